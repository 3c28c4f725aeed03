"""Several exchanges of messages under way, each of several rounds, in an order that is the same on every rank.

A round can start when the one before it has arrived, which is at another moment on every rank; but all ranks must
start the same collectives in the same order. So the order follows from the number of the bucket alone:

    turn        0       1       2       3       4       5       6
    bucket 0    start           2nd             end
    bucket 1            start           2nd             end
    bucket 2                    start           2nd             end

In each turn older buckets come first. The link always has the messages of two buckets or more to carry, and the second
round of a bucket goes out while backward still computes the gradients of others. Turns wait for what they need; who
does not want to wait asks first.

Where ranks of a node average different parameters, one rank may be through with a bucket some rounds before another.
So what an exchange returns, which other ranks of the node have to do their part for, is waited for when nothing is left
to be turned: a rank that waited for it earlier would keep messages back that these ranks, or others for them, wait for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import TYPE_CHECKING, Protocol

from ppe_ddp.compression.all_pending import is_completed
from ppe_ddp.contracts import Waitable
from ppe_ddp.engine.event_log import EventLog

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

Delivered = Generator[Waitable, None, Waitable | None]
"""An exchange; returns what its result still waits for when nothing more is to be sent, or None."""

_DISTANCE = 2  # turns from a round to the next of the same bucket


class CountedLink(Protocol):
    """Where an exchange communicates.

    Attributes:
        device: Where the tensors are.
    """

    device: torch.device

    @property
    def nbytes(self) -> int:
        """What was sent so far, see :attr:`Link.nbytes`."""
        ...


class ExchangeQueue:
    """Advances exchanges, turn by turn.

    Args:
        wait: Waits for something in flight, on a device.
    """

    def __init__(self, wait: Callable[[Waitable, torch.device], object]) -> None:
        self._wait = wait
        self._turn = 0
        self._running: deque[_Running] = deque()

    def start(self, exchange: Delivered, link: CountedLink, name: str = "") -> PendingExchange:
        """Begin ``exchange``, which is over ``link``, after a turn of those that are under way.

        Args:
            exchange: Yields what it waits for.
            link: Where it communicates.
            name: What timelines call it.
        """
        self._advance()
        entry = _Running(exchange, link, name, self._turn)
        entry.resume(self._turn)
        if not entry.is_over:
            self._running.append(entry)
        return PendingExchange(self, entry)

    def is_ready(self) -> bool:
        """Whether the next turn would not wait."""
        return all(entry.is_ready() for entry in self._due())

    def abandon(self) -> None:
        """Nothing of what is under way will be waited for any more."""
        for entry in self._running:
            entry.is_over = True
            entry.pending = None
            entry.exchange.close()
        self._running.clear()

    def advance_until(self, entry: _Running, *, may_wait: bool) -> None:
        """Take turns until ``entry`` is over and delivered, or until one of them would have to wait."""
        while not entry.is_over and (may_wait or self.is_ready()):
            self._advance()
        if entry.delivery is None:
            return
        while self._running and (may_wait or self.is_ready()):
            self._advance()
        if not self._running and (may_wait or is_completed(entry.delivery)):
            self._wait(entry.delivery, entry.link.device)
            entry.delivery = None

    def _due(self) -> list[_Running]:
        return [entry for entry in self._running if entry.due == self._turn + 1]

    def _advance(self) -> None:
        due = self._due()
        self._turn += 1
        for entry in due:
            if entry.pending is not None:
                self._wait(entry.pending, entry.link.device)
            entry.resume(self._turn)
            if entry.is_over:
                self._running.remove(entry)


@dataclass(eq=False)
class _Running:
    """One exchange under way.

    Attributes:
        exchange: The generator.
        link: Where it communicates.
        name: What timelines call it.
        due: The turn in which it goes on.
        pending: What it waits for.
        delivery: What its result still waits for when it has ended.
        is_over: Whether it has ended.
    """

    exchange: Delivered
    link: CountedLink
    name: str
    due: int
    pending: Waitable | None = field(default=None)
    delivery: Waitable | None = field(default=None)
    is_over: bool = False

    def is_ready(self) -> bool:
        """Whether it can go on without the host waiting: on GPUs a stream waits."""
        return self.pending is None or self.link.device.type != "cpu" or is_completed(self.pending)

    def resume(self, turn: int) -> None:
        """Go on to the next round, or to the end; what is pending was waited for."""
        self.pending = None
        self.due = turn + _DISTANCE
        begin, before = perf_counter_ns(), self.link.nbytes
        try:
            self.pending = next(self.exchange)
        except StopIteration as end:
            self.delivery = end.value
            self.is_over = True
        if (log := EventLog.current) is not None:
            log.add("decode" if before else "encode", self.name, begin)
            if self.pending is not None:
                log.add_message("bucket", self.name, perf_counter_ns(), self.pending, self.link.nbytes - before)


class PendingExchange:
    """What a bucket waits for. May be asked and waited for only when all buckets of the backward have been started.

    Args:
        queue: Where it is under way.
        entry: Its place there.
    """

    def __init__(self, queue: ExchangeQueue, entry: _Running) -> None:
        self._queue = queue
        self._entry = entry

    @property
    def nbytes(self) -> int:
        """What it has sent so far, see :attr:`Link.nbytes`."""
        return self._entry.link.nbytes

    def done(self) -> bool:
        """Whether the average is there; takes the turns that need not wait."""
        self._queue.advance_until(self._entry, may_wait=False)
        return self._entry.is_over and self._entry.delivery is None

    def wait(self) -> None:
        """Take turns until the average is there."""
        self._queue.advance_until(self._entry, may_wait=True)
