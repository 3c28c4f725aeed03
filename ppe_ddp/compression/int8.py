"""Eight-bit integers with one scale a block of elements.

T. Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016 (https://arxiv.org/abs/1511.04561), in the
reduce-scatter of codes of S. P. Karimireddy et al. and of ZeRO++ (G. Wang et al., ICLR 2024,
https://arxiv.org/abs/2306.10209); stochastic rounding as in QSGD, D. Alistarh et al., NeurIPS 2017
(https://arxiv.org/abs/1610.02132).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppe_ddp.compression.block_codec import BlockCodec

_LARGEST = 127


@dataclass(frozen=True)
class Int8(BlockCodec):
    """Sends a byte an element, and one scale a block.

    An element is wrong by at most half of 1/127 of the largest in its block (stochastic: by less than all of it), once
    on each rank and, with more than two ranks, once more for their mean. A block with NaN or infinity on any rank is
    NaN in the average.

    Attributes:
        block: Elements that share a scale. Smaller ones are more precise, and cost 4 bytes each; a multiple of 8.
        stochastic: Round up or down at random, so that the expectation is exact: for use without error feedback, where
            rounding to the nearest would lose small elements for ever. Takes longer.
    """

    block: int = 256
    stochastic: bool = False

    def __post_init__(self) -> None:
        """Refuse blocks in which the scale would not be aligned."""
        if self.block < 8 or self.block % 8:
            raise ValueError(f"Int8(block={self.block}): a block has a multiple of 8 elements, and at least 8")

    def encode(self, values: Tensor, sizes: Tensor, seed: int) -> Tensor:
        """``block`` bytes, and the scale in the dtype of ``values``."""
        largest = torch.maximum(values.amax(1, keepdim=True), -values.amin(1, keepdim=True))
        # The smallest normal number keeps a block of zeros, or of numbers that are next to it, from dividing by zero.
        scales = (largest / _LARGEST).clamp_min_(torch.finfo(values.dtype).tiny)
        codes = torch.empty(len(values), self.block + values.element_size(), dtype=torch.uint8, device=values.device)
        scaled = values / scales
        if self.stochastic:
            scaled.add_(_noise(scaled, seed)).floor_().clamp_(-_LARGEST, _LARGEST)
        else:
            scaled.round_()
        codes[:, : self.block].view(torch.int8).copy_(scaled)
        codes[:, self.block :].view(values.dtype).copy_(scales)
        return codes

    def decode(self, codes: Tensor, values: Tensor) -> None:
        """See :meth:`BlockCodec.decode`."""
        values.copy_(codes[:, : self.block].view(torch.int8))
        values.mul_(codes[:, self.block :].view(values.dtype))


def _noise(like: Tensor, seed: int) -> Tensor:
    """Uniform in [0, 1), in steps of 2**-16: a fifth of the time of ``torch.rand``."""
    generator = torch.Generator(like.device).manual_seed(seed)
    bits = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    bits.random_(-(2**63), None, generator=generator)
    lanes = bits.view(torch.int16)[: like.numel()].view(like.shape).to(like.dtype)
    return lanes.mul_(2**-16).add_(0.5)
