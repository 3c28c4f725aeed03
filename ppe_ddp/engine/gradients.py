"""The ``.grad`` of the parameters: what is there, taken out for a flight, handed back averaged."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from typing import TYPE_CHECKING

import torch

from ppe_ddp.engine.arena import Arena
from ppe_ddp.engine.torch_internals import storage_users

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
        self.shared: list[int] = []
        """Parameters whose gradients were one piece of memory when the last backward began."""
        self.stay = False
        """Whether somebody else used the memory of a gradient then, and shall find the average there."""

    def existing(self, reached: bytes | bytearray) -> bytes:
        """One byte a parameter: whether it is in ``reached``, or has a gradient already."""
        mask = bytearray(reached)
        held = [(i, grad) for i, p in enumerate(self._parameters) if (grad := p.grad) is not None]
        self.shared, self.stay = [], False
        if held:
            self._look_at(held)
        for i, _ in held:
            mask[i] = 1
        return bytes(mask)

    def _look_at(self, held: list[tuple[int, Tensor]]) -> None:
        """Find out what else uses the memory of gradients that are there before backward."""
        dense = [(i, gradient) for i, gradient in held if not gradient.is_sparse]
        addresses = [gradient.data_ptr() for _, gradient in dense]
        bounds = self.arena.bounds()
        others = [k for k, address in enumerate(addresses) if address and not bisect(bounds, address) % 2]
        self.stay = any(storage_users(dense[k][1]) > 1 for k in others)
        if len(set(addresses)) < len(addresses):
            counts = Counter(filter(None, addresses))  # without elements there is no address
            self.shared = [i for (i, _), address in zip(dense, addresses, strict=True) if counts[address] > 1]

    def take(self, indices: Sequence[int]) -> list[Tensor | None]:
        """Take gradients out of ``.grad``, which is None from then on; None where there is none."""
        parameters = self._parameters
        taken: list[Tensor | None] = []
        for i in indices:
            parameter = parameters[i]
            gradient = parameter.grad
            if gradient is not None:
                parameter.grad = None
                if i in self.shared:  # the averages may differ, and each needs a place of its own
                    gradient = gradient.clone()
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
