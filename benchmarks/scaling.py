"""Checks a model of a training step on nodes, and draws it for up to 10,000 ranks.

It measures the constants of the model on one node and on two, predicts steps on
other layouts, and measures these. The nodes are made of this machine (as root;
see `ppe_ddp.testing.Nodes`). So the network that is trained sleeps instead of
computing, and there should be at most twice as many ranks as cores.

  python -m benchmarks scaling --out scaling.png
  python -m benchmarks scaling --launcher torchrun --json result.json
"""

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ppe_ddp import DistributedDataParallel
from ppe_ddp.backends.shm import ShmOptions
from ppe_ddp.cli.benchmarking import largest, over_mpi, print_table
from ppe_ddp.cli.command_line import add_json, count, fail, output, told, write_report
from ppe_ddp.testing import JobStarter, Nodes, NodesError, RankError, Ranks
from ppe_ddp.tracing.timeline import check_pictures

# By launcher: the backend, and its algorithm between nodes.
_TRANSPORTS = {"torchrun": ("gloo", "ring"), "mpirun": ("mpi4py", "doubling")}
_LAYOUTS = ((2, 2), (3, 1), (4, 1))
_SMALL, _LARGE = 64, 4 << 20
_NBYTES, _LAYERS, _FORWARD = 16 << 20, 16, 0.01
_SECONDS, _WARM_UP = 300.0, 4
# The time of backward, divided by that of the gradients on a link, and the size of a bucket in MiB.
_LOADS = ((0.1, 4.0), (1.0, 4.0), (1.0, 1.0))
# Of the picture.
_INCHES, _DPI, _FONT = 8.6, 170, 9.0
_RANKS_A_NODE, _MOST_NODES = 8, 1250
_DRAWN_NBYTES, _DRAWN_PARAMETERS, _LARGE_BUCKET = 256 << 20, 64, 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    rate = "Mbit/s of each node's link, in each direction (default: 1000)"
    parser.add_argument("--mbit", type=count, default=1000, metavar="N", help=rate)
    parser.add_argument("--launcher", action="append", choices=_TRANSPORTS, help="only this one (default: both)")
    parser.add_argument("--repeats", type=count, default=7, metavar="N", help="default: 7")
    parser.add_argument("--out", type=output, metavar="FILE", help="the picture: .png, .svg or .pdf (matplotlib)")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and draw; 1 if a rank failed, 2 if nodes or pictures cannot be made."""
    constants: dict[str, Constants] = {}
    lines: list[dict[str, Any]] = []
    try:
        if arguments.out is not None:
            check_pictures()
        for launcher in dict.fromkeys(arguments.launcher or _TRANSPORTS):
            constants[launcher] = _measured_constants(launcher, arguments)
            lines += _check(launcher, constants[launcher], arguments)
    except (ImportError, NodesError) as error:
        return fail(error, 2)
    except RankError as error:
        return fail(error, 1)
    _print(constants, lines, arguments)
    if arguments.out is not None:
        draw_scaling({one.algorithm: one for one in constants.values()}, Path(arguments.out))
    written = {launcher: asdict(one) for launcher, one in constants.items()}
    write_report(arguments, "scaling", mbit=arguments.mbit, constants=written, lines=lines)
    return 0


# ---------------------------------------------------------------------- the model, which is pure
#
#     forward | backward: gradients, packed and summed in the node | waiting | spread    what a rank does
#             | mask ------->                                      | vote ->             the small messages
#                            | piece 0 -----> | piece 1 -----> | ...                     between the nodes
#
# An all-reduce of n bytes takes alpha + beta n in the memory of a node. Between N nodes a ring, as in gloo, takes
# 2 (N - 1) rounds and 2 (N - 1) / N n bytes on every link; recursive doubling, as in MPICH, takes log2 N rounds of n
# bytes, and two more if N is no power of two. No bucket is sent before the mask is known, which a rank notices when its
# next gradient arrives, and at most two pieces are under way at a time. MPI moves messages only while it is called:
# hardly any during backward.

_HEADER_BYTES = 96  # of the mask (ppe_ddp/engine/mask_exchange.py)
_BYTES_A_RANK = 5  # of the mask; the vote has fewer
_UNDER_WAY = 2  # all-reduces on which gloo's threads work at the same time


@dataclass(frozen=True)
class Constants:
    """The constants of the model, as measured."""

    node_latency: float  # seconds of the smallest all-reduce in a node
    node_per_byte: float  # seconds of each further byte there
    wire_latency: float  # seconds of one round between nodes
    wire_per_byte: float  # seconds of a byte on a node's link
    pack_per_byte: float = 0.0  # seconds to copy a byte of gradients into a bucket
    algorithm: str = "ring"  # between the nodes: ``"ring"`` as in gloo, on threads; ``"doubling"`` as in MPI

    def rounds(self, nodes: int) -> int:
        """The number of messages from other nodes for which an all-reduce waits one after another."""
        if self.algorithm == "ring":
            return 2 * (nodes - 1)
        powers = nodes.bit_length() - 1
        return powers if nodes == 1 << powers else powers + 2

    def volume(self, nodes: int) -> float:
        """The bytes on a node's link, in each direction, divided by those of the all-reduce."""
        return 2 * (nodes - 1) / nodes if self.algorithm == "ring" else float(self.rounds(nodes))


