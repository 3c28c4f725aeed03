"""Waits over MPI, none of which is inside MPI.

A rank that gives a group up tells the others by a message of its own, which they find in their waits. What was under
way in a group that was given up cannot be cancelled: its memory is kept, and its communicator is not used again, but
freed where all ranks can bring that to its end together (``communicator_release.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpi4py import MPI

from ppe_ddp.backends.process_group.polling_waits import PollingWaits

if TYPE_CHECKING:
    from collections.abc import Iterable

_NOTICE_BYTES = 1000  # short enough to leave without a receiver


class Waits(PollingWaits):
    """The waits of one group.

    Args:
        comm: Its ranks are the ranks of the group, in order.
        place: Who and where, for errors: ``"rank 1 of 4, group 'tp'"``.
        timeout: How long a wait may take, in seconds.

    Attributes:
        has_told: Whether this rank has sent the notice that it has given the group up.
    """

    def __init__(self, comm: MPI.Intracomm, place: str, timeout: float) -> None:
        super().__init__(place, timeout, "MPI")
        self._comm = comm
        self._tag = tag_limit(comm)
        self._noticed: set[int] = {comm.Get_rank()}
        self.has_told = False

    def have_noticed(self, ranks: Iterable[int]) -> bool:
        """Whether the notices of these ranks have arrived; no other group is to get one that has the number of this."""
        missing = set(ranks) - self._noticed
        while missing and self._notice():
            missing -= self._noticed
        return not missing

    def _notice(self) -> str:
        if not self._comm.Iprobe(MPI.ANY_SOURCE, self._tag):
            return ""
        status = MPI.Status()
        message = self._comm.Improbe(MPI.ANY_SOURCE, self._tag, status)
        if message is None:  # another thread has it
            return ""
        notice = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([notice, MPI.BYTE])
        self._noticed.add(status.Get_source())
        return notice.decode(errors="replace")

    def _tell(self, reason: str) -> None:
        self.has_told = True
        rank = self._comm.Get_rank()
        notice = bytearray(f"rank {rank} has given this group up: {reason}".encode()[:_NOTICE_BYTES])
        for peer in range(self._comm.Get_size()):
            if peer != rank:
                self._progress.keep(self._comm.Isend([notice, MPI.BYTE], peer, self._tag), notice)


def tag_limit(comm: MPI.Intracomm) -> int:
    """The largest tag, which is that of the notices."""
    limit = comm.Get_attr(MPI.TAG_UB)
    return limit if isinstance(limit, int) and limit > 0 else 32767  # what the MPI standard promises
