"""The options of loading checkpoints into shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class LoadOptions:
    """The options of a load; the same on every rank.

    Attributes:
        process_group: The ranks that load; its rank 0 has the checkpoint. None for the default group.
        dtype: Whose dtypes loaded tensors get, the ``"module"``'s or the ``"checkpoint"``'s. None for what torch does:
            the checkpoint's with ``assign=True``, else the module's.
        piece_nbytes: How much memory a rank may use beyond what it loads. Smaller costs more messages.
        device: Where tensors are made that the module has on the meta device. None for that of a DTensor's mesh, or
            of the module's other tensors, or what the process group sends.
        progress: Whether rank 0 shows a bar. None for long loads on a terminal only.
    """

    process_group: ProcessGroup | None = None
    dtype: Literal["module", "checkpoint"] | None = None
    piece_nbytes: int = 64 << 20
    device: torch.device | str | None = None
    progress: bool | None = None

    def keeps_dtype(self, fresh: bool) -> bool:
        """Whether tensors get the module's dtypes; ``fresh`` ones are its own memory's no more."""
        return self.dtype == "module" or (self.dtype is None and not fresh)

    def __post_init__(self) -> None:
        if self.dtype not in (None, "module", "checkpoint"):
            raise ValueError(f"dtype should be 'module', 'checkpoint' or None, but it is {self.dtype!r}")
        if self.piece_nbytes < 1:
            raise ValueError(f"piece_nbytes should be positive, but it is {self.piece_nbytes}")
