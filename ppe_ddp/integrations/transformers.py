"""transformers: a ``Trainer`` whose models are wrapped in this library's class.

    from ppe_ddp.integrations.transformers import Trainer, TrainingArguments

in the place of ``from transformers import Trainer, TrainingArguments``; for those of another kind,
``class Mine(TrainerMixin, Seq2SeqTrainer): ...``, and a call of :func:`ppe_ddp.init_process_group` before arguments are
made of a class of transformers' own.

Where a loss is divided by the number of items in the batches of all ranks (``average_tokens_across_devices``), that
number is not gathered before the forwards: it travels with the gradients, by :func:`ppe_ddp.weigh`. A ``compute_loss``
of your own may do anything with that number, so it is gathered for it.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from ppe_ddp.ddp import DistributedDataParallel
from ppe_ddp.integrations.accelerate import Accelerator, join_launcher

__all__ = ["Trainer", "TrainerMixin", "TrainingArguments"]


class TrainerMixin:
    """Lets the ``Accelerator`` that a ``Trainer`` makes for itself be the one of ``integrations/accelerate.py``."""

    accelerator: Any
    args: Any
    compute_loss: Any
    model_wrapped: Any
    _items_loss: Any = 0.0  # of the step: losses times this rank's items

    def create_accelerator_and_postprocess(self) -> None:
        """Make the ``Accelerator`` as ``Trainer`` does, by its arguments, and give it our methods."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        # Trainer calls the constructor by name; ours only adds options that have defaults.
        self.accelerator.__class__ = Accelerator

    def get_batch_samples(self, *given: Any) -> tuple[list[Any], Any]:
        """The batches of a step, and the number of their items on this rank alone."""
        get, args = super().get_batch_samples, self.args  # type: ignore[misc]
        self.accelerator.counted, self._items_loss = None, 0.0
        if not (args.average_tokens_across_devices and self._can_weigh()):
            return get(*given)
        args.average_tokens_across_devices = False  # or they would be gathered
        try:
            samples, items = get(*given)
        finally:
            args.average_tokens_across_devices = True
        if items is not None:
            self.accelerator.counted = float(items), len(samples)
        return samples, items

    def _can_weigh(self) -> bool:
        """Whether this wrapper's gradients are divided by items once a step, in the way of ``Trainer``."""
        is_own = getattr(self.compute_loss, "__func__", None) is not transformers.Trainer.compute_loss
        is_each_synchronized = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        return isinstance(self.model_wrapped, DistributedDataParallel) and not (is_own or is_each_synchronized)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward; returns a part of this rank in the loss of the step, as it is to be logged."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if self.accelerator.counted is None:
            return loss
        items, _ = self.accelerator.counted
        self._items_loss = self._items_loss + (loss * items if items else torch.zeros_like(loss))
        if not self.accelerator.sync_gradients:
            return torch.zeros_like(loss)  # the number of all ranks is known at the end of the step
        of_all = self.model_wrapped._reducer.synchronizer.weights.synchronized
        return self._items_loss / (of_all or 1.0)


class Trainer(TrainerMixin, transformers.Trainer):
    """``transformers.Trainer`` with this library's wrapper."""


class TrainingArguments(transformers.TrainingArguments):
    """``transformers.TrainingArguments``, which find the ranks also under mpirun and Slurm."""

    def __post_init__(self) -> None:
        join_launcher()
        super().__post_init__()
        self.__class__ = transformers.TrainingArguments  # checkpoints keep it, and load without this library
