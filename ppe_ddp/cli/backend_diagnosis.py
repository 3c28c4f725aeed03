"""Starts ranks that examine one backend for `doctor`, ends them in any case, and makes a diagnosis of the results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import torch

from ppe_ddp.backends.cupy_nccl.nccl_version import SHARE_DEVICES
from ppe_ddp.cli.backend_candidates import Candidate, many_ranks_a_device
from ppe_ddp.cli.backend_examination import ANSWER, EXAMINED, examine
from ppe_ddp.cli.libraries import mpirun
from ppe_ddp.testing import RankError, Ranks

__all__ = ["Diagnosis", "diagnose"]

_RANKS = 2
_TOLD_LINES = 12
_REMEDIES = {
    "gloo": "see that this machine's name has an address that it can reach, or set GLOO_SOCKET_IFNAME=lo",
    "mpi4py": "the mpirun has to be that of the MPI library which mpi4py loads: see `which -a mpirun` and `python -m "
    "ppe_ddp env`",
    "nccl": "run it again with NCCL_DEBUG=INFO, which tells what NCCL meets",
    "cupy_nccl": "run it again with NCCL_DEBUG=INFO, which tells what NCCL meets; where nccl is well, see the line "
    "`NCCL clash` of `python -m ppe_ddp env`",
}
_OWN_REMEDY = "hold it to ppe_ddp.testing.check_backend, which says more"
# Open MPI refuses to run as root, or with more ranks than cores, unless it is told to.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
# Where this process itself was started by a launcher, its ranks are not those that are started here.
_OF_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PMI_", "PMIX_", "OMPI_COMM_", "MPI_LOCAL", "SLURM_")


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of one backend.

    Attributes:
        backend: Its name.
        outcome: "ok", "failed" or "skipped".
        ranks: How many ranks were started.
        seconds: How long it took, with their start.
        reason: Why it failed or was skipped, in a line or a few; what was examined where all is well.
        remedy: What to do about it.
        details: Tracebacks of the ranks, or where they hang.
    """

    backend: str
    outcome: str
    ranks: int = 0
    seconds: float = 0.0
    reason: str = ""
    remedy: str = ""
    details: str = ""


class _Answer(TypedDict):
    """The result that a rank under mpirun prints."""

    rank: int
    ranks: int
    problems: list[str]


def diagnose(candidate: Candidate, timeout: float, setup: Callable[[], object] | None = None) -> Diagnosis:
    """Start ranks over one backend, have them examine it, and end them, whatever they do.

    Args:
        candidate: The backend; one that cannot be made here is skipped.
        timeout: Seconds that the examination may take; the start of the processes has as many again, at least.
        setup: Called in each rank before it joins, for example to register the backend. A function of a module.
    """
    if candidate.missing:
        return Diagnosis(candidate.name, "skipped", reason=candidate.missing, remedy=candidate.remedy)
    start = time.monotonic()
    diagnosis = _under_mpirun(timeout) if candidate.name == "mpi4py" else _by_ranks(candidate, timeout, setup)
    return replace(diagnosis, seconds=time.monotonic() - start)


def _by_ranks(candidate: Candidate, timeout: float, setup: Callable[[], object] | None) -> Diagnosis:
    size = _RANKS
    if candidate.device == "cuda" and torch.cuda.device_count() < _RANKS:
        # NCCL can do it from 2.30 on, as an experiment: only where it is asked for.
        wanted = os.environ.get(SHARE_DEVICES) == "1" and candidate.name in ("nccl", "cupy_nccl")
        size = _RANKS if wanted and many_ranks_a_device() else 1
    try:
        with Ranks(size, backend=candidate.name, timeout=timeout, prepare=setup) as ranks:
            return _judged(candidate.name, size, ranks.run(examine, candidate.device))
    except RankError as error:
        reason, _, details = str(error).partition("\n")
        return _failed(candidate.name, size, reason, details.strip())


def _under_mpirun(timeout: float) -> Diagnosis:
    command = [
        str(mpirun()),
        "-n",
        str(_RANKS),
        sys.executable,
        "-m",
        "ppe_ddp.cli.backend_examination",
        str(timeout / 2),
    ]
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**_ENVIRONMENT, **inherited, "OMP_NUM_THREADS": "1"},
    )
    # The ranks import torch first.
    limit = 2 * timeout
    try:
        output, errors = process.communicate(timeout=limit)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        answered = [answer["rank"] for answer in _answers(output)]
        reason = f"the ranks were killed after {limit:g} s; those that had answered: {answered or 'none'}"
        return _failed("mpi4py", _RANKS, reason, errors)
    answers = _answers(output)
    if process.returncode or not answers:
        return _failed("mpi4py", _RANKS, f"mpirun ended with exit code {process.returncode}", errors)
    sizes = {answer["ranks"] for answer in answers}
    if sizes != {_RANKS}:
        return _failed("mpi4py", _RANKS, f"mpirun started {_RANKS} ranks, and they see a world of {sorted(sizes)}", "")
    return _judged("mpi4py", _RANKS, [answer["problems"] for answer in answers])


def _answers(output: str) -> list[_Answer]:
    lines = [line.removeprefix(ANSWER) for line in output.splitlines() if line.startswith(ANSWER)]
    return [json.loads(line) for line in lines]


def _judged(name: str, size: int, by_rank: Sequence[Sequence[str]]) -> Diagnosis:
    # The same sentence from several ranks is told once.
    problems = dict.fromkeys(problem for problems in by_rank for problem in problems)
    if problems:
        return _failed(name, size, "\n".join(problems), "")
    return Diagnosis(name, "ok", size, reason=EXAMINED)


def _failed(name: str, size: int, reason: str, details: str) -> Diagnosis:
    lines = details.strip().splitlines()
    return Diagnosis(
        name,
        "failed",
        size,
        reason=reason,
        remedy=_REMEDIES.get(name, _OWN_REMEDY),
        details="\n".join(lines[-_TOLD_LINES:]),
    )
