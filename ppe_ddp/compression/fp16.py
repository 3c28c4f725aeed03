"""IEEE half precision: 11 bits of precision, and a range from 6e-8 to 65504.

P. Micikevicius et al., Mixed Precision Training, ICLR 2018 (https://arxiv.org/abs/1710.03740), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ppe_ddp.compression.half_codec import HalfCodec


@dataclass(frozen=True)
class FP16(HalfCodec):
    """Sends gradients in float16: half the bytes.

    What is larger than 65504 becomes infinite, in the average too; what is smaller than 6e-8 becomes zero.
    """

    kind = torch.float16