@dataclass(frozen=True)
class Cluster:
    """Nodes with ``ranks`` ranks each; if it ``is_flat``, all ranks send in one ring, not in two levels."""

    nodes: int
    ranks: int
    is_flat: bool = False

    @property
    def world_size(self) -> int:
        """The number of ranks on all nodes."""
        return self.nodes * self.ranks


@dataclass(frozen=True)
class Load:
    """One step of a model whose gradients arrive evenly during backward."""

    nbytes: int  # of the gradients that exist on some rank
    parameters: int  # the number of parameters, all of one size
    forward: float  # seconds
    backward: float  # seconds
    bucket_bytes: int = 4 << 20
    piece_bytes: int = 4 << 20  # in which larger buckets are summed in shared memory


class PredictedStep(NamedTuple):
    """The predicted times of a step, in seconds."""

    step: float  # from the begin of forward to the last average
    exposed: float  # ``step`` without forward and backward
    mask: float  # from the begin of backward to the arrival of the mask
    mask_delay: float  # for which the first bucket waits for the mask


def mask_seconds(load: Load, cluster: Cluster, constants: Constants) -> float:
    """The time of the mask, or of the vote; it is sent in two levels only if one ring would have too many rounds."""
    ranks = cluster.world_size
    nbytes = _HEADER_BYTES + load.parameters + _BYTES_A_RANK * ranks
    if ranks == 1:
        return 0.0
    is_ring = constants.algorithm == "ring"
    if cluster.nodes > 1 and is_ring and nbytes <= ShmOptions().for_control().direct_up_to(ranks):
        return constants.wire_latency
    in_levels = cluster.nodes == 1 or (is_ring and ShmOptions().two_levels_from(ranks) == 0)
    return all_reduce_seconds(nbytes, cluster if in_levels else replace(cluster, is_flat=True), constants)


def all_reduce_seconds(nbytes: float, cluster: Cluster, constants: Constants) -> float:
    """The time of one all-reduce alone."""
    return sum(_parts_of_sum(nbytes, cluster, constants))


def _parts_of_sum(nbytes: float, cluster: Cluster, constants: Constants) -> tuple[float, float, float]:
    """The seconds of an all-reduce: in the memory of a node, in rounds between nodes, and on their links."""
    in_node = 0.0
    if cluster.ranks > 1 and not (cluster.is_flat and cluster.nodes > 1):
        in_node = constants.node_latency + nbytes * constants.node_per_byte
    members = 1 if cluster.nodes == 1 else cluster.world_size if cluster.is_flat else cluster.nodes
    wire = constants.volume(members) * nbytes * constants.wire_per_byte
    return in_node, constants.rounds(members) * constants.wire_latency, wire


def predict(load: Load, cluster: Cluster, constants: Constants) -> PredictedStep:
    """The times of one step."""
    mask = mask_seconds(load, cluster, constants)
    now = load.forward  # the clock of the rank's own thread
    known = now + (noticed(mask, load) if mask < load.backward else mask)
    first_ready = now + load.backward * min(1.0, load.bucket_bytes / load.nbytes)
    # When the links between the nodes, which all carry the same, are free, and when each piece has arrived.
    free = 0.0 if constants.algorithm == "ring" else load.forward + load.backward
    arrivals: list[float] = []
    ready, waiting = 0, 0  # bytes
    for nbytes in _parts(load.nbytes, load.bucket_bytes):
        now += load.backward * nbytes / load.nbytes
        ready, waiting = ready + nbytes, waiting + nbytes
        if now < known and ready < load.nbytes:
            continue
        now = max(now, known)
        for bucket in _parts(waiting, load.bucket_bytes):
            now += bucket * constants.pack_per_byte
            for piece in _parts(bucket, load.piece_bytes):
                in_node, latency, on_wire = _parts_of_sum(piece, cluster, constants)
                now += in_node
                earlier = sorted(arrivals)[-_UNDER_WAY] if len(arrivals) >= _UNDER_WAY else 0.0
                free = max(now, earlier, free) + on_wire
                arrivals.append(free + latency)
        waiting = 0
    end = now + mask  # the vote is sent beside the last bucket
    if cluster.nodes > 1:
        last = min(load.bucket_bytes, load.piece_bytes, load.nbytes)
        end = max(end, max(arrivals) + _parts_of_sum(last, cluster, constants)[0] / 2)
    return PredictedStep(end, end - load.forward - load.backward, mask, max(0.0, known - first_ready))


