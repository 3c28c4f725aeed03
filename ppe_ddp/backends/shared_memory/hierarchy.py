"""A reduction over several nodes in three parts: a sum within each node, what its caller does between them, and back.

    start()      ranks of a node publish their tensors
    summed       what this rank owns is summed over its node                  shared memory
                 the caller makes of the sums what all ranks shall have       SliceLink: messages to the other nodes
    deliver()    ... and all ranks of the node have it                        shared memory

Here, and not among the collectives, as torch knows nothing like it: compressors see each node as if it were one rank.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed import ReduceOp

from ppe_ddp.backends.shared_memory.two_level_steps import NodeSumStep
from ppe_ddp.backends.work import Work
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ppe_ddp.backends.shared_memory.node_layout import NodeLayout
    from ppe_ddp.backends.shared_memory.shared_reservation import SharedMemory
    from ppe_ddp.backends.shared_memory.step_queue import SharedLink, StepQueue
    from ppe_ddp.backends.wire import Wire
    from ppe_ddp.backends.work import Waits
    from ppe_ddp.waiting import InFlight, ProgressEngine

_Kind: Any = ReduceOp.RedOpType
_SUM = _Kind.SUM


class Hierarchy:
    """The nodes of one group whose ranks share memory, and connections that are for these reductions alone.

    Args:
        layout: The nodes.
        memory: The reservation of this process.
        queue: Of the group.
        links: One for each slice of this rank. Not those of the group's own collectives, which other ranks may begin
            at other moments.
        shared: The transport under the group.

    Attributes:
        layout: The same.
        links: What goes between the nodes, for each slice of this rank.
    """

    def __init__(
        self,
        layout: NodeLayout,
        memory: SharedMemory,
        queue: StepQueue,
        links: Sequence[Wire],
        shared: SharedLink,
    ) -> None:
        self.layout = layout
        self._memory = memory
        self._queue = queue
        self._waits = shared.waits
        self.links = [
            SliceLink(link, layout.owners(index), layout.rank, shared.waits, shared.progress)
            for index, link in zip(layout.own_slices, links, strict=True)
        ]

    def start(self, flat: Tensor, ranges: Sequence[Sequence[tuple[int, int]]]) -> HierarchicalReduction:
        """Begin to sum ``flat`` over the ranks of each node; all ranks of the group must call it together.

        Args:
            flat: 1-D and contiguous, of the same size and a floating dtype everywhere; to be left alone until it is
                over. Changed in place.
            ranges: Of each slice, where its elements begin and end, in ascending order; disjoint, the same everywhere.
        """
        return HierarchicalReduction(self._queue, self._waits, flat, self._step(flat, ranges))

    def _step(self, flat: Tensor, ranges: Sequence[Sequence[tuple[int, int]]]) -> NodeSumStep:
        is_shared = self._memory.position(flat) >= 0
        local = self._memory.view_of(flat) if is_shared else flat.detach()
        return NodeSumStep(local, _SUM, ranges, self.layout, is_shared=is_shared)


class HierarchicalReduction:
    """One reduction, under way.

    Args:
        queue: Of the group.
        waits: Of the group.
        flat: What lives until all ranks have done their part.
        step: What is done with it.

    Attributes:
        summed: The first part.
    """

    def __init__(self, queue: StepQueue, waits: Waits, flat: Tensor, step: NodeSumStep) -> None:
        self._queue = queue
        self._waits = waits
        self._step = step
        (self._launched,) = queue.launch([step], flat)
        self.summed = Work(step.title, waits, self._is_summed, absent=partial(queue.absent, self._launched))

    @property
    def sums(self) -> list[Tensor]:
        """Of each slice of this rank, its ranges one after another, 1-D; to be changed in place. Once summed."""
        assert self._step.sums is not None
        return self._step.sums

    def deliver(self) -> Work:
        """Begin to bring the sums, as they are now, to all ranks of the node; what it returns is to be waited for."""
        self._step.is_over_nodes = True
        self._waits.progress()
        return self._queue.work([self._launched])

    def _is_summed(self) -> bool:
        return self._step.sums is not None or self._queue.has_ended([self._launched])


class SliceLink:
    """Messages among the owners of a slice, of which each is on another node; under way until they are waited for.

    Args:
        link: Joins them.
        ranks: Theirs in the group.
        rank: This one.
        waits: Of the group.
        progress: Advances the messages.

    Attributes:
        size: How many there are: the number of nodes.
        rank: This one's place among them.
    """

    def __init__(self, link: Wire, ranks: Sequence[int], rank: int, waits: Waits, progress: ProgressEngine) -> None:
        self._link = link
        self._waits = waits
        self._progress = progress
        self._under_way: list[_Message] = []
        self._elsewhere = [other for other in ranks if other != rank]
        self.size = len(ranks)
        self.rank = ranks.index(rank)

    def all_reduce(self, flat: Tensor) -> Work:
        """Sum ``flat``, 1-D, contiguous, float32 or float64, in place."""
        return self._message("all_reduce", partial(self._link.all_reduce, flat, _SUM))

    def all_to_all(self, output: Tensor, flat: Tensor, receiving: Sequence[int], sending: Sequence[int]) -> Work:
        """See :meth:`Wire.all_to_all`."""
        return self._message("all_to_all", partial(self._link.all_to_all, output, flat, receiving, sending))

    def advance(self) -> bool:
        """Move what is under way; whether nothing is left."""
        self._under_way = [message for message in self._under_way if not message.advance()]
        return not self._under_way

    def _message(self, what: str, start: Callable[[], InFlight]) -> Work:
        self._waits.check(what)
        with self._progress.lock:
            message = _Message(f"{what} between nodes", self._waits, start())
            self._under_way.append(message)
            self._progress.add(self)
        return Work(message.what, self._waits, message.poll, absent=lambda: self._elsewhere)


class _Message:
    """A collective of the owners of a slice; the progress engine advances it."""

    def __init__(self, what: str, waits: Waits, under_way: InFlight) -> None:
        self.what = what
        self._waits = waits
        self._under_way = under_way
        self._is_done = False
        self._reason = ""

    def advance(self) -> bool:
        """Whether it has ended, well or not; moves it."""
        if not self._is_done:
            try:
                self._is_done = self._under_way.done()
            except RuntimeError as error:
                self._reason = str(error)
                self._waits.give_up(f"{self.what} failed: {error}")
            if not self._is_done and self._waits.failure:
                self._reason = self._reason or self._waits.failure
                self._is_done = True
        return self._is_done

    def poll(self) -> bool:
        """Whether it has ended well."""
        if self._reason and self._is_done:
            raise CommunicationError(f"{self._waits.place}: {self._reason}")
        return self._is_done
