"""The Work of a call in flight, and the waits of its group, which end when a rank gives the group up."""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
from torch import distributed as dist

from ppe_ddp.backends.rank_store import BoundedStore, WrittenKeys
from ppe_ddp.backends.wire import MessageInFlight
from ppe_ddp.errors import CommunicationError, DisagreementError
from ppe_ddp.torch_internals import exclude_from_compiling
from ppe_ddp.waiting import InFlight, paced, progress_engine

_LOOK_SECONDS = 0.1  # between looks for ended processes and at the store, each of which is a message ...
_RARELY_SECONDS = 10.0  # ... and between looks at the store if shared memory tells when to look
_GIVEN_UP = "given up"
_TOLD_SECONDS = 0.3  # for other ranks, whose timeout is over at the same time, to report it
_ASK_SECONDS = 0.01
# Most calls end before a thread could be started. Not longer: another rank may wait for the caller.
_PATIENCE_SECONDS = 0.005


class Waits:
    """The waits of one group. A rank that gives the group up writes the reason to the group's store."""

    def __init__(self, store: WrittenKeys, rank: int, place: str, timeout: float, transport: str) -> None:
        self.place = place  # rank and group, for errors: ``"rank 1 of 4, group 'tp'"``
        self.timeout = timeout  # of a wait, in seconds
        self.transport = transport  # its name, for errors
        self.failure = ""  # the reason why the group was given up; empty as long as it can be used
        self.at_failure: list[Callable[[], None]] = []  # called when the group is given up
        # Returns the ranks whose processes are known to have ended.
        self.ended_ranks: Callable[[], Sequence[int]] = tuple
        # Tells, faster than the store, whether another rank has given the group up; the reason is then in the store.
        self.is_closed_elsewhere: Callable[[], bool] = bool
        self.sees_every_rank = False  # ``is_closed_elsewhere`` covers all ranks, so the store is rarely asked
        self._store = BoundedStore(store)
        self._rank = rank
        self._looked = -math.inf
        self._lock = threading.Lock()
        self._progress = progress_engine(os.getpid())

    def until(
        self,
        arrived: Callable[[], Any],
        what: str,
        absent: Callable[[], Sequence[int]] = tuple,
        seconds: float = 0.0,
        rest: Callable[[], None] | None = None,
        also: Callable[[], object] = bool,
    ) -> None:
        """Wait until ``arrived()``; CommunicationError if another rank gives the group up, or the time is over.

        Args:
            arrived: Tells whether the wait for the call ``what`` is over.
            what: For errors.
            absent: Returns the ranks that are waited for, as far as they are known.
            seconds: A shorter timeout, if positive. The group can be used after it, unlike after the group's timeout.
            rest: Gives the core to the threads that advance the call, if there are any.
            also: Called now and then; may raise to end the wait.
        """
        start = seen = monotonic()

        def look() -> None:
            nonlocal seen
            self.check(what)
            also()
            now = monotonic()
            if now - seen > _LOOK_SECONDS:
                seen = now
                self._look_for_ended(what, absent)
            waited = now - start
            if waited > seconds > 0.0:
                raise CommunicationError(
                    f"{self.place}: {what} is still under way after {seconds:g} s: the other rank did not call, or died"
                )
            if waited > self.timeout:
                self._end_of_time(what, absent())

        self._progress.wait_until(arrived, look, rest=rest)

    def _end_of_time(self, what: str, missing: Sequence[int]) -> None:
        told = paced(self.look_now, _ASK_SECONDS)
        # Unless this rank knows the one that is missing, give other ranks a moment to report it.
        if len(missing) != 1 and self._progress.wait_until(told, seconds=_TOLD_SECONDS):
            raise self.error(what, self.failure)
        who = f"rank {', '.join(map(str, missing))}" if missing else "another rank"
        self.give_up(
            f"{what} has waited for the group's timeout of {self.timeout:g} s: {who} did not make the call, or "
            "died. Where ranks may be that far apart, give init_process_group() or new_group() a longer timeout"
        )
        raise CommunicationError(f"{self.place}: {self.failure}")

    def _look_for_ended(self, what: str, absent: Callable[[], Sequence[int]]) -> None:
        ended = self.ended_ranks()
        # Read ``ended`` before ``absent()``: a process may make the call and then end.
        missing = sorted(set(ended).intersection(absent())) if ended else []
        if missing:
            self.give_up(f"{what} waits for rank {', '.join(map(str, missing))}, whose process has ended")
            raise CommunicationError(f"{self.place}: {self.failure}")

    def progress(self) -> None:
        self._progress.progress()

    def is_given_up(self) -> bool:
        if self.failure:
            return True
        now, is_closed = monotonic(), self.is_closed_elsewhere()
        if not is_closed and now - self._looked < (_RARELY_SECONDS if self.sees_every_rank else _LOOK_SECONDS):
            return False
        self._looked = now
        reason = "another rank has given this group up" if is_closed else ""
        with suppress(RuntimeError):  # the store may be gone, or out of reach
            reason = self._store.do(lambda store: store.get(_GIVEN_UP).decode() if store.check([_GIVEN_UP]) else reason)
        if reason and self._fail(reason):
            self._close()
        return bool(self.failure)

    def look_now(self) -> bool:
        """Whether a rank has given the group up; always asks the store."""
        self._looked = -math.inf
        return self.is_given_up()

    def check(self, what: str) -> None:
        """Raise a CommunicationError with the rank and the reason if a rank has given the group up."""
        if self.is_given_up():
            raise self.error(what, self.failure)

    def error(self, what: str, reason: str) -> CommunicationError:
        return CommunicationError(f"{self.place}: {what} over {self.transport} failed: {reason}")

    def give_up(self, reason: str) -> None:
        """Give the group up and tell the other ranks the reason; they leave their waits with an error."""
        if self._fail(reason):
            with suppress(RuntimeError):
                text = f"rank {self._rank} has given this group up: {reason}"
                self._store.do(lambda store: store.compare_set(_GIVEN_UP, "", text))
            self._close()

    def failed(self, what: str, reason: str) -> CommunicationError:
        """Give the group up after a call has failed here, unless another rank has; returns the error to raise."""
        if self.look_now():  # a rank that gives the group up writes that before it closes its connections
            return self.error(what, self.failure)
        self.give_up(f"{what} was left: {reason}")
        return self.error(what, reason)

    def _fail(self, reason: str) -> bool:
        with self._lock:
            is_first = not self.failure
            self.failure = self.failure or reason
        return is_first

    def _close(self) -> None:
        for close in self.at_failure:
            close()


