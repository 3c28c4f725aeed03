"""Buckets of dense gradients that a function or a hook reduces.

    .grad -> slot of a buffer -> reduce -> .grad becomes the slot, or gets a copy of it (no views)

What this rank has computed stays as it is until all has succeeded, so that nothing is lost by a failure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch

from ppe_ddp.contracts import Division, GradBucket, probe
from ppe_ddp.engine.bucket import Bucket
from ppe_ddp.engine.bucket_buffers import sole_owner
from ppe_ddp.scaling import scale
from ppe_ddp.torch_internals import is_future

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ppe_ddp.engine.bucket import BucketContext
    from ppe_ddp.engine.bucket_buffers import BucketBuffers
    from ppe_ddp.engine.bucket_plan import BucketPlan, ParameterSpec
    from ppe_ddp.engine.completion import Steps

# From this mean size of a gradient on, dividing while copying costs less than one more pass over the bucket.
_LARGE_BYTES = 16 << 10


class DenseBucket(Bucket, ABC):
    """Dense gradients in one flat tensor, reduced by a function or hook; subclasses decide where it lies.

    Attributes:
        factor: What gradients are multiplied by as they are packed.
    """

    def __init__(self, plan: BucketPlan, context: BucketContext, present: bytes | None = None) -> None:
        super().__init__(plan, context, present)
        self._reduction = context.reduction
        self._division = context.reduction.division(plan.device)
        self.factor = context.reduction.mean_factor if self._division is Division.DONE else 1.0
        self._sent: GradBucket | None = None
        self._flat: Tensor | None = None
        self._tensors: list[Tensor] = []

    @abstractmethod
    def _pack(self) -> tuple[Tensor, list[Tensor]]:
        """The flat tensor, and views of it, one a member, that hold the gradients times :attr:`factor`."""

    def launch(self, *, is_last: bool) -> None:
        """Pack the gradients and pass them to the function or hook."""
        self._flat, self._tensors = self._pack()
        self.packed_at = perf_counter_ns()
        if self.plan.numel == 0:
            return
        self._sent = GradBucket.of(
            *self._tensors_for_function(self._flat),
            parameters=self.parameters,
            names=self.names,
            index=self.plan.index,
            is_last=is_last,
            division=self._division,
        )
        self._pending = self._reduction.start(self._sent, self.plan.node)

    def _tensors_for_function(self, flat: Tensor) -> tuple[list[Tensor], Tensor]:
        """The tensors to pass on: aliases or copies for a function of the user's, which may change their shapes."""
        if self._reduction.is_plain_average:
            return self._tensors, flat
        if not self._reduction.may_resize:
            return [tensor.detach() for tensor in self._tensors], flat.detach()
        copy = flat.clone()  # what grows here must not grow into the memory behind it
        base = flat.storage_offset()
        views = [copy.as_strided(t.shape, t.stride(), t.storage_offset() - base) for t in self._tensors]
        return views, copy

    def finish(self) -> Steps:
        """Wait for the result."""
        if self._pending is not None:
            yield probe(self._pending)
        self._take_result()

    def _take_result(self) -> None:
        flat, sent = self._flat, self._sent
        assert flat is not None
        if sent is None:
            return
        self._reduction.finish(sent, self._pending, self._tensors)
        nbytes = self._reduction.nbytes(self._pending)
        self.nbytes = self.plan.nbytes if nbytes is None else nbytes
        self._pending = None
        result = sent.buffer()
        if result is not flat and (result.data_ptr() != flat.data_ptr() or result.dtype != flat.dtype):
            flat.copy_(result)

    def check(self) -> None:
        """Raise the error of the reduction, if it is known to have failed."""
        pending, sent = self._pending, self._sent
        if sent is None or not is_future(pending) or self.plan.device.type != "cpu":
            return
        if pending.done():
            self._reduction.wait(sent, pending)

    def wait(self) -> None:
        """Wait for the pending reduction."""
        if self._pending is not None and self._sent is not None:
            self._reduction.wait(self._sent, self._pending)

    def release(self) -> None:
        """Drop what belongs to one backward; references to the slots of a buffer would mark it as in use."""
        self.gradients = []
        self._pending = self._sent = self._flat = None
        self._tensors = []

    def _copy_to_gradients(self) -> list[Tensor]:
        """Copy the averages into this rank's own gradient tensors, where these can hold them."""
        results: list[Tensor] = []
        moved_to, moved_from = [], []
        for gradient, tensor in zip(self.gradients, self._tensors, strict=True):
            if gradient is None or not _can_hold(gradient, tensor):
                results.append(tensor.clone())  # the buffer is used again
                continue
            results.append(gradient)
            moved_to.append(gradient)
            moved_from.append(tensor)
        if moved_to:
            torch._foreach_copy_(moved_to, moved_from)
        return results


