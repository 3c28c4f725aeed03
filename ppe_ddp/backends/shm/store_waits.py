"""Waits of a group whose ranks meet in a store: that is where one tells the others that it has given the group up."""

from __future__ import annotations

from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING

from ppe_ddp.backends.process_group.polling_waits import PollingWaits

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppe_ddp.backends.group_internals import Store

_KEY = "given up"
_LOOK_SECONDS = 0.1  # between looks at the store, each of which may be a message


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
    """

    def __init__(self, store: Store, rank: int, place: str, timeout: float) -> None:
        super().__init__(place, timeout, "shm")
        self.is_closed_elsewhere: Callable[[], bool] = bool
        self._store = store
        self._rank = rank
        self._looked = 0.0

    def look_now(self) -> bool:
        """Whether a rank has given the group up; asks the store in any case."""
        self._looked = 0.0
        return self.is_over()

    def _notice(self) -> str:
        now, is_closed = monotonic(), self.is_closed_elsewhere()
        if not is_closed and now - self._looked < _LOOK_SECONDS:
            return ""
        self._looked = now
        with suppress(RuntimeError):  # the store may be gone
            if self._store.check([_KEY]):
                return self._store.get(_KEY).decode()
        return "another rank has given this group up" if is_closed else ""

    def _tell(self, reason: str) -> None:
        with suppress(RuntimeError):
            self._store.compare_set(_KEY, "", f"rank {self._rank} has given this group up: {reason}")
