"""One rank's part of ``bench step``: all contestants on one model, checked and then timed in turn.

Owns the protocol, so that numbers of one run can be compared: every repetition gives each contestant one
block of consecutive steps, in an order drawn anew, behind a barrier. Noise that lasts longer than a block
then meets them all, and a ratio within one repetition is free of what changed since the one before.
On a GPU, a block ends when the device has done its part.
"""

from __future__ import annotations

import copy
import gc
import random
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from ppe_ddp.benchmarks.bench_contestants import Contestant, Ours, OursOverMpi, Torch, Traffic, contestants
from ppe_ddp.benchmarks.bench_models import WORKLOADS, Workload
from ppe_ddp.benchmarks.bench_platform import Platform
from ppe_ddp.benchmarks.bench_trace import LEAD_STEPS, record, trace_file
from ppe_ddp.cli.machine import over_mpi

__all__ = ["GradientMismatchError", "RankResult", "Settings", "measure", "tolerance", "workload_named"]

# The first backwards of every wrapper are not like the later ones: buckets are made anew, orders learned.
_WARM_UP_STEPS = 3
# Of the largest value: what averaging in another order changes, with room for kernels that sum in another order.
_TOLERANCE = 1e-5
_ROUNDINGS = 4


@dataclass(frozen=True)
class Settings:
    """How to measure; the same on every rank.

    Attributes:
        steps: Steps in a block. More of them hide what a change of contestants costs (cold caches); fewer
            leave less time for the machine to change within a repetition. None: each model's own.
        repeats: Repetitions, of which medians are taken.
        bucket_cap_mb: ppe_ddp's option of this name; None for its default.
        bucket_sizes: In MiB: ppe_ddp takes part once more with each of these.
        views: ppe_ddp's ``gradient_as_bucket_view``.
        overlap: ppe_ddp's option of this name.
        by_gloo: Whether ppe_ddp takes part once more, with ``shared_memory=False``.
        mpi_thread: Whether ppe_ddp over mpi4py takes part once more, with its progress thread.
        seed: What weights, data, branches and the order of contestants are drawn from.
        platform: What all contestants run on.
        trace: The folder for pictures of a few steps, which exists; None for none.
    """

    steps: int | None = None
    repeats: int = 15
    bucket_cap_mb: float | None = None
    bucket_sizes: tuple[float, ...] = ()
    views: bool = True
    overlap: bool = True
    mpi_thread: bool = False
    by_gloo: bool = False
    seed: int = 0
    platform: Platform = field(default_factory=Platform)
    trace: str | None = None

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
    """The measurements of one rank.

    Attributes:
        seconds: By contestant, the seconds of one step, one number a repetition.
        traffic: By contestant, what this rank sent in the last step before the clock ran.
        present: In that step, one byte a parameter: whether this rank's own backward has its gradient.
        nbytes: The size of each parameter's gradient.
        skipped: By contestant that did not take part, the reason.
        launches: By contestant that tells, the host's seconds for packing and launching a bucket: all buckets of
            the last step of each repetition.
    """

    seconds: Mapping[str, list[float]]
    traffic: Mapping[str, Traffic]
    present: bytes
    nbytes: tuple[int, ...]
    skipped: Mapping[str, str]
    launches: Mapping[str, list[float]] = field(default_factory=dict)


class GradientMismatchError(RuntimeError):
    """Two contestants have different gradients after the same step, so their times mean nothing."""


