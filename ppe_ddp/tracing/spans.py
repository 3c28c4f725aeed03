"""The kinds of spans of a timeline, arithmetic on them, and the numbers of a timeline. Pure.

computes     forward, backward, optimizer; wait: nothing but waiting for messages
engine       pack, encode, decode, write: this rank's own work for messages
messages     mask, vote, bucket, gather: on their way
parts        node: this rank's sums in the memory of its node; wire: what is under way between nodes
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ppe_ddp.engine.record import Span
    from ppe_ddp.tracing.rank_record import RankRecord

COMPUTES = ("forward", "backward", "optimizer", "wait")
ENGINE = ("pack", "encode", "decode", "write")
MESSAGES = ("mask", "vote", "bucket", "gather")
PARTS = ("node", "wire")
KINDS = COMPUTES + ENGINE + MESSAGES + PARTS

_USUAL = 0.9
_COUNTED = ("bucket", "gather")  # masks and votes are a few bytes, which are under way all the time

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> int:
    """The time that the intervals cover."""
    return sum(end - begin for begin, end in union(intervals))


def without(whole: Interval, parts: Iterable[Interval]) -> list[Interval]:
    """The parts of ``whole`` that no interval of ``parts`` covers."""
    begin, left = whole[0], []
    for start, end in [*union(parts), (whole[1], whole[1])]:
        if begin < min(start, whole[1]):
            left.append((begin, min(start, whole[1])))
        begin = max(begin, end)
    return left


def merged(spans: Iterable[Span]) -> list[Span]:
    """Spans of one kind in order, those that overlap joined to one."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda one: one.begin):
        if joined and span.begin <= joined[-1].end:
            last = joined[-1]
            joined[-1] = last._replace(end=max(last.end, span.end), nbytes=last.nbytes + span.nbytes)
        else:
            joined.append(span)
    return joined


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """The spans in as few rows as keep those of a row from overlapping."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda one: (one.begin, one.end)):
        row = next((row for row in rows if row[-1].end <= span.begin), None)
        if row is None:
            rows.append(row := [])
        row.append(span)
    return rows


# ---------------------------------------------------------------------- numbers


@dataclass(frozen=True)
class TimelineSummary:
    """The numbers of a timeline.

    Attributes:
        ranks: The number of ranks.
        backwards: The most synchronized backwards of any rank.
        step_ms: The time from the end of one synchronized backward to the next; this and what follows are means over
            ranks and steps, without the longest tenth of these, where something else has kept a rank.
        under_way_ms: The time in a step in which gradients or parameters were on their way.
        exposed_ms: The time in a step in which a rank did nothing but wait for messages, masks and votes among them.
        hidden: The part of the time under way in which the rank computed; None where nothing was sent.
        clock_error_ms: By how much the times of a rank may be wrong beside those of rank 0, at most.
    """

    ranks: int
    backwards: int
    step_ms: float
    under_way_ms: float
    exposed_ms: float
    hidden: float | None
    clock_error_ms: float

    def __str__(self) -> str:
        """A few lines."""
        lines = [f"{self.ranks} ranks, {self.backwards} synchronized backwards; a step takes {self.step_ms:.2f} ms"]
        if self.hidden is None:
            lines.append("nothing was sent")
        else:
            lines.append(f"{self.hidden:.0%} of the communication is hidden behind computation:")
            lines.append(f"messages are under way for {self.under_way_ms:.2f} ms of a step,")
            lines.append(f"and a rank does nothing but wait for {self.exposed_ms:.2f} ms")
        if self.ranks > 1:
            lines.append("all ranks on the clock of rank 0, compared at the beginning;")
            lines.append(f"wrong by {self.clock_error_ms:.3f} ms at most then")
        return "\n".join(lines)


class StepTimes(NamedTuple):
    """The times of one step of one rank, in nanoseconds."""

    duration: int
    under_way: int
    hidden: int
    waiting: int


def summarize(records: Sequence[RankRecord]) -> TimelineSummary:
    """The numbers of these ranks."""
    steps = sorted((step for one in records for step in step_times(one)), key=lambda step: step.duration)
    usual = steps[: math.ceil(_USUAL * len(steps))]
    total = StepTimes(*map(sum, zip(*usual, strict=True))) if usual else StepTimes(0, 0, 0, 0)
    scale = 1e-6 / max(1, len(usual))
    return TimelineSummary(
        ranks=len(records),
        backwards=max((len(one.backwards) for one in records), default=0),
        step_ms=total.duration * scale,
        under_way_ms=total.under_way * scale,
        exposed_ms=total.waiting * scale,
        hidden=total.hidden / total.under_way if total.under_way else None,
        clock_error_ms=max((one.clock.error_ns for one in records), default=0) / 1e6,
    )


def step_times(one: RankRecord) -> list[StepTimes]:
    """From the end of one synchronized backward to that of the next; the first step is not like the others."""
    waits, sent = (union((s.begin, s.end) for s in one.spans if s.kind in kinds) for kinds in (("wait",), _COUNTED))
    ends = [end for _, end in one.backwards]
    if len(ends) == 1:
        ends = [min(span.begin for span in one.spans), *ends]
    times = []
    for begin, end in itertools.pairwise(ends):
        under_way, waiting = _inside((begin, end), sent), _inside((begin, end), waits)
        hidden = length([*under_way, *waiting]) - length(waiting)  # under way, and nothing waits
        times.append(StepTimes(end - begin, length(under_way), hidden, length(waiting)))
    return times


def _inside(window: Interval, intervals: Sequence[Interval]) -> list[Interval]:
    """The parts of disjoint intervals, which are in order, that lie in ``window``."""
    first = bisect_left(intervals, window[0], key=lambda interval: interval[1])
    last = bisect_left(intervals, window[1], key=lambda interval: interval[0])
    return [(max(begin, window[0]), min(end, window[1])) for begin, end in intervals[first:last]]
