"""The launch schedule of one plan: counts the gradients that are missing, and launches its buckets in order."""

from __future__ import annotations

from collections import Counter
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from ppe_ddp.contracts import probe
from ppe_ddp.engine.bucket import Bucket
from ppe_ddp.engine.compressor_reduction import PendingExchange
from ppe_ddp.engine.record import EventLog, RoundRecord, span, watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from ppe_ddp.contracts import Probe
    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.engine.plan import Plan

B = TypeVar("B", bound=Bucket)


class LaunchSchedule(Generic[B]):
    """Launches each bucket of a plan when its gradients are there and the one before it has been launched.

    Args:
        plan: What to send.
        buckets: Those of the plan.
        waiting: One byte a parameter: whether its gradient is expected here and has not arrived.
        prepare: Called with a bucket right before it is launched: gives it this rank's gradients.
        one_at_a_time: Whether a bucket must not be launched before the previous one is complete.
        may_launch: Asks whether a bucket can be launched without waiting; None where it always can.
        repair: Whether this is a second round.
        ranges: Whether to mark launches for torch's profiler.

    Attributes:
        plan: The same.
        buckets: The same.
        record: What happened when.
    """

    def __init__(
        self,
        plan: Plan,
        buckets: Sequence[B],
        waiting: bytes | bytearray,
        prepare: Callable[[B], None],
        *,
        one_at_a_time: bool = False,
        may_launch: Probe | None = None,
        repair: bool = False,
        ranges: bool = False,
    ) -> None:
        self.plan = plan
        self.buckets = buckets
        self.record = RoundRecord(plan, [bucket.nbytes for bucket in buckets], repair=repair)
        self._prepare = prepare
        self._one_at_a_time = one_at_a_time
        self._may_launch = may_launch
        self._ranges = ranges
        self._gone = 0
        self._previous: B | None = None
        self._missing = [sum([waiting[i] for i in bucket.members]) for bucket in plan.buckets]

    def mark_arrived(self, indices: Sequence[int]) -> None:
        """Count the gradients of these parameters as arrived."""
        for k, count in Counter(map(self.plan.bucket_of.__getitem__, indices)).items():
            self._missing[k] -= count
            if self._missing[k] == 0:
                self.record.ready[k] = perf_counter_ns()

    def launch_ready(self) -> None:
        """Launch buckets in order, up to the first that still misses a gradient of this rank."""
        while self._gone < len(self.buckets) and self._missing[self._gone] <= 0:
            if self._one_at_a_time and not self.is_complete():
                break
            if self._may_launch is not None and not self._may_launch():
                break
            with torch.no_grad():
                self._launch()

    def launch_all(self) -> Steps:
        """Launch the remaining buckets, as steps: no gradient will arrive any more."""
        while self._gone < len(self.buckets):
            previous = self._previous
            if self._one_at_a_time and previous is not None:
                if previous.pending is not None:
                    yield probe(previous.pending)
                previous.wait()
            if self._may_launch is not None and not self._may_launch():
                yield self._may_launch
            self._launch()

    def _launch(self) -> None:
        k = self._gone
        bucket, record = self.buckets[k], self.record
        self._gone += 1
        record.launch[k] = perf_counter_ns()
        if self._previous is not None:
            self._previous.check()  # the other ranks would take this bucket for one that was never sent
        self._prepare(bucket)
        if not bucket.plan.sparse:
            self._previous = bucket
        if self._ranges:
            with span(f"launch[{k}]", enabled=True):
                bucket.launch(is_last=k == self.plan.last)
        else:
            bucket.launch(is_last=k == self.plan.last)
        record.launched[k] = perf_counter_ns()
        record.packed[k] = bucket.packed_at
        if EventLog.current is not None:
            self._watch(bucket, k)

    def _watch(self, bucket: B, k: int) -> None:
        """Have it noted when what bucket ``k`` has sent has arrived."""
        record, pending = self.record, bucket.pending
        record.goes_in_turns = isinstance(pending, PendingExchange)
        if pending is not None:
            watch(pending, partial(record.note_arrival, k))
        elif not bucket.plan.sparse:
            record.arrived[k] = record.launched[k]

    def is_complete(self) -> bool:
        """Whether all launched buckets are complete."""
        return all(bucket.is_complete() for bucket in self.buckets[: self._gone])

    def finish(self) -> Steps:
        """Wait for the buckets in order, as steps. Sparse ones come last: they communicate only now."""
        record = self.record
        for is_sparse in (False, True):
            for k, bucket in enumerate(self.buckets):
                if bucket.plan.sparse is not is_sparse:
                    continue
                yield from bucket.finish()
                record.done[k] = perf_counter_ns()
                record.nbytes[k] = bucket.nbytes

    def hand_over(self, take: Callable[[Sequence[int], list[Tensor]], None]) -> None:
        """Call ``take(parameter indices, averages)`` for each bucket, once nothing can fail any more."""
        for bucket in self.buckets:
            averages = bucket.averages()
            take(bucket.expected, averages if bucket.is_exact else bucket.expected_of(averages))
        self.release()

    def give_back(self) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's gradients as they were, by parameter index; the launched buckets go on."""
        for bucket in self.buckets[: self._gone]:
            yield from bucket.give_back()

    def put_back(self) -> Iterator[tuple[int, Tensor]]:
        """Abandon the launched buckets; yields this rank's gradients as they were, by parameter index."""
        for bucket in self.buckets[: self._gone]:
            yield from bucket.put_back()

    def release(self) -> None:
        """Let the buckets drop what belongs to this backward."""
        for bucket in self.buckets:
            bucket.release()
        self._previous = None
