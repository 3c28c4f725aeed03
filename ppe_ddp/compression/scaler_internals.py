"""What is used of ``torch.amp.GradScaler`` that torch does not promise: how it lets an optimizer skip by itself."""

from __future__ import annotations

from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer


def tell_of_skipped_steps(optimizer: Optimizer, skipped: Callable[[], object]) -> None:
    """Let ``optimizer.step()`` call ``skipped``, and do nothing else, where a ``GradScaler`` skips the step.

    Gradients are those of one rank, so one rank alone may skip a step, in which ``step()`` would not be called. A
    scaler calls ``step()`` in any case where the optimizer says that it skips by itself, as torch's fused ones do.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        return
    plain: Callable[..., Any] = optimizer.step

    @wraps(plain)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # Taken away meanwhile: torch's optimizers refuse them where they are not fused.
        given: dict[str, Any] = {key: vars(self).pop(key) for key in ("found_inf", "grad_scale") if key in vars(self)}
        found_inf, scale = given.get("found_inf"), given.get("grad_scale")
        try:
            if found_inf is None or not bool(found_inf):
                if scale is not None:
                    _unscale(self, scale)
                return plain(*args, **kwargs)
            skipped()
            return None
        finally:
            vars(self).update(given)

    vars(optimizer).update(step=MethodType(step, optimizer), _step_supports_amp_scaling=True)


def _unscale(optimizer: Optimizer, scale: Tensor) -> None:
    factor = scale.double().reciprocal().float()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.device))
