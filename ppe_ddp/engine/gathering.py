"""The parameters of one unit on their way from the ranks that have updated them to all.

packed     own chunks -> own row -> all-gather of rows -> parameters
in place   the chunks of a large parameter are such rows where they lie
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from ppe_ddp.engine.chunks import Rows, bounds_of, flattened, is_dense

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from ppe_ddp.contracts import Waitable
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.layout import ParameterSpec
    from ppe_ddp.engine.pool import Pool


class Gather:
    """Brings some parameters of one dtype and device together, as often as they were updated.

    Views of the parameters are kept from one time to the next; they are made anew where a parameter has moved.

    Args:
        members: What the caller calls the parameters.
        parameters: The parameters.
        specs: Theirs.
        groups: Where to.
        pool: Memory for it.
    """

    def __init__(
        self,
        members: Sequence[int],
        parameters: Sequence[nn.Parameter],
        specs: Sequence[ParameterSpec],
        groups: Groups,
        pool: Pool,
    ) -> None:
        self.members = list(members)
        self._parameters = parameters
        self._specs = specs
        self._groups = groups
        self._pool = pool
        self._layout = Rows(specs, groups.world_size)
        self._rows: Tensor | None = None
        self._addresses = self._now()
        self._flats = [flattened(p.detach(), spec) for p, spec in zip(parameters, specs, strict=True)]
        self._lies_in_place = len(specs) == 1 and self._is_dense(0) and specs[0].numel % groups.world_size == 0
        self._own = [
            flat[slice(*bounds_of(flat.numel(), groups.rank, groups.world_size))] for k, flat in enumerate(self._flats)
        ]

    def _now(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._parameters]

    def _is_dense(self, k: int) -> bool:
        return is_dense(self._parameters[k], self._specs[k])

    def fits(self, members: Sequence[int]) -> bool:
        """Whether this is for ``members``, where they lie now."""
        dense = all(map(self._is_dense, range(len(self._parameters))))
        return dense and self.members == members and self._now() == self._addresses

    def start(self) -> Waitable | None:
        """Start the all-gather; None where there is nothing to send."""
        groups = self._groups
        if self._layout.width == 0:
            return None
        if self._lies_in_place:
            whole, own = self._flats[0], self._own[0]
        else:
            first = self._flats[0]
            whole = self._pool.take(self._layout.numel, first.dtype, first.device)
            self._rows = whole.view(groups.world_size, self._layout.width)
            own = self._rows[groups.rank]
            torch._foreach_copy_(self._layout.parts(own, groups.rank), self._own)
        # torch 2.13 has given it another name
        function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work: Waitable = function(whole, own, group=groups.buckets, async_op=True)
        return work

    def install(self) -> None:
        """Copy what has come into the parameters."""
        if self._rows is None:
            return
        whole, cut = self._layout.pairs(self._rows, self._flats)
        torch._foreach_copy_(whole, cut)
        self._rows = None
        for k, (parameter, spec) in enumerate(zip(self._parameters, self._specs, strict=True)):
            if not self._is_dense(k):
                parameter.detach().copy_(self._flats[k].as_strided(spec.shape, spec.stride))
