"""Autograd hooks: they find out which gradients a backward will have, and when each one is accumulated.

    on outputs         A backward has reached the module: autograd tells which parameters it will reach. A forward whose
                       graph was freed without a backward is counted: if these counts differ, a rank has skipped a step.
    on parameters      A gradient was accumulated. Arrivals that launch nothing are only recorded.
    of the user's      A post-accumulate-grad hook may step an optimizer. It is deferred until the average is in
                       ``.grad``, and called on every rank; else it would use this rank's gradient, and run only on
                       ranks that have one. In ``no_sync()`` it is called at once, as without this library; under
                       Megatron's wrapper, too, which takes what it leaves in ``.grad``.

The reducer decides what an arrival means for the other ranks.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import compress, repeat
from operator import contains, is_, setitem
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from ppe_ddp.engine.completion import Owner, Turn
from ppe_ddp.engine.gradients import GradientStreams, redistribute_gradients
from ppe_ddp.engine.memory import REQUIRES_GRAD
from ppe_ddp.engine.module import is_distributed
from ppe_ddp.errors import TorchChangedError, UnusableError
from ppe_ddp.torch_internals import (
    accumulates_below,
    in_backward_optimizers,
    in_backward_table,
    is_in_backward,
    node_is_executed,
    post_accumulate_hooks,
    register_first_hook,
    remove_in_backward_hooks,
    uncompiled_hook,
    without_torch_function,
)

if TYPE_CHECKING:
    from ppe_ddp.engine.negotiation import Agreement


class ReachedParameters:
    """Finds the parameters that the running backward will accumulate into, by their autograd nodes."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._trainable: list[bool] = []  # by index, as seen last
        self._nodes: dict[int, Node] = {}
        self._is_executed = node_is_executed()

    def refresh(self, indices: Sequence[int]) -> None:
        """Look up the nodes of these parameters. A cast, even there and back, gives a parameter a new node."""
        with torch.enable_grad():
            for i in indices:
                if self._parameters[i].requires_grad:
                    # Autograd holds the node weakly; without this reference the parameter would get another one.
                    self._nodes[i] = get_gradient_edge(self._parameters[i]).node

    def watch_thawed(self) -> None:
        """Watch parameters, too, that require gradients only by now: a forward may thaw some, or freeze some for it."""
        with without_torch_function():  # so that parameters that are being gathered are not waited for
            trainable = list(map(REQUIRES_GRAD, self._parameters))
        if trainable != self._trainable:
            self._watch(trainable)

    def _watch(self, trainable: list[bool]) -> None:
        self._trainable = trainable
        self.refresh([i for i, here in enumerate(trainable) if here and i not in self._nodes])

    def indices(self, *, has_accumulated: bool = False, watches: bool = True) -> list[int]:
        """The parameters that the graph task running on this thread will reach.

        If it ``watches``, those that require gradients only by now are among them. Two kinds are missing: parameters
        that an inner graph task reaches (reentrant checkpoints), and parameters whose graph has a node from before a
        cast. ``autograd.grad`` accumulates nothing, so the list is empty for it.

        ``has_accumulated`` says that this graph task has accumulated a gradient, so that it is no ``autograd.grad``.
        Raises TorchChangedError if autograd refuses to answer then.
        """
        if watches:  # as watch_thawed(), without a call
            with without_torch_function():
                trainable = list(map(REQUIRES_GRAD, self._parameters))
            if trainable != self._trainable:
                self._watch(trainable)
        try:
            return list(compress(self._nodes, map(self._is_executed, self._nodes.values())))
        except RuntimeError as error:
            if not has_accumulated:
                return []  # autograd.grad on the parameters themselves
            raise TorchChangedError(
                "node_is_executed: this version of torch does not tell in a backward which parameters it will reach "
                f"({error}); use a version that CONTRIBUTING.md names, and see `python -m ppe_ddp doctor`"
            ) from error


