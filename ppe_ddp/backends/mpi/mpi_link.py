"""Joins nodes by MPI: collectives among ranks of which each is on another node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from ppe_ddp.backends.mpi.mpi_datatypes import reduction_of
from ppe_ddp.backends.mpi.nonblocking_calls import NonblockingCalls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ppe_ddp.backends.mpi.communicator_release import UnderWay
    from ppe_ddp.backends.process_group.progress_engine import ProgressEngine


class MpiLink:
    """See :class:`~ppe_ddp.backends.shared_memory.node_link.NodeLink`.

    Args:
        comm: A communicator of these ranks.
        progress: Keeps what is under way when the link is given up, which cannot be cancelled.

    Attributes:
        calls: The collectives of the communicator.
        left: What was under way when the link was given up.
    """

    def __init__(self, comm: MPI.Intracomm, progress: ProgressEngine) -> None:
        self.calls = NonblockingCalls(comm)
        self.left: list[UnderWay] = []
        self._progress = progress
        self._under_way: list[UnderWay] = []

    def all_reduce(self, flat: Tensor, kind: Any) -> MPI.Request:
        """Begin to reduce ``flat`` in place."""
        reduction = reduction_of(flat.dtype, kind)
        return self._noted(self.calls.all_reduce(flat, reduction.datatype, reduction.op), flat)

    def broadcast(self, flat: Tensor, source: int) -> MPI.Request:
        """Begin to overwrite ``flat`` by that of one rank."""
        return self._noted(self.calls.broadcast(flat, source), flat)

    def all_to_all(self, output: Tensor, flat: Tensor, receiving: Sequence[int], sending: Sequence[int]) -> MPI.Request:
        """Begin to send parts of ``flat`` to the ranks, and to receive theirs."""
        size = flat.itemsize
        bytes_in, bytes_out = [count * size for count in receiving], [count * size for count in sending]
        return self._noted(self.calls.all_to_all(output, bytes_in, flat, bytes_out), output, flat)

    def _noted(self, request: MPI.Request, *memory: Tensor) -> MPI.Request:
        self._under_way = [one for one in self._under_way if one[0] != MPI.REQUEST_NULL]
        self._under_way.append((request, memory))
        return request

    def close(self) -> None:
        """Nothing: communicators are freed with that of the group."""

    def give_up(self) -> None:
        """Keep the memory of what is under way."""
        for request, memory in self._under_way:
            self._progress.keep(request, memory)
        self.left += self._under_way
        self._under_way.clear()
