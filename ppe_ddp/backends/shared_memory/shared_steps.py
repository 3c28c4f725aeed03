"""The arithmetic of collectives in shared memory: the part of one rank, after every rank has published its tensor.

    one node                   each rank
    AllReduceStep              sums its slice over all ranks, and writes it into the memory of all
    ReduceScatterStep          sums its row over all ranks, for itself
    AllGatherStep              reads the published tensors of the others

    several nodes              each rank within its node          by a Wire             then
    TwoLevelAllReduceStep      sums its slices                    sum over the nodes    writes them to all of the node
    ... with a ``source``      that node does                     it sends its sums     writes them to all of the node
    TwoLevelReduceScatterStep  sums its row, and those of owners  sends each its row    sums the rows that came, in the
                               of its slices on other nodes                             order of nodes
    TwoLevelAllGatherStep      writes its share to all            sends it to them      writes theirs to all of the node

A step is one piece of a collective. It may run many times: the views of its own and of the other ranks' memory are made
once, and again only if a rank publishes another place.

The nodes of a group, and the slices of each rank:

    node 0: ranks 0, 1      |= slice 0, rank 0 =|= slice 1, rank 1 =|
                                   ║                    ║              between the nodes
    node 1: rank 2          |= slice 0, rank 2 =|= slice 1, rank 2 =|

Each slice has one owner on every node. There are as many slices as the largest node has ranks, so that the links of all
of its ranks are used. Messages between nodes have memory of their own: after a group was given up, a transport may
still write there, and would otherwise change gradients.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ppe_ddp.backends.memory_pool import MemoryPool
from ppe_ddp.backends.wire import Wire
from ppe_ddp.waiting import InFlight

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_HALVES = (torch.float16, torch.bfloat16)
_Kind: Any = ReduceOp.RedOpType
_KINDS = (_Kind.SUM, _Kind.AVG, _Kind.MAX)
_CPU = torch.device("cpu")
_NAMES = ("all_reduce", "reduce_scatter", "all_gather", "all_reduce between nodes")

_CHUNK_BYTES = 1 << 18  # stays in a core's own cache, with the other ranks' chunks, until the sum is written back
_LINE_BYTES = 64
# The dtypes that are sent: half precision is rounded once, at the end, and transports need not support int16.
WIRE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.int16: torch.int32}


def supports(dtype: torch.dtype, kind: Any) -> bool:
    """Whether tensors of this dtype can be reduced here by this operation; complex numbers are passed as real ones."""
    return dtype in _CODES and kind in _KINDS


def describe_record(numel: int, code: int) -> str:
    """A rank's published record as text: ``"8 x float32 (all_reduce SUM)"``."""
    kind, dtype = divmod(code, len(_DTYPES))
    name, kind = divmod(kind, len(_KINDS))
    what = _NAMES[name] if name == AllGatherStep.name else f"{_NAMES[name]} {_KINDS[kind].name}"
    return f"{numel} x {str(_DTYPES[dtype]).removeprefix('torch.')} ({what})"


