"""Post-accumulate-grad hooks on parameters: our own, and the deferral of the user's until the averages are there.

A user's post-accumulate-grad hook that steps an optimizer as soon as a gradient is there would step with this
rank's share of it, and only where there is one. While a backward is being synchronized such hooks are
deferred, and called on every rank when the average is in ``.grad``; in ``no_sync()`` they are called at once, as
without this library.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from itertools import repeat
from operator import contains, is_, setitem
from typing import TYPE_CHECKING, Any

from torch import nn

from ppe_ddp.engine.gradients import redistribute_gradients
from ppe_ddp.engine.module import is_distributed
from ppe_ddp.torch_internals import (
    in_backward_optimizers,
    post_accumulate_hooks,
    uncompiled_hook,
    without_torch_function,
)

if TYPE_CHECKING:
    import weakref
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from torch.utils.hooks import RemovableHandle

    from ppe_ddp.engine.shared_parameters import Owner

_MOST_SEQUENCES = 64  # that are remembered: of graphs that change there is no end
PostHook = Callable[[nn.Parameter], object]


class GradHook(functools.partial[None]):
    """Our own hook: calls ``on_accumulated(owner, index, parameter)``, and holds the owner weakly.

    It is a ``partial`` because a call from autograd then costs one Python frame, which is most of what a small
    parameter costs.
    """

    __slots__ = ()

    def register(self, parameter: nn.Parameter) -> RemovableHandle:
        """Register on ``parameter``, before the user's hooks: we have to know first that a backward is on."""
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(self)
        table = _table(parameter)
        if len(table) == 1:
            return handle
        others = [(key, hook) for key, hook in table.items() if hook is not self]
        table.clear()  # not move_to_end(), which changes an order that autograd does not look at
        table[handle.id] = self
        for key, hook in others:
            owner = _owner_of(hook)
            if owner is None or owner() is not None:
                table[key] = hook
        return handle


def owners_of(parameters: Iterable[nn.Parameter]) -> list[Owner]:
    """The owners that the hooks on any of these parameters call."""
    owners = {id(owner): owner for parameter in parameters for owner in _owners(parameter)}
    return list(owners.values())


class _RecordedArrivals(list[nn.Parameter]):
    """The parameters whose gradients arrived while hooks were recording.

    Its ``append`` is put into hook tables; :func:`_owner_of` recognizes it there.
    """

    def __init__(self, owner: weakref.ref[Any]) -> None:
        super().__init__()
        self.owner = owner


class GradHooks:
    """Our hooks on the parameters of one module.

    Once a backward is known to be under way, most of them need not call back: they can *record*. An arrival then costs
    one call of a C function, a tenth of a Python one, and is read later.

    Args:
        parameters: The parameters.
        on_accumulated: Called as ``on_accumulated(owner, index, parameter)``.
        owner: Held weakly.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], on_accumulated: Callable[..., None], owner: weakref.ref[Any]
    ) -> None:
        self._recorded = _RecordedArrivals(owner)
        self._record = self._recorded.append
        self._index = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._handles: list[RemovableHandle] = []
        self._hooks: dict[int, tuple[dict[int, Any], int, GradHook]] = {}
        self._recording = _HookEntries((), (), {})
        self._is_recording = False
        self._sequences: dict[int, tuple[list[nn.Parameter], list[int]]] = {}  # what was recorded, by its first one
        for i, parameter in enumerate(parameters):
            if parameter.requires_grad:
                hook = GradHook(on_accumulated, owner, i)
                handle = hook.register(parameter)
                self._handles.append(handle)
                self._hooks[i] = _table(parameter), handle.id, hook
                if is_distributed(parameter):
                    self._handles.append(redistribute_gradients(parameter))

    def remove(self) -> None:
        """Take our hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.clear()
        self._recording = _HookEntries((), (), {})

    def start_recording(self, indices: Sequence[int], without: Collection[int] = ()) -> None:
        """Only record the arrivals of these parameters, save some, and call nothing, until :meth:`stop_recording`.

        Args:
            indices: The parameters.
            without: Those that are not to be recorded; to be the same object while it is the same ones.
        """
        self.stop_recording()
        self._recorded.clear()
        recording = self._recording
        if recording.indices != indices or recording.without is not without:
            recording = self._recording = _HookEntries(indices, without, self._hooks)
        recording.put(repeat(self._record))
        self._is_recording = True

    def stop_recording(self, _dead: object = None) -> None:
        """Call ``on_accumulated`` again for every arrival."""
        if self._is_recording:
            self._is_recording = False
            self._recording.put(self._recording.hooks)

    def take_recorded(self) -> list[int]:
        """The parameters that were recorded since the last call, in order of arrival."""
        count = len(self._recorded)  # another thread may be at work
        recorded, self._recorded[:count] = self._recorded[:count], []
        if not recorded:
            return []
        # As mostly, the same in the same order as in another backward: to look up each takes ten times as long.
        known = self._sequences.get(id(recorded[0]))
        if known is None or len(known[0]) != len(recorded) or not all(map(is_, known[0], recorded)):
            if len(self._sequences) >= _MOST_SEQUENCES:
                self._sequences.clear()
            known = self._sequences[id(recorded[0])] = recorded, [self._index[id(parameter)] for parameter in recorded]
        return known[1].copy()


