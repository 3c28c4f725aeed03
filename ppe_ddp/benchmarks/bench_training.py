"""Trains the tasks of ``bench compression --task`` by each method, to a loss.

All methods take some steps in turn, so that what else the machine does touches them alike; the clock is each method's
own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean, median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.lr_scheduler import LambdaLR

from ppe_ddp import DistributedDataParallel
from ppe_ddp.benchmarks.bench_tasks import TASKS, Task
from ppe_ddp.compression import FP16, DiLoCo, ErrorFeedback, Int8, LocalSGD, PowerSGD, Sign, TopK, WarmUp

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ppe_ddp.compression import Compressor

__all__ = ["CONTESTANTS", "TrainingLine", "reached_at", "train"]

_IN_TURN = 10  # steps; and so many losses are averaged
_OUTER_EVERY = 10
_WARM_UP = 5  # steps, of PowerSGD
_STEPS_A_SEED = 2_000  # more than any task has, so that no seed has the batches of another


@dataclass(frozen=True)
class TrainingLine:
    """One task, trained by one method.

    Attributes:
        task: The task.
        name: The method.
        ranks: The number of ranks.
        nbytes: What a rank sends in a step, in bytes of an all-reduce, on average; None for torch's wrapper and hooks.
        whole_nbytes: The bytes of all parameters.
        step_seconds: The median time of a step.
        target: The loss to reach, as the mean of ten steps.
        seconds_to_target: The time that it took; None where it was not reached.
        accuracies: On what was held out, in the end: from each seed. All else is from the first.
        seconds: When each step was over.
        losses: The mean over the ranks in each step.
    """

    task: str
    name: str
    ranks: int
    nbytes: float | None
    whole_nbytes: int
    step_seconds: float
    target: float
    seconds_to_target: float | None
    accuracies: list[float]
    seconds: list[float]
    losses: list[float]


@dataclass(frozen=True)
class _Method:
    """How to synchronize.

    Attributes:
        hook: Makes the arguments of ``register_comm_hook``; None for no hook.
        is_torchs: Whether in torch's wrapper.
        outer: Makes outer steps, of which there is one after every ten inner ones; None for gradients in each step.
    """

    hook: Callable[[], tuple[Any, ...]] | None = None
    is_torchs: bool = False
    outer: Callable[[DistributedDataParallel, Optimizer], object] | None = None


def _warmed_up(compressor: Compressor, steps: int) -> Callable[[], tuple[Any, ...]]:
    """The recommended composition: errors are fed back, and the first steps, which change most, are nearly exact."""
    return lambda: (WarmUp(ErrorFeedback(compressor), steps, before=Int8()),)


CONTESTANTS: dict[str, _Method] = {
    "torch DDP": _Method(is_torchs=True),
    "none": _Method(),
    "FP16, torch": _Method(lambda: (None, default_hooks.fp16_compress_hook), is_torchs=True),
    "FP16": _Method(lambda: (FP16(),)),
    "Int8": _Method(lambda: (Int8(),)),
    "Sign": _Method(_warmed_up(Sign(), 20)),
    "TopK(0.01)": _Method(_warmed_up(TopK(0.01), 20)),
    "PowerSGD(4), torch": _Method(
        lambda: (PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=_WARM_UP), powerSGD_hook)
    ),
    "PowerSGD(4)": _Method(_warmed_up(PowerSGD(4), _WARM_UP)),
    "LocalSGD, Int8": _Method(
        lambda: (Int8(),), outer=lambda wrapper, optimizer: LocalSGD(wrapper, optimizer, every=_OUTER_EVERY)
    ),
    "DiLoCo, Int8": _Method(
        lambda: (Int8(),),
        outer=lambda wrapper, optimizer: DiLoCo(wrapper, optimizer, every=_OUTER_EVERY, lr=0.7, momentum=0.3),
    ),
}
"""What takes part; the first is what the others are compared with. Where a method wants it, errors are fed back, and
the first steps are less compressed.

