"""Completes synchronizations: several in one backward without a deadlock, and in turns if they share parameters.

Two wrappers in one backward may come to its end in different states on different ranks: one rank has the buckets of the
first wrapper in flight, another rank those of the second. If each rank waited for one wrapper before it launched the
buckets of the other, both would wait for ever. So the completion of a synchronization is a generator. It yields before
it waits, and the loop that drives it meanwhile advances the other wrappers.

    one wrapper        runs straight through; every wait is the transport's own
    several wrappers   each advances as soon as its message has arrived; those that share parameters take turns

A gradient lies in one place, its ``.grad``, and a synchronization averages whatever is there. So wrappers that share
parameters (one module wrapped twice, or one tensor inside two wrapped modules) average one after another. Each averages
what the one before has left; a gradient that is the same on all ranks stays as it is. The order must be the same on
every rank, whatever the order of forwards was. Hence these wrappers send their masks after backward, and each mask says
which wrappers this rank ends together:

    gradient arrives    It belongs to the wrappers whose outputs backward has passed. If it has passed none, it belongs
                        to those used since they last synchronized, else to the wrapper made last.
    end of backward     All masks are sent. Only one wrapper claims a gradient that several have.
    mask arrives        The wrapper waits for those before it, in the order of names, that every rank ends with it.
    its turn            It launches its buckets and hands over the averages. Then the next one begins.

A rank that ends one of these wrappers by itself waits for that wrapper alone, so the other ranks let it go first. A
rank that does not have the other wrapper, which is over other ranks, agrees to any order.

Two further kinds of wrappers take turns in the same way. Hooks of torch's kind that communicate in one group of the
user's must start their collectives in one order on all ranks. Functions that block must be called in one order, too,
and so do wrappers that connect again after a failure, beside such functions.
"""

from __future__ import annotations

import enum
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar
from zlib import crc32

import torch
from torch import nn

from ppe_ddp.engine.failures import LOOK_SECONDS, reason_of
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.module import ModuleState
from ppe_ddp.errors import CommunicationError, PeerAbortedError, UnusableError
from ppe_ddp.torch_internals import at_end_of_backward, uncompiled_hook
from ppe_ddp.waiting import Probe, paced, progress_engine

T = TypeVar("T")

# The slot of a wrapper follows from its number in its group and the name of that. Groups made one after another have
# different slots, for three wrappers each. If ranks end different wrappers of one slot, all ranks treat these as apart.
_SLOTS, _STRIDE = 16, 3
TOGETHER = bytes(2 * _SLOTS)
"""The field ``apart`` of a silent rank without a backward: it gives and takes nothing, and agrees to any order."""


class Owner(Protocol):
    """The object that hooks call when a gradient has been accumulated: the reducer of a wrapper."""

    @property
    def shared(self) -> SharedParameters:
        """The parameters that it shares with other wrappers."""
        ...

    @property
    def is_synchronizing(self) -> bool:
        """Whether a gradient that arrives now is this rank's own, to be averaged or of a step that has failed."""
        ...

    def remove_hooks(self) -> None:
        """Remove its hooks from the parameters."""
        ...


