"""Decides which ranks get which region of each tensor of the checkpoint. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ppe_ddp.sharding.regions import Region, ShardLayout, whole
from ppe_ddp.sharding.transfer_plan import RoutedTensor

if TYPE_CHECKING:
    import torch

    from ppe_ddp.sharding.checkpoint_entries import ExpectedEntry, SourceEntry
    from ppe_ddp.sharding.key_matching import Match


def route_tensors(
    found: Sequence[SourceEntry],
    expectations: Sequence[Sequence[ExpectedEntry]],
    matched: Match,
    ranks: Sequence[int],
    *,
    converts: bool,
) -> list[RoutedTensor]:
    """One for each tensor that any rank takes, in the order of the checkpoint.

    Args:
        found: What the checkpoint has.
        expectations: What each rank's module has.
        matched: Which keys are loaded, from where.
        ranks: The global rank of each rank of the load group.
        converts: Whether values become the modules' dtypes; they are then sent in the dtype that has fewer bytes.
    """
    shares: dict[str, dict[Region, set[int]]] = {}
    dtypes: dict[str, set[torch.dtype | None]] = {}
    tensors = {entry.key: entry for entry in found if entry.shape is not None}
    known: dict[tuple[ShardLayout | None, tuple[int, ...]], Mapping[int, Region]] = {}
    for expected, members in _alike(expectations):
        for entry in expected:
            source = tensors.get(matched.sources.get(entry.key, ""))
            if source is None or source.shape is None:
                continue
            dtypes.setdefault(source.key, set()).add(entry.dtype)
            # Models have few kinds of layouts and shapes, and many entries.
            kind = (entry.layout, source.shape)
            if kind not in known:
                known[kind] = _regions(entry.layout, source.shape, ranks)
            holders = shares.setdefault(source.key, {})
            for rank, region in known[kind].items():
                if rank in members:
                    holders.setdefault(region, set()).add(rank)
    return [
        RoutedTensor(
            key,
            _wire_dtype(tensors[key].dtype, dtypes[key] if converts else set()),
            tuple((region, tuple(sorted(holders))) for region, holders in shares[key].items()),
        )
        for key in tensors
        if key in shares
    ]


def _alike(expectations: Sequence[Sequence[ExpectedEntry]]) -> list[tuple[Sequence[ExpectedEntry], set[int]]]:
    """The different expectations, and the ranks that have each."""
    groups: dict[int, tuple[Sequence[ExpectedEntry], set[int]]] = {}
    for rank, expected in enumerate(expectations):
        groups.setdefault(id(expected), (expected, set()))[1].add(rank)
    return list(groups.values())


def _regions(layout: ShardLayout | None, shape: tuple[int, ...], ranks: Sequence[int]) -> dict[int, Region]:
    """What each rank of the load group holds; nothing where it has no part."""
    if layout is None:
        return dict.fromkeys(range(len(ranks)), whole(shape))
    held = layout.regions(shape)
    return {rank: held[name] for rank, name in enumerate(ranks) if name in held}


def _wire_dtype(found: torch.dtype | None, wanted: set[torch.dtype | None]) -> torch.dtype:
    assert found is not None
    if len(wanted) == 1:
        (dtype,) = wanted
        if dtype is not None and dtype.itemsize < found.itemsize:
            return dtype
    return found
