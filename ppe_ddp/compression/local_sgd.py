"""Parameters are averaged every so many steps, and gradients not at all.

S. U. Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019 (https://arxiv.org/abs/1805.09767).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ppe_ddp.compression.outer_steps import OuterSteps, Synchronizing

if TYPE_CHECKING:
    from torch.optim import Optimizer


class LocalSGD(OuterSteps):
    """Lets every rank train by itself, and averages the parameters after ``every`` steps of ``optimizer``.

    Args:
        ddp: The wrapper; a compressor that is registered with it compresses what the parameters have changed by.
        optimizer: Updates the parameters.
        every: Steps between two averages. More of them cost less, and let the ranks drift apart.
    """

    def __init__(self, ddp: Synchronizing, optimizer: Optimizer, *, every: int) -> None:
        parameters = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        super().__init__(ddp, optimizer, every=every, outer=torch.optim.SGD(parameters, lr=1.0))
