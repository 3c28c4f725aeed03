"""Point-to-point messages over one MPI communicator, and the barrier that names missing ranks."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI

from ppe_ddp.backends.mpi.mpi_datatypes import byte_buffer
from ppe_ddp.backends.mpi.mpi_waits import tag_limit
from ppe_ddp.backends.mpi.mpi_work import MessageWork
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from torch import Tensor

    from ppe_ddp.backends.mpi.mpi_collectives import MpiCollectives
    from ppe_ddp.backends.mpi.mpi_waits import Waits

_NAP_SECONDS = 0.001


class MpiMessages:
    """The messages of one rank.

    Args:
        comm: Its ranks are the ranks of the group, in order.
        collectives: Of the same communicator: it knows how to stage tensors.
        waits: How to wait.
    """

    def __init__(self, comm: MPI.Intracomm, collectives: MpiCollectives, waits: Waits) -> None:
        self._comm = comm
        self._stage = collectives
        self._waits = waits
        self._place = waits.place
        self._timeout = waits.timeout
        self._under_way: deque[MessageWork] = deque()  # a Work that its owner drops must not free what MPI still reads
        self._farthest_tag = tag_limit(comm) - 1
        self.is_used = False
        """Whether there was any message, which may not have been received."""
        waits.at_failure.append(self._keep)

    def send(self, tensor: Tensor, peer: int, tag: int) -> MessageWork:
        """Start sending ``tensor`` to rank ``peer``, which receives as many bytes with the same tag."""
        host = self._stage.host_memory(tensor)
        start = partial(self._comm.Isend, byte_buffer(host), peer, self._checked(tag))
        return self._noted(MessageWork(start, tensor, host, f"send to rank {peer} (tag {tag})", self._waits))

    def receive(self, tensor: Tensor, peer: int | None, tag: int) -> MessageWork:
        """Start receiving into ``tensor`` from rank ``peer``, or from anyone where it is None."""
        host = self._stage.output_memory(tensor)
        self._checked(tag)

        def start() -> MPI.Request | None:
            if peer is not None:
                return self._comm.Irecv(byte_buffer(host), peer, tag)
            # MPICH loses messages from other nodes for which a receive from anyone was posted before they came.
            found = self._comm.Improbe(MPI.ANY_SOURCE, tag)
            return None if found is None else found.Irecv(byte_buffer(host))

        what = f"receive from {'any rank' if peer is None else f'rank {peer}'} (tag {tag})"
        message = MessageWork(start, tensor, host, what, self._waits)
        message.at_arrival = lambda: self._stage.copy_back(tensor, host)
        return self._noted(message)

    def monitored_barrier(self, seconds: float, all_missing: bool) -> None:
        """Wait until every rank is here, or name those that are not.

        Args:
            seconds: How long rank 0 waits for the others, and they for it; not positive: the group's timeout.
            all_missing: Whether rank 0 waits for all before it raises, else it names the first one missing.

        Raises:
            CommunicationError: A rank did not come in time. On rank 0 the message names it.
        """
        self.is_used = True
        seconds = seconds if seconds > 0 else self._timeout
        tag = self._farthest_tag  # a user's messages cannot have it
        nothing = torch.empty(0, dtype=torch.uint8)
        rank, size = self._comm.Get_rank(), self._comm.Get_size()
        end = time.monotonic() + seconds
        if rank > 0:
            self._comm.Isend(byte_buffer(nothing), 0, tag).Free()
            if not self._completes_by(self._comm.Irecv(byte_buffer(nothing), 0, tag), end):
                raise CommunicationError(
                    f"{self._place}: monitored_barrier had no answer from rank 0 within {seconds:g} s; its error says "
                    "which rank is missing"
                )
            return
        missing = []
        for peer in range(1, size):
            if not self._completes_by(self._comm.Irecv(byte_buffer(nothing), peer, tag), end):
                missing.append(peer)
                if not all_missing:
                    break
        if missing:
            raise CommunicationError(
                f"{self._place}: ranks {missing} did not reach monitored_barrier within {seconds:g} s"
            )
        for peer in range(1, size):
            self._comm.Isend(byte_buffer(nothing), peer, tag).Free()

    def _noted(self, message: MessageWork) -> MessageWork:
        self.is_used = True
        while self._under_way and self._under_way[0].is_completed():
            self._under_way.popleft()
        self._under_way.append(message)
        return message

    def _keep(self) -> None:
        """Hold what is under way in a group that was given up."""
        for message in self._under_way:
            message.keep()

    def _completes_by(self, request: MPI.Request, end: float) -> bool:
        while not request.Test():
            self._waits.progress()
            if time.monotonic() > end:
                request.Cancel()
                request.Wait()
                return False
            time.sleep(_NAP_SECONDS)
        return True

    def _checked(self, tag: int) -> int:
        if not 0 <= tag < self._farthest_tag:
            raise ValueError(
                f"{self._place}: tag {tag} is not between 0 and {self._farthest_tag - 1}, what this MPI allows"
            )
        return tag
