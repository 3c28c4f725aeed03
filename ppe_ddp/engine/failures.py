"""Handles the failure of a rank: it is reported, noticed by waiting ranks and named; then the ranks connect again.

In this order:

    report    The failing rank writes the error to the store and closes its connections (Groups.fail).
    look      The other ranks leave their waits: their connection is closed, or they find the report (Failures.wait).
    name      An error of the transport becomes an error that names a rank: one that has reported, or else one that is
              gone, is stopped, or has not come (LostRanks.find). A rank of this node is seen by its process
              (peer_processes.py), and all groups are told if it is gone. On other nodes every rank whose communication
              has failed writes its position to the store; a rank that writes nothing counts as silent.
    renew     At its next step each rank waits until all have come, and makes new connections (Renewals,
              Groups.renewing).
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from time import monotonic
from typing import Any, TypeVar

import torch
from torch import distributed as dist

from ppe_ddp.backends.group_internals import default_group, store_of
from ppe_ddp.backends.rank_store import BoundedStore, Meeting, MeetingOutcome, Reports, WrittenKeys
from ppe_ddp.backends.work import Work
from ppe_ddp.contracts import AllPending, Waitable
from ppe_ddp.engine.peer_processes import Activity, Condition, Deaths, PeerProcesses, Position
from ppe_ddp.errors import AbortedError, CommunicationError, DisagreementError, PeerAbortedError
from ppe_ddp.waiting import InFlight, in_flight, is_done, paced, progress_engine

logger = logging.getLogger("ppe_ddp")

T = TypeVar("T")

# Phases in which a rank may fail, besides those of a backward:
START = "start"  # before the first step, in which all ranks get the initial parameters
FINALIZE = "finalize_model_grads()"  # after a backward: gradients are summed over the ranks that split one model
CLIP = "clip_grad_norm_() or GradScaler.step()"  # after it: the ranks find the norm of all gradients, or whether inf
UPDATE = "DistributedOptimizer.step()"  # after it: each rank updates its shards, and parameters are gathered
LOAD = "DistributedOptimizer.load_state_dict()"  # each rank loads its shards, and parameters are gathered
SAVE = "DistributedOptimizer.state_dict()"  # ranks send one another parts of their shards
COMPARE = "a comparison of parameters"  # outside of a step, by a call of all ranks
_JOIN = "for uneven numbers of batches train in `with model.join():`"
EQUALLY_OFTEN = (
    "Every rank must run the same number of synchronized backwards of each wrapper, and call step() of a "
    "DistributedOptimizer after the same ones: for a wrapper that has no backward in this step "
    "call model.finish_grad_sync() on it, and where other wrappers have a backward, model.start_grad_sync() before "
    f"that backward, or the ranks wait for one another; {_JOIN}"
)
ADVICE = {
    "": "The gradients of this step are not averages: zero them and go on with the next step",
    START: "The parameters may not be those of rank 0: wrap the module again",
    CLIP: "No rank has clipped or scaled the gradients: zero them and go on with the next step",
    UPDATE: "Parameters are updated in part, until the next step gathers them: zero the gradients and go on with it",
    LOAD: "Some ranks may have loaded the state, and others not: load it again, on all ranks",
    SAVE: "No rank has the whole state: call state_dict() again, on all ranks",
    COMPARE: "Make the call that compares them again, on all ranks",
}
FINAL = "The job cannot go on: start it anew, from a checkpoint if there is one"
_HAS_WAITED = re.compile("Timed out waiting|has waited for the group's timeout")  # in gloo's error, and in ours
LOOK_SECONDS = 0.2  # between looks at the store
_GONE_SECONDS = 1.0  # for the last messages of a rank to arrive after it has gone
_LONGEST_REASON = 2000  # characters
_LAST_FRAMES = 4
# A connection closes a moment before the system shows that its process has ended.
_HERE_SECONDS = 0.5
_ELSEWHERE_SECONDS = 1.0  # a failure reaches all ranks that wait at about the same time
_NAP_SECONDS = 0.01
_SHORT_NAP_SECONDS = 0.0005
_TELL_SECONDS = 20.0  # before the log first tells for whom this rank waits; the intervals grow ...
_RARELY_SECONDS = 600.0  # ... up to this
_COMPLETING_SECONDS = 5.0  # for other ranks of this node to complete the step that is complete here ...
_STOPPED_SECONDS = 1.0  # ... if they are stopped: their user may let them go on
_ARRIVING_SECONDS = 0.3  # for ranks of other nodes, whose progress is not visible
_UNCAUGHT = "an error that nobody has caught, "
_SILENT = "does not answer"
_UNASKED = "cannot be asked, as the store that the ranks share does not answer"
LATE = "has not come"


@dataclass(frozen=True)
class LostRank:
    """A rank that others have waited for in vain."""

    rank: int
    condition: str  # its state as a verb phrase, such as "has died"
    step: int | None = None  # the last step in which it was seen
    phase: str = ""  # the name of its last activity in that step
    last: str = ""  # the last activity as a verb phrase; empty if unknown
    is_gone: bool = False  # whether it will never come
    reason: str = ""  # the error with which it has left

    def __str__(self) -> str:
        """The rank and its state, for an error message."""
        last = f" (it {self.last})" if self.last else ""
        return f"rank {self.rank}, which {self.condition}{last}"


class LostRanks:
    """Finds the lost ranks of one group; lives as long as the group's connections.

    ``name`` identifies the connections: the same on every rank, and never used again. Without ``job``, a store of all
    ranks of the job, no rank of another group is told of a death.
    """

    def __init__(
        self,
        store: BoundedStore,
        name: str,
        rank: int,
        world_size: int,
        processes: PeerProcesses,
        job: BoundedStore | None = None,
    ) -> None:
        self._reports = Reports(store, f"ppe_ddp/present/{name}")
        self._rank, self.world_size = rank, world_size
        self._processes, self._deaths = processes, Deaths(job, processes)
        self._elsewhere = set(range(world_size)) - {rank, *processes.on_this_node}
        self._has_answered = False

    def gone(self) -> list[LostRank]:
        """The ranks that are known to be gone, without waiting."""
        here = self._not_running()
        self._tell_job(one for one in here if one.condition == Condition.ENDED.value)
        if self._elsewhere:
            with suppress(dist.DistError, CommunicationError):
                told = self._told()
                if told and not self._has_answered:  # a rank that calls find() waits for an answer of each rank
                    self._has_answered = True
                    self._tell(here)
                here += [LostRank(**one) for record in told.values() for one in record["lost"]]
        gone = [one for one in here if one.is_gone]
        return gone or self._told_by_job()

    def find(self, explained: Callable[[], bool] = lambda: False) -> list[LostRank]:
        """The ranks that this rank waited for when its communication failed.

        ``explained`` is polled: it returns True once the failure has another reason, and the search ends.
        """
        told: dict[int, dict[str, Any]] = {}
        said: list[LostRank] | None = None
        found: list[LostRank] = []
        here_until = monotonic() + (_HERE_SECONDS if self._processes.on_this_node else 0.0)
        ask_job = paced(lambda: found.extend(self._told_by_job()), LOOK_SECONDS)
        is_store_silent = False

        def look_elsewhere() -> None:
            nonlocal said, told
            if found != said:
                self._tell(found)
                said = found.copy()
            told = self._told()
            found.extend(LostRank(**one) for record in told.values() for one in record["lost"] if not said)
            if not found:
                ask_job()

        def is_clear() -> bool:
            nonlocal is_store_silent
            found[:] = self._not_running()
            self._tell_job(one for one in found if one.is_gone)
            try:
                if self._elsewhere and not is_store_silent:
                    look_elsewhere()
            except (dist.DistError, CommunicationError):  # without the store, what can be seen here must do
                is_store_silent = True
            have_told = is_store_silent or (told and len(told) == len(self._elsewhere))
            return bool(found or explained() or (have_told and monotonic() >= here_until))

        seconds = _ELSEWHERE_SECONDS if self._elsewhere else _HERE_SECONDS
        progress_engine(os.getpid()).wait_until(is_clear, seconds=seconds, nap=_NAP_SECONDS)
        if explained():  # even if a rank was found: it may have reported an error before its process ended
            return []
        condition = _UNASKED if is_store_silent else _SILENT
        return found or self._not_running() or self._silent(told, condition) or self._behind(told)

    def note_wait(self) -> None:
        """Show the other processes that this rank waits."""
        self._processes.note_wait()

    def tell_wait(self, seconds: float) -> None:
        """Log for whom this rank waits; among ranks of one node that wait at the same place, only the lowest logs."""
        own = self._processes.position(self._rank)
        lower = [self._processes.position(rank) for rank in self._processes.on_this_node if rank < self._rank]
        lost = self._not_running() or self._behind({})
        if own is None or any(one == own for one in lower) or not (lost or self._elsewhere):
            return
        whom = " and ".join(map(str, lost)) or "a rank of another node, where the log may tell which"
        logger.warning(
            "rank %d: step %d has waited for %d s for %s. If it does not come to this step, let it call "
            "model.finish_grad_sync(); %s",
            *(self._rank, own.step, seconds, whom, _JOIN),
        )

    def await_completion(self) -> None:
        """Wait until the other ranks have completed the last step that is complete here; called before closing.

        They may still be receiving messages of that step from this rank. Closing would abort these messages: this rank
        would have taken the step, and the others would not.
        """
        own = self._processes.position(self._rank)
        has_met = own is not None and own.activity in (Activity.BUCKET, Activity.VOTE, Activity.LATE_BUCKET)
        progress = progress_engine(os.getpid())
        # A rank at a bucket has received the mask of every rank. So all have begun this step, and completed the last.
        if self._elsewhere and not has_met:
            progress.wait_until(lambda: False, seconds=_ARRIVING_SECONDS, nap=_SHORT_NAP_SECONDS)
        completing, nap = self._processes.completing, _SHORT_NAP_SECONDS
        progress.wait_until(lambda: not completing(stopped=True), seconds=_STOPPED_SECONDS, nap=nap)
        progress.wait_until(lambda: not completing(), seconds=_COMPLETING_SECONDS, nap=nap)

    def leave(self) -> None:
        """Tell the other ranks that this process is about to end, and of which error if that is known."""
        error = getattr(sys, "last_value", None)
        text = f"{_UNCAUGHT}{type(error).__name__}: {error}" if error is not None else ""
        self._processes.leave(text)
        if self._elsewhere:
            own = self._processes.position(self._rank)
            with suppress(dist.DistError, CommunicationError):
                self._tell([self._lost(self._rank, _said(Condition.LEFT, text), own, text, is_gone=True)])

    def behind(self, ranks: Sequence[int]) -> list[LostRank]:
        """A :class:`LostRank` for each of ``ranks``, which have not come, with what is known of it."""
        found = self._known()
        return [found.get(rank) or self._lost(rank, LATE, self._processes.position(rank)) for rank in ranks]

    def refined(self, lost: Iterable[LostRank]) -> list[LostRank]:
        """Those that another rank has found, with what is known here of those that may still come."""
        known = self._known()
        return [one if one.is_gone else known.get(one.rank, one) for one in lost]

    def _known(self) -> dict[int, LostRank]:
        return {one.rank: one for one in (*self._told_by_job(), *self._not_running())}

    def _tell_job(self, gone: Iterable[LostRank]) -> None:
        for one in gone:
            self._deaths.tell(one.rank, one.condition, one.reason)

    def _told_by_job(self) -> list[LostRank]:
        deaths = self._deaths.look() if self._elsewhere else {}
        found = {rank: told for rank, told in deaths.items() if rank in self._elsewhere}
        return [LostRank(rank, how, is_gone=True, reason=why) for rank, (how, why) in found.items()]

    def _not_running(self) -> list[LostRank]:
        found = []
        for rank, (condition, text) in self._processes.lost().items():
            said = _said(condition, text)
            is_gone = condition is not Condition.STOPPED
            found.append(self._lost(rank, said, self._processes.position(rank), text, is_gone=is_gone))
        return found

    def _tell(self, lost: list[LostRank]) -> None:
        record = {"position": self._processes.position(self._rank), "lost": [asdict(one) for one in lost]}
        self._reports.append(json.dumps([self._rank, record]))

    def _told(self) -> dict[int, dict[str, Any]]:
        """The last record that each rank of another node has written."""
        told: dict[int, dict[str, Any]] = dict(json.loads(text) for text in self._reports.look())
        return {rank: record for rank, record in told.items() if rank in self._elsewhere}

    def _silent(self, told: dict[int, dict[str, Any]], condition: str) -> list[LostRank]:
        return [LostRank(rank, condition) for rank in sorted(self._elsewhere - told.keys())]

    def _behind(self, told: dict[int, dict[str, Any]]) -> list[LostRank]:
        """The ranks that are behind this one: it waits for them, or they wait for each other."""
        own = self._processes.position(self._rank)
        if own is None:
            return []
        positions = {rank: self._processes.position(rank) for rank in self._processes.on_this_node}
        for rank, record in told.items():
            if record["position"] is not None:
                step, activity, bucket, waits = record["position"]
                positions[rank] = Position(step, Activity(activity), bucket, waits)
        late = {rank: position for rank, position in positions.items() if position and position.is_behind(own)}
        return [self._lost(rank, LATE, position) for rank, position in sorted(late.items())]

    def _lost(
        self, rank: int, condition: str, position: Position | None, text: str = "", *, is_gone: bool = False
    ) -> LostRank:
        reason = text.removeprefix(_UNCAUGHT)
        if position is None:
            return LostRank(rank, condition, is_gone=is_gone, reason=reason)
        return LostRank(rank, condition, position.step, position.phase, str(position), is_gone, reason)


def _said(condition: Condition, text: str) -> str:
    return f"{condition.value} by {text}" if text else condition.value


@dataclass(frozen=True)
class Failure:
    """The report of one rank that has failed."""

    rank: int  # the rank that has failed
    step: int  # number of the synchronized backward, as in ``Groups.step``
    phase: str  # the phase of the backward in which it failed
    reason: str  # the error
    trace: str = ""  # the last lines of its traceback
    lost: Sequence[LostRank] = ()  # the ranks that it waited for in vain, if it failed for that reason
    job_rank: int | None = None  # the rank of the job that has failed, if this one has heard of it in another group
    is_final: bool = False  # whether that rank does not come any more

    def __str__(self) -> str:
        """The report as a clause, for an error message."""
        if self.phase == START:
            return f"rank {self.rank} failed where all ranks get the parameters of rank 0: {self.reason}"
        if self.phase in (FINALIZE, CLIP):
            return f"rank {self.rank} of the group failed in {self.phase}, call {self.step}: {self.reason}"
        if self.phase in (UPDATE, LOAD, SAVE, COMPARE):
            return f"rank {self.rank} failed in {self.phase}, after the backward of step {self.step}: {self.reason}"
        return f"rank {self.rank} failed in the {self.phase} phase of its backward, in step {self.step}: {self.reason}"

    @classmethod
    def of(cls, rank: int, step: int, phase: str, error: BaseException, lost: Sequence[LostRank] = ()) -> Failure:
        """The report of ``error`` on this rank."""
        frames = "".join(traceback.format_tb(error.__traceback__)[-_LAST_FRAMES:]) if not lost else ""
        heard = error if isinstance(error, AbortedError) else AbortedError()
        trace = frames[-_LONGEST_REASON:]
        return cls(rank, step, phase, reason_of(error), trace, lost, heard.job_rank, heard.is_final)

    @classmethod
    def loaded(cls, text: bytes) -> Failure:
        """Load a report from its JSON."""
        fields = json.loads(text)
        return cls(**{**fields, "lost": [LostRank(**one) for one in fields["lost"]]})


@dataclass(frozen=True)
class HookProgress:
    """The progress of a hook on one rank in the user's process groups, which cannot be made anew after a failure."""

    title: str  # the hook's name
    calls: int  # how often it was called
    is_under_way: bool  # whether the last call was still in flight when the communication failed


