"""Joins nodes by MPI: all-reduces among ranks of which each is on another node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from ppe_ddp.backends.mpi.mpi_datatypes import reduction_of, typed_buffer

if TYPE_CHECKING:
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
        self._under_way: list[tuple[MPI.Request, Tensor]] = []

    def all_reduce(self, flat: Tensor, kind: Any) -> MPI.Request:
        """Begin to reduce ``flat`` in place."""
        reduction = reduction_of(flat.dtype, kind)
        request = self.comm.Iallreduce(MPI.IN_PLACE, typed_buffer(flat, reduction.datatype), reduction.op)
        self._under_way = [one for one in self._under_way if one[0] != MPI.REQUEST_NULL]
        self._under_way.append((request, flat))
        return request

    def close(self) -> None:
        """Keep the memory of what is under way; the communicator is never used again."""
        for request, flat in self._under_way:
            self._progress.keep(request, flat)
        self._under_way.clear()
