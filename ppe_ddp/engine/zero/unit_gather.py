"""The all-gather of one unit of parameters, from the ranks that have updated shards of them to all ranks.

packed     own chunks -> own row -> all-gather of rows -> parameters
in place   the chunks of a large parameter are such rows where they lie
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import increment_version

from ppe_ddp.engine.zero.chunks import Rows, bounds_of, flattened, is_dense
from ppe_ddp.engine.zero.shard_collectives import all_gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from ppe_ddp.contracts import Waitable
    from ppe_ddp.engine.bucket_plan import ParameterSpec
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.zero.message_pool import MessagePool


class UnitGather:
    """Gathers some parameters of one dtype and device, as often as they are updated.

    Views of the parameters are kept from one time to the next; they are made anew where a parameter has moved.

    Args:
        members: The caller's numbers of the parameters.
        parameters: The parameters.
        specs: Their specifications.
        groups: The process groups to communicate in.
        pool: Memory for it.
    """

    def __init__(
        self,
        members: Sequence[int],
        parameters: Sequence[nn.Parameter],
        specs: Sequence[ParameterSpec],
        groups: Groups,
        pool: MessagePool,
    ) -> None:
        self.members = list(members)
        self._parameters = parameters
        self._specs = specs
        self._groups = groups
        rank, world_size = groups.rank, groups.world_size
        layout = Rows(specs, rank, world_size)
        self._addresses = self._now()
        self._loose = [k for k, spec in enumerate(specs) if not is_dense(parameters[k], spec)]
        self._flats = [flattened(p.detach(), spec) for p, spec in zip(parameters, specs, strict=True)]
        self._own = [flat[slice(*bounds_of(flat.numel(), rank, world_size))] for flat in self._flats]
        self._rows: Tensor | None = None
        self._pool: MessagePool | None = pool
        if len(specs) == 1 and not self._loose and specs[0].numel % world_size == 0:
            self._message = (self._flats[0], self._own[0])
            return
        self._pool = None  # the rows are from there
        whole = pool.take(layout.numel, specs[0].dtype, specs[0].device)
        self._rows = whole.view(world_size, layout.width)
        self._message = (whole, self._rows[rank])
        self._parts = None if layout.is_full else layout.parts(self._rows[rank])
        self._pairs = layout.pairs(self._rows, self._flats)

    def _now(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._parameters))

    def is_current(self, members: Sequence[int]) -> bool:
        """Whether this is for ``members``, at their current addresses."""
        return not self._loose and self.members == members and self._now() == self._addresses

    def start(self) -> Waitable | None:
        """Start the all-gather; None where there is nothing to send."""
        whole, own = self._message
        if whole.numel() == 0:
            return None
        if self._rows is not None:
            if self._parts is None:  # in a quarter of the time of copies
                torch.cat(self._own, out=own)
            else:
                torch._foreach_copy_(self._parts, self._own)
        return all_gather(whole, own, self._groups.buckets, self._pool)

    def install(self) -> None:
        """Copy what was received into the parameters."""
        if self._rows is None:
            # A message changes memory behind autograd's back, which would then not find a stale graph.
            increment_version(self._parameters[0])
            return
        torch._foreach_copy_(*self._pairs)
        for k in self._loose:
            spec = self._specs[k]
            self._parameters[k].detach().copy_(self._flats[k].as_strided(spec.shape, spec.stride))
