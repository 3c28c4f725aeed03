"""One bit an element: its sign, with the mean magnitude of its block.

J. Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, ICML 2018
(https://arxiv.org/abs/1802.04434), for the vote; S. P. Karimireddy et al., Error Feedback Fixes SignSGD and other
Gradient Compression Schemes, ICML 2019 (https://arxiv.org/abs/1901.09847), for the scale; both ways in one bit as in
S. Zheng et al., Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback, NeurIPS 2019
(https://arxiv.org/abs/1905.10936).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppe_ddp.compression.block_codec import BlockCodec

_SCALE_BYTES = 8


@dataclass(frozen=True)
class Sign(BlockCodec):
    """Sends one bit an element, and one scale a block. Use it with error feedback: alone it is far from the gradient.

    Attributes:
        block: Elements that share a scale; a multiple of 64.
        majority: Let the ranks vote on the sign of each element instead of averaging; they all count alike, whatever
            their magnitudes, which one rank with wild gradients cannot outvote.
    """

    block: int = 1024
    majority: bool = False

    def __post_init__(self) -> None:
        """Refuse blocks whose bits do not fill whole words."""
        if self.block < 64 or self.block % 64:
            raise ValueError(f"Sign(block={self.block}): a block has a multiple of 64 elements, and at least 64")

    def encode(self, values: Tensor, sizes: Tensor, seed: int) -> Tensor:
        """``block / 8`` bytes, and the scale in eight."""
        width = self.block // 8
        codes = torch.empty(len(values), width + _SCALE_BYTES, dtype=torch.uint8, device=values.device)
        integer = torch.int32 if values.dtype is torch.float32 else torch.int64
        sign = values.view(integer) >> (8 * values.element_size() - 1)  # all ones where it is negative
        planes = sign.to(torch.uint8).view(-1, 8, width)
        bits = planes[:, 0] & 1
        for k in range(1, 8):
            bits |= planes[:, k] & (1 << k)
        codes[:, :width] = bits
        codes[:, width:].view(torch.float64)[:, 0] = values.abs().sum(1) / sizes
        return codes

    def decode(self, codes: Tensor, values: Tensor) -> None:
        """See :meth:`BlockCodec.decode`."""
        width = self.block // 8
        scales = codes[:, width:].view(torch.float64).to(values.dtype)
        bits = codes[:, :width]
        planes = values.view(-1, 8, width)
        for k in range(8):
            planes[:, k] = (bits >> k) & 1
        values.mul_(-2 * scales).add_(scales)

    def combine(self, received: Tensor, mean: Tensor) -> Tensor:
        """The mean, or what most ranks say with the mean of their scales; where they are even, the sign of the mean."""
        if not self.majority:
            return mean
        votes = torch.zeros_like(mean)
        for codes in received:
            votes.add_(self._decoded(codes, mean).sign_())
        scales = received[:, :, self.block // 8 :].view(torch.float64).mean(0).to(mean.dtype)
        return torch.where(votes == 0, mean, votes).sign_().mul_(scales)
