"""What commands have in common: types of arguments, tables, and reports as JSON."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TextIO

import torch
from rich import box
from rich.console import Console
from rich.table import Table

import ppe_ddp

_WIDTH = 80


def count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"should be a whole number from 1, but it is {text!r}")
    return int(text)


def positive(text: str) -> float:
    """A positive number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"should be a positive number, but it is {text!r}")
    return number


def size_of(text: str) -> int:
    """Bytes: a whole number from 1, with K, M or G after it for KiB, MiB, GiB."""
    match = re.fullmatch(r"([1-9][0-9]*)([KMG]?)", text.upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"should be a number of bytes such as 4, 64K or 32M, but it is {text!r}")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def output(text: str) -> str:
    """A file that can be written, or - for stdout."""
    # Found out now, and not when everything has been measured.
    if text != "-" and (not Path(text).parent.is_dir() or Path(text).is_dir()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists")
    return text


def folder(text: str) -> Path:
    """A folder that files can be written to; made if there is none."""
    path = Path(text).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        # Permissions alone do not tell: file systems may be full or read-only.
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder that can be written to ({error})") from error
    return path


def fail(error: object, code: int) -> int:
    """Say on stderr what is wrong; the exit code."""
    print(f"ppe_ddp: {error}", file=sys.stderr)
    return code


# ---------------------------------------------------------------------- reports


def versions() -> dict[str, str]:
    """Versions of what takes part, without anything that names the machine."""
    found = {"ppe_ddp": ppe_ddp.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
    try:
        return {**found, "pytorch_pfn_extras": metadata.version("pytorch-pfn-extras")}
    except metadata.PackageNotFoundError:
        return found


def machine_facts() -> dict[str, str | int]:
    """Kind of processor and system, and how many cores there are for this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    cpu = found[1] if found else platform.processor() or "unknown"
    return {"cores": cores, "cpu": cpu, "system": platform.system(), "architecture": platform.machine()}


def told(arguments: argparse.Namespace) -> TextIO:
    """Where text for people goes: stdout, or stderr where the report goes to stdout."""
    return sys.stderr if arguments.json == "-" else sys.stdout


def write_report(arguments: argparse.Namespace, command: str, **content: object) -> None:
    """Write what ``command`` has found, and on what machine, as JSON to where ``--json`` says; nothing without it."""
    if arguments.json is None:
        return
    report = {"command": command, "versions": versions(), "machine": machine_facts(), **content}
    text = json.dumps(report, indent=2, default=vars) + "\n"
    if arguments.json == "-":
        sys.stdout.write(text)
    else:
        Path(arguments.json).write_text(text)


# ---------------------------------------------------------------------- tables


@dataclass(frozen=True)
class Spread:
    """A median, and the quartiles around it."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        lower, median, upper = statistics.quantiles(
            values if len(values) > 1 else [*values, *values], n=4, method="inclusive"
        )
        return cls(median, lower, upper)

    def text(self, digits: int) -> str:
        """The median, and the middle half; the larger the numbers, the fewer digits."""
        digits = 0 if self.upper >= 100 else min(digits, 1) if self.upper >= 10 else digits
        return f"{self.median:.{digits}f} ({self.lower:.{digits}f}-{self.upper:.{digits}f})"


def print_table(title: str, caption: str, headings: Sequence[str], rows: Iterator[Sequence[str]], file: TextIO) -> None:
    """Print a table for 80 columns, or as wide as its numbers are: with less room they would be cut off.

    Args:
        title: Above it.
        caption: Below it, wrapped; with the processor, its cores, and torch's version.
        headings: One a column; the first is of text, as is one that begins with a small letter after it.
        rows: Its cells; empty for a line.
        file: Where to print.
    """
    facts = machine_facts()
    caption = f"{caption}; {facts['cpu']}, {facts['cores']} cores; torch {torch.__version__}"
    table = Table(box=box.SIMPLE_HEAD, title=title, caption=caption, padding=0, show_edge=False)
    for k, heading in enumerate(headings):
        table.add_column(heading.strip("<"), justify="left" if not k or heading[0] == "<" else "right", no_wrap=True)
    for row in rows:
        if row:
            table.add_row(*row)
        else:
            table.add_section()
    console = Console(file=file, width=max(_WIDTH, Console(file=file).width), highlight=False, markup=False)
    needed = console.measure(table, options=console.options.update(max_width=1000)).maximum
    console.width = max(console.width, needed)
    console.print(table)


def print_rows(rows: Sequence[Sequence[str]], widths: Sequence[int], file: TextIO) -> None:
    """Print texts in columns of these widths and a last one, which is wrapped."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    for width in widths:
        grid.add_column(width=width)
    grid.add_column()
    for row in rows:
        grid.add_row(*row)
    console = Console(file=file, highlight=False, markup=False)
    console.width = max(_WIDTH, console.width)
    with console.capture() as text:
        console.print(grid)
    print("\n".join(line.rstrip() for line in text.get().splitlines()), file=file, flush=True)
