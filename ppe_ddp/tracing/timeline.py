"""``timeline()``: every rank writes its record into a folder; the last one makes files and pictures of all records."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppe_ddp.engine.record import Span
from ppe_ddp.tracing.pictures import draw_presence, draw_steps
from ppe_ddp.tracing.rank_record import (
    COMPUTES,
    ENGINE,
    MESSAGES,
    ClockOffset,
    RankRecord,
    Recording,
    TimelineSummary,
    lanes,
    record,
    summarize,
)

_NAMES = "rank-{}.json"
# Readers of Chrome's format add up microseconds as floating-point numbers. Eighths are exact; with other fractions a
# span can seem to begin before the end of the one before, and is hidden or dropped.
_TICK_NS = 125


@contextmanager
def timeline(folder: str | os.PathLike[str], *, pictures: bool = True) -> Generator[None, None, None]:
    """Record what each rank does in the block, and draw it. All ranks enter the block together.

    It records forward, backward and optimizer; in each synchronized backward the mask, the vote and each bucket
    (packed, encoded, under way, decoded); the all-gathers of a ``DistributedOptimizer``; and when a rank only waits.
    The ranks compare their clocks as they enter, or when the first wrapper is made if there is no process group yet.
    Each rank writes a ``rank-N.json``. From these the last rank to leave makes

    - ``timeline.json`` for https://ui.perfetto.dev,
    - ``timeline.png``, one step of all ranks,
    - ``gradients.png``, which parameters had a gradient on which rank in which step,
    - ``summary.txt``, with the part of the communication that is hidden and the error of the clocks.

    If the ranks do not share a file system, copy the records into one folder, and call
    ``python -m ppe_ddp timeline FOLDER``. Nothing is sent at the end, so a rank may leave by an exception.

    It costs a few microseconds a bucket. Times are those of the host; for a GPU's use ``torch.profiler``. The newest
    10,000 backwards are kept.

    Args:
        folder: Made if it does not exist. Files of an earlier recording are replaced.
        pictures: Draw pictures, which needs matplotlib.

    Raises:
        ImportError: At entry, if ``pictures`` is True and matplotlib is not installed.
        UnusableError: A timeline is being recorded in this process already.
    """
    if pictures:
        check_pictures()
    path = Path(folder).absolute()
    path.mkdir(parents=True, exist_ok=True)
    recording: Recording | None = None
    try:
        with record() as recording:
            yield
    finally:
        if recording is not None:
            own = recording.result()
            own.write(path / _NAMES.format(own.clock.rank))
            _draw_if_last(path, own.clock, pictures=pictures)


def check_pictures() -> None:
    """Raise ImportError, which names the extra to install, if pictures cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            'pictures of a timeline need matplotlib: pip install "ppe-ddp[pictures]", or pass pictures=False '
            "(python -m ppe_ddp trace --no-pictures) for timeline.json and summary.txt alone"
        )


def _draw_if_last(folder: Path, clock: ClockOffset, *, pictures: bool) -> None:
    """Draw if all ranks have written. Two ranks that finish at the same moment may both draw the same."""
    records = []
    for rank in range(clock.world_size):
        try:
            records.append(RankRecord.read(folder / _NAMES.format(rank)))
        except (FileNotFoundError, ValueError):  # not written yet, or a file of another version
            return
    if all(one.clock.job == clock.job for one in records):  # none is left from an earlier job
        draw(folder, records, pictures=pictures)


def read_records(folder: Path) -> list[RankRecord]:
    """The records of all ranks of a job, from ``folder``; ValueError if some are missing or of another job."""
    records = [RankRecord.read(path) for path in sorted(folder.glob(_NAMES.format("*")))]
    if not records:
        raise ValueError(f"{folder} has no file rank-0.json: no timeline was recorded there")
    records.sort(key=lambda one: one.clock.rank)
    first = records[0].clock
    own = {one.clock.rank: one for one in records if one.clock.job == first.job}
    if missing := sorted(set(range(first.world_size)) - set(own)):
        strangers = [one.clock.rank for one in records if one.clock.job != first.job]
        others = f"; those of ranks {strangers} are of another recording" if strangers else ""
        raise ValueError(f"{folder} lacks the records of ranks {missing} of {first.world_size}{others}")
    return list(own.values())


def draw(folder: Path, records: Sequence[RankRecord], *, pictures: bool) -> TimelineSummary:
    """Make files and pictures in ``folder`` from the records of all ranks; returns the numbers."""
    records = [one.on_one_clock() for one in records]
    summary = summarize(records)
    write_chrome_trace(records, folder / "timeline.json")
    (folder / "summary.txt").write_text(f"{summary}\n")
    if pictures:
        draw_steps({"": records}, folder / "timeline.png")
        draw_presence(records, folder / "gradients.png")
    return summary


def write_chrome_trace(records: Sequence[RankRecord], path: Path) -> None:
    """Write a file for https://ui.perfetto.dev and chrome://tracing; the records have one clock."""
    first = min((span.begin for one in records for span in one.spans), default=0)
    content = {
        "traceEvents": [event for one in records for event in _events(one, first)],
        "displayTimeUnit": "ms",
        "otherData": {"summary": str(summarize(records)), "clocks": [vars(one.clock) for one in records]},
    }
    path.write_text(json.dumps(content, separators=(",", ":")))


def _events(one: RankRecord, first: int) -> Iterator[dict[str, Any]]:
    """The events of a rank; each row is a thread of the trace."""

    def of(*kinds: str) -> list[Span]:
        return [span for span in one.spans if span.kind in kinds]

    # Events of one thread must be nested or apart. Waits lie inside of a forward or backward; messages overlap.
    rows = [("computes", of(*COMPUTES)), ("engine", of(*ENGINE))]
    for name, kinds in (("messages", MESSAGES), ("in the node", ("node",)), ("on the wire", ("wire",))):
        rows += [(f"{name} {k}", row) for k, row in enumerate(lanes(of(*kinds)))]
    rank = one.clock.rank
    yield _about("process_name", rank, 0, {"name": f"rank {rank} ({one.host})"})
    yield _about("process_sort_index", rank, 0, {"sort_index": rank})
    for thread, (name, spans) in enumerate(rows):
        yield _about("thread_name", rank, thread, {"name": name})
        yield _about("thread_sort_index", rank, thread, {"sort_index": thread})
        for span in spans:
            begin, end = (span.begin - first) // _TICK_NS, (span.end - first) // _TICK_NS
            place = {"ph": "X", "pid": rank, "tid": thread, "ts": begin / 8, "dur": (end - begin) / 8}
            event = {"name": f"{span.kind} {span.name}".strip(), "cat": span.kind, **place}
            yield {**event, "args": {"bytes": span.nbytes}} if span.nbytes else event


def _about(name: str, rank: int, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": thread, "args": arguments}
