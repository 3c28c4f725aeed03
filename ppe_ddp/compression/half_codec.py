"""Elements rounded to a narrower floating type, each by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from ppe_ddp.compression.block_codec import BlockCodec

if TYPE_CHECKING:
    from torch import Tensor


class HalfCodec(BlockCodec):
    """Rounds to :attr:`kind`, and adds up in the precision of the gradients: a sum is rounded once, and fits."""

    block = 1
    kind: ClassVar[torch.dtype]

    def encode(self, values: Tensor, sizes: Tensor, seed: int) -> Tensor:
        """Two bytes an element."""
        return values.to(self.kind).view(torch.uint8)

    def decode(self, codes: Tensor, values: Tensor) -> None:
        """See :meth:`BlockCodec.decode`."""
        values.copy_(codes.view(self.kind))
