"""bfloat16: 8 bits of precision, and the range of float32.

D. Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019 (https://arxiv.org/abs/1905.12322).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ppe_ddp.compression.half_codec import HalfCodec


@dataclass(frozen=True)
class BF16(HalfCodec):
    """Sends gradients in bfloat16: half the bytes, and nothing overflows or vanishes."""

    kind = torch.bfloat16
