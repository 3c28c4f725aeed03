"""The Work of a collective in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppe_ddp.backends.process_group.pending_work import PendingWork
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppe_ddp.backends.process_group.pending_work import FailableWaits
    from ppe_ddp.backends.shared_memory.launched_step import LaunchedStep
    from ppe_ddp.backends.shared_memory.step_queue import StepQueue


class SharedMemoryWork(PendingWork):
    """A collective in shared memory, under way.

    ``wait()`` also raises CommunicationError where the ranks have brought different sizes or dtypes; the same on all.
    """

    def __init__(self, waits: FailableWaits, queue: StepQueue, launched: Sequence[LaunchedStep]) -> None:
        super().__init__(launched[0].step.title, waits)
        self._queue = queue
        self._launched = launched

    def when_ended(self, call: Callable[[], None]) -> None:
        """As :meth:`PendingWork.when_ended`, in any call that advances it."""
        self._launched[-1].at_end = self._tell_end
        super().when_ended(call)

    def _has_ended(self) -> bool:
        return self._queue.is_left_alone(self._launched[-1])

    def _failure(self) -> BaseException | None:
        reasons = [reason for reason in map(self._queue.failure_of, self._launched) if reason]
        return CommunicationError(reasons[0]) if reasons else None

    def _absent(self) -> Sequence[int]:
        return self._queue.absent(self._launched[-1])
