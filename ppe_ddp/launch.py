"""init_process_group(): joins the other ranks, whichever launcher has started this process (``launchers.py``)."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import importlib.util
import inspect
import ipaddress
import logging
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from typing_extensions import Never

from ppe_ddp.backends.group_internals import HashStore, PrefixStore, Store, TCPStore
from ppe_ddp.errors import CommunicationError, DisagreementError, PeerAbortedError, UnusableError, did_you_mean
from ppe_ddp.launchers import Rendezvous, detect

logger = logging.getLogger("ppe_ddp")

_NOT_OF_USERS = (str(Path(__file__).parent), str(Path(torch.__file__).parent))

_EXIT_SECONDS = 3.0  # for which other ranks wait before they exit, so that the rank that failed is the first

Timeout = datetime.timedelta | None


@dataclass(frozen=True)
class Job:
    """This process's place in its job.

    Attributes:
        rank: The rank in the default process group, from 0.
        world_size: The number of ranks in the default process group.
        local_rank: The rank among the processes of this machine, from 0.
        device: The device for this rank's model: `cuda:N` or `cpu`.
        backend: The backend of the default process group, such as `gloo` or `cpu:gloo,cuda:nccl`.
        launcher: What has started the ranks: `torchrun`, `mpirun`, `slurm`; `alone` if nothing has, or `caller` if
            torch.distributed was initialized before.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    launcher: str


