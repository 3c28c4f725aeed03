"""Reports failures of single ranks through the store, which ranks that wait in a collective can still read.

the rank that fails     reports, then closes its connections
the others              leave their waits: the connection is closed, or they look here now and then
"""

from __future__ import annotations

import json
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from ppe_ddp.backends.rank_store import Reports
from ppe_ddp.backends.work import PythonWork
from ppe_ddp.engine.lost_ranks import LostRank
from ppe_ddp.errors import CommunicationError, PeerAbortedError
from ppe_ddp.torch_internals import is_future

if TYPE_CHECKING:
    from ppe_ddp.backends.rank_store import BoundedStore, WrittenKeys
    from ppe_ddp.contracts import Waitable
    from ppe_ddp.engine.lost_ranks import LostRanks

START = "start"
"""The phase before the first step, in which all ranks get what they start from."""
FINALIZE = "finalize_model_grads()"
"""The phase after a backward in which gradients are summed over the ranks that split one model."""
UPDATE = "DistributedOptimizer.step()"
"""The phase after a backward in which each rank updates its shards, and parameters are gathered."""
EQUALLY_OFTEN = (
    "Every rank must run the same number of synchronized backwards of each wrapper: for one that has none in this step "
    "call ddp.finish_grad_sync() on it, and where other wrappers have a backward, ddp.start_grad_sync() before that "
    "backward, or the ranks wait for one another; uneven numbers of batches need `with Join([ddp])`"
)
_ADVICE = {
    "": "The gradients of this step are not averages: zero them and go on with the next step",
    START: "The parameters may not be those of rank 0: wrap the module again",
    UPDATE: "Parameters are updated in part, until the next step gathers them: zero the gradients and go on with it",
}
LOOK_SECONDS = 0.2  # between looks at the store; nobody else has to wait for them
_LOOK = timedelta(seconds=LOOK_SECONDS)
_GONE_SECONDS = 1.0  # that a rank's last messages have, once it has gone, to arrive
_LONGEST_REASON = 2000  # characters
_LAST_FRAMES = 4


