"""What benchmarks share: the ranks, device and backend to run on, taking turns, and tables."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch.distributed import ProcessGroup

from ppe_ddp.backends.cupy_nccl.nccl_library import SHARE_DEVICES, load_nccl, torch_nccl_text
from ppe_ddp.cli.command_line import WIDTH, add_json, count, fail, machine_facts, told
from ppe_ddp.cli.doctor import many_ranks_a_device
from ppe_ddp.launch import init_process_group
from ppe_ddp.launchers import detect
from ppe_ddp.testing import JobStarter, RankError, Ranks

DEFAULT_RANKS = 2
_RUN_SECONDS, _COLLECTIVE_SECONDS = 3600.0, 300.0

BACKENDS: dict[str, tuple[str, ...]] = {
    "cpu": ("gloo",),
    "cuda": ("cpu:gloo,cuda:nccl", "cpu:gloo,cuda:cupy_nccl", "nccl", "cupy_nccl", "gloo"),
}
"""The backends for each kind of device, the default first."""


def add_arguments(parser: argparse.ArgumentParser, *, repeats: int | None = 11) -> None:
    """Adds ``--ranks``, ``--repeats`` and ``--json`` to ``parser``."""
    parser.add_argument("--ranks", type=count, metavar="N", help=f"ranks to start (default: {DEFAULT_RANKS})")
    times = f"repetitions (default: {repeats})"
    parser.add_argument("--repeats", type=count, default=repeats, metavar="N", help=times)
    add_json(parser)


def over_mpi() -> bool:
    """Whether the default process group is over mpi4py."""
    return dist.is_initialized() and "mpi4py" in str(dist.get_backend_config())


@dataclass(frozen=True)
class Platform:
    """A kind of device and a backend; the same on every rank."""

    device: str = "cpu"  # "cpu" or "cuda"
    backend: str = BACKENDS["cpu"][0]  # as for ``init_process_group``

    @classmethod
    def of(cls, device: str, backend: str | None = None) -> Platform:
        """The platform of a command line; ValueError if it cannot be used here, ImportError without CuPy."""
        known = BACKENDS[device]
        backend = backend or known[0]
        if backend not in known:
            raise ValueError(f"--backend {backend} is not for --device {device}, which has {' or '.join(known)}")
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"--device cuda: torch {torch.__version__} sees no GPU; `python -m ppe_ddp env` tells what is here"
            )
        if "cupy" in backend:
            load_nccl()
        elif "nccl" in backend and not dist.is_nccl_available():
            raise ValueError(f"--backend {backend}: this torch is built without NCCL; take --backend gloo")
        return cls(device, backend)

    def start(self, ranks: int) -> Ranks:
        """Start ranks; ValueError if they would have to share devices, and NCCL is too old for that."""
        if "nccl" in self.backend and ranks > torch.cuda.device_count():
            if not many_ranks_a_device():
                raise ValueError(
                    f"{ranks} ranks would share {torch.cuda.device_count()} GPUs, which NCCL {torch_nccl_text()} does "
                    "not allow (2.30 does): take --backend gloo, or no more ranks than GPUs"
                )
            os.environ.setdefault(SHARE_DEVICES, "1")
        starter = JobStarter(None, "mpirun", (ranks,)) if self.backend == "mpi4py" else None
        timeout = _RUN_SECONDS
        return Ranks(ranks, backend=self.backend, starter=starter, timeout=timeout, group_timeout=_COLLECTIVE_SECONDS)

    def join(self, wanted: int | None = None) -> None:
        """Join the ranks that a launcher has started, which all call this; under mpirun over mpi4py if on CPUs."""
        if "nccl" in self.backend and many_ranks_a_device():
            os.environ.setdefault(SHARE_DEVICES, "1")
        is_over_mpi = self == Platform() and detect(os.environ).launcher == "mpirun"
        job = init_process_group("mpi4py" if is_over_mpi else self.backend, quiet=True)
        if wanted not in (None, job.world_size):
            dist.destroy_process_group()
            raise ValueError(f"--ranks is {wanted}, but {job.launcher} has started {job.world_size}; leave it out")

    def enter(self) -> ProcessGroup | None:
        """Use one thread, and the device of this rank's number. Returns the group for barriers; None: the default."""
        torch.set_num_threads(1)
        if self.device == "cpu":
            return None
        job = init_process_group(quiet=True)  # has been joined before, so this only describes it
        torch.cuda.set_device(job.local_rank % torch.cuda.device_count())
        control: ProcessGroup = dist.new_group(backend="gloo")
        return control

    def clock(self) -> float:
        """The time in seconds, read when the device has finished its work."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return perf_counter()

    def facts(self) -> dict[str, str | int | None]:
        """The facts for a report: device, the GPUs' name and number, backend and NCCL's version."""
        has_gpu = self.device == "cuda"
        return {
            "device": self.device,
            "device_name": torch.cuda.get_device_name() if has_gpu else None,
            "devices": torch.cuda.device_count() if has_gpu else 0,
            "backend": self.backend,
            "nccl": torch_nccl_text() if "nccl" in self.backend else None,
        }

    def __str__(self) -> str:
        """The facts in a few words, for a caption."""
        facts = self.facts()
        nccl = f", NCCL {facts['nccl']}" if facts["nccl"] else ""
        name = f"{self.device} ({facts['devices']} x {facts['device_name']}{nccl})" if facts["devices"] else self.device
        return f"{name} over {self.backend}"


def on_ranks(
    measure: Callable[..., Any],
    words: tuple[Any, ...],
    publish: Callable[[Any, int], int],
    *,
    ranks: int | None,
    platform: Platform | None = None,
) -> int:
    """Measure on the ranks that a launcher has started, or on new ones.

    Calls ``measure``, a function of a module, with ``words`` on every rank, and ``publish`` with the result of rank 0
    and the number of ranks. Without a launcher it starts ``ranks``, by default two; a launcher must have started as
    many. Returns the exit code of ``publish``; 1 if a rank that was started here failed, 2 if ranks cannot be used.
    """
    platform = platform or Platform()
    try:
        if detect(os.environ).launcher == "alone":
            with platform.start(ranks or DEFAULT_RANKS) as started:
                return publish(started.run(measure, *words)[0], started.world_size)
        platform.join(ranks)
    except RankError as error:
        return fail(error, 1)
    except (ImportError, RuntimeError, ValueError) as error:
        return fail(error, 2)
    found, size = measure(*words), dist.get_world_size()
    code = publish(found, size) if dist.get_rank() == 0 else 0
    dist.destroy_process_group()
    return code


def in_turn(
    contestants: Mapping[str, Callable[[int], object]],
    steps: Mapping[str, int],
    repeats: int,
    platform: Platform,
    control: ProcessGroup | None,
) -> dict[str, list[float]]:
    """Time contestants in turn, on all ranks together. Returns each one's seconds of a step, by repetition.

    They are those of the slowest rank. In every repetition each contestant takes one block of steps behind a barrier,
    in a new random order. So noise that lasts longer than a block meets all, and ratios within a repetition do not
    depend on what changes later.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    order, shuffler = list(contestants), random.Random(0)
    gc.collect()
    for _ in range(repeats):
        shuffler.shuffle(order)
        for name in order:
            contestants[name](1)  # brings its memory back into the caches
            platform.clock()
            dist.barrier(control)
            start = platform.clock()
            contestants[name](steps[name])
            seconds[name].append((platform.clock() - start) / steps[name])
    return dict(zip(seconds, largest(list(seconds.values()), control), strict=True))


