"""The arithmetic of an all-reduce over several nodes: in shared memory within each, by links between them.

    all ranks of the node have published     sum own slices over the node       into memory of their own
    then                                     sum them over the nodes            NodeLink, under way by itself
    when that is over                        write them into the memory of all ranks of the node

What is under way between nodes lies in memory of its own: a transport goes on with it in a group that was given up,
and would change gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from ppe_ddp.backends.shared_memory.shared_steps import AllReduceStep, columns, pieces

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from ppe_ddp.backends.process_group.progress_engine import Testable
    from ppe_ddp.backends.shared_memory.node_layout import NodeLayout
    from ppe_ddp.backends.shared_memory.node_link import NodeLink
    from ppe_ddp.backends.shared_memory.shared_steps import Region

_Kind: Any = ReduceOp.RedOpType
# Halves are rounded once, at the end; of int16 no transport need know anything.
_WIRE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.int16: torch.int32}


class WireMemory:
    """Memory for what is under way between nodes, kept from step to step, as fresh memory costs page faults."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """So many elements with arbitrary contents."""
        free = self._free.get((numel, dtype))
        return free.pop() if free else torch.empty(numel, dtype=dtype)

    def give_back(self, memory: Tensor) -> None:
        """Let it be used again: nothing is under way in it."""
        self._free.setdefault((memory.numel(), memory.dtype), []).append(memory)


class _Sent(NamedTuple):
    """A slice that is under way between the nodes."""

    views: tuple[Tensor, ...]
    wire: Tensor
    under_way: Testable


class Crossing:
    """One run of a step between nodes."""

    def __init__(self, sent: Sequence[_Sent]) -> None:
        self.sent = sent

    def is_over(self) -> bool:
        """Whether all slices have arrived; moves them."""
        return all([one.under_way.Test() for one in self.sent])


class TwoLevelAllReduceStep(AllReduceStep):
    """A sum over the ranks of several nodes, in place.

    Args:
        local: This rank's tensor, of the same size and dtype on every rank.
        kind: SUM, AVG or MAX.
        layout: The nodes.
        is_shared: Whether ``local`` lies in shared memory.
    """

    def __init__(self, local: Tensor, kind: Any, layout: NodeLayout, *, is_shared: bool) -> None:
        super().__init__(local, kind, is_shared=is_shared)
        self._layout = layout
        self._size = sum(map(len, layout.nodes))

    def cross(self, links: Sequence[NodeLink], memory: WireMemory) -> Crossing:
        """Sum this rank's slices over the node, and begin to sum them over the nodes."""
        sent = []
        for views, link in zip(self._views, links, strict=False):
            own, *others = views
            if not own.numel():  # on all nodes
                continue
            wire = memory.take(own.numel(), _WIRE.get(own.dtype, own.dtype))
            _sum_up(wire, own, others, self.kind)
            kind = _Kind.MAX if self.kind == _Kind.MAX else _Kind.SUM
            sent.append(_Sent(views, wire, link.all_reduce(wire, kind)))
        return Crossing(sent)

    def spread(self, crossing: Crossing, memory: WireMemory) -> None:
        """Write what has arrived into the memory of all ranks of the node."""
        for views, wire, _ in crossing.sent:
            if self.kind == _Kind.AVG:
                wire.div_(self._size, rounding_mode=None if wire.is_floating_point() else "trunc")
            for source, *targets in columns(wire, *views):
                for target in targets:
                    target.copy_(source)
            memory.give_back(wire)

    def _cut(self, regions: Sequence[Region], rank: int) -> Iterator[tuple[Tensor, ...]]:
        """Of each of this rank's slices its own part and those of the others; an empty one for an empty slice."""
        local, dtype = self.local, self.local.dtype
        bounds = self._layout.bounds(local.numel(), local.itemsize)
        for index in self._layout.own_slices:
            start, stop = bounds[index], bounds[index + 1]
            others = [i for i in range(len(regions)) if i != rank and start < stop]
            yield local[start:stop], *[regions[i].view(dtype, start, stop - start) for i in others]

    def _own_part(self, rank: int, size: int) -> slice:
        bounds, own = self._layout.bounds(self.local.numel(), self.local.itemsize), self._layout.own_slices
        return slice(bounds[own.start], bounds[own.stop])


def two_level_all_reduce_steps(
    flat: Tensor, kind: Any, piece_bytes: int, layout: NodeLayout, *, is_shared: bool
) -> Iterator[TwoLevelAllReduceStep]:
    """The steps of an all-reduce of ``flat``, 1-D, in place."""
    for (piece,) in pieces(piece_bytes, flat):
        yield TwoLevelAllReduceStep(piece, kind, layout, is_shared=is_shared)


def _sum_up(wire: Tensor, own: Tensor, others: Sequence[Tensor], kind: Any) -> None:
    combine = torch.maximum if kind == _Kind.MAX else torch.add
    for total, mine, *theirs in columns(wire, own, *others):
        if theirs and total.dtype is mine.dtype:
            combine(mine, theirs.pop(0), out=total)
        else:
            total.copy_(mine)
        for one in theirs:
            combine(total, one, out=total)
