"""The store that the ranks of a group share: what a rank writes there, how it is asked, and where ranks meet.

WrittenKeys          remembers what this rank has written, so that it can be deleted when no rank reads it any more
BoundedStore         gives up a store that does not answer
Meeting              each rank brings a word; one outcome for all
Reports              what some ranks append, and all ask for now and then: in one call, however many ranks there are
await_members()      waits until all ranks make the same group
exchange()           the words of all ranks of a group of torch's
"""

from __future__ import annotations

import functools
import json
import os
import queue
import threading
from collections import deque
from concurrent.futures import Future, TimeoutError
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from torch import distributed as dist
from torch.distributed import default_pg_timeout

from ppe_ddp.backends.group_internals import PrefixStore, kept_with, store_of, timeout_of
from ppe_ddp.errors import CommunicationError, DisagreementError
from ppe_ddp.waiting import each_process, paced, progress_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import timedelta

    from torch.distributed import ProcessGroup

    from ppe_ddp.backends.group_internals import Store

T = TypeVar("T")

_NAP = 0.001  # seconds between looks at the store ...
_LONGEST_PAUSE = 0.02  # ... which grow to this
_LAST = 16  # exchanges whose words stay in the store; all have read the one before, but threads may be in several

SILENT = "the store that the ranks share does not answer: the process that serves it has stopped, or the network is cut"


