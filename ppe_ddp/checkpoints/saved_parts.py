"""The parts of a checkpoint: what each object of a training saves, under which names, and how it is loaded again.

The name of an entry begins with the part of the training that it belongs to:

    model.layer.weight                   a tensor of a module's state dict
    model._metadata                      the versions of a module and the modules in it
    optimizer.state.0.exp_avg            of a torch optimizer, by the number of the parameter
    optimizer.state.layer.weight.step    of a DistributedOptimizer, by the parameter's name; sharded
    optimizer.param_groups               a value that is not a tensor
    outer.last.layer.weight              of LocalSGD or DiLoCo: a parameter after the last outer step
    ranks.3.own.scheduler                of rank 3 alone
    ranks.3.own.optimizer.state.0.step   an inner optimizer is saved by rank, and so is a module between two outer steps
    ranks.3.differing                    other entries that differ between ranks; model.* has those of the first rank
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from ppe_ddp.backends.json_collectives import dump_plain
from ppe_ddp.compression.outer_steps import OuterSteps
from ppe_ddp.engine.module import is_distributed, local_tensor
from ppe_ddp.engine.replicas import digest_of
from ppe_ddp.errors import CheckpointError
from ppe_ddp.optim import DistributedOptimizer
from ppe_ddp.torch_internals import metadata_of as versions_of
from ppe_ddp.torch_internals import set_metadata

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

RANKS = "ranks"
"""How the names of entries of one rank begin; the rank follows."""
_VERSIONS = "_metadata"


class SavedPart:
    """A part of a training whose state dict has the same keys whenever it is saved or loaded, as a module's.

    ``tables`` are the nested dictionaries in its state dict, each with the number of keys that lead to a value.
    """

    is_of_rank = False  # saved by each rank, and loaded only by as many ranks on the same mesh

    def __init__(self, name: str, what: Any, tables: Mapping[str, int] | None = None) -> None:
        self.prefix = f"{name}."
        self.what = what
        self._tables = tables or {}

    def entries(self) -> dict[str, Any]:
        """The entries to save, by name: plain values, and tensors, which are not copied."""
        state = self.what.state_dict()
        found = {name: table[key] for name, table, key in self._places(state)}
        if (versions := versions_of(state)) is not None:
            found[self.prefix + _VERSIONS] = {module: one.get("version") for module, one in versions.items()}
        return found

    def _places(self, state: dict[Any, Any]) -> list[tuple[str, dict[Any, Any], Any]]:
        """The name of each entry in ``state``, with the dictionary that it is in and its key there."""
        return [place for key in state for place in _places_below(state, key, self.prefix, self._tables.get(key, 0))]

    def targets(self, saved: Metadata) -> dict[str, Any]:
        """The tensors to load into, by name of entry; None for an entry that is not a tensor."""
        own = self.entries()
        theirs = {name for name in saved.state_dict_metadata if name.startswith(self.prefix)}
        if theirs != own.keys():
            lacking, more = sorted(own.keys() - theirs)[:3], sorted(theirs - own.keys())[:3]
            raise ValueError(
                f"the checkpoint lacks {lacking} and has {more}, which are not here: load the same model (with a "
                "DistributedOptimizer: of the same dtype)"
            )
        return {name: value if isinstance(value, torch.Tensor) else None for name, value in own.items()}

    def load(self, entries: Mapping[str, Any]) -> None:
        """Take this part's entries from all that were read; every rank calls it together."""
        state = self.what.state_dict()
        for name, table, key in self._places(state):
            table[key] = entries[name]
        if (versions := versions_of(state)) is not None:
            saved = entries[self.prefix + _VERSIONS]
            set_metadata(state, {module: {**one, "version": saved.get(module)} for module, one in versions.items()})
        self.what.load_state_dict(state)

    def _check_saved(self, entry: str, saved: Metadata) -> None:
        if entry not in saved.state_dict_metadata:
            raise ValueError(f"the checkpoint lacks {entry!r}: it was saved without this part")


