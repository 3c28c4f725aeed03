"""One rank's part of ``bench step``: all contestants on one model, checked and then timed in turn.

Owns the protocol, so that numbers of one run can be compared: every repetition gives each contestant one
block of consecutive steps, in an order drawn anew, behind a barrier. Noise that lasts longer than a block
then meets them all, and a ratio within one repetition is free of what changed since the one before.
"""

from __future__ import annotations

import copy
import gc
import random
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from ppe_ddp.cli.bench_contestants import Contestant, Traffic, contestants
from ppe_ddp.cli.bench_models import WORKLOADS, Workload
from ppe_ddp.cli.machine import over_mpi

__all__ = ["GradientMismatchError", "RankResult", "Settings", "measure", "workload_named"]

# The first backwards of every wrapper are not like the later ones: buckets are made anew, orders learned.
_WARM_UP_STEPS = 3
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Settings:
    """How to measure; the same on every rank.

    Attributes:
        steps: Steps in a block. More of them hide what a change of contestants costs (cold caches); fewer
            leave less time for the machine to change within a repetition. None: each model's own.
        repeats: Repetitions, of which medians are taken.
        bucket_cap_mb: ppe_ddp's option of this name; None for its default.
        views: ppe_ddp's ``gradient_as_bucket_view``.
        overlap: ppe_ddp's option of this name.
        mpi_thread: Whether ppe_ddp over mpi4py takes part once more, with its communication thread.
        seed: What weights, data, branches and the order of contestants are drawn from.
    """

    steps: int | None = None
    repeats: int = 15
    bucket_cap_mb: float | None = None
    views: bool = True
    overlap: bool = True
    mpi_thread: bool = False
    seed: int = 0

    def options(self) -> dict[str, object]:
        """The keywords that ppe_ddp's wrapper gets: none where the user left its defaults alone."""
        chosen: dict[str, object] = {}
        if self.bucket_cap_mb is not None:
            chosen["bucket_cap_mb"] = self.bucket_cap_mb
        if not self.views:
            chosen["gradient_as_bucket_view"] = False
        if not self.overlap:
            chosen["overlap"] = False
        return chosen


@dataclass(frozen=True)
class RankResult:
    """What one rank has measured.

    Attributes:
        seconds: By contestant, the seconds of one step, one number a repetition.
        traffic: By contestant, what this rank sent in the last step before the clock ran.
        present: In that step, one byte a parameter: whether this rank's own backward has its gradient.
        nbytes: The size of each parameter's gradient.
        skipped: By contestant that did not take part, the reason.
    """

    seconds: Mapping[str, list[float]]
    traffic: Mapping[str, Traffic]
    present: bytes
    nbytes: tuple[int, ...]
    skipped: Mapping[str, str]


class GradientMismatchError(RuntimeError):
    """Two contestants have different gradients after the same step, so their times mean nothing."""


class _Race:
    """The contestants, each with the number of steps that it has made."""

    def __init__(self, workload: Workload, settings: Settings) -> None:
        self._workload = workload
        self._seed = settings.seed
        self._rank = dist.get_rank()
        generator = torch.Generator().manual_seed(1000 * settings.seed + self._rank)
        self._batch = workload.batch(generator)
        self.contestants: dict[str, Contestant] = {}
        self.skipped: dict[str, str] = {}
        self._steps: dict[str, int] = {}
        self._enter(settings)

    def _enter(self, settings: Settings) -> None:
        torch.manual_seed(settings.seed)
        module = self._workload.build()
        group = dist.new_group(backend="gloo") if over_mpi() else None
        for kind in contestants(with_thread=settings.mpi_thread):
            try:
                self.contestants[kind.name] = kind(
                    copy.deepcopy(module), is_dynamic=self._workload.is_dynamic, options=settings.options(), group=group
                )
            except ImportError as error:
                self.skipped[kind.name] = str(error)
        self._steps = dict.fromkeys(self.contestants, 0)

    def run(self, name: str, steps: int) -> None:
        """Let one contestant make its next steps. The n-th is the same for all contestants."""
        contestant, workload, batch = self.contestants[name], self._workload, self._batch
        first = self._steps[name]
        for number in range(first, first + steps):
            route = workload.route(self._seed, number, self._rank)
            contestant.module.zero_grad(set_to_none=True)
            workload.loss(contestant.trained(batch, *route), batch).backward()
        self._steps[name] = first + steps

    def clock(self, name: str, steps: int) -> float:
        """Seconds a step of one block. All ranks come here together."""
        # The step before the clock runs warms the caches that the contestant before has filled.
        self.run(name, 1)
        dist.barrier()
        start = perf_counter()
        self.run(name, steps)
        return (perf_counter() - start) / steps

    def check(self) -> None:
        """Compare the gradients of all contestants that communicate."""
        step = self._steps["torch"] - 1
        expected = self.contestants["torch"].module
        for name, contestant in self.contestants.items():
            if name in ("torch", "bare"):
                continue
            for parameter, theirs in zip(contestant.module.named_parameters(), expected.parameters(), strict=True):
                _compare(parameter, theirs.grad, f"step {step}, rank {self._rank}: {name}")


