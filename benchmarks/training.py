"""Trains small tasks to a loss, with each compressor and with torch's own hooks.

It runs on ranks of this machine, or on --nodes that are made of it, with links
of --mbit (as root). All methods take turns of a few steps, so that other
programs slow them alike; each has its own clock. --out draws the losses over
time (needs matplotlib).

  python -m benchmarks training --task trees --nodes 2 --mbit 100 --out loss.png
"""

import argparse
import ast
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from random import Random
from statistics import fmean, median, stdev
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.nodes import add_node_arguments, started_ranks
from ppe_ddp import DistributedDataParallel
from ppe_ddp.cli.benchmarking import largest, print_table, without_warnings
from ppe_ddp.cli.command_line import add_json, count, fail, output, write_report
from ppe_ddp.compression import FP16, Compressor, DiLoCo, ErrorFeedback, Int8, LocalSGD, PowerSGD, Sign, TopK, WarmUp
from ppe_ddp.testing import NodesError, RankError

_IN_TURN = 10  # steps of a turn, whose losses are averaged
_OUTER_EVERY = 10
_WARM_UP = 5  # steps, of PowerSGD
_STEPS_A_SEED = 2_000  # more than a task has, so that each seed has other batches

Line = dict[str, Any]

# ---------------------------------------------------------------------- tasks
# Their data are on every machine, or come with scikit-learn. Weights follow from torch's global generator, batches from
# rank and step, so that all contestants train the same.

_HELD_OUT = 5  # one sample in five is for the test
_STATEMENTS = ("Assign", "AugAssign", "Expr", "For", "If", "Raise", "Return", "While", "With")


@dataclass(frozen=True)
class Task:
    """A model, its data, and the loss to reach."""

    build: Callable[[], nn.Module]  # makes a model, whose output are the scores of the classes
    batch: Callable[[int, int], tuple[Any, Tensor]]  # inputs and labels, by rank and step
    held_out: tuple[Any, Tensor]  # inputs and labels for the test
    steps: int  # by default
    target: float  # the mean loss of a turn to reach
    lr: float  # of Adam, in the first half of the steps; it decays to zero in the second
    is_dynamic: bool = False  # a step leaves parameters out, others on each rank


def _digits() -> Task:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 8 - 1, torch.tensor(labels)[order]
    first = len(order) // _HELD_OUT

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def batch(rank: int, step: int) -> tuple[Any, Tensor]:
        chosen = torch.randint(first, len(y), (32,), generator=torch.Generator().manual_seed(100_000 * rank + step))
        return x[chosen], y[chosen]

    return Task(build, batch, (x[:first], y[:first]), steps=400, target=0.1, lr=2e-3)


