"""Waits of a group whose ranks meet in a store: that is where one tells the others that it has given the group up."""

from __future__ import annotations

import math
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from ppe_ddp.backends.process_group.bounded_store import BoundedStore
from ppe_ddp.backends.process_group.polling_waits import PollingWaits

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppe_ddp.backends.process_group.written_keys import WrittenKeys

_KEY = "given up"
_LOOK_SECONDS = 0.1  # between looks at the store: each is a message, and waits until a busy core serves it
_RARE_LOOK_SECONDS = 10.0  # ... where memory shows when it is time


class StoreWaits(PollingWaits):
    """The waits of one group.

    Args:
        store: Of these ranks alone, and of this group alone.
        rank: This process in the group.
        place: Who and where, for errors: ``"rank 1 of 4, group 'tp'"``.
        timeout: How long a wait may take, in seconds.

    Attributes:
        is_closed_elsewhere: Whether another rank has given the group up, by a quicker way than the store; the reason
            is in the store then.
        sees_every_rank: Whether that way shows it of all ranks, so that the store is hardly asked before.
    """

    def __init__(self, store: WrittenKeys, rank: int, place: str, timeout: float) -> None:
        super().__init__(place, timeout, "shm")
        self.is_closed_elsewhere: Callable[[], bool] = bool
        self.sees_every_rank = False
        self._store = BoundedStore(store)
        self._rank = rank
        self._looked = -math.inf

    def look_now(self) -> bool:
        """Whether a rank has given the group up; asks the store in any case."""
        self._looked = -math.inf
        return self.is_over()

    def _notice(self) -> str:
        now, is_closed = monotonic(), self.is_closed_elsewhere()
        if not is_closed and now - self._looked < (_RARE_LOOK_SECONDS if self.sees_every_rank else _LOOK_SECONDS):
            return ""
        self._looked = now
        with suppress(RuntimeError):  # the store may be gone, or out of reach
            reason = self._store.do(_reason)
            if reason:
                return reason
        return "another rank has given this group up" if is_closed else ""

    def _tell(self, reason: str) -> None:
        with suppress(RuntimeError):
            text = f"rank {self._rank} has given this group up: {reason}"
            self._store.do(lambda store: store.compare_set(_KEY, "", text))


def _reason(store: WrittenKeys) -> str:
    return store.get(_KEY).decode() if store.check([_KEY]) else ""
