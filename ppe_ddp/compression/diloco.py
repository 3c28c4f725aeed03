"""Many inner steps without communication, then one outer step with Nesterov momentum.

A. Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023
(https://arxiv.org/abs/2311.08105); that what is sent may be quantized: A. Douillard et al., Streaming DiLoCo with
overlapping communication, 2025 (https://arxiv.org/abs/2501.18512).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ppe_ddp.compression.outer_steps import OuterSteps, Synchronizing

if TYPE_CHECKING:
    from torch.optim import Optimizer


class DiLoCo(OuterSteps):
    """Lets every rank train by itself, and takes an outer step on the mean change after ``every`` steps.

    Args:
        ddp: The wrapper; register ``Int8()`` or another compressor with it for quantized outer gradients.
        optimizer: The inner one, in the paper AdamW.
        every: Inner steps to one outer step; in the paper 500.
        lr: Of the outer step; 1 without momentum is LocalSGD.
        momentum: Of the outer step.
    """

    def __init__(
        self, ddp: Synchronizing, optimizer: Optimizer, *, every: int, lr: float = 0.7, momentum: float = 0.9
    ) -> None:
        parameters = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        outer = torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=momentum > 0)
        super().__init__(ddp, optimizer, every=every, outer=outer)
