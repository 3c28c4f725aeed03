"""A wrapper's own duplicates of the user's process group, so that no other collectives come between.

Buckets are launched at moments that differ from rank to rank. On a group that the user's own code also uses during
backward (SyncBatchNorm, expert parallelism), the order of collectives would then differ between ranks. So a
wrapper duplicates the user's group, as MPI programs duplicate their communicator: once for buckets, which a
function may send from a thread of its own, and once for the small messages by which the ranks agree.

    duplicate ──► OPEN ──► fail: a rank has failed ──► CLOSED ──► renewing, on all ranks ──► OPEN
                    └────► release: no wrapper uses them; the next one over this parent takes them
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import distributed as dist
from torch.distributed import ProcessGroup, default_pg_timeout

from ppe_ddp.backends.group import ended_at_exit
from ppe_ddp.backends.group_internals import (
    HashStore,
    device_types,
    forget_destroyed,
    is_registered,
    kept_with,
    store_of,
    timeout_of,
)
from ppe_ddp.backends.rank_store import BoundedStore, MeetingOutcome, exchange, first_unused, looking
from ppe_ddp.engine.failures import (
    CLIP,
    EQUALLY_OFTEN,
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
    lost_error,
    obstacle,
    reason_of,
)
from ppe_ddp.engine.group_duplicates import (
    LIFE_BEFORE,
    Life,
    backends_of,
    check_wanted,
    close,
    destroy,
    duplicates,
    is_over_gloo,
    registered_duplicates,
    release_all,
)
from ppe_ddp.engine.peer_processes import Activity, PeerProcesses, own_address
from ppe_ddp.errors import AbortedError, CommunicationError, PeerAbortedError, PpeDdpError, UnusableError, clear_frames
from ppe_ddp.waiting import paced, progress_engine

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from ppe_ddp.contracts import Probe
    from ppe_ddp.engine.group_duplicates import Release

_NOT_STARTED = "the ranks could not start together"
_NOT_CONNECTED = "the ranks could not connect again after a failure"
_MOST_DUPLICATES = 1_000_000  # of one parent
_NAP_SECONDS = 0.001  # between looks at the store, while the others come to connect again ...
_LONGEST_PAUSE = 0.01  # ... which grow to this


class User(Protocol):
    """The object that communicates in a wrapper's groups."""

    @property
    def is_running(self) -> bool:
        """Whether a collective may be under way, so that the connections must not be ended."""
        ...

    @property
    def connections(self) -> Sequence[Groups]:
        """The groups of the wrapper, which connect again one after another."""
        ...

    def note_failure(self) -> None:
        """This step has failed on this rank, behind its backward, and the others are told."""
        ...


class _Renewing(threading.local):
    """The groups that one thread makes anew, in the order in which it has come to them."""

    def __init__(self) -> None:
        self.groups: list[Groups] = []


_RENEWING = _Renewing()


