"""Measures collectives over several backends side by side, as nccl-tests does.

The backends are gloo and mpi4py; with --device cuda NCCL, called by torch and
by CuPy.

algbw is the size divided by the time; busbw is the least speed of each rank's
link for that, and can be compared between numbers of ranks and collectives.
"wrong" counts wrong elements of the results.

Without a launcher it starts its own ranks, on the CPU by the mpirun beside this
Python. Under mpirun it uses the ranks of the job; under torchrun or srun too,
but measures gloo alone:

  python -m ppe_ddp bench collective --op all_reduce --max-size 32M
  mpirun -n 4 python -m ppe_ddp bench collective --json result.json
  python -m ppe_ddp bench collective --device cuda --max-size 256M
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ppe_ddp.backends.cupy_nccl.nccl_library import load_nccl
from ppe_ddp.cli import benchmarking
from ppe_ddp.cli.benchmarking import BACKENDS, Platform, in_turn, largest, on_ranks, print_table
from ppe_ddp.cli.command_line import fail, size_of, write_report
from ppe_ddp.launchers import detect

_FACTOR = 8
_BLOCK_SECONDS = 0.05
_DTYPES = {str(dtype)[6:]: dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64)}


def _parts(result: Tensor, ranks: int) -> Tensor:
    numbers = torch.arange(1, ranks + 1, device=result.device)
    return numbers.to(result.dtype).repeat_interleave(result.numel() // ranks)


Call = Callable[[Tensor, Tensor, Any], object]

# The call, given the whole and a rank's part of it; True if the result is the part; the right result if each rank gives
# rank + 1; and busbw / algbw by the number of ranks.
OPERATIONS: dict[str, tuple[Call, bool, Callable[[Tensor, int], Any], Callable[[int], float]]] = {
    "all_reduce": (
        lambda whole, _, group: dist.all_reduce(whole, group=group),
        False,
        lambda _, n: n * (n + 1) / 2,
        lambda n: 2 * (n - 1) / n,
    ),
    "broadcast": (lambda whole, _, group: dist.broadcast(whole, 0, group=group), False, lambda *_: 1, lambda n: 1),
    "all_gather": (
        lambda whole, part, group: dist.all_gather_into_tensor(whole, part, group=group),
        False,
        _parts,
        lambda n: (n - 1) / n,
    ),
    "reduce_scatter": (
        lambda whole, part, group: dist.reduce_scatter_tensor(part, whole, group=group),
        True,
        lambda _, n: n * (n + 1) / 2,
        lambda n: (n - 1) / n,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    names = list(OPERATIONS)
    parser.add_argument("--op", action="append", choices=names, metavar="NAME", help=f"{', '.join(names)}")
    parser.add_argument("--device", choices=list(BACKENDS), default="cpu", help="of the tensors (default: cpu)")
    kinds = f"{', '.join(_DTYPES)} (default: float32)"
    parser.add_argument("--dtype", choices=list(_DTYPES), default="float32", metavar="TYPE", help=kinds)
    parser.add_argument("--min-size", type=size_of, default=4, metavar="BYTES", help="smallest message (default: 4)")
    parser.add_argument("--max-size", type=size_of, default=32 << 20, metavar="BYTES", help="largest (default: 32M)")
    benchmarking.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 1 if a result was wrong or a rank failed, 2 if a backend or device is missing."""
    if arguments.min_size > arguments.max_size:
        return fail(f"--min-size {arguments.min_size} is more than --max-size {arguments.max_size}", 2)
    try:
        platform = Platform.of(arguments.device)
        if platform.device == "cpu" and detect(os.environ).launcher == "alone":
            platform = Platform("cpu", "mpi4py")
    except (ImportError, RuntimeError, ValueError) as error:
        return fail(error, 2)

    def publish(lines: list[dict[str, Any]], ranks: int) -> int:
        title = f"Collectives of {arguments.dtype}; bandwidths in GB/s"
        headings = ["operation", "<backend", "bytes", "us", "algbw", "busbw", "wrong", f"x {lines[0]['backend']}"]
        print_table(arguments, title, f"{ranks} ranks on {platform.device}", headings, _rows(lines))
        used = {"ranks": ranks, "repeats": arguments.repeats, "threads": 1, "platform": platform.facts()}
        write_report(arguments, "bench collective", settings=used, lines=lines)
        return int(any(line["wrong"] for line in lines))

    return on_ranks(measure, (arguments, platform), publish, ranks=arguments.ranks, platform=platform)


