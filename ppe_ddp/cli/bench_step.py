"""Measures one training step: forward, backward and the exchange of gradients, without an optimizer.

ppe_ddp, torch DDP, ppe's DDP and the bare module train copies of one model on the same data, in turn, within
one run over gloo, one thread a rank. Look at the ratios: times on a shared machine mean little by themselves.

Started alone it starts its own ranks; under torchrun, srun or mpirun it uses those that there are, and under mpirun
ppe_ddp over mpi4py takes part as well:

  python -m ppe_ddp bench step --model mlp --model small
  torchrun --nproc_per_node=4 -m ppe_ddp bench step --json result.json
  mpirun -n 2 python -m ppe_ddp bench step
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ppe_ddp import init_process_group
from ppe_ddp.cli.arguments import count, mebibytes, output
from ppe_ddp.cli.bench_measure import RankResult, Settings, measure, workload_named
from ppe_ddp.cli.bench_models import WORKLOADS, Workload
from ppe_ddp.cli.bench_result import ModelResult, combine
from ppe_ddp.cli.machine import machine_facts, versions, write_report
from ppe_ddp.cli.table import print_step_table
from ppe_ddp.launch import detect
from ppe_ddp.testing import RankError, Ranks

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]

_RANKS = 2
_QUICK_STEPS, _QUICK_REPEATS = 2, 3
_MODEL_SECONDS = 3600.0
_COLLECTIVE_SECONDS = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    defaults = Settings()
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--ranks", type=count, metavar="N", help=f"ranks to start (default: {_RANKS})")
    parser.add_argument(
        "--model", action="append", choices=names, metavar="NAME", help=f"{', '.join(names)} (default: all)"
    )
    parser.add_argument(
        "--steps", type=count, metavar="N", help="steps in a block (default: 3, or 8 where a step is short)"
    )
    parser.add_argument("--repeats", type=count, metavar="N", help=f"repetitions (default: {defaults.repeats})")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{_QUICK_STEPS} steps, {_QUICK_REPEATS} repetitions: a first look",
    )
    parser.add_argument("--seed", type=int, default=defaults.seed, metavar="N", help="of weights, data and order")
    parser.add_argument(
        "--json",
        type=output,
        metavar="FILE",
        help="write all numbers there; - for stdout, with the table on stderr",
    )
    own = parser.add_argument_group("options of ppe_ddp's wrapper")
    own.add_argument("--bucket-cap-mb", type=mebibytes, metavar="MIB", help="size of a bucket")
    own.add_argument("--no-views", action="store_true", help="gradient_as_bucket_view=False")
    own.add_argument("--no-overlap", action="store_true", help="communicate after backward")
    own.add_argument(
        "--mpi-thread", action="store_true", help="under mpirun: once more over mpi4py with MpiOptions(thread=True)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints what came out.

    Returns:
        0 if all was measured, whether or not targets were met; 1 if a rank that was started here failed; 2 if
        the ranks that there are cannot be used, or are not as many as were asked for.

    Raises:
        GradientMismatchError: In a rank that was started outside: two contestants do not compute the same.
    """
    settings = _settings(arguments)
    workloads = [workload_named(name) for name in dict.fromkeys(arguments.model or ())] or list(WORKLOADS)
    try:
        joins = detect(os.environ).launcher != "alone"
        if joins:
            _join(arguments.ranks)
    except (RuntimeError, ValueError) as error:
        return _fail(error, 2)
    results = _joined(settings, workloads) if joins else _alone(settings, workloads, arguments.ranks or _RANKS)
    try:
        models = list(_combined(settings, results))
    except RankError as error:
        return _fail(error, 1)
    if models:
        _publish(arguments, settings, models)
    if joins:
        dist.destroy_process_group()
    return 0


def _settings(arguments: argparse.Namespace) -> Settings:
    quick = arguments.quick
    return Settings(
        steps=arguments.steps or (_QUICK_STEPS if quick else None),
        repeats=arguments.repeats or (_QUICK_REPEATS if quick else Settings.repeats),
        bucket_cap_mb=arguments.bucket_cap_mb,
        views=not arguments.no_views,
        overlap=not arguments.no_overlap,
        mpi_thread=arguments.mpi_thread,
        seed=arguments.seed,
    )


def _join(wanted: int | None) -> None:
    """Join the ranks that a launcher has started."""
    job = init_process_group(None if detect(os.environ).launcher == "mpirun" else "gloo")
    if wanted is not None and wanted != job.world_size:
        dist.destroy_process_group()
        raise ValueError(f"--ranks is {wanted}, but {job.launcher} has started {job.world_size}; leave --ranks out")


def _fail(error: Exception, code: int) -> int:
    print(f"ppe_ddp: {error}", file=sys.stderr)
    return code


_Measured = Iterator[tuple[Workload, list[RankResult]]]


def _alone(settings: Settings, workloads: Sequence[Workload], world_size: int) -> _Measured:
    """Measure on ranks of our own."""
    with ExitStack() as stack:
        worlds: dict[int, Ranks] = {}
        for workload in workloads:
            size = workload.world_size or world_size
            if size not in worlds:
                worlds[size] = stack.enter_context(_ranks(size))
            yield workload, worlds[size].run(measure, workload.name, settings)


def _joined(settings: Settings, workloads: Sequence[Workload]) -> _Measured:
    """Measure on the ranks of the default process group, which all come here; only rank 0 yields anything."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for workload in workloads:
        results: list[RankResult] = []
        if workload.world_size in (None, world_size):
            gathered: list[Any] = [None] * world_size
            dist.gather_object(measure(workload.name, settings), gathered if rank == 0 else None)
            results = gathered
        else:
            if rank == 0:
                with _ranks(workload.world_size or 1) as ranks:
                    results = ranks.run(measure, workload.name, settings)
            dist.barrier()
        if rank == 0:
            yield workload, results


def _ranks(world_size: int) -> Ranks:
    return Ranks(world_size, timeout=_MODEL_SECONDS, group_timeout=_COLLECTIVE_SECONDS)


def _combined(settings: Settings, measured: _Measured) -> Iterator[ModelResult]:
    start = monotonic()
    for workload, ranks in measured:
        model = combine(workload, settings.steps or workload.steps, ranks)
        ratio = model.ours.ratio
        assert ratio is not None
        line = f"{model.name}: ppe_ddp {ratio.median:.2f} x {model.reference}"
        print(f"{line}, after {monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        yield model


def _publish(arguments: argparse.Namespace, settings: Settings, models: Sequence[ModelResult]) -> None:
    own = {name: value for name, value in versions().items() if value is not None}
    facts = machine_facts()
    caption = f"{facts['cpu']}, {facts['cores']} cores; " + ", ".join(f"{k} {v}" for k, v in own.items())
    print_step_table(models, caption, sys.stderr if arguments.json == "-" else sys.stdout)
    if arguments.json is not None:
        used = {**asdict(settings), "backend": "gloo", "threads": 1}
        write_report(arguments.json, "bench step", settings=used, models=[asdict(model) for model in models])
