"""Connections that are ended when Python exits: their threads must not need Python any more when it is gone."""

from __future__ import annotations

import atexit
import functools
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


class Ending(Protocol):
    """Connections that can be ended."""

    def end(self) -> None:
        """End now what can be ended without waiting for other ranks."""
        ...


@functools.cache
def ended_at_exit(_pid: int) -> weakref.WeakSet[Ending]:
    """The set of objects that this process ends when Python exits, held weakly."""
    alive: weakref.WeakSet[Ending] = weakref.WeakSet()
    atexit.register(_end_all, alive)
    return alive


def _end_all(alive: Iterable[Ending]) -> None:
    for each in list(alive):
        each.end()
