"""The nodes of a group, and the slices of each rank in a collective over several nodes. Pure, no communication.

    node 0: ranks 0, 1      |= slice 0, rank 0 =|= slice 1, rank 1 =|
                                   ║                    ║              between the nodes
    node 1: rank 2          |= slice 0, rank 2 =|= slice 1, rank 2 =|

Each slice has one owner on every node, which sums it over the ranks of the node. The owners of a slice then sum it over
the nodes. There are as many slices as the largest node has ranks, so that the links of all of its ranks are used.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_LINE_BYTES = 64


@dataclass(frozen=True)
class NodeLayout:
    """The nodes of one group, seen from one of its ranks."""

    nodes: tuple[tuple[int, ...], ...]  # the ranks of each node, in order; the nodes in the order of their first ranks
    rank: int  # this rank in the group

    @classmethod
    def of(cls, names: Sequence[Hashable], rank: int) -> NodeLayout:
        ranks: dict[Hashable, list[int]] = {}
        for other, name in enumerate(names):
            ranks.setdefault(name, []).append(other)
        return cls(tuple(map(tuple, ranks.values())), rank)

    @property
    def local(self) -> tuple[int, ...]:
        return next(node for node in self.nodes if self.rank in node)

    @property
    def local_rank(self) -> int:
        return self.local.index(self.rank)

    @property
    def elsewhere(self) -> list[int]:
        return sorted(rank for node in self.nodes for rank in node if self.rank not in node)

    @property
    def size(self) -> int:
        return sum(map(len, self.nodes))

    @property
    def slices(self) -> int:
        """The most ranks of a node."""
        return max(map(len, self.nodes))

    def owners(self, index: int) -> tuple[int, ...]:
        return tuple(node[index * len(node) // self.slices] for node in self.nodes)

    def targets(self, index: int) -> tuple[int | None, ...]:
        """For each node the owner of a slice, if it is the first slice of that rank; messages for one rank use that."""
        return tuple(
            owner if index == 0 or owner != before else None
            for owner, before in zip(self.owners(index), self.owners(max(0, index - 1)), strict=True)
        )

    @property
    def own_slices(self) -> range:
        own = [index for index in range(self.slices) if self.rank in self.owners(index)]
        return range(own[0], own[-1] + 1) if own else range(0)

    def bounds(self, numel: int, itemsize: int) -> list[int]:
        """The ``slices + 1`` bounds of the slices of ``numel`` elements, at whole cache lines."""
        line = _LINE_BYTES // itemsize
        lines = -(-numel // line)
        return [min(lines * index // self.slices * line, numel) for index in range(self.slices + 1)]
