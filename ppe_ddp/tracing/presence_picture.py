"""The heat map of gradients: which parameters had one on which rank, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ppe_ddp.tracing.rank_record import Presence, RankRecord

_NOWHERE, _ELSEWHERE, _HERE = 0, 1, 2
_COLOURS = ["#f3f3f3", "#f2c14e", "#2e6fb0"]
_WORDS = ["on no rank: not sent", "on another rank only: zero here", "on this rank"]
_MOST_ROWS, _MOST_RANKS, _MOST_STEPS = 60, 8, 100
_DPI, _FONT = 150, 9.0


def draw_presence(records: Sequence[RankRecord], path: Path) -> None:
    """Draw the heat map of each module; of the first to ``path``, of others to files with numbers.

    Parameters of one module of the tree share a row where there are too many to be read; the row has the colour of the
    one that is most at hand.
    """
    for number, presence in enumerate(records[0].presence):
        others = [next((p for p in record.presence if p.names == presence.names), None) for record in records]
        shown = [(r.clock.rank, p) for r, p in zip(records, others, strict=True) if p is not None][:_MOST_RANKS]
        _draw(shown, path if not number else path.with_stem(f"{path.stem}-{number}"))


def _draw(ranks: Sequence[tuple[int, Presence]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    names = ranks[0][1].names
    rows = group_names(names)
    steps = len(ranks[0][1].local)
    first = max(0, steps - _MOST_STEPS)
    figure = Figure(figsize=(10, 1.3 + 0.17 * len(rows)), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(ranks), squeeze=False, sharey=True)[0]
    for axis, (rank, presence) in zip(axes, ranks, strict=True):
        picture = [[_colour(presence, step, members) for step in range(first, steps)] for _, members in rows]
        extent = (first - 0.5, steps - 0.5, len(rows) - 0.5, -0.5)
        colours: Any = ListedColormap(_COLOURS)
        axis.imshow(picture, cmap=colours, vmin=0, vmax=2, aspect="auto", interpolation="none", extent=extent)
        axis.set_title(f"rank {rank}", fontsize=_FONT + 1, loc="left")
        axis.set_xlabel("step", fontsize=_FONT)
        axis.tick_params(labelsize=_FONT, length=0)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_yticks(range(1, len(rows)), minor=False)
        axis.hlines([k + 0.5 for k in range(len(rows) - 1)], first - 0.5, steps - 0.5, color="white", linewidth=0.5)
    axes[0].set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=_FONT - 1.5)
    handles = [Patch(facecolor=c, edgecolor="#999", label=w) for c, w in zip(_COLOURS, _WORDS, strict=True)]
    title = {"title": "Gradients", "title_fontsize": _FONT + 1.5, "alignment": "left"}
    figure.legend(handles=handles[::-1], loc="outside upper left", ncols=3, frameon=False, fontsize=_FONT, **title)
    figure.savefig(path)


def _colour(presence: Presence, step: int, members: Sequence[int]) -> int:
    local, agreed = presence.local[step], presence.agreed[step]
    if any(local[i] == "1" for i in members):
        return _HERE
    return _ELSEWHERE if any(agreed[i] == "1" for i in members) else _NOWHERE


def group_names(names: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Rows of a picture: one a parameter, or where these are too many one a module, as deep in the tree as fits."""
    depths = sorted({name.count(".") for name in names}, reverse=True)
    rows: dict[str, list[int]] = {name: [i] for i, name in enumerate(names)}
    for depth in depths:
        if len(rows) <= _MOST_ROWS:
            break
        rows = {}
        for i, name in enumerate(names):
            parts = name.split(".")
            key = name if len(parts) <= depth else ".".join(parts[:depth]) + ".*" if depth else "*"
            rows.setdefault(key, []).append(i)
    return list(rows.items())
