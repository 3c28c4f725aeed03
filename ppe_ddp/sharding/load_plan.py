"""Plans a load: regions of tensors, the entries of checkpoint and modules, their names, and the messages between ranks.

    tensor of 10 rows over 4 ranks, Shard(0)         0 1 2 | 3 4 5 | 6 7 8 | 9

A region is a list of runs ``(start, stop)`` for each dimension, mostly one run; a rank may have several with FSDP over
tensor parallelism (torch's ``_StridedShard``).

    entry   |   a   | b |        c        |      cut into pieces; small ones of a route share a message
    route   | 1 2 3 | * | 1     2     3   |      * all ranks: a broadcast; else a tree from rank 0

Every rank computes the same plan, from what all have exchanged, and makes only the messages that it sends, receives or
passes on. They have the same order on all ranks, so that there is no deadlock.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parameter import is_lazy

from ppe_ddp.backends.json_collectives import as_text
from ppe_ddp.errors import CheckpointError
from ppe_ddp.torch_internals import COMPILED, holds_tensors, split_strided

Run: TypeAlias = "tuple[int, int]"
Runs: TypeAlias = "tuple[Run, ...]"
Region: TypeAlias = "tuple[Runs, ...]"
Box: TypeAlias = "tuple[Run, ...]"
Route: TypeAlias = "tuple[int, ...]"

_ALONE = 256 << 10  # bytes; a larger piece is a message of its own, as copying it would take longer than sending one


@dataclass(frozen=True)
class ShardLayout:
    """The placement of a DTensor on a device mesh.

    A placement is ``()`` to replicate, ``(dim,)`` for a Shard, and ``(dim, split_factor)`` for torch's _StridedShard.
    """

    ranks: tuple[int, ...]  # the global ranks of the mesh, in row-major order
    mesh_shape: tuple[int, ...]
    placements: tuple[tuple[int, ...], ...]  # one for each mesh dimension

    @classmethod
    def of(cls, tensor: DTensor) -> ShardLayout:
        """The layout of ``tensor``; ValueError if it is Partial, a sum that has not been made yet."""
        placements: list[tuple[int, ...]] = []
        placement: Any
        for placement in tensor.placements:
            if isinstance(placement, Replicate):
                placements.append(())
            elif hasattr(placement, "split_factor"):  # a _StridedShard, which is a Shard in some versions of torch
                placements.append((placement.dim, placement.split_factor))
            elif isinstance(placement, Shard):
                placements.append((placement.dim,))
            else:
                raise ValueError(f"it is placed as {placement}, and only Shard and Replicate can be loaded")
        mesh = tensor.device_mesh
        return cls(tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape), tuple(placements))

    def region(self, shape: tuple[int, ...], rank: int) -> Region | None:
        """The region of a tensor of ``shape`` on global rank ``rank``; None if that is not in the mesh."""
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
    """The shape of a tensor that holds just the region."""
    return tuple(sum(stop - start for start, stop in runs) for runs in region)


def cut(tensor: Tensor, region: Region, box: Box) -> Tensor:
    """The values of ``box``, given in coordinates of ``region``: a view if each dimension has one run."""
    for dim, (runs, (start, stop)) in enumerate(zip(region, box, strict=True)):
        parts = [tensor.narrow(dim, first, last - first) for first, last in _within(runs, start, stop)]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return tensor


def boxes(shape: tuple[int, ...], most: int) -> Iterator[tuple[Box, int, int]]:
    """Contiguous boxes of at most ``most`` elements that cover a tensor, each with its first element and its size."""
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
    """The runs that a placement gives to part ``index`` of ``parts``, of the ``runs`` that earlier placements left."""
    count = sum(stop - start for start, stop in runs)
    if len(placement) == 1:
        size = -(-count // parts)
        return _within(runs, min(index * size, count), min((index + 1) * size, count))
    # Only torch knows how _StridedShard interleaves, so it splits a tensor of positions.
    dim, split_factor = placement
    positions = torch.cat([torch.arange(start, stop, device="cpu") for start, stop in runs])
    mine = split_strided(positions.view([1] * dim + [count]), dim, split_factor, parts)[index].flatten()
    breaks = (mine.diff() != 1).nonzero().flatten() + 1
    pieces = mine.tensor_split(breaks) if mine.numel() else ()
    return tuple((int(piece[0]), int(piece[-1]) + 1) for piece in pieces) or ((0, 0),)


def _within(runs: Runs, start: int, stop: int) -> Runs:
    """Positions ``start`` to ``stop`` of the runs laid end to end; one empty run if there are none."""
    found = []
    for first, last in runs:
        size = last - first
        if start < size and stop > 0 and start < stop:
            found.append((first + max(start, 0), first + min(stop, size)))
        start, stop = start - size, stop - size
    return tuple(found) or ((0, 0),)


_EXTRA = "_extra_state"  # nn.Module's name for an entry of any type
# Parts of names that wrappers add; ignored in both names, as the checkpoint may be of another wrapper.
_WRAPPERS = frozenset({COMPILED, "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


class SourceEntry(NamedTuple):
    """An entry of the checkpoint."""

    key: str
    shape: tuple[int, ...] | None  # of the full tensor; None if it is not a tensor
    dtype: torch.dtype | None
    kind: str  # the name of its type
    content: str = ""  # as_text() of an entry that is not a tensor, if it is sent


class ExpectedEntry(NamedTuple):
    """An entry that a module has."""

    key: str
    shape: tuple[int, ...] | None  # of the full tensor; None if any entry will do
    dtype: torch.dtype | None
    layout: ShardLayout | None  # None for a tensor that each rank has whole
    tie: str  # the first key of the same memory; the key itself if the tensor is not tied


def describe(state_dict: Mapping[str, Any], *, is_sent: bool) -> list[SourceEntry]:
    """The entries of a checkpoint; if ``is_sent``, those that are not tensors with their content."""
    found = []
    for key, value in state_dict.items():
        if not isinstance(key, str):
            raise TypeError(f"the keys of a state_dict are texts, not {type(key).__name__}")
        if isinstance(value, DTensor):
            raise TypeError(f"{key!r} is a DTensor on the rank that has the checkpoint; pass full tensors there")
        if isinstance(value, Tensor) and value.layout is torch.strided and not holds_tensors(value):
            if value.is_meta:
                raise TypeError(f"{key!r} is on the meta device and has no values; pass real tensors")
            found.append(SourceEntry(key, tuple(value.shape), value.dtype, "Tensor"))
            continue
        try:
            content = as_text(value) if is_sent else ""
        except TypeError as error:
            raise TypeError(f"{key!r} cannot be sent: {error}") from error
        found.append(SourceEntry(key, None, None, type(value).__name__, content))
    return found


def expect(state_dict: Mapping[str, Any], rank: int) -> list[ExpectedEntry]:
    """The entries that a module expects, given its ``state_dict(keep_vars=True)`` and this global ``rank``."""
    first: dict[object, str] = {}
    expected = []
    for key, value in state_dict.items():
        if takes_anything(key, value):
            expected.append(ExpectedEntry(key, None, None, None, key))
            continue
        local = local_of(value)
        layout = _layout(key, value, local, rank)
        memory: object = id(value)  # entries with the same memory are one tensor
        if not local.is_meta and local.numel() > 0:
            memory = local.data_ptr(), local.dtype, tuple(local.shape), local.stride(), str(local.device)
        expected.append(ExpectedEntry(key, tuple(value.shape), value.dtype, layout, first.setdefault(memory, key)))
    return expected


def takes_anything(key: str, value: object) -> bool:
    """Whether any entry may be loaded here: extra state, or a lazy parameter, which has no shape yet."""
    return not isinstance(value, Tensor) or key.rpartition(".")[2] == _EXTRA or is_lazy(value)


def local_of(value: Tensor) -> Tensor:
    """This rank's shard, not a view of it, which ``to_local()`` would make with gradients enabled."""
    with torch.no_grad():
        return value.to_local() if isinstance(value, DTensor) else value


