"""The picture of a timeline: one step, some rows a rank, what each bar is written on it or beside it.

computes     forward, backward, optimizer; red where the rank waits
packs        this rank's own work for messages
sends        the messages, side by side where several are under way
in the node, on the wire    what of that was where, if memory is shared and it takes long enough to be seen
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ppe_ddp.tracing.spans import COMPUTES, ENGINE, MESSAGES, PARTS, lanes, merged, without
from ppe_ddp.tracing.timeline_summary import step_times, summarize

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ppe_ddp.engine.event_log import Span
    from ppe_ddp.tracing.rank_record import RankRecord
    from ppe_ddp.tracing.spans import Interval

_COLOURS = {
    "forward": "#7db7e8",
    "backward": "#2e6fb0",
    "optimizer": "#9467bd",
    "wait": "#d62728",
    "pack": "#e69f00",
    "encode": "#ffc966",
    "decode": "#c47f00",
    "write": "#b9a44c",
    "bucket": "#2a9d6f",
    "gather": "#17a2a2",
    "mask": "#9a9a9a",
    "vote": "#9a9a9a",
    "node": "#a5d6a7",
    "wire": "#1b5e44",
}
_WORDS = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "wait": "waiting",
    "pack": "packing",
    "encode": "encoding",
    "decode": "decoding",
    "write": "writing back",
    "bucket": "bucket under way",
    "gather": "parameters under way",
    "mask": "mask, vote",
    "node": "its sums in the node",
    "wire": "on the wire",
}
_DARK = {"backward", "wait", "optimizer", "bucket", "gather", "wire"}
_INCHES, _DPI, _FONT = 8.6, 170, 9.0
_SMALL = ("mask", "vote")
_MOST_RANKS = 8
_LANE, _GAP = 1.0, 0.7
_SEEN = 0.01  # of the width: parts that are shorter altogether have no row


@dataclass(frozen=True)
class Panel:
    """Some ranks that are drawn together.

    Attributes:
        title: Above them; empty for none.
        records: By one clock.
    """

    title: str
    records: Sequence[RankRecord]


def draw_timeline(panels: Sequence[Panel], path: Path) -> None:
    """Draw a typical step of each panel, one below the other on one scale, and write it to ``path``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawings = [_Drawing(panel) for panel in panels]
    longest = max(drawing.end - drawing.begin for drawing in drawings)
    heights = [drawing.height * 0.2 + 0.75 for drawing in drawings]
    figure = Figure(figsize=(_INCHES, sum(heights) + 0.7), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights})[:, 0]
    for axis, drawing in zip(axes, drawings, strict=True):
        drawing.draw(axis, longest / 1e6)
    axes[-1].set_xlabel("milliseconds", fontsize=_FONT)
    kinds = {span.kind for drawing in drawings for span in drawing.spans}
    _explain(figure, [kind for kind in _WORDS if kind in kinds])
    figure.savefig(path)


