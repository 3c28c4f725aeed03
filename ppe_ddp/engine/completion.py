"""Completes synchronizations, several in one backward without a deadlock, and those that share parameters in turn.

With two wrappers in one backward, one rank may come to the end with the buckets of the first in flight and those of
the second still to be launched, and another rank the other way around. If each waited for one wrapper before it went
on with the next, both would wait for ever. So whatever completes a synchronization is a generator: it yields before
it waits, and the loop that drives it goes on meanwhile with the others.

    one alone     run straight through: every wait is the transport's own
    several       each goes on as soon as what it waits for is there; those that share parameters take turns

A gradient lies in one place, its ``.grad``, and whatever is there is averaged. So wrappers that share parameters (one
module wrapped twice, or one tensor inside two wrapped modules) average one after another, each what the one before has
left: what is the same on all ranks is its own mean. That is right only if they go in the same order on every rank,
whatever the order of their forwards was there. Hence their masks are sent when backward is over, and each says which
others this rank ends together with it:

    gradient arrives    for the wrappers through whose outputs backward has come; where it has come through none, for
                        those used since they synchronized; else for the one made last
    backward is over    all masks are sent; one wrapper alone claims a gradient that several have
    mask is there       wait for those before it, by name, that every rank ends together with it
    turn has come       launch the buckets, hand over the averages, give the turn to the next

A rank that ends one of them by itself waits for that one alone, so the others let it go first.

Wrappers whose hooks of torch's kind communicate in one group of the user's take turns in the same way, since what two
hooks start there must come in one order on all ranks; and so do those whose functions of the user's block.
"""

from __future__ import annotations

import enum
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar
from zlib import crc32

import torch

from ppe_ddp.contracts import Probe
from ppe_ddp.engine.failures import LOOK_SECONDS
from ppe_ddp.errors import CommunicationError, UnusableError
from ppe_ddp.torch_internals import at_end_of_backward, uncompiled_hook
from ppe_ddp.waiting import paced, progress_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn

    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.module import ModuleState
    from ppe_ddp.errors import PeerAbortedError

T = TypeVar("T")

# A wrapper has the slot of its number, so that wrappers made one after another have different ones. Two of one slot
# that this rank ends together, and another rank apart, are taken for apart.
_SLOTS = 16
APART = b"\xff" * 2 * _SLOTS
"""What a rank says of a synchronization that it ends by itself."""
TOGETHER = bytes(2 * _SLOTS)
"""What a rank says that gives nothing, takes nothing and keeps nobody waiting: any order suits it."""


class Owner(Protocol):
    """The object that hooks call when a gradient has been accumulated: the reducer of a wrapper."""

    @property
    def shared(self) -> SharedParameters:
        """Which parameters it shares with others."""
        ...

    @property
    def is_synchronizing(self) -> bool:
        """Whether a gradient that arrives now is only this rank's, and its average is still to come."""
        ...

    def remove_hooks(self) -> None:
        """Be told of no gradient any more."""
        ...


