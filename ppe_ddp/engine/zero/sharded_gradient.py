"""The ``.grad`` of a parameter whose average is sharded over the ranks: a tensor with a shape and no memory.

    clear                  .grad None               autograd hands its gradient over, as ever
    backward, averaged     .grad ShardedGradient    this rank's shard is in ``.grad`` of the weight that is updated
    another backward       .grad the same           what autograd adds is kept beside the shard, until it is averaged

With None in its place it could not be seen whether the user has cleared it. So whatever clears a gradient works as
with any other tensor: where it is gone from ``.grad`` the shard is void, and ``zero_()`` makes the shard zero.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ppe_ddp.errors import UnusableError
from ppe_ddp.torch_internals import is_cast, is_foreach_zero, without_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from ppe_ddp.engine.zero.shards import Shard

_ATEN = torch.ops.aten


class GradientShard:
    """The average of one shard, and this rank's gradients that were added since.

    It knows nothing of the parameter, whose ``.grad`` refers to it: such a circle would never be freed.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.local: Tensor | None = None  # what this rank's backwards have added, whole and not averaged
        # Its ``grad`` is the average; the 1-D tensor that an optimizer updates, once one has attached it.
        self.weight: Any = SimpleNamespace(grad=None)

    def attach(self, weight: Tensor) -> None:
        """From now on the average is in ``weight.grad``, in the dtype of ``weight``."""
        value = self.value
        self.weight = weight
        self.value = None if value is None else value.to(weight.dtype)

    @property
    def value(self) -> Tensor | None:
        """This rank's shard of the average, 1-D; None if there is none."""
        value: Tensor | None = self.weight.grad
        return value

    @value.setter
    def value(self, value: Tensor | None) -> None:
        self.weight.grad = value

    def add(self, average: Tensor) -> None:
        """Add an average: 1-D, and owned by this object from here on."""
        weight = self.weight
        if isinstance(weight, Tensor) and average.dtype is not weight.dtype:
            average = average.to(weight.dtype)
        value = weight.grad
        weight.grad = average if value is None else value.add_(average)

    def drop(self) -> None:
        """Free both."""
        self.weight.grad = self.local = None

    def accumulate(self, gradient: Tensor) -> None:
        """Add a whole gradient of this rank, not averaged."""
        local, gradient = self.local, gradient.detach()
        if local is None:
            self.local = gradient.clone()  # autograd may still need it
        elif local.is_sparse and not gradient.is_sparse:
            self.local = gradient + local
        else:
            local.add_(gradient)

    @property
    def parts(self) -> list[Tensor]:
        return [part for part in (self.value, self.local) if part is not None]

    def update(self, change: Callable[[Tensor], object]) -> None:
        for part in self.parts:
            change(part)


class ShardedGradient(Tensor):
    """The gradient of a parameter of which this rank has a shard: in ``DistributedOptimizer.param_groups``.

    Has shape, dtype and device of the parameter, and takes no memory. It can be cleared, set to zero, added to (by
    autograd) and multiplied by a number; whatever needs its elements raises :class:`ppe_ddp.errors.UnusableError`.
    It is no copy: kept and set again, it is what the shard is by then.
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
        """Apply ``func`` to the shard, where that is the same as applying it to the whole gradient."""
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
        if func is _ATEN.zero_.default:
            first.content.update(Tensor.zero_)
        elif func in (_ATEN.mul_.Tensor, _ATEN.mul_.Scalar) and _is_number(args[1]):
            first.content.update(lambda part: part.mul_(args[1]))
        elif func in (_ATEN.div_.Tensor, _ATEN.div_.Scalar) and _is_number(args[1]):
            first.content.update(lambda part: part.div_(args[1]))
        elif func is _ATEN.detach.default or is_cast(func):  # module.to() makes one of another dtype
            return cls(first.content, first, (kwargs or {}).get("dtype"))
        elif func is not _ATEN.detach_.default:
            raise _refusal(func, args)
        return first


class GradientSlot:
    """``.grad`` of one parameter, as far as it is sharded."""

    def __init__(self, shard: Shard) -> None:
        parameter = shard.parameter
        where = f"elements {shard.start} to {shard.stop} of {parameter.numel()}"
        self._parameter = parameter
        self.name = shard.name
        # The average, and what was added since.
        self.content = GradientShard(f"{where} of the gradient of {shard.name!r}")
        self.mark = ShardedGradient(self.content, parameter)  # what ``.grad`` is while there is an average

    @property
    def exists(self) -> bool:
        """Whether there is an average that was not cleared: the same on all ranks that clear alike."""
        gradient = self._parameter.grad
        return type(gradient) is ShardedGradient and gradient.content is self.content

    @property
    def is_synchronized(self) -> bool:
        """Whether everything in ``.grad`` is averaged."""
        return local_of(self._parameter.grad) is None

    def release(self) -> None:
        """Free the memory of an average that was cleared."""
        gradient = self._parameter.grad  # not by `exists`: this is called for every parameter, several times a step
        if type(gradient) is not ShardedGradient or gradient.content is not self.content:
            self.content.drop()

    def add(self, average: Tensor) -> None:
        """Add an average, 1-D and owned by this object from here on, to what was not cleared."""
        if not self.exists:
            self.content.value, self.content.local = None, local_of(self._parameter.grad)
            self._parameter.grad = self.mark
        self.content.add(average)


def local_of(gradient: Tensor | None) -> Tensor | None:
    """The part of a ``.grad`` that this rank has computed and that is not averaged yet."""
    return gradient.content.local if type(gradient) is ShardedGradient else gradient


def take_local(parameter: nn.Parameter) -> Tensor | None:
    """Take :func:`local_of` out of ``.grad``, which still shows whether it was cleared."""
    gradient = parameter.grad
    if type(gradient) is ShardedGradient:
        content = gradient.content
        gradient, content.local = content.local, None
    elif gradient is not None:
        parameter.grad = None
    return gradient


def _is_number(value: object) -> bool:
    return not isinstance(value, Tensor) or value.dim() == 0


def _refusal(func: object, args: Sequence[Any]) -> UnusableError:
    given = [one for arg in args for one in (arg if isinstance(arg, list | tuple) else [arg])]
    found = next(one for one in given if isinstance(one, ShardedGradient))
    return UnusableError(
        f"{func} needs a whole gradient, and this rank has only {found.content.title}: with a DistributedOptimizer "
        "clip by its clip_grad_norm_(), step by its step(), and look at gradients in its param_groups"
    )
