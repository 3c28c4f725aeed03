"""A process group of torch.distributed over CuPy's NCCL: backend name ``cupy_nccl``, for CUDA tensors.

torch's side of it: how calls get onto the streams, together or one by one, the Work for what is on its way there, and
the watchdog that ends what never ends. Tensors on the CPU go to a group over gloo beside it, so that ``"cupy_nccl"``
does what ``"cpu:gloo,cuda:cupy_nccl"`` does.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from ppe_ddp.backends.cuda_device import CudaDevice
from ppe_ddp.backends.cupy_nccl.nccl_communicator import Communicators, Members, NcclCollectives, PreparedCalls
from ppe_ddp.backends.device_routed_group import DeviceRoutedGroup, group_over
from ppe_ddp.backends.group import SUM, CollectiveGroup
from ppe_ddp.backends.work import PythonWork
from ppe_ddp.errors import CommunicationError, UnusableError
from ppe_ddp.nested_tensors import tensors_in
from ppe_ddp.waiting import progress_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import timedelta

    from torch import Tensor, device
    from torch.distributed import Work
    from torch.futures import Future

    from ppe_ddp.backends.cupy_nccl.nccl_communicator import Communicator

_NAME = "cupy_nccl"
_NAP_SECONDS = 50e-6
_LOOK_SECONDS = 0.5
_PATIENCE_SECONDS = 1.0


def make_group(arguments: Any, library: Any) -> DeviceRoutedGroup:
    """Make the group that torch gets: NCCL for CUDA tensors, gloo for those on the CPU."""
    makers = {"cuda": lambda: NcclGroup(arguments, library, CudaDevice()), "cpu": lambda: group_over("gloo", arguments)}
    return DeviceRoutedGroup(arguments.group_rank, arguments.group_size, arguments, _NAME, makers=makers)


class NcclGroup(CollectiveGroup):
    """A group over NCCL communicators, one for each device that its tensors are on.

    Calls return when NCCL has taken them; they happen on a stream that waits for the caller's current stream, and
    ``Work.wait()`` lets the caller's stream wait for them. All ranks make the same collectives in the same order, with
    the same sizes and dtypes. Where they differ, NCCL waits, until the group's timeout, or computes wrong numbers.

    A message between two ranks is on a communicator and a stream of those two, one for each direction, so that
    messages and collectives do not wait for one another. The first between two ranks leaves at its ``wait()``, or at
    the next collective, since both must be there to connect; later ones leave at once. Tags are not looked at.

    Raises from any collective:
        CommunicationError: NCCL reports an error, a rank did not come, or an earlier call did not end in time.
        TypeError: NCCL has no such reduction for the dtype, or the tensors are sparse.
        ValueError: The sizes of this rank's own arguments do not fit together.
        UnusableError: The group was destroyed, or a CUDA graph is being captured.
    """

    def __init__(self, arguments: Any, library: Any, nccl_device: CudaDevice) -> None:
        rank, size = arguments.group_rank, arguments.group_size
        super().__init__(rank, size, arguments, _NAME, ("cuda",))
        seconds = self._timeout.total_seconds()
        self._place = f"rank {rank} of {size}, group {self._group_name!r}"
        self._device = nccl_device
        self._over: NcclCollectives = NcclCollectives(rank, size)
        self._communicators = Communicators(library, nccl_device, arguments.store, rank, self._place, seconds)
        self._everyone = Members("collectives", tuple(range(size)))
        self._coalesced: NcclOperation | None = None
        self._posted: list[NcclOperation] = []
        self._lock = threading.RLock()  # buckets may be sent from a thread, and waited for in another
        self._watchdog = Watchdog(self._communicators, self._place, seconds, self._lock)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:  # type: ignore[override]
        """Wait until every rank is here and this one's current stream has come so far; the host waits."""
        ids = getattr(opts, "device_ids", None)
        index = ids[0] if ids else self._device.current()
        with self._device.make_current(index):
            sign = torch.zeros(1, dtype=torch.int32, device=self._device.torch_device(index))
        return self._run("barrier", self._over.all_reduce, [(sign, SUM)], None, blocks=True)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        """Start to send one tensor; complete when the tensor may be changed again."""
        return self._message(f"send to rank {peer}", tensors, (self.rank(), peer))

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        return self._message(f"receive from rank {peer}", tensors, (peer, self.rank()))

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
        with self._lock:
            self._coalesced = self._operation("coalesced calls")

    def _end_coalescing(self, device: device) -> Work:
        with self._lock:
            if self._coalesced is None:
                raise UnusableError(f"{self._place}: the end of coalesced calls that were never begun")
            operation, self._coalesced = self._coalesced, None
            self._launch([operation])
        index = device.index if device.index is not None else self._device.current()
        return NcclWork(operation, self._device, index, None)

    def _run(
        self,
        what: str,
        call: Callable[..., PreparedCalls],
        rows: Iterable[tuple[Any, ...]],
        result: Any,
        *,
        blocks: bool = False,
        members: Members | None = None,
        source: int = -1,
    ) -> Work:
        """Give ``call`` of each of ``rows`` to NCCL, as a collective of all, or a message between two ``members``."""
        rows = list(rows)
        tensors = list(tensors_in(rows))
        with self._lock:
            self._check(what)
            if members is None:
                self._launch_posted()
            communicator = self._communicators.of(self._index_of(what, tensors), members or self._everyone)
            operation = self._coalesced or self._operation(what)
            communicator.wait_for_caller(tensors)
            with self._device.use_stream(communicator.stream):
                operation.parts += [(communicator, call(*row)) for row in rows]
            if members is not None and communicator.nccl is None and operation is not self._coalesced:
                # Connecting waits for the other rank, which may have to come by way of a third that waits for this one.
                operation.launch = self._launch_posted
                self._posted.append(operation)
            elif operation is not self._coalesced:
                self._launch([operation])
        return NcclWork(operation, self._device, communicator.index, result, blocks=blocks, source=source)

    def _message(self, what: str, tensors: list[Tensor], way: tuple[int, int]) -> Work:
        if len(tensors) != 1:
            raise ValueError(f"{self._place}: a message is one tensor, not {len(tensors)}")
        sender, receiver = way
        if sender == receiver:
            raise ValueError(f"{self._place}: {what}, which is itself; copy the tensor")
        is_mine = sender == self.rank()
        call = PreparedCalls().send if is_mine else PreparedCalls().receive
        rows, members = [(tensors[0], int(is_mine))], Members("messages", way)
        return self._run(what, call, rows, tensors, members=members, source=-1 if is_mine else sender)

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

    def _operation(self, what: str) -> NcclOperation:
        return NcclOperation(f"{self._place}: {what}", self._watchdog.check_failed)

    def _launch_posted(self) -> None:
        with self._lock:
            posted, self._posted = self._posted, []
            if posted:
                self._launch(posted)

    def _launch(self, operations: Sequence[NcclOperation]) -> None:
        """Give all calls of some operations to NCCL, as one group where they are several."""
        parts = [part for operation in operations for part in operation.parts]
        try:
            with self._communicators.translated_errors(operations[0].what):
                self._communicators.connect(communicator for communicator, _ in parts)
                for operation in operations:
                    self._watchdog.watch(operation)
                self._communicators.call(parts)
        except Exception as error:
            for operation in operations:
                self._watchdog.forget(operation)
                operation.fail(error)
            # What the watchdog has broken off fails in NCCL's words, which tell less.
            self._watchdog.check_failed()
            raise
        for operation in operations:
            for communicator, part in operation.parts:
                with self._device.use_stream(communicator.stream):
                    part.finish()
            operation.note_launched()


