"""Checkpointer: saves the state of a training so that a job which is killed goes on as if it had not been."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ppe_ddp.checkpoints.checkpoint_parts import (
    RANKS,
    AveragedModulePart,
    loaded_part,
    own_part,
    part_of,
    random_states,
    set_random_states,
)
from ppe_ddp.compression.outer_steps import OuterSteps
from ppe_ddp.errors import CheckpointError, DisagreementError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata

    from ppe_ddp.checkpoints.checkpoint_files import CheckpointName, Digest
    from ppe_ddp.checkpoints.checkpoint_parts import SavedPart

logger = logging.getLogger("ppe_ddp")

_RANDOM, _POSITION, _COMMUNICATION = "random", "position", "communication"
_STATE_OF_COMM = "comm_state_dict"
_IS_OF_RANK = re.compile(rf"{RANKS}\.\d+\.{_RANDOM}").fullmatch


@dataclass(frozen=True)
class Restored:
    """What :meth:`Checkpointer.load` has found beside the state that it has loaded.

    Attributes:
        step: At which the checkpoint was saved.
        position: What this rank passed as its position; None where the checkpoint is of another number of ranks.
        positions: What each rank passed, by rank.
    """

    step: int
    position: Any
    positions: list[Any]


class Checkpointer:
    """Saves a training so that it can go on after it was killed at any moment, and loses only the steps since.

    Made when all that is saved has been made::

        checkpointer = Checkpointer("checkpoints", {"model": model, "optimizer": optimizer, "scheduler": scheduler})
        restored = checkpointer.load()
        for step in range(restored.step if restored else 0, steps):
            ...
            if (step + 1) % 100 == 0:
                checkpointer.save(step + 1, position=...)

    A checkpoint is complete or not there: it is written under another name, waited for until it is on the disk,
    and renamed. One that was damaged later is noticed before anything of it is loaded. Beside the parts it has the
    states of the random number generators of each rank (Python's, NumPy's, torch's on the CPU and on the rank's CUDA
    device), and what the wrappers among the parts have in ``comm_state_dict()``. A training that goes on with as many
    ranks goes on bit by bit, if the same steps give the same bits at all and are given the same data.

    Files are those of ``torch.distributed.checkpoint``; nothing in them is executed, neither here nor, as torch would
    do it, where its own files of metadata are read. Modules and optimizers can be loaded by another number of ranks.

    Every rank makes it, and calls its methods together with the others. An error of one rank is raised by all.

    Args:
        folder: Where checkpoints are kept, for this job alone; the same folder for all ranks, on a file system that
            they have in common.
        parts: By name, what is saved: modules and wrappers; optimizers, of torch and ``DistributedOptimizer``;
            ``LocalSGD`` and ``DiLoCo``, which let each rank save its own model and inner optimizer;
            and whatever else has ``state_dict()`` and ``load_state_dict()``, of which each rank saves its own, made
            of tensors and plain values. The same names on every rank.
        keep: How many checkpoints to keep. With 1, a checkpoint that is damaged later leaves nothing to go on from.
        process_group: The ranks; None for the default group, or this process alone where there is none.

    Raises:
        TypeError: A part cannot be saved.
        ValueError: A name has dots, or ``keep`` is not positive.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        parts: Mapping[str, Any],
        *,
        keep: int = 3,
        process_group: ProcessGroup | None = None,
    ) -> None:
        # which import DTensor and torch.distributed.checkpoint
        from ppe_ddp.checkpoints.checkpoint_files import CheckpointFolder
        from ppe_ddp.sharding.load_group import LoadGroup

        if keep < 1:
            raise ValueError(f"keep is how many checkpoints are kept, at least 1; it is {keep}")
        self._folder = CheckpointFolder(Path(folder))
        self._keep = keep
        self._ranks = LoadGroup(process_group)
        self._given = dict(parts)
        self._parts = {name: part_of(name, what, self._ranks.rank) for name, what in parts.items()}
        self._wrappers: dict[str, Any] = {
            name: what for name, what in parts.items() if isinstance(what, nn.Module) and hasattr(what, _STATE_OF_COMM)
        }
        self._damaged: set[str] = set()

    # ------------------------------------------------------------------ saving

    def save(self, step: int, *, position: Any = None) -> Path:
        """Save everything; call it between two steps, on all ranks together. Gradients are not saved.

        When it returns, the checkpoint is on the disk, and those before the last ``keep`` are removed.

        Args:
            step: How many steps were made, for the name; the same on every rank.
            position: What this rank needs to go on with the data: plain values and tensors.

        Returns:
            The folder of this checkpoint.

        Raises:
            CheckpointError: On every rank: one could not write, the disk is full, or there is something in it whose
                loading would run code. The checkpoints before are as they were, and training may go on.
            DisagreementError: On every rank: they are at different steps, or have different parts.
            CommunicationError: A rank has left.
        """
        from ppe_ddp.checkpoints.checkpoint_files import write_entries

        entries: dict[str, Any] = {}

        def collect() -> Any:
            outer_steps = self._outer_steps()
            for name, what in self._given.items():
                part = own_part(name, what, outer_steps, self._ranks.rank) or self._parts[name]
                entries.update(part.entries())
            entries.update(self._of_this_rank(position))
            return [step, sorted(self._parts)]

        self._compare(self._ranks.from_each(collect))
        begun = self._ranks.from_source(lambda: self._folder.begin(step))
        folder = self._folder.path / begun
        is_complete = False
        try:
            write_entries(entries, folder, self._ranks)
            digests = self._ranks.from_each(lambda: self._synced(folder))
            files = {name: digest for own in digests for name, digest in own.items()}
            path = Path(self._ranks.from_source(lambda: str(self._folder.publish(begun, files))))
            is_complete = True
        finally:
            if self._ranks.is_source:
                if is_complete:
                    self._folder.prune(self._keep, self._damaged)
                else:
                    self._folder.discard(begun)
        return path

    def _outer_steps(self) -> list[OuterSteps]:
        """Those of LocalSGD and DiLoCo, which let each rank have a state of its own."""
        found = []
        for name, what in self._given.items():
            outer = what if isinstance(what, OuterSteps) else getattr(what, "outer_steps", None)
            if isinstance(outer, OuterSteps):
                if not any(outer is one for one in self._given.values()):
                    raise ValueError(
                        f"{name!r} is the inner optimizer of a {type(outer).__name__}, which is not among the parts: "
                        "add it, as a training cannot go on without"
                    )
                found.append(outer)
        return found

    def _of_this_rank(self, position: Any) -> dict[str, Any]:
        """The entries that each rank has for itself, beside those of parts."""
        states = {self._of_wrapper(name): wrapper.comm_state_dict() for name, wrapper in self._wrappers.items()}
        return states | {self._name(_RANDOM): random_states(), self._name(_POSITION): position}

    def _of_wrapper(self, name: str) -> str:
        return self._name(f"{_COMMUNICATION}.{name}")

    def _name(self, key: str, rank: int | None = None) -> str:
        return f"{RANKS}.{self._ranks.rank if rank is None else rank}.{key}"

    def _compare(self, found: list[Any]) -> None:
        for rank, (step, names) in enumerate(found):
            if [step, names] != found[0]:
                raise DisagreementError(
                    f"rank {rank} saves a checkpoint of step {step} with {names}, and rank 0 of step {found[0][0]} "
                    f"with {found[0][1]}: call save() at the same step with the same parts on every rank"
                )

    def _synced(self, folder: Path) -> dict[str, Digest]:
        """Wait until the files of this rank are on the disk."""
        from ppe_ddp.checkpoints.checkpoint_files import sync

        rank = self._ranks.rank
        own = [file for file in folder.iterdir() if file.name.startswith(f"__{rank}_")]
        if self._ranks.is_source:
            own += [file for file in folder.iterdir() if not file.name.startswith("__")]
        return {file.name: sync(file) for file in own}

    # ------------------------------------------------------------------ loading

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, the oldest first; of this rank's view of the folder alone."""
        return [name.step for name in self._folder.complete()]

    def load(self, step: int | None = None) -> Restored | None:
        """Go on from the newest checkpoint that is not damaged; call it on all ranks together.

        With another number of ranks than it was saved by, only modules, optimizers and outer steps are loaded, and a
        warning says so. What each rank has had of a module for itself, between two outer steps, is averaged.

        Args:
            step: The step of the checkpoint to load; default: the newest.

        Returns:
            None where there is no checkpoint.

        Raises:
            CheckpointError: On every rank: all are damaged, or what is saved does not fit the parts, some of which may
                then have been loaded.
            CommunicationError: A rank has left.
        """
        from ppe_ddp.checkpoints.checkpoint_files import metadata_of, read_entries

        name = self._intact(step)
        if name is None:
            return None
        folder = self._folder.path / name.text
        found: list[Metadata] = []
        targets: dict[str, Any] = {}
        parts: list[SavedPart] = []

        def prepare() -> int:
            found.append(metadata_of(folder))
            saved_by = sum(_IS_OF_RANK(name) is not None for name in found[0].state_dict_metadata)
            parts.extend(self._loaded_parts(saved_by, found[0]))
            for part in parts:
                targets.update(part.targets(found[0]))
            names = [self._name(_POSITION, rank) for rank in range(saved_by)]
            if saved_by == self._ranks.size:
                names += [self._name(_RANDOM), *map(self._of_wrapper, self._wrappers)]
            targets.update(dict.fromkeys(names))
            return saved_by

        saved_by = self._ranks.from_each(prepare)[0]
        read_entries(targets, folder, self._ranks)
        for part in parts:
            if isinstance(part, AveragedModulePart):
                targets.update(part.read(found[0], partial(read_entries, folder=folder, load_group=self._ranks)))
        self._apply(parts, targets, saved_by)
        positions = [targets[self._name(_POSITION, rank)] for rank in range(saved_by)]
        return Restored(name.step, positions[self._ranks.rank] if saved_by == self._ranks.size else None, positions)

    def _intact(self, step: int | None) -> CheckpointName | None:
        """The newest checkpoint that no rank finds damaged."""
        from ppe_ddp.checkpoints.checkpoint_files import CheckpointName

        listed = self._ranks.from_source(lambda: [list(name) for name in self._folder.complete()])
        names = [CheckpointName(*one) for one in listed]
        names = [name for name in names if step in (None, name.step)]
        damages: list[str] = []
        for name in reversed(names):
            texts = self._ranks.from_each(partial(self._folder.damage, name.text, self._ranks.rank, self._ranks.size))
            found = [text for text in texts if text]
            if not found:
                return name
            damages += found[:1]
            self._damaged.add(name.text)
            if self._ranks.is_source:
                logger.warning("%s; going back to the checkpoint before", found[0])
        if damages:
            raise CheckpointError(f"no checkpoint in {self._folder.path} is whole: {'; '.join(damages)}")
        return None

    def _loaded_parts(self, saved_by: int, saved: Metadata) -> list[SavedPart]:
        outer_steps, rank, size = self._outer_steps(), self._ranks.rank, self._ranks.size
        parts = [
            loaded_part(name, what, saved, outer_steps, rank, size, saved_by) or self._parts[name]
            for name, what in self._given.items()
            if saved_by == size or not self._parts[name].is_of_rank
        ]
        return sorted(parts, key=lambda part: part.begins_from_module)

    def _apply(self, parts: list[SavedPart], entries: dict[str, Any], saved_by: int) -> None:
        """Let each part go on, one after another: a rank that fails in one must not leave the others in the next."""
        for part in parts:
            self._ranks.from_each(partial(part.load, entries))
        if saved_by != self._ranks.size:
            if self._ranks.is_source:
                logger.warning(
                    "the checkpoint is of %d ranks, and here are %d: random states, positions, and what each rank had "
                    "for itself, are not loaded; between two outer steps the model is the average of all ranks', and "
                    "inner optimizers have the state of one of them",
                    saved_by,
                    self._ranks.size,
                )
            return
        for name, wrapper in self._wrappers.items():
            self._ranks.from_each(partial(wrapper.load_comm_state_dict, entries[self._of_wrapper(name)]))
        self._ranks.from_each(partial(set_random_states, entries[self._name(_RANDOM)]))  # last, as loading may use some
