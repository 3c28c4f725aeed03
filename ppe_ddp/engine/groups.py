"""A wrapper's own duplicates of the user's process group, so that no other collectives come between.

Buckets are launched at moments that differ from rank to rank. On a group that the user's own code also uses during
backward (SyncBatchNorm, expert parallelism), the order of collectives would then differ between ranks. So a
wrapper duplicates the user's group, as MPI programs duplicate their communicator: once for buckets, which a
function may send from a thread of its own, and once for the small messages by which the ranks agree.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
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
from ppe_ddp.backends.rank_store import BoundedStore
from ppe_ddp.engine.exit_order import is_over_gloo
from ppe_ddp.engine.failures import (
    EQUALLY_OFTEN,
    START,
    Failure,
    Failures,
    HookProgress,
    is_explained,
    is_of_transport,
    lost_error,
)
from ppe_ddp.engine.group_duplicates import backends_of, check_wanted, duplicates
from ppe_ddp.engine.group_lifetime import close, destroy, release_all
from ppe_ddp.engine.group_pool import GroupPool
from ppe_ddp.engine.lost_ranks import LostRank, LostRanks
from ppe_ddp.engine.peer_processes import Activity, PeerProcesses, own_address
from ppe_ddp.engine.store_exchange import exchange, progress_of
from ppe_ddp.errors import (
    CommunicationError,
    DisagreementError,
    PeerAbortedError,
    PpeDdpError,
    UnusableError,
    clear_frames,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppe_ddp.engine.exit_order import User
    from ppe_ddp.engine.group_lifetime import Release

_NAP_SECONDS = 0.001  # between looks at the store, while the others come to connect again
_LOOKS = 100  # at the store, for one at the processes


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
        generation: How often the duplicates were made anew.
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
        self._connect_failures()
        self._unusable = ""
        self._attempts = 0  # to renew, since the last failure
        self._starts = 0
        self._releases: list[Release] = []  # of the duplicates that were closed
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
        pool = _pool_of(parent)
        pool.calls += 1
        address = own_address()
        packed = None if address is None else address.packed()
        wanted = {"shared_memory": shared_memory, "init_sync": init_sync}
        known: list[Any] = exchange(parent, f"idle/{pool.calls}", [wanted, pool.numbers(), packed])
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
        timeout = timedelta(seconds=self.timeout_seconds)
        try:
            self._await_renewal()
        except dist.DistError as error:  # the store is gone, with the rank that has served it
            raise self.explained(error, "connecting the ranks again after a failure") from error
        try:
            reason = "" if progress is None else self.failures.compare(progress, self.world_size, timeout)
            self._release(f"{self.generation}/{self._attempts}")
            if not reason:
                self.processes.note_open()
                self.generation += 1
                name = f"{self.number}/{self.generation}"
                self.buckets, self.control = duplicates(
                    self.parent, backends_of(self.parent), name, shared_memory=self.shared_memory
                )
        except RuntimeError as error:
            self.processes.note_closed()
            raise CommunicationError(
                f"rank {self.rank} of {self.world_size}: connecting the ranks again after a failure did not succeed: "
                f"{error}. Every rank must go on with its next step"
            ) from error
        if reason:
            self._unusable = f"rank {self.rank}: {reason}"
            raise UnusableError(self._unusable)
        self.failures.forget()  # all have come here, and so left the old connections
        self._connect_failures()
        self._attempts = self._starts = 0
        self.is_closed = False

    def _release(self, when: str) -> None:
        """Give back what the closed duplicates have, now that all ranks have closed theirs."""
        name = f"released/{self.number}/{when}"
        release_all(self._releases, lambda what, word: exchange(self.parent, f"{name}/{what}", word))

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

    def skip_step(self, reason: str) -> None:
        """This rank's backward has raised before it has sent anything, or has made new connections in :meth:`renew`."""
        self.step += 1
        if self.is_closed:
            self.failures.announce(self._attempts, self.step, reason)
            self._attempts += 1

    def _await_renewal(self) -> None:
        """Wait until all ranks have come to make new connections: what makes them waits for all, without an end."""
        attempt, self._attempts = self._attempts, self._attempts + 1
        self.failures.announce(attempt, self.step, "")
        end = monotonic() + self.timeout_seconds
        advance = progress_of(self.parent)
        for looks in itertools.count(1):
            said = self.failures.announced(attempt, self.world_size)
            if said:
                break
            lost: Sequence[LostRank] = self._lost.gone() if looks % _LOOKS == 0 else ()
            if monotonic() > end:
                lost = self._lost.behind(self.failures.silent(attempt, self.world_size))
            if lost:
                self.failures.announce(attempt, self.step, f"it has waited in vain for {' and '.join(map(str, lost))}")
                raise lost_error(self.rank, lost, "the ranks could not connect again after a failure")
            advance()
            sleep(_NAP_SECONDS)
        self.step = max(step for step, _ in said.values())
        absent = [f"rank {rank}: {reason}" for rank, (_, reason) in said.items() if reason]
        if absent:
            error = PeerAbortedError(
                f"rank {self.rank}: a rank has failed again before the ranks were connected: {'; '.join(absent)}. The "
                "gradients of this step are not averages: zero them and go on with the next step"
            )
            rank, (step, reason) = next((rank, one) for rank, one in said.items() if one[1])
            error.rank, error.step, error.phase, error.reason = rank, step, "begun", reason
            raise error

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
        self._releases = close(ours)

    def end_together(self) -> None:
        """Give back what these have, which no rank uses any more; every rank must call this together.

        Raises:
            CommunicationError: Not all ranks have come.
        """
        if not self.is_closed:
            self._close()
        self._release("unused")
        self.failures.forget()

    def _connect_failures(self) -> None:
        # a bare group has no store that could be asked for, and is never closed
        store = BoundedStore(store_of(self.control) if self.is_duplicate else HashStore())
        name = self.name + f"/{self.generation}"
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