class _Race:
    """The contestants, each with the number of steps that it has made."""

    def __init__(self, workload: Workload, settings: Settings) -> None:
        self._workload = workload
        self._settings = settings
        self._rank = dist.get_rank()
        self.platform = settings.platform
        self.platform.enter()
        self.control = self.platform.control()
        self._group = dist.new_group(backend="gloo") if over_mpi() else None
        generator = torch.Generator().manual_seed(1000 * settings.seed + self._rank)
        # Made on the CPU, so that they are the same on every kind of device.
        self._batch = workload.batch(generator).to(self.platform.device)
        torch.manual_seed(settings.seed)
        self._module = workload.build().to(self.platform.device)
        self.contestants: dict[str, Contestant] = {}
        self.skipped: dict[str, str] = {}
        self._steps: dict[str, int] = {}
        for kind in contestants(with_thread=settings.mpi_thread, with_gloo=settings.by_gloo):
            try:
                self.enter(kind.name, kind)
            except ImportError as error:
                self.skipped[kind.name] = str(error)
        for size in settings.bucket_sizes:
            self.enter(f"{size:g} MiB", OursOverMpi if over_mpi() else Ours, bucket_cap_mb=size)

    def enter(self, name: str, kind: type[Contestant], **options: object) -> None:
        """Let one more take part. All ranks call this together.

        Args:
            name: What to call it.
            kind: What it is.
            **options: Keywords for ppe_ddp, beside those of the settings.

        Raises:
            ImportError: It is not installed.
        """
        self.contestants[name] = kind(
            copy.deepcopy(self._module),
            is_dynamic=self._workload.is_dynamic,
            options={**self._settings.options(), **options},
            group=self._group,
        )
        self._steps[name] = 0

    def run(self, name: str, steps: int) -> None:
        """Let one contestant make its next steps. The n-th is the same for all contestants."""
        contestant, workload, batch = self.contestants[name], self._workload, self._batch
        first = self._steps[name]
        for number in range(first, first + steps):
            route = workload.route(self._settings.seed, number, self._rank)
            contestant.module.zero_grad(set_to_none=True)
            workload.loss(contestant.trained(batch, *route), batch).backward()
        self._steps[name] = first + steps

    def clock(self, name: str, steps: int) -> float:
        """Seconds a step of one block. All ranks come here together."""
        # The step before the clock runs warms the caches that the contestant before has filled.
        self.run(name, 1)
        self.platform.synchronize()
        dist.barrier(self.control)
        start = self.platform.clock()
        self.run(name, steps)
        return (self.platform.clock() - start) / steps

    def trace(self, folder: str) -> None:
        """Record a few steps of ppe_ddp, with its ranges, and of torch DDP. All ranks come here together."""
        self.enter("traced", Ours, record_function=True)
        for name, entrant in ((Ours.name, "traced"), (Torch.name, Torch.name)):
            self.run(entrant, LEAD_STEPS)
            file = trace_file(folder, self._workload.name, name, self._rank)
            record(partial(self.run, entrant, 1), file, self.platform, self.control)

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
        # ppe's own, which a benchmark can do nothing about.
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


def tolerance(dtype: torch.dtype) -> float:
    """How far two gradients of this type may be apart, as a part of the largest value."""
    return max(_TOLERANCE, _ROUNDINGS * torch.finfo(dtype).eps)


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
    seconds, launches = _timed(race, steps, settings, workload.name)
    if settings.trace is not None:
        race.trace(settings.trace)
    return RankResult(seconds, traffic, present, nbytes, race.skipped, launches)


_BySeconds = dict[str, list[float]]


def _timed(race: _Race, steps: int, settings: Settings, title: str) -> tuple[_BySeconds, _BySeconds]:
    """The seconds of a step, and of launching a bucket."""
    seconds: _BySeconds = {name: [] for name in race.contestants}
    launches: _BySeconds = {name: [] for name in race.contestants}
    order = list(race.contestants)
    shuffler = random.Random(settings.seed)
    gc.collect()
    with _progress() as progress:
        task = progress.add_task(title, total=settings.repeats)
        for _ in range(settings.repeats):
            shuffler.shuffle(order)
            for name in order:
                seconds[name].append(race.clock(name, steps))
                launches[name] += race.contestants[name].launches()
            progress.update(task, advance=1, refresh=True)
    return seconds, {name: found for name, found in launches.items() if found}


def _progress() -> Progress:
    # Drawn between the blocks only: the thread that draws by itself would take time from them.
    shown = dist.get_rank() == 0 and sys.stderr.isatty()
    return Progress(console=Console(stderr=True), auto_refresh=False, transient=True, disable=not shown)


def _compare(named: tuple[str, nn.Parameter], theirs: Tensor | None, where: str) -> None:
    name, parameter = named
    ours = parameter.grad
    expected = (torch.zeros_like(parameter) if theirs is None else theirs).detach()
    actual = (torch.zeros_like(parameter) if ours is None else ours).detach()
    largest = float(expected.abs().max())
    difference = float((actual.double() - expected.double()).abs().max())
    # Not `>`, which a NaN would pass.
    if not difference <= tolerance(parameter.dtype) * largest:
        raise GradientMismatchError(
            f"{where} has a gradient of {name!r} that differs from torch's by up to {difference:.3g}, where "
            f"values go up to {largest:.3g}; nothing was timed"
        )