@dataclass(frozen=True)
class Failure:
    """The report of one rank that has failed.

    Attributes:
        rank: The rank that has failed.
        step: Which synchronized backward, counted since the connections were made.
        phase: The phase of the backward in which it failed.
        reason: The error.
        trace: The last lines of its traceback.
        lost: The ranks that it has waited for in vain, where that is what it has failed of.
    """

    rank: int
    step: int
    phase: str
    reason: str
    trace: str = ""
    lost: Sequence[LostRank] = ()

    def __str__(self) -> str:
        """As a clause."""
        if self.phase == START:
            return f"rank {self.rank} failed where all ranks get the parameters of rank 0: {self.reason}"
        if self.phase == FINALIZE:
            return f"rank {self.rank} of the group failed in {self.phase}, call {self.step}: {self.reason}"
        if self.phase == UPDATE:
            return f"rank {self.rank} failed in {self.phase}, after the backward of step {self.step}: {self.reason}"
        return f"rank {self.rank} failed in the {self.phase} phase of its backward, in step {self.step}: {self.reason}"

    @classmethod
    def of(cls, rank: int, step: int, phase: str, error: BaseException, lost: Sequence[LostRank] = ()) -> Failure:
        """The report of ``error`` on this rank."""
        frames = "".join(traceback.format_tb(error.__traceback__)[-_LAST_FRAMES:]) if not lost else ""
        return cls(rank, step, phase, reason_of(error), frames[-_LONGEST_REASON:], lost)

    @classmethod
    def loaded(cls, text: bytes) -> Failure:
        """The report that was written as JSON."""
        fields = json.loads(text)
        return cls(**{**fields, "lost": [LostRank(**one) for one in fields["lost"]]})


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
        lost: Looks for ranks that are lost.
        timeout_seconds: How long a wait in the group may take.
    """

    def __init__(self, store: BoundedStore, name: str, rank: int, lost: LostRanks, timeout_seconds: float) -> None:
        self._store = store
        self._timeout_seconds = timeout_seconds
        self._reports = Reports(store, f"ppe_ddp/failures/{name}")
        self._rank = rank
        self._lost = lost

    def report(self, failure: Failure) -> None:
        """Write the report; before the connections are closed, so that a rank that notices that finds the reason."""
        self._reports.append(json.dumps(asdict(failure)))

    def of_others(self) -> list[Failure]:
        """The reports of the other ranks so far."""
        failures = [Failure.loaded(text) for text in self._reports.look()]
        return [failure for failure in failures if failure.rank != self._rank]

    def check(self, phase: str = "") -> None:
        """Raise the error of :meth:`error` where another rank has failed; nothing where the store does not answer.

        Args:
            phase: The only one that counts; empty for all.
        """
        others: list[Failure] = []
        with suppress(dist.DistError, CommunicationError):  # what is waited for may still come
            others = [failure for failure in self.of_others() if phase in ("", failure.phase)]
        if others:
            raise self.error(others)

    def error(self, failures: Sequence[Failure]) -> PeerAbortedError | CommunicationError:
        """The error to raise on this rank for the reports of others."""
        lost = {one.rank: one for failure in failures for one in failure.lost}
        if lost:
            found = ", ".join(f"{failure.rank}" for failure in failures if failure.lost)
            own = lost.pop(self._rank, None)
            if lost:
                return lost_error(self._rank, list(lost.values()), f"rank {found} has found")
            assert own is not None
            return CommunicationError(
                f"rank {self._rank}: this rank came too late, and rank {found} has given this step up: {own}. Where "
                "the others go on, the next step works; where a rank may be that slow, give init_process_group() a "
                "longer timeout"
            )
        reports = "; ".join(map(str, failures))
        first = min(failures, key=lambda failure: failure.step)
        trace = f"\nThe last lines of rank {first.rank}'s traceback:\n{first.trace}" if first.trace else ""
        advice = _ADVICE.get(first.phase, _ADVICE[""])
        error = PeerAbortedError(f"rank {self._rank}: {reports}. {advice}, or look at that rank's traceback{trace}")
        error.rank, error.step, error.phase, error.reason = first.rank, first.step, first.phase, first.reason
        return error

    def forget(self) -> None:
        """Delete what this rank has reported; called when no rank uses these connections any more."""
        self._store.delete_all()

    def wait(self, pending: Waitable, device: torch.device) -> Any:
        """Wait for ``pending`` on ``device``, no longer than until another rank reports a failure.

        Raises:
            PeerAbortedError: Another rank has failed.
            CommunicationError: Another rank is gone, and so is what it had sent.
        """
        if device.type != "cpu":
            return pending.wait()  # the host does not wait
        self._await(getattr(pending, "work", pending))
        return pending.wait()

    def _await(self, pending: Any) -> None:
        """Wait until a Future or a Work has ended whose transport knows nothing of failures."""
        if is_message(pending):
            return  # a wait for a moment would close the connection, and a second wait would find nothing
        looks = _Looks(self)
        if is_future(pending) and not pending.done():
            arrived = threading.Event()
            pending.add_done_callback(lambda _: arrived.set())
            while not arrived.wait(LOOK_SECONDS):
                looks.look()
        elif type(pending) is dist.Work or isinstance(pending, PythonWork):
            end = monotonic() + self._timeout_seconds
            while not pending.is_completed():
                try:
                    pending.wait(_LOOK)
                except RuntimeError:
                    if pending.is_completed():
                        return  # with an error, which its own wait will raise
                    looks.look()  # the operation goes on
                if isinstance(pending, PythonWork) and monotonic() > end:  # which may count from each of these waits
                    raise CommunicationError(f"the group's timeout of {self._timeout_seconds:g} s is over")


@dataclass(frozen=True)
class Decision:
    """What came of one attempt of the ranks to connect again.

    Attributes:
        rank: The rank that has decided.
        step: The last step that is over: the highest one of all ranks, or that in which this attempt has failed.
        reason: Why the attempt has failed; empty where all ranks connect.
    """

    rank: int
    step: int
    reason: str


class Renewals:
    """The attempts of the ranks of one group to connect again, numbered alike on every rank.

    Each synchronized step with closed connections is one attempt on each rank, which every rank ends by learning its
    decision: there is one for all ranks, by whoever speaks first. The last rank to come says yes; a rank that cannot
    connect says no.

    Args:
        store: Shared by the ranks.
        name: Of the group; the same on every rank, and never used again.
        rank: This process in the group.
        world_size: The size of the group.

    Attributes:
        number: Of the attempt under way, or of the last one.
        is_open: Whether it is under way.
    """

    def __init__(self, store: Callable[[], BoundedStore], name: str, rank: int, world_size: int) -> None:
        self._new_store = store
        self._stores: list[BoundedStore] = []  # one an attempt, since the last that succeeded
        self._name = f"ppe_ddp/renewal/{name}"
        self._rank = rank
        self._world_size = world_size
        self._ended = 0
        self.number = 0

    @property
    def is_open(self) -> bool:
        """Whether this rank has begun an attempt, and not ended it."""
        return self.number > self._ended

    def begin(self) -> None:
        """Begin the next attempt."""
        self._stores.append(self._new_store())
        self.number = self._ended + 1

    def end(self) -> None:
        """End the attempt: its decision is known, and what follows from it done."""
        self._ended = self.number

    def come(self, step: int) -> None:
        """Say that this rank connects, and has had so many steps."""
        keys = [self._key(rank) for rank in range(self._world_size)]

        def write(store: WrittenKeys) -> None:
            store.set(keys[self._rank], str(step))
            if store.add(self._key("count"), 1) == self._world_size:
                highest = max(int(text) for text in store.multi_get(keys))
                store.compare_set(self._key("decision"), "", json.dumps([self._rank, highest, ""]))

        self._stores[-1].do(write)

    def decision(self) -> Decision | None:
        """The decision, if there is one."""
        key = self._key("decision")
        text = self._stores[-1].do(lambda store: store.get(key) if store.check([key]) else b"")
        return Decision(*json.loads(text)) if text else None

    def refuse(self, step: int, reason: str) -> Decision:
        """Say that this rank does not connect, in ``step``; the decision, which may have been another one before."""
        key, word = self._key("decision"), json.dumps([self._rank, step, reason])
        return Decision(*json.loads(self._stores[-1].do(lambda store: store.compare_set(key, "", word))))

    def silent(self) -> list[int]:
        """The ranks that have not come."""
        keys = {rank: self._key(rank) for rank in range(self._world_size)}
        return self._stores[-1].do(lambda store: [rank for rank, key in keys.items() if not store.check([key])])

    def forget(self) -> None:
        """Delete what this rank has written in earlier attempts; called when all ranks have come to this one."""
        while len(self._stores) > 1:
            self._stores.pop(0).delete_all()

    def _key(self, what: object) -> str:
        return f"{self._name}/{self.number}/{what}"


def obstacle(everyone: Sequence[HookProgress]) -> str:
    """Why a hook that has come this far on the ranks cannot go on; empty where all have come equally far."""
    under_way = [rank for rank, one in enumerate(everyone) if one.is_under_way]
    if under_way:
        place = f"was under way on rank {', '.join(map(str, under_way))}"
    elif len({one.calls for one in everyone}) > 1:
        counts = ", ".join(f"{one.calls} on rank {rank}" for rank, one in enumerate(everyone))
        place = f"had been called a different number of times ({counts})"
    else:
        return ""
    return (
        f"when a rank failed, {everyone[0].title} {place}, in a process group that the wrapper did not make, and "
        "cannot make anew: what is sent there next would be taken for the rest of it. Make that group anew, and "
        "wrap the module again"
    )


def is_message(pending: object) -> bool:
    """Whether ``pending`` is gloo's Work of a message between two ranks, which must be waited for once, and to its end.

    It is the only one without a Future. It tells that the message is there only to who waits for it.
    """
    if type(pending) is not dist.Work:
        return False
    try:
        pending.get_future()
    except RuntimeError:
        return True
    return False


def awaited_once(pending: Waitable, device: torch.device) -> Waitable:
    """``pending``; for a message's Work a Future in its place, which a thread that waits for the message completes.

    Every rank that waits for the Future sees meanwhile whether another one has failed.
    """
    if device.type != "cpu" or not is_message(pending):
        return pending
    arrived: torch.futures.Future[Any] = torch.futures.Future()

    def wait() -> None:
        try:
            pending.wait()
        except RuntimeError as error:
            arrived.set_exception(error.with_traceback(None))  # whose frames have the Future
        else:
            arrived.set_result(None)

    threading.Thread(target=wait, name="ppe_ddp-message", daemon=True).start()
    return arrived


class _Looks:
    """The looks of one wait: whether a rank has reported a failure, or is gone for so long that nothing can come."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._gone_since = 0.0

    def look(self) -> None:
        self._failures._lost.note_wait()
        self._failures.check()
        gone = self._failures._lost.gone()
        if not gone:
            return
        self._gone_since = self._gone_since or monotonic()
        if monotonic() - self._gone_since > _GONE_SECONDS:
            raise lost_error(self._failures._rank, gone, "")