class WrittenKeys:
    """A store, or a part of it, and the keys that this rank has written there."""

    def __init__(self, store: Store) -> None:
        self._whole = store
        self._prefix = ""
        self._written: dict[str, None] = {}

    def under(self, name: str) -> WrittenKeys:
        """The part whose keys begin with ``name`` and a slash; they are deleted together with those of the whole."""
        part = WrittenKeys(self._whole)
        part._prefix = f"{self._prefix}{name}/"
        part._written = self._written
        return part

    @property
    def store(self) -> Store:
        """A plain store of this part, for gloo; its keys are to be counted by :meth:`note`."""
        return PrefixStore(self._prefix[:-1], self._whole) if self._prefix else self._whole

    def note(self, key: str) -> str:
        """Count a key as written; its name in the whole store."""
        name = self._prefix + key
        self._written[name] = None
        return name

    def set(self, key: str, value: str) -> None:
        self._whole.set(self.note(key), value)

    def add(self, key: str, amount: int) -> int:
        return self._whole.add(self.note(key), amount)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Write ``value`` where ``expected`` was, which is empty for nothing; what is there then."""
        return self._whole.compare_set(self.note(key), expected, value)

    def get(self, key: str) -> bytes:
        """What was written; waits for it."""
        return self._whole.get(self._prefix + key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """What was written under each of these; waits for it."""
        return multi_get(self._whole, [self._prefix + key for key in keys])

    def check(self, keys: Sequence[str]) -> bool:
        return self._whole.check([self._prefix + key for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        self._whole.wait([self._prefix + key for key in keys], timeout)

    def delete_key(self, key: str) -> None:
        """Delete what any rank has written."""
        self._written.pop(self._prefix + key, None)
        self._whole.delete_key(self._prefix + key)

    def delete_all(self) -> None:
        """Delete what this rank has written, as far as the store can; no rank may read it any more."""
        while self._written:
            name, _ = self._written.popitem()
            with suppress(RuntimeError):  # it is gone, or one of the user's that cannot delete
                self._whole.delete_key(name)


def multi_get(store: Any, keys: Sequence[str]) -> list[bytes]:
    """What was written under each of ``keys``, in one call where the store can do that; waits for it."""
    if keys and store.has_extended_api():
        return [bytes(value) for value in store.multi_get(list(keys))]
    return [store.get(key) for key in keys]


class BoundedStore:
    """Calls one store, and waits for its answer for so many seconds, unless the call says otherwise."""

    def __init__(self, store: Store | WrittenKeys, seconds: float = 1.0) -> None:
        self._store = store if isinstance(store, WrittenKeys) else WrittenKeys(store)
        self._seconds = seconds

    def do(self, calls: Callable[[WrittenKeys], T], seconds: float | None = None) -> T:
        """What ``calls(store)`` returns or raises; CommunicationError where the store does not answer."""
        return _caller().result(functools.partial(calls, self._store), seconds or self._seconds)

    def delete_all(self) -> None:
        """Delete what this rank has written, which no rank reads any more; not all of it where nobody answers."""
        with suppress(CommunicationError):
            self.do(WrittenKeys.delete_all)


class Reports:
    """Texts that ranks append to one list, which all of them look at now and then.

    A look asks for their number alone, and reads those that are new. The store counts a text before it is written, so
    that of a rank which dies in between there is none.
    """

    def __init__(self, store: BoundedStore, key: str) -> None:
        self._store = store
        self._key = key
        self._read: dict[str, bytes] = {}

    def append(self, text: str) -> None:
        """Write ``text``; the others find it as soon as this returns."""

        def write(store: WrittenKeys) -> None:
            store.set(f"{self._key}/{store.add(f'{self._key}/count', 1)}", text)

        self._store.do(write)

    def look(self) -> list[bytes]:
        """The texts so far, in order."""

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
    """The thread of this process that calls stores: those of all groups are parts of one."""

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
        del call, function  # which the error's frames would keep


_caller = each_process(_Caller)


class MeetingOutcome(NamedTuple):
    """What came of a meeting, the same for every rank."""

    words: Sequence[Any]  # of all ranks, in their order; empty where one has refused
    rank: int  # the rank that has spoken: the last to come, or the one that has refused
    refusal: Any = None  # its word, where it has refused
    place: int = 0  # in the order of all meetings whose places the ranks count, where all have come; else 0

    def error(self, message: str, absent: Sequence[int]) -> CommunicationError:
        """The error of one that was refused: names the ``absent`` ranks, and what the rank that refused has raised."""
        _, reason, is_own = self.refusal
        error = CommunicationError(message)
        error.ranks, error.reason = tuple(absent), reason if is_own else ""
        return error


class Meeting:
    """A meeting of all ranks in a store: each brings a word, and all learn the words of all, or that one has refused.

    The last rank to come joins the words, so that each reads one key. Who does not wait any longer refuses. Whoever
    speaks first decides for all.

    Args:
        name: New, and the same on every rank.
        next_place: Gives a place in an order of meetings; called once all have come, by one rank.
    """

    def __init__(
        self, store: WrittenKeys, name: str, rank: int, size: int, next_place: Callable[[], int] = int
    ) -> None:
        self._store, self._next_place = store, next_place
        self._outcome = f"{name}/outcome"
        self._count = f"{name}/count"
        self._name, self._rank, self._size = name, rank, size

    def come(self, word: Any) -> None:
        """Bring this rank's word, which JSON can write."""
        self._store.set(f"{self._name}/{self._rank}", json.dumps(word))
        if self._store.add(self._count, 1) == self._size:
            self._join()

    def refuse(self, word: Any) -> MeetingOutcome:
        """Refuse, unless all have come or one has refused before; the outcome."""
        if self._store.check(self._keys()):  # who has come last may have died since
            return self._join()
        return self._decide(MeetingOutcome([], self._rank, word))

    def _join(self) -> MeetingOutcome:
        words = [json.loads(text) for text in self._store.multi_get(self._keys())]
        return self._decide(MeetingOutcome(words, self._rank, None, self._next_place()))

    def _decide(self, outcome: MeetingOutcome) -> MeetingOutcome:
        return MeetingOutcome(*json.loads(self._store.compare_set(self._outcome, "", json.dumps(outcome))))

    def outcome(self) -> MeetingOutcome | None:
        """The outcome; None as long as there is none."""
        if not self._store.check([self._outcome]):
            return None
        return MeetingOutcome(*json.loads(self._store.get(self._outcome)))

    def is_over(self) -> bool:
        """Whether it ended for this rank: all have come, or it was refused after this rank had come."""
        outcome = self.outcome()
        return outcome is not None and bool(outcome.words or self._store.check([f"{self._name}/{self._rank}"]))

    def is_full(self) -> bool:
        """Whether all have come. While they have not, the place of this meeting comes after all that are taken."""
        return self._store.add(self._count, 0) == self._size

    def absent(self) -> list[int]:
        return [rank for rank, key in enumerate(self._keys()) if not self._store.check([key])]

    def forget(self) -> None:
        """Delete this rank's word, and on rank 0 the rest; called on all ranks when all know the outcome."""
        for key in (f"{self._name}/{self._rank}", *((self._count, self._outcome) if self._rank == 0 else ())):
            self._store.delete_key(key)

    def _keys(self) -> list[str]:
        return [f"{self._name}/{rank}" for rank in range(self._size)]

    def words(self, word: Any, look: Callable[[], None], seconds: float, *, may_leave: bool = False) -> MeetingOutcome:
        """Come, and wait for the outcome; after so many seconds this rank refuses.

        Moves meanwhile what is under way in all groups: a rank may need it to come. ``look`` raises what ends the wait.
        With ``may_leave`` a rank that has come and is gone since is not missed.

        Returns:
            The outcome. Its refusal is the list of absent ranks; the error that has ended the wait of the rank that
            refused, if there was one; and whether it is that rank's own, and not that it has found others lost.
        """
        found: list[MeetingOutcome] = []

        def has_ended() -> bool:
            outcome = self.outcome()
            if outcome is not None:
                found.append(outcome)
            return outcome is not None

        progress, ask = progress_engine(os.getpid()), paced(has_ended, longest=_LONGEST_PAUSE)
        try:
            self.come(word)
            if not progress.wait_until(ask, paced(look, _LONGEST_PAUSE), seconds=seconds, nap=_NAP):
                return self.refuse([self.absent(), "", False])
        except BaseException as error:  # also an interrupt: the others need not wait for this rank
            with suppress(RuntimeError):  # the store may be gone
                is_own = not isinstance(error, CommunicationError)
                outcome = self.refuse([[self._rank], f"{type(error).__name__}: {error}", is_own])
                if may_leave and outcome.words and not is_own:
                    return outcome
            raise
        return found[0]


