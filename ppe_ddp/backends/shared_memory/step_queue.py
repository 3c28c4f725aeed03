"""Queue of one group's steps in shared memory: each rank publishes, and acts when all have published.

    rank 0 and 1 publish "my tensor for step s is at position x"      arrived = s
    when all have: each does its part of the work in all memory       done = s
    when all have: the step is complete

Where the group has several nodes, these are the ranks of one. In between, each rank's slices go over the nodes
(``two_level_steps.py``), and it has done its part when they are back.

A step is advanced in any call of the backend that this process makes, and in between only where a thread makes such
calls. So a rank that has launched its bucket goes on with its backward, and waits for the others at the end. A step
whose tensor lies elsewhere is published once there is room to copy it into shared memory; what was launched after it
waits behind it.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count, repeat
from operator import itemgetter
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ppe_ddp.backends.shared_memory.shared_steps import Region, Scratch, describe_record
from ppe_ddp.backends.shared_memory.two_level_steps import TwoLevelStep, WireMemory
from ppe_ddp.backends.work import Work
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from ppe_ddp.backends.shared_memory.node_layout import NodeLayout
    from ppe_ddp.backends.shared_memory.shared_reservation import ControlPage, SharedMemory
    from ppe_ddp.backends.shared_memory.shared_steps import Step
    from ppe_ddp.backends.shared_memory.two_level_steps import Crossing
    from ppe_ddp.backends.wire import Wire
    from ppe_ddp.backends.work import Waits
    from ppe_ddp.waiting import ProgressEngine

# The layout of a control page, in words of int64, as many as a page has; what different ranks write lies in different
# cache lines.
_ARRIVED, _DONE, _CLOSED, _ACTING, _MESSAGES, _LEFT, _RECORDS, _PLACES, _WIDTH = 0, 8, 16, 17, 18, 19, 24, 64, 4
_arrived, _done, _closed, _acting = map(itemgetter, (_ARRIVED, _DONE, _CLOSED, _ACTING))
_STAGES = 2  # pieces of a tensor from elsewhere that are under way at a time


PartListener = Callable[[str, str, int, int], None]
"""Called with ``"node"`` or ``"wire"``, the step's number, its begin by ``perf_counter_ns()``, and bytes; by any
thread."""


class StepParts:
    """The one who asks for the parts of each step, and their times."""

    listener: ClassVar[PartListener | None] = None

    @classmethod
    def end(cls, kind: str, number: int, begin: int, nbytes: int) -> None:
        """A part of step ``number`` has ended; nothing where nobody asked as it began, or does not any more."""
        if begin and cls.listener is not None:
            cls.listener(kind, str(number), begin, nbytes)


class LaunchedStep:
    """One run of a step.

    Args:
        number: Counted on each group, from 1.
        tensors: What must not be freed before all ranks have done their part.
    """

    __slots__ = ("at_end", "crossed_at", "crossing", "error", "is_staged", "number", "step", "tensors")

    def __init__(self, step: Step, number: int, tensors: Any) -> None:
        self.step = step
        self.number = number
        self.tensors = tensors
        # Whether its tensor is to be copied into shared memory, and the result back.
        self.is_staged = step.shared is None
        self.error = ""  # what is wrong with it; empty while nothing is known
        self.crossing: Crossing | None = None  # what is under way between nodes
        self.crossed_at = 0  # since when; 0 where nobody asks
        # Called when it is complete on all ranks, under the lock of the progress engine; None where nobody asks.
        self.at_end: Callable[[], None] | None = None


@dataclass(frozen=True)
class SharedLink:
    """How the ranks of one group reach each other besides their shared memory."""

    rank: int  # this process in the group
    size: int
    # Brings the bytes of every rank, as many from each, to all; every rank calls it together.
    all_gather: Callable[[bytes], list[bytes]]
    waits: Waits
    progress: ProgressEngine  # advances the group's collectives whenever this process calls any backend
    # Joins this rank with those of its group that own a slice of this number on other nodes; all of these call it
    # together, for one slice after another.
    join: Callable[[int, Sequence[int]], Wire]


class StepQueue:
    """Launches the steps of one group, and does this rank's part of each when all ranks have launched it.

    No step brings more than ``piece_bytes``, the same on every rank.
    """

    def __init__(
        self, link: SharedLink, memory: SharedMemory, layout: NodeLayout, pages: Sequence[ControlPage], piece_bytes: int
    ) -> None:
        self._layout = layout
        own = layout.own_slices if len(layout.nodes) > 1 else range(0)
        self._links = [link.join(index, layout.owners(index)) for index in own]
        # To the other nodes, one for each slice that this rank owns. The group's own collectives have others, which
        # other ranks may begin at other moments.
        self.links_of_callers = [link.join(layout.slices + index, layout.owners(index)) for index in own]
        self._rank, self._size = layout.local_rank, len(layout.local)
        self._waits = link.waits
        self._progress = link.progress
        self._memory = memory
        self._spaces = [page.space for page in pages]
        self._controls = [page.words for page in pages]
        self._own = self._controls[self._rank]
        self._piece_bytes = piece_bytes
        self._launched = 0
        self._finished = 0  # complete on all ranks, as far as this rank has seen, and its result where it belongs
        self._waiting: deque[LaunchedStep] = deque()  # to be published
        self._arriving: deque[LaunchedStep] = deque()
        self._crossing: deque[LaunchedStep] = deque()
        # Their memory: until all ranks have done their part they write into it, whoever has dropped the Work here.
        self._held: deque[LaunchedStep] = deque()
        self._stages: deque[tuple[int, Tensor]] = deque()  # each with the last step that it was used for, in turn
        self._scratch = Scratch()
        self._wires = WireMemory()
        self._waits.at_failure.append(self._close)

    def launch(self, steps: Iterable[Step], tensors: Any) -> list[LaunchedStep]:
        """Begin the steps of a collective; ``tensors`` live until all ranks have done their part.

        Every rank calls it with steps of the same sizes and dtypes. CommunicationError where the group was given up.
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
        """The Work of a collective's steps.

        Its ``wait()`` also raises CommunicationError where the ranks have brought different sizes or dtypes; the same
        on all.
        """
        last = launched[-1]
        poll, absent = partial(self.has_ended, launched), partial(self.absent, last)
        work = Work(launched[0].step.title, self._waits, poll, absent=absent)
        work.ask_transport = partial(setattr, last, "at_end")
        return work

    def has_ended(self, launched: Sequence[LaunchedStep]) -> bool:
        """Whether no rank writes into the memory of some steps any more; CommunicationError if they were given up."""
        if self._finished < launched[-1].number and (not self._own[_CLOSED] or any(map(_acting, self._controls))):
            return False
        for one in launched:
            if one.error or self._finished < one.number:
                raise CommunicationError(one.error or self._waits.failure)
        return True

    def absent(self, launched: LaunchedStep) -> list[int]:
        """The ranks that have not come to a step; if all have, those that have not done their part.

        Of ranks of other nodes no more is known than that some have not, where this node's have all come.
        """
        late = self._ranks_behind(_ARRIVED, launched.number)
        if late:
            return late
        late = self._ranks_behind(_DONE, launched.number)
        ended = sorted(set(late).intersection(self._waits.ended_ranks()))
        return ended or (self._layout.elsewhere if launched in self._crossing else late)

    def _ranks_behind(self, word: int, number: int) -> list[int]:
        ranks = self._layout.local
        return [rank for rank, page in zip(ranks, self._controls, strict=True) if page[word] < number]

    def is_closed_elsewhere(self) -> bool:
        return any(map(_closed, self._controls))

    def count_message(self) -> Callable[[], list[int]]:
        """Show the others that this rank has begun one more collective by messages; tells which of them have not."""
        self._own[_MESSAGES] = number = self._own[_MESSAGES] + 1
        return partial(self._ranks_behind, _MESSAGES, number)

    def drain(self, seconds: float) -> None:
        """Wait until every step is complete on all ranks, or a rank has left that has not launched it; then leave.

        Raises CommunicationError where that takes longer, or the group was given up.
        """
        last = self._launched

        def is_over() -> bool:
            return self._finished >= last or any([page[_LEFT] and page[_ARRIVED] < last for page in self._controls])

        try:
            self._waits.until(is_over, "destroy_process_group", seconds=seconds)
        finally:
            self._own[_LEFT] = 1

    @property
    def is_crossing(self) -> bool:
        return bool(self._crossing)

    def close_links(self) -> None:
        """End the connections with other nodes; what is still under way there is given up."""
        for link in (*self._links, *self.links_of_callers):
            link.give_up() if self._crossing else link.close()

    def advance(self) -> bool:
        """Do what all have arrived for; whether nothing is left to do or to wait for."""
        held, controls = self._held, self._controls
        if self._own[_CLOSED]:
            if all(map(_closed, controls)):
                held.clear()
            return not held
        try:
            while True:
                while self._waiting and self._publish(self._waiting[0]):
                    pass
                while self._arriving and min(map(_arrived, controls)) >= self._arriving[0].number:
                    if not self._act(self._compute, self._arriving[0]):
                        break
                    launched = self._arriving.popleft()
                    if launched.crossing is not None or self._crossing:
                        self._crossing.append(launched)
                    else:
                        self._own[_DONE] = launched.number
                while self._crossing and self._end_crossing(self._crossing[0]):
                    self._own[_DONE] = self._crossing.popleft().number
                done, finished = min(map(_done, controls)), self._finished
                while held and held[0].number <= done:
                    self._finish(held.popleft())
                if not self._waiting or self._finished == finished:
                    break
        except Exception as error:  # such as a lack of memory: the others would wait for this rank's part
            if self._waits.look_now():  # a rank that gives up says so before it closes its connections
                return not held
            self._waits.give_up(f"its part in shared memory failed: {type(error).__name__}: {error}")
        return not held and not self._waiting

    def _close(self) -> None:
        """Take no part any more. What was under way stays in memory until nobody does."""
        with self._progress.lock:
            self._waiting.clear()
            self._arriving.clear()
            self._crossing.clear()
            self._own[_CLOSED] = 1
            self._progress.fence()
        for link in (*self._links, *self.links_of_callers):
            link.give_up()

    def _free_stage(self, launched: LaunchedStep) -> Tensor | None:
        nbytes = launched.step.local.nbytes
        if nbytes > self._piece_bytes:  # it could not be cut
            return self._memory.allocate(nbytes, torch.uint8)
        if len(self._stages) == _STAGES and self._stages[0][0] > self._finished:
            return None
        is_new = len(self._stages) < _STAGES
        stage = self._memory.allocate(self._piece_bytes, torch.uint8) if is_new else self._stages.popleft()[1]
        self._stages.append((launched.number, stage))
        return stage

    def _publish(self, launched: LaunchedStep) -> bool:
        """Show the others a step, if there is room for it."""
        step, own = launched.step, self._own
        if launched.number - _PLACES > self._finished:  # whose record is still to be read
            return False
        if launched.is_staged:
            stage = self._free_stage(launched)
            if stage is None:
                return False
            step.stage(stage, self._rank, self._size)
        if step.record is None:
            assert step.shared is not None
            position = self._memory.position(step.shared)
            step.record = array("q", (position, step.stride, step.local.numel(), step.code))
        place = _RECORDS + launched.number % _PLACES * _WIDTH
        own[place : place + _WIDTH] = step.record
        self._arriving.append(self._waiting.popleft())
        self._held.append(launched)
        self._progress.fence()
        own[_ARRIVED] = launched.number
        return True

    def _act(self, work: Callable[[LaunchedStep], None], launched: LaunchedStep) -> bool:
        """Do work in the memory of others; False where a rank has given the group up, whose memory is its own again."""
        own, fence = self._own, self._progress.fence
        own[_ACTING] = 1
        fence()  # either it sees that, or this rank sees that it has closed
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
        records: list[list[int]] = []
        for page in self._controls:
            records.append(page[place : place + _WIDTH].tolist())
        if records != step.records:
            if any(one[2:] != records[0][2:] for one in records):
                launched.error = self._mismatch(records)
                if self._links:  # of which the other nodes know nothing
                    raise CommunicationError(launched.error)
                return
            regions = [Region(space, *one[:2]) for space, one in zip(self._spaces, records, strict=True)]
            step.prepare(regions, self._rank)
            step.records = records
        if isinstance(step, TwoLevelStep):
            launched.crossing = step.cross(self._links, self._wires)
            launched.crossed_at = perf_counter_ns() if begin else 0
        else:
            step.act(self._scratch)
        if begin:
            StepParts.end("node", launched.number, begin, step.local.nbytes)

    def _end_crossing(self, launched: LaunchedStep) -> bool:
        """Bring what has arrived from other nodes to the ranks of this one; False if it has not arrived."""
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
        launched.step.spread(launched.crossing, self._wires)
        StepParts.end("node", launched.number, begin, launched.step.local.nbytes)

    def _finish(self, launched: LaunchedStep) -> None:
        """Bring the result of what is complete on all ranks to where it belongs."""
        if launched.is_staged and not launched.error:
            self._progress.fence()
            launched.step.finish(self._rank, self._size)
        self._finished = launched.number
        if launched.at_end is not None:
            launched.at_end()

    def _mismatch(self, records: list[list[int]]) -> str:
        named = zip(self._layout.local, records, strict=True)
        each = ", ".join(f"rank {rank} {describe_record(*record[2:])}" for rank, record in named)
        return f"{self._waits.place}: the ranks have brought different tensors to one collective: {each}"
