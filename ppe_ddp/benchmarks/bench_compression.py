"""Measures compressors: what they send and cost, and on which links they pay.

Each averages the gradients of a model over the ranks, as in the wrapper, and so
does torch's hook of the same method. "sent" is in bytes of an all-reduce; "CPU"
is the processor time of all threads of a rank for one average, transport
included; "error" is the distance to the mean of the ranks, in parts of its
length, in one step without error feedback. Below the link speed "pays below" a
step with this method is shorter than one that sends everything, by the time
that the bytes take on the link and the processor time; "a step" is the ratio of
the two at the speed that --mbit names.

With --task each method trains to a loss instead, on ranks of this machine, or
on --nodes of it that are joined by links of --mbit (as root), beside torch's
wrapper and its hooks; --out draws the losses over time (needs matplotlib).

  python -m ppe_ddp bench compression --mbit 100
  mpirun -n 2 python -m ppe_ddp bench compression --json result.json
  python -m ppe_ddp bench compression --task gpt --nodes 2 --out loss.png
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from time import process_time
from typing import TYPE_CHECKING, Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from ppe_ddp import DistributedDataParallel
from ppe_ddp.benchmarks.bench_loss_picture import draw_losses
from ppe_ddp.benchmarks.bench_ranks import DEFAULT_RANKS, measure_on_ranks
from ppe_ddp.benchmarks.bench_table import print_table, table_of
from ppe_ddp.benchmarks.bench_tasks import TASKS
from ppe_ddp.benchmarks.bench_training import CONTESTANTS, TrainingLine, train
from ppe_ddp.cli.arguments import count, output
from ppe_ddp.cli.machine import machine_facts, over_mpi, versions, write_report
from ppe_ddp.compression import BF16, FP16, Int8, PowerSGD, RandomK, Sign, TopK, Uncompressed
from ppe_ddp.testing import JobStarter, Nodes, NodesError, Ranks

if TYPE_CHECKING:
    import argparse

__all__ = ["METHODS", "CompressionLine", "add_arguments", "measure", "run"]

_WIDTH = 1024
_WARM_UP = 3
_FASTEST = 1e6  # Mbit/s: above any link
_SECONDS = 3600.0

METHODS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "none": lambda: (Uncompressed(),),
    "none, torch": lambda: (None, default_hooks.allreduce_hook),
    "FP16": lambda: (FP16(),),
    "FP16, torch": lambda: (None, default_hooks.fp16_compress_hook),
    "BF16": lambda: (BF16(),),
    "BF16, torch": lambda: (None, default_hooks.bf16_compress_hook),
    "Int8": lambda: (Int8(),),
    "Int8, stochastic": lambda: (Int8(stochastic=True),),
    "TopK(0.01)": lambda: (TopK(0.01),),
    "RandomK(0.01)": lambda: (RandomK(0.01),),
    "Sign": lambda: (Sign(),),
    "PowerSGD(4)": lambda: (PowerSGD(4),),
    "PowerSGD(4), torch": lambda: (_torch_power_sgd(), powerSGD_hook),
}
"""What takes part: arguments of ``register_comm_hook``."""


def _torch_power_sgd() -> PowerSGDState:
    return PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2, use_error_feedback=False)


@dataclass(frozen=True)
class CompressionLine:
    """One method.

    Attributes:
        name: The method.
        ranks: The number of ranks.
        nbytes: What a rank sends in a step, in bytes of an all-reduce; None where that is not known (torch's hooks).
        whole_nbytes: What it would send uncompressed.
        cpu_seconds: Processor time of one average, the largest of any rank.
        error: Distance to the mean of the ranks, relative to its length.
        pays_below: The speed of a link in Mbit/s below which a step is shorter than without compression; None where it
            never is.
        ratio: Time of a step to that without compression, at the speed that was asked for.
    """

    name: str
    ranks: int
    nbytes: int | None
    whole_nbytes: int
    cpu_seconds: float
    error: float
    pays_below: float | None
    ratio: float | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    parser.add_argument("--ranks", type=count, metavar="N", help=f"ranks to start (default: {DEFAULT_RANKS})")
    parser.add_argument("--width", type=count, default=_WIDTH, metavar="N", help=f"of the model (default: {_WIDTH})")
    parser.add_argument("--mbit", type=count, default=100, metavar="N", help="speed of the link (default: 100)")
    parser.add_argument("--repeats", type=count, default=11, metavar="N", help="steps of each (default: 11)")
    parser.add_argument("--json", type=output, metavar="FILE", help="write all numbers there; - for stdout")
    training = parser.add_argument_group("training to a loss")
    training.add_argument("--task", action="append", choices=TASKS, metavar="NAME", help=f"{', '.join(TASKS)}")
    training.add_argument("--nodes", type=count, metavar="N", help="make so many nodes, and spread the ranks over them")
    methods = f"only this one, repeatable ({'; '.join(CONTESTANTS)})"
    training.add_argument("--method", action="append", choices=CONTESTANTS, metavar="NAME", help=methods)
    training.add_argument("--steps", type=count, metavar="N", help="fewer than the task has: a first look")
    seeds = "train so often, from other weights: accuracies are means of them (default: 1)"
    training.add_argument("--seeds", type=count, default=1, metavar="N", help=seeds)
    training.add_argument("--out", type=output, metavar="FILE", help="draw losses over time: .png, .svg or .pdf")


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints what came out on rank 0.

    Returns:
        0; 2 if the ranks that there are, are not as many as were asked for, or nodes cannot be made.
    """
    if arguments.task:
        return _train(arguments)
    asked = (arguments.width, arguments.mbit, arguments.repeats)
    return measure_on_ranks(measure, asked, partial(_publish, arguments), ranks=arguments.ranks)


def measure(width: int, mbit: float, repeats: int) -> list[CompressionLine]:
    """Measures all methods in the default process group; all ranks call this together.

    Args:
        width: Of the square weights of the model.
        mbit: The speed of the link that ratios are for, in Mbit/s.
        repeats: Steps of each method.

    Returns:
        One line a method, the same on every rank.
    """
    torch.set_num_threads(1)
    logging.getLogger("ppe_ddp").setLevel(logging.ERROR)  # that compression cannot pay on one machine is known
    return list(_lines(width, mbit, repeats))


def _lines(width: int, mbit: float, repeats: int) -> Iterator[CompressionLine]:
    plain: float | None = None
    for name, arguments in METHODS.items():
        nbytes, whole, seconds, error = _measured(arguments(), width, repeats)
        plain = seconds if plain is None else plain
        known = None if name.endswith("torch") else nbytes
        link = _link_seconds(whole, mbit)
        ratio = None if known is None else (seconds + _link_seconds(known, mbit)) / (plain + link)
        pays = None if known is None else _pays_below(whole - known, seconds - plain)
        yield CompressionLine(name, dist.get_world_size(), known, whole, seconds, error, pays, ratio)


def _measured(arguments: tuple[Any, ...], width: int, repeats: int) -> tuple[int, int, float, float]:
    """Bytes sent, bytes of the gradients, processor seconds of one average, and its error."""
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(width, width) for _ in range(4)])
    wrapper = DistributedDataParallel(module)
    wrapper.register_comm_hook(*arguments)
    own = _gradients(module, dist.get_rank())
    seconds = []
    for _ in range(_WARM_UP + repeats):
        for parameter, gradient in zip(module.parameters(), own, strict=True):
            parameter.grad = gradient.clone()
        dist.barrier()
        start = process_time()
        wrapper.finish_grad_sync()
        seconds.append(process_time() - start)
    trace = wrapper.trace()
    assert trace is not None
    everyone = [_gradients(module, rank) for rank in range(dist.get_world_size())]
    exact = [sum(parts) / len(everyone) for parts in zip(*everyone, strict=True)]
    found = [parameter.grad for parameter in module.parameters()]
    error = _length([a - b for a, b in zip(found, exact, strict=True) if a is not None]) / _length(exact)
    slowest = torch.tensor(median(seconds[_WARM_UP:]))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    whole = sum(parameter.nbytes for parameter in module.parameters())
    return trace.gradient_nbytes, whole, float(slowest), error


