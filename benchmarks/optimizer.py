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
import gc
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ppe_ddp import DistributedDataParallel, DistributedOptimizer
from ppe_ddp.cli.bench_platform import measure_on_ranks, over_mpi
from ppe_ddp.cli.bench_step import WORKLOADS
from ppe_ddp.cli.command_line import Spread, count, output, print_table, told, write_report

_WARM_UP_STEPS = 4
_MODELS = ("mlp", "transformer", "small")
_RATE = 1e-4

Made = tuple[nn.Module, torch.optim.Optimizer]


def _ours(module: nn.Module, group: Any, **options: Any) -> Made:
    model = DistributedDataParallel(module, process_group=group)
    return model, DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=_RATE), model, **options)


def _ours_whole(module: nn.Module, group: Any) -> Made:
    model = DistributedDataParallel(module, process_group=group)
    return model, torch.optim.AdamW(model.parameters(), lr=_RATE)


def _zero(module: nn.Module, group: Any) -> Made:
    # Imported here, since torch then warns of things of its own.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = TorchDDP(module, process_group=group, gradient_as_bucket_view=True)
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, lr=_RATE)


def _torch(module: nn.Module, group: Any) -> Made:
    model = TorchDDP(module, process_group=group, gradient_as_bucket_view=True)
    return model, torch.optim.AdamW(model.parameters(), lr=_RATE)


CONTESTANTS: dict[str, Callable[[nn.Module, Any], Made]] = {
    "ppe_ddp": _ours,
    "ppe_ddp, overlap": partial(_ours, overlap=True),
    "zero": _zero,
    "torch": _torch,
    "ppe_ddp, whole": _ours_whole,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    names = [name for name, workload in WORKLOADS.items() if not workload.is_dynamic]
    parser.add_argument("--ranks", type=count, metavar="N", help="ranks to start (default: 2)")
    known = f"{', '.join(names)} (default: {', '.join(_MODELS)})"
    parser.add_argument("--model", action="append", choices=names, metavar="NAME", help=known)
    parser.add_argument("--steps", type=count, default=3, metavar="N", help="steps in a block (default: 3)")
    parser.add_argument("--repeats", type=count, default=11, metavar="N", help="repetitions (default: 11)")
    parser.add_argument("--json", type=output, metavar="FILE", help="write all numbers there; - for stdout")


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints what came out on rank 0.

    Returns:
        0; 1 if a rank failed; 2 if the ranks that there are, are not as many as were asked for.
    """
    asked = (list(arguments.model or _MODELS), arguments.steps, arguments.repeats)
    return measure_on_ranks(measure, asked, partial(_publish, arguments), ranks=arguments.ranks)


def measure(models: Sequence[str], steps: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Measure some models in the default process group; all ranks call this together.

    Returns:
        By model and contestant, this rank's seconds of a step by repetition, and the bytes of its optimizer's state.
    """
    torch.set_num_threads(1)
    group = dist.new_group(backend="gloo") if over_mpi() else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own
        return {name: _measured(name, group, steps, repeats) for name in models}


def _measured(model_name: str, group: Any, steps: int, repeats: int) -> dict[str, Any]:
    workload = WORKLOADS[model_name]
    torch.manual_seed(0)
    module = workload.build()
    contestants = {name: make(copy.deepcopy(module), group) for name, make in CONTESTANTS.items()}
    if over_mpi():
        contestants["over mpi4py"] = _ours(copy.deepcopy(module), None)
    batch = workload.batch(torch.Generator().manual_seed(dist.get_rank()))

    def train(name: str, number: int) -> None:
        model, optimizer = contestants[name]
        for _ in range(number):
            optimizer.zero_grad()
            workload.loss(model(batch), batch).backward()
            optimizer.step()

    for name in [*contestants] * _WARM_UP_STEPS:
        train(name, 1)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    order, shuffler = list(contestants), random.Random(0)
    gc.collect()
    for _ in range(repeats):
        shuffler.shuffle(order)
        for name in order:
            train(name, 1)  # warms the caches that the contestant before has filled
            dist.barrier()
            start = perf_counter()
            train(name, steps)
            seconds[name].append((perf_counter() - start) / steps)
    return {name: [times, _state_nbytes(contestants[name][1])] for name, times in seconds.items()}


def _state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer's own
    states = inner.state.values()
    nbytes = sum(v.nbytes for state in states for v in state.values() if isinstance(v, torch.Tensor) and v.dim())
    return nbytes + (optimizer.master_nbytes if isinstance(optimizer, DistributedOptimizer) else 0)


def _publish(arguments: argparse.Namespace, ranks: Sequence[dict[str, dict[str, Any]]]) -> int:
    lines = [line for model in ranks[0] for line in _lines(model, [found[model] for found in ranks])]
    headings = ["", "ms a step", "to zero", "to torch", "state MB"]
    title = "A step with AdamW: medians (middle half)"
    print_table(title, f"{len(ranks)} ranks", headings, _rows(lines), told(arguments))
    write_report(arguments, "optimizer", lines=lines)
    return 0


def _lines(model: str, ranks: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    slowest = {name: [max(times) for times in zip(*(one[name][0] for one in ranks), strict=True)] for name in ranks[0]}
    for name, times in slowest.items():
        ratios = {
            f"to_{other}": Spread.of([a / b for a, b in zip(times, slowest[other], strict=True)])
            for other in ("zero", "torch")
        }
        milliseconds = Spread.of([1e3 * time for time in times])
        state = max(one[name][1] for one in ranks)
        yield {"model": model, "name": name, "milliseconds": milliseconds, **ratios, "state_nbytes": state}


def _rows(lines: Sequence[dict[str, Any]]) -> Iterator[Sequence[str]]:
    for k, one in enumerate(lines):
        if not k or one["model"] != lines[k - 1]["model"]:
            yield one["model"], "", "", "", ""
        to_zero, to_torch = ("" if one["name"] == other else one[f"to_{other}"].text(2) for other in ("zero", "torch"))
        yield f"  {one['name']}", one["milliseconds"].text(1), to_zero, to_torch, f"{one['state_nbytes'] / 1e6:.2f}"
