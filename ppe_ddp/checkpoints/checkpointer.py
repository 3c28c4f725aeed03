"""Checkpointer: saves a training, so that a job that was killed continues from its last checkpoint."""

from __future__ import annotations

import logging
import operator
import os
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from ppe_ddp.backends.group_internals import default_group
from ppe_ddp.checkpoints.saved_parts import (
    RANKS,
    AveragedModulePart,
    CommonPart,
    Differing,
    RankPart,
    SavedPart,
    digests_of,
    loaded_part,
    of_rank,
    own_part,
    part_of,
    split_wrappers,
)
from ppe_ddp.compression.comm_state import fitting_state, forget_unsent, has_no_engine
from ppe_ddp.compression.outer_steps import OuterSteps, outer_steps_of, outer_steps_over
from ppe_ddp.engine.module import is_distributed
from ppe_ddp.engine.plan import fingerprint
from ppe_ddp.engine.replicas import ranks_of
from ppe_ddp.engine.zero.shards import Copies
from ppe_ddp.errors import CheckpointError, CommunicationError, DisagreementError
from ppe_ddp.optim import DistributedOptimizer
from ppe_ddp.torch_internals import before_compiling, uncompiled_hook

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

    from ppe_ddp.checkpoints.checkpoint_files import CheckpointName, Digest
    from ppe_ddp.sharding.load_group import LoadGroup

_T = TypeVar("_T")
logger = logging.getLogger("ppe_ddp")

_POSITION = "position"
_MESH = "mesh"
_IS_POSITION = re.compile(rf"{RANKS}\.\d+\.{_POSITION}").fullmatch


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
        position: The position that this rank passed; None if another number of ranks saved the checkpoint, or as many
            on another mesh.
        positions: The positions of all ranks that saved it.
    """

    step: int
    position: Any
    positions: list[Any]


def _load_communication(wrapper: Any, saved: Any) -> None:
    """Load the ``comm_state_dict()`` of a wrapper; another compressor, or one on other nodes, begins anew.

    So it does where another kind of wrapper has saved the module, of which Megatron's has one for each group, or none.
    """
    has_own = not has_no_engine(wrapper) or (saved is not None and dist.is_initialized())
    own = wrapper.comm_state_dict() if has_own else None
    if own is None or saved is None or isinstance(own, list) is not isinstance(saved, list):
        forget_unsent([wrapper])
        for state in saved if isinstance(saved, list) else [saved or {}]:
            fitting_state(state, {})  # warns of what is not loaded
    elif isinstance(own, list):
        wrapper.load_comm_state_dict([fitting_state(*pair) for pair in zip(saved, own, strict=True)])
    else:
        wrapper.load_comm_state_dict(fitting_state(saved, own))


def _averaging_groups(wrapper: Any) -> list[ProcessGroup]:
    """The groups in which a wrapper averages gradients; Megatron's averages experts in one of their own."""
    groups: Any = getattr(wrapper, "groups", None)
    if groups is None:
        return [wrapper.process_group]
    return [one for one in (groups.data or default_group(), groups.expert) if one is not None]


def _meet(wrapper: Any, *, has_met: bool) -> None:
    if has_met and has_no_engine(wrapper):
        wrapper._ready()


def _communication_of(wrapper: Any) -> Any:
    return None if has_no_engine(wrapper) else wrapper.comm_state_dict()