def reached_though_replaced(
    before: Mapping[str, nn.Parameter], module: nn.Module | None, now: Sequence[nn.Parameter]
) -> list[str]:
    """The names of parameters that this backward reaches, and that are in ``module`` again, but not watched ``now``.

    ``before`` has those that were watched in the forward of its graph. Of those that are reached, and are not in
    ``module`` any more, a warning tells.
    """
    back, watched = set(map(id, module.parameters() if module is not None else ())), set(map(id, now))
    others = {name: one for name, one in before.items() if id(one) not in watched}
    reached = [list(others)[i] for i in ReachedParameters(list(others.values())).indices()]
    if gone := [name for name in reached if id(others[name]) not in back and not any(_owners(others[name]))]:
        _warn_of_removed(gone[0])
    return [name for name in reached if id(others[name]) in back]


@functools.cache
def _warn_of_removed(name: str) -> None:
    logger.warning(
        "a backward on this rank reaches %r, which the module had in the forward of this graph, and has no more since "
        "a later one: its gradient is not averaged. Call backward() before the module changes, or register all heads "
        "in the module, and choose one in forward()",
        name,
    )


_MOST_SEQUENCES = 64  # that are cached; graphs that change would add new ones for ever
PostHook = Callable[[nn.Parameter], object]


class GradHook(functools.partial[None]):
    """The library's hook: calls ``on_accumulated(owner, index, parameter)``, and holds the owner weakly.

    It is a ``partial``, so that a call from autograd costs one Python frame instead of two. For a small parameter the
    frame is most of the cost.
    """

    __slots__ = ()

    def register(self, parameter: nn.Parameter) -> RemovableHandle:
        """Register on ``parameter`` before the user's hooks, so that it sees a new backward before they run."""
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(self)
        table = _table(parameter)
        if len(table) == 1:
            return handle
        others = [(key, hook) for key, hook in table.items() if hook is not self]
        table.clear()  # move_to_end() would not change the order in which autograd calls hooks
        table[handle.id] = self
        for key, hook in others:
            owner = _owner_of(hook)
            if owner is None or owner() is not None:
                table[key] = hook
        return handle


def owners_of(parameters: Iterable[nn.Parameter]) -> list[Owner]:
    """The owners of the library's hooks on these parameters."""
    owners = {id(owner): owner for parameter in parameters for owner in _owners(parameter)}
    return list(owners.values())


class _RecordedArrivals(list[nn.Parameter]):
    """The parameters whose gradients arrived while hooks were recording.

    Its ``append`` is put into hook tables, where :func:`_owner_of` recognizes it.
    """

    def __init__(self, owner: weakref.ref[Any]) -> None:
        super().__init__()
        self.owner = owner


