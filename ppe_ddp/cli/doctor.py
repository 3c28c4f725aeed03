"""Starts ranks over each backend that can be made here, and tells which work.

First it tries what this library uses of torch and torch does not promise.
The ranks then make collectives whose results are known, and train a model
whose graph differs from rank to rank beside one process that does the same.
Two ranks, or one for CUDA where they would have to share a device (two all
the same, over an NCCL that can do it, if NCCL_MULTI_RANK_GPU_ENABLE=1 is
set). A rank that hangs is killed and reported.

Under mpirun, torchrun or srun it examines the ranks of that job instead:
which share a node, and for the groups of all ranks, of a node, and of one
rank of each node, what goes through memory and what over the network.

  python -m ppe_ddp doctor
  mpirun -hosts n0:2,n1:2 -n 4 python -m ppe_ddp doctor
  python -m ppe_ddp doctor --backend mine --setup my_module:register
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

import torch
import torch.distributed as dist

from ppe_ddp.backends.cupy_nccl.nccl_version import SHARE_DEVICES
from ppe_ddp.cli import examination
from ppe_ddp.cli.command_line import fail, output, positive, print_rows, told, write_report
from ppe_ddp.cli.env import (
    Candidate,
    candidates,
    changes_of_torch,
    find_libraries,
    many_ranks_a_device,
    text_of_changes,
)
from ppe_ddp.launch import check_backend, init_process_group
from ppe_ddp.launchers import detect
from ppe_ddp.testing import RankError, Ranks

__all__ = ["Diagnosis", "add_arguments", "diagnose", "run"]

_SECONDS, _RANKS, _TOLD_LINES = 60.0, 2, 12
_NCCL_REMEDY = "run it again with NCCL_DEBUG=INFO, which tells what NCCL meets; see also `python -m ppe_ddp env`"
_REMEDIES = {
    "gloo": "see that this machine's name has an address that it can reach, or set GLOO_SOCKET_IFNAME=lo",
    "mpi4py": "the mpirun has to be that of the MPI library which mpi4py loads: see `which -a mpirun` and `python -m "
    "ppe_ddp env`",
    "nccl": _NCCL_REMEDY,
    "cupy_nccl": _NCCL_REMEDY,
}
_OWN_REMEDY = "hold it to ppe_ddp.testing.check_backend, which says more"
# Open MPI refuses to run as root, or with more ranks than cores, unless it is told to.
_ENVIRONMENT = {
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    only = "only this one, of ours or your own; may be repeated"
    parser.add_argument("--backend", action="append", default=[], metavar="NAME", help=only)
    setup = "called without arguments in each rank before it joins: registers a backend of your own"
    parser.add_argument("--setup", type=function_named, metavar="MODULE:FUNCTION", help=setup)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what your own backend is for")
    limit = f"for each backend (default: {_SECONDS:g})"
    parser.add_argument("--timeout", type=positive, default=_SECONDS, metavar="S", help=limit)
    parser.add_argument("--json", type=output, metavar="FILE", help="write the findings there; - for stdout")


def function_named(text: str) -> Callable[[], object]:
    """The function that ``module:function`` names."""
    module, _, name = text.partition(":")
    try:
        function: Callable[[], object] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} names no function that can be imported ({error})") from error
    return function


def run(arguments: argparse.Namespace) -> int:
    """Examines one backend after the other, and prints what it finds as it goes.

    Returns:
        0 if nothing failed; 1 if something did, a backend that was asked for by name cannot be made here, or torch
        has changed; 2 if a name is no backend's.
    """
    file, asked = told(arguments), arguments.backend
    try:
        place = detect(os.environ)
    except (ValueError, RuntimeError) as error:
        return fail(error, 1)
    if place.world_size > 1:
        return _in_job(arguments, place.rank, file)
    try:
        for name in asked if arguments.setup is None else ():
            check_backend(name)
    except ValueError as error:
        return fail(f"{error}: --setup MODULE:FUNCTION names a function that does", 2)
    changes = _told_changes(file)
    diagnoses = []
    for candidate in _chosen(asked, arguments.device):
        if not candidate.missing:
            print(f"{candidate.name}: ranks are starting ...", file=sys.stderr, flush=True)
        own = arguments.setup if candidate.name in asked else None
        found = diagnose(candidate, arguments.timeout, own)
        diagnoses.append(found)
        ranks = f"{found.ranks} rank{'s' if found.ranks != 1 else ''}, {found.seconds:.1f} s: " if found.ranks else ""
        texts = [ranks + found.reason, found.details, found.remedy and f"remedy: {found.remedy}"]
        print_rows([(found.backend, found.outcome, "\n".join(filter(None, texts)))], [11, 8], file)
    write_report(arguments, "doctor", torch_internals=changes, diagnoses=[asdict(one) for one in diagnoses])
    unwell = [one for one in diagnoses if one.outcome == "failed" or (asked and one.outcome == "skipped")]
    return int(bool(unwell or changes))


def _told_changes(file: TextIO) -> tuple[str, ...]:
    changes = changes_of_torch()
    print("\n  ".join(f"torch internals: {text_of_changes(changes)}".splitlines()), file=file, flush=True)
    return changes


def _in_job(arguments: argparse.Namespace, rank: int, file: TextIO) -> int:
    """Examine the job whose rank this process is, together with the others; rank 0 tells."""
    asked = arguments.backend or [None]
    if len(asked) > 1:
        return fail(f"the ranks of a job have one backend: not --backend {' --backend '.join(asked)}", 2)
    changes = _told_changes(file) if rank == 0 else ()
    if arguments.setup is not None:
        arguments.setup()
    try:
        job = init_process_group(asked[0], timeout=arguments.timeout, quiet=True)
    except (ValueError, RuntimeError) as error:
        return fail(error, 1)
    findings = examination.examine_job(job)
    dist.destroy_process_group()
    if rank == 0:
        print("\n".join(examination.lines_of(findings)), file=file, flush=True)
        write_report(arguments, "doctor", torch_internals=changes, job=findings)
    return int(bool(findings["problems"] or changes))


def _chosen(asked: Sequence[str], device: str) -> Iterator[Candidate]:
    ours = {candidate.name: candidate for candidate in candidates(find_libraries())}
    for name in asked or ours:
        yield ours.get(name) or Candidate(name, device)


# ---------------------------------------------------------------------- one backend


def diagnose(candidate: Candidate, timeout: float, setup: Callable[[], object] | None = None) -> Diagnosis:
    """Start ranks over one backend, have them examine it, and end them, whatever they do.

    Args:
        candidate: The backend; one that cannot be made here is skipped.
        timeout: Seconds that the examination may take; the start of the processes has as many again, at least.
        setup: Called in each rank before it joins, for example to register the backend. A function of a module.
    """
    name, size = candidate.name, _RANKS
    if candidate.missing:
        return Diagnosis(name, "skipped", reason=candidate.missing, remedy=candidate.remedy)
    start, details = time.monotonic(), ""
    if candidate.device == "cuda" and torch.cuda.device_count() < _RANKS:
        # NCCL can do it from 2.30 on, as an experiment: only where it is asked for.
        is_wanted = os.environ.get(SHARE_DEVICES) == "1" and name in ("nccl", "cupy_nccl")
        size = _RANKS if is_wanted and many_ranks_a_device() else 1
    try:
        if name == "mpi4py":
            problems, details = _under_mpirun(timeout)
        else:
            with Ranks(size, backend=name, timeout=timeout, prepare=setup) as ranks:
                problems = [one for found in ranks.run(examination.examine, candidate.device) for one in found]
    except RankError as error:
        reason, _, details = str(error).partition("\n")
        problems = [reason]
    details = "\n".join(details.strip().splitlines()[-_TOLD_LINES:])
    seconds = time.monotonic() - start
    if not problems:
        return Diagnosis(name, "ok", size, seconds, examination.EXAMINED)
    reason = "\n".join(dict.fromkeys(problems))  # the same sentence from several ranks is told once
    return Diagnosis(name, "failed", size, seconds, reason, _REMEDIES.get(name, _OWN_REMEDY), details)


def _under_mpirun(timeout: float) -> tuple[list[str], str]:
    """The problems that ranks under mpirun find, and what they have written to stderr where they fail."""
    mpirun = find_libraries().mpirun
    command = [str(mpirun), "-n", str(_RANKS), sys.executable, "-m", "ppe_ddp.cli.examination", str(timeout / 2)]
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
    limit, is_over = 2 * timeout, True  # the ranks import torch first
    try:
        text, errors = process.communicate(timeout=limit)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        text, errors = process.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        is_over = False
    lines = [line.removeprefix(examination.ANSWER) for line in text.splitlines() if line.startswith(examination.ANSWER)]
    answers = [json.loads(line) for line in lines]
    if not is_over:
        answered = [answer["rank"] for answer in answers] or "none"
        return [f"the ranks were killed after {limit:g} s; those that had answered: {answered}"], errors
    if process.returncode or not answers:
        return [f"mpirun ended with exit code {process.returncode}"], errors
    if (sizes := {answer["ranks"] for answer in answers}) != {_RANKS}:
        return [f"mpirun started {_RANKS} ranks, and they see a world of {sorted(sizes)}"], ""
    return [problem for answer in answers for problem in answer["problems"]], ""