class SharedParameters:
    """Which other wrappers have some of the parameters of one wrapper, or are not to communicate beside it.

    Where it is ``exclusive``, no other wrapper finds gradients where this one does. ``turns`` names places where only
    one wrapper may communicate at a time.
    """

    _all: ClassVar[weakref.WeakSet[SharedParameters]] = weakref.WeakSet()
    _numbers: ClassVar[Iterator[int]] = itertools.count()
    _with_places: ClassVar[weakref.WeakSet[SharedParameters]] = weakref.WeakSet()

    def __init__(self, groups: Groups, *, exclusive: bool, turns: Callable[[], frozenset[str]] = frozenset) -> None:
        self.groups, self._exclusive, self._turns = groups, exclusive, turns
        self._lost = ""  # a parameter that another wrapper has taken over
        self.index: dict[int, int] = {}  # of each parameter of this one, by its identity
        # Returns None where no backward is running that has come through outputs of this one.
        self.end_callback: Callable[[], object] = lambda: None
        self._others: weakref.WeakSet[SharedParameters] = weakref.WeakSet()
        self._frozen: weakref.WeakKeyDictionary[SharedParameters, list[nn.Parameter]] = weakref.WeakKeyDictionary()
        self._all.add(self)
        self._number = next(self._numbers)
        self._is_used = False
        self.places: frozenset[str] = frozenset()  # what ``turns`` has given last

    def take_turns(self) -> None:
        """Take turns with all that name one of the same places, where only one may communicate at a time."""
        self.places = self._turns()
        if self.places:
            self._with_places.add(self)

    def share(self, module_state: ModuleState, owners: Iterable[Owner]) -> None:
        """From now on this one has the parameters of ``module_state``, of which each of the ``owners`` has some.

        Where they cannot be shared it takes them over, and the others listen no more.
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
        frozen = [parameter for parameter in module_state.parameters if not parameter.requires_grad]
        for other in list(self._all) if frozen and not self._exclusive else ():
            common = [parameter for parameter in frozen if id(parameter) in other.index]
            if common and not (other is self or other._exclusive):
                self._frozen[other] = other._frozen[self] = common

    def check(self) -> None:
        """Raise :class:`UnusableError` where another wrapper has taken over some of the parameters."""
        if self._lost:
            raise UnusableError(
                f"rank {self.groups.rank}: parameter {self._lost!r} was wrapped again since, and a wrapper that keeps "
                "gradients in buffers of its own (ppe_ddp.megatron) can share it with no other: use the wrapper that "
                "was made last, on all ranks"
            )

    def leave(self) -> None:
        """This one has no parameters any more."""
        for other in self._others:
            other._others.discard(self)
        for other in list(self._frozen):
            other._frozen.pop(self, None)
        self._others.clear()
        self._frozen.clear()
        self.index = {}

    def use(self) -> None:
        """A forward of this one begins, or a synchronization by hand."""
        self._is_used = True

    def is_for_another(self, parameter: nn.Parameter) -> bool:
        """Whether a gradient that has arrived is no sign of a backward of this one, but of another."""
        if not self._others or self.end_callback() is not None:
            return False
        others = [other for other in self._others if id(parameter) in other.index]
        if any(other.end_callback() is not None for other in others):
            return True
        if self._is_used:
            return False
        return any(other._is_used or other._number > self._number for other in others)

    def turn(self) -> Turn | None:
        """The turn of a synchronization that begins now; None where it shares nothing with another wrapper.

        Raises:
            UnusableError: As :meth:`check`.
        """
        if self._lost:
            self.check()
        if self.places:  # a function may have shown that it does not block
            self.take_turns()
        if self._others or (self.places and any(map(self.goes_apart_from, list(self._with_places)))):
            return Turn(self)
        # What is frozen on this rank alone takes turns on the others, and a gradient that it has kept is averaged here.
        if self._frozen and any(one.grad is not None for common in list(self._frozen.values()) for one in common):
            return Turn(self)
        self._is_used = False
        return None

    def settle(self) -> None:
        """A synchronization of this one is over."""
        self._is_used = False

    def has_alone(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether some of ``parameters``, which are this one's, no other wrapper has, nor has taken over."""
        if self._lost:
            return False
        return any(all(id(parameter) not in other.index for other in self._others) for parameter in parameters)

    def goes_apart_from(self, other: SharedParameters) -> bool:
        """Whether the two are never synchronized at the same time: they share a parameter, or a place."""
        shares = other in self._others or other in self._frozen
        return shares or (other is not self and not self.places.isdisjoint(other.places))


class _State(enum.Enum):
    """How far a turn is."""

    HELD = enum.auto()
    """Nothing may be said to the other ranks before it is known what ends together with it."""
    ASKED = enum.auto()
    """The mask is under way."""
    BEHIND = enum.auto()
    """Others go first."""
    SENDING = enum.auto()
    """It communicates; those that share parameters with it do not."""
    OVER = enum.auto()
    """It has ended, or failed."""


