"""The parts of a training's state, and the entries of a checkpoint that each is saved as. No files, no ranks.

model.layer.weight                   a tensor of a module's state_dict
optimizer.state.0.exp_avg            of a torch optimizer, by the number of the parameter
optimizer.state.layer.weight.step    of a DistributedOptimizer, by its name: shards, for any number of ranks
optimizer.param_groups               what is no tensor is one entry
ranks.3.own.scheduler                what each rank has for itself
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from ppe_ddp.optim import DistributedOptimizer

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

RANKS = "ranks"
"""What the names of entries begin with that each rank has for itself; followed by the rank."""


class SavedPart(ABC):
    """A part of a training's state under a name of its own."""

    def __init__(self, name: str) -> None:
        self.prefix = f"{name}."

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


class ModulePart(SavedPart):
    """A module, or a wrapper of one."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name)
        self._module = module

    def entries(self) -> dict[str, Any]:
        """Its state_dict."""
        return {self.prefix + key: value for key, value in self._module.state_dict().items()}

    def load(self, entries: Mapping[str, Any]) -> None:
        """Load its state_dict."""
        own = self._module.state_dict()  # which has the versions of modules
        own.update({key: entries[self.prefix + key] for key in own})
        self._module.load_state_dict(own)


class OptimizerPart(SavedPart):
    """An optimizer that has the same state on every rank; parameters that were never updated have none."""

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        super().__init__(name)
        self._optimizer = optimizer

    def entries(self) -> dict[str, Any]:
        """Its state_dict, each tensor by itself."""
        state_dict = self._optimizer.state_dict()
        state = state_dict.pop("state")
        each = {f"state.{number}.{key}": value for number, own in state.items() for key, value in own.items()}
        return {self.prefix + key: value for key, value in {**each, **state_dict}.items()}

    def targets(self, saved: Metadata) -> dict[str, Any]:
        """New tensors as they were saved: there is no state before the first step."""
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        found = {name: one for name, one in saved.state_dict_metadata.items() if name.startswith(self.prefix)}
        return {
            name: torch.empty(one.size, dtype=one.properties.dtype) if isinstance(one, TensorStorageMetadata) else None
            for name, one in found.items()
        }

    def load(self, entries: Mapping[str, Any]) -> None:
        """Load its state_dict."""
        state: dict[int, dict[str, Any]] = {}
        state_dict: dict[str, Any] = {"state": state}
        for name, value in entries.items():
            if not name.startswith(self.prefix):
                continue
            key = name.removeprefix(self.prefix)
            if key.startswith("state."):
                _, number, of_state = key.split(".", 2)
                state.setdefault(int(number), {})[of_state] = value
            else:
                state_dict[key] = value
        self._optimizer.load_state_dict(state_dict)


class ShardedOptimizerPart(SavedPart):
    """A ``DistributedOptimizer``: its state_dict has every entry from the beginning."""

    def __init__(self, name: str, optimizer: DistributedOptimizer) -> None:
        super().__init__(name)
        self._optimizer = optimizer

    def entries(self) -> dict[str, Any]:
        """Its state_dict, by the paths in it."""
        return {self.prefix + ".".join(path): table[path[-1]] for path, table in _leaves(self._optimizer.state_dict())}

    def load(self, entries: Mapping[str, Any]) -> None:
        """Load its state_dict."""
        state_dict = self._optimizer.state_dict()
        for path, table in list(_leaves(state_dict)):
            table[path[-1]] = entries[self.prefix + ".".join(path)]
        self._optimizer.load_state_dict(state_dict)


class RankPart(SavedPart):
    """Anything else with ``state_dict()`` and ``load_state_dict()``, of which each rank has its own: one entry."""

    def __init__(self, name: str, stateful: Any, rank: int) -> None:
        super().__init__(name)
        self._stateful = stateful
        self._entry = f"{RANKS}.{rank}.own.{name}"

    def entries(self) -> dict[str, Any]:
        """Its state_dict."""
        return {self._entry: self._stateful.state_dict()}

    def targets(self, saved: Metadata) -> dict[str, Any]:
        """One entry."""
        if self._entry not in saved.state_dict_metadata:
            raise ValueError(f"the checkpoint lacks {self._entry!r}: it was saved without this part")
        return {self._entry: None}

    def load(self, entries: Mapping[str, Any]) -> None:
        """Load its state_dict."""
        self._stateful.load_state_dict(entries[self._entry])


def part_of(name: str, what: Any, rank: int) -> SavedPart:
    """The part that ``what`` is, by its type.

    Raises:
        TypeError: It cannot be saved.
        ValueError: Its name cannot be the beginning of names of entries.
    """
    if not name or "." in name or name == RANKS:
        raise ValueError(f"a part of a checkpoint cannot be named {name!r}: without dots, and not {RANKS!r}")
    if isinstance(what, nn.Module):
        return ModulePart(name, what)
    if isinstance(what, DistributedOptimizer):
        return ShardedOptimizerPart(name, what)
    if isinstance(what, Optimizer):
        return OptimizerPart(name, what)
    if callable(getattr(what, "state_dict", None)) and callable(getattr(what, "load_state_dict", None)):
        return RankPart(name, what, rank)
    raise TypeError(
        f"{name!r} is a {type(what).__name__}, which has no state_dict() and load_state_dict(): give it these, or pass "
        "plain values as the position"
    )


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