def noticed(mask: float, load: Load) -> float:
    """The seconds from the begin of backward to the first gradient after the mask's arrival, which notices it."""
    interval = load.backward / load.parameters
    return math.ceil(mask / interval) * interval if interval else mask


def _parts(nbytes: int, size: int) -> Iterator[int]:
    for start in range(0, nbytes, size):
        yield min(size, nbytes - start)


# ---------------------------------------------------------------------- on nodes


def _on_nodes(launcher: str, layout: tuple[int, int], mbit: float, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The results on rank 0 of calls, each a function and its arguments, on the ranks of new nodes."""
    nodes, each = layout
    print(f"{launcher}: measuring on {nodes} x {each} ranks ...", file=sys.stderr, flush=True)
    with Nodes(nodes, mbit=mbit) as made:
        starter = JobStarter(made, launcher, (each,) * nodes)
        with Ranks(nodes * each, backend=_TRANSPORTS[launcher][0], starter=starter, timeout=_SECONDS) as ranks:
            return [ranks.run(function, *rest)[0] for function, *rest in calls]


def _measured_constants(launcher: str, arguments: argparse.Namespace) -> Constants:
    times = (all_reduce_times, (_SMALL, _LARGE), 2 * arguments.repeats)
    packing = (measure_step, _NBYTES, _LAYERS, _FORWARD, _FORWARD, 4.0, arguments.repeats)
    node, step = _on_nodes(launcher, (1, 2), arguments.mbit, [times, packing])
    (wire,) = _on_nodes(launcher, (2, 1), arguments.mbit, [times])
    return constants_of(node, wire, step.pack_per_byte, _TRANSPORTS[launcher][1])


def constants_of(
    node: Mapping[int, float], wire: Mapping[int, float], pack_per_byte: float, algorithm: str
) -> Constants:
    """The constants, from the seconds of a small and a large all-reduce, by their bytes.

    Those of ``node`` were measured on one node, those of ``wire`` on two nodes with one rank each.
    """
    (small, short), (large, long) = sorted(node.items())
    (_, short_wire), (_, long_wire) = sorted(wire.items())
    rates = [max(0.0, more - less) / (large - small) for less, more in ((short, long), (short_wire, long_wire))]
    found = Constants(short, rates[0], short_wire, rates[1], pack_per_byte, algorithm)
    return replace(found, wire_latency=short_wire / found.rounds(2))


def _check(launcher: str, constants: Constants, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    link = 2 * _NBYTES * constants.wire_per_byte
    for nodes, each in _LAYOUTS:
        calls = [
            (measure_step, _NBYTES, _LAYERS, _FORWARD, part * link, bucket_mb, arguments.repeats)
            for part, bucket_mb in _LOADS
        ]
        measured = _on_nodes(launcher, (nodes, each), arguments.mbit, calls)
        for (_, bucket_mb), one in zip(_LOADS, measured, strict=True):
            load = Load(_NBYTES, _LAYERS, one.forward, one.backward, int(bucket_mb * 2**20))
            step = predict(load, Cluster(nodes, each), constants).step
            print(f"a step: {step:.3f} s predicted, {one.step:.3f} s measured", file=sys.stderr, flush=True)
            line = {"launcher": launcher, "nodes": nodes, "ranks": each, "bucket_mb": bucket_mb}
            times = {"backward": one.backward, "predicted": step, "measured": one.step}
            yield {**line, **times, "error": step / one.step - 1}


class MeasuredStep(NamedTuple):
    """Seconds of the slowest rank, as lower quartiles, since other programs only make a step longer."""

    forward: float  # of the bare model
    backward: float  # of the bare model
    step: float  # with ppe_ddp
    pack_per_byte: float  # of copying gradients into a bucket


class _Sleep(torch.autograd.Function):
    """Sleeps in forward and backward, and gives its weight a gradient of ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward: float, backward: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.seconds = backward
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.seconds)
        (weight,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(weight), None, None


class _SleepingModel(nn.Module):
    """Layers of one size that sleep, as computing ranks of emulated nodes would wait for a core."""

    def __init__(self, nbytes: int, layers: int, forward: float, backward: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(nbytes // 4 // layers)) for _ in range(layers))
        self._seconds = forward / layers, backward / layers

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = _Sleep.apply(x, weight, *self._seconds)  # type: ignore[no-untyped-call]
        return x


def all_reduce_times(sizes: tuple[int, ...], repeats: int) -> dict[int, float]:
    """Seconds of an all-reduce of each size, in a group like the wrapper's: the fastest, on the slowest rank."""
    group = dist.group.WORLD if over_mpi() else dist.new_group(backend="shm")
    control = dist.new_group(backend="gloo")
    found: dict[int, list[float]] = {size: [] for size in sizes}
    tensors = {size: torch.zeros(size, dtype=torch.uint8).view(torch.float32) for size in sizes}
    for _ in range(_WARM_UP + repeats):
        for size, tensor in tensors.items():
            dist.barrier(control)
            start = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            found[size].append(time.perf_counter() - start)
    return {size: largest(min(times[_WARM_UP:]), control) for size, times in found.items()}


def measure_step(
    nbytes: int, layers: int, forward: float, backward: float, bucket_mb: float, repeats: int
) -> MeasuredStep:
    """Train in turn without and with ppe_ddp; all ranks call this together."""
    control = dist.new_group(backend="gloo")
    bare = _SleepingModel(nbytes, layers, forward, backward)
    model = DistributedDataParallel(_SleepingModel(nbytes, layers, forward, backward), bucket_cap_mb=bucket_mb)
    found: list[MeasuredStep] = []
    for _ in range(_WARM_UP + repeats):
        own, step = _clock(bare, control), sum(_clock(model, control))
        trace = model.trace()
        assert trace is not None
        packing = sum(bucket.packed_ns - bucket.launch_ns for bucket in trace.buckets)
        found.append(MeasuredStep(*own, step, packing / 1e9 / nbytes))
    return MeasuredStep(*largest([quantiles(times)[0] for times in zip(*found[_WARM_UP:], strict=True)], control))


def _clock(module: nn.Module, control: Any) -> tuple[float, float]:
    module.zero_grad()
    x = torch.zeros(1, requires_grad=True)
    dist.barrier(control)
    start = time.perf_counter()
    y = module(x).sum()
    middle = time.perf_counter()
    y.backward()
    return middle - start, time.perf_counter() - middle


# ---------------------------------------------------------------------- tables and picture


def _print(constants: Mapping[str, Constants], lines: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    def of_transport(launcher: str, one: Constants) -> list[str]:
        rates = [1e-9 / max(seconds, 1e-15) for seconds in (one.node_per_byte, one.pack_per_byte)]
        link = 8e-6 / max(one.wire_per_byte, 1e-15)
        cells = [one.node_latency * 1e6, rates[0], one.wire_latency * 1e6, link, rates[1]]
        return [f"{launcher}, {one.algorithm}", *[f"{cell:.3g}" if cell < 100 else f"{cell:.0f}" for cell in cells]]

    def of_step(line: dict[str, Any]) -> list[str]:
        name = f"{line['launcher']}, {line['nodes']} x {line['ranks']}"
        seconds = [f"{line[key] * 1e3:.0f}" for key in ("backward", "predicted", "measured")]
        return [name, f"{line['bucket_mb']:g} MiB", *seconds, f"{line['error']:+.0%}"]

    headings = ["", "node us", "node GB/s", "round us", "link Mbit/s", "pack GB/s"]
    rows = (of_transport(*item) for item in constants.items())
    print_table(arguments, "Constants", f"links of {arguments.mbit} Mbit/s", headings, rows)
    largest = max((abs(line["error"]) for line in lines), default=0.0)
    headings = ["", "bucket", "backward", "predicted ms", "measured ms", "error"]
    print_table(arguments, "A step of 16 MiB", f"largest error {largest:.0%}", headings, map(of_step, lines))
    for curve in scaling_curves({one.algorithm: one for one in constants.values()}):
        ranks = curve.first_late_mask()
        where = "never shows up to 10,000 ranks" if ranks is None else f"shows from {ranks} ranks on"
        print(f"{' '.join(curve.name.split())}: the mask {where}", file=told(arguments))


class Curve(NamedTuple):
    """One line of the picture, and its arguments of the model."""

    name: str
    colour: str
    constants: Constants
    load: Load
    is_flat: bool = False

    def at(self, nodes: int) -> PredictedStep:
        """The times of a step on ``nodes`` nodes."""
        return predict(self.load, Cluster(nodes, _RANKS_A_NODE, self.is_flat), self.constants)

    def first_late_mask(self) -> int | None:
        """The smallest number of ranks at which the first bucket waits for the mask; None if it never does."""
        late = (nodes for nodes in range(2, _MOST_NODES + 1) if self.at(nodes).mask_delay > 0)
        return next((nodes * _RANKS_A_NODE for nodes in late), None)


def scaling_curves(constants: Mapping[str, Constants]) -> list[Curve]:
    """The lines of the picture, given constants by algorithm, ``"ring"`` or ``"doubling"``.

    Backward takes as long as its gradients need on a link, so all communication could be hidden.
    """
    backward = 2 * _DRAWN_NBYTES * next(iter(constants.values())).wire_per_byte
    load = Load(_DRAWN_NBYTES, _DRAWN_PARAMETERS, backward / 2, backward)
    large = replace(load, bucket_bytes=_LARGE_BUCKET, piece_bytes=_LARGE_BUCKET)
    found = []
    if ring := constants.get("ring"):
        found.append(Curve("one ring of all ranks", "#9a9a9a", ring, load, is_flat=True))
        found.append(Curve("two levels over gloo", "#d62728", ring, load))
        found.append(Curve("two levels over gloo,\nbuckets of 64 MiB", "#e69f00", ring, large))
    if doubling := constants.get("doubling"):
        found.append(Curve("two levels over MPI", "#2e6fb0", doubling, load))
    return found


def draw_scaling(constants: Mapping[str, Constants], path: Path) -> None:
    """Draw the model's predictions for up to 10,000 ranks, and write the picture to ``path``: .png, .svg or .pdf."""
    from matplotlib.figure import Figure

    nodes = sorted({round(2 * 1.12**k) for k in range(58) if 2 * 1.12**k < _MOST_NODES} | {_MOST_NODES})
    curves = scaling_curves(constants)
    load = curves[0].load
    masks = [curve for curve in curves if curve.load == load]
    panels: list[tuple[str, list[Curve], Callable[[PredictedStep], float]]] = [
        ("A step, as a multiple of forward and backward", curves, lambda it: it.step / (load.forward + load.backward)),
        ("Communication that nothing hides, seconds", curves, lambda it: it.exposed),
        ("The mask on its way, seconds", masks, lambda it: it.mask),
    ]
    figure = Figure(figsize=(_INCHES, 8.2), dpi=_DPI, layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    for axis, (title, drawn, value) in zip(axes, panels, strict=True):
        for curve in drawn:
            times = [value(curve.at(one)) for one in nodes]
            ranks = [one * _RANKS_A_NODE for one in nodes]
            axis.plot(ranks, times, color=curve.colour, linewidth=2, label=curve.name)
        axis.set(xscale="log", yscale="log", xlim=(2 * _RANKS_A_NODE, _MOST_NODES * _RANKS_A_NODE))
        axis.set_title(title, fontsize=_FONT + 1, loc="left")
        axis.set_xticks([100, 1000, 10000], ["100", "1000", "10,000"])
        axis.yaxis.set_major_formatter("{x:g}")
        axis.tick_params(labelsize=_FONT)
        axis.grid(which="major", color="#dddddd", linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    _mark_first_bucket(axes[2], load, masks)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=_FONT)
    axes[2].set_xlabel(f"ranks, {_RANKS_A_NODE} on each node", fontsize=_FONT)
    figure.savefig(path)


def _mark_first_bucket(axis: Any, load: Load, masks: Sequence[Curve]) -> None:
    """Mark the time at which the first bucket is complete, and from how many ranks on the mask arrives later."""
    seconds = load.backward * load.bucket_bytes / load.nbytes
    axis.axhline(seconds, color="#444444", linewidth=1, linestyle="--")
    where = {"xycoords": ("axes fraction", "data"), "va": "bottom", "fontsize": _FONT}
    axis.annotate("backward completes the first bucket", (0.01, seconds), color="#444444", **where)
    for curve in masks:
        if ranks := curve.first_late_mask():
            axis.plot([ranks], [seconds], "o", color=curve.colour)
            style = {"textcoords": "offset points", "fontsize": _FONT, "color": curve.colour}
            axis.annotate(f"{ranks} ranks", (ranks, seconds), xytext=(6, -13), **style)
