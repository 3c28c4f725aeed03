"""Tables for people, on a terminal or in a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ppe_ddp.cli.bench_result import ContestantResult, ModelResult, Spread

__all__ = ["print_step_table"]

_PLAIN_WIDTH = 120


def print_step_table(models: Sequence[ModelResult], caption: str, file: TextIO | None = None) -> None:
    """Prints the results of ``bench step``.

    Args:
        models: The results.
        caption: A line below the table.
        file: Where to print; by default stdout.
    """
    console = _console(sys.stdout if file is None else file)
    table = Table(box=box.SIMPLE_HEAD, title="One training step: medians (middle half)", caption=caption)
    table.add_column("model")
    table.add_column("")
    for heading in ("ms a step", "ratio", "target", "MB sent", "control B"):
        table.add_column(heading, justify="right", no_wrap=True)
    for model in models:
        for place, result in enumerate(model.contestants):
            label = f"{model.name}\n[dim]{_ranks(model.world_size)}[/dim]" if place == 0 else ""
            table.add_row(label, result.name, *_cells(model, result))
        table.add_section()
    console.print(table)


def _console(file: TextIO) -> Console:
    # Without a terminal rich would fold the table to 80 columns.
    return Console(file=file, width=None if file.isatty() else _PLAIN_WIDTH, highlight=False)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"


def _cells(model: ModelResult, result: ContestantResult) -> tuple[str, ...]:
    if result.milliseconds is None or result.ratio is None or result.traffic is None:
        return (f"skipped: {result.skipped}", "", "", "", "")
    traffic = result.traffic
    ratio = f"{_spread(result.ratio, 2)} x {model.reference}"
    return (
        _spread(result.milliseconds, 1),
        "" if result.name == model.reference else ratio,
        _target(model) if result.name == model.ours.name else "",
        f"{traffic.gradient_nbytes / 1e6:.2f}" if traffic.gradient_nbytes else "-",
        str(traffic.control_nbytes) if traffic.control_nbytes else "-",
    )


def _spread(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.lower:.{digits}f}-{spread.upper:.{digits}f})"


def _target(model: ModelResult) -> str:
    if model.at_most is None:
        return ""
    met = "[green]met[/green]" if model.met else "[red]missed[/red]"
    return f"<= {model.at_most:.2f} {met}"
