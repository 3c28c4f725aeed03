"""Queue of one group's steps in shared memory: each rank publishes, and acts when all have published.

    rank 0 and 1 publish "my tensor for step s is at position x"      arrived = s
    when all have: each does its part of the work in all memory       done = s
    when all have: the step is complete

A step is advanced in any call of the backend that this process makes; nothing happens in between. So a rank that
has launched its bucket goes on with its backward, and waits for the others at the end.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from ppe_ddp.backends.shared_memory.shared_steps import Region, Scratch, describe_record
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterable

    from torch import Tensor

    from ppe_ddp.backends.shared_memory.shared_link import SharedLink
    from ppe_ddp.backends.shared_memory.shared_reservation import SharedMemory
    from ppe_ddp.backends.shared_memory.shared_steps import Step

# The layout of a control page, in int64; what different ranks write lies in different cache lines.
_ARRIVED, _DONE, _CLOSED, _RECORDS, _PLACES, _WIDTH = 0, 8, 16, 24, 64, 4
CONTROL_BYTES = 8 * (_RECORDS + _PLACES * _WIDTH)
_STAGES = 2  # pieces of a tensor from elsewhere that are under way at a time


class LaunchedStep:
    """One run of a step.

    Args:
        step: The step.
        number: Counted on each group, from 1.
        tensors: What must not be freed before all ranks have done their part.

    Attributes:
        error: What is wrong with it; empty while nothing is known.
    """

    __slots__ = ("error", "number", "step", "tensors")

    def __init__(self, step: Step, number: int, tensors: Any) -> None:
        self.step = step
        self.number = number
        self.tensors = tensors
        self.error = ""


class StepQueue:
    """Launches the steps of one group, and does this rank's part of each when all ranks have launched it.

    Args:
        link: The ranks of the group.
        memory: The reservation of this process.
        spaces: The reservations of all ranks.
        controls: The control pages of all ranks, ``CONTROL_BYTES`` each, as int64.
        piece_bytes: No step brings more; the same on every rank.
    """

    def __init__(
        self,
        link: SharedLink,
        memory: SharedMemory,
        spaces: list[mmap.mmap],
        controls: list[memoryview],
        piece_bytes: int,
    ) -> None:
        self._rank, self._size = link.rank, link.size
        self._waits = link.waits
        self._progress = link.progress
        self._memory = memory
        self._spaces = spaces
        self._controls = controls
        self._own = controls[link.rank]
        self._piece_bytes = piece_bytes
        self._launched = 0
        self._complete = 0  # as far as this rank has seen
        self._arriving: deque[LaunchedStep] = deque()
        # Their memory: until all ranks have done their part they write into it, whoever has dropped the Work here.
        self._held: deque[LaunchedStep] = deque()
        self._staging: list[Tensor] = []
        self._staged = [0] * _STAGES  # the last step that each stage was used for
        self._scratch = Scratch()
        self._waits.at_failure.append(self._close)

    def launch(self, step: Step, tensors: Any) -> LaunchedStep:
        """Begin a step, whose memory is shared; ``tensors`` live until all ranks have done their part.

        Every rank must call ``launch`` or ``run`` with steps of the same sizes and dtypes.
        """
        if self._own[_CLOSED]:
            self._waits.check(step.title)  # raises
        number = self._launched + 1
        self._wait_for(number - _PLACES, step.title)  # whose record is still to be read
        self._launched = number
        launched = LaunchedStep(step, number, tensors)
        self._publish(launched)
        self._progress.add(self)
        self._progress.progress()
        return launched

    def run(self, steps: Iterable[Step], tensors: Any) -> None:
        """Do the steps of a collective of tensors that lie anywhere in the host's memory, and wait for them."""
        under_way: deque[LaunchedStep] = deque()
        for index, step in enumerate(steps):
            if len(under_way) == _STAGES:
                self.finish(under_way.popleft())
            if step.shared is None:
                stage = index % _STAGES
                self._wait_for(self._staged[stage], step.title)  # an error may have left it under way
                step.stage(self._stage(stage), self._rank, self._size)
                self._staged[stage] = self._launched + 1
            under_way.append(self.launch(step, tensors))
        while under_way:
            self.finish(under_way.popleft())

    def finish(self, launched: LaunchedStep) -> None:
        """Wait for a step, and see that its result is where it belongs.

        Raises:
            CommunicationError: The ranks have launched different things.
        """
        self._wait_for(launched.number, launched.step.title)
        if launched.error:
            raise CommunicationError(launched.error)
        self._progress.fence()
        launched.step.finish(self._rank, self._size)

    def has_ended(self, launched: LaunchedStep) -> bool:
        """Whether a step is complete on all ranks, or never will be; does what can be done now."""
        self._progress.progress()
        return self._done() >= launched.number or self._waits.is_over()

    def failure_of(self, launched: LaunchedStep) -> str:
        """Why a step has not ended well; empty if it has, or is under way."""
        return launched.error or (self._waits.failure if self._done() < launched.number else "")

    def drain(self) -> None:
        """Wait until every step is complete on all ranks."""
        self._wait_for(self._launched, "destroy_process_group")

    def advance(self) -> bool:
        """Do what all have arrived for; whether nothing is left to do or to wait for."""
        if self._own[_CLOSED]:
            if all(page[_CLOSED] for page in self._controls):
                self._held.clear()
            return not self._held
        arriving = self._arriving
        while arriving and min([page[_ARRIVED] for page in self._controls]) >= arriving[0].number:
            self._progress.fence()
            self._act(arriving[0])
            self._progress.fence()
            self._own[_DONE] = arriving.popleft().number
        done = self._done()
        while self._held and self._held[0].number <= done:
            self._held.popleft()
        return not self._held

    def _done(self) -> int:
        """The last step that is complete on all ranks."""
        self._complete = min([page[_DONE] for page in self._controls])
        return self._complete

    def _wait_for(self, number: int, what: str) -> None:
        """Wait until a step is complete on all ranks."""
        if self._complete < number and self._done() < number:
            self._waits.until(lambda: self._done() >= number, what, lambda: self._absent(number))

    def _absent(self, number: int) -> list[int]:
        """The ranks that have not come to a step; if all have, those that have not done their part."""
        late = [[rank for rank, page in enumerate(self._controls) if page[word] < number] for word in (_ARRIVED, _DONE)]
        return late[0] or late[1]

    def _close(self) -> None:
        """Take no part any more. What was under way stays in memory until nobody does."""
        with self._progress.lock:
            self._arriving.clear()
            self._own[_CLOSED] = 1

    def _publish(self, launched: LaunchedStep) -> None:
        step, own = launched.step, self._own
        assert step.shared is not None
        record = _RECORDS + launched.number % _PLACES * _WIDTH
        own[record] = self._memory.position(step.shared)
        own[record + 1] = step.stride
        own[record + 2] = step.local.numel()
        own[record + 3] = step.code
        self._arriving.append(launched)
        self._held.append(launched)
        self._progress.fence()
        own[_ARRIVED] = launched.number

    def _stage(self, index: int) -> Tensor:
        while len(self._staging) <= index:
            self._staging.append(self._memory.allocate(self._piece_bytes, torch.uint8))
        return self._staging[index]

    def _act(self, launched: LaunchedStep) -> None:
        step, record = launched.step, _RECORDS + launched.number % _PLACES * _WIDTH
        records = [page[record : record + _WIDTH].tolist() for page in self._controls]
        with torch.no_grad():
            if records != step.records:
                if any(one[2:] != records[0][2:] for one in records):
                    launched.error = self._mismatch(records)
                    return
                regions = [Region(space, *one[:2]) for space, one in zip(self._spaces, records, strict=True)]
                step.prepare(regions, self._rank)
                step.records = records
            step.act(self._scratch)

    def _mismatch(self, records: list[list[int]]) -> str:
        each = ", ".join(f"rank {rank} {describe_record(*record[2:])}" for rank, record in enumerate(records))
        return f"{self._waits.place}: the ranks have brought different tensors to one collective: {each}"