_look_at_members: ContextVar[Callable[[], None]] = ContextVar("look", default=lambda: None)


@contextmanager
def looking(look: Callable[[], None]) -> Iterator[None]:
    """While groups are made in here, their waits for members call ``look`` now and then; it raises what ends the wait.

    torch.distributed makes a group, and passes nothing on to its backend that could be called.
    """
    token = _look_at_members.set(look)
    try:
        yield
    finally:
        _look_at_members.reset(token)


def await_members(arguments: Any, ranks: Sequence[int], options: object, store: WrittenKeys) -> int:
    """Wait until all ``ranks`` (of the world, in the group's order) make this group; a transport may wait for ever.

    All must make it with the same ``options``, compared by their text, as is whether collectives are compared. The
    ``store`` is shared by them, under the name of the group.

    Returns:
        How many groups of this name there have been, with this one: keys in the store of those before are still there.

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
        others, reason, _ = outcome.refusal
        others = [other for other in others if other != place]
        absent = ", ".join(str(ranks[other]) for other in others) or "that came too late"
        waited = f"has waited for the group's timeout of {seconds:g} s: rank {absent} did not make it"
        raise outcome.error(
            f"rank {ranks[place]}: making {group} {f'has failed on rank {absent} ({reason})' if reason else waited}. "
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
    """The words of all ranks of ``group``, one of torch's, in their order; all of them must call this together.

    By the store, and not by the group: what the threads of a backend have done for us they give up a moment after this
    rank has gone on, and gloo's need Python for it. Where Python is at its end by then, C++ ends the process. Our own
    duplicates of a group are ended before; the user's group is not ours to end, so nothing of ours goes through it. The
    ``name`` is new; the word is what JSON can write; ``look`` raises what ends the wait. With ``may_leave`` a rank that
    has come and is gone since is not missed.

    Raises:
        CommunicationError: Not all ranks have come within the group's timeout; names them.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    seconds = (timeout_of(group) or default_pg_timeout).total_seconds()
    store = WrittenKeys(store_of(group))
    outcome = Meeting(store, f"ppe_ddp/{name}", rank, world_size).words(word, look, seconds, may_leave=may_leave)
    if not outcome.words:
        look()  # it may know why
        absent, reason, _ = outcome.refusal
        why = f"has left ({reason})" if reason else f"did not come within the group's timeout of {seconds:g} s"
        raise outcome.error(
            f"rank {rank} of {world_size}: rank {', '.join(map(str, absent))} {why}. All ranks of the group must wrap "
            "the module together",
            absent,
        )
    written = kept_with(group, _stores_of_exchanges)
    written.append(store)
    while len(written) > _LAST:
        written.popleft().delete_all()
    return list(outcome.words)


def _stores_of_exchanges() -> deque[WrittenKeys]:
    """Those of one group whose keys are still in the store."""
    return deque()


def first_unused(is_used: Callable[[int], bool]) -> int:
    """The first turn that no group of this name has had, which was destroyed or given up; they come in order."""
    used, unused = 0, 1
    while is_used(unused):
        used, unused = unused, 2 * unused
    while unused - used > 1:
        middle = (used + unused) // 2
        used, unused = (middle, unused) if is_used(middle) else (used, middle)
    return unused
