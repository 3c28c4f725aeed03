"""Measures one training step: forward, backward, exchange; no optimizer.

ppe_ddp, torch DDP, ppe's DDP and the bare module train copies of one model on
the same data, in turn, within one run over one backend, one thread a rank.
Look at the ratios: times on a shared machine mean little by themselves.
"exposed" is what a step takes beyond the bare model's, where torch DDP's is 1.
--json has more: bytes of masks, and launch_us, the host's time for packing a
bucket and starting its collective.

Started alone it starts its own ranks; under torchrun, srun or mpirun it uses
those that there are, and under mpirun ppe_ddp over mpi4py takes part as well:

  python -m ppe_ddp bench step --model mlp --model small
  torchrun --nproc_per_node=4 -m ppe_ddp bench step --json result.json
  mpirun -n 2 python -m ppe_ddp bench step
  python -m ppe_ddp bench step --device cuda --trace traces
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

from ppe_ddp.benchmarks.bench_measure import RankResult, Settings, measure, workload_named
from ppe_ddp.benchmarks.bench_models import WORKLOADS, Workload
from ppe_ddp.benchmarks.bench_platform import Platform, add_platform_arguments
from ppe_ddp.benchmarks.bench_result import ModelResult, combine
from ppe_ddp.benchmarks.bench_table import print_step_table
from ppe_ddp.benchmarks.bench_trace import trace_file
from ppe_ddp.cli.arguments import count, folder, mebibytes, output
from ppe_ddp.cli.machine import machine_facts, versions, write_report
from ppe_ddp.launchers import detect
from ppe_ddp.testing import RankError, Ranks

if TYPE_CHECKING:
    import argparse

__all__ = ["BUCKET_SIZE_HELP", "add_arguments", "run"]

BUCKET_SIZE_HELP = "once more with this size of a bucket, beside the one that is chosen; repeatable"
_RANKS = 2
_QUICK_STEPS, _QUICK_REPEATS = 2, 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    defaults = Settings()
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("--ranks", type=count, metavar="N", help=f"ranks to start (default: {_RANKS})")
    parser.add_argument(
        "--model",
        action="append",
        choices=names,
        metavar="NAME",
        help=f"{', '.join(names)} (default: all, transformer-bf16 on cuda only)",
    )
    add_platform_arguments(parser)
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
    parser.add_argument(
        "--trace",
        type=folder,
        metavar="FOLDER",
        help="then record a few steps of ppe_ddp and torch DDP there, for https://ui.perfetto.dev",
    )
    own = parser.add_argument_group("options of ppe_ddp's wrapper")
    own.add_argument("--bucket-cap-mb", type=mebibytes, metavar="MIB", help="size of a bucket")
    own.add_argument("--bucket-size", type=mebibytes, action="append", metavar="MIB", help=BUCKET_SIZE_HELP)
    own.add_argument("--no-views", action="store_true", help="gradient_as_bucket_view=False")
    own.add_argument("--no-overlap", action="store_true", help="communicate after backward")
    own.add_argument("--by-gloo", action="store_true", help="once more with shared_memory=False")
    own.add_argument(
        "--mpi-thread", action="store_true", help="under mpirun: once more over mpi4py with MpiOptions(thread=True)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints what came out.

    Returns:
        0 if all was measured; 1 if a rank that was started here failed; 2 if
        the ranks that there are cannot be used, or are not as many as were asked for.

    Raises:
        GradientMismatchError: In a rank that was started outside: two contestants do not compute the same.
    """
    try:
        platform = Platform.of(arguments.device, arguments.backend)
        workloads = _workloads(arguments, platform)
        joins = detect(os.environ).launcher != "alone"
        if joins:
            _join(platform, arguments.ranks)
        else:
            platform.admit(max(workload.world_size or arguments.ranks or _RANKS for workload in workloads))
    except (ImportError, RuntimeError, ValueError) as error:
        return _fail(error, 2)
    settings = _settings(arguments, platform)
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


def _workloads(arguments: argparse.Namespace, platform: Platform) -> list[Workload]:
    if arguments.model:
        return [workload_named(name) for name in dict.fromkeys(arguments.model)]
    return [workload for workload in WORKLOADS if workload.on in (None, platform.device)]


def _settings(arguments: argparse.Namespace, platform: Platform) -> Settings:
    quick = arguments.quick
    return Settings(
        steps=arguments.steps or (_QUICK_STEPS if quick else None),
        repeats=arguments.repeats or (_QUICK_REPEATS if quick else Settings.repeats),
        bucket_cap_mb=arguments.bucket_cap_mb,
        bucket_sizes=tuple(dict.fromkeys(arguments.bucket_size or ())),
        views=not arguments.no_views,
        overlap=not arguments.no_overlap,
        mpi_thread=arguments.mpi_thread,
        by_gloo=arguments.by_gloo,
        seed=arguments.seed,
        platform=platform,
        trace=None if arguments.trace is None else str(arguments.trace),
    )


def _join(platform: Platform, wanted: int | None) -> None:
    """Join the ranks that a launcher has started."""
    job = platform.join()
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
                worlds[size] = stack.enter_context(settings.platform.start(size))
            yield workload, worlds[size].run(measure, workload.name, settings)


def _joined(settings: Settings, workloads: Sequence[Workload]) -> _Measured:
    """Measure on the ranks of the default process group, which all come here; only rank 0 yields anything."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    control = settings.platform.control()
    for workload in workloads:
        results: list[RankResult] = []
        if workload.world_size in (None, world_size):
            gathered: list[Any] = [None] * world_size
            result = measure(workload.name, settings)
            dist.gather_object(result, gathered if rank == 0 else None, group=control)
            results = gathered
        else:
            if rank == 0:
                with settings.platform.start(workload.world_size or 1) as ranks:
                    results = ranks.run(measure, workload.name, settings)
            dist.barrier(control)
        if rank == 0:
            yield workload, results


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
    caption = f"{settings.platform}; {facts['cpu']}, {facts['cores']} cores; "
    caption += ", ".join(f"{name} {value}" for name, value in own.items())
    file = sys.stderr if arguments.json == "-" else sys.stdout
    print_step_table(models, caption, file)
    if settings.trace is not None:
        files = trace_file(settings.trace, "MODEL", "CONTESTANT", "N")
        print(f"traces: {files}; drop one on https://ui.perfetto.dev", file=file)
    if arguments.json is not None:
        used = {**asdict(settings), "platform": settings.platform.facts(), "threads": 1}
        write_report(arguments.json, "bench step", settings=used, models=[asdict(model) for model in models])
