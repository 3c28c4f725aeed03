"""The step of a sum over several nodes whose part between the nodes is left to the caller.

A compressor, for one:

all ranks of the node have published     sum own ranges over the node      into memory of its own
then                                     the caller makes them what they are over all nodes
when it says that they are               write them into the memory of all ranks of the node

Memory between the two parts is the rank's own.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from ppe_ddp.backends.shared_memory.shared_steps import AllReduceStep, columns
from ppe_ddp.backends.shared_memory.two_level_steps import WIRE, Crossing, Sent, TwoLevelStep, sum_up

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from ppe_ddp.backends.shared_memory.node_layout import NodeLayout
    from ppe_ddp.backends.shared_memory.node_link import NodeLink
    from ppe_ddp.backends.shared_memory.shared_steps import Region
    from ppe_ddp.backends.shared_memory.two_level_steps import WireMemory


class NodeSumStep(AllReduceStep, TwoLevelStep):
    """A sum over the ranks of a node, in ranges of elements that its caller has chosen; for one run.

    Args:
        local: This rank's tensor, of the same size and dtype on every rank.
        kind: SUM.
        ranges: Of each slice, where its elements begin and end; the same on every rank. What is in none stays.
        layout: The nodes.
        is_shared: Whether ``local`` lies in shared memory.

    Attributes:
        sums: Of each slice of this rank, its ranges one after another, halves in float32; None until they are there.
        is_over_nodes: Whether they are what all ranks shall have.
    """

    name = 3

    def __init__(
        self,
        local: Tensor,
        kind: object,
        ranges: Sequence[Sequence[tuple[int, int]]],
        layout: NodeLayout,
        *,
        is_shared: bool,
    ) -> None:
        super().__init__(local, kind, is_shared=is_shared)
        self._ranges = ranges
        self._own = layout.own_slices
        self.sums: list[Tensor] | None = None
        self.is_over_nodes = False

    def Test(self) -> bool:  # what is under way between the nodes
        """Whether the caller has done its part."""
        return self.is_over_nodes

    def stage(self, memory: Tensor, rank: int, size: int) -> None:
        """Copy what the others sum."""
        self.shared = memory[: self.local.nbytes].view(self.local.dtype)
        for start, stop in self._ranges_of_others():
            self.shared[start:stop].copy_(self.local[start:stop])

    def finish(self, rank: int, size: int) -> None:
        """Take what the others have written."""
        if self.shared is not None and self.shared is not self.local:
            for start, stop in self._ranges_of_others():
                self.local[start:stop].copy_(self.shared[start:stop])

    def cross(self, links: Sequence[NodeLink], memory: WireMemory) -> Crossing:
        """Sum this rank's ranges over the node."""
        sums, views = [], iter(self._views)
        dtype = WIRE.get(self.local.dtype, self.local.dtype)
        for index in self._own:
            sizes = [stop - start for start, stop in self._ranges[index]]
            total = memory.take(sum(sizes), dtype)
            for part in total.split(sizes) if sizes else ():
                own, *others = next(views)
                sum_up(part, own, others, self.kind)
            sums.append(total)
        self.sums = sums
        return Crossing([Sent((), tuple(sums), self)])

    def spread(self, crossing: Crossing, memory: WireMemory) -> None:
        """Write what the sums have become into the memory of all ranks of the node."""
        assert self.sums is not None
        views = iter(self._views)
        for index, total in zip(self._own, self.sums, strict=True):
            sizes = [stop - start for start, stop in self._ranges[index]]
            for part in total.split(sizes) if sizes else ():
                for source, *targets in columns(part, *next(views)):
                    for target in targets:
                        target.copy_(source)
        crossing.give_back(memory)

    def _cut(self, regions: Sequence[Region], rank: int) -> Iterator[tuple[Tensor, ...]]:
        """Each range of this rank: its own part and those of the others of the node."""
        others = [region for i, region in enumerate(regions) if i != rank]
        for start, stop in chain.from_iterable(self._ranges[index] for index in self._own):
            theirs = [region.view(self.local.dtype, start, stop - start) for region in others]
            yield self.local[start:stop], *theirs

    def _ranges_of_others(self) -> Iterator[tuple[int, int]]:
        return chain.from_iterable(ranges for index, ranges in enumerate(self._ranges) if index not in self._own)