class GradHooks(ReachedParameters):
    """The library's hooks on the parameters of one module; each calls ``on_accumulated(owner, index, parameter)``.

    During a known backward most hooks need not call back: they *record*. An arrival then costs one call of a C
    function, a tenth of a Python call, and is read later.

    Args:
        parameters: The parameters.
        on_accumulated: Called for each arrival.
        owner: The first argument of ``on_accumulated``; held weakly.
        takes: Tells whether a parameter that is thawed later can be watched, by its index.

    Attributes:
        streams: The CUDA streams that gradients are accumulated on; None on CPUs.
        reached: Returns the parameters that the backward running on this thread will reach.
        accumulates: Tells whether the graph task running on this thread accumulates gradients.
    """

    reached, accumulates = ReachedParameters.indices, staticmethod(accumulates_below)

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        on_accumulated: Callable[..., None],
        owner: weakref.ref[Any],
        takes: Callable[[int], bool] = lambda _: True,
    ) -> None:
        super().__init__(parameters)
        self._recorded = _RecordedArrivals(owner)
        self._record = self._recorded.append
        self._index = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._hook_of = functools.partial(GradHook, on_accumulated, owner)
        self._takes: Callable[[int], bool] = lambda _: True
        self._handles: list[RemovableHandle] = []
        self._hooks: dict[int, tuple[dict[int, Any], int, GradHook]] = {}
        self._recording = _HookEntries((), (), {})
        self._is_recording = False
        # Recorded sequences and their indices, by the identity of the first parameter.
        self._sequences: dict[int, tuple[list[nn.Parameter], list[int]]] = {}
        self.streams = GradientStreams.of(parameters)
        self.watch_thawed()
        self._takes = takes

    def _watch(self, trainable: list[bool]) -> None:
        self._trainable = trainable
        new = [i for i, here in enumerate(trainable) if here and i not in self._hooks and self._takes(i)]
        for i in new:
            parameter, hook = self._parameters[i], self._hook_of(i)
            handle = hook.register(parameter)
            self._handles.append(handle)
            self._hooks[i] = _table(parameter), handle.id, hook
            if is_distributed(parameter):
                self._handles.append(redistribute_gradients(parameter))
        self.refresh(new)

    def remove(self) -> None:
        """Remove the library's hooks from the parameters, and let go of their nodes.

        A parameter whose data has another shape by now gets a node that fits when nothing holds the old one.
        """
        self._parameters, self._trainable = (), []
        self._nodes.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.clear()
        self._recording = _HookEntries((), (), {})

    def start_recording(self, indices: Sequence[int], without: Collection[int] = ()) -> None:
        """Record the arrivals of these parameters instead of calling back, until :meth:`stop_recording`.

        Parameters in ``without``, and those whose stream is not known yet, go on calling back. Pass the same object as
        ``without`` as long as its content is the same: it is compared by identity.
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
        """Call back for every arrival again."""
        if self._is_recording:
            self._is_recording = False
            self._recording.put(self._recording.hooks)

    def take_recorded(self) -> list[int]:
        """The parameters that were recorded since the last call, in order of arrival."""
        count = len(self._recorded)  # another thread may append meanwhile
        recorded, self._recorded[:count] = self._recorded[:count], []
        if not recorded:
            return []
        # Mostly an earlier backward has had the same sequence. Looking up each index would take ten times as long.
        known = self._sequences.get(id(recorded[0]))
        if known is None or len(known[0]) != len(recorded) or not all(map(is_, known[0], recorded)):
            if len(self._sequences) >= _MOST_SEQUENCES:
                self._sequences.clear()
            known = self._sequences[id(recorded[0])] = recorded, [self._index[id(parameter)] for parameter in recorded]
        return known[1].copy()

    def expected(self, arrived: int, names: Sequence[str]) -> list[int]:
        """The parameters that this backward will reach, which has accumulated the gradient of parameter ``arrived``.

        Raises:
            TorchChangedError: Autograd refuses to answer.
            UnusableError: It is too late to defer a user's hook on this parameter, of those with these ``names``.
        """
        table, key, _ = self._hooks[arrived]
        behind = list(table.values())[list(table).index(key) :]  # those before get it at once, as they are to
        if any(_owner_of(hook) is None and not isinstance(hook, _DeferredHook) for hook in behind):
            raise UnusableError(
                f"a post-accumulate-grad hook on {names[arrived]!r}, registered after the last forward of the wrapper, "
                "would get this rank's own gradient, as this backward does not come through an output of the wrapper: "
                "register it before the module is wrapped, or call the wrapper (its forward) after it"
            )
        if reached := self.reached(has_accumulated=True):
            return reached
        self.refresh(range(len(self._index)))  # autograd uses other nodes than those held here
        # If the graph is older than a cast, its nodes stay unknown: the other gradients go into the second round.
        return self.reached(has_accumulated=True) or [arrived]

    def refresh(self, indices: Sequence[int]) -> None:
        """Ask autograd again for the nodes of these parameters."""
        super().refresh(indices)
        if self.streams is not None:
            self.streams.forget_streams(indices)

    def check(self, rank: int) -> None:
        """Raise :class:`UnusableError` if a CUDA graph is being captured."""
        if self.streams is not None and self.streams.is_capturing():
            raise UnusableError(
                f"rank {rank}: a CUDA graph is being captured, and what each backward sends is agreed on anew, which a "
                "replay leaves out; capture model.module, and call model.finish_grad_sync() after replays"
            )


class _HookEntries:
    """The entries of hook tables at which arrivals are recorded; cached while the parameters are the same.

    ``hooks`` has for each hooked parameter its hook table, the key of the library's hook in it, and that hook.
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
        """Put each of ``hooks`` into its entry, if the entry still exists."""
        if all(map(contains, self._tables, self._keys)):
            deque(map(setitem, self._tables, self._keys, hooks), maxlen=0)
            return
        for table, key, hook in zip(self._tables, self._keys, hooks, strict=False):
            if key in table:
                table[key] = hook


