"""Waits of one group: a polling loop with a timeout and failure notices, instead of MPI's blocking calls.

    move all that is outstanding, on every group     arrived?     now and then: has a rank given up? is the time over?

A rank that gives a group up tells the others by a message of its own, which they find in this loop. What was under way
in a group that was given up cannot be cancelled: its memory is kept, its communicator is never used again.
"""

from __future__ import annotations

import os
import threading
from time import monotonic
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from ppe_ddp.backends.mpi.progress_engine import progress_engine
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_NOTICE_BYTES = 1000  # short enough to leave without a receiver


class Waits:
    """The waits of one group.

    Args:
        comm: Its ranks are the ranks of the group, in order.
        place: Who and where, for errors: ``"rank 1 of 4, group 'tp'"``.
        timeout: How long a wait may take, in seconds.

    Attributes:
        failure: Why the group cannot be used any more; empty while it can.
        at_failure: Called when the group is given up.
    """

    def __init__(self, comm: MPI.Intracomm, place: str, timeout: float) -> None:
        self.place = place
        self.timeout = timeout
        self.failure = ""
        self.at_failure: list[Callable[[], None]] = []
        self._comm = comm
        self._tag = tag_limit(comm)
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
        start = monotonic()

        def look() -> None:
            self.check(what)
            waited = monotonic() - start
            if waited > seconds > 0.0:
                raise CommunicationError(
                    f"{self.place}: {what} is still under way after {seconds:g} s: the other rank did not call, or died"
                )
            if waited > self.timeout:
                missing = absent()
                who = f"rank {', '.join(map(str, missing))}" if missing else "another rank"
                self.give_up(
                    f"{what} has waited for the group's timeout of {self.timeout:g} s: {who} did not make the call, or "
                    "died. Where ranks may be that far apart, give init_process_group() or new_group() a longer timeout"
                )
                raise CommunicationError(f"{self.place}: {self.failure}")

        self._progress.wait_until(arrived, look)

    def progress(self) -> None:
        """Move all that is outstanding, without waiting."""
        self._progress.progress()

    def is_over(self) -> bool:
        """Whether a rank has given the group up."""
        self._receive_notice()
        return bool(self.failure)

    def check(self, what: str) -> None:
        """See whether a rank has given the group up.

        Raises:
            CommunicationError: It has; with that rank and its reason.
        """
        if self.is_over():
            raise CommunicationError(f"{self.place}: {what} over MPI failed: {self.failure}")

    def give_up(self, reason: str) -> None:
        """Never use the group again, and tell the other ranks why; they leave their waits with an error."""
        with self._lock:
            if self.failure:
                return
            self.failure = reason
        rank = self._comm.Get_rank()
        notice = bytearray(f"rank {rank} has given this group up: {reason}".encode()[:_NOTICE_BYTES])
        for peer in range(self._comm.Get_size()):
            if peer != rank:
                self._progress.keep(self._comm.Isend([notice, MPI.BYTE], peer, self._tag), notice)
        self._close()

    def _receive_notice(self) -> None:
        if self.failure or not self._comm.Iprobe(MPI.ANY_SOURCE, self._tag):
            return
        status = MPI.Status()
        message = self._comm.Improbe(MPI.ANY_SOURCE, self._tag, status)
        if message is None:  # another thread has it
            return
        notice = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([notice, MPI.BYTE])
        with self._lock:
            if self.failure:
                return
            self.failure = notice.decode(errors="replace")
        self._close()

    def _close(self) -> None:
        for close in self.at_failure:
            close()


def tag_limit(comm: MPI.Intracomm) -> int:
    """The largest tag, which is that of the notices."""
    limit = comm.Get_attr(MPI.TAG_UB)
    return limit if isinstance(limit, int) and limit > 0 else 32767  # what the MPI standard promises
