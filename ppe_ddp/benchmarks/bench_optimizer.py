"""Measures whole training steps with AdamW, sharded and not.

DistributedOptimizer with and without overlap, torch's ZeroRedundancyOptimizer
and unsharded AdamW each train a copy of one model on the same data, in turn
within one run over gloo, one thread a rank. Look at the ratios: times on a
shared machine mean little by themselves. "state" is what the optimizer of one
rank keeps.

Started alone it starts its own ranks; under torchrun, srun or mpirun it uses
those that there are, and under mpirun ppe_ddp over mpi4py takes part as well:

  python -m ppe_ddp bench optimizer --model transformer
  mpirun -n 2 python -m ppe_ddp bench optimizer --json result.json
"""

from __future__ import annotations

import copy
import gc
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ppe_ddp import DistributedDataParallel, DistributedOptimizer
from ppe_ddp.benchmarks.bench_measure import workload_named
from ppe_ddp.benchmarks.bench_models import WORKLOADS, Workload
from ppe_ddp.benchmarks.bench_ranks import DEFAULT_RANKS, measure_on_ranks
from ppe_ddp.benchmarks.bench_result import Spread
from ppe_ddp.benchmarks.bench_table import print_table, spread_text, table_of
from ppe_ddp.cli.arguments import count, output
from ppe_ddp.cli.machine import machine_facts, over_mpi, versions, write_report

if TYPE_CHECKING:
    import argparse

    from torch.distributed import ProcessGroup

__all__ = ["CONTESTANTS", "OptimizerResult", "add_arguments", "measure", "run"]

_WARM_UP_STEPS = 4
_MODELS = ("mlp", "transformer", "small")
_RATE = 1e-4

Made = tuple[nn.Module, torch.optim.Optimizer]


def _sharded(module: nn.Module, group: ProcessGroup | None) -> Made:
    model = DistributedDataParallel(module, process_group=group)
    return model, DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=_RATE), model)


def _overlapping(module: nn.Module, group: ProcessGroup | None) -> Made:
    model = DistributedDataParallel(module, process_group=group)
    return model, DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=_RATE), model, overlap=True)


def _zero(module: nn.Module, group: ProcessGroup | None) -> Made:
    # Imported here, since torch then warns of things of its own.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = TorchDDP(module, process_group=group, gradient_as_bucket_view=True)
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, lr=_RATE)


def _torch(module: nn.Module, group: ProcessGroup | None) -> Made:
    model = TorchDDP(module, process_group=group, gradient_as_bucket_view=True)
    return model, torch.optim.AdamW(model.parameters(), lr=_RATE)


def _plain(module: nn.Module, group: ProcessGroup | None) -> Made:
    model = DistributedDataParallel(module, process_group=group)
    return model, torch.optim.AdamW(model.parameters(), lr=_RATE)


CONTESTANTS: dict[str, Callable[[nn.Module, ProcessGroup | None], Made]] = {
    "ppe_ddp": _sharded,
    "ppe_ddp, overlap": _overlapping,
    "zero": _zero,
    "torch": _torch,
    "ppe_ddp, whole": _plain,
}
"""What takes part: DistributedOptimizer at once and overlapping, torch DDP with ZeRO and without, our wrapper."""