def _gradients(module: nn.Module, rank: int) -> list[Tensor]:
    """Gradients of a rank: matrices whose singular values decay, as those of training do, and some noise."""
    generator = torch.Generator().manual_seed(rank)
    common = torch.Generator().manual_seed(99)
    gradients = []
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 2:
            left = torch.randn(parameter.shape[0], 16, generator=common) * 0.7 ** torch.arange(16)
            noise = left @ torch.randn(16, parameter.shape[1], generator=common) + 0.3 * noise
        gradients.append(noise)
    return gradients


def _length(tensors: list[Any]) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors]).norm())


def _link_seconds(nbytes: int, mbit: float) -> float:
    """How long a rank's link takes for an all-reduce of so many bytes, one direction at a time."""
    world_size = dist.get_world_size()
    return 2 * (world_size - 1) / world_size * nbytes * 8 / (mbit * 1e6)


def _pays_below(saved_nbytes: int, lost_seconds: float) -> float | None:
    """The speed in Mbit/s at which the link takes as long for what is saved as the processor for saving it."""
    if saved_nbytes <= 0:
        return None
    return min(_link_seconds(saved_nbytes, 1.0) / max(lost_seconds, 1e-9), _FASTEST)


def _train(arguments: argparse.Namespace) -> int:
    names = arguments.method or list(CONTESTANTS)
    lines: list[TrainingLine] = []
    try:
        with ExitStack() as stack:
            ranks = _ranks(arguments, stack)
            for task in dict.fromkeys(arguments.task):
                lines += ranks.run(train, task, names, arguments.steps, arguments.seeds)[0]
    except (ImportError, NodesError) as error:
        print(f"ppe_ddp: {error}", file=sys.stderr)
        return 2
    where = f"{arguments.nodes} nodes, {arguments.mbit:g} Mbit/s" if arguments.nodes else "one machine"
    _print_training(lines, where, sys.stderr if arguments.json == "-" else sys.stdout)
    if arguments.json is not None:
        used = {"nodes": arguments.nodes or 1, "mbit": arguments.mbit if arguments.nodes else None}
        used["seeds"] = arguments.seeds
        write_report(arguments.json, "bench compression", settings=used, training=[asdict(line) for line in lines])
    if arguments.out is not None:
        draw_losses(lines, Path(arguments.out), f"{lines[0].ranks} ranks on {where}")
    return 0