class Failures:
    """The failure reports of the ranks of one group; lives as long as the group's connections.

    Args:
        store: Shared by the ranks.
        name: Identifies the connections; the same on every rank, and never used again.
        rank: The rank of this process in the group.
        lost: Finds lost ranks.
        job_rank_of: Converts a rank of the group to the rank in the job.
        step: Returns the current step of this rank.
        on_host: The device types whose collectives the host waits for: "cpu", and "cuda" where gloo or MPI serves it.
    """

    def __init__(
        self,
        store: BoundedStore,
        name: str,
        rank: int,
        lost: LostRanks,
        job_rank_of: Callable[[int], int | None] = lambda _rank: None,
        step: Callable[[], int] = lambda: sys.maxsize,
        on_host: Collection[str] = ("cpu",),
    ) -> None:
        self._store = store
        self._job_rank_of = job_rank_of
        self._step = step
        self._on_host = on_host
        self._name = name
        self._reports = Reports(store, f"ppe_ddp/failures/{name}")
        self._rank = rank
        self._lost = lost

    def report(self, failure: Failure) -> None:
        """Write the report; called before the connections are closed, so that ranks that see them closed find it."""
        self._reports.append(json.dumps(asdict(failure)))

    def report_error(self, step: int, phase: str, error: BaseException) -> None:
        """Report that this rank has failed with ``error``, or for which ranks it has waited in vain.

        Such ranks may be of another group of the wrapper: they have other numbers here, or are not here.
        """
        lost: Sequence[LostRank] = ()
        if isinstance(error, CommunicationError) and error.ranks:
            own = {self._job_rank_of(rank): rank for rank in range(self._lost.world_size)}
            is_known = error.job_ranks and None not in own
            lost = self._lost.behind([own[r] for r in error.job_ranks if r in own] if is_known else error.ranks)
            error = error if lost else relayed(error)
        self.report(Failure.of(self._rank, step, phase, error, lost))

    def of_others(self) -> list[Failure]:
        """The reports of the other ranks so far."""
        failures = [Failure.loaded(text) for text in self._reports.look()]
        return [failure for failure in failures if failure.rank != self._rank]

    def check(self, phase: str = "") -> None:
        """Raise the error of :meth:`error` if another rank has failed in ``phase``; an empty phase stands for any.

        Does nothing if the store does not answer.
        """
        others: list[Failure] = []
        with suppress(dist.DistError, CommunicationError):  # the awaited message may still arrive
            others = [failure for failure in self.of_others() if phase in ("", failure.phase)]
        if others:
            raise self.error(others)

    def error(self, failures: Sequence[Failure]) -> PeerAbortedError | CommunicationError:
        """The error to raise on this rank for the reports of others."""
        lost = {one.rank: one for failure in failures for one in failure.lost}
        if lost:
            lost = {one.rank: one for one in self._lost.refined(lost.values())}
            found = ", ".join(f"{failure.rank}" for failure in failures if failure.lost)
            own = lost.pop(self._rank, None)
            late = CommunicationError(
                f"rank {self._rank}: this rank came too late, and rank {found} has given this step up: {own}. Where "
                "the others go on, the next step works; where a rank may be that slow, give init_process_group() a "
                "longer timeout"
            )
            if lost:
                late = self.lost_error(list(lost.values()), f"rank {found} has found")
            late.is_late = own is not None and not late.is_final
            if own is not None:
                late.phase = next(failure.phase for failure in failures if failure.lost)
            return late
        first = min(failures, key=lambda failure: failure.step)
        trace = f"\nThe last lines of rank {first.rank}'s traceback:\n{first.trace}" if first.trace else ""
        advice = FINAL if first.is_final else ADVICE.get(first.phase, ADVICE[""])
        error = PeerAbortedError(
            f"rank {self._rank}: {'; '.join(map(str, failures))}. {advice}, or look at that rank's traceback{trace}"
        )
        error.rank, error.step, error.phase, error.reason = first.rank, first.step, first.phase, first.reason
        error.job_rank = self._job_rank_of(first.rank) if first.job_rank is None else first.job_rank
        error.is_final = first.is_final
        error.told_in = self._name
        return error

    def check_lost(self, reason: str = "") -> None:
        """Raise CommunicationError if a rank is known to be gone; it waits for nothing."""
        if lost := self._lost.gone():
            raise self.lost_error(lost, reason)

    def lost_error(self, lost: Sequence[LostRank], reason: str) -> CommunicationError:
        """The error that names the ranks, at least one, that this rank has waited for in vain.

        ``reason`` tells how they were found.
        """
        if any(one.is_gone for one in lost):
            had_fewer = any(one.condition == Condition.LEFT.value or _HAS_WAITED.search(one.condition) for one in lost)
            skipped = "If it has left out a backward: let it call model.finish_grad_sync() in its place"
            fewer = f"If it had fewer batches: {_JOIN}. {skipped}. If it has failed"
            when = fewer if had_fewer else "It does not come any more"
            advice = f"{when}: start the job anew, from a checkpoint if there is one"
        else:
            advice = f"{EQUALLY_OFTEN}; and where a rank may be that slow, give init_process_group() a longer timeout"
        told = f"{' and '.join(map(str, lost))}. {advice}" + (f" ({reason})" if reason else "")
        error = CommunicationError(f"rank {self._rank}: the communication of this step failed, as it needs {told}")
        first = next((k for k, one in enumerate(lost) if one.is_gone), 0)
        error.ranks = tuple(one.rank for one in lost)
        error.job_ranks = tuple(map(self._job_rank_of, error.ranks))
        error.job_rank, error.is_final = error.job_ranks[first], lost[first].is_gone
        error.step, error.phase = lost[0].step, lost[0].phase
        error.reason = next((one.reason for one in lost if one.reason), "")
        return error

    def to_report(self, error: BaseException) -> BaseException | None:
        """The error to report to the ranks of these connections for ``error``; None if they know of it already."""
        if not isinstance(error, PeerAbortedError):
            return None if isinstance(error, DisagreementError) else error
        if error.told_in in ("", self._name):
            return None
        with suppress(dist.DistError, CommunicationError):
            if self.of_others():
                return None
        return relayed(error)

    def forget(self) -> None:
        """Delete what this rank has reported; called when no rank uses these connections any more."""
        self._store.delete_all()

    def wait(
        self, pending: Waitable, device: torch.device, waited: Callable[[float], object] = lambda _seconds: None
    ) -> Any:
        """Wait for ``pending`` on ``device``, until it is done or another rank fails, or ``waited(seconds)`` raises.

        Raises:
            PeerAbortedError: Another rank has reported a failure.
            CommunicationError: Another rank is gone, and its messages have not arrived.
        """
        if isinstance(pending, AllPending):
            for part in pending.parts:
                self.wait(part, device, waited)
            return None
        call = getattr(pending, "work", pending)
        if type(call) is dist.Work and (device.type not in self._on_host or call.is_completed()):
            return pending.wait()  # on a stream of the device, if the host does not wait
        one = call if isinstance(call, Work) else in_flight(call)
        if one is not None and not one.done():
            self._await(one, waited)
        return pending.wait()

    def blocks(self, pending: Waitable, device: torch.device) -> bool:
        """Whether the host would wait in :meth:`wait`, and not a stream of ``device``, or nobody."""
        if isinstance(pending, AllPending):
            return any([self.blocks(part, device) for part in pending.parts])
        call = getattr(pending, "work", pending)
        is_on_stream = isinstance(call, dist.Work) and not isinstance(call, Work) and device.type not in self._on_host
        return not (is_on_stream or is_done(pending))

    def _await(self, one: Work | InFlight, waited: Callable[[float], object]) -> None:
        """Wait until ``one`` is done, and look for failures meanwhile: its transport may not notice them."""
        progress = progress_engine(os.getpid())
        if not isinstance(one, Work) and progress.is_idle:
            one.block()
            if one.done():  # the usual case
                return
        begin, gone_since, ahead_since = monotonic(), 0.0, 0.0
        tell = paced(
            lambda: self._lost.tell_wait(monotonic() - begin), _TELL_SECONDS, longest=_RARELY_SECONDS, at_once=False
        )

        def look() -> None:
            nonlocal gone_since, ahead_since
            self._lost.note_wait()
            try:
                self.check()
            except PeerAbortedError as error:
                # A rank that has failed in a later step had completed this one. So every rank has sent its part of
                # this step, and the message is in flight.
                ahead_since = ahead_since or monotonic()
                is_ahead = error.step is not None and error.step > self._step()
                if not is_ahead or monotonic() - ahead_since > _GONE_SECONDS:
                    if is_ahead and (gone := self._lost.gone()):
                        raise self.lost_error(gone, "") from None
                    raise
            tell()
            waited(monotonic() - begin)
            if gone := self._lost.gone():
                gone_since = gone_since or monotonic()
                if monotonic() - gone_since > _GONE_SECONDS:
                    raise self.lost_error(gone, "")

        looks = paced(look, LOOK_SECONDS, at_once=False)
        if isinstance(one, Work):
            one.await_done(looks)
        else:
            progress.wait_until(one.done, looks, rest=one.block)


