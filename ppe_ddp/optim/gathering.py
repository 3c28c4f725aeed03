"""Parameters on their way back to all ranks: each unit is waited for where it is first needed.

    step        units 0 1 2 3 leave
    forward     layer A needs unit 0: wait for it; A computes, while 1 2 3 are under way; layer B needs unit 1 ...

A module waits for its own parameters when it is called, and a module that has some itself for all below it, which
it may use without calling them (attention does). Saving, loading and the next step wait for everything.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import nn

from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.utils.hooks import RemovableHandle

    from ppe_ddp.contracts import Waitable
    from ppe_ddp.engine.shards import ShardedModel


class Gathering:
    """The units of one model that are under way.

    Args:
        model: What gathers them.
        module: Whose modules need them; None where everything is to be waited for at once.
        arrived: Called with a unit when its parameters have their new values.
    """

    def __init__(self, model: ShardedModel, module: nn.Module | None, arrived: Callable[[int], None]) -> None:
        self._model = model
        self._arrived = arrived
        self._module = module
        self._pending: dict[int, Waitable | None] = {}
        self._handles: list[RemovableHandle] = []
        if module is not None:
            self._hook_up(module)

    def _hook_up(self, module: nn.Module) -> None:
        unit_of = {
            id(self._model.shards[index].parameter): unit
            for unit, members in enumerate(self._model.units)
            for index in members
        }
        for part in module.modules():
            if not any(id(parameter) in unit_of for parameter in part._parameters.values()):
                continue
            units = sorted({unit_of[id(p)] for p in part.parameters() if id(p) in unit_of})
            self._handles += [
                part.register_forward_pre_hook(_Wait(self, units)),
                part.register_state_dict_pre_hook(_Wait(self, None)),
                part.register_load_state_dict_pre_hook(_Wait(self, None)),
            ]

    def __del__(self) -> None:
        for handle in self._handles:
            handle.remove()

    def start(self, units: Iterable[int]) -> None:
        """Let ``units`` leave, in this order, which is the same on every rank."""
        for unit in units:
            self._pending[unit] = self._model.gather(unit)
        if self._module is None:
            self.finish()

    def finish(self, units: Sequence[int] | None = None) -> None:
        """Wait until ``units`` are there, or all that are under way."""
        if not self._pending:
            return
        for unit in list(self._pending) if units is None else units:
            if unit in self._pending:
                self._arrive(unit, self._pending.pop(unit))

    def _arrive(self, unit: int, pending: Waitable | None) -> None:
        try:
            if pending is not None:
                pending.wait()
        except RuntimeError as error:
            first = self._model.shards[self._model.units[unit][0]].name
            raise CommunicationError(
                f"gathering the updated parameters failed, at {first!r} and those with it: {error}. An error or a "
                "crash on another rank ends here: look for the first traceback of all ranks."
            ) from error
        with torch.no_grad():
            self._model.install(unit)
        self._arrived(unit)


class _Wait:
    """Waits for units, as a hook of a module. A copy of the module, or an unpickled one, waits for nothing."""

    __slots__ = ("_gathering", "_units")

    def __init__(self, gathering: Gathering | None, units: Sequence[int] | None) -> None:
        self._gathering = None if gathering is None else weakref.ref(gathering)
        self._units = units

    def __call__(self, *_arguments: object) -> None:
        gathering = None if self._gathering is None else self._gathering()
        if gathering is not None and gathering._pending:
            gathering.finish(self._units)

    def __reduce__(self) -> tuple[type[_Wait], tuple[None, None]]:
        return _Wait, (None, None)
