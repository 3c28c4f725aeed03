"""Watchdog of one group: turns NCCL's asynchronous errors and calls that exceed the timeout into errors.

NCCL waits for ever, on the device, while the host goes on. Somebody has to look.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING

from ppe_ddp.errors import CommunicationError, UnusableError

if TYPE_CHECKING:
    from ppe_ddp.backends.cupy_nccl.nccl_communicator import Communicators
    from ppe_ddp.backends.cupy_nccl.nccl_work import NcclOperation

__all__ = ["Watchdog"]

_LOOK_SECONDS = 0.5
_PATIENCE_SECONDS = 1.0


class Watchdog:
    """The operations of one group that are on their way, and its failure, if it has failed.

    A thread looks for asynchronous errors of NCCL, and for calls that have taken longer than the timeout. Either
    breaks off the group's communicators, so that the device goes on, with wrong numbers; from then on every call and
    every ``wait()`` of the group raises. Not guaranteed: that no step is computed with those numbers in between.

    Args:
        communicators: The group's.
        place: Who and where, for errors.
        timeout: How long a call may take, in seconds.
        calls: Held by whoever is about to call NCCL.
    """

    def __init__(self, communicators: Communicators, place: str, timeout: float, calls: threading.RLock) -> None:
        self._communicators = communicators
        self._place = place
        self._timeout = timeout
        self._calls = calls
        self._looking = threading.Lock()
        self._operations: deque[tuple[float, NcclOperation]] = deque()
        self._error: CommunicationError | None = None
        self._closed = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def check(self) -> None:
        """Raise if the group has failed or was destroyed.

        Raises:
            CommunicationError: It has failed.
            UnusableError: It was destroyed.
        """
        if self._error is not None:
            # A new one each time: an exception collects the tracebacks of all who raise it.
            raise CommunicationError(str(self._error)) from self._error
        if self._closed:
            raise UnusableError(f"{self._place}: a call on a process group that was destroyed")

    def check_failed(self) -> None:
        """Raise if the group has failed; what was on its way when it was destroyed is well."""
        if self._error is not None:
            self.check()

    def watch(self, operation: NcclOperation) -> None:
        """Add an operation that is about to be given to NCCL, whose calls may wait for the other ranks, too."""
        # Only here and when one is late: a query from another thread would spoil a graph that is being captured.
        while self._operations and self._operations[0][1].is_over():
            self._operations.popleft()
        self._operations.append((time.monotonic(), operation))
        if self._thread is None:
            args = (weakref.ref(self), self._ended)
            self._thread = threading.Thread(target=_poll, args=args, name="ppe_ddp-nccl-watchdog", daemon=True)
            self._thread.start()

    def forget(self, operation: NcclOperation) -> None:
        """Remove an operation that NCCL has refused."""
        self._operations = deque(entry for entry in self._operations if entry[1] is not operation)

    def drain(self) -> None:
        """Wait on the host until nothing is on its way; not in a group that has failed or was closed."""
        for _, operation in list(self._operations):
            while not (operation.is_over() or self._error is not None or self._closed):
                time.sleep(0.001)
        self._operations.clear()

    def close(self) -> None:
        """End the watch: every later call raises, and the communicators are not looked at any more."""
        with self._looking:
            self._closed = True
        self._ended.set()

    def poll(self) -> None:
        """Check the operations once; fail the group if one has failed or takes too long."""
        with self._looking:
            if not self._closed and self._error is None:
                error = self._reported_error() or self._timeout_error()
                if error is not None:
                    self._fail(error)

    def _reported_error(self) -> CommunicationError | None:
        for communicator in self._communicators:
            try:
                with self._communicators.translated_errors("a call that had been started"):
                    communicator.check_async_error()
            except CommunicationError as error:
                return error
        return None

    def _timeout_error(self) -> CommunicationError | None:
        late = [operation for since, operation in list(self._operations) if time.monotonic() - since > self._timeout]
        for operation in late:
            if not operation.is_over():
                return CommunicationError(
                    f"{operation.what} is not over after the group's timeout of {self._timeout:g} s: another rank "
                    "did not make the call, or died. The group's communicators were broken off, and what it was "
                    "computing is not to be trusted"
                )
        return None

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


def _poll(reference: weakref.ref[Watchdog], ended: threading.Event) -> None:
    while not ended.wait(_LOOK_SECONDS):
        watchdog = reference()
        if watchdog is None:
            return
        watchdog.poll()
        del watchdog
