"""The ranks that compressed gradients are exchanged with, and the collectives that this takes.

Each collective is a generator: it starts, yields what is in flight, and returns its result when it is resumed. So a
compressor reads as if it waited, ``rows = yield from link.all_gather(message)``, and several buckets are under way.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from ppe_ddp.backends.collective_arguments import as_bytes
from ppe_ddp.backends.group_internals import backend_for
from ppe_ddp.contracts import Waitable, probe

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

_PIECE_NBYTES = 1 << 18

Exchange = Generator[Waitable, None, None]
"""Yields what its next step waits for; whoever resumes it has waited for that."""


class Link:
    """The ranks on the two sides of what compression is for: a process group whose connection is slow.

    All ranks must start the same collectives in the same order, with the same sizes.

    Args:
        group: Where to communicate; None for a subclass that communicates otherwise.
        rank: This process in the group.
        size: The number of ranks.
        device: Where the tensors are.

    Attributes:
        nbytes: What was sent, as the size of an all-reduce that puts as many bytes on the link: so that it compares
            with the bytes of the gradients whatever the collectives are.
    """

    def __init__(self, group: ProcessGroup | None, rank: int, size: int, device: torch.device) -> None:
        self._group = group
        self.rank = rank
        self.size = size
        self.device = device
        self.nbytes = 0

    def all_reduce(self, tensor: Tensor) -> Exchange:
        """Add up ``tensor``, float32 or float64, in place."""
        if self.size > 1 and tensor.numel():
            self.nbytes += tensor.nbytes
            yield dist.all_reduce(tensor, group=self._group, async_op=True)

    def all_gather(self, message: Tensor) -> Generator[Waitable, None, Tensor]:
        """The messages of all ranks, ``(size, *message.shape)``: contiguous tensors of one shape and dtype."""
        if self.size == 1 or not message.numel():
            return message.expand(self.size, *message.shape)
        self.nbytes += message.nbytes * self.size // 2
        rows = message.new_empty((self.size, *message.shape))
        if self._is_over_gloo():
            yield AllPending(self._gather_in_pieces(rows, message))
            return rows
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        yield gather(as_bytes(rows), as_bytes(message), group=self._group, async_op=True)
        return rows

    def _gather_in_pieces(self, rows: Tensor, message: Tensor) -> list[Waitable]:
        """Begin to gather ``message`` in ``rows``, some bytes at a time.

        Long messages in both directions of a link hold up each other's acknowledgements, and gloo, which sends and
        receives all at once, takes half as long again as for an all-reduce. Pieces go in turns, and take as long.
        """
        sent, received = as_bytes(message), rows.view(self.size, -1).view(torch.uint8)
        started = []
        for begin in range(0, sent.numel(), _PIECE_NBYTES):
            piece = slice(begin, begin + _PIECE_NBYTES)
            pending = dist.all_gather([row[piece] for row in received], sent[piece], group=self._group, async_op=True)
            assert pending is not None  # this rank is in the group
            started.append(pending)
        return started

    def _is_over_gloo(self) -> bool:
        if self._group is None or self.device.type != "cpu":
            return False
        return str(backend_for(self._group, self.device).name()) == "gloo"

    def all_to_all(self, rows: Tensor) -> Generator[Waitable, None, Tensor]:
        """What every rank has in row ``rank`` of ``rows``, a contiguous tensor of one row a rank; in the same shape."""
        if self.size == 1 or not rows.numel():
            return rows
        self.nbytes += rows.nbytes // 2
        received = torch.empty_like(rows)
        yield dist.all_to_all_single(as_bytes(received), as_bytes(rows), group=self._group, async_op=True)
        return received


class AllPending:
    """Several things in flight, waited for as one."""

    def __init__(self, parts: list[Waitable]) -> None:
        self.parts = parts

    def is_completed(self) -> bool:
        """Whether all of them are; asks each, since asking may be what advances it."""
        return all([is_completed(one) for one in self.parts])

    def wait(self) -> None:
        """Wait for one after another."""
        for one in self.parts:
            one.wait()


def is_completed(pending: Waitable) -> bool:
    """Whether waiting would return at once, without waiting."""
    is_done = probe(pending)
    return is_done is None or bool(is_done())