def _next_place() -> int:
    return store_of(default_group()).add("ppe_ddp/renewals", 1)


class Renewals:
    """The attempts of the ranks of one group to connect again, with the same numbers on every rank.

    Each synchronized step with closed connections is one attempt: a meeting to which each rank brings the numbers of
    its steps. A rank that cannot connect refuses, with the step and the reason. If several groups connect again, they
    do so in the order in which their meetings became complete. That order is the same on all ranks.

    ``store`` makes a store for one attempt. ``name`` is the same on every rank, and never used again.
    """

    def __init__(self, store: Callable[[], BoundedStore], name: str, rank: int, world_size: int) -> None:
        self._new_store = store
        self._stores: list[BoundedStore] = []  # one an attempt, since the last that succeeded
        self._name = f"ppe_ddp/renewal/{name}"
        self._rank, self._world_size = rank, world_size
        self._came = self._ended = 0
        self._outcome: MeetingOutcome | None = None
        self.number = 0  # of the attempt under way, or of the last one

    @property
    def is_open(self) -> bool:
        """Whether this rank has begun an attempt and not ended it."""
        return self.number > self._ended

    def begin(self) -> None:
        """Begin the next attempt, or resume one that could not be ended because the store did not answer."""
        self._stores.append(self._new_store())
        self.number = self._ended + 1
        self._outcome = None

    def end(self) -> None:
        """End the attempt, whose outcome has been acted on."""
        self._ended = self.number

    def put_off(self) -> None:
        """Put the attempt off to this rank's next step."""
        self.number = self._ended

    def come(self, step: int) -> None:
        """Announce that this rank connects after ``step`` steps; does nothing if it has announced that already."""
        if self._came != self.number:
            self._came = self.number
            self._do(lambda meeting: meeting.come(step))

    def outcome(self) -> MeetingOutcome | None:
        """The outcome, if there is one."""
        if self._outcome is None:
            self._outcome = self._do(Meeting.outcome)
        return self._outcome

    def may_precede(self, place: int) -> bool:
        """Whether this attempt may precede one at ``place``: all have come, and its place is lower or not set yet."""
        outcome = self.outcome()
        if outcome is None:
            return self._do(Meeting.is_full)
        return bool(outcome.words) and outcome.place < place

    def refuse(self, step: int, reason: str | BaseException, lost: Sequence[LostRank] = ()) -> MeetingOutcome:
        """Announce that this rank does not connect in ``step``; returns the outcome, which may be an earlier decision.

        ``lost`` are the ranks that it has waited for in vain, if that is the reason.
        """
        text = reason if isinstance(reason, str) else reason_of(reason)
        # Of another rank, of whose failure this one has been told.
        heard = getattr(reason, "job_rank", None), getattr(reason, "is_final", False)
        return self._do(lambda meeting: meeting.refuse([step, text, [asdict(one) for one in lost], *heard]))

    def absent(self) -> list[int]:
        """The ranks that have not come."""
        return self._do(Meeting.absent)

    def _do(self, call: Callable[[Meeting], T]) -> T:
        name = f"{self._name}/{self.number}"

        def ask(store: WrittenKeys) -> T:
            return call(Meeting(store, name, self._rank, self._world_size, _next_place))

        return self._stores[-1].do(ask)

    def forget(self) -> None:
        """Delete the keys of earlier attempts; called when all ranks have come to the current one."""
        while len(self._stores) > 1:
            self._stores.pop(0).delete_all()


