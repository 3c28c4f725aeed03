"""The store that the ranks of a group share: what a rank writes there, how it is asked, and where ranks meet.

WrittenKeys          remembers what this rank has written, so that it can be deleted when no rank reads it any more
BoundedStore         gives up a store that does not answer
Reports              what some ranks append, and all ask for now and then: in one call, however many ranks there are
await_members()      waits until all ranks make the same group
monitored_barrier()  names the ranks that are missing
"""

from __future__ import annotations

import functools
import json
import os
import queue
import threading
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ppe_ddp.backends.group_internals import PrefixStore
from ppe_ddp.errors import CommunicationError, DisagreementError
from ppe_ddp.waiting import paced, progress_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from ppe_ddp.backends.group_internals import Store
    from ppe_ddp.backends.work import Waits

T = TypeVar("T")

SILENT = "the store that the ranks share does not answer: the process that serves it has stopped, or the network is cut"


class WrittenKeys:
    """A store, or a part of it, and the keys that this rank has written there.

    Args:
        store: Of torch.distributed.
    """

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
        """Write ``value``."""
        self._whole.set(self.note(key), value)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, and return the sum."""
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
        """Whether all of these were written."""
        return self._whole.check([self._prefix + key for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all of these were written."""
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
    """Calls one store.

    Args:
        store: Of torch.distributed, or the keys in one.
        seconds: How long to wait for an answer, unless the call says otherwise.
    """

    def __init__(self, store: Store | WrittenKeys, seconds: float = 1.0) -> None:
        self._store = store if isinstance(store, WrittenKeys) else WrittenKeys(store)
        self._seconds = seconds

    def do(self, calls: Callable[[WrittenKeys], T], seconds: float | None = None) -> T:
        """What ``calls(store)`` returns or raises.

        Raises:
            CommunicationError: The store does not answer.
        """
        return _caller(os.getpid()).result(functools.partial(calls, self._store), seconds or self._seconds)

    def delete_all(self) -> None:
        """Delete what this rank has written, which no rank reads any more; not all of it where nobody answers."""
        with suppress(CommunicationError):
            self.do(WrittenKeys.delete_all)


