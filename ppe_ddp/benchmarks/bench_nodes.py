"""Measures `bench step` on several nodes that it makes, under each launcher.

The nodes are on this machine: each has a network, processes and memory of its
own, and a link of --mbit to the others (as root, of Linux namespaces; see
`ppe_ddp.testing.Nodes`). Under mpirun ppe_ddp takes part over gloo and over
mpi4py, under torchrun over gloo; torch DDP over gloo, under both.

  python -m ppe_ddp bench nodes --model mlp --model supernet-own
  python -m ppe_ddp bench nodes --nodes 4 --ranks 1 --mbit 10000 --quick
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from ppe_ddp.benchmarks.bench_models import WORKLOADS
from ppe_ddp.benchmarks.bench_step import BUCKET_SIZE_HELP
from ppe_ddp.cli.arguments import count, mebibytes, output
from ppe_ddp.cli.machine import write_report
from ppe_ddp.testing import Nodes, NodesError

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]

_LAUNCHERS = ("mpirun", "torchrun")
_NODES, _RANKS, _MBIT = 2, 2, 1000
_REPEATS, _STEPS = 9, 2
_SECONDS = 3600.0
_TOLD_LINES = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    names = [workload.name for workload in WORKLOADS if workload.on in (None, "cpu") and workload.world_size is None]
    parser.add_argument("--nodes", type=count, default=_NODES, metavar="N", help=f"nodes to make (default: {_NODES})")
    parser.add_argument("--ranks", type=count, default=_RANKS, metavar="N", help=f"on each node (default: {_RANKS})")
    rate = f"Mbit/s of each node's link, in each direction (default: {_MBIT})"
    parser.add_argument("--mbit", type=count, default=_MBIT, metavar="N", help=rate)
    parser.add_argument("--launcher", action="append", choices=_LAUNCHERS, help="only this one (default: both)")
    parser.add_argument("--model", action="append", choices=names, metavar="NAME", help=f"{', '.join(names)}")
    parser.add_argument("--bucket-size", type=mebibytes, action="append", metavar="MIB", help=BUCKET_SIZE_HELP)
    parser.add_argument("--steps", type=count, default=_STEPS, metavar="N", help=f"in a block (default: {_STEPS})")
    parser.add_argument("--repeats", type=count, default=_REPEATS, metavar="N", help=f"default: {_REPEATS}")
    parser.add_argument("--quick", action="store_true", help="one step, three repetitions: a first look")
    parser.add_argument("--json", type=output, metavar="FILE", help="write all numbers there; - for stdout")
    parser.set_defaults(names=names)


def run(arguments: argparse.Namespace) -> int:
    """Makes the nodes, measures, and prints what came out.

    Returns:
        0 if all was measured; 1 if a job failed; 2 if nodes cannot be made here.
    """
    file = sys.stderr if arguments.json == "-" else sys.stdout
    ranks = (arguments.ranks,) * arguments.nodes
    layout = f"{arguments.nodes} nodes x {arguments.ranks} ranks, {arguments.mbit} Mbit/s"
    reports: dict[str, Any] = {}
    try:
        with (
            Nodes(arguments.nodes, mbit=arguments.mbit) as nodes,
            tempfile.TemporaryDirectory(prefix="ppe_ddp_bench_") as folder,
        ):
            for launcher in dict.fromkeys(arguments.launcher or _LAUNCHERS):
                report = Path(folder, f"{launcher}.json")
                start = monotonic()
                print(f"{launcher}: measuring on {layout} ...", file=sys.stderr, flush=True)
                done = nodes.launch(launcher, _step_command(arguments, report), ranks=ranks, timeout=_SECONDS)
                if done.code:
                    lines = done.errors.strip().splitlines()[-_TOLD_LINES:]
                    print(
                        "\n".join([f"ppe_ddp: {launcher} ended with exit code {done.code}:", *lines]), file=sys.stderr
                    )
                    return 1
                print(f"{launcher}, {layout}, {monotonic() - start:.0f} s\n{done.output}", file=file, flush=True)
                reports[launcher] = json.loads(report.read_text())
    except NodesError as error:
        print(f"ppe_ddp: nodes cannot be made here: {error}", file=sys.stderr)
        return 2
    if arguments.json is not None:
        used = {"nodes": arguments.nodes, "ranks": list(ranks), "mbit": arguments.mbit}
        found = {
            launcher: {name: report[name] for name in ("settings", "models")} for launcher, report in reports.items()
        }
        write_report(arguments.json, "bench nodes", settings=used, launchers=found)
    return 0


def _step_command(arguments: argparse.Namespace, report: Path) -> list[str]:
    """``bench step`` for each rank; rank 0 writes the report, on a file system that all nodes have in common."""
    steps, repeats = (1, 3) if arguments.quick else (arguments.steps, arguments.repeats)
    words = ["bench", "step", "--steps", str(steps), "--repeats", str(repeats), "--json", str(report)]
    for name in arguments.model or arguments.names:
        words += ["--model", name]
    for size in arguments.bucket_size or ():
        words += ["--bucket-size", str(size)]
    return [sys.executable, "-m", "ppe_ddp", *words]