class NcclOperation:
    """NCCL calls that are launched together; ``what``: ``"rank 0 of 2, group 'default': all_reduce"``, for errors."""

    def __init__(self, what: str, check: Callable[[], None]) -> None:
        self.what = what
        # What is to be called, on which communicators; empty once it was.
        self.parts: list[tuple[Communicator, PreparedCalls]] = []
        self.events: list[tuple[Any, Any]] = []  # the streams that it is on, each with the event behind it
        # Gives it to NCCL before that would happen by itself; None where that is not left to the Work.
        self.launch: Callable[[], None] | None = None
        self.since = 0.0  # when it was given to NCCL
        self._check_group = check
        self._launched = False
        self._error: BaseException | None = None

    def start(self) -> None:
        """Launch it, if it was not launched yet and this thread may do so."""
        if not self._launched and self._error is None and self.launch is not None:
            self.launch()

    def note_launched(self) -> None:
        """Note that NCCL has it: record the events, and drop the memory, which streams may then reuse."""
        streams = dict.fromkeys(communicator.stream for communicator, _ in self.parts)
        self.events = [(stream, stream.record_event()) for stream in streams]
        self.parts = []
        self._launched = True

    def fail(self, error: BaseException) -> None:
        """Note that NCCL has refused it, or that a rank did not come to connect: :meth:`check` raises from now on."""
        self.parts = []
        self._error = error

    def check(self) -> None:
        """Raise if the group has failed, or could not launch this; a new error each time, with its own traceback."""
        self._check_group()
        if self._error is not None:
            raise CommunicationError(str(self._error)) from self._error

    def done(self) -> bool:
        return self._launched and all(event.query() for _, event in self.events)


