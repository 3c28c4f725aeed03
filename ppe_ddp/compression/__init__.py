"""Compressors for ``ddp.register_comm_hook(...)``: send less where the link is slow.

``ddp.register_comm_hook(ErrorFeedback(TopK(0.01)))``. Each method is in the file of its name, with its paper.
"""

from ppe_ddp.compression.bf16 import BF16
from ppe_ddp.compression.block_codec import BlockCodec
from ppe_ddp.compression.by_parameter import ByParameter
from ppe_ddp.compression.compressor import Compressor
from ppe_ddp.compression.error_feedback import ErrorFeedback
from ppe_ddp.compression.flat_gradients import FlatGradients, Segment
from ppe_ddp.compression.fp16 import FP16
from ppe_ddp.compression.int8 import Int8
from ppe_ddp.compression.link import Exchange, Link
from ppe_ddp.compression.outer_steps import DiLoCo, LocalSGD
from ppe_ddp.compression.power_sgd import PowerSGD
from ppe_ddp.compression.random_k import RandomK
from ppe_ddp.compression.sign import Sign
from ppe_ddp.compression.top_k import TopK
from ppe_ddp.compression.uncompressed import Uncompressed
from ppe_ddp.compression.warm_up import WarmUp

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
