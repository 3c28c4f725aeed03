"""A process group of torch.distributed over shared memory within a node and gloo for all else: backend name ``shm``.

Only translates torch's names and calling conventions; the work is in the modules beside it. Everything in
torch that talks over a process group works: DistributedDataParallel and its hooks, DTensor, FSDP2, DCP.
"""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from ppe_ddp.backends.group_internals import UNSENT_TAG, address_key, backends_being_made
from ppe_ddp.backends.process_group.background_progress import background_progress
from ppe_ddp.backends.process_group.collective_comparison import compares_collectives
from ppe_ddp.backends.process_group.device_routed_group import DeviceRoutedGroup, beside_other_backends
from ppe_ddp.backends.process_group.ended_at_exit import ended_at_exit
from ppe_ddp.backends.process_group.member_rendezvous import await_members
from ppe_ddp.backends.process_group.other_device_groups import group_over
from ppe_ddp.backends.process_group.pending_group import DRAIN_SECONDS, PendingGroup, only
from ppe_ddp.backends.process_group.progress_engine import progress_engine
from ppe_ddp.backends.process_group.written_keys import WrittenKeys
from ppe_ddp.backends.shared_memory.shared_group import SharedMemoryGroup
from ppe_ddp.backends.shared_memory.shared_link import SharedLink, SharedMemoryConfig
from ppe_ddp.backends.shm.gloo_link import GlooLink
from ppe_ddp.backends.shm.member_exchange import MemberExchange
from ppe_ddp.backends.shm.shm_collectives import ShmCollectives
from ppe_ddp.backends.shm.shm_options import ShmOptions
from ppe_ddp.backends.shm.store_waits import StoreWaits
from ppe_ddp.errors import CommunicationError, UnusableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

_MORE_TIME = timedelta(seconds=60)  # for gloo, whose own timeouts name nobody and end its connections
_LARGEST_TAG = UNSENT_TAG - 1  # gloo has one more

__all__ = ["ShmOptions", "ShmProcessGroup", "make_group"]


def make_group(arguments: Any, options: ShmOptions | None) -> ShmProcessGroup | DeviceRoutedGroup:
    """Make a group; its ranks, and no others, must call it together.

    Where the user wants another backend for some devices (``"cpu:shm,cuda:nccl"``), it holds a group for each.

    Args:
        arguments: torch's ``_DistributedBackendOptions``.
        options: None for the defaults.

    Raises:
        CommunicationError: Not all ranks have come within the group's timeout.
        DisagreementError: The ranks have different options.
        TypeError: ``options`` are those of another backend.
        TorchChangedError: torch does not show which backends it makes the group over.
    """
    if options is not None and not isinstance(options, ShmOptions):
        raise TypeError(f"pg_options for the backend shm are ppe_ddp's ShmOptions, not {type(options).__name__}")
    wanted = backends_being_made()
    ranks = list(arguments.global_ranks_in_group) or list(range(arguments.group_size))
    options = options or ShmOptions()
    keys = WrittenKeys(arguments.store)
    turn = await_members(arguments, ranks, options, keys)
    own = ShmProcessGroup(arguments, options, keys.under(f"ppe_ddp/shm/{turn}"))
    if compares_collectives():
        own.compare_collectives(keys.under(f"ppe_ddp/calls/{turn}"))
    return beside_other_backends(own, wanted, arguments)


