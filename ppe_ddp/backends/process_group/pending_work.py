"""Base class of a Work that is under way until it is waited for, and advances in every call of its backend."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ppe_ddp.backends.process_group.python_work import PythonWork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

# Most end sooner than a thread would be started; not longer, as what they wait for may wait for the caller.
_PATIENCE_SECONDS = 0.005


class FailableWaits(Protocol):
    """The waits of one group: each ends with an error when a rank gives the group up, or the time is over.

    Attributes:
        place: Who and where, for errors.
        failure: Why the group cannot be used any more; empty while it can.
        at_failure: Called when the group is given up.
        ended_ranks: The ranks whose processes have ended, as far as can be seen.
    """

    place: str
    failure: str
    at_failure: list[Callable[[], None]]
    ended_ranks: Callable[[], Sequence[int]]

    def until(
        self, arrived: Callable[[], Any], what: str, absent: Callable[[], Sequence[int]] = ..., seconds: float = ...
    ) -> None:
        """Wait until ``arrived()``; ``absent`` gives the ranks that are waited for.

        Raises:
            CommunicationError: The group was given up, or the time is over: that of the group, which is given up
                then, or these ``seconds``, after which it goes on.
        """

    def progress(self) -> None:
        """Move all that is outstanding, without waiting."""

    def is_over(self) -> bool:
        """Whether a rank has given the group up."""
        ...

    def look_now(self) -> bool:
        """The same, by all ways in which a rank may have told."""
        ...

    def error(self, what: str, reason: str) -> Exception:
        """The error to raise where ``what`` has failed."""
        ...

    def check(self, what: str) -> None:
        """Raise CommunicationError if a rank has given the group up."""

    def give_up(self, reason: str) -> None:
        """Never use the group again, and tell the other ranks why."""


class PendingWork(PythonWork):
    """A collective or message that is under way.

    It advances in every call of its backend, on any group. Its tensors must be left alone until ``wait()`` has
    returned, or ``is_completed()`` has said so.

    Args:
        what: The call, for errors.
        waits: Of its group.
    """

    def __init__(self, what: str, waits: FailableWaits) -> None:
        super().__init__()
        self._what = what
        self._waits = waits
        self._lock = threading.Lock()
        self._is_settled = False
        self._error: BaseException | None = None
        self.at_arrival: Callable[[], None] | None = None
        """Called once when it has ended well: brings what came to where it belongs."""
        self._at_end: Callable[[], None] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is complete.

        Args:
            timeout: How long at most; None or a time that is not positive stands for the group's timeout.

        Returns:
            True.

        Raises:
            CommunicationError: The transport reports an error, a rank has given the group up, or the time is over. If
                it is that of the call and not that of the group, it is still under way, and its tensors must be left
                alone.
        """
        if not self._settle():
            seconds = timeout.total_seconds() if timeout is not None else 0.0
            self._waits.until(self._arrived, self._what, self._absent, seconds)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return True

    def is_completed(self) -> bool:
        """Whether it has ended, well or not; does what can be done now."""
        if not self._settle():
            self._waits.progress()
            self._waits.is_over()  # receives the notice
        return self._settle()

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """What ``wait()`` will raise."""
        return self._error if self.is_completed() else None

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of ``result()``: complete after a short wait, or later by a thread.

        Who waits for a future, in C++, calls no backend.
        """
        future: torch.futures.Future[Any] = torch.futures.Future()
        end = time.monotonic() + _PATIENCE_SECONDS
        while not self.is_completed():
            if time.monotonic() > end:
                threading.Thread(target=self._complete, args=(future,), name="ppe_ddp-future", daemon=True).start()
                return future
        self._complete(future)
        return future

    def when_ended(self, call: Callable[[], None]) -> None:
        """Have ``call`` called once, by any thread, when this process sees that it has ended, well or not.

        Unlike a future's callback it changes nothing: nobody waits for the work, or advances it, who did not before.
        """
        self._at_end = call
        if self._is_settled or self._has_ended():
            self._tell_end()

    def _tell_end(self) -> None:
        """It has ended, as this process sees now."""
        call, self._at_end = self._at_end, None
        if call is not None:
            call()

    def _has_ended(self) -> bool:
        """Whether it has ended, well or not; does nothing for it."""
        raise NotImplementedError  # an abstract class would need another metaclass than torch's

    def _failure(self) -> BaseException | None:
        """What it has failed with, once it has ended."""
        raise NotImplementedError

    def _absent(self) -> Sequence[int]:
        """The ranks that it waits for, as far as is known."""
        return ()

    def _arrived(self) -> bool:
        """Whether it has ended; may block for a moment where nothing else is under way."""
        return self._settle()

    def _settle(self) -> bool:
        if not self._is_settled:
            with self._lock:
                if not self._is_settled and self._has_ended():
                    self._error = self._failure()
                    if self._error is None and self.at_arrival is not None:
                        with torch.no_grad():
                            self.at_arrival()
                    self.at_arrival = None
                    self._is_settled = True
                    self._tell_end()
        return self._is_settled

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        """Wait, and hand on what came of it."""
        try:
            self.wait()
        except Exception as error:
            # Its frames have this future, and by their callers all of a user's: no collector sees into one of C++.
            future.set_exception(error.with_traceback(None))
        else:
            future.set_result(self.outputs)
