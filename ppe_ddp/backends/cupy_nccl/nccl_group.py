"""A process group of torch.distributed over CuPy's NCCL: backend name ``cupy_nccl``, for CUDA tensors.

Owns how calls get onto NCCL's streams, together or one by one. Tensors on the CPU go to a group over gloo beside it, so
that ``"cupy_nccl"`` does what ``"cpu:gloo,cuda:cupy_nccl"`` does.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from ppe_ddp.backends.cuda_device import CudaDevice
from ppe_ddp.backends.cupy_nccl.comm_stream import CommStream
from ppe_ddp.backends.cupy_nccl.nccl_collectives import NcclCollectives
from ppe_ddp.backends.cupy_nccl.nccl_communicator import Communicators, Members
from ppe_ddp.backends.cupy_nccl.nccl_watchdog import Watchdog
from ppe_ddp.backends.cupy_nccl.nccl_work import NcclOperation, NcclWork
from ppe_ddp.backends.device_routed_group import DeviceRoutedGroup, group_over
from ppe_ddp.backends.group import CollectiveGroup
from ppe_ddp.errors import CommunicationError, UnusableError
from ppe_ddp.nested_tensors import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import timedelta

    from torch import Tensor, device
    from torch.distributed import Work

    from ppe_ddp.backends.cuda_device import Device
    from ppe_ddp.backends.cupy_nccl.nccl_collectives import Call, Steps
    from ppe_ddp.backends.cupy_nccl.nccl_communicator import NcclLibrary

__all__ = ["NcclGroup", "make_group"]

_NAME = "cupy_nccl"
_SUM = ReduceOp(ReduceOp.SUM)


def make_group(
    arguments: Any,
    library: NcclLibrary,
    nccl_device: Device | None = None,
    *,
    kinds: tuple[str, str] = ("cuda", "cpu"),
    kind_of: Callable[[Tensor], str] = lambda tensor: tensor.device.type,
    name: str = _NAME,
) -> DeviceRoutedGroup:
    """Make the group that torch gets: NCCL for CUDA tensors, gloo for those on the CPU.

    Args:
        arguments: torch's ``_DistributedBackendOptions``.
        library: ``cupy.cuda.nccl``.
        nccl_device: What NCCL's tensors are on; None for CUDA.
        kinds: What kinds of devices NCCL's tensors and gloo's are on.
        kind_of: The kind of a tensor.
        name: The backend's.
    """
    rank, size = arguments.group_rank, arguments.group_size
    makers: dict[str, Callable[[], Any]] = {
        kinds[0]: lambda: NcclGroup(rank, size, arguments, library, nccl_device or CudaDevice(), name=name),
        kinds[1]: lambda: group_over("gloo", arguments),
    }
    return DeviceRoutedGroup(rank, size, arguments, name, makers=makers, kind_of=kind_of)


@dataclass(frozen=True)
class _Part:
    """One collective or message of an operation, prepared on its stream."""

    comm_stream: CommStream
    steps: Steps
    calls: list[Call]


class NcclGroup(CollectiveGroup):
    """A group over NCCL communicators, one for each device that its tensors are on.

    Calls return when NCCL has taken them; they happen on a stream that waits for the caller's current stream, and
    ``Work.wait()`` lets the caller's stream wait for them. All ranks make the same collectives in the same order, with
    the same sizes and dtypes. Where they differ, NCCL waits, until the group's timeout, or computes wrong numbers.

    A message between two ranks is on a communicator and a stream of those two, one for each direction, so that
    messages and collectives do not wait for one another. The first between two ranks leaves at its ``wait()``, or at
    the next collective, since both must be there to connect; later ones leave at once. Tags are not looked at.

    Args:
        rank: This rank in the group.
        size: How many ranks it has.
        arguments: torch's ``_DistributedBackendOptions``.
        library: ``cupy.cuda.nccl``.
        nccl_device: What the tensors are on.
        name: The backend's.

    Raises from any collective:
        CommunicationError: NCCL reports an error, a rank did not come, or an earlier call did not end in time.
        TypeError: NCCL has no such reduction for the dtype, or the tensors are sparse.
        ValueError: The sizes of this rank's own arguments do not fit together.
        UnusableError: The group was destroyed, or a CUDA graph is being captured.
    """

    def __init__(
        self, rank: int, size: int, arguments: Any, library: NcclLibrary, nccl_device: Device, *, name: str = _NAME
    ) -> None:
        super().__init__(rank, size, arguments, name, ("cuda",))
        seconds = self._timeout.total_seconds()
        self._place = f"rank {rank} of {size}, group {self._group_name!r}"
        self._device = nccl_device
        self._over: NcclCollectives = NcclCollectives(rank, size, library.get_version())
        self._communicators = Communicators(library, arguments.store, rank, self._place, seconds)
        self._everyone = Members("collectives", tuple(range(size)))
        self._comm_streams: dict[tuple[int, Members], CommStream] = {}
        self._coalesced: tuple[NcclOperation, list[_Part]] | None = None
        self._posted: list[tuple[NcclOperation, list[_Part]]] = []
        self._lock = threading.RLock()  # buckets may be sent from a thread, and waited for in another
        self._watchdog = Watchdog(self._communicators, self._place, seconds, self._lock)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:  # type: ignore[override]
        """Wait until every rank is here and this one's current stream has come so far; the host waits."""
        ids = getattr(opts, "device_ids", None)
        index = ids[0] if ids else self._device.current()
        with self._device.make_current(index):
            sign = torch.zeros(1, dtype=torch.int32, device=self._device.torch_device(index))
        return self._start("barrier", [(self._over.all_reduce, sign, _SUM)], None, blocks=True)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        """Start to send one tensor; complete when the tensor may be changed again."""
        return self._message(f"send to rank {peer}", _only(tensors), (self.rank(), peer))

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        """Start to receive one tensor."""
        return self._message(f"receive from rank {peer}", _only(tensors), (peer, self.rank()))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Refused: a receiver over NCCL has to know its sender."""
        raise ValueError(f"{self._place}: NCCL cannot receive from any rank; name the sender: recv(tensor, src)")

    def shutdown(self) -> None:
        """Wait for what is on its way, and give the communicators back to NCCL; every rank of the group calls it."""
        with self._lock:
            self._watchdog.drain()
            self._watchdog.close()
            self._communicators.end(orderly=True)

    def abort(self) -> None:
        """Close the group without talking to the other ranks; what is on its way is broken off."""
        self._watchdog.close()
        self._communicators.end(orderly=False)

    def _start_coalescing(self, _device: device) -> None:
        operation = NcclOperation(f"{self._place}: coalesced calls", self._watchdog.check_failed)
        with self._lock:
            self._coalesced = (operation, [])

    def _end_coalescing(self, device: device) -> Work:
        with self._lock:
            if self._coalesced is None:
                raise UnusableError(f"{self._place}: the end of coalesced calls that were never begun")
            (operation, parts), self._coalesced = self._coalesced, None
            self._launch([(operation, parts)])
        index = device.index if device.index is not None else self._device.current()
        return NcclWork(operation, self._device, index, None)

    def _run(self, what: str, calls: Sequence[tuple[Any, ...]], result: Any) -> Work:
        return self._start(what, calls, result)

    def _start(self, what: str, calls: Sequence[tuple[Any, ...]], result: Any, *, blocks: bool = False) -> Work:
        with self._lock:
            self._check(what)
            self._launch_posted()
            tensors = list(tensors_in([list(arguments) for _, *arguments in calls]))
            comm_stream = self._comm_stream(self._index_of(what, tensors), self._everyone)
            comm_stream.wait_for_caller(tensors)
            operation = NcclOperation(f"{self._place}: {what}", self._watchdog.check_failed)
            parts = [self._prepare(comm_stream, collective(*arguments)) for collective, *arguments in calls]
            if self._coalesced is None:
                self._launch([(operation, parts)])
            else:
                operation = self._coalesced[0]
                self._coalesced[1].extend(parts)
        return NcclWork(operation, self._device, comm_stream.index, result, blocks=blocks)

    def _message(self, what: str, tensor: Tensor, way: tuple[int, int]) -> Work:
        sender, receiver = way
        if sender == receiver:
            raise ValueError(f"{self._place}: {what}, which is itself; copy the tensor")
        with self._lock:
            self._check(what)
            comm_stream = self._comm_stream(self._index_of(what, [tensor]), Members("messages", way))
            comm_stream.wait_for_caller([tensor])
            is_mine = sender == self.rank()
            steps = self._over.send(tensor, 1) if is_mine else self._over.receive(tensor, 0)
            part = self._prepare(comm_stream, steps)
            operation = NcclOperation(f"{self._place}: {what}", self._watchdog.check_failed)
            if self._coalesced is not None:
                operation = self._coalesced[0]
                self._coalesced[1].append(part)
            elif self._communicators.has(comm_stream.index, comm_stream.members):
                self._launch([(operation, [part])])
            else:
                # Connecting waits for the other rank, which may have to come by way of a third that waits for this one.
                operation.launch = self._launch_posted
                self._posted.append((operation, [part]))
        return NcclWork(operation, self._device, comm_stream.index, [tensor], source=-1 if is_mine else sender)

    def _check(self, what: str) -> None:
        self._watchdog.check()
        if self._device.is_capturing():
            raise UnusableError(
                f"{self._place}: {what} while a CUDA graph is being captured, which this backend cannot be part of; "
                "take the backend nccl, or leave communication out of the graph"
            )

    def _index_of(self, what: str, tensors: Sequence[Tensor]) -> int:
        indices = {max(0, tensor.get_device()) for tensor in tensors}
        if len(indices) != 1:
            raise ValueError(f"{self._place}: {what} of tensors on {len(indices)} devices; they have to be on one")
        return indices.pop()

    def _comm_stream(self, index: int, members: Members) -> CommStream:
        comm_stream = self._comm_streams.get((index, members))
        if comm_stream is None:
            comm_stream = self._comm_streams[index, members] = CommStream(self._device, index, members)
        return comm_stream

    def _prepare(self, comm_stream: CommStream, steps: Steps) -> _Part:
        with self._device.use_stream(comm_stream.stream):
            return _Part(comm_stream, steps, next(steps))

    def _launch_posted(self) -> None:
        with self._lock:
            posted, self._posted = self._posted, []
            if posted:
                self._launch(posted)

    def _launch(self, operations: Sequence[tuple[NcclOperation, list[_Part]]]) -> None:
        """Give all calls of some operations to NCCL, as one group where they are several."""
        parts = [part for _, parts in operations for part in parts]
        with self._communicators.translated_errors(operations[0][0].what.rpartition(": ")[2]):
            self._connect(part.comm_stream for part in parts)
        for operation, _ in operations:
            self._watchdog.watch(operation)
        try:
            self._call(operations[0][0].what, [(part.comm_stream, call) for part in parts for call in part.calls])
        except CommunicationError:
            for operation, _ in operations:
                self._watchdog.forget(operation)
            # What the watchdog has broken off fails in NCCL's words, which tell less.
            self._watchdog.check_failed()
            raise
        for operation, own in operations:
            for part in own:
                with self._device.use_stream(part.comm_stream.stream):
                    next(part.steps, None)
            comm_streams = dict.fromkeys(part.comm_stream for part in own)
            operation.events = [(comm_stream, comm_stream.stream.record_event()) for comm_stream in comm_streams]
            operation.launched = True

    def _call(self, what: str, calls: Sequence[tuple[CommStream, Call]]) -> None:
        together = self._communicators.grouped() if len(calls) > 1 else contextlib.nullcontext()
        with self._communicators.translated_errors(what.rpartition(": ")[2]), together:
            for comm_stream, call in calls:
                with self._device.make_current(comm_stream.index):
                    communicator = self._communicators.of(comm_stream.index, comm_stream.members)
                    call(communicator, comm_stream.stream.cuda_stream)

    def _connect(self, comm_streams: Iterable[CommStream]) -> None:
        """Make the communicators that are missing; in one order on all ranks, or two would wait for each other."""
        for index, members in sorted(
            {(comm_stream.index, comm_stream.members) for comm_stream in comm_streams}, key=_sort_key
        ):
            with self._device.make_current(index):
                # Those two ranks may next meet with a message the other way, in the other order.
                for way in sorted({members, members.reversed}) if members.purpose == "messages" else [members]:
                    self._communicators.of(index, way)


def _sort_key(entry: tuple[int, Members]) -> tuple[str, list[int], int]:
    index, members = entry
    return members.purpose, sorted(members.ranks), index


def _only(tensors: list[Tensor]) -> Tensor:
    if len(tensors) != 1:
        raise ValueError(f"a message is one tensor, not {len(tensors)}")
    return tensors[0]
