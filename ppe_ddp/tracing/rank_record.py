"""The record of one rank: its clock compared with rank 0's, its JSON file, and the numbers of its timeline.

Kinds of spans:

computes     forward, backward, optimizer; wait: only waiting for messages
engine       pack, encode, decode, write: this rank's own work for messages
messages     mask, vote, bucket, gather: under way
parts        node: this rank adds up in the memory of its node; wire: messages under way between nodes

Clocks are compared by ping-pong; of several round trips the fastest counts:

    rank 0   sends at a                            receives at c
    rank r                reads its own clock: b

If both ways take equally long, b is (a + c) / 2 by rank 0's clock. So the error is at most half of the round trip.
Where no group of all ranks ever asks for it, nothing is compared; each rank's times are those of its machine's clock.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import statistics
import uuid
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import get_ident
from time import perf_counter_ns, time_ns
from typing import NamedTuple

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup
from torch.optim import optimizer as torch_optimizer

from ppe_ddp.backends.group_internals import default_group, device_types, store_of
from ppe_ddp.backends.json_collectives import all_gather_json
from ppe_ddp.backends.shared_memory.step_queue import StepParts
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.record import EventLog, Recorder, RoundRecord, Span
from ppe_ddp.errors import UnusableError
from ppe_ddp.launchers import detect
from ppe_ddp.stragglers import LEAST_MS, SLOW

_ROUND_TRIPS = 16
_FORMAT = "ppe_ddp timeline, version 1"
_JOB = "ppe_ddp/timeline"  # the key of the store under which the first rank that needs it leaves the job's name


@dataclass(frozen=True)
class ClockOffset:
    """The offset between this rank's clock and that of rank 0."""

    job: str = field(default_factory=lambda: uuid.uuid4().hex)  # the same on all ranks of the group, and on no others
    rank: int = 0
    world_size: int = 1
    offset_ns: int = 0  # subtracted from this rank's times it gives rank 0's
    error_ns: int = 0  # the largest error of the offset
    is_compared: bool = True  # if not, the offset gives the time of day by this rank's machine


def measure_offset(group: ProcessGroup) -> ClockOffset:
    """Compare the clocks of all ranks of ``group`` with that of its rank 0; all must call this together."""
    rank, size, alone = dist.get_rank(group), dist.get_world_size(group), ClockOffset()
    if size == 1:
        return alone
    serves_cpu = "cpu" in device_types(group)
    ranks = dist.get_process_group_ranks(group)
    messages = group if serves_cpu else dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    found = [(0, 0)]
    if rank == 0:
        found += [_offset_of(peer, messages) for peer in range(1, size)]
    else:
        for _ in range(_ROUND_TRIPS):
            dist.recv(_message(0), group=messages, group_src=0)
            dist.send(_message(perf_counter_ns()), group=messages, group_dst=0)
    job, offsets = all_gather_json([alone.job, found], messages)[0]
    if not serves_cpu:
        dist.destroy_process_group(messages)
    return ClockOffset(job, rank, size, *offsets[rank])


