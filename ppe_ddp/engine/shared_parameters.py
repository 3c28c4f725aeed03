"""Parameters that several wrappers have: one module wrapped twice, or one tensor inside two wrapped modules.

A gradient lies in one place, its ``.grad``, and whatever is there is averaged. So such wrappers average one after
another, each what the one before has left: what is the same on all ranks is its own mean. That is right only if they
go in the same order on every rank, whatever the order of their forwards was there. Hence their masks are sent when
backward is over, and each says which others this rank ends together with it:

    gradient arrives    for the wrappers through whose outputs backward has come; where it has come through none, for
                        those used since they synchronized; else for the one made last
    backward is over    all masks are sent; one wrapper alone claims a gradient that several have
    mask is there       wait for those before it, by name, that every rank ends together with it
    turn has come       launch the buckets, hand over the averages, give the turn to the next

A rank that ends one of them by itself waits for that one alone, so the others let it go first.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from typing import TYPE_CHECKING, ClassVar, Protocol
from zlib import crc32

from ppe_ddp.errors import UnusableError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from torch import nn

    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.module import ModuleState

# Two wrappers of one slot are taken for one another only where the ranks end others together.
_SLOTS = 16
_STEPS = 5  # slots from one step of a wrapper to the next, so that neighbours a step apart are not mixed up
APART = bytes([1]) * _SLOTS
"""What a rank says of a synchronization that it ends by itself."""
TOGETHER = bytes(_SLOTS)
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
    """Which other wrappers have some of the parameters of one wrapper.

    Args:
        groups: Where this one communicates.
        exclusive: Whether no other wrapper finds gradients where this one does.

    Attributes:
        groups: The same.
        index: Of each parameter of this one, by its identity.
        end_callback: Returns None where no backward is running that has come through outputs of this one.
    """

    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, groups: Groups, *, exclusive: bool) -> None:
        self.groups = groups
        self._exclusive = exclusive
        self._lost = ""  # a parameter that another wrapper has taken over
        self.index: dict[int, int] = {}
        self.end_callback: Callable[[], object] = lambda: None
        self._others: weakref.WeakSet[SharedParameters] = weakref.WeakSet()
        self._number = next(self._numbers)
        self._is_used = False

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
        self._others.clear()
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

    def turn(self) -> Turn:
        """The turn of a synchronization that begins now."""
        if not self._others:
            self._is_used = False
            return Turn()
        return Turn(self)

    def settle(self) -> None:
        """A synchronization of this one is over."""
        self._is_used = False

    def has_some_of(self, other: SharedParameters) -> bool:
        """Whether the two share a parameter."""
        return other in self._others


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
    """When one synchronization may launch buckets, among those that share parameters with it.

    Args:
        shared: Of its wrapper; None where there is no other one to wait for.

    Attributes:
        called: The parameters whose user's hooks were called, by identity: once for all that end together.
    """

    def __init__(self, shared: SharedParameters | None = None) -> None:
        self._shared = shared
        self._state = _State.ASKED if shared is None else _State.HELD
        self._sharers: list[Turn] = []
        self._before: list[Turn] = []
        self._ahead: list[Turn] = []
        self._claimed = b""
        self._slot = 0
        self.called: set[int] = set()

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
        """One byte a slot: 0 for what this rank ends together with it, 1 for everything else."""
        slots = bytearray(APART)
        for sharer in self._sharers:
            slots[sharer._slot] = 0
        return bytes(slots)

    def claim(self, local: bytes) -> bytes:
        """Leave out of ``local`` (one byte a parameter) what another one before it averages over the same ranks."""
        if self._shared is None:
            return local
        rest = bytearray(local)
        for identity, i in self._shared.index.items():
            if rest[i] and any(other._claims(identity, self._shared.groups) for other in self._before):
                rest[i] = 0
        self._claimed = bytes(rest)
        return self._claimed

    def _claims(self, identity: int, groups: Groups) -> bool:
        if self._shared is None or not self._claimed or self._shared.groups.parent is not groups.parent:
            return False
        i = self._shared.index.get(identity)
        return i is not None and bool(self._claimed[i])

    def agree(self, apart: bytes) -> None:
        """The maximum over all ranks of :attr:`apart` is there."""
        self._ahead = [other for other in self._before if not apart[other._slot]]

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
        if self._shared is not None:
            self._shared.settle()
        self._sharers, self._before, self._ahead = [], [], []  # which hold this one in turn

    def _shares_with(self, other: Turn) -> bool:
        if self._shared is None or other._shared is None:
            return False
        return self._shared.has_some_of(other._shared)

    def _follow(self, before: Sequence[Turn], after: Sequence[Turn], called: set[int]) -> None:
        assert self._shared is not None
        groups = self._shared.groups
        step = 1 if groups.is_closed else groups.step + 1
        self._slot = (crc32(groups.parent.group_name.encode()) + groups.number + _STEPS * step) % _SLOTS
        self._before = [other for other in before if self._shares_with(other)]
        self._sharers = [*self._before, *(other for other in after if self._shares_with(other))]
        self._state = _State.ASKED
        self.called = called

    @property
    def _name(self) -> str:
        return "" if self._shared is None else self._shared.groups.name


def arrange(turns: Iterable[Turn], held: Iterable[Turn]) -> list[Turn]:
    """Let these end together, in an order that every rank has.

    Args:
        turns: They end now.
        held: Others that have been begun.

    Returns:
        Those of ``held`` that share parameters with them, directly or by others, and so have to end with them.
    """
    given = list(turns)
    joined = [turn for turn in given if turn.is_held]
    waiting = [turn for turn in held if turn.is_held]
    for turn in joined:  # grows
        joined += [other for other in waiting if other not in joined and turn._shares_with(other)]
    ordered = sorted(joined, key=lambda turn: turn._name)
    called: set[int] = set()
    for k, turn in enumerate(ordered):
        turn._follow(ordered[:k], ordered[k + 1 :], called)
    return [turn for turn in joined if turn not in given]
