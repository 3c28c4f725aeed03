"""Progress engine: advances collectives that move only while this process calls in, whatever transport they are on.

One for each process, since a rank that waits in one group has to serve the ranks that wait for it in another.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

_SPINS = 64  # between looks at the clock and at the transport
_SPIN_SECONDS = 0.005  # before the core is given away ...
_CROWDED_SECONDS = 0.0001  # ... where there are more ranks than cores
# Of a long wait, as for a network, most is slept: the other ranks, and what moves the messages, need the core. It is
# made so much longer at most.
_NAP_PART = 1 / 32
_SHORTEST_NAP_SECONDS = 50e-6
_LONGEST_NAP_SECONDS = 0.0002  # in which no network goes idle that MPI moves in our calls


class Advancing(Protocol):
    """A group that is registered with the engine."""

    def advance(self) -> bool:
        """Do what can be done without waiting; whether nothing is left to do or to wait for."""
        ...


class Testable(Protocol):
    """What a transport has under way, such as an MPI request."""

    def Test(self) -> bool:
        """Whether it is over; moves it."""
        ...


class ProgressEngine:
    """Advances what this process has begun and not ended, on all its groups."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held while anything is advanced."""
        self._fence = threading.Lock()
        self._groups: list[Advancing] = []
        self._added: list[Advancing] = []  # while all were advanced
        self._is_advancing = False
        self.turns = 0
        """How often all was advanced."""
        self.at_begin: Callable[[], None] | None = None
        """Called when there is something to advance."""
        self._kept: list[tuple[Testable, Any]] = []
        self._patience = _SPIN_SECONDS

    def expect(self, ranks: int) -> None:
        """Give cores away sooner if so many ranks of one job are more than this node has cores."""
        if ranks > len(os.sched_getaffinity(0)):
            self._patience = _CROWDED_SECONDS

    def add(self, group: Advancing) -> None:
        """Advance ``group`` in every call until it has nothing left to do."""
        with self.lock:
            if self._is_advancing:  # one of them has begun it; whether it stays in the list is not known yet
                self._added.append(group)
            elif group not in self._groups:
                self._groups.append(group)
                if self.at_begin is not None:
                    self.at_begin()

    def keep(self, request: Testable, memory: Any) -> None:
        """Keep memory alive that a transport still reads or writes, though nobody waits for the request any more."""
        with self.lock:
            self._kept = [(one, held) for one, held in self._kept if not one.Test()]
            self._kept.append((request, memory))

    def progress(self) -> None:
        """Do what can be done now, without waiting."""
        if not self._groups:
            return
        with self.lock:
            if self._is_advancing:  # a group that is advanced has called back
                return
            self._is_advancing = True
            self.turns += 1
            try:
                self._groups = [group for group in self._groups if not group.advance()]
                while self._added:
                    if (added := self._added.pop()) not in self._groups:
                        self._groups.append(added)
            finally:
                self._is_advancing = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to advance."""
        return not self._groups

    def wait_until(self, arrived: Callable[[], Any], look: Callable[[], None]) -> None:
        """Advance everything until ``arrived()``; also what others wait for.

        Args:
            arrived: Whether the wait is over.
            look: Called now and then; lets the transport move its messages, and raises what ends the wait.
        """
        start = nap = 0.0
        for spins in itertools.count(1):
            self.progress()
            if arrived():
                return
            if nap:
                time.sleep(nap)
            else:
                os.sched_yield()  # another rank may need this core to arrive
            if nap or spins % _SPINS == 0:
                look()
                now = time.monotonic()
                start = start or now
                if now - start > self._patience:
                    nap = min(max(_SHORTEST_NAP_SECONDS, (now - start) * _NAP_PART), _LONGEST_NAP_SECONDS)

    def fence(self) -> None:
        """Let no memory access move across: a release followed by an acquire, on every processor."""
        self._fence.acquire()
        self._fence.release()
        self._fence.acquire()
        self._fence.release()


@functools.cache
def progress_engine(_pid: int) -> ProgressEngine:
    """The progress engine of this process."""
    return ProgressEngine()
