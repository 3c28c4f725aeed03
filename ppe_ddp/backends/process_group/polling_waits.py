"""Waits that poll: a loop of ours advances what is outstanding on every group until what is waited for has arrived.

    wait for a bucket     advance all that is outstanding, on every group     arrived?     ... again
                          now and then: has a rank given the group up? is the time over?

So no order of collectives on different groups deadlocks, every wait ends at its timeout with an error, and Ctrl-C
comes through.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from ppe_ddp.backends.process_group.progress_engine import progress_engine
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LOOK_SECONDS = 0.1  # between looks for processes that have ended
_TOLD_SECONDS = 0.3  # in which ranks whose timeouts are over at the same time have said so
_NAP_SECONDS = 0.01


class PollingWaits(ABC):
    """The waits of one group; a subclass knows how its ranks tell each other that one has given it up.

    Args:
        place: Who and where, for errors: ``"rank 1 of 4, group 'tp'"``.
        timeout: How long a wait may take, in seconds.
        transport: For errors.

    Attributes:
        failure: Why the group cannot be used any more; empty while it can.
        at_failure: Called when the group is given up.
        ended_ranks: The ranks whose processes have ended, as far as can be seen.
    """

    def __init__(self, place: str, timeout: float, transport: str) -> None:
        self.place = place
        self.timeout = timeout
        self.failure = ""
        self.at_failure: list[Callable[[], None]] = []
        self.ended_ranks: Callable[[], Sequence[int]] = tuple
        self.transport = transport
        self._lock = threading.Lock()
        self._progress = progress_engine(os.getpid())

    def until(
        self,
        arrived: Callable[[], Any],
        what: str,
        absent: Callable[[], Sequence[int]] = tuple,
        seconds: float = 0.0,
    ) -> None:
        """Wait until ``arrived()``.

        Args:
            arrived: Whether the wait is over.
            what: For errors.
            absent: The ranks that are waited for, as far as it is known.
            seconds: How long at most, if positive: the group goes on after that, unlike after its own timeout.

        Raises:
            CommunicationError: The group was given up, by another rank or because the time is over.
        """
        start = seen = monotonic()

        def look() -> None:
            nonlocal seen
            self.check(what)
            now = monotonic()
            if now - seen > _LOOK_SECONDS:
                seen = now
                self._look_for_ended(what, absent)
            waited = now - start
            if waited > seconds > 0.0:
                raise CommunicationError(
                    f"{self.place}: {what} is still under way after {seconds:g} s: the other rank did not call, or died"
                )
            if waited > self.timeout:
                missing = absent()
                if len(missing) != 1 and self._is_told_soon():  # by a rank that knows better who it is
                    raise self.error(what, self.failure)
                who = f"rank {', '.join(map(str, missing))}" if missing else "another rank"
                self.give_up(
                    f"{what} has waited for the group's timeout of {self.timeout:g} s: {who} did not make the call, or "
                    "died. Where ranks may be that far apart, give init_process_group() or new_group() a longer timeout"
                )
                raise CommunicationError(f"{self.place}: {self.failure}")

        self._progress.wait_until(arrived, look)

    def _is_told_soon(self) -> bool:
        end = monotonic() + _TOLD_SECONDS
        while not self.look_now():
            if monotonic() > end:
                return False
            sleep(_NAP_SECONDS)
        return True

    def _look_for_ended(self, what: str, absent: Callable[[], Sequence[int]]) -> None:
        ended = self.ended_ranks()
        # In this order: what a process has done, it did before its end.
        missing = sorted(set(ended).intersection(absent())) if ended else []
        if missing:
            self.give_up(f"{what} waits for rank {', '.join(map(str, missing))}, whose process has ended")
            raise CommunicationError(f"{self.place}: {self.failure}")

    def progress(self) -> None:
        """Move all that is outstanding, without waiting."""
        self._progress.progress()

    def is_over(self) -> bool:
        """Whether a rank has given the group up."""
        if not self.failure:
            notice = self._notice()
            if notice and self._fail(notice):
                self._close()
        return bool(self.failure)

    def look_now(self) -> bool:
        """The same, by all ways in which a rank may have told."""
        return self.is_over()

    def check(self, what: str) -> None:
        """See whether a rank has given the group up.

        Raises:
            CommunicationError: It has; with that rank and its reason.
        """
        if self.is_over():
            raise self.error(what, self.failure)

    def error(self, what: str, reason: str) -> CommunicationError:
        """The error to raise where ``what`` has failed."""
        return CommunicationError(f"{self.place}: {what} over {self.transport} failed: {reason}")

    def give_up(self, reason: str) -> None:
        """Never use the group again, and tell the other ranks why; they leave their waits with an error."""
        if self._fail(reason):
            self._tell(reason)
            self._close()

    @abstractmethod
    def _notice(self) -> str:
        """What another rank has told; empty if none has."""

    @abstractmethod
    def _tell(self, reason: str) -> None:
        """Tell the other ranks that this one has given the group up."""

    def _fail(self, reason: str) -> bool:
        with self._lock:
            is_first = not self.failure
            self.failure = self.failure or reason
        return is_first

    def _close(self) -> None:
        for close in self.at_failure:
            close()
