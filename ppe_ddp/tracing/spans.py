"""The kinds of spans of a timeline, and the spans of a backward, made from what the engine has recorded.

    computes     forward, backward, optimizer; wait: nothing but waiting for messages
    engine       pack, encode, decode, write: this rank's own work for messages
    messages     mask, vote, bucket, gather: on their way
    parts        node: this rank's sums in the memory of its node; wire: what is under way between nodes

Pure: what was recorded goes in, spans come out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppe_ddp.engine.event_log import Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ppe_ddp.engine.trace import Recorder, RoundRecord

COMPUTES = ("forward", "backward", "optimizer", "wait")
ENGINE = ("pack", "encode", "decode", "write")
MESSAGES = ("mask", "vote", "bucket", "gather")
PARTS = ("node", "wire")
KINDS = COMPUTES + ENGINE + MESSAGES + PARTS

Interval = tuple[int, int]


def spans_of_backward(recorder: Recorder) -> Iterator[Span]:
    """The spans of one backward."""
    r = recorder
    over = r.averaged_at or r.returned_at
    yield Span("backward", "", r.begin, r.backward_at)
    if over > r.backward_at:
        yield Span("wait", "for averages", r.backward_at, over)
    if r.averaged_at:
        yield Span("write", "averages to .grad", r.averaged_at, r.done_at)
    if r.asked_at and r.agreed_at:
        yield Span("mask", f"{sum(map(bool, r.agreed))} of {len(r.names)} parameters", r.asked_at, r.agreed_at)
    if r.vote_at and r.voted_at:
        yield Span("vote", "", r.vote_at, r.voted_at)
    for one in r.rounds:
        yield from _spans_of_round(one, r.backward_at)


def _spans_of_round(record: RoundRecord, backward_at: int) -> Iterator[Span]:
    for k, bucket in enumerate(record.plan.buckets):
        begin, end = record.launch[k], record.done[k]
        if not begin or not end:
            continue  # its launch has raised
        name = f"{'late ' if record.repair else ''}{k}"
        packed, launched = max(begin, record.packed[k]), record.launched[k]
        arrived = record.arrived[k] or end  # not everything tells
        if bucket.sparse:
            packed = max(packed, backward_at)  # which communicate only then
        elif arrived == launched:
            yield Span("pack", name, begin, packed)
            if launched <= backward_at:
                yield Span("wait", "for a function that blocks", packed, launched)
        else:
            yield Span("pack", name, begin, packed if record.goes_in_turns else launched)
        if not record.goes_in_turns:
            yield Span("bucket", name, packed, max(packed, min(arrived, end)), record.nbytes[k])


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def overlap(ones: Iterable[Interval], others: Iterable[Interval]) -> int:
    """How long something of both is going on."""
    total = 0
    left, right = union(ones), union(others)
    i = k = 0
    while i < len(left) and k < len(right):
        total += max(0, min(left[i][1], right[k][1]) - max(left[i][0], right[k][0]))
        if left[i][1] < right[k][1]:
            i += 1
        else:
            k += 1
    return total


def length(intervals: Iterable[Interval]) -> int:
    """How long something is going on."""
    return sum(end - begin for begin, end in union(intervals))


def without(whole: Interval, parts: Iterable[Interval]) -> list[Interval]:
    """What is left of ``whole``."""
    begin, left = whole[0], []
    for start, end in [*union(parts), (whole[1], whole[1])]:
        if begin < min(start, whole[1]):
            left.append((begin, min(start, whole[1])))
        begin = max(begin, end)
    return left


def merged(spans: Iterable[Span]) -> list[Span]:
    """Spans of one kind, those that overlap as one, in order."""
    together: list[Span] = []
    for span in sorted(spans, key=lambda one: one.begin):
        if together and span.begin <= together[-1].end:
            last = together[-1]
            together[-1] = last._replace(end=max(last.end, span.end), nbytes=last.nbytes + span.nbytes)
        else:
            together.append(span)
    return together


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """The spans in as few rows as it takes for none to overlap another of its row."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda one: (one.begin, one.end)):
        row = next((row for row in rows if row[-1].end <= span.begin), None)
        if row is None:
            rows.append(row := [])
        row.append(span)
    return rows