class SharedParameters:
    """The other wrappers that share parameters with one wrapper, or must not communicate at the same time.

    An ``exclusive`` wrapper takes gradients out of ``.grad``, so no other wrapper can share its parameters. ``turns``
    returns the names of places where only one wrapper may communicate at a time.
    """

    _all: ClassVar[weakref.WeakSet[SharedParameters]] = weakref.WeakSet()
    _numbers: ClassVar[Iterator[int]] = itertools.count()
    _with_places: ClassVar[weakref.WeakSet[SharedParameters]] = weakref.WeakSet()
    apart: ClassVar[bytes] = TOGETHER
    """The field ``apart`` of a synchronization that this rank ends by itself: the slots of all its wrappers."""

    def __init__(self, groups: Groups, *, exclusive: bool, turns: Callable[[], frozenset[str]] = frozenset) -> None:
        self.groups, self._exclusive, self._turns = groups, exclusive, turns
        self._lost = ""  # the name of a parameter that another wrapper has taken over
        self.index: dict[int, int] = {}  # from the identity of each parameter of this wrapper to its index
        # Returns None unless a backward is running that has passed outputs of this wrapper, also in no_sync().
        self.end_callback: Callable[[], object] = lambda: None
        self._others: weakref.WeakSet[SharedParameters] = weakref.WeakSet()
        # The parameters in common with each other wrapper, if both have listed all of them as frozen.
        self._frozen: weakref.WeakKeyDictionary[SharedParameters, list[nn.Parameter]] = weakref.WeakKeyDictionary()
        self._all.add(self)
        slots = bytearray(TOGETHER)
        for one in list(self._all):
            slots[2 * one.slot : 2 * one.slot + 2] = b"\xff\xff"
        SharedParameters.apart = bytes(slots)
        self._number = next(self._numbers)
        self._is_used = False
        self.places: frozenset[str] = frozenset()  # the last result of ``turns``

    @property
    def slot(self) -> int:
        """The place of this wrapper in the field ``apart``, the same on every rank that has it."""
        name = self.groups.parent.group_name
        place = int(name) if name.isdecimal() else crc32(name.encode())  # torch numbers the groups of a job
        return (_STRIDE * place + self.groups.number) % _SLOTS

    def take_turns(self) -> None:
        """Take turns from now on with all wrappers that name one of the same places."""
        self.places = self._turns()
        if self.places:
            self._with_places.add(self)

    def share(self, module_state: ModuleState, owners: Iterable[Owner]) -> None:
        """Take the parameters of ``module_state``, and share them with the ``owners``, which have some of them.

        If one of both wrappers is exclusive, this one takes the parameters over, and the owner's hooks are removed.
        """
        self.leave()
        self.index = {id(parameter): i for i, parameter in enumerate(module_state.parameters)}
        for owner in owners:
            other = owner.shared
            if self._exclusive or other._exclusive:
                first = min(self.index[identity] for identity in self.index.keys() & other.index.keys())
                other._lost = module_state.names[first]
                owner.remove_hooks()
            else:
                self._others.add(other)
                other._others.add(self)
        for other in list(self._all) if not self._exclusive else ():
            common = [module_state.parameters[self.index[one]] for one in self.index.keys() & other.index.keys()]
            if not common or other is self or other._exclusive or other in self._others:
                continue
            if any(one.requires_grad for one in common):  # the other one has listed them as frozen
                self._others.add(other)
                other._others.add(self)
            else:
                self._frozen[other] = other._frozen[self] = common

    def check(self) -> None:
        """Raise :class:`UnusableError` if another wrapper has taken over some of the parameters."""
        if self._lost:
            raise UnusableError(
                f"rank {self.groups.rank}: parameter {self._lost!r} was wrapped again since, and a wrapper that keeps "
                "gradients in buffers of its own (ppe_ddp.megatron) can share it with no other: use the wrapper that "
                "was made last, on all ranks"
            )

    def leave(self) -> None:
        """Give up all parameters, and share them with no other wrapper."""
        for other in self._others:
            other._others.discard(self)
        for other in list(self._frozen):
            other._frozen.pop(self, None)
        self._others.clear()
        self._frozen.clear()
        self.index = {}

    def use(self) -> None:
        """Note that a forward of this wrapper begins."""
        self._is_used = True

    def pass_by(self, record: Callable[[], None] | None) -> None:
        """Note that a backward in ``no_sync()`` passes outputs of this wrapper; at its end it calls ``record``."""
        if self.end_callback() is None and (record is not None or self._others or self._frozen):
            end: Callable[[], Any] = partial(record or bool)
            at_end_of_backward(end)  # an interrupt's traceback may keep it alive, so it is not known before
            self.end_callback = weakref.ref(end)

    def is_for_another(self, parameter: nn.Parameter) -> bool:
        """Whether a gradient that has arrived for ``parameter`` belongs to another wrapper's backward."""
        if not (self._others or self._frozen) or self.end_callback() is not None:
            return False
        others = [other for other in (*self._others, *self._frozen) if id(parameter) in other.index]
        if any(other.end_callback() is not None for other in others):
            return True
        if self._is_used:
            return False
        return any(other._is_used or other._number > self._number for other in others)

    def turn(self, *, is_manual: bool = False) -> Turn | None:
        """The turn of a synchronization that begins now, by a call if it ``is_manual``; None if it shares nothing.

        Raises:
            UnusableError: As :meth:`check`.
        """
        if self._lost:
            self.check()
        if self.places or self.groups.is_closed:  # a function may have shown that it does not block
            self.take_turns()
            for other in [one for one in list(self._all) if one is not self and one.groups.is_closed]:
                other.take_turns()
        if self._others or (self.places and any(map(self.goes_apart_from, list(self._with_places)))):
            return Turn(self)
        # Other ranks may not have frozen it, and take turns: if this one ended both wrappers without, two of the others
        # could begin with different ones. A gradient that is still here, or that the other wrapper brings, is averaged.
        for other, common in list(self._frozen.items()):
            if is_manual or other._is_used or any(one.requires_grad or one.grad is not None for one in common):
                return Turn(self)
        self._is_used = False
        return None

    def settle(self) -> None:
        """Note that a synchronization of this wrapper is over."""
        self._is_used = False

    def takes(self, parameters: Sequence[nn.Parameter], takes: Callable[[int], bool], index: int) -> bool:
        """Whether this wrapper ``takes`` a parameter that is thawed later, and no exclusive one has it."""
        exclusive = (one for one in list(self._all) if one is not self and one._exclusive)
        return takes(index) and not any(id(parameters[index]) in one.index for one in exclusive)

    def has_alone(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether some of ``parameters``, all of this wrapper, belong to no other wrapper."""
        there = {identity for other in (*self._others, *self._frozen) for identity in other.index}
        return not self._lost and any(id(parameter) not in there for parameter in parameters)

    def goes_apart_from(self, other: SharedParameters) -> bool:
        """Whether both wrappers must not synchronize at the same time: they share a parameter or a place."""
        shares = other in self._others or other in self._frozen
        return shares or (other is not self and not self.places.isdisjoint(other.places))


class _State(enum.Enum):
    """The state of a turn."""

    HELD = enum.auto()
    """Nothing may be sent before it is known which wrappers end together with this one."""
    ASKED = enum.auto()
    """The mask is in flight."""
    BEHIND = enum.auto()
    """Other wrappers go first."""
    SENDING = enum.auto()
    """It communicates; the wrappers that share parameters with it do not."""
    OVER = enum.auto()
    """It has ended or failed."""


class Turn:
    """The place of one synchronization in the order of those that share parameters or places with it."""

    def __init__(self, shared: SharedParameters) -> None:
        self._shared = shared
        self._state = _State.HELD
        self._sharers: list[Turn] = []
        self._before: list[Turn] = []
        self._ahead: list[Turn] = []
        self._together: list[Turn] = []  # those of the sharers that every rank ends together with it
        self._claimed = b""
        self._digest = 0
        # Both sets have identities of parameters, and are common to all turns that end together.
        self.called: set[int] = set()  # parameters whose hooks of the user's were called
        self.averaged: set[int] = set()  # parameters whose averages are in ``.grad``

    @property
    def is_held(self) -> bool:
        """Whether nothing may be sent yet."""
        return self._state is _State.HELD

    def is_complete_in(self, turns: Iterable[Turn]) -> bool:
        """Whether each wrapper that goes apart from this one, and may end with it, has its turn in ``turns``."""
        own, there = self._shared, {turn._shared for turn in turns}
        there.update(other for other in list(own._frozen) if not other._is_used)
        return all(other in there for other in list(SharedParameters._all) if own.goes_apart_from(other))

    @property
    def is_behind(self) -> bool:
        """Whether it waits for another wrapper of this rank, not for other ranks."""
        return self._state is _State.BEHIND

    @property
    def apart(self) -> bytes:
        """Two bytes a slot: a digest of the wrappers that this rank ends together with it, and its complement.

        A slot has the highest bytes if this rank has a wrapper there that it does not end now. The maxima over all
        ranks equal this rank's own bytes only if every rank that has wrappers of that slot ends the same ones.
        """
        digests: dict[int, int] = {}
        for sharer in self._sharers:
            slot = sharer._shared.slot
            digests[slot] = digests.get(slot, 0) ^ sharer._digest
        slots = bytearray(SharedParameters.apart)
        for slot, digest in digests.items():
            slots[2 * slot : 2 * slot + 2] = digest, 255 - digest
        return bytes(slots)

    def claim(self, local: bytes) -> bytes:
        """Clear in ``local`` (one byte a parameter) what an earlier turn averages over the same ranks; returns it."""
        rest = bytearray(local)
        for identity, i in self._shared.index.items():
            if rest[i] and any(other._claims(identity, self._shared.groups) for other in self._before):
                rest[i] = 0
        self._claimed = bytes(rest)
        return self._claimed

    def _claims(self, identity: int, groups: Groups) -> bool:
        if self._shared.groups.parent is not groups.parent:
            return False
        i = self._shared.index.get(identity)
        if i is None or not self._claimed:  # it has sent no mask yet as it renews its connections, and will claim them
            return i is not None and self._state is _State.ASKED
        return bool(self._claimed[i])

    def agree(self, apart: bytes, *, is_weighed: bool = False) -> None:
        """Take the maximum of :attr:`apart` over all ranks, which tells whom to wait for."""
        if is_weighed:
            self.check_weighed()
        own = self.apart
        places = [(other, 2 * other._shared.slot) for other in self._sharers]
        self._together = [other for other, k in places if apart[k : k + 2] == own[k : k + 2]]
        self._ahead = [other for other in self._before if other in self._together]

    def check_weighed(self) -> None:
        """Raise :class:`UnusableError` if another wrapper averages some of the parameters over other ranks."""
        own = self._shared
        others = [other._shared.groups for other in self._sharers if other._shared in own._others]
        if any(other.parent is not own.groups.parent for other in others):
            raise UnusableError(
                f"rank {own.groups.rank}: with weigh(), wrappers in one backward that share parameters need one group "
                "of ranks, as the second one would weigh the averages of the first: wrap these parameters once"
            )

    def wait(self) -> Generator[Callable[[], bool], None, None]:
        """Wait for the turn, as steps."""
        while not self._has_come():
            self._state = _State.BEHIND
            yield self._has_come
        self._state = _State.SENDING

    def _has_come(self) -> bool:
        if any(other._state is _State.SENDING for other in self._sharers):
            return False
        if any(other._state is _State.ASKED and other._shared.groups.is_closed for other in self._together):
            return False  # it connects again on all ranks, some of which may block there already
        return all(other._state is _State.OVER for other in self._ahead)

    def end(self) -> None:
        """Let the next turn begin."""
        self._state = _State.OVER
        self._shared.settle()
        self._sharers, self._together, self._before, self._ahead = [], [], [], []  # else turns refer to one another

    def _shares_with(self, other: Turn) -> bool:
        return self._shared.goes_apart_from(other._shared)

    def _follow(self, before: Sequence[Turn], after: Sequence[Turn], first: Turn) -> None:
        groups = self._shared.groups
        step = 1 if groups.is_closed else groups.step + 1
        name = groups.parent.group_name
        self._digest = crc32(f"{name} {groups.number} {step}".encode()) & 0xFF
        self._before = [other for other in before if self._shares_with(other)]
        self._sharers = [*self._before, *(other for other in after if self._shares_with(other))]
        self._state = _State.ASKED
        self.called, self.averaged = first.called, first.averaged


def arrange(turns: Iterable[Turn], held: Iterable[Turn]) -> list[Turn]:
    """Put ``turns``, which end now, into an order that is the same on every rank. ``held`` are others that have begun.

    Returns them with those that share parameters with them, directly or through others: these have to end now, too.
    Some may have been arranged before.
    """
    ending = list(turns)
    joined = [turn for turn in ending if turn.is_held]
    waiting = [turn for turn in held if turn.is_held]
    for turn in joined:  # grows
        joined += [other for other in waiting if other not in joined and turn._shares_with(other)]
    ordered = sorted(joined, key=lambda turn: in_order(turn._shared.groups))
    for k, turn in enumerate(ordered):
        turn._follow(ordered[:k], ordered[k + 1 :], ordered[0])
    for turn in ending:  # grows
        ending += [other for other in turn._sharers if other not in ending]
    return ending


def in_order(groups: Groups) -> tuple[int, str]:
    """A sort key for groups: by the order in which they were made, with "10" after "9"."""
    return len(groups.name), groups.name


Steps = Generator[Probe | None, None, None]
"""Yields a probe that tells whether the next step can run without waiting; None if only a wait can tell. A generator
that is resumed earlier waits."""
ResultSteps = Generator[Probe | None, None, T]
"""Steps that return a result."""

_NAP = 50e-6  # seconds; a thread of the transport, or another rank, may need this core
_ENDING_SECONDS = 1.0


def ends_soon(done: Probe) -> bool:
    """Wait up to a second for ``done``; False if time is over. After a failure, messages may never arrive."""
    try:
        return progress_engine(os.getpid()).wait_until(done, seconds=_ENDING_SECONDS, nap=_NAP)
    except RuntimeError:
        return True  # the user already gets another error


def run(steps: Steps) -> None:
    """Run all steps to their end; each waits by itself."""
    # No loop variable: the traceback of an error would hold the probe, which holds its Work and so the connection.
    deque(steps, maxlen=0)


class Completion:
    """The rest of one synchronization, driven step by step.

    Args:
        steps: The steps; run in ``torch.no_grad()`` and under ``lock``, by one thread.
        groups: The groups in which the synchronization communicates.
        lock: Held while a step runs, not between steps; None makes a new one.
        then: Called by :meth:`conclude` after success, without the lock.
        turn: The turn of the synchronization, if it shares parameters with others.
        note_failure: Called if this completion, or another one of the same backward or step, has failed.
    """

    _open: ClassVar[weakref.WeakValueDictionary[int, Completion]] = weakref.WeakValueDictionary()
    # Autograd calls back on the thread that has ended the backward: for a GPU one of its own.
    _threads: ClassVar[_Thread]

    def __init__(
        self,
        steps: Steps,
        groups: Groups,
        lock: threading.RLock | None = None,
        then: Callable[[], None] | None = None,
        turn: Turn | None = None,
        note_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._steps = steps
        self._lock = lock or threading.RLock()
        self._then = then
        self.note_failure = note_failure
        self.turn = turn
        self._probe: Probe | None = _always
        self._running_on: int | None = None  # the thread that runs a step
        self.groups = groups
        self.is_over = False  # with or without an error
        self._error: BaseException | None = None

    def keep_open(self) -> None:
        """Let every :func:`finish` of this process advance it, until it is over."""
        self._open[id(self)] = self

    def finish(self) -> None:
        """Run it to its end, and conclude it."""
        finish([self])
        self.conclude()

    def conclude(self) -> None:
        """Raise its error, or call ``then``; called when it is over."""
        error, self._error = self._error, None
        if error is None:
            if self._then is not None:
                self._then()
            return
        try:
            raise error
        finally:
            del error  # a reference cycle: its traceback holds this frame

    def finish_at_end_of_backward(self) -> None:
        """Finish and conclude it at the end of this thread's backward, together with all that are queued by then."""
        last = None if self._threads.last is None else self._threads.last()
        if last is None:
            last = _AfterCallbacks(_finish_all, [])
            at_end_of_backward(last)  # an interrupt's traceback may keep it alive, so it is not known before
            self._threads.last = weakref.ref(last)
        waiting: list[Completion] = last.args[0]
        del last  # nor may a traceback keep it afterwards
        waiting.append(self)

    def advance(self, *, to_end: bool = False, error: BaseException | None = None) -> None:
        """Run the next step, or all steps ``to_end``; a step whose message has not arrived waits for it.

        ``error`` is raised inside the steps, at the place where they wait.
        """
        with self._lock, torch.no_grad():
            self._running_on = threading.get_ident()
            try:
                if not to_end:
                    self._probe = next(self._steps) if error is None else self._steps.throw(error)
                    return
                run(self._steps)
                self.is_over = True
            except StopIteration:
                self.is_over = True
            except BaseException as raised:
                self.is_over = True
                if not isinstance(raised, Exception):  # KeyboardInterrupt: nothing else is worth finishing
                    rank, reason = self.groups.rank, reason_of(raised)
                    self._error = PeerAbortedError(f"rank {rank}: this step has failed here already: {reason}")
                    raise
                self._error = raised
            finally:
                self._running_on = None
                if self.is_over:
                    self._probe = _always  # a probe holds its Work, and so the connection
                    if self.turn is not None:
                        self.turn.end()

    def advance_if_free(self) -> None:
        """As :meth:`advance`; does nothing if another thread drives it, as that one may wait for a message."""
        if self._lock.acquire(blocking=False):
            try:
                if not self.is_over and self._running_on is None:
                    self.advance()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Abandon it; the steps get a GeneratorExit."""
        self.is_over = True
        if self.turn is not None:
            self.turn.end()
        with self._lock, torch.no_grad():
            self._steps.close()

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with an error that :meth:`conclude` has not raised yet."""
        return self._error is not None

    @property
    def is_ready(self) -> bool:
        """Whether the next step can run without waiting; False while a step runs, on this thread or another one."""
        try:
            return self._running_on is None and self._probe is not None and bool(self._probe())
        except Exception:
            return True  # the step raises the error itself


class _Thread(threading.local):
    """The callback of the backward that ends on one thread."""

    def __init__(self) -> None:
        self.last: weakref.ref[_AfterCallbacks] | None = None


Completion._threads = _Thread()


class _AfterCallbacks(partial[None]):
    """A callback that the first completion of a backward queues, so that it runs after all callbacks queued before.

    It calls :func:`_finish_all`, with the list of completions; no traceback of an interrupt has this object.
    """


@uncompiled_hook
def _finish_all(completions: list[Completion]) -> None:
    Completion._threads.last = None  # a backward inside one of the steps queues a callback of its own
    try:
        finish_and_conclude(completions)
    except BaseException:
        for completion in completions:
            completion.note_failure()
        note_failure_of_open()
        raise


def _everyone_open() -> list[Completion]:
    # valuerefs() copies in one step: another thread may open one meanwhile.
    return [one for reference in Completion._open.valuerefs() if (one := reference()) is not None]


def note_failure_of_open() -> None:
    """Note in all open completions that another wrapper has failed in their step."""
    for completion in _everyone_open():
        if not completion.is_over:  # one that is over may be of an earlier step, and is kept by its error's traceback
            completion.note_failure()


def finish(completions: Sequence[Completion]) -> None:
    """Drive these to their ends, none waiting for another; each keeps its error for :meth:`Completion.conclude`.

    Open completions that share parameters with them end, too.
    """
    here = threading.get_ident()  # a step of one may run this
    others = [one for one in _everyone_open() if not (one.is_over or one._running_on == here or one in completions)]
    held = _turns_of(others)
    joined = arrange(_turns_of(completions), held)
    arrange(_complete_sets(turn for turn in held if turn.is_held), ())  # other ranks may end these now
    completions = [*completions, *(other for other in others if other.turn in joined)]
    others = [other for other in others if other.turn is None or not (other.turn in joined or other.turn.is_held)]
    if others or completions[1:]:
        _poll(completions, others)
    elif completions and not completions[0].is_over:
        completions[0].advance(to_end=True)
    for completion in completions:
        Completion._open.pop(id(completion), None)


def _turns_of(completions: Iterable[Completion]) -> list[Turn]:
    return [one.turn for one in completions if one.turn is not None]


def _complete_sets(held: Iterable[Turn]) -> list[Turn]:
    """Those of ``held`` whose sharers, and the sharers of these, are all in it: none that shares can begin later."""
    turns = list(held)
    while left := [turn for turn in turns if not turn.is_complete_in(turns)]:
        turns = [turn for turn in turns if turn not in left]
    return turns


def finish_and_conclude(completions: Sequence[Completion]) -> None:
    """Drive these to their ends, and conclude each, even after an error; one error is raised."""
    if len(completions) == 1 and not Completion._open and completions[0].turn is None:
        completions[0].advance(to_end=True)  # the usual case
        completions[0].conclude()
        return
    try:
        finish(completions)
    except BaseException:  # the other ranks conclude those that are complete
        conclude([one for one in completions if one.is_over and not one.has_failed])
        raise
    conclude(completions)


def conclude(completions: Sequence[Completion]) -> None:
    """Conclude each, even after an error; one error is raised."""
    with ExitStack() as stack:
        for completion in completions:
            stack.callback(completion.conclude)


def _poll(completions: Sequence[Completion], others: Sequence[Completion]) -> None:
    # Sorted, so that every rank makes the same choice among several that are ready.
    waiting = sorted([*completions, *others], key=lambda completion: in_order(completion.groups))
    seconds = max(completion.groups.timeout_seconds for completion in waiting)
    late: CommunicationError | PeerAbortedError | None = None
    try:
        while not all(completion.is_over for completion in completions):
            waiting = [completion for completion in waiting if not completion.is_over]
            left = [one for one in waiting if one in completions and not (one.turn and one.turn.is_behind)]
            ready = _await_any(waiting, left, 0.0 if late else seconds)
            for completion in ready:
                (completion.advance_if_free if completion in others else completion.advance)()
            if left and not ready:  # from now on the timeout is 0: each further wrapper would wait it out once more
                late = _late_error(left[0].groups, seconds) if late is None else _copy_of(late)
                left[0].advance(error=late)
    except BaseException as error:
        for completion in completions:
            if not completion.is_over:
                with suppress(BaseException):  # the error itself, which tells the other ranks
                    completion.advance(error=error)
        raise


def _await_any(waiting: Sequence[Completion], left: Sequence[Completion], seconds: float) -> list[Completion]:
    """Wait until some completions can advance, and return them; returns none after ``seconds``.

    A completion can advance if its message has arrived or failed, or if it has no probe and must wait by itself.
    ``waiting`` are all that are not over. ``left`` are those that have to end now and whose turn it is.
    """
    found: list[Completion] = []

    def look_for_failures() -> bool:
        failed = [completion for completion in waiting if completion.groups.has_failed]  # their next step raises
        found[:] = [completion for completion in failed if completion._running_on is None]
        return bool(found)

    has_failed = paced(look_for_failures, LOOK_SECONDS, at_once=False)

    def arrived() -> bool:
        found[:] = [completion for completion in waiting if completion.is_ready]
        if not found:
            found[:] = [completion for completion in left if completion._probe is None][:1]  # the step waits by itself
        return bool(found) or has_failed()

    progress_engine(os.getpid()).wait_until(arrived, seconds=seconds, nap=_NAP)
    return found


def _late_error(groups: Groups, seconds: float) -> CommunicationError | PeerAbortedError:
    """The error after the timeout; it names the ranks that have not come to ``groups``."""
    what = f"several wrappers in one backward: none has moved for the group's timeout of {seconds:g} s"
    return groups.explained(CommunicationError("nothing has come"), what)


def _copy_of(error: CommunicationError | PeerAbortedError) -> CommunicationError:
    """Copy ``error`` for another wrapper of the same backward: finding the ranks again would take half a second."""
    again = CommunicationError(*error.args)
    again.__dict__.update({"ranks": (), **error.__dict__})
    return again


def _always() -> bool:
    return True
