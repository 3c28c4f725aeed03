"""Lists versions, launcher, devices, and the backends that can be made here.

Copy what it prints into a bug report: it names no machine and no user. It
starts no ranks; `doctor` does.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from ppe_ddp.backends.cupy_nccl.nccl_version import SHARE_DEVICES, torch_nccl_text
from ppe_ddp.cli.arguments import output
from ppe_ddp.cli.backend_candidates import Candidate, candidates, many_ranks_a_device
from ppe_ddp.cli.libraries import CupyLibrary, MpiLibrary, cupy_library, mpi_library
from ppe_ddp.cli.machine import machine_facts, versions, write_report
from ppe_ddp.cli.torch_check import changes_of_torch, text_of_changes
from ppe_ddp.launchers import detect

if TYPE_CHECKING:
    import argparse

__all__ = ["EnvironmentReport", "add_arguments", "inspect_environment", "run", "text_of"]

_UNTOLD = "-"


@dataclass(frozen=True)
class EnvironmentReport:
    """The report of `env`.

    Attributes:
        launcher: Who started this process and with how many ranks, or what is wrong with its variables.
        threads: ``OMP_NUM_THREADS`` as it is set, and the threads that torch takes.
        devices: The CUDA devices by name.
        cuda: The CUDA version that torch is built for; None for none.
        torch_nccl: The version of the NCCL that torch calls; None where it has none.
        torch_internals: What is not as this library needs it, of what torch does not promise.
        mpi: The MPI behind mpi4py.
        cupy: CuPy and its NCCL.
        nccl_clash: Why torch's NCCL and CuPy's do not go together; empty where they do.
        backends: Which can be made here, and why the others cannot.
    """

    launcher: str
    threads: str
    devices: tuple[str, ...]
    cuda: str | None
    torch_nccl: str | None
    torch_internals: tuple[str, ...]
    mpi: MpiLibrary
    cupy: CupyLibrary
    nccl_clash: str
    backends: tuple[Candidate, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    parser.add_argument("--json", type=output, metavar="FILE", help="write it as JSON there; - for stdout")


def run(arguments: argparse.Namespace) -> int:
    """Looks and prints.

    Returns:
        0, whatever there is or is not.
    """
    surroundings = inspect_environment()
    print(text_of(surroundings), file=sys.stderr if arguments.json == "-" else sys.stdout)
    if arguments.json is not None:
        write_report(arguments.json, "env", **asdict(surroundings))
    return 0


def inspect_environment() -> EnvironmentReport:
    """Make the report; takes seconds, as the libraries are loaded in processes of their own."""
    mpi, cupy = mpi_library(), cupy_library()
    nccl = torch_nccl_text()
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return EnvironmentReport(
        launcher=_launcher(),
        threads=f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', '')}, torch takes {torch.get_num_threads()}",
        devices=tuple(torch.cuda.get_device_name(index) for index in range(count)),
        cuda=torch.version.cuda,
        torch_nccl=nccl,
        torch_internals=changes_of_torch(),
        mpi=mpi,
        cupy=cupy,
        nccl_clash=_clash(nccl, cupy),
        backends=candidates(mpi, cupy),
    )


def text_of(surroundings: EnvironmentReport) -> str:
    """The lines for people."""
    found, facts = versions(), machine_facts()
    mpi, cupy = surroundings.mpi, surroundings.cupy
    rows = {
        "ppe_ddp": found["ppe_ddp"],
        "python": f"{found['python']}, {facts['system']} {facts['architecture']}",
        "processor": f"{facts['cpu']}, {facts['cores']} cores for this process",
        "threads": surroundings.threads,
        "torch": f"{found['torch']} (CUDA {surroundings.cuda or 'none'}, NCCL {surroundings.torch_nccl or 'none'})",
        "torch internals": f"\n{'':<17}".join(text_of_changes(surroundings.torch_internals).splitlines()),
        "mpi4py": mpi.mpi4py,
        "MPI": f"{mpi.library} (MPI {mpi.standard})" if mpi.library else None,
        "mpirun": mpi.mpirun,
        "CuPy": f"{cupy.cupy} (NCCL {cupy.nccl or 'none'})" if cupy.cupy else None,
        "NCCL clash": surroundings.nccl_clash or "no",
        "launcher": surroundings.launcher,
        "devices": "; ".join(surroundings.devices) or None,
        "ranks a device": f"several, with {SHARE_DEVICES}=1" if many_ranks_a_device() else None,
    }
    lines = [f"{name + ':':<17}{text or _UNTOLD}" for name, text in rows.items()]
    lines += ["", "backends"]
    for backend in surroundings.backends:
        state = f"no: {backend.missing}" if backend.missing else f"yes, for {backend.device} tensors"
        lines.append(f"  {backend.name + ':':<14}{state}")
        lines += [f"  {'':<14}  remedy: {backend.remedy}"] if backend.missing else []
    return "\n".join(lines)


def _launcher() -> str:
    try:
        place = detect(os.environ)
    except (ValueError, RuntimeError) as error:
        return f"its variables are wrong: {error}"
    note = f" ({place.note})" if place.note else ""
    return f"{place.launcher}, rank {place.rank} of {place.world_size}{note}"


def _clash(torchs: str | None, cupy: CupyLibrary) -> str:
    if cupy.files > 1:
        return f"torch and CuPy load {cupy.files} different libnccl files into one process"
    if torchs and cupy.nccl and torchs != cupy.nccl:
        return f"torch calls NCCL {torchs}, and CuPy calls {cupy.nccl}"
    return ""
