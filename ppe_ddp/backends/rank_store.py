"""The store that the ranks of a group share, and the exchanges of the ranks over it."""

from __future__ import annotations

import functools
import json
import os
import queue
import sys
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

from torch import distributed as dist
from torch.distributed import ProcessGroup, default_pg_timeout

from ppe_ddp.backends.group_internals import (
    PrefixStore,
    Store,
    connections_awaited,
    end_wait_for_connections,
    kept_with,
    store_of,
    timeout_of,
)
from ppe_ddp.errors import CommunicationError, DisagreementError
from ppe_ddp.waiting import Repeated, each_process, paced, progress_engine

T = TypeVar("T")

_NAP, _LONG_NAP = 0.001, 0.002  # seconds between looks at the store, the longer where processes start ...
_LONGEST_PAUSE = 0.02  # ... and the longest such pause
_LAST = 16  # exchanges whose words stay in the store: threads of other ranks may still read some of them

SILENT = "the store that the ranks share does not answer: the process that serves it has stopped, or the network is cut"


class WrittenKeys:
    """A store, or a part of it, and the keys that this rank has written there, which it deletes at the end."""

    def __init__(self, store: Store) -> None:
        self._whole = store
        self._prefix = ""
        self._written: dict[str, None] = {}

    def under(self, name: str) -> WrittenKeys:
        """The part with the prefix ``name`` and a slash; its keys are deleted together with all others."""
        part = WrittenKeys(self._whole)
        part._prefix = f"{self._prefix}{name}/"
        part._written = self._written
        return part

    @property
    def store(self) -> Store:
        """This part as a torch store, for gloo. Keys that gloo writes have to be passed to :meth:`note`."""
        return PrefixStore(self._prefix[:-1], self._whole) if self._prefix else self._whole

    def note(self, key: str) -> str:
        """Note a key as written, and return its name in the whole store."""
        name = self._prefix + key
        self._written[name] = None
        return name

    def set(self, key: str, value: str) -> None:
        self._whole.set(self.note(key), value)

    def add(self, key: str, amount: int) -> int:
        return self._whole.add(self.note(key), amount)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Replace ``expected`` (empty: no value) by ``value`` if it is the current value; returns the value then."""
        return self._whole.compare_set(self.note(key), expected, value)

    def get(self, key: str) -> bytes:
        """The value of ``key``; waits until it is written."""
        return self._whole.get(self._prefix + key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of ``keys``, in one call if the store can do that; waits until all are written."""
        store: Any = self._whole
        names = [self._prefix + key for key in keys]
        if names and store.has_extended_api():
            return [bytes(value) for value in store.multi_get(names)]
        return [store.get(name) for name in names]

    def check(self, keys: Sequence[str]) -> bool:
        return self._whole.check([self._prefix + key for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        self._whole.wait([self._prefix + key for key in keys], timeout)

    def delete_key(self, key: str) -> None:
        self._written.pop(self._prefix + key, None)
        self._whole.delete_key(self._prefix + key)

    def delete_all(self) -> None:
        """Delete all keys that this rank has written, if the store can delete; no rank may read them any more."""
        while self._written:
            name, _ = self._written.popitem()
            with suppress(RuntimeError):  # the store is gone, or a store of the user's cannot delete
                self._whole.delete_key(name)


class BoundedStore:
    """Calls one store, and waits for each answer for at most ``seconds``, or the time that the call gives."""

    def __init__(self, store: Store | WrittenKeys, seconds: float = 1.0) -> None:
        self._store = store if isinstance(store, WrittenKeys) else WrittenKeys(store)
        self._seconds = seconds

    def do(self, calls: Callable[[WrittenKeys], T], seconds: float | None = None) -> T:
        """Return or raise the result of ``calls(store)``; CommunicationError if the store does not answer in time."""
        if sys.is_finalizing():  # no thread runs any more
            raise CommunicationError("this process ends, and calls no store")
        return _caller().result(functools.partial(calls, self._store), seconds or self._seconds)

    def delete_all(self) -> None:
        """Delete the keys of this rank, which no rank reads any more; gives up if the store does not answer."""
        with suppress(CommunicationError):
            self.do(WrittenKeys.delete_all)


class Reports:
    """Texts that ranks append to one list, which all of them read now and then; a look is one call for any number.

    A rank counts a text before it writes it. If it dies in between, that text is missing.
    """

    def __init__(self, store: BoundedStore, key: str) -> None:
        self._store = store
        self._key = key
        self._read: dict[str, bytes] = {}

    def append(self, text: str) -> None:
        """Append ``text``; the other ranks find it as soon as this returns."""

        def write(store: WrittenKeys) -> None:
            store.set(f"{self._key}/{store.add(f'{self._key}/count', 1)}", text)

        self._store.do(write)

    def look(self) -> list[bytes]:
        def read(store: WrittenKeys) -> None:
            if not store.check([f"{self._key}/count"]):
                return
            keys = [f"{self._key}/{number + 1}" for number in range(store.add(f"{self._key}/count", 0))]
            missing = [key for key in keys if key not in self._read]
            if missing and not store.check(missing):
                missing = [key for key in missing if store.check([key])]
            texts = dict(zip(missing, store.multi_get(missing), strict=True)) if missing else {}
            self._read = {key: one[key] for key in keys for one in (self._read, texts) if key in one}

        self._store.do(read)
        return [*self._read.values()]


class _Caller:
    """The one thread of this process that calls stores: all groups use parts of one store."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._silent: Future[Any] | None = None
        threading.Thread(target=self._serve, name="ppe_ddp-store", daemon=True).start()

    def result(self, function: Callable[[], T], seconds: float) -> T:
        if self._silent is not None and not self._silent.done():
            raise CommunicationError(SILENT)
        call: Future[T] = Future()
        self._calls.put((call, function))
        try:
            error = call.exception(seconds)
        except TimeoutError:
            self._silent = call
            raise CommunicationError(SILENT) from None
        if error is None:
            return call.result()
        del call, function
        raise error

    def _serve(self) -> None:
        while True:
            _make(*self._calls.get())


def _make(call: Future[Any], function: Callable[[], Any]) -> None:
    try:
        call.set_result(function())
    except Exception as error:
        call.set_exception(error)
    finally:
        del call, function  # the error's frames would keep them alive


_caller = each_process(_Caller)


class MeetingOutcome(NamedTuple):
    """The outcome of a meeting, the same for every rank."""

    words: Sequence[Any]  # of all ranks, in rank order; empty if a rank has refused
    rank: int  # the rank that has decided: the last to come, or the one that has refused
    refusal: Any = None  # the word of the rank that has refused
    place: int = 0  # if all have come, the place in the order of all counted meetings; else 0

    def error(self, message: str, absent: Sequence[int]) -> CommunicationError:
        """The error for a refused meeting, with the ``absent`` ranks and the error of the rank that refused."""
        _, reason, is_own = self.refusal
        error = CommunicationError(message)
        error.ranks, error.reason = tuple(absent), reason if is_own else ""
        return error


class Meeting:
    """A meeting of all ranks in a store: each rank brings a word. All get the words of all, or learn that one refused.

    The last rank to come writes all words under one key, which each rank reads. A rank that stops waiting refuses. The
    first outcome that is written counts.

    Args:
        name: New, and the same on every rank.
        next_place: Returns the next place in an order of meetings; called by one rank when all have come.
    """

    def __init__(
        self, store: WrittenKeys, name: str, rank: int, size: int, next_place: Callable[[], int] = int
    ) -> None:
        self._store, self._next_place = store, next_place
        self._outcome = f"{name}/outcome"
        self._count = f"{name}/count"
        self._name, self._rank, self._size = name, rank, size

    def come(self, word: Any) -> None:
        """Bring this rank's word, a JSON value."""
        self._store.set(f"{self._name}/{self._rank}", json.dumps(word))
        if self._store.add(self._count, 1) == self._size:
            self._join()

    def refuse(self, word: Any) -> MeetingOutcome:
        """Refuse, unless all have come or a rank has refused before; returns the outcome."""
        if self._store.check(self._keys()):  # all have come, but the last one may have died before it decided
            return self._join()
        return self._decide(MeetingOutcome([], self._rank, word))

    def _join(self) -> MeetingOutcome:
        words = [json.loads(text) for text in self._store.multi_get(self._keys())]
        return self._decide(MeetingOutcome(words, self._rank, None, self._next_place()))

    def _decide(self, outcome: MeetingOutcome) -> MeetingOutcome:
        return MeetingOutcome(*json.loads(self._store.compare_set(self._outcome, "", json.dumps(outcome))))

    def outcome(self) -> MeetingOutcome | None:
        if not self._store.check([self._outcome]):
            return None
        return MeetingOutcome(*json.loads(self._store.get(self._outcome)))

    def is_over(self) -> bool:
        """Whether all have come, or it was refused and this rank had come."""
        outcome = self.outcome()
        return outcome is not None and bool(outcome.words or self._store.check([f"{self._name}/{self._rank}"]))

    def is_full(self) -> bool:
        """Whether all have come. If not, the place of this meeting will come after all places taken so far."""
        return self._store.add(self._count, 0) == self._size

    def absent(self) -> list[int]:
        return [rank for rank, key in enumerate(self._keys()) if not self._store.check([key])]

    def forget(self) -> None:
        """Delete this rank's word, and on rank 0 the other keys; called on all ranks when all know the outcome."""
        for key in (f"{self._name}/{self._rank}", *((self._count, self._outcome) if self._rank == 0 else ())):
            self._store.delete_key(key)

    def _keys(self) -> list[str]:
        return [f"{self._name}/{rank}" for rank in range(self._size)]

    def words(self, word: Any, look: Callable[[], None], seconds: float, *, may_leave: bool = False) -> MeetingOutcome:
        """Come, and wait for the outcome; after ``seconds`` this rank refuses.

        Meanwhile it advances all groups of this process, since other ranks may need that to come. ``look`` may raise to
        end the wait. With ``may_leave`` a rank may end after it has come.

        Returns:
            The outcome. A refusal has three items: the ranks that are absent or lost, or the one that refused; the text
            of the error that has ended its wait, or empty; and whether that error is its own, not of lost ranks.
        """
        found: MeetingOutcome | None = None

        def is_decided() -> bool:
            nonlocal found
            found = self.outcome()
            return found is not None

        progress, ask = progress_engine(os.getpid()), paced(is_decided, longest=_LONGEST_PAUSE)
        try:
            self.come(word)
            if not progress.wait_until(ask, paced(look, _LONGEST_PAUSE), seconds=seconds, nap=_NAP):
                return self.refuse([self.absent(), "", False])
        except BaseException as error:  # even an interrupt, so that the other ranks do not wait for this one
            with suppress(RuntimeError):  # the store may be gone
                is_own = not isinstance(error, CommunicationError)
                lost = getattr(error, "ranks", None) or [self._rank]
                outcome = self.refuse([lost, f"{type(error).__name__}: {error}", is_own])
                if may_leave and outcome.words and not is_own:
                    return outcome
            raise
        assert found is not None
        return found


def wait_for(arrived: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``arrived()``, which is called at once and then now and then; False if the time is over.

    It takes no lock if that is so at once. The lock of a wait may belong to a thread that waits for this one.
    """
    return arrived() or progress_engine(os.getpid()).wait_until(arrived, seconds=seconds, nap=_LONG_NAP)


def _nothing() -> None:
    """Look for nothing."""


class ConnectingStore(Store):
    """A store in which ranks connect. Meanwhile its waits end if ``look`` raises, as where one is gone or has failed.

    gloo calls these methods, too, and waits in them. After that gloo waits for other ranks to connect to it, without
    the store; a thread calls :meth:`end_waits`, which ends that wait. C++ does not keep this object alive.
    """

    def __init__(self, store: Any, look: Callable[[], object], seconds: float) -> None:
        super().__init__()
        self._store, self._look, self._seconds = store, look, seconds
        self._awaits: list[bytes] = []  # the addresses that gloo has written, where it awaits connections

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """A context in which the ranks connect, while a thread looks."""
        looks = Repeated(self.end_waits, _LONGEST_PAUSE)
        try:
            yield
            self._look = _nothing  # the other may hold the group that holds this
        finally:
            looks.end()

    def end_waits(self) -> None:
        """End gloo's waits for connections, in other threads, if ``look`` raises."""
        try:
            self._look()
        except RuntimeError:
            while self._awaits:
                end_wait_for_connections(self._awaits.pop())

    def set(self, key: str, value: Any) -> None:
        if self._look is not _nothing and isinstance(value, bytes) and connections_awaited(value):
            self._awaits.append(value)
        self._store.set(key, value)

    def add(self, key: str, value: int) -> Any:
        return self._store.add(key, value)

    def compare_set(self, key: str, expected_value: Any, desired_value: Any) -> Any:
        return self._store.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> Any:
        return self._store.delete_key(key)

    def check(self, keys: list[str]) -> Any:
        self._look()
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = min(self._seconds, timeout.total_seconds()) if timeout is not None else self._seconds
        if not wait_for(lambda: bool(self.check(keys)), seconds):
            raise dist.DistStoreError(f"nobody has written {', '.join(keys)} in {seconds:g} s")

    def get(self, key: str) -> Any:
        self.wait([key])
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> Any:
        self.wait(keys)
        return self._store.multi_get(keys)

    def has_extended_api(self) -> Any:
        return self._store.has_extended_api()


# torch.distributed passes no such argument on to a backend.
_look_at_members: ContextVar[Callable[[], None]] = ContextVar("look", default=_nothing)


@contextmanager
def looking(look: Callable[[], None]) -> Iterator[None]:
    """A context in which new groups call ``look`` as they wait for their members; it may raise to end the wait."""
    token = _look_at_members.set(look)
    try:
        yield
    finally:
        _look_at_members.reset(token)


@contextmanager
def connecting(store: Store, seconds: float) -> Iterator[Store]:
    """A context in which gloo connects ranks in the store that it yields; its waits look as :func:`looking` says."""
    look = _look_at_members.get()
    if look is _nothing:
        yield store
        return
    looked_at = ConnectingStore(store, paced(look, _LONGEST_PAUSE), seconds)
    with looked_at.connecting():
        yield looked_at


def await_members(arguments: Any, ranks: Sequence[int], options: object, store: WrittenKeys) -> int:
    """Wait until all ``ranks`` (of the world, in the group's order) make this group: a transport would wait for ever.

    ``options`` and PPE_DDP_DEBUG are compared as text. ``store`` is that of the group's name.

    Returns:
        The number of groups of this name so far, including this one: keys of earlier ones may still be in the store.

    Raises:
        CommunicationError: Some have not come within the group's timeout; names them.
        DisagreementError: On every rank: not all have the same options.
    """
    place, seconds = arguments.group_rank, arguments.timeout.total_seconds()

    def meeting(turn: int) -> Meeting:
        return Meeting(store, f"ppe_ddp/made/{turn}", place, len(ranks))

    turn = first_unused(lambda turn: meeting(turn).is_over())
    with_what = f"{options} and PPE_DDP_DEBUG={os.environ.get('PPE_DDP_DEBUG', '')}"
    outcome = meeting(turn).words(with_what, _look_at_members.get(), seconds)
    group = f"group {arguments.group_id!r} of ranks {list(ranks)}"
    if not outcome.words:
        others, reason, is_own = outcome.refusal
        others = [other for other in others if other != place]
        absent = ", ".join(str(ranks[other]) for other in others) or "that came too late"
        waited = f"has waited for the group's timeout of {seconds:g} s: rank {absent} did not make it"
        failed = f"has failed on rank {absent} ({reason})" if is_own else f"has failed ({reason})"
        raise outcome.error(
            f"rank {ranks[place]}: making {group} {failed if reason else waited}. "
            "Where only its ranks make a group (use_local_synchronization=True), torch names it by how many groups a "
            "process has, or has tried to make, so that must be equally many on each; else all ranks of the job call "
            "new_group()",
            others,
        )
    for other, others in zip(ranks, outcome.words, strict=True):
        if others != outcome.words[0]:
            raise DisagreementError(
                f"{group}: rank {ranks[0]} makes it with {outcome.words[0]}, and rank {other} with {others}. Give the "
                "same on every rank"
            )
    return turn


def exchange(
    group: ProcessGroup, name: str, word: Any, look: Callable[[], None] = lambda: None, *, may_leave: bool = False
) -> list[Any]:
    """Exchange a JSON ``word`` over the store; returns the words of all ranks of ``group``, a registered group.

    All ranks must call this together, with a new ``name``; see :meth:`Meeting.words`.

    It sends nothing in the group, which is the user's, and which this library cannot end before Python ends: a gloo
    thread drops an operation only a moment after its wait has returned. If Python has ended by then, C++ ends the
    process.

    Raises:
        CommunicationError: Not all ranks have come within the group's timeout; names them.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    seconds = (timeout_of(group) or default_pg_timeout).total_seconds()
    store = WrittenKeys(store_of(group))
    outcome = Meeting(store, f"ppe_ddp/{name}", rank, world_size).words(word, look, seconds, may_leave=may_leave)
    if not outcome.words:
        look()  # may raise a better error
        absent, reason, _ = outcome.refusal
        why = f"has left ({reason})" if reason else f"did not come within the group's timeout of {seconds:g} s"
        raise outcome.error(
            f"rank {rank} of {world_size}: rank {', '.join(map(str, absent))} {why}. All ranks of the group must wrap "
            "the module together. A copy of a wrapper waits for all ranks in its first forward with gradients; "
            "a rank that alone has one evaluates it in torch.no_grad()",
            absent,
        )
    written = kept_with(group, _stores_of_exchanges)
    written.append(store)
    while len(written) > _LAST:
        written.popleft().delete_all()
    return list(outcome.words)


def _stores_of_exchanges() -> deque[WrittenKeys]:
    """The stores of one group's last exchanges, whose keys still exist."""
    return deque()


def first_unused(is_used: Callable[[int], bool]) -> int:
    """The first turn that no earlier group of this name has used; turns are used in order, so it is a binary search."""
    unused = 1
    while is_used(unused):
        unused *= 2
    return bisect_left(range(unused), True, unused // 2 + 1, key=lambda turn: not is_used(turn))
