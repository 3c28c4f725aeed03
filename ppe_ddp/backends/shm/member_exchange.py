"""Exchange of a few bytes between the ranks of one group through their store: how they get to know each other.

Whoever waits for others keeps going what this process has under way, and learns who has not come.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from ppe_ddp.backends.process_group.member_rendezvous import paced
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from ppe_ddp.backends.process_group.polling_waits import PollingWaits
    from ppe_ddp.backends.process_group.written_keys import WrittenKeys

_DONE = "done"


class MemberExchange:
    """The exchanges of one group, which every rank makes in the same order.

    Args:
        store: Of these ranks alone, and of this group alone.
        rank: This process in the group.
        size: How many ranks the group has.
        waits: Of the group.
    """

    def __init__(self, store: WrittenKeys, rank: int, size: int, waits: PollingWaits) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._waits = waits
        self._count = 0

    def all_gather(self, own: bytes) -> list[bytes]:
        """The bytes of every rank; every rank calls it together.

        Raises:
            CommunicationError: Some have not come within the group's timeout; names them.
        """
        keys = self._next_keys()
        self._store.set(keys[self._rank], own.hex())
        here = paced(lambda: self._store.check(keys))
        self._waits.until(here, "the connection of shared memory", lambda: self._absent(keys))
        return [bytes.fromhex(self._store.get(key).decode()) for key in keys]

    def monitored_barrier(self, seconds: float, all_missing: bool) -> None:
        """Wait until every rank is here, or name those that are not.

        Args:
            seconds: How long rank 0 waits for the others, and they for it; not positive: the group's timeout.
            all_missing: Whether rank 0 names all that are missing, or the first one.

        Raises:
            CommunicationError: A rank did not come in time. On rank 0 the message names it.
        """
        seconds = seconds if seconds > 0 else self._waits.timeout
        keys, end = self._next_keys(), monotonic() + seconds
        done = f"{keys[0]}/{_DONE}"
        self._store.set(keys[self._rank], "")
        here = paced(lambda: self._store.check(keys if self._rank == 0 else [done]))
        self._waits.until(lambda: here() or monotonic() > end, "monitored_barrier", lambda: self._absent(keys))
        missing = self._absent(keys) if self._rank == 0 else []
        if missing:
            raise CommunicationError(
                f"{self._waits.place}: ranks {missing if all_missing else missing[:1]} did not reach monitored_barrier "
                f"within {seconds:g} s"
            )
        if self._rank == 0:
            self._store.set(done, "")
        elif not self._store.check([done]):
            raise CommunicationError(
                f"{self._waits.place}: monitored_barrier had no answer from rank 0 within {seconds:g} s; its error "
                "says which rank is missing"
            )

    def _next_keys(self) -> list[str]:
        self._count += 1
        return [f"exchange/{self._count}/{rank}" for rank in range(self._size)]

    def _absent(self, keys: list[str]) -> list[int]:
        return [rank for rank in range(self._size) if not self._store.check([keys[rank]])]
