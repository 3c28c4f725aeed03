"""The ``.grad`` of a parameter whose average is sharded over the ranks: a tensor with a shape and no memory.

    cleared                .grad is None                 autograd sets its gradient, as without a DistributedOptimizer
    backward, averaged     .grad is a ShardedGradient    this rank's shard is in ``.grad`` of the optimizer's weight
    another backward       .grad is the same             what autograd adds is kept beside the shard until averaged

If ``.grad`` were None after averaging, nobody could tell whether the user has cleared it. With this tensor every way of
clearing works: if it is gone from ``.grad`` the shard is void, and ``zero_()`` sets the shard to zero.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ppe_ddp.engine.zero.shards import Shard
from ppe_ddp.errors import UnusableError
from ppe_ddp.torch_internals import is_cast, is_foreach_zero, without_memory

_ATEN = torch.ops.aten
_SCALINGS = (_ATEN.mul_.Tensor, _ATEN.mul_.Scalar, _ATEN.div_.Tensor, _ATEN.div_.Scalar)


class GradientShard:
    """The average of one shard, and this rank's gradients that were added since.

    It holds no reference to the parameter, whose ``.grad`` refers to it: such a cycle would never be freed.
    """

    def __init__(self, title: str, bounds: tuple[int, int]) -> None:
        self.title = title
        self.bounds = bounds  # in the flattened parameter
        self.local: Tensor | None = None  # the whole gradients that later backwards of this rank have added
        # Its ``grad`` is the average (1-D), or None. It is the 1-D tensor that an optimizer updates, once attached.
        self.weight: Any = SimpleNamespace(grad=None)

    def attach(self, weight: Tensor) -> None:
        """Keep the average in ``weight.grad`` from now on, in the dtype of ``weight``."""
        value, self.weight = self.weight.grad, weight
        weight.grad = None if value is None else value.to(weight.dtype)

    @property
    def is_attached(self) -> bool:
        """Whether an optimizer updates this shard."""
        return isinstance(self.weight, Tensor)

    def add(self, average: Tensor) -> None:
        """Add an average (1-D), which this object owns from here on."""
        weight = self.weight
        if isinstance(weight, Tensor) and average.dtype is not weight.dtype:
            average = average.to(weight.dtype)
        value = weight.grad
        weight.grad = average if value is None else value.add_(average)

    def drop(self) -> None:
        """Free the average and the local gradients."""
        self.weight.grad = self.local = None

    def accumulate(self, gradient: Tensor) -> None:
        """Add a whole gradient of this rank that is not averaged yet."""
        local, gradient = self.local, gradient.detach()
        if local is None:
            self.local = gradient.clone()  # autograd may still need it
        elif local.is_sparse and not gradient.is_sparse:
            self.local = gradient + local
        else:
            local.add_(gradient)

    @property
    def parts(self) -> list[Tensor]:
        """The average and the local gradients, as far as there are any."""
        return [part for part in (self.weight.grad, self.local) if part is not None]


class ShardedGradient(Tensor):
    """Stands for the gradient of a parameter of which this rank keeps a shard in ``DistributedOptimizer.param_groups``.

    It has the shape, dtype and device of the parameter, and takes no memory. It can be cleared, set to zero, added to
    (by autograd) and multiplied by a number. Other operations need its elements and raise
    :class:`ppe_ddp.errors.UnusableError`. It refers to the current shard: if it is kept and set again, the shard may
    have changed.
    """

    content: GradientShard

    @staticmethod
    def __new__(
        cls: type[ShardedGradient], content: GradientShard, like: Tensor, dtype: torch.dtype | None = None
    ) -> ShardedGradient:
        """A tensor that looks like ``like``."""
        made = without_memory(cls, like, dtype or like.dtype)
        made.content = content
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.content.title})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Apply ``func`` to the shard, if that gives the shard of ``func`` of the whole gradient; else raise."""
        first = args[0]
        if is_foreach_zero(func):
            for gradient in first:
                gradient.zero_()
            return None
        if not isinstance(first, cls) or (len(args) > 1 and isinstance(args[1], cls)):
            raise _refusal(func, args)
        if func in (_ATEN.add_.Tensor, _ATEN.add.Tensor) and not kwargs and args[1].shape == first.shape:
            first.content.accumulate(args[1])
            return first if func is _ATEN.add_.Tensor else cls(first.content, first)  # create_graph
        if func is _ATEN.zero_.default or (func in _SCALINGS and (not torch.is_tensor(args[1]) or args[1].dim() == 0)):
            for part in first.content.parts:
                func(part, *args[1:])
        elif func is _ATEN.detach.default or is_cast(func):  # module.to() makes one of another dtype
            return cls(first.content, first, (kwargs or {}).get("dtype"))
        elif func is not _ATEN.detach_.default:
            raise _refusal(func, args)
        return first


