"""What a measurement was made on: versions and hardware, without anything that names the machine."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

import ppe_ddp

__all__ = ["cores", "machine_facts", "versions"]


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
