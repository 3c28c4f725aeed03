"""Lists versions, launcher, devices, and the backends that can be made here.

Copy what it prints into a bug report: it names no machine and no user. It
starts no ranks; `doctor` does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.utils import collect_env

from ppe_ddp import torch_internals_check
from ppe_ddp.backends import group_internals_check
from ppe_ddp.backends.cupy_nccl.nccl_version import (
    NCCL_OF_SHARED_DEVICES,
    SHARE_DEVICES,
    torch_nccl,
    torch_nccl_text,
)
from ppe_ddp.cli.command_line import machine_facts, output, print_rows, told, versions, write_report
from ppe_ddp.launchers import detect

__all__ = ["Candidate", "Libraries", "add_arguments", "candidates", "changes_of_torch", "find_libraries", "run"]

_SECONDS = 60.0
_ANSWER = "ppe_ddp: "
_OF_TORCH = ("cuda_compiled_version", "nvidia_driver_version", "nvidia_gpu_models", "os", "gcc_version", "libc_version")
# Each is asked in a process of its own: importing mpi4py may start MPI in this one, CuPy would bring its NCCL, and a
# library that does not fit crashes. What a script knows before it fails is told, too.
_ASK = f"import atexit, json; a = {{}}; atexit.register(lambda: print({_ANSWER!r} + json.dumps(a), flush=True))\n"
_ASK_MPI = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
a["mpi4py"] = mpi4py.__version__
from mpi4py import MPI
a["mpi"] = " ".join(MPI.Get_library_version().strip("\\0 \\n").splitlines()[0].split())
"""
# torch first, as a program of ours has it. What is mapped says which libnccl is really used.
_ASK_CUPY = """
import warnings
warnings.simplefilter("ignore")
import torch, cupy
a["cupy"] = cupy.__version__
from cupy.cuda import nccl
from ppe_ddp.backends.cupy_nccl.nccl_version import loaded_files, version_text
a["cupy_nccl"] = version_text(nccl.get_version()) if nccl.available else None
a["nccl_files"] = len(loaded_files())
"""


@dataclass(frozen=True)
class Libraries:
    """The communication libraries that Python finds here.

    Attributes:
        mpi4py: Its version; None where it is not installed.
        mpi: What the MPI library behind it calls itself.
        mpirun: The path of the one beside this Python, which is that of its MPI, else of the one on PATH.
        mpi_problem: Why mpi4py or its MPI cannot be loaded; empty where they can.
        cupy: Its version; None where it is not installed.
        cupy_nccl: The version of the NCCL that CuPy finds, such as ``"2.27.7"``.
        nccl_files: How many different libnccl files torch and CuPy load together; more than one is a clash.
        cupy_problem: Why CuPy cannot be loaded; empty where it can.
    """

    mpi4py: str | None = None
    mpi: str | None = None
    mpirun: str | None = None
    mpi_problem: str = ""
    cupy: str | None = None
    cupy_nccl: str | None = None
    nccl_files: int = 0
    cupy_problem: str = ""


@dataclass(frozen=True)
class Candidate:
    """A backend that this library can train over.

    Attributes:
        name: As ``init_process_group`` takes it.
        device: Whose tensors it is for: "cpu" or "cuda".
        missing: Why it cannot be made here; empty where it can.
        remedy: What to do about that.
    """

    name: str
    device: str
    missing: str = ""
    remedy: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    parser.add_argument("--json", type=output, metavar="FILE", help="write it as JSON there; - for stdout")


def run(arguments: argparse.Namespace) -> int:
    """Looks and prints.

    Returns:
        0, whatever there is or is not.
    """
    found, nccl, changes = find_libraries(), torch_nccl_text(), changes_of_torch()
    info = collect_env.get_env_info()
    torchs = {name: getattr(info, name, None) for name in _OF_TORCH}
    facts, clash, launcher = machine_facts(), clash_of(nccl, found), launcher_here()
    threads = f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')}, torch takes {torch.get_num_threads()}"
    shares = f"several, with {SHARE_DEVICES}=1" if many_ranks_a_device() else None
    rows = {
        **versions(),
        "system": f"{torchs['os']}, {torchs['libc_version']}, gcc {torchs['gcc_version']}",
        "processor": f"{facts['cpu']}, {facts['cores']} cores for this process",
        "threads": threads,
        "torch's CUDA": f"{torchs['cuda_compiled_version']}, NCCL {nccl}, driver {torchs['nvidia_driver_version']}",
        "torch internals": text_of_changes(changes),
        "mpi4py": found.mpi4py and f"{found.mpi4py}, {found.mpi}, mpirun {_place_of(found.mpirun)}",
        "CuPy": found.cupy and f"{found.cupy}, NCCL {found.cupy_nccl}",
        "NCCL clash": clash or "no",
        "launcher": launcher,
        "devices": torchs["nvidia_gpu_models"],
        "ranks a device": shares,
    }
    backends = candidates(found)
    for one in backends:
        state = f"no: {one.missing}; remedy: {one.remedy}" if one.missing else f"yes, for {one.device} tensors"
        rows[f"backend {one.name}"] = state
    print_rows([(f"{name}:", str(text or "-")) for name, text in rows.items()], [19], told(arguments))
    libraries = {**asdict(found), "mpirun": _place_of(found.mpirun)}
    content: dict[str, Any] = {
        "launcher": launcher,
        "threads": threads,
        "torch": torchs,
        "torch_nccl": nccl,
        "nccl_clash": clash,
    }
    content |= {"torch_internals": changes, "libraries": libraries, "backends": [asdict(one) for one in backends]}
    write_report(arguments, "env", **content)
    return 0


