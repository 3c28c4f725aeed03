"""Collectives through memory that the ranks of a node share: no message, and no rank waits for the slower ones.

    rank 0 and 1 write "what I bring to step s is at position x"      arrived = s
    when all have: each does its part of the work in all memory       done = s
    when all have: the step is complete

A step is taken whenever this process comes by, in any call of the backend; nothing happens in between. So a rank that
has launched its bucket goes on with its backward, and meets the others at the end.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI

from ppe_ddp.backends.mpi.progress_engine import progress_engine
from ppe_ddp.backends.process_group.python_work import PythonWork
from ppe_ddp.backends.shared_memory.shared_reservation import OFFER_BYTES, Address, shared_memory
from ppe_ddp.backends.shared_memory.shared_steps import Contribution, Scratch, described
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterable, Sequence
    from datetime import timedelta

    from torch import Tensor

    from ppe_ddp.backends.mpi.mpi_waits import Waits
    from ppe_ddp.backends.shared_memory.shared_reservation import SharedMemory
    from ppe_ddp.backends.shared_memory.shared_steps import Step

# The layout of a control page, in int64; what different ranks write lies in different cache lines.
_ARRIVED, _DONE, _CLOSED, _RECORDS, _PLACES, _WIDTH = 0, 8, 16, 24, 64, 4
_CONTROL_BYTES = 8 * (_RECORDS + _PLACES * _WIDTH)
_STAGES = 2  # pieces of a tensor from elsewhere that are under way at a time


class SharedMemoryGroup:
    """The steps of one group of ranks on one node, taken in the order of their launch.

    Args:
        rank: This process in the group.
        maps: The reservations of all ranks.
        controls: The control pages of all ranks.
        memory: The reservation of this process.
        waits: How to wait.
        piece_bytes: No step brings more; the same on every rank.
    """

    def __init__(
        self,
        rank: int,
        maps: list[mmap.mmap],
        controls: list[memoryview],
        memory: SharedMemory,
        waits: Waits,
        piece_bytes: int,
    ) -> None:
        self.piece_bytes = piece_bytes
        self._rank = rank
        self._size = len(maps)
        self._maps = maps
        self._controls = controls
        self._own = controls[rank]
        self._memory = memory
        self._waits = waits
        self._progress = progress_engine(os.getpid())
        self._launched = 0
        self._arriving: deque[Step] = deque()
        # Their memory: until all ranks have done their part they write into it, whoever has dropped the Work here.
        self._held: deque[Step] = deque()
        self._staging: list[Tensor] = []
        self._staged = [0] * _STAGES  # the last step that each stage was used for
        self._scratch = Scratch()
        waits.at_failure.append(self._close)

    @classmethod
    def connect(cls, comm: MPI.Intracomm, waits: Waits, piece_bytes: int) -> SharedMemoryGroup | None:
        """Make it for the ranks of ``comm``, which must call this together; None on all where one cannot."""
        memory = shared_memory()
        control = -1 if memory is None else memory.reserve(_CONTROL_BYTES)
        own = bytes(OFFER_BYTES) if memory is None else memory.address.packed(control)
        table = bytearray(OFFER_BYTES * comm.Get_size())
        waits.request(comm.Iallgather(own, [table, OFFER_BYTES, MPI.BYTE]))
        contributions = [
            Address.unpacked(table[start : start + OFFER_BYTES]) for start in range(0, len(table), OFFER_BYTES)
        ]
        maps: list[mmap.mmap] = []
        if memory is not None:
            with suppress(OSError, ValueError):
                for address, _ in contributions:
                    maps.append(memory.attach(address))
        reached = bytearray([len(maps) == comm.Get_size()])
        waits.request(comm.Iallreduce(MPI.IN_PLACE, [reached, MPI.BYTE], MPI.BAND))
        if not reached[0]:
            return None
        assert memory is not None
        controls = [
            memoryview(space)[start : start + _CONTROL_BYTES].cast("q")
            for space, (_, start) in zip(maps, contributions, strict=True)
        ]
        return cls(comm.Get_rank(), maps, controls, memory, waits, piece_bytes)

    def holds(self, tensor: Tensor) -> bool:
        """Whether the memory of a contiguous tensor is shared already, so that nothing has to be copied."""
        return self._memory.position(tensor) >= 0

    def start(self, steps: Iterable[Step], result: Any) -> SharedMemoryWork:
        """Begin a collective whose tensors this process holds in shared memory.

        Every rank must call ``start`` or ``run`` with steps of the same sizes and dtypes.
        """
        launched = [self._launch(step) for step in steps]
        return SharedMemoryWork(self, launched, result)

    def run(self, steps: Iterable[Step]) -> None:
        """Do a collective of tensors that lie anywhere in the host's memory, and wait for it."""
        under_way: deque[Step] = deque()
        for index, step in enumerate(steps):
            if len(under_way) == _STAGES:
                self.finish(under_way.popleft())
            if step.slab is None:
                stage = index % _STAGES
                self._wait_for(self._staged[stage], step.title)  # an error may have left it under way
                step.stage(self._stage(stage), self._rank, self._size)
                self._staged[stage] = self._launched + 1
            under_way.append(self._launch(step))
        while under_way:
            self.finish(under_way.popleft())

    def finish(self, step: Step) -> None:
        """Wait for a step, and see that its result is where it belongs.

        Raises:
            CommunicationError: The ranks have brought different things.
        """
        self._wait_for(step.number, step.title)
        if step.complaint:
            raise CommunicationError(step.complaint)
        self._progress.fence()
        step.finish(self._rank, self._size)

    def has_ended(self, step: Step) -> bool:
        """Whether a step is complete on all ranks, or never will be; does what can be done now."""
        self._progress.progress()
        return self._done() >= step.number or self._waits.is_over()

    def failure_of(self, step: Step) -> str:
        """Why a step has not ended well; empty if it has, or is under way."""
        return step.complaint or (self._waits.failure if self._done() < step.number else "")

    def wait(self, steps: Sequence[Step]) -> None:
        """Finish ``steps``."""
        for step in steps:
            self.finish(step)

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
        while arriving and min(page[_ARRIVED] for page in self._controls) >= arriving[0].number:
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
        return min(page[_DONE] for page in self._controls)

    def _wait_for(self, number: int, what: str) -> None:
        """Wait until a step is complete on all ranks."""
        if self._done() < number:
            self._waits.until(lambda: self._done() >= number, what, lambda: self._absent(number))

    def _absent(self, number: int) -> list[int]:
        """Who has not come to a step; if all have, who has not done its part."""
        late = [[rank for rank, page in enumerate(self._controls) if page[word] < number] for word in (_ARRIVED, _DONE)]
        return late[0] or late[1]

    def _close(self) -> None:
        """Take no part any more. What was under way stays in memory until nobody does."""
        with self._progress.lock:
            self._arriving.clear()
            self._own[_CLOSED] = 1

    def _launch(self, step: Step) -> Step:
        if self._own[_CLOSED]:
            self._waits.check(step.title)  # raises
        number = self._launched + 1
        self._wait_for(number - _PLACES, step.title)  # whose record is still to be read
        self._launched = step.number = number
        self._publish(step)
        self._progress.add(self)
        self._progress.progress()
        return step

    def _publish(self, step: Step) -> None:
        assert step.slab is not None
        record = _RECORDS + step.number % _PLACES * _WIDTH
        own = self._own
        own[record] = self._memory.position(step.slab)
        own[record + 1] = step.stride
        own[record + 2] = step.brought.numel()
        own[record + 3] = step.code
        self._arriving.append(step)
        self._held.append(step)
        self._progress.fence()
        own[_ARRIVED] = step.number

    def _stage(self, index: int) -> Tensor:
        while len(self._staging) <= index:
            self._staging.append(self._memory.allocate(self.piece_bytes, torch.uint8))
        return self._staging[index]

    def _act(self, step: Step) -> None:
        record = _RECORDS + step.number % _PLACES * _WIDTH
        brought = [tuple(page[record + 2 : record + 4]) for page in self._controls]
        if len(set(brought)) > 1:
            step.complaint = self._complaint(brought)
            return
        contributions = [
            Contribution(space, page[record], page[record + 1])
            for space, page in zip(self._maps, self._controls, strict=True)
        ]
        with torch.no_grad():
            step.act(contributions, self._rank, self._scratch)

    def _complaint(self, brought: list[tuple[int, ...]]) -> str:
        each = ", ".join(f"rank {rank} {described(*one)}" for rank, one in enumerate(brought))
        return f"{self._waits.place}: the ranks have brought different tensors to one collective: {each}"


class SharedMemoryWork(PythonWork):
    """A collective in shared memory, under way.

    It moves on in every call of the backend, on any group. Its tensors must be left alone until ``wait()`` returns.
    """

    def __init__(self, group: SharedMemoryGroup, steps: list[Step], result: Any) -> None:
        super().__init__(result)
        self._group = group
        self._steps = steps

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the result is in place, no longer than the group's timeout.

        Raises:
            CommunicationError: The ranks have brought different sizes or dtypes; the same error on all. Or a rank
                did not come in time, or has given the group up.
        """
        steps, self._steps = self._steps, []
        self._group.wait(steps)
        return True

    def is_completed(self) -> bool:
        """Whether the result is in place on all ranks, or never will be."""
        return not self._steps or self._group.has_ended(self._steps[-1])

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What ``wait()`` will raise."""
        reasons = [reason for reason in map(self._group.failure_of, self._steps) if reason]
        return CommunicationError(reasons[0]) if reasons else None

    def get_future(self) -> torch.futures.Future[Any]:
        """A completed future of ``result()``: waits first, since who waits for a future calls no backend."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        try:
            self.wait()
        except CommunicationError as error:
            future.set_exception(error)
        else:
            future.set_result(self._result)
        return future
