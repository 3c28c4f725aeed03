"""A pool of flat message buffers, reused as soon as no tensor uses their memory: fresh memory costs page faults."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ppe_ddp.engine.bucket_buffers import sole_owner

if TYPE_CHECKING:
    from ppe_ddp.engine.bucket_allocator import Allocator

_UNIT_BYTES = 1 << 16


class MessagePool:
    """Gives out 1-D buffers. One is free again when every view of it is gone; there is no call to return it.

    Args:
        allocate: Makes the memory of a buffer.
    """

    def __init__(self, allocate: Allocator) -> None:
        self._allocate = allocate
        self._held: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        self._used: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(memory.nbytes for held in self._held.values() for memory in held)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A buffer of ``numel`` elements with arbitrary contents; a view, which is what shows that it is in use."""
        held = self._held.setdefault((dtype, device), [])
        unit = max(1, _UNIT_BYTES // dtype.itemsize)
        fitting = [m for m in held if numel <= m.numel() <= 2 * numel + unit and sole_owner(m)]
        if fitting:
            memory = min(fitting, key=torch.Tensor.numel)
        else:
            memory = self._allocate(-(-max(numel, 1) // unit) * unit, dtype, device)
            held.append(memory)
        self._used.add(id(memory))
        return memory.narrow(0, 0, numel)

    def trim(self) -> None:
        """Free the buffers that were not taken since the last trim and that no tensor uses."""
        for key, held in self._held.items():
            self._held[key] = [m for m in held if id(m) in self._used or not sole_owner(m)]
        self._used.clear()
