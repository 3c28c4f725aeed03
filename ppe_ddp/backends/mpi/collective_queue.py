"""Queue of one group's collectives over MPI: each is a generator that starts requests, and goes on as they arrive.

    steps of an all-reduce    start piece 1    arrived?    start piece 2    arrived?    bring the result home
    advanced by               every call of the backend, on any group: no call waits inside MPI

They run one after another, so that every rank starts its requests in the same order, whatever it waits for meanwhile.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ppe_ddp.backends.mpi.communicator_release import UnderWay
from ppe_ddp.backends.process_group.pending_work import PendingWork
from ppe_ddp.backends.process_group.progress_engine import progress_engine

if TYPE_CHECKING:
    from ppe_ddp.backends.mpi.mpi_waits import Waits

Requests = Iterator[UnderWay]
"""Starts a request, yields it with the memory that it reads or writes, and is resumed when it has arrived."""


class QueuedCollective(PendingWork):
    """A collective that is under way, or waits for its turn."""

    _waits: Waits

    def __init__(self, what: str, waits: Waits, steps: Requests, left: list[UnderWay]) -> None:
        super().__init__(what, waits)
        self._steps = steps
        self._left = left
        self._request: UnderWay | None = None
        self._reason: BaseException | None = None
        self._is_over = False

    def advance(self) -> bool:
        """Go on as far as what has arrived lets it; whether it is over."""
        try:
            while self._request is None or self._request[0].Test():
                with torch.no_grad():
                    self._request = next(self._steps)
            return False
        except StopIteration:
            self._request = None
            self._is_over = True
            self._tell_end()
        except BaseException as error:
            # whatever it was, the ranks are out of step here
            self.fail(f"{type(error).__name__}: {error}")
            self._waits.give_up(f"{self._what} was left: {type(error).__name__}: {error}")
            if not isinstance(error, Exception):
                raise
        return True

    def fail(self, reason: str) -> None:
        """End it; the memory of what cannot be cancelled stays."""
        if self._request is not None:
            progress_engine(os.getpid()).keep(*self._request)
            self._left.append(self._request)
        self._reason = self._waits.error(self._what, reason)
        self._is_over = True

    def _has_ended(self) -> bool:
        return self._is_over

    def _failure(self) -> BaseException | None:
        return self._reason


class CollectiveQueue:
    """Runs the collectives of one group, in the order in which they came."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits
        self._queue: deque[QueuedCollective] = deque()
        self.left: list[UnderWay] = []
        """What was under way when the group was given up."""
        self._progress = progress_engine(os.getpid())
        waits.at_failure.append(self._fail_all)

    def append(self, what: str, steps: Requests) -> QueuedCollective:
        """Begin a collective as soon as those before it are over; every rank must call it in the same order.

        Args:
            what: For errors.
            steps: Run under the lock of the progress engine, by any thread; wait for nothing but what they yield.
        """
        collective = QueuedCollective(what, self._waits, steps, self.left)
        with self._progress.lock:
            self._queue.append(collective)
            self._progress.add(self)
        self._progress.progress()
        return collective

    def advance(self) -> bool:
        """Do what can be done without waiting; whether nothing is left to do or to wait for."""
        while self._queue:
            if not self._queue[0].advance():
                return False
            if self._queue:  # a failure has ended all
                self._queue.popleft()
        return True

    def drain(self, seconds: float) -> None:
        """Wait until every collective is over; raises CommunicationError if that takes longer."""
        self._waits.until(lambda: not self._queue, "destroy_process_group", seconds=seconds)

    def _fail_all(self) -> None:
        with self._progress.lock:
            while self._queue:
                collective = self._queue.popleft()
                if not collective._has_ended():
                    collective.fail(self._waits.failure)