def measure(name: str, settings: Settings) -> RankResult:
    """Measures one workload in the default process group. All ranks call this together.

    Args:
        name: The workload's name.
        settings: How.

    Returns:
        This rank's times, and what it has sent.

    Raises:
        GradientMismatchError: Two contestants do not compute the same.
    """
    torch.set_num_threads(1)
    workload = workload_named(name)
    steps = workload.steps if settings.steps is None else settings.steps
    with warnings.catch_warnings():
        # ppe's own, about which who measures can do nothing.
        warnings.filterwarnings("ignore", "Using .*non-full backward hook", FutureWarning)
        return _measure(workload, steps, settings)


def workload_named(name: str) -> Workload:
    """The workload of this name.

    Raises:
        ValueError: There is none.
    """
    for workload in WORKLOADS:
        if workload.name == name:
            return workload
    raise ValueError(f"no model {name!r}: there are {', '.join(workload.name for workload in WORKLOADS)}")


def _measure(workload: Workload, steps: int, settings: Settings) -> RankResult:
    race = _Race(workload, settings)
    for _ in range(_WARM_UP_STEPS):
        for contestant in race.contestants:
            race.run(contestant, 1)
        race.check()
    bare = race.contestants["bare"].module
    traffic = {name: contestant.traffic() for name, contestant in race.contestants.items()}
    present = bytes(parameter.grad is not None for parameter in bare.parameters())
    nbytes = tuple(parameter.numel() * parameter.element_size() for parameter in bare.parameters())
    seconds = _timed(race, steps, settings, workload.name)
    return RankResult(seconds, traffic, present, nbytes, race.skipped)


def _timed(race: _Race, steps: int, settings: Settings, title: str) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in race.contestants}
    order = list(race.contestants)
    shuffler = random.Random(settings.seed)
    gc.collect()
    with _progress() as progress:
        task = progress.add_task(title, total=settings.repeats)
        for _ in range(settings.repeats):
            shuffler.shuffle(order)
            for name in order:
                seconds[name].append(race.clock(name, steps))
            progress.update(task, advance=1, refresh=True)
    return seconds


def _progress() -> Progress:
    # Drawn between the blocks only: the thread that draws by itself would take time from them.
    shown = dist.get_rank() == 0 and sys.stderr.isatty()
    return Progress(console=Console(stderr=True), auto_refresh=False, transient=True, disable=not shown)


def _compare(named: tuple[str, nn.Parameter], theirs: Tensor | None, where: str) -> None:
    name, parameter = named
    ours = parameter.grad
    expected = torch.zeros_like(parameter) if theirs is None else theirs
    actual = torch.zeros_like(parameter) if ours is None else ours
    largest = float(expected.abs().max())
    difference = float((actual - expected).abs().max())
    # Not `>`, which a NaN would pass.
    if not difference <= _TOLERANCE * largest:
        raise GradientMismatchError(
            f"{where} has a gradient of {name!r} that differs from torch's by up to {difference:.3g}, where "
            f"values go up to {largest:.3g}; nothing was timed"
        )