def _trees() -> Task:
    """Predict the kind of a statement from its syntax tree: another graph in every step and on every rank."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]  # the same on every rank of one machine
    roots = [node for path in files for node in ast.walk(ast.parse(path.read_bytes()))]
    sizes = [sum(1 for _ in ast.walk(root)) if type(root).__name__ in _STATEMENTS else 0 for root in roots]
    found = [root for root, size in zip(roots, sizes, strict=True) if 4 <= size <= 24]
    Random(0).shuffle(found)
    kinds = sorted({type(node).__name__ for root in found for node in ast.walk(root)})

    def labelled(roots: list[ast.AST]) -> tuple[Any, Tensor]:
        return roots, torch.tensor([_STATEMENTS.index(type(root).__name__) for root in roots])

    def batch(rank: int, step: int) -> tuple[Any, Tensor]:
        return labelled(Random(f"{rank} {step}").sample(found[400:], 24))

    held_out = labelled(found[:400])
    return Task(lambda: _TreeNetwork(kinds, 64), batch, held_out, steps=200, target=0.45, lr=4e-3, is_dynamic=True)


class _TreeNetwork(nn.Module):
    """A cell for each kind of node, which is applied to each subtree, and a classifier."""

    def __init__(self, kinds: list[str], width: int) -> None:
        super().__init__()
        self.cells = nn.ModuleDict({kind: nn.Linear(width, width) for kind in kinds})
        self.leaf = nn.Parameter(torch.randn(width))
        self.head = nn.Linear(width, len(_STATEMENTS))

    def forward(self, roots: list[ast.AST]) -> Tensor:
        return self.head(torch.stack([self._below(root) for root in roots]))  # type: ignore[no-any-return]

    def _below(self, node: ast.AST) -> Tensor:
        children = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr_context)]
        states = [torch.tanh(self.cells[type(child).__name__](self._below(child))) for child in children]
        return torch.stack(states).sum(0) if states else self.leaf


TASKS: dict[str, Callable[[], Task]] = {"digits": _digits, "trees": _trees}
"""All tasks; making one reads its data."""

# ---------------------------------------------------------------------- methods


@dataclass(frozen=True)
class Method:
    """A way to synchronize."""

    hook: Callable[[], tuple[Any, ...]] = tuple  # makes the arguments of ``register_comm_hook``; empty for no hook
    is_torchs: bool = False  # in torch's wrapper
    # Makes outer steps, one after ten inner ones; None to average gradients in each step.
    outer: Callable[[DistributedDataParallel, torch.optim.Optimizer], object] | None = None


def _warmed_up(compressor: Compressor, steps: int) -> Method:
    """The recommended composition: with error feedback, and nearly exact in the first steps, which change most."""
    return Method(lambda: (WarmUp(ErrorFeedback(compressor), steps, before=Int8()),))


# The others are compared with the first. torch's wrapper takes its hook for bfloat16 only over NCCL and XCCL. torch's
# PowerSGD is in our wrapper, which waits for one bucket before the next: in torch's, over gloo, several buckets send
# messages in different orders on the ranks, and gloo ends the processes.
METHODS: dict[str, Method] = {
    "torch DDP": Method(is_torchs=True),
    "none": Method(),
    "FP16, torch": Method(lambda: (None, default_hooks.fp16_compress_hook), is_torchs=True),
    "FP16": Method(lambda: (FP16(),)),
    "Int8": Method(lambda: (Int8(),)),
    "Sign": _warmed_up(Sign(), 20),
    "TopK(0.01)": _warmed_up(TopK(0.01), 20),
    "PowerSGD(4), torch": Method(
        lambda: (PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=_WARM_UP), powerSGD_hook)
    ),
    "PowerSGD(4)": _warmed_up(PowerSGD(4), _WARM_UP),
    "LocalSGD, Int8": Method(
        lambda: (Int8(),), outer=lambda wrapper, optimizer: LocalSGD(wrapper, optimizer, every=_OUTER_EVERY)
    ),
    "DiLoCo, Int8": Method(
        lambda: (Int8(),),
        outer=lambda wrapper, optimizer: DiLoCo(wrapper, optimizer, every=_OUTER_EVERY, lr=0.7, momentum=0.3),
    ),
}
# Of METHODS. torch's wrapper and hooks are dashed, in the colour of the same method of ours.
_COLOURS = ("#777777", "#333333", "", "#2e6fb0", "#17a2a2", "#9467bd", "#e69f00", "", "#d62728", "#8c564b", "#2a9d6f")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    tasks = f"{', '.join(TASKS)} (default: all)"
    parser.add_argument("--task", action="append", choices=TASKS, metavar="NAME", help=tasks)
    add_node_arguments(parser)
    methods = f"only this one, repeatable ({'; '.join(METHODS)})"
    parser.add_argument("--method", action="append", choices=METHODS, metavar="NAME", help=methods)
    parser.add_argument("--steps", type=count, metavar="N", help="fewer than the task has: a first look")
    seeds = "train so often, from other weights: accuracies are means of them (default: 1)"
    parser.add_argument("--seeds", type=count, default=1, metavar="N", help=seeds)
    add_json(parser)
    parser.add_argument("--out", type=output, metavar="FILE", help="draw losses over time: .png, .svg or .pdf")


def run(arguments: argparse.Namespace) -> int:
    """Train and print; 1 if a rank failed, 2 if nodes cannot be made or a package is missing."""
    lines: list[Line] = []
    try:
        with started_ranks(arguments) as ranks:
            for task in dict.fromkeys(arguments.task or TASKS):
                lines += ranks.run(train, task, arguments.method or list(METHODS), arguments.steps, arguments.seeds)[0]
    except (ImportError, NodesError) as error:
        return fail(error, 2)
    except RankError as error:
        return fail(error, 1)
    where = f"{arguments.nodes} nodes, {arguments.mbit:g} Mbit/s" if arguments.nodes else "one machine"
    caption = f"{lines[0]['ranks']} ranks on {where}; parts are those of the first; loss: of the last ten steps"
    headings = ["method", "MB a step", "ms a step", "part", "s to loss", "part", "loss", "right"]
    print_table(arguments, "Training to a loss", caption, headings, _rows(lines))
    write_report(arguments, "training", lines=lines)
    if arguments.out is not None:
        _draw(lines, Path(arguments.out), f"{lines[0]['ranks']} ranks on {where}")
    return 0


@without_warnings()  # as compression cannot pay on one machine
def train(task_name: str, names: Sequence[str], steps: int | None, seeds: int = 1) -> list[Line]:
    """Train one task by some methods in the default process group, on all ranks together. Returns a line for each.

    Accuracies are of all seeds, all else is of the first seed.
    """
    torch.set_num_threads(1)
    task = TASKS[task_name]()
    total = task.steps if steps is None else steps
    lines: list[Line] = []
    for seed in range(seeds):
        runs = {name: _Run(task, METHODS[name], seed, total) for name in names}
        for begun in range(0, total, _IN_TURN):
            for one in runs.values():
                one.take(min(_IN_TURN, total - begun))
        found = [{"task": task_name, "name": name, **one.line()} for name, one in runs.items()]
        lines = lines or found
        for line, other in zip(lines, found if seed else (), strict=False):
            line["accuracies"] += other["accuracies"]
    return lines


class _Run:
    """The training of one copy of the model by one method."""

    def __init__(self, task: Task, method: Method, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        self._task, self._method, self._first_step = task, method, seed * _STEPS_A_SEED
        self._module = task.build()
        self._optimizer = torch.optim.Adam(self._module.parameters(), lr=task.lr, fused=True)
        # Decays in the second half: with a constant rate the last batches would decide the accuracy.
        self._schedule = LambdaLR(self._optimizer, lambda step: min(1.0, 2 - 2 * step / steps))
        self._wrapper: TorchDDP | DistributedDataParallel
        if method.is_torchs:
            self._wrapper = TorchDDP(self._module, find_unused_parameters=task.is_dynamic, gradient_as_bucket_view=True)
        else:
            self._wrapper = DistributedDataParallel(self._module)
            if method.outer is not None:
                method.outer(self._wrapper, self._optimizer)
        if hook := method.hook():
            self._wrapper.register_comm_hook(*hook)
        self._seconds: list[float] = []  # of a step, by turn
        self._losses: list[float] = []
        self._nbytes = 0

    def take(self, steps: int) -> None:
        """Take ``steps`` steps."""
        begun = self._first_step + len(self._losses)
        batches = [self._task.batch(dist.get_rank(), begun + k) for k in range(steps)]
        every = 1 if self._method.outer is None else _OUTER_EVERY
        dist.barrier()
        start = perf_counter()
        for inputs, labels in batches:
            self._optimizer.zero_grad()
            loss = functional.cross_entropy(self._wrapper(inputs), labels)
            loss.backward()
            self._optimizer.step()
            self._schedule.step()
            self._losses.append(float(loss.detach()))
            if isinstance(self._wrapper, DistributedDataParallel) and len(self._losses) % every == 0:
                trace = self._wrapper.trace()
                self._nbytes += 0 if trace is None else trace.gradient_nbytes
        self._seconds.append((perf_counter() - start) / steps)

    def line(self) -> Line:
        """The result, the same on every rank: losses are means over ranks, times those of the slowest."""
        size, steps = dist.get_world_size(), len(self._losses)
        losses = torch.tensor(self._losses)
        dist.all_reduce(losses)
        means, seconds = (losses / size).tolist(), largest(self._seconds)
        over = list(accumulate(_IN_TURN * step for step in seconds))
        reached = (end for end, loss in zip(over, of_turns(means), strict=True) if loss <= self._task.target)
        inputs, labels = self._task.held_out
        with torch.no_grad():
            accuracy = float((self._module(inputs).argmax(-1) == labels).float().mean())
        is_known = not self._method.is_torchs and len(self._method.hook()) < 2  # not for torch's hooks
        return {
            "ranks": size,
            "nbytes": largest(self._nbytes) / steps if is_known else None,
            "whole_nbytes": sum(parameter.nbytes for parameter in self._module.parameters()),
            "step_seconds": median(seconds),
            "target": self._task.target,
            "seconds_to_target": next(reached, None),
            "accuracies": [accuracy],
            "seconds": over,
            "losses": means,
        }


def of_turns(losses: Sequence[float]) -> list[float]:
    """The mean loss of each turn."""
    return [fmean(losses[begun : begun + _IN_TURN]) for begun in range(0, len(losses), _IN_TURN)]


def _rows(lines: Sequence[Line]) -> Iterator[Sequence[str]]:
    for task in dict.fromkeys(line["task"] for line in lines):
        own = [line for line in lines if line["task"] == task]
        first = own[0]
        yield (f"{task}, {first['whole_nbytes'] / 1e6:.1f} MB, to {first['target']:g}",)
        for one in own:
            reached, right = one["seconds_to_target"], one["accuracies"]
            error = f" ±{100 * stdev(right) / len(right) ** 0.5:.1f}" if len(right) > 1 else ""
            yield (
                f"  {one['name']}",
                "-" if one["nbytes"] is None else f"{one['nbytes'] / 1e6:.3f}",
                f"{one['step_seconds'] * 1e3:.0f}",
                f"{one['step_seconds'] / first['step_seconds']:.2f}",
                "-" if reached is None else f"{reached:.1f}",
                f"{reached / first['seconds_to_target']:.2f}" if reached and first["seconds_to_target"] else "-",
                f"{of_turns(one['losses'])[-1]:.2f}",
                f"{100 * fmean(right):.1f}{error} %",
            )
        yield ()


def _draw(lines: Sequence[Line], file: Path, caption: str) -> None:
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(line["task"] for line in lines))
    figure = Figure(figsize=(4.2 * len(tasks) + 1.8, 3.4), layout="constrained")
    axes = figure.subplots(1, len(tasks), squeeze=False)[0]
    for task, axis in zip(tasks, axes, strict=True):
        own = [line for line in lines if line["task"] == task]
        target = own[0]["target"]
        axis.axhline(target, color="#bbbbbb", linewidth=0.8, zorder=0)
        for line in own:
            name = line["name"]
            colour = _COLOURS[list(METHODS).index(name.removesuffix(", torch"))]
            dashed = {"linestyle": "--", "linewidth": 1.1} if "torch" in name else {"linewidth": 1.6}
            axis.plot(line["seconds"], of_turns(line["losses"]), label=name, color=colour, **dashed)
            if (reached := line["seconds_to_target"]) is not None:
                inside = "white" if "torch" in name else colour
                axis.plot(reached, target, "o", color=colour, markerfacecolor=inside, markersize=5, zorder=4)
        axis.set_xscale("log")
        axis.set_title(f"{task}, {own[0]['whole_nbytes'] / 1e6:.1f} MB, to {target:g}", fontsize=10)
        axis.set_xlabel("seconds")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("loss, mean of ten steps")
    axes[-1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(caption, fontsize=10)
    figure.savefig(file, dpi=130)
