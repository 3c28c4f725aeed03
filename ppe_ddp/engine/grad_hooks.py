"""Hooks of autograd: which gradients a backward will have, when each is there, and forwards that have no backward.

    on outputs         a backward has come to the module: ask autograd which parameters it will reach; a forward whose
                       graph was freed without one is counted, since ranks that differ there have skipped a step
    on parameters      a gradient was accumulated; only recorded where nobody waits for it
    of the user's      a post-accumulate-grad hook that steps an optimizer would do so with this rank's share of the
                       gradient, and only where there is one: it is called when the average is in ``.grad``, on every
                       rank. In ``no_sync()`` it is called at once, as without this library

The reducer decides what an arrival means for the other ranks.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import compress, repeat
from operator import contains, is_, setitem
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from ppe_ddp.engine.gradients import GradientStreams, redistribute_gradients
from ppe_ddp.engine.module import is_distributed
from ppe_ddp.errors import TorchChangedError, UnusableError
from ppe_ddp.torch_internals import (
    current_node,
    in_backward_optimizers,
    is_in_backward,
    node_is_executed,
    post_accumulate_hooks,
    register_first_hook,
    uncompiled_hook,
    without_torch_function,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle

    from ppe_ddp.engine.completion import Owner, Turn


class ReachedParameters:
    """Finds the parameters that the running backward will accumulate into, by their autograd nodes."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._nodes: dict[int, Node] = {}
        self._is_executed = node_is_executed()
        self.refresh(range(len(parameters)))

    def refresh(self, indices: Iterable[int]) -> None:
        """Look up the nodes of these parameters. A cast, even there and back, gives a parameter a new one."""
        with torch.enable_grad():
            for i in indices:
                if self._parameters[i].requires_grad:
                    # Holding a node keeps it the parameter's own: autograd itself holds it weakly.
                    self._nodes[i] = get_gradient_edge(self._parameters[i]).node

    def indices(self, *, has_accumulated: bool = False) -> list[int]:
        """The parameters that the graph task running on this thread will reach.

        Exact, except for those that it reaches through a graph task of its own (reentrant checkpoints), or by a node
        that a parameter had before it was cast. Empty for ``autograd.grad``, which accumulates nothing.

        Raises TorchChangedError where it ``has_accumulated`` a gradient, and autograd refuses to answer, which it does
        to ``autograd.grad`` alone.
        """
        try:
            return list(compress(self._nodes, map(self._is_executed, self._nodes.values())))
        except RuntimeError as error:
            if not has_accumulated:
                return []  # autograd.grad on the parameters themselves
            raise TorchChangedError(
                "node_is_executed: this version of torch does not tell in a backward which parameters it will reach "
                f"({error}); use a version that CONTRIBUTING.md names, and see `python -m ppe_ddp doctor`"
            ) from error

    def accumulates(self) -> bool:
        """Whether the graph task accumulates gradients below the node that it executes now; ``autograd.grad`` does not.

        Asked of the first leaf that is found there.
        """
        below, seen = [current_node()], set()
        while below:
            node = below.pop()
            if node is None or node in seen:
                continue
            if hasattr(node, "variable"):
                with suppress(RuntimeError):  # autograd.grad of this leaf
                    return self._is_executed(node)
                return False
            seen.add(node)
            below += [after for after, _ in node.next_functions]
        return False


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
    """Our hooks on the parameters of one module; each calls ``on_accumulated(owner, index, parameter)``.

    Once a backward is known to be under way, most of them need not call back: they can *record*. An arrival then costs
    one call of a C function, a tenth of a Python one, and is read later.

    Args:
        parameters: The parameters.
        on_accumulated: Called with an arrival.
        owner: Held weakly.

    Attributes:
        streams: Those that gradients arrive on; None on CPUs.
        reached: Returns the parameters whose gradients the backward that runs on this thread will accumulate.
        accumulates: Tells whether the graph task that runs on this thread accumulates gradients.
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
        self.streams = GradientStreams.of(parameters)
        self._reached = ReachedParameters(parameters)
        self.reached, self.accumulates = self._reached.indices, self._reached.accumulates

    def remove(self) -> None:
        """Take our hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.clear()
        self._recording = _HookEntries((), (), {})

    def start_recording(self, indices: Sequence[int], without: Collection[int] = ()) -> None:
        """Only record the arrivals of these parameters, and call nothing, until :meth:`stop_recording`.

        Those in ``without`` are not recorded, nor those of unknown streams. It is to be the same object while it is the
        same ones.
        """
        if self._is_recording:
            self.stop_recording()
        self._recorded.clear()
        if self.streams is not None:
            indices = [i for i in indices if self.streams.knows_stream(i)]
        recording = self._recording
        if recording.indices != indices or recording.without is not without:
            recording = self._recording = _HookEntries(indices, without, self._hooks)
        recording.put(repeat(self._record))
        self._is_recording = True

    def stop_recording(self) -> None:
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

    def expected(self, arrived: int) -> list[int]:
        """As :attr:`reached`, once the backward has accumulated the gradient of parameter ``arrived``.

        Raises:
            TorchChangedError: Autograd refuses to answer.
        """
        if reached := self.reached(has_accumulated=True):
            return reached
        self.refresh(range(len(self._index)))  # our nodes were not those that autograd uses
        # The graph may be older than a cast, and have other nodes: what else it brings comes late, and is repaired.
        return self.reached(has_accumulated=True) or [arrived]

    def refresh(self, indices: Sequence[int]) -> None:
        """Ask autograd again for the nodes of these parameters."""
        self._reached.refresh(indices)
        if self.streams is not None:
            self.streams.forget_streams(indices)

    def check(self, rank: int) -> None:
        """Raise :class:`UnusableError` where a CUDA graph is being captured."""
        if self.streams is not None and self.streams.is_capturing():
            raise UnusableError(
                f"rank {rank}: a CUDA graph is being captured, and what each backward sends is agreed on anew, which a "
                "replay leaves out; capture model.module, and call model.finish_grad_sync() after replays"
            )