@dataclass(frozen=True)
class OptimizerResult:
    """One contestant on one model.

    Attributes:
        model: The model.
        name: The contestant.
        ranks: The number of ranks.
        milliseconds: Of one step, of the slowest rank.
        to_zero: Ratio to ZeroRedundancyOptimizer with torch DDP, each time within one repetition.
        to_torch: Ratio to AdamW with torch DDP, in the same way.
        state_nbytes: Of optimizer state and of master weights beside the parameters, the largest of any rank.
    """

    model: str
    name: str
    ranks: int
    milliseconds: Spread
    to_zero: Spread
    to_torch: Spread
    state_nbytes: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    names = [workload.name for workload in WORKLOADS if not workload.is_dynamic]
    parser.add_argument("--ranks", type=count, metavar="N", help=f"ranks to start (default: {DEFAULT_RANKS})")
    parser.add_argument(
        "--model", action="append", choices=names, metavar="NAME", help=f"{', '.join(names)} (default: {_MODELS})"
    )
    parser.add_argument("--steps", type=count, default=3, metavar="N", help="steps in a block (default: 3)")
    parser.add_argument("--repeats", type=count, default=11, metavar="N", help="repetitions (default: 11)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, data and order")
    parser.add_argument("--json", type=output, metavar="FILE", help="write all numbers there; - for stdout")


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints what came out on rank 0.

    Returns:
        0; 2 if the ranks that there are, are not as many as were asked for.
    """
    asked = (tuple(arguments.model or _MODELS), arguments.steps, arguments.repeats, arguments.seed)
    return measure_on_ranks(measure, asked, partial(_publish, arguments), ranks=arguments.ranks)


def measure(models: Sequence[str], steps: int, repeats: int, seed: int) -> list[OptimizerResult]:
    """Measures some models in the default process group; all ranks call this together.

    Args:
        models: Names of workloads.
        steps: Steps in a block.
        repeats: Blocks of each contestant.
        seed: What weights, data and the order of contestants are drawn from.

    Returns:
        One line a contestant and model, the same on every rank.
    """
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own
        return [line for name in models for line in _measured(workload_named(name), steps, repeats, seed)]


def _measured(workload: Workload, steps: int, repeats: int, seed: int) -> Iterator[OptimizerResult]:
    contestants = _entered(workload, seed)
    batch = workload.batch(torch.Generator().manual_seed(1000 * seed + dist.get_rank()))

    def train(name: str, number: int) -> None:
        model, optimizer = contestants[name]
        for _ in range(number):
            optimizer.zero_grad()
            workload.loss(model(batch), batch).backward()
            optimizer.step()

    for _ in range(_WARM_UP_STEPS):
        for name in contestants:
            train(name, 1)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    order, shuffler = list(contestants), random.Random(seed)
    gc.collect()
    for _ in range(repeats):
        shuffler.shuffle(order)
        for name in order:
            train(name, 1)  # warms the caches that the contestant before has filled
            dist.barrier()
            start = perf_counter()
            train(name, steps)
            seconds[name].append((perf_counter() - start) / steps)
    own = (seconds, {name: _state_nbytes(optimizer) for name, (_, optimizer) in contestants.items()})
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    yield from _lines(workload.name, everyone)


def _entered(workload: Workload, seed: int) -> dict[str, Made]:
    torch.manual_seed(seed)
    module = workload.build()
    group = dist.new_group(backend="gloo") if over_mpi() else None
    contestants = {name: make(copy.deepcopy(module), group) for name, make in CONTESTANTS.items()}
    if over_mpi():
        contestants["over mpi4py"] = _sharded(copy.deepcopy(module), None)
    return contestants


def _state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer's own
    states = inner.state.values()
    nbytes = sum(v.nbytes for state in states for v in state.values() if isinstance(v, torch.Tensor) and v.dim())
    return nbytes + (optimizer.master_nbytes if isinstance(optimizer, DistributedOptimizer) else 0)


def _lines(model: str, everyone: Sequence[tuple[dict[str, list[float]], dict[str, int]]]) -> Iterator[OptimizerResult]:
    names = everyone[0][0]
    slowest = {
        name: [max(times) for times in zip(*(times[name] for times, _ in everyone), strict=True)] for name in names
    }
    for name, times in slowest.items():
        ratios = {
            other: Spread.of([a / b for a, b in zip(times, slowest[other], strict=True)]) for other in ("zero", "torch")
        }
        yield OptimizerResult(
            model,
            name,
            len(everyone),
            Spread.of([1e3 * time for time in times]),
            ratios["zero"],
            ratios["torch"],
            max(nbytes[name] for _, nbytes in everyone),
        )


def _publish(arguments: argparse.Namespace, lines: Sequence[OptimizerResult]) -> None:
    facts = machine_facts()
    caption = f"{lines[0].ranks} ranks; {facts['cpu']}, {facts['cores']} cores; torch {versions()['torch']}"
    _print_table(lines, caption, sys.stderr if arguments.json == "-" else sys.stdout)
    if arguments.json is not None:
        used = {"ranks": lines[0].ranks, "steps": arguments.steps, "repeats": arguments.repeats, "threads": 1}
        write_report(arguments.json, "bench optimizer", settings=used, lines=[asdict(line) for line in lines])


def _print_table(lines: Sequence[OptimizerResult], caption: str, file: TextIO) -> None:
    headings = ["", "ms a step", "to zero", "to torch", "state MB"]
    table = table_of("A step with AdamW: medians (middle half)", caption, headings)
    for model in dict.fromkeys(line.model for line in lines):
        table.add_row(f"[bold]{model}[/bold]")
        for line in lines:
            if line.model == model:
                table.add_row(
                    f"  {line.name}",
                    spread_text(line.milliseconds, 1),
                    "" if line.name == "zero" else spread_text(line.to_zero, 2),
                    "" if line.name == "torch" else spread_text(line.to_torch, 2),
                    f"{line.state_nbytes / 1e6:.2f}",
                )
        table.add_section()
    print_table(table, file)
