"""Compares the ranks' calls of collectives before they run, if PPE_DDP_DEBUG=1: not every transport detects a mismatch.

Each rank writes ``all_reduce(float32 x 10)`` to the store. A call does not wait for the comparison: whenever this
process calls the backend, the group begins the collectives on which the ranks agree by then, in order.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ppe_ddp.backends.rank_store import Meeting, WrittenKeys
from ppe_ddp.backends.work import Waits, Work, combined
from ppe_ddp.errors import DisagreementError
from ppe_ddp.waiting import paced, progress_engine

_COMMON = {
    "all_reduce": (0, 1),
    "reduce": (0, 1, 2),
    "broadcast": (0, 1),
    "all_gather": (0, 1),
    "all_gather_list": (0,),
    "reduce_scatter": (0, 1, 2),
    "reduce_scatter_list": (1, 2),
}
"""The positions of arguments that must be the same on every rank. For other collectives these are dtype and root."""


def compares_collectives() -> bool:
    """Whether collectives are to be compared."""
    return os.environ.get("PPE_DDP_DEBUG") == "1"


class _ComparedCall:
    """A collective that is begun once all ranks have called the same."""

    def __init__(self, method: Callable[..., Work], rows: Sequence[tuple[Any, ...]], waits: Waits) -> None:
        self.what = "; ".join(_described(method.__name__, row) for row in rows)
        self._method = method
        self._rows = rows
        self._waits = waits
        self._work: Work | None = None
        self.reason: BaseException | None = None  # the error with which it has ended before it was begun

    def begin(self) -> None:
        try:
            self._work = combined([self._method(*row) for row in self._rows], self._waits)
        except Exception as error:  # its arguments are wrong
            self.reason = error

    def done(self) -> bool:
        """Whether it is done; raises its error."""
        if self.reason is not None:
            raise self.reason
        if self._work is None or not self._work.is_completed():
            return False
        return self._work.wait()


class CollectiveComparison:
    """Compares the collectives of one group; the ranks use ``store`` only for this."""

    def __init__(self, store: WrittenKeys, rank: int, size: int, waits: Waits) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._waits = waits
        self._progress = progress_engine(os.getpid())
        self._number = 0  # of the collective being compared
        self._meeting: Meeting | None = None  # of the collective being compared; None before this rank has come to it
        self._last: Meeting | None = None  # of the previous collective
        self._error: BaseException | None = None
        self._queue: deque[_ComparedCall] = deque()
        self._are_here = paced(lambda: self._meeting is not None and self._meeting.outcome())
        waits.at_failure.append(self._give_up)

    def append(self, method: Callable[..., Work], rows: Sequence[tuple[Any, ...]]) -> Work:
        """Queue the calls of ``method`` with each of ``rows`` as arguments, to begin when all ranks agree."""
        call = _ComparedCall(method, rows, self._waits)
        with self._progress.lock:
            self._queue.append(call)
            self._progress.add(self)
        self._progress.progress()
        return Work(call.what, self._waits, call.done, absent=self.absent)

    def advance(self) -> bool:
        """Begin the calls that all ranks have made; returns whether the queue is empty."""
        while self._queue:
            if self._error is not None:
                self._fail_all(self._error)
                break
            if self._meeting is None:
                self._number += 1
                self._meeting = Meeting(self._store, str(self._number), self._rank, self._size)
                self._meeting.come(self._queue[0].what)
            if not self._are_here():
                return False
            self._error = self.disagreement()
            if self._error is not None:
                continue
            # All ranks have come to this meeting, so all have read the outcome of the last one.
            if self._last is not None:
                self._last.forget()
            self._last, self._meeting = self._meeting, None
            self._queue.popleft().begin()
        return True

    def absent(self) -> list[int]:
        """The ranks that have not made the call being compared, as far as is known."""
        return [] if self._meeting is None else self._meeting.absent()

    def disagreement(self) -> DisagreementError | None:
        """The error if the ranks have made different calls; None if the calls agree, or some rank has made none."""
        try:
            outcome = None if self._meeting is None else self._meeting.outcome()
        except RuntimeError:  # the store has gone with the rank that served it
            return None
        if outcome is None or len(set(outcome.words)) == 1:
            return None
        ranks: dict[str, list[str]] = {}
        for rank, what in enumerate(outcome.words):
            ranks.setdefault(what, []).append(str(rank))
        each = "; ".join(f"rank {', '.join(those)} has called {what}" for what, those in ranks.items())
        return DisagreementError(
            f"{self._waits.place}: the ranks have called different collectives, number {self._number} of this group: "
            f"{each}. Nothing of it was sent (PPE_DDP_DEBUG=1)"
        )

    def _give_up(self) -> None:
        left = self._waits.error("a collective that was not begun", self._waits.failure)
        self._fail_all(self.disagreement() or left)

    def _fail_all(self, error: BaseException) -> None:
        with self._progress.lock:
            while self._queue:
                self._queue.popleft().reason = error


def _described(name: str, arguments: Sequence[Any]) -> str:
    if name in _COMMON:
        words = [_word(arguments[place]) for place in _COMMON[name]]
    else:
        tensors = [one for one in arguments if isinstance(one, Tensor)]
        words = [str(one.dtype).removeprefix("torch.") for one in tensors[:1]]
        words += [f"root {one}" for one in arguments if isinstance(one, int)]
    return f"{name}({', '.join(words)})"


def _word(argument: Any) -> str:
    if isinstance(argument, Tensor):
        return f"{str(argument.dtype).removeprefix('torch.')} x {argument.numel()}"
    if isinstance(argument, int):
        return f"root {argument}"
    if isinstance(argument, list | tuple):
        return f"[{', '.join(map(_word, argument))}]"
    return str(argument.op).rpartition(".")[2]
