"""The communication libraries that are installed here, and their versions: MPI, CuPy, NCCL.

Each is asked in a process of its own: importing mpi4py may start MPI in this one, CuPy would bring its NCCL, and a
library that does not fit crashes.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ppe_ddp.backends.cupy_nccl.nccl_version import version_text

__all__ = ["CupyLibrary", "MpiLibrary", "cupy_library", "mpi_library", "mpirun"]

_SECONDS = 60.0
_ANSWER = "ppe_ddp: "

# What a script knows before it fails is told, too.
_FRAME = f"""
import atexit, json
answer = {{}}
atexit.register(lambda: print({_ANSWER!r} + json.dumps(answer), flush=True))
"""

_ASK_MPI = """
import mpi4py
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
answer["mpi4py"] = mpi4py.__version__
from mpi4py import MPI
answer["library"] = MPI.Get_library_version().strip("\\0 \\n").splitlines()[0]
answer["standard"] = ".".join(map(str, MPI.Get_version()))
"""

# torch first, as a program of ours has it. What is mapped says which libnccl is really used.
_ASK_CUPY = """
import warnings
warnings.simplefilter("ignore")
import torch
import cupy
answer["cupy"] = cupy.__version__
from cupy.cuda import nccl
if nccl.available:
    answer["nccl"] = nccl.get_version()
from ppe_ddp.backends.cupy_nccl.nccl_version import loaded_files
answer["files"] = loaded_files()
"""


@dataclass(frozen=True)
class MpiLibrary:
    """The MPI behind mpi4py.

    Attributes:
        mpi4py: Its version; None where it is not installed.
        library: What the MPI library calls itself.
        standard: The version of the MPI standard.
        mpirun: Where the launcher is that our commands take, "beside this Python" or "on PATH"; None for nowhere.
        problem: Why it cannot be loaded; empty where it can.
    """

    mpi4py: str | None
    library: str | None
    standard: str | None
    mpirun: str | None
    problem: str = ""


@dataclass(frozen=True)
class CupyLibrary:
    """CuPy, and the NCCL that it sees.

    Attributes:
        cupy: Its version; None where it is not installed.
        nccl: The version of its NCCL, such as ``"2.27.7"``; None where it has found none.
        files: How many different libnccl files torch and CuPy have loaded together; more than one is a clash.
        problem: Why it cannot be loaded; empty where it can.
    """

    cupy: str | None
    nccl: str | None
    files: int
    problem: str = ""


def mpi_library() -> MpiLibrary:
    """Ask for the MPI behind mpi4py, without starting MPI."""
    answer, problem = _ask(_ASK_MPI)
    beside = shutil.which("mpirun", path=Path(sys.executable).parent) is not None
    where = "beside this Python" if beside else "on PATH" if mpirun() else None
    return MpiLibrary(_text(answer, "mpi4py"), _text(answer, "library"), _text(answer, "standard"), where, problem)


def cupy_library() -> CupyLibrary:
    """Ask for CuPy and its NCCL, beside torch and its own."""
    answer, problem = _ask(_ASK_CUPY)
    number, files = answer.get("nccl"), answer.get("files")
    nccl = version_text(number) if isinstance(number, int) else None
    return CupyLibrary(_text(answer, "cupy"), nccl, len(files) if isinstance(files, list) else 0, problem)


def mpirun() -> str | None:
    """The mpirun beside this Python, which is that of the MPI installed with it, else the one on PATH."""
    return shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")


def _ask(script: str) -> tuple[dict[str, object], str]:
    """What a script puts into ``answer`` before it ends or fails, and the last line of its error."""
    script = _FRAME + script
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {}, f"it has not answered within {_SECONDS:g} s"
    answer: dict[str, object] = {}
    for line in done.stdout.splitlines():
        if line.startswith(_ANSWER):
            answer = json.loads(line.removeprefix(_ANSWER))
    lines = done.stderr.strip().splitlines()
    if done.returncode == 0:
        return answer, ""
    return answer, lines[-1] if lines else f"its process ended with exit code {done.returncode}"


def _text(answer: dict[str, object], name: str) -> str | None:
    value = answer.get(name)
    return " ".join(value.split()) if isinstance(value, str) else None