def _wrappers_in(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The wrappers among ``parts``, and then those inside of these, by name; each once."""
    found = {what: name for name, what in parts.items() if hasattr(type(what), "comm_state_dict")}
    for name, what in parts.items():
        for path, module in what.named_modules() if isinstance(what, nn.Module) else ():
            if hasattr(type(module), "comm_state_dict"):
                found.setdefault(module, before_compiling(f"{name}.{path}.").strip("."))
    return {name: wrapper for wrapper, name in found.items()}


def _refuse_split(name: str, wrapper: Any, count: int) -> None:
    """Refuse a part if ``count`` ranks would save different tensors under one name."""
    if isinstance(wrapper, OuterSteps) and any(map(is_distributed, wrapper.module.parameters())):
        raise ValueError(
            f"{name!r} averages DTensors, of which each rank has its own between two outer steps, and a Checkpointer "
            "saves one of each name: save each rank's state_dict()s, and the model's comm_state_dict(), by torch.save()"
        )
    if isinstance(wrapper, DistributedOptimizer) and (ranks := dist.get_world_size(wrapper.group)) < count:
        raise ValueError(
            f"{name!r} has shards on {ranks} ranks, those of its wrapper, and this Checkpointer has {count}, so that "
            "other ranks would save other shards under the same names: make a Checkpointer for each process group, "
            "Checkpointer(a folder of its own, ..., process_group=that of the wrapper)"
        )
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


def _of_step(step: int | None) -> str:
    return "" if step is None else f" of step {step}"


def _raised(error: Exception | None, told: list[list[int]]) -> list[list[int]]:
    """Raise ``error``, else return what is ``told``."""
    if error is not None:
        raise error
    return told


def _place_of(name: CheckpointName | None) -> list[int]:
    """The place of a checkpoint among those of its folder, in which all parts of a split model have the same ones."""
    return [0, 0] if name is None else [name.number, name.step]


def _other_parts(parts: Iterable[Any]) -> list[LoadGroup]:
    """The groups of ranks with other parts of the model, which have Checkpointers of their own; none if it is whole.

    One for the optimizer of experts stands apart, as some stages may have no experts.
    """
    from ppe_ddp.sharding.load_group import LoadGroup

    splits: list[Sequence[ProcessGroup]] = []
    for one in parts:
        state = one._model if isinstance(one, DistributedOptimizer) else getattr(one, "gradient_buffers", None)
        copies = getattr(state, "copies", None)
        if isinstance(copies, Copies) and getattr(one, "group", copies.parents[0]) is copies.parents[0]:
            splits.append(copies.parents[1:])
    return [LoadGroup(parent) for parent in max(splits, key=len, default=())]


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
    device), and the ``comm_state_dict()`` of each wrapper that is a part or in one. The same number of ranks continues
    with the same bits, if its steps are reproducible. Another number of ranks, or as many on another mesh (a wrapper
    averages over others), loads modules, optimizers, outer steps, and other parts whose state was the same on all
    ranks, as a scheduler's. As many ranks with another compressor, or on other nodes, load all but the state of
    compressors.

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

    @uncompiled_hook
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
        self._ranks, rank, parts = ranks, ranks.rank, self._given
        self._wrappers = _wrappers_in(parts)
        for name, what in (parts | self._wrappers).items():
            _refuse_split(name, what, ranks.size)
        self._others = _other_parts((parts | self._wrappers).values())
        self._parts = {name: part_of(name, what, rank) for name, what in parts.items()}
        self._of_rank: list[SavedPart] = [
            RankPart(entry, partial(_communication_of, what), partial(_load_communication, what), may_lack=True)
            for entry, what in ((of_rank(rank, f"communication.{name}"), what) for name, what in self._wrappers.items())
        ]
        self._differing = Differing(rank)
        # Last, as loading other parts may draw random numbers.
        self._of_rank.append(RankPart(of_rank(rank, "random"), random_states, set_random_states))

    def _follow(self) -> None:
        """Go on with the ranks of the default group of now, which ``ppe_ddp.elastic`` replaces."""
        from ppe_ddp.sharding.load_group import LoadGroup

        if self._is_of_default and dist.is_initialized() and self._ranks.group is not default_group():
            self._use(LoadGroup())

    # ------------------------------------------------------------------ saving

    @uncompiled_hook
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
        number = self._next_number()  # here, no part of a split model can have failed alone
        entries: dict[str, Any] = {}
        of_entries: dict[str, list[int]] = {}
        outer_steps: list[OuterSteps] = []

        def begin() -> Any:
            outer_steps.extend(self._outer_steps(saves=True))
            for part in self._of_rank:
                entries.update(part.entries())
            entries[of_rank(self._ranks.rank, _POSITION)] = position
            if (count := int(operator.index(step))) < 0:
                raise ValueError(f"step is how many steps were taken, not {count}")
            return [count, list(self._parts), [one.is_between for one in outer_steps]]

        def collect(name: str, what: Any) -> None:
            own = own_part(name, what, outer_steps, between, self._ranks.rank)
            found = (own or self._parts[name]).entries()
            entries.update(found)
            if own is None and not (self._parts[name].is_of_rank or isinstance(what, DistributedOptimizer)):
                of_entries.update(digests_of(found))

        told = self._ranks.from_each(begin)
        step = self._compared(told)
        # Ranks may have counted apart, as where one has left a step out.
        between = [one for one, *flags in zip(outer_steps, *(flags for *_, flags in told), strict=True) if any(flags)]
        for name, what in self._given.items():  # one after another, as some communicate
            self._ranks.from_each(partial(collect, name, what))
        self._add_differing(entries, of_entries)
        begun = self._ranks.from_source(lambda: self._folder.begin(number, step))
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

    def _next_number(self) -> int:
        """The number of the next checkpoint, the same of all parts of a split model."""

        def check_updates() -> None:
            for optimizer in self._sharding():
                optimizer._model.copies.check_updates()

        def find() -> int:
            if self._others:
                self._ranks.from_each(check_updates)
            return int(self._ranks.from_source(self._folder.next_number))

        _, _, (highest,) = self._of_all_parts(find, lambda number: [number])
        return highest

    def _add_differing(self, entries: dict[str, Any], digests: Mapping[str, Sequence[int]]) -> None:
        """Add the entries that differ between ranks, and with whom this one averages; ``digests`` are its, by entry."""
        split: list[str] = []
        found = self._ranks.from_each(lambda: [self._averaging(), fingerprint([repr(sorted(digests.items()))]).hex()])
        averaging = [one for one, _ in found]
        if len({digest for _, digest in found}) > 1:
            everyone = self._ranks.from_each(lambda: digests)
            self._ranks.from_each(lambda: self._differing.add_to(entries, everyone))
            parameters = {
                name: [
                    before_compiling(f"{name}.{last}{one}")
                    for last in ("", "last.")
                    for one, _ in wrapper.module.named_parameters()
                ]
                for name, wrapper in self._averaged().items()  # ``last`` of outer steps
            }
            plain = [{before_compiling(entry): digest for entry, digest in one.items()} for one in everyone]
            split = split_wrappers(parameters, plain, averaging)
        entries[of_rank(self._ranks.rank, _MESH)] = {"averaging": averaging[self._ranks.rank], "split": split}

    def _averaged(self) -> dict[str, Any]:
        """The wrappers, and under the names of outer steps those that these average, by name."""
        return self._wrappers | {name: one._ddp for name, one in self._given.items() if isinstance(one, OuterSteps)}

    def _averaging(self) -> dict[str, list[list[int]]]:
        """The ranks with which each wrapper averages here, once it has met them, by their numbers in this group."""
        number = {rank: here for here, rank in enumerate(self._ranks.ranks)}
        met = {name: one for name, one in self._averaged().items() if not has_no_engine(one)}
        return {
            name: [sorted(number.get(rank, -1) for rank in ranks_of(group)) for group in _averaging_groups(wrapper)]
            for name, wrapper in met.items()
        }

    def _is_of_this_mesh(self, saved_by: int, saved: Metadata, read: Callable[[dict[str, Any]], None]) -> bool:
        """Whether as many ranks have saved it, and each wrapper has averaged over the same ones; collective.

        Else ranks that have copies of one another may have had different things. Wrappers that were made before
        torch.distributed meet here, if they had met as they were saved: all get what rank 0 has then.
        """
        entry = of_rank(self._ranks.rank % max(saved_by, 1), _MESH)
        targets: dict[str, Any] = {entry: None} if entry in saved.state_dict_metadata else {}
        read(targets)
        mesh: dict[str, Any] = targets.get(entry) or {"averaging": {}, "split": []}
        before: dict[str, Any] = mesh["averaging"]
        for name, wrapper in self._averaged().items():
            self._ranks.from_each(partial(_meet, wrapper, has_met=name in before))  # a copy of one has not met others

        def is_same() -> bool:
            here = self._averaging()
            same = saved_by == self._ranks.size and all(before[one] == here[one] for one in before.keys() & here.keys())
            if mesh["split"] and not same:
                raise CheckpointError(
                    f"{', '.join(map(repr, mesh['split']))} in the checkpoint is another part of a model for each "
                    "group of ranks that averaged, under the same names, so that only as many ranks on the same mesh "
                    "can load it: load it there, and save by a Checkpointer for each part, Checkpointer(a folder of "
                    "its own, ..., process_group=that of the wrapper)"
                )
            return same

        return all(self._ranks.from_each(is_same))

    def _sharding(self) -> list[DistributedOptimizer]:
        return [what for what in self._given.values() if isinstance(what, DistributedOptimizer)]

    def _outer_steps(self, *, saves: bool = False) -> list[OuterSteps]:
        """Those among the parts; raises if a part is trained by another one, unless the ranks have the same of it."""
        given = [what for what in self._given.values() if isinstance(what, OuterSteps)]
        for name, what in self._given.items():
            apart = [one for one in outer_steps_over(what) if saves and one.is_between]
            for outer in [*outer_steps_of(what), *apart]:
                if not any(outer is one for one in given):
                    raise ValueError(
                        f"{name!r} is trained by a {type(outer).__name__}, which is not among the parts: add it, as a "
                        "training cannot go on without"
                    )
        return given

    def _compared(self, found: list[Any]) -> int:
        """The step, which all ranks have in common."""
        for rank, (step, names, _) in enumerate(found):
            if [step, names] != found[0][:2]:
                raise DisagreementError(
                    f"rank {rank} saves a checkpoint of step {step} with {names}, and rank 0 of step {found[0][0]} "
                    f"with {found[0][1]}: call save() at the same step with the same parts on every rank"
                )
        return int(found[0][0])

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

    @uncompiled_hook
    def load(self, step: int | None = None) -> Restored | None:
        """Load the newest checkpoint that is not damaged; all ranks call it together.

        Of a split model, each part of which has a folder, it is the newest one that all parts have saved together.

        If another number of ranks saved it, or as many on another mesh, states of single ranks are not loaded, with a
        warning. A module that was saved between two outer steps is then the average of all ranks'.

        Args:
            step: The step to load; None for the newest.

        Returns:
            The step and the positions; None if there is no checkpoint, and no ``step`` was given.

        Raises:
            CheckpointError: On every rank: there is none of ``step``, all checkpoints are damaged, or one does not fit
                the parts; then some parts may have been loaded.
            CommunicationError: A rank has left.
        """
        from ppe_ddp.checkpoints.checkpoint_files import metadata_of, read_entries

        self._follow()
        name = self._common(step)
        if name is None:
            return None
        folder = self._folder.path / name.text
        found: list[Metadata] = []
        targets: dict[str, Any] = {}
        parts: list[SavedPart] = []

        def prepare() -> int:
            found.append(metadata_of(folder))
            saved_by = sum(_IS_POSITION(name) is not None for name in found[0].state_dict_metadata)
            targets.update(dict.fromkeys(of_rank(rank, _POSITION) for rank in range(saved_by)))
            return saved_by

        def add_targets(part: SavedPart) -> None:
            targets.update(part.targets(found[0]))

        saved_by = self._ranks.from_each(prepare)[0]
        read = partial(read_entries, folder=folder, load_group=self._ranks)
        is_same = self._is_of_this_mesh(saved_by, found[0], read)
        own = self._differing.read(found[0], read) if is_same else {}
        self._ranks.from_each(lambda: parts.extend(self._loaded_parts(saved_by, found[0], is_same=is_same)))
        for part in parts:  # one after another: a rank that fails in one must not leave the others in the next
            self._ranks.from_each(partial(add_targets, part))
        fitting = {entry: one for entry, one in own.items() if one.fits(targets.get(entry))}
        values = {entry: one.in_place_of(targets.pop(entry, None)) for entry, one in fitting.items()}
        read(targets)
        targets.update(values)
        for part in parts:
            if isinstance(part, AveragedModulePart):
                targets.update(part.read(found[0], read))
        for part in parts:
            self._ranks.from_each(partial(part.load, targets))
        self._end_loading()
        positions = [targets[of_rank(rank, _POSITION)] for rank in range(saved_by)]
        if is_same:
            return Restored(name.step, positions[self._ranks.rank], positions)
        self._ranks.from_each(lambda: forget_unsent(self._wrappers.values()))
        self._warn_of_ranks(saved_by, parts)
        return Restored(name.step, None, positions)

    def _end_loading(self) -> None:
        loaded = {one for what in self._given.values() if isinstance(what, nn.Module) for one in what.parameters()}
        for outer in self._outer_steps():
            outer.end_loading(loaded)
        for optimizer in self._sharding() if self._others else ():
            optimizer._model.copies.note_load(is_of_all=True)

    def _warn_of_ranks(self, saved_by: int, parts: Sequence[SavedPart]) -> None:
        if self._ranks.is_source:
            differing = [part.name for part in parts if isinstance(part, CommonPart) and part.differs]
            logger.warning(
                "the checkpoint was saved by %d ranks%s: random states, positions and what compressors had not sent "
                "are not loaded%s; a model that was saved between two outer steps is averaged, and each rank gets the "
                "inner optimizer of one rank",
                *(saved_by, f", and {size} load it" if (size := self._ranks.size) != saved_by else " on another mesh"),
                f", nor {', '.join(differing)}, whose states differ between ranks" if differing else "",
            )

    def _of_all_parts(
        self, find: Callable[[], _T], place_of: Callable[[_T], list[int]]
    ) -> tuple[_T, list[int], list[int]]:
        """What ``find`` returns, with the lowest and the highest place of what it returns for any part of the model.

        An error of one part is raised for all: none is left in a collective that the others do not call.
        """
        found: list[_T] = []
        places: list[list[int]] = []
        error: Exception | None = None
        try:
            found = [find()]
            places = [place_of(found[0])]
        except (CheckpointError, CommunicationError) as own:
            error = own
        for others in self._others:  # one after another, they reach all ranks of the model
            try:
                told = others.from_each(partial(_raised, error, places))
                places = sorted(place for own in told for place in own)
            except CheckpointError as theirs:
                error = error or theirs
            except CommunicationError as theirs:
                error = error if isinstance(error, CommunicationError) else theirs
        if error is not None:
            raise error
        return found[0], places[0], places[-1]

    def _common(self, step: int | None) -> CheckpointName | None:
        """The newest checkpoint that is not damaged, and that all parts of a split model have.

        The job may have been killed when some parts were saved, and others not.
        """
        latest: int | None = None
        while True:
            name, lowest, highest = self._of_all_parts(partial(self._intact, step, latest), _place_of)
            if lowest == highest:
                return name
            if latest is None and lowest[0] == 0 and highest[0] == 1 and step is None:
                if self._ranks.is_source:
                    logger.warning("nothing is loaded: not all parts of the model have a checkpoint")
                return None
            if lowest[0] == 0 or lowest[0] == highest[0]:
                raise CheckpointError(
                    f"no checkpoint{_of_step(step)} is there of all parts of the model ({self._folder.path} has "
                    f"{self.steps()}): with keep=1 they are lost if a job is killed when some parts were saved"
                )
            latest = lowest[0]
            if name is not None and name.number > latest and step is None and self._ranks.is_source:
                logger.warning("other parts of the model have no %s; going back to a checkpoint before", name.text)
                # They are of no use without the others, so they are the first to be removed.
                self._damaged.update(one.text for one in self._folder.complete() if one.number > latest)

    def _intact(self, step: int | None, latest: int | None) -> CheckpointName | None:
        """The newest checkpoint that no rank finds damaged, each of which looks at some of the files.

        It is of ``step``, and has no higher number than ``latest``, if these are given.
        """
        from ppe_ddp.checkpoints.checkpoint_files import CheckpointName

        listed = self._ranks.from_source(lambda: [list(name) for name in self._folder.complete()])
        names = [CheckpointName(*one) for one in listed]
        names = [name for name in names if step in (None, name.step) and (latest is None or name.number <= latest)]
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
        if step is not None and latest is None:
            raise CheckpointError(
                f"{self._folder.path} has no checkpoint of step {step}: it has {[one for *_, one in listed]}"
            )
        if self._ranks.is_source and not listed and (others := self._folder.nearby()):
            found_in = ", ".join(map(str, others))
            logger.warning("nothing is loaded: %s has no checkpoint; there is one in %s", self._folder.path, found_in)
        return None

    def _loaded_parts(self, saved_by: int, saved: Metadata, *, is_same: bool) -> list[SavedPart]:
        outer_steps, rank = self._outer_steps(), self._ranks.rank
        parts = [
            loaded_part(name, what, saved, outer_steps, rank, saved_by, is_same=is_same) or self._parts[name]
            for name, what in self._given.items()
            if is_same or not self._parts[name].is_of_rank
        ]
        if not is_same:
            parts += [CommonPart(name, self._given[name], saved_by) for name, p in self._parts.items() if p.is_of_rank]
        parts.sort(key=lambda part: isinstance(part.what, OuterSteps))  # which begin from what their module has
        return parts + (self._of_rank if is_same else [])
