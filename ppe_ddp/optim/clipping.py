"""Agrees over all ranks on what is true of all gradients: their norm, and that none is inf.

``torch.amp.GradScaler`` looks for inf where it divides by the scale, in one call of torch for all gradients. A tensor
of a subclass among them adds an all-reduce of what was found: inf in one rank's shard skips the step on all ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from ppe_ddp.torch_internals import is_scaler_check, without_torch_function

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed import ProcessGroup


def total_norm(
    shards: Sequence[Tensor],
    norm_type: float,
    device: torch.device,
    groups: Sequence[ProcessGroup],
    *,
    is_unknown: bool = False,
) -> Tensor:
    """The norm of the gradients whose shards the ranks have: 0-dimensional, the same on every rank.

    Args:
        shards: This rank's, without those that are copies of another rank's.
        norm_type: The p of the p-norm; may be ``inf``.
        device: The device of the result.
        groups: The ranks that must call this; they agree over one group after another.
        is_unknown: Whether this rank does not know which of its shards are copies.

    Raises:
        ValueError: On all ranks, if one does not know.
    """
    present = [shard for shard in shards if shard.numel()]
    dtype = torch.float64 if any(shard.dtype == torch.float64 for shard in shards) else torch.float32
    is_max = math.isinf(norm_type)
    value = torch.zeros((), dtype=torch.float64, device=device)
    if present:
        norms = torch._foreach_norm(present, norm_type, dtype=dtype)
        stacked = torch.stack([norm.to(device, torch.float64) for norm in norms])
        value = stacked.max() if is_max else stacked.pow(norm_type).sum()
    unknown = torch.full_like(value, float(is_unknown))
    total = torch.stack([value, value.isnan().to(value), unknown])  # transports take the maximum with NaN differently
    for group in groups:
        dist.all_reduce(total, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
    if len(groups) > 1 and total[2] > 0:
        raise ValueError(
            "tensor-parallel ranks clip by the norm of the whole model, for which it must be known which parameters "
            "are split: set parameter.tensor_model_parallel, True for these and False for copies, as Megatron does"
        )
    norm = total[0] if is_max else total[0].pow(1.0 / norm_type)
    return torch.where(total[1] > 0, math.nan, norm).to(dtype)


def scale_to(shards: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply ``shards`` by ``max_norm / norm``, or by 1 where that is more; in place."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if shards:
        torch._foreach_mul_(list(shards), factor.to(shards[0].device))


class ScaleCheck:
    """One check for inf over all ranks, which the scaler makes in one call for each device and dtype.

    Args:
        calls: The number of calls that this rank's scaler makes. Only the last one communicates, so that ranks whose
            gradients have other dtypes and devices send as many messages.
        groups: The groups whose ranks agree, one after another.
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
