"""One run of a step in shared memory, as the queue of its group keeps it while it is under way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ppe_ddp.backends.shared_memory.shared_steps import Step
    from ppe_ddp.backends.shared_memory.two_level_steps import Crossing


class LaunchedStep:
    """One run of a step.

    Args:
        step: The step.
        number: Counted on each group, from 1.
        tensors: What must not be freed before all ranks have done their part.

    Attributes:
        is_staged: Whether its tensor is to be copied into shared memory, and the result back.
        error: What is wrong with it; empty while nothing is known.
        crossing: What is under way between nodes.
        crossed_at: Since when; 0 where nobody asks.
        at_end: Called when it is complete on all ranks, under the lock of the progress engine; None where nobody asks.
    """

    __slots__ = ("at_end", "crossed_at", "crossing", "error", "is_staged", "number", "step", "tensors")

    def __init__(self, step: Step, number: int, tensors: Any) -> None:
        self.step = step
        self.number = number
        self.tensors = tensors
        self.is_staged = step.shared is None
        self.error = ""
        self.crossing: Crossing | None = None
        self.crossed_at = 0
        self.at_end: Callable[[], None] | None = None
