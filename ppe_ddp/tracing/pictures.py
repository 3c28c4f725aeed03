"""The two pictures of a timeline: one step of some ranks, and which gradients existed.

Each rank has several rows in the picture of a step:

computes     forward, backward, optimizer; red while the rank waits
packs        the rank's own work for messages
sends        messages under way, in several rows if they overlap
in the node, on the wire    where they were, if the ranks of a node share memory and it took long enough to be seen
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ppe_ddp.engine.record import Span
from ppe_ddp.tracing.rank_record import (
    COMPUTES,
    ENGINE,
    MESSAGES,
    PARTS,
    Interval,
    Presence,
    RankRecord,
    lanes,
    merged,
    summarize,
    without,
)


class _Style(NamedTuple):
    """The style of a kind of span."""

    colour: str
    word: str = ""  # in the legend; empty for none
    is_dark: bool = False  # text on it is white


_STYLES = {
    "forward": _Style("#7db7e8", "forward"),
    "backward": _Style("#2e6fb0", "backward", True),
    "optimizer": _Style("#9467bd", "optimizer", True),
    "wait": _Style("#d62728", "waiting", True),
    "pack": _Style("#e69f00", "packing"),
    "encode": _Style("#ffc966", "encoding"),
    "decode": _Style("#c47f00", "decoding"),
    "write": _Style("#b9a44c", "writing back"),
    "bucket": _Style("#2a9d6f", "bucket under way", True),
    "gather": _Style("#17a2a2", "parameters under way", True),
    "mask": _Style("#9a9a9a", "mask, vote"),
    "vote": _Style("#9a9a9a"),
    "node": _Style("#a5d6a7", "its sums in the node"),
    "wire": _Style("#1b5e44", "on the wire", True),
}
_INCHES, _DPI, _FONT = 8.6, 170, 9.0
_MOST_RANKS = 8
_LANE, _GAP = 1.0, 0.7
_SEEN = 0.01  # the least part of the width that gets a row of its own
_PRESENCE = [
    ("#f3f3f3", "on no rank: not sent"),
    ("#f2c14e", "on another rank only: zero here"),
    ("#2e6fb0", "on this rank"),
]
_MOST_ROWS, _MOST_STEPS = 60, 100


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DPI, layout="constrained")


def _legend(figure: Any, entries: Sequence[tuple[str, str]], columns: int, **more: Any) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, edgecolor="#999" if more else colour, label=word) for colour, word in entries]
    style = {"handlelength": 0.9, "handletextpad": 0.4, "columnspacing": 1.1, "borderpad": 0.2, **more}
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, frameon=False, fontsize=_FONT, **style)


def draw_steps(panels: Mapping[str, Sequence[RankRecord]], path: Path) -> None:
    """Draw a typical step of each panel, one below the other on the same scale, and write it to ``path``."""
    drawings = [_Drawing(title, records) for title, records in panels.items()]
    longest = max(drawing.end - drawing.begin for drawing in drawings)
    heights = [drawing.height * 0.2 + 0.75 for drawing in drawings]
    figure = _figure(_INCHES, sum(heights) + 0.7)
    axes = figure.subplots(len(drawings), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights})[:, 0]
    for axis, drawing in zip(axes, drawings, strict=True):
        drawing.draw(axis, longest / 1e6)
    axes[-1].set_xlabel("milliseconds", fontsize=_FONT)
    kinds = {span.kind for drawing in drawings for _, _, row in drawing.rows for span in row}
    entries = [(style.colour, style.word) for kind, style in _STYLES.items() if kind in kinds and style.word]
    width = sum(len(word) + 4.3 for _, word in entries) * 0.56 * _FONT / 72
    _legend(figure, entries, len(entries) if width <= _INCHES else -(-len(entries) // 2))
    figure.savefig(path)


def _typical_step(records: Sequence[RankRecord]) -> list[Interval]:
    """Begin and end, on each rank, of the step whose length is nearest to the mean, among the second half of them."""
    count = min(len(one.backwards) for one in records)
    if not count:
        return [(min((s.begin for s in r.spans), default=0), max((s.end for s in r.spans), default=1)) for r in records]
    steps, mean = [_steps(one) for one in records], summarize(records).step_ms

    def distance(k: int) -> float:
        return abs(statistics.fmean(own[k][1] - own[k][0] for own in steps) / 1e6 - mean)

    number = min(range((count + 1) // 2, count - 1), key=distance, default=count - 1)
    return [own[number] for own in steps]


def _steps(one: RankRecord) -> list[Interval]:
    """Each step from its first forward to that of the next step; the last to the end of the record."""
    forwards = sorted(span.begin for span in one.spans if span.kind == "forward")
    begins, before = [], 0
    for begin, end in one.backwards:
        own = bisect_left(forwards, before)
        begins.append(min([begin, *forwards[own : own + 1]]))
        before = end
    return list(itertools.pairwise([*begins, max(span.end for span in one.spans)]))


class _Drawing:
    """One panel: rows, each with a name, a distance from the top, and spans."""

    def __init__(self, title: str, records: Sequence[RankRecord]) -> None:
        self._title = title
        self._records = records
        self.rows: list[tuple[str, float, list[Span]]] = []
        self.height = 0.0
        shown = records[:_MOST_RANKS]
        steps = _typical_step(shown)
        self._slow = summarize(records).slow
        self.begin, self.end = min(begin for begin, _ in steps), max(end for _, end in steps)
        for one, (begin, end) in zip(shown, steps, strict=True):
            # Messages of the step before are shown too, as this one may wait for them.
            own = [s for s in one.spans if begin <= s.begin < end]
            older = [s for s in one.spans if s.begin < begin < s.end and s.kind in MESSAGES + PARTS]
            self._add_rank(one.clock.rank, [*older, *own])

    def _add_rank(self, rank: int, spans: list[Span]) -> None:
        # Waits last, so that they are drawn over the forward or backward that they are in.
        computes = sorted((s for s in spans if s.kind in COMPUTES), key=lambda s: s.kind == "wait")
        self._add_row(f"rank {rank}{' (slow)' if rank in self._slow else ''} computes", computes)
        if engine := [span for span in spans if span.kind in ENGINE]:
            self._add_row("codes" if any(span.kind == "encode" for span in engine) else "packs", engine)
        for k, row in enumerate(lanes(span for span in spans if span.kind in MESSAGES) or [[]]):
            self._add_row("" if k else "sends", row)
        for kind, name in (("node", "in the node"), ("wire", "on the wire")):
            parts = merged(span for span in spans if span.kind == kind)
            if sum(span.end - span.begin for span in parts) > _SEEN * (self.end - self.begin):
                self._add_row(name, parts)
        self.height += _GAP

    def _add_row(self, name: str, spans: list[Span]) -> None:
        self.rows.append((name, self.height, spans))
        self.height += _LANE

    def draw(self, axis: Any, width: float) -> None:
        axis.set_xlim(0, width * 1.005)
        axis.set_ylim(self.height - _GAP + 0.3, -0.3)
        for _, top, spans in self.rows:
            waits = [(span.begin, span.end) for span in spans if span.kind == "wait"]
            for span in spans:
                self._draw_bar(axis, span, top, width, [] if span.kind == "wait" else waits)
        axis.set_yticks([top + 0.45 for _, top, _ in self.rows], [name for name, _, _ in self.rows], fontsize=_FONT)
        axis.tick_params(axis="y", length=0)
        axis.tick_params(axis="x", labelsize=_FONT)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.set_title(self._heading(), fontsize=_FONT + 1.5, loc="left")

    def _draw_bar(self, axis: Any, span: Span, top: float, width: float, covers: list[Interval]) -> None:
        style = _STYLES[span.kind]
        begin, end = self._ms(span.begin), self._ms(span.end)
        height = 0.9 if span.kind in COMPUTES + MESSAGES else 0.75
        edge = "white" if end - begin > width / 300 else "none"
        axis.barh(top + 0.45, end - begin, height, left=begin, color=style.colour, edgecolor=edge, linewidth=0.6)
        free = max(without((span.begin, span.end), covers), key=lambda part: part[1] - part[0], default=(0, 0))
        begin, end = (self._ms(moment) for moment in free)
        characters = (end - begin) / width * (_INCHES - 1.4) / (_FONT - 1) * 72 / 0.56
        text = next((text for text in _texts(span) if len(text) + 1 <= characters), "")
        if text:
            colour = "white" if style.is_dark else "black"
            place = {"ha": "center", "va": "center", "clip_on": True}
            axis.text((begin + end) / 2, top + 0.47, text, fontsize=_FONT - 1, color=colour, **place)

    def _ms(self, moment: int) -> float:
        return (min(max(moment, self.begin), self.end) - self.begin) / 1e6

    def _heading(self) -> str:
        summary = summarize(self._records)
        head = f"{self._title}: " if self._title else ""
        if summary.hidden is None:
            return f"{head}one step, nothing is sent"
        left_out = len(self._records) - _MOST_RANKS
        more = f"; {left_out} more ranks are not drawn" if left_out > 0 else ""
        return (
            f"{head}mean step {summary.step_ms:.1f} ms, {summary.waiting_ms:.1f} only waiting; "
            f"{summary.hidden:.0%} of the communication is hidden{more}"
        )


def _texts(span: Span) -> list[str]:
    """Texts for a bar, the longest first."""
    size = f"{span.nbytes / 1e6:.1f} MB" if span.nbytes >= 1e5 else f"{span.nbytes / 1e3:.0f} kB"
    if span.kind in ENGINE:
        return [span.name] if span.kind != "write" else []
    texts = {
        "bucket": [f"bucket {span.name}: {size}", f"{span.name}: {size}", size, span.name],
        "gather": [f"gather {span.name}: {size}", size, span.name],
        "wait": [f"waits {span.name}", "waits"],
        "mask": [f"mask: {span.name}", "mask"],
        "wire": [size],
        "node": [],
    }
    return texts.get(span.kind, [span.kind])


def draw_presence(records: Sequence[RankRecord], path: Path) -> None:
    """Draw a heat map for each wrapper: which parameters had a gradient on which rank, step by step.

    The first is written to ``path``, others to numbered files beside it. If there are too many parameters, those of a
    submodule share a row: blue if this rank had any of their gradients, else yellow if another rank had one.
    """
    maps: dict[tuple[tuple[str, ...], int], list[tuple[int, Presence]]] = {}
    for one in records:
        for k, presence in enumerate(one.presence):
            twins = sum(other.names == presence.names for other in one.presence[:k])
            maps.setdefault((presence.names, twins), []).append((one.clock.rank, presence))
    for number, ranks in enumerate(maps.values()):
        _draw_heat_map(ranks[:_MOST_RANKS], path if not number else path.with_stem(f"{path.stem}-{number}"))


def _draw_heat_map(ranks: Sequence[tuple[int, Presence]], path: Path) -> None:
    from matplotlib.colors import ListedColormap

    # A rank may have taken fewer steps; the rest of its panel is white.
    rows, steps = group_names(ranks[0][1].names), max(len(presence.local) for _, presence in ranks)
    first = max(0, steps - _MOST_STEPS)
    figure = _figure(10, 1.3 + 0.17 * len(rows))
    axes = figure.subplots(1, len(ranks), squeeze=False, sharey=True)[0]
    colours = ListedColormap([colour for colour, _ in _PRESENCE])
    for axis, (rank, presence) in zip(axes, ranks, strict=True):
        own = range(first, len(presence.local))
        picture = [[_colour(presence, step, members) for step in own] for _, members in rows]
        extent = (first - 0.5, own.stop - 0.5, len(rows) - 0.5, -0.5)
        if own:
            axis.imshow(picture, cmap=colours, vmin=0, vmax=2, aspect="auto", interpolation="none", extent=extent)
        axis.set(xlim=(first - 0.5, steps - 0.5), ylim=(len(rows) - 0.5, -0.5))
        axis.set_title(f"rank {rank}", fontsize=_FONT + 1, loc="left")
        axis.set_xlabel("step", fontsize=_FONT)
        axis.tick_params(labelsize=_FONT, length=0)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.hlines([k + 0.5 for k in range(len(rows) - 1)], first - 0.5, steps - 0.5, color="white", linewidth=0.5)
    axes[0].set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=_FONT - 1.5)
    _legend(figure, _PRESENCE[::-1], 3, title="Gradients", title_fontsize=_FONT + 1.5, alignment="left")
    figure.savefig(path)


def _colour(presence: Presence, step: int, members: Sequence[int]) -> int:
    if any(presence.local[step][i] == "1" for i in members):
        return 2
    return 1 if any(presence.agreed[step][i] == "1" for i in members) else 0


def group_names(names: Sequence[str]) -> list[tuple[str, list[int]]]:
    """The rows of a heat map, each with its parameters: one for each parameter, or submodule if these are too many."""
    rows: dict[str, list[int]] = {name: [i] for i, name in enumerate(names)}
    for depth in sorted({name.count(".") for name in names}, reverse=True):
        if len(rows) <= _MOST_ROWS:
            break
        rows = {}
        for i, name in enumerate(names):
            parts = name.split(".")
            key = name if len(parts) <= depth else ".".join(parts[:depth]) + ".*" if depth else "*"
            rows.setdefault(key, []).append(i)
    return list(rows.items())
