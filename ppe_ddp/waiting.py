"""The one loop that waits for other ranks, and advances all operations of this process meanwhile.

A rank that waits in one group advances operations of other groups, for which other ranks may wait. So no order of
collectives on different groups deadlocks.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from operator import methodcaller
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed import Work

from ppe_ddp.torch_internals import is_future

_T = TypeVar("_T")

_SPINS = 64  # rounds of the loop between looks at the clock
_SPIN_SECONDS = 0.005  # of yielding before the first nap ...
_CROWDED_SECONDS = 0.0001  # ... if there are more ranks than cores
# A core that another program uses comes back some milliseconds after it was yielded, but in a tenth of one after a nap,
# from which the kernel wakes a thread before those that have computed. So after a yield that took so long ...
_SLOW_YIELD_SECONDS = 0.0003
_BUSY_SECONDS = 0.5  # ... waits begin with naps, until the core is tried once more
# A long wait, as for a network, mostly sleeps: other ranks, and threads that move messages, need the core. Naps make
# the wait longer by this fraction at most.
_NAP_PART = 1 / 32
_SHORTEST_NAP_SECONDS = 50e-6
_LONGEST_NAP_SECONDS = 0.0002  # short enough that a network does not go idle if MPI moves messages only in calls
_ASK_SECONDS = 0.001
_REST = timedelta(milliseconds=50)  # after it a Work of gloo that is not done raises, which takes 80 us
_JOIN_SECONDS = 5.0


class Advancing(Protocol):
    """An object that can be registered with the progress engine."""

    def advance(self) -> bool:
        """Advance its operations without waiting; True if none is left."""


class InFlight(Protocol):
    """An operation of a transport in flight. By default only calls of :meth:`done` advance it."""

    def done(self) -> bool:
        """Whether it is done; the call also advances it. Raises RuntimeError if it has failed."""

    def block(self) -> None:
        """Give the core to the threads that advance it, for some milliseconds; returns at once if only calls do."""
        return


Probe = Callable[[], object]
"""Returns, without waiting, whether an operation is done. The call may also advance the operation."""


def probe(pending: object) -> Probe | None:
    """The method of a Work or a Future that tells whether it is done; None if it has none."""
    return getattr(pending, "done", None) or getattr(pending, "is_completed", None)


def is_done(pending: object) -> bool:
    """Whether a wait for ``pending`` would end at once, with or without an error."""
    done = probe(pending)
    try:
        return done is None or bool(done())
    except RuntimeError:  # a wait raises it
        return True


def in_flight(pending: object) -> InFlight | None:
    """Wrap a Work of C++ or a Future; None for an operation that can only be waited for by its ``wait()``."""
    if type(pending) is Work:
        return None if is_message(pending) else _PendingWork(pending)
    return _PendingFuture(pending) if is_future(pending) else None


def is_message(pending: object) -> bool:
    """Whether ``pending`` is gloo's Work of a message, which has no Future, and whose ``is_completed()`` tells nothing.

    It must be waited for once, and without a timeout.
    """
    if type(pending) is not Work:
        return False
    try:
        pending.get_future()
    except RuntimeError:
        return True
    return False


def awaited_once(pending: Any, device: torch.device) -> Any:
    """Return ``pending``, or for the Work of a message, which can only block, a Future that a thread completes."""
    if device.type != "cpu" or not is_message(pending):
        return pending
    arrived: torch.futures.Future[Any] = torch.futures.Future()

    def wait() -> None:
        try:
            pending.wait()
        except RuntimeError as error:
            arrived.set_exception(error.with_traceback(None))  # its frames hold the Future: a reference cycle
        else:
            arrived.set_result(None)

    threading.Thread(target=wait, name="ppe_ddp-message", daemon=True).start()
    return arrived


class _PendingWork:
    def __init__(self, work: Work) -> None:
        self._work = work
        self.done = work.is_completed

    def block(self) -> None:
        with suppress(RuntimeError):  # the time is over, or it has failed, which its wait() raises again
            self._work.wait(_REST)


class _PendingFuture:
    def __init__(self, future: torch.futures.Future[Any]) -> None:
        self.done = future.done
        self._is_done = is_done = threading.Event()
        if not future.done():  # the callback must not hold this object, which holds the future
            future.add_done_callback(lambda _: is_done.set())

    def block(self) -> None:
        self._is_done.wait(_REST.total_seconds())


class ProgressEngine:
    """Advances the operations in flight of this process, in all its groups. There is one engine in each process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held while operations are advanced."""
        self.turns = 0
        """The number of times that all groups were advanced."""
        self.at_begin: list[Callable[[], None]] = []
        """Called when a group is added."""
        self._fence = threading.Lock()
        self._groups: list[Advancing] = []
        self._added: list[Advancing] = []  # groups that were added while all were advanced
        self._is_advancing = False
        self._kept: list[tuple[InFlight, Any]] = []
        self._patience = _SPIN_SECONDS
        self._slow_yield = _SLOW_YIELD_SECONDS
        self._busy_until = 0.0

    def expect(self, ranks: int) -> None:
        """Nap sooner from now on if a job has more ``ranks`` on this node than there are cores.

        The core is yielded however long that takes, as another rank uses it.
        """
        if ranks > len(os.sched_getaffinity(0)):
            self._patience, self._slow_yield = _CROWDED_SECONDS, math.inf

    def add(self, group: Advancing) -> None:
        """Advance ``group`` in every :meth:`progress` until it has nothing left to do."""
        with self.lock:
            if self._is_advancing:  # called by a group that is being advanced, while the list is rebuilt
                self._added.append(group)
            elif group not in self._groups:
                self._groups.append(group)
                for call in self.at_begin:
                    call()

    def keep(self, call: InFlight, memory: Any) -> None:
        """Keep ``memory`` alive until ``call`` is done, for a call that nobody waits for any more."""
        with self.lock:
            self._kept = [(one, held) for one, held in self._kept if not is_done(one)]
            self._kept.append((call, memory))

    def progress(self) -> None:
        """Advance all groups once, without waiting."""
        if not self._groups:
            return
        if torch.is_inference_mode_enabled():  # tensors made in it could not be written outside of it, by a later call
            with torch.inference_mode(False):
                self.progress()
            return
        with self.lock:
            if self._is_advancing:  # called by a group that is being advanced
                return
            try:
                self._is_advancing = True
                self.turns += 1
                self._groups = [*itertools.filterfalse(methodcaller("advance"), self._groups)]
                while self._added:
                    if (added := self._added.pop()) not in self._groups:
                        self._groups.append(added)
            finally:
                self._is_advancing = False

    @property
    def is_idle(self) -> bool:
        """Whether no group has anything to advance."""
        return not self._groups

    def wait_until(
        self,
        arrived: Callable[[], Any],
        look: Callable[[], object] | None = None,
        *,
        seconds: float | None = None,
        nap: float = 0.0,
        rest: Callable[[], None] | None = None,
    ) -> bool:
        """Advance all groups until ``arrived()`` is true; Ctrl-C ends the wait as well.

        Args:
            arrived: Tells whether the wait is over.
            look: Called now and then; may raise to end the wait, as after the failure of a rank.
            seconds: The longest wait in seconds; None for no limit. False is returned at its end.
            nap: The shortest nap in seconds. With 0 the core is only yielded at first, and naps begin later.
            rest: Gives the core to the threads that advance the operation (:meth:`InFlight.block`); called in place of
                naps while no group has anything to advance.
        """
        start, least = 0.0, nap
        for spins in itertools.count(1):
            self.progress()
            if arrived():
                return True
            is_resting = rest is not None and not self._groups
            if rest is not None and is_resting:
                rest()
            elif nap:
                time.sleep(nap)
            else:
                nap = self._yield()
            if nap or is_resting or spins % _SPINS == 0:
                if look is not None:
                    look()
                now = time.monotonic()
                start = start or now
                if seconds is not None and now - start > seconds:
                    return bool(arrived())
                if nap or now - start > self._patience:
                    nap = max(least, min(max(_SHORTEST_NAP_SECONDS, (now - start) * _NAP_PART), _LONGEST_NAP_SECONDS))
        raise AssertionError("unreachable")

    def _yield(self) -> float:
        """Yield the core, which another rank may need to arrive; the length of a nap if it is better to nap."""
        before = time.monotonic()
        if before >= self._busy_until:
            os.sched_yield()
            if (now := time.monotonic()) - before < self._slow_yield:
                return 0.0
            self._busy_until = now + _BUSY_SECONDS
        return _SHORTEST_NAP_SECONDS

    def fence(self) -> None:
        """A full memory fence: no memory access moves across, as it is a release followed by an acquire."""
        with self._fence:  # no signal handler runs inside: an interrupt after acquire() would leave it locked for ever
            pass
        with self._fence:
            pass


def each_process(make: Callable[[], _T]) -> Callable[[], _T]:
    """Cache the result of ``make`` in each process: a forked child has a result of its own."""
    made = functools.cache(lambda _pid: make())
    return functools.wraps(make, updated=())(lambda: made(os.getpid()))


@functools.cache
def progress_engine(_pid: int) -> ProgressEngine:
    """The progress engine of this process."""
    return ProgressEngine()


class ProgressThread:
    """A thread that advances operations in flight while this process computes, or is blocked in another library.

    It sleeps in naps, and does nothing while another thread waits in ``wait_until()``, which advances faster.

    Args:
        long_nap: Seconds between looks, which take the interpreter from the threads that advance the operations.
        short_nap: Seconds between looks while no other thread advances them.
        rest_after: The number of naps without operations in flight after which it sleeps until one begins.
    """

    def __init__(self, pid: int, name: str, *, long_nap: float, short_nap: float, rest_after: int) -> None:
        self._progress = progress_engine(pid)
        self._long_nap, self._short_nap, self._rest_after = long_nap, short_nap, rest_after
        self._work = threading.Event()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._progress.at_begin.append(self._wake)
        self._thread.start()
        atexit.register(self._end)

    @property
    def is_resting(self) -> bool:
        """Whether it sleeps until an operation begins."""
        return not self._work.is_set()

    def _wake(self) -> None:
        if not self._work.is_set():
            self._work.set()

    def _run(self) -> None:
        while not self._is_ending:
            self._work.wait()
            quiet, nap = 0, self._long_nap
            while quiet < self._rest_after and not self._is_ending:
                turns = self._progress.turns
                time.sleep(nap)
                is_idle = self._progress.is_idle
                quiet = quiet + 1 if is_idle else 0
                is_left = self._progress.turns == turns and not is_idle
                nap = self._short_nap if is_left else self._long_nap
                if is_left:
                    self._progress.progress()
            self._work.clear()
            if not self._progress.is_idle:  # an operation has begun before clear()
                self._work.set()

    def _end(self) -> None:
        """End the thread before Python ends: a thread that returns from torch or MPI later would abort the process."""
        self._is_ending = True
        self._work.set()
        while self._thread.is_alive():
            with suppress(KeyboardInterrupt):  # a second Ctrl-C, while the process is ending after the first one
                self._thread.join()


@functools.cache
def background_thread(pid: int) -> ProgressThread:
    """The thread for shared memory, in which a rank must do its part of a collective even while it computes."""
    return ProgressThread(pid, "ppe_ddp-background", long_nap=0.01, short_nap=0.002, rest_after=10)


@functools.cache
def network_thread(pid: int) -> ProgressThread:
    """The thread for a network that is advanced only in calls, as under MPI; with 1 ms naps 1 Gbit/s would go idle."""
    return ProgressThread(pid, "ppe_ddp-progress", long_nap=0.0002, short_nap=0.0002, rest_after=1)


class Repeated:
    """A thread that calls a function repeatedly, even if it raises, with ``seconds`` between two calls."""

    def __init__(self, call: Callable[[], object], seconds: float) -> None:
        self._call, self._seconds = call, seconds
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ppe_ddp-repeated", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.is_set():
            with suppress(Exception):  # the next call may succeed
                self._call()
            self._ends.wait(self._seconds)

    def end(self) -> None:
        """Stop the calls."""
        self._ends.set()
        self._thread.join(_JOIN_SECONDS)  # a call may hang in a store that does not answer any more


def paced(
    question: Callable[[], object], seconds: float = _ASK_SECONDS, *, longest: float = 0.0, at_once: bool = True
) -> Callable[[], bool]:
    """Limit how often ``question`` is called: it mostly asks a store, which may be remote, and all ranks ask it.

    Args:
        question: The function.
        seconds: The shortest time between two calls; in between the result is False.
        longest: The limit up to which this time doubles with each call; 0 keeps it.
        at_once: Whether the first call asks; else it waits for ``seconds`` from now.
    """
    asked, pause = 0.0 if at_once else time.monotonic(), seconds

    def ask() -> bool:
        nonlocal asked, pause
        now = time.monotonic()
        if now - asked < pause:
            return False
        asked, pause = now, max(pause, min(2 * pause, longest))
        return bool(question())

    return ask
