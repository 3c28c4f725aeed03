"""Waiting: the one loop that waits for other ranks, and what moves while it does.

    wait_until(arrived, look)     advance all that is outstanding, on every group     arrived? then return
                                  yield the core; after some milliseconds, nap        now and then: look

A rank that waits in one group serves the ranks that wait for it in another, so no order of collectives on different
groups deadlocks. ``look`` raises what ends a wait: a rank has failed, the time is over. Ctrl-C comes through.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import threading
import time
from contextlib import suppress
from datetime import timedelta
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch.distributed import Work

from ppe_ddp.torch_internals import is_future

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_T = TypeVar("_T")

_SPINS = 64  # between looks at the clock and at the transport
_SPIN_SECONDS = 0.005  # before the core is given away ...
_CROWDED_SECONDS = 0.0001  # ... where there are more ranks than cores
# Most of a long wait, as for a network, is slept: the other ranks, and what moves the messages, need the core. The
# naps make it longer by this part of itself at most.
_NAP_PART = 1 / 32
_SHORTEST_NAP_SECONDS = 50e-6
_LONGEST_NAP_SECONDS = 0.0002  # in which no network goes idle that MPI moves in our calls
_ASK_SECONDS = 0.001
_REST = timedelta(milliseconds=50)  # a Work of gloo that is still under way then raises, which takes 80 us


class Advancing(Protocol):
    """What is registered with the progress engine."""

    def advance(self) -> bool:
        """Do what can be done without waiting; True when nothing is left to do or to wait for."""
        ...


class InFlight(Protocol):
    """What a transport has under way."""

    def done(self) -> bool:
        """Whether it has ended; moves it. Raises RuntimeError where it has failed."""
        ...

    def block(self) -> None:
        """Give the core to the threads that move it, for some milliseconds; nothing where only calls move it."""
        ...


def in_flight(pending: object) -> InFlight | None:
    """What torch has under way, a Work of C++ or a Future; None for what is to be waited for to its end at once."""
    if type(pending) is Work:
        return None if is_message(pending) else _PendingWork(pending)
    return _PendingFuture(pending) if is_future(pending) else None


def is_message(pending: object) -> bool:
    """Whether ``pending`` is gloo's Work of a message between two ranks, which must be waited for once, and to its end.

    It is the only one without a Future. It tells that the message is there only to who waits for it.
    """
    if type(pending) is not Work:
        return False
    try:
        pending.get_future()
    except RuntimeError:
        return True
    return False


class _PendingWork:
    def __init__(self, work: Work) -> None:
        self._work = work
        self.done = work.is_completed

    def block(self) -> None:
        with suppress(RuntimeError):  # the moment is over; its own error comes out of its wait()
            self._work.wait(_REST)


class _PendingFuture:
    def __init__(self, future: torch.futures.Future[Any]) -> None:
        self.done = future.done
        self._ended = threading.Event()
        if not future.done():
            ended = self._ended  # not this object, which has the future
            future.add_done_callback(lambda _: ended.set())

    def block(self) -> None:
        self._ended.wait(_REST.total_seconds())


class ProgressEngine:
    """Advances what this process has begun and not ended, on all its groups. There is one for each process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held while anything is advanced."""
        self.turns = 0
        """How often all was advanced."""
        self.at_begin: list[Callable[[], None]] = []
        """Called when there is something to advance."""
        self._fence = threading.Lock()
        self._groups: list[Advancing] = []
        self._added: list[Advancing] = []  # while all were advanced
        self._is_advancing = False
        self._kept: list[tuple[InFlight, Any]] = []
        self._patience = _SPIN_SECONDS

    def expect(self, ranks: int) -> None:
        """Give cores away sooner if one job has more ``ranks`` here than this node has cores."""
        if ranks > len(os.sched_getaffinity(0)):
            self._patience = _CROWDED_SECONDS

    def add(self, group: Advancing) -> None:
        """Advance ``group`` in every call until it has nothing left to do."""
        with self.lock:
            if self._is_advancing:  # one of them has begun it; whether it stays in the list is not known yet
                self._added.append(group)
            elif group not in self._groups:
                self._groups.append(group)
                for call in self.at_begin:
                    call()

    def keep(self, call: InFlight, memory: Any) -> None:
        """Keep ``memory`` alive until ``call`` has ended, though nobody waits for it any more."""
        with self.lock:
            self._kept = [(one, held) for one, held in self._kept if not _is_done(one)]
            self._kept.append((call, memory))

    def progress(self) -> None:
        """Do what can be done now, without waiting."""
        if not self._groups:
            return
        with self.lock:
            if self._is_advancing:  # a group that is advanced has called back
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
        """Whether nothing is left to advance."""
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
        """Advance everything until ``arrived()``; also what others wait for.

        Args:
            arrived: Whether the wait is over.
            look: Called now and then; raises what ends the wait.
            seconds: How long at most; None for no limit.
            nap: How long to sleep at least each time, in seconds; by default the core is only yielded at first.
            rest: Gives the core to the threads that bring what is waited for (:meth:`InFlight.block`); called in place
                of the naps while there is nothing to advance.

        Returns:
            Whether it has arrived; False when the time was over before.
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
                os.sched_yield()  # another rank may need this core to arrive
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

    def fence(self) -> None:
        """Let no memory access move across: a release followed by an acquire, on every processor."""
        self._fence.acquire()
        self._fence.release()
        self._fence.acquire()
        self._fence.release()


