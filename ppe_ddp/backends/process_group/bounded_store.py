"""A store whose answers are waited for no longer than so many seconds.

The store of torch.distributed is served by one process of the job. Where that one is stopped, or the network is cut,
every call waits without an end, also those that have a timeout. So calls are made by a thread of their own, and given
up when the time is over; as long as that one still waits, all further ones fail at once.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from ppe_ddp.backends.process_group.written_keys import WrittenKeys
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppe_ddp.backends.group_internals import Store

T = TypeVar("T")

SILENT = "the store that the ranks share does not answer: the process that serves it has stopped, or the network is cut"


class BoundedStore:
    """Calls one store.

    Args:
        store: Of torch.distributed, or the keys in one.
        seconds: How long to wait for an answer, unless the call says otherwise.
    """

    def __init__(self, store: Store | WrittenKeys, seconds: float = 1.0) -> None:
        self._store = store if isinstance(store, WrittenKeys) else WrittenKeys(store)
        self._seconds = seconds

    def do(self, calls: Callable[[WrittenKeys], T], seconds: float | None = None) -> T:
        """What ``calls(store)`` returns or raises.

        Raises:
            CommunicationError: The store does not answer.
        """
        return _caller(os.getpid()).result(functools.partial(calls, self._store), seconds or self._seconds)

    def delete_all(self) -> None:
        """Delete what this rank has written, which no rank reads any more; not all of it where nobody answers."""
        with suppress(CommunicationError):
            self.do(WrittenKeys.delete_all)


class _Caller:
    """The thread of this process that calls stores: those of all groups are parts of one."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_StoreCall] = queue.SimpleQueue()
        self._silent: _StoreCall | None = None
        threading.Thread(target=self._serve, name="ppe_ddp-store", daemon=True).start()

    def result(self, function: Callable[[], T], seconds: float) -> T:
        if self._silent is not None and not self._silent.is_over.is_set():
            raise CommunicationError(SILENT)
        call = _StoreCall(function)
        self._calls.put(call)
        if not call.is_over.wait(seconds):
            self._silent = call
            raise CommunicationError(SILENT)
        error, call.error = call.error, None
        if error is not None:
            raise error
        result: T = call.result
        return result

    def _serve(self) -> None:
        while True:
            self._calls.get().make()


class _StoreCall:
    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.is_over = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None

    def make(self) -> None:
        try:
            self.result = self._function()
        except Exception as error:
            self.error = error
        self.is_over.set()


@functools.cache
def _caller(_pid: int) -> _Caller:
    return _Caller()
