"""Progress engine: advances collectives and messages that move only while this process calls in.

One for each process, since a rank that waits in one group has to serve the ranks that wait for it in another.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from mpi4py import MPI

if TYPE_CHECKING:
    from collections.abc import Callable

_SPINS = 64  # between looks at the clock and at MPI
_SPIN_SECONDS = 0.005  # before the core is given away ...
_CROWDED_SECONDS = 0.0001  # ... where there are more ranks than cores
_NAP_SECONDS = 50e-6


class Advancing(Protocol):
    """A group that is registered with the engine."""

    def advance(self) -> bool:
        """Do what can be done without waiting; whether nothing is left to do or to wait for."""
        ...


class ProgressEngine:
    """Advances what this process has begun and not ended, on all its groups."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held while anything is advanced."""
        self._fence = threading.Lock()
        self._groups: list[Advancing] = []
        self._is_advancing = False
        self._kept: list[tuple[MPI.Request, Any]] = []
        is_crowded = MPI.COMM_WORLD.Get_size() > len(os.sched_getaffinity(0))
        self._patience = _CROWDED_SECONDS if is_crowded else _SPIN_SECONDS

    def add(self, group: Advancing) -> None:
        """Advance ``group`` in every call until it has nothing left to do."""
        with self.lock:
            if group not in self._groups:
                self._groups.append(group)

    def keep(self, request: MPI.Request, memory: Any) -> None:
        """Keep memory alive that MPI still reads or writes, though nobody waits for the request any more."""
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
            try:
                self._groups = [group for group in self._groups if not group.advance()]
            finally:
                self._is_advancing = False

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to advance."""
        return not self._groups

    def wait_until(self, arrived: Callable[[], Any], look: Callable[[], None]) -> None:
        """Advance everything until ``arrived()``; also MPI's own messages, for which others may wait.

        Args:
            arrived: Whether the wait is over.
            look: Called now and then; raises what ends the wait.
        """
        start = 0.0
        for spins in itertools.count(1):
            self.progress()
            if arrived():
                return
            os.sched_yield()  # another rank may need this core to arrive
            if spins % _SPINS == 0:
                look()  # which calls MPI
                now = time.monotonic()
                start = start or now
                if now - start > self._patience:
                    time.sleep(_NAP_SECONDS)

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
