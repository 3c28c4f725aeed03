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


def total_norm(shards: Sequence[Tensor], norm_type: float, device: torch.device, group: ProcessGroup) -> Tensor:
    """The norm of the gradients whose shards the ranks have: 0-dimensional, the same on every rank.

    Args:
        shards: This rank's.
        norm_type: The p of the p-norm; may be ``inf``.
        device: Where the result is to be.
        group: The ranks; all of them must call this.
    """
    present = [shard for shard in shards if shard.numel()]
    dtype = torch.float64 if any(shard.dtype == torch.float64 for shard in shards) else torch.float32
    norms = torch._foreach_norm(present, norm_type, dtype=dtype) if present else []
    stacked = torch.stack([norm.to(device, torch.float64) for norm in norms]) if norms else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    if math.isinf(norm_type):
        total = total if stacked is None else stacked.max()
        dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
        return total.to(dtype)
    if stacked is not None:
        total = stacked.pow(norm_type).sum()
    dist.all_reduce(total, group=group)
    return total.pow(1.0 / norm_type).to(dtype)


def scale_to(shards: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply ``shards`` by ``max_norm / norm``, or by 1 where that is more; in place."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if shards:
        torch._foreach_mul_(list(shards), factor.to(shards[0].device))