def _explain(figure: Any, kinds: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    style = {"handlelength": 0.9, "handletextpad": 0.4, "columnspacing": 1.1, "borderpad": 0.2}
    handles = [Patch(color=_COLOURS[kind], label=_WORDS[kind]) for kind in kinds]
    width = sum(len(_WORDS[kind]) + 4.3 for kind in kinds) * 0.56 * _FONT / 72
    columns = len(handles) if width <= _INCHES else -(-len(handles) // 2)
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, frameon=False, fontsize=_FONT, **style)


def _typical_step(records: Sequence[RankRecord]) -> list[Interval]:
    """Begin and end, on each rank, of the step that is nearest to what is written above it, in length and in waiting.

    The first steps are not typical: buckets are made anew, and an order of arrival is learned.
    """
    count = min(len(record.backwards) for record in records)
    if not count:
        return [(min((s.begin for s in r.spans), default=0), max((s.end for s in r.spans), default=1)) for r in records]
    steps = [_steps(record) for record in records]
    waiting = [[0, *(step.waiting for step in step_times(record))] for record in records]
    means = summarize(records)

    def distance(k: int) -> float:
        duration = statistics.fmean(own[k][1] - own[k][0] for own in steps)
        waits = statistics.fmean(own[k] for own in waiting)
        return abs(duration / 1e6 - means.step_ms) + abs(waits / 1e6 - means.exposed_ms)

    number = min(range((count + 1) // 2, count - 1), key=distance, default=count - 1)
    return [own[number] for own in steps]


def _steps(record: RankRecord) -> list[Interval]:
    """Each step, from its first forward to that of the next, so that it is as long as it seems; the last to the end."""
    forwards = sorted(span.begin for span in record.spans if span.kind == "forward")
    begins, before = [], 0
    for begin, end in record.backwards:
        own = bisect_left(forwards, before)
        begins.append(min([begin, *forwards[own : own + 1]]))
        before = end
    return list(itertools.pairwise([*begins, max(span.end for span in record.spans)]))


class _Drawing:
    """The rows of one panel."""

    def __init__(self, panel: Panel) -> None:
        self._panel = panel
        self._rows: list[tuple[str, float, list[Span]]] = []
        self.height = 0.0
        shown = panel.records[:_MOST_RANKS]
        steps = _typical_step(shown)
        self.begin, self.end = min(begin for begin, _ in steps), max(end for _, end in steps)
        for record, (begin, end) in zip(shown, steps, strict=True):
            # Neighbouring steps would only puzzle, but for messages, which this one may wait for.
            own = [span for span in record.spans if begin <= span.begin < end]
            older = [span for span in record.spans if span.begin < begin < span.end and span.kind in MESSAGES + PARTS]
            self._add_rank(record, [*older, *own])
        self.spans = [span for _, _, row in self._rows for span in row]

    def _add_rank(self, record: RankRecord, spans: list[Span]) -> None:
        rank = record.clock.rank
        # What waits inside of a forward or backward lies over it.
        computes = sorted((s for s in spans if s.kind in COMPUTES), key=lambda s: s.kind == "wait")
        self._add_row(f"rank {rank} computes", computes)
        if engine := [span for span in spans if span.kind in ENGINE]:
            self._add_row("codes" if any(span.kind == "encode" for span in engine) else "packs", engine)
        messages = [span for span in spans if span.kind in MESSAGES]
        rows = lanes(span for span in messages if span.kind not in _SMALL) or [[]]
        for one in (span for span in messages if span.kind in _SMALL):
            free = (row for row in rows if all(one.end <= other.begin or one.begin >= other.end for other in row))
            row = next(free, None)
            if row is None:
                rows.append(row := [])
            row.append(one)
        for k, row in enumerate(rows):
            self._add_row("" if k else "sends", row)
        for kind, name in (("node", "in the node"), ("wire", "on the wire")):
            parts = merged(span for span in spans if span.kind == kind)
            if sum(span.end - span.begin for span in parts) > _SEEN * (self.end - self.begin):
                self._add_row(name, parts)
        self.height += _GAP

    def _add_row(self, name: str, spans: list[Span]) -> None:
        self._rows.append((name, self.height, spans))
        self.height += _LANE

    def draw(self, axis: Any, longest_ms: float) -> None:
        """Draw it on ``axis``, which is as wide as the longest step."""
        axis.set_xlim(0, longest_ms * 1.005)
        axis.set_ylim(self.height - _GAP + 0.3, -0.3)
        for _, top, spans in self._rows:
            waits = [(span.begin, span.end) for span in spans if span.kind == "wait"]
            for span in spans:
                self._draw_bar(axis, span, top, longest_ms, [] if span.kind == "wait" else waits)
        axis.set_yticks([top + 0.45 for _, top, _ in self._rows], [name for name, _, _ in self._rows], fontsize=_FONT)
        axis.tick_params(axis="y", length=0)
        axis.tick_params(axis="x", labelsize=_FONT)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
        axis.set_title(self._title(), fontsize=_FONT + 1.5, loc="left")

    def _draw_bar(self, axis: Any, span: Span, top: float, longest_ms: float, covers: list[Interval]) -> None:
        begin = (max(span.begin, self.begin) - self.begin) / 1e6
        end = (min(span.end, self.end) - self.begin) / 1e6
        height = 0.9 if span.kind in COMPUTES + MESSAGES else 0.75
        edge = "white" if end - begin > longest_ms / 300 else "none"
        axis.barh(top + 0.45, end - begin, height, left=begin, color=_COLOURS[span.kind], edgecolor=edge, linewidth=0.6)
        free = max(without((span.begin, span.end), covers), key=lambda part: part[1] - part[0], default=(0, 0))
        begin, end = (max(free[0], self.begin) - self.begin) / 1e6, (min(free[1], self.end) - self.begin) / 1e6
        text = _fitting(_texts(span), (end - begin) / longest_ms)
        if text:
            colour = "white" if span.kind in _DARK else "black"
            middle = {"ha": "center", "va": "center"}
            axis.text((begin + end) / 2, top + 0.47, text, fontsize=_FONT - 1, color=colour, clip_on=True, **middle)

    def _title(self) -> str:
        summary = summarize(self._panel.records)
        head = f"{self._panel.title}: " if self._panel.title else ""
        if summary.hidden is None:
            return f"{head}one step, nothing is sent"
        left_out = len(self._panel.records) - _MOST_RANKS
        more = f"; {left_out} more ranks are not drawn" if left_out > 0 else ""
        return (
            f"{head}mean step {summary.step_ms:.1f} ms, {summary.exposed_ms:.1f} only waiting; "
            f"{summary.hidden:.0%} of the communication is hidden{more}"
        )


def _texts(span: Span) -> list[str]:
    """What may be written on a bar, the longest first."""
    megabytes = f"{span.nbytes / 1e6:.1f} MB" if span.nbytes >= 1e5 else f"{span.nbytes / 1e3:.0f} kB"
    if span.kind == "bucket":
        return [f"bucket {span.name}: {megabytes}", f"{span.name}: {megabytes}", megabytes, span.name]
    if span.kind == "gather":
        return [f"gather {span.name}: {megabytes}", megabytes, span.name]
    if span.kind == "wait":
        return [f"waits {span.name}", "waits"]
    if span.kind == "mask":
        return [f"mask: {span.name}", "mask"]
    if span.kind == "wire":
        return [megabytes]
    if span.kind == "node":
        return []
    if span.kind in ENGINE:
        return [span.name] if span.kind != "write" else []
    return [span.kind]


def _fitting(texts: Sequence[str], share: float) -> str:
    """The first text that fits on a bar of this share of the width; none where none does."""
    characters = share * (_INCHES - 1.4) / (_FONT - 1) * 72 / 0.56
    return next((text for text in texts if len(text) + 1 <= characters), "")
