"""Reduces buckets by a compressor, in rounds; passes it flat gradients with the state of each parameter."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Generator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from ppe_ddp.backends.collective_arguments import as_bytes
from ppe_ddp.backends.shared_memory.shared_group import SharedMemoryGroup
from ppe_ddp.backends.shared_memory.shared_reservation import joined_ranges
from ppe_ddp.backends.shared_memory.step_queue import SliceLink
from ppe_ddp.compression.comm_state import CommState, hierarchy_of
from ppe_ddp.compression.compressor import WIDE, Compressor, FlatGradients, Link, Segment, are_finite, together
from ppe_ddp.contracts import GradBucket, Waitable
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.module import ModuleState
from ppe_ddp.engine.record import EventLog
from ppe_ddp.engine.reduction import Reduction
from ppe_ddp.waiting import is_done

logger = logging.getLogger("ppe_ddp")

Delivered = Generator[Waitable, None, Waitable | None]
"""An exchange. It returns an operation that its result still waits for after all is sent, or None."""

_CPU = torch.device("cpu")
_DISTANCE = 2  # turns from one round of a bucket to its next
_LAYOUTS = 256  # cached


class CompressorReduction(Reduction):
    """Calls a compressor, with the state of each parameter in ``state``."""

    sends_kept = True

    def __init__(self, compressor: Compressor, state: CommState, groups: Groups) -> None:
        super().__init__(groups)
        self.compressor = compressor
        self._state = state
        # Cached by names, shapes and strides, as most steps have the same layouts.
        self._segments = lru_cache(_LAYOUTS)(partial(_segments, state))
        self._queue = ExchangeQueue(groups)
        self._started: list[GradBucket] = []
        self._sparse: list[Tensor] = []  # sparse averages, which are not compressed
        self.may_launch = self._queue.is_ready
        self.agreed = self.title

    @property
    def title(self) -> str:
        return f"compressor {self.compressor!r}"

    def abandon(self) -> None:
        """Drop the step: abandon exchanges in flight, and restore the state."""
        self._queue.abandon()
        self._started.clear()
        self._sparse.clear()
        self._state.put_back()

    def note_sparse(self, name: str, average: Tensor) -> None:
        """See :meth:`Reduction.note_sparse`; a sparse average that is not finite drops the step as well."""
        super().note_sparse(name, average)
        self._sparse.append(average.values())

    def has_finite_averages(self) -> bool:
        return are_finite([*self._sparse, *(bucket.buffer() for bucket in self._started)])

    def nonzero_averages(self) -> Collection[str]:
        pairs = (pair for bucket in self._started for pair in zip(bucket.names(), bucket, strict=True))
        return {name for name, average in pairs if bool(average.any())}

    def commit(self, module_state: ModuleState, *, is_finite: bool | None = None) -> None:
        """Commit the state; if an average is not finite, restore it for parameters that no optimizer updates."""
        if is_finite is None:
            is_finite = self._state.is_empty or self.has_finite_averages()
        started, self._started = self._started, []
        self._sparse.clear()
        self._state.count(self._groups)
        if is_finite:
            self._state.commit()
            return
        averages = [one for bucket in started for one in zip(bucket.names(), bucket, strict=True)]
        finite = {name for name, _ in averages} - {name for name, average in averages if not are_finite([average])}
        # Those of the module, as an optimizer has them: a bucket has the local tensors of DTensors.
        parameters = zip(module_state.names, module_state.parameters, strict=True)
        # Ranks whose parts are all finite commit what they have copies of.
        copied = module_state.copied_parameters()
        self._state.put_back_unless_stepped({name: one for name, one in parameters if name in finite}, copied)

    def finish(self, bucket: GradBucket, pending: Waitable | None, memory: Sequence[Tensor]) -> int | None:
        """Wait for ``pending``; returns the bytes that this rank has sent, see :attr:`Link.nbytes`."""
        super().finish(bucket, pending, memory)
        return pending.nbytes if isinstance(pending, PendingExchange) else None

    def _call(self, bucket: GradBucket) -> PendingExchange:
        self._started.append(bucket)
        self._state.keep(bucket.names())
        groups, device, name = self._groups, bucket.buffer().device, str(bucket.index())
        hierarchy = hierarchy_of(groups.buckets) if device.type == "cpu" else None
        if hierarchy is not None:
            links = [CrossNodeLink(link) for link in hierarchy.links]
            return self._queue.start(self._average_between_nodes(bucket, hierarchy, links), links, device, name)
        link = Link(groups.buckets, groups.rank, groups.world_size, device)
        return self._queue.start(self._average(bucket, link), [link], device, name)

    def _average(self, bucket: GradBucket, link: Link) -> Delivered:
        gradients = self._gradients(bucket)
        plain = gradients.given
        wide = plain.to(WIDE.get(plain.dtype, plain.dtype))
        yield from self.compressor.start(replace(gradients, given=wide, average=wide), link)
        if wide is not plain:
            plain.copy_(wide)
        return None

    def _average_between_nodes(
        self, bucket: GradBucket, hierarchy: SharedMemoryGroup, links: Sequence[Link]
    ) -> Delivered:
        """Average over all ranks of the group; only messages between nodes are compressed.

            ranks of a node      flat gradients of a bucket    --exact sum-->    own parameters, over the node
            owners of a slice    own parameters                --compressor-->   their averages over the nodes
            ranks of a node      averages                      --copy-->         flat gradients of all ranks

        For the compressor each node is one rank, whose gradient is the mean over the node.
        """
        gradients, state, layout = self._gradients(bucket), self._state, hierarchy.layout
        parts: list[list[Segment]] = [[] for _ in range(layout.slices)]
        for segment in gradients.segments:
            parts[state.owners.of(segment.name)].append(segment)
        ranges = [joined_ranges((one.start, one.stop) for one in part) for part in parts]
        reduction = hierarchy.sum_ranges(gradients.given, ranges)
        yield reduction.summed
        exchanges = []
        for index, link, total in zip(layout.own_slices, links, reduction.sums, strict=True):
            total.mul_(link.size / layout.size)  # so that the mean over the nodes is the mean over the ranks
            own = replace(gradients, given=total, average=total, segments=tuple(_packed(parts[index])))
            exchanges.append(self.compressor.start(own, link))
        yield from together(exchanges)
        return reduction.deliver()

    def _gradients(self, bucket: GradBucket) -> FlatGradients:
        flat = bucket.buffer()
        plain = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        return FlatGradients(
            given=plain,
            average=plain,
            segments=self._segments(bucket.names(), tuple((t.shape, t.stride(), t.is_complex()) for t in bucket)),
            keeps=False,
            dtype=plain.dtype,
            step=self._groups.taken,
        )


def _segments(
    state: CommState, names: Sequence[str], forms: Sequence[tuple[tuple[int, ...], tuple[int, ...], bool]]
) -> tuple[Segment, ...]:
    """A segment for each tensor of a bucket, by its name and its shape, strides, and whether it is complex."""
    segments, start = [], 0
    for name, (shape, stride, is_complex) in zip(names, forms, strict=True):
        numel = math.prod(shape)
        # The size of the outermost dimension in memory: for a matrix its rows, as stored.
        rows = max(zip(stride, shape, strict=True))[1] if len(shape) > 1 and numel else 1
        if is_complex:
            numel, shape, stride = 2 * numel, (*shape, 2), (*(2 * step for step in stride), 1)
        segments.append(Segment(name, start, numel, rows, state.of(name), tuple(shape), stride))
        start += numel
    return tuple(segments)


def warn_of_one_machine(compressor: Compressor, groups: Groups) -> None:
    """Warn if all ranks are on one machine, where compression cannot pay."""
    if groups.rank == 0 < groups.world_size - 1 == len(groups.processes.on_this_node):
        logger.warning(
            "all ranks are on one machine, where %r takes longer than the memory that it saves: compression is for "
            "links between machines",
            compressor,
        )


class ExchangeQueue:
    """Advances exchanges of several rounds each, turn by turn, in an order that is the same on every rank.

    A round can start when the one before it has arrived, which happens at another moment on each rank. But all ranks
    must start the same collectives in the same order. So the order follows from the number of the bucket alone:

        turn        0       1       2       3       4       5       6
        bucket 0    start           2nd             end
        bucket 1            start           2nd             end
        bucket 2                    start           2nd             end

    In each turn older buckets come first. The second round of a bucket is sent while backward still computes gradients
    of other buckets. A turn waits for the messages that it needs; :meth:`is_ready` tells whether it would wait.

    Ranks of a node that average different parameters finish a bucket at different times. The operation that an exchange
    returns needs the other ranks of the node. So it is waited for only when no turns are left: a rank that waited
    earlier would delay messages that the other ranks wait for.
    """

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self._turn = 0
        self._running: deque[PendingExchange] = deque()
        self._error: BaseException | None = None  # of a failed turn; the next turn raises it again

    def start(
        self, exchange: Delivered, links: Sequence[Link], device: torch.device, name: str = ""
    ) -> PendingExchange:
        """Take a turn of the exchanges in flight, then begin ``exchange`` over ``links``, ``name`` in timelines."""
        self._advance()
        entry = PendingExchange(self, exchange, links, device, name)
        if entry.resume(self._turn):
            self._running.append(entry)
        return entry

    def is_ready(self) -> bool:
        """Whether the next turn would not wait."""
        return all(entry.is_ready() for entry in self._due())

    def abandon(self) -> None:
        for entry in self._running:
            entry.pending = None
            entry.exchange.close()
        self._running.clear()
        self._error = None

    def advance_until(self, entry: PendingExchange, *, may_wait: bool) -> bool:
        """Take turns until ``entry`` is done, which it returns; without ``may_wait`` stop before a turn would wait."""
        while entry in self._running and (may_wait or self.is_ready()):
            self._advance()
        if entry.delivery is None:
            return entry not in self._running
        while self._running and (may_wait or self.is_ready()):
            self._advance()
        if not self._running and (may_wait or is_done(entry.delivery)):
            self.groups.failures.wait(entry.delivery, entry.device)
            entry.delivery = None
        return entry.delivery is None

    def _due(self) -> list[PendingExchange]:
        return [entry for entry in self._running if entry.due == self._turn + 1]

    def _advance(self) -> None:
        if self._error is not None:
            raise self._error
        due = self._due()
        self._turn += 1
        try:
            for entry in due:
                if entry.pending is not None:
                    self.groups.failures.wait(entry.pending, entry.device)
                if not entry.resume(self._turn):
                    self._running.remove(entry)
        except BaseException as error:
            self._error = error
            raise


class PendingExchange:
    """One exchange in flight. Call :meth:`done` and :meth:`wait` only when all buckets of the backward have started."""

    goes_in_turns = True  # timelines show its messages one by one

    def __init__(
        self, queue: ExchangeQueue, exchange: Delivered, links: Sequence[Link], device: torch.device, name: str
    ) -> None:
        self._queue = queue
        self.exchange = exchange
        self._links = links
        self.device = device
        self.name = name
        self.due = 0  # the turn of its next round
        self.pending: Waitable | None = None
        self.delivery: Waitable | None = None  # the operation that its result still waits for

    @property
    def nbytes(self) -> int:
        """The bytes that this rank has sent so far, see :attr:`Link.nbytes`."""
        return sum(link.nbytes for link in self._links)

    def is_ready(self) -> bool:
        """Whether its next round can start without a wait of the host."""
        return self.pending is None or not self._queue.groups.failures.blocks(self.pending, self.device)

    def resume(self, turn: int) -> bool:
        """Start the next round, and return whether there is one; called when ``pending`` has been waited for."""
        self.pending = None
        self.due = turn + _DISTANCE
        begin, before, has_next = perf_counter_ns(), self.nbytes, True
        try:
            self.pending = next(self.exchange)
        except StopIteration as end:
            self.delivery, has_next = end.value, False
        if (log := EventLog.current) is not None:
            log.add("decode" if before else "encode", self.name, begin)
            if self.pending is not None:
                log.add_message("bucket", self.name, perf_counter_ns(), self.pending, self.nbytes - before)
        return has_next

    def done(self) -> bool:
        """Whether the average has arrived; takes turns that need not wait."""
        return self._queue.advance_until(self, may_wait=False)

    def wait(self) -> None:
        """Take turns until the average has arrived."""
        self._queue.advance_until(self, may_wait=True)


class CrossNodeLink(Link):
    """The link between the owners of one slice on all nodes."""

    def __init__(self, link: SliceLink) -> None:
        super().__init__(None, link.rank, link.size, _CPU)
        self._link = link

    def _sum(self, tensor: Tensor) -> Any:
        return self._link.all_reduce(tensor.view(-1))

    def _gather(self, rows: Tensor, message: Tensor) -> Any:
        return self._exchange(as_bytes(rows), message.repeat(self.size))

    def _exchange(self, received: Tensor, sent: Tensor) -> Any:
        counts = [len(sent) // self.size] * self.size
        return self._link.all_to_all(received, sent, counts, counts)


def _packed(segments: Sequence[Segment]) -> Generator[Segment, None, None]:
    """The segments, shifted so that each begins at the end of the one before it."""
    start = 0
    for segment in segments:
        yield replace(segment, start=start)
        start += segment.numel