torch's wrapper takes its hook for bfloat16 over NCCL and XCCL alone. Its hook for PowerSGD is in our wrapper, which
waits for one bucket before the next: with several of them in torch's own, over gloo, the order of messages is not the
same on all ranks, and gloo ends the processes.
"""


def train(task_name: str, names: Sequence[str], steps: int | None, seeds: int = 1) -> list[TrainingLine]:
    """Trains one task by some methods in the default process group; all ranks call this together.

    Args:
        task_name: Of :data:`TASKS`.
        names: Of :data:`CONTESTANTS`.
        steps: How many; None for as many as the task says.
        seeds: How often, from other weights and with the data in another order.

    Returns:
        One line a method, the same on every rank.
    """
    torch.set_num_threads(1)
    logging.getLogger("ppe_ddp").setLevel(logging.ERROR)  # that compression cannot pay on one machine is known
    task = TASKS[task_name]()
    count = task.steps if steps is None else steps
    first, *others = (_trained(task, names, count, seed) for seed in range(seeds))
    return [
        replace(line, accuracies=[accuracy for lines in (first, *others) for accuracy in lines[k].accuracies])
        for k, line in enumerate(first)
    ]


def _trained(task: Task, names: Sequence[str], count: int, seed: int) -> list[TrainingLine]:
    """All methods from one seed."""
    runs = {name: _Run(task, CONTESTANTS[name], seed, count) for name in names}
    for begun in range(0, count, _IN_TURN):
        for run in runs.values():
            run.take(min(_IN_TURN, count - begun))
    return [run.line(name) for name, run in runs.items()]


def reached_at(losses: Sequence[float], target: float) -> int | None:
    """The step in which the mean of the last ones is down to ``target``."""
    ends = range(_IN_TURN, len(losses) + 1)
    return next((end - 1 for end in ends if fmean(losses[end - _IN_TURN : end]) <= target), None)


def ends_in_turns(seconds: Sequence[float]) -> Iterator[float]:
    """When each step was over on this rank, from the beginning of its turn, in which all ranks begin together."""
    for begun in range(0, len(seconds), _IN_TURN):
        yield from accumulate(seconds[begun : begun + _IN_TURN])


def joined(ends: Sequence[float]) -> list[float]:
    """The same from the beginning of the training.

    Args:
        ends: See :func:`ends_in_turns`; of the rank on which each step was over last. The longest step of any rank,
            added up, would be too much: ranks that do not wait for each other are slow in different steps.
    """
    over: list[float] = []
    for begun in range(0, len(ends), _IN_TURN):
        before = over[-1] if over else 0.0
        over += [before + end for end in ends[begun : begun + _IN_TURN]]
    return over


class _Run:
    """One method with its own copy of the model."""

    def __init__(self, task: Task, method: _Method, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        self._task = task
        self._first_step = seed * _STEPS_A_SEED
        self._method = method
        self._module = task.build()
        self._optimizer = torch.optim.Adam(self._module.parameters(), lr=task.lr, fused=True)
        # Constant for the first half, and down to nothing: with a constant one accuracy in the end is what the last
        # batches make of it.
        self._schedule = LambdaLR(self._optimizer, lambda step: min(1.0, 2 - 2 * step / steps))
        self._wrapper = self._wrapped()
        self._seconds: list[float] = []
        self._losses: list[float] = []
        self._nbytes = 0

    def _wrapped(self) -> nn.Module:
        method, module = self._method, self._module
        wrapper: TorchDDP | DistributedDataParallel
        if method.is_torchs:
            wrapper = TorchDDP(module, gradient_as_bucket_view=True, find_unused_parameters=self._task.is_dynamic)
        else:
            wrapper = DistributedDataParallel(module)
        if method.hook is not None:
            wrapper.register_comm_hook(*method.hook())
        if method.outer is not None:
            assert isinstance(wrapper, DistributedDataParallel)
            method.outer(wrapper, self._optimizer)
        return wrapper

    def take(self, count: int) -> None:
        """Take so many steps."""
        rank = dist.get_rank()
        begun = self._first_step + len(self._losses)
        batches = [self._task.batch(rank, begun + k) for k in range(count)]
        dist.barrier()
        for batch in batches:
            start = perf_counter()
            self._optimizer.zero_grad()
            loss = self._wrapper(*batch)
            loss.backward()
            self._optimizer.step()
            self._schedule.step()
            self._seconds.append(perf_counter() - start)
            self._losses.append(float(loss.detach()))
            self._note()

    def _note(self) -> None:
        """Note what this step has sent."""
        every = 1 if self._method.outer is None else _OUTER_EVERY
        if isinstance(self._wrapper, DistributedDataParallel) and len(self._losses) % every == 0:
            trace = self._wrapper.trace()
            self._nbytes += 0 if trace is None else trace.gradient_nbytes

    def line(self, name: str) -> TrainingLine:
        """The result, the same on every rank."""
        size, steps = dist.get_world_size(), len(self._losses)
        losses, seconds = torch.tensor(self._losses), torch.tensor(self._seconds)
        sent, ends = torch.tensor(float(self._nbytes)), torch.tensor(list(ends_in_turns(self._seconds)))
        dist.all_reduce(losses)
        for each in (seconds, sent, ends):
            dist.all_reduce(each, dist.ReduceOp.MAX)
        means, over = (losses / size).tolist(), joined(ends.tolist())
        reached = reached_at(means, self._task.target)
        with torch.no_grad():
            accuracy = self._task.accuracy(self._module)
        return TrainingLine(
            task=self._task.name,
            name=name,
            ranks=size,
            nbytes=None if "torch" in name else float(sent) / steps,
            whole_nbytes=sum(parameter.nbytes for parameter in self._module.parameters()),
            step_seconds=median(seconds.tolist()),
            target=self._task.target,
            seconds_to_target=None if reached is None else over[reached],
            accuracies=[accuracy],
            seconds=over,
            losses=means,
        )
