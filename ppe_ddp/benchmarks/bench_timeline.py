"""Draws one step of torch DDP above the same step of ppe_ddp, on one scale.

The ranks are on this machine; with --nodes N on N nodes that are made of it,
each with a link of --mbit to the others (as root; see `ppe_ddp.testing.Nodes`).
torch's wrapper is seen by a hook around its own all-reduce. Needs matplotlib.

  python -m ppe_ddp bench timeline --out step.png
  python -m ppe_ddp bench timeline --out step.png --nodes 2 --compressor int8
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ppe_ddp.benchmarks.bench_measure import workload_named
from ppe_ddp.benchmarks.bench_models import WORKLOADS, Workload
from ppe_ddp.benchmarks.bench_torch_spans import TorchSpans
from ppe_ddp.cli.arguments import count, output
from ppe_ddp.compression import BF16, FP16, Compressor, ErrorFeedback, Int8, PowerSGD, TopK
from ppe_ddp.ddp import DistributedDataParallel
from ppe_ddp.testing import JobStarter, Nodes, NodesError, RankError, Ranks
from ppe_ddp.tracing.timeline import record
from ppe_ddp.tracing.timeline_folder import check_pictures
from ppe_ddp.tracing.timeline_picture import Panel, draw_timeline
from ppe_ddp.tracing.timeline_summary import summarize

if TYPE_CHECKING:
    import argparse

    from ppe_ddp.tracing.rank_record import RankRecord

__all__ = ["add_arguments", "run"]

_COMPRESSORS: dict[str, Compressor] = {
    "bf16": BF16(),
    "fp16": FP16(),
    "int8": Int8(),
    "top-k": ErrorFeedback(TopK(0.01)),
    "power-sgd": ErrorFeedback(PowerSGD(rank=4)),
}
_RANKS, _MBIT, _STEPS, _LEAD_STEPS = 2, 1000, 12, 6
_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    names = [workload.name for workload in WORKLOADS if workload.on in (None, "cpu") and workload.world_size is None]
    parser.add_argument("--out", type=output, required=True, metavar="FILE", help="the picture: .png, .svg or .pdf")
    parser.add_argument(
        "--model", choices=names, default="supernet-own", metavar="NAME", help=f"{', '.join(names)} (supernet-own)"
    )
    parser.add_argument("--ranks", type=count, metavar="N", help=f"ranks (default: {_RANKS}, or one on each node)")
    parser.add_argument("--nodes", type=count, metavar="N", help="make so many nodes")
    parser.add_argument("--mbit", type=count, default=_MBIT, metavar="N", help=f"of a node's link (default: {_MBIT})")
    compressors = f"once more with this one ({', '.join(_COMPRESSORS)}); repeatable"
    parser.add_argument("--compressor", action="append", choices=_COMPRESSORS, metavar="NAME", help=compressors)
    parser.add_argument("--no-torch", action="store_true", help="ppe_ddp alone")
    parser.add_argument("--steps", type=count, default=_STEPS, metavar="N", help=f"to record (default: {_STEPS})")


def run(arguments: argparse.Namespace) -> int:
    """Records, draws, and prints the numbers.

    Returns:
        0; 1 if a rank failed; 2 where nodes cannot be made, or pictures not be drawn.
    """
    contestants = [] if arguments.no_torch else ["torch DDP"]
    contestants += ["ppe_ddp", *(f"ppe_ddp, {name}" for name in arguments.compressor or [])]
    try:
        check_pictures()
        with ExitStack() as stack:
            ranks = _ranks(arguments, stack)
            panels = [
                Panel(
                    name,
                    [one.on_one_clock() for one in ranks.run(record_steps, name, arguments.model, arguments.steps)],
                )
                for name in contestants
            ]
    except (ImportError, NodesError) as error:
        print(f"ppe_ddp: {error}", file=sys.stderr)
        return 2
    except RankError as error:
        print(f"ppe_ddp: {error}", file=sys.stderr)
        return 1
    draw_timeline(panels, Path(arguments.out))
    for panel in panels:
        print(f"{panel.title}: {summarize(panel.records)}\n")
    return 0


def _ranks(arguments: argparse.Namespace, stack: ExitStack) -> Ranks:
    if arguments.nodes is None:
        return stack.enter_context(Ranks(arguments.ranks or _RANKS, timeout=_SECONDS))
    nodes = stack.enter_context(Nodes(arguments.nodes, mbit=arguments.mbit))
    each = -(-(arguments.ranks or arguments.nodes) // arguments.nodes)
    starter = JobStarter(nodes, "torchrun", (each,) * arguments.nodes)
    return stack.enter_context(Ranks(each * arguments.nodes, starter=starter, timeout=_SECONDS))


def record_steps(contestant: str, model: str, steps: int) -> RankRecord:
    """One rank's part: train, and record the last steps."""
    rank, workload = dist.get_rank(), workload_named(model)
    torch.manual_seed(0)
    module = workload.build()
    batch = workload.batch(torch.Generator().manual_seed(rank))
    if contestant == "torch DDP":
        wrapper = TorchDDP(module, gradient_as_bucket_view=True, find_unused_parameters=workload.is_dynamic)
        spans = TorchSpans(wrapper)
        _train(wrapper, workload, batch, range(_LEAD_STEPS))
        with record() as recording, spans.into(recording.log):
            dist.barrier()
            _train(wrapper, workload, batch, range(_LEAD_STEPS, _LEAD_STEPS + steps))
        return recording.result()
    ours = DistributedDataParallel(module)
    if ", " in contestant:
        ours.register_comm_hook(_COMPRESSORS[contestant.split(", ")[1]])
    _train(ours, workload, batch, range(_LEAD_STEPS))
    with record() as recording:
        dist.barrier()
        _train(ours, workload, batch, range(_LEAD_STEPS, _LEAD_STEPS + steps))
    return recording.result()


def _train(wrapper: torch.nn.Module, workload: Workload, batch: torch.Tensor, steps: range) -> None:
    rank = dist.get_rank()
    for step in steps:
        wrapper.zero_grad()
        workload.loss(wrapper(batch, *workload.route(0, step, rank)), batch).backward()
