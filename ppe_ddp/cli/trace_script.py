"""Runs a script, and records a timeline of it: what each rank computes and sends.

The script is run as python would run it, on every rank that a launcher starts.
FOLDER gets timeline.json for https://ui.perfetto.dev, timeline.png (one step),
gradients.png (which parameters had a gradient on which rank) and summary.txt.
Where the machines share no file system, bring all rank-N.json into one folder,
and call `python -m ppe_ddp timeline FOLDER`.

  python -m ppe_ddp trace --out folder train.py --epochs 1
  mpirun -n 2 python -m ppe_ddp trace train.py
  torchrun --nproc_per_node=2 -m ppe_ddp trace -m package.train
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ppe_ddp.cli.arguments import folder

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments to ``parser``."""
    import argparse

    parser.add_argument("--out", type=folder, default="timeline", metavar="FOLDER", help="default: timeline")
    parser.add_argument("--no-pictures", action="store_true", help="only timeline.json and summary.txt")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="what to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own")


def run(arguments: argparse.Namespace) -> int:
    """Runs the script.

    Returns:
        0 where it ran to its end; 2 where there is no such script, or pictures cannot be drawn. What the script raises,
        or leaves by, goes on.
    """
    from ppe_ddp.tracing import timeline
    from ppe_ddp.tracing.timeline_folder import check_pictures

    script = str(arguments.script)
    try:
        if not arguments.no_pictures:
            check_pictures()
        if not arguments.module and not Path(script).is_file():
            raise ImportError(f"there is no file {script!r}")
    except ImportError as error:
        print(f"ppe_ddp: {error}", file=sys.stderr)
        return 2
    sys.argv = [script, *arguments.arguments]
    # As python has it: the folder of the script, or the current one for a module.
    sys.path.insert(0, os.getcwd() if arguments.module else str(Path(script).absolute().parent))
    out = Path(arguments.out).absolute()
    with timeline(out, pictures=not arguments.no_pictures):
        if arguments.module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    return 0
