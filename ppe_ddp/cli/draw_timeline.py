"""Draws a timeline from the records of its ranks, a file rank-N.json each.

What `with ppe_ddp.timeline(FOLDER)` and `python -m ppe_ddp trace` do by
themselves, where the ranks share a file system.

  python -m ppe_ddp timeline folder
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the records are")
    parser.add_argument("--no-pictures", action="store_true", help="only timeline.json and summary.txt")


def run(arguments: argparse.Namespace) -> int:
    """Draws it, and prints the summary.

    Returns:
        0; 2 where records are missing, or pictures cannot be drawn.
    """
    from ppe_ddp.tracing.timeline_folder import check_pictures, draw, read_records

    try:
        if not arguments.no_pictures:
            check_pictures()
        summary = draw(arguments.folder, read_records(arguments.folder), pictures=not arguments.no_pictures)
    except (ImportError, ValueError) as error:
        print(f"ppe_ddp: {error}", file=sys.stderr)
        return 2
    print(summary)
    return 0
