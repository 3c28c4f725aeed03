"""Completes synchronizations as generators, so that several in one backward do not deadlock on one another.

With two wrappers in one backward, one rank may come to the end with the buckets of the first in flight and those of
the second still to be launched, and another rank the other way around. If each waited for one wrapper before it went
on with the next, both would wait for ever. So whatever completes a synchronization is a generator: it yields before
it waits, and the loop that drives it goes on meanwhile with the others.

    one alone     run straight through: every wait is the transport's own
    several       each goes on as soon as what it waits for is there; those that share parameters take turns

Not guaranteed: that functions of the user's which block (a ``reduce_function`` that communicates synchronously, a
``broadcast_function``) get past one another. They are called in the same order on every rank only where what comes
before them ends in the same order.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import TYPE_CHECKING, ClassVar

import torch

from ppe_ddp.contracts import Probe
from ppe_ddp.engine.failures import LOOK_SECONDS
from ppe_ddp.engine.shared_parameters import Turn, arrange
from ppe_ddp.errors import CommunicationError
from ppe_ddp.torch_internals import at_end_of_backward, uncompiled_hook
from ppe_ddp.waiting import paced, progress_engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.errors import PeerAbortedError

Steps = Generator[Probe | None, None, None]
"""Yields a probe of what its next step waits for (None: that cannot be asked without waiting). It may be resumed at any
time: the next step waits then."""

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
        lock: Held while a step runs, not between them.
        then: Called by :meth:`conclude`, outside of all that.
        turn: Of the synchronization.

    Attributes:
        groups: The same.
        turn: The same.
        is_over: Whether all is done, or has failed.
    """

    _threads: ClassVar[_Thread]

    def __init__(
        self,
        steps: Steps,
        groups: Groups,
        lock: threading.RLock,
        then: Callable[[], None] | None = None,
        turn: Turn | None = None,
    ) -> None:
        self._steps = steps
        self._lock = lock
        self._then = then
        self.turn = turn or Turn()
        self._probe: Probe | None = _always
        self._is_running = False
        self.groups = groups
        self.is_over = False
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
        last = self._threads.last()
        if last is None:
            last = _AfterCallbacks()
            self._threads.last = weakref.ref(last)
            at_end_of_backward(last)
        last.completions.append(self)

    def advance(self, *, to_end: bool = False, error: Exception | None = None) -> None:
        """Go on to where it has to wait next, or to its end; waits first for what is not there yet.

        Args:
            to_end: Whether to go on to its end.
            error: Raised where it waits, in place of the wait.
        """
        self._is_running = True
        try:
            with self._lock, torch.no_grad():
                if not to_end:
                    self._probe = next(self._steps) if error is None else self._steps.throw(error)
                    return
                run(self._steps)
            self.is_over = True
        except StopIteration:
            self.is_over = True
        except BaseException as raised:
            self.is_over = True
            if not isinstance(raised, Exception):
                raise  # KeyboardInterrupt: nothing else is worth finishing
            self._error = raised
        finally:
            self._is_running = False
            if self.is_over:
                self.turn.end()
                self._probe = _always  # a probe keeps its Work, and that the connection

    def close(self) -> None:
        """Abandon it: the steps see a GeneratorExit where they are."""
        self.is_over = True
        self.turn.end()
        with self._lock, torch.no_grad():
            self._steps.close()

    @property
    def is_ready(self) -> bool:
        """Whether it can go on without waiting."""
        try:
            return self._probe is not None and bool(self._probe())
        except Exception:
            return True  # its own wait says what is wrong

    @property
    def can_be_polled(self) -> bool:
        """Whether :attr:`is_ready` can be found out without waiting."""
        return self._probe is not None


class _Thread(threading.local):
    """The open completions of one thread: autograd calls back in the thread that has called it."""

    def __init__(self) -> None:
        self.open: weakref.WeakSet[Completion] = weakref.WeakSet()
        self.last: Callable[[], _AfterCallbacks | None] = lambda: None


Completion._threads = _Thread()


class _AfterCallbacks:
    """Queued by the first callback at the end of a backward, so that it comes after all that were there."""

    __slots__ = ("__weakref__", "completions")

    def __init__(self) -> None:
        self.completions: list[Completion] = []

    @uncompiled_hook
    def __call__(self) -> None:
        Completion._threads.last = lambda: None  # a backward inside one of the steps has an end of its own
        finish_and_conclude(self.completions)


def finish(completions: Sequence[Completion]) -> None:
    """Drive these to their ends, each without waiting for another; their errors are left in them.

    So end those that were started before and share parameters with them.
    """
    others = [
        other
        for other in Completion._threads.open
        if not other.is_over and not other._is_running and other not in completions
    ]
    joined = arrange([one.turn for one in completions], [other.turn for other in others])
    completions = [*completions, *(other for other in others if other.turn in joined)]
    others = [other for other in others if other.turn not in joined and not other.turn.is_held]
    if len(completions) == 1 and not others:
        if not completions[0].is_over:
            completions[0].advance(to_end=True)
    else:
        _poll(completions, others)
    for completion in completions:
        Completion._threads.open.discard(completion)


def finish_and_conclude(completions: Sequence[Completion]) -> None:
    """Drive these to their ends, and conclude each, also after an error; one error comes out."""
    finish(completions)
    conclude(completions)


def conclude(completions: Sequence[Completion]) -> None:
    """Conclude each, also after an error; one error comes out."""
    with ExitStack() as stack:
        for completion in completions:
            stack.callback(completion.conclude)


def _poll(completions: Sequence[Completion], others: Sequence[Completion]) -> None:
    # Where there is a choice, let it be the same on every rank.
    waiting = sorted([*completions, *others], key=lambda completion: completion.groups.name)
    seconds = max(completion.groups.timeout_seconds for completion in waiting)
    late: CommunicationError | PeerAbortedError | None = None
    try:
        while not all(completion.is_over for completion in completions):
            waiting = [completion for completion in waiting if not completion.is_over]
            left = [one for one in waiting if one in completions and not one.turn.is_behind]
            ready = _await_any(waiting, left, 0.0 if late else seconds)
            for completion in ready:
                completion.advance()
            if left and not ready:  # at once: if each waited for the whole time, the times would add up
                late = _late_error(left[0].groups, seconds) if late is None else _copy_of(late)
                left[0].advance(error=late)
    except BaseException:
        for completion in completions:
            if not completion.is_over:
                completion.close()
        raise


def _await_any(waiting: Sequence[Completion], left: Sequence[Completion], seconds: float) -> list[Completion]:
    """Wait until some can go on: what they wait for has come or failed, or cannot be asked for; none after ``seconds``.

    Args:
        waiting: All that are not over.
        left: Those of them that are to be driven to their ends, and whose turn it is.
        seconds: How long at most.
    """
    found: list[Completion] = []

    def look_for_failures() -> bool:
        found[:] = [completion for completion in waiting if completion.groups.has_failed]  # their waits raise
        return bool(found)

    has_failed = paced(look_for_failures, LOOK_SECONDS, at_once=False)

    def arrived() -> bool:
        found[:] = [completion for completion in waiting if completion.is_ready]
        if not found:
            found[:] = [completion for completion in left if not completion.can_be_polled][:1]  # it waits by itself
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
