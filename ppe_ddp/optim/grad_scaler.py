"""Makes ``torch.amp.GradScaler``'s check for inf global: inf in one rank's shard skips the step on all ranks.

The scaler looks for inf where it divides by the scale, in one call of torch for all gradients. A tensor of this
subclass among them adds an all-reduce of what the call has found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch import distributed as dist

from ppe_ddp.engine.torch_internals import is_scaler_check, without_torch_function

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed import ProcessGroup


class SharedScaleCheck(Tensor):
    """A gradient shard whose check for inf is all-reduced. Everything else works on it as on any tensor."""

    _group: ProcessGroup

    @classmethod
    def of(cls, gradient: Tensor, group: ProcessGroup) -> SharedScaleCheck:
        """``gradient`` itself, in another type."""
        shared: SharedScaleCheck = gradient.as_subclass(cls)
        shared._group = group
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
                group = next(gradient._group for gradient in args[0] if isinstance(gradient, cls))
                dist.all_reduce(args[1], dist.ReduceOp.MAX, group=group)
            return result
