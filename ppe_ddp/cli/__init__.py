"""The commands of ``python -m ppe_ddp``: a list of them, and ``main()``, which runs one.

A command is a module, or a class in one, with ``add_arguments(parser)`` and ``run(arguments) -> int`` (the exit code).
It is imported only when it is called, so that help and errors come quickly.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import os
import sys
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from ppe_ddp.errors import did_you_mean
from ppe_ddp.launchers import detect


class Command(NamedTuple):
    """One command."""

    words: str  # by which it is called
    summary: str  # one line of help
    target: str  # ``module`` or ``module:class``


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
    """Run one command. Returns its exit code, or 2 for an unknown command; argparse raises SystemExit."""
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
    """Whether this is rank 0 of a job, or no rank: the one that prints what all ranks know."""
    with contextlib.suppress(ValueError, RuntimeError):
        return detect(os.environ).rank == 0
    return True


@contextlib.contextmanager
def _on_rank_0() -> Generator[None]:
    """Discard the output of all ranks but 0: errors of the command line are the same on all."""
    if is_on_rank_0():
        yield
    else:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield


def _list(words: Sequence[str], program: str, commands: Sequence[Command]) -> int:
    width = max(len(command.words) for command in commands)
    lines = [f"  {command.words:<{width}}  {command.summary}" for command in commands]
    listing = "\n".join([f"usage: {program} COMMAND ...", "", *lines, "", "--help after a COMMAND tells more of it."])
    if {"-h", "--help"} & set(words):
        print(listing)
        return 0
    begun = " ".join(words[:2])
    if begun and not any(command.words.startswith(f"{begun} ") for command in commands):
        meant = did_you_mean(begun, [command.words for command in commands])
        print(f"{program}: unknown command {begun!r}{meant}\n", file=sys.stderr)
    print(listing, file=sys.stderr)
    return 2


def _parse(command: Command, program: str, words: Sequence[str]) -> tuple[Any, argparse.Namespace]:
    """The command's module or class, and the arguments for its ``run``."""
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
