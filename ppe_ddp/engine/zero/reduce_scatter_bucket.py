"""A bucket of gradients on its way to the ranks that own them: each keeps its chunk of the average.

packed     .grad -> rows, one a rank -> reduce-scatter -> this rank's row of the average
adopted    .grad, where it lies in memory as such rows -> reduce-scatter -> this rank's row of the average
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ppe_ddp.engine.flight import Flight, reducible_in_place
from ppe_ddp.engine.zero.chunks import flattened
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.reduction import Reduction
    from ppe_ddp.engine.zero.chunks import Rows
    from ppe_ddp.engine.zero.message_pool import MessagePool
    from ppe_ddp.engine.zero.shard_collectives import ReduceScatter

_HALVES = (torch.float16, torch.bfloat16)


class ReduceScatterBucket(Flight):
    """A bucket of dense gradients of which every rank gets its part.

    Takes the arguments of :class:`Flight`, and:

    Args:
        groups: Where to.
        pool: Memory for it.
        transport: The way there.
        rows: The layout of the bucket.
    """

    def __init__(
        self,
        *args: Any,
        groups: Groups,
        pool: MessagePool,
        transport: ReduceScatter,
        rows: Rows,
        views: bool = False,
        **keywords: Any,
    ) -> None:
        super().__init__(*args, views=False, **keywords)
        self._groups = groups
        self._pool = pool
        self._transport = transport
        self._rows = rows
        self._member_specs = [self._specs[i] for i in self.plan.members]
        self._row: Tensor | None = None

    def launch(self, reduction: Reduction, parameters: Sequence[nn.Parameter], *, is_last: bool) -> None:
        """Bring the gradients into rows and start the reduce-scatter."""
        if self.plan.numel == 0:
            return
        rows = self._lying()
        ours = rows is None
        if rows is None:
            flat = self._pool.take(self._rows.numel, self.plan.dtype, self.plan.device)
            rows = flat.view(self._groups.world_size, self._rows.width)
            self._rows.fill(rows, self._flats())
        self._buffer = rows
        wide = torch.float32 if rows.dtype in _HALVES else rows.dtype
        self._row = self._pool.take(self._rows.width, wide, rows.device)
        try:
            self._pending = self._transport.start(self._row, rows.view(-1), factor=reduction.mean_factor, spare=ours)
        except RuntimeError as error:
            raise self._failure(error) from error

    def _lying(self) -> Tensor | None:
        """A single gradient whose memory is such rows already."""
        gradient, world_size = self.gradients[0], self._groups.world_size
        if self._transport.from_pool or len(self.gradients) > 1 or gradient is None or gradient.numel() % world_size:
            return None
        if not reducible_in_place(gradient, self._member_specs[0]):
            return None
        return gradient.as_strided((world_size, self._rows.width), (self._rows.width, 1))

    def _flats(self) -> list[Tensor]:
        dtype, specs = self.plan.dtype, self._member_specs
        present = [gradient for gradient in self.gradients if gradient is not None]
        if self.plan.row_major and len(present) == len(specs):  # which is faster
            flats = [gradient.reshape(-1) for gradient in present]
        else:
            zero = torch.zeros((), dtype=dtype, device=self.plan.device)
            flats = [
                zero.expand(spec.numel).contiguous() if gradient is None else flattened(gradient, spec)
                for gradient, spec in zip(self.gradients, specs, strict=True)
            ]
        return [flat if flat.dtype is dtype else flat.to(dtype) for flat in flats]

    def land(self, reduction: Reduction) -> list[Tensor]:
        """Wait for the result; this rank's chunk of each member's average, 1-D."""
        if self._row is None:
            return [torch.empty(0, dtype=spec.dtype, device=spec.device) for spec in self._member_specs]
        try:
            if self._pending is not None:
                self._pending.wait()
        except RuntimeError as error:
            raise self._failure(error) from error
        row, self._row = self._row, None
        self._pending = self._buffer = None
        return self._rows.parts(row)

    def _failure(self, error: RuntimeError) -> CommunicationError:
        return CommunicationError(
            f"rank {self._groups.rank}, bucket {self.plan.index} with {self._member_specs[0].name!r}: the reduce-"
            f"scatter failed: {error}. An error or a crash on another rank ends here: look for the first traceback of "
            "all ranks."
        )
