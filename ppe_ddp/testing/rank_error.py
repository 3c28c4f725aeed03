"""RankError: the failures of ranks, as a test sees them.

Owns the error of `ppe_ddp.testing.ranks` and the record of one failing rank. It is apart from the launcher
of ranks because it is all that a test which expects a failure looks at.
"""

from __future__ import annotations

import contextlib
import enum
import pickle
import signal
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Outcome", "RankError", "RankFailure"]


class Outcome(enum.Enum):
    """How a rank failed."""

    RAISED = "raised"
    DIED = "died"
    SILENT = "did not answer"


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank.

    Attributes:
        rank: The rank.
        outcome: How it failed.
        summary: One line: the exception, the exit code, or how long there was no answer.
        details: The traceback of the exception, or the stacks of all threads where there are any.
        exception: The exception itself if it could be pickled, without its traceback and causes.
        exit_code: That of a process that died; negative for a signal, None if it did not die.
    """

    rank: int
    outcome: Outcome
    summary: str
    details: str = ""
    exception: BaseException | None = None
    exit_code: int | None = None

    @classmethod
    def raised(cls, rank: int, content: bytes) -> RankFailure:
        """The failure of a rank whose function raised.

        Args:
            rank: The rank.
            content: The rank's pickled `(one-line summary, traceback, pickled exception or None)`.
        """
        summary, details, pickled = pickle.loads(content)
        exception = None
        if pickled is not None:
            # Many exceptions whose constructor takes more than a message can be pickled but not made anew.
            with contextlib.suppress(Exception):
                exception = pickle.loads(pickled)
        return cls(rank, Outcome.RAISED, summary, details, exception)

    @classmethod
    def died(cls, rank: int, exit_code: int | None, stacks: str) -> RankFailure:
        """The failure of a rank whose process is gone.

        Args:
            rank: The rank.
            exit_code: The process's exit code; None if it only closed its pipe.
            stacks: What it wrote about its threads when it crashed, if it did.
        """
        if exit_code is None:
            cause = "closed its pipe"
        elif exit_code < 0:
            cause = f"ended by signal {-exit_code} ({signal.strsignal(-exit_code)})"
        else:
            cause = f"ended with exit code {exit_code}"
        return cls(rank, Outcome.DIED, f"its process {cause}", stacks, exit_code=exit_code)

    @classmethod
    def silent(cls, rank: int, seconds: float, stacks: str) -> RankFailure:
        """The failure of a rank that did not answer in time.

        Args:
            rank: The rank.
            seconds: How long it was waited for.
            stacks: Where its threads were.
        """
        return cls(rank, Outcome.SILENT, f"nothing for {seconds:.1f} s", stacks)


class RankError(RuntimeError):
    """Some ranks failed; the message has the traceback of each, the first that failed first.

    Args:
        world_size: How many ranks were asked.
        failures: One for each failing rank, in the order in which they failed.
    """

    def __init__(self, world_size: int, failures: Sequence[RankFailure]) -> None:
        super().__init__(world_size, tuple(failures))
        self.world_size = world_size
        self.failures = tuple(failures)

    def __str__(self) -> str:
        short = "; ".join(f"rank {f.rank} {f.outcome.value}: {f.summary}" for f in self.failures)
        sections = [
            f"--- rank {f.rank} {f.outcome.value} ---\n{f.details.rstrip()}" for f in self.failures if f.details
        ]
        head = f"{len(self.failures)} of {self.world_size} ranks failed: {short}"
        return "\n\n".join([head, *sections])

    @property
    def exceptions(self) -> dict[int, BaseException]:
        """The exceptions by rank, of those ranks that raised one which could be pickled."""
        return {f.rank: f.exception for f in self.failures if f.exception is not None}

    @property
    def ranks(self) -> dict[int, Outcome]:
        """How each failing rank failed, in the order in which they did."""
        return {f.rank: f.outcome for f in self.failures}
