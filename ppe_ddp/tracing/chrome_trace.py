"""A timeline in Chrome's format for traces, which https://ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ppe_ddp.tracing.spans import COMPUTES, ENGINE, MESSAGES, lanes
from ppe_ddp.tracing.timeline_summary import summarize

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ppe_ddp.engine.event_log import Span
    from ppe_ddp.tracing.rank_record import RankRecord

# Times are in microseconds, which readers add up as floating-point numbers or cut to nanoseconds. Eighths are exact in
# both; of others, what begins where something ends can seem to begin before that, and is hidden or dropped.
_TICK_NS = 125
# Names of colours that the format has; Perfetto chooses its own, by the name of the event.
_COLOURS = {"wait": "terrible", "bucket": "good", "gather": "good", "mask": "grey", "vote": "grey"}


def write_chrome_trace(records: Sequence[RankRecord], path: Path) -> None:
    """Write what these ranks have recorded, by the clock of rank 0, to ``path``."""
    first = min((span.begin for record in records for span in record.spans), default=0)
    content = {
        "traceEvents": [event for record in records for event in _events(record, first)],
        "displayTimeUnit": "ms",
        "otherData": {
            "summary": str(summarize(records)),
            "clock offsets (ns)": {str(record.clock.rank): record.clock.offset_ns for record in records},
            "clock errors (ns)": {str(record.clock.rank): record.clock.error_ns for record in records},
        },
    }
    path.write_text(json.dumps(content, separators=(",", ":")))


def _events(record: RankRecord, first: int) -> Iterator[dict[str, Any]]:
    rank = record.clock.rank
    yield _about("process_name", rank, 0, {"name": f"rank {rank} ({record.host})"})
    yield _about("process_sort_index", rank, 0, {"sort_index": rank})
    # Events of one thread must lie inside of one another, which waits in a forward do, and messages do not.
    rows = [("computes", [span for span in record.spans if span.kind in COMPUTES])]
    rows.append(("engine", [span for span in record.spans if span.kind in ENGINE]))
    messages = lanes(span for span in record.spans if span.kind in MESSAGES)
    rows += [(f"messages {k}", row) for k, row in enumerate(messages)]
    for kind, name in (("node", "in the node"), ("wire", "on the wire")):
        parts = lanes(span for span in record.spans if span.kind == kind)
        rows += [(f"{name} {k}", row) for k, row in enumerate(parts)]
    for thread, (name, spans) in enumerate(rows):
        yield _about("thread_name", rank, thread, {"name": name})
        yield _about("thread_sort_index", rank, thread, {"sort_index": thread})
        for span in spans:
            yield _event(span, rank, thread, first)


def _about(name: str, rank: int, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": thread, "args": arguments}


def _event(span: Span, rank: int, thread: int, first: int) -> dict[str, Any]:
    begin, end = (span.begin - first) // _TICK_NS, (span.end - first) // _TICK_NS
    event: dict[str, Any] = {
        "ph": "X",
        "name": f"{span.kind} {span.name}".strip(),
        "cat": span.kind,
        "pid": rank,
        "tid": thread,
        "ts": begin / 8,
        "dur": (end - begin) / 8,
    }
    if span.nbytes:
        event["args"] = {"bytes": span.nbytes}
    if span.kind in _COLOURS:
        event["cname"] = _COLOURS[span.kind]
    return event
