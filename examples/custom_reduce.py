"""A reduce function of one's own: one bit a gradient, with error feedback.

    python examples/custom_reduce.py
    python -m torch.distributed.run --standalone --nproc_per_node=2 examples/custom_reduce.py

Of each gradient only the signs are sent, and one number: the mean size. What that leaves out is kept on this rank
and added to the next gradient of the same parameter, so that it is late and not lost (1-bit SGD, Seide et al. 2014;
error feedback: Karimireddy et al. 2019). The digits of scikit-learn are learnt twice: with the default reduce function
and with this one.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

import ppe_ddp


class OneBit:
    """A reduce function: averages a bucket over the ranks, in place, by the signs of the gradients."""

    def __init__(self) -> None:
        self.residuals: dict[str, Tensor] = {}
        self.sent_nbytes = 0

    def __call__(self, gradients: ppe_ddp.GradBucket, group: ProcessGroup | None) -> None:
        # Keyed by name: the graph decides anew in each step which parameters are in a bucket. One that only
        # another rank has got is here as zeros, and takes its residual along like any other.
        signs, scales = [], []
        for name, gradient in zip(gradients.names(), gradients, strict=True):
            wanted = gradient + self.residuals.get(name, 0.0)
            scale = wanted.abs().mean()
            is_positive = wanted >= 0
            self.residuals[name] = wanted - torch.where(is_positive, scale, -scale)
            signs.append(is_positive.flatten())
            scales.append(scale)
        sizes = [gradient.numel() for gradient in gradients]
        packed = pack(torch.cat(signs))
        ...


BITS = 2 ** torch.arange(8)


def pack(bits: Tensor) -> Tensor:
    """Eight bits a byte."""
    padded = F.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (padded * torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8)).sum(1, dtype=torch.uint8)