class Turn:
    """When one synchronization may launch buckets, among those that share parameters with it."""

    def __init__(self, shared: SharedParameters) -> None:
        self._shared = shared
        self._state = _State.HELD
        self._sharers: list[Turn] = []
        self._before: list[Turn] = []
        self._ahead: list[Turn] = []
        self._claimed = b""
        self._slot = self._digest = 0
        # The parameters whose user's hooks were called, by identity: once for all that end together.
        self.called: set[int] = set()
        self.averaged: set[int] = set()  # those whose averages are in ``.grad``, by any that ends together with it

    @property
    def is_held(self) -> bool:
        """Whether nothing may be said to the other ranks yet."""
        return self._state is _State.HELD

    @property
    def is_behind(self) -> bool:
        """Whether it waits for its turn, and not for other ranks."""
        return self._state is _State.BEHIND

    @property
    def apart(self) -> bytes:
        """Two bytes a slot: what this rank ends together with it, and the complement; the highest for nothing.

        The maxima over all ranks are this rank's own bytes only where no rank ends something else, or nothing.
        """
        digests: dict[int, int] = {}
        for sharer in self._sharers:
            digests[sharer._slot] = digests.get(sharer._slot, 0) ^ sharer._digest
        slots = bytearray(APART)
        for slot, digest in digests.items():
            slots[2 * slot : 2 * slot + 2] = digest, 255 - digest
        return bytes(slots)

    def claim(self, local: bytes) -> bytes:
        """Leave out of ``local`` (one byte a parameter) what another one before it averages over the same ranks."""
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
        if i is None or not self._claimed:  # it still connects again, and then finds the same gradients
            return i is not None and self._state is _State.ASKED
        return bool(self._claimed[i])

    def agree(self, apart: bytes) -> None:
        """The maximum over all ranks of :attr:`apart` is there."""
        own = self.apart
        same = [apart[k : k + 2] == own[k : k + 2] for k in range(0, len(own), 2)]
        self._ahead = [other for other in self._before if same[other._slot]]

    def wait(self) -> Generator[Callable[[], bool], None, None]:
        """Wait for the turn, step by step."""
        while not self._has_come():
            self._state = _State.BEHIND
            yield self._has_come
        self._state = _State.SENDING

    def _has_come(self) -> bool:
        if any(other._state is _State.SENDING for other in self._sharers):
            return False
        return all(other._state is _State.OVER for other in self._ahead)

    def end(self) -> None:
        """Let the next one go."""
        self._state = _State.OVER
        self._shared.settle()
        self._sharers, self._before, self._ahead = [], [], []  # which hold this one in turn

    def _shares_with(self, other: Turn) -> bool:
        return self._shared.goes_apart_from(other._shared)

    def _follow(self, before: Sequence[Turn], after: Sequence[Turn], first: Turn) -> None:
        groups = self._shared.groups
        step = 1 if groups.is_closed else groups.step + 1
        name = groups.parent.group_name
        self._slot = (crc32(name.encode()) + groups.number) % _SLOTS
        self._digest = crc32(f"{name} {groups.number} {step}".encode()) & 0xFF
        self._before = [other for other in before if self._shares_with(other)]
        self._sharers = [*self._before, *(other for other in after if self._shares_with(other))]
        self._state = _State.ASKED
        self.called, self.averaged = first.called, first.averaged


def arrange(turns: Iterable[Turn], held: Iterable[Turn]) -> list[Turn]:
    """Let ``turns``, which end now, end together, in an order that every rank has; ``held`` are others that have begun.

    Returns those of ``held`` that share parameters with them, directly or by others, and so have to end with them.
    """
    given = list(turns)
    joined = [turn for turn in given if turn.is_held]
    waiting = [turn for turn in held if turn.is_held]
    for turn in joined:  # grows
        joined += [other for other in waiting if other not in joined and turn._shares_with(other)]
    ordered = sorted(joined, key=lambda turn: in_order(turn._shared.groups))
    for k, turn in enumerate(ordered):
        turn._follow(ordered[:k], ordered[k + 1 :], ordered[0])
    return [turn for turn in joined if turn not in given]


def in_order(groups: Groups) -> tuple[int, str]:
    """A key that sorts groups as they were made, the tenth after the ninth."""
    return len(groups.name), groups.name


Steps = Generator[Probe | None, None, None]
"""Yields a probe of what its next step waits for (None: that cannot be asked without waiting). It may be resumed at any
time: the next step waits then."""
ResultSteps = Generator[Probe | None, None, T]
"""Steps that come to a result."""

