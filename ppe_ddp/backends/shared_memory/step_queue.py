"""The queue of one group's steps in shared memory: each rank publishes, and acts when all have published.

    ranks 0 and 1 publish "my tensor for step s is at position x"          published = s
    when all have: each does its part of the work in the memory of all     acted = s
    when all have: the step is done

In a group of several nodes these are the ranks of one node. Between ``published`` and ``acted`` each rank's slices are
summed over the nodes; it has done its part when the results have come. A step whose tensor lies in other memory is
published when there is room to copy it into shared memory; later steps wait behind it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, repeat
from operator import itemgetter
from time import perf_counter_ns
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ppe_ddp.backends.memory_pool import MemoryPool
from ppe_ddp.backends.shared_memory.shared_reservation import ControlPage, SharedMemory
from ppe_ddp.backends.shared_memory.shared_steps import (
    Crossing,
    NodeLayout,
    NodeSumStep,
    Region,
    Scratch,
    Step,
    TwoLevelStep,
    describe_record,
)
from ppe_ddp.backends.wire import Wire
from ppe_ddp.backends.work import CallQueue, Waits, WireCall, Work, one_call
from ppe_ddp.errors import CommunicationError
from ppe_ddp.waiting import InFlight, ProgressEngine

_Kind: Any = ReduceOp.RedOpType

# The layout of a control page, in words of int64.
_PUBLISHED, _ACTED, _CLOSED, _ACTING, _MESSAGES, _LEFT, _RECORDS, _PLACES, _WIDTH = 0, 8, 16, 17, 18, 19, 24, 64, 4
_published, _acted, _closed, _acting = map(itemgetter, (_PUBLISHED, _ACTED, _CLOSED, _ACTING))
_STEPS_BETWEEN_TRIMS = 1 << 10  # of memory for messages between nodes, of sizes that no step has any more
_STAGES = 2  # pieces of tensors in other memory that are in flight at a time


class StepParts:
    """The listener for the parts of each step, if there is one.

    It is called, in any thread, with ``"node"`` or ``"wire"``, the step's number, its begin by ``perf_counter_ns()``,
    and its bytes.
    """

    listener: ClassVar[Callable[[str, str, int, int], None] | None] = None

    @classmethod
    def end(cls, kind: str, number: int, begin: int, nbytes: int) -> None:
        """Report the end of a part of step ``number``; does nothing if there was no listener at its begin or end."""
        if begin and cls.listener is not None:
            cls.listener(kind, str(number), begin, nbytes)


class LaunchedStep:
    """One run of a step, the group's ``number``-th; keeps ``tensors`` alive until all ranks have done their part."""

    __slots__ = ("crossed_at", "crossing", "error", "is_staged", "number", "step", "tensors", "when_done")

    def __init__(self, step: Step, number: int, tensors: Any) -> None:
        self.step = step
        self.number = number
        self.tensors = tensors
        # Whether its tensor is copied into shared memory, and the result back.
        self.is_staged = step.shared is None
        self.error = ""  # empty if there is none
        self.crossing: Crossing | None = None  # the messages in flight between nodes
        self.crossed_at = 0  # when these began; 0 without a listener
        # Called when it is done on all ranks, under the lock of the progress engine.
        self.when_done: Callable[[], None] | None = None


@dataclass(frozen=True)
class SharedLink:
    """The connections of the ranks of one group, other than shared memory."""

    rank: int  # this process in the group
    size: int
    # Returns the bytes of every rank, the same number from each; all ranks call it together.
    all_gather: Callable[[bytes], list[bytes]]
    waits: Waits
    progress: ProgressEngine  # advances the group's collectives whenever this process calls any backend
    # Makes a wire between the given ranks, which own the slice of this number; all of these call it together, for one
    # slice after another.
    join: Callable[[int, Sequence[int]], Wire]


