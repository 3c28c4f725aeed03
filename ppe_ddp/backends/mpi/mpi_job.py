"""A job under MPI: the rendezvous of its ranks (``init_method="mpi://"``), and exit hooks that end the job on failure.

Without the hooks, a rank that raises would wait in MPI_Finalize for the others, which wait for it in a collective.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import ipaddress
import json
import os
import socket
import sys
import textwrap
import time
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from urllib.parse import parse_qs, urlparse

from mpi4py import MPI
from torch.distributed import default_pg_timeout

from ppe_ddp.backends.group_internals import TCPStore
from ppe_ddp.errors import CommunicationError
from ppe_ddp.waiting import each_process, progress_engine

_NAP_SECONDS = 0.002
_FORWARD_SECONDS = 0.1  # for the launcher to forward the traceback before it reports the abort
# Environment variables with the number of ranks, and the launchers that set them.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
    ("MV2_COMM_WORLD_SIZE", "MVAPICH's mpirun"),
    ("PMI_SIZE", "an mpirun of the MPICH family (MPICH, Intel MPI)"),
    ("SLURM_STEP_NUM_TASKS", "Slurm's srun"),
    ("WORLD_SIZE", "torchrun, or another launcher that sets WORLD_SIZE"),
)

_ADDRESS_BYTES = 64  # for rank 0's address and port as JSON; the longest address is an IPv6 one of 39 bytes


class _JobHooks:
    """The exit hooks of this process (``sys.excepthook``, ``atexit``, mpi4py's)."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.exit_comm: MPI.Intracomm | None = None  # of the barrier at the exit
        self._code = 0
        self._report = sys.excepthook
        sys.excepthook = self._end_all
        self._mpi4py_note = MPI._set_abort_status
        # ``python -m mpi4py`` calls this with the code of a SystemExit
        MPI._set_abort_status = self._note_exit_code  # type: ignore[assignment]
        atexit.register(self._wait_at_exit)

    def _end_all(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        """Print an uncaught exception, then end all ranks, which would wait for this one."""
        if hasattr(sys, "ps1") or sys.flags.interactive or os.getpid() != self._pid:
            self._report(kind, error, where)
            return
        # Prefix each line with the rank. torch's own hook does so, but it wraps this one and would run too late.
        with contextlib.redirect_stderr(io.StringIO()) as text:
            self._report(kind, error, where)
        sys.stderr = sys.__stderr__
        if sys.stderr is not None:
            sys.stderr.write(textwrap.indent(text.getvalue(), f"[rank{MPI.COMM_WORLD.Get_rank()}]: "))
        _abort()

    def _note_exit_code(self, code: int) -> None:
        """Note that this process will end with ``code``, which is not 0."""
        self._code = code
        self._mpi4py_note(code)

    def _wait_at_exit(self) -> None:
        """Wait at a normal exit for ranks that still work, without using a core as MPI_Finalize does."""
        if self.exit_comm is None or os.getpid() != self._pid or MPI.Is_finalized():
            return
        if self._code:
            world = MPI.COMM_WORLD
            print(
                f"rank {world.Get_rank()} of {world.Get_size()} has left with code {self._code}, so the job is ended",
                file=sys.stderr,
            )
            _abort(self._code)
        request = self.exit_comm.Ibarrier()
        progress_engine(self._pid).wait_until(request.Test, nap=_NAP_SECONDS)  # other ranks may need this one's part


def install_job_hooks(*, together: bool = False) -> None:
    """Install the exit hooks, once in each process.

    From then on, an uncaught exception prints its traceback and ends all ranks. A normal exit waits for the other ranks
    without using a core. ``os._exit()`` bypasses both.

    ``sys.exit(1)`` on one rank ends the job at once only under ``mpirun python -m mpi4py script.py``: Python passes an
    uncaught SystemExit neither to ``sys.excepthook`` nor to ``atexit``.

    The exit can wait for all ranks only if every rank of MPI's world makes this call with ``together``.
    """
    job = _job_hooks()
    if together and job.exit_comm is None:
        job.exit_comm = MPI.COMM_WORLD.Dup()


_job_hooks = each_process(_JobHooks)


def _abort(code: int = 1) -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    time.sleep(_FORWARD_SECONDS)
    MPI.COMM_WORLD.Abort(code)


def rendezvous(url: str, timeout: timedelta | None) -> tuple[TCPStore, int, int]:
    """Make one store that all ranks of MPI's world share; all these ranks must call it together.

    Rank 0 serves the store on a free port: on the loopback interface if all ranks are on one machine, else on all.
    ``url`` is ``mpi://``, with a ``rank`` or ``world_size`` in its query if the user gave them. Returns the store, and
    MPI's rank and number of ranks.

    Raises:
        CommunicationError: The launcher belongs to another MPI library.
        ValueError: ``rank`` or ``world_size`` was given and differs from MPI's.
    """
    world = MPI.COMM_WORLD
    check_launcher(os.environ)
    rank, size = world.Get_rank(), world.Get_size()
    for name, values in parse_qs(urlparse(url).query).items():
        actual = {"rank": rank, "world_size": size}.get(name)
        if actual is not None and int(values[0]) != actual:
            raise ValueError(f"init_process_group() got {name}={values[0]}, and MPI says {actual}; leave it out")
    install_job_hooks(together=True)
    limit = timeout if timeout is not None else default_pg_timeout
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    one_node = node.Get_size() == size
    node.Free()
    address = bytearray(_ADDRESS_BYTES)
    if rank > 0:
        world.Bcast(address)
        host, port = json.loads(address)
        return TCPStore(host, port, size, is_master=False, timeout=limit), rank, size
    listener = socket.create_server(("127.0.0.1" if one_node else "", 0), backlog=max(size, 16))
    port = listener.getsockname()[1]
    host = "127.0.0.1" if one_node else _address_for_others()
    # The socket listens already, so other ranks may connect before the store serves.
    address[:] = json.dumps([host, port]).encode().ljust(_ADDRESS_BYTES)
    world.Bcast(address)
    store = TCPStore(
        host, port, size, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, rank, size


def check_launcher(environment: Mapping[str, str]) -> None:
    """Raise CommunicationError for N worlds of one rank, which the mpirun of another MPI library would start."""
    if MPI.COMM_WORLD.Get_size() > 1:
        return
    for variable, launcher in _LAUNCHERS:
        value = environment.get(variable, "")
        if value.isdigit() and int(value) > 1:
            raise CommunicationError(mismatch(int(value), f"{launcher} ({variable}={value})"))


def mismatch(expected: int, source: str) -> str:
    """The message for a world of MPI that does not have the ``expected`` number of ranks, which ``source`` gives."""
    library = MPI.Get_library_version().strip("\0 \n").splitlines()[0]
    return (
        f"MPI's world has {MPI.COMM_WORLD.Get_size()} rank(s), but {source} says {expected}: these processes were not "
        f"started by the launcher of the MPI library that mpi4py has loaded, which is: {library}. Start them by that "
        "library's own mpirun (`pip install mpich` puts one into bin/ of the environment; see `which -a mpirun`), take "
        "an mpi4py that is built for the MPI whose mpirun you use, or, under torchrun, leave mpi4py and mpi:// out"
    )


def _address_for_others() -> str:
    """The address for other machines: that of the host name, or of the default route if the former is loopback."""
    address = socket.gethostbyname(socket.gethostname())
    if not ipaddress.ip_address(address).is_loopback:
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))  # sends nothing: it only asks the routing table
        return str(probe.getsockname()[0])