class GradientSlot:
    """The sharded ``.grad`` of one parameter."""

    _attached: ClassVar[weakref.WeakValueDictionary[int, GradientShard]] = weakref.WeakValueDictionary()
    """By the identity of the parameter, the shard that an optimizer updates."""

    def __init__(self, shard: Shard) -> None:
        self._parameter, self.name = shard.parameter, shard.name
        where = f"elements {shard.start} to {shard.stop} of {shard.spec.numel}"
        self.content = GradientShard(f"{where} of the gradient of {shard.name!r}", (shard.start, shard.stop))
        self.mark = ShardedGradient(self.content, shard.parameter)  # the value of ``.grad`` while there is an average

    @property
    def exists(self) -> bool:
        """Whether there is an average that was not cleared; the same on all ranks, if they clear alike."""
        gradient = self._parameter.grad
        return type(gradient) is ShardedGradient and gradient.content is self.content

    @property
    def is_synchronized(self) -> bool:
        """Whether ``.grad`` has no gradients of this rank that are not averaged."""
        return local_of(self._parameter.grad) is None

    def release(self) -> None:
        """Free the memory of an average that was cleared."""
        gradient = self._parameter.grad  # not by `exists`: this is called for every parameter, several times a step
        if type(gradient) is not ShardedGradient or gradient.content is not self.content:
            self.content.drop()

    def add(self, average: Tensor) -> None:
        """Add an average (1-D), which this object owns from here on; replaces an average that was cleared."""
        if not self.exists:
            gradient, content = self._parameter.grad, self.content
            content.weight.grad, content.local = None, local_of(gradient)
            if type(gradient) is ShardedGradient:  # of another wrapper that has this parameter, too
                other = gradient.content
                self._check_bounds(other)
                if other.is_attached and not content.is_attached:
                    other.add(average)
                    return
                if other.weight.grad is not None:
                    content.add(other.weight.grad)
                other.drop()
            elif not content.is_attached and (updated := self._attached.get(id(self._parameter))) is not None:
                self._check_bounds(updated)  # another wrapper's, which has averaged nothing since it was cleared
                updated.weight.grad, updated.local, content.local = None, content.local, None
                updated.add(average)
                self._parameter.grad = ShardedGradient(updated, self._parameter)
                return
            self._parameter.grad = self.mark
        self.content.add(average)

    def attach(self, weight: Tensor) -> None:
        """Keep the average in ``weight.grad`` from now on, also what other wrappers with this parameter average."""
        self.content.attach(weight)
        self._attached[id(self._parameter)] = self.content  # alive as long as this slot, which has the parameter

    def _check_bounds(self, other: GradientShard) -> None:
        if other.bounds != self.content.bounds:
            raise UnusableError(
                f"{self.content.title} cannot be added to {other.title}, which another wrapper has averaged: wrappers "
                "that share a parameter must have one process group to use a DistributedOptimizer; if that one is no "
                "longer used, clear its gradients (zero_grad()) before the first backward of this one"
            )


def local_of(gradient: Tensor | None) -> Tensor | None:
    """The part of a ``.grad`` that is not an averaged shard: a gradient of this rank that is yet to be averaged."""
    return gradient.content.local if type(gradient) is ShardedGradient else gradient


def take_local(parameter: nn.Parameter) -> Tensor | None:
    """Take :func:`local_of` out of ``.grad``; a ShardedGradient stays there."""
    gradient = parameter.grad
    if type(gradient) is ShardedGradient:
        content = gradient.content
        gradient, content.local = content.local, None
    elif gradient is not None:
        parameter.grad = None
    return gradient


def _refusal(func: object, args: Sequence[Any]) -> UnusableError:
    given = [one for arg in args for one in (arg if isinstance(arg, list | tuple) else [arg])]
    found = next(one for one in given if isinstance(one, ShardedGradient))
    return UnusableError(
        f"{func} needs a whole gradient, and this rank has only {found.content.title}: with a DistributedOptimizer "
        "clip by its clip_grad_norm_(), step by its step(), and look at gradients in its param_groups"
    )
