"""The commands of ``python -m ppe_ddp``: their list, and the dispatch to one of them.

A command is a module with ``add_arguments(parser)`` and ``run(arguments) -> int`` (the exit code). It is
imported only when it is called, so that help and errors are quick.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["COMMANDS", "Command", "main"]

_PROGRAM = "python -m ppe_ddp"
_USAGE_ERROR = 2


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        words: How it is called: one word, or a group's word and its own.
        summary: What it does, in one line.
        module: Where its arguments and its ``run`` are.
    """

    words: tuple[str, ...]
    summary: str
    module: str


COMMANDS: tuple[Command, ...] = (
    Command(("env",), "versions, launcher, devices, backends that can be made here", "ppe_ddp.cli.env"),
    Command(
        ("doctor",),
        "tries each of these backends on ranks, torch's internals",
        "ppe_ddp.cli.doctor",
    ),
    Command(("trace",), "runs a script and draws what each rank computes and sends", "ppe_ddp.cli.trace_script"),
    Command(("timeline",), "draws that again, from the records of all ranks", "ppe_ddp.cli.draw_timeline"),
    Command(
        ("bench", "step"),
        "a training step beside torch DDP, ppe's and the bare module",
        "ppe_ddp.benchmarks.bench_step",
    ),
    Command(
        ("bench", "nodes"),
        "the same on several nodes with a slow network that it makes",
        "ppe_ddp.benchmarks.bench_nodes",
    ),
    Command(
        ("bench", "scaling"),
        "a model of a step: held to nodes, drawn to 10,000 ranks",
        "ppe_ddp.benchmarks.bench_scaling",
    ),
    Command(
        ("bench", "timeline"),
        "draws a step of ppe_ddp below one of torch DDP",
        "ppe_ddp.benchmarks.bench_timeline",
    ),
    Command(
        ("bench", "collective"),
        "all-reduce and others over gloo and mpi4py, side by side",
        "ppe_ddp.benchmarks.bench_collective",
    ),
    Command(
        ("bench", "compression"),
        "what compressors send and cost, and on which links they pay",
        "ppe_ddp.benchmarks.bench_compression",
    ),
    Command(
        ("bench", "load"),
        "a checkpoint into shards, beside torch and accelerate",
        "ppe_ddp.benchmarks.bench_load",
    ),
    Command(
        ("bench", "optimizer"),
        "AdamW sharded, beside torch's ZeroRedundancyOptimizer",
        "ppe_ddp.benchmarks.bench_optimizer",
    ),
)
"""All commands, in the order in which help lists them."""


def main(words: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        words: The command line after the program's name; by default this process's own.

    Returns:
        The exit code: 0 for success, 2 for a wrong command line, others as the command has them.

    Raises:
        SystemExit: From argparse, for a command's ``--help`` (0) and for wrong arguments (2).
    """
    words = sys.argv[1:] if words is None else words
    for command in COMMANDS:
        size = len(command.words)
        if tuple(words[:size]) == command.words:
            return _call(command, words[size:])
    group: list[str] = []
    for word in words:
        if word in ("-h", "--help"):
            print(_listing(group))
            return 0
        if not _below([*group, word]):
            print(_complaint(group, word), file=sys.stderr)
            return _USAGE_ERROR
        group.append(word)
    print(_listing(group), file=sys.stderr)
    return _USAGE_ERROR


def _call(command: Command, words: Sequence[str]) -> int:
    module = importlib.import_module(command.module)
    parser = argparse.ArgumentParser(
        prog=f"{_PROGRAM} {' '.join(command.words)}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    code: int = module.run(parser.parse_args(words))
    return code


def _below(group: Sequence[str]) -> list[Command]:
    return [command for command in COMMANDS if command.words[: len(group)] == tuple(group)]


def _listing(group: Sequence[str]) -> str:
    commands = {" ".join(command.words): command.summary for command in _below(group)}
    width = max(map(len, commands))
    lines = [f"  {words:<{width}}  {summary}" for words, summary in commands.items()]
    title = " ".join([_PROGRAM, *group])
    more = [f"{_PROGRAM} COMMAND --help tells more of each.", "The schema of --json: ppe_ddp/cli/report.schema.json."]
    return "\n".join([f"usage: {title} COMMAND ...", "", *lines, "", *more])


def _complaint(group: Sequence[str], word: str) -> str:
    known = sorted({command.words[len(group)] for command in _below(group)})
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    what = "option" if word.startswith("-") else "command"
    return f"{' '.join([_PROGRAM, *group])}: unknown {what} {word!r}{meant}\n\n{_listing(group)}"