def obstacle(everyone: Sequence[HookProgress]) -> str:
    """The reason why a hook with this progress on the ranks cannot go on; empty if it is the same on all."""
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


def aborted_error(rank: int, step: int, statuses: bytes) -> PeerAbortedError:
    """The error for a step in which the backward of some ranks has raised, although they have completed the step.

    ``statuses`` has the status of each rank from the vote; 0 stands for success.
    """
    ranks = [other for other, status in enumerate(statuses) if status]
    error = PeerAbortedError(
        f"rank {rank}: the backward of rank {', '.join(map(str, ranks))} raised an error, so the gradients of this "
        "step lack its share; zero them and go on with the next step, or look at that rank's traceback"
    )
    error.rank, error.step, error.phase = ranks[0], step, "backward"
    error.reason, error.is_in_step = "its backward has raised an error", True
    return error


def relayed(error: BaseException) -> AbortedError:
    """The error to report to another group for ``error``; it names the rank of the job that has failed."""
    told = (isinstance(error, PeerAbortedError) and error.reason) or reason_of(error)
    job_rank = getattr(error, "job_rank", None)
    culprit = dist.get_rank() if job_rank is None else job_rank
    if "of the job)" not in told:
        told += f" (rank {culprit} of the job)"
    aborted = AbortedError(told.removeprefix("AbortedError: "))
    aborted.job_rank, aborted.is_final = culprit, getattr(error, "is_final", False)
    return aborted


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:_LONGEST_REASON]


def is_explained(error: BaseException) -> bool:
    """Whether an error already names the ranks that have failed, or states that none could be named."""
    return isinstance(error, PeerAbortedError) or (isinstance(error, CommunicationError) and error.ranks is not None)


def is_of_transport(error: BaseException) -> bool:
    """Whether an error may come from a closed connection, in our code or in a function of the user's."""
    if isinstance(error, CommunicationError | PeerAbortedError | dist.DistError):
        return True
    # gloo raises RuntimeError. Most messages name one of its source files; aborted calls say "pair closure".
    return type(error) is RuntimeError and any(sign in str(error) for sign in ("gloo", "pair closure"))
