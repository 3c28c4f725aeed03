"""Progress thread: advances what is under way over MPI while the caller goes on.

By default where a group has several nodes: MPI moves messages in calls only, and a backward may make none for longer
than a network needs to go idle. On one node it takes a core from the computation, and advancing inline was faster.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time

from mpi4py import MPI

from ppe_ddp.backends.process_group.progress_engine import progress_engine

_NAP_SECONDS = 0.0002  # in naps of up to 1 ms a network of 1 Gbit/s goes idle


class ProgressThread:
    """One for each process.

    Raises:
        ValueError: The MPI does not let several threads call it.
    """

    def __init__(self, pid: int) -> None:
        if not is_possible():
            raise ValueError(
                "MpiOptions(thread=True) needs MPI_THREAD_MULTIPLE, which this MPI does not give: leave it out, or "
                "use another MPI library"
            )
        self._progress = progress_engine(pid)
        self._work = threading.Event()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="ppe_ddp-progress", daemon=True)
        self._thread.start()
        atexit.register(self._end)

    def wake(self) -> None:
        """Advance what is under way, until nothing is."""
        self._work.set()

    def _run(self) -> None:
        while not self._is_ending:
            self._work.wait()
            self._work.clear()
            while not self._progress.is_idle and not self._is_ending:
                turns = self._progress.turns
                time.sleep(_NAP_SECONDS)
                if self._progress.turns == turns:  # else the caller advances it
                    self._progress.progress()

    def _end(self) -> None:
        """Leave MPI before it is finalized."""
        self._is_ending = True
        self._work.set()
        self._thread.join()


def is_possible() -> bool:
    """Whether the MPI lets several threads call it."""
    return MPI.Query_thread() >= MPI.THREAD_MULTIPLE


@functools.cache
def progress_thread(pid: int) -> ProgressThread:
    """The progress thread of this process."""
    return ProgressThread(pid)
