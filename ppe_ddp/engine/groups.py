"""A wrapper's own duplicates of the user's process group, so that the user's collectives cannot get in between.

Each rank launches buckets at other moments. If the user's code also communicates in the same group during backward
(SyncBatchNorm, expert parallelism), the order of collectives would differ between ranks. So a wrapper duplicates the
user's group, as MPI programs duplicate their communicator: once for buckets, which a function may send from a thread of
its own, and once for masks and votes.

    duplicate ──► OPEN ──► fail: a rank has failed ──► CLOSED ──► renewing, on all ranks ──► OPEN
                    └────► release: no wrapper uses them; the next wrapper over the same parent takes them
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from torch import distributed as dist
from torch.distributed import ProcessGroup, default_pg_timeout

from ppe_ddp.backends.group import ended_at_exit
from ppe_ddp.backends.group_internals import (
    HashStore,
    default_group,
    device_types,
    forget_destroyed,
    is_registered,
    kept_with,
    nodes_of,
    store_of,
    timeout_of,
)
from ppe_ddp.backends.rank_store import BoundedStore, MeetingOutcome, exchange, first_unused, looking
from ppe_ddp.engine.failures import (
    ADVICE,
    CLIP,
    EQUALLY_OFTEN,
    FINAL,
    LOOK_SECONDS,
    START,
    Failure,
    Failures,
    HookProgress,
    LostRank,
    LostRanks,
    Renewals,
    is_explained,
    is_of_transport,
    obstacle,
)
from ppe_ddp.engine.group_duplicates import (
    LIFE_BEFORE,
    Life,
    Release,
    backends_of,
    check_wanted,
    close,
    destroy,
    devices_on_host,
    devices_used,
    duplicates,
    is_over_gloo,
    registered_duplicates,
    release_all,
)
from ppe_ddp.engine.peer_processes import Activity, PeerProcesses, own_address
from ppe_ddp.engine.plan import NodeMasks
from ppe_ddp.errors import AbortedError, CommunicationError, PeerAbortedError, PpeDdpError, UnusableError, clear_frames
from ppe_ddp.waiting import Probe, paced, progress_engine

_NOT_STARTED = "the ranks could not start together"
_NOT_CONNECTED = "the ranks could not connect again after a failure"
_MOST_DUPLICATES = 1_000_000  # of one parent
_NAP_SECONDS = 0.001  # between looks at the store, while other ranks come to connect again ...
_LONGEST_PAUSE = 0.01  # ... and the longest such pause
_TOLD_SECONDS = 1.0  # for a rank that has failed while the ranks connect to tell of it


class User(Protocol):
    """The object that communicates in a wrapper's groups."""

    @property
    def is_running(self) -> bool:
        """Whether a collective may be in flight, so that the connections must not be ended."""
        ...

    @property
    def connections(self) -> Sequence[Groups]:
        """The groups of the wrapper, which connect again one after another."""
        ...

    def note_failure(self) -> None:
        """Note that this step has failed on this rank after its backward, and that the other ranks are told."""

    def compare(self, groups: Groups) -> None:
        """Compare what the ranks of ``groups`` have outside of a step, and connect again after a failure."""


class _Renewing(threading.local):
    """The groups that one thread is renewing, in the order in which it began."""

    def __init__(self) -> None:
        self.groups: list[Groups] = []


_RENEWING = _Renewing()


