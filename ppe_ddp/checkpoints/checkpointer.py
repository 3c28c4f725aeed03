"""Checkpointer: saves a training, so that a job that was killed continues from its last checkpoint.

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
import logging
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from ppe_ddp.backends.group_internals import default_group
from ppe_ddp.compression.comm_state import on_these_nodes
from ppe_ddp.compression.outer_steps import OuterSteps, outer_steps_of
from ppe_ddp.engine.module import is_distributed
from ppe_ddp.engine.plan import fingerprint
from ppe_ddp.engine.replicas import digest_of
from ppe_ddp.errors import CheckpointError, DisagreementError
from ppe_ddp.optim import DistributedOptimizer
from ppe_ddp.sharding.checkpoint_reader import dump_plain
from ppe_ddp.torch_internals import metadata_of as versions_of
from ppe_ddp.torch_internals import set_metadata

if TYPE_CHECKING:
    import os

    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata

    from ppe_ddp.checkpoints.checkpoint_files import CheckpointName, Digest
    from ppe_ddp.sharding.load_group import LoadGroup

logger = logging.getLogger("ppe_ddp")

RANKS = "ranks"
"""How the names of entries of one rank begin; the rank follows."""
_POSITION, _VERSIONS = "position", "_metadata"
_IS_POSITION = re.compile(rf"{RANKS}\.\d+\.{_POSITION}").fullmatch


class SavedPart:
    """A part of a training whose state dict has the same keys whenever it is saved or loaded, as a module's.

    Args:
        name: The name of its entries, before a dot.
        what: The object.
        tables: The nested dictionaries in its state dict, each with the number of keys that lead to a value.
    """

    is_of_rank = False  # saved by each rank, and loaded only by as many ranks

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
            raise ValueError(f"the checkpoint lacks {lacking} and has {more}, which are not here: load the same model")
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
        """The averages of floating-point tensors, and rank 0's other entries; calls ``read`` once for each rank."""
        total: dict[str, Any] = {}
        for prefix in self._prefixes:
            targets = _as_saved(saved, prefix)
            read(targets)
            for entry, value in targets.items():
                key = self.prefix + entry.removeprefix(prefix)
                if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
                    total.setdefault(key, value)
                    continue
                wide = torch.promote_types(value.dtype, torch.float32)
                total[key] = total.get(key, 0) + value.to(wide) / len(self._prefixes)
        return total