class AveragedModulePart(SavedPart):
    """A module that was saved by each rank, and is loaded as the average of all of them."""

    def __init__(self, name: str, module: nn.Module, saved_by: int) -> None:
        super().__init__(name, module)
        self._prefixes = [f"{own_name(name, rank)}." for rank in range(saved_by)]

    def targets(self, saved: Metadata) -> dict[str, Any]:
        """Nothing: :meth:`read` reads one rank's module after the other, as all may not fit in memory."""
        return {}

    def read(self, saved: Metadata, read: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """The averages of floating-point tensors, and rank 0's other entries; calls ``read`` once for each rank.

        What is the same on all ranks keeps its bits, as outer steps would take rounding for a change.
        """
        means: dict[str, Any] = {}
        for count, prefix in enumerate(self._prefixes, 1):
            targets = _as_saved(saved, prefix)
            read(targets)
            for entry, value in targets.items():
                key = self.prefix + entry.removeprefix(prefix)
                if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
                    means.setdefault(key, value)
                    continue
                wide = value.to(torch.promote_types(value.dtype, torch.float32))
                mean = means.setdefault(key, wide)
                means[key] = torch.where(wide == mean, mean, mean * (1 - 1 / count) + wide / count)
        return means


class _SteppingPart(SavedPart):
    """A part that may have no tensors before its first step, so that it loads whatever was saved.

    The entry ``always`` is there even before the first step.
    """

    def __init__(self, name: str, what: Any, tables: Mapping[str, int], always: str) -> None:
        super().__init__(name, what, tables)
        self._always = always

    def targets(self, saved: Metadata) -> dict[str, Any]:
        """New tensors, with the shapes and dtypes that were saved.

        State as large as its parameter is a DTensor if that is one, and has the same order of memory, in which fused
        optimizers go through both.
        """
        self._check_saved(self.prefix + self._always, saved)
        targets = _as_saved(saved, self.prefix)
        groups = self.what.param_groups if isinstance(self.what, Optimizer) else []
        parameters = [parameter for group in groups for parameter in group["params"]]
        for name, value in targets.items():
            state, _, number = name.removeprefix(self.prefix).rpartition(".")[0].partition(".")
            if state == "state" and number.isdecimal() and int(number) < len(parameters):
                parameter = parameters[int(number)]
                if value is not None and value.shape == parameter.shape:
                    targets[name] = _empty_like(parameter, value.dtype)
        return targets

    def load(self, entries: Mapping[str, Any]) -> None:
        state: dict[Any, Any] = {name: {} for name in self._tables}
        for name in (one.removeprefix(self.prefix) for one in entries if one.startswith(self.prefix)):
            *path, last = name.split(".", self._tables.get(name.partition(".")[0], 0))
            table = state
            for key in path:
                table = table.setdefault(int(key) if key.isdecimal() else key, {})
            table[last] = entries[self.prefix + name]
        self.what.load_state_dict(state)


class RankPart(SavedPart):
    """State that each rank saves and loads by itself, in one entry; with ``may_lack`` it loads None if that was not."""

    is_of_rank = True

    def __init__(
        self, entry: str, state: Callable[[], Any], load_state: Callable[[Any], object], *, may_lack: bool = False
    ) -> None:
        super().__init__(entry, None)
        self._entry, self._state, self._load_state, self._may_lack = entry, state, load_state, may_lack

    def entries(self) -> dict[str, Any]:
        return {self._entry: self._state()}

    def targets(self, saved: Metadata) -> dict[str, Any]:
        """The entry of this rank, which may hold tensors, but is none."""
        if self._may_lack and self._entry not in saved.state_dict_metadata:
            return {}
        self._check_saved(self._entry, saved)
        return {self._entry: None}

    def load(self, entries: Mapping[str, Any]) -> None:
        self._load_state(entries.get(self._entry))


class CommonPart(SavedPart):
    """State that each rank has saved by itself; another number of ranks, or mesh, loads it if all had the same."""

    differs = False

    def __init__(self, name: str, what: Any, saved_by: int) -> None:
        super().__init__(name, what)
        self.name = name
        self._entries = [own_name(name, rank) for rank in range(saved_by)]

    def targets(self, saved: Metadata) -> dict[str, Any]:
        self._check_saved(self._entries[0], saved)
        return dict.fromkeys(self._entries)

    def load(self, entries: Mapping[str, Any]) -> None:
        self.differs = len({dump_plain(entries[entry]) for entry in self._entries}) > 1
        if self.differs:
            return
        try:
            self.what.load_state_dict(entries[self._entries[0]])
        except Exception as error:
            raise CheckpointError(
                f"{self.name!r} does not take the state that {len(self._entries)} ranks have saved, the same on each "
                f"({type(error).__name__}: {error}): let its load_state_dict() pass over it, or make a Checkpointer "
                "without this part to load"
            ) from error


class Differing:
    """The entries of modules and optimizers that differ between ranks; each rank saves its own in one entry.

    torch saves each entry on some rank; without this, entries of several ranks would be mixed.
    """

    def __init__(self, rank: int) -> None:
        self._entry, self._rank = of_rank(rank, "differing"), rank

    def add_to(self, entries: dict[str, Any], digests: Sequence[Mapping[str, Sequence[int]]]) -> None:
        """Move the entries that differ by the ``digests`` of all ranks; the first rank that has one saves it for all.

        Only as many ranks on the same mesh load their own entries again. Of a DTensor, torch saves each part of some
        rank for all.
        """
        first = {entry: rank for rank in reversed(range(len(digests))) for entry in digests[rank]}
        differing = [entry for entry in first if _differ([of_rank.get(entry) for of_rank in digests])]
        own = [entry for entry in differing if entry in entries]
        entries[self._entry] = {
            "entries": {entry: _copied(entries[entry]) for entry in own},
            "places": {entry: place for entry in own if (place := _place(entries[entry]))},
            "lacking": [entry for entry in differing if entry not in entries],
        }
        for entry in own:
            if first[entry] != self._rank and not is_distributed(entries[entry]):
                entries.pop(entry)

    def read(self, saved: Metadata, read: Callable[[dict[str, Any]], None]) -> dict[str, OwnEntry]:
        """This rank's own entries; hides in ``saved`` those that only others have. ``read`` is called on all or none.

        They may have another shape than what the first rank has saved for all.
        """
        if self._entry not in saved.state_dict_metadata:
            return {}
        targets: dict[str, Any] = {self._entry: None}
        read(targets)
        for entry in targets[self._entry]["lacking"]:
            saved.state_dict_metadata.pop(entry, None)
        places = targets[self._entry].get("places", {})
        return {entry: OwnEntry(one, places.get(entry, [])) for entry, one in targets[self._entry]["entries"].items()}


def split_wrappers(
    parameters: Mapping[str, Sequence[str]],
    digests: Sequence[Mapping[str, Sequence[int]]],
    averaging: Sequence[Mapping[str, Sequence[Sequence[int]]]],
) -> list[str]:
    """The wrappers of which a parameter is the same where ranks average, and another one elsewhere: parts of a model.

    Args:
        parameters: The entries of each wrapper's parameters.
        digests: See :func:`digests_of`; of each rank.
        averaging: The groups of ranks with which each wrapper averages, on each rank.

    Of DTensors only those that are cut count: others, which must be copies, may have come apart by rounding.
    """
    found = []
    for name, entries in parameters.items():
        groups = {tuple(rank for rank in one[name][0] if rank >= 0) for one in averaging if name in one}
        cut = [entry for entry in entries if len(digests[0].get(entry, ())) > 1]
        values = [{entry: one[entry] for entry in cut or entries if entry in one} for one in digests]
        equal = [
            entry
            for entry in values[0]
            if all(values[rank].get(entry) == values[group[0]].get(entry) for group in groups for rank in group)
        ]
        if len(groups) > 1 and any(_differ([one.get(entry) for one in values]) for entry in equal):
            found.append(name)
    return found


def _differ(digests: Sequence[Sequence[int] | None]) -> bool:
    """Whether a rank lacks the entry with these digests, or ranks with the same part of it have other values."""
    by_place: dict[tuple[int, ...], int] = {}
    return any(one is None or by_place.setdefault(tuple(one[:-1]), one[-1]) != one[-1] for one in digests)


def _copied(value: Any) -> Any:
    # A view would be saved with all of the memory that it lies in.
    return local_tensor(value).detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True)
