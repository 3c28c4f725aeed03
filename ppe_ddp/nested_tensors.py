"""Finds, maps and moves the tensors in nested inputs and outputs: tuples, lists, mappings, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

logger = logging.getLogger("ppe_ddp")

_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})  # told from containers at once: there may be many
_UNDER_WAY, _HAS_ITSELF = object(), object()  # in the place of a result


def tensors_in(value: object, visited: dict[int, object] | None = None, *, levels: int = 0) -> Iterator[Tensor]:
    """Every tensor in ``value``, also in attributes of objects of other kinds, as many ``levels`` deep.

    A container is visited once, however often it is there: ``visited`` has them by their ids, and keeps them alive.
    """
    if isinstance(value, Tensor):
        yield value
        return
    if type(value) in _PLAIN:
        return
    is_container = isinstance(value, list | tuple | Mapping | set | frozenset) or _is_record(value)
    if not is_container and (not levels or isinstance(value, type | nn.Module)):
        return
    if visited is None:
        visited = {}
    if id(value) in visited:
        return
    visited[id(value)] = value
    items: Iterable[object]
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    elif is_container:
        items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]  # type: ignore[arg-type]
    else:
        levels -= 1
        items = attributes_of(value)
    for item in items:
        yield from tensors_in(item, visited, levels=levels)


def attributes_of(value: object) -> list[object]:
    """The values of an object's attributes, also of those in slots."""
    members = (member for cls in type(value).__mro__ for member in vars(cls).values())
    slots = [getattr(value, one.__name__, None) for one in members if isinstance(one, MemberDescriptorType)]
    return [*getattr(value, "__dict__", {}).values(), *slots]


def mapped(function: Callable[[Tensor], Tensor], value: Any, visited: dict[int, tuple[Any, Any]] | None = None) -> Any:
    """``value`` with ``function`` applied to its tensors; the same object if none changes.

    A container that is there several times is mapped once: ``visited`` has each and its result, by the id.

    Raises:
        ValueError: A container has itself somewhere in it, and a tensor in it changes.
    """
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in _PLAIN:
        return value
    if isinstance(value, PackedSequence):
        moved = function(value.data)
        return value if moved is value.data else value.to(moved.device, moved.dtype)  # type: ignore[arg-type]
    if not (isinstance(value, list | tuple | Mapping) or _is_record(value)):
        return value
    if visited is None:
        visited = {}
    elif (known := visited.get(id(value))) is not None:
        if known[1] is not _UNDER_WAY and known[1] is not _HAS_ITSELF:
            return known[1]
        visited[id(value)] = value, _HAS_ITSELF
        return value
    visited[id(value)] = value, _UNDER_WAY
    result = value
    if isinstance(value, list | tuple):
        parts = [mapped(function, item, visited) for item in value]
        if any(part is not item for part, item in zip(parts, value, strict=True)):
            result = _like_sequence(value, parts)
    elif isinstance(value, Mapping):
        items = {key: mapped(function, item, visited) for key, item in value.items()}
        if any(items[key] is not item for key, item in value.items()):
            result = _like_mapping(value, items)
    else:
        result = _mapped_record(function, value, visited)
    if result is not value and visited[id(value)][1] is _HAS_ITSELF:
        raise ValueError(
            f"a {type(value).__name__} has itself somewhere in it, and its copy with tensors that were moved, cast or "
            "passed on as they are would have this one: pass its tensors to the module, and return them, without it"
        )
    visited[id(value)] = value, result
    return result


def _mapped_record(function: Callable[[Tensor], Tensor], value: Any, visited: dict[int, tuple[Any, Any]]) -> Any:
    before = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    after = {name: mapped(function, item, visited) for name, item in before.items()}
    changed = {name: item for name, item in after.items() if item is not before[name]}
    twin = copy.copy(value) if changed else value
    for name, item in changed.items():
        object.__setattr__(twin, name, item)  # also in a frozen one
    return twin


def _is_record(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _like_sequence(value: Any, parts: list[Any]) -> Any:
    if hasattr(value, "_fields"):
        return type(value)(*parts)
    if type(value) is list or not isinstance(value, list):
        return type(value)(parts)
    twin = copy.copy(value)  # a subclass may have other arguments, and has other attributes
    twin[:] = parts
    return twin


def _like_mapping(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    if not hasattr(value, "__setitem__"):
        return type(value)(items)  # type: ignore[call-arg]
    twin: Any = copy.copy(value)  # keeps a subclass's other attributes, such as a default factory
    for key, item in items.items():
        twin[key] = item
    return twin


class Inputs:
    """Moves inputs to the device of a module that is on one device; warns once if an input is on another."""

    def __init__(self, module: nn.Module) -> None:
        self._has_warned = False
        self.find_device(module)

    def find_device(self, module: nn.Module) -> None:
        """Set the device to that of all parameters, or of all buffers without parameters; None if there are several."""
        tensors: list[Tensor] = [*module.parameters()] or [*module.buffers()]
        devices = {tensor.device for tensor in tensors}
        self._device = devices.pop() if len(devices) == 1 else None
        self._module, self._first = module, tensors[0] if self._device is not None else None

    @property
    def device(self) -> torch.device | None:
        """The device of the module; ``module.to()`` changes it."""
        if self._first is not None and self._first.device != self._device:
            self.find_device(self._module)
        return self._device

    def to_device(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The inputs on the module's device; the same objects if they are there already."""
        device = self.device
        if device is None:
            return args, kwargs
        return mapped(partial(self._to_device, device), args), mapped(partial(self._to_device, device), kwargs)

    def _to_device(self, device: torch.device, tensor: Tensor) -> Tensor:
        if tensor.device == device:
            return tensor
        if not self._has_warned:
            self._has_warned = True
            logger.warning("inputs are moved from %s to %s, where the module is", tensor.device, device)
        return tensor.to(device)