class _SteppingPart(SavedPart):
    """A part that may have no tensors before its first step, so that it loads whatever was saved.

    The entry ``always`` is there even before the first step.
    """

    def __init__(self, name: str, what: Any, tables: Mapping[str, int], always: str) -> None:
        super().__init__(name, what, tables)
        self._always = always

    def targets(self, saved: Metadata) -> dict[str, Any]:
        """New tensors, with the shapes and dtypes that were saved; DTensors if they are as large as a DTensor."""
        self._check_saved(self.prefix + self._always, saved)
        targets = _as_saved(saved, self.prefix)
        groups = self.what.param_groups if isinstance(self.what, Optimizer) else []
        parameters = [parameter for group in groups for parameter in group["params"]]
        for name, value in targets.items():
            state, _, number = name.removeprefix(self.prefix).rpartition(".")[0].partition(".")
            if state == "state" and number.isdecimal() and int(number) < len(parameters):
                parameter = parameters[int(number)]
                if is_distributed(parameter) and value is not None and value.shape == parameter.shape:
                    targets[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
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


class _RankPart(SavedPart):
    """State that each rank saves and loads by itself, in one entry."""

    is_of_rank = True

    def __init__(self, entry: str, state: Callable[[], Any], load_state: Callable[[Any], object]) -> None:
        super().__init__(entry, None)
        self._entry, self._state, self._load_state = entry, state, load_state

    def entries(self) -> dict[str, Any]:
        return {self._entry: self._state()}

    def targets(self, saved: Metadata) -> dict[str, Any]:
        self._check_saved(self._entry, saved)
        return {self._entry: None}

    def load(self, entries: Mapping[str, Any]) -> None:
        self._load_state(entries[self._entry])


class _DifferingPart(SavedPart):
    """The entries of modules and optimizers that differ between ranks; each rank saves its own in one entry.

    torch saves each entry on some rank; without this, entries of several ranks would be mixed.
    """

    is_of_rank = True

    def __init__(self, rank: int) -> None:
        super().__init__(RANKS, None)
        self._entry, self._rank = of_rank(rank, "differing"), rank

    def add_to(self, entries: dict[str, Any], digests: Sequence[Mapping[str, int]]) -> None:
        """Move the entries that differ by the ``digests`` of all ranks; the first rank that has one saves it for all.

        Only as many ranks load their own entries again.
        """
        first = {entry: rank for rank in reversed(range(len(digests))) for entry in digests[rank]}
        differing = [e for e, rank in first.items() if any(other.get(e) != digests[rank][e] for other in digests)]
        own = [entry for entry in differing if entry in entries]
        entries[self._entry] = {
            "entries": {entry: _copied(entries[entry]) for entry in own},
            "lacking": [entry for entry in differing if entry not in entries],
        }
        for entry in own:
            if first[entry] != self._rank:
                entries.pop(entry)

    def targets(self, saved: Metadata) -> dict[str, Any]:
        return {self._entry: None} if self._entry in saved.state_dict_metadata else {}

    def put_into(self, entries: dict[str, Any]) -> None:
        """Put this rank's own entries into those that were read, before other parts load them."""
        if self._entry in entries:
            own = entries[self._entry]
            entries.update(own["entries"])
            for entry in own["lacking"]:
                entries.pop(entry, None)

    def load(self, entries: Mapping[str, Any]) -> None:
        """Do nothing: the parts of these entries load them."""


def _copied(value: Any) -> Any:
    # A view would be saved with all of the memory that it lies in.
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _digests(entries: Mapping[str, Any]) -> dict[str, int]:
    """The digests of these entries, without those that torch saves in shards or that cannot be saved."""
    found = {}
    for name, value in entries.items():
        if isinstance(value, torch.Tensor):
            if type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_meta:
                found[name] = digest_of(value)
            continue
        try:
            content = dump_plain(value)
        except TypeError:  # writing it will raise the error
            continue
        found[name] = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
    return found


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
        return _RankPart(entry, lambda: what.state_dict(), lambda state: what.load_state_dict(state))
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


def own_part(name: str, what: Any, outer_steps: Sequence[OuterSteps], rank: int) -> SavedPart | None:
    """The part to save ``what`` as if ranks differ because of outer steps; None if it is equal on all ranks."""
    if not outer_steps:
        return None
    if isinstance(what, nn.Module):
        is_own = any(one.is_between for one in outer_steps if one.is_of(what))
        return SavedPart(own_name(name, rank), what) if is_own else None
    is_plain = isinstance(what, Optimizer) and not isinstance(what, DistributedOptimizer)
    return _optimizer_part(own_name(name, rank), what) if is_plain else None


def loaded_part(
    name: str, what: Any, saved: Metadata, outer_steps: Sequence[OuterSteps], rank: int, ranks: int, saved_by: int
) -> SavedPart | None:
    """The part that loads ``what`` if each of ``saved_by`` ranks has saved its own; None if it was equal on all."""
    if not any(entry.startswith(own_name(name, 0) + ".") for entry in saved.state_dict_metadata):
        return None
    if isinstance(what, Optimizer):  # each rank takes the moments of one rank, also if there are more ranks now
        return _optimizer_part(own_name(name, rank % saved_by if outer_steps else 0), what)
    if ranks == saved_by and any(one.is_of(what) for one in outer_steps):
        return SavedPart(own_name(name, rank), what)
    return AveragedModulePart(name, what, saved_by)


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
        yield f"{prefix}{key}", table, key
        return
    for inner in table[key]:
        yield from _places_below(table[key], inner, f"{prefix}{key}.", depth - 1)


def random_states() -> dict[str, Any]:
    """The states of the generators of Python, NumPy, torch on the CPU, and this rank's CUDA device if it is in use."""
    version, numbers, gauss = random.getstate()
    legacy: dict[str, Any] = np.random.get_state(legacy=False)
    legacy = legacy | {"state": {**legacy["state"], "key": legacy["state"]["key"].tolist()}}
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return {"python": [version, list(numbers), gauss], "numpy": legacy, "cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_states(states: dict[str, Any]) -> None:
    """Set the generators to what :func:`random_states` has returned."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    legacy = states["numpy"]
    key = np.array(legacy["state"]["key"], dtype=np.uint32)
    np.random.set_state(legacy | {"state": {**legacy["state"], "key": key}})
    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


@dataclass(frozen=True)
class Restored:
    """The step and the positions of the checkpoint that :meth:`Checkpointer.load` has loaded.

    Attributes:
        step: The step that was passed to ``save()``.
        position: The position that this rank passed; None if another number of ranks saved the checkpoint.
        positions: The positions of all ranks that saved it.
    """

    step: int
    position: Any
    positions: list[Any]


def _load_communication(wrapper: Any, saved: Any) -> None:
    """Load the ``comm_state_dict()`` of a wrapper; if the ranks are on other nodes now, compressors begin anew."""
    own = wrapper.comm_state_dict()
    if isinstance(own, list):  # of Megatron's wrapper: one for each group
        fitting: Any = [on_these_nodes(*pair) for pair in zip(saved, own, strict=True)]
    else:
        fitting = on_these_nodes(saved, own)
    wrapper.load_comm_state_dict(fitting)


def _refuse_split(name: str, wrapper: Any, count: int) -> None:
    """Refuse a Megatron wrapper if ``count`` ranks would save different tensors under one name."""
    groups: Any = getattr(wrapper, "groups", None)
    if not getattr(groups, "split_model", False):
        return
    size = dist.get_world_size(groups.data)
    if groups.expert is not None and dist.get_world_size(groups.expert) < size:
        raise ValueError(
            f"{name!r} has experts of which each rank has others under the same names, and a Checkpointer saves one of "
            "each name: save by torch.distributed.checkpoint, under names of your own"
        )
    if count > size:
        raise ValueError(
            f"{name!r} is split over ranks, by tensor or pipeline parallelism, and a Checkpointer saves one tensor of "
            "each name: make one for each data-parallel group, Checkpointer(a folder of its own, ..., "
            "process_group=groups.data)"
        )


class Checkpointer:
    """Saves a training, so that it can be killed at any moment and loses only the steps since the last save.

    Make it after everything that it saves::

        checkpointer = Checkpointer("checkpoints", {"model": model, "optimizer": optimizer, "scheduler": scheduler})
        restored = checkpointer.load()
        for step in range(restored.step if restored else 0, steps):
            ...
            if (step + 1) % 100 == 0:
                checkpointer.save(step + 1, position=...)

    A checkpoint is never half written, and damage is noticed before anything is loaded. Besides the parts it holds
    each rank's states of random number generators (Python's, NumPy's, torch's on the CPU and on the rank's CUDA
    device), and the ``comm_state_dict()`` of each wrapper. The same number of ranks continues with the same bits, if
    its steps are reproducible; another number of ranks loads only modules, optimizers and outer steps. As many ranks on
    other nodes load all but the state of compressors.

    Files are those of ``torch.distributed.checkpoint``. Nothing in them is executed.

    All ranks must call the constructor and the methods together. An error on one rank is raised on all.

    Args:
        folder: The folder of this job's checkpoints, on a file system that all ranks share.
        parts: What is saved, by name; the same names on every rank. Modules and wrappers; torch's optimizers and
            ``DistributedOptimizer``; ``LocalSGD`` and ``DiLoCo``, with which each rank saves its own model and inner
            optimizer; and any other object with ``state_dict()`` and ``load_state_dict()``: each rank saves its own,
            which may hold tensors and plain values.
        keep: How many checkpoints to keep. With 1, nothing is left if that one is damaged later.
        process_group: The ranks; None for the default group of the moment, or for this process alone if there is none.

    Raises:
        TypeError: A part cannot be saved.
        ValueError: A name has dots, ``keep`` is not positive, or the ranks have different parts of one split model.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        parts: Mapping[str, Any],
        *,
        keep: int = 3,
        process_group: ProcessGroup | None = None,
    ) -> None:
        # They import DTensor and torch.distributed.checkpoint, which takes a while.
        from ppe_ddp.checkpoints.checkpoint_files import CheckpointFolder
        from ppe_ddp.sharding.load_group import LoadGroup

        if keep < 1:
            raise ValueError(f"keep is how many checkpoints are kept, at least 1; it is {keep}")
        self._folder = CheckpointFolder(Path(folder))
        self._keep = keep
        self._given = dict(sorted(parts.items()))  # in which all ranks save and load them
        self._damaged: set[str] = set()
        self._is_of_default = process_group is None
        self._use(LoadGroup(process_group))

    def _use(self, ranks: LoadGroup) -> None:
        """Save and load with ``ranks``."""
        self._ranks, rank, parts = ranks, ranks.rank, self._given
        for name, what in parts.items():
            _refuse_split(name, what, ranks.size)
        self._parts = {name: part_of(name, what, rank) for name, what in parts.items()}
        modules: dict[str, Any] = {name: what for name, what in parts.items() if isinstance(what, nn.Module)}
        wrappers = {name: what for name, what in modules.items() if hasattr(what, "comm_state_dict")}
        self._of_rank: list[SavedPart] = [
            _RankPart(of_rank(rank, f"communication.{name}"), what.comm_state_dict, partial(_load_communication, what))
            for name, what in wrappers.items()
        ]
        self._differing = _DifferingPart(rank)
        # Last, as loading other parts may draw random numbers.
        self._of_rank.append(_RankPart(of_rank(rank, "random"), random_states, set_random_states))

    def _follow(self) -> None:
        """Go on with the ranks of the default group of now, which ``ppe_ddp.elastic`` replaces."""
        from ppe_ddp.sharding.load_group import LoadGroup

        if self._is_of_default and dist.is_initialized() and self._ranks.group is not default_group():
            self._use(LoadGroup())

    # ------------------------------------------------------------------ saving

    def save(self, step: int, *, position: Any = None) -> Path:
        """Save everything, between two steps; all ranks call it together. Gradients are not saved.

        When it returns, the checkpoint is on the disk, and all but the newest ``keep`` are removed.

        Args:
            step: How many steps were taken; a part of the folder's name, and the same on every rank.
            position: This rank's place in its data, of plain values and tensors; ``load()`` returns it.

        Returns:
            The folder of this checkpoint.

        Raises:
            CheckpointError: On every rank: a rank could not write, the disk is full, or loading an entry would run
                code. Earlier checkpoints are intact, and training may continue.
            DisagreementError: On every rank: they are at different steps, or have different parts.
            CommunicationError: A rank has left.
        """
        from ppe_ddp.checkpoints.checkpoint_files import write_entries

        self._follow()
        entries: dict[str, Any] = {}
        of_entries: dict[str, int] = {}
        outer_steps: list[OuterSteps] = []

        def begin() -> Any:
            outer_steps.extend(self._outer_steps())
            for part in self._of_rank:
                entries.update(part.entries())
            entries[of_rank(self._ranks.rank, _POSITION)] = position
            return [step, list(self._parts)]

        def collect(name: str, what: Any) -> None:
            own = own_part(name, what, outer_steps, self._ranks.rank)
            found = (own or self._parts[name]).entries()
            entries.update(found)
            if own is None and not (self._parts[name].is_of_rank or isinstance(what, DistributedOptimizer)):
                of_entries.update(_digests(found))

        self._compare(self._ranks.from_each(begin))
        for name, what in self._given.items():  # one after another, as some communicate
            self._ranks.from_each(partial(collect, name, what))
        self._add_differing(entries, of_entries)
        begun = self._ranks.from_source(lambda: self._folder.begin(step))
        folder = self._folder.path / begun
        try:
            write_entries(entries, folder, self._ranks)
            digests = self._ranks.from_each(lambda: self._synced(folder))
            files = {name: digest for own in digests for name, digest in own.items()}
            path = Path(self._ranks.from_source(lambda: str(self._folder.publish(begun, files))))
        except BaseException:
            if self._ranks.is_source:
                self._folder.discard(begun)
            raise
        if self._ranks.is_source:
            self._folder.prune(self._keep, self._damaged)
        return path

    def _add_differing(self, entries: dict[str, Any], digests: Mapping[str, int]) -> None:
        """Add the entries that differ between ranks; ``digests`` are this rank's, by entry."""
        if len(set(self._ranks.from_each(lambda: fingerprint([repr(sorted(digests.items()))]).hex()))) > 1:
            everyone = self._ranks.from_each(lambda: digests)
            self._ranks.from_each(lambda: self._differing.add_to(entries, everyone))

    def _outer_steps(self) -> list[OuterSteps]:
        given = [what for what in self._given.values() if isinstance(what, OuterSteps)]
        for name, what in self._given.items():
            for outer in outer_steps_of(what):
                if not any(outer is one for one in given):
                    raise ValueError(
                        f"{name!r} is the inner optimizer of a {type(outer).__name__}, which is not among the parts: "
                        "add it, as a training cannot go on without"
                    )
        return given

    def _compare(self, found: list[Any]) -> None:
        for rank, (step, names) in enumerate(found):
            if [step, names] != found[0]:
                raise DisagreementError(
                    f"rank {rank} saves a checkpoint of step {step} with {names}, and rank 0 of step {found[0][0]} "
                    f"with {found[0][1]}: call save() at the same step with the same parts on every rank"
                )

    def _synced(self, folder: Path) -> dict[str, Digest]:
        """Wait until the files of this rank are on the disk; their digests by name."""
        from ppe_ddp.checkpoints.checkpoint_files import sync

        rank = self._ranks.rank
        own = [file for file in folder.iterdir() if file.name.startswith(f"__{rank}_")]
        if self._ranks.is_source:
            own += [file for file in folder.iterdir() if not file.name.startswith("__")]
        return {file.name: sync(file) for file in own}

    # ------------------------------------------------------------------ loading

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints that this rank sees in the folder, the oldest first."""
        return [name.step for name in self._folder.complete()]

    def load(self, step: int | None = None) -> Restored | None:
        """Load the newest checkpoint that is not damaged; all ranks call it together.

        If another number of ranks saved it, only modules, optimizers and outer steps are loaded, with a warning. A
        module that was saved between two outer steps is then the average of all ranks'.

        Args:
            step: The step to load; None for the newest.

        Returns:
            The step and the positions; None if there is no checkpoint.

        Raises:
            CheckpointError: On every rank: all checkpoints are damaged, or one does not fit the parts; then some parts
                may have been loaded.
            CommunicationError: A rank has left.
        """
        from ppe_ddp.checkpoints.checkpoint_files import metadata_of, read_entries

        self._follow()
        name = self._intact(step)
        if name is None:
            return None
        folder = self._folder.path / name.text
        found: list[Metadata] = []
        targets: dict[str, Any] = {}
        parts: list[SavedPart] = []

        def prepare() -> int:
            found.append(metadata_of(folder))
            saved_by = sum(_IS_POSITION(name) is not None for name in found[0].state_dict_metadata)
            parts.extend(self._loaded_parts(saved_by, found[0]))
            targets.update(dict.fromkeys(of_rank(rank, _POSITION) for rank in range(saved_by)))
            return saved_by

        def add_targets(part: SavedPart) -> None:
            targets.update(part.targets(found[0]))

        saved_by = self._ranks.from_each(prepare)[0]
        for part in parts:  # one after another: a rank that fails in one must not leave the others in the next
            self._ranks.from_each(partial(add_targets, part))
        read_entries(targets, folder, self._ranks)
        self._differing.put_into(targets)
        for part in parts:
            if isinstance(part, AveragedModulePart):
                targets.update(part.read(found[0], partial(read_entries, folder=folder, load_group=self._ranks)))
        for part in parts:
            self._ranks.from_each(partial(part.load, targets))
        positions = [targets[of_rank(rank, _POSITION)] for rank in range(saved_by)]
        if saved_by == self._ranks.size:
            return Restored(name.step, positions[self._ranks.rank], positions)
        if self._ranks.is_source:
            logger.warning(
                "the checkpoint was saved by %d ranks, and %d load it: random states, positions and other states of "
                "single ranks are not loaded; a model that was saved between two outer steps is averaged, and each "
                "rank gets the inner optimizer of one rank",
                *(saved_by, self._ranks.size),
            )
        return Restored(name.step, None, positions)

    def _intact(self, step: int | None) -> CheckpointName | None:
        """The newest checkpoint that no rank finds damaged, each of which looks at some of the files."""
        from ppe_ddp.checkpoints.checkpoint_files import CheckpointName

        listed = self._ranks.from_source(lambda: [list(name) for name in self._folder.complete()])
        names = [CheckpointName(*one) for one in listed]
        names = [name for name in names if step in (None, name.step)]
        damages: list[str] = []
        for name in reversed(names):
            answers = self._ranks.from_each(partial(self._folder.damage, name.text, self._ranks.rank, self._ranks.size))
            found = [text for text, _ in answers if text]
            if not found:
                return name
            damages += found[:1]
            if any(stays for _, stays in answers):
                self._damaged.add(name.text)
            if self._ranks.is_source:
                logger.warning("%s; going back to the checkpoint before", found[0])
        if damages:
            raise CheckpointError(f"no checkpoint in {self._folder.path} is whole: {'; '.join(damages)}")
        others = [f"{self._folder.path} of step {one}" for _, _, one in listed] or self._folder.nearby()
        if self._ranks.is_source and others:
            which = "" if step is None else f" of step {step}"
            logger.warning(
                "nothing is loaded: %s has no checkpoint%s; there is one in %s",
                *(self._folder.path, which, ", ".join(map(str, others))),
            )
        return None

    def _loaded_parts(self, saved_by: int, saved: Metadata) -> list[SavedPart]:
        outer_steps, rank, size = self._outer_steps(), self._ranks.rank, self._ranks.size
        parts = [
            loaded_part(name, what, saved, outer_steps, rank, size, saved_by) or self._parts[name]
            for name, what in self._given.items()
            if saved_by == size or not self._parts[name].is_of_rank
        ]
        parts.sort(key=lambda part: isinstance(part.what, OuterSteps))  # which begin from what their module has
        return parts + ([self._differing, *self._of_rank] if saved_by == size else [])
