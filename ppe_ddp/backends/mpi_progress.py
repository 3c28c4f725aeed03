"""What keeps going that nobody else keeps going: MPI and shared memory move only while somebody calls.

One for each process, since a rank that waits in one group has to serve the ranks that wait for it in another.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from mpi4py import MPI

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SPINS = 64  # between looks at the clock and at MPI
_SPIN_SECONDS = 0.005  # before the core is given away ...
_CROWDED_SECONDS = 0.0001  # ... where there are more ranks than cores
_NAP_SECONDS = 50e-6


class Advancing(Protocol):
    """Something that moves on when it is told to."""

    def advance(self) -> bool:
        """Do what can be done without waiting; whether nothing is left to do or to wait for."""
        ...


class Outstanding:
    """What this process has begun and not ended, on all its groups."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._fence = threading.Lock()
        self._groups: list[Advancing] = []
        self._tender: threading.Thread | None = None
        self._tended = 0
        self._is_needed = threading.Condition(self._lock)
        is_crowded = MPI.COMM_WORLD.Get_size() > len(os.sched_getaffinity(0))
        self._patience = _CROWDED_SECONDS if is_crowded else _SPIN_SECONDS

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self._groups)

    def add(self, group: Advancing) -> None:
        """Keep ``group`` going until it has nothing left."""
        with self._lock:
            if group not in self._groups:
                self._groups.append(group)
            if self._tended:
                self._is_needed.notify()

    def progress(self) -> None:
        """Do what can be done now, without waiting."""
        if self._groups:
            with self._lock:
                self._groups = [group for group in self._groups if not group.advance()]

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Around a call that blocks in MPI, while this thread keeps nothing going.

        The main thread first waits until nothing is outstanding. Any other (a reduce function that runs beside
        backward) must not: the main thread may begin something later and then wait for this one, as those of the other
        ranks do. Then a thread keeps things going until the call is over.
        """
        if threading.current_thread() is threading.main_thread():
            self.drain()
            yield
            return
        with self._lock:
            if self._tender is None:
                self._tender = threading.Thread(target=self._tend, name="ppe_ddp-progress", daemon=True)
                self._tender.start()
            self._tended += 1
            self._is_needed.notify()
        try:
            yield
        finally:
            with self._lock:
                self._tended -= 1

    def _tend(self) -> None:
        while True:
            with self._is_needed:
                self._is_needed.wait_for(lambda: self._tended and self._groups)
                self.progress()
            time.sleep(_NAP_SECONDS)

    def drain(self) -> None:
        """Wait until nothing is outstanding."""
        if self._groups:
            self.wait_until(lambda: not self._groups)

    def wait_until(self, arrived: Callable[[], bool]) -> None:
        """Keep everything going until ``arrived()``; also MPI's own messages, for which others may wait."""
        start = 0.0
        for spins in itertools.count(1):
            self.progress()
            if arrived():
                return
            os.sched_yield()  # another rank may need this core to arrive
            if spins % _SPINS == 0:
                MPI.COMM_WORLD.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
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
def outstanding(_pid: int) -> Outstanding:
    """That of this process."""
    return Outstanding()
