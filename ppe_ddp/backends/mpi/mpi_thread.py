"""Communication thread: runs collectives in the order of their calls while the caller goes on.

A choice, not the default. MPI waits by spinning, so on one node the thread takes a core from the computation, and
calling inline was faster; over a network that is slow beside the computation, waiting elsewhere wins.
"""

from __future__ import annotations

import concurrent.futures
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI

from ppe_ddp.backends.process_group.python_work import PythonWork
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta


class CommunicationThread:
    """One for each process, so that the order of calls is kept across groups, too.

    Raises:
        ValueError: The MPI does not let several threads call it.
    """

    def __init__(self) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ValueError(
                "MpiOptions(thread=True) needs MPI_THREAD_MULTIPLE, which this MPI does not give: leave it out, or "
                "use another MPI library"
            )
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="ppe_ddp-communication")

    def submit(self, call: Callable[[], None], what: str, result: Any) -> QueuedWork:
        """Run ``call`` after all that was submitted before."""
        return QueuedWork(self._executor.submit(call), what, result)

    def flush(self) -> None:
        """Wait until all that was submitted has run."""
        self._executor.submit(lambda: None).result()


@functools.cache
def communication_thread(_pid: int) -> CommunicationThread:
    """The communication thread of this process."""
    return CommunicationThread()


class QueuedWork(PythonWork):
    """A collective that the communication thread runs. Its tensors must be left alone until ``wait()`` returns."""

    def __init__(self, future: concurrent.futures.Future[None], what: str, result: Any) -> None:
        super().__init__(result)
        self._future = future
        self._what = what

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it has run.

        Args:
            timeout: How long at most; None or a time that is not positive: until the group's timeout ends the job.

        Raises:
            CommunicationError: MPI reports an error, or the time is over; then the collective is still under way.
        """
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        try:
            self._future.result(seconds if seconds > 0.0 else None)
        except concurrent.futures.TimeoutError as error:
            raise CommunicationError(f"{self._what} has not ended within {seconds:g} s") from error
        return True

    def is_completed(self) -> bool:
        """Whether it has run, well or not."""
        return self._future.done()

    def is_success(self) -> bool:
        """Whether it has run without an error."""
        return self._future.done() and self._future.exception() is None

    def exception(self) -> BaseException | None:
        """The error that it ended with."""
        return self._future.exception() if self._future.done() else None

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of ``result()``."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def settle(done: concurrent.futures.Future[None]) -> None:
            error = done.exception()
            if error is None:
                future.set_result(self._result)
            else:
                future.set_exception(error)

        self._future.add_done_callback(settle)
        return future
