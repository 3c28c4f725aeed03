"""Measures the peak memory of a rank, beside torch DDP and the bare module.

Each of them trains a model for some steps in processes of its own. "peak" is
the most that a rank had in memory at once (resident set size); memory that
ranks share is divided among them. "more" is what it is above the bare module.
It reads /proc, so it needs Linux.

  python -m benchmarks memory --model mlp --ranks 4
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.mask import MODELS
from ppe_ddp.cli.bench_step import WORKLOADS, Contestant, wraps
from ppe_ddp.cli.benchmarking import DEFAULT_RANKS, Platform, print_table
from ppe_ddp.cli.command_line import add_json, count, write_report

NAMES = ("bare", "torch", "ppe_ddp", "shared_memory=False")
_STEPS = 24  # the bucket size is chosen after ten


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    names = "a model of bench step (default: those for CPUs)"
    parser.add_argument("--model", action="append", choices=WORKLOADS, metavar="NAME", help=names)
    default = f"ranks to start (default: {DEFAULT_RANKS})"
    parser.add_argument("--ranks", type=count, default=DEFAULT_RANKS, metavar="N", help=default)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Returns the exit code."""
    rows, lines = [], []
    for model in arguments.model or MODELS:
        line: dict[str, Any] = {"model": model}
        for name in NAMES:
            with Platform().start(arguments.ranks) as ranks:
                line[name] = statistics.median(ranks.run(peak_nbytes, model, name))
        lines.append(line)
        more = [f"{(line[name] - line['bare']) / 1e6:+.0f}" for name in NAMES[1:]]
        rows.append((model, f"{line['bare'] / 1e6:.0f}", *more))
    caption = f"{arguments.ranks} ranks, {_STEPS} steps"
    print_table(arguments, "Peak memory of a rank, MB; the others: more", caption, ["", *NAMES], rows)
    write_report(arguments, "memory", lines=lines)
    return 0


def peak_nbytes(model: str, name: str) -> int:
    """Train ``model`` in one wrapper, on all ranks together. Returns the peak memory of this process in bytes."""
    import torch._dynamo  # noqa: F401  # torch's wrapper imports it, with more memory than a small model has

    Platform().enter()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of imports
    workload = WORKLOADS[model]
    module, batch = workload.made()
    wrapper = wraps(["shared_memory=False"], adamw=False)[name](module, None, workload.is_dynamic)
    Contestant(workload, batch, module, wrapper).take(_STEPS)
    dist.barrier()  # all have their shared memory still
    of_process, of_maps = (_kibibytes(Path("/proc/self", name).read_text()) for name in ("status", "smaps_rollup"))
    return 1024 * (of_process["VmHWM"] - of_process["RssShmem"] + of_maps["Pss_Shmem"])


def _kibibytes(text: str) -> dict[str, int]:
    lines = (line.split() for line in text.splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if words[-1] == "kB"}
