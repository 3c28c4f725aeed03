"""Makes ``torch.amp.GradScaler``'s check for inf global: inf in one rank's shard skips the step on all ranks.

The scaler looks for inf where it divides by the scale, in one call of torch for all gradients. A tensor of this
subclass among them adds an all-reduce of what was found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch import distributed as dist

from ppe_ddp.torch_internals import is_scaler_check, without_torch_function

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed import ProcessGroup


class ScaleCheck:
    """One check for inf over all ranks, which the scaler makes in one call for each device and dtype.

    Args:
        calls: How many calls this rank's scaler makes. The last one tells, once, what all of them have found, so that
            ranks whose gradients have other dtypes and devices send as many messages.
        groups: Their ranks agree, one group after another.
    """

    def __init__(self, calls: int, groups: Sequence[ProcessGroup]) -> None:
        self._missing = calls
        self._groups = groups
        self._found: list[Tensor] = []

    def add(self, found: Tensor) -> None:
        """Take what one call has found; the last one is told what any rank has found in any call."""
        self._found.append(found)
        self._missing -= 1
        if self._missing:
            return
        for other in self._found[:-1]:
            found.copy_(found.maximum(other.to(found.device)))
        for group in self._groups:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)


class SharedScaleCheck(Tensor):
    """A gradient shard whose check for inf is shared. Everything else works on it as on any tensor."""

    _check: ScaleCheck

    @classmethod
    def of(cls, gradient: Tensor, check: ScaleCheck) -> SharedScaleCheck:
        """``gradient`` itself, in another type."""
        shared: SharedScaleCheck = gradient.as_subclass(cls)
        shared._check = check
        return shared

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``; if it was the scaler's check, agree on what it found."""
        with without_torch_function():
            result = func(*args, **(kwargs or {}))
            if is_scaler_check(func):
                check = next(gradient._check for gradient in args[0] if isinstance(gradient, cls))
                check.add(args[1])
            return result
