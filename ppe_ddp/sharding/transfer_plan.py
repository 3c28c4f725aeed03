"""Plans a load: which ranks get which region of each tensor, and the messages that bring it there.

Pure: every rank computes the same plan from what the ranks agreed on.

    entry   |   a   | b |        c        |      cut into pieces; small ones of a route share a message
    route   | 1 2 3 | * | 1     2     3   |      * all ranks: a broadcast; else a tree from rank 0

A rank makes only the messages that it sends, receives or passes on; their order is the same on all ranks, so there is
no deadlock.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from ppe_ddp.sharding.checkpoint_entries import Box, Region, ShardLayout, boxes, shape_of, whole

if TYPE_CHECKING:
    import torch

    from ppe_ddp.sharding.checkpoint_entries import ExpectedEntry, Match, SourceEntry

Route: TypeAlias = "tuple[int, ...]"

_ALONE = 256 << 10  # larger pieces are sent from where they lie: a copy would cost more than a message


@dataclass(frozen=True)
class RoutedTensor:
    """One tensor of the checkpoint and the ranks that it goes to.

    Attributes:
        key: Its key in the checkpoint.
        dtype: The dtype in which it is sent.
        shares: Regions, and the ranks of the load group that hold each, in order.
    """

    key: str
    dtype: torch.dtype
    shares: tuple[tuple[Region, Route], ...]

    @property
    def nbytes(self) -> int:
        """The size of all regions; one that several ranks hold counts once."""
        return sum(math.prod(shape_of(region)) for region, _ in self.shares) * self.dtype.itemsize


def route_tensors(
    found: Sequence[SourceEntry],
    expectations: Sequence[Sequence[ExpectedEntry]],
    matched: Match,
    ranks: Sequence[int],
    *,
    converts: bool,
) -> list[RoutedTensor]:
    """The tensors that any rank takes, in the order of the checkpoint.

    Args:
        found: What the checkpoint has.
        expectations: What the module of each rank has.
        matched: The sources of their keys.
        ranks: The global rank of each rank of the load group.
        converts: Values become the modules' dtypes; they are then sent in the dtype that has fewer bytes.
    """
    members: dict[int, list[int]] = {}
    for rank, expected in enumerate(expectations):
        members.setdefault(id(expected), []).append(rank)
    tensors = {entry.key: entry for entry in found if entry.shape is not None}
    shares: dict[str, dict[Region, set[int]]] = {}
    dtypes: dict[str, set[torch.dtype | None]] = {}
    # Models have few kinds of layouts and shapes, and many entries.
    known: dict[tuple[ShardLayout | None, tuple[int, ...]], list[Region | None]] = {}
    for expected, holders in ((expectations[holders[0]], holders) for holders in members.values()):
        for entry in expected:
            source = tensors.get(matched.sources.get(entry.key, ""))
            if source is None or source.shape is None:
                continue
            dtypes.setdefault(source.key, set()).add(entry.dtype)
            layout, shape = kind = (entry.layout, source.shape)
            if kind not in known:
                known[kind] = [layout.region(shape, rank) if layout else whole(shape) for rank in ranks]
            for rank in holders:
                region = known[kind][rank]
                if region is not None:
                    shares.setdefault(source.key, {}).setdefault(region, set()).add(rank)
    return [
        RoutedTensor(
            key,
            _wire_dtype(entry.dtype, dtypes[key] if converts else set()),
            tuple((region, tuple(sorted(holders))) for region, holders in shares[key].items()),
        )
        for key, entry in tensors.items()
        if key in shares
    ]


def _wire_dtype(found: torch.dtype | None, wanted: set[torch.dtype | None]) -> torch.dtype:
    assert found is not None
    if len(wanted) == 1:
        (dtype,) = wanted
        if dtype is not None and dtype.itemsize < found.itemsize:
            return dtype
    return found


# ---------------------------------------------------------------------- messages


@dataclass(frozen=True)
class Piece:
    """A part of one tensor.

    Attributes:
        routed: The tensor.
        region: The region of it that the ranks of the route hold.
        box: The part of the region that this is.
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
    """Pieces that are sent together.

    Attributes:
        route: The ranks that it is for, in order; it comes from rank 0, which may be one of them.
        pieces: What is in it.
        nbytes: The size of all.
    """

    route: Route
    pieces: list[Piece] = field(default_factory=list)
    nbytes: int = 0


def plan_messages(tensors: Sequence[RoutedTensor], rank: int, most: int) -> Iterator[TransferMessage]:
    """The messages of at most ``most`` bytes that ``rank`` sends, receives or passes on, in their order."""
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
    yield from filling.values()


def tree(route: Route, rank: int) -> tuple[int | None, list[int]]:
    """The binomial tree from rank 0 on which a message travels.

    Returns:
        From whom ``rank`` gets it, None for rank 0; and to whom it passes it on, the largest subtree first.
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