class Reports:
    """Texts that ranks append to one list, which all of them look at now and then.

    A look asks for their number alone, and reads those that are new. The store counts a text before it is written, so
    that of a rank which dies in between there is none.

    Args:
        store: Shared by the ranks.
        key: Of the list.
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
        self._calls: queue.SimpleQueue[_StoreCall] = queue.SimpleQueue()
        self._silent: _StoreCall | None = None
        threading.Thread(target=self._serve, name="ppe_ddp-store", daemon=True).start()

    def result(self, function: Callable[[], T], seconds: float) -> T:
        if self._silent is not None and not self._silent.is_over.is_set():
            raise CommunicationError(SILENT)
        call = _StoreCall(function)
        self._calls.put(call)
        if not call.is_over.wait(seconds):
            self._silent = call
            raise CommunicationError(SILENT)
        error, call.error = call.error, None
        if error is not None:
            raise error
        result: T = call.result
        return result

    def _serve(self) -> None:
        while True:
            self._calls.get().make()


class _StoreCall:
    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.is_over = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None

    def make(self) -> None:
        try:
            self.result = self._function()
        except Exception as error:
            self.error = error
        self.is_over.set()


@functools.cache
def _caller(_pid: int) -> _Caller:
    return _Caller()


def await_members(arguments: Any, ranks: Sequence[int], options: object, store: WrittenKeys) -> int:
    """Wait until all ``ranks`` make this group, which a transport itself may wait for without an end.

    Keeps going what is under way on other groups, which a rank may need to get here.

    Args:
        arguments: torch's ``_DistributedBackendOptions``.
        ranks: Of the world, in the order of the group.
        options: What they must all make it with; compared by its text, as is whether collectives are compared.
        store: That the ranks share, under the name of the group.

    Returns:
        How many groups of this name there have been, with this one: keys in the store of those before are still there.

    Raises:
        CommunicationError: Some have not come within the group's timeout; names them.
        DisagreementError: On every rank: not all have the same options.
    """
    place, seconds = arguments.group_rank, arguments.timeout.total_seconds()
    turn = first_unused(lambda turn: store.check([f"ppe_ddp/made/{turn}"]))
    keys = [f"ppe_ddp/makes/{turn}/{other}" for other in range(len(ranks))]
    differing = f"ppe_ddp/options/{turn}/differing"
    with_what = f"{options} and PPE_DDP_DEBUG={os.environ.get('PPE_DDP_DEBUG', '')}"
    own = json.dumps([ranks[place], with_what])
    first = store.compare_set(f"ppe_ddp/options/{turn}", "", own)  # that of whoever came first
    if json.loads(first)[1] != with_what:
        store.set(differing, own)
    store.set(keys[place], "1")  # last: when all have come, all have compared
    is_decided, start = paced(lambda: store.check([f"ppe_ddp/made/{turn}"])), monotonic()

    def is_made(outcome: str) -> bool:
        # What one rank says first holds for all: nobody begins to connect to a rank that has given up just now.
        return bool(store.compare_set(f"ppe_ddp/made/{turn}", "", outcome) == b"yes")

    def look() -> None:
        if monotonic() - start > seconds and not is_made("no"):
            refuse()

    def refuse() -> NoReturn:
        absent = [str(rank) for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        who = ", ".join(absent) or "that came too late"
        raise CommunicationError(
            f"rank {ranks[place]}: making group {arguments.group_id!r} of ranks {list(ranks)} has waited for the "
            f"group's timeout of {seconds:g} s: rank {who} did not make it. Where "
            "only its ranks make a group (use_local_synchronization=True), torch names it by how many groups a "
            "process has, so each of them must have made equally many; else all ranks of the job call new_group()"
        )

    try:
        if store.add(f"ppe_ddp/come/{turn}", 1) == len(ranks):
            is_made("yes")
        progress_engine(os.getpid()).wait_until(lambda: is_decided() and (is_made("yes") or refuse()), look)
    except BaseException:  # an interrupt: the others need not wait for this rank
        with suppress(RuntimeError):  # the store may be gone
            is_made("no")
        raise
    if store.check([differing]):
        (one, its), (other, others) = sorted([json.loads(first), json.loads(store.get(differing))])
        raise DisagreementError(
            f"group {arguments.group_id!r} of ranks {list(ranks)}: rank {one} makes it with {its}, and rank {other} "
            f"with {others}. Give the same on every rank"
        )
    return turn


def first_unused(is_used: Callable[[int], bool]) -> int:
    """The first turn that no group of this name has had, which was destroyed or given up; they come in order."""
    used, unused = 0, 1
    while is_used(unused):
        used, unused = unused, 2 * unused
    while unused - used > 1:
        middle = (used + unused) // 2
        used, unused = (middle, unused) if is_used(middle) else (used, middle)
    return unused


def monitored_barrier(
    store: WrittenKeys, name: str, rank: int, size: int, waits: Waits, seconds: float, all_missing: bool
) -> None:
    """Wait until every rank is here, or name those that are not; every rank calls it together.

    Args:
        store: Of these ranks alone.
        name: Of this barrier; another one each time.
        rank: This one.
        size: How many there are.
        waits: Of the group.
        seconds: How long rank 0 waits for the others, and they for it; not positive: the group's timeout.
        all_missing: Whether rank 0 names all that are missing, or the first one.

    Raises:
        CommunicationError: A rank did not come in time. On rank 0 the message names it.
    """
    seconds = seconds if seconds > 0 else waits.timeout
    keys, end = [f"{name}/{one}" for one in range(size)], monotonic() + seconds
    done = f"{name}/done"
    store.set(keys[rank], "")

    def absent() -> list[int]:
        return [one for one in range(size) if not store.check([keys[one]])]

    here = paced(lambda: store.check(keys if rank == 0 else [done]))
    waits.until(lambda: here() or monotonic() > end, "monitored_barrier", absent)
    missing = absent() if rank == 0 else []
    if missing:
        raise CommunicationError(
            f"{waits.place}: ranks {missing if all_missing else missing[:1]} did not reach monitored_barrier within "
            f"{seconds:g} s"
        )
    if rank == 0:
        store.set(done, "")
    elif not store.check([done]):
        raise CommunicationError(
            f"{waits.place}: monitored_barrier had no answer from rank 0 within {seconds:g} s; its error says which "
            "rank is missing"
        )
