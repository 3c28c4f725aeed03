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

from ppe_ddp.backends.beside import group_over
from ppe_ddp.backends.cuda_device import CudaDevice
from ppe_ddp.backends.cupy_collectives import NcclCollectives
from ppe_ddp.backends.cupy_communicator import Communicators, Members
from ppe_ddp.backends.cupy_streams import Channel
from ppe_ddp.backends.cupy_watchdog import Watchdog
from ppe_ddp.backends.cupy_work import Flight, NcclWork
from ppe_ddp.backends.python_group import CollectiveGroup, tensors_in
from ppe_ddp.backends.routed_group import RoutedGroup
from ppe_ddp.errors import CommunicationError, UnusableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import timedelta

    from torch import Tensor, device
    from torch.distributed import Work

    from ppe_ddp.backends.cuda_device import Device
    from ppe_ddp.backends.cupy_collectives import Call, Steps
    from ppe_ddp.backends.cupy_communicator import NcclLibrary

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
) -> RoutedGroup:
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
    return RoutedGroup(rank, size, arguments, name, makers=makers, kind_of=kind_of)


@dataclass(frozen=True)
class _Part:
    """One collective or message of a flight, prepared on its stream."""

    channel: Channel
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
        self._channels: dict[tuple[int, Members], Channel] = {}
        self._coalesced: tuple[Flight, list[_Part]] | None = None
        self._posted: list[tuple[Flight, list[_Part]]] = []
        self._lock = threading.RLock()  # buckets may be sent from a thread, and waited for in another
        self._watchdog = Watchdog(self._communicators, self._place, seconds, self._lock)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:  # type: ignore[override]
        """Wait until every rank is here and this one's current stream has come so far; the host waits."""
        ids = getattr(opts, "device_ids", None)
        index = ids[0] if ids else self._device.current()
        with self._device.at(index):
            sign = torch.zeros(1, dtype=torch.int32, device=self._device.room(index))
        return self._started("barrier", [(self._over.all_reduce, sign, _SUM)], None, blocks=True)

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
        flight = Flight(f"{self._place}: coalesced calls", self._watchdog.check_failed)
        with self._lock:
            self._coalesced = (flight, [])

    def _end_coalescing(self, device: device) -> Work:
        with self._lock:
            if self._coalesced is None:
                raise UnusableError(f"{self._place}: the end of coalesced calls that were never begun")
            (flight, parts), self._coalesced = self._coalesced, None
            self._launch([(flight, parts)])
        index = device.index if device.index is not None else self._device.current()
        return NcclWork(flight, self._device, index, None)

    def _run(self, what: str, calls: Sequence[tuple[Any, ...]], result: Any) -> Work:
        return self._started(what, calls, result)

    def _started(self, what: str, calls: Sequence[tuple[Any, ...]], result: Any, *, blocks: bool = False) -> Work:
        with self._lock:
            self._check(what)
            self._launch_posted()
            tensors = list(tensors_in([list(arguments) for _, *arguments in calls]))
            channel = self._channel(self._index_of(what, tensors), self._everyone)
            channel.follow(tensors)
            flight = Flight(f"{self._place}: {what}", self._watchdog.check_failed)
            parts = [self._prepared(channel, collective(*arguments)) for collective, *arguments in calls]
            if self._coalesced is None:
                self._launch([(flight, parts)])
            else:
                flight = self._coalesced[0]
                self._coalesced[1].extend(parts)
        return NcclWork(flight, self._device, channel.index, result, blocks=blocks)

    def _message(self, what: str, tensor: Tensor, way: tuple[int, int]) -> Work:
        sender, receiver = way
        if sender == receiver:
            raise ValueError(f"{self._place}: {what}, which is itself; copy the tensor")
        with self._lock:
            self._check(what)
            channel = self._channel(self._index_of(what, [tensor]), Members("messages", way))
            channel.follow([tensor])
            is_mine = sender == self.rank()
            steps = self._over.send(tensor, 1) if is_mine else self._over.receive(tensor, 0)
            part = self._prepared(channel, steps)
            flight = Flight(f"{self._place}: {what}", self._watchdog.check_failed)
            if self._coalesced is not None:
                flight = self._coalesced[0]
                self._coalesced[1].append(part)
            elif self._communicators.has(channel.index, channel.members):
                self._launch([(flight, [part])])
            else:
                # Connecting waits for the other rank, which may have to come by way of a third that waits for this one.
                flight.launch = self._launch_posted
                self._posted.append((flight, [part]))
        return NcclWork(flight, self._device, channel.index, [tensor], source=-1 if is_mine else sender)

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

    def _channel(self, index: int, members: Members) -> Channel:
        channel = self._channels.get((index, members))
        if channel is None:
            channel = self._channels[index, members] = Channel(self._device, index, members)
        return channel

    def _prepared(self, channel: Channel, steps: Steps) -> _Part:
        with self._device.on(channel.stream):
            return _Part(channel, steps, next(steps))

    def _launch_posted(self) -> None:
        with self._lock:
            posted, self._posted = self._posted, []
            if posted:
                self._launch(posted)

    def _launch(self, flights: Sequence[tuple[Flight, list[_Part]]]) -> None:
        """Give all calls of some flights to NCCL, as one group where they are several."""
        parts = [part for _, parts in flights for part in parts]
        with self._communicators.translated(flights[0][0].what.rpartition(": ")[2]):
            self._connect(part.channel for part in parts)
        for flight, _ in flights:
            self._watchdog.watch(flight)
        try:
            self._call(flights[0][0].what, [(part.channel, call) for part in parts for call in part.calls])
        except CommunicationError:
            for flight, _ in flights:
                self._watchdog.forget(flight)
            # What the watchdog has broken off fails in NCCL's words, which tell less.
            self._watchdog.check_failed()
            raise
        for flight, own in flights:
            for part in own:
                with self._device.on(part.channel.stream):
                    next(part.steps, None)
            channels = dict.fromkeys(part.channel for part in own)
            flight.landings = [(channel, channel.stream.record_event()) for channel in channels]
            flight.launched = True

    def _call(self, what: str, calls: Sequence[tuple[Channel, Call]]) -> None:
        together = self._communicators.grouped() if len(calls) > 1 else contextlib.nullcontext()
        with self._communicators.translated(what.rpartition(": ")[2]), together:
            for channel, call in calls:
                with self._device.at(channel.index):
                    communicator = self._communicators.of(channel.index, channel.members)
                    call(communicator, channel.stream.cuda_stream)

    def _connect(self, channels: Iterable[Channel]) -> None:
        """Make the communicators that are missing; in one order on all ranks, or two would wait for each other."""
        for index, members in sorted({(channel.index, channel.members) for channel in channels}, key=_in_order):
            with self._device.at(index):
                # Those two ranks may next meet with a message the other way, in the other order.
                for way in sorted({members, members.turned}) if members.purpose == "messages" else [members]:
                    self._communicators.of(index, way)


def _in_order(entry: tuple[int, Members]) -> tuple[str, list[int], int]:
    index, members = entry
    return members.purpose, sorted(members.ranks), index


def _only(tensors: list[Tensor]) -> Tensor:
    if len(tensors) != 1:
        raise ValueError(f"a message is one tensor, not {len(tensors)}")
    return tensors[0]
