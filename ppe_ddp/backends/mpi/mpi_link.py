"""Joins nodes by MPI: collectives among ranks of which each is on another node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from ppe_ddp.backends.mpi.mpi_datatypes import byte_buffer, reduction_of, typed_buffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ppe_ddp.backends.process_group.progress_engine import ProgressEngine


class MpiLink:
    """See :class:`~ppe_ddp.backends.shared_memory.node_link.NodeLink`.

    Args:
        comm: A communicator of these ranks.
        progress: Keeps what is under way when the link is closed, which cannot be cancelled.
    """

    def __init__(self, comm: MPI.Intracomm, progress: ProgressEngine) -> None:
        self.comm = comm
        self._progress = progress
        self._under_way: list[tuple[MPI.Request, tuple[Tensor, ...]]] = []

    def all_reduce(self, flat: Tensor, kind: Any) -> MPI.Request:
        """Begin to reduce ``flat`` in place."""
        reduction = reduction_of(flat.dtype, kind)
        request = self.comm.Iallreduce(MPI.IN_PLACE, typed_buffer(flat, reduction.datatype), reduction.op)
        return self._noted(request, flat)

    def broadcast(self, flat: Tensor, source: int) -> MPI.Request:
        """Begin to overwrite ``flat`` by that of one rank."""
        return self._noted(self.comm.Ibcast(byte_buffer(flat), source), flat)

    def all_to_all(self, output: Tensor, flat: Tensor, receiving: Sequence[int], sending: Sequence[int]) -> MPI.Request:
        """Begin to send parts of ``flat`` to the ranks, and to receive theirs."""
        size = flat.itemsize
        send = [byte_buffer(flat)[0], [count * size for count in sending], MPI.BYTE]
        receive = [byte_buffer(output)[0], [count * size for count in receiving], MPI.BYTE]
        return self._noted(self.comm.Ialltoallv(send, receive), output, flat)

    def _noted(self, request: MPI.Request, *memory: Tensor) -> MPI.Request:
        self._under_way = [one for one in self._under_way if one[0] != MPI.REQUEST_NULL]
        self._under_way.append((request, memory))
        return request

    def close(self) -> None:
        """Nothing: communicators are freed with that of the group."""

    def give_up(self) -> None:
        """Keep the memory of what is under way; the communicator is never used again."""
        for request, memory in self._under_way:
            self._progress.keep(request, memory)
        self._under_way.clear()