def _layout(key: str, value: Tensor, local: Tensor, rank: int) -> ShardLayout | None:
    if holds_tensors(local) or local.layout is not torch.strided:
        raise TypeError(f"{key!r} holds a {type(local).__name__} ({local.layout}), which cannot be filled from bytes")
    if not isinstance(value, DTensor):
        return None
    try:
        layout = ShardLayout.of(value)
    except ValueError as error:
        raise ValueError(f"{key!r} cannot be loaded: {error}") from None
    region, shape = layout.region(tuple(value.shape), rank), tuple(local.shape)
    if region is not None and shape_of(region) != shape:
        raise ValueError(
            f"{key!r} of shape {tuple(value.shape)} has a shard of shape {shape} on global rank {rank}, where "
            f"{list(value.placements)} gives {shape_of(region)}; shards of other sizes cannot be loaded"
        )
    return layout


def packed(entries: Sequence[ExpectedEntry]) -> Any:
    """The entries that a module expects as plain values, to be sent; each of the few layouts once."""
    layouts: dict[ShardLayout | None, int] = {}
    rows = [(e.key, e.shape, e.dtype, layouts.setdefault(e.layout, len(layouts)), e.tie) for e in entries]
    return [[one and astuple(one) for one in layouts], rows]


def unpacked(sent: Any) -> list[ExpectedEntry]:
    """The entries that :func:`packed` was given."""
    layouts = [one and ShardLayout(*one) for one in sent[0]]
    return [ExpectedEntry(key, shape, dtype, layouts[layout], tie) for key, shape, dtype, layout, tie in sent[1]]


