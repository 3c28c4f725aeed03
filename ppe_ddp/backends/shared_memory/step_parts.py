"""Tells whoever asks what a rank's time in shared memory goes to: the parts of steps, while a timeline is made.

node     this rank sums, or copies, in the memory of the ranks of its node
wire     what it has summed is under way to the other nodes, until this rank has noticed that theirs is here
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import ClassVar

PartListener = Callable[[str, str, int, int], None]
"""Called with ``"node"`` or ``"wire"``, the step's number, its begin by ``perf_counter_ns()``, and bytes; by any
thread."""


class StepParts:
    """The one who asks."""

    listener: ClassVar[PartListener | None] = None

    @classmethod
    def begin(cls) -> int:
        """The time; 0 where nobody asks."""
        return 0 if cls.listener is None else perf_counter_ns()

    @classmethod
    def end(cls, kind: str, number: int, begin: int, nbytes: int) -> None:
        """A part of step ``number`` has ended; nothing where nobody asked as it began, or does not any more."""
        if begin and cls.listener is not None:
            cls.listener(kind, str(number), begin, nbytes)
