"""Segments cut into blocks of one size, so that a method works on all of them at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from ppe_ddp.compression.flat_gradients import FlatGradients


class Blocks:
    """The segments of ``gradients`` as rows of ``block`` elements each.

    A block never holds elements of two parameters, so that their results do not depend on how buckets are packed;
    the last one of each is filled up by zeros.

    Args:
        gradients: The segments.
        block: Elements a block.

    Attributes:
        number: The number of blocks.
    """

    def __init__(self, gradients: FlatGradients, block: int) -> None:
        self._gradients = gradients = gradients.chosen(lambda segment: segment.numel > 0)
        self._block = block
        self._counts = [-(-segment.numel // block) for segment in gradients.segments]
        self.number = sum(self._counts)
        self._is_padded = self.number * block != gradients.numel

    def cut(self, flat: Tensor) -> Tensor:
        """The segments of ``flat`` as ``(number, block)``: a view of it where they lie so, or else a copy."""
        if not self._is_padded:
            return self._gradients.packed(flat).view(self.number, self._block)
        values = flat.new_zeros(self.number, self._block)
        torch._foreach_copy_(self._parts(values), self._gradients.views(flat))
        return values

    def join(self, values: Tensor, flat: Tensor) -> None:
        """Copy ``values``, ``(number, block)``, into the segments of ``flat``, unless they lie there."""
        if self._is_padded:
            torch._foreach_copy_(self._gradients.views(flat), self._parts(values))
        else:
            self._gradients.unpack(values.view(-1), flat)

    def room(self, flat: Tensor) -> Tensor:
        """Where ``(number, block)`` values can be written that :meth:`join` brings to ``flat``; any contents."""
        gradients = self._gradients
        first, last = gradients.segments[0], gradients.segments[-1]
        if self._is_padded or last.stop - first.start != gradients.numel:
            return flat.new_empty(self.number, self._block)
        return flat[first.start : last.stop].view(self.number, self._block)

    def sizes(self, like: Tensor) -> Tensor:
        """How many elements of each block are those of a parameter: ``(number,)``, to read, where ``like`` is."""
        if not self._is_padded:  # one number for all: with blocks of one element they would take twice the gradients
            return torch.full((1,), self._block, device=like.device).expand(self.number)
        sizes = torch.full((self.number,), self._block)
        ends = torch.tensor(self._counts).cumsum(0) - 1
        numels = torch.tensor([segment.numel for segment in self._gradients.segments])
        full = torch.tensor(self._counts) * self._block
        sizes[ends] -= full - numels
        return sizes.to(like.device)

    def _parts(self, values: Tensor) -> list[Tensor]:
        parts = values.split(self._counts)
        return [part.view(-1)[: segment.numel] for part, segment in zip(parts, self._gradients.segments, strict=True)]
