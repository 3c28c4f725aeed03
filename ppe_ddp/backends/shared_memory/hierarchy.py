"""A reduction over several nodes in three parts: a sum within each node, an exchange by the caller, and a copy back.

    start()      ranks of a node publish their tensors
    summed       this rank's slices are summed over its node                     shared memory
                 the caller replaces the sums by the result for all ranks        SliceLink: messages to the other nodes
    deliver()    the results are copied to all ranks of the node                 shared memory

torch has no such collective. Compressors use it, for which each node is one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp

from ppe_ddp.backends.shared_memory.node_layout import NodeLayout
from ppe_ddp.backends.shared_memory.shared_reservation import SharedMemory
from ppe_ddp.backends.shared_memory.step_queue import SharedLink, StepQueue
from ppe_ddp.backends.shared_memory.two_level_steps import NodeSumStep
from ppe_ddp.backends.wire import Wire
from ppe_ddp.backends.work import Waits, WireCall, Work, one_call
from ppe_ddp.waiting import InFlight, ProgressEngine

_Kind: Any = ReduceOp.RedOpType
_SUM = _Kind.SUM


class Hierarchy:
    """The nodes of one group whose ranks share memory, with connections that only these reductions use."""

    def __init__(self, layout: NodeLayout, memory: SharedMemory, queue: StepQueue, link: SharedLink) -> None:
        self.layout = layout
        self._memory = memory
        self._queue = queue
        self._waits = link.waits
        # The connections to other nodes, one for each slice of this rank.
        self.links = [
            SliceLink(wire, layout.owners(index), layout.rank, link.waits, link.progress)
            for index, wire in zip(layout.own_slices, queue.links_of_callers, strict=True)
        ]

    def start(self, flat: Tensor, ranges: Sequence[Sequence[tuple[int, int]]]) -> HierarchicalReduction:
        """Begin to sum ``flat`` over the ranks of each node; all ranks of the group must call it together.

        ``flat`` is 1-D and contiguous, of the same size and floating dtype on all ranks; it is changed in place until
        the reduction is over. ``ranges`` has for each slice the begin and end of its ranges of elements, in ascending
        order. Ranges are disjoint, and the same on all ranks.
        """
        is_shared = self._memory.position(flat) >= 0
        local = self._memory.view_of(flat) if is_shared else flat.detach()
        step = NodeSumStep(local, ranges, self.layout, is_shared=is_shared)
        return HierarchicalReduction(self._queue, self._waits, flat, step)


class HierarchicalReduction:
    """One reduction of ``flat`` in flight; ``summed`` is the Work of its first part."""

    def __init__(self, queue: StepQueue, waits: Waits, flat: Tensor, step: NodeSumStep) -> None:
        self._queue = queue
        self._waits = waits
        self._step = step
        (self._launched,) = queue.launch([step], flat)
        self.summed = Work(
            step.title,
            waits,
            lambda: step.sums is not None or queue.has_ended([self._launched]),
            absent=partial(queue.absent, self._launched),
        )

    @property
    def sums(self) -> list[Tensor]:
        """For each slice of this rank, the sums of its ranges, 1-D, to be changed in place; available once summed."""
        assert self._step.sums is not None
        return self._step.sums

    def deliver(self) -> Work:
        """Begin to copy the current sums to all ranks of the node; returns the Work."""
        self._step.is_over_nodes = True
        self._waits.progress()
        return self._queue.work([self._launched])


class SliceLink:
    """Messages between the owners of a slice, each of which is on another node.

    ``ranks`` are the owners' ranks in the group, and ``rank`` is this one's.
    """

    def __init__(self, wire: Wire, ranks: Sequence[int], rank: int, waits: Waits, progress: ProgressEngine) -> None:
        self._wire = wire
        self._waits = waits
        self._progress = progress
        self._calls: list[WireCall] = []
        self._elsewhere = [other for other in ranks if other != rank]
        self.size = len(ranks)  # the number of owners, and so of nodes
        self.rank = ranks.index(rank)  # this rank's index among the owners
        waits.at_failure.append(self._fail_all)

    def all_reduce(self, flat: Tensor) -> Work:
        """Sum ``flat`` (1-D, contiguous, float32 or float64) over the owners, in place."""
        return self._begin("all_reduce", partial(self._wire.all_reduce, flat, _SUM))

    def all_to_all(self, output: Tensor, flat: Tensor, receiving: Sequence[int], sending: Sequence[int]) -> Work:
        return self._begin("all_to_all", partial(self._wire.all_to_all, output, flat, receiving, sending))

    def advance(self) -> bool:
        """Advance the calls in flight; returns whether none is left."""
        self._calls = [call for call in self._calls if not call.advance()]
        return not self._calls

    def _begin(self, what: str, start: Callable[[], InFlight]) -> Work:
        self._waits.check(what)
        call = WireCall(f"{what} between nodes", self._waits, one_call(start), is_queued=True)
        with self._progress.lock:
            call.start()
            self._calls.append(call)
            self._progress.add(self)
        return Work(call.what, self._waits, call.poll, absent=lambda: self._elsewhere)

    def _fail_all(self) -> None:
        with self._progress.lock:
            for call in self._calls:
                call.fail()
