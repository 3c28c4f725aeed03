"""The regions of a tensor that each rank holds, and how they are cut into pieces. Pure: no communication, no data.

    tensor of 10 rows over 4 ranks, Shard(0)         0 1 2 | 3 4 5 | 6 7 8 | 9

A region is a list of runs ``(start, stop)`` for each dimension. One run is the rule; FSDP over tensor parallelism
(torch's ``_StridedShard``) may leave a rank with several.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ppe_ddp.engine.torch_internals import split_by

if TYPE_CHECKING:
    from torch import Tensor

Run: TypeAlias = "tuple[int, int]"
Runs: TypeAlias = "tuple[Run, ...]"
Region: TypeAlias = "tuple[Runs, ...]"
Box: TypeAlias = "tuple[Run, ...]"


@dataclass(frozen=True)
class ShardLayout:
    """The placement of a DTensor on a device mesh.

    Attributes:
        ranks: The global ranks of the mesh, in row-major order.
        mesh_shape: The sizes of the mesh's dimensions.
        placements: One for each mesh dimension: Replicate, Shard or torch's _StridedShard.
    """

    ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: DTensor) -> ShardLayout:
        """That of ``tensor``.

        Raises:
            ValueError: A placement is Partial: such a tensor is a sum that has not been made yet.
        """
        mesh = tensor.device_mesh
        for placement in tensor.placements:
            if not isinstance(placement, Replicate) and not _is_sharded(placement):
                raise ValueError(f"it is placed as {placement}, and only Shard and Replicate can be loaded")
        return cls(tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape), tuple(tensor.placements))

    def regions(self, shape: tuple[int, ...]) -> dict[int, Region]:
        """What each global rank of the mesh holds of a tensor of ``shape``."""
        return {rank: self._region(shape, place) for place, rank in enumerate(self.ranks)}

    def region(self, shape: tuple[int, ...], rank: int) -> Region | None:
        """What global rank ``rank`` holds of a tensor of ``shape``; None where it is not in the mesh."""
        return self._region(shape, self.ranks.index(rank)) if rank in self.ranks else None

    def _region(self, shape: tuple[int, ...], place: int) -> Region:
        dims = list(whole(shape))
        stride = len(self.ranks)
        for placement, parts in zip(self.placements, self.mesh_shape, strict=True):
            stride //= parts
            index, place = divmod(place, stride)
            if _is_sharded(placement):
                dims[placement.dim] = _part(dims[placement.dim], placement, parts, index)
        return tuple(dims)


def whole(shape: tuple[int, ...]) -> Region:
    """The region that is all of a tensor of ``shape``."""
    return tuple(((0, size),) for size in shape)


def shape_of(region: Region) -> tuple[int, ...]:
    """The shape of a region, packed together."""
    return tuple(sum(stop - start for start, stop in runs) for runs in region)


def cut(tensor: Tensor, region: Region, box: Box) -> Tensor:
    """The values of ``box``, which counts within ``region``: a view where there is one run in each dimension."""
    for dim, (runs, (start, stop)) in enumerate(zip(region, box, strict=True)):
        parts = [tensor.narrow(dim, first, last - first) for first, last in _within(runs, start, stop)]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return tensor


def boxes(shape: tuple[int, ...], most: int) -> Iterator[tuple[Box, int, int]]:
    """Cut a contiguous tensor into boxes of at most ``most`` elements, each contiguous in it.

    Yields:
        A box, where it starts in the flat tensor, and how many elements it has.
    """
    count = math.prod(shape)
    if count == 0:
        return
    # The last dimension whose boxes region_memory more than one index; those before it are cut into single ones.
    dim, inner = 0, count
    for dim, size in enumerate(shape):  # noqa: B007
        inner //= size
        if inner <= most:
            break
    rows = max(1, most // inner)
    offset = 0
    for lead in _indices(shape[:dim]):
        for start in range(0, shape[dim], rows) if shape else (0,):
            stop = min(start + rows, shape[dim]) if shape else 1
            tail = (((start, stop), *((0, size) for size in shape[dim + 1 :]))) if shape else ()
            yield (*((index, index + 1) for index in lead), *tail), offset, (stop - start) * inner
            offset += (stop - start) * inner


def _indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for number in range(math.prod(shape)):
        index = []
        for size in reversed(shape):
            number, last = divmod(number, size)
            index.append(last)
        yield tuple(reversed(index))


def _is_sharded(placement: Any) -> bool:
    # In some versions _StridedShard is a Shard, in others not.
    return isinstance(placement, Shard) or hasattr(placement, "split_factor")


def _part(runs: Runs, placement: Any, parts: int, index: int) -> Runs:
    """What ``placement`` gives to the ``index``-th of ``parts`` from a dimension of which ``runs`` are left."""
    count = sum(stop - start for start, stop in runs)
    if type(placement) is Shard:
        size = -(-count // parts)
        return _within(runs, min(index * size, count), min((index + 1) * size, count))
    # Only torch knows how this one interleaves: it is given the positions and returns which go where.
    positions = torch.arange(count).view([1] * placement.dim + [count])
    chosen = split_by(placement, positions, parts)[index].flatten()
    merged: list[Run] = []
    for first, last in _runs_of(chosen.tolist()):
        for start, stop in _within(runs, first, last):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], stop)
            elif stop > start:
                merged.append((start, stop))
    return tuple(merged) or ((0, 0),)


def _runs_of(positions: list[int]) -> Iterator[Run]:
    start = 0
    for place in range(1, len(positions) + 1):
        if place == len(positions) or positions[place] != positions[place - 1] + 1:
            yield positions[start], positions[place - 1] + 1
            start = place


def _within(runs: Runs, start: int, stop: int) -> Runs:
    """The part from ``start`` to ``stop`` of runs laid one after another; one empty run if there is nothing."""
    found = []
    for first, last in runs:
        size = last - first
        if start < size and stop > 0 and start < stop:
            found.append((first + max(start, 0), first + min(stop, size)))
        start, stop = start - size, stop - size
    return tuple(found) or ((0, 0),)