@dataclass(frozen=True)
class NodeLayout:
    """The nodes of one group, seen from one of its ranks."""

    nodes: tuple[tuple[int, ...], ...]  # the ranks of each node, in order; the nodes in the order of their first ranks
    rank: int  # this rank in the group

    @classmethod
    def of(cls, names: Sequence[Hashable], rank: int) -> NodeLayout:
        """The layout of ranks whose nodes have these ``names``, by rank."""
        ranks: dict[Hashable, list[int]] = {}
        for other, name in enumerate(names):
            ranks.setdefault(name, []).append(other)
        return cls(tuple(map(tuple, ranks.values())), rank)

    @cached_property
    def local(self) -> tuple[int, ...]:
        return next(node for node in self.nodes if self.rank in node)

    @cached_property
    def local_rank(self) -> int:
        return self.local.index(self.rank)

    @property
    def size(self) -> int:
        return sum(map(len, self.nodes))

    @property
    def elsewhere(self) -> list[int]:
        return sorted(rank for node in self.nodes for rank in node if self.rank not in node)

    @cached_property
    def slices(self) -> int:
        """The most ranks of a node."""
        return max(map(len, self.nodes))

    def owners(self, index: int) -> tuple[int, ...]:
        return tuple(node[index * len(node) // self.slices] for node in self.nodes)

    @cached_property
    def own_slices(self) -> range:
        own = [index for index in range(self.slices) if self.rank in self.owners(index)]
        return range(own[0], own[-1] + 1)

    def _targets(self, index: int) -> list[int | None]:
        """By node, the rank elsewhere that owns a slice, if it is that rank's first; messages for one rank use that."""
        before = self.owners(index - 1) if index else (-1,) * len(self.nodes)
        both = zip(self.owners(index), before, strict=True)
        return [None if owner in (other, self.rank) else owner for owner, other in both]

    @cached_property
    def peers(self) -> list[int]:
        """The ranks of other nodes with which this rank exchanges messages that are for it, in the order of slices."""
        return [rank for index in self.own_slices for rank in self._targets(index) if rank is not None]

    def routes(self) -> list[tuple[list[int], list[int]]]:
        """For each slice of this rank and each node, the number of messages: for or from this rank, and for peers."""
        return [
            (
                [int(index == self.own_slices.start and owner != self.rank) for owner in self.owners(index)],
                [int(rank is not None) for rank in self._targets(index)],
            )
            for index in self.own_slices
        ]

    def bounds(self, numel: int, itemsize: int) -> list[int]:
        """The ``slices + 1`` bounds of the slices of ``numel`` elements, at whole cache lines."""
        line = _LINE_BYTES // itemsize
        lines = -(-numel // line)
        return [min(lines * index // self.slices * line, numel) for index in range(self.slices + 1)]


class Region(NamedTuple):
    """The place of the tensor that one rank has published for a step."""

    space: mmap.mmap  # the rank's reservation
    position: int  # the position in it, in bytes
    stride: int  # from one row to the next, in elements

    def view(self, dtype: torch.dtype, start: int, count: int) -> Tensor:
        """``count`` elements from ``start`` on, 1-D."""
        offset = self.position + start * dtype.itemsize
        return torch.frombuffer(self.space, dtype=dtype, count=count, offset=offset)


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


class Step(ABC):
    """One piece of a collective, the same on every rank. It has no state of a run: several may be in flight at once.

    This rank's tensor ``local``, which may lie in shared memory, has the same size and dtype on every rank.
    """

    name: int

    def __init__(self, local: Tensor, kind: Any, layout: NodeLayout, *, is_shared: bool) -> None:
        self.local = local
        self.kind = kind
        self.layout = layout
        # The tensor that other ranks access; None before :meth:`stage` if ``local`` is not in shared memory.
        self.shared = local if is_shared else None
        # The collective, its kind and dtype: the same on every rank.
        self.code = _CODES[local.dtype] + len(_DTYPES) * (_KINDS.index(kind) + len(_KINDS) * self.name)
        self.title = _NAMES[self.name]  # the collective's name
        # The record that this rank publishes: position, stride, size and code; None before it has published.
        self.record: array[int] | None = None
        self.records: list[list[int]] = []  # the records of all ranks at the last prepare()
        self._views: list[tuple[Tensor, ...]] = []

    @property
    def stride(self) -> int:
        """The elements from one row of ``shared`` to the next; 0 if it has no rows."""
        return self.shared.stride(0) if self.shared is not None and self.shared.dim() > 1 else 0

    @abstractmethod
    def stage(self, memory: Tensor) -> None:
        """Copy the parts that other ranks access to ``memory``, shared bytes, and set ``shared`` to it."""

    def prepare(self, regions: Sequence[Region]) -> None:
        """Make views of the tensors that the ranks of the node have published, until one publishes another place."""
        self._views = list(self._cut(regions)) if self.local.numel() else []

    @abstractmethod
    def act(self, scratch: Scratch) -> None:
        """Do this rank's part, after all ranks have published; no rank changes a tensor before all have acted."""

    def finish(self) -> None:
        """Copy the result to the user's tensor, after all ranks have acted."""
        if self.shared is not None and self.shared is not self.local:
            for part in self._written_by_others():
                self.local[part].copy_(self.shared[part])

    def _written_by_others(self) -> Iterable[slice]:
        """The parts of ``shared`` into which other ranks write; by default none."""
        return ()

    @abstractmethod
    def _cut(self, regions: Sequence[Region]) -> Iterator[tuple[Tensor, ...]]:
        """Views of the memory that this rank works on, in parts that stay in the cache."""

    def _of_others(self, regions: Sequence[Region], start: int, count: int, row: int = 0) -> list[Tensor]:
        """Views of these elements of the tensors of the other ranks of the node."""
        others = [region for rank, region in enumerate(regions) if rank != self.layout.local_rank]
        return [region.view(self.local.dtype, row * region.stride + start, count) for region in others]


class AllReduceStep(Step):
    """A sum over the ranks, in place."""

    name = 0

    def stage(self, memory: Tensor) -> None:
        local = self.local
        self.shared = memory[: local.nbytes].view(local.dtype)
        for part in self._written_by_others():
            self.shared[part].copy_(local[part])

    def _written_by_others(self) -> Iterable[slice]:
        start, stop = self._own_part
        return [slice(*part) for part in ((0, start), (stop, self.local.numel())) if part[0] < part[1]]

    @cached_property
    def _own_part(self) -> tuple[int, int]:
        """The begin and end of the elements that this rank sums."""
        bounds, own = self.layout.bounds(self.local.numel(), self.local.itemsize), self.layout.own_slices
        return bounds[own.start], bounds[own.stop]

    def _cut(self, regions: Sequence[Region]) -> Iterator[tuple[Tensor, ...]]:
        start, stop = self._own_part
        if start < stop:
            yield from columns(self.local[start:stop], *self._of_others(regions, start, stop - start))

    def act(self, scratch: Scratch) -> None:
        for own, *others in self._views:
            _reduce(own, own, others, self.kind, scratch)
            for other in others:
                other.copy_(own)


class ReduceScatterStep(Step):
    """A sum of ``rows`` (size x columns, each row contiguous) over the ranks; each rank gets its own row.

    It is written to ``result``, 1-D, which may be that row of ``rows``.
    """

    name = 1

    def __init__(self, result: Tensor, rows: Tensor, kind: Any, layout: NodeLayout, *, is_shared: bool) -> None:
        super().__init__(rows, kind, layout, is_shared=is_shared)
        self._result = result

    def stage(self, memory: Tensor) -> None:
        rows, rank = self.local, self.layout.rank
        self.shared = memory[: rows.nbytes].view(rows.dtype).view(rows.shape)
        for part in (slice(0, rank), slice(rank + 1, len(rows))):
            self.shared[part].copy_(rows[part])

    def _cut(self, regions: Sequence[Region]) -> Iterator[tuple[Tensor, ...]]:
        own = self.local[self.layout.rank]
        return columns(self._result, own, *self._of_others(regions, 0, own.numel(), self.layout.rank))

    def act(self, scratch: Scratch) -> None:
        for result, own, *others in self._views:
            _reduce(result, own, others, self.kind, scratch)


class AllGatherStep(Step):
    """An all-gather: each rank copies the tensors of all ranks to ``rows`` (size x columns, each row contiguous).

    This rank's tensor is ``share``, 1-D, which may be this rank's row, and lie in shared memory.
    """

    name = 2

    def __init__(self, rows: Tensor, share: Tensor, layout: NodeLayout, *, is_shared: bool) -> None:
        super().__init__(share, _Kind.SUM, layout, is_shared=is_shared)
        self._rows = rows

    def stage(self, memory: Tensor) -> None:
        share = self.local
        self.shared = memory[: share.nbytes].view(share.dtype).copy_(share)

    def _cut(self, regions: Sequence[Region]) -> Iterator[tuple[Tensor, ...]]:
        share = self.local
        for other, (row, region) in enumerate(zip(self._rows, regions, strict=True)):
            if other != self.layout.rank:
                yield row, region.view(share.dtype, 0, share.numel())
            elif row.data_ptr() != share.data_ptr():
                yield row, share

    def act(self, scratch: Scratch) -> None:
        for row, source in self._views:
            row.copy_(source)


class TwoLevelStep(Step):
    """A step of a group of several nodes, in two parts: :meth:`cross` and :meth:`spread`."""

    def act(self, scratch: Scratch) -> None:
        """Do nothing: :meth:`cross` and :meth:`spread` do the work."""

    @abstractmethod
    def cross(self, links: Sequence[Wire], memory: MemoryPool) -> Crossing:
        """Do this rank's part within the node, and begin the messages between nodes; ``links`` has one a slice."""

    @abstractmethod
    def spread(self, crossing: Crossing) -> None:
        """Copy the received results to the ranks of the node."""

    @property
    def _wire_dtype(self) -> torch.dtype:
        return WIRE.get(self.local.dtype, self.local.dtype)

    def _exchange_rows(
        self, link: Wire, memory: MemoryPool, write: Callable[[Tensor], object], counts: Sequence[list[int]]
    ) -> Sent:
        """Begin to exchange rows of ``local``; ``counts`` has the numbers that are received and sent, by node."""
        width = self.local.shape[1]
        come, wire = (memory.take(width * sum(count), self._wire_dtype, _CPU) for count in counts)
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

    def cross(self, links: Sequence[Wire], memory: MemoryPool) -> Crossing:
        sent, views = [], iter(self._views)
        has_some = self._source is None or self.layout.nodes[self._source] == self.layout.local
        for ranges, link in zip(self._ranges(), links, strict=True):
            own = tuple(islice(views, len(ranges)))
            wire = memory.take(sum(one[0].numel() for one in own), self._wire_dtype, _CPU)
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

    def spread(self, crossing: Crossing) -> None:
        for own, (wire,), _ in crossing.sent:
            divide(wire, self.kind, self.layout.size)
            for total, views in _parts(wire, own):
                for source, *targets in columns(total, *views):
                    for target in targets:
                        target.copy_(source)

    def _cut(self, regions: Sequence[Region]) -> Iterator[tuple[Tensor, ...]]:
        """For each range of this rank: its own part and those of the other ranks of the node."""
        for start, stop in chain.from_iterable(self._ranges()):
            yield self.local[start:stop], *self._of_others(regions, start, stop - start)


class NodeSumStep(TwoLevelAllReduceStep, InFlight):
    """A sum over the ranks of a node in ranges of the caller's, which does the exchange between the nodes itself.

    The caller replaces the sums by the results over all nodes, and sets ``has_results``. It is for one run.

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
        self.has_results = False  # whether the caller has replaced the sums by the results

    def done(self) -> bool:
        return self.has_results

    def cross(self, links: Sequence[Wire], memory: MemoryPool) -> Crossing:
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

    def cross(self, links: Sequence[Wire], memory: MemoryPool) -> Crossing:
        if not self._views:
            return Crossing([])
        views = iter(self._views)

        def write(row: Tensor) -> None:
            _sum_over_node(row, next(views), self.kind)

        own = memory.take(self.local.shape[1], self._wire_dtype, _CPU)
        write(own)
        routes = zip(links, self.layout.routes(), strict=True)
        return Crossing([self._exchange_rows(link, memory, write, route) for link, route in routes], own)

    def spread(self, crossing: Crossing) -> None:
        if crossing.own is None:
            return
        rows = list(crossing.sent[0].wires[0].view(-1, self.local.shape[1]))
        rows.insert(self.layout.nodes.index(self.layout.local), crossing.own)
        sum_up(rows[0], rows[0], rows[1:], self.kind)
        divide(rows[0], self.kind, len(self.local))
        self._result.copy_(rows[0])

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

    def cross(self, links: Sequence[Wire], memory: MemoryPool) -> Crossing:
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

    def spread(self, crossing: Crossing) -> None:
        rows = [row for one in crossing.sent for row in one.wires[0].view(-1, self.local.shape[1])]
        for rank, row in zip(self.layout.peers, rows, strict=bool(rows)):
            self._write(rank, row)

    def _write(self, row: int, source: Tensor) -> None:
        for target in self._views[row]:
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)

    def _cut(self, regions: Sequence[Region]) -> Iterator[tuple[Tensor, ...]]:
        """For each row: its views on all ranks of the node."""
        width, dtype = self.local.shape[1], self.local.dtype
        for row in range(len(self.local)):
            yield tuple(region.view(dtype, row * region.stride, width) for region in regions)


def pieces(most_bytes: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Cut the tensors along their columns into pieces, at most ``most_bytes`` of the first tensor.

    Sizes are about equal, as a small last piece would take as long as a round trip.
    """
    first = tensors[0]
    numel, line = first.shape[-1], _LINE_BYTES // first.itemsize
    most = max(1, most_bytes // (first.itemsize * (first.numel() // numel if numel else 1)))
    width = -(-numel // max(1, -(-numel // most)))
    return columns(*tensors, width=min(most, -(-width // line) * line))


class Scratch:
    """Memory in which half precision is summed in float32, kept from step to step."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32, device="cpu")

    def take(self, numel: int) -> Tensor:
        """Memory for ``numel`` elements, with arbitrary contents."""
        if self._memory.numel() < numel:
            self._memory = torch.empty(numel, dtype=torch.float32, device="cpu")
        return self._memory[:numel]


def columns(*tensors: Tensor, width: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """Cut the tensors along their columns, at most ``width`` at a time; by default as many as stay in the cache."""
    width = width or max(1, _CHUNK_BYTES // tensors[0].itemsize)
    if tensors[0].shape[-1] <= width:  # for small tensors every view would cost as much as the sum
        return iter((tensors,))
    return zip(*(tensor.split(width, dim=-1) for tensor in tensors), strict=True)


def _reduce(result: Tensor, own: Tensor, others: list[Tensor], kind: Any, scratch: Scratch) -> None:
    """Reduce ``own`` and ``others`` into ``result``, which may be ``own``; half precision in float32, rounded once."""
    is_wide = result.dtype in _HALVES and (kind == _Kind.AVG or len(others) > 1)
    total = scratch.take(own.numel()) if is_wide else result
    sum_up(total, own, others, kind)
    divide(total, kind, len(others) + 1)
    if is_wide:
        result.copy_(total)


def sum_up(total: Tensor, own: Tensor, others: Sequence[Tensor], kind: Any) -> None:
    """Reduce ``own`` and ``others`` into ``total``, which may have a wider dtype, or be ``own`` itself."""
    combine = torch.maximum if kind == _Kind.MAX else torch.add
    rest = iter(others)
    if total.dtype is not own.dtype:
        total.copy_(own)
    elif (first := next(rest, None)) is not None:
        combine(own, first, out=total)
    elif total is not own:
        total.copy_(own)
    for other in rest:
        combine(total, other, out=total)


def divide(total: Tensor, kind: Any, size: int) -> None:
    """Divide a sum over ``size`` ranks by ``size``, if ``kind`` is AVG."""
    if kind == _Kind.AVG:
        total.div_(size, rounding_mode=None if total.is_floating_point() else "trunc")


def _sum_over_node(wire: Tensor, views: Sequence[Tensor], kind: Any) -> None:
    """Reduce ``views`` into ``wire``, which may have a wider dtype, in parts that stay in the cache."""
    for total, own, *others in columns(wire, *views):
        sum_up(total, own, others, kind)


def _parts(wire: Tensor, own: Sequence[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, tuple[Tensor, ...]]]:
    """The parts of ``wire`` for some ranges, each with the views of its range."""
    return zip(wire.split([len(views[0]) for views in own]) if own else (), own, strict=True)