class _HookEntries:
    """The entries of hook tables at which arrivals are recorded; kept while it is those of the same parameters.

    ``hooks`` has for each parameter that has one its table, the key in there and our hook.
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
    """The user's hooks on the parameters of one module; one waits while any wrapper with its parameter synchronizes."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        with without_torch_function():  # so that parameters that are being gathered are not waited for
            tables = [post_accumulate_hooks(parameter) for parameter in parameters]
            is_frozen = [not parameter.requires_grad for parameter in parameters]
        # One without a table needs no gradient: where that changes, the module is looked at anew.
        self._tables = [(i, parameters[i], table) for i, table in enumerate(tables) if table is not None]
        self._just_tables = [table for i, _, table in self._tables if not is_frozen[i]]
        self._frozen_tables = [table for i, _, table in self._tables if is_frozen[i]]  # which have no hook of ours
        self._hooked: list[tuple[int, nn.Parameter]] = []
        # torch's _apply_optimizer_in_backward(register_hook=False) leaves optimizers to the wrapper
        self._optimized = [
            (i, parameter) for i, parameter in enumerate(parameters) if in_backward_optimizers(parameter)
        ]
        self.exist = bool(self._optimized)
        """Whether :meth:`run` has anything to call."""

    def defer(self) -> None:
        """Defer also the hooks that were registered since the last call."""
        self._hooked.clear()
        has_others = max(map(len, self._just_tables), default=0) > 1 or any(self._frozen_tables)  # than ours
        for i, parameter, table in self._tables if has_others else ():
            users = [(key, hook) for key, hook in table.items() if _owner_of(hook) is None]
            if users:
                self._hooked.append((i, parameter))
            for key, hook in users:
                if not isinstance(hook, _DeferredHook):
                    table[key] = _DeferredHook(hook)
        self.exist = bool(self._hooked or self._optimized)

    def run(self, averaged: bytes, turn: Turn | None) -> None:
        """Call the hooks of the parameters in ``averaged``: one byte a parameter, whether there is an average.

        ``turn`` knows whose hooks were called already, for another wrapper.
        """
        due = {id(parameter) for i, parameter in (*self._hooked, *self._optimized) if averaged[i]}
        if turn is not None:
            due -= turn.called
            turn.called.update(due)
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


logger = logging.getLogger("ppe_ddp")

_STATUS_BITS = 2
_MODULUS = 1 << (8 - _STATUS_BITS)
_MOST_OUTPUTS = 64  # that are looked at


