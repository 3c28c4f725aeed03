"""Compressors for ``ddp.register_comm_hook(...)``, which send fewer bytes over slow links.

``ddp.register_comm_hook(ErrorFeedback(TopK(0.01)))``. Each method names its paper.
"""

from ppe_ddp.compression.composition import ByParameter, ErrorFeedback, WarmUp
from ppe_ddp.compression.compressor import Compressor, Exchange, FlatGradients, Link, Segment
from ppe_ddp.compression.outer_steps import DiLoCo, LocalSGD
from ppe_ddp.compression.power_sgd import PowerSGD
from ppe_ddp.compression.quantization import BF16, FP16, BlockCodec, Int8, Sign, Uncompressed
from ppe_ddp.compression.sparsification import RandomK, TopK

__all__ = [
    "BF16",
    "FP16",
    "BlockCodec",
    "ByParameter",
    "Compressor",
    "DiLoCo",
    "ErrorFeedback",
    "Exchange",
    "FlatGradients",
    "Int8",
    "Link",
    "LocalSGD",
    "PowerSGD",
    "RandomK",
    "Segment",
    "Sign",
    "TopK",
    "Uncompressed",
    "WarmUp",
]
