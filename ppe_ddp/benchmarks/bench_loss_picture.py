"""The picture of ``bench compression --task``: the loss of each method over time, a panel a task."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ppe_ddp.benchmarks.bench_training import TrainingLine

_PIXELS_AN_INCH = 130
_MEAN_OF = 10  # losses
# Torch's own wrapper and hooks are grey, and dashed where we have the same method.
_COLOURS = {
    "none": "#333333",
    "FP16": "#2e6fb0",
    "Int8": "#17a2a2",
    "Sign": "#9467bd",
    "TopK(0.01)": "#e69f00",
    "PowerSGD(4)": "#d62728",
    "LocalSGD, Int8": "#8c564b",
    "DiLoCo, Int8": "#2a9d6f",
}


def draw_losses(lines: Sequence[TrainingLine], file: Path, caption: str) -> None:
    """Draw them.

    Args:
        lines: Of one or several tasks.
        file: The picture.
        caption: Where they were trained.

    Raises:
        ImportError: There is no matplotlib.
    """
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(line.task for line in lines))
    figure = Figure(figsize=(4.2 * len(tasks) + 1.8, 3.4), layout="constrained")
    axes = figure.subplots(1, len(tasks), squeeze=False)[0]
    for task, axis in zip(tasks, axes, strict=True):
        own = [line for line in lines if line.task == task]
        target = own[0].target
        axis.axhline(target, color="#bbbbbb", linewidth=0.8, zorder=0)
        for line in own:
            first = min(_MEAN_OF, len(line.losses))  # before it there are too few for a mean
            smooth = [fmean(line.losses[k - first : k]) for k in range(first, len(line.losses) + 1)]
            is_torchs = line.name.startswith("torch") or line.name.endswith("torch")
            colour = _COLOURS.get(line.name.removesuffix(", torch"), "#777777")
            axis.plot(
                line.seconds[first - 1 :],
                smooth,
                label=line.name,
                color=colour,
                linestyle="--" if is_torchs else "-",
                linewidth=1.1 if is_torchs else 1.6,
            )
            if line.seconds_to_target is not None:
                inside = "white" if is_torchs else colour
                axis.plot(
                    line.seconds_to_target, target, "o", color=colour, markerfacecolor=inside, markersize=5, zorder=4
                )
        axis.set_xscale("log")
        axis.set_title(f"{task}, {own[0].whole_nbytes / 1e6:.1f} MB, to {target:g}", fontsize=10)
        axis.set_xlabel("seconds")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("loss, mean of ten steps")
    axes[-1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.suptitle(caption, fontsize=10)
    figure.savefig(file, dpi=_PIXELS_AN_INCH)
