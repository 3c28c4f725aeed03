"""Measures whole training steps with AdamW, sharded and not.

DistributedOptimizer with and without overlap, torch's ZeroRedundancyOptimizer
and unsharded AdamW each train a copy of one model on the same data, in turn
within one run over gloo, one thread a rank. Look at the ratios: times on a
shared machine mean little by themselves. "state" is what the optimizer of one
rank keeps.

Started alone it starts its own ranks; under torchrun, srun or mpirun it uses
those that there are, and under mpirun ppe_ddp over mpi4py takes part as well:

  python -m benchmarks optimizer --model transformer
  mpirun -n 2 python -m benchmarks optimizer --json result.json
"""

import argparse
import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ppe_ddp import DistributedDataParallel, DistributedOptimizer
from ppe_ddp.cli import benchmarking
from ppe_ddp.cli.bench_step import WORKLOADS, Contestant
from ppe_ddp.cli.benchmarking import Platform, Spread, in_turn, largest, on_ranks, over_mpi, print_table
from ppe_ddp.cli.command_line import count, write_report

_WARM_UP_STEPS = 4
_MODELS = ("mlp", "transformer", "small")
_RATE = 1e-4

Made = tuple[nn.Module, torch.optim.Optimizer]


def _ours(module: nn.Module, group: Any, *, is_whole: bool = False, **options: Any) -> Made:
    model = DistributedDataParallel(module, process_group=group)
    inner = torch.optim.AdamW(model.parameters(), lr=_RATE)
    return model, inner if is_whole else DistributedOptimizer(inner, model, **options)


def _torchs(module: nn.Module, group: Any, *, is_whole: bool) -> Made:
    # Imported here, since torch then warns of things of its own.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = TorchDDP(module, process_group=group, gradient_as_bucket_view=True)
    if is_whole:
        return model, torch.optim.AdamW(model.parameters(), lr=_RATE)
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, lr=_RATE)


CONTESTANTS: dict[str, Callable[[nn.Module, Any], Made]] = {
    "ppe_ddp": _ours,
    "ppe_ddp, overlap": partial(_ours, overlap=True),
    "zero": partial(_torchs, is_whole=False),
    "torch": partial(_torchs, is_whole=True),
    "ppe_ddp, whole": partial(_ours, is_whole=True),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    names = [name for name, workload in WORKLOADS.items() if not workload.is_dynamic]
    known = f"{', '.join(names)} (default: {', '.join(_MODELS)})"
    parser.add_argument("--model", action="append", choices=names, metavar="NAME", help=known)
    parser.add_argument("--steps", type=count, default=3, metavar="N", help="steps in a block (default: 3)")
    benchmarking.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints what came out on rank 0.

    Returns:
        0; 1 if a rank failed; 2 if the ranks that there are, are not as many as were asked for.
    """

    def publish(lines: list[dict[str, Any]], ranks: int) -> int:
        headings = ["", "ms a step", "to zero", "to torch", "state MB"]
        title = "A step with AdamW: medians (middle half)"
        print_table(arguments, title, f"{ranks} ranks", headings, _rows(lines))
        write_report(arguments, "optimizer", lines=lines)
        return 0

    asked = (list(arguments.model or _MODELS), arguments.steps, arguments.repeats)
    return on_ranks(measure, asked, publish, ranks=arguments.ranks)


def _rows(lines: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
    for k, one in enumerate(lines):
        if not k or one["model"] != lines[k - 1]["model"]:
            yield (one["model"],)
        to_zero, to_torch = ("" if one["name"] == other else one[f"to_{other}"].text(2) for other in ("zero", "torch"))
        yield f"  {one['name']}", one["milliseconds"].text(1), to_zero, to_torch, f"{one['state_nbytes'] / 1e6:.2f}"


def measure(models: Sequence[str], steps: int, repeats: int) -> list[dict[str, Any]]:
    """Measure some models in the default process group; all ranks call this together.

    Returns:
        A line for each model and contestant, the same on every rank, as the report has it.
    """
    Platform().enter()
    group = dist.new_group(backend="gloo") if over_mpi() else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own
        return [line for name in models for line in _lines(name, group, steps, repeats)]


def _lines(model: str, group: Any, steps: int, repeats: int) -> Iterator[dict[str, Any]]:
    workload = WORKLOADS[model]
    original, batch = workload.made()
    contestants = {}
    for name, make in [*CONTESTANTS.items(), *([("over mpi4py", _ours)] if over_mpi() else [])]:
        module = copy.deepcopy(original)
        made = make(module, None if name == "over mpi4py" else group)
        contestants[name] = Contestant(workload, batch, module, *made)
    for contestant in [*contestants.values()] * _WARM_UP_STEPS:
        contestant.take(1)
    takes = {name: one.take for name, one in contestants.items()}
    seconds = in_turn(takes, dict.fromkeys(takes, steps), repeats, Platform(), None)
    states = largest([_state_nbytes(one.optimizer) for one in contestants.values()])
    for (name, own), state in zip(seconds.items(), states, strict=True):
        ratios = {f"to_{other}": Spread.of(own, seconds[other]) for other in ("zero", "torch")}
        milliseconds = Spread.of([1e3 * time for time in own])
        yield {"model": model, "name": name, "milliseconds": milliseconds, **ratios, "state_nbytes": int(state)}


def _state_nbytes(optimizer: Any) -> int:
    inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer's own
    states = inner.state.values()
    nbytes = sum(v.nbytes for state in states for v in state.values() if isinstance(v, torch.Tensor) and v.dim())
    return nbytes + (optimizer.master_nbytes if isinstance(optimizer, DistributedOptimizer) else 0)