class ForwardCounter:
    """Counts the forwards of one module on this rank whose graph was freed before any backward reached it."""

    def __init__(self) -> None:
        self._dropped = 0
        self._recent = 0
        self._count = 0
        self._excused = 0
        self._outputs: deque[weakref.ref[Tensor]] = deque(maxlen=_MOST_OUTPUTS)
        self._is_executed = node_is_executed()

    def watch(self, outputs: Iterable[Tensor], on_backward: Callable[[], None], *, counts: bool) -> None:
        """Call ``on_backward`` when a backward reaches any of ``outputs``, those of one forward.

        Args:
            outputs: Those that are not differentiable are passed over.
            on_backward: Called with every gradient of them.
            counts: Whether the forward counts as dropped if none does.
        """
        hook = None
        for output in outputs:
            if output.grad_fn is not None:
                if hook is None:
                    self._count += 1
                    # A checkpoint that computes a forward once more, in backward, uses nothing of its outputs.
                    is_repeated = not counts or is_in_backward()
                    hook = _OutputHook(self, self._count, on_backward, is_reached=is_repeated)
                register_first_hook(output, hook)  # one of the model's own may raise
                self._outputs.append(weakref.ref(output))

    def will_be_reached(self) -> bool:
        """Whether the running backward is going to reach an output of the last forwards that is still referred to."""
        nodes = (output.grad_fn for reference in self._outputs if (output := reference()) is not None)
        return any(node is not None and self._is_executed(node) for node in nodes)

    def count_dropped(self, *, excuses: bool) -> int:
        """The number of forwards so far that no backward has reached, nor can reach; called by each synchronization.

        Args:
            excuses: Whether the synchronization has no backward (``finish_grad_sync()``): then the forwards before it
                do not count.
        """
        if excuses:
            self._excused = self._count
        else:
            self._dropped += self._recent
        self._recent = 0
        return self._dropped

    def _drop(self, number: int) -> None:
        if number > self._excused:
            self._recent += 1


class _OutputHook:
    """A hook on the outputs of one forward; lives as long as their graph, or they themselves."""

    __slots__ = ("_forwards", "_is_reached", "_number", "_on_backward")

    def __init__(
        self, forwards: ForwardCounter, number: int, on_backward: Callable[[], None], *, is_reached: bool
    ) -> None:
        self._forwards = forwards
        self._number = number
        self._on_backward = on_backward
        self._is_reached = is_reached

    @uncompiled_hook
    def __call__(self, _gradient: Tensor) -> None:
        """Called by autograd: a backward has reached an output."""
        self._is_reached = True
        self._on_backward()

    def __del__(self) -> None:
        if not getattr(self, "_is_reached", True):  # an interrupt may have kept it from being made
            self._forwards._drop(self._number)


class DroppedForwards:
    """Compares how many forwards each rank has dropped, at each synchronization, and warns where they differ."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._has_differed = False
        self._has_warned = False

    def unpack(self, extra: bytes) -> bytes:
        """Unpack the bytes of :func:`pack_status`, one a rank, and warn once where the counts stay different.

        Returns:
            The statuses.
        """
        if not extra or max(extra) < 1 << _STATUS_BITS:
            self._has_differed = False
            return extra
        counts = [byte >> _STATUS_BITS for byte in extra]
        differ = min(counts) != max(counts)
        # Once is not enough: a graph in a reference cycle goes when the garbage is collected, on each rank in its time.
        if differ and self._has_differed and not self._has_warned:
            self._has_warned = True
            logger.warning(_warning(self._rank, counts))
        self._has_differed = differ
        return bytes(byte % (1 << _STATUS_BITS) for byte in extra)


def pack_status(status: int, dropped: int) -> int:
    """Pack a rank's status (below 4) and its number of dropped forwards (modulo 64) into one byte."""
    return status | (dropped % _MODULUS) << _STATUS_BITS


def _warning(rank: int, counts: Sequence[int]) -> str:
    by_rank = ", ".join(f"rank {other}: {count}" for other, count in enumerate(counts))
    return (
        f"rank {rank}: the ranks may be averaging gradients of different steps: they differ in how many forwards in "
        f"training mode have had no backward ({by_rank}). A rank that skips its backward, or goes on after its loss "
        "raised above the outputs of the module, must call model.finish_grad_sync() in that step. If these ranks only "
        "ran more forwards than the others, nothing is wrong: run those under torch.no_grad() or after eval()"
    )
