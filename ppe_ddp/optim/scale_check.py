"""A check for inf in the gradients of a sharded optimizer, which all ranks share.

``torch.amp.GradScaler`` looks for inf when it divides by the scale, in one call of torch for all gradients. One
gradient of a tensor subclass adds an all-reduce of the result, so that inf in one rank's shard skips the step on all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ppe_ddp.engine.zero.shards import Copies
from ppe_ddp.errors import UnusableError
from ppe_ddp.torch_internals import is_scaler_check, uncompiled, without_torch_function

# By which torch's clip_grad_norm_() and its users find the norm of gradients.
_NORMS = (torch._foreach_norm, torch.linalg.vector_norm, torch.norm, Tensor.norm)


class ScaleCheck:
    """One check for inf over all ranks of a model, for the scaler's calls for each device and dtype.

    Only the last of ``calls`` communicates, so that ranks with different numbers of calls send one message each.
    """

    def __init__(self, calls: int, copies: Copies, note_unscaled: Callable[[], object]) -> None:
        self._missing = calls
        self.copies = copies
        self._note_unscaled = note_unscaled  # called behind the check
        self._found: list[Tensor] = []

    @uncompiled
    def add(self, found: Tensor) -> None:
        """Take the result of one call. The last call gets the maximum over all calls of all ranks."""
        self._found.append(found)
        self._missing -= 1
        if self._missing:
            return
        for other in self._found[:-1]:
            found.copy_(found.maximum(other.to(found.device)))
        if self.copies.has_inf():
            found.fill_(1.0)
        self.copies.check_scaling()
        with self.copies.agreeing():
            self.copies.all_reduce(found, dist.ReduceOp.MAX)
        self._note_unscaled()


class SharedScaleCheck(Tensor):
    """A gradient shard whose check for inf is shared by all ranks.

    Its norm is refused, as it would be that of one rank; all other functions work as on any tensor.
    """

    check: ScaleCheck

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with without_torch_function():
            if func in _NORMS and args and max(map(dist.get_world_size, _check_of(args[0]).copies.parents)) > 1:
                raise UnusableError(
                    "this is the norm of one rank's shards of the gradients, and would clip them differently on each "
                    "rank: call clip_grad_norm_() of the DistributedOptimizer, which also returns the norm of all; "
                    "the norm of a shard itself is that of its detach()"
                )
            result = func(*args, **(kwargs or {}))
            if is_scaler_check(func):
                _check_of(args[0]).add(args[1])
            return result


def _check_of(gradients: Tensor | Sequence[Tensor]) -> ScaleCheck:
    given = [gradients] if isinstance(gradients, Tensor) else gradients
    return next(gradient.check for gradient in given if isinstance(gradient, SharedScaleCheck))
