"""What one rank does with the memory of all, once each has shown its own: the arithmetic of mpi_shared.py.

    SumStep      each sums its slice over all, and writes it into all
    ReduceScatterStep  each sums its row over all, for itself
    AllGatherStep   each reads what the others show

A step is one piece of a collective. It is cut alike on every rank, wherever the tensors lie, so that a rank whose
tensor is in shared memory meets one that has to copy its own there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed import ReduceOp

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator, Sequence

    from torch import Tensor

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
_NAMES = ("all_reduce", "reduce_scatter", "all_gather")

_CHUNK_BYTES = 1 << 20  # stays in the cache between the sum and its way back
_LINE_BYTES = 64


def serves(dtype: torch.dtype, kind: Any) -> bool:
    """Whether there are sums of this kind and dtype; complex numbers come as real ones."""
    return dtype in _CODES and kind in _KINDS


def described(numel: int, code: int) -> str:
    """What a rank has brought, by the numbers that the ranks show one another."""
    kind, dtype = divmod(code, len(_DTYPES))
    name, kind = divmod(kind, len(_KINDS))
    what = _NAMES[name] if name == AllGatherStep.name else f"{_NAMES[name]} {_KINDS[kind].name}"
    return f"{numel} x {str(_DTYPES[dtype]).removeprefix('torch.')} ({what})"


class Contribution(NamedTuple):
    """What one rank shows in a step.

    Attributes:
        space: Its reservation.
        position: Where in it, in bytes.
        stride: From one row to the next, in elements.
    """

    space: mmap.mmap
    position: int
    stride: int

    def part(self, dtype: torch.dtype, start: int, count: int) -> Tensor:
        """Some elements of it, 1-D."""
        offset = self.position + start * dtype.itemsize
        return torch.frombuffer(self.space, dtype=dtype, count=count, offset=offset)


class Scratch:
    """Memory in which halves are summed in float32, kept from step to step."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take(self, numel: int) -> Tensor:
        """So many elements with arbitrary contents."""
        if self._memory.numel() < numel:
            self._memory = torch.empty(numel)
        return self._memory[:numel]


class Step(ABC):
    """One piece under way.

    Args:
        brought: This rank's part in it, the same size and dtype on every rank.
        kind: SUM, AVG or MAX.
        is_shared: Whether ``brought`` lies in shared memory.

    Attributes:
        slab: What the other ranks look at; None before :meth:`stage` where nothing is in shared memory yet.
        code: The collective, its kind and dtype: the same on every rank.
        number: Counted on each group, from 1.
        complaint: What is wrong with it.
    """

    name: int

    def __init__(self, brought: Tensor, kind: Any, *, is_shared: bool) -> None:
        self.brought = brought
        self.kind = kind
        self.slab = brought if is_shared else None
        self.code = _CODES[brought.dtype] + len(_DTYPES) * (_KINDS.index(kind) + len(_KINDS) * self.name)
        self.number = 0
        self.complaint = ""

    @property
    def title(self) -> str:
        """The collective's name."""
        return _NAMES[self.name]

    @property
    def stride(self) -> int:
        """From one row of the slab to the next, in elements."""
        return 0

    @abstractmethod
    def stage(self, memory: Tensor, rank: int, size: int) -> None:
        """Copy what others will look at to ``memory``, shared bytes, and make that the slab."""

    @abstractmethod
    def act(self, contributions: Sequence[Contribution], rank: int, scratch: Scratch) -> None:
        """Do this rank's part of the work. What every rank shows is there; nobody changes it before all have acted."""

    @abstractmethod
    def finish(self, rank: int, size: int) -> None:
        """Bring the result to where it belongs; all ranks have acted."""


class SumStep(Step):
    """A sum over the ranks, in place."""

    name = 0

    def stage(self, memory: Tensor, rank: int, size: int) -> None:
        """Copy what the others sum."""
        local = self.brought
        self.slab = memory[: local.nbytes].view(local.dtype)
        for part in _parts_of_others(local, rank, size):
            self.slab[part].copy_(local[part])

    def act(self, contributions: Sequence[Contribution], rank: int, scratch: Scratch) -> None:
        """Sum one slice, and write it into the memory of all."""
        part = _part(self.brought, rank, len(contributions))
        count = part.stop - part.start
        if count > 0:
            dtype = self.brought.dtype
            others = [
                contribution.part(dtype, part.start, count) for i, contribution in enumerate(contributions) if i != rank
            ]
            own = self.brought[part]
            for some, *them in _chunks(own, *others):
                _reduce(some, some, them, self.kind, scratch)
                for other in them:
                    other.copy_(some)

    def finish(self, rank: int, size: int) -> None:
        """Take what the others have summed."""
        if self.slab is not None and self.slab is not self.brought:
            for part in _parts_of_others(self.brought, rank, size):
                self.brought[part].copy_(self.slab[part])