def _offset_of(peer: int, group: ProcessGroup) -> tuple[int, int]:
    reply, trips = _message(0), []
    for _ in range(_ROUND_TRIPS):
        begin = perf_counter_ns()
        dist.send(_message(0), group=group, group_dst=peer)
        dist.recv(reply, group=group, group_src=peer)
        end = perf_counter_ns()
        trips.append((end - begin, int(reply[0]) - (begin + end) // 2))
    fastest, offset = min(trips)
    return offset, -(-fastest // 2)


def _message(number: int) -> torch.Tensor:
    return torch.tensor([number], dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class Presence:
    """The gradients that existed in the backwards of one wrapper, while it had these parameters."""

    names: tuple[str, ...]  # the names of its parameters
    # A text for each backward, with a character for each parameter: "1" if this rank had a gradient of it.
    local: list[str] = field(default_factory=list)
    agreed: list[str] = field(default_factory=list)  # the same for all ranks: "1" if any had a gradient

    @classmethod
    def of(cls, recorders: Sequence[Recorder]) -> Presence:
        """The gradients of these backwards, which are all of one wrapper with the same parameters."""
        masks = [[one.local for one in recorders], [one.agreed for one in recorders]]
        local, agreed = (["".join("1" if here else "0" for here in mask) for mask in own] for own in masks)
        return cls(recorders[0].names, local, agreed)


@dataclass(frozen=True)
class RankRecord:
    """The record of one rank."""

    clock: ClockOffset
    host: str
    spans: list[Span]  # in order of their begin, by this rank's clock
    # Begin and end of each synchronized backward, by this rank's clock; of several wrappers, of the one with the most.
    backwards: list[tuple[int, int]]
    presence: list[Presence]  # one for each wrapper, and for each list of parameters that it had

    @classmethod
    def of(cls, log: EventLog, clock: ClockOffset) -> RankRecord:
        spans = [*log.spans, *(span for recorder in log.backwards for span in spans_of_backward(recorder))]
        wrappers: defaultdict[int, list[Recorder]] = defaultdict(list)
        modules: defaultdict[tuple[int, tuple[str, ...]], list[Recorder]] = defaultdict(list)
        for recorder in log.backwards:
            wrappers[recorder.wrapper].append(recorder)
            modules[recorder.wrapper, recorder.names].append(recorder)
        spans.sort(key=lambda span: (span.begin, -span.end))
        backwards = [(recorder.begin, recorder.done_at) for recorder in max(wrappers.values(), key=len, default=[])]
        return cls(clock, socket.gethostname(), spans, backwards, [Presence.of(own) for own in modules.values()])

    def on_one_clock(self) -> RankRecord:
        """This record with times by the clock of rank 0."""
        offset = self.clock.offset_ns
        spans = [span._replace(begin=span.begin - offset, end=span.end - offset) for span in self.spans]
        backwards = [(begin - offset, end - offset) for begin, end in self.backwards]
        return RankRecord(self.clock, self.host, spans, backwards, self.presence)

    def write(self, path: Path) -> None:
        """Write it to ``path``; a reader sees the whole file or none."""
        presence = [vars(one) for one in self.presence]
        content = {**vars(self), "format": _FORMAT, "clock": vars(self.clock), "presence": presence}
        temporary = path.with_suffix(f".{os.getpid()}.part")
        temporary.write_text(json.dumps(content, separators=(",", ":")))
        temporary.replace(path)

    @classmethod
    def read(cls, path: Path) -> RankRecord:
        """Read what :meth:`write` has written; ValueError if the file is something else."""
        try:
            content = json.loads(path.read_text())
            if content["format"] != _FORMAT:
                raise ValueError(f"it is of the format {content['format']!r}, not {_FORMAT!r}")
            return cls(
                ClockOffset(**content["clock"]),
                content["host"],
                [Span(*span) for span in content["spans"]],
                [(begin, end) for begin, end in content["backwards"]],
                [Presence(tuple(one["names"]), one["local"], one["agreed"]) for one in content["presence"]],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no record of a timeline: {error}") from error


def spans_of_backward(r: Recorder) -> Iterator[Span]:
    """The spans of one backward, from what the engine has recorded."""
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
    for k, one in enumerate(record.buckets):
        begin, end = one.launch, one.done
        if not begin or not end:
            continue  # its launch raised an error
        name = f"{'late ' if record.repair else ''}{k}"
        packed, launched = max(begin, one.packed), one.launched
        arrived = one.arrived or end  # some transports do not say when
        if record.plan.buckets[k].sparse:
            packed = max(packed, backward_at)  # sparse gradients are sent only then
        elif arrived == launched:
            yield Span("pack", name, begin, packed)
            if launched <= backward_at:
                yield Span("wait", "for a function that blocks", packed, launched)
        else:
            yield Span("pack", name, begin, packed if one.goes_in_turns else launched)
        if not one.goes_in_turns:
            yield Span("bucket", name, packed, max(packed, min(arrived, end)), one.nbytes)


class Recording:
    """A recording under way on this rank; ``clock`` is a lone rank's until this rank's place in a job is known."""

    def __init__(self) -> None:
        self.log = EventLog(self._on_groups)  # the engine writes to it
        self.clock, self._is_compared, self._is_placed = ClockOffset(), False, False
        # By thread, the steps under way, each with its optimizer's id and its begin: a step may call another one's.
        self._steps: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)

    def result(self) -> RankRecord:
        self._find_place()
        if not self._is_placed:  # there is no process group, but a launcher may have started several ranks
            with suppress(ValueError, UnusableError):
                job = detect(os.environ)
                self._place("", job.rank, job.world_size)
        return RankRecord.of(self.log, self.clock)

    def compare_clocks(self, group: ProcessGroup) -> None:
        """Compare clocks with all ranks of ``group``, which call this together; later calls do nothing."""
        if not self._is_compared:
            self.clock, self._is_compared, self._is_placed = measure_offset(group), True, True

    def _on_groups(self, groups: Groups) -> None:
        if groups.world_size == dist.get_world_size():  # the clock of global rank 0 counts
            self.compare_clocks(groups.control)
        self._find_place()

    def _find_place(self) -> None:
        """Note this rank, which names its file, where clocks are not compared; it waits for no other rank."""
        if not dist.is_initialized():
            return
        if not self._is_placed or self.clock.world_size == 1 < dist.get_world_size():  # elastic ranks begin alone
            job = ""
            with suppress(RuntimeError):  # the store lacks this operation, or has ended
                job = store_of(default_group()).compare_set(_JOB, "", self.clock.job).decode()
            self._place(job, dist.get_rank(), dist.get_world_size())

    def _place(self, job: str, rank: int, world_size: int) -> None:
        self._is_placed = True
        if world_size > 1:
            offset = perf_counter_ns() - time_ns()
            self.clock = replace(self.clock, job=job, rank=rank, world_size=world_size, offset_ns=offset)
            self.clock = replace(self.clock, is_compared=False)

    def begin_step(self, optimizer: object, *_: object) -> None:
        self._find_place()  # while there is a process group
        self._end_steps(optimizer)  # one that has raised, for which torch calls no hook
        self._steps[get_ident()].append((id(optimizer), perf_counter_ns()))

    def end_step(self, optimizer: object, *_: object) -> None:
        """Record an optimizer's step, unless it is a part of another one's."""
        begin = self._end_steps(optimizer)
        if begin and not self._steps[get_ident()]:
            self.log.add("optimizer", type(optimizer).__name__, begin)

    def _end_steps(self, optimizer: object) -> int:
        """Forget this thread's step of ``optimizer``, and those that it has called; returns its begin, 0 if none."""
        steps = self._steps[get_ident()]
        first = next((k for k, (owner, _) in enumerate(steps) if owner == id(optimizer)), None)
        if first is None:
            return 0
        begin = steps[first][1]
        del steps[first:]
        return begin


@contextmanager
def record() -> Generator[Recording, None, None]:
    """Record what this rank does in the block, which all ranks enter together; UnusableError in another recording."""
    if EventLog.current is not None:
        raise UnusableError("a timeline is being recorded in this process already; end that one before")
    recording = Recording()
    if dist.is_initialized():
        recording.compare_clocks(default_group())
    hooks = [
        torch_optimizer.register_optimizer_step_pre_hook(recording.begin_step),
        torch_optimizer.register_optimizer_step_post_hook(recording.end_step),
    ]
    EventLog.current, StepParts.listener = recording.log, recording.log.add
    try:
        yield recording
    finally:
        EventLog.current = StepParts.listener = None
        for hook in hooks:
            hook.remove()


# ---------------------------------------------------------------------- arithmetic on spans, which is pure

COMPUTES = ("forward", "backward", "optimizer", "wait")
ENGINE = ("pack", "encode", "decode", "write")
MESSAGES = ("mask", "vote", "bucket", "gather")
PARTS = ("node", "wire")
KINDS = COMPUTES + ENGINE + MESSAGES + PARTS

_USUAL = 0.9  # the part of the steps that count; the longest were delayed by something else
_COUNTED = ("bucket", "gather")  # masks and votes are only a few bytes, but under way for a long time

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals, as disjoint ones in order."""
    return [(span.begin, span.end) for span in merged(Span("", "", *one) for one in intervals) if span.end > span.begin]


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
    """Spans of one kind in order; those that overlap are joined."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda one: one.begin):
        if joined and span.begin <= joined[-1].end:
            last = joined[-1]
            joined[-1] = last._replace(end=max(last.end, span.end), nbytes=last.nbytes + span.nbytes)
        else:
            joined.append(span)
    return joined


def lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """The spans in as few rows as possible; those of a row do not overlap."""
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
    """The numbers of a timeline; times are means over ranks and steps, without the longest tenth of the steps."""

    ranks: int
    backwards: int  # the number of synchronized backwards, the largest of any rank and wrapper
    step_ms: float  # from the end of a synchronized backward to the end of the next
    under_way_ms: float  # the time in a step in which gradients or parameters were under way
    waiting_ms: float  # the time in a step in which a rank only waited for messages, also for masks and votes
    hidden: float | None  # the part of ``under_way_ms`` in which the rank computed; None if nothing was sent
    clock_error_ms: float | None  # the largest error of a rank's clock; None if clocks were not compared
    own_ms: dict[int, float]  # by rank, the median time in a step in which it did not wait

    @property
    def slow(self) -> dict[int, float]:
        """The ranks that the others wait for, each with its milliseconds a step beyond the median rank's."""
        usual = statistics.median_low(self.own_ms.values()) if self.own_ms else 0.0
        least = max(SLOW * usual, usual + LEAST_MS)
        return {rank: own - usual for rank, own in self.own_ms.items() if own > least}

    def __str__(self) -> str:
        lines = [f"{self.ranks} ranks, {self.backwards} synchronized backwards; a step takes {self.step_ms:.2f} ms"]
        if self.hidden is None:
            lines.append("nothing was sent")
        else:
            lines.append(f"{self.hidden:.0%} of the communication is hidden behind computation:")
            lines.append(f"messages are under way for {self.under_way_ms:.2f} ms of a step,")
            lines.append(f"and a rank only waits for {self.waiting_ms:.2f} ms")
        for rank, more in self.slow.items():
            lines.append(f"rank {rank} is slow: it takes {more:.1f} ms a step longer than the median rank")
        if self.ranks > 1 and self.clock_error_ms is None:
            lines.append("clocks were not compared: each machine's own time of day")
        elif self.ranks > 1:
            lines.append(f"all ranks on the clock of rank 0, with an error of up to {self.clock_error_ms:.3f} ms")
        return "\n".join(lines)


class StepTimes(NamedTuple):
    """The times of one step of one rank, in nanoseconds."""

    duration: int
    under_way: int
    hidden: int
    waiting: int


def summarize(records: Sequence[RankRecord]) -> TimelineSummary:
    """The numbers of a timeline of these ranks."""
    steps = sorted((step for one in records for step in step_times(one)), key=lambda step: step.duration)
    usual = steps[: math.ceil(_USUAL * len(steps))]
    total = StepTimes(*map(sum, zip(*usual, strict=True))) if usual else StepTimes(0, 0, 0, 0)
    scale = 1e-6 / max(1, len(usual))
    are_compared = all(one.clock.is_compared for one in records)
    return TimelineSummary(
        ranks=len(records),
        backwards=max((len(one.backwards) for one in records), default=0),
        step_ms=total.duration * scale,
        under_way_ms=total.under_way * scale,
        waiting_ms=total.waiting * scale,
        hidden=total.hidden / total.under_way if total.under_way else None,
        clock_error_ms=max((one.clock.error_ns for one in records), default=0) / 1e6 if are_compared else None,
        own_ms={one.clock.rank: _own_ms(one) for one in records if len(one.backwards) > 1},
    )


def _own_ms(one: RankRecord) -> float:
    return statistics.median(step.duration - step.waiting for step in step_times(one)) / 1e6


def step_times(one: RankRecord) -> list[StepTimes]:
    """The times of each step, from the end of a synchronized backward to the end of the next; so not of the first."""
    waits, sent = (union((s.begin, s.end) for s in one.spans if s.kind in kinds) for kinds in (("wait",), _COUNTED))
    ends = [end for _, end in one.backwards]
    if len(ends) == 1:
        ends = [min(span.begin for span in one.spans), *ends]
    times = []
    for begin, end in itertools.pairwise(ends):
        under_way, waiting = _inside((begin, end), sent), _inside((begin, end), waits)
        hidden = length([*under_way, *waiting]) - length(waiting)  # under way while the rank does not wait
        times.append(StepTimes(end - begin, length(under_way), hidden, length(waiting)))
    return times


def _inside(window: Interval, intervals: Sequence[Interval]) -> list[Interval]:
    """The parts in ``window`` of intervals that are disjoint and in order."""
    first = bisect_left(intervals, window[0], key=lambda interval: interval[1])
    last = bisect_left(intervals, window[1], key=lambda interval: interval[0])
    return [(max(begin, window[0]), min(end, window[1])) for begin, end in intervals[first:last]]
