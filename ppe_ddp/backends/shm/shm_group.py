"""A process group of torch.distributed over shared memory within a node, and gloo otherwise: the backend ``shm``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup

from ppe_ddp.backends.collective_arguments import HostMemory
from ppe_ddp.backends.device_routed_group import DeviceRoutedGroup, beside_other_backends, copied_arguments, gloo_beside
from ppe_ddp.backends.group import PendingGroup, ended_at_exit
from ppe_ddp.backends.group_internals import backend_for, backends_being_made
from ppe_ddp.backends.rank_store import WrittenKeys, await_members
from ppe_ddp.backends.shm import ShmOptions
from ppe_ddp.backends.shm.gloo_wire import GlooWire
from ppe_ddp.waiting import background_thread, progress_engine

_MORE_TIME = timedelta(seconds=60)  # added to gloo's timeout, whose error names no rank and ends its connections
_SLICE_GROUPS = 2  # gloo groups between nodes, so that what a node sends does not wait for what it receives


def make_group(arguments: Any, options: ShmOptions | None) -> ShmProcessGroup | DeviceRoutedGroup:
    """Make a group, as of the backend mpi4py; only its ranks must call this, together."""
    options = ShmOptions() if options is None else options
    if not isinstance(options, ShmOptions):
        raise TypeError(f"pg_options for the backend shm are ppe_ddp's ShmOptions, not {type(options).__name__}")
    wanted = backends_being_made()
    ranks = list(arguments.global_ranks_in_group) or list(range(arguments.group_size))
    keys = WrittenKeys(arguments.store)
    turn = await_members(arguments, ranks, options, keys)
    own = ShmProcessGroup(arguments, options, keys.under(f"ppe_ddp/shm/{turn}"))
    return beside_other_backends(own, wanted, arguments)


class ShmProcessGroup(PendingGroup):
    """A group whose ranks share memory if they can. It is made by torch.distributed.

    Ranks of one node run all-reduces (sums, means and maxima) in shared memory; with ``ShmOptions.shared_parts`` also
    reduce-scatters and all-gathers. All else goes by gloo, and everything where memory cannot be shared: between nodes,
    in isolated containers, under some limits. Each rank then warns once of the reason, if it should be possible.
    Collectives also advance on a thread while this process makes no call of the backend.
    """

    def __init__(self, arguments: Any, options: ShmOptions, keys: WrittenKeys) -> None:
        super().__init__(arguments, options, keys, backend_name="shm", transport="shm", device_types=("cpu",))
        rank, size = self.rank(), self.size()
        with self._connecting():
            self._wire = GlooWire([_over_gloo(copied_arguments(arguments, keys.store), keys, _MORE_TIME)])
            self._connect(
                self._wire,
                HostMemory(rank, "shm"),
                partial(_join, arguments, keys, rank),
                is_enabled=options.shared_memory,
                two_level_bytes=options.two_levels_from(size),
                direct_bytes=options.direct_up_to(size),
            )
        if self._shared.queue is not None:
            progress_engine(self._pid).expect(size)
            background_thread(self._pid)
        ended_at_exit(self._pid).add(self)

    def _disconnect(self, *, is_idle: bool) -> None:
        self._shared.close()
        self._wire.close()

    def end(self) -> None:
        """End gloo's connections at the exit of Python, unless a call is in flight: ending would wait for it."""
        queue = self._shared.queue
        if os.getpid() == self._pid and self._wire.is_idle and not (queue is not None and queue.is_crossing):
            self._closed = True
            self._shared.close()
            self._wire.end()


def _join(arguments: Any, keys: WrittenKeys, rank: int, index: int, ranks: Sequence[int]) -> GlooWire:
    """Make a wire to the ranks of other nodes that own the same slice."""
    world = list(arguments.global_ranks_in_group)
    groups = []
    for number in range(_SLICE_GROUPS):
        part = keys.under(f"slice/{index}/{number}")
        own = copied_arguments(arguments, part.store)
        own.group_rank, own.group_size = ranks.index(rank), len(ranks)
        own.global_ranks_in_group = [world[one] for one in ranks] if world else list(ranks)
        own.group_id = f"{arguments.group_id}/slice/{index}/{number}"
        groups.append(_over_gloo(own, part))
    return GlooWire(groups, f"between nodes, of ranks {', '.join(map(str, ranks))}: ")


def _over_gloo(arguments: Any, keys: WrittenKeys, more_time: timedelta = timedelta()) -> ProcessGroup:
    """Make a gloo group; ``keys`` is the part of the store that only this group uses.

    Connecting has the group's timeout, as a rank may die then. Calls have ``more_time`` in addition.
    """
    group = gloo_beside(arguments, keys)
    backend_for(group, torch.device("cpu")).set_timeout(arguments.timeout + more_time)
    return group
