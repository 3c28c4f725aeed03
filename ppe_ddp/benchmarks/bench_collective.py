"""Measures collectives over backends side by side, as nccl-tests does.

Those are gloo and mpi4py, and with --device cuda NCCL as torch calls it and as
CuPy does.

algbw is the size divided by the time; busbw is what each rank's link must
carry at least for that, which can be compared between numbers of ranks and
collectives. "wrong" counts elements that are not what they should be.

Started alone it starts its ranks, on the CPU by the mpirun of this Python's
environment; under mpirun it uses those that there are, and under torchrun or
srun it measures gloo alone:

  python -m ppe_ddp bench collective --op all_reduce --max-size 32M
  mpirun -n 4 python -m ppe_ddp bench collective --json result.json
  python -m ppe_ddp bench collective --device cuda --max-size 256M
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch
import torch.distributed as dist

from ppe_ddp.backends.cupy_nccl.nccl_library import load_nccl
from ppe_ddp.benchmarks.bench_platform import BACKENDS, Platform
from ppe_ddp.benchmarks.bench_table import print_table, table_of
from ppe_ddp.cli.arguments import count, output, size_of
from ppe_ddp.cli.machine import machine_facts, over_mpi, versions, write_report
from ppe_ddp.launchers import detect
from ppe_ddp.testing import RankError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.distributed import ProcessGroup

__all__ = ["OPERATIONS", "CollectiveResult", "add_arguments", "measure", "run"]

_RANKS = 2
_FACTOR = 8
_BLOCK_SECONDS = 0.05
_DTYPES = {str(dtype)[6:]: dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64)}


@dataclass(frozen=True)
class CollectiveResult:
    """One collective of one size over one backend.

    Attributes:
        operation: Its name.
        backend: The backend.
        nbytes: The size of the whole message, as nccl-tests counts it.
        dtype: Of the elements.
        microseconds: Median over repetitions, of the slowest rank.
        algbw: GB/s.
        busbw: GB/s.
        wrong: Elements that are not what they should be, on any rank.
    """

    operation: str
    backend: str
    nbytes: int
    dtype: str
    microseconds: float
    algbw: float
    busbw: float
    wrong: int


def _all_reduce(whole: Tensor, part: Tensor, group: ProcessGroup) -> Tensor:
    dist.all_reduce(whole, group=group)
    return whole


def _broadcast(whole: Tensor, part: Tensor, group: ProcessGroup) -> Tensor:
    dist.broadcast(whole, 0, group=group)
    return whole


def _all_gather(whole: Tensor, part: Tensor, group: ProcessGroup) -> Tensor:
    dist.all_gather_into_tensor(whole, part, group=group)
    return whole


def _reduce_scatter(whole: Tensor, part: Tensor, group: ProcessGroup) -> Tensor:
    dist.reduce_scatter_tensor(part, whole, group=group)
    return part


def _sums(result: Tensor, ranks: int) -> Tensor:
    return torch.full_like(result, ranks * (ranks + 1) / 2)


def _firsts(result: Tensor, ranks: int) -> Tensor:
    return torch.ones_like(result)


def _parts(result: Tensor, ranks: int) -> Tensor:
    numbers = torch.arange(1, ranks + 1, device=result.device)
    return numbers.to(result.dtype).repeat_interleave(result.numel() // ranks)


# What runs it, what its result should be where each rank gave rank + 1, and busbw / algbw by the number of ranks.
OPERATIONS: dict[
    str,
    tuple[Callable[[Tensor, Tensor, ProcessGroup], Tensor], Callable[[Tensor, int], Tensor], Callable[[int], float]],
] = {
    "all_reduce": (_all_reduce, _sums, lambda n: 2 * (n - 1) / n),
    "broadcast": (_broadcast, _firsts, lambda n: 1),
    "all_gather": (_all_gather, _parts, lambda n: (n - 1) / n),
    "reduce_scatter": (_reduce_scatter, _sums, lambda n: (n - 1) / n),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    parser.add_argument("--ranks", type=count, metavar="N", help=f"ranks to start (default: {_RANKS})")
    names = list(OPERATIONS)
    parser.add_argument("--op", action="append", choices=names, metavar="NAME", help=f"{', '.join(names)}")
    parser.add_argument("--device", choices=list(BACKENDS), default="cpu", help="of the tensors (default: cpu)")
    kinds = f"{', '.join(_DTYPES)} (default: float32)"
    parser.add_argument("--dtype", choices=list(_DTYPES), default="float32", metavar="TYPE", help=kinds)
    parser.add_argument("--min-size", type=size_of, default=4, metavar="BYTES", help="smallest message (default: 4)")
    parser.add_argument("--max-size", type=size_of, default=32 << 20, metavar="BYTES", help="largest (default: 32M)")
    parser.add_argument("--repeats", type=count, default=11, metavar="N", help="repetitions (default: 11)")
    parser.add_argument("--json", type=output, metavar="FILE", help="write all numbers there; - for stdout")


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints what came out on rank 0.

    Returns:
        0, or 1 if a result was wrong or a rank failed, or the code with which mpirun ended; 2 if what is needed is not
        here.
    """
    try:
        platform = Platform.of(arguments.device)
        if detect(os.environ).launcher != "alone":
            return _join(arguments, platform)
        ranks = arguments.ranks or _RANKS
        if platform.device == "cpu":
            return _start(ranks)
        platform.admit(ranks)
    except (ImportError, RuntimeError, ValueError) as error:
        print(f"ppe_ddp: {error}", file=sys.stderr)
        return 2
    try:
        with platform.start(ranks) as world:
            lines = world.run(measure, arguments, platform)[0]
    except RankError as error:
        print(f"ppe_ddp: {error}", file=sys.stderr)
        return 1
    _publish(arguments, platform, ranks, lines)
    return int(any(line.wrong for line in lines))