def init_process_group(
    backend: str | None = None,
    *,
    init_method: str | None = None,
    timeout: float | datetime.timedelta | None = None,
    pg_options: Any = None,
    quiet: bool = False,
    **unknown: Never,
) -> Job:
    """Joins the job that this process was started in. Every rank must call it, once.

    The environment shows what has started the ranks; the first of these that fits counts:

    - torchrun, or anything else that sets `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`;
    - mpirun of MPICH, Open MPI, Intel MPI, MVAPICH2 or Cray;
    - Slurm's `srun`;
    - nothing, also in a shell of `sbatch` or `salloc` without `srun`: a world of one rank, which opens no port.

    If the backend serves CUDA, the current CUDA device is set to that of the local rank. If torch.distributed is
    initialized already, nothing changes, arguments are ignored, and the returned job describes the existing group.

    Args:
        backend: A backend of torch.distributed, such as `gloo`, or one for each kind of device, such as
            `cpu:gloo,cuda:nccl`. The default is the latter if CUDA and NCCL are available, else `mpi4py` under mpirun,
            else `gloo`.
        init_method: Where the ranks meet, instead of where the launcher says: `tcp://host:port`, `file:///path`,
            `env://`, or under mpirun `mpi://` for any backend.
        timeout: The longest time of a collective, and of this call, in seconds or as a timedelta. The default is
            torch.distributed's for the backend.
        pg_options: Options of the backend, such as ``ppe_ddp.backends.mpi.MpiOptions(thread=True)``.
        quiet: Do not print on rank 0's stderr what was chosen.
        **unknown: Refused. The error explains torch's own keywords, and names the nearest for a misspelt one.

    Returns:
        The job as this rank sees it.

    Raises:
        TypeError: ``timeout`` is neither a number nor a timedelta, or there is no such keyword.
        ValueError: No such backend is registered; the message names the nearest. Or a variable of the environment,
            which the message names, is missing, not a number or out of range. Or there are more ranks on this machine
            than CUDA devices.
        CommunicationError: The ranks could not meet, or mpi4py belongs to another MPI than mpirun.
        UnusableError: The ranks were started by mpirun, and mpi4py is not installed.
    """
    if unknown:
        raise TypeError(_unknown_keyword(next(iter(unknown))))
    limit = _timedelta(timeout)
    if dist.is_initialized():
        return _job_of_caller()
    place = detect(os.environ, init_method)
    backend = backend or _default_backend(place.launcher)
    check_backend(backend)
    device = _choose_device(backend, place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "TORCHELASTIC_RUN_ID" in os.environ and hasattr(os, "pidfd_open"):
        args = (os.pidfd_open(os.getppid()), place.rank)
        threading.Thread(target=_end_with_launcher, args=args, name="ppe_ddp-launcher", daemon=True).start()
    _shorten_reports(place.rank)  # before others wrap the hook: theirs end the job after ours has printed
    _join(place, backend, limit, pg_options)
    job = Job(place.rank, place.world_size, place.local_rank, device, backend, place.launcher)
    if job.rank == 0 and not quiet:
        print(_describe(job, place.note), file=sys.stderr, flush=True)
    return job


def _unknown_keyword(name: str) -> str:
    known = inspect.signature(init_process_group).parameters.keys() - {"unknown"}
    if name in inspect.signature(dist.init_process_group).parameters.keys() - known:
        return (
            f"ppe_ddp.init_process_group() takes no {name!r}: it finds out who the ranks are from what started them. "
            "Leave it out, or call torch.distributed.init_process_group(), which this library works with as well"
        )
    return f"ppe_ddp.init_process_group() got an unexpected keyword argument {name!r}{did_you_mean(name, known)}"


def check_alone() -> None:
    """Warn that torch.distributed is not initialized; UnusableError if a launcher has started several ranks."""
    try:
        place = detect(os.environ)
    except (ValueError, RuntimeError):
        place = None  # not variables of a launcher
    if place is not None and place.world_size > 1:
        raise UnusableError(
            f"rank {place.rank} of {place.world_size}, started by {place.launcher}: torch.distributed is not "
            "initialized, so that every rank would train by itself; call ppe_ddp.init_process_group() before wrapping "
            "the module"
        )
    logger.warning(
        "torch.distributed is not initialized: the module is synchronized with no other before the first forward after "
        "init_process_group()"
    )


def _default_backend(launcher: str) -> str:
    if torch.cuda.is_available() and dist.is_nccl_available():
        return "cpu:gloo,cuda:nccl"  # under mpirun too, where the ranks then only meet over MPI
    return "mpi4py" if launcher == "mpirun" and importlib.util.find_spec("mpi4py") else "gloo"


def _serves_cuda(backend: str) -> bool:
    if ":" in backend:
        return any(entry.strip().startswith("cuda:") for entry in backend.split(","))
    return "cuda" in dist.Backend.backend_capability.get(backend.lower(), ())


def _choose_device(backend: str, local_rank: int) -> torch.device:
    if not torch.cuda.is_available() or not _serves_cuda(backend):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1:
        # Slurm may show each rank only its own device, as number 0.
        return torch.device("cuda", 0)
    if local_rank >= count:
        raise ValueError(
            f"the local rank (LOCAL_RANK, SLURM_LOCALID or mpirun's) is {local_rank}, but this process sees {count} "
            "CUDA devices; start at most one rank a device"
        )
    return torch.device("cuda", local_rank)


def check_backend(backend: str) -> None:
    """Refuse a backend that is not registered; torch would fail with an assertion."""
    known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
    for entry in backend.split(","):
        name = entry.rpartition(":")[2].strip().lower()
        if name not in known:
            raise ValueError(
                f"no backend {name!r} is registered with torch.distributed{did_you_mean(name, known) or '.'} There are "
                f"{', '.join(known)}; register your own in every process, by "
                "torch.distributed.Backend.register_backend()"
            )


def _timedelta(timeout: object) -> Timeout:
    if timeout is None or isinstance(timeout, datetime.timedelta):
        return timeout
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds or a datetime.timedelta, not {timeout!r}")
    return datetime.timedelta(seconds=timeout)


def _end_with_launcher(launcher: int, rank: int) -> None:
    """End this rank when torchrun was killed, as torchrun would have done."""
    select.select([launcher], [], [])
    print(f"rank {rank} ends, as torchrun is no more\n", end="", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def _shorten_reports(rank: int) -> None:
    """Print a line after a Ctrl-C on ranks but 0, and for another rank's error its message and the user's line."""
    report, heard = sys.excepthook, threading.Event()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        atexit.register(_exit_after_the_cause, heard)  # registered first, so it runs last

    @_uninterrupted()
    def report_briefly(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        own = [frame for frame in traceback.extract_tb(where) if not frame.filename.startswith(_NOT_OF_USERS)]
        is_interrupt = rank > 0 and isinstance(error, KeyboardInterrupt)
        is_of_others = isinstance(error, PeerAbortedError | DisagreementError) or bool(getattr(error, "ranks", None))
        if where is None or not (is_interrupt or (own and is_of_others)):
            report(kind, error, where)
        elif is_interrupt:
            place = f"{where.tb_frame.f_code.co_filename}, line {where.tb_lineno}"
            print(f"rank {rank} was interrupted, in {place}\n", end="", file=sys.stderr)
        else:
            place = "".join(traceback.format_list(own[-1:]))
            what = f"{kind.__module__}.{kind.__qualname__}: {error}"
            # In one piece, as other ranks write too.
            print(f"rank {rank} has ended here:\n{place}{what}\n", end="", file=sys.stderr)
            if not isinstance(error, DisagreementError):  # all ranks raise that one
                heard.set()

    sys.excepthook = report_briefly


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C meanwhile: a launcher and the terminal may each send one, and the second must not end a report."""
    try:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread, which alone is interrupted
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler or signal.SIG_DFL)


def _exit_after_the_cause(heard: threading.Event) -> None:
    """Let the rank that has failed exit before this one, if this one has only ``heard`` of the failure.

    torchrun reports the first rank that exits, and ends the others, and so this wait.
    """
    if heard.is_set():
        with contextlib.suppress(KeyboardInterrupt):  # which torchrun sends to all of them after a Ctrl-C
            time.sleep(_EXIT_SECONDS)


def _join(place: Rendezvous, backend: str, timeout: Timeout, pg_options: Any) -> None:
    where = place.init_method
    try:
        if where is None:
            store: Store | None = HashStore()
        else:
            store = restarted_store(place, timeout, os.environ) or loopback_store(place, timeout, os.environ)
        dist.init_process_group(
            backend,
            init_method=where if store is None else None,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
            pg_options=pg_options,
        )
    except dist.DistError as error:
        raise CommunicationError(
            f"rank {place.rank} of {place.world_size} (launcher {place.launcher}) could not meet the others "
            f"at {where}: {error}"
        ) from error


def _job_of_caller() -> Job:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    backend = str(dist.get_backend())
    if backend == dist.Backend.UNDEFINED:
        # Nobody has named a backend, and torch has chosen one for each kind of device.
        backend = str(dist.get_backend_config())
    launcher, local_rank = "caller", rank
    try:
        place = detect(os.environ, "env://")
    except (ValueError, RuntimeError):
        place = None
    if place is not None and (place.rank, place.world_size) == (rank, world_size):
        launcher, local_rank = place.launcher, place.local_rank
    cuda = torch.cuda.is_available() and _serves_cuda(backend)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    return Job(rank, world_size, local_rank, device, backend, launcher)


def _describe(job: Job, note: str) -> str:
    ranks = f"{job.world_size} rank{'s' if job.world_size != 1 else ''}"
    ranks += ", a lone process" if job.launcher == "alone" else f" by {job.launcher}"
    line = f"ppe_ddp: {ranks}, backend {job.backend}, device {job.device}"
    return f"{line} ({note})" if note else line


# ---------------------------------------------------------------------- stores that are used instead of torch's own
#
# torch's server listens on all interfaces of the machine, and serves anyone. Ranks that meet on the loopback interface
# get a server that listens only there.
#
# When torchrun starts ranks again (``--max-restarts``), its agent keeps the store, with the addresses of earlier ranks.
# So keys get a prefix that is new with each start. As each agent counts its own starts, rank 0 chooses it, and the
# others ask for it.

_ASKED, _ANSWERED = "ppe_ddp/start/asked", "ppe_ddp/start/answered"


def restarted_store(place: Rendezvous, timeout: Timeout, environment: Mapping[str, str]) -> Store | None:
    """The store of torchrun's agent with a prefix of this start, made by all ranks together; None if not needed."""
    if place.init_method != "env://" or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    is_first = environment.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if is_first and environment.get("LOCAL_WORLD_SIZE") == str(place.world_size):  # on one node
        return None
    store = _tcp_store(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), place, timeout)
    return PrefixStore(f"ppe_ddp/start/{_name_of_start(store, place)}", store)


def _name_of_start(store: TCPStore, place: Rendezvous) -> str:
    """The name that rank 0 has chosen for this start. It may also answer ranks of earlier starts, which are gone."""
    own = secrets.token_hex(16)
    if place.rank > 0:
        store.queue_push(_ASKED, f"for {own}")
        name = store.get(f"{_ANSWERED}/{own}").decode()
        store.queue_push(_ASKED, f"has {name}")
        return name
    told = 1
    while told < place.world_size:
        word, name = store.queue_pop(_ASKED).decode().split()
        if word == "for":
            store.set(f"{_ANSWERED}/{name}", own)
        else:
            told += name == own
    return own


def loopback_store(place: Rendezvous, timeout: Timeout, environment: Mapping[str, str]) -> Store | None:
    """The store for ranks that meet at a loopback address; None to leave it to torch.

    That is so at other addresses, where torchrun's agent serves, and on rank 0 if the port is in use.
    """
    found = _address(place.init_method or "", environment)
    if found is None:
        return None
    if place.rank > 0:
        served = _tcp_store(*found, place, timeout)
    else:
        family = socket.AF_INET6 if ":" in found[0] else socket.AF_INET
        try:
            listener = socket.create_server(found, family=family, backlog=max(place.world_size, 16))
        except OSError:
            return None
        served = _tcp_store(*found, place, timeout, listener.detach())
    # torch's prefix, as rank 0 may have left the store to torch.
    return PrefixStore("default_pg", served)


def _tcp_store(host: str, port: int, place: Rendezvous, timeout: Timeout, listener: int | None = None) -> TCPStore:
    is_client, size = listener is None, place.world_size
    limit = dist.default_pg_timeout if timeout is None else timeout
    return TCPStore(host, port, size, not is_client, limit, wait_for_workers=is_client, master_listen_fd=listener)


def _address(init_method: str, environment: Mapping[str, str]) -> tuple[str, int] | None:
    """The loopback address and port at which rank 0 has to serve; None if there is none."""
    parts = urlsplit(init_method)
    if parts.scheme == "tcp":
        host, port = parts.hostname, parts.port
    elif parts.scheme == "env" and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        host, port = environment.get("MASTER_ADDR"), int(environment.get("MASTER_PORT", 0))
    else:
        return None
    if host == "localhost":
        host = "127.0.0.1"
    try:
        is_loopback = ipaddress.ip_address(host or "").is_loopback
    except ValueError:  # a name
        return None
    return (host or "", port) if is_loopback and port else None
