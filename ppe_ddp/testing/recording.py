"""Records the buckets that a reduce function or hook gets, without changing what it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from ppe_ddp.contracts import CommHook, GradBucket, ReduceFunction, Waitable

__all__ = ["RecordedBucket", "RecordedFunction", "RecordedHook"]


@dataclass(frozen=True)
class RecordedBucket:
    """One bucket, as a function or hook got it."""

    index: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    is_last: bool

    @classmethod
    def of(cls, bucket: GradBucket) -> RecordedBucket:
        """The description of ``bucket``."""
        shapes = tuple(tuple(gradient.shape) for gradient in bucket)
        return cls(bucket.index(), bucket.names(), shapes, bucket.buffer().dtype, bucket.is_last())


class RecordedFunction:
    """A reduce function that writes down what it is asked to do.

    Args:
        function: Does it.
        log: Where it is written.
    """

    def __init__(self, function: ReduceFunction, log: list[RecordedBucket]) -> None:
        self._function = function
        self._log = log
        self.takes_divided = getattr(function, "takes_divided", False)
        self.__qualname__ = getattr(function, "__qualname__", type(function).__qualname__)

    def __call__(self, gradients: GradBucket, group: ProcessGroup | None, /) -> Waitable | None:
        """Log the bucket, and reduce it."""
        self._log.append(RecordedBucket.of(gradients))
        return self._function(gradients, group)


class RecordedHook:
    """A communication hook that writes down what it is asked to do; otherwise as :class:`RecordedFunction`."""

    def __init__(self, hook: CommHook, log: list[RecordedBucket]) -> None:
        self._hook = hook
        self._log = log
        self.__qualname__ = getattr(hook, "__qualname__", type(hook).__qualname__)

    def __call__(self, state: Any, bucket: GradBucket, /) -> torch.futures.Future[Any]:
        """Log the bucket, and reduce it."""
        self._log.append(RecordedBucket.of(bucket))
        return self._hook(state, bucket)