def _join(arguments: argparse.Namespace, platform: Platform) -> int:
    """Measure on the ranks that a launcher has started."""
    job = platform.join(quiet=True)
    lines = measure(arguments, platform)
    if job.rank == 0:
        _publish(arguments, platform, job.world_size, lines)
    dist.destroy_process_group()
    return int(any(line.wrong for line in lines))


def _start(ranks: int) -> int:
    """Run this very command line under mpirun."""
    mpirun = shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")
    if mpirun is None:
        print("ppe_ddp: there is no mpirun: pip install 'ppe_ddp[mpi]', or start with torchrun", file=sys.stderr)
        return 2
    command = [mpirun, "-n", str(ranks), sys.executable, "-m", "ppe_ddp", *sys.argv[1:]]
    return subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode


def measure(arguments: argparse.Namespace, platform: Platform) -> list[CollectiveResult]:
    """Measures what ``arguments`` ask for in the default process group; all ranks call this together."""
    torch.set_num_threads(1)
    platform.enter()
    table = _BackendComparison(platform, arguments.repeats)
    lines: list[CollectiveResult] = []
    for operation in arguments.op or ["all_reduce"]:
        nbytes = arguments.min_size
        while nbytes <= arguments.max_size:
            lines += table.lines(operation, nbytes, _DTYPES[arguments.dtype])
            nbytes = arguments.max_size if nbytes < arguments.max_size < nbytes * _FACTOR else nbytes * _FACTOR
    return lines


