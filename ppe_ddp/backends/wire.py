"""The interface of a wire, which moves bytes between processes by gloo or MPI; all else is built on it, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ppe_ddp.waiting import InFlight


class MessageInFlight(InFlight, Protocol):
    """A message to or from one rank; knows its sender."""

    source: int
    """The sender, as a rank of the wire; -1 until the message has arrived."""


class Wire(Protocol):
    """Connects the ranks of one group; all ranks call the collectives in the same order.

    Tensors are 1-D and contiguous, or rows of such. The caller must not touch them until the call is done. The wire
    keeps them alive until then, even after it was given up.

    Attributes:
        size: The number of ranks.
        largest_tag: The largest tag of a message.
        dtypes: The dtypes that :meth:`all_reduce` supports.
        piece_bytes: The size of pieces in which larger messages are faster, begun one after another; 0 to send them
            whole. If it is not 0, the wire advances only in calls of this process. A call then can be neither cancelled
            nor abandoned, and writes even after the wire was given up.
    """

    size: int
    largest_tag: int
    dtypes: frozenset[torch.dtype]
    piece_bytes: int

    def all_reduce(self, flat: Tensor, kind: Any) -> InFlight:
        """Begin to reduce ``flat`` over the ranks, in place, by a ``ReduceOp.RedOpType`` without a division."""

    def broadcast(self, flat: Tensor, root: int) -> InFlight:
        """Begin to overwrite ``flat`` by that of rank ``root``; the same number of bytes on all ranks."""

    def all_gather(self, rows: Tensor, flat: Tensor) -> InFlight:
        """Begin to put the tensors of all ranks, of equal sizes, one after another into ``rows``."""

    def all_to_all(self, output: Tensor, flat: Tensor, receiving: Sequence[int], sending: Sequence[int]) -> InFlight:
        """Begin to send consecutive parts of ``flat`` to the ranks, and to receive theirs into ``output``.

        Both have one dtype. ``receiving`` and ``sending`` have the number of elements for each rank.
        """

    def barrier(self) -> InFlight:
        """Begin a barrier, which is done when every rank has begun it."""

    def send(self, flat: Tensor, peer: int, tag: int) -> MessageInFlight:
        """Begin to send ``flat`` to rank ``peer``."""

    def receive(self, flat: Tensor, peer: int | None, tag: int) -> MessageInFlight:
        """Begin to receive into ``flat`` from rank ``peer``; None stands for any rank that sends with this tag."""

    def close(self) -> None:
        """Close the connections; called when nothing is in flight."""

    def give_up(self) -> None:
        """Drop the connections without waiting for operations in flight."""
