"""Checks a model of a training step on nodes, and draws it to 10,000 ranks.

The constants of the model are measured on one node and on two; then it is asked
for the steps of other layouts, and these are measured. The nodes are on this
machine (as root, of Linux namespaces; see `ppe_ddp.testing.Nodes`): the model
that is trained sleeps where another computes, and more than twice as many ranks
as there are cores measure the cores, not the network.

  python -m ppe_ddp bench scaling --out scaling.png
  python -m ppe_ddp bench scaling --launcher torchrun --json result.json
  python -m ppe_ddp bench scaling --read result.json --out scaling.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ppe_ddp.benchmarks.bench_table import print_table, table_of
from ppe_ddp.benchmarks.scaling_measure import MeasuredStep, all_reduce_times, measure_step
from ppe_ddp.benchmarks.scaling_picture import draw_scaling, first_late_mask, scaling_curves
from ppe_ddp.benchmarks.step_model import Cluster, Constants, Load, predict
from ppe_ddp.cli.arguments import count, output
from ppe_ddp.cli.machine import write_report
from ppe_ddp.testing import JobStarter, Nodes, NodesError, RankError, Ranks
from ppe_ddp.tracing.timeline_folder import check_pictures

if TYPE_CHECKING:
    import argparse

__all__ = ["ScalingLine", "add_arguments", "constants_of", "run"]

# By launcher: the backend, and what it does between nodes.
_TRANSPORTS = {"torchrun": ("gloo", "ring"), "mpirun": ("mpi4py", "doubling")}
_LAYOUTS = ((2, 2), (3, 1), (4, 1))
_MBIT, _REPEATS = 1000, 7
_SMALL, _LARGE = 64, 4 << 20
_NBYTES, _LAYERS, _FORWARD = 16 << 20, 16, 0.01
_SECONDS = 300.0
# Of backward, as parts of the time that the gradients take on a link; each with a bucket size in MiB.
_LOADS = ((0.1, 4.0), (1.0, 4.0), (1.0, 1.0))


@dataclass(frozen=True)
class ScalingLine:
    """One step, as the model has it and as it was measured.

    Attributes:
        launcher: What has started the ranks.
        nodes: How many.
        ranks: On each.
        bucket_mb: The size of a bucket in MiB.
        backward: Seconds, measured without ppe_ddp.
        predicted: Seconds of a step.
        measured: The same.
        error: (predicted - measured) / measured.
    """

    launcher: str
    nodes: int
    ranks: int
    bucket_mb: float
    backward: float
    predicted: float
    measured: float
    error: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    rate = f"Mbit/s of each node's link, in each direction (default: {_MBIT})"
    parser.add_argument("--mbit", type=count, default=_MBIT, metavar="N", help=rate)
    parser.add_argument("--launcher", action="append", choices=_TRANSPORTS, help="only this one (default: both)")
    parser.add_argument("--repeats", type=count, default=_REPEATS, metavar="N", help=f"default: {_REPEATS}")
    parser.add_argument("--out", type=output, metavar="FILE", help="the picture: .png, .svg or .pdf (matplotlib)")
    parser.add_argument("--json", type=output, metavar="FILE", help="write all numbers there; - for stdout")
    parser.add_argument(
        "--read", type=Path, action="append", metavar="FILE", help="measure nothing: take these results"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints, and draws.

    Returns:
        0; 1 if a rank failed; 2 where nodes cannot be made, pictures not be drawn, or a file not be read.
    """
    try:
        if arguments.out is not None:
            check_pictures()
        constants, lines = _read(arguments.read) if arguments.read else _measured(arguments)
    except (ImportError, KeyError, NodesError, OSError, TypeError, ValueError) as error:
        print(f"ppe_ddp: {error}", file=sys.stderr)
        return 2
    except RankError as error:
        print(f"ppe_ddp: {error}", file=sys.stderr)
        return 1
    _print(constants, lines, sys.stderr if arguments.json == "-" else sys.stdout)
    if arguments.out is not None:
        draw_scaling({one.algorithm: one for one in constants.values()}, Path(arguments.out))
    if arguments.json is not None:
        write_report(
            arguments.json,
            "bench scaling",
            settings={"mbit": arguments.mbit, "repeats": arguments.repeats},
            constants={launcher: asdict(one) for launcher, one in constants.items()},
            lines=[asdict(line) for line in lines],
        )
    return 0


def constants_of(
    node: Mapping[int, float], wire: Mapping[int, float], pack_per_byte: float, algorithm: str
) -> Constants:
    """The constants that explain what was measured.

    Args:
        node: Seconds of all-reduces on one node, by their bytes: a small one and a large one.
        wire: The same between two nodes of a rank each.
        pack_per_byte: As measured.
        algorithm: As :class:`Constants` has it.
    """
    (small, short), (large, long) = sorted(node.items())
    (_, short_wire), (_, long_wire) = sorted(wire.items())
    found = Constants(
        node_latency=short,
        node_per_byte=max(0.0, long - short) / (large - small),
        wire_latency=short_wire,
        wire_per_byte=max(0.0, long_wire - short_wire) / (large - small),
        pack_per_byte=pack_per_byte,
        algorithm="ring" if algorithm == "ring" else "doubling",
    )
    return replace(found, wire_latency=short_wire / found.rounds(2))