class PackedBucket(DenseBucket):
    """Gradients packed into a buffer.

    Args:
        plan: What it is.
        context: What all buckets have in common.
        present: One byte a parameter: whether some rank has its gradient.
        buffers: Lends the buffer.
    """

    def __init__(
        self, plan: BucketPlan, context: BucketContext, present: bytes | None = None, *, buffers: BucketBuffers
    ) -> None:
        super().__init__(plan, context, present)
        self._buffers = buffers
        self._shapes = [spec.shape for spec in self.specs]
        self._is_fused = plan.nbytes >= _LARGE_BYTES * len(plan.members)

    def _pack(self) -> tuple[Tensor, list[Tensor]]:
        """Copy the gradients into a buffer: another than the one in which they may lie since the last step."""
        gradients, factor = self.gradients, self.factor
        if self._views and True in [gradient is not None and gradient.requires_grad for gradient in gradients]:
            self._views = False  # a gradient with a graph of its own (create_graph) keeps it
        buffer = self._buffers.buffer(self.plan, self.specs, self.parameters)
        if self._is_fused:
            fill(buffer.slots, gradients, factor)
        else:
            if not concatenate(buffer.runs, self._shapes, gradients):
                fill(buffer.slots, gradients, 1.0)
            scale(buffer.flat, buffer.flat, factor)
        return buffer.flat, list(buffer.slots)  # these references mark the buffer as in use

    def averages(self) -> list[Tensor]:
        """One average a member: the slots, or without views this rank's own gradient tensors."""
        return self._tensors if self._views else self._copy_to_gradients()


def fill(slots: Sequence[Tensor], gradients: Sequence[Tensor | None], factor: float) -> None:
    """Set each slot to ``factor`` times its gradient; to zero where there is none."""
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) == len(slots):
        filled = list(slots)
    else:
        pairs = list(zip(slots, gradients, strict=True))
        filled = [slot for slot, gradient in pairs if gradient is not None]
        torch._foreach_zero_([slot for slot, gradient in pairs if gradient is None])
    if factor != 1.0:
        for slot, gradient in zip(filled, present, strict=True):
            scale(slot, gradient, factor)
    elif present:
        torch._foreach_copy_(filled, present)


def concatenate(
    runs: Sequence[tuple[int, Tensor]], shapes: list[tuple[int, ...]], gradients: Sequence[Tensor | None]
) -> bool:
    """Put gradients one behind another into ``runs``, if there are any and all exist in ``shapes``; whether that is so.

    A copy for each would take four times as long where they are small; but one of another shape (``.grad.data = ...``)
    would move those behind it, without an error.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    if not runs or [gradient.shape for gradient in present] != shapes:
        return False
    start = 0
    for count, run in runs:
        torch.cat(present[start : start + count], out=run)
        start += count
    return True


def _can_hold(gradient: Tensor, average: Tensor) -> bool:
    """Whether ``average`` can be put where ``gradient`` is, which the user may have made (``.grad.data = …``)."""
    same = gradient.dtype is average.dtype and gradient.device == average.device
    return same and (gradient.is_contiguous() or 0 not in gradient.stride())


def reducible_in_place(gradient: Tensor, spec: ParameterSpec) -> bool:
    """Whether the memory of ``gradient`` may be handed to the transport as it is.

    Autograd can hand out views of one memory as the gradients of two parameters, or go on computing with it;
    so the storage must have no other user.
    """
    return (
        gradient.shape == spec.shape
        and gradient.dtype == spec.dtype
        and gradient.device == spec.device
        and gradient.stride() == spec.stride
        and not gradient.requires_grad
        and not gradient.is_neg()
        and not gradient.is_conj()
        and sole_owner(gradient)
    )
