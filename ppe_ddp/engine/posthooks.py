"""The user's own post-accumulate-grad hooks, which have to wait until a gradient is averaged.

A hook that steps an optimizer as soon as a gradient is there would otherwise step with this rank's share of
it. While a backward is being synchronized such hooks are kept back, and called when the average is in
``.grad``; in ``no_sync()`` they are called at once, as without this library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import nn

if TYPE_CHECKING:
    import weakref
    from collections import OrderedDict
    from collections.abc import Sequence

    from torch.utils.hooks import RemovableHandle

PostHook = Callable[[nn.Parameter], object]


class Owner(Protocol):
    """Whoever wants to know when gradients land."""

    def landed(self, index: int) -> None:
        """The gradient of parameter ``index`` has landed."""
        ...

    def displaced(self) -> None:
        """Another owner has taken over some of the parameters."""
        ...


class LandingHook:
    """Our own hook on a parameter; a class, so that it can be told from the user's.

    A parameter has one at a time: when a module is wrapped twice, or two wrapped modules share a parameter,
    the wrapper that was used last averages it, once.
    """

    __slots__ = ("_index", "_owner")

    def __init__(self, owner: weakref.ref[Owner], index: int) -> None:
        self._owner = owner
        self._index = index

    def __call__(self, parameter: nn.Parameter) -> None:
        """Called by autograd when a gradient has been added to ``.grad``."""
        owner = self._owner()
        if owner is not None:
            owner.landed(self._index)

    def register(self, parameter: nn.Parameter) -> RemovableHandle:
        """Register on ``parameter``, before the user's hooks: we have to know first that a backward is on."""
        handle = parameter.register_post_accumulate_grad_hook(self)
        table: OrderedDict[int, PostHook] = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if len(table) == 1:
            return handle
        others = [(key, hook) for key, hook in table.items() if hook is not self]
        table.clear()  # not move_to_end(), which changes an order that autograd does not look at
        table[handle.id] = self
        for key, hook in others:
            if not isinstance(hook, LandingHook):
                table[key] = hook
                continue
            other = hook._owner()
            if other is not None:
                other.displaced()
        return handle


class _Deferred:
    """Stands in a parameter's hook table in the place of a user's hook, so that its handle still removes it."""

    def __init__(self, hook: PostHook, defer: Callable[[PostHook, nn.Parameter], bool]) -> None:
        self._hook = hook
        self._defer = defer

    def __call__(self, parameter: nn.Parameter) -> None:
        if not self._defer(self._hook, parameter):
            self._hook(parameter)


def keep_back(parameters: Sequence[nn.Parameter], defer: Callable[[PostHook, nn.Parameter], bool]) -> None:
    """Put every user's hook on ``parameters`` behind ``defer``, which says whether it takes the call over."""
    for parameter in parameters:
        table = parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
        if table is None or len(table) < 2:
            continue  # ours alone
        for key, hook in table.items():
            if not isinstance(hook, LandingHook | _Deferred):
                table[key] = _Deferred(hook, defer)


def optimizers_in_backward(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Parameters that torch's ``_apply_optimizer_in_backward(register_hook=False)`` gave an optimizer."""
    return [parameter for parameter in parameters if hasattr(parameter, "_in_backward_optimizers")]