# ---------------------------------------------------------------------- names


class Match(NamedTuple):
    """The keys of a checkpoint, matched with the module's.

    Tied keys are all loaded from the last of them that the checkpoint has, as if they were loaded one after another.
    """

    sources: dict[str, str]  # the checkpoint's key for each key of the module that is loaded
    missing: list[str]  # keys of the module that the checkpoint lacks
    unexpected: list[str]  # keys of the checkpoint that no rank's module has


def match(found: Iterable[SourceEntry], expectations: Sequence[Sequence[ExpectedEntry]]) -> Match:
    """Match the keys of a checkpoint with those of the modules of all ranks, which may be parts of one model."""
    ours: dict[str, None] = {}
    ties: dict[str, dict[str, None]] = {}
    for _, entry in _each(expectations):
        ours[entry.key] = None
        ties.setdefault(entry.tie, {})[entry.key] = None
    theirs = [entry.key for entry in found]
    named = _names(theirs, list(ours))
    direct = {name: key for key, name in named.items()}
    sources = {}
    for tied in ties.values():
        source = next((direct[key] for key in reversed(tied) if key in direct), None)
        if source is not None:
            sources.update(dict.fromkeys(tied, source))
    return Match(
        sources={key: sources[key] for key in ours if key in sources},
        missing=[key for key in ours if key not in sources],
        unexpected=[key for key in theirs if key not in named],
    )


def check(
    found: Mapping[str, SourceEntry],
    expectations: Sequence[Sequence[ExpectedEntry]],
    matched: Match,
    *,
    strict: bool,
    what: str,
) -> None:
    """Raise, in torch's words, if shapes do not match, or if ``strict`` keys; ``what`` names the module's class."""
    problems = []
    for kind, keys in (("Missing", matched.missing), ("Unexpected", matched.unexpected)):
        if strict and keys:
            quoted = ", ".join(f'"{key}"' for key in keys)
            problems.append(f"{kind} key(s) in state_dict: {quoted}.")
    if problems and matched.missing:
        problems.append(
            "Keys are compared before modules rename or add any (load_state_dict pre-hooks, versions): if torch loads "
            "this checkpoint into the whole module, do so on rank 0 and pass the state_dict() of that."
        )
    for rank, entry in _each(expectations):
        source = found.get(matched.sources.get(entry.key, ""))
        if source is not None and (problem := _misfit(source, entry)):
            problems.append(problem if rank == 0 else f"on rank {rank}: {problem}")
    if problems:
        raise CheckpointError("\n\t".join([f"Error(s) in loading state_dict for {what}:", *problems]))


def _each(expectations: Sequence[Sequence[ExpectedEntry]]) -> list[tuple[int, ExpectedEntry]]:
    """The expected entries, each with its first rank; a list that several ranks share is passed through once."""
    different = {id(expected): (rank, expected) for rank, expected in reversed(list(enumerate(expectations)))}
    return [(rank, entry) for rank, expected in sorted(different.values()) for entry in expected]


def _misfit(source: SourceEntry, entry: ExpectedEntry) -> str:
    if entry.shape is None or source.shape == entry.shape:
        return ""
    if source.shape is None:
        return f"expected a tensor for {entry.key}, and the checkpoint has a {source.kind}."
    return (
        f"size mismatch for {entry.key}: copying a param with shape torch.Size({list(source.shape)}) from "
        f"checkpoint, the shape in current model is torch.Size({list(entry.shape)})."
    )


def _names(theirs: Sequence[str], ours: Sequence[str]) -> dict[str, str]:
    """The module's name for each key of the checkpoint that it has."""
    own = set(ours)
    named = {key: key for key in theirs if key in own}
    bare: dict[str, list[str]] = {}
    for key in ours:
        if key not in named:
            bare.setdefault(_bare(key), []).append(key)
    for key in theirs:
        alike = bare.get(_bare(key), [])
        if key not in named and len(alike) == 1:
            named[key] = alike.pop()
    return named


def _bare(key: str) -> str:
    """A key without the names that wrappers add: ``_WRAPPERS`` anywhere, DistributedDataParallel's in front."""
    parts = [part for part in key.split(".") if part not in _WRAPPERS]
    return ".".join(parts[1:] if parts[:1] == ["module"] and len(parts) > 1 else parts)


