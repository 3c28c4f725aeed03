"""Versions and hardware for the report of a measurement, without anything that names the machine."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

import ppe_ddp

__all__ = ["cores", "machine_facts", "over_mpi", "versions", "write_report"]


def versions() -> dict[str, str | None]:
    """Version of everything that takes part; None for what is not installed."""
    try:
        ppe: str | None = metadata.version("pytorch-pfn-extras")
    except metadata.PackageNotFoundError:
        ppe = None
    return {
        "ppe_ddp": ppe_ddp.__version__,
        "torch": str(torch.__version__),
        "pytorch_pfn_extras": ppe,
        "python": platform.python_version(),
    }


def machine_facts() -> dict[str, str | int]:
    """Kind of processor and system, and how many cores there are for this process."""
    return {"cores": cores(), "cpu": _cpu(), "system": platform.system(), "architecture": platform.machine()}


def over_mpi() -> bool:
    """Whether the default process group is mpi4py's."""
    return dist.is_initialized() and "mpi4py" in str(dist.get_backend_config())


def write_report(file: str, command: str, **content: object) -> None:
    """Write what ``command`` measured, and on what, as JSON to ``file``; - is stdout."""
    report = {"command": command, "versions": versions(), "machine": machine_facts(), **content}
    text = json.dumps(report, indent=2) + "\n"
    if file == "-":
        sys.stdout.write(text)
    else:
        Path(file).write_text(text)


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
