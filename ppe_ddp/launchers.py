"""Finds out which launcher has started this process: torchrun, mpirun, Slurm, or none.

Nothing else in the package reads an environment variable to find its rank.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ppe_ddp.errors import UnusableError

Environment = Mapping[str, str]

# Rank, world size and local rank, as process managers of MPI name them.
_MPIRUN_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),  # MVAPICH2
    ("PALS_RANKID", "PALS_SIZE", "PALS_LOCAL_RANKID"),  # Cray
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # Hydra: MPICH and Intel MPI
)

# Higher numbers are not steps of srun, but the shells of sbatch and salloc.
_LAST_SRUN_STEP = 0xFFFFFFF0

# Linux gives lower ports to outgoing connections.
_FIRST_PORT = 61440


@dataclass(frozen=True)
class Rendezvous:
    """The job that a launcher describes in the environment."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int  # the rank among those of this machine
    init_method: str | None  # where the ranks meet, as for torch.distributed; None for one rank, which opens no port
    note: str = ""  # a hint for the user; may be empty


Launcher = Callable[[Environment, str | None], Rendezvous | None]
"""Returns this process's place in a job, or None if another launcher has started it."""


def detect(environment: Environment, init_method: str | None = None) -> Rendezvous:
    """The job of the first launcher whose variables are in ``environment``; of a lone process if there are none.

    ValueError, which names the variable, if variables are missing or wrong; UnusableError under mpirun without mpi4py.
    """
    for launcher in LAUNCHERS:
        place = launcher(environment, init_method)
        if place is not None:
            return place
    tasks = environment.get("SLURM_NTASKS", "1")
    note = "" if tasks == "1" else f"SLURM_NTASKS is {tasks}: start with srun to use them all"
    return Rendezvous("alone", 0, 1, 0, init_method, note)


def first_host(nodelist: str) -> str:
    """The first machine of a list in Slurm's notation, such as `node03` of `node[03-05,9],gpu1`; else ValueError."""
    match = re.match(r"(?:[^][,\s]|\[[^][,\s-][^][\s]*\])+(?=,|$)", nodelist.strip())
    if match is None:
        raise ValueError(f"{nodelist!r} is not a list of machines in Slurm's notation")
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", match.group())


def find_mpirun() -> str | None:
    """The mpirun beside this Python, which belongs to its MPI; else the one on PATH; None if there is neither."""
    return shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")


