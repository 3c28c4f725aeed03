"""Test cases for the laws: a model and steps, under some options, with functions and hooks that are plugged in."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ppe_ddp.errors import PpeDdpError
from ppe_ddp.testing.steps import StepKind, TrainingStep, Zeroing

if TYPE_CHECKING:
    from ppe_ddp.contracts import BroadcastFunction, CommHook, ReduceFunction
    from ppe_ddp.testing.models import Recipe

__all__ = ["Case", "ConformanceError", "Plugs", "Variant"]


class ConformanceError(PpeDdpError):
    """A backend, function or hook breaks a law; the message says which, where, and what was expected."""


@dataclass(frozen=True)
class Variant:
    """Options that must not change a result.

    Attributes:
        overlap: See :class:`ppe_ddp.Options`.
        views: Its ``gradient_as_bucket_view``.
        bucket_mb: Its ``bucket_cap_mb``: 0.0002 gives a small model many buckets.
        negotiate: The wrapper's ``negotiate_grads``; False only where all ranks have the same gradients.
        shared_memory: As the wrapper has it.
    """

    overlap: bool = True
    views: bool = False
    bucket_mb: float = 25.0
    negotiate: bool = True
    shared_memory: bool = True

    @classmethod
    def every(cls, *, common_path: bool = False) -> list[Variant]:
        """All combinations; without negotiation only for models with a common path."""
        sizes = (0.00001, 0.0002, 25.0)  # all but the smallest where they lie, several buckets, one bucket
        negotiations = (True, False) if common_path else (True,)
        combinations = itertools.product((True, False), (False, True), sizes, negotiations)
        return [cls(*combination) for combination in combinations]

    def keywords(self) -> dict[str, Any]:
        """The keywords of the wrapper."""
        return {
            "overlap": self.overlap,
            "gradient_as_bucket_view": self.views,
            "bucket_cap_mb": self.bucket_mb,
            "negotiate_grads": self.negotiate,
            "shared_memory": self.shared_memory,
        }


@dataclass(frozen=True)
class Case:
    """A model, and what is done with it."""

    recipe: Recipe
    steps: tuple[TrainingStep, ...] = (TrainingStep(), TrainingStep(zeroing=Zeroing.TO_ZERO))

    def supports(self, variant: Variant) -> bool:
        """Whether the laws apply under ``variant``: without negotiation all ranks must have the same gradients."""
        if variant.negotiate:
            return True
        apart = {StepKind.ABSENT, StepKind.ABSENT_WITH_MICRO_BATCH}
        return self.recipe.common_path and not any(step.kind in apart for step in self.steps)


@dataclass(frozen=True)
class Plugs:
    """The functions and hooks that are plugged into the wrapper.

    Attributes:
        reduce_function: See :class:`ppe_ddp.ReduceFunction`.
        broadcast_function: See :class:`ppe_ddp.BroadcastFunction`.
        hook: See :class:`ppe_ddp.CommHook`.
        state: The hook's; each case gets a deep copy.
        tolerance: The largest error of a mean, in units of the largest gradient element of the model on any
            rank. None: what rounding explains.
    """

    reduce_function: ReduceFunction | None = None
    broadcast_function: BroadcastFunction | None = None
    hook: CommHook | None = None
    state: object = None
    tolerance: float | None = None
