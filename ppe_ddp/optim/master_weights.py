"""Master weights, which the wrapped optimizer updates: 1-D shards of parameters, in high precision.

If a parameter has that precision itself, its master weight is a view of the shard's memory. Else it is a copy. The
parameter has its rounded values; where it has others, other code has written them (``load_state_dict``), also by
``.data``, which changes no version of the parameter.

An optimizer on CPUs makes a dozen calls of torch for each tensor. For tensors of a few thousand elements these take
longer than the arithmetic. So the small weights are stepped together, laid end to end in one flat tensor:

    weights        a | b | c | D        copied there for the step
    gradients      a | b | c | D        copied there for the step
    state          a   b   c | D        stays there between steps; the state of a small weight is a view of it

This requires an element-wise optimizer, equal hyper-parameters, and equal numbers of steps. A layout is made after two
steps with the same gradients, since making it costs as much as some steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from itertools import accumulate, chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ppe_ddp.engine.record import EventLog
from ppe_ddp.engine.zero.shards import Shard, ShardedModel, is_dense
from ppe_ddp.torch_internals import step_hooks

_LARGEST_BYTES = 16 << 10  # of a small shard; from 32 KB on, copying it takes as long as the saved calls (measured)
_MOST_BYTES = 512 << 10  # of a flat tensor, so that it stays in the cache: a step passes it and its state ten times
_PARAMETERS: MutableMapping[Tensor, Any] = WeakIdKeyDictionary()  # references to parameters, by their master weights
_FEWEST = 4  # shards in a flat tensor
_IS_SPARSE = torch.Tensor.is_sparse.__get__  # type: ignore[attr-defined]
# Optimizers whose state has only numbers and tensors like the parameter, and whose step reads nothing else.
_KNOWN_NAMES = "Adadelta Adagrad Adam Adamax AdamW ASGD NAdam RAdam RMSprop Rprop SGD"
_KNOWN = tuple(getattr(torch.optim, name) for name in _KNOWN_NAMES.split())


class MasterWeight:
    """The master weight of one shard."""

    def __init__(self, index: int, shard: Shard, dtype: torch.dtype) -> None:
        self.index = index
        self.shard = shard
        own, dtype = self.own(), torch.promote_types(shard.parameter.dtype, dtype)
        self.is_alias = own.dtype == dtype and is_dense(shard.parameter, shard.spec)
        self.weight = nn.Parameter(own if self.is_alias else own.to(dtype, copy=True))
        _PARAMETERS[self.weight] = weakref.ref(shard.parameter)

    def own(self) -> Tensor:
        """This rank's part of the current parameter: a view of its memory if that is dense, else a copy."""
        return self.shard.cut(self.shard.parameter)

    def written(self) -> Tensor | None:
        """The master weight with the values that other code has written into the parameter; None if it has not."""
        own = self.own()
        rounded = self.weight.to(own.dtype)
        if own.is_cpu and _are_equal(own, rounded):  # the host would wait for a GPU
            return None
        return torch.where(own != rounded, own.to(self.weight.dtype), self.weight)

    def follow(self) -> None:
        """Take the place in memory of the parameter, which other code has moved; be a copy if its memory has holes."""
        self.is_alias = is_dense(self.shard.parameter, self.shard.spec)
        self.weight.data = self.own() if self.is_alias else self.own().clone()


def parameter_of(weight: Any) -> Any:
    """The parameter of a master weight, also of one that is no longer used; anything else itself."""
    reference = _PARAMETERS.get(weight) if isinstance(weight, Tensor) else None
    return weight if reference is None or (parameter := reference()) is None else parameter