def _ranks(arguments: argparse.Namespace, stack: ExitStack) -> Ranks:
    if arguments.nodes is None:
        return stack.enter_context(Ranks(arguments.ranks or DEFAULT_RANKS, timeout=_SECONDS, group_timeout=300))
    nodes = stack.enter_context(Nodes(arguments.nodes, mbit=arguments.mbit))
    each = -(-(arguments.ranks or arguments.nodes) // arguments.nodes)
    starter = JobStarter(nodes, "torchrun", (each,) * arguments.nodes)
    return stack.enter_context(Ranks(each * arguments.nodes, starter=starter, timeout=_SECONDS))


def _print_training(lines: Sequence[TrainingLine], where: str, file: TextIO) -> None:
    caption = f"{lines[0].ranks} ranks on {where}, torch {versions()['torch']}, {machine_facts()['cores']} cores; "
    caption += "parts are those of torch DDP; loss: of the last ten steps"
    headings = ["method", "MB a step", "ms a step", "part", "s to loss", "part", "loss", "right"]
    table = table_of("Training to a loss", caption, headings)
    for task in dict.fromkeys(line.task for line in lines):
        own = [line for line in lines if line.task == task]
        table.add_row(f"[bold]{task}[/bold], {own[0].whole_nbytes / 1e6:.1f} MB, to {own[0].target:g}")
        for line in own:
            reached, first = line.seconds_to_target, own[0].seconds_to_target
            table.add_row(
                f"  {line.name}",
                "-" if line.nbytes is None else f"{line.nbytes / 1e6:.3f}",
                f"{line.step_seconds * 1e3:.0f}",
                f"{line.step_seconds / own[0].step_seconds:.2f}",
                "-" if reached is None else f"{reached:.1f}",
                "-" if reached is None or first is None else f"{reached / first:.2f}",
                f"{sum(line.losses[-10:]) / len(line.losses[-10:]):.2f}",
                _accuracy(line.accuracies),
            )
        table.add_section()
    print_table(table, file)


def _accuracy(parts: Sequence[float]) -> str:
    """The mean, and its standard error where there are several."""
    error = f" ±{100 * stdev(parts) / len(parts) ** 0.5:.1f}" if len(parts) > 1 else ""
    return f"{100 * fmean(parts):.1f}{error} %"


def _publish(arguments: argparse.Namespace, lines: list[CompressionLine]) -> None:
    _print(lines, arguments.mbit, sys.stderr if arguments.json == "-" else sys.stdout)
    if arguments.json is not None:
        used = {"width": arguments.width, "mbit": arguments.mbit, "repeats": arguments.repeats}
        write_report(arguments.json, "bench compression", settings=used, lines=[asdict(line) for line in lines])


def _print(lines: list[CompressionLine], mbit: float, file: TextIO) -> None:
    facts = machine_facts()
    backend = "mpi4py" if over_mpi() else "gloo"
    caption = f"{lines[0].ranks} ranks over {backend}, torch {versions()['torch']}, {facts['cores']} cores"
    caption += f"; a step at {mbit:g} Mbit/s, as a part of one without compression; pays below so many Mbit/s"
    title = f"{lines[0].whole_nbytes / 1e6:.1f} MB of gradients"
    table = table_of(title, caption, ["method", "MB sent", "of all", "CPU ms", "error", "pays below", "a step"])
    for line in lines:
        sent = line.nbytes
        table.add_row(
            line.name,
            "-" if sent is None else f"{sent / 1e6:.3f}",
            "-" if sent is None else f"{sent / line.whole_nbytes:.3f}",
            f"{line.cpu_seconds * 1e3:.1f}",
            f"{line.error:.1e}",
            "-" if line.pays_below is None else f"{line.pays_below:.0f}",
            "-" if line.ratio is None else f"{line.ratio:.3f}",
        )
    print_table(table, file)