class _DeferredHook:
    """A deferred user's hook. It replaces the hook in the parameter's hook table, so the handle still removes it."""

    def __init__(self, hook: PostHook) -> None:
        self.hook = hook

    @uncompiled_hook
    def __call__(self, parameter: nn.Parameter) -> None:
        if not any(owner.is_synchronizing for owner in _owners(parameter)):
            self.hook(parameter)


class UserGradHooks:
    """The user's hooks on the parameters of one module; deferred while a wrapper with the parameter synchronizes.

    With ``at_once`` they are called when this rank's gradient was accumulated, before the library's hooks take it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, at_once: bool = False) -> None:
        self._at_once = at_once
        with without_torch_function():  # so that parameters that are being gathered are not waited for
            tables = [post_accumulate_hooks(parameter) for parameter in parameters]
            is_frozen = [not parameter.requires_grad for parameter in parameters]
        # A parameter without a table needs no gradient. When that changes, the wrapper makes a new UserGradHooks.
        self._parameters = parameters
        self._tables = [(i, parameters[i], table) for i, table in enumerate(tables) if table is not None]
        self.tables: list[Sized] = [*(table for _, _, table in self._tables), ()]
        self.bare = [int(not is_frozen[i]) for i, _, _ in self._tables]  # their lengths with the library's hooks alone
        self.bare.append(-1)  # the last table is in_backward_table()
        self._hooked: list[tuple[int, nn.Parameter]] = []
        self._optimized: list[tuple[int, nn.Parameter]] = []
        self.exist = False
        """Whether :meth:`run` has anything to call."""
        self.defer()
        self.bare[-1] = -1  # torch, too, looks again in the first forward

    def defer(self, *, is_apart: bool = False) -> None:
        """Defer the hooks that were registered, and take the optimizers that were attached, since the last call.

        Raises UnusableError for such optimizers if backwards are not synchronized (``is_apart``).
        """
        if not self.exist and list(map(len, self.tables)) == self.bare:
            return
        # torch's _apply_optimizer_in_backward leaves these optimizers to the wrapper
        self._optimized = [(i, one) for i, one in enumerate(self._parameters) if in_backward_optimizers(one)]
        for _, parameter in self._optimized:
            remove_in_backward_hooks(parameter)
        self.tables[-1] = in_backward_table()
        self.bare[-1] = len(self.tables[-1])
        self._hooked.clear()
        for i, parameter, table in self._tables:
            users = [(key, hook) for key, hook in table.items() if _owner_of(hook) is None]
            if self._at_once:
                for key in [key for key, hook in table.items() if users and _owner_of(hook) is not None]:
                    table[key] = table.pop(key)  # behind the user's hooks
                continue
            if users:
                self._hooked.append((i, parameter))
            for key, hook in users:
                if not isinstance(hook, _DeferredHook):
                    table[key] = _DeferredHook(hook)
        self.exist = bool(self._hooked or self._optimized)
        if is_apart:
            refuse_in_backward(parameter for _, parameter in self._optimized)

    @torch.no_grad()  # as autograd calls them
    def run(self, averaged: bytes, turn: Turn | None) -> None:
        """Call the hooks of the parameters in ``averaged``: one byte a parameter, whether its average is in ``.grad``.

        ``turn`` has the parameters whose hooks another wrapper has called already.
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


