"""A cache of the buckets of plans: made once for each plan, and used in every backward that has it."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from ppe_ddp.engine.dense_bucket import PackedBucket
from ppe_ddp.engine.sparse_bucket import SparseBucket

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppe_ddp.engine.bucket import Bucket, BucketContext
    from ppe_ddp.engine.bucket_buffers import BucketBuffers
    from ppe_ddp.engine.bucket_plan import BucketPlan, Plan

    MakeBucket = Callable[[BucketPlan, BucketContext, bytes], Bucket]


class BucketCache:
    """Keeps the buckets of the most recently used plans.

    Args:
        context: What all buckets have in common.
        buffers: Memory for those that are packed.
        scattered: Makes a bucket of dense gradients that is reduce-scattered; None to all-reduce.
        capacity: The number of plans.
    """

    def __init__(
        self,
        context: BucketContext,
        buffers: BucketBuffers,
        scattered: MakeBucket | None = None,
        capacity: int = 32,
    ) -> None:
        self._context = context
        self._buffers = buffers
        self._scattered = scattered
        self._capacity = capacity
        self._kept: OrderedDict[int, tuple[Plan, list[Bucket]]] = OrderedDict()

    def buckets(self, plan: Plan) -> Sequence[Bucket]:
        """The buckets of ``plan``, in its order; the same objects as long as they are kept."""
        key = id(plan)  # unique while the plan lives, and it is kept here
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = plan, [self._made(bucket, plan.present) for bucket in plan.buckets]
            if len(self._kept) > self._capacity:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return kept[1]

    def _made(self, plan: BucketPlan, present: bytes) -> Bucket:
        if plan.sparse:
            return SparseBucket(plan, self._context, present)
        if self._scattered is not None:
            return self._scattered(plan, self._context, present)
        return PackedBucket(plan, self._context, present, buffers=self._buffers)
