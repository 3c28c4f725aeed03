"""What this rank has written to a store that the ranks share, so that it can be deleted when no rank reads it any more.

A store keeps all it is told for as long as the job runs; and groups, which need some twenty keys each, are made anew
after every failure.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ppe_ddp.backends.group_internals import PrefixStore

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from ppe_ddp.backends.group_internals import Store


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
        """The same for what knows nothing else; what that writes is to be noted here."""
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