class StepQueue:
    """Launches the steps of one group, and does this rank's part of each when all ranks have launched it.

    A step has at most ``piece_bytes``, the same on every rank.
    """

    def __init__(
        self, link: SharedLink, memory: SharedMemory, layout: NodeLayout, pages: Sequence[ControlPage], piece_bytes: int
    ) -> None:
        self._layout = layout
        own = layout.own_slices if len(layout.nodes) > 1 else range(0)
        self._links = [link.join(index, layout.owners(index)) for index in own]
        # Further wires for :class:`SliceLink`, as its calls may come between the group's collectives in another order
        # on each rank.
        self.links_of_callers = [link.join(layout.slices + index, layout.owners(index)) for index in own]
        self._waits = link.waits
        self._progress = link.progress
        self._memory = memory
        self._spaces = [page.space for page in pages]
        self._controls = [page.words for page in pages]
        self._own = self._controls[layout.local_rank]
        self._piece_bytes = piece_bytes
        self._launched = 0
        self._done = 0  # the last step that is done on all ranks, with its result copied back
        self._waiting: deque[LaunchedStep] = deque()  # to be published
        self._arriving: deque[LaunchedStep] = deque()
        self._crossing: deque[LaunchedStep] = deque()
        # Keeps memory alive into which other ranks write until all have done their part, even if the Work was dropped.
        self._held: deque[LaunchedStep] = deque()
        self._stages: deque[tuple[int, Tensor]] = deque()  # each with the last step that it was used for, oldest first
        self._scratch = Scratch()
        self._messages = MemoryPool()
        self._waits.at_failure.append(self._close)

    def launch(self, steps: Iterable[Step], tensors: Any) -> list[LaunchedStep]:
        """Begin the steps of a collective; keeps ``tensors`` alive until all ranks have done their part.

        Every rank calls it with steps of the same sizes and dtypes. CommunicationError if the group was given up.
        """
        with self._progress.lock:
            launched = list(map(LaunchedStep, steps, count(self._launched + 1), repeat(tensors)))
            if self._own[_CLOSED]:
                self._waits.check(launched[0].step.title)  # raises
            self._launched += len(launched)
            self._waiting.extend(launched)
            self._progress.add(self)
        self._progress.progress()
        return launched

    def work(self, launched: Sequence[LaunchedStep]) -> Work:
        """The Work of a collective; ``wait()`` raises CommunicationError, on all ranks, if sizes or dtypes differ."""
        last = launched[-1]
        poll, absent = partial(self.done, launched), partial(self.absent, last)
        work = Work(last.step.title, self._waits, poll, absent=absent)
        work.ask_transport = partial(setattr, last, "when_done")
        return work

    def done(self, launched: Sequence[LaunchedStep]) -> bool:
        """Whether no rank writes into the memory of these steps any more; CommunicationError if they were given up."""
        if self._done < launched[-1].number and (not self._own[_CLOSED] or any(map(_acting, self._controls))):
            return False
        for one in launched:
            if one.error or self._done < one.number:
                raise CommunicationError(one.error or self._waits.failure)
        return True

    def absent(self, launched: LaunchedStep) -> list[int]:
        """The ranks that have not come to a step; if all have, those that have not done their part.

        The progress of ranks of other nodes is not known: if a step waits for messages, all of these are named.
        """
        late = self._ranks_behind(_PUBLISHED, launched.number)
        if late:
            return late
        late = self._ranks_behind(_ACTED, launched.number)
        ended = sorted(set(late).intersection(self._waits.ended_ranks()))
        return ended or (self._layout.elsewhere if launched in self._crossing else late)

    def _ranks_behind(self, word: int, number: int) -> list[int]:
        ranks = self._layout.local
        return [rank for rank, page in zip(ranks, self._controls, strict=True) if page[word] < number]

    def is_closed_elsewhere(self) -> bool:
        return any(map(_closed, self._controls))

    def count_message(self) -> Callable[[], list[int]]:
        """Count one more collective by messages on this rank's page; returns a function that names ranks behind."""
        self._own[_MESSAGES] = number = self._own[_MESSAGES] + 1
        return partial(self._ranks_behind, _MESSAGES, number)

    def drain(self, seconds: float) -> None:
        """Wait until every step is done on all ranks, or a rank has left without launching it; then leave.

        Raises CommunicationError after ``seconds``, or if the group was given up.
        """
        last = self._launched

        def is_drained() -> bool:
            return self._done >= last or any([page[_LEFT] and page[_PUBLISHED] < last for page in self._controls])

        try:
            self._waits.until(is_drained, "destroy_process_group", seconds=seconds)
        finally:
            self._own[_LEFT] = 1

    @property
    def is_crossing(self) -> bool:
        return bool(self._crossing)

    def close_links(self) -> None:
        """Close the connections to other nodes; gives them up if messages are in flight."""
        for link in (*self._links, *self.links_of_callers):
            link.give_up() if self._crossing else link.close()

    def advance(self) -> bool:
        """Advance all steps as far as the other ranks have come; returns whether none is left."""
        held, controls = self._held, self._controls
        if self._own[_CLOSED]:
            if all(map(_closed, controls)):
                held.clear()
            return not held
        try:
            while True:
                while self._waiting and self._publish(self._waiting[0]):
                    pass
                while self._arriving and min(map(_published, controls)) >= self._arriving[0].number:
                    if not self._act(self._compute, self._arriving[0]):
                        break
                    launched = self._arriving.popleft()
                    if launched.crossing is not None or self._crossing:
                        self._crossing.append(launched)
                    else:
                        self._own[_ACTED] = launched.number
                while self._crossing and self._end_crossing(self._crossing[0]):
                    self._own[_ACTED] = self._crossing.popleft().number
                if not self._finish_acted() or not self._waiting:
                    break
        except BaseException as error:  # such as MemoryError, or Ctrl-C; a part that was begun cannot be done once more
            if not self._waits.look_now():  # a rank that gives the group up writes that before it closes connections
                self._waits.give_up(f"its part in shared memory failed: {type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise
        return not held and not self._waiting

    def _close(self) -> None:
        """Take no part any more. Memory of steps in flight is kept until all ranks have closed.

        A step of which all ranks have done their part succeeds here, too: another rank may have gone on from it.
        """
        with self._progress.lock:
            self._finish_acted()
            self._waiting.clear()
            self._arriving.clear()
            self._crossing.clear()
            self._progress.fence()  # a rank that sees this one closed sees what it has done before
            self._own[_CLOSED] = 1
            self._progress.fence()
        for link in (*self._links, *self.links_of_callers):
            link.give_up()

    def _free_stage(self, launched: LaunchedStep) -> Tensor | None:
        nbytes = launched.step.local.nbytes
        if nbytes > self._piece_bytes:  # a single column may be larger than a piece
            return self._memory.allocate(nbytes, torch.uint8)
        if len(self._stages) == _STAGES and self._stages[0][0] > self._done:
            return None
        is_new = len(self._stages) < _STAGES
        stage = self._memory.allocate(self._piece_bytes, torch.uint8) if is_new else self._stages.popleft()[1]
        self._stages.append((launched.number, stage))
        return stage

    def _publish(self, launched: LaunchedStep) -> bool:
        """Publish a step if there is room for it; returns whether it was published."""
        step, own = launched.step, self._own
        if launched.number - _PLACES > self._done:  # the record at this place may still be read
            return False
        if launched.is_staged:
            stage = self._free_stage(launched)
            if stage is None:
                return False
            step.stage(stage)
        if step.record is None:
            assert step.shared is not None
            position = self._memory.position(step.shared)
            step.record = array("q", (position, step.stride, step.local.numel(), step.code))
        place = _RECORDS + launched.number % _PLACES * _WIDTH
        own[place : place + _WIDTH] = step.record
        self._arriving.append(self._waiting.popleft())
        self._held.append(launched)
        self._progress.fence()
        own[_PUBLISHED] = launched.number
        return True

    def _act(self, work: Callable[[LaunchedStep], None], launched: LaunchedStep) -> bool:
        """Do ``work`` in the memory of other ranks; does nothing and returns False if a rank has given the group up."""
        own, fence = self._own, self._progress.fence
        own[_ACTING] = 1
        fence()  # a rank that closes either sees that this one acts, or this one sees that it has closed
        is_open = not any(map(_closed, self._controls))
        try:
            if is_open:
                work(launched)
        finally:
            fence()
            own[_ACTING] = 0
        return is_open

    def _compute(self, launched: LaunchedStep) -> None:
        begin = 0 if StepParts.listener is None else perf_counter_ns()
        step, place = launched.step, _RECORDS + launched.number % _PLACES * _WIDTH
        records: list[list[int]] = [page[place : place + _WIDTH].tolist() for page in self._controls]
        if records != step.records:
            if any(one[2:] != records[0][2:] for one in records):
                launched.error = self._mismatch(records)
                if self._links:  # the other nodes do not know of the mismatch
                    raise CommunicationError(launched.error)
                return
            regions = [Region(space, *one[:2]) for space, one in zip(self._spaces, records, strict=True)]
            step.prepare(regions)
            step.records = records
        if isinstance(step, TwoLevelStep):
            if launched.number % _STEPS_BETWEEN_TRIMS == 0:
                self._messages.trim()
            launched.crossing = step.cross(self._links, self._messages)
            launched.crossed_at = perf_counter_ns() if begin else 0
        else:
            step.act(self._scratch)
        if begin:
            StepParts.end("node", launched.number, begin, step.local.nbytes)

    def _end_crossing(self, launched: LaunchedStep) -> bool:
        """Copy results of other nodes to the ranks of this one; returns False if they have not arrived."""
        crossing = launched.crossing
        if crossing is not None:
            if not crossing.done() or not self._act(self._spread, launched):
                return False
            launched.crossing = None
        return True

    def _spread(self, launched: LaunchedStep) -> None:
        assert isinstance(launched.step, TwoLevelStep)
        assert launched.crossing is not None
        begin = 0 if StepParts.listener is None else perf_counter_ns()
        StepParts.end("wire", launched.number, launched.crossed_at, launched.crossing.nbytes)
        launched.step.spread(launched.crossing)
        StepParts.end("node", launched.number, begin, launched.step.local.nbytes)

    def _finish_acted(self) -> bool:
        """Finish the steps of which all ranks have done their part; returns whether there were any."""
        held, acted, done = self._held, min(map(_acted, self._controls)), self._done
        while held and held[0].number <= acted:
            launched = held.popleft()
            if launched.is_staged and not launched.error:
                self._progress.fence()
                launched.step.finish()
            self._done = launched.number
            if launched.when_done is not None:
                launched.when_done()
        return self._done != done

    def _mismatch(self, records: list[list[int]]) -> str:
        named = zip(self._layout.local, records, strict=True)
        each = ", ".join(f"rank {rank} {describe_record(*record[2:])}" for rank, record in named)
        return f"{self._waits.place}: the ranks have brought different tensors to one collective: {each}"


class HierarchicalReduction:
    """One reduction of ``flat`` in flight, over nodes by its caller; ``summed`` is the Work of its first part."""

    def __init__(self, queue: StepQueue, waits: Waits, flat: Tensor, step: NodeSumStep) -> None:
        self._queue = queue
        self._waits = waits
        self._step = step
        (self._launched,) = queue.launch([step], flat)
        self.summed = Work(
            step.title,
            waits,
            lambda: step.sums is not None or queue.done([self._launched]),
            absent=partial(queue.absent, self._launched),
        )

    @property
    def sums(self) -> list[Tensor]:
        """For each slice of this rank, the sums of its ranges, 1-D, to be changed in place; available once summed."""
        assert self._step.sums is not None
        return self._step.sums

    def deliver(self) -> Work:
        """Begin to copy the current sums to all ranks of the node; returns the Work."""
        self._step.has_results = True
        self._waits.progress()
        return self._queue.work([self._launched])


class SliceLink:
    """Messages between the owners of a slice, each of which is on another node.

    ``ranks`` are the owners' ranks in the group, and ``rank`` is this one's.
    """

    def __init__(self, wire: Wire, ranks: Sequence[int], rank: int, waits: Waits) -> None:
        self._wire = wire
        self._waits = waits
        self._calls = CallQueue(waits, at_once=True)
        self._elsewhere = [other for other in ranks if other != rank]
        self.size = len(ranks)  # the number of owners, and so of nodes
        self.rank = ranks.index(rank)  # this rank's index among the owners

    def all_reduce(self, flat: Tensor) -> Work:
        """Sum ``flat`` (1-D, contiguous, float32 or float64) over the owners, in place."""
        return self._begin("all_reduce", partial(self._wire.all_reduce, flat, _Kind.SUM))

    def all_to_all(self, output: Tensor, flat: Tensor, receiving: Sequence[int], sending: Sequence[int]) -> Work:
        return self._begin("all_to_all", partial(self._wire.all_to_all, output, flat, receiving, sending))

    def _begin(self, what: str, start: Callable[[], InFlight]) -> Work:
        self._waits.check(what)
        call = WireCall(f"{what} between nodes", self._waits, one_call(start), is_queued=True)
        self._calls.begin(call)
        return Work(call.what, self._waits, call.done, absent=lambda: self._elsewhere)