@dataclass(eq=False)
class Groups:
    """A user's process group and its duplicates.

    After a failure each rank closes its duplicates, and :meth:`renewing` makes new ones, on all ranks together.
    """

    parent: ProcessGroup  # the group that the user named
    buckets: ProcessGroup  # for gradients and buffers
    control: ProcessGroup  # for masks and votes; serves CPU tensors
    rank: int  # this process in the group
    world_size: int  # the size of the group
    pid: int  # the process that made them
    number: int  # counts the duplicates of the parent, the same on every rank; 0 for the parent itself
    generation: int = 0  # the number of the attempt that has renewed the duplicates; 0 for the first ones
    step: int = 0  # number of synchronized backwards so far; the same on every rank
    user: Callable[[], User | None] = lambda: None  # returns the reducer that synchronizes in them, if there is one
    # The processes of the ranks, those of this node.
    processes: PeerProcesses = field(default_factory=lambda: PeerProcesses(0))
    shared_memory: bool = False  # whether duplicates use shared memory if the parent is over gloo
    taken: int = 0  # number of synchronized backwards that this rank's compressor has completed so far

    def __post_init__(self) -> None:
        self.is_duplicate = self.number > 0
        """Whether these are duplicates, which can be closed and renewed."""
        self._was_registered = self.is_duplicate or is_registered(self.parent)
        self.is_closed = False
        """Whether the duplicates cannot be used, as a failure has closed them."""
        self.life = Life.OPEN if self.is_duplicate else Life.BORROWED
        self.name = self.control.group_name
        self.timeout_seconds = (timeout_of(self.control) or default_pg_timeout).total_seconds()
        self._connect_failures(self.generation)
        self._renewals = Renewals(self._store, self.name, self.rank, self.world_size)
        self.is_renewing = False
        """Whether :meth:`renewing` is running on this rank."""
        self.gathers: weakref.WeakSet[Any] = weakref.WeakSet()
        """The ``ParameterGather`` of each optimizer that may have parameters in flight here."""
        self._outdated: list[Failures] = []  # of earlier generations; forgotten once a renewal succeeds
        self._reason = ""  # why they are unusable
        self._starts = 0
        self._releases: dict[str, Release] = {}  # of closed duplicates
        self._devices: dict[str, Any] = {}  # of this rank, on which they have been used
        self._note_nodes()
        if self.is_duplicate:
            ended_at_exit(self.pid).add(self)

    def _enter(self, life: Life) -> None:
        assert self.life in LIFE_BEFORE[life], f"groups cannot go from {self.life.name} to {life.name}"
        self.life, self.is_closed = life, life is not Life.OPEN

    @classmethod
    def duplicate(cls, parent: ProcessGroup, *, shared_memory: bool = False, taken: int = 0, **wanted: Any) -> Groups:
        """Duplicate ``parent``, or take duplicates that no rank uses any more; every rank must call this together.

        With ``shared_memory`` they use shared memory if the parent is over gloo. ``taken`` is the number of steps that
        the compressor has completed. ``wanted`` has further options that must be the same on all ranks, by the name
        that an error gives them.

        Raises:
            DisagreementError: On every rank, if their options differ.
            ValueError: The parent is a bare group that serves no CPU tensors, so the ranks cannot agree on masks.
        """
        rank, world_size = dist.get_rank(parent), dist.get_world_size(parent)
        serves_cpu = "cpu" in device_types(parent)
        if world_size == 1 or not is_registered(parent):
            # One rank alone, or a bare ProcessGroup object, which torch.distributed did not make and cannot copy.
            if world_size > 1 and not serves_cpu:
                raise ValueError(
                    f"rank {rank}: the process group is a bare object that serves no CPU tensors, on which the ranks "
                    'agree; make it by torch.distributed.new_group(ranks, backend="cpu:gloo,cuda:nccl")'
                )
            return cls(parent, parent, parent, rank, world_size, os.getpid(), 0, taken=taken)
        unused, store = _unused_of(parent), store_of(parent)
        is_first = not unused.calls
        if is_first:  # an earlier group of the same name may have left keys in the store
            turn = first_unused(lambda turn: store.check([f"ppe_ddp/parent/{turn}"]))
            unused.calls = unused.count = (turn - 1) * _MOST_DUPLICATES
        unused.calls += 1
        address = own_address()
        packed = None if address is None else address.packed()
        wanted |= {"shared_memory": shared_memory}
        known = exchange(parent, f"idle/{unused.calls}", [wanted, unused.numbers(), packed])
        if is_first:
            store.set(f"ppe_ddp/parent/{turn}", "")
        check_wanted(rank, [there for there, *_ in known])
        groups = unused.take([there for _, there, _ in known], shared_memory=shared_memory)
        if groups is None:
            unused.count += 1
            made = duplicates(parent, backends_of(parent), str(unused.count), shared_memory=shared_memory)
            processes = PeerProcesses(rank, address, [packed for _, _, packed in known])
            groups = cls(parent, *made, rank, world_size, os.getpid(), unused.count, processes=processes)
            groups.shared_memory = shared_memory
        groups.taken = taken
        return groups

    def await_start(self) -> None:
        """Wait until all ranks have received the initial parameters; every rank must call this together.

        Without it, a rank whose first step fails could close its duplicates while other ranks still receive in them.

        Raises:
            PeerAbortedError: Another rank has failed.
            CommunicationError: A rank is gone, or has not come within the group's timeout.
        """
        if not self.is_duplicate:
            return
        self._starts += 1
        # Only failures of this phase count: a rank that has seen all others come may already fail in the next step.
        self._share(f"start/{self._starts}", "", START)

    def renewing(self, progress: HookProgress | None = None) -> Generator[Probe, None, None]:
        """Make new duplicates in place of closed ones; every rank must do this at its next step.

        The ranks may come to several groups in different orders. So it yields a probe before it waits for the other
        ranks. ``progress`` is the progress of a hook that communicates in groups of the user's.

        Raises:
            PeerAbortedError: The backward of another rank has raised before that rank came here. The next step tries
                again.
            CommunicationError: Not all ranks have come within the group's timeout.
            UnusableError: On all ranks, if the hook's progress differs between them.
        """
        if not self.is_closed:
            return
        self.check()
        try:
            self._end_attempt(AbortedError("it was interrupted while the ranks connected again"))
            self._begin_attempt()
        except dist.DistError as error:  # the store has gone with the rank that served it
            raise self.explained(error, _NOT_CONNECTED) from error
        self.is_renewing = True
        _RENEWING.groups.append(self)
        try:
            yield from self._agree()
            self._connect_again(progress)
        except BaseException as error:
            instead = self._renewal_error(error)
            with contextlib.suppress(dist.DistError, CommunicationError):  # if the store is silent, the next step does
                self._end_attempt(instead)
            if instead is error:
                raise
            raise instead from error
        finally:
            self.is_renewing = False
            _RENEWING.groups.remove(self)

    def _renewal_error(self, error: BaseException) -> BaseException:
        """The error to raise in place of ``error``, which :meth:`renewing` has met."""
        if not isinstance(error, Exception) or isinstance(error, PeerAbortedError | UnusableError):
            return error
        if not self._is_agreed:
            # A DistError comes from the store, which has gone with the rank that served it.
            return self.explained(error, "connecting the ranks again") if isinstance(error, dist.DistError) else error
        seconds = _TOLD_SECONDS if is_of_transport(error) else 0.0  # an error of its own is to be told at once
        try:  # a rank that has failed or died closes its end, and that may be known only then
            progress_engine(os.getpid()).wait_until(bool, self._look, seconds=seconds, nap=_LONGEST_PAUSE)
        except (PeerAbortedError, CommunicationError) as told:
            return told
        if isinstance(error, CommunicationError) and error.reason and error.ranks and not error.is_final:
            # That rank has not reported it.
            return self.failures.error([Failure(error.ranks[0], self.step + 1, "begun", error.reason)])
        failed = CommunicationError(
            f"rank {self.rank}: {_NOT_CONNECTED}: {error}. Every rank must go on with its next step"
        )
        failed.__dict__.update(error.__dict__)
        return failed

    @property
    def _is_agreed(self) -> bool:
        """Whether all ranks have agreed to connect in the current attempt."""
        return self.generation == self._renewals.number

    def _agree(self) -> Generator[Probe, None, None]:
        """Wait until all ranks have come to connect again: making a group would wait for absent ranks for ever."""
        lost: list[LostRank] = []
        outcome = yield from self._meet(lost)
        while self._is_of_before(outcome):
            self._next_attempt()
            outcome = yield from self._meet(lost)
        self._accept(outcome, lost)

    def _meet(self, lost: list[LostRank]) -> Generator[Probe, None, MeetingOutcome]:
        """Take part in one attempt and return its outcome; adds to ``lost`` the ranks for which this rank refuses."""
        failed = self._failed_since()
        if not failed:
            self._renewals.come(self.step)

        def look() -> None:
            lost.extend(self._lost.gone())
            failed.extend(self._failed_since())

        looks = paced(look, LOOK_SECONDS, at_once=False)
        can_go_on = paced(self._can_connect, longest=_LONGEST_PAUSE)
        seconds = self.timeout_seconds
        try:
            yield lambda: failed or can_go_on()
        except (CommunicationError, PeerAbortedError):
            seconds = 0.0  # raised in place of the wait: the timeout is over already
        progress = progress_engine(os.getpid())
        if not progress.wait_until(lambda: lost or failed or can_go_on(), looks, seconds=seconds, nap=_NAP_SECONDS):
            lost.extend(self._lost.behind(self._renewals.absent()))
        outcome = self._renewals.outcome()
        if outcome is None and failed:
            outcome = self._renewals.refuse(self.step + 1, str(failed[0]))
        elif outcome is None:
            reason = f"it has waited in vain for {' and '.join(map(str, lost))}"
            outcome = self._renewals.refuse(self.step + 1, reason, lost)
        return outcome

    def _accept(self, outcome: MeetingOutcome, lost: Sequence[LostRank]) -> None:
        """Act on the outcome; raises if the ranks do not connect. ``lost`` has the ranks for which this one refused."""
        failed = [] if outcome.words else self._failed_since()
        self._follow(outcome)
        if outcome.words:
            return
        if failed:
            raise self.failures.error(failed)
        _, reason, found, job_rank, is_final = outcome.refusal
        if outcome.rank == self.rank:
            raise self.failures.lost_error(lost, _NOT_CONNECTED)
        if found:
            lost = [LostRank(**one) for one in found]
            raise self.failures.error([Failure(outcome.rank, self.step, "begun", reason, lost=lost)])
        error = PeerAbortedError(
            f"rank {self.rank}: a rank has failed again before the ranks were connected: rank {outcome.rank}: "
            f"{reason}. {FINAL if is_final else ADVICE['']}"
        )
        error.rank, error.job_rank = outcome.rank, self.job_rank_of(outcome.rank) if job_rank is None else job_rank
        error.step, error.phase, error.reason, error.is_final = self.step, "begun", reason, is_final
        raise error

    def _failed_since(self) -> list[Failure]:
        """The reports of ranks that failed in a later step than the one in which this rank closed its connections.

        Such a rank had completed that step and heard of no failure, so it has not come to connect again. A report
        without a phase is of a rank that postpones its step: it does come.
        """
        with contextlib.suppress(dist.DistError, CommunicationError):
            return [failure for failure in self.failures.of_others() if failure.phase and failure.step > self.step]
        return []

    def _can_connect(self) -> bool:
        """Whether a rank has refused, or all have come and no other group of this thread has to connect before.

        A store that does not answer in time is asked again until the timeout: its process may be short of a core.
        """
        with contextlib.suppress(CommunicationError):
            outcome = self._renewals.outcome()
            if outcome is None or not outcome.words:
                return outcome is not None
            others = (other for other in _RENEWING.groups if other is not self)
            return not any(other._renewals.may_precede(outcome.place) for other in others)
        return False

    def _follow(self, outcome: MeetingOutcome) -> None:
        """Take the step number from the outcome; if the ranks connect, begin a new generation of failure reports."""
        if not outcome.words:
            step, *_ = outcome.refusal
            if step > self.step + 1 and self._failed_since():  # refused by a rank that has failed in a later step
                self.step += 1
                self._renewals.put_off()
            else:
                self.step = step
                self._renewals.end()
            return
        self.step = max(outcome.words)  # of the last step that is over
        if not self._is_agreed:
            self._outdated.append(self.failures)
            self._connect_failures(self._renewals.number)
            self.generation = self._renewals.number
            self._renewals.forget()

    def _connect_again(self, progress: HookProgress | None) -> None:
        """Make new duplicates, as all ranks do now; a rank that fails here reports it in the new generation."""
        reason = ""
        if progress is not None:
            words = self._share("progress", asdict(progress))
            reason = obstacle([HookProgress(**word) for word in words])
        release_all(self._releases, lambda what, word: self._share(f"released/{what}", word))
        if reason:
            self._reason = f"rank {self.rank}: {reason}"
            self._enter(Life.UNUSABLE)
            self._renewals.end()
            raise UnusableError(self._reason)
        self.processes.note_open()
        with looking(self._look):  # ends the wait if a rank reports that it was interrupted
            where = self.parent, backends_of(self.parent), self._made_as
            made = duplicates(*where, shared_memory=self.shared_memory, share=self._share, devices=self._devices)
            self.buckets, self.control = made
        self._note_nodes()
        self._starts = 0
        while self._outdated:
            self._outdated.pop().forget()  # all ranks have agreed, so none reads earlier reports
        self._renewals.end()
        self._enter(Life.OPEN)

    def _note_nodes(self) -> None:
        """Note the nodes of the connections. They stay known while the groups are closed, as ranks close at any time.

        Each rank may change its module by itself then, and must come to the same masks and slices as the others.
        """
        self.nodes = nodes_of(self.buckets)
        self.node_masks = NodeMasks.of(self.nodes, self.rank)

    @property
    def _made_as(self) -> str:
        return f"{self.number}/{self.generation}"

    def _share(self, what: str, word: Any, phase: str = "") -> list[Any]:
        """Exchange a ``word`` of each rank over the store, and return all; raises if a rank has failed or is gone.

        ``what`` is a key that is used once in a generation. Only failures of ``phase`` count; an empty phase stands for
        any.
        """
        look = functools.partial(self._look, phase)
        name = f"{self.name}/{self.generation}/{what}"
        return exchange(self.parent, name, word, look, may_leave=phase == START)

    def _look(self, phase: str = "") -> None:
        self.failures.check(phase)
        self.failures.check_lost(_NOT_STARTED if phase == START else _NOT_CONNECTED)

    def _begin_attempt(self) -> None:
        """Begin the attempt to connect again for the next step of this rank.

        Ranks that heard of a failure in time made the first attempt in the step after it. If this rank had not heard of
        it, it has lost that step as well. So it refuses the first attempt.
        """
        self._renewals.begin()
        if self._renewals.number == self.generation + 1:
            reports = [failure for failure in self.failures.of_others() if failure.step < self.step]
            if reports:
                self._renewals.refuse(self.step, f"it had not heard that {reports[0]}")

    def _next_attempt(self) -> None:
        self._renewals.end()
        self._renewals.begin()

    def _is_of_before(self, outcome: MeetingOutcome) -> bool:
        """Whether the attempt was refused in a step that this rank has already left behind."""
        return not outcome.words and outcome.refusal[0] <= self.step

    def _end_attempt(self, error: BaseException) -> None:
        """End the attempt to connect again, which has failed here with ``error``, and tell the other ranks.

        If the ranks have already agreed to connect, the others are connecting or sending. So it reports a failure and
        closes what it has made.
        """
        if not self._renewals.is_open:
            return
        while self._is_of_before(outcome := self._renewals.refuse(self.step + 1, error)):
            self._next_attempt()
        self._follow(outcome)
        if self._renewals.is_open:
            self.step += 1
            if not isinstance(error, PeerAbortedError):
                self.failures.report_error(self.step, "begun", error)
            self.buckets = self.control = self.parent
            self.processes.note_closed()
            self._releases |= close(registered_duplicates(self.parent, self._made_as))
            self._renewals.end()

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed in this step, so that messages in flight will not arrive."""
        if not self.is_duplicate or (self.is_closed and not self.is_renewing):
            return self.is_duplicate
        try:
            failed = self._failed_since() if self.is_renewing else self.failures.of_others()
            return bool(failed or self._lost.gone())
        except (dist.DistError, CommunicationError):
            return False  # messages may still arrive

    def job_rank_of(self, rank: int) -> int | None:
        """The rank in the job of ``rank`` of this group; None if torch does not know the group."""
        return dist.get_global_rank(self.parent, rank) if is_registered(self.parent) else None

    def note(self, activity: Activity, bucket: int = 0) -> None:
        """Write what this rank does now to its page, where other processes read it if this rank is lost."""
        if activity in (Activity.DONE, Activity.SUMMED, Activity.GATHERED):
            self.processes.completed = self.step, activity, bucket
        self.processes.write(self.step, activity, bucket, 0)

    def skip_step(self, error: BaseException) -> None:
        """Count a step that has failed on this rank before it sent anything, or before it connected again."""
        if not self.is_closed:
            self.step += 1
            return
        with contextlib.suppress(dist.DistError, CommunicationError):  # if the store is silent, the next step does
            self._end_attempt(error)
            self._begin_attempt()
            self._end_attempt(error)

    def explained(self, error: Exception, what: str) -> CommunicationError | PeerAbortedError:
        """Convert an error of the transport in ``what`` to one that names the rank that failed, or the lost ranks."""
        others: list[Failure] = []

        def is_reported() -> bool:
            with contextlib.suppress(dist.DistError, CommunicationError):  # the store may be gone
                others[:] = [] if self.is_renewing else self.failures.of_others()
            return bool(others)

        lost = self._lost.find(is_reported) if self.is_duplicate else []
        if others and all(failure.step > self.step for failure in others):
            lost = self._lost.gone()  # as those that have failed had completed this step
        if others and not lost:
            return self.failures.error(others)
        if lost:
            # If the ranks may still come, quote the first sentence of the transport's error, without its advice.
            are_gone = all(one.is_gone for one in lost)
            return self.failures.lost_error(lost, what if are_gone else f"{what}: {error}".partition(". ")[0])
        unnamed = CommunicationError(
            f"rank {self.rank} of {self.world_size}: {what} failed: {error}. {EQUALLY_OFTEN}. An error on another rank "
            "ends here, too, so look for the first traceback of all ranks."
        )
        unnamed.ranks = ()
        return unnamed

    def fail(self, error: BaseException, phase: str) -> PpeDdpError | None:
        """End the communication of this step after ``error``: report it to the other ranks, and close the duplicates.

        It clears the local variables in the traceback of ``error``. They may hold the group, whose connections end with
        the last reference.

        Returns:
            The error to raise instead, if ``error`` is only the consequence of a rank that has failed or is lost.
        """
        if phase == CLIP and (user := self.user()) is not None:
            user.note_failure()
        if not self.is_duplicate or self.is_closed or os.getpid() != self.pid:
            return None
        instead: PpeDdpError | None = None
        try:
            if isinstance(error, Exception) and is_of_transport(error) and not is_explained(error):
                instead = self.explained(error, "the communication of this step")
            told = self.failures.to_report(instead or error)
            if told is not None:
                with contextlib.suppress(RuntimeError):  # the store may be gone
                    self.failures.report_error(self.step, phase, told)
            clear_frames(error)
            self._lost.await_completion()
        finally:  # even if an interrupt ends a wait
            self.close()
        return instead

    def close(self) -> None:
        """Close the duplicates; ranks that wait in them leave with an error at once."""
        self._enter(Life.CLOSED)
        self.processes.note_closed()
        self._devices |= devices_used(self.buckets)
        ours = [self.buckets, self.control]
        self.buckets = self.control = self.parent
        self._releases |= close(ours)

    def end_together(self) -> None:
        """Free all resources of these groups, which no rank uses any more; every rank must call this together.

        Raises:
            CommunicationError: Not all ranks have come.
        """
        if not self.is_closed:
            self.close()
        release_all(self._releases, lambda what, word: exchange(self.parent, f"{self.name}/unused/{what}", word))
        self.failures.forget()

    def _store(self) -> BoundedStore:
        return BoundedStore(store_of(self.parent) if self.is_duplicate else HashStore())  # a bare group is never closed

    def _connect_failures(self, generation: int) -> None:
        store, name = self._store(), f"{self.name}/{generation}"
        job = BoundedStore(store_of(default_group())) if self.is_duplicate else None
        self._lost = LostRanks(store, name, self.rank, self.world_size, self.processes, job)
        on_host = devices_on_host(self.parent)
        self.failures = Failures(store, name, self.rank, self._lost, self.job_rank_of, lambda: self.step, on_host)

    def release(self) -> None:
        """Leave them unused; the next :meth:`duplicate` of the parent takes them, or all ranks free them there.

        Call this when nothing is in flight in them. It sends nothing.
        """
        is_ours = self.is_duplicate and os.getpid() == self.pid and self.life is not Life.ENDED
        if is_ours and is_registered(self.control, self.parent):
            _unused_of(self.parent).groups.append(self)

    def end(self) -> None:
        """End gloo's connections at the exit of Python, unless a message may be in flight: ending would wait for it.

        If the user has destroyed the parent, its connections end here with the last reference.
        """
        life = self.life
        self._enter(Life.ENDED)
        if os.getpid() != self.pid:
            return
        self._lost.leave()
        if (user := self.user()) is not None and user.is_running:
            return
        if life is Life.OPEN:
            ours = [group for group in (self.buckets, self.control) if is_over_gloo(group)]
            self.buckets = self.control = self.parent
            destroy(ours)
        if is_over_gloo(self.parent) and not is_registered(self.parent):
            forget_destroyed()
            del self.buckets, self.control, self.parent

    def check(self) -> None:
        """Raise :class:`UnusableError`, which says what to do, if these groups can no longer be used."""
        self.check_process()
        if self._was_registered and not is_registered(self.control, self.parent):
            raise self._destroyed()

    def check_process(self) -> None:
        """As :meth:`check`, but assume that no single group was destroyed since the forward; cheaper, for backward."""
        if os.getpid() != self.pid:
            raise UnusableError(
                f"rank {self.rank}: this process was forked after the wrapper was made, and its connections "
                "belong to the parent; start workers by 'spawn' and initialize torch.distributed in each, or "
                "use the plain module (ddp.module) here; a backward needs a copy of it, copy.deepcopy(ddp.module)"
            )
        if self.life is Life.UNUSABLE:
            raise UnusableError(self._reason)
        if not dist.is_initialized():
            raise self._destroyed()

    def _destroyed(self) -> UnusableError:
        return UnusableError(
            f"rank {self.rank}: the process group of this wrapper was destroyed; wrap the module again after "
            "init_process_group(), or use the plain module (ddp.module)"
        )


@dataclass
class _Unused:
    """The duplicates of one parent that no wrapper uses. The next wrapper takes them, unless a rank has closed them.

    Ranks differ in when they collect garbage, and a rank may have failed in the last step of a wrapper after the others
    had completed it. So whenever duplicates are wanted, the ranks exchange what each one has, and all do the same.
    """

    calls: int = 0  # number of exchanges
    count: int = 0  # number of duplicates made so far
    groups: list[Groups] = field(default_factory=list)

    def numbers(self) -> list[list[int]]:
        """The numbers of the usable and of the closed duplicates, in two lists, for the exchange."""
        return [[one.number for one in self.groups if one.is_closed is closed] for closed in (False, True)]

    def take(self, known: Sequence[Sequence[Sequence[int]]], *, shared_memory: bool) -> Groups | None:
        """Take the first duplicates of this kind that are usable on all ranks; None if there are none.

        Frees the duplicates that no rank uses and some rank has closed. Every rank must call this together, with the
        :meth:`numbers` of all ranks. Raises CommunicationError if not all ranks have come.
        """
        unused = set.intersection(*({*idle, *closed} for idle, closed in known))
        closed = {number for _, numbers in known for number in numbers}
        for one in sorted(self.groups, key=lambda one: one.number):
            if one.number in unused & closed:
                self.groups.remove(one)
                one.end_together()
        fitting = [one for one in self.groups if one.number in unused - closed and one.shared_memory == shared_memory]
        first = min(fitting, key=lambda one: one.number, default=None)
        if first is not None:
            self.groups.remove(first)
        return first


def _unused_of(parent: ProcessGroup) -> _Unused:
    return kept_with(parent, _Unused)


def renewing_all(everyone: Iterable[Groups], progress: HookProgress | None = None) -> Generator[Probe, None, None]:
    """Call :meth:`Groups.renewing` of each, and raise as that does; all ranks do so together, in the same order."""
    errors = []
    left = list(everyone)
    while left:
        try:
            yield from left[0].renewing(progress)
        except PeerAbortedError as error:
            errors.append(error)  # the other groups must still be renewed, as on the other ranks
        except BaseException as error:
            for groups in left[1:]:
                if groups.is_closed:
                    groups.skip_step(error)
            raise
        del left[0]
    if errors:
        raise errors[0]
