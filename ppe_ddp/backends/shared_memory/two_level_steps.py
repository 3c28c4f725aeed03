"""The arithmetic of collectives over several nodes: in shared memory within each node, by wires between nodes.

    TwoLevelAllReduceStep
        all ranks of the node have published     sum own slices over the node, into separate memory
        then                                     sum them over the nodes, by a Wire
        when that is done                        write them into the memory of all ranks of the node
    TwoLevelAllReduceStep with a ``source``, the only node with data
        all ranks of that node have published    sum own slices over the node, into separate memory
        then, on all nodes                       send them to the other nodes, by a Wire: half as many bytes
        when that is done                        write them into the memory of all ranks of the node
    TwoLevelReduceScatterStep
        all ranks of the node have published     sum own row over the node, and the rows of the owners of the same
                                                 slices on the other nodes
        then                                     send each of these owners its row, by a Wire
        when rows for this rank have come        sum them, in the order of nodes
    TwoLevelAllGatherStep
        all ranks of the node have published     write own share into the memory of all ranks of the node; send it to
                                                 the owner of the same slice on every other node, by a Wire
        when other shares have come              write them into the memory of all ranks of the node

Messages between nodes have memory of their own: after a group was given up, a transport may still write there, and
would otherwise change gradients.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ppe_ddp.backends.shared_memory.node_layout import NodeLayout
from ppe_ddp.backends.shared_memory.shared_steps import (
    AllGatherStep,
    AllReduceStep,
    ReduceScatterStep,
    Region,
    RowsStep,
    Scratch,
    Step,
    columns,
    divide,
    pieces,
    sum_up,
)
from ppe_ddp.backends.wire import Wire
from ppe_ddp.waiting import InFlight

_Kind: Any = ReduceOp.RedOpType
# The dtypes that are sent: half precision is rounded once, at the end, and transports need not support int16.
WIRE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.int16: torch.int32}

_UNIT_BYTES = 1 << 16
_MOST_FREE = 8  # pieces that are kept; few are in flight at a time


class WireMemory:
    """Memory for messages between nodes; some is kept, as fresh memory costs page faults."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = numel * dtype.itemsize
        if not nbytes:
            return torch.empty(0, dtype=dtype, device="cpu")
        fitting = [memory for memory in self._free if memory.numel() >= nbytes]
        if fitting:
            memory = min(fitting, key=torch.Tensor.numel)
            self._free = [one for one in self._free if one is not memory]
        else:
            memory = torch.empty(-(-nbytes // _UNIT_BYTES) * _UNIT_BYTES, dtype=torch.uint8, device="cpu")
        self._lent[memory.data_ptr()] = memory
        return memory[:nbytes].view(dtype)

    def give_back(self, wire: Tensor) -> None:
        if wire.numel():
            self._free.append(self._lent.pop(wire.data_ptr()))
            del self._free[:-_MOST_FREE]


class Sent(NamedTuple):
    """The messages in flight between nodes for one of this rank's slices."""

    views: tuple[Tensor, ...]  # the memory for the result
    wires: tuple[Tensor, ...]  # the memory of the messages; the first is that of received data
    under_way: InFlight


class Crossing(NamedTuple):
    """One run of a step between nodes."""

    sent: list[Sent]
    own: Tensor | None = None  # this rank's own row, summed over its node (reduce-scatter)

    @property
    def nbytes(self) -> int:
        return sum(wire.nbytes for one in self.sent for wire in one.wires)

    def done(self) -> bool:
        return all([one.under_way.done() for one in self.sent])

    def give_back(self, memory: WireMemory) -> None:
        for wire in [wire for one in self.sent for wire in one.wires] + ([] if self.own is None else [self.own]):
            memory.give_back(wire)


class TwoLevelStep(Step):
    """A step of a group of several nodes, in two parts: :meth:`cross` and :meth:`spread`."""

    def act(self, scratch: Scratch) -> None:
        """Do nothing: :meth:`cross` and :meth:`spread` do the work."""

    @abstractmethod
    def cross(self, links: Sequence[Wire], memory: WireMemory) -> Crossing:
        """Do this rank's part within the node, and begin the messages between nodes; ``links`` has one a slice."""

    @abstractmethod
    def spread(self, crossing: Crossing, memory: WireMemory) -> None:
        """Copy the received results to the ranks of the node."""


class TwoLevelAllReduceStep(AllReduceStep, TwoLevelStep):
    """A sum over the ranks of several nodes, in place.

    ``source`` is the number of the only node whose tensors are not zero, which sends its sum to the others. None sums
    over the nodes.
    """

    def __init__(
        self, local: Tensor, kind: Any, layout: NodeLayout, source: int | None = None, *, is_shared: bool
    ) -> None:
        super().__init__(local, kind, is_shared=is_shared)
        self._layout = layout
        self._source = source
        self._size = sum(map(len, layout.nodes))

    def cross(self, links: Sequence[Wire], memory: WireMemory) -> Crossing:
        sent = []
        has_some = self._source is None or self._layout.nodes[self._source] == self._layout.local
        for views, link in zip(self._views, links, strict=False):
            own = views[0]
            if not own.numel():  # on all nodes
                continue
            wire = memory.take(own.numel(), WIRE.get(own.dtype, own.dtype))
            if has_some:
                _sum_over_node(wire, views, self.kind)
            if self._source is not None:
                under_way = link.broadcast(wire, self._source)
            else:
                under_way = link.all_reduce(wire, _Kind.MAX if self.kind == _Kind.MAX else _Kind.SUM)
            sent.append(Sent(views, (wire,), under_way))
        return Crossing(sent)

    def spread(self, crossing: Crossing, memory: WireMemory) -> None:
        for views, (wire,), _ in crossing.sent:
            divide(wire, self.kind, self._size)
            _spread(wire, views)
        crossing.give_back(memory)

    def _cut(self, regions: Sequence[Region], rank: int) -> Iterator[tuple[Tensor, ...]]:
        """For each slice of this rank: its own part and those of the other ranks of the node; empty if that is."""
        local, dtype = self.local, self.local.dtype
        bounds = self._layout.bounds(local.numel(), local.itemsize)
        for index in self._layout.own_slices:
            start, stop = bounds[index], bounds[index + 1]
            others = [i for i in range(len(regions)) if i != rank and start < stop]
            yield local[start:stop], *[regions[i].view(dtype, start, stop - start) for i in others]

    def _own_part(self, rank: int, size: int) -> slice:
        bounds, own = self._layout.bounds(self.local.numel(), self.local.itemsize), self._layout.own_slices
        return slice(bounds[own.start], bounds[own.stop])


class TwoLevelReduceScatterStep(ReduceScatterStep, TwoLevelStep):
    """A sum of rows over the ranks of several nodes; each rank gets its own row.

    A row is sent by the link of the first slice that its rank owns. Arguments are those of :class:`ReduceScatterStep`.
    """

    def __init__(self, result: Tensor, rows: Tensor, kind: Any, layout: NodeLayout, *, is_shared: bool) -> None:
        super().__init__(result, rows, kind, is_shared=is_shared)
        self._layout = layout
        self._targets = [layout.targets(index) for index in layout.own_slices]

    def stage(self, memory: Tensor, rank: int, size: int) -> None:
        super().stage(memory, self._layout.rank, len(self.local))

    def cross(self, links: Sequence[Wire], memory: WireMemory) -> Crossing:
        if not self._views:
            return Crossing([])
        dtype = WIRE.get(self.local.dtype, self.local.dtype)
        width, views = self.local.shape[1], iter(self._views)
        own = memory.take(width, dtype)
        _sum_over_node(own, next(views), self.kind)
        sent = []
        for count, (link, targets) in enumerate(zip(links, self._targets, strict=True)):
            owners = self._layout.owners(self._layout.own_slices[count])
            sending = [int(target is not None and target != self._layout.rank) for target in targets]
            receiving = [int(count == 0 and owner != self._layout.rank) for owner in owners]
            wire, come = memory.take(width * sum(sending), dtype), memory.take(width * sum(receiving), dtype)
            for part in wire.view(-1, width) if any(sending) else ():
                _sum_over_node(part, next(views), self.kind)
            under_way = link.all_to_all(come, wire, [width * n for n in receiving], [width * n for n in sending])
            sent.append(Sent((), (come, wire), under_way))
        return Crossing(sent, own)

    def spread(self, crossing: Crossing, memory: WireMemory) -> None:
        if crossing.own is None:
            return
        rows = list(crossing.sent[0].wires[0].view(-1, self.local.shape[1]))
        rows.insert(self._layout.nodes.index(self._layout.local), crossing.own)
        total, *others = rows
        for one in others:
            (torch.maximum if self.kind == _Kind.MAX else torch.add)(total, one, out=total)
        divide(total, self.kind, len(self.local))
        self._result.copy_(total)
        crossing.give_back(memory)

    def _cut(self, regions: Sequence[Region], rank: int) -> Iterator[tuple[Tensor, ...]]:
        """For this rank's row, and each row that it sends: its own part and those of the other ranks of the node."""
        count, dtype = self.local.shape[1], self.local.dtype
        sent = [target for targets in self._targets for target in targets if target not in (None, self._layout.rank)]
        for row in (self._layout.rank, *sent):
            others = [region for i, region in enumerate(regions) if i != rank]
            yield self.local[row], *[region.view(dtype, row * region.stride, count) for region in others]


class TwoLevelAllGatherStep(RowsStep, TwoLevelStep):
    """An all-gather over the ranks of several nodes.

    A rank publishes the rows of its output, into which the other ranks of its node write. A share is sent by the link
    of the first slice that its rank owns. Arguments are those of :class:`AllGatherStep`; ``is_shared`` tells of
    ``rows``, not of ``share``.
    """

    name = AllGatherStep.name

    def __init__(self, rows: Tensor, share: Tensor, layout: NodeLayout, *, is_shared: bool) -> None:
        super().__init__(rows, _Kind.SUM, is_shared=is_shared)
        self._share = share
        self._layout = layout

    def finish(self, rank: int, size: int) -> None:
        if self.shared is not None and self.shared is not self.local:
            self.local.copy_(self.shared)

    def cross(self, links: Sequence[Wire], memory: WireMemory) -> Crossing:
        if not self._views:
            return Crossing([])
        layout, width = self._layout, self._share.numel()
        self._write(layout.rank, self._share)
        sent = []
        for count, (index, link) in enumerate(zip(layout.own_slices, links, strict=True)):
            receiving = [int(target is not None and target != layout.rank) for target in layout.targets(index)]
            sending = [int(count == 0 and owner != layout.rank) for owner in layout.owners(index)]
            come = memory.take(width * sum(receiving), self._share.dtype)
            wire = memory.take(width * sum(sending), self._share.dtype)
            wire.view(-1, width).copy_(self._share.expand(sum(sending), width))
            under_way = link.all_to_all(come, wire, [width * n for n in receiving], [width * n for n in sending])
            sent.append(Sent((), (come, wire), under_way))
        return Crossing(sent)

    def spread(self, crossing: Crossing, memory: WireMemory) -> None:
        for index, (_, (come, _), _) in zip(self._layout.own_slices, crossing.sent, strict=False):
            targets = [one for one in self._layout.targets(index) if one not in (None, self._layout.rank)]
            for target, part in zip(targets, come.split(self._share.numel()) if targets else (), strict=True):
                assert target is not None
                self._write(target, part)
        crossing.give_back(memory)

    def _write(self, row: int, source: Tensor) -> None:
        for target in self._views[row]:
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)

    def _cut(self, regions: Sequence[Region], rank: int) -> Iterator[tuple[Tensor, ...]]:
        """For each row: its views on all ranks of the node."""
        width, dtype = self.local.shape[1], self.local.dtype
        for row in range(len(self.local)):
            yield tuple(region.view(dtype, row * region.stride, width) for region in regions)


class NodeSumStep(AllReduceStep, TwoLevelStep):
    """A sum over the ranks of a node in ranges of the caller's, which does the exchange between the nodes itself.

    A compressor uses it:

        all ranks of the node have published     sum own ranges over the node, into separate memory
        then                                     the caller replaces them by the results over all nodes
        when it has set ``is_over_nodes``        write them into the memory of all ranks of the node

    It is for one run.

    Args:
        ranges: For each slice, the begin and end of its ranges; the same on every rank. Other elements do not change.
    """

    name = 3

    def __init__(
        self, local: Tensor, ranges: Sequence[Sequence[tuple[int, int]]], layout: NodeLayout, *, is_shared: bool
    ) -> None:
        super().__init__(local, _Kind.SUM, is_shared=is_shared)
        self._ranges = ranges
        self._own = layout.own_slices
        # For each slice of this rank, the sums of its ranges, half precision in float32; None before they are summed.
        self.sums: list[Tensor] | None = None
        self.is_over_nodes = False  # whether the caller has replaced the sums by the results

    def done(self) -> bool:
        return self.is_over_nodes

    def block(self) -> None:
        """Do nothing: the caller advances it."""

    def cross(self, links: Sequence[Wire], memory: WireMemory) -> Crossing:
        sums, views = [], iter(self._views)
        dtype = WIRE.get(self.local.dtype, self.local.dtype)
        for index in self._own:
            sizes = [stop - start for start, stop in self._ranges[index]]
            total = memory.take(sum(sizes), dtype)
            for part in total.split(sizes) if sizes else ():
                _sum_over_node(part, next(views), self.kind)
            sums.append(total)
        self.sums = sums
        return Crossing([Sent((), tuple(sums), self)])

    def spread(self, crossing: Crossing, memory: WireMemory) -> None:
        assert self.sums is not None
        views = iter(self._views)
        for index, total in zip(self._own, self.sums, strict=True):
            sizes = [stop - start for start, stop in self._ranges[index]]
            for part in total.split(sizes) if sizes else ():
                _spread(part, next(views))
        crossing.give_back(memory)

    def _cut(self, regions: Sequence[Region], rank: int) -> Iterator[tuple[Tensor, ...]]:
        """For each range of this rank: its own part and those of the other ranks of the node."""
        others = [region for i, region in enumerate(regions) if i != rank]
        for start, stop in chain.from_iterable(self._ranges[index] for index in self._own):
            theirs = [region.view(self.local.dtype, start, stop - start) for region in others]
            yield self.local[start:stop], *theirs

    def _parts_of_others(self, rank: int, size: int) -> list[slice]:
        others = [ranges for index, ranges in enumerate(self._ranges) if index not in self._own]
        return [slice(*bounds) for ranges in others for bounds in ranges]


def all_reduce_steps(
    flat: Tensor,
    kind: Any,
    piece_bytes: int,
    layout: NodeLayout | None = None,
    source: int | None = None,
    *,
    is_shared: bool,
) -> Iterator[Step]:
    """The steps of an all-reduce of ``flat`` (1-D), in place; in two levels with a ``layout``.

    ``source`` is the only node whose tensors are not zero, if that is known.
    """
    for (piece,) in pieces(piece_bytes, flat):
        if layout is None:
            yield AllReduceStep(piece, kind, is_shared=is_shared)
        else:
            yield TwoLevelAllReduceStep(piece, kind, layout, source, is_shared=is_shared)


def reduce_scatter_steps(
    result: Tensor, rows: Tensor, kind: Any, piece_bytes: int, layout: NodeLayout | None = None, *, is_shared: bool
) -> Iterator[Step]:
    """The steps of a reduce-scatter of ``rows`` (size x width) into ``result`` (width)."""
    for piece, part in pieces(piece_bytes, rows, result):
        if layout is None:
            yield ReduceScatterStep(part, piece, kind, is_shared=is_shared)
        else:
            yield TwoLevelReduceScatterStep(part, piece, kind, layout, is_shared=is_shared)


def all_gather_steps(
    rows: Tensor, share: Tensor, piece_bytes: int, layout: NodeLayout | None = None, *, is_shared: bool
) -> Iterator[Step]:
    """The steps of an all-gather of ``share`` (width) into ``rows`` (size x width).

    ``is_shared`` tells whether the tensor that other ranks access is in shared memory: ``rows`` in two levels, else
    ``share``.
    """
    for part, piece in pieces(piece_bytes, rows, share):
        if layout is None:
            yield AllGatherStep(part, piece, is_shared=is_shared)
        else:
            yield TwoLevelAllGatherStep(part, piece, layout, is_shared=is_shared)


def _sum_over_node(wire: Tensor, views: Sequence[Tensor], kind: Any) -> None:
    """Reduce ``views`` into ``wire``, which may have a wider dtype, in parts that stay in the cache."""
    for total, own, *others in columns(wire, *views):
        sum_up(total, own, others, kind)


def _spread(wire: Tensor, views: Sequence[Tensor]) -> None:
    for source, *targets in columns(wire, *views):
        for target in targets:
            target.copy_(source)
