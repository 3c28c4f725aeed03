"""The wire over one MPI communicator: MPI's non-blocking calls, and the release of the communicator.

MPI can neither cancel a collective that was begun, nor free a communicator in which one is in flight. So ranks complete
a group that was given up:

    rank 0 has begun   all-reduce 7    all-reduce 8          8 is in flight when the group is given up
    rank 1 has begun   all-reduce 7                          begins 8 as well, with arbitrary numbers
    both               wait for all calls in flight, and free the communicator

If that does not succeed, the communicator is kept and never used again. MPI has about two thousand of them.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import ReduceOp

from ppe_ddp.backends.wire import MessageInFlight
from ppe_ddp.waiting import InFlight, is_done, progress_engine

Buffer = tuple[MPI.buffer, int, MPI.Datatype]

_DATATYPES = {
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
_Kind: Any = ReduceOp.RedOpType
_OPS = {
    _Kind.SUM: MPI.SUM,
    _Kind.PRODUCT: MPI.PROD,
    _Kind.MIN: MPI.MIN,
    _Kind.MAX: MPI.MAX,
    _Kind.BAND: MPI.BAND,
    _Kind.BOR: MPI.BOR,
    _Kind.BXOR: MPI.BXOR,
}
_EXTREMES: dict[Any, Callable[..., object]] = {_Kind.MIN: torch.amin, _Kind.MAX: torch.amax}
_REMEMBERED = 64  # last calls; ranks differ by a few, as only roots and leaves end before all others have come
_RELEASE_SECONDS = 2.0  # for all ranks to complete the missing calls

Call = list[Any]
"""The name of a collective and its arguments as JSON values; of tensors the number and dtype of their elements."""


class MpiCall(InFlight):
    """A collective of MPI in flight; ``at_arrival`` is called once, when it is done."""

    def __init__(self, request: MPI.Request, memory: tuple[Tensor, ...]) -> None:
        self.request = request
        self.memory = memory
        self.at_arrival: Callable[[], object] | None = None

    def done(self) -> bool:
        if not self.request.Test():
            return False
        at_arrival, self.at_arrival = self.at_arrival, None
        if at_arrival is not None:
            at_arrival()
        self.memory = ()
        return True


class MpiMessage(MessageInFlight):
    """A message over MPI; ``request`` makes its MPI request, or returns None if it cannot be started yet.

    ``start_in_turn`` starts this message, and others, as far as their order allows.
    """

    def __init__(
        self, request: Callable[[], MPI.Request | None], memory: Tensor, start_in_turn: Callable[[], object]
    ) -> None:
        self.source = -1
        self.memory: Tensor | None = memory
        self._make: Callable[[], MPI.Request | None] | None = request  # holds the memory, too
        self._start_in_turn = start_in_turn
        self._request: MPI.Request | None = None
        self._is_done = False
        self._error: MPI.Exception | None = None
        self._lock = threading.Lock()  # MPI frees the request in the test that finds it complete

    @property
    def is_started(self) -> bool:
        """Whether MPI may read or write the memory now."""
        return self._request is not None and not self._is_done

    def start(self) -> bool:
        """Start it if possible; returns whether it is started."""
        if self._request is None and self._make is not None:
            self._request = self._make()
        return self._request is not None

    def done(self) -> bool:
        if self._request is None:
            self._start_in_turn()
        with self._lock:
            if not self._is_done and self._request is not None:
                status = MPI.Status()
                try:
                    self._is_done = self._request.Test(status)
                except MPI.Exception as error:
                    self._error, self._is_done = error, True
                if self._is_done:
                    self.source = status.Get_source() if self._error is None else -1
                    self.memory = self._make = None
        if self._error is not None:
            raise self._error
        return self._is_done


class MpiWire:
    """See :class:`~ppe_ddp.backends.wire.Wire`."""

    dtypes = frozenset(_DATATYPES)

    def __init__(self, comm: MPI.Intracomm, piece_bytes: int = 0) -> None:
        self.comm = comm  # of the ranks, in order
        self.size = comm.Get_size()
        self.piece_bytes = piece_bytes
        self.count = 0  # number of collectives begun
        self.left: list[MpiCall] = []  # calls in flight when the wire was given up
        self.has_messages = False  # whether any message was sent or received, as one may still be pending
        self._rank = comm.Get_rank()
        self._last: deque[tuple[Any, ...]] = deque(maxlen=_REMEMBERED)
        self._under_way: list[MpiCall] = []
        self._messages: deque[MpiMessage] = deque()
        self._unstarted: list[tuple[int, MpiMessage]] = []  # receives with their tags, in the order of the calls
        self._lock = threading.RLock()  # several threads may send, receive and wait for messages
        limit = comm.Get_attr(MPI.TAG_UB)
        self.largest_tag = limit if isinstance(limit, int) and limit > 0 else 32767  # the MPI standard's minimum

    def all_reduce(self, flat: Tensor, kind: Any) -> MpiCall:
        if flat.is_floating_point() and kind in _EXTREMES:  # with NaN each rank would get another result from MPI
            rows = flat.new_empty((self.size, flat.numel()))
            call = self.all_gather(rows, flat)
            call.at_arrival = partial(_EXTREMES[kind], rows, 0, out=flat)
            return call
        return self._all_reduce(flat, kind.name)

    def broadcast(self, flat: Tensor, root: int) -> MpiCall:
        return self._begun(self.comm.Ibcast(_byte_buffer(flat), root), (flat,), "broadcast", flat, root)

    def all_gather(self, rows: Tensor, flat: Tensor) -> MpiCall:
        block = (_byte_buffer(rows)[0], flat.nbytes, MPI.BYTE)  # mpi4py takes the count of one rank's part
        request = self.comm.Iallgather(_byte_buffer(flat), block)
        return self._begun(request, (rows, flat), "all_gather", rows, flat)

    def all_to_all(self, output: Tensor, flat: Tensor, receiving: Sequence[int], sending: Sequence[int]) -> MpiCall:
        size = flat.itemsize
        bytes_in, bytes_out = [count * size for count in receiving], [count * size for count in sending]
        there, here = [_byte_buffer(flat)[0], bytes_out, MPI.BYTE], [_byte_buffer(output)[0], bytes_in, MPI.BYTE]
        return self._begun(self.comm.Ialltoallv(there, here), (output, flat), "all_to_all", bytes_in, bytes_out)

    def barrier(self) -> MpiCall:
        return self._begun(self.comm.Ibarrier(), (), "barrier")

    def send(self, flat: Tensor, peer: int, tag: int) -> MpiMessage:
        message = MpiMessage(lambda: self.comm.Isend(_byte_buffer(flat), peer, tag), flat, bool)
        message.start()
        return self._noted(message)

    def receive(self, flat: Tensor, peer: int | None, tag: int) -> MpiMessage:
        def request() -> MPI.Request | None:
            if peer is not None:
                return self.comm.Irecv(_byte_buffer(flat), peer, tag)
            # MPICH loses a message of another node if a receive from any source was posted before it arrived.
            found = self.comm.Improbe(MPI.ANY_SOURCE, tag)
            return None if found is None else found.Irecv(_byte_buffer(flat))

        message = MpiMessage(request, flat, self._start_receives)
        with self._lock:
            self._unstarted.append((tag, message))
        self._start_receives()
        return self._noted(message)

    def close(self) -> None:
        """Do nothing: all ranks free communicators together, in :func:`release`."""

    def give_up(self) -> None:
        """Keep the memory of calls in flight alive until they are done."""
        progress = progress_engine(os.getpid())
        under_way, self._under_way = self._under_way, []
        for call in under_way:
            progress.keep(call, call.memory)
        with self._lock:
            messages = list(self._messages)
        for message in messages:
            if message.is_started:
                progress.keep(message, message.memory)
        self.left += under_way

    def since(self, count: int) -> list[Call]:
        """The calls after the first ``count``, except those that are not remembered any more."""
        missing = min(self.count - count, len(self._last))
        return [[_written(word) for word in call] for call in list(self._last)[len(self._last) - missing :]]

    def make_up(self, calls: Mapping[int, Call]) -> MpiCall:
        """Begin a collective that this rank has not come to, with arbitrary numbers; ``calls`` is by rank."""
        name, *words = next(iter(calls.values()))
        if name == "all_to_all":
            receiving, sending = (
                [calls[rank][place][self._rank] if rank in calls else 0 for rank in range(self.size)]
                for place in (2, 1)  # this rank receives what another one sends
            )
            return self.all_to_all(_bytes(sum(receiving)), _bytes(sum(sending)), receiving, sending)
        call: MpiCall = getattr(self, "_all_reduce" if name == "all_reduce" else name)(*map(_read, words))
        return call

    def _all_reduce(self, flat: Tensor, kind: str) -> MpiCall:
        memory = _byte_buffer(flat)[0], flat.numel(), _DATATYPES[flat.dtype]
        request = self.comm.Iallreduce(MPI.IN_PLACE, memory, _OPS[getattr(_Kind, kind)])
        return self._begun(request, (flat,), "all_reduce", flat, kind)

    def _begun(self, request: MPI.Request, memory: tuple[Tensor, ...], *call: Any) -> MpiCall:
        self.count += 1
        # Remember sizes and dtypes, not the tensors, which would be kept alive.
        self._last.append(tuple([(word.numel(), word.dtype) if isinstance(word, Tensor) else word for word in call]))
        begun = MpiCall(request, memory)
        self._under_way = [one for one in self._under_way if one.request != MPI.REQUEST_NULL]
        self._under_way.append(begun)
        return begun

    def _start_receives(self) -> None:
        """Start the receives that can be; one that cannot be keeps later ones with its tag from its message."""
        with self._lock:
            waiting: dict[int, list[tuple[int, MpiMessage]]] = {}
            for tag, message in self._unstarted:
                if tag in waiting or not message.start():
                    waiting.setdefault(tag, []).append((tag, message))
            self._unstarted = list(chain.from_iterable(waiting.values()))

    def _noted(self, message: MpiMessage) -> MpiMessage:
        """Keep a message until it is done, as MPI may still read its memory after the caller has dropped it."""
        self.has_messages = True
        with self._lock:
            while self._messages and is_done(self._messages[0]):
                self._messages.popleft()
            self._messages.append(message)
        return message


def release(wires: Mapping[str, tuple[MpiWire, Sequence[int]]], exchange: Callable[[str, Any], list[Any]]) -> None:
    """Free the communicators of a group; all its ranks call this together, when all have given the group up.

    ``wires`` has the wires by name, which is the same on all ranks of the wire, each with its ranks in the group. If a
    rank lacks a wire, it is not freed. ``exchange`` is that of :meth:`PythonGroup.release`.
    """
    with progress_engine(os.getpid()).lock:
        own = {name: wire.count for name, (wire, _) in wires.items()}
    counts: list[dict[str, int]] = exchange("begun", own)
    least = {name: min(one[name] for one in counts if name in one) for one in counts for name in one}
    missing: list[dict[str, list[Call]]] = [{} for _ in counts]
    if any(count > least[name] for one in counts for name, count in one.items()):
        missing = exchange("missing", {name: wire.since(least[name]) for name, (wire, _) in wires.items()})
    for name, (wire, ranks) in wires.items():
        begun = [missing[rank].get(name, []) for rank in ranks]
        wanted = [counts[rank].get(name, -1) - least[name] for rank in ranks]
        if [len(calls) for calls in begun] == wanted:
            _end(wire, begun)


def _end(wire: MpiWire, begun: Sequence[list[Call]]) -> None:
    """Complete the calls in flight in a communicator, and free it."""
    progress = progress_engine(os.getpid())
    steps = [
        {rank: calls[step] for rank, calls in enumerate(begun) if step < len(calls)}
        for step in range(max(map(len, begun)))
    ]
    if not all(_fit(list(calls.values())) for calls in steps):
        return
    with progress.lock:
        # The completed calls write arbitrary numbers into memory that the user may still use, so restore it.
        kept = [(tensor, tensor.clone()) for call in wire.left for tensor in call.memory]
        made_up = [wire.make_up(calls) for calls in steps[len(begun[wire.comm.Get_rank()]) :]]
    under_way = [*wire.left, *made_up]
    try:
        # The list asks every one, so that each advances.
        if progress.wait_until(lambda: all([call.done() for call in under_way]), seconds=_RELEASE_SECONDS):
            wire.comm.Free()
    except MPI.Exception:  # lengths differ, for instance, as a rank had called another collective
        pass
    finally:
        for call in made_up:
            progress.keep(call, call.memory)
        with torch.no_grad():
            for tensor, content in kept:
                tensor.copy_(content)


def _fit(calls: Sequence[Call]) -> bool:
    """Whether these calls, of one rank each, belong to one collective that other ranks can complete."""
    name = calls[0][0]
    return all(call[0] == name if name == "all_to_all" else call == calls[0] for call in calls)


def sub_communicator(comm: MPI.Intracomm, ranks: Sequence[int], tag: int) -> MPI.Intracomm:
    """Make a communicator of ``ranks`` of ``comm``, in their order; only these ranks must call this, together."""
    everyone = comm.Get_group()
    members = everyone.Incl(list(ranks))
    try:
        return comm.Create_group(members, tag)
    finally:  # MPI keeps groups until they are freed
        members.Free()
        everyone.Free()


def _byte_buffer(tensor: Tensor) -> Buffer:
    """The memory of a contiguous tensor as plain bytes; the tensor must outlive the MPI call."""
    if tensor.is_cuda:  # a GPU-aware MPI does not know streams, so wait until the tensor is written
        torch.cuda.current_stream(tensor.device).synchronize()
    nbytes = tensor.nbytes
    return MPI.buffer.fromaddress(tensor.data_ptr(), nbytes), nbytes, MPI.BYTE


def _written(word: Any) -> Any:
    if isinstance(word, tuple):
        numel, dtype = word
        return {"numel": numel, "dtype": str(dtype).removeprefix("torch.")}
    return word


def _read(word: Any) -> Any:
    if isinstance(word, dict):
        return torch.zeros(word["numel"], dtype=getattr(torch, word["dtype"]), device="cpu")
    return word


def _bytes(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8, device="cpu")
