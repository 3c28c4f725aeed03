"""The memory of one buffer: contiguous gradients, and for a distributed optimizer the parameters as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from ppe_ddp.engine.memory import Allocator
    from ppe_ddp.engine.plan import ParameterSpec
    from ppe_ddp.megatron.buffer_layout import BucketRange, BufferKind


class ParamAndGradBuffer:
    """Contiguous gradients of one kind.

    Args:
        kind: What they have in common.
        size: Elements, padding included.
        buckets: Its buckets.
        parameters: All parameters of the module.
        specs: Theirs.
        allocate: Makes the memory of the gradients.
        with_params: Whether the parameters become views of a contiguous buffer too. Their values stay.

    Attributes:
        grad_data: 1-D, ``size`` elements of the gradients' dtype; padding is zero.
        param_data: 1-D, ``size`` elements of the parameters' dtype, or None.
        params: Those whose gradients lie here, in the order in which they do.
    """

    def __init__(
        self,
        kind: BufferKind,
        size: int,
        buckets: Sequence[BucketRange],
        parameters: Sequence[nn.Parameter],
        specs: Sequence[ParameterSpec],
        allocate: Allocator,
        *,
        with_params: bool,
    ) -> None:
        self.kind = kind
        self.buckets = tuple(buckets)
        self.grad_data = allocate(size, kind.grad_dtype, kind.device).zero_()
        self.param_data: Tensor | None = None
        self.params = [parameters[i] for bucket in buckets for i in bucket.plan.members]
        if with_params:
            self.param_data = torch.zeros(size, dtype=kind.param_dtype, device=kind.device)
            self._move_in(parameters, specs, self.param_data)

    @torch.no_grad()
    def _move_in(self, parameters: Sequence[nn.Parameter], specs: Sequence[ParameterSpec], memory: Tensor) -> None:
        for bucket in self.buckets:
            for i, offset in zip(bucket.plan.members, bucket.plan.offsets, strict=True):
                parameter, spec = parameters[i], specs[i]
                slot = memory.as_strided(spec.shape, spec.stride, bucket.start + offset)
                slot.copy_(parameter)
                parameter.data = slot

    def grads(self, bucket: BucketRange) -> Tensor:
        """The gradients of one bucket, padding included."""
        return self.grad_data.narrow(0, bucket.start, bucket.padded)

    def values(self, bucket: BucketRange) -> Tensor:
        """The parameters of one bucket, padding included."""
        assert self.param_data is not None
        return self.param_data.narrow(0, bucket.start, bucket.padded)

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply all gradients by ``scaling_factor``."""
        self.grad_data.mul_(scaling_factor)

    def reset(self) -> None:
        """Set all gradients to zero."""
        self.grad_data.zero_()
