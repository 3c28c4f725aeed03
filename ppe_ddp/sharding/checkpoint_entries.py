"""Describes the entries that a checkpoint has and those that a module expects, small enough to be sent. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ppe_ddp.engine.torch_internals import holds_tensors
from ppe_ddp.sharding.plain_values import dump_plain
from ppe_ddp.sharding.regions import ShardLayout, shape_of

_EXTRA = "_extra_state"  # as nn.Module names it; anything may stand there


@dataclass(frozen=True)
class SourceEntry:
    """An entry of the checkpoint.

    Attributes:
        key: Its name.
        shape: Of the full tensor; None for an entry that is no tensor.
        dtype: Of the tensor.
        kind: The name of its type.
        content: The bytes of an entry that is no tensor, where it is sent with its description.
    """

    key: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    kind: str
    content: bytes = b""


@dataclass(frozen=True)
class ExpectedEntry:
    """An entry that a module has.

    Attributes:
        key: Its name in the module.
        shape: Of the full tensor; None where any shape will do, or an entry that is no tensor.
        dtype: Of the tensor.
        layout: How it is spread over ranks; None for a tensor that each rank has whole.
        tie: The first key that stands for the same memory; usually the key itself.
    """

    key: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    layout: ShardLayout | None
    tie: str


def describe(state_dict: Mapping[str, Any], *, is_sent: bool) -> list[SourceEntry]:
    """The entries of a checkpoint in memory, or of one that reads its tensors on demand.

    Args:
        state_dict: The checkpoint.
        is_sent: Whether other ranks need what is no tensor.

    Raises:
        TypeError: A key is not a text, an entry is no full tensor, or loading what is no tensor would run code.
    """
    found = []
    for key, value in state_dict.items():
        if not isinstance(key, str):
            raise TypeError(f"the keys of a state_dict are texts, not {type(key).__name__}")
        if isinstance(value, DTensor):
            raise TypeError(f"{key!r} is a DTensor on the rank that has the checkpoint; pass full tensors there")
        if isinstance(value, Tensor) and value.layout is torch.strided and not holds_tensors(value):
            if value.is_meta:
                raise TypeError(f"{key!r} is on the meta device and has no values; pass real tensors")
            found.append(SourceEntry(key, tuple(value.shape), value.dtype, "Tensor"))
        else:
            found.append(SourceEntry(key, None, None, type(value).__name__, _content(key, value) if is_sent else b""))
    return found


def expect(state_dict: Mapping[str, Any], rank: int) -> list[ExpectedEntry]:
    """The entries that a module expects, by its own state_dict of sharded tensors, meta tensors or real ones.

    Args:
        state_dict: Where it was made with ``keep_vars=True``, tied parameters on the meta device are seen.
        rank: The global rank of this process.

    Raises:
        TypeError: An entry is of a kind that cannot be filled.
        ValueError: A DTensor is not split as torch splits.
    """
    first: dict[object, str] = {}
    expected = []
    for key, value in state_dict.items():
        if takes_anything(key, value):
            expected.append(ExpectedEntry(key, None, None, None, key))
            continue
        tie = first.setdefault(_memory(value), key)
        expected.append(ExpectedEntry(key, tuple(value.shape), value.dtype, _layout(key, value, rank), tie))
    return expected


def takes_anything(key: str, value: object) -> bool:
    """Whether an entry of a module does not say what has to come: extra state, and parameters without a shape."""
    return not isinstance(value, Tensor) or key.rpartition(".")[2] == _EXTRA or is_lazy(value)


def _content(key: str, value: object) -> bytes:
    try:
        return dump_plain(value)
    except TypeError as error:
        raise TypeError(f"{key!r} cannot be sent: {error}") from error


def _layout(key: str, value: Tensor, rank: int) -> ShardLayout | None:
    if not isinstance(value, DTensor):
        if holds_tensors(value) or value.layout is not torch.strided:
            raise TypeError(f"{key!r} is a {type(value).__name__} ({value.layout}), which cannot be filled from bytes")
        return None
    local = local_of(value)
    if holds_tensors(local):
        raise TypeError(f"{key!r} holds a {type(local).__name__}, which cannot be filled from bytes")
    try:
        layout = ShardLayout.of(value)
    except ValueError as error:
        raise ValueError(f"{key!r} cannot be loaded: {error}") from None
    region, shape = layout.region(tuple(value.shape), rank), tuple(local.shape)
    if region is not None and shape_of(region) != shape:
        raise ValueError(
            f"{key!r} of shape {tuple(value.shape)} has a shard of shape {shape} on global rank {rank}, where "
            f"{list(layout.placements)} gives {shape_of(region)}; shards of other sizes cannot be loaded"
        )
    return layout


def local_of(value: DTensor) -> Tensor:
    """This rank's shard itself, not a view of it as ``to_local()`` makes while gradients are on."""
    with torch.no_grad():
        return value.to_local()


def _memory(value: Tensor) -> object:
    """A key for the memory of a tensor: the same for two entries that are one tensor."""
    local = local_of(value) if isinstance(value, DTensor) else value
    if local.is_meta or local.numel() == 0:
        return id(value)
    return local.data_ptr(), local.dtype, tuple(local.shape), local.stride(), str(local.device)
