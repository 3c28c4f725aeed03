"""The commands that examine an installation: ``env`` lists what is there, ``doctor`` tries it on ranks."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils import collect_env

from ppe_ddp.backends.cupy_nccl.nccl_library import NCCL_OF_SHARED_DEVICES, SHARE_DEVICES, torch_nccl, torch_nccl_text
from ppe_ddp.backends.group_internals import default_group
from ppe_ddp.backends.json_collectives import all_gather_json
from ppe_ddp.cli import is_on_rank_0
from ppe_ddp.cli.command_line import add_json, count, fail, machine_facts, print_rows, told, versions, write_report
from ppe_ddp.engine.group_duplicates import backends_of
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.memory import offers_memory
from ppe_ddp.launch import Job, check_backend, init_process_group
from ppe_ddp.launchers import detect, find_mpirun
from ppe_ddp.testing import JobStarter, NodesError, RankError, Ranks
from ppe_ddp.testing.conformance import examine_backend
from ppe_ddp.torch_internals import tried_versions


@dataclass(frozen=True)
class Candidate:
    """A backend over which this library can train."""

    name: str  # as for ``init_process_group``
    device: str  # of its tensors: "cpu" or "cuda"
    missing: str = ""  # why it cannot be used here; empty if it can
    remedy: str = ""  # what to do about that
    library: str = ""  # the libraries that it calls, with versions


class Env:
    """Lists versions, launcher, devices, and the backends that can be used here.

    Copy its output into a bug report; it names no machine and no user. It starts
    no ranks; `doctor` does. Under a launcher only rank 0 prints.
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add_json(parser)

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        if not is_on_rank_0():
            return 0
        info, facts, backends = collect_env.get_env_info(), machine_facts(), candidates()
        threads = f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')}, torch takes {torch.get_num_threads()}"
        rows = {
            **versions(),
            "system": f"{info.os}, {info.libc_version}, gcc {info.gcc_version}",
            "processor": f"{facts['cpu']}, {facts['cores']} cores for this process",
            "threads": threads,
            "torch's CUDA": f"{info.cuda_compiled_version}, driver {info.nvidia_driver_version}",
            "torch internals": tried_versions(),
            "launcher": launcher_here(),
            "devices": info.nvidia_gpu_models,
            "ranks a device": f"several, with {SHARE_DEVICES}=1" if many_ranks_a_device() else None,
        }
        for one in backends:
            state = f"no: {one.missing}; remedy: {one.remedy}" if one.missing else f"yes, for {one.device} tensors"
            rows[f"backend {one.name}"] = "; ".join(filter(None, (state, one.library)))
        print_rows([(f"{name}:", str(text or "-")) for name, text in rows.items()], [19], told(arguments))
        write_report(arguments, "env", rows=rows, backends=[asdict(one) for one in backends])
        return 0


def launcher_here() -> str:
    """The launcher of this process, its rank and the number of ranks; or what is wrong with the variables."""
    try:
        place = detect(os.environ)
    except (ValueError, RuntimeError) as error:
        return f"its variables are wrong: {error}"
    return f"{place.launcher}, rank {place.rank} of {place.world_size}{place.note and f' ({place.note})'}"


def many_ranks_a_device() -> bool:
    """Whether torch's NCCL is new enough to let several ranks share a GPU."""
    return (torch_nccl() or 0) >= NCCL_OF_SHARED_DEVICES


def candidates() -> list[Candidate]:
    """All backends, those with the fewest requirements first."""
    no_gloo = "" if dist.is_gloo_available() else "this build of torch has no gloo"
    gloo = Candidate("gloo", "cpu", no_gloo, no_gloo and "install a torch that is built with gloo")
    missing, remedy = _without_cuda()
    nccl = Candidate("nccl", "cuda", missing, remedy, "" if missing else f"NCCL {torch_nccl_text()}")
    if not missing and not dist.is_nccl_available():
        nccl = Candidate("nccl", "cuda", "this build of torch has no NCCL", "install a torch for CUDA on Linux")
    cupy = _cupy(has_cuda=not missing)
    missing, remedy = ("; ".join(filter(None, texts)) for texts in ((missing, cupy.missing), (remedy, cupy.remedy)))
    return [gloo, _mpi4py(), nccl, Candidate("cupy_nccl", "cuda", missing, remedy, cupy.library)]


