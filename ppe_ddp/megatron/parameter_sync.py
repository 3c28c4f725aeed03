"""Bringing sharded parameters together again, while the next forward is running if that is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from ppe_ddp.contracts import Waitable
    from ppe_ddp.engine.shards import ShardedModel


class ParameterSync:
    """Gathers the units of some sharded models, in the order in which a forward needs them.

    Args:
        module: Whose forwards wait, module by module, once the hooks are enabled.
        models: One for each group of ranks that shares parameters.
    """

    def __init__(self, module: nn.Module, models: Sequence[ShardedModel]) -> None:
        self._module = module
        self._models = models
        self._handles: list[RemovableHandle] = []
        self._pending: dict[tuple[int, int], Waitable | None] = {}
        self._unit_of = {
            id(model.shards[k].parameter): (number, unit)
            for number, model in enumerate(models)
            for unit, members in enumerate(model.units)
            for k in members
        }

    def start(self) -> None:
        """Start to gather all units; every rank must call this."""
        self.finish()
        with torch.no_grad():
            for number, model in enumerate(self._models):
                for unit in range(len(model.units)):
                    self._pending[number, unit] = model.gather(unit)

    def finish(self) -> None:
        """Wait for all units that are under way."""
        for key in list(self._pending):
            self._install(key)

    def _install(self, key: tuple[int, int]) -> None:
        if key not in self._pending:
            return
        pending = self._pending.pop(key)
        if pending is not None:
            pending.wait()
        number, unit = key
        self._models[number].install(unit)

    def enable(self) -> None:
        """Let the forward of each submodule wait for the parameters that are its own."""
        if self._handles:
            return
        for module in self._module.modules():
            if next(module.parameters(recurse=False), None) is not None:
                self._handles.append(module.register_forward_pre_hook(self._before))

    def disable(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, module: nn.Module, _inputs: object) -> None:
        if self._pending:
            for parameter in module.parameters(recurse=False):
                key = self._unit_of.get(id(parameter))
                if key is not None:
                    self._install(key)