def _rows(lines: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    first = lines[0]["backend"]
    base = {(one["operation"], one["nbytes"]): one["microseconds"] for one in lines if one["backend"] == first}
    for one in lines:
        ratio = one["microseconds"] / base[one["operation"], one["nbytes"]]
        speeds = [f"{one[name]:.3f}" for name in ("algbw", "busbw")]
        numbers = [str(one["nbytes"]), f"{one['microseconds']:.1f}", *speeds, str(one["wrong"])]
        yield [one["operation"], one["backend"], *numbers, "" if one["backend"] == first else f"{ratio:.3f}"]


def measure(arguments: argparse.Namespace, platform: Platform) -> list[dict[str, Any]]:
    """Measure in the default process group, on all ranks together: a line for each operation, size and backend."""
    control = platform.enter() or dist.new_group(backend="gloo")
    groups = _groups(platform, control)
    lines: list[dict[str, Any]] = []
    for operation in arguments.op or ["all_reduce"]:
        nbytes = arguments.min_size
        while nbytes <= arguments.max_size:
            lines += _lines(operation, nbytes, _DTYPES[arguments.dtype], groups, arguments.repeats, platform, control)
            nbytes = arguments.max_size if nbytes < arguments.max_size < nbytes * _FACTOR else nbytes * _FACTOR
    return lines


def _groups(platform: Platform, control: ProcessGroup) -> dict[str, Any]:
    if platform.device == "cpu":
        return {"gloo": control, **({"mpi4py": dist.group.WORLD} if benchmarking.over_mpi() else {})}
    groups = {"nccl": dist.new_group(backend="nccl")}
    try:
        load_nccl()
    except ImportError as error:
        if dist.get_rank() == 0:
            print(f"ppe_ddp: cupy_nccl skipped: {error}", file=sys.stderr)
    else:
        groups["cupy_nccl"] = dist.new_group(backend="cupy_nccl")
    return groups


def _lines(
    operation: str,
    nbytes: int,
    dtype: torch.dtype,
    groups: dict[str, Any],
    repeats: int,
    platform: Platform,
    control: ProcessGroup,
) -> Iterator[dict[str, Any]]:
    ranks = dist.get_world_size()
    function, *_, factor = OPERATIONS[operation]
    per_rank = max(1, nbytes // dtype.itemsize // ranks)
    elements = max(1, nbytes // dtype.itemsize) if operation in ("all_reduce", "broadcast") else per_rank * ranks
    whole, part = (torch.zeros(n, dtype=dtype, device=platform.device) for n in (elements, per_rank))
    wrong = largest([count_wrong(operation, whole, part, group) for group in groups.values()], control)
    whole.zero_()
    part.zero_()

    def take(group: ProcessGroup, calls: int) -> None:
        for _ in range(calls):
            function(whole, part, group)

    takes = {name: partial(take, group) for name, group in groups.items()}
    first = in_turn(takes, dict.fromkeys(takes, 3), 1, platform, control)
    calls = {name: max(1, min(2000, int(_BLOCK_SECONDS / max(first[name][0], 1e-9)))) for name in takes}
    seconds = in_turn(takes, calls, repeats, platform, control)
    for name, count in zip(takes, wrong, strict=True):
        time = median(seconds[name])
        speed = whole.nbytes / time / 1e9
        yield {
            "operation": operation,
            "backend": name,
            "nbytes": whole.nbytes,
            "dtype": str(dtype)[6:],
            "microseconds": time * 1e6,
            "algbw": speed,
            "busbw": speed * factor(ranks),
            "wrong": int(count),
        }


def count_wrong(operation: str, whole: Tensor, part: Tensor, group: Any) -> int:
    """The number of wrong elements on this rank, if each rank gives its number plus one."""
    function, is_part, expected, _ = OPERATIONS[operation]
    whole.fill_(dist.get_rank() + 1)
    part.fill_(dist.get_rank() + 1)
    function(whole, part, group)
    result = part if is_part else whole
    return int((result != expected(result, dist.get_world_size())).sum())
