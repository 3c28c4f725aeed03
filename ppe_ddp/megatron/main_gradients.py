"""Accumulates gradients: adds each ``.grad`` to ``main_grad``, and sets it to None."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor, nn

    from ppe_ddp.engine.gradients import GradientStreams


class MainGradients:
    """The accumulated gradients of one module, and which of them there are.

    Args:
        parameters: All parameters of the module.
        main: The memory of each trainable one, by its index; zero at first.

    Attributes:
        accumulated: One byte a parameter: whether something was added here since the buffers were zeroed.
        averaged: One byte a parameter: whether some rank had it when it was synchronized.
        is_dirty: Whether something was added that is not synchronized yet.
        revision: Another number after each synchronization and each zeroing.
        streams: Those that gradients are accumulated on; None on CPUs.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], main: Mapping[int, Tensor]) -> None:
        self._parameters = parameters
        self._main = main
        self._index = {id(parameters[i]): i for i in main}
        self.streams: GradientStreams | None = None
        self.revision = 0
        self.forget()
        for i, memory in main.items():
            parameter = parameters[i]
            parameter.main_grad = memory  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def forget(self) -> None:
        """Mark every gradient as absent: the buffers were zeroed."""
        self.accumulated = bytearray(len(self._parameters))
        self.averaged = bytearray(len(self._parameters))
        self.is_dirty = False
        self.revision += 1

    def forget_some(self, indices: Iterable[int]) -> list[int]:
        """Mark the gradients at ``indices`` as absent: they are being zeroed.

        Returns:
            Those that were there on some rank or here; the memory of the others is zero already.
        """
        there = [i for i in indices if self.accumulated[i] or self.averaged[i]]
        for i in there:
            self.accumulated[i] = self.averaged[i] = 0
        self.is_dirty = self.is_dirty and any(self.accumulated)
        self.revision += 1
        return there

    def discard(self) -> None:
        """Drop what is in ``.grad``, and the marks of kernels that add to ``main_grad`` by themselves."""
        for i in self._main:
            parameter = self._parameters[i]
            if parameter.grad is not None:
                parameter.grad = None
            if parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
                parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def existing(self, reached: Sequence[int] | bytes | bytearray) -> bytearray:
        """One byte a parameter: whether its gradient is expected, accumulated, or still in ``.grad``."""
        mask = bytearray(self.accumulated)
        for i in self._main:
            if reached[i] or self._parameters[i].grad is not None:
                mask[i] = 1
        return mask

    def index_of(self, parameter: nn.Parameter) -> int:
        """The number of a parameter that has a ``main_grad``."""
        return self._index[id(parameter)]

    def was_averaged(self, parameter: nn.Parameter) -> bool:
        """Whether some rank had a gradient of ``parameter``."""
        return bool(self.averaged[self._index[id(parameter)]])

    def mark_averaged(self, parameter: nn.Parameter) -> None:
        """Mark the gradient of ``parameter`` as present: another dimension of parallelism had one."""
        self.averaged[self._index[id(parameter)]] = 1

    def add(self, indices: Iterable[int]) -> None:
        """Add the ``.grad`` of these parameters, which is None from then on; skips those without one."""
        to: list[Tensor] = []
        of: list[Tensor] = []
        for i in indices:
            parameter = self._parameters[i]
            gradient = parameter.grad
            if gradient is None or i not in self._main:
                continue
            parameter.grad = None
            self.accumulated[i] = 1
            self.is_dirty = True
            if parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
                continue  # a fused kernel has added it already; what is in .grad is a dummy
            to.append(self._main[i])
            of.append(gradient.detach() if gradient.requires_grad else gradient)  # create_graph
        if self.streams is not None:
            self.streams.wait_for_gradients(of)
        if len(to) == 1:  # most often, in no_sync(): a third of the cost
            to[0].add_(of[0])
        elif True in [gradient.is_sparse for gradient in of]:
            for memory, gradient in zip(to, of, strict=True):
                memory.add_(gradient)
        elif to:
            torch._foreach_add_(to, of)

    def take(self, indices: Iterable[int]) -> dict[int, Tensor]:
        """Take the ``.grad`` of these parameters out, dense and in the dtype of ``main_grad``."""
        taken: dict[int, Tensor] = {}
        for i in indices:
            gradient = self._parameters[i].grad
            if gradient is not None and i in self._main:
                self._parameters[i].grad = None
                taken[i] = gradient.detach()
        if self.streams is not None:
            self.streams.wait_for_gradients(list(taken.values()))
        for i, gradient in taken.items():
            taken[i] = (gradient.to_dense() if gradient.is_sparse else gradient).to(self._main[i].dtype)
        return taken

    def put_back(self, taken: Mapping[int, Tensor]) -> None:
        """Add gradients that :meth:`take` has taken out to ``main_grad``: no average came of them."""
        for i, gradient in taken.items():
            self._main[i].add_(gradient)
            self.accumulated[i] = 1
        self.is_dirty = True
