"""The backend ``cupy_nccl``: a process group of torch.distributed over CuPy's NCCL, for CUDA tensors.

Tensors on the CPU go to a gloo group beside it, so that ``"cupy_nccl"`` is the same as ``"cpu:gloo,cuda:cupy_nccl"``.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, device
from torch.distributed import Work
from torch.futures import Future

from ppe_ddp.backends.cuda_device import CudaDevice
from ppe_ddp.backends.cupy_nccl.nccl_communicator import (
    Communicator,
    Communicators,
    Members,
    NcclCollectives,
    PreparedCalls,
)
from ppe_ddp.backends.cupy_nccl.nccl_library import load_nccl
from ppe_ddp.backends.device_routed_group import DeviceRoutedGroup, gloo_beside
from ppe_ddp.backends.group import SUM, CollectiveGroup
from ppe_ddp.backends.rank_store import WrittenKeys
from ppe_ddp.backends.work import PythonWork
from ppe_ddp.errors import CommunicationError, UnusableError
from ppe_ddp.nested_tensors import tensors_in
from ppe_ddp.waiting import progress_engine

_NAME = "cupy_nccl"
_NAP_SECONDS = 50e-6
_LOOK_SECONDS = 0.5
_PATIENCE_SECONDS = 1.0


def make_group(arguments: Any, options: Any) -> DeviceRoutedGroup:
    """Make the group for torch: NCCL for CUDA tensors, gloo for those on the CPU."""
    if options is not None:
        raise TypeError(f"the backend cupy_nccl takes no pg_options, but it got {type(options).__name__}")
    library = load_nccl()
    keys = WrittenKeys(arguments.store)
    made = {"cpu": gloo_beside(arguments, keys)}
    makers = {"cuda": lambda: NcclGroup(arguments, library, CudaDevice(), keys)}
    return DeviceRoutedGroup(arguments, _NAME, ("cuda", "cpu"), made=made, makers=makers, keys=keys)


class NcclGroup(CollectiveGroup):
    """A group over NCCL communicators, one for each device of its tensors.

    Calls return when NCCL has taken them. They run on a stream that waits for the caller's current stream, and
    ``Work.wait()`` lets the caller's stream wait for them. All ranks must make the same collectives in the same order,
    with the same sizes and dtypes; otherwise NCCL waits until the group's timeout, or computes wrong numbers.

    Messages between two ranks have a communicator and a stream for each direction, so that messages and collectives do
    not wait for each other. Both ranks must be there to connect, so the first message between them is sent in its
    ``wait()``, or by the next collective; later ones are sent at once. Tags are ignored.

    Raises from any collective:
        CommunicationError: NCCL reports an error, a rank did not come, or an earlier call did not end in time.
        TypeError: NCCL has no such reduction for the dtype, or the tensors are sparse.
        ValueError: The sizes of this rank's own arguments do not fit together.
        UnusableError: The group was destroyed, or a CUDA graph is being captured.
    """

    def __init__(self, arguments: Any, library: Any, nccl_device: CudaDevice, keys: WrittenKeys) -> None:
        rank, size = arguments.group_rank, arguments.group_size
        super().__init__(arguments, _NAME, ("cuda",))
        seconds = self._timeout.total_seconds()
        self._place = f"rank {rank} of {size}, group {self._group_name!r}"
        self._device = nccl_device
        self._over: NcclCollectives = NcclCollectives(rank, size)
        self._communicators = Communicators(library, nccl_device, keys, rank, self._place, seconds)
        self._everyone = Members("collectives", tuple(range(size)))
        self._coalesced: NcclOperation | None = None
        self._posted: list[NcclOperation] = []
        self._lock = threading.RLock()  # buckets may be sent from a thread, and waited for in another
        self._watchdog = Watchdog(self._communicators, self._place, seconds, self._lock)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:  # type: ignore[override]
        """Wait, on the host, until all ranks have come here and this one's current stream has finished its work."""
        ids = getattr(opts, "device_ids", None)
        index = ids[0] if ids else self._device.current()
        with self._device.make_current(index):
            sign = torch.zeros(1, dtype=torch.int32, device=self._device.torch_device(index))
        return self._run("barrier", self._over.all_reduce, [(sign, SUM)], None, blocks=True)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        """Send one tensor; complete when the tensor may be changed again."""
        return self._message(f"send to rank {peer}", tensors, (self.rank(), peer))

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        return self._message(f"receive from rank {peer}", tensors, (peer, self.rank()))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Refuse, as NCCL cannot receive from an unknown sender."""
        raise ValueError(f"{self._place}: NCCL cannot receive from any rank; name the sender: recv(tensor, src)")

    def shutdown(self) -> None:
        """Wait for calls under way, and end the communicators; all ranks call it together."""
        with self._lock:
            self._watchdog.drain()
            self._watchdog.close()
            self._communicators.end(orderly=True)

    def abort(self) -> None:
        """Close the group without the other ranks, and abort calls under way."""
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
        """Launch ``call(*row)`` for each of ``rows``, as a collective of all ranks or a message between ``members``."""
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
                # Connecting now could deadlock: the other rank may be waiting for a third, and that one for this rank.
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
        """Give all calls of some operations to NCCL, several as one group."""
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
            # The watchdog's own error says more than NCCL's for a call that it has aborted.
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
        self.parts: list[tuple[Communicator, PreparedCalls]] = []  # the calls; empty after the launch
        self.events: list[tuple[Any, Any]] = []  # its streams, each with the event at its end
        self.launch: Callable[[], None] | None = None  # launches it early, if it is a message that waits for that
        self.since = 0.0  # the time of the launch
        self._check_group = check
        self._launched = False
        self._error: BaseException | None = None

    def start(self) -> None:
        """Launch it, if it is a message that is not launched yet."""
        if not self._launched and self._error is None and self.launch is not None:
            self.launch()

    def note_launched(self) -> None:
        """Note that NCCL has it: record the events, and drop the memory, which the streams may then reuse."""
        streams = dict.fromkeys(communicator.stream for communicator, _ in self.parts)
        self.events = [(stream, stream.record_event()) for stream in streams]
        self.parts = []
        self._launched = True

    def fail(self, error: BaseException) -> None:
        """Note that it could not be launched; from now on :meth:`check` raises."""
        self.parts = []
        self._error = error

    def check(self) -> None:
        """Raise a new error if the group has failed, or this could not be launched."""
        self._check_group()
        if self._error is not None:
            raise CommunicationError(str(self._error)) from self._error

    def done(self) -> bool:
        return self._launched and all(event.query() for _, event in self.events)


class NcclWork(PythonWork):
    """A collective or message under way on device number ``index``; with ``blocks`` its ``wait()`` blocks the host.

    ``source`` is the sender of a received message, as a rank of the group; otherwise -1.
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
        """Let the caller's current stream wait; after a barrier, or with a positive ``timeout``, the host waits, too.

        CommunicationError if the group has failed, this could not be launched, or the time is over.
        """
        self._operation.start()
        self._operation.check()
        stream = self._device.current_stream(self._index)
        for _, event in self._operation.events:
            stream.wait_event(event)
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if seconds > 0 or self._blocks:
            done, check, limit = self._operation.done, self._operation.check, seconds if seconds > 0 else None
            if not progress_engine(os.getpid()).wait_until(done, check, seconds=limit, nap=_NAP_SECONDS):
                raise CommunicationError(f"{self._operation.what} is not over after {seconds:g} s")
            check()
        return True

    def is_completed(self) -> bool:
        """Whether the device has finished it, or it has failed; does not wait."""
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
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """A Future of ``result()``; ``wait()`` and ``then()`` let the current stream wait, not the host."""
        if self._future is None:
            self._operation.start()
            self._operation.check()
            future = self._device.future(self._index)
            # A Future records an event on the current stream when it is set.
            stream = self._operation.events[0][0]
            for _, event in self._operation.events[1:]:
                stream.wait_event(event)
            with self._device.use_stream(stream):
                future.set_result(self.outputs)
            self._future = future
        return self._future


