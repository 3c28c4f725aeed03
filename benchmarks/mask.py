"""Measures what weights, times of ranks and digests of parameters cost a step.

They are sent in its mask and vote. One wrapper trains blocks of steps in turn
with one of them, with all, and with none. As it has the same memory in each,
the ratio shows the work alone; two wrappers in one run would differ by more.

  python -m benchmarks mask --repeats 100
  mpirun -n 4 python -m benchmarks mask --json result.json
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist

import ppe_ddp
from ppe_ddp.cli import benchmarking
from ppe_ddp.cli.bench_step import WORKLOADS, Contestant
from ppe_ddp.cli.benchmarking import Platform, Spread, in_turn, on_ranks, print_table
from ppe_ddp.cli.command_line import write_report
from ppe_ddp.stragglers import NBYTES, RankTimes

MODES = ("none", "weights", "times", "digests", "all")
MODELS = ("mlp", "small", "supernet-common", "supernet-own", "transformer")
_TOKENS = 64


class _NoTimes(RankTimes):
    """Measures no times, but sends as many bytes."""

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
    """Measure, and print on rank 0. Returns the exit code."""

    def publish(lines: list[dict[str, Any]], ranks: int) -> int:
        rows = []
        for one in lines:
            alone = [f"{one[mode].median:.3f}" for mode in MODES[1:-1]]
            rows.append((one["model"], f"{one['ms'].median:.1f}", *alone, one["all"].text(3)))
        caption = f"ratios to a step without them; {ranks} ranks, {arguments.repeats} repetitions"
        print_table(arguments, "Medians (middle half)", caption, ["", "ms", *MODES[1:]], rows)
        write_report(arguments, "mask", lines=lines)
        return 0

    words = (arguments.model or list(MODELS), arguments.repeats)
    return on_ranks(measure, words, publish, ranks=arguments.ranks)


def measure(models: list[str], repeats: int) -> list[dict[str, Any]]:
    """Measure these models in the default process group, on all ranks together. Returns a line for each."""
    platform = Platform()
    platform.enter()
    lines = []
    for name in models:
        modes, steps = _modes(name), dict.fromkeys(MODES, 8)  # every 8th step makes digests
        for take in modes.values():
            take(8)
        seconds = in_turn(modes, steps, repeats, platform, None)
        ms = Spread.of([1e3 * one for one in seconds["none"]])
        lines.append({"model": name, "ms": ms} | {m: Spread.of(seconds[m], seconds["none"]) for m in MODES[1:]})
    return lines


def _modes(name: str) -> dict[str, Callable[[int], None]]:
    workload = WORKLOADS[name]
    module, batch = workload.made()
    model = ppe_ddp.DistributedDataParallel(module)
    weighing = replace(workload, loss=lambda *given: ppe_ddp.weigh(workload.loss(*given), _TOKENS))
    plain, weighed = (Contestant(one, batch, module, model) for one in (workload, weighing))
    plain.take(1)
    reducer = model._reducer
    assert reducer is not None
    synchronizer = reducer.synchronizer
    times, drift, nobody = synchronizer.times, synchronizer.drift, _NoTimes(dist.get_rank())

    def take(mode: str, steps: int) -> None:
        synchronizer.times = times if mode in ("times", "all") else nobody
        synchronizer.drift = drift if mode in ("digests", "all") else None
        (weighed if mode in ("weights", "all") else plain).take(steps)

    return {mode: partial(take, mode) for mode in MODES}
