"""Base class of process groups whose calls are under way until they are waited for, by a loop of ours.

Owns what such groups have beside their collectives: several calls as one, memory that the ranks of a node share, and
the check that the group is good.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

from ppe_ddp.backends.process_group.collective_comparison import CollectiveComparison
from ppe_ddp.backends.process_group.combined_work import CombinedWork
from ppe_ddp.backends.process_group.progress_engine import progress_engine
from ppe_ddp.backends.process_group.python_group import SUM, CollectiveGroup, Transport
from ppe_ddp.errors import UnusableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, device, dtype
    from torch.distributed import Work

    from ppe_ddp.backends.process_group.pending_work import FailableWaits
    from ppe_ddp.backends.process_group.python_work import PythonWork
    from ppe_ddp.backends.process_group.written_keys import WrittenKeys
    from ppe_ddp.backends.shared_memory.hierarchical_reduction import Hierarchy
    from ppe_ddp.backends.shared_memory.shared_group import SharedMemoryGroup

DRAIN_SECONDS = 1.0  # that a group waits, when it is destroyed, for what other ranks may never begin


class TwoLevelTransport(Transport, Protocol):
    """Collectives that may know of nodes."""

    def all_reduce(self, tensor: Tensor, op: Any, source: int | None = None) -> Any:
        """Reduce over the ranks, in place; ``source`` is the only node whose tensors are not zero, if that is known."""


class PendingGroup(CollectiveGroup):
    """A group of which a subclass sets ``_over``, ``_waits`` and ``_shared``, and defines messages and the end.

    Args:
        rank: This rank in the group.
        size: How many ranks the group has.
        arguments: torch's ``_DistributedBackendOptions``.
        backend_name: The name that the backend is registered under.
        device_types: Whose tensors the group takes.
    """

    _over: TwoLevelTransport
    _waits: FailableWaits
    _shared: SharedMemoryGroup

    def __init__(self, rank: int, size: int, arguments: Any, backend_name: str, device_types: Sequence[str]) -> None:
        super().__init__(rank, size, arguments, backend_name, device_types)
        self._coalesced: list[Any] | None = None
        self._closed = False
        self._comparison: CollectiveComparison | None = None

    def compare_collectives(self, store: WrittenKeys) -> None:
        """Compare every collective across the ranks before it runs, from now on; on all ranks together."""
        progress = progress_engine(os.getpid())
        self._comparison = CollectiveComparison(store, self.rank(), self.size(), self._waits, progress)

    def supports_tensor_alloc(self, device: device) -> bool:
        """Whether ``allocate_tensor`` has memory there that makes collectives faster: torch's name for it."""
        return self._shared.is_open and device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: dtype, device: device) -> Tensor:
        """A 1-D tensor of ``size`` zeros that the ranks of this node share, so that no collective has to copy it there.

        Not collective. An all-reduce, reduce-scatter or all-gather of it is under way until its Work was waited for.

        Raises:
            ValueError: There is no such memory for this device.
        """
        if not self.supports_tensor_alloc(device):
            raise ValueError(f"{self._waits.place}: no shared memory for tensors on {device}")
        return self._shared.allocate(size, dtype)

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, where it makes a difference to :meth:`sum_of_node`; else none. The same on all."""
        return self._shared.nodes

    def sum_of_node(self, tensor: Tensor, node: int) -> Work:
        """Sum over the ranks, in place, a tensor that is zero on all ranks but those of one node.

        The same sum as an all-reduce makes; but what is large is sent from that node instead of being summed over the
        nodes, which takes half the traffic. All ranks call it together, as any collective.

        Args:
            tensor: Of the same size and dtype everywhere; changed in place.
            node: Which of :attr:`nodes`; the same everywhere.
        """
        return self._run("all_reduce", [(self._over.all_reduce, tensor, SUM, node)], [tensor])

    @property
    def hierarchy(self) -> Hierarchy | None:
        """For reductions in two levels, where ranks of several nodes share memory; the same answer on all ranks."""
        return self._shared.hierarchy

    def progress(self) -> None:
        """Move all that is outstanding on all groups of this process, without waiting."""
        self._waits.progress()

    def _start_coalescing(self, _device: device) -> None:
        self._coalesced = []

    def _end_coalescing(self, _device: device) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return CombinedWork(works)

    def _noted(self, work: Work) -> Work:
        """Keep a call for the end of coalesced ones, if it is among some: torch does not."""
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _begin(self, calls: Sequence[tuple[Any, ...]], result: Any) -> PythonWork:
        def begin() -> PythonWork:
            works = [call(*arguments) for call, *arguments in calls]
            return works[0] if len(works) == 1 else CombinedWork(works)

        work = begin() if self._comparison is None else self._comparison.append(calls, begin)
        work.outputs = result
        return work

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise UnusableError(f"{self._waits.place}: {what} on a process group that was destroyed")
        self._waits.check(what)


def only(tensors: list[Tensor]) -> Tensor:
    """The tensor of a message."""
    if len(tensors) != 1:
        raise ValueError(f"a message is one tensor, not {len(tensors)}")
    return tensors[0]
