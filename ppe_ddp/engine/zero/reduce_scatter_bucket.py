"""A bucket of gradients that is reduce-scattered: each rank keeps its chunk of the average.

packed     .grad -> rows, one a rank -> reduce-scatter -> this rank's row of the average
adopted    .grad, where it lies in memory as such rows -> reduce-scatter -> this rank's row of the average
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch

from ppe_ddp.engine.bucket import Bucket
from ppe_ddp.engine.dense_bucket import reducible_in_place
from ppe_ddp.engine.zero.chunks import flattened
from ppe_ddp.errors import CommunicationError, PeerAbortedError

if TYPE_CHECKING:
    from torch import Tensor

    from ppe_ddp.engine.bucket import BucketContext
    from ppe_ddp.engine.bucket_plan import BucketPlan
    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.engine.zero.chunks import Rows
    from ppe_ddp.engine.zero.message_pool import MessagePool
    from ppe_ddp.engine.zero.shard_collectives import ReduceScatter

_HALVES = (torch.float16, torch.bfloat16)


class AveragedShards(list["Tensor"]):
    """This rank's shards of some averages: 1-D each, and owned by nobody else."""


class ReduceScatterBucket(Bucket):
    """A bucket of dense gradients that is reduce-scattered.

    Args:
        plan: What it is.
        context: What all buckets have in common.
        present: One byte a parameter: whether some rank has its gradient.
        pool: Memory for it.
        transport: The reduce-scatter to use.
        rows: The layout of the bucket.
    """

    def __init__(
        self,
        plan: BucketPlan,
        context: BucketContext,
        present: bytes,
        *,
        pool: MessagePool,
        transport: ReduceScatter,
        rows: Rows,
    ) -> None:
        super().__init__(plan, context, present)
        self._groups = context.groups
        self._factor = context.reduction.mean_factor
        self._pool = pool
        self._transport = transport
        self._rows = rows
        world_size = context.groups.world_size
        # The others have the same chunks along their first dimension.
        self._ragged = [k for k, spec in enumerate(self.specs) if not spec.shape or spec.shape[0] % world_size]
        self._message: Tensor | None = None
        self._row: Tensor | None = None

    def launch(self, *, is_last: bool) -> None:
        """Copy the gradients into rows and start the reduce-scatter."""
        if self.plan.numel == 0:
            return
        rows = self._gradient_as_rows()
        ours = rows is None
        if rows is None:
            flat = self._pool.take(self._rows.numel, self.plan.dtype, self.plan.device)
            rows = flat.view(self._groups.world_size, self._rows.width)
            self._rows.fill(rows, self._gradients_to_cut())
        self._message = rows
        wide = torch.float32 if rows.dtype in _HALVES else rows.dtype
        self._row = self._pool.take(self._rows.width, wide, rows.device)
        self.packed_at = perf_counter_ns()
        try:
            self._pending = self._transport.start(self._row, rows.view(-1), factor=self._factor, spare=ours)
        except RuntimeError as error:
            raise self._failure(error) from error

    def _gradient_as_rows(self) -> Tensor | None:
        """The rows, if the bucket is a single gradient whose memory can be used as such; else None."""
        gradient, world_size = self.gradients[0], self._groups.world_size
        if self._transport.from_pool or len(self.gradients) > 1 or gradient is None or gradient.numel() % world_size:
            return None
        if not reducible_in_place(gradient, self.specs[0]):
            return None
        return gradient.as_strided((world_size, self._rows.width), (self._rows.width, 1))

    def _gradients_to_cut(self) -> list[Tensor]:
        """The gradients, flattened where they are to be cut elsewhere than between two of their rows."""
        dtype, specs = self.plan.dtype, self.specs
        flats = [gradient for gradient in self.gradients if gradient is not None]
        if self.plan.row_major and len(flats) == len(specs):  # which is faster
            for k in self._ragged:
                flats[k] = flats[k].reshape(-1)
        else:
            zero = torch.zeros((), dtype=dtype, device=self.plan.device)
            flats = [
                zero.expand(spec.numel).contiguous() if gradient is None else flattened(gradient, spec)
                for gradient, spec in zip(self.gradients, specs, strict=True)
            ]
        return [flat if flat.dtype is dtype else flat.to(dtype) for flat in flats]

    def finish(self) -> Steps:
        """Wait for the result."""
        try:
            if self._pending is not None:
                yield self.probe()
                self._groups.failures.wait(self._pending, self.plan.device)
        except PeerAbortedError:
            raise
        except RuntimeError as error:
            raise self._failure(error) from error
        self._pending = self._message = None

    def averages(self) -> list[Tensor]:
        """This rank's chunk of each member's average, 1-D."""
        if self._row is None:
            return AveragedShards([torch.empty(0, dtype=spec.dtype, device=spec.device) for spec in self.specs])
        row, self._row = self._row, None
        return AveragedShards(self._rows.parts(row))

    def release(self) -> None:
        """Drop what belongs to one backward."""
        super().release()
        self._message = self._row = None

    def _failure(self, error: RuntimeError) -> CommunicationError:
        return CommunicationError(
            f"rank {self._groups.rank}, bucket {self.plan.index} with {self.specs[0].name!r}: the reduce-"
            f"scatter failed: {error}. An error or a crash on another rank ends here: look for the first traceback of "
            "all ranks."
        )
