"""No compression: what wrappers send where another method does not pay, or may not begin yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ppe_ddp.compression.bf16 import BF16
from ppe_ddp.compression.compressor import Compressor
from ppe_ddp.compression.fp16 import FP16

if TYPE_CHECKING:
    from ppe_ddp.compression.flat_gradients import FlatGradients
    from ppe_ddp.compression.link import Exchange, Link


@dataclass(frozen=True)
class Uncompressed(Compressor):
    """One all-reduce in the gradients' own precision; halves are added up in float32 and rounded once."""

    def average(self, gradients: FlatGradients, link: Link) -> Exchange:
        """See :meth:`Compressor.average`."""
        if not gradients.numel:
            return
        if gradients.dtype in (torch.float16, torch.bfloat16):
            own = FP16() if gradients.dtype is torch.float16 else BF16()
            yield from own.average(gradients, link)
            return
        # Divided before it is added up, as the default reduce function does, so that the results are the same.
        values = gradients.packed(gradients.given) * (1.0 / link.size)
        yield from link.all_reduce(values)
        gradients.unpack(values, gradients.average)
        if gradients.keeps:
            torch._foreach_zero_(gradients.views(gradients.given))