def _from_torchrun(environment: Environment, init_method: str | None) -> Rendezvous | None:
    if not any(name in environment for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return None
    if "RANK" not in environment and _is_srun_task(environment):
        # Batch scripts often export WORLD_SIZE for tasks of srun, which get their rank from Slurm.
        return None
    rank, world_size = _rank_and_size(environment, "RANK", "WORLD_SIZE")
    local_rank = _integer(environment, "LOCAL_RANK", default=_other_local_rank(environment, world_size))
    if init_method is None:
        _text(environment, "MASTER_ADDR")
        _port(environment)
    return Rendezvous("torchrun", rank, world_size, local_rank, init_method or "env://")


def _other_local_rank(environment: Environment, world_size: int) -> int:
    """The local rank by mpirun or srun, if they have started as many ranks; else 0, as in Kubernetes' pods."""
    known = [(size, local) for _, size, local in _MPIRUN_VARIABLES]
    if _is_srun_task(environment):
        known.append((_slurm_size_name(environment), "SLURM_LOCALID"))
    for size_name, local_name in known:
        if environment.get(size_name) == str(world_size) and local_name in environment:
            return _integer(environment, local_name)
    return 0


def _from_mpirun(environment: Environment, init_method: str | None) -> Rendezvous | None:
    for rank_name, size_name, local_name in _MPIRUN_VARIABLES:
        if rank_name not in environment or size_name not in environment:
            continue
        rank, world_size = _rank_and_size(environment, rank_name, size_name)
        if _is_srun_task(environment) and (rank, world_size) == _slurm_rank_and_size(environment):
            # srun sets these too, for MPI programs. Under mpirun within srun, rank and size differ from Slurm's.
            return None
        if world_size == 1:
            return Rendezvous("alone", 0, 1, 0, init_method)
        if init_method is None and importlib.util.find_spec("mpi4py") is None:
            raise UnusableError(
                f"rank {rank} of {world_size} was started by mpirun ({rank_name}={rank}), and mpi4py, by which the "
                "ranks would meet, is not installed: pip install 'ppe_ddp[mpi]', or start the ranks with "
                f"`torchrun --nproc_per_node={world_size} script.py`"
            )
        # Without MPI's variable: Slurm's, or the rank, as if all ranks were on one machine.
        other = _integer(environment, "SLURM_LOCALID", default=rank) if _is_srun_task(environment) else rank
        local_rank = _integer(environment, local_name, default=other)
        return Rendezvous("mpirun", rank, world_size, local_rank, init_method or "mpi://")
    return None


def _from_slurm(environment: Environment, init_method: str | None) -> Rendezvous | None:
    if not _is_srun_task(environment):
        return None
    rank, world_size = _slurm_rank_and_size(environment)
    local_rank = _integer(environment, "SLURM_LOCALID")
    if init_method is None and world_size > 1:
        init_method = f"tcp://{_slurm_address(environment)}:{_slurm_port(environment)}"
    return Rendezvous("slurm", rank, world_size, local_rank, init_method)


LAUNCHERS: tuple[Launcher, ...] = (_from_torchrun, _from_mpirun, _from_slurm)
"""All launchers, in the order of trial. torchrun is first, since it may run under Slurm or mpirun."""


def _is_srun_task(environment: Environment) -> bool:
    # A shell of sbatch also has SLURM_PROCID=0, and may have SLURM_NTASKS.
    if "SLURM_STEP_ID" not in environment or "SLURM_JOB_ID" not in environment:
        return False
    return _integer(environment, "SLURM_STEP_ID") <= _LAST_SRUN_STEP


def _slurm_rank_and_size(environment: Environment) -> tuple[int, int]:
    return _rank_and_size(environment, "SLURM_PROCID", _slurm_size_name(environment))


def _slurm_size_name(environment: Environment) -> str:
    # SLURM_NTASKS may be that of the whole job, of which a step uses fewer tasks.
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"


def _slurm_address(environment: Environment) -> str:
    if environment.get("MASTER_ADDR"):
        return _bracketed(environment["MASTER_ADDR"])
    if environment.get("SLURM_STEP_NUM_NODES") == "1":
        return "127.0.0.1"  # keeps the store away from other machines
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if environment.get(name):
            try:
                return first_host(environment[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    # Last, as it is where srun was called, which may be a login node.
    if environment.get("SLURM_LAUNCH_NODE_IPADDR"):
        return _bracketed(environment["SLURM_LAUNCH_NODE_IPADDR"])
    raise ValueError("SLURM_STEP_NODELIST is not set, so the ranks cannot find rank 0; set MASTER_ADDR")


def _slurm_port(environment: Environment) -> int:
    if "MASTER_PORT" in environment:
        return _port(environment)
    # Differs by step, as two steps of a job may run at the same time.
    job, step = (_integer(environment, name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _FIRST_PORT + (job + 257 * step) % (65536 - _FIRST_PORT)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _text(environment: Environment, name: str) -> str:
    if not environment.get(name):
        raise ValueError(
            f"{name} is not set, though other variables of this launcher are; start every rank with the "
            "same launcher, or unset them all to run one process"
        )
    return environment[name]


def _integer(environment: Environment, name: str, *, default: int | None = None) -> int:
    if default is not None and name not in environment:
        return default
    text = _text(environment, name)
    if not re.fullmatch(r"[0-9]+", text):
        raise ValueError(f"{name} should be a whole number from 0, but it is {text!r}")
    return int(text)


def _port(environment: Environment) -> int:
    port = _integer(environment, "MASTER_PORT")
    if not 0 < port < 65536:
        raise ValueError(f"MASTER_PORT should be from 1 to 65535, but it is {port}")
    return port


def _rank_and_size(environment: Environment, rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = _integer(environment, rank_name), _integer(environment, size_name)
    if rank >= size:
        raise ValueError(f"{rank_name} is {rank}, but {size_name} is {size}: ranks go from 0 to one below it")
    return rank, size