class ShmProcessGroup(PendingGroup):
    """A group whose ranks share memory where they can. Made by torch.distributed, not by hand.

    Ranks of one node do all-reduces (sums, means and maxima), and with ``ShmOptions.shared_parts`` reduce-scatters and
    all-gathers, in memory that they share. All else goes by gloo, as does everything where memory cannot be shared: on
    several nodes, in containers that see nothing of one another, under some limits. The ranks agree on it when the
    group is made, and log the reason at debug level.

    Attributes:
        pg_options: What it was made with, for groups that shall be like it.

    A collective with ``async_op=True`` is begun in the call and goes on in every call and wait of this backend, on any
    group, and on a thread where this process makes none. All ranks of a group make the same collectives in the same
    order, with the same sizes and dtypes; the order of those on different groups is free.

    Every wait ends with an error when the group's timeout is over, or when another rank gives the group up
    (``abort()``, an error of gloo, a timeout). The group is of no use then.

    Raises from any collective:
        CommunicationError: gloo reports an error, a rank did not come in time, or has given the group up.
        TypeError: The operation is not defined for the dtype, or the tensors are sparse or not on CPU.
        ValueError: The sizes of this rank's own arguments do not fit together.
        UnusableError: The group was destroyed, or belongs to the process that this one was forked from.
    """

    _waits: StoreWaits

    def __init__(self, arguments: Any, options: ShmOptions, keys: WrittenKeys) -> None:
        rank, size = arguments.group_rank, arguments.group_size
        super().__init__(rank, size, arguments, "shm", ("cpu",))
        self.pg_options = options
        self._pid = os.getpid()
        place = f"rank {rank} of {size}, group {self._group_name!r}"
        self._keys = keys
        self._waits = StoreWaits(keys, rank, place, self._timeout.total_seconds())
        self._exchange = MemberExchange(keys, rank, size, self._waits)
        gloo = _over_gloo(_with_more_time(arguments), keys)
        progress = progress_engine(self._pid)
        self._shared = SharedMemoryGroup(
            SharedLink(
                rank, size, self._exchange.all_gather, self._waits, progress, partial(_join, arguments, keys, rank)
            ),
            SharedMemoryConfig(
                is_enabled=options.shared_memory,
                parts=options.shared_parts,
                smallest_bytes=options.shared_bytes,
                two_level_bytes=options.two_levels_from(size),
                piece_bytes=options.shared_piece_bytes,
            ),
        )
        if self._shared.is_open:
            progress.expect(size)
            background_progress(self._pid)
            self._waits.is_closed_elsewhere = self._shared.is_closed_elsewhere
            self._waits.sees_every_rank = self._shared.shows_every_rank
        self._collectives = ShmCollectives(gloo, self._waits, self._shared, options)
        self._over = self._collectives
        self._waits.at_failure.append(self._collectives.give_up)
        ended_at_exit(self._pid).add(self)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:  # type: ignore[override]
        """Wait until every rank is here."""
        return self._run("barrier", [(self._collectives.barrier,)], None)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank is here, or raise CommunicationError on rank 0 with those that are missing."""
        self._check_open("monitored_barrier")
        self._exchange.monitored_barrier(timeout.total_seconds() if timeout is not None else 0.0, wait_all_ranks)

    monitoredBarrier = monitored_barrier

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        """Start to send one tensor; complete when the tensor may be changed again."""
        return self._message("send", self._collectives.send, tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        """Start to receive one tensor."""
        return self._message("recv", self._collectives.receive, tensors, peer, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Start to receive one tensor from whoever sends with this tag; ``source_rank()`` says who it was."""
        return self._message("recv", self._collectives.receive, tensors, None, tag)

    def shutdown(self) -> None:
        """End the connections; called by ``destroy_process_group`` on every rank of the group."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        with suppress(CommunicationError):  # one that was given up
            self._shared.drain(DRAIN_SECONDS)
        self._shared.close()
        self._collectives.close()

    def abort(self) -> None:
        """Give the group up without waiting; the other ranks leave their waits in it with an error."""
        if os.getpid() == self._pid:
            self._closed = True
            self._waits.give_up("it has called abort()")

    def release(self, exchange: Callable[[str, Any], list[Any]]) -> None:
        """Delete what this rank has written to the store; see :class:`PythonGroup`."""
        self._keys.delete_all()

    def end(self) -> None:
        """End the connections of gloo, unless something is under way in them: that would be waited for."""
        if os.getpid() == self._pid and self._collectives.is_idle and not self._shared.is_crossing:
            self._closed = True
            self._shared.close()
            self._collectives.close()

    def _run(self, what: str, calls: Sequence[tuple[Any, ...]], result: Any) -> Work:
        self._check_open(what)
        return self._noted(self._begin(calls, result))

    def _message(self, what: str, call: Any, tensors: list[Tensor], peer: int | None, tag: int) -> Work:
        self._check_open(what)
        if not 0 <= tag <= _LARGEST_TAG:
            raise ValueError(f"{self._waits.place}: tag {tag} is not between 0 and {_LARGEST_TAG}")
        return self._noted(call(only(tensors), peer, tag))

    def _check_open(self, what: str) -> None:
        if os.getpid() != self._pid:
            raise UnusableError(
                f"{self._waits.place}: {what} in a process that was forked from the one that made the group, to which "
                "its connections belong; start workers by 'spawn', and initialize torch.distributed in each"
            )
        super()._check_open(what)


def _join(arguments: Any, keys: WrittenKeys, rank: int, index: int, ranks: Sequence[int]) -> GlooLink:
    """Join this rank with those of other nodes that own the same slice."""
    own = _with_more_time(arguments)
    own.timeout = arguments.timeout
    own.group_rank, own.group_size = ranks.index(rank), len(ranks)
    world = list(arguments.global_ranks_in_group)
    own.global_ranks_in_group = [world[one] for one in ranks] if world else list(ranks)
    groups = []
    for number in range(GlooLink.GROUPS):
        own.group_id = f"{arguments.group_id}/slice/{index}/{number}"
        groups.append(_over_gloo(own, keys.under(f"slice/{index}/{number}")))
    return GlooLink(groups, ranks)


def _over_gloo(arguments: Any, keys: WrittenKeys) -> ProcessGroup:
    """A group of gloo; ``keys`` are of this one alone."""
    arguments.store = keys.store
    keys.under("beside/gloo").note(address_key(arguments.group_rank))
    return group_over("gloo", arguments)


def _with_more_time(arguments: Any) -> Any:
    """What to make gloo's part of the group with."""
    own = type(arguments)()
    for name in ("group_rank", "group_size", "group_id", "global_ranks_in_group"):
        setattr(own, name, getattr(arguments, name))
    own.timeout = arguments.timeout + _MORE_TIME
    return own
