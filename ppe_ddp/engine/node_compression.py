"""Compression between the nodes alone: ranks of a node sum exactly in the memory that they share.

    ranks of a node      flat gradients of a bucket    --exact sum-->    own parameters, over the node
    owners of a slice    own parameters                --compressor-->   their averages over the nodes
    ranks of a node      averages                      --copy-->         flat gradients of all ranks

To the compressor a node is one rank, whose gradient is the mean over the node.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ppe_ddp.backends.group_internals import backend_for, device_types
from ppe_ddp.compression.compressor import together
from ppe_ddp.compression.link import Exchange, Link

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from ppe_ddp.backends.shared_memory.hierarchy import Hierarchy, SliceLink
    from ppe_ddp.compression.compressor import Compressor
    from ppe_ddp.compression.flat_gradients import FlatGradients, Segment
    from ppe_ddp.contracts import Waitable
    from ppe_ddp.engine.exchange_queue import Delivered

_CPU = torch.device("cpu")


def hierarchy_of(group: ProcessGroup) -> Hierarchy | None:
    """What joins the nodes of ``group`` where ranks of several nodes share memory; the same answer on all ranks."""
    if _CPU.type not in device_types(group):
        return None
    hierarchy: Hierarchy | None = getattr(backend_for(group, _CPU), "hierarchy", None)
    return hierarchy


class CrossNodeLinks:
    """What this rank has under way between nodes, for one bucket.

    Args:
        hierarchy: The nodes.

    Attributes:
        hierarchy: The same.
        links: For each slice of this rank.
        device: Where the tensors are.
    """

    def __init__(self, hierarchy: Hierarchy) -> None:
        self.hierarchy = hierarchy
        self.links = [CrossNodeLink(link) for link in hierarchy.links]
        self.device = _CPU

    @property
    def nbytes(self) -> int:
        """What this rank has sent, see :attr:`Link.nbytes`: the other ranks of its node send the rest."""
        return sum(link.nbytes for link in self.links)


class CrossNodeLink(Link):
    """The owners of one slice on all nodes, as compressors see them."""

    def __init__(self, link: SliceLink) -> None:
        super().__init__(None, link.rank, link.size, _CPU)
        self._link = link

    def all_reduce(self, tensor: Tensor) -> Exchange:
        """See :meth:`Link.all_reduce`."""
        if tensor.numel():
            self.nbytes += tensor.nbytes
            yield self._link.all_reduce(tensor.view(-1))

    def all_gather(self, message: Tensor) -> Generator[Waitable, None, Tensor]:
        """See :meth:`Link.all_gather`."""
        rows = message.new_empty((self.size, *message.shape))
        if message.numel():
            self.nbytes += message.nbytes * self.size // 2
            own = _as_bytes(message)
            counts = [len(own)] * self.size
            yield self._link.all_to_all(_as_bytes(rows), own.repeat(self.size), counts, counts)
        return rows

    def all_to_all(self, rows: Tensor) -> Generator[Waitable, None, Tensor]:
        """See :meth:`Link.all_to_all`."""
        received = torch.empty_like(rows)
        if rows.numel():
            self.nbytes += rows.nbytes // 2
            counts = [rows[0].nbytes] * self.size
            yield self._link.all_to_all(_as_bytes(received), _as_bytes(rows), counts, counts)
        return received


def average_between_nodes(
    compressor: Compressor, gradients: FlatGradients, slices: Sequence[int], seeds: Sequence[int], links: CrossNodeLinks
) -> Delivered:
    """Average ``gradients`` over all ranks of the group, in place.

    Args:
        compressor: How, between the nodes.
        gradients: Those of this rank, in their own dtype; all elements are in segments.
        slices: The slice of each segment.
        seeds: One for each slice.
        links: Between the nodes.
    """
    hierarchy, layout = links.hierarchy, links.hierarchy.layout
    parts: list[list[Segment]] = [[] for _ in range(layout.slices)]
    for segment, index in zip(gradients.segments, slices, strict=True):
        parts[index].append(segment)
    reduction = hierarchy.start(gradients.given, [_ranges(part) for part in parts])
    yield reduction.summed
    exchanges = []
    for index, link, total in zip(layout.own_slices, links.links, reduction.sums, strict=True):
        total.mul_(link.size / layout.size)  # so that the mean over the nodes is that over the ranks
        segments, seed = tuple(_packed(parts[index])), seeds[index]
        own = replace(gradients, given=total, average=total, segments=segments, seed=seed)
        exchanges.append(compressor.average(own, link))
    yield from together(exchanges)
    return reduction.deliver()


def _ranges(segments: Sequence[Segment]) -> list[tuple[int, int]]:
    """Where they lie; those next to one another as one."""
    ranges: list[tuple[int, int]] = []
    for segment in segments:
        if ranges and ranges[-1][1] == segment.start:
            ranges[-1] = (ranges[-1][0], segment.stop)
        elif segment.numel:
            ranges.append((segment.start, segment.stop))
    return ranges


def _packed(segments: Sequence[Segment]) -> Generator[Segment, None, None]:
    """The same one after another."""
    start = 0
    for segment in segments:
        yield replace(segment, start=start)
        start += segment.numel


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, 1-D."""
    return tensor.view(-1).view(torch.uint8)