@exclude_from_compiling
class PythonWork(dist.Work):
    """A Work written in Python; a subclass defines ``wait()`` and the methods that tell its state."""

    outputs: Any = None  # the result of ``result()``

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        exclude_from_compiling(cls)

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def result(self) -> Any:
        """The output tensors, which may be read after ``wait()``."""
        return self.outputs


class Work(PythonWork):
    """A collective or message in flight. Do not touch its tensors before ``wait()`` has returned.

    Args:
        what: The call, for errors.
        poll: Tells whether it is done; raises if it has failed.
        absent: Returns the ranks that it waits for, as far as they are known.
        block: Gives the core, for a moment, to the transport's threads that advance it; None if only calls do.
        message: The point-to-point message in flight, if it is one. After its timeout the group can still be used.
    """

    def __init__(
        self,
        what: str,
        waits: Waits,
        poll: Callable[[], bool],
        *,
        absent: Callable[[], Sequence[int]] = tuple,
        block: Callable[[], None] | None = None,
        message: MessageInFlight | None = None,
    ) -> None:
        super().__init__()
        # Called once after success; copies the result to the user's tensors.
        self.at_arrival: Callable[[], None] | None = None
        # Lets the transport call a function when it is done; None if only this process can notice that.
        self.ask_transport: Callable[[Callable[[], None]], None] | None = None
        self._what = what
        self._waits = waits
        self._poll = poll
        self._absent = absent
        self._block = block
        self._message = message
        self._lock = threading.Lock()
        self._is_done = False
        self._error: BaseException | None = None
        self._when_done: Callable[[], None] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is complete, at most for ``timeout`` if that is positive, else for the group's; returns True.

        Raises:
            CommunicationError: The transport reports an error, a rank has given the group up, or the time is over.
                After a ``timeout`` of this call it is still in flight.
            DisagreementError: The ranks have called different collectives (PPE_DDP_DEBUG=1).
        """
        if not self._is_done and not self.done():
            self.await_done(seconds=max(0.0, timeout.total_seconds()) if timeout is not None else 0.0)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return True

    def await_done(self, look: Callable[[], object] = bool, seconds: float = 0.0) -> None:
        """Wait until it is done, at most for ``seconds`` if positive; raises as :meth:`wait`, but for its own error.

        ``look`` is called now and then, and may raise to end the wait.
        """
        if self._message is not None:
            seconds = seconds or self._waits.timeout
        try:
            self._waits.until(self.done, self._what, self._absent, seconds, self._block, look)
        except CommunicationError:
            # It may have succeeded all the same: another rank that had the result has gone on, and failed.
            if not (self.done() and isinstance(self._error, DisagreementError | None)):
                raise

    def done(self) -> bool:
        """Whether it is done, with or without an error; does not advance other operations."""
        if self._is_done:
            return True
        if torch.is_inference_mode_enabled():  # see ProgressEngine.progress()
            with torch.inference_mode(False):
                return self.done()
        with self._lock:
            if not self._is_done:
                try:
                    if not self._poll():
                        return False
                    if self.at_arrival is not None:
                        self.at_arrival()
                except Exception as error:
                    self._error = error
                self.at_arrival = None
                self._is_done = True
                if self._when_done is not None:
                    self._tell_done()
        return True

    def is_completed(self) -> bool:
        """As :meth:`done`, but advances the operations of all groups."""
        if not self.done():
            self._waits.progress()
            self._waits.is_given_up()  # ends this call if another rank has given the group up
        return self.done()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error if self.is_completed() else None

    def source_rank(self) -> int:
        """The sender of a message, as a rank of the group; -1 before it has arrived."""
        return -1 if self._message is None else self._message.source

    _source_rank = source_rank  # torch's name for it

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of ``result()``, completed after a short wait here or by a thread: waits in C++ call no backend."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        if progress_engine(os.getpid()).wait_until(self.is_completed, seconds=_PATIENCE_SECONDS):
            self._complete(future)
        else:
            threading.Thread(target=self._complete, args=(future,), name="ppe_ddp-future", daemon=True).start()
        return future

    def when_done(self, call: Callable[[], None]) -> None:
        """Call ``call`` once, in any thread, when this process notices that it is done; starts no thread for it."""
        self._when_done = call
        if self.ask_transport is not None:
            self.ask_transport(self._tell_done)
        if self.done():
            self._tell_done()

    def _tell_done(self) -> None:
        call, self._when_done = self._when_done, None
        if call is not None:
            call()

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        try:
            self.wait()
        except Exception as error:
            # Its frames hold this future and the user's objects: a cycle through C++ that is never collected.
            future.set_exception(error.with_traceback(None))
        else:
            future.set_result(self.outputs)


def combined(works: Sequence[Work], waits: Waits) -> Work:
    """One Work for several calls. When all are done, it raises the error of the first one that has failed."""

    def poll() -> bool:
        # Ask every one: a message advances only while it is asked.
        if not all([work.is_completed() for work in works]):
            return False
        for work in works:
            work.wait()
        return True

    def absent() -> list[int]:
        return sorted({rank for work in works for rank in work._absent()})

    what = " and ".join(work._what for work in works)
    messages = [work._message for work in works if work._message is not None]
    whole = Work(what, waits, poll, absent=absent, message=messages[0] if messages else None)
    whole.outputs = [work.result() for work in works]
    return whole


# ---------------------------------------------------------------------- calls of a wire

Steps = Generator[InFlight, None, None]
"""Begins a call of the wire, yields it, and is resumed when it is done."""


def one_call(start: Callable[[], InFlight], home: Callable[[], object] = int) -> Steps:
    """The steps of a collective that is one call of the wire; ``home`` copies the result to the user's tensors."""
    yield start()
    home()