def lost_error(rank: int, lost: Sequence[LostRank], reason: str) -> CommunicationError:
    """The error that names the ranks that this one has waited for in vain.

    Args:
        rank: This rank.
        lost: The ranks; at least one.
        reason: How that was found out.
    """
    names = " and ".join(map(str, lost))
    if any(one.is_gone for one in lost):
        advice = "It does not come any more: start the job anew, from a checkpoint if there is one"
    else:
        advice = f"{EQUALLY_OFTEN}; and where a rank may be that slow, give init_process_group() a longer timeout"
    error = CommunicationError(
        f"rank {rank}: the communication of this step failed, as it needs {names}. {advice}"
        + (f" ({reason})" if reason else "")
    )
    error.ranks = tuple(one.rank for one in lost)
    error.step, error.phase = lost[0].step, lost[0].phase
    return error


def aborted_error(rank: int, step: int, statuses: bytes) -> PeerAbortedError:
    """The error for ranks whose backward has raised, and which have taken part in the step all the same.

    Args:
        rank: This rank.
        step: The step.
        statuses: Of all ranks, as they have voted; 0 where nothing was wrong.
    """
    ranks = [other for other, status in enumerate(statuses) if status]
    error = PeerAbortedError(
        f"rank {rank}: the backward of rank {', '.join(map(str, ranks))} raised an error, so the gradients of this "
        "step lack its share; zero them and go on with the next step, or look at that rank's traceback"
    )
    error.rank, error.step, error.phase = ranks[0], step, "backward"
    error.reason, error.is_in_step = "its backward has raised an error", True
    return error


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}"[:_LONGEST_REASON]


def is_explained(error: BaseException) -> bool:
    """Whether an error names what has failed elsewhere, or nobody could be named."""
    return isinstance(error, PeerAbortedError) or (isinstance(error, CommunicationError) and error.ranks is not None)


def is_of_transport(error: BaseException) -> bool:
    """Whether an error may be what a closed connection looks like, from our code or a function of the user's."""
    if isinstance(error, CommunicationError | PeerAbortedError | dist.DistError):
        return True
    # gloo has no type of its own: most name one of its sources, and what ends with another call tells of the connection
    return type(error) is RuntimeError and any(sign in str(error) for sign in ("gloo", "pair closure"))
