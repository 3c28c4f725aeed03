"""The commands of ``python -m ppe_ddp``: their list, and the dispatch to one of them.

A command is a module, or a class in one, with ``add_arguments(parser)`` and ``run(arguments) -> int`` (the exit code).
It is imported only when it is called, so that help and errors are quick.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import inspect
import io
import os
import sys
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from ppe_ddp.launchers import detect


class Command(NamedTuple):
    """One command: the words that call it, what it does in one line, and ``module`` or ``module:class``."""

    words: str
    summary: str
    target: str


COMMANDS: tuple[Command, ...] = (
    Command("env", "versions, launcher, devices, backends that can be made here", "ppe_ddp.cli.doctor:Env"),
    Command("doctor", "tries each of these backends on ranks, or inside a job", "ppe_ddp.cli.doctor:Doctor"),
    Command("trace", "runs a script and draws what each rank computes and sends", "ppe_ddp.cli.timelines:TraceScript"),
    Command("timeline", "draws that again, from the records of all ranks", "ppe_ddp.cli.timelines:DrawTimeline"),
    Command("bench step", "a step beside torch DDP, ppe's and the bare module", "ppe_ddp.cli.bench_step"),
    Command("bench collective", "all-reduce and others over backends, side by side", "ppe_ddp.cli.bench_collective"),
    Command("bench compression", "what compressors send and cost, and where they pay", "ppe_ddp.cli.bench_compression"),
)
"""All commands, in the order in which help lists them."""


def main(
    words: Sequence[str] | None = None, *, program: str = "python -m ppe_ddp", commands: Sequence[Command] = COMMANDS
) -> int:
    """Run one command; the exit code: 2 for a wrong command line. argparse leaves by SystemExit, as for ``--help``."""
    words = list(sys.argv[1:] if words is None else words)
    for command in commands:
        own = command.words.split()
        if words[: len(own)] == own:
            with _on_rank_0():
                target, arguments = _parse(command, program, words[len(own) :])
            code: int = target.run(arguments)
            return code
    with _on_rank_0():
        return _list(words, program, commands)


def is_on_rank_0() -> bool:
    """Whether this process tells what is the same on all ranks of a job; also where its variables are wrong."""
    with contextlib.suppress(ValueError, RuntimeError):
        return detect(os.environ).rank == 0
    return True


@contextlib.contextmanager
def _on_rank_0() -> Generator[None]:
    """Discards what other ranks of a job print: the command line is the same on all of them."""
    if is_on_rank_0():
        yield
    else:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield


def _list(words: Sequence[str], program: str, commands: Sequence[Command]) -> int:
    """Prints all commands; the exit code."""
    width = max(len(command.words) for command in commands)
    lines = [f"  {command.words:<{width}}  {command.summary}" for command in commands]
    listing = "\n".join([f"usage: {program} COMMAND ...", "", *lines, "", "--help after a COMMAND tells more of it."])
    if {"-h", "--help"} & set(words):
        print(listing)
        return 0
    begun = " ".join(words[:2])
    if begun and not any(command.words.startswith(f"{begun} ") for command in commands):
        near = difflib.get_close_matches(begun, [command.words for command in commands], n=1, cutoff=0.5)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        print(f"{program}: unknown command {begun!r}{meant}\n", file=sys.stderr)
    print(listing, file=sys.stderr)
    return 2


def _parse(command: Command, program: str, words: Sequence[str]) -> tuple[Any, argparse.Namespace]:
    """What has the command's ``run``, and what to call it with."""
    name, _, inner = command.target.partition(":")
    module = importlib.import_module(name)
    target = getattr(module, inner) if inner else module
    parser = argparse.ArgumentParser(
        prog=f"{program} {command.words}",
        description=inspect.getdoc(target),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    target.add_arguments(parser)
    return target, parser.parse_args(words)
