"""The folder of a timeline: one record a rank, and what is made of them once they are all there."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from ppe_ddp.tracing.chrome_trace import write_chrome_trace
from ppe_ddp.tracing.rank_record import RankRecord
from ppe_ddp.tracing.timeline_summary import TimelineSummary, summarize

if TYPE_CHECKING:
    from pathlib import Path

    from ppe_ddp.tracing.clock_offset import ClockOffset

_NAMES = "rank-{}.json"


def check_pictures() -> None:
    """Raise ImportError where pictures cannot be drawn, and name the extra to install."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            'pictures of a timeline need matplotlib: pip install "ppe-ddp[pictures]", or pass pictures=False '
            "(python -m ppe_ddp trace --no-pictures) for timeline.json and summary.txt alone"
        )


def record_file(folder: Path, rank: int) -> Path:
    """Where ``rank`` writes what it has recorded."""
    return folder / _NAMES.format(rank)


def publish(folder: Path, clock: ClockOffset, *, pictures: bool) -> None:
    """Make files and pictures, if this rank is the last of its job to have written its record.

    Two that finish at the same moment may both find themselves the last, and write the same.
    """
    records = []
    for rank in range(clock.world_size):
        try:
            record = RankRecord.read(record_file(folder, rank))
        except (FileNotFoundError, ValueError):  # nothing of this rank yet, or of another version
            return
        if record.clock.job != clock.job:
            return  # what an earlier job has left
        records.append(record)
    draw(folder, records, pictures=pictures)


def read_records(folder: Path) -> list[RankRecord]:
    """The records in ``folder`` of the ranks of one job.

    Raises:
        ValueError: There are none, or they are not all of one job, or some are missing.
    """
    records = [RankRecord.read(path) for path in sorted(folder.glob(_NAMES.format("*")))]
    if not records:
        raise ValueError(f"{folder} has no file rank-0.json: no timeline was recorded there")
    records.sort(key=lambda record: record.clock.rank)
    newest = records[0].clock
    strangers = [record.clock.rank for record in records if record.clock.job != newest.job]
    found = {record.clock.rank for record in records if record.clock.job == newest.job}
    if missing := sorted(set(range(newest.world_size)) - found):
        others = f"; those of ranks {strangers} are of another recording" if strangers else ""
        raise ValueError(f"{folder} lacks the records of ranks {missing} of {newest.world_size}{others}")
    return [record for record in records if record.clock.job == newest.job]


def draw(folder: Path, records: list[RankRecord], *, pictures: bool) -> TimelineSummary:
    """Make files and pictures in ``folder`` of the records of all ranks."""
    records = [record.on_one_clock() for record in records]
    summary = summarize(records)
    write_chrome_trace(records, folder / "timeline.json")
    (folder / "summary.txt").write_text(f"{summary}\n")
    if pictures:
        from ppe_ddp.tracing.presence_picture import draw_presence
        from ppe_ddp.tracing.timeline_picture import Panel, draw_timeline

        draw_timeline([Panel("", records)], folder / "timeline.png")
        draw_presence(records, folder / "gradients.png")
    return summary
