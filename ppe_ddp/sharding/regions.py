"""The regions of a tensor that each rank holds, and how they are cut into pieces. Pure: no communication, no data.

    tensor of 10 rows over 4 ranks, Shard(0)         0 1 2 | 3 4 5 | 6 7 8 | 9

A region is a list of runs ``(start, stop)`` for each dimension. One run is the rule; FSDP over tensor parallelism
(torch's ``_StridedShard``) may leave a rank with several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from ppe_ddp.torch_internals import split_by, strided_shard

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
        placements: One for each mesh dimension: ``()`` replicates, ``(dim,)`` is a Shard, and ``(dim, split_factor)``
            torch's _StridedShard.
    """

    ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    placements: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, tensor: DTensor) -> ShardLayout:
        """The layout of ``tensor``.

        Raises:
            ValueError: A placement is Partial: such a tensor is a sum that has not been made yet.
        """
        placements: list[tuple[int, ...]] = []
        placement: Any
        for placement in tensor.placements:
            if isinstance(placement, Replicate):
                placements.append(())
            elif hasattr(placement, "split_factor"):  # in some versions of torch it is a Shard, in others not
                placements.append((placement.dim, placement.split_factor))
            elif isinstance(placement, Shard):
                placements.append((placement.dim,))
            else:
                raise ValueError(f"it is placed as {placement}, and only Shard and Replicate can be loaded")
        mesh = tensor.device_mesh
        return cls(tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape), tuple(placements))

    def region(self, shape: tuple[int, ...], rank: int) -> Region | None:
        """The region that global rank ``rank`` holds of a tensor of ``shape``; None where it is not in the mesh."""
        if rank not in self.ranks:
            return None
        dims = list(whole(shape))
        place, stride = self.ranks.index(rank), len(self.ranks)
        for placement, parts in zip(self.placements, self.mesh_shape, strict=True):
            stride //= parts
            index, place = divmod(place, stride)
            if placement:
                dims[placement[0]] = _part(dims[placement[0]], placement, parts, index)
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
    if 0 in shape:
        return
    if not shape:
        yield (), 0, 1
        return
    # Dimensions before ``dim`` are cut into single indices, those behind it not at all.
    dim, inner = 0, math.prod(shape[1:])
    while inner > most:
        dim += 1
        inner //= shape[dim]
    tail = tuple((0, size) for size in shape[dim + 1 :])
    rows, offset = max(1, most // inner), 0
    for lead in itertools.product(*map(range, shape[:dim])):
        for start in range(0, shape[dim], rows):
            stop = min(start + rows, shape[dim])
            yield (*((index, index + 1) for index in lead), (start, stop), *tail), offset, (stop - start) * inner
            offset += (stop - start) * inner


def _part(runs: Runs, placement: tuple[int, ...], parts: int, index: int) -> Runs:
    """The runs that a placement gives to the ``index``-th of ``parts``, from a dimension of which ``runs`` are left."""
    count = sum(stop - start for start, stop in runs)
    if len(placement) == 1:
        size = -(-count // parts)
        return _within(runs, min(index * size, count), min((index + 1) * size, count))
    # Only torch knows how this one interleaves: it is given the positions and returns which go where.
    dim, split_factor = placement
    positions = torch.cat([torch.arange(start, stop) for start, stop in runs])
    mine = split_by(strided_shard(dim, split_factor), positions.view([1] * dim + [count]), parts)[index].flatten()
    breaks = (mine.diff() != 1).nonzero().flatten() + 1
    pieces = mine.tensor_split(breaks) if mine.numel() else ()
    return tuple((int(piece[0]), int(piece[-1]) + 1) for piece in pieces) or ((0, 0),)


def _within(runs: Runs, start: int, stop: int) -> Runs:
    """The part from ``start`` to ``stop`` of runs laid one after another; one empty run if there is nothing."""
    found = []
    for first, last in runs:
        size = last - first
        if start < size and stop > 0 and start < stop:
            found.append((first + max(start, 0), first + min(stop, size)))
        start, stop = start - size, stop - size
    return tuple(found) or ((0, 0),)