def refuse_in_backward(parameters: Iterable[nn.Parameter]) -> None:
    """Raise UnusableError if torch's ``_apply_optimizer_in_backward`` has attached an optimizer to one of these."""
    if any(map(in_backward_optimizers, parameters)):
        raise UnusableError(
            "LocalSGD, DiLoCo and train_apart() do not step optimizers of torch's _apply_optimizer_in_backward, "
            "which step where a backward is averaged: give the parameters to an optimizer of your own"
        )


def _owner_of(hook: Any) -> weakref.ref[Owner] | None:
    """The owner of a hook of the library; None for a user's hook."""
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
    assert table is not None, "the library has a hook on it"
    return table


logger = logging.getLogger("ppe_ddp")

_STATUS_BITS = 2
_MODULUS = 1 << (8 - _STATUS_BITS)
_MOST_OUTPUTS = 64  # that will_be_reached() looks at


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
        """Call ``on_backward`` when a backward reaches any of ``outputs``, the tensors of one forward.

        Args:
            outputs: The tensors; those without a graph are skipped.
            on_backward: Called for each gradient of an output.
            counts: Whether the forward counts as dropped if no backward reaches it.
        """
        hook = None
        for output in outputs:
            if output.grad_fn is not None:
                if hook is None:
                    self._count += 1
                    # A checkpoint that recomputes a forward in backward does not use its outputs.
                    is_repeated = not counts or is_in_backward()
                    hook = _OutputHook(self, self._count, on_backward, is_reached=is_repeated)
                register_first_hook(output, hook)  # before the model's own hooks, which may raise
                self._outputs.append(weakref.ref(output))

    def will_be_reached(self) -> bool:
        """Whether the running backward will reach an output of a recent forward that is still alive."""
        nodes = (output.grad_fn for reference in self._outputs if (output := reference()) is not None)
        return any(node is not None and self._is_executed(node) for node in nodes)

    def count_dropped(self) -> int:
        """The number of dropped forwards so far; called once by each synchronization."""
        self._dropped += self._recent
        self._recent = 0
        return self._dropped

    def excuse(self, *, dropped: bool) -> None:
        """Do not count the forwards so far if no backward reaches them, as this step fails or has no backward.

        Those dropped already count all the same, as they are of earlier steps, unless ``dropped`` excuses them, too.
        """
        self._excused = self._count
        if dropped:
            self._recent = 0

    def _drop(self, number: int) -> None:
        if number > self._excused:
            self._recent += 1


class _OutputHook:
    """A hook on the outputs of one forward; lives as long as the outputs or their graph."""

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
        if not getattr(self, "_is_reached", True):  # True if an interrupt has ended __init__()
            self._forwards._drop(self._number)


class DroppedForwards:
    """Compares the ranks' numbers of dropped forwards at each synchronization, and warns once if they differ."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._has_differed = False
        self._has_warned = False
        self._base: Sequence[int] | None = None  # the counts from which ranks are compared; None for no dropped forward

    def unpack(self, extra: bytes, agreement: Agreement | None = None) -> bytes:
        """Unpack the bytes of :func:`pack_status`, one a rank, and warn once if the counts differ twice in a row.

        They are compared anew when all ranks contribute again, by the ``agreement`` on masks if there is one: a rank
        that has run out of batches drops no forwards.

        Returns:
            The statuses.
        """
        if not extra or max(extra) < 1 << _STATUS_BITS:
            self._has_differed = False
            return extra
        counts = [byte >> _STATUS_BITS for byte in extra]
        if agreement is not None and not all(agreement.statuses):
            self._base = counts
        base = self._base or [0] * len(counts)
        since = [(count - before) % _MODULUS for count, before in zip(counts, base, strict=True)]
        differ = min(since) != max(since)
        # One difference is not enough: the garbage collector frees a graph in a reference cycle, and it runs at another
        # time on each rank.
        if differ and self._has_differed and not self._has_warned:
            self._has_warned = True
            logger.warning(_warning(self._rank, since))
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