def _read(files: Sequence[Path]) -> tuple[dict[str, Constants], list[ScalingLine]]:
    reports = [json.loads(file.read_text()) for file in files]
    constants = {name: Constants(**one) for report in reports for name, one in report["constants"].items()}
    return constants, [ScalingLine(**line) for report in reports for line in report["lines"]]


def _measured(arguments: argparse.Namespace) -> tuple[dict[str, Constants], list[ScalingLine]]:
    constants: dict[str, Constants] = {}
    lines: list[ScalingLine] = []
    for launcher in dict.fromkeys(arguments.launcher or _TRANSPORTS):
        constants[launcher] = _measure_constants(launcher, arguments)
        lines += _check(launcher, constants[launcher], arguments)
    return constants, lines


def _measure_constants(launcher: str, arguments: argparse.Namespace) -> Constants:
    repeats = arguments.repeats
    times = (all_reduce_times, (_SMALL, _LARGE), 2 * repeats)
    packing = (measure_step, _NBYTES, _LAYERS, _FORWARD, _FORWARD, 4.0, repeats)
    node, step = _on_nodes(launcher, (1, 2), arguments.mbit, [times, packing])
    (wire,) = _on_nodes(launcher, (2, 1), arguments.mbit, [times])
    return constants_of(node, wire, step.pack_per_byte, _TRANSPORTS[launcher][1])


def _check(launcher: str, constants: Constants, arguments: argparse.Namespace) -> Iterator[ScalingLine]:
    link = 2 * _NBYTES * constants.wire_per_byte
    for layout in _LAYOUTS:
        calls = [
            (measure_step, _NBYTES, _LAYERS, _FORWARD, part * link, bucket_mb, arguments.repeats)
            for part, bucket_mb in _LOADS
        ]
        measured = _on_nodes(launcher, layout, arguments.mbit, calls)
        for (_, bucket_mb), one in zip(_LOADS, measured, strict=True):
            yield _line(launcher, layout, bucket_mb, one, constants)


def _line(
    launcher: str, layout: tuple[int, int], bucket_mb: float, measured: MeasuredStep, constants: Constants
) -> ScalingLine:
    load = Load(_NBYTES, _LAYERS, measured.forward, measured.backward, int(bucket_mb * 2**20))
    step = predict(load, Cluster(*layout), constants).step
    error = step / measured.step - 1
    print(f"a step: {step:.3f} s predicted, {measured.step:.3f} s measured", file=sys.stderr, flush=True)
    return ScalingLine(launcher, *layout, bucket_mb, measured.backward, step, measured.step, error)


def _on_nodes(launcher: str, layout: tuple[int, int], mbit: float, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What rank 0 has returned from each call: a function, and its arguments."""
    nodes, each = layout
    print(f"{launcher}: measuring on {nodes} x {each} ranks ...", file=sys.stderr, flush=True)
    with Nodes(nodes, mbit=mbit) as made:
        starter = JobStarter(made, launcher, (each,) * nodes)
        with Ranks(nodes * each, backend=_TRANSPORTS[launcher][0], starter=starter, timeout=_SECONDS) as ranks:
            return [ranks.run(function, *rest)[0] for function, *rest in calls]


def _print(constants: Mapping[str, Constants], lines: Sequence[ScalingLine], file: TextIO) -> None:
    told = table_of("Constants", "", ["", "node us", "node GB/s", "round us", "link Mbit/s", "pack GB/s"])
    for launcher, one in constants.items():
        rates = [1e-9 / max(seconds, 1e-15) for seconds in (one.node_per_byte, one.pack_per_byte)]
        link = 8e-6 / max(one.wire_per_byte, 1e-15)
        cells = [one.node_latency * 1e6, rates[0], one.wire_latency * 1e6, link, rates[1]]
        told.add_row(
            f"{launcher}, {one.algorithm}", *[f"{cell:.3g}" if cell < 100 else f"{cell:.0f}" for cell in cells]
        )
    print_table(told, file)
    largest = max((abs(line.error) for line in lines), default=0.0)
    caption = f"largest error {largest:.0%}"
    table = table_of("A step of 16 MiB", caption, ["", "bucket", "backward", "predicted ms", "measured ms", "error"])
    for line in lines:
        name = f"{line.launcher}, {line.nodes} x {line.ranks}"
        seconds = [f"{value * 1e3:.0f}" for value in (line.backward, line.predicted, line.measured)]
        table.add_row(name, f"{line.bucket_mb:g} MiB", *seconds, f"{line.error:+.0%}")
    print_table(table, file)
    for curve in scaling_curves({one.algorithm: one for one in constants.values()}):
        ranks = first_late_mask(curve)
        where = "up to 10,000 ranks" if ranks is None else f"from {ranks} ranks on"
        what = "never shows" if ranks is None else "shows"
        print(f"{' '.join(curve.name.split())}: the mask {what} {where}", file=file)
