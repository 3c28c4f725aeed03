"""What a timeline says in numbers: above all the part of the communication that is hidden."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ppe_ddp.tracing.spans import Interval, length, overlap, union

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppe_ddp.tracing.rank_record import RankRecord

_USUAL = 0.9
_COUNTED = ("bucket", "gather")  # masks and votes are a few bytes, which are under way all the time


@dataclass(frozen=True)
class TimelineSummary:
    """The numbers of a timeline.

    Attributes:
        ranks: How many there are.
        backwards: How many synchronized backwards each rank had, at most.
        step_ms: The time from the end of one synchronized backward to the next; this and what follows are means over
            ranks and steps, without the longest tenth of these, where something else has kept a rank.
        under_way_ms: The time in a step in which gradients or parameters were on their way.
        exposed_ms: The time in a step in which a rank did nothing but wait for messages, masks and votes among them.
        hidden: The part of the time under way in which the rank computed; None where nothing was sent.
        clock_errors_ms: By rank: by how much its times may be wrong beside those of rank 0.
    """

    ranks: int
    backwards: int
    step_ms: float
    under_way_ms: float
    exposed_ms: float
    hidden: float | None
    clock_errors_ms: tuple[float, ...]

    def __str__(self) -> str:
        """A few lines."""
        lines = [f"{self.ranks} ranks, {self.backwards} synchronized backwards; a step takes {self.step_ms:.2f} ms"]
        if self.hidden is None:
            lines.append("nothing was sent")
        else:
            lines.append(f"{self.hidden:.0%} of the communication is hidden behind computation:")
            lines.append(
                f"messages are under way for {self.under_way_ms:.2f} ms of a step, and a rank does nothing but wait "
                f"for {self.exposed_ms:.2f} ms"
            )
        lines.append(self.clocks())
        return "\n".join(lines)

    def clocks(self) -> str:
        """How well the clocks agree."""
        worst = max(self.clock_errors_ms, default=0.0)
        if self.ranks == 1:
            return "one clock"
        return f"all ranks on the clock of rank 0, compared at the beginning; wrong by {worst:.3f} ms at most then"


def summarize(records: Sequence[RankRecord]) -> TimelineSummary:
    """The numbers of these ranks."""
    steps = sorted((step for record in records for step in step_times(record)), key=lambda step: step.duration)
    usual = steps[: math.ceil(_USUAL * len(steps))]
    total = StepTimes(*map(sum, zip(*usual, strict=True))) if usual else StepTimes(0, 0, 0, 0)
    scale = 1e-6 / max(1, len(usual))
    return TimelineSummary(
        ranks=len(records),
        backwards=max((len(record.backwards) for record in records), default=0),
        step_ms=total.duration * scale,
        under_way_ms=total.under_way * scale,
        exposed_ms=total.waiting * scale,
        hidden=total.hidden / total.under_way if total.under_way else None,
        clock_errors_ms=tuple(record.clock.error_ns / 1e6 for record in records),
    )


class StepTimes(NamedTuple):
    """The times of one step of one rank, in nanoseconds."""

    duration: int
    under_way: int
    hidden: int
    waiting: int


def step_times(record: RankRecord) -> list[StepTimes]:
    """From the end of one synchronized backward to that of the next; the first step is not like the others."""
    waits, sent = _of(record, ("wait",)), _of(record, _COUNTED)
    ends = [end for _, end in record.backwards]
    if len(ends) == 1:
        ends = [min(span.begin for span in record.spans), *ends]
    times = []
    for window in itertools.pairwise(ends):
        under_way = _inside(window, sent)
        waiting = _inside(window, waits)
        times.append(
            StepTimes(
                duration=window[1] - window[0],
                under_way=length(under_way),
                hidden=length(under_way) - overlap(under_way, waiting),
                waiting=length(waiting),
            )
        )
    return times


def _inside(window: Interval, intervals: Sequence[Interval]) -> list[Interval]:
    """The parts of disjoint intervals, which are in order, that lie in ``window``."""
    first = bisect_left(intervals, window[0], key=lambda interval: interval[1])
    last = bisect_left(intervals, window[1], key=lambda interval: interval[0])
    return [(max(begin, window[0]), min(end, window[1])) for begin, end in intervals[first:last]]


def _of(record: RankRecord, kinds: Sequence[str]) -> list[Interval]:
    return union((span.begin, span.end) for span in record.spans if span.kind in kinds)