def find_libraries() -> Libraries:
    """Ask for MPI and CuPy, each in a process of its own, which takes seconds."""
    (mpi, mpi_problem), (cupy, cupy_problem) = _ask(_ASK_MPI), _ask(_ASK_CUPY)
    mpirun = shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")
    return Libraries(**mpi, **cupy, mpirun=mpirun, mpi_problem=mpi_problem, cupy_problem=cupy_problem)


def _ask(script: str) -> tuple[dict[str, Any], str]:
    """What a script puts into ``a`` before it ends or fails, and the last line of its error."""
    command = [sys.executable, "-c", _ASK + script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {}, f"it has not answered within {_SECONDS:g} s"
    answers = [line.removeprefix(_ANSWER) for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    lines = done.stderr.strip().splitlines() or [f"its process ended with exit code {done.returncode}"]
    return json.loads(answers[-1]) if answers else {}, lines[-1] if done.returncode else ""


def candidates(found: Libraries) -> tuple[Candidate, ...]:
    """All backends, those first that need least."""
    no_gloo = "" if dist.is_gloo_available() else "this build of torch has no gloo"
    cuda = _without_cuda()
    nccl = cuda
    if not cuda[0] and not dist.is_nccl_available():
        nccl = "this build of torch has no NCCL", "install a torch for CUDA on Linux"
    both = (
        "; ".join(filter(None, texts)) for texts in zip(cuda, _without_cupy(found, has_cuda=not cuda[0]), strict=True)
    )
    return (
        Candidate("gloo", "cpu", no_gloo, no_gloo and "install a torch that is built with gloo"),
        Candidate("mpi4py", "cpu", *_without_mpi(found)),
        Candidate("nccl", "cuda", *nccl),
        Candidate("cupy_nccl", "cuda", *both),
    )


def _without_mpi(found: Libraries) -> tuple[str, str]:
    """What is missing, and the remedy; both empty for nothing."""
    if found.mpi4py is None:
        return "mpi4py is not installed", 'pip install "ppe-ddp[mpi]"'
    if found.mpi is None:
        return f"mpi4py finds no MPI library ({found.mpi_problem})", 'pip install "ppe-ddp[mpi]"'
    if found.mpirun is None:
        remedy = f'put the mpirun of {found.mpi} on PATH, or pip install "ppe-ddp[mpi]"'
        return "there is no mpirun, which starts its ranks", remedy
    return "", ""


def _without_cuda() -> tuple[str, str]:
    if torch.version.cuda is None:
        return "this build of torch is without CUDA", "install a torch for CUDA, on a machine with an NVIDIA GPU"
    if not torch.cuda.is_available():
        version = f"see nvidia-smi, whose CUDA version must be of torch's number ({torch.version.cuda}) or above"
        return "no CUDA device is visible", f"{version}, and CUDA_VISIBLE_DEVICES"
    return "", ""


def _without_cupy(found: Libraries, *, has_cuda: bool) -> tuple[str, str]:
    install = f'pip install "ppe-ddp[{"cupy12" if (torch.version.cuda or "13").startswith("12") else "cupy13"}]"'
    if found.cupy is None:
        is_absent = "No module named 'cupy'" in found.cupy_problem
        return "CuPy is not installed" if is_absent else f"CuPy cannot be imported ({found.cupy_problem})", install
    if has_cuda and found.cupy_nccl is None:
        why = f" ({found.cupy_problem})" if found.cupy_problem else ""
        remedy = "install a torch for CUDA, which brings NCCL, and import it before CuPy"
        return f"CuPy {found.cupy} finds no NCCL{why}", remedy
    if found.nccl_files > 1:
        clash = "torch and CuPy load two different NCCLs, which get in each other's way"
        return clash, f"install the CuPy that fits torch: {install}"
    return "", ""


def clash_of(torchs: str | None, found: Libraries) -> str:
    """Why torch's NCCL and CuPy's do not go together; empty where they do."""
    if found.nccl_files > 1:
        return f"torch and CuPy load {found.nccl_files} different libnccl files into one process"
    if torchs and found.cupy_nccl and torchs != found.cupy_nccl:
        return f"torch calls NCCL {torchs}, and CuPy calls {found.cupy_nccl}"
    return ""


def many_ranks_a_device() -> bool:
    """Whether torch's NCCL takes several ranks on one GPU, where it is told to."""
    return (torch_nccl() or 0) >= NCCL_OF_SHARED_DEVICES


def changes_of_torch() -> tuple[str, ...]:
    """What this torch does otherwise than this library needs it, a line for each function; takes seconds."""
    return (*torch_internals_check.check(), *group_internals_check.check())


def text_of_changes(changes: tuple[str, ...]) -> str:
    """``changes`` for people: on the first line that all is well, or how many there are; then each."""
    first = f"{len(changes)} changed, so that ppe_ddp may train wrongly; report it, and use another torch:"
    return "\n".join([first, *changes]) if changes else "as expected"


def launcher_here() -> str:
    """Who started this process and with how many ranks, or what is wrong with its variables."""
    try:
        place = detect(os.environ)
    except (ValueError, RuntimeError) as error:
        return f"its variables are wrong: {error}"
    return f"{place.launcher}, rank {place.rank} of {place.world_size}{place.note and f' ({place.note})'}"


def _place_of(mpirun: str | None) -> str:
    """Where it is, without a path, which may name a user."""
    if mpirun is None:
        return "nowhere"
    return "beside this Python" if Path(mpirun).parent == Path(sys.executable).parent else "on PATH"
