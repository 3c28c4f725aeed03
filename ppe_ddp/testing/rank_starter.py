"""How the processes of ranks begin: the contract, and processes of this machine, forked from one that knows torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from ppe_ddp.testing.rank_process import serve

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

__all__ = ["ForkStarter", "RankProcess", "RankStarter"]

_PRELOADED = "ppe_ddp.testing.rank_process"


class RankProcess(Protocol):
    """A process as :class:`~ppe_ddp.testing.Ranks` needs it; those of `multiprocessing` are such."""

    @property
    def pid(self) -> int | None:
        """As this process sees it."""

    @property
    def sentinel(self) -> int:
        """A file descriptor that can be read from when the process has ended."""

    @property
    def exitcode(self) -> int | None:
        """That of a process which has ended; None if it is not known."""

    def is_alive(self) -> bool:
        """Whether it has not ended."""

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, for so many seconds at most."""

    def kill(self) -> None:
        """End it at once; nothing if it has ended."""

    def close(self) -> None:
        """Let go of what is held for it; it has ended."""


class RankStarter(Protocol):
    """Starts the processes of a world, each of which answers calls by :func:`ppe_ddp.testing.rank_process.serve`."""

    def start(self, stack_files: Sequence[Path]) -> Iterator[tuple[RankProcess, Connection]]:
        """Start one process a file, and give each with the pipe to it, in the order of ranks.

        Args:
            stack_files: Where each writes its stacks.
        """

    def end(self) -> None:
        """End what else was started for them; called when all of them have ended, also if there are none."""

    def errors(self) -> str:
        """What there is to say about a process that has died, beyond its exit code."""


class ForkStarter:
    """Processes on this machine: started in no time, and as good as new."""

    def start(self, stack_files: Sequence[Path]) -> Iterator[tuple[RankProcess, Connection]]:
        """As :class:`RankStarter` has it."""
        # Forked from a process that has imported torch and done nothing else.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_PRELOADED])
        with _one_thread():
            for rank, file in enumerate(stack_files):
                ours, theirs = context.Pipe()
                args = (theirs, str(file), dict(os.environ))
                process = context.Process(target=serve, args=args, name=f"rank {rank}", daemon=True)
                process.start()
                theirs.close()
                yield process, ours

    def end(self) -> None:
        """Nothing else was started."""

    def errors(self) -> str:
        """What they have said is on this process's own standard error."""
        return ""


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    # OpenMP reads it while torch is imported, before any code of ours runs in the process.
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
