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
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ppe_ddp.backends.shared_memory.shared_steps import (
    AllGatherStep,
    AllReduceStep,
    NodeLayout,
    ReduceScatterStep,
    Region,
    Scratch,
    Step,
    columns,
    divide,
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

    views: Sequence[tuple[Tensor, ...]]  # the memory for the result: of each range, on all ranks of the node
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

    @property
    def _wire_dtype(self) -> torch.dtype:
        return WIRE.get(self.local.dtype, self.local.dtype)

    def _exchange_rows(
        self, link: Wire, memory: WireMemory, write: Callable[[Tensor], object], counts: Sequence[list[int]]
    ) -> Sent:
        """Begin to exchange rows of ``local``; ``counts`` has the numbers that are received and sent, by node."""
        width = self.local.shape[1]
        come, wire = (memory.take(width * sum(count), self._wire_dtype) for count in counts)
        for row in wire.view(-1, width):
            write(row)
        receiving, sending = ([width * n for n in count] for count in counts)
        return Sent((), (come, wire), link.all_to_all(come, wire, receiving, sending))


class TwoLevelAllReduceStep(AllReduceStep, TwoLevelStep):
    """A sum over the ranks of several nodes, in place.

    ``source`` is the number of the only node whose tensors are not zero, which sends its sum to the others. None sums
    over the nodes.
    """

    def __init__(
        self, local: Tensor, kind: Any, layout: NodeLayout, source: int | None = None, *, is_shared: bool
    ) -> None:
        super().__init__(local, kind, layout, is_shared=is_shared)
        self._source = source

    def _ranges(self) -> list[list[tuple[int, int]]]:
        """For each slice of this rank, the begin and end of its ranges of elements, which are not empty."""
        bounds = list(pairwise(self.layout.bounds(self.local.numel(), self.local.itemsize)))
        return [[bounds[i]] if bounds[i][0] < bounds[i][1] else [] for i in self.layout.own_slices]

    def cross(self, links: Sequence[Wire], memory: WireMemory) -> Crossing:
        sent, views = [], iter(self._views)
        has_some = self._source is None or self.layout.nodes[self._source] == self.layout.local
        for ranges, link in zip(self._ranges(), links, strict=True):
            own = tuple(islice(views, len(ranges)))
            wire = memory.take(sum(one[0].numel() for one in own), self._wire_dtype)
            for total, one in _parts(wire, own) if has_some else ():
                _sum_over_node(total, one, self.kind)
            under_way = self._exchange(link, wire)
            if under_way is not None:
                sent.append(Sent(own, (wire,), under_way))
        return Crossing(sent)

    def _exchange(self, link: Wire, wire: Tensor) -> InFlight | None:
        """Begin the exchange of a slice; None for one without elements, on all nodes."""
        if not wire.numel():
            return None
        if self._source is not None:
            return link.broadcast(wire, self._source)
        return link.all_reduce(wire, _Kind.MAX if self.kind == _Kind.MAX else _Kind.SUM)

    def spread(self, crossing: Crossing, memory: WireMemory) -> None:
        for own, (wire,), _ in crossing.sent:
            divide(wire, self.kind, self.layout.size)
            for total, views in _parts(wire, own):
                for source, *targets in columns(total, *views):
                    for target in targets:
                        target.copy_(source)
        crossing.give_back(memory)

    def _cut(self, regions: Sequence[Region]) -> Iterator[tuple[Tensor, ...]]:
        """For each range of this rank: its own part and those of the other ranks of the node."""
        for start, stop in chain.from_iterable(self._ranges()):
            yield self.local[start:stop], *self._of_others(regions, start, stop - start)


class NodeSumStep(TwoLevelAllReduceStep):
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
        super().__init__(local, _Kind.SUM, layout, is_shared=is_shared)
        self._all_ranges = ranges
        # For each slice of this rank, the sums of its ranges, half precision in float32; None before they are summed.
        self.sums: list[Tensor] | None = None
        self.is_over_nodes = False  # whether the caller has replaced the sums by the results

    def done(self) -> bool:
        return self.is_over_nodes

    def block(self) -> None:
        """Do nothing: the caller advances it."""

    def cross(self, links: Sequence[Wire], memory: WireMemory) -> Crossing:
        crossing = super().cross(links, memory)
        self.sums = [wire for _, (wire,), _ in crossing.sent]
        return crossing

    def _exchange(self, link: Wire, wire: Tensor) -> InFlight:
        return self

    def _ranges(self) -> list[list[tuple[int, int]]]:
        return [[*self._all_ranges[index]] for index in self.layout.own_slices]

    def _written_by_others(self) -> Iterable[slice]:
        others = [ranges for index, ranges in enumerate(self._all_ranges) if index not in self.layout.own_slices]
        return [slice(*bounds) for ranges in others for bounds in ranges]


class TwoLevelReduceScatterStep(ReduceScatterStep, TwoLevelStep):
    """A sum of rows over the ranks of several nodes; each rank gets its own row.

    A row is sent by the link of the first slice that its rank owns. Arguments are those of :class:`ReduceScatterStep`.
    """

    def cross(self, links: Sequence[Wire], memory: WireMemory) -> Crossing:
        if not self._views:
            return Crossing([])
        views = iter(self._views)

        def write(row: Tensor) -> None:
            _sum_over_node(row, next(views), self.kind)

        own = memory.take(self.local.shape[1], self._wire_dtype)
        write(own)
        routes = zip(links, self.layout.routes(), strict=True)
        return Crossing([self._exchange_rows(link, memory, write, route) for link, route in routes], own)

    def spread(self, crossing: Crossing, memory: WireMemory) -> None:
        if crossing.own is None:
            return
        rows = list(crossing.sent[0].wires[0].view(-1, self.local.shape[1]))
        rows.insert(self.layout.nodes.index(self.layout.local), crossing.own)
        sum_up(rows[0], rows[0], rows[1:], self.kind)
        divide(rows[0], self.kind, len(self.local))
        self._result.copy_(rows[0])
        crossing.give_back(memory)

    def _cut(self, regions: Sequence[Region]) -> Iterator[tuple[Tensor, ...]]:
        """For this rank's row, and each row that it sends: its own part and those of the other ranks of the node."""
        for row in (self.layout.rank, *self.layout.peers):
            yield self.local[row], *self._of_others(regions, 0, self.local.shape[1], row)


class TwoLevelAllGatherStep(TwoLevelStep):
    """An all-gather over the ranks of several nodes.

    A rank publishes the rows of its output, into which the other ranks of its node write. A share is sent by the link
    of the first slice that its rank owns. Arguments are those of :class:`AllGatherStep`; ``is_shared`` tells of
    ``rows``, not of ``share``.
    """

    name = AllGatherStep.name

    def __init__(self, rows: Tensor, share: Tensor, layout: NodeLayout, *, is_shared: bool) -> None:
        super().__init__(rows, _Kind.SUM, layout, is_shared=is_shared)
        self._share = share

    def stage(self, memory: Tensor) -> None:
        self.shared = memory[: self.local.nbytes].view(self.local.dtype).view(self.local.shape)

    def _written_by_others(self) -> Iterable[slice]:
        return (slice(None),)

    def cross(self, links: Sequence[Wire], memory: WireMemory) -> Crossing:
        if not self._views:
            return Crossing([])
        self._write(self.layout.rank, self._share)
        routes = zip(links, self.layout.routes(), strict=True)
        return Crossing(
            [self._exchange_rows(link, memory, self._copy_share, (theirs, own)) for link, (own, theirs) in routes]
        )

    @property
    def _wire_dtype(self) -> torch.dtype:
        return self.local.dtype

    def _copy_share(self, row: Tensor) -> None:
        row.copy_(self._share)

    def spread(self, crossing: Crossing, memory: WireMemory) -> None:
        rows = [row for one in crossing.sent for row in one.wires[0].view(-1, self.local.shape[1])]
        for rank, row in zip(self.layout.peers, rows, strict=bool(rows)):
            self._write(rank, row)
        crossing.give_back(memory)

    def _write(self, row: int, source: Tensor) -> None:
        for target in self._views[row]:
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)

    def _cut(self, regions: Sequence[Region]) -> Iterator[tuple[Tensor, ...]]:
        """For each row: its views on all ranks of the node."""
        width, dtype = self.local.shape[1], self.local.dtype
        for row in range(len(self.local)):
            yield tuple(region.view(dtype, row * region.stride, width) for region in regions)


def _sum_over_node(wire: Tensor, views: Sequence[Tensor], kind: Any) -> None:
    """Reduce ``views`` into ``wire``, which may have a wider dtype, in parts that stay in the cache."""
    for total, own, *others in columns(wire, *views):
        sum_up(total, own, others, kind)


def _parts(wire: Tensor, own: Sequence[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """The parts of ``wire`` for some ranges, each with the views of its range."""
    return zip(wire.split([len(views[0]) for views in own]) if own else (), own, strict=True)
