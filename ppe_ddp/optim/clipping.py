"""Clips sharded gradients by their global norm, over all ranks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
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
        device: Where the result is to be.
        groups: All their ranks must call this; it is agreed over one group after another.
        is_unknown: Whether this rank does not know which of its shards are copies.

    Raises:
        ValueError: On all ranks, if one does not know.
    """
    present = [shard for shard in shards if shard.numel()]
    dtype = torch.float64 if any(shard.dtype == torch.float64 for shard in shards) else torch.float32
    norms = torch._foreach_norm(present, norm_type, dtype=dtype) if present else []
    stacked = torch.stack([norm.to(device, torch.float64) for norm in norms]) if norms else None
    is_max = math.isinf(norm_type)
    value = torch.zeros((), dtype=torch.float64, device=device)
    if stacked is not None:
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