_NAP = 50e-6  # seconds: a thread of the transport, or another rank, may need this core
_ENDING_SECONDS = 1.0


def ends_soon(is_done: Probe) -> bool:
    """Whether ``is_done`` becomes true within a second: after a failure, the other ranks' part may never come."""
    try:
        return progress_engine(os.getpid()).wait_until(is_done, seconds=_ENDING_SECONDS, nap=_NAP)
    except RuntimeError:
        return True  # another error is on its way to the user already


def run(steps: Steps) -> None:
    """Run all steps, waiting where they wait."""
    # Not by a variable: the traceback of an error would keep it, a probe keeps its Work, and that the connection.
    deque(steps, maxlen=0)


class Completion:
    """The rest of one synchronization, which is driven step by step.

    Args:
        steps: What to do; run without gradients and under ``lock``, by one thread.
        groups: Where the synchronization communicates.
        lock: Held while a step runs, not between them; None for one of its own.
        then: Called by :meth:`conclude`, outside of all that.
        turn: Of the synchronization, where it shares parameters with others.
        note_failure: Called where this, or another one of the same backward, has failed.
    """

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
        self._is_running = False
        self.groups = groups
        self.is_done = False  # whether all is done, or has failed
        self._error: BaseException | None = None

    def keep_open(self) -> None:
        """Advance it in every wait of this thread, until it is over."""
        self._threads.open.add(self)

    def finish(self) -> None:
        """Run it to its end, and conclude it."""
        finish([self])
        self.conclude()

    def conclude(self) -> None:
        """When it is over: raise its error, or call ``then``."""
        error, self._error = self._error, None
        if error is None:
            if self._then is not None:
                self._then()
            return
        try:
            raise error
        finally:
            del error  # whose traceback holds this frame

    def finish_at_end_of_backward(self) -> None:
        """Do the same at the end of this thread's backward, together with all completions that were queued by then."""
        last = None if self._threads.last is None else self._threads.last()
        if last is None:
            last = _AfterCallbacks()
            self._threads.last = weakref.ref(last)
            at_end_of_backward(last)
        last.append(self)

    def advance(self, *, to_end: bool = False, error: Exception | None = None) -> None:
        """Go on to where it has to wait next, or ``to_end``; waits first for what is not there yet.

        Where it waits, ``error`` is raised in place of the wait.
        """
        self._is_running = True
        try:
            with self._lock, torch.no_grad():
                if not to_end:
                    self._probe = next(self._steps) if error is None else self._steps.throw(error)
                    return
                run(self._steps)
            self.is_done = True
        except StopIteration:
            self.is_done = True
        except BaseException as raised:
            self.is_done = True
            if not isinstance(raised, Exception):
                raise  # KeyboardInterrupt: nothing else is worth finishing
            self._error = raised
        finally:
            self._is_running = False
            if self.is_done:
                self._probe = _always  # a probe keeps its Work, and that the connection
                if self.turn is not None:
                    self.turn.end()

    def close(self) -> None:
        """Abandon it: the steps see a GeneratorExit where they are."""
        self.is_done = True
        if self.turn is not None:
            self.turn.end()
        with self._lock, torch.no_grad():
            self._steps.close()

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with an error that :meth:`conclude` is still to raise."""
        return self._error is not None

    @property
    def is_ready(self) -> bool:
        """Whether it can go on without waiting."""
        try:
            return self._probe is not None and bool(self._probe())
        except Exception:
            return True  # its own wait says what is wrong


class _Thread(threading.local):
    """The open completions of one thread: autograd calls back in the thread that has called it."""

    def __init__(self) -> None:
        self.open: weakref.WeakSet[Completion] = weakref.WeakSet()
        self.last: weakref.ref[_AfterCallbacks] | None = None


Completion._threads = _Thread()


class _AfterCallbacks(list[Completion]):
    """Queued by the first callback at the end of a backward, so that it comes after all that were there."""

    __slots__ = ("__weakref__",)

    @uncompiled_hook
    def __call__(self) -> None:
        Completion._threads.last = None  # a backward inside one of the steps has an end of its own
        try:
            finish_and_conclude(self)
        except BaseException:
            for completion in self:
                completion.note_failure()
            raise


def finish(completions: Sequence[Completion]) -> None:
    """Drive these to their ends, each without waiting for another; their errors are left in them.

    So end those that were started before and share parameters with them.
    """
    others = [one for one in Completion._threads.open if not (one.is_done or one._is_running or one in completions)]
    joined = arrange(_turns_of(completions), _turns_of(others))
    completions = [*completions, *(other for other in others if other.turn in joined)]
    others = [other for other in others if other.turn is None or not (other.turn in joined or other.turn.is_held)]
    if others or completions[1:]:
        _poll(completions, others)
    elif completions and not completions[0].is_done:
        completions[0].advance(to_end=True)
    for completion in completions:
        Completion._threads.open.discard(completion)


def _turns_of(completions: Iterable[Completion]) -> list[Turn]:
    return [one.turn for one in completions if one.turn is not None]


def finish_and_conclude(completions: Sequence[Completion]) -> None:
    """Drive these to their ends, and conclude each, also after an error; one error comes out."""
    if len(completions) == 1 and not Completion._threads.open and completions[0].turn is None:
        completions[0].advance(to_end=True)  # as nearly always
        completions[0].conclude()
        return
    finish(completions)
    conclude(completions)


def conclude(completions: Sequence[Completion]) -> None:
    """Conclude each, also after an error; one error comes out."""
    with ExitStack() as stack:
        for completion in completions:
            stack.callback(completion.conclude)


def _poll(completions: Sequence[Completion], others: Sequence[Completion]) -> None:
    # Where there is a choice, let it be the same on every rank.
    waiting = sorted([*completions, *others], key=lambda completion: in_order(completion.groups))
    seconds = max(completion.groups.timeout_seconds for completion in waiting)
    late: CommunicationError | PeerAbortedError | None = None
    try:
        while not all(completion.is_done for completion in completions):
            waiting = [completion for completion in waiting if not completion.is_done]
            left = [one for one in waiting if one in completions and not (one.turn and one.turn.is_behind)]
            ready = _await_any(waiting, left, 0.0 if late else seconds)
            for completion in ready:
                completion.advance()
            if left and not ready:  # at once: if each waited for the whole time, the times would add up
                late = _late_error(left[0].groups, seconds) if late is None else _copy_of(late)
                left[0].advance(error=late)
    except BaseException:
        for completion in completions:
            if not completion.is_done:
                completion.close()
        raise


def _await_any(waiting: Sequence[Completion], left: Sequence[Completion], seconds: float) -> list[Completion]:
    """Wait until some can go on: what they wait for has come or failed, or cannot be asked for; none after ``seconds``.

    ``waiting`` are all that are not over; ``left`` those that are to be driven to their ends, and whose turn it is.
    """
    found: list[Completion] = []

    def look_for_failures() -> bool:
        found[:] = [completion for completion in waiting if completion.groups.has_failed]  # their waits raise
        return bool(found)

    has_failed = paced(look_for_failures, LOOK_SECONDS, at_once=False)

    def arrived() -> bool:
        found[:] = [completion for completion in waiting if completion.is_ready]
        if not found:
            found[:] = [completion for completion in left if completion._probe is None][:1]  # it waits by itself
        return bool(found) or has_failed()

    progress_engine(os.getpid()).wait_until(arrived, seconds=seconds, nap=_NAP)
    return found


def _late_error(groups: Groups, seconds: float) -> CommunicationError | PeerAbortedError:
    """What ends a wait when the time is over: names the ranks that have not come to ``groups``."""
    what = f"several wrappers in one backward: none has moved for the group's timeout of {seconds:g} s"
    return groups.explained(CommunicationError("nothing has come"), what)


def _copy_of(error: CommunicationError | PeerAbortedError) -> CommunicationError:
    """The same for another wrapper of the same backward, as it takes half a second to find the ranks."""
    again = CommunicationError(*error.args)
    again.ranks = getattr(error, "ranks", ())
    return again


def _always() -> bool:
    return True
