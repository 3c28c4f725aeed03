"""The ``.grad`` of the parameters: what is there, taken out for a flight, handed back averaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ppe_ddp.engine.arena import Arena

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn

    from ppe_ddp.engine.census import Census
    from ppe_ddp.engine.groups import Allocator
    from ppe_ddp.engine.streams import LandingStreams


class Gradients:
    """Owns the arena and all access to ``.grad``.

    Args:
        census: The parameters.
        allocate: Makes the memory of buckets.
        streams: Those that gradients land on; None on CPUs.
    """

    def __init__(self, census: Census, allocate: Allocator, streams: LandingStreams | None) -> None:
        self._parameters: Sequence[nn.Parameter] = census.parameters
        self._specs = census.specs
        self._streams = streams
        self.arena = Arena(allocate)

    def existing(self, reached: Iterable[int]) -> bytes:
        """One byte a parameter: whether it is in ``reached``, or has a gradient already."""
        return bytes(
            [here or parameter.grad is not None for here, parameter in zip(reached, self._parameters, strict=True)]
        )

    def take(self, indices: Sequence[int]) -> list[Tensor | None]:
        """Take gradients out of ``.grad``, which is None from then on; None where there is none."""
        parameters = self._parameters
        taken: list[Tensor | None] = []
        for i in indices:
            parameter = parameters[i]
            gradient = parameter.grad
            if gradient is not None:
                parameter.grad = None
            taken.append(gradient)
        if self._streams is not None:
            self._streams.follow(taken)
        for k, i in enumerate(indices):
            gradient = taken[k]
            if gradient is not None and gradient.is_sparse and not self._specs[i].sparse:
                taken[k] = gradient.to_dense()
        return taken

    def hand_over(self, indices: Sequence[int], gradients: list[Tensor], scale: float = 1.0) -> None:
        """Give averaged gradients to their parameters; add them where there is one already."""
        parameters = self._parameters
        if scale != 1.0:
            torch._foreach_mul_(gradients, scale)
        for i, gradient in zip(indices, gradients, strict=True):
            parameter = parameters[i]
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def put_back(self, gradients: Iterable[tuple[int, Tensor]]) -> None:
        """Give gradients back to parameters that have none."""
        for i, gradient in gradients:
            if self._parameters[i].grad is None:
                self._parameters[i].grad = gradient
