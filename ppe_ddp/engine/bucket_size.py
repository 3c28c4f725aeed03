"""The size of buckets where the user names none: chosen after some steps, by what was measured until then.

    each step        how long backward was, and how many bytes were sent
    the last one     all-reduces of two sizes: the latency and the speed of the group
                     one small exchange: the largest of each number over the ranks
    from the next    the size with which a step is shortest, by a model of it: the same on every rank

After a failure the ranks start over with the default, and measure again.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from ppe_ddp.contracts import probe
from ppe_ddp.engine.memory import allocator

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.record import Recorder

MEASURED_STEPS = 10
_FIRST_STEPS = 5  # which make buckets and learn orders
_SIZES = tuple(1 << power for power in range(19, 26))  # 0.5 to 32 MiB
_SMALL, _LARGE = 1 << 10, 1 << 20
_TRIALS = 4  # of each size, of which the first brings the ranks together
_HOST_SECONDS = 150e-6  # for one more bucket: launching it, waiting for it, handing it over
_UNDER_WAY = 2  # at a time: gloo has two threads
_GAIN = 0.02  # of a step: what is less is noise
_SAME = 1.005  # of two sizes with steps of the same length the larger has fewer messages
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class MeasuredSpeed:
    """What the ranks have measured, the slowest of them.

    Attributes:
        backward: Seconds of a backward.
        nbytes: Of its gradients.
        latency: Seconds of an all-reduce of next to nothing.
        per_byte: Seconds that each further byte adds.
    """

    backward: float
    nbytes: int
    latency: float
    per_byte: float

    def step_seconds(self, bucket_bytes: int) -> float:
        """From the begin of backward to the last average, with buckets of this size."""
        count = max(1, -(-self.nbytes // bucket_bytes))
        sent, arrivals = 0.0, [0.0] * _UNDER_WAY
        for k in range(1, count + 1):
            ready = self.backward * k / count + _HOST_SECONDS * k
            sent = max(ready, sent, arrivals[-_UNDER_WAY]) + self.nbytes / count * self.per_byte
            arrivals.append(sent + self.latency)
        return arrivals[-1]

    def best_bucket_bytes(self, default: int) -> int:
        """The size with which a step is shortest; ``default`` where that gains next to nothing."""
        seconds = {size: self.step_seconds(size) for size in _SIZES}
        shortest = min(seconds.values())
        if shortest >= (1 - _GAIN) * self.step_seconds(default):
            return default
        return max(size for size in _SIZES if seconds[size] <= _SAME * shortest)


class BucketSizeMeasurement:
    """Measures the first steps of a wrapper; all ranks make the same calls in the same steps.

    Args:
        groups: Where buckets are sent.

    Attributes:
        speed: What was measured, the same on every rank; None before.
        count: The number of steps that were noted.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._backwards: list[tuple[int, int]] = []
        self.speed: MeasuredSpeed | None = None
        self.count = 0

    def after_step(self, recorder: Recorder) -> Steps:
        """Note one step; after the last of them measure the group, and agree. Every rank must run it to its end."""
        nbytes = sum(sum(one.nbytes) for one in recorder.rounds)
        self._backwards.append((recorder.backward_at - recorder.begin, nbytes))
        self.count += 1
        if self.count != MEASURED_STEPS:
            return
        found = [int(statistics.median(column)) for column in zip(*self._backwards[_FIRST_STEPS:], strict=True)]
        for size in (_SMALL, _LARGE):
            message = allocator(self._groups.buckets)(size // 4, torch.float32, _CPU).zero_()
            times = []
            for _ in range(_TRIALS):
                start = perf_counter_ns()
                yield from self._all_reduce(message, self._groups.buckets)
                times.append(perf_counter_ns() - start)
            found.append(min(times[1:]))
        agreed = allocator(self._groups.control)(len(found), torch.int64, _CPU)
        agreed.copy_(torch.tensor(found))
        yield from self._all_reduce(agreed, self._groups.control)
        backward, nbytes, small, large = agreed.tolist()
        per_byte = max(0, large - small) / 1e9 / (_LARGE - _SMALL)
        self.speed = MeasuredSpeed(backward / 1e9, nbytes, small / 1e9, per_byte)
        recorder.control_nbytes += _TRIALS * (_SMALL + _LARGE) + agreed.nbytes

    def _all_reduce(self, tensor: Tensor, group: ProcessGroup) -> Steps:
        """The largest of each element over the ranks, in place."""
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group, async_op=True)
        yield probe(work)
        self._groups.failures.wait(work, _CPU)
