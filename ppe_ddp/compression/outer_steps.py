"""Training in two loops: every rank by itself for some steps, then one step of all ranks together.

LocalSGD and DiLoCo differ in the outer step only. It is a synchronization like any other: what each parameter has
changed by since the last one takes the place of its gradient. So it is negotiated, packed and compressed as gradients
are, and a parameter that no rank has changed costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.optim import Optimizer


class Synchronizing(Protocol):
    """What is needed of the wrapper."""

    module: nn.Module
    require_backward_grad_sync: bool

    def finish_grad_sync(self) -> None:
        """Average what is in ``.grad``; on all ranks together."""
        ...


class OuterSteps:
    """Counts the steps of an optimizer, and lets all ranks take an outer step after every so many.

    Backwards of ``ddp`` are not synchronized any more. All ranks must make it together, and run the same number of
    inner steps. ``.grad`` is None after an outer step.

    Args:
        ddp: The wrapper; a compressor that is registered with it compresses the outer steps.
        optimizer: The inner one, which updates whole parameters: no ``DistributedOptimizer``.
        every: Inner steps to one outer step.
        outer: What updates the same parameters in an outer step.

    Raises:
        ValueError: ``every`` is less than 1.
    """

    def __init__(self, ddp: Synchronizing, optimizer: Optimizer, *, every: int, outer: Optimizer) -> None:
        if every < 1:
            raise ValueError(f"every={every}: an outer step follows at least one inner step")
        self._ddp = ddp
        self._every = every
        self._outer = outer
        self._steps = 0
        self._names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        self._last = {name: parameter.detach().clone() for name, parameter in self._parameters().items()}
        ddp.require_backward_grad_sync = False
        self._handle = optimizer.register_step_post_hook(lambda *_: self._stepped())

    def _parameters(self) -> dict[str, nn.Parameter]:
        updated = (parameter for group in self._outer.param_groups for parameter in group["params"])
        return {self._names[id(parameter)]: parameter for parameter in updated}

    def _stepped(self) -> None:
        self._steps += 1
        if self._steps % self._every == 0:
            self.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        """Take an outer step now; called by itself after every so many inner steps. All ranks must call it together."""
        parameters = self._parameters()
        for name, parameter in parameters.items():
            change = self._last[name] - parameter
            parameter.grad = change if bool(change.any()) else None  # also where it is NaN
        self._ddp.finish_grad_sync()
        changed = {name: parameter for name, parameter in parameters.items() if parameter.grad is not None}
        for name, parameter in changed.items():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
            parameter.copy_(self._last[name])
        self._outer.step()
        for name, parameter in changed.items():
            self._last[name].copy_(parameter)
            parameter.grad = None

    def stop(self) -> None:
        """Take no more outer steps, and synchronize backwards again."""
        self._handle.remove()
        self._ddp.require_backward_grad_sync = True

    def state_dict(self) -> dict[str, Any]:
        """What all ranks have at the last outer step, and how many inner steps there were: a copy."""
        last: dict[str, Tensor] = {name: value.clone() for name, value in self._last.items()}
        return {"steps": self._steps, "last": last, "outer": self._outer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave; the parameters are each rank's own, and loaded apart."""
        self._steps = int(state["steps"])
        for name, value in state["last"].items():
            self._last[name].copy_(value)
        self._outer.load_state_dict(state["outer"])
