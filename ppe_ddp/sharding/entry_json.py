"""Descriptions of entries as JSON, which is what the ranks send to one another: nothing in it can be executed. Pure."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from ppe_ddp.engine.torch_internals import strided_shard
from ppe_ddp.sharding.checkpoint_entries import ExpectedEntry, SourceEntry
from ppe_ddp.sharding.regions import ShardLayout


def sources_to_json(entries: Sequence[SourceEntry]) -> Any:
    """The entries of a checkpoint."""
    return [[e.key, e.shape, _name(e.dtype), e.kind, b64encode(e.content).decode()] for e in entries]


def sources_from_json(sent: Any) -> list[SourceEntry]:
    """What :func:`sources_to_json` was given."""
    return [
        SourceEntry(key, _shape(shape), _dtype(dtype), kind, b64decode(content))
        for key, shape, dtype, kind, content in sent
    ]


def expectations_to_json(entries: Sequence[ExpectedEntry]) -> Any:
    """The entries that a module expects; of its layouts, which are few, each once."""
    layouts: dict[ShardLayout | None, int] = {}
    rows = [
        [e.key, e.shape, _name(e.dtype), layouts.setdefault(e.layout, len(layouts)), e.tie if e.tie != e.key else None]
        for e in entries
    ]
    return {"layouts": [None if layout is None else _layout_to_json(layout) for layout in layouts], "entries": rows}


def expectations_from_json(sent: Any) -> list[ExpectedEntry]:
    """What :func:`expectations_to_json` was given."""
    layouts = [None if layout is None else _layout_from_json(layout) for layout in sent["layouts"]]
    return [
        ExpectedEntry(key, _shape(shape), _dtype(dtype), layouts[layout], key if tie is None else tie)
        for key, shape, dtype, layout, tie in sent["entries"]
    ]


def _layout_to_json(layout: ShardLayout) -> Any:
    return [layout.ranks, layout.mesh_shape, [_placement_to_json(placement) for placement in layout.placements]]


def _layout_from_json(sent: Any) -> ShardLayout:
    ranks, mesh_shape, placements = sent
    return ShardLayout(tuple(ranks), tuple(mesh_shape), tuple(_placement_from_json(one) for one in placements))


def _placement_to_json(placement: Any) -> Any:
    """Replicate, Shard or torch's _StridedShard, the only ones that a layout has."""
    if isinstance(placement, Replicate):
        return []
    return [placement.dim, *([] if type(placement) is Shard else [placement.split_factor])]


def _placement_from_json(sent: Any) -> Any:
    if not sent:
        return Replicate()
    return Shard(sent[0]) if len(sent) == 1 else strided_shard(*sent)


def _shape(sent: Any) -> tuple[int, ...] | None:
    return None if sent is None else tuple(sent)


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _dtype(name: str | None) -> torch.dtype | None:
    dtype = None if name is None else getattr(torch, name)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype of torch")
    return dtype
