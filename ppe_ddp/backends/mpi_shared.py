"""All-reduce through memory that the ranks of a node share: no message, no copy, and no rank waits for the slower ones.

    rank 0 and 1 write "bucket s is at position x"                arrived = s
    when all have: rank r sums its slice over all ranks' memory,
    and writes the sum into all of them                           done = s
    when all have: the bucket is complete

A step is taken whenever this process comes by, in any call of the backend; nothing happens in between. So a rank that
has launched its bucket goes on with its backward, and meets the others at the end.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI
from torch.distributed import ReduceOp

from ppe_ddp.backends.mpi_memory import shared_memory
from ppe_ddp.backends.mpi_progress import outstanding
from ppe_ddp.backends.python_work import PythonWork
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    import mmap
    from datetime import timedelta

    from torch import Tensor

    from ppe_ddp.backends.mpi_job import Call
    from ppe_ddp.backends.mpi_memory import Address, SharedMemory

_CODES = {
    dtype: code
    for code, dtype in enumerate(
        (
            torch.float32,
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.uint8,
        )
    )
}
_NAMES = {code: str(dtype).removeprefix("torch.") for dtype, code in _CODES.items()}
_HALVES = (torch.float16, torch.bfloat16)
_Kind: Any = ReduceOp.RedOpType
_KINDS = (_Kind.SUM, _Kind.AVG, _Kind.MAX)

# The layout of a control page, in int64; what different ranks write lies in different cache lines.
_ARRIVED, _DONE, _RECORDS, _PLACES, _WIDTH = 0, 8, 16, 64, 4
_CONTROL_BYTES = 8 * (_RECORDS + _PLACES * _WIDTH)
_STAGES = 2  # pieces of a tensor from elsewhere that are under way at a time
_CHUNK_BYTES = 1 << 20  # stays in the cache between the sum and its way back
_LINE_BYTES = 64


@dataclass
class _Step:
    """One piece under way.

    Attributes:
        number: Counted on each group.
        local: Where the result belongs.
        slab: The shared memory that stands for it: itself, or where it was copied to.
        kind: SUM, AVG or MAX.
        complaint: What is wrong with it.
    """

    number: int
    local: Tensor
    slab: Tensor
    kind: Any
    complaint: str = ""


class SharedReduce:
    """All-reduces of one group of ranks on one node.

    Args:
        rank: This process in the group.
        maps: The reservations of all ranks.
        controls: The control pages of all ranks.
        memory: The reservation of this process.
        call: What the watchdog looks at.
        piece_bytes: Larger tensors go in pieces; the same on every rank.
    """

    def __init__(
        self,
        rank: int,
        maps: list[mmap.mmap],
        controls: list[memoryview],
        memory: SharedMemory,
        call: Call,
        piece_bytes: int,
    ) -> None:
        self._rank = rank
        self._size = len(maps)
        self._maps = maps
        self._controls = controls
        self._own = controls[rank]
        self._memory = memory
        self._call = call
        self._piece_bytes = piece_bytes
        self._outstanding = outstanding(os.getpid())
        self._launched = 0
        self._unsummed: deque[_Step] = deque()
        self._staging: list[Tensor] = []
        self._scratch = torch.empty(0)

    @classmethod
    def connect(cls, comm: MPI.Intracomm, call: Call, piece_bytes: int) -> SharedReduce | None:
        """Make it for the ranks of ``comm``, which must call this together; None on all where one cannot."""
        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        fits = node.Get_size() == comm.Get_size()
        node.Free()
        memory = shared_memory() if fits else None
        offer = None if memory is None else (memory.address, memory.reserve(_CONTROL_BYTES))
        offers: list[tuple[Address, int] | None] = comm.allgather(offer)
        maps: list[mmap.mmap] = []
        try:
            for other in offers:
                if memory is not None and other is not None:
                    maps.append(memory.attach(other[0]))
        except (OSError, ValueError):
            pass
        if not comm.allreduce(len(maps) == comm.Get_size(), MPI.LAND):
            return None
        assert memory is not None
        positions = [other[1] for other in offers if other is not None]
        controls = [
            memoryview(space)[start : start + _CONTROL_BYTES].cast("q")
            for space, start in zip(maps, positions, strict=True)
        ]
        return cls(comm.Get_rank(), maps, controls, memory, call, piece_bytes)

    @staticmethod
    def serves(dtype: torch.dtype, kind: Any) -> bool:
        """Whether sums of this kind and dtype go this way; complex numbers come as real ones."""
        return dtype in _CODES and kind in _KINDS

    def holds(self, tensor: Tensor) -> bool:
        """Whether the memory of a contiguous tensor is shared already, so that nothing has to be copied."""
        return self._memory.position(tensor) >= 0

    def start(self, flat: Tensor, kind: Any, result: Any) -> SharedWork:
        """Begin the sum over the ranks of ``flat``, which this process holds in shared memory, in place.

        Every rank must call ``start`` or ``run`` with the same size and dtype.
        """
        steps = [self._launch(piece, piece, kind) for piece in self._pieces(flat)]
        return SharedWork(self, steps, result)

    def run(self, flat: Tensor, kind: Any) -> None:
        """Sum ``flat``, 1-D and anywhere in the host's memory, over the ranks in place."""
        is_shared = self.holds(flat)
        under_way: deque[_Step] = deque()
        for index, piece in enumerate(self._pieces(flat)):
            if len(under_way) == _STAGES:
                self.finish(under_way.popleft())
            slab = piece if is_shared else self._stage(index % _STAGES, piece)
            under_way.append(self._launch(piece, slab, kind))
        while under_way:
            self.finish(under_way.popleft())

    def finish(self, step: _Step) -> None:
        """Wait for a step, and see that its result is where it belongs.

        Raises:
            CommunicationError: The ranks have brought different things.
        """
        self._outstanding.wait_until(lambda: min(page[_DONE] for page in self._controls) >= step.number)
        if step.complaint:
            raise CommunicationError(step.complaint)
        if step.slab is not step.local:
            self._outstanding.fence()
            for part in self._parts_of_others(step.local):
                step.local[part].copy_(step.slab[part])

    def has_ended(self, step: _Step) -> bool:
        """Whether a step is complete on all ranks; does what can be done now."""
        self._outstanding.progress()
        return min(page[_DONE] for page in self._controls) >= step.number

    def wait(self, steps: list[_Step]) -> None:
        """Finish ``steps``, under the eyes of the watchdog."""
        with self._call.watched("all_reduce"):
            for step in steps:
                self.finish(step)

    def _publish(self, step: _Step) -> None:
        record = _RECORDS + step.number % _PLACES * _WIDTH
        own = self._own
        own[record] = self._memory.position(step.slab)
        own[record + 1] = step.local.numel()
        own[record + 2] = _CODES[step.local.dtype] + len(_CODES) * _KINDS.index(step.kind)
        self._unsummed.append(step)
        self._outstanding.fence()
        own[_ARRIVED] = step.number

    def advance(self) -> bool:
        """Sum what has arrived from all; whether nothing is left to do or to wait for."""
        unsummed = self._unsummed
        while unsummed and min(page[_ARRIVED] for page in self._controls) >= unsummed[0].number:
            self._outstanding.fence()
            self._sum(unsummed[0])
            self._outstanding.fence()
            self._own[_DONE] = unsummed.popleft().number
        return not unsummed and min(page[_DONE] for page in self._controls) >= self._launched

    def _launch(self, local: Tensor, slab: Tensor, kind: Any) -> _Step:
        if slab is not local:
            for part in self._parts_of_others(local):
                slab[part].copy_(local[part])
        number = self._launched + 1
        if min(page[_DONE] for page in self._controls) < number - _PLACES:  # its record is still to be read
            self._outstanding.wait_until(lambda: min(page[_DONE] for page in self._controls) >= number - _PLACES)
        self._launched = number
        step = _Step(number, local, slab, kind)
        self._publish(step)
        self._outstanding.add(self)
        self._outstanding.progress()
        return step

    def _pieces(self, flat: Tensor) -> tuple[Tensor, ...]:
        pieces: tuple[Tensor, ...] = flat.split(max(1, self._piece_bytes // flat.itemsize))
        return pieces

    def _stage(self, index: int, piece: Tensor) -> Tensor:
        while len(self._staging) <= index:
            self._staging.append(self._memory.allocate(self._piece_bytes, torch.uint8))
        return self._staging[index][: piece.nbytes].view(piece.dtype)

    def _part(self, flat: Tensor, rank: int) -> slice:
        """What one rank sums: whole cache lines."""
        line = _LINE_BYTES // flat.itemsize
        lines = -(-flat.numel() // line)
        low, high = lines * rank // self._size, lines * (rank + 1) // self._size
        return slice(low * line, min(high * line, flat.numel()))

    def _parts_of_others(self, flat: Tensor) -> list[slice]:
        own = self._part(flat, self._rank)
        return [part for part in (slice(0, own.start), slice(own.stop, flat.numel())) if part.start < part.stop]

    def _sum(self, step: _Step) -> None:
        record = _RECORDS + step.number % _PLACES * _WIDTH
        brought = [tuple(page[record + 1 : record + 3]) for page in self._controls]
        if len(set(brought)) > 1:
            step.complaint = self._complaint(brought)
            return
        part = self._part(step.local, self._rank)
        count = part.stop - part.start
        if count <= 0:
            return
        dtype = step.local.dtype
        offset = part.start * dtype.itemsize
        others = [
            torch.frombuffer(space, dtype=dtype, count=count, offset=page[record] + offset)
            for rank, (space, page) in enumerate(zip(self._maps, self._controls, strict=True))
            if rank != self._rank
        ]
        own = step.local[part]
        chunk = max(1, _CHUNK_BYTES // dtype.itemsize)
        with torch.no_grad():
            for low in range(0, count, chunk):
                self._sum_chunk(own[low : low + chunk], [other[low : low + chunk] for other in others], step.kind)

    def _sum_chunk(self, own: Tensor, others: list[Tensor], kind: Any) -> None:
        """Sum into ``own`` and all ``others``; halves in float32, rounded once."""
        total = own
        combine = torch.maximum if kind == _Kind.MAX else torch.add
        divides = kind == _Kind.AVG
        if own.dtype in _HALVES and (divides or len(others) > 1):
            if self._scratch.numel() < own.numel():
                self._scratch = torch.empty(own.numel())
            total = self._scratch[: own.numel()].copy_(own)
        for other in others:
            combine(total, other, out=total)
        if divides:
            total.div_(self._size, rounding_mode=None if total.is_floating_point() else "trunc")
        if total is not own:
            own.copy_(total)
        for other in others:
            other.copy_(own)

    def _complaint(self, brought: list[tuple[int, ...]]) -> str:
        each = []
        for rank, (numel, code) in enumerate(brought):
            kind = _KINDS[code // len(_CODES)].name
            each.append(f"rank {rank} {numel} x {_NAMES[code % len(_CODES)]} ({kind})")
        return f"{self._call.place}: the ranks have brought different tensors to one all_reduce: {', '.join(each)}"


class SharedWork(PythonWork):
    """An all-reduce in shared memory, under way.

    It moves on in every call of the backend, on any group. Its tensor must be left alone until ``wait()`` returns.
    """

    def __init__(self, group: SharedReduce, steps: list[_Step], result: Any) -> None:
        super().__init__(result)
        self._group = group
        self._steps = steps

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the result is in place, no longer than the group's timeout, which ends the job.

        Raises:
            CommunicationError: The ranks have brought different sizes or dtypes; the same error on all.
        """
        steps, self._steps = self._steps, []
        self._group.wait(steps)
        return True

    def is_completed(self) -> bool:
        """Whether the result is in place on all ranks."""
        return not self._steps or self._group.has_ended(self._steps[-1])

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What ``wait()`` will raise."""
        complaints = [step.complaint for step in self._steps if step.complaint]
        return CommunicationError(complaints[0]) if complaints else None

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
