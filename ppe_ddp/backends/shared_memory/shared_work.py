"""The Work of a collective in shared memory, which is under way until it is waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ppe_ddp.backends.process_group.python_work import PythonWork
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from ppe_ddp.backends.shared_memory.step_queue import LaunchedStep, StepQueue


class SharedMemoryWork(PythonWork):
    """A collective in shared memory, under way.

    It advances in every call of the backend, on any group. Its tensors must be left alone until ``wait()`` returns.
    """

    def __init__(self, queue: StepQueue, launched: Sequence[LaunchedStep], result: Any) -> None:
        super().__init__(result)
        self._queue = queue
        self._launched = launched

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the result is in place, no longer than the group's timeout.

        Raises:
            CommunicationError: The ranks have brought different sizes or dtypes; the same error on all. Or a rank
                did not come in time, or has given the group up.
        """
        launched, self._launched = self._launched, ()
        for one in launched:
            self._queue.finish(one)
        return True

    def is_completed(self) -> bool:
        """Whether the result is in place on all ranks, or never will be."""
        return not self._launched or self._queue.has_ended(self._launched[-1])

    def is_success(self) -> bool:
        """Whether it has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What ``wait()`` will raise."""
        reasons = [reason for reason in map(self._queue.failure_of, self._launched) if reason]
        return CommunicationError(reasons[0]) if reasons else None

    def get_future(self) -> torch.futures.Future[Any]:
        """A completed future of ``result()``: waits first, since who waits for a future calls no backend."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        try:
            self.wait()
        except CommunicationError as error:
            future.set_exception(error)
        else:
            future.set_result(self._result)
        return future