class _BackendComparison:
    """The groups that are compared, one a backend, and how."""

    def __init__(self, platform: Platform, repeats: int) -> None:
        self._platform = platform
        self._repeats = repeats
        self._control = dist.new_group(backend="gloo")
        self._groups = self._cuda_groups() if platform.device == "cuda" else self._cpu_groups()

    def _cpu_groups(self) -> dict[str, ProcessGroup]:
        world = dist.group.WORLD
        assert world is not None
        return {"gloo": self._control, "mpi4py": world} if over_mpi() else {"gloo": self._control}

    def _cuda_groups(self) -> dict[str, ProcessGroup]:
        groups = {"nccl": dist.new_group(backend="nccl")}
        try:
            load_nccl()
        except ImportError as error:
            if dist.get_rank() == 0:
                print(f"ppe_ddp: cupy_nccl skipped: {error}", file=sys.stderr)
        else:
            groups["cupy_nccl"] = dist.new_group(backend="cupy_nccl")
        return groups

    def lines(self, operation: str, nbytes: int, dtype: torch.dtype) -> Iterator[CollectiveResult]:
        """Measure one size over all backends in turn, so that noise meets them all."""
        ranks = dist.get_world_size()
        function, _, factor = OPERATIONS[operation]
        per_rank = max(1, nbytes // dtype.itemsize // ranks)
        elements = max(1, nbytes // dtype.itemsize) if operation in ("all_reduce", "broadcast") else per_rank * ranks
        whole, part = (torch.zeros(n, dtype=dtype, device=self._platform.device) for n in (elements, per_rank))
        wrong = {name: _wrong(operation, whole, part, group) for name, group in self._groups.items()}
        whole.zero_()
        part.zero_()
        run = {name: partial(function, whole, part, group) for name, group in self._groups.items()}
        calls = {name: self._calls(run[name], group) for name, group in self._groups.items()}
        seconds: dict[str, list[float]] = {name: [] for name in run}
        for _ in range(self._repeats):
            for name, group in self._groups.items():
                seconds[name].append(self._block(run[name], group, calls[name]))
        for name in run:
            slowest = torch.tensor([statistics.median(seconds[name]), float(wrong[name])], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._control)
            time, nbytes = slowest[0].item(), whole.nbytes
            speed = nbytes / time / 1e9
            yield CollectiveResult(
                operation, name, nbytes, str(dtype)[6:], time * 1e6, speed, speed * factor(ranks), int(slowest[1])
            )

    def _block(self, function: Callable[[], Any], group: ProcessGroup, calls: int) -> float:
        """Seconds a call."""
        self._platform.synchronize()
        dist.barrier(group)
        start = self._platform.clock()
        for _ in range(calls):
            function()
        return (self._platform.clock() - start) / calls

    def _calls(self, function: Callable[[], Any], group: ProcessGroup) -> int:
        """How many calls make up a block; the same on all ranks."""
        function()
        number = torch.tensor([_BLOCK_SECONDS / max(self._block(function, group, 3), 1e-9)])
        dist.all_reduce(number, dist.ReduceOp.MIN, group=self._control)
        return max(1, min(2000, int(number)))


def _wrong(operation: str, whole: Tensor, part: Tensor, group: ProcessGroup) -> int:
    function, expected, _ = OPERATIONS[operation]
    whole.fill_(dist.get_rank() + 1)
    part.fill_(dist.get_rank() + 1)
    result = function(whole, part, group)
    return int((result != expected(result, dist.get_world_size())).sum())


def _print_table(lines: list[CollectiveResult], caption: str, file: TextIO) -> None:
    first = lines[0].backend
    headings = ["operation", "backend", "bytes", "us", "algbw", "busbw", "wrong", f"x {first}"]
    table = table_of(f"Collectives of {lines[0].dtype}; bandwidths in GB/s", caption, headings, left=2)
    base = {(line.operation, line.nbytes): line.microseconds for line in lines if line.backend == first}
    for line in lines:
        ratio = line.microseconds / base[line.operation, line.nbytes]
        table.add_row(
            line.operation,
            line.backend,
            str(line.nbytes),
            f"{line.microseconds:.1f}",
            f"{line.algbw:.3f}",
            f"{line.busbw:.3f}",
            str(line.wrong),
            "" if line.backend == first else f"{ratio:.3f}",
        )
    print_table(table, file)


def _publish(arguments: argparse.Namespace, platform: Platform, ranks: int, lines: list[CollectiveResult]) -> None:
    facts = machine_facts()
    where = f"{ranks} ranks on {platform.name}; {facts['cpu']}, {facts['cores']} cores"
    caption = f"{where}; torch {versions()['torch']}"
    _print_table(lines, caption, sys.stderr if arguments.json == "-" else sys.stdout)
    if arguments.json is not None:
        used = {"ranks": ranks, "repeats": arguments.repeats, "threads": 1, "platform": platform.facts()}
        write_report(arguments.json, "bench collective", settings=used, lines=[asdict(line) for line in lines])