def largest(numbers: Any, group: ProcessGroup | None = None) -> Any:
    """The largest over the ranks of a number, or of each number in a list or in lists of one length."""
    found = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found.tolist()


@dataclass(frozen=True)
class Spread:
    """A median, and the quartiles around it."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float], beside: Sequence[float] | None = None) -> Spread:
        """The spread of at least one value, or of the ratios to as many others."""
        if beside is not None:
            values = [value / other for value, other in zip(values, beside, strict=True)]
        values = values if len(values) > 1 else [*values, *values]
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper)

    def text(self, digits: int) -> str:
        """The median and the quartiles, with fewer digits if they are large."""
        digits = 0 if self.upper >= 100 else min(digits, 1) if self.upper >= 10 else digits
        return f"{self.median:.{digits}f} ({self.lower:.{digits}f}-{self.upper:.{digits}f})"


def print_table(
    arguments: argparse.Namespace, title: str, caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    """Print a table of 80 columns, or more if its numbers need them; on stderr if the report goes to stdout.

    The processor, its cores and torch's version are added to the caption. Columns are aligned to the right, except the
    first and those with ``<`` before their heading. An empty row becomes a line.
    """
    facts, file = machine_facts(), told(arguments)
    caption = f"{caption}; {facts['cpu']}, {facts['cores']} cores; torch {torch.__version__}"
    table = Table(box=box.SIMPLE_HEAD, title=title, caption=caption, padding=0, show_edge=False)
    for k, heading in enumerate(headings):
        table.add_column(heading.strip("<"), justify="left" if not k or heading[0] == "<" else "right", no_wrap=True)
    for row in rows:
        if row:
            table.add_row(*row)  # missing cells stay empty
        else:
            table.add_section()
    console = Console(file=file, width=max(WIDTH, Console(file=file).width), highlight=False, markup=False)
    needed = console.measure(table, options=console.options.update(max_width=1000)).maximum
    console.width = max(console.width, needed)
    console.print(table)


@contextmanager
def without_warnings() -> Iterator[None]:
    """A context in which this library logs no warnings."""
    logger = logging.getLogger("ppe_ddp")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
