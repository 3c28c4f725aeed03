"""Exit hooks of a job under MPI: a rank that fails ends all.

MPI itself does not: a rank that raises leaves the others waiting in a collective, and waits for them in MPI_Finalize.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
from typing import TYPE_CHECKING

from mpi4py import MPI

from ppe_ddp.waiting import progress_engine

if TYPE_CHECKING:
    from types import TracebackType

_NAP_SECONDS = 0.002
_FORWARD_SECONDS = 0.1  # for the launcher to pass on the traceback before its own word about the end


class _JobHooks:
    """The exit hooks of this process (``sys.excepthook``, ``atexit``, mpi4py's)."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._exit_comm: MPI.Intracomm | None = None
        self._code = 0
        self._report = sys.excepthook
        sys.excepthook = self._end_all
        self._mpi4py_note = MPI._set_abort_status
        # by which ``python -m mpi4py`` tells of a SystemExit
        MPI._set_abort_status = self._note_exit_code  # type: ignore[assignment]
        atexit.register(self._wait_at_exit)

    def prepare_exit_barrier(self) -> None:
        if self._exit_comm is None:
            self._exit_comm = MPI.COMM_WORLD.Dup()

    def _end_all(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        """Print an uncaught exception, then end every rank: the others would wait for this one."""
        if hasattr(sys, "ps1") or sys.flags.interactive or os.getpid() != self._pid:
            self._report(kind, error, where)
            return
        # torch's own hook, around this one, collects what is printed and would show it too late.
        sys.stderr = sys.__stderr__
        self._report(kind, error, where)
        _abort()

    def _note_exit_code(self, code: int) -> None:
        """Remember that this process will end with ``code``, which is not 0."""
        self._code = code
        self._mpi4py_note(code)

    def _wait_at_exit(self) -> None:
        """Wait at a normal exit for the ranks that still work, without the spinning of MPI_Finalize."""
        if self._exit_comm is None or os.getpid() != self._pid or MPI.Is_finalized():
            return
        if self._code:
            world = MPI.COMM_WORLD
            print(
                f"rank {world.Get_rank()} of {world.Get_size()} has left with code {self._code}, so the job is ended",
                file=sys.stderr,
            )
            _abort(self._code)
        request = self._exit_comm.Ibarrier()
        progress_engine(self._pid).wait_until(request.Test, nap=_NAP_SECONDS)  # others may still need this rank's part


def install_job_hooks(*, together: bool = False) -> None:
    """Install the exit hooks, once a process.

    From then on, an exception that no one catches prints its traceback and ends all ranks, and the normal exit waits
    for the other ranks without using a core. ``os._exit()`` goes past all this.

    ``sys.exit(1)`` on one rank ends the job at once where it was started by ``mpirun python -m mpi4py script.py``.
    In a plain ``mpirun python script.py`` it does not, and ranks that wait for the one that has left wait until their
    timeout is over: Python hands a SystemExit that no one catches neither to ``sys.excepthook`` nor to ``atexit``, so
    that nothing in the process can tell this end from a good one.

    Args:
        together: Whether every rank of MPI's world makes this call, so that the exit can be arranged.
    """
    job = _job(os.getpid())
    if together:
        job.prepare_exit_barrier()


@functools.cache
def _job(pid: int) -> _JobHooks:
    return _JobHooks()


def _abort(code: int = 1) -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    time.sleep(_FORWARD_SECONDS)
    MPI.COMM_WORLD.Abort(code)
