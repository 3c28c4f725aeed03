"""How a tensor's elements lie in memory, by its sizes and strides: read by planning and by optimizers alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


def is_packed(dimensions: Iterable[tuple[int, int]]) -> bool:
    """Whether (stride, size) of dimensions, the innermost first, leave neither holes nor overlap."""
    expected = 1
    for stride, size in dimensions:
        if size != 1 and stride != expected:
            return False
        expected *= max(size, 1)
    return True


def is_non_overlapping_and_dense(tensor: Tensor) -> bool:
    """Whether the tensor fills its memory without holes or overlap, in some order of its dimensions."""
    return is_packed(sorted(zip(tensor.stride(), tensor.shape, strict=True)))