@dataclass(frozen=True)
class RoutedTensor:
    """One tensor of the checkpoint, and the ranks that receive it."""

    key: str
    dtype: torch.dtype  # of the messages
    shares: tuple[tuple[Region, Route], ...]  # each region, with the ranks of the load group that hold it

    @property
    def nbytes(self) -> int:
        """The bytes of all regions, one that several ranks hold counted once."""
        return sum(math.prod(shape_of(region)) for region, _ in self.shares) * self.dtype.itemsize


def route_tensors(
    found: Mapping[str, SourceEntry],
    expectations: Sequence[Sequence[ExpectedEntry]],
    matched: Match,
    ranks: Sequence[int],
    *,
    converts: bool,
) -> list[RoutedTensor]:
    """The tensors that any rank expects, in the order of the checkpoint.

    With ``converts`` a tensor is sent in the module's dtype if that is smaller.
    """
    members: dict[int, list[int]] = {}
    for rank, expected in enumerate(expectations):
        members.setdefault(id(expected), []).append(rank)
    tensors = {key: entry for key, entry in found.items() if entry.shape is not None}
    shares: dict[str, dict[Region, set[int]]] = {}
    dtypes: dict[str, set[torch.dtype | None]] = {}
    # Models have many entries, and few layouts and shapes.
    known: dict[tuple[ShardLayout | None, tuple[int, ...]], list[Region | None]] = {}
    for expected, holders in ((expectations[holders[0]], holders) for holders in members.values()):
        for entry in expected:
            source = tensors.get(matched.sources.get(entry.key, ""))
            if source is None or source.shape is None:
                continue
            dtypes.setdefault(source.key, set()).add(entry.dtype)
            layout, shape = kind = (entry.layout, source.shape)
            if kind not in known:
                known[kind] = [layout.region(shape, rank) if layout else whole(shape) for rank in ranks]
            for rank in holders:
                region = known[kind][rank]
                if region is not None:
                    shares.setdefault(source.key, {}).setdefault(region, set()).add(rank)
    return [
        RoutedTensor(
            key,
            _wire_dtype(entry.dtype, dtypes[key] if converts else set()),
            tuple((region, tuple(sorted(holders))) for region, holders in shares[key].items()),
        )
        for key, entry in tensors.items()
        if key in shares
    ]


def _wire_dtype(found: torch.dtype | None, wanted: set[torch.dtype | None]) -> torch.dtype:
    assert found is not None
    if len(wanted) == 1:
        (dtype,) = wanted
        if dtype is not None and dtype.itemsize < found.itemsize:
            return dtype
    return found


@dataclass(frozen=True)
class Piece:
    """A part of one tensor."""

    routed: RoutedTensor
    region: Region
    box: Box  # which part of the region this is
    offset: int  # where it begins in the region, in elements
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.routed.dtype.itemsize


@dataclass
class TransferMessage:
    """Pieces that are sent together."""

    route: Route  # the ranks that keep it, in order; rank 0, which sends it, may be one of them
    pieces: list[Piece] = field(default_factory=list)
    nbytes: int = 0


def plan_messages(tensors: Sequence[RoutedTensor], rank: int, most: int) -> Iterator[TransferMessage]:
    """The messages of at most ``most`` bytes that ``rank`` sends, receives or passes on, in order."""
    filling: dict[Route, TransferMessage] = {}
    for routed in tensors:
        shares = [share for share in routed.shares if rank == 0 or rank in share[1]]
        limit = max(1, most // routed.dtype.itemsize)
        # A piece of each share in turn, so that no rank waits for all of another's.
        for row in itertools.zip_longest(*(boxes(shape_of(region), limit) for region, _ in shares)):
            for found, (region, route) in zip(row, shares, strict=True):
                if found is None:
                    continue
                piece = Piece(routed, region, *found)
                if piece.nbytes >= _ALONE:
                    yield TransferMessage(route, [piece], piece.nbytes)
                    continue
                message = filling.setdefault(route, TransferMessage(route))
                if message.pieces and message.nbytes + piece.nbytes > most:
                    yield message
                    message = filling[route] = TransferMessage(route)
                message.pieces.append(piece)
                message.nbytes += piece.nbytes
    yield from filling.values()


def tree(route: Route, rank: int) -> tuple[int | None, list[int]]:
    """The rank from which ``rank`` receives a message and those it sends it to, in a binomial tree from rank 0."""
    nodes = [0, *(node for node in route if node != 0)]
    place = nodes.index(rank)
    parent = None if place == 0 else nodes[place & (place - 1)]
    step = place & -place or 1 << (len(nodes) - 1).bit_length()
    children = []
    while step > 1:
        step >>= 1
        if place + step < len(nodes):
            children.append(nodes[place + step])
    return parent, children