class ReduceScatterStep(Step):
    """A sum of rows over the ranks, of which each rank gets its own.

    Args:
        result: Where that belongs: 1-D; it may be this rank's row of ``rows``.
        rows: (size x columns), each row contiguous.
        kind: SUM, AVG or MAX.
        is_shared: Whether ``rows`` lie in shared memory.
    """

    name = 1

    def __init__(self, result: Tensor, rows: Tensor, kind: Any, *, is_shared: bool) -> None:
        super().__init__(rows, kind, is_shared=is_shared)
        self._result = result

    @property
    def stride(self) -> int:
        """From one row of the slab to the next, in elements."""
        return 0 if self.slab is None else self.slab.stride(0)

    def stage(self, memory: Tensor, rank: int, size: int) -> None:
        """Copy the rows of the others."""
        rows = self.brought
        self.slab = memory[: rows.nbytes].view(rows.dtype).view(rows.shape)
        for part in (slice(0, rank), slice(rank + 1, size)):
            self.slab[part].copy_(rows[part])

    def act(self, contributions: Sequence[Contribution], rank: int, scratch: Scratch) -> None:
        """Sum one's own row."""
        own, result, dtype = self.brought[rank], self._result, self._result.dtype
        count = own.numel()
        if count > 0:
            theirs = [o.part(dtype, rank * o.stride, count) for i, o in enumerate(contributions) if i != rank]
            for some, mine, *them in _chunks(result, own, *theirs):
                _reduce(some, mine, them, self.kind, scratch)

    def finish(self, rank: int, size: int) -> None:
        """Nothing: the result is where it belongs."""


class AllGatherStep(Step):
    """What every rank has, brought to all.

    Args:
        rows: Where that belongs: (size x columns), each row contiguous.
        share: What this rank has: 1-D; it may be this rank's row.
        is_shared: Whether ``share`` lies in shared memory.
    """

    name = 2

    def __init__(self, rows: Tensor, share: Tensor, *, is_shared: bool) -> None:
        super().__init__(share, _Kind.SUM, is_shared=is_shared)
        self._rows = rows

    def stage(self, memory: Tensor, rank: int, size: int) -> None:
        """Copy one's own."""
        share = self.brought
        self.slab = memory[: share.nbytes].view(share.dtype).copy_(share)

    def act(self, contributions: Sequence[Contribution], rank: int, scratch: Scratch) -> None:
        """Read what the others show."""
        share, count = self.brought, self.brought.numel()
        if count == 0:
            return
        for other, (row, contribution) in enumerate(zip(self._rows, contributions, strict=True)):
            if other != rank:
                row.copy_(contribution.part(share.dtype, 0, count))
            elif row.data_ptr() != share.data_ptr():
                row.copy_(share)

    def finish(self, rank: int, size: int) -> None:
        """Nothing: the result is where it belongs."""


def cut_sum(flat: Tensor, kind: Any, piece_bytes: int, *, is_shared: bool) -> Iterator[SumStep]:
    """The steps of an all-reduce of ``flat``, 1-D, in place."""
    for (piece,) in _cut(max(1, piece_bytes // flat.itemsize), flat):
        yield SumStep(piece, kind, is_shared=is_shared)


def cut_scatter(
    result: Tensor, rows: Tensor, kind: Any, piece_bytes: int, *, is_shared: bool
) -> Iterator[ReduceScatterStep]:
    """The steps of a reduce-scatter of ``rows`` (size x width) into ``result`` (width)."""
    for part, piece in _cut(max(1, piece_bytes // (rows.itemsize * len(rows))), result, rows):
        yield ReduceScatterStep(part, piece, kind, is_shared=is_shared)


def cut_gather(rows: Tensor, share: Tensor, piece_bytes: int, *, is_shared: bool) -> Iterator[AllGatherStep]:
    """The steps of an all-gather of ``share`` (width) into ``rows`` (size x width)."""
    for part, piece in _cut(max(1, piece_bytes // (rows.itemsize * len(rows))), rows, share):
        yield AllGatherStep(part, piece, is_shared=is_shared)


def _part(flat: Tensor, rank: int, size: int) -> slice:
    """What one rank sums: whole cache lines."""
    line = _LINE_BYTES // flat.itemsize
    lines = -(-flat.numel() // line)
    low, high = lines * rank // size, lines * (rank + 1) // size
    return slice(low * line, min(high * line, flat.numel()))


def _parts_of_others(flat: Tensor, rank: int, size: int) -> list[slice]:
    own = _part(flat, rank, size)
    return [part for part in (slice(0, own.start), slice(own.stop, flat.numel())) if part.start < part.stop]


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return _cut(max(1, _CHUNK_BYTES // tensors[0].itemsize), *tensors)


def _cut(width: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same columns of each tensor, at most ``width`` at a time."""
    if tensors[0].shape[-1] <= width:  # where every view would cost as much as the sum
        return iter((tensors,))
    return zip(*(tensor.split(width, dim=-1) for tensor in tensors), strict=True)


def _reduce(result: Tensor, own: Tensor, others: list[Tensor], kind: Any, scratch: Scratch) -> None:
    """Reduce ``own`` and ``others`` into ``result``, which may be ``own``; halves in float32, rounded once."""
    combine = torch.maximum if kind == _Kind.MAX else torch.add
    divides = kind == _Kind.AVG
    total = result
    if result.dtype in _HALVES and (divides or len(others) > 1):
        own = total = scratch.take(own.numel()).copy_(own)
    for other in others:
        combine(own, other, out=total)
        own = total
    if divides:
        total.div_(len(others) + 1, rounding_mode=None if total.is_floating_point() else "trunc")
    if total is not result:
        result.copy_(total)