class NcclWork(PythonWork):
    """A collective or message on its way on the device.

    Args:
        blocks: ``wait()`` keeps the host until it is over, as a barrier does.
        source: Whom a message comes from, as a rank of the group; -1 for anything else.
    """

    def __init__(
        self,
        operation: NcclOperation,
        device: CudaDevice,
        index: int,
        result: Any,
        *,
        blocks: bool = False,
        source: int = -1,
    ) -> None:
        super().__init__()
        self.outputs = result
        self._operation = operation
        self._device = device
        self._index = index
        self._blocks = blocks
        self._source = source
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the caller's current stream wait; the host does so after a barrier, and for a positive ``timeout``.

        CommunicationError where the group has failed, it could not be launched, or the time is over.
        """
        self._operation.start()
        self._operation.check()
        stream = self._device.current_stream(self._index)
        for _, event in self._operation.events:
            stream.wait_event(event)
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if seconds > 0 or self._blocks:
            self._wait_on_host(seconds)
        return True

    def is_completed(self) -> bool:
        """Whether the device is through with it, or it has failed; never waits for the device."""
        self._operation.start()
        return self.exception() is not None or self._operation.done()

    def is_success(self) -> bool:
        return self.exception() is None and self._operation.done()

    def exception(self) -> BaseException | None:
        try:
            self._operation.check()
        except CommunicationError as error:
            return error
        return None

    def source_rank(self) -> int:
        """Who sent it, as a rank of the group; -1 for what is no received message."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """A Future of ``result()``: whoever waits for it, or goes on from it, does so in stream order."""
        if self._future is None:
            self._operation.start()
            self._operation.check()
            future = self._device.future(self._index)
            # A Future takes the point of the stream that is current while it is set.
            stream = self._operation.events[0][0]
            for _, event in self._operation.events[1:]:
                stream.wait_event(event)
            with self._device.use_stream(stream):
                future.set_result(self.outputs)
            self._future = future
        return self._future

    def _wait_on_host(self, seconds: float) -> None:
        operation = self._operation
        if not progress_engine(os.getpid()).wait_until(
            operation.done, operation.check, seconds=seconds if seconds > 0 else None, nap=_NAP_SECONDS
        ):
            raise CommunicationError(f"{operation.what} is not over after {seconds:g} s")
        self._operation.check()


class Watchdog:
    """The operations of one group that are on their way, and its failure, if it has failed.

    NCCL waits for ever, on the device, while the host goes on; so a thread looks for asynchronous errors of NCCL, and
    for calls that have taken longer than the timeout. Either breaks off the group's communicators, so that the device
    goes on, with wrong numbers; from then on every call and every ``wait()`` of the group raises. Not guaranteed: that
    no step is computed with those numbers in between.

    Args:
        calls: Held by whoever is about to call NCCL.
    """

    def __init__(self, communicators: Communicators, place: str, timeout: float, calls: threading.RLock) -> None:
        self._communicators = communicators
        self._place = place
        self._timeout = timeout
        self._calls = calls
        self._looking = threading.Lock()
        self._operations: deque[NcclOperation] = deque()
        self._error: CommunicationError | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Raise CommunicationError if the group has failed, UnusableError if it was destroyed."""
        self.check_failed()
        if self._closed.is_set():
            raise UnusableError(f"{self._place}: a call on a process group that was destroyed")

    def check_failed(self) -> None:
        """Raise if the group has failed; what was on its way when it was destroyed is well."""
        if self._error is not None:
            # A new one each time: an exception collects the tracebacks of all who raise it.
            raise CommunicationError(str(self._error)) from self._error

    def watch(self, operation: NcclOperation) -> None:
        """Add an operation that is about to be given to NCCL, whose calls may wait for the other ranks, too."""
        # Only here and when one is late: a query from another thread would spoil a graph that is being captured.
        while self._operations and self._operations[0].done():
            self._operations.popleft()
        operation.since = time.monotonic()
        self._operations.append(operation)
        if self._thread is None:
            args = (weakref.ref(self), self._closed)
            self._thread = threading.Thread(target=_poll, args=args, name="ppe_ddp-nccl-watchdog", daemon=True)
            self._thread.start()

    def forget(self, operation: NcclOperation) -> None:
        """Remove an operation that NCCL has refused, if it was added."""
        with suppress(ValueError):
            self._operations.remove(operation)

    def drain(self) -> None:
        """Wait on the host until nothing is on its way; not in a group that has failed or was closed."""

        def is_over() -> bool:
            is_done = all(operation.done() for operation in list(self._operations))
            return is_done or self._error is not None or self._closed.is_set()

        progress_engine(os.getpid()).wait_until(is_over, nap=0.001)
        self._operations.clear()

    def close(self) -> None:
        """End the watch: every later call raises, and the communicators are not looked at any more."""
        with self._looking:
            self._closed.set()

    def poll(self) -> None:
        """Check the operations once; fail the group if one has failed or takes too long."""
        with self._looking:
            if self._closed.is_set() or self._error is not None:
                return
            try:
                with self._communicators.translated_errors(f"{self._place}: a call that had been started"):
                    for communicator in self._communicators:
                        communicator.check_async_error()
                self._check_times()
            except CommunicationError as error:
                self._fail(error)

    def _check_times(self) -> None:
        for operation in list(self._operations):
            if time.monotonic() - operation.since > self._timeout and not operation.done():
                raise CommunicationError(
                    f"{operation.what} is not over after the group's timeout of {self._timeout:g} s: another rank "
                    "did not make the call, or died. The group's communicators were broken off, and what it was "
                    "computing is not to be trusted"
                )

    def _fail(self, error: CommunicationError) -> None:
        # Before the abort, which lets those go on who wait on the host.
        self._error = error
        # An abort frees what a call from another thread is using: only a call that hangs is not waited for.
        held = self._calls.acquire(timeout=_PATIENCE_SECONDS)
        try:
            self._communicators.end(orderly=False)
        finally:
            if held:
                self._calls.release()


def _poll(reference: weakref.ref[Watchdog], closed: threading.Event) -> None:
    while not closed.wait(_LOOK_SECONDS):
        watchdog = reference()
        if watchdog is None:
            return
        watchdog.poll()
        del watchdog