@dataclass(eq=False)
class Groups:
    """A user's process group and its duplicates.

    After a failure on some rank each closes its duplicates, and :meth:`renew` makes others, with all ranks.
    """

    parent: ProcessGroup  # the group that the user named
    buckets: ProcessGroup  # for gradients and buffers
    control: ProcessGroup  # for masks and votes; serves CPU tensors
    rank: int  # this process in the group
    world_size: int  # the size of the group
    pid: int  # the process that made them
    number: int  # which duplicate of the parent this is, the same on every rank
    generation: int = 0  # the number of the attempt that has made the duplicates anew; 0 for the first ones
    step: int = 0  # the synchronized backwards so far; the same on every rank
    user: Callable[[], User | None] = lambda: None  # gives the reducer that synchronizes in them, if there is one
    # Of the ranks, as far as they can be seen.
    processes: PeerProcesses = field(default_factory=lambda: PeerProcesses(0))
    shared_memory: bool = False  # whether they are over shared memory where the parent is over gloo

    def __post_init__(self) -> None:
        self.is_duplicate = self.number > 0
        """Whether there are duplicates, which can be closed and made anew."""
        self.is_closed = False
        """Whether they have to be made anew."""
        self.life = Life.OPEN if self.is_duplicate else Life.BORROWED
        self.name = self.control.group_name
        self.timeout_seconds = (timeout_of(self.control) or default_pg_timeout).total_seconds()
        self._connect_failures(self.generation)
        self._renewals = Renewals(self._store, self.name, self.rank, self.world_size)
        self.is_renewing = False
        """Whether this rank has come to make them anew, and not ended that."""
        self.gathers: weakref.WeakSet[Any] = weakref.WeakSet()
        """The ``ParameterGather`` of each optimizer that may have parameters in flight here."""
        self._outdated: list[Failures] = []  # of the attempts since the last that has succeeded
        self._reason = ""  # why they are unusable
        self._starts = 0
        self._releases: dict[str, Release] = {}  # of the duplicates that were closed
        if self.is_duplicate:
            ended_at_exit(self.pid).add(self)

    def _enter(self, life: Life) -> None:
        assert self.life in LIFE_BEFORE[life], f"groups cannot go from {self.life.name} to {life.name}"
        self.life, self.is_closed = life, life is not Life.OPEN

    @classmethod
    def duplicate(cls, parent: ProcessGroup, *, shared_memory: bool = False, **wanted: Any) -> Groups:
        """Duplicate ``parent``, or take a duplicate that no rank needs any more; every rank must call this together.

        They are over ``shared_memory`` where the parent is over gloo. ``wanted`` has what else must be the same on all,
        by the name that an error gives it.

        Raises:
            DisagreementError: On every rank, if not all give the same.
            ValueError: A bare group on which the ranks cannot agree.
        """
        rank, world_size = dist.get_rank(parent), dist.get_world_size(parent)
        serves_cpu = "cpu" in device_types(parent)
        if world_size == 1 or not is_registered(parent):
            # alone, or a bare ProcessGroup object that torch.distributed did not make and cannot copy
            if world_size > 1 and not serves_cpu:
                raise ValueError(
                    f"rank {rank}: the process group is a bare object that serves no CPU tensors, on which the ranks "
                    'agree; make it by torch.distributed.new_group(ranks, backend="cpu:gloo,cuda:nccl")'
                )
            return cls(parent, parent, parent, rank, world_size, os.getpid(), 0)
        pool, store = _pool_of(parent), store_of(parent)
        is_first = not pool.calls
        if is_first:  # of a group whose name another one had before, there are keys in the store
            turn = first_unused(lambda turn: store.check([f"ppe_ddp/parent/{turn}"]))
            pool.calls = pool.count = (turn - 1) * _MOST_DUPLICATES
        pool.calls += 1
        address = own_address()
        packed = None if address is None else address.packed()
        wanted |= {"shared_memory": shared_memory}
        known = exchange(parent, f"idle/{pool.calls}", [wanted, pool.numbers(), packed])
        if is_first:
            store.set(f"ppe_ddp/parent/{turn}", "")
        check_wanted(rank, [there for there, *_ in known])
        groups = pool.take([there for _, there, _ in known], shared_memory=shared_memory)
        if groups is not None:
            return groups
        pool.count += 1
        made = duplicates(parent, backends_of(parent), str(pool.count), shared_memory=shared_memory)
        processes = PeerProcesses(rank, address, [packed for *_, packed in known])
        pid = os.getpid()
        return cls(parent, *made, rank, world_size, pid, pool.count, processes=processes, shared_memory=shared_memory)

    def await_start(self) -> None:
        """Wait until all ranks have received what they start from; every rank must call this together.

        A rank whose first step fails closes its duplicates, and with them what others still receive.

        Raises:
            PeerAbortedError: Another rank has failed.
            CommunicationError: A rank is gone, or has not come within the group's timeout.
        """
        if not self.is_duplicate:
            return
        self._starts += 1
        # Of no other phase: who has seen all ranks come is a step ahead.
        self._share(f"start/{self._starts}", "", START)

    def renewing(self, progress: HookProgress | None = None) -> Generator[Probe, None, None]:
        """Make new duplicates where the old ones were closed; every rank must do this then, at its next step.

        The ranks may come to several groups in different orders: it yields before it waits for the others to come, a
        probe of whether it can go on. ``progress`` is that of a hook that communicates in groups of its own.

        Raises:
            PeerAbortedError: The backward of another rank has raised before it came here; the next step will do.
            CommunicationError: Not all ranks have come within the group's timeout.
            UnusableError: On all ranks: the hook has not come equally far on all of them.
        """
        if not self.is_closed:
            return
        self.check()
        self._end_attempt(AbortedError("it was interrupted while the ranks connected again"))
        self._begin_attempt()
        self.is_renewing = True
        _RENEWING.groups.append(self)
        try:
            yield from self._agree()
            self._connect_again(progress)
        except BaseException as error:
            instead = self._renewal_error(error)
            with contextlib.suppress(dist.DistError, CommunicationError):  # the store is gone; else the next step does
                self._end_attempt(instead)
            if instead is error:
                raise
            raise instead from error
        finally:
            self.is_renewing = False
            _RENEWING.groups.remove(self)

    def _renewal_error(self, error: BaseException) -> BaseException:
        """The error to raise for one in :meth:`renewing`."""
        what = "connecting the ranks again after a failure"
        if not isinstance(error, Exception) or isinstance(error, PeerAbortedError | UnusableError):
            return error
        if not self._is_agreed:  # the store is gone, with the rank that has served it
            return self.explained(error, what) if isinstance(error, dist.DistError) else error
        with contextlib.suppress(dist.DistError, CommunicationError):
            if others := self.failures.of_others():  # one that was connected has closed its end since
                return self.failures.error(others)
        if isinstance(error, CommunicationError) and error.reason and error.ranks:  # it is yet to report that
            return self.failures.error([Failure(error.ranks[0], self.step + 1, "begun", error.reason)])
        failed = CommunicationError(
            f"rank {self.rank} of {self.world_size}: {what} did not succeed: {error}. Every rank must go on with its "
            "next step"
        )
        failed.ranks = getattr(error, "ranks", None)
        return failed

    @property
    def _is_agreed(self) -> bool:
        """Whether all ranks have agreed to make the duplicates of this generation."""
        return self.generation == self._renewals.number

    def _agree(self) -> Generator[Probe, None, None]:
        """Wait until all ranks have come to make new connections: what makes them waits for all, without an end."""
        lost: list[LostRank] = []
        outcome = yield from self._meet(lost)
        while self._is_of_before(outcome):
            self._next_attempt()
            outcome = yield from self._meet(lost)
        self._accept(outcome, lost)

    def _meet(self, lost: list[LostRank]) -> Generator[Probe, None, MeetingOutcome]:
        """Take part in one attempt; gives its outcome, and adds to ``lost`` the ranks that it was refused for here."""
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
            seconds = 0.0  # none of several wrappers has moved for the whole timeout
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
        """Do what the ranks have decided; raises where they do not connect, for which this one has found ``lost``."""
        failed = [] if outcome.words else self._failed_since()
        self._follow(outcome)
        if outcome.words:
            return
        if failed:
            raise self.failures.error(failed)
        _, reason, found = outcome.refusal
        if outcome.rank == self.rank:
            raise lost_error(self.rank, lost, _NOT_CONNECTED)
        if found:
            lost = [LostRank(**one) for one in found]
            raise self.failures.error([Failure(outcome.rank, self.step, "begun", reason, lost=lost)])
        error = PeerAbortedError(
            f"rank {self.rank}: a rank has failed again before the ranks were connected: rank {outcome.rank}: "
            f"{reason}. The gradients of this step are not averages: zero them and go on with the next step"
        )
        error.rank, error.job_rank = outcome.rank, self.job_rank_of(outcome.rank)
        error.step, error.phase, error.reason = self.step, "begun", reason
        raise error

    def _failed_since(self) -> list[Failure]:
        """The reports of ranks that had completed the step in which the connections were closed, and have failed since.

        They have not heard of that, and have not come to connect again. Who postpones a step names no phase: it comes.
        """
        with contextlib.suppress(dist.DistError, CommunicationError):
            return [failure for failure in self.failures.of_others() if failure.phase and failure.step > self.step]
        return []

    def _can_connect(self) -> bool:
        """Whether a rank has refused, or all have come, and to no other group of this thread before."""
        outcome = self._renewals.outcome()
        if outcome is None or not outcome.words:
            return outcome is not None
        others = (other for other in _RENEWING.groups if other is not self)
        return not any(other._renewals.may_precede(outcome.place) for other in others)

    def _follow(self, outcome: MeetingOutcome) -> None:
        """Do what the ranks have decided; where they connect, they report to one another under the new number."""
        if not outcome.words:
            step, *_ = outcome.refusal
            if step > self.step + 1 and self._failed_since():  # by one that has failed in this step before
                self.step += 1
                self._renewals.put_off()
            else:
                self.step = step
                self._renewals.end()
            return
        self.step = max(outcome.words)  # the last step that is over
        if not self._is_agreed:
            self._outdated.append(self.failures)
            self._connect_failures(self._renewals.number)
            self.generation = self._renewals.number
            self._renewals.forget()

    def _connect_again(self, progress: HookProgress | None) -> None:
        """Make new duplicates, now that all ranks do; another one that cannot says so under the new number."""
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
        with looking(self._look):  # a rank that was interrupted says so
            self.buckets, self.control = duplicates(
                self.parent,
                backends_of(self.parent),
                self._made_as,
                shared_memory=self.shared_memory,
                before_each=lambda name: self._share(f"makes/{name}", ""),
            )
        self._starts = 0
        while self._outdated:
            self._outdated.pop().forget()  # all have agreed, and look no more at what was reported before
        self._renewals.end()
        self._enter(Life.OPEN)

    @property
    def _made_as(self) -> str:
        return f"{self.number}/{self.generation}"

    def _share(self, what: str, word: Any, phase: str = "") -> list[Any]:
        """The words of all ranks, by the store; raises what ends the wait where one of them has failed or is gone.

        ``what`` names the words, another one each time in one generation. Only in ``phase`` a failure counts; empty for
        all.
        """
        look = functools.partial(self._look, phase)
        name = f"{self.name}/{self.generation}/{what}"
        return exchange(self.parent, name, word, look, may_leave=phase == START)

    def _look(self, phase: str = "") -> None:
        self.failures.check(phase)
        if lost := self._lost.gone():
            raise lost_error(self.rank, lost, _NOT_STARTED if phase == START else _NOT_CONNECTED)

    def _begin_attempt(self) -> None:
        """Begin the attempt to connect again that belongs to the step which comes next here.

        Ranks that were told of a failure in time have begun the first one in the step after it. Where this rank had not
        heard of it, and has lost that step, too, that attempt is over.
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
        """Whether the attempt has failed in a step that this rank has lost without it."""
        return not outcome.words and outcome.refusal[0] <= self.step

    def _end_attempt(self, error: BaseException) -> None:
        """End an attempt to connect again that has not succeeded here because of ``error``; the other ranks hear of it.

        Where they have agreed to connect already, they are making connections or sending in them.
        """
        if not self._renewals.is_open:
            return
        while self._is_of_before(outcome := self._renewals.refuse(self.step + 1, reason_of(error))):
            self._next_attempt()
        self._follow(outcome)
        if self._renewals.is_open:
            self.step += 1
            if not isinstance(error, PeerAbortedError):
                self.failures.report(Failure.of(self.rank, self.step, "begun", error, self._lost_of(error)))
            self.buckets = self.control = self.parent
            self.processes.note_closed()
            self._releases |= close(registered_duplicates(self.parent, self._made_as))
            self._renewals.end()

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed in this step: what is under way will not come."""
        if not self.is_duplicate or (self.is_closed and not self.is_renewing):
            return self.is_duplicate
        try:
            failed = self._failed_since() if self.is_renewing else self.failures.of_others()
            return bool(failed or self._lost.gone())
        except (dist.DistError, CommunicationError):
            return False  # what is under way may still come

    def job_rank_of(self, rank: int) -> int | None:
        """The rank in the job for one of these groups; None where torch does not know the group."""
        return dist.get_global_rank(self.parent, rank) if is_registered(self.parent) else None

    def note(self, activity: Activity, bucket: int = 0) -> None:
        """Note what this rank does now, for the others to see if it is lost."""
        if activity in (Activity.DONE, Activity.GATHERED):
            self.processes.completed = self.step, activity, bucket
        self.processes.write(self.step, activity, bucket, 0)

    def skip_step(self, error: BaseException) -> None:
        """This rank has failed before it has sent anything of this step, or has made new connections for it."""
        if not self.is_closed:
            self.step += 1
            return
        with contextlib.suppress(dist.DistError, CommunicationError):  # the store is gone; else the next step does
            self._end_attempt(error)
            self._begin_attempt()
            self._end_attempt(error)

    def explained(self, error: Exception, what: str) -> CommunicationError | PeerAbortedError:
        """The error to raise for one of the transport, in ``what``: names the rank that has failed, or those lost."""
        others: list[Failure] = []

        def is_reported() -> bool:
            with contextlib.suppress(dist.DistError, CommunicationError):  # the store may be gone
                others[:] = [] if self.is_renewing else self.failures.of_others()
            return bool(others)

        lost = self._lost.find(is_reported) if self.is_duplicate else []
        if others:
            return self.failures.error(others)
        if lost:
            # What the transport saw is told of ranks that may still come, without its advice.
            is_over = all(one.is_gone for one in lost)
            return lost_error(self.rank, lost, what if is_over else f"{what}: {error}".partition(". ")[0])
        unnamed = CommunicationError(
            f"rank {self.rank} of {self.world_size}: {what} failed: {error}. {EQUALLY_OFTEN}. An error on another rank "
            "ends here, too, so look for the first traceback of all ranks."
        )
        unnamed.ranks = ()
        return unnamed

    def fail(self, error: BaseException, phase: str) -> PpeDdpError | None:
        """End the communication of this step after ``error``: tell the other ranks, and close the duplicates.

        Local variables of the functions that have raised are cleared, as they may hold the group, and its connections
        end with the last reference.

        Returns:
            What to raise instead, if this is only what came here of a rank that has failed or is lost.
        """
        if phase == CLIP and (user := self.user()) is not None:
            user.note_failure()
        if not self.is_duplicate or self.is_closed:
            return None
        instead: PpeDdpError | None = None
        try:
            if isinstance(error, Exception) and is_of_transport(error) and not is_explained(error):
                instead = self.explained(error, "the communication of this step")
            told = self.failures.to_report(instead or error)
            if told is not None:
                lost = self._lost_of(told)
                with contextlib.suppress(RuntimeError):  # the store may be gone
                    self.failures.report(Failure.of(self.rank, self.step, phase, told, lost))
            clear_frames(error)
            self._lost.await_completion()
        finally:  # also where an interrupt ends a wait
            self.close()
        return instead

    def _lost_of(self, error: BaseException) -> Sequence[LostRank]:
        """The ranks for which this one has waited in vain, where that is what ``error`` tells."""
        return self._lost.behind(error.ranks or ()) if isinstance(error, CommunicationError) else ()

    def close(self) -> None:
        """Close the duplicates, of which the other ranks see the end at once."""
        self._enter(Life.CLOSED)
        self.processes.note_closed()
        ours = [self.buckets, self.control]
        self.buckets = self.control = self.parent
        self._releases |= close(ours)

    def end_together(self) -> None:
        """Give back what these have, which no rank uses any more; every rank must call this together.

        Raises:
            CommunicationError: Not all ranks have come.
        """
        if not self.is_closed:
            self.close()
        release_all(self._releases, lambda what, word: exchange(self.parent, f"{self.name}/unused/{what}", word))
        self.failures.forget()

    def _store(self) -> BoundedStore:
        # a bare group has no store that could be asked for, and is never closed
        return BoundedStore(store_of(self.parent) if self.is_duplicate else HashStore())

    def _connect_failures(self, generation: int) -> None:
        store, name = self._store(), f"{self.name}/{generation}"
        self._lost = LostRanks(store, name, self.rank, self.world_size, self.processes)
        self.failures = Failures(store, name, self.rank, self._lost, self.job_rank_of, lambda: self.step)

    def release(self) -> None:
        """Let another wrapper over the same parent have them, or all ranks give back what they have.

        To be called when nothing is in flight in them; nothing is sent before the next :meth:`duplicate`.
        """
        is_ours = self.is_duplicate and os.getpid() == self.pid and self.life is not Life.ENDED
        if is_ours and is_registered(self.control, self.parent):
            _pool_of(self.parent).unused.append(self)

    def end(self) -> None:
        """End the connections of gloo, unless something may be in flight in them: that would be waited for.

        Those of the user's group end with the last reference to it, once the user has destroyed it.
        """
        life = self.life
        self._enter(Life.ENDED)
        if os.getpid() != self.pid:
            return
        self._lost.leave()
        user = self.user()
        if user is not None and user.is_running:
            return
        if life is Life.OPEN:
            ours = [group for group in (self.buckets, self.control) if is_over_gloo(group)]
            self.buckets = self.control = self.parent
            destroy(ours)
        if is_over_gloo(self.parent) and not is_registered(self.parent):
            forget_destroyed()
            del self.buckets, self.control, self.parent

    def check(self) -> None:
        """Raise :class:`UnusableError` where these groups can no longer be used, and say what to do."""
        self.check_process()
        used = (self.control, self.parent) if self.is_duplicate and self.world_size > 1 else ()
        if not is_registered(*used):
            raise self._destroyed()

    def check_process(self) -> None:
        """As :meth:`check`, of what a backward may find after its forward: no single group was destroyed since."""
        if os.getpid() != self.pid:
            raise UnusableError(
                f"rank {self.rank}: this process was forked after the wrapper was made, and its connections "
                "belong to the parent; start workers by 'spawn' and initialize torch.distributed in each, or "
                "use the plain module (ddp.module) here"
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
class _Pool:
    """The duplicates of one parent that no wrapper uses: the next one takes them, unless a rank has failed in them.

    Garbage is collected at different moments on different ranks, and a rank may have failed in the last step of a
    wrapper, after the others were through: whenever they ask for duplicates, they say what each has, and do the same
    with them.
    """

    calls: int = 0  # how often the ranks have asked one another for duplicates
    count: int = 0  # how many were made
    unused: list[Groups] = field(default_factory=list)  # those that no wrapper of this process uses

    def numbers(self) -> list[list[int]]:
        """Of those that can be used, and of those that a failure has closed; for the other ranks."""
        return [[one.number for one in self.unused if one.is_closed is closed] for closed in (False, True)]

    def take(self, known: Sequence[Sequence[Sequence[int]]], *, shared_memory: bool) -> Groups | None:
        """The first duplicates of this kind that can be used on all ranks, if there are any.

        Closes everywhere what one rank has closed and no rank uses. Every rank must call this together, with the
        :meth:`numbers` of all ranks. Raises CommunicationError where not all have come.
        """
        unused = set.intersection(*({*idle, *closed} for idle, closed in known))
        closed = {number for _, numbers in known for number in numbers}
        for one in sorted(self.unused, key=lambda one: one.number):
            if one.number in unused & closed:
                self.unused.remove(one)
                one.end_together()
        fitting = [one for one in self.unused if one.number in unused - closed and one.shared_memory == shared_memory]
        if not fitting:
            return None
        first = min(fitting, key=lambda one: one.number)
        self.unused.remove(first)
        return first


def _pool_of(parent: ProcessGroup) -> _Pool:
    return kept_with(parent, _Pool)


def renewing_all(everyone: Iterable[Groups], progress: HookProgress | None = None) -> Generator[Probe, None, None]:
    """Make new duplicates of each where the old ones were closed; every rank must do this together, in this order.

    Yields as :meth:`Groups.renewing`, and raises PeerAbortedError where the backward of another rank has raised before
    it came here; the next step will do.
    """
    errors = []
    left = list(everyone)
    while left:
        try:
            yield from left[0].renewing(progress)
        except PeerAbortedError as error:
            errors.append(error)  # the others must be tried all the same, as on the other ranks
        except BaseException as error:
            for groups in left[1:]:
                if groups.is_closed:
                    groups.skip_step(error)
            raise
        del left[0]
    if errors:
        raise errors[0]
