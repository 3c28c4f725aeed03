"""A bucket of one sparse gradient: .grad -> all-gather of indices and values -> a new .grad."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from ppe_ddp.contracts import probe
from ppe_ddp.engine.bucket import Bucket
from ppe_ddp.scaling import scale

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from ppe_ddp.contracts import Probe
    from ppe_ddp.engine.bucket import BucketContext
    from ppe_ddp.engine.bucket_plan import BucketPlan
    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.engine.groups import Groups


class SparseBucket(Bucket):
    """A sparse gradient. It communicates in :meth:`finish`, and not before: no function of the user's runs then.

    The average is a coalesced sparse tensor over the rows that exist on any rank.
    """

    def __init__(self, plan: BucketPlan, context: BucketContext, present: bytes | None = None) -> None:
        super().__init__(plan, context, present)
        self._groups = context.groups
        self._reduction = context.reduction
        self._spec = self.specs[0]
        self._average: list[Tensor] = []

    def launch(self, *, is_last: bool) -> None:
        """Do nothing: see :meth:`finish`."""

    def finish(self) -> Steps:
        """All-gather indices and values over the ranks, and average."""
        self._reduction.warn_of_sparse(self._spec.name)
        groups = self._groups
        local = self._local()
        indices, values = local.indices(), local.values()
        self.nbytes = indices.nbytes + values.nbytes
        if groups.world_size == 1:
            self._average = [self._of(indices, values)]
            return
        # On CPUs, so that no GPU is waited for.
        parts = yield from _gathered(torch.tensor([indices.shape[1]]), groups.control, groups)
        counts = [int(part) for part in parts]
        longest = max(counts)
        if longest:
            rows = yield from _gathered_rows(indices.t().contiguous(), counts, longest, groups)
            indices = rows.t()
            values = yield from _gathered_rows(values.contiguous(), counts, longest, groups)
        average = self._of(indices, values)
        scale(average.values(), average.values(), self._reduction.mean_factor)
        self._average = [average]

    def averages(self) -> list[Tensor]:
        """The average."""
        return self._average

    def release(self) -> None:
        """Forget what belongs to one backward."""
        super().release()
        self._average = []

    def _of(self, indices: Tensor, values: Tensor) -> Tensor:
        """A coalesced gradient; each rank's indices are those of a tensor that was checked, if any was."""
        return torch.sparse_coo_tensor(indices, values, self._spec.shape, check_invariants=False).coalesce()

    def _local(self) -> Tensor:
        gradient = self.gradients[0]
        spec = self._spec
        if gradient is None:
            rows = (0, *spec.shape[1:])
            return torch.sparse_coo_tensor(
                torch.empty((1, 0), dtype=torch.int64, device=spec.device),
                torch.empty(rows, dtype=spec.dtype, device=spec.device),
                spec.shape,
                is_coalesced=True,
                check_invariants=False,
            )
        if not gradient.is_sparse:  # the weight was used densely as well
            return gradient.to_sparse(1).coalesce()
        return gradient.coalesce()


def _gathered(tensor: Tensor, group: ProcessGroup, groups: Groups) -> Generator[Probe | None, None, list[Tensor]]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(parts, tensor, group=group, async_op=True)
    yield probe(work)
    groups.failures.wait(work, tensor.device)
    return parts


def _gathered_rows(
    rows: Tensor, counts: list[int], longest: int, groups: Groups
) -> Generator[Probe | None, None, Tensor]:
    """All-gather tensors of different lengths along dimension 0."""
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    parts = yield from _gathered(padded, groups.buckets, groups)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
