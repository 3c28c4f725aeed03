"""The commands that draw timelines: ``trace`` runs a script, ``timeline`` reads the records of earlier runs."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

from ppe_ddp.cli.command_line import fail
from ppe_ddp.tracing.timeline import check_pictures, draw, read_records, timeline


def _add_no_pictures(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-pictures", action="store_true", help="only timeline.json and summary.txt")


class TraceScript:
    """Runs a script, and records a timeline of it: what each rank computes and sends.

    It runs the script as python would, on every rank that a launcher starts. It
    writes timeline.json for https://ui.perfetto.dev, timeline.png (one step),
    gradients.png (which parameters had a gradient on which rank) and summary.txt
    to FOLDER. If the machines do not share a file system, copy all rank-N.json
    into one folder, and call `python -m ppe_ddp timeline FOLDER`.

      python -m ppe_ddp trace --out folder train.py --epochs 1
      mpirun -n 2 python -m ppe_ddp trace train.py
      torchrun --nproc_per_node=2 -m ppe_ddp trace -m package.train
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--out", type=Path, default="timeline", metavar="FOLDER", help="default: timeline")
        _add_no_pictures(parser)
        parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
        parser.add_argument("script", help="what to run")
        parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own")

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        """Run the script; 2 if there is none, or pictures cannot be drawn. Its exceptions and exit are passed on."""
        script, folder = str(arguments.script), Path(arguments.out).absolute()
        try:
            if not arguments.no_pictures:
                check_pictures()
            # As python does: the folder of the script, or the current one for a module.
            sys.path.insert(0, os.getcwd() if arguments.module else str(Path(script).absolute().parent))
            if arguments.module and find_spec(script.partition(".")[0]) is None:
                raise ImportError(f"there is no module {script!r}")
            if not arguments.module and not Path(script).is_file():
                raise ImportError(f"there is no file {script!r}")
            folder.mkdir(parents=True, exist_ok=True)
        except (ImportError, OSError) as error:
            return fail(error, 2)
        sys.argv = [script, *arguments.arguments]
        with timeline(folder, pictures=not arguments.no_pictures):
            if arguments.module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
        return 0


class DrawTimeline:
    """Draws a timeline from the records of its ranks, a file rank-N.json each.

    `with ppe_ddp.timeline(FOLDER)` and `python -m ppe_ddp trace` do so by
    themselves if the ranks share a file system.

      python -m ppe_ddp timeline folder
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the records are")
        _add_no_pictures(parser)

    @staticmethod
    def run(arguments: argparse.Namespace) -> int:
        """Draw it, and print the summary; 2 if records are missing, or pictures cannot be drawn."""
        try:
            if not arguments.no_pictures:
                check_pictures()
            print(draw(arguments.folder, read_records(arguments.folder), pictures=not arguments.no_pictures))
        except (ImportError, ValueError) as error:
            return fail(error, 2)
        return 0
