"""Plans the messages of a load: which bytes go to which ranks, in which order.

Pure: every rank computes the same plan from what the ranks agreed on.

    entry   |   a   | b |        c        |      cut into pieces; small ones of a route share a message
    route   | 1 2 3 | * | 1     2     3   |      * all ranks: a broadcast; else a tree from rank 0

A message is what is sent at a time. A rank makes only those that it sends, receives or passes on; the order of
those is the same on all ranks, so there is no deadlock.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from ppe_ddp.sharding.regions import Box, Region, boxes, shape_of

if TYPE_CHECKING:
    import torch

Route: TypeAlias = "tuple[int, ...]"

_ALONE = 256 << 10  # larger pieces are sent from where they lie: a copy would cost more than a message


@dataclass(frozen=True)
class RoutedTensor:
    """One tensor of the checkpoint and the ranks that it goes to.

    Attributes:
        key: Its key in the checkpoint.
        dtype: In which it is sent.
        shares: Regions, and the ranks of the load group that hold each, in order.
    """

    key: str
    dtype: torch.dtype
    shares: tuple[tuple[Region, Route], ...]

    @property
    def nbytes(self) -> int:
        """The size of all regions; one that several ranks hold counts once."""
        return sum(math.prod(shape_of(region)) for region, _ in self.shares) * self.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """A part of one tensor.

    Attributes:
        routed: The tensor.
        region: What the ranks of the route hold of it.
        box: Which part of the region this is.
        offset: Where it starts in the region, in elements.
        numel: How many elements it has.
    """

    routed: RoutedTensor
    region: Region
    box: Box
    offset: int
    numel: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.numel * self.routed.dtype.itemsize


@dataclass
class TransferMessage:
    """One message: pieces that are sent together.

    Attributes:
        route: The ranks that it is for, in order; it comes from rank 0, which may be one of them.
        pieces: What is in it.
        nbytes: The size of all.
    """

    route: Route
    pieces: list[Piece] = field(default_factory=list)
    nbytes: int = 0


def plan_messages(tensors: Sequence[RoutedTensor], rank: int, most: int) -> Iterator[TransferMessage]:
    """The messages that ``rank`` sends, receives or passes on, in their order.

    Args:
        tensors: What is sent, and to whom.
        rank: Of the load group.
        most: Bytes of the largest message.
    """
    filling: dict[Route, TransferMessage] = {}
    for routed in tensors:
        shares = [share for share in routed.shares if rank == 0 or rank in share[1]]
        limit = max(1, most // routed.dtype.itemsize)
        # In turn, so that no rank waits until all of another's share is there.
        for row in itertools.zip_longest(*(_pieces(routed, region, limit) for region, _ in shares)):
            for piece, (_, route) in zip(row, shares, strict=True):
                if piece is None:
                    continue
                if piece.nbytes >= _ALONE:
                    yield TransferMessage(route, [piece], piece.nbytes)
                    continue
                message = filling.setdefault(route, TransferMessage(route))
                if message.pieces and message.nbytes + piece.nbytes > most:
                    yield message
                    message = filling[route] = TransferMessage(route)
                message.pieces.append(piece)
                message.nbytes += piece.nbytes
    yield from (message for message in filling.values() if message.pieces)


def tree(route: Route, rank: int) -> tuple[int | None, list[int]]:
    """From whom ``rank`` gets a message, and to whom it passes it on: a binomial tree from rank 0.

    Returns:
        None for rank 0, which has it; and the ranks to send to, the root of the largest subtree first.
    """
    nodes = [0, *(node for node in route if node != 0)]
    place = nodes.index(rank)
    parent = None if place == 0 else nodes[place & (place - 1)]
    step = place & -place or 1 << (len(nodes) - 1).bit_length()
    children = []
    while step > 1:
        step >>= 1
        if place + step < len(nodes):
            children.append(nodes[place + step])
    return parent, children


def _pieces(routed: RoutedTensor, region: Region, limit: int) -> Iterator[Piece]:
    for box, offset, numel in boxes(shape_of(region), limit):
        yield Piece(routed, region, box, offset, numel)
