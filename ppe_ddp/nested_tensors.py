"""Finds, maps and moves the tensors in nested inputs and outputs: tuples, lists, mappings, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

logger = logging.getLogger("ppe_ddp")


def tensors_in(value: object, *, levels: int = 0) -> Iterator[Tensor]:
    """Every tensor in ``value``, also in attributes of objects of other kinds, as many ``levels`` deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, levels=levels)
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from tensors_in(item, levels=levels)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), levels=levels)
    elif levels and not isinstance(value, type | nn.Module):
        slots = [getattr(value, name, None) for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
        for item in [*getattr(value, "__dict__", {}).values(), *slots]:
            yield from tensors_in(item, levels=levels - 1)


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """``value`` with ``function`` applied to its tensors; the same object if none changes."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, PackedSequence):
        moved = function(value.data)
        return value if moved is value.data else value.to(moved.device, moved.dtype)  # type: ignore[arg-type]
    if isinstance(value, Mapping):
        items = {key: mapped(function, item) for key, item in value.items()}
        if all(items[key] is item for key, item in value.items()):
            return value
        return _like_mapping(value, items)
    if isinstance(value, list | tuple):
        parts = [mapped(function, item) for item in value]
        if all(part is item for part, item in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        before = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
        after = {name: mapped(function, item) for name, item in before.items()}
        changed = {name: item for name, item in after.items() if item is not before[name]}
        twin = copy.copy(value) if changed else value
        for name, item in changed.items():
            object.__setattr__(twin, name, item)  # also in a frozen one
        return twin
    return value


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
        self.device: torch.device | None = None
        self._has_warned = False
        self.find_device(module)

    def find_device(self, module: nn.Module) -> None:
        """Set the device to that of all parameters, or of all buffers without parameters; None if there are several."""
        devices = {tensor.device for tensor in module.parameters()} or {tensor.device for tensor in module.buffers()}
        self.device = devices.pop() if len(devices) == 1 else None

    def to_device(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The inputs on the module's device; the same objects if they are there already."""
        if self.device is None:
            return args, kwargs
        return mapped(self._to_device, args), mapped(self._to_device, kwargs)

    def _to_device(self, tensor: Tensor) -> Tensor:
        if tensor.device == self.device:
            return tensor
        if not self._has_warned:
            self._has_warned = True
            logger.warning("inputs are moved from %s to %s, where the module is", tensor.device, self.device)
        return tensor.to(self.device)