def _is_done(call: InFlight) -> bool:
    try:
        return call.done()
    except RuntimeError:  # with an error, for which nobody waits
        return True


def each_process(make: Callable[[], _T]) -> Callable[[], _T]:
    """``make``, called once in each process: a forked child has a result of its own."""
    made = functools.cache(lambda _pid: make())
    return functools.wraps(make, updated=())(lambda: made(os.getpid()))


@functools.cache
def progress_engine(_pid: int) -> ProgressEngine:
    """The progress engine of this process."""
    return ProgressEngine()


class ProgressThread:
    """A thread that advances what is under way while this process calls no backend of ours.

    A rank may sit in its computation, or in a blocking call of another library, while others wait for its part. The
    thread naps: whoever waits in our own loop is quicker, and is left alone.

    Args:
        pid: Of this process.
        name: Of the thread.
        long_nap: Seconds between looks while this process comes by itself: each end of one takes the interpreter from
            it.
        short_nap: Seconds between looks while nobody else advances what is under way.
        rest_after: Naps with nothing under way before it sleeps until something begins.
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
        """Whether it sleeps until something begins."""
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
            if not self._progress.is_idle:  # begun before that
                self._work.set()

    def _end(self) -> None:
        """Leave torch and MPI before Python ends: a thread that comes back from them then ends the process."""
        self._is_ending = True
        self._work.set()
        self._thread.join()


@functools.cache
def background_thread(pid: int) -> ProgressThread:
    """The thread for shared memory: a rank that computes must do its part for the others."""
    return ProgressThread(pid, "ppe_ddp-background", long_nap=0.01, short_nap=0.002, rest_after=10)


@functools.cache
def network_thread(pid: int) -> ProgressThread:
    """The thread for a network that moves only in calls, as under MPI: in naps of 1 ms one of 1 Gbit/s goes idle."""
    return ProgressThread(pid, "ppe_ddp-progress", long_nap=0.0002, short_nap=0.0002, rest_after=1)


def paced(
    question: Callable[[], object], seconds: float = _ASK_SECONDS, *, longest: float = 0.0, at_once: bool = True
) -> Callable[[], bool]:
    """``question``, asked once in so many seconds at most: the store that it asks may be far, and all ranks ask it.

    Args:
        question: What is asked.
        seconds: Between two times.
        longest: Up to where these seconds double each time.
        at_once: Whether it is asked in the first call; else so many seconds after now.
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
