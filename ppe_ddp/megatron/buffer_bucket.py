"""One bucket: a range of a buffer that is reduced where it lies.

By all-reduce, all of it becomes averages. By reduce-scatter only this rank's share does, and what is in the rest
afterwards is of no use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ppe_ddp.engine.bucket_buffers import BucketBuffer
from ppe_ddp.engine.completion import ends_soon, probe
from ppe_ddp.engine.flight import Flight
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from ppe_ddp.contracts import Waitable
    from ppe_ddp.engine.bucket_buffers import BucketBuffers
    from ppe_ddp.engine.bucket_plan import ParameterSpec
    from ppe_ddp.engine.completion import Probe
    from ppe_ddp.engine.zero.shard_collectives import ReduceScatter
    from ppe_ddp.megatron.buffer_layout import BucketRange
    from ppe_ddp.megatron.reduction_group import ReductionGroup


class BufferBucket:
    """A range of a buffer, at rest or on its way.

    Args:
        extent: What it holds.
        memory: The range of the buffer, padding included.
        reduction_group: Who reduces it.
        buffers: Where flights find that the gradients lie in place.
        specs: Of all parameters of the module, with the dtypes of ``main_grad``.
        parameters: All parameters of the module.
        scatter: The way of a reduce-scatter; None to all-reduce.

    Attributes:
        slots: The ``main_grad`` of each member.
    """

    def __init__(
        self,
        extent: BucketRange,
        memory: Tensor,
        reduction_group: ReductionGroup,
        buffers: BucketBuffers,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[nn.Parameter],
        *,
        scatter: ReduceScatter | None,
    ) -> None:
        self.extent = extent
        self.reduction_group = reduction_group
        self._memory = memory
        self._buffers = buffers
        self._specs = specs
        self._parameters = parameters
        self._scatter = scatter
        buffer = BucketBuffer(memory)
        buffer.lay_out(extent.plan, specs, parameters)
        buffers.keep(buffer)
        self.slots = buffer.slots
        self._is_reduced = False
        self._kept: Tensor | None = None
        self._flight: Flight | None = None
        self._pending: Waitable | None = None

    @property
    def share(self) -> Tensor:
        """This rank's equal part of the bucket, 1-D."""
        groups = self.reduction_group.groups
        size = self.extent.padded // groups.world_size
        return self._memory.narrow(0, groups.rank * size, size)

    def reset(self) -> None:
        """The buffer was zeroed."""
        self._is_reduced = False
        self._kept = None

    def scale(self, factor: float | Tensor) -> None:
        """The buffer was multiplied by ``factor``."""
        if self._kept is not None:
            self._kept.mul_(factor)

    def reopen(self) -> None:
        """Let more be added to averages, so that the next reduction gives their sum with its own averages."""
        if not self._is_reduced:
            return
        self._is_reduced = False
        gain = self.reduction_group.gain
        if self._scatter is None:
            if gain != 1.0:
                self._memory.mul_(1.0 / gain)
            return
        # No other rank has this share of the averages. As many times as there are ranks, to be reduced once more,
        # they would be rounded in halves, or too large for them.
        self._kept = self.share.clone()
        self._memory.zero_()

    def add(self, index: int, gradient: Tensor) -> None:
        """Add an average that came late to that of parameter ``index``."""
        self.slots[self.extent.plan.members.index(index)].add_(gradient)
        self._is_reduced = True

    def launch(self, *, is_last: bool) -> None:
        """Start the reduction, in place."""
        self.reopen()
        if self.extent.padded == 0:
            return
        gain = self.reduction_group.gain
        if self._scatter is not None:
            factor = gain * self.reduction_group.reduction.mean_factor
            self._pending = self._scatter.start(self.share, self._memory, factor=factor)
            return
        if gain != 1.0:
            self._memory.mul_(gain)
        self._flight = Flight(self.extent.plan, list(self.slots), self._buffers, self._specs, views=True)
        self._flight.launch(self.reduction_group.reduction, self._parameters, is_last=is_last)

    @property
    def is_under_way(self) -> bool:
        """Whether something was sent that was not waited for."""
        return self._pending is not None or (self._flight is not None and self._flight.is_under_way)

    def probe(self) -> Probe | None:
        """How to ask whether what was sent has come back; None where nobody can tell."""
        return probe(self._pending) if self._flight is None else self._flight.probe()

    def land(self) -> None:
        """Wait for the result.

        Raises:
            CommunicationError: The transport failed.
            FunctionError: The user's reduce function broke its contract.
        """
        flight, self._flight = self._flight, None
        pending, self._pending = self._pending, None
        if flight is not None:
            flight.land(self.reduction_group.reduction)
        if pending is not None:
            try:
                pending.wait()
            except RuntimeError as error:
                raise CommunicationError(
                    f"rank {self.reduction_group.groups.rank}, bucket {self.extent.plan.index} with {self.title}: the "
                    f"reduce-scatter failed: {error}. An error or a crash on another rank ends here: look for the "
                    "first traceback of all ranks."
                ) from error
        if self._kept is not None:
            self.share.add_(self._kept)
            self._kept = None
        self._is_reduced = True

    def abandon(self) -> None:
        """Forget what is still in flight, in connections that were closed; what ends soon is waited for."""
        is_done = self.probe()
        if is_done is not None:
            ends_soon(is_done)
        self._flight = self._pending = None

    @property
    def title(self) -> str:
        """The first of its parameters, for messages."""
        names = [self._specs[i].name for i in self.extent.plan.members]
        return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if names[3:] else "")

    def non_finite(self) -> list[str]:
        """The names of the members whose gradient is NaN or infinite here."""
        if is_finite(self._memory):
            return []
        pairs = zip(self.extent.plan.members, self.slots, strict=True)
        return [self._specs[i].name for i, slot in pairs if not is_finite(slot)]


def is_finite(tensor: Tensor) -> bool:
    """Whether there is neither NaN nor infinity in ``tensor``; one pass, without a temporary of its size."""
    if tensor.numel() == 0:
        return True
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    low, high = torch.aminmax(plain)
    return bool(torch.isfinite(low) & torch.isfinite(high))
