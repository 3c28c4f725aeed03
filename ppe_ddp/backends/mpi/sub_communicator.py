"""Makes a communicator of some ranks of another, by a call of these ranks alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI


def sub_communicator(comm: MPI.Intracomm, ranks: Sequence[int], tag: int) -> MPI.Intracomm:
    """A communicator of ``ranks`` of ``comm``, in their order; each of them must call this.

    Args:
        comm: The communicator.
        ranks: In ``comm``.
        tag: Keeps apart those that are made at the same time.
    """
    everyone = comm.Get_group()
    members = everyone.Incl(list(ranks))
    try:
        return comm.Create_group(members, tag)
    finally:  # which MPI keeps until they are given back
        members.Free()
        everyone.Free()
