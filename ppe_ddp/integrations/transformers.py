"""transformers: a ``Trainer`` whose models are wrapped in this library's class.

Replace ``from transformers import Trainer, TrainingArguments`` by::

    from ppe_ddp.integrations.transformers import Trainer, TrainingArguments

For other trainers write ``class Mine(TrainerMixin, Seq2SeqTrainer): ...``. With a class of arguments of transformers,
call :func:`ppe_ddp.init_process_group` before making the arguments.

If a loss is divided by the number of items in the batches of all ranks (``average_tokens_across_devices``), that number
is not gathered before the forwards: :func:`ppe_ddp.weigh` sends it with the gradients. It is gathered if you override
``compute_loss`` or give a ``compute_loss_func``, which may use it in other ways.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from ppe_ddp.ddp import DistributedDataParallel
from ppe_ddp.integrations.accelerate import Accelerator, join_launcher
from ppe_ddp.integrations.loading import loading

__all__ = ["Trainer", "TrainerMixin", "TrainingArguments"]


class TrainerMixin:
    """Lets a ``Trainer`` use the ``Accelerator`` of ``integrations/accelerate.py``."""

    accelerator: Any
    args: Any
    compute_loss: Any
    compute_loss_func: Any
    model_wrapped: Any
    _items_loss: Any = 0.0  # the sum of the step's losses so far, times this rank's items

    def create_accelerator_and_postprocess(self) -> None:
        """Let ``Trainer`` make its ``Accelerator``, and turn that into ours."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        # Trainer names the class; ours has only further options, with defaults.
        self.accelerator.__class__ = Accelerator

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with loading(self.model_wrapped):
            super()._load_from_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        with loading(self.model_wrapped):
            super()._load_best_model()  # type: ignore[misc]

    def get_batch_samples(self, *given: Any) -> tuple[list[Any], Any]:
        """The batches of a step, and the number of their items on this rank alone."""
        get, args = super().get_batch_samples, self.args  # type: ignore[misc]
        self.accelerator.counted, self._items_loss = None, 0.0
        if not (args.average_tokens_across_devices and self._can_weigh()):
            return get(*given)
        args.average_tokens_across_devices = False  # or Trainer would gather them
        try:
            samples, items = get(*given)
        finally:
            args.average_tokens_across_devices = True
        if items is not None:
            self.accelerator.counted = float(items), len(samples)
        return samples, items

    def _can_weigh(self) -> bool:
        """Whether :func:`ppe_ddp.weigh` can divide by the items, as ``Trainer`` would: once a step, in our wrapper."""
        is_own = getattr(self.compute_loss, "__func__", None) is not transformers.Trainer.compute_loss
        is_own = is_own or self.compute_loss_func is not None
        # With one process Accelerate does not enter no_sync(), so each micro-batch would end a step.
        has_others = self.accelerator.num_processes > 1 and isinstance(self.model_wrapped, DistributedDataParallel)
        is_each_synchronized = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        return has_others and not (is_own or is_each_synchronized)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward. Returns this rank's part of the step's loss, for the log."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if self.accelerator.counted is None:
            return loss
        items, _ = self.accelerator.counted
        self._items_loss = self._items_loss + (loss * items if items else torch.zeros_like(loss))
        if not self.accelerator.sync_gradients:
            return torch.zeros_like(loss)  # the items of all ranks are known only at the end of the step
        of_all = self.model_wrapped._reducer.synchronizer.weights.synchronized
        return self._items_loss / (of_all or 1.0)


class Trainer(TrainerMixin, transformers.Trainer):
    """``transformers.Trainer`` with this library's wrapper."""


class TrainingArguments(transformers.TrainingArguments):
    """``transformers.TrainingArguments`` that also find the ranks under mpirun and Slurm."""

    def __post_init__(self) -> None:
        join_launcher()
        super().__post_init__()
        self.__class__ = transformers.TrainingArguments  # so that checkpoints load without this library
