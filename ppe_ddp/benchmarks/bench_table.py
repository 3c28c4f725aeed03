"""Prints results as tables, on a terminal or to a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ppe_ddp.benchmarks.bench_result import ContestantResult, ModelResult, Spread

__all__ = ["print_step_table", "print_table", "spread_text", "table_of"]

_WIDTH = 80


def print_step_table(models: Sequence[ModelResult], caption: str, file: TextIO | None = None) -> None:
    """Prints the results of ``bench step``.

    Args:
        models: The results.
        caption: A line below the table.
        file: Where to print; by default stdout.
    """
    headings = ["", "ms a step", "ratio", "exposed", "MB sent"]
    table = table_of("One training step: medians (middle half)", caption, headings)
    for model in models:
        count = f"{model.world_size} rank{'s' if model.world_size != 1 else ''}"
        table.add_row(f"[bold]{model.name}[/bold], {count}", "", f"to {model.reference}")
        for result in model.contestants:
            table.add_row(f"  {result.name}", *_cells(model, result))
        table.add_section()
    print_table(table, sys.stdout if file is None else file)
    for line in dict.fromkeys(_reasons(models)):
        print(line, file=file)


def table_of(title: str, caption: str, headings: Sequence[str], *, left: int = 1) -> Table:
    """A table for 80 columns, of numbers.

    Args:
        title: Above it.
        caption: Below it, wrapped.
        headings: One a column.
        left: How many columns from the left are text.
    """
    table = Table(box=box.SIMPLE_HEAD, title=title, caption=caption, padding=0, show_edge=False)
    for k, heading in enumerate(headings):
        table.add_column(heading, justify="left" if k < left else "right", no_wrap=True)
    return table


def print_table(table: Table, file: TextIO) -> None:
    """Prints it, as wide as it is at least: where there is less room, numbers would be cut off."""
    console = Console(file=file, width=max(_WIDTH, Console(file=file).width), highlight=False)
    needed = console.measure(table, options=console.options.update(max_width=1000)).maximum
    Console(file=file, width=max(console.width, needed), highlight=False).print(table)


def spread_text(spread: Spread, digits: int) -> str:
    """The median, and the middle half; the larger the numbers, the fewer digits."""
    digits = 0 if spread.upper >= 100 else min(digits, 1) if spread.upper >= 10 else digits
    return f"{spread.median:.{digits}f} ({spread.lower:.{digits}f}-{spread.upper:.{digits}f})"


def _cells(model: ModelResult, result: ContestantResult) -> tuple[str, ...]:
    if result.milliseconds is None or result.ratio is None or result.traffic is None:
        return ("skipped", "", "", "")
    return (
        spread_text(result.milliseconds, 1),
        "" if result.name == model.reference else spread_text(result.ratio, 2),
        "" if result.exposed is None or result.name in (model.reference, "bare") else f"{result.exposed:.2f}",
        f"{result.traffic.gradient_nbytes / 1e6:.2f}" if result.traffic.gradient_nbytes else "-",
    )


def _reasons(models: Sequence[ModelResult]) -> Iterator[str]:
    for model in models:
        for result in model.contestants:
            if result.skipped is not None:
                yield f"{result.name} skipped: {result.skipped}"