class Watchdog:
    """Watches the operations of one group that are under way, and fails the group if one hangs.

    NCCL has no timeout, so a thread looks for its asynchronous errors, and for calls that take longer than the timeout.
    If there is one, it aborts the communicators. The device then goes on with wrong numbers, and every later call and
    ``wait()`` of the group raises; a step may be computed with these numbers in between. The lock ``calls`` is held
    while NCCL is called.
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
        """Raise CommunicationError if the group has failed, and UnusableError if it was destroyed."""
        self.check_failed()
        if self._closed.is_set():
            raise UnusableError(f"{self._place}: a call on a process group that was destroyed")

    def check_failed(self) -> None:
        if self._error is not None:
            # A new one each time, as an exception keeps the traceback of each raise.
            raise CommunicationError(str(self._error)) from self._error

    def watch(self, operation: NcclOperation) -> None:
        """Add an operation that is about to be launched; NCCL's calls may wait for other ranks, too."""
        # The thread does not query events unless one is late, as that would break a graph that is being captured.
        while self._operations and self._operations[0].done():
            self._operations.popleft()
        operation.since = time.monotonic()
        self._operations.append(operation)
        if self._thread is None:
            args = (weakref.ref(self), self._closed)
            self._thread = threading.Thread(target=_poll, args=args, name="ppe_ddp-nccl-watchdog", daemon=True)
            self._thread.start()

    def forget(self, operation: NcclOperation) -> None:
        with suppress(ValueError):
            self._operations.remove(operation)

    def drain(self) -> None:
        """Wait on the host until nothing is under way, or the group has failed or was closed."""

        def is_drained() -> bool:
            are_done = all(operation.done() for operation in list(self._operations))
            return are_done or self._error is not None or self._closed.is_set()

        progress_engine(os.getpid()).wait_until(is_drained, nap=0.001)
        self._operations.clear()

    def close(self) -> None:
        """End the watch: later calls raise, and the thread ends."""
        with self._looking:
            self._closed.set()

    def poll(self) -> None:
        """Look once for errors and late operations; if there is one, fail the group."""
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
        # Before the abort, after which those who wait on the host go on.
        self._error = error
        # An abort frees memory that a call of another thread may be using, so it waits for the call unless that hangs.
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
