"""Reduce-scatter and all-gather of flat tensors, under the names that this version of torch has for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import distributed as dist

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from ppe_ddp.contracts import Waitable


def reduce_scatter(share: Tensor, flat: Tensor, group: ProcessGroup) -> Waitable | None:
    """Sum ``flat`` over the ranks; rank i gets the i-th of equal parts in ``share``, which may be a part of ``flat``.

    Args:
        share: 1-D; changed in place.
        flat: 1-D, as many times the size of ``share`` as there are ranks; its contents are lost.
        group: The ranks.

    Returns:
        The Work; None where one rank is alone.
    """
    if dist.get_world_size(group) == 1:
        if share.data_ptr() != flat.data_ptr():
            share.copy_(flat)
        return None
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return function(share, flat, group=group, async_op=True)  # type: ignore[no-any-return]


def all_gather(flat: Tensor, share: Tensor, group: ProcessGroup) -> Waitable | None:
    """Put the shares of all ranks one after another into ``flat``; ``share`` may be this rank's part of it.

    Args:
        flat: 1-D; changed in place.
        share: 1-D, the same size on every rank.
        group: The ranks.

    Returns:
        The Work; None where one rank is alone.
    """
    if dist.get_world_size(group) == 1:
        if share.data_ptr() != flat.data_ptr():
            flat.copy_(share)
        return None
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return function(flat, share, group=group, async_op=True)  # type: ignore[no-any-return]
