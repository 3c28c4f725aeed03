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

__all__ = ["console_on", "print_step_table"]

_WIDTH = 140


def print_step_table(models: Sequence[ModelResult], caption: str, file: TextIO | None = None) -> None:
    """Prints the results of ``bench step``.

    Args:
        models: The results.
        caption: A line below the table.
        file: Where to print; by default stdout.
    """
    console = console_on(sys.stdout if file is None else file)
    table = Table(box=box.SIMPLE_HEAD, title="One training step: medians (middle half)", caption=caption)
    table.add_column("model", no_wrap=True)
    table.add_column("", no_wrap=True)
    for heading in ("ms a step", "ratio", "exposed", "target", "MB sent", "control B", "us/bucket", "of"):
        table.add_column(heading, justify="right", no_wrap=True)
    for model in models:
        count = f"{model.world_size} rank{'s' if model.world_size != 1 else ''}"
        labels = [model.name, f"[dim]{count}[/dim]", f"[dim]ratio to {model.reference}[/dim]", ""]
        labels += [""] * (len(model.contestants) - len(labels))
        for label, result in zip(labels, model.contestants, strict=True):
            table.add_row(label, result.name, *_cells(model, result))
        table.add_section()
    console.print(table)
    for line in dict.fromkeys(_reasons(models)):
        console.print(line, markup=False)


def console_on(file: TextIO) -> Console:
    """A console that writes to ``file``, wide enough for a table."""
    # Where there is less room, numbers would be cut off.
    width = max(_WIDTH, Console(file=file).width)
    return Console(file=file, width=width, highlight=False)


def _cells(model: ModelResult, result: ContestantResult) -> tuple[str, ...]:
    if result.milliseconds is None or result.ratio is None or result.traffic is None:
        return ("skipped", "", "", "", "", "", "", "")
    traffic = result.traffic
    return (
        _spread(result.milliseconds, 1),
        "" if result.name == model.reference else _spread(result.ratio, 2),
        "" if result.exposed is None or result.name in (model.reference, "bare") else f"{result.exposed:.2f}",
        _target(model) if result.name == model.ours.name else "",
        f"{traffic.gradient_nbytes / 1e6:.2f}" if traffic.gradient_nbytes else "-",
        str(traffic.control_nbytes) if traffic.control_nbytes else "-",
        f"{result.launch_us.median:.0f}" if result.launch_us else "",
        str(result.launches) if result.launch_us else "",
    )


def _reasons(models: Sequence[ModelResult]) -> Iterator[str]:
    for model in models:
        for result in model.contestants:
            if result.skipped is not None:
                yield f"{result.name} skipped: {result.skipped}"


def _spread(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.lower:.{digits}f}-{spread.upper:.{digits}f})"


def _target(model: ModelResult) -> str:
    if model.at_most is None:
        return ""
    met = "[green]met[/green]" if model.met else "[red]missed[/red]"
    return f"<= {model.at_most:.2f} {met}"
