"""The non-blocking collectives of one communicator: begins them, and knows which were begun.

Apart from the collectives on tensors because MPI can neither cancel one that was begun, nor free a communicator in
which one is under way. What was begun, and by which arguments, lets a rank that has not come so far make it up, so that
it ends, when all ranks have given the group up.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI
from torch import Tensor

from ppe_ddp.backends.mpi.mpi_datatypes import byte_buffer, typed_buffer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_REMEMBERED = 64  # calls; ranks are apart by a few, as only a root or a leaf ends before all others have come
_UNEVEN = ("gather", "scatter", "reduce_scatter_list")  # whose arguments are not known on all ranks: never made up

Call = list[Any]
"""The name of a collective, and its arguments as JSON can write them, tensors by number and dtype of their elements."""


class NonblockingCalls:
    """Begins the collectives of one communicator; their memory must outlive them.

    Args:
        comm: The communicator.

    Attributes:
        comm: The communicator.
        count: How many collectives were begun.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.count = 0
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._last: deque[tuple[Any, ...]] = deque(maxlen=_REMEMBERED)

    def all_reduce(self, wire: Tensor, datatype: MPI.Datatype, op: MPI.Op) -> MPI.Request:
        """Reduce ``wire`` in place."""
        request = self.comm.Iallreduce(MPI.IN_PLACE, typed_buffer(wire, datatype), op)
        return self._begun(request, "all_reduce", wire, datatype, op)

    def reduce(self, wire: Tensor, datatype: MPI.Datatype, op: MPI.Op, root: int) -> MPI.Request:
        """Reduce into ``wire`` of rank ``root``."""
        buffer = typed_buffer(wire, datatype)
        if self._rank == root:
            request = self.comm.Ireduce(MPI.IN_PLACE, buffer, op, root)
        else:
            request = self.comm.Ireduce(buffer, None, op, root)
        return self._begun(request, "reduce", wire, datatype, op, root)

    def broadcast(self, piece: Tensor, root: int) -> MPI.Request:
        """Overwrite ``piece`` by that of rank ``root``."""
        return self._begun(self.comm.Ibcast(byte_buffer(piece), root), "broadcast", piece, root)

    def all_gather(self, result: Tensor, part: Tensor) -> MPI.Request:
        """Put the equal parts of all ranks one after another into ``result``."""
        block = (byte_buffer(result)[0], part.nbytes, MPI.BYTE)  # mpi4py wants the count of one rank's part
        return self._begun(self.comm.Iallgather(byte_buffer(part), block), "all_gather", result, part)

    def all_gather_list(self, result: Tensor, counts: Sequence[int], part: Tensor) -> MPI.Request:
        """Put the parts of all ranks, of ``counts[i]`` bytes, one after another into ``result``."""
        request = self.comm.Iallgatherv(byte_buffer(part), [byte_buffer(result)[0], counts, MPI.BYTE])
        return self._begun(request, "all_gather_list", counts)

    def reduce_scatter(self, part: Tensor, wire: Tensor, datatype: MPI.Datatype, op: MPI.Op) -> MPI.Request:
        """Reduce; each rank gets its equal part of ``wire``."""
        block = (typed_buffer(wire, datatype)[0], part.numel(), datatype)
        request = self.comm.Ireduce_scatter_block(block, typed_buffer(part, datatype), op)
        return self._begun(request, "reduce_scatter", part, wire, datatype, op)

    def reduce_scatter_list(
        self, part: Tensor, wire: Tensor, counts: Sequence[int], datatype: MPI.Datatype, op: MPI.Op
    ) -> MPI.Request:
        """Reduce; rank i gets the i-th part of ``wire``, of ``counts[i]`` elements."""
        send, receive = typed_buffer(wire, datatype), typed_buffer(part, datatype)
        return self._begun(self.comm.Ireduce_scatter(send, receive, counts, op), "reduce_scatter_list")

    def all_to_all(self, result: Tensor, receiving: Sequence[int], wire: Tensor, sending: Sequence[int]) -> MPI.Request:
        """Send ``sending[j]`` bytes of ``wire`` to rank j, and receive ``receiving[i]`` bytes from rank i."""
        there, here = [byte_buffer(wire)[0], sending, MPI.BYTE], [byte_buffer(result)[0], receiving, MPI.BYTE]
        return self._begun(self.comm.Ialltoallv(there, here), "all_to_all", receiving, sending)

    def gather(self, result: Tensor | None, counts: Sequence[int], part: Tensor, root: int) -> MPI.Request:
        """Put rank i's ``part`` of ``counts[i]`` bytes into ``result`` of rank ``root``, which is None elsewhere."""
        receive = None if result is None else [byte_buffer(result)[0], counts, MPI.BYTE]
        return self._begun(self.comm.Igatherv(byte_buffer(part), receive, root), "gather")

    def scatter(self, part: Tensor, wire: Tensor | None, counts: Sequence[int], root: int) -> MPI.Request:
        """Put ``counts[i]`` bytes of ``wire`` of rank ``root``, which is None elsewhere, into rank i's ``part``."""
        send = None if wire is None else [byte_buffer(wire)[0], counts, MPI.BYTE]
        return self._begun(self.comm.Iscatterv(send, byte_buffer(part), root), "scatter")

    def barrier(self) -> MPI.Request:
        """Complete when every rank has begun it."""
        return self._begun(self.comm.Ibarrier(), "barrier")

    def _begun(self, request: MPI.Request, *call: Any) -> MPI.Request:
        self.count += 1
        # not the tensors themselves, which must not live longer for it
        self._last.append(tuple([(word.numel(), word.dtype) if isinstance(word, Tensor) else word for word in call]))
        return request

    def since(self, count: int) -> list[Call]:
        """The calls after the first ``count``; those that are not remembered are left out."""
        missing = min(self.count - count, len(self._last))
        return [[_written(word) for word in call] for call in list(self._last)[len(self._last) - missing :]]

    def make_up(self, calls: Mapping[int, Call]) -> tuple[MPI.Request, Any]:
        """Begin a collective that this rank has not come to, with numbers that mean nothing.

        Args:
            calls: Of the ranks that have begun it; :func:`fit` holds.

        Returns:
            The request, and its memory.
        """
        name, *words = next(iter(calls.values()))
        if name == "all_to_all":
            receiving, sending = (
                [calls[rank][place][self._rank] if rank in calls else 0 for rank in range(self._size)]
                for place in (2, 1)  # what another sends is what this one receives
            )
            arguments = [_bytes(sum(receiving)), receiving, _bytes(sum(sending)), sending]
        elif name == "all_gather_list":
            (counts,) = words
            arguments = [_bytes(sum(counts)), counts, _bytes(counts[self._rank])]
        else:
            arguments = [_read(word) for word in words]
        return getattr(self, name)(*arguments), arguments


def fit(calls: Sequence[Call]) -> bool:
    """Whether these, of one rank each, belong to one collective that other ranks can make up."""
    name = calls[0][0]
    if name in _UNEVEN:
        return False
    return all(call[0] == name if name == "all_to_all" else call == calls[0] for call in calls)


def _written(word: Any) -> Any:
    if isinstance(word, MPI.Datatype):
        return {"datatype": word.py2f()}
    if isinstance(word, MPI.Op):
        return {"op": word.py2f()}
    if isinstance(word, tuple):
        numel, dtype = word
        return {"numel": numel, "dtype": str(dtype).removeprefix("torch.")}
    return word if isinstance(word, str | int) else list(word)


def _read(word: Any) -> Any:
    match word:
        case {"datatype": number}:
            return MPI.Datatype.f2py(number)
        case {"op": number}:
            return MPI.Op.f2py(number)
        case {"numel": numel, "dtype": name}:
            return torch.zeros(numel, dtype=getattr(torch, name))
    return word


def _bytes(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8)