class OwnEntry:
    """A rank's own entry; of a DTensor its local tensor, with the place of this one among the parts."""

    value: Any
    place: Sequence[int]

    def fits(self, target: Any) -> bool:
        """Whether it may be loaded in place of ``target``: not if that is another part, as on another mesh."""
        if not (self.place or is_distributed(target)):
            return True
        return self.place == _place(target) and self.value.shape == local_tensor(target).shape

    def in_place_of(self, target: Any) -> Any:
        """The value, as a DTensor if ``target`` is one."""
        if not is_distributed(target):
            return self.value
        from torch.distributed.tensor import DTensor

        local, mesh, shape, stride = self.value.to(target.device), target.device_mesh, target.shape, target.stride()
        return DTensor.from_local(local, mesh, target.placements, shape=shape, stride=stride)


def digests_of(entries: Mapping[str, Any]) -> dict[str, list[int]]:
    """The digests of these entries, without those that cannot be saved.

    That of a DTensor is of its local tensor, behind the place of this one among the parts.
    """
    found = {}
    for name, value in entries.items():
        if isinstance(value, torch.Tensor):
            local = local_tensor(value)
            if type(local) in (torch.Tensor, nn.Parameter) and local.layout is torch.strided and not local.is_meta:
                found[name] = [*_place(value), digest_of(local)]
            continue
        try:
            content = dump_plain(value)
        except TypeError:  # writing it will raise the error
            continue
        found[name] = [int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")]
    return found


def _place(tensor: Any) -> list[int]:
    """Which part of a DTensor its local tensor is, and of how many; empty if it is all of it."""
    if not is_distributed(tensor):
        return []
    mesh, cut = tensor.device_mesh, [not placement.is_replicate() for placement in tensor.placements]
    dimensions = [k for k, is_cut in enumerate(cut) if is_cut and mesh.size(k) > 1]
    return [number for k in dimensions for number in (mesh.get_local_rank(k), mesh.size(k))]


def _optimizer_part(name: str, optimizer: Optimizer) -> SavedPart:
    return _SteppingPart(name, optimizer, {"state": 2}, always="param_groups")


def part_of(name: str, what: Any, rank: int) -> SavedPart:
    """The part to save ``what`` as, by its type."""
    if not name or "." in name or name == RANKS:
        raise ValueError(f"a part of a checkpoint cannot be named {name!r}: without dots, and not {RANKS!r}")
    if isinstance(what, OuterSteps):
        return _SteppingPart(name, what, {"last": 1, "velocity": 1}, always="steps")
    if isinstance(what, nn.Module):
        return SavedPart(name, what)
    if isinstance(what, DistributedOptimizer):
        return SavedPart(name, what, {"state": 2, "exists": 1, "master": 1, "layout": 1})
    if isinstance(what, Optimizer):
        return _optimizer_part(name, what)
    if callable(getattr(what, "state_dict", None)) and callable(getattr(what, "load_state_dict", None)):
        entry = own_name(name, rank)
        return RankPart(entry, lambda: what.state_dict(), lambda state: what.load_state_dict(state))
    raise TypeError(
        f"{name!r} is a {type(what).__name__}, which has no state_dict() and load_state_dict(): give it these, or pass "
        "plain values as the position"
    )


def of_rank(rank: int, key: str) -> str:
    """The name of an entry of one rank."""
    return f"{RANKS}.{rank}.{key}"


def own_name(name: str, rank: int) -> str:
    """The name of a part that is saved by each rank."""
    return of_rank(rank, f"own.{name}")


def own_part(
    name: str, what: Any, outer_steps: Sequence[OuterSteps], between: Sequence[OuterSteps], rank: int
) -> SavedPart | None:
    """The part to save ``what`` as if ranks differ because of outer steps; None if it is equal on all ranks.

    ``between`` are those with inner steps since their last outer step, on any rank.
    """
    if not outer_steps:
        return None
    if isinstance(what, nn.Module):
        return SavedPart(own_name(name, rank), what) if any(one.is_of(what) for one in between) else None
    is_plain = isinstance(what, Optimizer) and not isinstance(what, DistributedOptimizer)
    return _optimizer_part(own_name(name, rank), what) if is_plain else None


def loaded_part(
    name: str, what: Any, saved: Metadata, outer_steps: Sequence[OuterSteps], rank: int, saved_by: int, *, is_same: bool
) -> SavedPart | None:
    """The part that loads ``what`` if each of ``saved_by`` ranks has saved its own; None if it was equal on all.

    ``is_same`` tells that as many ranks load it, on the same mesh.
    """
    if not any(entry.startswith(own_name(name, 0) + ".") for entry in saved.state_dict_metadata):
        return None
    if isinstance(what, Optimizer):  # each rank takes the moments of one rank, also if there are more ranks now
        return _optimizer_part(own_name(name, rank % saved_by if outer_steps else 0), what)
    if is_same and any(one.is_of(what) for one in outer_steps):
        return SavedPart(own_name(name, rank), what)
    return AveragedModulePart(name, what, saved_by)


def _empty_like(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """New memory for the state of ``parameter``, with its order of memory; a DTensor of a DTensor, else on the CPU."""
    if is_distributed(parameter):
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    plain = torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtype, device="meta")  # of no class
    return torch.empty_like(plain, device="cpu")


def _as_saved(saved: Metadata, prefix: str) -> dict[str, Any]:
    """New tensors for the entries whose names begin with ``prefix``; None for entries that are not tensors."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    found = {name: one for name, one in saved.state_dict_metadata.items() if name.startswith(prefix)}
    return {
        name: torch.empty(one.size, dtype=one.properties.dtype, device="cpu")
        if isinstance(one, TensorStorageMetadata)
        else None
        for name, one in found.items()
    }


def _places_below(
    table: dict[Any, Any], key: Any, prefix: str, depth: int
) -> Iterator[tuple[str, dict[Any, Any], Any]]:
    if depth == 0:
        if not isinstance(key, str):  # it would be loaded as a text
            raise TypeError(f"{prefix}{key!r} cannot be saved: a key there must be a text, not {type(key).__name__}")
        yield f"{prefix}{key}", table, key
        return
    for inner in table[key]:
        yield from _places_below(table[key], inner, f"{prefix}{key}.", depth - 1)
