"""One bucket: a range of a buffer, which is reduced in other memory.

By all-reduce, all of it becomes averages. By reduce-scatter only this rank's share does, and what is in the rest
afterwards is of no use. Until the whole step has succeeded the range is what this rank has computed: a reduction that
was given up may still write into its memory, so that a copy to go back to would not do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ppe_ddp.contracts import probe
from ppe_ddp.engine.bucket import DenseBucket
from ppe_ddp.engine.completion import ends_soon
from ppe_ddp.engine.memory import allocator, slots_of
from ppe_ddp.errors import CommunicationError, PeerAbortedError
from ppe_ddp.scaling import scale

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ppe_ddp.engine.bucket import BucketContext
    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.engine.zero.shard_collectives import ReduceScatter
    from ppe_ddp.megatron.buffer_layout import BucketRange


class BufferBucket(DenseBucket):
    """A range of a buffer, and the memory that it is all-reduced in, as large as the range and kept from step to step.

    Args:
        extent: The range, and the parameters in it.
        memory: The range of the buffer, padding included.
        context: What all buckets of one group have in common; the specs with the dtypes of ``main_grad``.
        gain: What the mean over the group is to be multiplied by.
        scatter: How to reduce-scatter; None to all-reduce.

    Attributes:
        slots: The ``main_grad`` of each member.
    """

    def __init__(
        self,
        extent: BucketRange,
        memory: Tensor,
        context: BucketContext,
        *,
        gain: float,
        scatter: ReduceScatter | None,
    ) -> None:
        super().__init__(extent.plan, context)
        self.extent = extent
        self._groups = context.groups
        self._memory = memory
        self._gain = gain
        self._scatter = scatter
        self._range = memory.narrow(0, 0, extent.plan.numel)
        self.slots = slots_of(self._range, extent.plan, self.specs, self.parameters)
        self._is_reduced = False
        self._carried: Tensor | None = None
        self._message: tuple[Tensor, list[Tensor]] | None = None
        self._reduced_share: Tensor | None = None

    @property
    def share(self) -> Tensor:
        """This rank's equal part of the bucket, 1-D."""
        size = self.extent.padded // self._groups.world_size
        return self._memory.narrow(0, self._groups.rank * size, size)

    def reset(self) -> None:
        """The buffer was zeroed."""
        self._is_reduced = False
        self._carried = None

    def clear(self, indices: Sequence[int]) -> None:
        """Set the gradients of the parameters at ``indices``, some of its members, to zero."""
        if len(indices) == len(self.extent.plan.members):
            self._memory.zero_()
            self.reset()
            return
        first = 0 if self._scatter is None else self._groups.rank * self.share.numel()
        for slot, index, offset in zip(self.slots, self.extent.plan.members, self.extent.plan.offsets, strict=True):
            if index in indices:
                slot.zero_()
                if self._carried is not None:
                    self._carried[max(offset - first, 0) : max(offset + slot.numel() - first, 0)].zero_()

    def scale(self, factor: float | Tensor) -> None:
        """The buffer was multiplied by ``factor``."""
        if self._carried is not None:
            self._carried.mul_(factor)

    def reopen(self) -> None:
        """Let more be added to averages, so that the next reduction gives their sum with its own averages."""
        if not self._is_reduced:
            return
        self._is_reduced = False
        if self._scatter is None and self._gain == 1.0:
            return  # the mean of what all ranks have is the same
        # No other rank has this share of the averages, or what they were multiplied by would be multiplied once more:
        # undone beforehand, they would be rounded in halves, or too large for them.
        self._carried = (self._range if self._scatter is None else self.share).clone()
        self._memory.zero_()

    def add(self, index: int, gradient: Tensor) -> None:
        """Add an average that came late to that of parameter ``index``."""
        self.slots[self.extent.plan.members.index(index)].add_(gradient)
        self._is_reduced = True

    def launch(self, *, is_last: bool) -> None:
        """Start the reduction: an all-reduce of a copy, or a reduce-scatter into other memory."""
        self.reopen()
        if self.extent.padded == 0:
            return
        if self._scatter is None:
            super().launch(is_last=is_last)
        else:
            factor = self._gain * self._reduction.mean_factor
            self._reduced_share = self._scatter.memory_for_share(self._memory)
            self.pending = self._scatter.start(self._reduced_share, self._memory, factor=factor, spare=False)

    def _pack(self) -> tuple[Tensor, list[Tensor]]:
        factor = self._gain * self.factor
        if self._reduction.sends_nothing:
            scale(self._range, self._range, factor)
            return self._range, self.slots
        if self._message is None:
            flat = allocator(self._groups.buckets)(self.plan.numel, self.plan.dtype, self.plan.device)
            self._message = flat, slots_of(flat, self.plan, self.specs, self.parameters)
        flat, slots = self._message
        scale(flat, self._range, factor)
        return flat, slots

    @property
    def message_nbytes(self) -> int:
        """Bytes of the memory that it is all-reduced in."""
        return 0 if self._message is None else self._message[0].nbytes

    def finish(self) -> Steps:
        """Wait for the result.

        Raises:
            CommunicationError: The transport failed.
            FunctionError: The user's reduce function broke its contract.
        """
        if self._scatter is None:
            yield from super().finish()
            return
        if self.pending is not None:
            yield probe(self.pending)
        self._wait_for_share()

    def _wait_for_share(self) -> None:
        try:
            if self.pending is not None:
                self._groups.failures.wait(self.pending, self.plan.device)
        except PeerAbortedError:
            raise
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self._groups.rank}, bucket {self.plan.index} with {self.title}: the reduce-scatter failed: "
                f"{error}. An error or a crash on another rank ends here: look for the first traceback of all ranks."
            ) from error
        self.pending = None

    def averages(self) -> list[Tensor]:
        """The ``main_grad`` of each member, with the averages in it: of a reduce-scatter in this rank's share."""
        if self._reduced_share is not None:
            self.share.copy_(self._reduced_share)
        if self._flat is not None and self._flat is not self._range:
            self._range.copy_(self._flat)
        if self._carried is not None:
            (self._range if self._scatter is None else self.share).add_(self._carried)
            self._carried = None
        self._is_reduced = True
        return self.slots

    def release(self) -> None:
        """Drop what belongs to one reduction."""
        super().release()
        self._reduced_share = None

    def put_back(self) -> list[tuple[int, Tensor]]:
        """Abandon the reduction, whose connections were closed; ``main_grad`` is as it was.

        Waits a moment for a reduce-scatter to end, which reads ``main_grad``.
        """
        is_done = probe(self.pending)
        if self._scatter is not None and is_done is not None:
            ends_soon(is_done)
        self.release()
        self._message = None  # the reduction may still write there
        return []

    @property
    def title(self) -> str:
        """The first of its parameters, for messages."""
        names = self.names
        return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if names[3:] else "")

    def non_finite(self) -> list[str]:
        """The names of the members whose gradient is NaN or infinite here."""
        if is_finite(self._memory):
            return []
        return [name for name, slot in zip(self.names, self.slots, strict=True) if not is_finite(slot)]


def is_finite(tensor: Tensor) -> bool:
    """Whether there is neither NaN nor infinity in ``tensor``; one pass, without a temporary of its size."""
    if tensor.numel() == 0:
        return True
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    low, high = torch.aminmax(plain)
    return bool(torch.isfinite(low) & torch.isfinite(high))
