"""Ray Train: ``prepare_model`` for the training function of a ``TorchTrainer``, with this library's wrapper.

Replace ``from ray.train.torch import prepare_model`` by::

    from ppe_ddp.integrations.ray import prepare_model
"""

from __future__ import annotations

from typing import Any

import ray.train.torch
from torch import nn

from ppe_ddp.ddp import DistributedDataParallel

__all__ = ["prepare_model"]


def prepare_model(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """Move ``model`` to the worker's device and wrap it; all workers call it together.

    All workers begin with the parameters of rank 0. Load the checkpoint before, as Ray starts the training function
    again after a failure.

    Args:
        model: The model.
        **options: Keywords of :class:`ppe_ddp.DistributedDataParallel`.
    """
    return DistributedDataParallel(ray.train.torch.prepare_model(model, parallel_strategy=None), **options)