def _are_equal(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same bits: torch compares integers of 64 bits five times as fast as bfloat16."""
    step = max(1, 8 // first.itemsize)
    first = first.clone() if first.storage_offset() % step else first
    count = first.numel() // step * step
    whole, other = first[:count].view(torch.int64), second[:count].view(torch.int64)
    return torch.equal(whole, other) and torch.equal(first[count:], second[count:])


class MasterWeights(list[MasterWeight]):
    """All master weights of one optimizer, in the order in which they were added."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: list[MasterWeight] = []
        self._aliased: list[nn.Parameter] = []
        self._weights: list[nn.Parameter] = []
        self._addresses: list[int] = []  # of the aliased parameters, at the last refresh
        self._own_addresses: list[int] = []

    def extend(self, masters: Iterable[MasterWeight]) -> None:
        super().extend(masters)
        self._note_aliases()

    def forget(self, masters: Collection[MasterWeight]) -> None:
        if masters:
            self[:] = [master for master in self if master not in masters]
            self._note_aliases()

    def _note_aliases(self) -> None:
        aliases = [master for master in self if master.is_alias]
        self._copies = [master for master in self if not master.is_alias]
        self._aliased = [master.shard.parameter for master in aliases]
        self._weights = [master.weight for master in aliases]

    def refresh(self) -> None:
        """Give the master weights the values of their parameters, where other code has written these."""
        for master in self._copies:
            if (written := master.written()) is not None:
                master.weight.data = written
        self.follow()

    def follow(self) -> None:
        """Let those that are views of parameters have their memory, where other code has moved these."""
        if list(map(torch.Tensor.data_ptr, self._aliased)) != self._addresses:
            for master in self:
                if master.is_alias:
                    master.follow()
            self._note_aliases()
            self._addresses = list(map(torch.Tensor.data_ptr, self._aliased))
            self._own_addresses = list(map(torch.Tensor.data_ptr, self._weights))

    def write(self, model: ShardedModel, updated: Sequence[bool]) -> Sequence[int]:
        """Write the master weights of ``updated`` shards to ``model``, on this rank; returns the changed units."""
        masters = [master for master in self if updated[master.index]]
        indices = {master.index for master in masters}
        if list(map(torch.Tensor.data_ptr, self._weights)) == self._own_addresses:
            model.write_in_place([master.index for master in masters if master.is_alias])
            masters = [master for master in masters if not master.is_alias]
        for master in masters:  # all of them if the optimizer has set ``.data`` of some weight
            model.write(master.index, master.weight.detach())
        return [unit for unit, members in enumerate(model.units) if not indices.isdisjoint(members)]


class FlatStep:
    """Steps an optimizer of 1-D weights; lays small weights end to end if that does not change the result.

    Code that watches the steps would see the flat tensors. So each weight is stepped by itself if the optimizer has
    more step hooks than ``hooks``, if its ``step`` was replaced (by ``torch.compile``), or if it is not torch's own.
    """

    def __init__(self, optimizer: Optimizer, *, hooks: int) -> None:
        self._optimizer = optimizer
        self._is_known = type(optimizer) in _KNOWN
        self._hooks = hooks
        self._last: list[list[int]] = []
        self._flats: list[tuple[dict[str, Any], list[FlatShards]]] | None = None  # pairs of a group and its flat shards
        self._table = optimizer.state

    def step(self) -> None:
        optimizer = self._optimizer
        groups = self._laid_out()
        for _, flats in groups:
            for flat in flats:
                flat.pack()
        weights = [group["params"] for group, _ in groups]
        try:
            for group, flats in groups:
                laid_out = {id(weight) for flat in flats for weight in flat.weights}
                others = [weight for weight in group["params"] if id(weight) not in laid_out]
                group["params"] = [*others, *(flat.weight for flat in flats)]
                optimizer.state.update({flat.weight: flat.state for flat in flats})
            optimizer.step()
        finally:
            for (group, _), own in zip(groups, weights, strict=True):  # of all, even if an interrupt ends the rest
                group["params"] = own
            states = [(flat, optimizer.state.pop(flat.weight, flat.state)) for _, flats in groups for flat in flats]
            for flat, state in states:
                flat.unpack(state)

    def separate(self) -> None:
        """Give each weight state of its own again, since other code is about to read or change it."""
        for _, flats in self._flats or ():
            for flat in flats:
                flat.separate()
        self._flats = None

    def _laid_out(self) -> list[tuple[dict[str, Any], list[FlatShards]]]:
        """The groups that have flat shards, with these; makes them if the last two steps had the same gradients."""
        hooks = self._hooks + (EventLog.step_hooks if EventLog.current is not None else 0)  # a timeline sees no tensors
        if not self._is_known or "step" in vars(self._optimizer) or step_hooks(self._optimizer) != hooks:
            self.separate()
            return []
        groups = self._optimizer.param_groups
        present = [[weight for weight in group["params"] if weight.grad is not None] for group in groups]
        last = self._last
        self._last = [[id(group), *map(id, weights)] for group, weights in zip(groups, present, strict=True)]
        if self._last != last or (self._flats is not None and not self._are_intact()):
            self.separate()
        elif self._flats is None:
            made = [(group, self._made(group, weights)) for group, weights in zip(groups, present, strict=True)]
            self._flats = [(group, flats) for group, flats in made if flats]
            self._table = self._optimizer.state
        return self._flats or []

    def _are_intact(self) -> bool:
        if self._optimizer.state is not self._table:
            return False
        return all(flat.is_intact(self._table) for _, flats in self._flats or () for flat in flats)

    def _made(self, group: dict[str, Any], weights: Iterable[Tensor]) -> list[FlatShards]:
        # A fused step makes one call for all weights already, and rounds the last elements of each differently.
        if group.get("differentiable") or group.get("fused"):
            return []
        state = self._optimizer.state
        alike: dict[Any, list[Tensor]] = {}
        for weight in weights:
            # On other devices torch makes one call for many tensors itself.
            if weight.nbytes <= _LARGEST_BYTES and weight.device.type == "cpu" and not _IS_SPARSE(weight.grad):
                kinds = [(key, _kind(value, weight)) for key, value in state[weight].items()]
                alike.setdefault((weight.dtype, *kinds), []).append(weight)
        parts = [part for same in alike.values() for part in _parts(same) if len(part) >= _FEWEST]
        return [FlatShards(part, [state[weight] for weight in part]) for part in parts]


class FlatShards:
    """Weights of equal hyper-parameters, dtype, device and steps; ``weight`` and ``state`` have them end to end."""

    def __init__(self, weights: list[Tensor], states: list[dict[str, Any]]) -> None:
        self.weights = weights
        self._sizes = [weight.numel() for weight in weights]
        self._flat = flat = torch.cat(weights)
        self.weight = nn.Parameter(flat)
        self.weight.grad = torch.empty_like(flat)
        self._pieces = list(flat.split(self._sizes))
        self._states = states
        self.state = {key: _joined([state[key] for state in states]) for key in states[0]}
        self._share()

    def is_intact(self, table: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether the state of the weights was not replaced or changed by other code, and no gradient is sparse."""
        if not all(map(is_, map(table.get, self.weights), self._states)):
            return False
        entries = list(chain.from_iterable(map(dict.values, self._states)))
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            return False
        if not all(bool((numbers == self.state[key]).all()) for key, numbers in self._numbers.items()):
            return False
        return not any(map(_IS_SPARSE, [weight.grad for weight in self.weights]))

    def pack(self) -> None:
        torch.cat(self.weights, out=self._flat)
        torch.cat([weight.grad for weight in self.weights], out=self.weight.grad)  # type: ignore[misc]  # all have one

    def unpack(self, state: dict[str, Any]) -> None:
        """Copy the flat tensor to the weights; ``state`` is the flat tensor's state after the step."""
        torch._foreach_copy_(self.weights, self._pieces)
        if list(state) == list(self._kept) and all(map(is_, state.values(), self._kept.values())):
            for key, numbers in self._numbers.items():
                numbers.fill_(state[key])
        else:
            self.state = state
            self._share()

    def separate(self) -> None:
        """Give each weight state in memory of its own: saving a view would save the whole flat tensor."""
        for state in self._states:
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.clone()

    def _share(self) -> None:
        """Make each weight's state a view of the flat state; numbers, such as the step, are copies of its own."""
        self._numbers = {
            key: value.repeat(len(self._sizes))
            for key, value in self.state.items()
            if isinstance(value, Tensor) and not value.dim()
        }
        for key, value in self.state.items():
            parts: Sequence[Any] = [value] * len(self._sizes)
            if key in self._numbers:
                parts = self._numbers[key].unbind()
            elif isinstance(value, Tensor):
                parts = value.split(self._sizes)
            for state, part in zip(self._states, parts, strict=True):
                state[key] = part
        self._kept = dict(self.state)
        self._entries = list(chain.from_iterable(map(dict.values, self._states)))


def _parts(weights: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group the weights, in order, so that each group stays in the cache."""
    sizes = accumulate(weight.nbytes for weight in weights)
    parts: dict[int, list[Tensor]] = {}
    for weight, size in zip(weights, sizes, strict=True):
        parts.setdefault((size - 1) // _MOST_BYTES, []).append(weight)
    return list(parts.values())


def _kind(value: Any, weight: Tensor) -> object:
    """The properties of a state entry that must be equal for weights to be stepped together."""
    if not isinstance(value, Tensor):
        return type(value), value
    if value.shape == weight.shape:
        return value.dtype
    return value.dtype, value.item() if not value.dim() else id(value)


def _joined(values: Sequence[Any]) -> Any:
    first = values[0]
    if not isinstance(first, Tensor):
        return first
    return torch.cat([*values]) if first.dim() else first.clone()
