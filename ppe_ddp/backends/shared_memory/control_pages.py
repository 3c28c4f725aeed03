"""Control pages: a page of each rank of a node for each group, in which the others see how far it has come.

    life of a page    0: of its first group     1: its rank has left that group, or has a page of another one here
    rank 0 leaves     its page goes from 0 to 1; rank 1 may look at it all the same
    rank 1 leaves     its page goes from 0 to 1, so both are unused: each rank takes its own again, for another group

Apart from the reservation, where memory is its owner's to give back: a page is also its readers'. A rank that never
leaves a group, as it has died or is kept by somebody, keeps the pages of the others in use.
"""

from __future__ import annotations

import functools
import mmap
import os
import threading
import weakref
from typing import TYPE_CHECKING

from ppe_ddp.backends.shared_memory.shared_reservation import shared_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppe_ddp.backends.shared_memory.shared_reservation import SharedMemory

_LIFE_WORDS = 8  # a cache line of its own


class ControlPage:
    """The page of one rank for one group; made before that rank can know that this one has all it needs, and leave.

    Args:
        space: The reservation of that rank.
        position: Where the page begins in it.

    Attributes:
        position: The same.
        words: What the rank shows, as int64; zeros at first. Only that rank writes there.
    """

    def __init__(self, space: mmap.mmap, position: int) -> None:
        page = memoryview(space)[position : position + mmap.PAGESIZE].cast("q")
        self.position = position
        self.words = page[_LIFE_WORDS:]
        self._life = page[:1]
        self._first_seen = self._life[0]

    @property
    def is_left(self) -> bool:
        """Whether its rank has left the group."""
        return bool(self._life[0] != self._first_seen)

    def leave(self) -> None:
        """Show the others that this rank, whose page it is, looks at no page of the group any more."""
        self._life[0] = self._first_seen + 1

    def clear(self) -> None:
        """Make it zeros again for another group; it has the same life until that is left."""
        self.words[:] = memoryview(bytes(self.words.nbytes)).cast("q")


class ControlPages:
    """The control pages of this process.

    Args:
        memory: The reservation that they lie in.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # Filled by finalizers, which may run in the middle of anything: never under the lock.
        self._left: list[tuple[int, Sequence[ControlPage]]] = []

    def take(self) -> int:
        """The position of a page for a group that is being made.

        Raises:
            MemoryError: The reservation is full.
        """
        with self._lock:
            for place, (position, pages) in enumerate(self._left):
                if all([page.is_left for page in pages]):
                    del self._left[place]
                    ControlPage(self._memory.attach(self._memory.address), position).clear()
                    return position
        return self._memory.reserve(mmap.PAGESIZE)

    def give_back(self, position: int) -> None:
        """A page that no rank has come to look at."""
        self._left.append((position, ()))

    def leave_with(self, user: object, own: int, pages: Sequence[ControlPage]) -> None:
        """Leave a group as soon as ``user`` is no more.

        Args:
            user: What looks at the pages.
            own: Which of the pages is this rank's.
            pages: Of all ranks of this node.
        """
        weakref.finalize(user, self._leave, own, pages).atexit = False

    def _leave(self, own: int, pages: Sequence[ControlPage]) -> None:
        if os.getpid() == self._pid:  # a forked child has no say in it
            pages[own].leave()
            self._left.append((pages[own].position, pages))


def control_pages() -> ControlPages:
    """Those of this process.

    Raises:
        OSError: It has no reservation.
    """
    return _made(os.getpid())


@functools.cache
def _made(_pid: int) -> ControlPages:
    return ControlPages(shared_memory())
