"""The contract of what moves bytes between processes: gloo's and MPI's calls behind one interface.

Collectives, process groups, shared memory and two levels stand above it, once for all wires.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ppe_ddp.waiting import InFlight

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor


class MessageInFlight(InFlight, Protocol):
    """A message to or from one rank; knows its sender."""

    source: int
    """Who has sent it, as a rank of the wire; -1 until it has arrived."""


class Wire(Protocol):
    """Joins the ranks of one group; all of them call each collective in the same order.

    Tensors are 1-D and contiguous, or rows of such. They must be left alone until the call is done; the wire keeps them
    alive until then, also when it was given up.

    Attributes:
        size: How many ranks it joins.
        largest_tag: That messages may have.
        dtypes: The dtypes that :meth:`all_reduce` can compute with.
        piece_bytes: What is larger is faster in pieces of this size, begun one after another; 0 where it is not. Where
            it is not 0, a call can neither be cancelled nor abandoned, and writes after the wire was given up.
    """

    size: int
    largest_tag: int
    dtypes: frozenset[torch.dtype]
    piece_bytes: int

    def all_reduce(self, flat: Tensor, kind: Any) -> InFlight:
        """Begin to reduce ``flat`` over the ranks, in place, by a ``ReduceOp.RedOpType`` without a division."""
        ...

    def broadcast(self, flat: Tensor, root: int) -> InFlight:
        """Begin to overwrite ``flat`` by that of rank ``root``; its size in bytes is the same on all."""
        ...

    def all_gather(self, rows: Tensor, flat: Tensor) -> InFlight:
        """Begin to put the tensors of all ranks, of equal sizes, one after another into ``rows``."""
        ...

    def all_to_all(self, output: Tensor, flat: Tensor, receiving: Sequence[int], sending: Sequence[int]) -> InFlight:
        """Begin to send parts of ``flat`` to the ranks, one after another, and to receive theirs into ``output``.

        Both have one dtype; so many elements come from each rank, and go to each.
        """
        ...

    def barrier(self) -> InFlight:
        """Begin what is done when every rank has begun it."""
        ...

    def send(self, flat: Tensor, peer: int, tag: int) -> MessageInFlight:
        """Begin to send ``flat`` to rank ``peer``."""
        ...

    def receive(self, flat: Tensor, peer: int | None, tag: int) -> MessageInFlight:
        """Begin to receive into ``flat`` from rank ``peer``, or from whoever sends with this tag."""
        ...

    def close(self) -> None:
        """End the connections; nothing is under way."""
        ...

    def give_up(self) -> None:
        """Drop the connections without waiting for what is under way."""
        ...
