"""Reports failures of single ranks through the store, which ranks that wait in a collective can still read.

the rank that fails     reports, then closes its connections
the others              leave their waits: the connection is closed, or they look here now and then
"""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from ppe_ddp.engine.torch_internals import is_future
from ppe_ddp.errors import PeerAbortedError

if TYPE_CHECKING:
    from ppe_ddp.contracts import Waitable

LOOK_SECONDS = 0.2  # between looks at the store; nobody else has to wait for them
_LOOK = timedelta(seconds=LOOK_SECONDS)
_LONGEST_REASON = 2000  # characters
_READY = "ready"


@dataclass(frozen=True)
class Failure:
    """The report of one rank that has failed.

    Attributes:
        rank: The rank that has failed.
        step: Which synchronized backward, counted since the connections were made.
        phase: The phase of the backward in which it failed.
        reason: The error.
    """

    rank: int
    step: int
    phase: str
    reason: str


@dataclass(frozen=True)
class HookProgress:
    """The progress of one rank in process groups that are not ours, which cannot be made anew after a failure.

    Attributes:
        title: What communicates there.
        calls: How often it was called.
        is_under_way: Whether the last one had not ended when the communication failed.
    """

    title: str
    calls: int
    is_under_way: bool


class Failures:
    """The reports of the ranks of one group, for as long as its connections last.

    Args:
        store: Shared by the ranks.
        name: Of the connections; the same on every rank, and never used again.
        rank: This process in the group.
    """

    def __init__(self, store: Any, name: str, rank: int) -> None:
        self._store = store
        self._key = f"ppe_ddp/failures/{name}"
        self._rank = rank

    def report(self, failure: Failure) -> None:
        """Write the report; before the connections are closed, so that a rank that notices that finds the reason."""
        number = self._store.add(f"{self._key}/begun", 1)
        self._store.set(f"{self._key}/{number}", json.dumps(asdict(failure)))
        self._store.add(f"{self._key}/count", 1)

    def of_others(self) -> list[Failure]:
        """The reports of the other ranks so far."""
        if not self._store.check([f"{self._key}/count"]):
            return []
        count = self._store.add(f"{self._key}/begun", 0)
        keys = [key for key in (f"{self._key}/{number + 1}" for number in range(count)) if self._store.check([key])]
        failures = [Failure(**json.loads(self._store.get(key))) for key in keys]
        return [failure for failure in failures if failure.rank != self._rank]

    def announce(self, attempt: int, reason: str) -> None:
        """Say to the others whether this rank will make new connections; ``reason`` is empty if so.

        Args:
            attempt: How often it has said so before: once for each synchronized backward, on every rank.
            reason: Why not.
        """
        self._store.set(f"{self._key}/renewal/{attempt}/{self._rank}", reason or _READY)

    def announced(self, attempt: int, world_size: int) -> list[str] | None:
        """What all ranks have said to this attempt: reasons, empty where they are ready; None while one has not."""
        keys = [f"{self._key}/renewal/{attempt}/{rank}" for rank in range(world_size)]
        if not self._store.check(keys):
            return None
        words = [self._store.get(key).decode() for key in keys]
        return ["" if word == _READY else word for word in words]

    def compare(self, progress: HookProgress, world_size: int, timeout: timedelta) -> str:
        """Tell the others how far this rank has come, and wait for what they say; all ranks must call this.

        Returns:
            Why that cannot go on, the same on every rank; empty where all have come equally far.

        Raises:
            DistError: Not all ranks have come within ``timeout``.
        """
        keys = [f"{self._key}/progress/{rank}" for rank in range(world_size)]
        self._store.set(keys[self._rank], json.dumps(asdict(progress)))
        self._store.wait(keys, timeout)
        everyone = [HookProgress(**json.loads(self._store.get(key))) for key in keys]
        under_way = [rank for rank, one in enumerate(everyone) if one.is_under_way]
        if under_way:
            place = f"was under way on rank {', '.join(map(str, under_way))}"
        elif len({one.calls for one in everyone}) > 1:
            counts = ", ".join(f"{one.calls} on rank {rank}" for rank, one in enumerate(everyone))
            place = f"had been called a different number of times ({counts})"
        else:
            return ""
        return (
            f"when a rank failed, {progress.title} {place}, in a process group that the wrapper did not make, and "
            "cannot make anew: what is sent there next would be taken for the rest of it. Make that group anew, and "
            "wrap the module again"
        )

    def check(self) -> None:
        """Raise :class:`PeerAbortedError` where another rank has failed."""
        others = self.of_others()
        if others:
            raise self.error(others)

    def error(self, failures: list[Failure]) -> PeerAbortedError:
        """The error to raise on this rank for the reports of others."""
        reports = "; ".join(
            f"rank {failure.rank} failed in the {failure.phase} phase of its backward: {failure.reason}"
            for failure in failures
        )
        error = PeerAbortedError(
            f"rank {self._rank}: {reports}. The gradients of this step are not averages: zero them and go on with the "
            "next step, or look at that rank's traceback"
        )
        error.step = min(failure.step for failure in failures)
        return error

    def wait(self, pending: Waitable, device: torch.device) -> Any:
        """Wait for ``pending`` on ``device``, no longer than until another rank reports a failure.

        Raises:
            PeerAbortedError: Another rank has failed.
        """
        if device.type != "cpu":
            return pending.wait()  # the host does not wait
        self._await(getattr(pending, "work", pending))
        return pending.wait()

    def _await(self, pending: Any) -> None:
        """Wait until a Future or a Work of a transport in C++ has ended, which knows nothing of failures."""
        if is_future(pending) and not pending.done():
            arrived = threading.Event()
            pending.add_done_callback(lambda _: arrived.set())
            while not arrived.wait(LOOK_SECONDS):
                self.check()
        elif type(pending) is dist.Work:
            while not pending.is_completed():
                try:
                    pending.wait(_LOOK)
                except RuntimeError:
                    if not pending.is_completed():  # this look is over; the operation goes on
                        self.check()


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