class WireCall(InFlight):
    """A collective over a wire: calls, each begun when the one before is done; its queue or ``done()`` advances it."""

    def __init__(self, what: str, waits: Waits, steps: Steps, *, is_queued: bool) -> None:
        self.what = what
        self._is_done = False
        self._is_queued = is_queued
        self._waits = waits
        self._steps = steps
        self._lock = threading.RLock()  # reentrant, since advance() may give the group up, which calls fail()
        self._current: InFlight | None = None
        self._error: BaseException | None = None
        self._when_done: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin the next step; the first one raises if the arguments are wrong."""
        with torch.no_grad():
            self._current = next(self._steps)

    def advance(self) -> bool:
        """Begin further steps as long as the current one is done; returns whether all are."""
        with self._lock:
            try:
                while not self._is_done and (self._current is None or self._current.done()):
                    self.start()
            except StopIteration:
                self._end(None)
            except BaseException as error:
                # After any error the ranks are out of step, so the group is given up.
                reason = str(error) if isinstance(error, CommunicationError) else f"{type(error).__name__}: {error}"
                self._end(self._waits.error(self.what, reason))
                self._error = self._waits.failed(self.what, reason)
                if not isinstance(error, Exception):
                    raise
        return self._is_done

    def fail(self) -> None:
        """End it after the group was given up; the wire keeps the memory of calls in flight."""
        with self._lock:
            if not self._is_done:
                self._end(self._waits.error(self.what, self._waits.failure))

    def done(self) -> bool:
        is_done = self._is_done if self._is_queued else self.advance()
        if self._error is not None:
            raise self._error
        return is_done

    def block(self) -> None:
        current = self._current
        if current is not None:
            current.block()

    def when_done(self, call: Callable[[], None]) -> None:
        self._when_done = call
        ask = getattr(self._current, "when_done", None)  # exists if the wire has threads, which notice it earlier
        if ask is not None:
            ask(call)

    def _end(self, error: BaseException | None) -> None:
        self._error, self._current = error, None
        self._steps.close()
        self._is_done = True
        call, self._when_done = self._when_done, None
        if call is not None:
            call()


class CallSet:
    """The calls of a wire with threads: all are in flight at the same time, and their waits advance them."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._calls: deque[WireCall] = deque()
        waits.at_failure.append(self._fail_all)

    def begin(self, call: WireCall) -> None:
        try:
            call.start()
        except CommunicationError as error:  # the call before has succeeded, and the group is given up all the same
            raise self._waits.error(call.what, self._waits.failure or str(error)) from None
        while self._calls and self._calls[0]._is_done:
            self._calls.popleft()
        self._calls.append(call)

    def is_empty(self) -> bool:
        """True: the wire completes its calls by itself."""
        return True

    def _fail_all(self) -> None:
        while self._calls:
            call = self._calls.popleft()
            if not call.advance():
                call.fail()


class CallQueue:
    """The calls of a wire that advances only in calls of this process.

    They advance in every call of a backend, on any group; no call waits inside MPI. They are begun one at a time, in
    the same order on all ranks; or with ``at_once``, each when it comes.
    """

    def __init__(self, waits: Waits, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self._calls: list[WireCall] = []
        self._progress = progress_engine(os.getpid())
        waits.at_failure.append(self._fail_all)

    def begin(self, call: WireCall) -> None:
        """Begin a call, or queue it until all earlier ones are done."""
        with self._progress.lock:
            if self._at_once:
                call.start()
            self._calls.append(call)
            self._progress.add(self)
        self._progress.progress()

    def is_empty(self) -> bool:
        return not self._calls

    def advance(self) -> bool:
        """Advance the calls without waiting; returns whether all are done."""
        for call in self._calls:
            if not (call.advance() or self._at_once):
                break
        while self._calls and self._calls[0]._is_done:
            del self._calls[0]
        return not self._calls

    def _fail_all(self) -> None:
        with self._progress.lock:
            while self._calls:
                self._calls.pop(0).fail()
