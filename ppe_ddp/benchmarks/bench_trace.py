"""Records a few steps under torch's profiler, host and device of each rank, for https://ui.perfetto.dev."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

    from ppe_ddp.benchmarks.bench_platform import Platform

__all__ = ["LEAD_STEPS", "record", "trace_file"]

LEAD_STEPS = 9
"""How many steps a new wrapper makes first: by then its buckets are in the order in which gradients arrive."""

_STEPS = 3
_SILENT = "6"


def trace_file(folder: str, model: str, contestant: str, rank: int | str) -> str:
    """The path of the trace of ``contestant`` on one rank."""
    return f"{folder}/{model}-{contestant}-rank{rank}.json.gz"


def record(step: Callable[[], object], file: str, platform: Platform, control: ProcessGroup | None) -> None:
    """Makes three steps under torch's profiler; all ranks call this together.

    Args:
        step: Makes one step.
        file: Written, in Chrome's format for traces, compressed.
        platform: What the steps run on: a GPU's own activity is recorded too.
        control: The group in which the ranks meet.
    """
    activities = [ProfilerActivity.CPU]
    if platform.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    else:
        # Some versions of the profiler tell on stderr when they start and stop; on a GPU they also tell of errors.
        os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    platform.synchronize()
    with profile(activities=activities) as picture:
        # The profiler takes its time to start, another on each rank.
        dist.barrier(control)
        for number in range(_STEPS):
            with record_function(f"step {number}"):
                step()
        platform.synchronize()
    picture.export_chrome_trace(file)
