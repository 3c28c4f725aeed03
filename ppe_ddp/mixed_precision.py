"""Mixed precision with torch's options: a module computes in one dtype and keeps its parameters in another.

    forward      parameter ── cast ──> copy in param_dtype, in the parameter's place while the module runs
    backward     .grad     <── cast ── gradient of the copy
    reduction    bucket    ── cast ──> message in reduce_dtype ── cast ──> bucket

torch's wrapper replaces the data of the parameters until their bucket is reduced. Here the cast is a part of the graph.
So gradients arrive in the parameter's dtype, those of several backwards add up in it, and nothing has to be restored
after an error or a forward without a backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup

from ppe_ddp.contracts import GradBucket, MixedPrecision, ReduceFunction, Waitable
from ppe_ddp.engine.module import CAST_OF
from ppe_ddp.functions import declares, name_of
from ppe_ddp.nested_tensors import mapped, tensors_in
from ppe_ddp.torch_internals import at_end_of_backward, is_marked_ignored, parameter_table, uncompiled_hook


class Precision:
    """The dtypes of one wrapper, from torch's ``_MixedPrecision`` or an object like it; None to cast nothing.

    Casts floating-point tensors, except those that ``_set_params_and_buffers_to_ignore_for_model`` has marked.
    """

    def __init__(self, config: MixedPrecision | None) -> None:
        if config is not None:
            _check(config)
        self._param_dtype: torch.dtype | None = getattr(config, "param_dtype", None)
        self._reduce_dtype: torch.dtype | None = getattr(config, "reduce_dtype", None) or self._param_dtype
        self._buffer_dtype: torch.dtype | None = getattr(config, "buffer_dtype", None)
        self._casts_inputs: bool = getattr(config, "cast_forward_inputs", True)

    def __str__(self) -> str:
        """The dtypes as text, by which ranks compare them; empty if nothing is cast."""
        if self._param_dtype is None and self._reduce_dtype is None:
            return ""
        return f"mixed_precision with param_dtype {self._param_dtype}, reduce_dtype {self._reduce_dtype}"

    def cast_buffers(self, module: nn.Module) -> None:
        for buffer in module.buffers():
            if _is_cast(buffer, self._buffer_dtype):
                buffer.data = buffer.to(self._buffer_dtype)

    def wrap_reduce_function(self, function: ReduceFunction) -> ReduceFunction:
        """``function``, called with buckets in the dtype in which gradients are reduced."""
        return function if self._reduce_dtype is None else _CastingReduce(function, self._reduce_dtype)

    def call(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        dtype = self._param_dtype
        if dtype is None:
            return module(*args, **kwargs)
        if self._casts_inputs:
            args, kwargs = _cast_inputs(args, kwargs, dtype)
        copies = _installed_copies(module, dtype)
        try:
            outputs = module(*args, **kwargs)
        finally:
            copies.remove()
        if torch.is_grad_enabled():
            for output in tensors_in(outputs):
                if output.grad_fn is not None:
                    output.register_hook(copies.reinstall)
        return outputs


class _CastParameters:
    """Copies of a module's parameters in another dtype, for one forward and its backward.

    They are in the place of the parameters in the forward, and again in the backward, as a checkpoint computes parts of
    the forward again.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._is_installed = False
        self._slots: list[tuple[nn.Module, str, nn.Parameter, Tensor]] = []
        copies: dict[int, Tensor] = {}  # a shared parameter has one, in which its gradients add up before the cast
        for owner in module.modules():
            for key, parameter in parameter_table(owner).items():
                if isinstance(parameter, nn.Parameter) and _is_cast(parameter, dtype):
                    if id(parameter) not in copies:
                        copies[id(parameter)] = parameter.to(dtype)
                        setattr(copies[id(parameter)], CAST_OF, parameter)  # for a wrapper inside that looks for it
                    self._slots.append((owner, key, parameter, copies[id(parameter)]))

    def install(self) -> None:
        """Put the copies in the place of the parameters, unless those of another forward are there."""
        self._is_installed = True
        try:
            for owner, key, parameter, copy in self._slots:
                if parameter_table(owner).get(key) is parameter:
                    parameter_table(owner)[key] = copy  # functional_call does so as well
        except BaseException:  # an interrupt
            self.remove()
            raise

    @uncompiled_hook
    def remove(self) -> None:
        """Put the parameters back. Copies that were left there would be taken for parameters from then on."""
        try:
            self._put_back()
        except BaseException:  # an interrupt
            self._put_back()
            raise

    def _put_back(self) -> None:
        for owner, key, parameter, copy in self._slots:
            if parameter_table(owner).get(key) is copy:
                if isinstance(owner, nn.RNNBase):
                    setattr(owner, key, parameter)  # also sets it in the list of weights with which the RNN computes
                else:
                    parameter_table(owner)[key] = parameter
        self._is_installed = False

    def __del__(self) -> None:
        """An interrupt may come between making copies and the forward."""
        if self._is_installed:
            self._put_back()

    @uncompiled_hook
    def reinstall(self, _gradient: Tensor) -> None:
        """Put the copies in place until the end or the failure of the backward that has reached an output."""
        if not self._is_installed:
            at_end_of_backward(_UntilEndOfBackward(self))


@uncompiled_hook
def _cast_inputs(args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """The inputs in ``dtype``; outside of compiled graphs, as Dynamo fails at nested ones."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return mapped(cast, args), mapped(cast, kwargs)


@uncompiled_hook
def _installed_copies(module: nn.Module, dtype: torch.dtype) -> _CastParameters:
    """Copies of the parameters, in their place.

    A compiled graph has no casts. That of an unused parameter would give it a gradient of zeros. And a checkpoint, for
    which copies are in place when it computes again, would do so by another graph.
    """
    copies = _CastParameters(module, dtype)
    copies.install()
    return copies


class _UntilEndOfBackward:
    """Keeps copies in place until autograd calls it at the end of a backward, or drops it after a failure."""

    def __init__(self, copies: _CastParameters) -> None:
        self._copies = copies
        copies.install()

    @uncompiled_hook
    def __call__(self) -> None:
        self._copies.remove()

    def __del__(self) -> None:
        self._copies.remove()


class _CastingReduce:
    """Calls a reduce function with buckets in another dtype; the engine casts the result back."""

    def __init__(self, function: ReduceFunction, dtype: torch.dtype) -> None:
        self.__qualname__ = name_of(function)  # for messages
        self._function = function
        self._dtype = dtype

    def __call__(self, gradients: GradBucket, group: ProcessGroup | None, /) -> Waitable | None:
        buffer = gradients.buffer()
        if buffer.is_floating_point() and buffer.dtype is not self._dtype:
            gradients.set_buffer(buffer.to(self._dtype))
        if declares(self._function, "takes_divided"):  # divide in the dtype in which they are reduced
            gradients.divide(dist.get_world_size(group))
        return self._function(gradients, group)


def _check(config: MixedPrecision) -> None:
    if not hasattr(config, "param_dtype") or not hasattr(config, "reduce_dtype"):
        raise TypeError(
            "mixed_precision must have param_dtype and reduce_dtype, as torch's _MixedPrecision has, and "
            f"{type(config).__name__} has not"
        )
    for name in ("keep_low_precision_grads", "output_dtype"):
        if getattr(config, name, None):
            raise ValueError(f"mixed_precision with {name}={getattr(config, name)!r} is not supported: leave it out")


def _is_cast(tensor: Tensor, dtype: torch.dtype | None) -> bool:
    is_other = dtype is not None and tensor.is_floating_point() and tensor.dtype is not dtype
    return is_other and not is_marked_ignored(tensor)
