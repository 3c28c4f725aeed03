"""Collectives of one group in shared memory: chooses the collectives for it, connects the ranks, caches the steps.

The choice follows from the total size and the dtype, so it is the same on every rank. The steps of a collective whose
tensors lie in shared memory are cached, and run again for the same memory, as in every training step. They have views
of the reservation, not of tensors allocated in it. So they keep no tensor alive, and fit tensors that are later
allocated at the same place.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ppe_ddp.backends.collective_arguments import overlap
from ppe_ddp.backends.mpi import MpiOptions
from ppe_ddp.backends.shared_memory.shared_reservation import (
    TOKEN_BYTES,
    Address,
    ControlPage,
    SharedMemory,
    control_pages,
    node_name,
    shared_memory,
)
from ppe_ddp.backends.shared_memory.shared_steps import (
    AllGatherStep,
    AllReduceStep,
    NodeLayout,
    NodeSumStep,
    ReduceScatterStep,
    Step,
    TwoLevelAllGatherStep,
    TwoLevelAllReduceStep,
    TwoLevelReduceScatterStep,
    pieces,
    supports,
)
from ppe_ddp.backends.shared_memory.step_queue import HierarchicalReduction, SharedLink, SliceLink, StepQueue
from ppe_ddp.backends.shm import ShmOptions
from ppe_ddp.backends.work import Work
from ppe_ddp.waiting import each_process

logger = logging.getLogger("ppe_ddp")

_Kind: Any = ReduceOp.RedOpType
# An all-gather must have at least this many times ``smallest_bytes``. Measured: messages are faster for all-gathers
# below 4 MB, and for sums below 0.5 to 1 MB.
_GATHERED_PART = 16
_MOST_KEPT = 256  # collectives whose steps are cached; about 10 kB each
_REASON_BYTES = 200

Made = tuple[list[Step], bool] | None
"""The steps of a collective, and whether they can be cached, as all its tensors lie in shared memory; None if they do
not go through it."""


class SharedMemoryGroup:
    """All-reduces of large tensors, and with ``options.shared_parts`` reduce-scatters and all-gathers.

    All ranks make it together. In a group of several nodes collectives below ``two_level_bytes`` go by messages.
    """

    # Of this process and this rank, where there is a ``queue``.
    _memory: SharedMemory
    layout: NodeLayout

    def __init__(
        self, link: SharedLink, options: MpiOptions | ShmOptions, *, is_enabled: bool, two_level_bytes: int
    ) -> None:
        self._link = link
        self._piece_bytes = options.shared_piece_bytes
        self._kept: dict[Any, Sequence[Step]] = {}
        self._makers: dict[str, Callable[..., Made]] = {}
        # The ranks of each node, if there are several, and ranks share memory or each is alone on a node; else empty.
        self.nodes: tuple[tuple[int, ...], ...] = ()
        # Runs the collectives in shared memory; None if some ranks of a node cannot share memory.
        self.queue: StepQueue | None = None
        # For :meth:`sum_ranges`, a connection to other nodes for each slice of this rank; none without shared memory.
        self.links: list[SliceLink] = []
        if link.size > 1 and is_enabled:
            self._connect()
        self._smallest_bytes = max(options.shared_bytes, two_level_bytes if self.links else 0)
        if self.queue is not None:
            self._makers["all_reduce"] = self._all_reduce
            if options.shared_parts:
                self._makers |= {"reduce_scatter": self._reduce_scatter, "all_gather": self._all_gather}

    def _connect(self) -> None:
        """Map the reservations of the ranks of this node, and connect the nodes; all ranks of the group call this.

        No rank uses shared memory if some rank cannot map those of its node, or no node has several ranks.
        """
        link = self._link
        own: SharedMemory | None = None
        position, reason = -1, ""
        try:
            own = shared_memory()
            position = control_pages().take()
            packed = own.address.packed(position)
        except (OSError, MemoryError) as error:
            reason = f"it has none: {type(error).__name__}: {error}"
            packed = _without_memory()
        addresses = [Address.unpacked(one) for one in link.all_gather(packed)]
        layout = NodeLayout.of([address.node for address, _ in addresses], link.rank)
        local = [addresses[rank] for rank in layout.local]
        pages: list[ControlPage] = []
        if own is not None and not reason:
            pages, reason = _attach(own, layout.local, local)
        reasons = [f"rank {rank}: {one}" for rank, one in enumerate(_exchange(link, reason)) if one]
        self.nodes = layout.nodes if len(layout.nodes) > 1 and not reasons else ()
        nodes = {address.node for address, _ in addresses} - {bytes(TOKEN_BYTES)}
        is_expected = not reasons or len(nodes) == link.size
        if layout.slices == 1:
            reasons.append("every rank is alone on its node")
        if own is None or reasons:
            _log_reasons(link.waits.place, reasons, is_expected=is_expected)
            if position >= 0:
                control_pages().give_back(position)
            return
        link.waits.ended_ranks = lambda: [
            rank for rank, (one, _) in zip(layout.local, local, strict=True) if own.has_ended(one)
        ]
        self._memory, self.layout = own, layout
        self.queue = queue = StepQueue(link, own, layout, pages, self._piece_bytes)
        link.waits.is_closed_elsewhere, link.waits.sees_every_rank = queue.is_closed_elsewhere, len(layout.nodes) == 1
        control_pages().leave_with(queue, layout.local_rank, pages)
        self.links = [
            SliceLink(wire, layout.owners(index), layout.rank, link.waits)
            for index, wire in zip(layout.own_slices, queue.links_of_callers, strict=False)
        ]

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self._memory.allocate(numel, dtype)

    def close(self) -> None:
        if self.queue is not None:
            self.queue.close_links()

    def only_rank(self, node: int | None) -> int | None:
        """The only rank of a node; None if it has several, or ``node`` is None."""
        if node is None or self.queue is None:  # each rank counts as a node
            return node
        return self.nodes[node][0] if len(self.nodes[node]) == 1 else None

    def start(self, what: str, *tensors: Tensor, kind: Any = None, source: int | None = None) -> Work | None:
        """Begin a collective of CPU tensors; None, without effect, if they do not go through shared memory.

        ``what`` is ``"all_reduce"``, ``"reduce_scatter"`` or ``"all_gather"``, with arguments as in
        :class:`Collectives`; ``kind`` is ``ReduceOp.op``.
        """
        queue = self.queue
        if queue is None or what not in self._makers:
            return None
        key: list[Any] = [what, kind, source]
        for tensor in tensors:
            key += (tensor.data_ptr(), tensor.numel(), tensor.dtype)
        steps = self._kept.get(tuple(key))
        if steps is None:
            made = self._makers[what](*tensors, kind, source)
            if made is None:
                return None
            steps, is_lasting = made
            if is_lasting:
                if len(self._kept) >= _MOST_KEPT:
                    self._kept.pop(next(iter(self._kept)), None)
                self._kept[tuple(key)] = steps
        return queue.work(queue.launch(steps, tensors))

    def sum_ranges(self, flat: Tensor, ranges: Sequence[Sequence[tuple[int, int]]]) -> HierarchicalReduction:
        """Begin to sum ``flat`` over the ranks of each node; the caller exchanges the sums by :attr:`links`.

        All ranks of the group must call it together, where there are links. torch has no such collective; compressors
        use it, for which each node is one rank.

        ``flat`` is 1-D and contiguous, of the same size and floating dtype on all ranks; it is changed in place until
        the reduction is over. ``ranges`` has for each slice the begin and end of its ranges of elements, in ascending
        order. Ranges are disjoint, and the same on all ranks.
        """
        assert self.queue is not None
        is_shared = self._is_shared(flat)
        local = self._memory.view_of(flat) if is_shared else flat.detach()
        step = NodeSumStep(local, ranges, self.layout, is_shared=is_shared)
        return HierarchicalReduction(self.queue, self._link.waits, flat, step)

    def _all_reduce(self, tensor: Tensor, kind: Any, source: int | None) -> Made:
        if not self._admits(tensor, kind):
            return None
        is_shared = self._is_shared(tensor)
        (flat,) = self._elements(is_shared, tensor)
        make = partial(TwoLevelAllReduceStep, source=source) if self.links else AllReduceStep
        parts = pieces(self._piece_bytes, flat)
        return [make(part, kind, self.layout, is_shared=is_shared) for (part,) in parts], is_shared

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, kind: Any, _source: None) -> Made:
        if not self._admits(tensor, kind) or not self._sizes_match(output, tensor):
            return None
        tensor = self._without_overlap(tensor, output, tensor)
        is_shared = self._is_shared(tensor)
        is_lasting = is_shared and self._is_shared(output)
        part, flat = self._elements(is_lasting, output, tensor)
        make = TwoLevelReduceScatterStep if self.links else ReduceScatterStep
        parts = pieces(self._piece_bytes, flat.view(self._link.size, -1), part)
        return [make(result, rows, kind, self.layout, is_shared=is_shared) for rows, result in parts], is_lasting

    def _all_gather(self, output: Tensor, tensor: Tensor, _kind: None, _source: None) -> Made:
        if output.nbytes < _GATHERED_PART * self._smallest_bytes:
            return None
        if not self._admits(output, None) or not self._sizes_match(tensor, output):
            return None
        tensor = self._without_overlap(tensor, tensor, output)
        is_lasting = self._is_shared(tensor) and self._is_shared(output)
        flat, share = self._elements(is_lasting, output, tensor)
        make = TwoLevelAllGatherStep if self.links else AllGatherStep
        is_shared = self._is_shared(output if self.links else tensor)
        parts = pieces(self._piece_bytes, flat.view(self._link.size, -1), share)
        return [make(rows, part, self.layout, is_shared=is_shared) for rows, part in parts], is_lasting

    def _is_shared(self, tensor: Tensor) -> bool:
        return self._memory.position(tensor) >= 0

    def _elements(self, is_lasting: bool, *tensors: Tensor) -> list[Tensor]:
        """Flatten each tensor; with ``is_lasting`` to views of the reservation that keep no tensor alive."""
        flat = [tensor.detach().view(-1).view(_real(tensor.dtype)) for tensor in tensors]
        if not is_lasting:
            return flat
        return [self._memory.view_of(tensor) for tensor in flat]

    def _admits(self, whole: Tensor, kind: Any) -> bool:
        """Whether ``whole`` goes through shared memory, by its size and dtype, which are the same on all ranks."""
        dtype = whole.dtype
        is_undefined = (kind is not None and dtype is torch.bool) or (kind == _Kind.MAX and dtype.is_complex)
        if is_undefined or whole.nbytes < self._smallest_bytes:
            return False
        return supports(_real(dtype), _Kind.SUM if kind is None else kind)

    def _sizes_match(self, part: Tensor, whole: Tensor) -> bool:
        return part.dtype is whole.dtype and part.numel() * self._link.size == whole.numel()

    def _without_overlap(self, tensor: Tensor, part: Tensor, whole: Tensor) -> Tensor:
        """The input; a copy of it if input and output overlap, unless it is this rank's own part of the whole."""
        is_own = part.data_ptr() == whole.data_ptr() + self._link.rank * part.nbytes
        return tensor if is_own or not overlap(part, whole) else tensor.clone()


