"""A wrapper's own duplicates of the user's process group, so that no other collectives come between.

Buckets are launched at moments that differ from rank to rank. On a group that the user's own code also uses during
backward (SyncBatchNorm, expert parallelism), the order of collectives would then differ between ranks. So a
wrapper duplicates the user's group, as MPI programs duplicate their communicator: once for buckets, which a
function may send from a thread of its own, and once for the small messages by which the ranks agree.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

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
from ppe_ddp.backends.rank_store import BoundedStore, first_unused
from ppe_ddp.engine.exit_order import is_over_gloo
from ppe_ddp.engine.failures import (
    EQUALLY_OFTEN,
    LOOK_SECONDS,
    START,
    Decision,
    Failure,
    Failures,
    HookProgress,
    Renewals,
    is_explained,
    is_of_transport,
    lost_error,
    obstacle,
    reason_of,
)
from ppe_ddp.engine.group_duplicates import backends_of, check_wanted, duplicates, registered_duplicates
from ppe_ddp.engine.group_lifetime import close, destroy, release_all
from ppe_ddp.engine.group_pool import GroupPool
from ppe_ddp.engine.lost_ranks import LostRank, LostRanks
from ppe_ddp.engine.peer_processes import Activity, PeerProcesses, own_address
from ppe_ddp.engine.store_exchange import exchange, progress_of
from ppe_ddp.errors import (
    AbortedError,
    CommunicationError,
    DisagreementError,
    PeerAbortedError,
    PpeDdpError,
    UnusableError,
    clear_frames,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ppe_ddp.engine.exit_order import User
    from ppe_ddp.engine.group_lifetime import Release

_MOST_DUPLICATES = 1_000_000  # of one parent
_NAP_SECONDS = 0.001  # between looks at the store, while the others come to connect again
_LONGEST_NAP_SECONDS = 0.01


@dataclass(eq=False)
class Groups:
    """A user's process group and its duplicates.

    After a failure on some rank each closes its duplicates, and :meth:`renew` makes others, with all ranks.

    Attributes:
        parent: The group that the user named.
        buckets: For gradients and buffers.
        control: For masks and votes; serves CPU tensors.
        rank: This process in the group.
        world_size: The size of the group.
        pid: The process that made them.
        number: Which duplicate of the parent this is, the same on every rank.
        generation: The number of the attempt that has made the duplicates anew; 0 for the first ones.
        step: The synchronized backwards so far; the same on every rank.
        is_closed: Whether they have to be made anew.
        user: Gives the reducer that synchronizes in them, if there is one.
        processes: Of the ranks, as far as they can be seen.
        shared_memory: Whether they are over shared memory where the parent is over gloo.
    """

    parent: ProcessGroup
    buckets: ProcessGroup
    control: ProcessGroup
    rank: int
    world_size: int
    pid: int
    number: int
    generation: int = 0
    step: int = 0
    is_closed: bool = False
    user: Callable[[], User | None] = lambda: None
    processes: PeerProcesses = field(default_factory=lambda: PeerProcesses(0))
    shared_memory: bool = False

    def __post_init__(self) -> None:
        self.is_duplicate = self.number > 0
        """Whether there are duplicates, which can be closed and made anew."""
        self.name = self.control.group_name
        self.timeout_seconds = (timeout_of(self.control) or default_pg_timeout).total_seconds()
        self._connect_failures(self.generation)
        self._renewals = Renewals(self._store, self.name, self.rank, self.world_size)
        self._unusable = ""
        self._starts = 0
        self._releases: dict[str, Release] = {}  # of the duplicates that were closed
        self._has_ended = False
        if self.is_duplicate:
            ended_at_exit(self.pid).add(self)

    @classmethod
    def duplicate(cls, parent: ProcessGroup, *, shared_memory: bool = False, init_sync: bool = True) -> Groups:
        """Duplicate ``parent``, or take a duplicate that no rank needs any more; every rank must call this together.

        Args:
            parent: What the user named.
            shared_memory: Whether to make them over shared memory where the parent is over gloo; the same on all.
            init_sync: Whether this rank goes on with collectives in them; the same on all.

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
        wanted = {"shared_memory": shared_memory, "init_sync": init_sync}
        known: list[Any] = exchange(parent, f"idle/{pool.calls}", [wanted, pool.numbers(), packed])
        if is_first:
            store.set(f"ppe_ddp/parent/{turn}", "")
        check_wanted(rank, [there for there, *_ in known])
        numbers = [there for _, there, _ in known]
        pool.end_closed(numbers)
        groups = pool.take(numbers, shared_memory=shared_memory)
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

        def look() -> None:
            self.failures.check(START)  # no other phase: who has seen all ranks come is a step ahead
            lost = self._lost.gone()
            if lost:
                raise lost_error(self.rank, lost, "the ranks could not start together")

        exchange(self.parent, f"{self.name}/start/{self.generation}/{self._starts}", "", look)

    def renew(self, progress: HookProgress | None = None) -> None:
        """Make new duplicates where the old ones were closed; every rank must call this then, at its next step.

        Args:
            progress: Of a hook that communicates in groups of its own; None on every rank where there is none.

        Raises:
            PeerAbortedError: The backward of another rank has raised before it came here; the next step will do.
            CommunicationError: Not all ranks have come within the group's timeout.
            UnusableError: On all ranks: the hook has not come equally far on all of them.
        """
        if not self.is_closed:
            return
        self.check()
        self._end_attempt(AbortedError("it was interrupted while the ranks connected again"))
        self._renewals.begin()
        try:
            self._agree()
            self._connect_again(progress)
        except BaseException as error:
            instead = self._renewal_error(error)
            with contextlib.suppress(dist.DistError, CommunicationError):  # the store is gone; else the next step does
                self._end_attempt(instead)
            if instead is error:
                raise
            raise instead from error

    def _renewal_error(self, error: BaseException) -> BaseException:
        """The error to raise for one in :meth:`renew`."""
        what = "connecting the ranks again after a failure"
        if not isinstance(error, Exception) or isinstance(error, PeerAbortedError | UnusableError):
            return error
        if not self._is_agreed:  # the store is gone, with the rank that has served it
            return self.explained(error, what) if isinstance(error, dist.DistError) else error
        return CommunicationError(
            f"rank {self.rank} of {self.world_size}: {what} did not succeed: {error}. Every rank must go on with its "
            "next step"
        )

    @property
    def _is_agreed(self) -> bool:
        """Whether all ranks have agreed to make the duplicates of this generation."""
        return self.generation == self._renewals.number

    def _agree(self) -> None:
        """Wait until all ranks have come to make new connections: what makes them waits for all, without an end."""
        self._renewals.come(self.step)
        end, nap = monotonic() + self.timeout_seconds, _NAP_SECONDS
        advance = progress_of(self.parent)
        looked = monotonic()
        lost: Sequence[LostRank] = ()
        while (decision := self._renewals.decision()) is None and not lost:
            advance()
            sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)
            if monotonic() > looked + LOOK_SECONDS:
                lost, looked = self._lost.gone(), monotonic()
            if monotonic() > end:
                lost = self._lost.behind(self._renewals.silent())
        if decision is None:
            reason = f"it has waited in vain for {' and '.join(map(str, lost))}"
            decision = self._renewals.refuse(self.step + 1, reason)
        self._follow(decision)
        if decision.reason and decision.rank == self.rank:
            raise lost_error(self.rank, lost, "the ranks could not connect again after a failure")
        if decision.reason:
            error = PeerAbortedError(
                f"rank {self.rank}: a rank has failed again before the ranks were connected: rank {decision.rank}: "
                f"{decision.reason}. The gradients of this step are not averages: zero them and go on with the next "
                "step"
            )
            error.rank, error.step, error.phase, error.reason = decision.rank, decision.step, "begun", decision.reason
            raise error

    def _follow(self, decision: Decision) -> None:
        """Do what the ranks have decided; where they connect, they report to one another under the new number."""
        self.step = decision.step
        if decision.reason:
            self._renewals.end()
        elif not self._is_agreed:
            before = self.failures
            self._connect_failures(self._renewals.number)
            self.generation = self._renewals.number
            before.forget()  # all have come here, and so left the old connections
            self._renewals.forget()

    def _connect_again(self, progress: HookProgress | None) -> None:
        """Make new duplicates, now that all ranks do; another one that cannot says so under the new number."""
        reason = ""
        if progress is not None:
            words = self._share("progress", asdict(progress))
            reason = obstacle([HookProgress(**word) for word in words])
        release_all(self._releases, lambda what, word: self._share(f"released/{what}", word))
        if reason:
            self._unusable = f"rank {self.rank}: {reason}"
            self._renewals.end()
            raise UnusableError(self._unusable)
        self.processes.note_open()
        self.buckets, self.control = duplicates(
            self.parent, backends_of(self.parent), self._made_as, shared_memory=self.shared_memory
        )
        self._starts = 0
        self._renewals.end()
        self.is_closed = False

    @property
    def _made_as(self) -> str:
        return f"{self.number}/{self.generation}"

    def _share(self, what: str, word: Any) -> list[Any]:
        """The words of all ranks while they connect again; raises what ends the wait where one of them has failed."""
        return exchange(self.parent, f"{self.name}/{self.generation}/{what}", word, self.failures.check)

    def _end_attempt(self, error: BaseException) -> None:
        """End an attempt to connect again that has not succeeded here because of ``error``; the other ranks hear of it.

        Where they have agreed to connect already, they are making connections or sending in them.
        """
        if not self._renewals.is_open:
            return
        self._follow(self._renewals.refuse(self.step + 1, reason_of(error)))
        if self._renewals.is_open:
            self.step += 1
            if not isinstance(error, PeerAbortedError):
                self.failures.report(Failure.of(self.rank, self.step, "begun", error))
            self.buckets = self.control = self.parent
            self.processes.note_closed()
            self._releases |= close(registered_duplicates(self.parent, self._made_as))
            self._renewals.end()

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed in this step: what is under way will not come."""
        if not self.is_duplicate or self.is_closed:
            return self.is_duplicate
        try:
            return bool(self.failures.of_others() or self._lost.gone())
        except (dist.DistError, CommunicationError):
            return False  # what is under way may still come

    def note(self, activity: Activity, bucket: int = 0) -> None:
        """Note what this rank does now, for the others to see if it is lost."""
        self.processes.note(self.step, activity, bucket)

    def skip_step(self, error: BaseException) -> None:
        """This rank has failed before it has sent anything of this step, or has made new connections for it."""
        if not self.is_closed:
            self.step += 1
            return
        with contextlib.suppress(dist.DistError, CommunicationError):  # the store is gone; else the next step does
            self._end_attempt(error)
            self._renewals.begin()
            self._end_attempt(error)

    def explained(self, error: Exception, what: str) -> CommunicationError | PeerAbortedError:
        """The error to raise for one of the transport, in ``what``: names the rank that has failed, or those lost."""
        others: list[Failure] = []

        def is_reported() -> bool:
            with contextlib.suppress(dist.DistError, CommunicationError):  # the store may be gone
                others[:] = self.failures.of_others()
            return bool(others)

        lost = self._lost.find(is_reported) if self.is_duplicate else []
        if others:
            return self.failures.error(others)
        if lost:
            return lost_error(self.rank, lost, f"{what}: {error}")
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
        if not self.is_duplicate or self.is_closed:
            return None
        instead: PpeDdpError | None = None
        if isinstance(error, Exception) and is_of_transport(error) and not is_explained(error):
            instead = self.explained(error, "the communication of this step")
        told = instead or error
        if not isinstance(told, DisagreementError | PeerAbortedError):  # which other ranks have
            lost = self._lost.behind(told.ranks or ()) if isinstance(told, CommunicationError) else ()
            with contextlib.suppress(RuntimeError):  # the store may be gone
                self.failures.report(Failure.of(self.rank, self.step, phase, told, lost))
        clear_frames(error)
        self._lost.await_completion(progress_of(self.parent))
        self._close()
        return instead

    def _close(self) -> None:
        self.is_closed = True
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
            self._close()
        release_all(self._releases, lambda what, word: exchange(self.parent, f"{self.name}/unused/{what}", word))
        self.failures.forget()

    def _store(self) -> BoundedStore:
        # a bare group has no store that could be asked for, and is never closed
        return BoundedStore(store_of(self.parent) if self.is_duplicate else HashStore())

    def _connect_failures(self, generation: int) -> None:
        store = self._store()
        name = f"{self.name}/{generation}"
        self._lost = LostRanks(store, name, self.rank, self.world_size, self.processes)
        self.failures = Failures(store, name, self.rank, self._lost, self.timeout_seconds)

    def release(self) -> None:
        """Let another wrapper over the same parent have them, or all ranks give back what they have.

        To be called when nothing is in flight in them; nothing is sent before the next :meth:`duplicate`.
        """
        if self.is_duplicate and os.getpid() == self.pid and not (self._has_ended or self._destroyed()):
            _pool_of(self.parent).put(self)

    def end(self) -> None:
        """End the connections of gloo, unless something may be in flight in them: that would be waited for.

        Those of the user's group end with the last reference to it, once the user has destroyed it.
        """
        self._has_ended = True
        if os.getpid() == self.pid:
            self._lost.leave()
        user = self.user()
        if (user is not None and user.is_running) or os.getpid() != self.pid:
            return
        if not self.is_closed:
            ours = [group for group in (self.buckets, self.control) if is_over_gloo(group)]
            self.buckets = self.control = self.parent
            self.is_closed = True
            destroy(ours)
        if is_over_gloo(self.parent) and not is_registered(self.parent):
            forget_destroyed()
            del self.buckets, self.control, self.parent

    def check(self) -> None:
        """Raise :class:`UnusableError` where these groups can no longer be used, and say what to do."""
        if os.getpid() != self.pid:
            raise UnusableError(
                f"rank {self.rank}: this process was forked after the wrapper was made, and its connections "
                "belong to the parent; start workers by 'spawn' and initialize torch.distributed in each, or "
                "use the plain module (ddp.module) here"
            )
        if self._unusable:
            raise UnusableError(self._unusable)
        if not dist.is_initialized() or (self.world_size > 1 and self._destroyed()):
            raise UnusableError(
                f"rank {self.rank}: the process group of this wrapper was destroyed; wrap the module again after "
                "init_process_group(), or use the plain module (ddp.module)"
            )

    def _destroyed(self) -> bool:
        return self.is_duplicate and not (is_registered(self.control) and is_registered(self.parent))


def _pool_of(parent: ProcessGroup) -> GroupPool[Groups]:
    return kept_with(parent, GroupPool)


def renew_all(everyone: Iterable[Groups], progress: HookProgress | None = None) -> None:
    """Make new duplicates of each where the old ones were closed; every rank must call this together, in this order.

    Raises:
        PeerAbortedError: The backward of another rank has raised before it came here; the next step will do.
    """
    errors = []
    left = list(everyone)
    while left:
        try:
            left[0].renew(progress)
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
