"""The parts of a training's state, and the entries of a checkpoint that each is saved as. No files, no ranks.

model.layer.weight                   a tensor of a module's state_dict
optimizer.state.0.exp_avg            of a torch optimizer, by the number of the parameter
optimizer.state.layer.weight.step    of a DistributedOptimizer, by its name: shards, for any number of ranks
optimizer.param_groups               what is no tensor is one entry
outer.last.layer.weight              of LocalSGD and DiLoCo: what all ranks had at the last outer step
ranks.3.own.scheduler                what each rank has for itself
ranks.3.own.optimizer.state.0.step   so are an inner optimizer, and the model between two outer steps
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ppe_ddp.compression.outer_steps import OuterSteps
from ppe_ddp.optim import DistributedOptimizer

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_TABLES = ("last", "velocity")  # of tensors by parameter, in the state of outer steps

RANKS = "ranks"
"""What the names of entries begin with that each rank has for itself; followed by the rank."""


class SavedPart(ABC):
    """A part of a training's state under a name of its own.

    Args:
        name: What its entries begin with, followed by a dot.
        what: The object that has the state.
    """

    is_of_rank = False
    """Whether each rank saves its own, which only as many ranks can load."""
    begins_from_module = False
    """Whether it is loaded after modules."""

    def __init__(self, name: str, what: Any) -> None:
        self.prefix = f"{name}."
        self._what = what

    @abstractmethod
    def entries(self) -> dict[str, Any]:
        """What to save, by the names of entries: tensors, which are the part's own, and plain values."""

    def targets(self, saved: Metadata) -> dict[str, Any]:
        """What to load into, by the names of entries; None for what is no tensor.

        Raises:
            ValueError: The checkpoint has other entries.
        """
        own = self.entries()
        theirs = {name for name in saved.state_dict_metadata if name.startswith(self.prefix)}
        if theirs != own.keys():
            lacking, more = sorted(own.keys() - theirs)[:3], sorted(theirs - own.keys())[:3]
            raise ValueError(f"the checkpoint lacks {lacking} and has {more}, which are not here: load the same model")
        return {name: value if isinstance(value, torch.Tensor) else None for name, value in own.items()}

    @abstractmethod
    def load(self, entries: Mapping[str, Any]) -> None:
        """Go on from the entries that were loaded, those of other parts among them; all ranks call it together."""

    def _own(self, entries: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """This part's ``entries``, by what follows its name."""
        return [(n.removeprefix(self.prefix), value) for n, value in entries.items() if n.startswith(self.prefix)]

    def _check_saved(self, entry: str, saved: Metadata) -> None:
        if entry not in saved.state_dict_metadata:
            raise ValueError(f"the checkpoint lacks {entry!r}: it was saved without this part")


class _ModulePart(SavedPart):
    """A module, or a wrapper of one."""

    def entries(self) -> dict[str, Any]:
        return {self.prefix + key: value for key, value in self._what.state_dict().items()}

    def load(self, entries: Mapping[str, Any]) -> None:
        own = self._what.state_dict()  # which has the versions of modules
        own.update({key: entries[self.prefix + key] for key in own})
        self._what.load_state_dict(own)


class AveragedModulePart(_ModulePart):
    """A module of which each rank has saved its own, where other ranks or synchronized ones begin from the average.

    Args:
        name: The name of the part.
        module: The module.
        saved_by: How many ranks have saved it.
    """

    def __init__(self, name: str, module: nn.Module, saved_by: int) -> None:
        super().__init__(name, module)
        self._parts = [_ModulePart(own_name(name, rank), module) for rank in range(saved_by)]

    def targets(self, saved: Metadata) -> dict[str, Any]:
        """Nothing yet: the modules of all ranks together may need more memory than there is."""
        return {}

    def read(self, saved: Metadata, read: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """The entries of the average, of floating-point numbers; of anything else, rank 0's.

        Args:
            saved: What is in the checkpoint.
            read: Reads entries; called for one rank after another.
        """
        total: dict[str, Any] = {}
        for part in self._parts:
            targets = _as_saved(saved, part.prefix)
            read(targets)
            for entry, value in targets.items():
                key = self.prefix + entry.removeprefix(part.prefix)
                if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
                    total.setdefault(key, value)
                    continue
                wide = torch.promote_types(value.dtype, torch.float32)
                total[key] = total.get(key, 0) + value.to(wide) / len(self._parts)
        return total


class _OptimizerPart(SavedPart):
    """An optimizer that has the same state on every rank; parameters that were never updated have none."""

    def entries(self) -> dict[str, Any]:
        state_dict = self._what.state_dict()
        state = state_dict.pop("state")
        each = {f"state.{number}.{key}": value for number, own in state.items() for key, value in own.items()}
        return {self.prefix + key: value for key, value in {**each, **state_dict}.items()}

    def targets(self, saved: Metadata) -> dict[str, Any]:
        """New tensors as they were saved: there is no state before the first step."""
        return _as_saved(saved, self.prefix)

    def load(self, entries: Mapping[str, Any]) -> None:
        state: dict[int, dict[str, Any]] = {}
        state_dict: dict[str, Any] = {"state": state}
        for key, value in self._own(entries):
            if key.startswith("state."):
                _, number, of_state = key.split(".", 2)
                state.setdefault(int(number), {})[of_state] = value
            else:
                state_dict[key] = value
        self._what.load_state_dict(state_dict)


class _ShardedOptimizerPart(SavedPart):
    """A ``DistributedOptimizer``: its state_dict has every entry from the beginning."""

    def entries(self) -> dict[str, Any]:
        return {self.prefix + ".".join(path): table[path[-1]] for path, table in _leaves(self._what.state_dict())}

    def load(self, entries: Mapping[str, Any]) -> None:
        state_dict = self._what.state_dict()
        for path, table in list(_leaves(state_dict)):
            table[path[-1]] = entries[self.prefix + ".".join(path)]
        self._what.load_state_dict(state_dict)


class _OuterPart(SavedPart):
    """LocalSGD or DiLoCo: all ranks have the same state."""

    begins_from_module = True

    def entries(self) -> dict[str, Any]:
        state = self._what.state_dict()
        tables = {f"{key}.{name}": value for key in _TABLES for name, value in state[key].items()}
        return {self.prefix + key: value for key, value in {**tables, "steps": state["steps"]}.items()}

    def targets(self, saved: Metadata) -> dict[str, Any]:
        """New tensors as they were saved: momentum is there only after the first outer step."""
        self._check_saved(self.prefix + "steps", saved)
        return _as_saved(saved, self.prefix)

    def load(self, entries: Mapping[str, Any]) -> None:
        state: dict[str, Any] = {key: {} for key in _TABLES}
        for name, value in self._own(entries):
            key, _, parameter = name.partition(".")
            if parameter:
                state[key][parameter] = value
            else:
                state[key] = value
        self._what.load_state_dict(state)


class _RankPart(SavedPart):
    """Anything else with ``state_dict()`` and ``load_state_dict()``, of which each rank has its own: one entry."""

    is_of_rank = True

    def __init__(self, name: str, stateful: Any, rank: int) -> None:
        super().__init__(name, stateful)
        self._entry = own_name(name, rank)

    def entries(self) -> dict[str, Any]:
        return {self._entry: self._what.state_dict()}

    def targets(self, saved: Metadata) -> dict[str, Any]:
        self._check_saved(self._entry, saved)
        return {self._entry: None}

    def load(self, entries: Mapping[str, Any]) -> None:
        self._what.load_state_dict(entries[self._entry])


_PARTS: dict[type, type[SavedPart]] = {  # in this order: a DistributedOptimizer is an Optimizer too
    OuterSteps: _OuterPart,
    nn.Module: _ModulePart,
    DistributedOptimizer: _ShardedOptimizerPart,
    Optimizer: _OptimizerPart,
}


def part_of(name: str, what: Any, rank: int) -> SavedPart:
    """The part that ``what`` is, by its type.

    Raises:
        TypeError: It cannot be saved.
        ValueError: Its name cannot be the beginning of names of entries.
    """
    if not name or "." in name or name == RANKS:
        raise ValueError(f"a part of a checkpoint cannot be named {name!r}: without dots, and not {RANKS!r}")
    for kind, part in _PARTS.items():
        if isinstance(what, kind):
            return part(name, what)
    if callable(getattr(what, "state_dict", None)) and callable(getattr(what, "load_state_dict", None)):
        return _RankPart(name, what, rank)
    raise TypeError(
        f"{name!r} is a {type(what).__name__}, which has no state_dict() and load_state_dict(): give it these, or pass "
        "plain values as the position"
    )


def own_name(name: str, rank: int) -> str:
    """The name of a part of which each rank has its own."""
    return f"{RANKS}.{rank}.own.{name}"


def own_part(name: str, what: Any, outer_steps: Sequence[OuterSteps], rank: int) -> SavedPart | None:
    """The part that ``what`` is where outer steps let each rank have its own; None where all ranks have the same."""
    if not outer_steps:
        return None
    if isinstance(what, nn.Module):
        is_own = any(one.is_between for one in outer_steps if one.is_of(what))
        return _ModulePart(own_name(name, rank), what) if is_own else None
    is_plain = isinstance(what, Optimizer) and not isinstance(what, DistributedOptimizer)
    return _OptimizerPart(own_name(name, rank), what) if is_plain else None


def loaded_part(
    name: str, what: Any, saved: Metadata, outer_steps: Sequence[OuterSteps], rank: int, ranks: int, saved_by: int
) -> SavedPart | None:
    """The part that loads ``what`` where each rank has saved its own; None where all ranks had the same.

    Without outer steps it must be the same on all ranks from here on.
    """
    if not any(entry.startswith(own_name(name, 0) + ".") for entry in saved.state_dict_metadata):
        return None
    if isinstance(what, Optimizer):  # its moments are those of a real rank also where there are more ranks now
        return _OptimizerPart(own_name(name, rank % saved_by if outer_steps else 0), what)
    if ranks == saved_by and any(one.is_of(what) for one in outer_steps):
        return _ModulePart(own_name(name, rank), what)
    return AveragedModulePart(name, what, saved_by)


def _as_saved(saved: Metadata, prefix: str) -> dict[str, Any]:
    """New tensors, and None for what is none, for all entries whose names begin with ``prefix``."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    found = {name: one for name, one in saved.state_dict_metadata.items() if name.startswith(prefix)}
    return {
        name: torch.empty(one.size, dtype=one.properties.dtype) if isinstance(one, TensorStorageMetadata) else None
        for name, one in found.items()
    }


def _leaves(table: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """The paths to all that is no dictionary, or an empty one, each with the dictionary that it is in."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), table


def random_states() -> dict[str, Any]:
    """Those of Python, NumPy, torch on the CPU, and of this rank's CUDA device if it is in use."""
    version, numbers, gauss = random.getstate()
    legacy: dict[str, Any] = np.random.get_state(legacy=False)
    legacy = legacy | {"state": {**legacy["state"], "key": legacy["state"]["key"].tolist()}}
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return {"python": [version, list(numbers), gauss], "numpy": legacy, "cpu": torch.get_rng_state(), "cuda": cuda}


def set_random_states(states: dict[str, Any]) -> None:
    """Go on from what :func:`random_states` has returned."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    legacy = states["numpy"]
    key = np.array(legacy["state"]["key"], dtype=np.uint32)
    np.random.set_state(legacy | {"state": {**legacy["state"], "key": key}})
    torch.set_rng_state(states["cpu"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