def _without_memory() -> bytes:
    """The packed address of a rank without a reservation: only the name of its node, if that is known."""
    node = b""
    with suppress(OSError):
        node = node_name()
    return Address(os.getpid(), -1, 0, b"", node).packed(-1)


def _log_reasons(place: str, reasons: Sequence[str], *, is_expected: bool) -> None:
    text = f"{place}: no shared memory, so all goes by messages: {'; '.join(reasons)}"
    if is_expected or _told():
        logger.debug("%s", text)
    else:
        _told().append(text)
        logger.warning("%s. That is right, but slower; with shared_memory=False it is not tried", text)


_told: Callable[[], list[str]] = each_process(list)
"""What this process has warned of already."""


def _attach(
    own: SharedMemory, ranks: Sequence[int], addresses: Sequence[tuple[Address, int]]
) -> tuple[list[ControlPage], str]:
    """The control pages of the ranks that have one, and the reason if one cannot be mapped."""
    pages: list[ControlPage] = []
    for rank, (address, position) in zip(ranks, addresses, strict=True):
        if address.nbytes:  # else that rank gives its own reason
            try:
                pages.append(ControlPage(own.attach(address), position))
            except (OSError, ValueError) as error:
                return pages, f"it does not reach rank {rank}: {type(error).__name__}: {error}"
    return pages, ""


def _exchange(link: SharedLink, reason: str) -> list[str]:
    """The reasons of all ranks, by rank; empty for a rank without one."""
    texts = link.all_gather(reason.encode()[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0"))
    return [text.rstrip(b"\0").decode(errors="replace") for text in texts]


def _real(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which elements are reduced: a complex number counts as two real ones, a bool as a byte."""
    return torch.uint8 if dtype is torch.bool else dtype.to_real()
