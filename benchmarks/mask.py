"""Measures what weights, times of ranks and digests of parameters cost a step.

They travel in its mask and vote. One wrapper trains with each switched on
alone, with all, and with none, in turn, block by block: its memory is the same,
so the ratio is that of the work. Two wrappers in one run differ by more.

  python -m benchmarks mask --repeats 100
  mpirun -n 4 python -m benchmarks mask --json result.json
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

import ppe_ddp
from ppe_ddp.cli import benchmarking
from ppe_ddp.cli.bench_step import WORKLOADS
from ppe_ddp.cli.benchmarking import Platform, Spread, in_turn, on_ranks, print_table
from ppe_ddp.cli.command_line import write_report
from ppe_ddp.stragglers import NBYTES, RankTimes

MODES = ("none", "weights", "times", "digests", "all")
_MODELS = ("mlp", "small", "supernet-common", "supernet-own", "transformer")
_TOKENS = 64


class _NoTimes(RankTimes):
    """Times that nobody takes; as many bytes."""

    def begin_forward(self) -> None: ...

    def end_step(self) -> None: ...

    def field(self, backward_at: int) -> bytes:
        return bytes(NBYTES)

    def note(self, field: bytes) -> None: ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    names = "a model of bench step (default: those for CPUs)"
    parser.add_argument("--model", action="append", choices=WORKLOADS, metavar="NAME", help=names)
    benchmarking.add_arguments(parser, repeats=40)


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints what came out on rank 0; returns the exit code."""

    def publish(lines: list[dict[str, Any]], ranks: int) -> int:
        rows = []
        for one in lines:
            alone = [f"{one[mode].median:.3f}" for mode in MODES[1:-1]]
            rows.append((one["model"], f"{one['ms'].median:.1f}", *alone, one["all"].text(3)))
        caption = f"ratios to a step without them; {ranks} ranks, {arguments.repeats} repetitions"
        print_table(arguments, "Medians (middle half)", caption, ["", "ms", *MODES[1:]], rows)
        write_report(arguments, "mask", lines=lines)
        return 0

    words = (arguments.model or list(_MODELS), arguments.repeats)
    return on_ranks(measure, words, publish, ranks=arguments.ranks)


def measure(models: list[str], repeats: int) -> list[dict[str, Any]]:
    """Measure these models in the default process group; all ranks call this together. A line for each."""
    platform = Platform()
    platform.enter()
    lines = []
    for name in models:
        modes, steps = _modes(name), dict.fromkeys(MODES, max(4, WORKLOADS[name].steps))
        for take in modes.values():
            take(8)
        seconds = in_turn(modes, steps, repeats, platform, None)
        ms = Spread.of([1e3 * one for one in seconds["none"]])
        lines.append({"model": name, "ms": ms} | {m: Spread.of(seconds[m], seconds["none"]) for m in MODES[1:]})
    return lines


def _modes(name: str) -> dict[str, Callable[[int], None]]:
    """By mode, a function that trains one wrapper for some steps."""
    workload = WORKLOADS[name]
    module, batch = workload.made()
    model = ppe_ddp.DistributedDataParallel(module)
    model(batch, *workload.route(0, dist.get_rank())).sum().backward()
    reducer = model._reducer
    assert reducer is not None
    synchronizer, taken = reducer.synchronizer, 0
    times, drift, nobody = synchronizer.times, synchronizer.drift, _NoTimes(dist.get_rank())

    def take(mode: str, steps: int) -> None:
        nonlocal taken
        synchronizer.times = times if mode in ("times", "all") else nobody
        synchronizer.drift = drift if mode in ("digests", "all") else None
        for _ in range(steps):
            module.zero_grad(set_to_none=True)
            loss = workload.loss(model(batch, *workload.route(taken, dist.get_rank())), batch)
            (ppe_ddp.weigh(loss, _TOKENS) if mode in ("weights", "all") else loss).backward()
            taken += 1

    return {mode: partial(take, mode) for mode in MODES}