def _mpi4py() -> Candidate:
    install = 'pip install "ppe-ddp[mpi]"'
    if importlib.util.find_spec("mpi4py") is None:
        return Candidate("mpi4py", "cpu", "mpi4py is not installed", install)
    mpi, problem = _ask(_ASK_MPI)
    if problem:
        return Candidate("mpi4py", "cpu", f"mpi4py finds no MPI library ({problem})", install)
    mpirun = find_mpirun()
    if mpirun is None:
        remedy = f"put the mpirun of {mpi} on PATH, or {install}"
        return Candidate("mpi4py", "cpu", "there is no mpirun, which starts its ranks", remedy)
    # Not the path, which may name a user.
    where = "beside this Python" if Path(mpirun).parent == Path(sys.executable).parent else "on PATH"
    return Candidate("mpi4py", "cpu", library=f"mpi4py {metadata.version('mpi4py')}, {mpi}, mpirun {where}")


def _without_cuda() -> tuple[str, str]:
    """The reason why CUDA cannot be used, and the remedy; both empty if it can."""
    if torch.version.cuda is None:
        return "this build of torch is without CUDA", "install a torch for CUDA, on a machine with an NVIDIA GPU"
    if not torch.cuda.is_available():
        version = f"see nvidia-smi, whose CUDA version must be of torch's number ({torch.version.cuda}) or above"
        return "no CUDA device is visible", f"{version}, and CUDA_VISIBLE_DEVICES"
    return "", ""


def _cupy(*, has_cuda: bool) -> Candidate:
    install = f'pip install "ppe-ddp[{"cupy12" if (torch.version.cuda or "13").startswith("12") else "cupy13"}]"'
    if importlib.util.find_spec("cupy") is None:
        return Candidate("cupy_nccl", "cuda", "CuPy is not installed", install)
    found, problem = _ask(_ASK_CUPY)
    if has_cuda and problem:
        remedy = f"install a torch for CUDA, which brings NCCL, and the CuPy that fits it: {install}"
        return Candidate("cupy_nccl", "cuda", f"CuPy finds no NCCL ({problem})", remedy)
    if found.endswith("!"):
        clash = "torch and CuPy load two different NCCLs, which get in each other's way"
        return Candidate("cupy_nccl", "cuda", clash, f"install the CuPy that fits torch: {install}")
    return Candidate("cupy_nccl", "cuda", library=found)


# Each in a process of its own: importing mpi4py may start MPI, CuPy loads an NCCL, and a library that does not fit may
# crash.
_ASK_SECONDS = 60.0
_ASK_MPI = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
print(" ".join(MPI.Get_library_version().strip("\\0 \\n").splitlines()[0].split()))
"""
# torch first, as in a program that uses ppe_ddp. If two libnccl files are mapped, torch and CuPy use different ones.
_ASK_CUPY = """
import warnings
warnings.simplefilter("ignore")
import torch, cupy
from cupy.cuda import nccl
from ppe_ddp.backends.cupy_nccl.nccl_library import loaded_files, version_text
version = version_text(nccl.get_version())
print(f"CuPy {cupy.__version__}, NCCL {version}{'!' if len(loaded_files()) > 1 else ''}")
"""


def _ask(script: str) -> tuple[str, str]:
    """The last line that a script prints, and the last line of its error if it fails."""
    try:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "", f"it has not answered within {_ASK_SECONDS:g} s"
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or [f"its process ended with exit code {done.returncode}"])[-1]
    return done.stdout.strip().splitlines()[-1], ""


_DTYPES = (torch.float32, torch.float64)
_SECONDS, _RANKS, _TOLD_LINES = 60, 2, 12
_NCCL_REMEDY = "run it again with NCCL_DEBUG=INFO, which tells what NCCL meets; see also `python -m ppe_ddp env`"
_REMEDIES = {
    "gloo": "see that this machine's name has an address that it can reach, or set GLOO_SOCKET_IFNAME=lo",
    "mpi4py": "the mpirun has to be that of the MPI library which mpi4py loads: see `which -a mpirun` and `python -m "
    "ppe_ddp env`",
    "nccl": _NCCL_REMEDY,
    "cupy_nccl": _NCCL_REMEDY,
}
_OWN_REMEDY = "hold it to ppe_ddp.testing.check_backend, which says more"


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of one backend."""

    backend: str
    outcome: str  # "ok", "failed" or "skipped"
    ranks: int = 0  # the number of ranks that were started
    seconds: float = 0.0  # with the start of the ranks
    reason: str = ""  # why it failed or was skipped; what was examined if it is ok
    remedy: str = ""  # what to do about it
    details: str = ""  # tracebacks of the ranks, or where they hang

    def row(self) -> tuple[str, str, str]:
        """The cells of a row: name, outcome, and all else."""
        ranks = f"{self.ranks} rank{'s' if self.ranks != 1 else ''}, {self.seconds:.1f} s: " if self.ranks else ""
        texts = [ranks + self.reason, self.details, self.remedy and f"remedy: {self.remedy}"]
        return self.backend, self.outcome, "\n".join(filter(None, texts))


