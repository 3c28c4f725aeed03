"""Parts that commands share: types of arguments, texts in columns, and reports as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TextIO

import torch
from rich.console import Console
from rich.table import Table

import ppe_ddp

WIDTH = 80


def count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"should be a whole number from 1, but it is {text!r}")
    return int(text)


def size_of(text: str) -> int:
    """A number of bytes from 1, with K, M or G for KiB, MiB or GiB."""
    match = re.fullmatch(r"([1-9][0-9]*)([KMG]?)", text.upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"should be a number of bytes such as 4, 64K or 32M, but it is {text!r}")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def output(text: str) -> str:
    """A file in a folder that exists, or - for stdout; checked before anything is measured."""
    path = Path(text)
    if text == "-":
        return text
    if not path.parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists")
    is_there = path.exists()
    try:
        path.open("a").close()
        if not is_there:
            path.unlink(missing_ok=True)  # another rank may have done so
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {error.strerror}") from None
    return text


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json`` to ``parser``."""
    text = "write all that was found there; - for stdout, with the text on stderr"
    parser.add_argument("--json", type=output, metavar="FILE", help=text)


def fail(error: object, code: int) -> int:
    """Print an error on stderr. Returns the exit code."""
    print(f"ppe_ddp: {error}", file=sys.stderr)
    return code


def versions() -> dict[str, str]:
    """The versions of ppe_ddp, torch, Python, and pytorch-pfn-extras if it is installed."""
    found = {"ppe_ddp": ppe_ddp.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
    try:
        return {**found, "pytorch_pfn_extras": metadata.version("pytorch-pfn-extras")}
    except metadata.PackageNotFoundError:
        return found


def machine_facts() -> dict[str, str | int]:
    """The kind of processor and system, and the number of cores for this process."""
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cpu, cores = found[1] if found else platform.processor() or "unknown", len(os.sched_getaffinity(0))
    return {"cores": cores, "cpu": cpu, "system": platform.system(), "architecture": platform.machine()}


def told(arguments: argparse.Namespace) -> TextIO:
    """The file for text that people read: stdout, or stderr if the report goes to stdout."""
    return sys.stderr if arguments.json == "-" else sys.stdout


def write_report(arguments: argparse.Namespace, command: str, **content: object) -> None:
    """Write ``content``, versions and the machine as JSON to the file of ``--json``, if it was given."""
    if arguments.json is None:
        return
    report = {"command": command, "versions": versions(), "machine": machine_facts(), **content}
    text = json.dumps(report, indent=2, default=vars) + "\n"
    if arguments.json == "-":
        sys.stdout.write(text)
    else:
        Path(arguments.json).write_text(text)


def print_rows(rows: Sequence[Sequence[str]], widths: Sequence[int], file: TextIO) -> None:
    """Print rows of texts in columns of these widths, and a last column that takes the rest of the line."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    for width in (*widths, None):
        grid.add_column(width=width)
    for row in rows:
        grid.add_row(*row)
    console = Console(file=file, highlight=False, markup=False)
    console.width = max(WIDTH, console.width)
    with console.capture() as text:
        console.print(grid)
    print("\n".join(line.rstrip() for line in text.get().splitlines()), file=file, flush=True)
