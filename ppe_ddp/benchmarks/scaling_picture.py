"""The picture of `bench scaling`: what the model says of up to 10,000 ranks, each line named where it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ppe_ddp.benchmarks.step_model import Cluster, Constants, Load, PredictedStep, predict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    _Lines = Sequence[tuple["ScalingCurve", list[PredictedStep]]]

__all__ = ["ScalingCurve", "draw_scaling", "first_late_mask", "scaling_curves"]

_INCHES, _DPI, _FONT = 8.6, 170, 9.0
_RANKS_A_NODE = 8
_MOST_NODES = 1250
_NBYTES, _PARAMETERS = 256 << 20, 64
_LARGE = 64 << 20
_LINE_HEIGHT = 0.062  # of an axis


@dataclass(frozen=True)
class ScalingCurve:
    """One line.

    Attributes:
        name: Written where it ends.
        colour: Of the line.
        constants: Of the transport.
        load: What a step does.
        is_flat: As for a cluster.
    """

    name: str
    colour: str
    constants: Constants
    load: Load
    is_flat: bool = False

    def at(self, nodes: int) -> PredictedStep:
        """The times of a step on so many nodes."""
        return predict(self.load, Cluster(nodes, _RANKS_A_NODE, self.is_flat), self.constants)


def scaling_curves(constants: Mapping[str, Constants]) -> list[ScalingCurve]:
    """What is drawn, by the constants of the transports that were measured, ``"ring"`` and ``"doubling"``.

    The load has a backward that takes as long as its gradients need on a link; so all of it could be hidden.
    """
    first = next(iter(constants.values()))
    backward = 2 * _NBYTES * first.wire_per_byte
    load = Load(_NBYTES, _PARAMETERS, backward / 2, backward)
    large = replace(load, bucket_bytes=_LARGE, piece_bytes=_LARGE)
    found = []
    if "ring" in constants:
        ring = constants["ring"]
        found.append(ScalingCurve("one ring of all ranks", "#9a9a9a", ring, load, is_flat=True))
        found.append(ScalingCurve("two levels over gloo", "#d62728", ring, load))
        found.append(ScalingCurve("two levels over gloo,\nbuckets of 64 MiB", "#e69f00", ring, large))
    if "doubling" in constants:
        found.append(ScalingCurve("two levels over MPI", "#2e6fb0", constants["doubling"], load))
    return found


def first_late_mask(curve: ScalingCurve) -> int | None:
    """The smallest number of ranks for which the first bucket waits for the mask; None where it never does."""
    for nodes in range(2, _MOST_NODES + 1):
        if curve.at(nodes).mask_delay > 0:
            return nodes * _RANKS_A_NODE
    return None


def draw_scaling(constants: Mapping[str, Constants], path: Path) -> None:
    """Draw it, and write it to ``path``.

    Args:
        constants: As for :func:`scaling_curves`.
        path: The file: .png, .svg or .pdf.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    nodes = sorted({round(2 * 1.12**k) for k in range(58) if 2 * 1.12**k < _MOST_NODES} | {_MOST_NODES})
    lines = [(curve, [curve.at(count) for count in nodes]) for curve in scaling_curves(constants)]
    ranks = [count * _RANKS_A_NODE for count in nodes]
    figure = Figure(figsize=(_INCHES, 8.2), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(3, 1, sharex=True)
    load = lines[0][0].load
    computing = load.forward + load.backward
    masks = [line for line in lines if line[0].load == load]
    _draw(axes[0], ranks, lines, lambda times: times.step / computing, "A step, as a multiple of forward and backward")
    _draw(axes[1], ranks, lines, lambda times: times.exposed, "Communication that nothing hides, seconds")
    _draw(axes[2], ranks, masks, lambda times: times.mask, "The mask on its way, seconds")
    _mark_first_bucket(axes[2], load, [curve for curve, _ in masks])
    axes[2].set_xlabel(f"ranks, {_RANKS_A_NODE} on each node", fontsize=_FONT)
    figure.savefig(path)


def _draw(axis: Any, ranks: list[int], lines: _Lines, value: Callable[[PredictedStep], float], title: str) -> None:
    axis.set_title(title, fontsize=_FONT + 1, loc="left")
    ends = []
    for curve, times in lines:
        values = [value(one) for one in times]
        axis.plot(ranks, values, color=curve.colour, linewidth=2)
        ends.append((values[-1], curve))
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(2 * _RANKS_A_NODE, ranks[-1])
    axis.set_xticks([100, 1000, 10000], ["100", "1000", "10,000"])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.tick_params(labelsize=_FONT)
    axis.grid(which="major", color="#dddddd", linewidth=0.6)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    _name_lines(axis, ends)


def _name_lines(axis: Any, ends: list[tuple[float, ScalingCurve]]) -> None:
    """Write each name where its line ends, or above the one below if there is no room."""
    low, high = (math.log(limit) for limit in axis.get_ylim())
    free = 0.0  # from here on upwards
    for end, curve in sorted(ends, key=lambda one: one[0]):
        half = _LINE_HEIGHT / 2 * (1 + curve.name.count("\n"))
        height = max((math.log(end) - low) / (high - low), free + half)
        style = {"color": curve.colour, "fontsize": _FONT, "va": "center", "linespacing": 1.0}
        axis.annotate(curve.name, (1.008, height), xycoords="axes fraction", **style)
        free = height + half


def _mark_first_bucket(axis: Any, load: Load, masks: Sequence[ScalingCurve]) -> None:
    """Where the mask begins to show: beyond the time at which the first bucket is complete."""
    seconds = load.backward * load.bucket_bytes / load.nbytes
    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": _FONT}
    axis.axhline(seconds, color="#444444", linewidth=1, linestyle="--")
    where = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": _FONT, "linespacing": 1.0}
    axis.annotate("backward completes\nthe first bucket", (1.008, seconds), color="#444444", **where)
    for curve in masks:
        if ranks := first_late_mask(curve):
            axis.plot([ranks], [seconds], "o", color=curve.colour)
            axis.annotate(f"{ranks} ranks", (ranks, seconds), xytext=(6, -13), color=curve.colour, **style)
