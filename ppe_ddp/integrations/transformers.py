"""transformers: a ``Trainer`` whose models are wrapped in this library's class.

    from ppe_ddp.integrations.transformers import Trainer

in the place of ``from transformers import Trainer``; for a ``Trainer`` of another kind,
``class Mine(TrainerMixin, Seq2SeqTrainer): ...``.
"""

from __future__ import annotations

from typing import Any

import transformers

from ppe_ddp.integrations.accelerate import Accelerator

__all__ = ["Trainer", "TrainerMixin"]


class TrainerMixin:
    """Lets the ``Accelerator`` that a ``Trainer`` makes for itself be the one of ``integrations/accelerate.py``."""

    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Make the ``Accelerator`` as ``Trainer`` does, by its arguments, and give it our methods."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        # Trainer calls the constructor by name; ours only adds options that have defaults.
        self.accelerator.__class__ = Accelerator


class Trainer(TrainerMixin, transformers.Trainer):
    """``transformers.Trainer`` with this library's wrapper."""
