"""Reduces buckets by a compressor: hands it flat gradients with what is remembered of each parameter."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ppe_ddp.compression.all_pending import AllPending
from ppe_ddp.compression.flat_gradients import FlatGradients, Segment
from ppe_ddp.compression.link import Link
from ppe_ddp.engine.exchange_queue import Delivered, ExchangeQueue, PendingExchange
from ppe_ddp.engine.node_compression import CrossNodeLinks, average_between_nodes, hierarchy_of
from ppe_ddp.engine.reduction import Reduction

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import Tensor

    from ppe_ddp.compression.compressor import Compressor
    from ppe_ddp.contracts import GradBucket, Probe, Waitable
    from ppe_ddp.engine.comm_state import CommState
    from ppe_ddp.engine.groups import Groups

logger = logging.getLogger("ppe_ddp")

_LAYOUTS = 256
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


class CompressorReduction(Reduction):
    """Calls a compressor.

    Args:
        compressor: How to send.
        state: What is remembered of each parameter.
        groups: Where to communicate.

    Attributes:
        compressor: The same.
    """

    def __init__(self, compressor: Compressor, state: CommState, groups: Groups) -> None:
        super().__init__(groups)
        self.compressor = compressor
        self._state = state
        self._layouts: OrderedDict[tuple[object, ...], tuple[Segment, ...]] = OrderedDict()
        self._queue = ExchangeQueue(self._wait_for)
        self._started: list[GradBucket] = []

    @property
    def title(self) -> str:
        """The compressor."""
        return f"compressor {self.compressor!r}"

    @property
    def agreed(self) -> str:
        """The compressor."""
        return self.title

    @property
    def may_launch(self) -> Probe:
        """Whether the next bucket can be launched without waiting for those ahead of it."""
        return self._queue.is_ready

    def abandon(self) -> None:
        """Leave what is under way, and what it has changed of the state: the step is dropped."""
        self._queue.abandon()
        self._started.clear()
        self._state.put_back()

    def commit(self) -> None:
        """Let the state be what the step has made of it, or what it was where an average is not finite.

        An optimizer has to leave out such a step, and a ``GradScaler`` does. All ranks have the same averages, so they
        decide alike.
        """
        started, self._started = self._started, []
        if self._state.is_empty or _are_finite([bucket.buffer() for bucket in started]):
            self._state.commit()
            return
        members = [one for bucket in started for one in zip(bucket.names(), bucket.parameters(), bucket, strict=True)]
        wrong = {name for name, _, average in members if not _are_finite([average])}
        self._state.put_back_unless_stepped({name: one for name, one, _ in members if name not in wrong})

    def nbytes(self, pending: Waitable | None) -> int | None:
        """What this rank has sent by ``pending``, in bytes of an all-reduce."""
        return pending.nbytes if isinstance(pending, PendingExchange) else None

    def _call(self, bucket: GradBucket) -> PendingExchange:
        self._started.append(bucket)
        self._state.keep(bucket.names())
        groups, device, name = self._groups, bucket.buffer().device, str(bucket.index())
        hierarchy = hierarchy_of(groups.buckets) if device.type == "cpu" else None
        if hierarchy is not None:
            links = CrossNodeLinks(hierarchy)
            return self._queue.start(self._average_between_nodes(bucket, links), links, name)
        link = Link(groups.buckets, groups.rank, groups.world_size, device)
        return self._queue.start(self._average(bucket, link), link, name)

    def _average(self, bucket: GradBucket, link: Link) -> Delivered:
        gradients = self._gradients(bucket)
        plain = gradients.given
        wide = plain.to(_WIDE.get(plain.dtype, plain.dtype))
        yield from self.compressor.average(replace(gradients, given=wide, average=wide), link)
        if wide is not plain:
            plain.copy_(wide)
        return None

    def _average_between_nodes(self, bucket: GradBucket, links: CrossNodeLinks) -> Delivered:
        gradients, state, slices = self._gradients(bucket), self._state, links.hierarchy.layout.slices
        owners = [state.owners.of(segment.name) for segment in gradients.segments]
        seeds = [state.seed(self._groups, bucket.index() * slices + index) for index in range(slices)]
        return average_between_nodes(self.compressor, gradients, owners, seeds, links)

    def _gradients(self, bucket: GradBucket) -> FlatGradients:
        """Those of ``bucket``, in their own dtype."""
        flat = bucket.buffer()
        plain = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        return FlatGradients(
            given=plain,
            average=plain,
            segments=self._segments(bucket),
            keeps=False,
            dtype=plain.dtype,
            step=self._state.step(self._groups),
            seed=self._state.seed(self._groups, bucket.index()),
        )

    def _segments(self, bucket: GradBucket) -> tuple[Segment, ...]:
        """Those of the members of ``bucket``; made once, as long as the same layout comes along."""
        layout = (bucket.names(), *((tensor.shape, tensor.stride()) for tensor in bucket))
        segments = self._layouts.get(layout)
        if segments is None:
            segments = self._layouts[layout] = tuple(self._cut(bucket))
            if len(self._layouts) > _LAYOUTS:
                self._layouts.popitem(last=False)
        else:
            self._layouts.move_to_end(layout)
        return segments

    def _cut(self, bucket: GradBucket) -> Generator[Segment, None, None]:
        start = 0
        for name, tensor in zip(bucket.names(), bucket, strict=True):
            numel = tensor.numel() * (2 if tensor.is_complex() else 1)
            yield Segment(name, start, numel, _rows(tensor), self._state.of(name))
            start += numel

    def _wait_for(self, pending: Waitable, device: torch.device) -> None:
        for part in pending.parts if isinstance(pending, AllPending) else (pending,):
            self._groups.failures.wait(part, device)

    def _wait(self, bucket: GradBucket, pending: Waitable) -> None:
        pending.wait()

    def _accept(self, bucket: GradBucket, value: object) -> None:
        """The result is in place."""


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether there is neither NaN nor infinity in any of them. The host waits for a GPU."""
    totals = [tensor.sum(dtype=_WIDE.get(tensor.dtype)) for tensor in tensors]
    if all([bool(total.isfinite()) for total in totals]):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in tensors)  # a sum can overflow


def _rows(tensor: Tensor) -> int:
    """The size of the dimension that is the outermost in memory: of a matrix the rows as they lie."""
    if tensor.dim() < 2 or not tensor.numel():
        return 1
    return max(zip(tensor.stride(), tensor.shape, strict=True))[1]


def warn_of_one_machine(compressor: Compressor, groups: Groups) -> None:
    """Warn where compression cannot pay, as far as this rank sees the others."""
    if groups.rank == 0 < groups.world_size - 1 == len(groups.processes.on_this_node):
        logger.warning(
            "all ranks are on one machine, where %r takes longer than the memory that it saves: compression is for "
            "links between machines",
            compressor,
        )