class _HookEntries:
    """The entries of hook tables at which arrivals are recorded; kept while it is those of the same parameters.

    Args:
        indices: The parameters.
        without: Those that are left out.
        hooks: For each that has one, its table, the key in there and our hook.
    """

    def __init__(
        self,
        indices: Sequence[int],
        without: Collection[int],
        hooks: Mapping[int, tuple[dict[int, Any], int, GradHook]],
    ) -> None:
        entries = [hooks[i] for i in indices if i in hooks and i not in without]
        self.indices = list(indices)
        self.without = without
        self.hooks = [hook for _, _, hook in entries]
        self._tables = [table for table, _, _ in entries]
        self._keys = [key for _, key, _ in entries]

    def put(self, hooks: Iterable[Any]) -> None:
        """Put each of ``hooks`` into its entry, if that is still there."""
        if all(map(contains, self._tables, self._keys)):
            deque(map(setitem, self._tables, self._keys, hooks), maxlen=0)
            return
        for table, key, hook in zip(self._tables, self._keys, hooks, strict=False):
            if key in table:
                table[key] = hook


class _DeferredHook:
    """A user's hook, deferred: replaces it in the parameter's hook table, so that its handle still removes it."""

    def __init__(self, hook: PostHook) -> None:
        self.hook = hook

    @uncompiled_hook
    def __call__(self, parameter: nn.Parameter) -> None:
        if not any(owner.is_synchronizing for owner in _owners(parameter)):
            self.hook(parameter)


class UserGradHooks:
    """The user's hooks on the parameters of one module.

    Args:
        parameters: The parameters. A hook waits while any wrapper that has the parameter synchronizes.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        with without_torch_function():  # so that parameters that are being gathered are not waited for
            tables = [post_accumulate_hooks(parameter) for parameter in parameters]
        # One without a table needs no gradient: where that changes, the module is looked at anew.
        self._tables = [(i, parameters[i], table) for i, table in enumerate(tables) if table is not None]
        self._just_tables = [table for _, _, table in self._tables]
        self._hooked: list[tuple[int, nn.Parameter]] = []
        # torch's _apply_optimizer_in_backward(register_hook=False) leaves optimizers to the wrapper
        self._optimized = [
            (i, parameter) for i, parameter in enumerate(parameters) if in_backward_optimizers(parameter)
        ]

    def defer(self) -> None:
        """Defer also the hooks that were registered since the last call."""
        self._hooked.clear()
        if max(map(len, self._just_tables), default=0) < 2:
            return  # ours alone
        for i, parameter, table in self._tables:
            if len(table) < 2:
                continue
            users = [(key, hook) for key, hook in table.items() if _owner_of(hook) is None]
            if users:
                self._hooked.append((i, parameter))
            for key, hook in users:
                if not isinstance(hook, _DeferredHook):
                    table[key] = _DeferredHook(hook)

    def run(self, averaged: bytes, called: set[int]) -> None:
        """Call the hooks of the parameters in ``averaged`` (one byte a parameter).

        Args:
            averaged: Whether there is an average.
            called: The parameters whose hooks were called already, by identity; those of these are added.
        """
        due = {id(parameter) for i, parameter in (*self._hooked, *self._optimized) if averaged[i]} - called
        called.update(due)
        for _, parameter in self._hooked:
            if id(parameter) in due:
                for hook in list(_table(parameter).values()):
                    if isinstance(hook, _DeferredHook):
                        hook.hook(parameter)
        for _, parameter in self._optimized:
            if id(parameter) in due:
                for optimizer in in_backward_optimizers(parameter):
                    optimizer.step()
                parameter.grad = None


def _owner_of(hook: Any) -> weakref.ref[Owner] | None:
    """The owner that ``hook`` calls; None for a user's hook."""
    if isinstance(hook, GradHook):
        owner: weakref.ref[Owner] = hook.args[0]
        return owner
    recorded = getattr(hook, "__self__", None)
    return recorded.owner if isinstance(recorded, _RecordedArrivals) else None


def _owners(parameter: nn.Parameter) -> Iterator[Owner]:
    with without_torch_function():  # so that a parameter that is being gathered is not waited for
        table = post_accumulate_hooks(parameter)
    for hook in list((table or {}).values()):
        reference = _owner_of(hook)
        owner = None if reference is None else reference()
        if owner is not None:
            yield owner


def _table(parameter: nn.Parameter) -> dict[int, Any]:
    table = post_accumulate_hooks(parameter)
    assert table is not None, "there is a hook of ours"
    return table