class Doctor:
    """Starts ranks over each backend that can be used here, and tells which work.

    The ranks make calls whose results are known, train a model whose graph
    differs on each rank, and compare its gradients with those of one process.
    There are two ranks, but one if they would have to share a CUDA device
    (unless NCCL can do that, and NCCL_MULTI_RANK_GPU_ENABLE=1 is set). A rank
    that hangs is killed and reported.

    Under mpirun, torchrun or srun it examines the ranks of that job instead:
    which share a node, and what goes through memory and what over the network.

      python -m ppe_ddp doctor
      mpirun -hosts n0:2,n1:2 -n 4 python -m ppe_ddp doctor
      python -m ppe_ddp doctor --backend mine --setup my_module:register
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        only = "only this one, of ours or your own; may be repeated"
        parser.add_argument("--backend", action="append", default=[], metavar="NAME", help=only)
        setup = "called without arguments in each rank before it joins: registers a backend of your own"
        parser.add_argument("--setup", type=function_named, metavar="MODULE:FUNCTION", help=setup)
        parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="what your own backend is for")
        limit = f"for each backend (default: {_SECONDS})"
        parser.add_argument("--timeout", type=count, default=_SECONDS, metavar="S", help=limit)
        add_json(parser)

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        """Examine one backend after the other, and print each result at once.

        Returns 1 if something failed, or a backend that was asked for cannot be used here; 2 if a name is not one of a
        backend.
        """
        file, asked = told(arguments), arguments.backend
        try:
            place = detect(os.environ)
        except (ValueError, RuntimeError) as error:
            return fail(error, 1)
        if place.world_size > 1:
            return _in_job(arguments)
        try:
            for name in asked if arguments.setup is None else ():
                check_backend(name)
        except ValueError as error:
            return fail(f"{error}: --setup MODULE:FUNCTION names a function that does", 2)
        print_rows([("torch internals:", tried_versions())], [16], file)
        ours = {candidate.name: candidate for candidate in candidates()}
        diagnoses = []
        for candidate in [ours.get(name) or Candidate(name, arguments.device) for name in asked or ours]:
            if not candidate.missing:
                print(f"{candidate.name}: ranks are starting ...", file=sys.stderr, flush=True)
            found = diagnose(candidate, arguments.timeout, arguments.setup if candidate.name in asked else None)
            diagnoses.append(found)
            print_rows([found.row()], [11, 8], file)
        write_report(arguments, "doctor", diagnoses=[asdict(one) for one in diagnoses])
        return int(any(one.outcome == "failed" or (asked and one.outcome == "skipped") for one in diagnoses))


def function_named(text: str) -> Callable[[], object]:
    """The function that ``module:function`` names."""
    module, _, name = text.partition(":")
    try:
        function: Callable[[], object] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} names no function that can be imported ({error})") from error
    return function


def diagnose(candidate: Candidate, timeout: float, setup: Callable[[], object] | None = None) -> Diagnosis:
    """Start ranks over one backend, let them examine it, and end them; skip it if it cannot be used here.

    ``setup``, a function of a module, is called in each rank before it joins.
    """
    name, size = candidate.name, _RANKS
    if candidate.missing:
        return Diagnosis(name, "skipped", reason=candidate.missing, remedy=candidate.remedy)
    start, details = time.monotonic(), ""
    if candidate.device == "cuda" and torch.cuda.device_count() < _RANKS:
        # NCCL 2.30 and newer let ranks share a device as an experiment, so only if the user asks for it.
        is_wanted = os.environ.get(SHARE_DEVICES) == "1" and name in ("nccl", "cupy_nccl")
        size = _RANKS if is_wanted and many_ranks_a_device() else 1
    starter = JobStarter(None, "mpirun", (size,)) if name == "mpi4py" else None
    try:
        with Ranks(size, backend=name, timeout=timeout, prepare=setup, starter=starter) as ranks:
            problems = [one for found in ranks.run(examine_backend, _DTYPES, candidate.device) for one in found]
    except (NodesError, RankError) as error:
        reason, _, details = str(error).partition("\n")
        problems = [reason]
    seconds = time.monotonic() - start
    if not problems:
        return Diagnosis(name, "ok", size, seconds, "collectives, training of a model that changes")
    details = "\n".join(details.strip().splitlines()[-_TOLD_LINES:])
    told_once = list(dict.fromkeys(problems))  # several ranks say the same
    reason = "\n".join([*told_once[:_TOLD_LINES], *(["..."] if len(told_once) > _TOLD_LINES else [])])
    return Diagnosis(name, "failed", size, seconds, reason, _REMEDIES.get(name, _OWN_REMEDY), details)


# ---------------------------------------------------------------------- inside a job

_NBYTES, _SMALL_NBYTES = 4 << 20, 64  # as a bucket, and as a mask
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def _in_job(arguments: argparse.Namespace) -> int:
    """Examine the job of this rank, together with its other ranks; rank 0 prints."""
    asked = arguments.backend or [None]
    if len(asked) > 1:
        return fail(f"the ranks of a job have one backend: not --backend {' --backend '.join(asked)}", 2)
    if arguments.setup is not None:
        arguments.setup()
    try:
        job = init_process_group(asked[0], timeout=arguments.timeout, quiet=True)
    except (ValueError, RuntimeError) as error:
        return fail(error, 1)
    findings = _examine_job(job)
    dist.destroy_process_group()
    if job.rank == 0:
        print("\n".join(_lines_of(findings)), file=told(arguments), flush=True)
        write_report(arguments, "doctor", job=findings)
    return int(bool(findings["problems"]))


def _examine_job(job: Job) -> dict[str, Any]:
    """The nodes and their ranks, how messages travel, and problems; the same on all ranks."""
    world = default_group()
    own = [socket.gethostname(), _BOOT_ID.read_text()]  # the name alone may be that of several machines
    names = [tuple(name) for name in all_gather_json(own, world)]
    nodes = [(name, [rank for rank, other in enumerate(names) if other == name]) for name in dict.fromkeys(names)]
    found = all_gather_json(examine_backend(_DTYPES, job.device.type), world)
    groups = Groups.duplicate(world, shared_memory=True)
    ways = {}
    for what, group, nbytes in (("buckets", groups.buckets, _NBYTES), ("masks", groups.control, _SMALL_NBYTES)):
        dist.all_reduce(torch.zeros(nbytes // 4), group=group)  # the first message decides about shared memory
        ways[what] = _way(group, spans=len(nodes) > 1, is_small=what == "masks")
    return {
        "launcher": job.launcher,
        "backend": job.backend,
        "nodes": [[name, ranks] for (name, _), ranks in nodes],
        **ways,
        "problems": list(dict.fromkeys(problem for problems in found for problem in problems)),
    }


def _lines_of(findings: dict[str, Any]) -> list[str]:
    size = sum(len(ranks) for _, ranks in findings["nodes"])
    lines = [f"torch internals: {tried_versions()}"]
    lines += [f"job: {size} ranks by {findings['launcher']}, backend {findings['backend']}"]
    for name, ranks in findings["nodes"]:
        lines.append(f"  node {name}: rank{'s' if len(ranks) > 1 else ''} {' '.join(map(str, ranks))}")
    lines += [f"  buckets: {findings['buckets']}", f"  masks:   {findings['masks']}"]
    return lines + ([f"  failed: {problem}" for problem in findings["problems"]] or ["  ok: collectives and training"])


def _way(group: ProcessGroup, *, spans: bool, is_small: bool) -> str:
    backend = backends_of(group).get("cpu", "its backend")
    messages = f"messages of {'gloo' if backend == 'shm' else backend}"
    is_fit = backend == "shm" and not spans if is_small else True  # over MPI small messages are faster
    if not is_fit or not offers_memory(group, torch.device("cpu")):
        return f"{messages}, over the network between nodes" if spans else f"{messages}, within the node"
    return f"shared memory in a node, {messages} between nodes" if spans else "shared memory"
