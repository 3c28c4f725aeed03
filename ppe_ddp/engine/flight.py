"""One bucket on its way: from the gradients of this rank to the gradients of all.

    packed     .grad -> slot of the buffers -> reduce -> .grad becomes the slot, or gets a copy of it (no views)
    adopted    .grad -> reduce where it lies
    sparse     .grad -> all-gather of indices and values -> a new .grad

A gradient belongs to its flight while that lasts, and ``.grad`` is None meanwhile: a gradient that lands in
the meantime (a repair) makes a ``.grad`` of its own instead of being added to a message that is on its way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from ppe_ddp.contracts import Division, GradBucket
from ppe_ddp.engine.bucket_buffers import sole_owner
from ppe_ddp.engine.completion import probe

# From this mean size of a gradient on, dividing while copying costs less than one more pass over the bucket.
_LARGE_BYTES = 16 << 10

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from ppe_ddp.contracts import Waitable
    from ppe_ddp.engine.bucket_buffers import BucketBuffers
    from ppe_ddp.engine.bucket_plan import BucketPlan, ParameterSpec
    from ppe_ddp.engine.completion import Probe
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.reduction import Reduction


class Flight:
    """A bucket of dense gradients under way.

    Args:
        plan: The bucket.
        gradients: One a member: what this rank has, or None. The flight owns them from here on.
        buffers: Memory for a packed bucket.
        specs: Of all parameters of the module.
        views: Whether the results may be views of the buffers.
    """

    def __init__(
        self,
        plan: BucketPlan,
        gradients: list[Tensor | None],
        buffers: BucketBuffers,
        specs: Sequence[ParameterSpec],
        *,
        views: bool,
    ) -> None:
        self.plan = plan
        self.gradients = gradients
        self._buffers = buffers
        self._specs = specs
        self._views = views
        self._bucket: GradBucket | None = None
        self._pending: Waitable | None = None
        self._buffer: Tensor | None = None
        self._tensors: list[Tensor] = []

    def launch(self, reduction: Reduction, parameters: Sequence[nn.Parameter], *, is_last: bool) -> None:
        """Fill the bucket and start its reduction."""
        division = reduction.division(self.plan.device)
        share = reduction.mean_factor if division is Division.DONE else 1.0
        if self.plan.adopted:
            self._adopt(share)
        else:
            self._pack(parameters, share)
        assert self._buffer is not None
        if self.plan.numel == 0:
            return
        members = self.plan.members
        self._bucket = GradBucket.of(
            *self._given(self._buffer, reduction),
            parameters=[parameters[i] for i in members],
            names=tuple(self._specs[i].name for i in members),
            index=self.plan.index,
            is_last=is_last,
            division=division,
        )
        self._pending = reduction.start(self._bucket)

    def _given(self, buffer: Tensor, reduction: Reduction) -> tuple[list[Tensor], Tensor]:
        """What goes out: never our own tensors to a stranger, who may change their shapes."""
        if reduction.is_plain_average:
            return self._tensors, buffer
        if not reduction.may_resize:
            return [tensor.detach() for tensor in self._tensors], buffer.detach()
        copy = buffer.clone()  # what grows here must not grow into the memory behind it
        base = buffer.storage_offset()
        views = [copy.as_strided(t.shape, t.stride(), t.storage_offset() - base) for t in self._tensors]
        return views, copy

    def _adopt(self, share: float) -> None:
        spec = self._specs[self.plan.members[0]]
        gradient = self.gradients[0]
        if gradient is not None and reducible_in_place(gradient, spec):
            memory = gradient
            if share != 1.0:
                memory.mul_(share)
        else:
            memory = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
            _fill([memory], [gradient], share)
        self._tensors = [memory]
        self._buffer = memory.as_strided((self.plan.numel,), (1,))

    def _pack(self, parameters: Sequence[nn.Parameter], share: float) -> None:
        """Bring the gradients together in one buffer, unless they lie in one already."""
        if True in [gradient is not None and gradient.requires_grad for gradient in self.gradients]:
            self._views = False  # a gradient with a graph of its own (create_graph) keeps it
        buffer = self._buffers.holding(self.gradients, self.plan) if self._views else None
        if buffer is not None:
            if share != 1.0:
                buffer.flat.mul_(share)
        else:
            buffer = self._buffers.buffer(self.plan, self._specs, parameters)
            is_fused = self.plan.nbytes >= _LARGE_BYTES * len(self.plan.members)
            _fill(buffer.slots, self.gradients, share if is_fused else 1.0)
            if share != 1.0 and not is_fused:
                buffer.flat.mul_(share)
        self._buffer = buffer.flat
        self._tensors = list(buffer.slots)  # which shows that they are in use
        if self._views:  # the slots are the gradients from here on; the memory of the old ones is free
            self.gradients = [
                None if gradient is None else slot for slot, gradient in zip(self._tensors, self.gradients, strict=True)
            ]

    @property
    def is_under_way(self) -> bool:
        """Whether something was sent that was not waited for."""
        return self._pending is not None

    def probe(self) -> Probe | None:
        """How to ask whether what was sent has come back; None where nobody can tell."""
        return probe(self._pending)

    def is_back(self) -> bool:
        """Whether nothing of it is on its way any more."""
        is_done = self.probe()
        return not self.is_under_way or (is_done is not None and bool(is_done()))

    def check(self, reduction: Reduction) -> None:
        """Raise what it is known to have failed with."""
        pending, bucket = self._pending, self._bucket
        if bucket is None or not isinstance(pending, torch._C.Future) or self.plan.device.type != "cpu":
            return
        if pending.done():
            reduction.settle(bucket, pending)

    def settle(self, reduction: Reduction) -> None:
        """Wait until nothing of it is on its way."""
        if self._pending is not None and self._bucket is not None:
            reduction.settle(self._bucket, self._pending)

    def land(self, reduction: Reduction) -> list[Tensor]:
        """Wait for the result; one gradient a member, each the tensor that ``.grad`` shall be."""
        assert self._buffer is not None
        if self._bucket is not None:
            reduction.finish(self._bucket, self._pending, self._tensors)
            self._pending = None
            result = self._bucket.buffer()
            if result.data_ptr() != self._buffer.data_ptr() or result.dtype != self._buffer.dtype:
                self._buffer.copy_(result)
        if self._views and not self.plan.adopted:
            return self._tensors
        return self._back_to_gradients()

    def _back_to_gradients(self) -> list[Tensor]:
        results: list[Tensor] = []
        moved_to, moved_from = [], []
        for gradient, tensor in zip(self.gradients, self._tensors, strict=True):
            if gradient is None or not _can_hold(gradient, tensor):
                results.append(tensor if self.plan.adopted else tensor.clone())
                continue
            results.append(gradient)
            if gradient is not tensor:
                moved_to.append(gradient)
                moved_from.append(tensor)
        if moved_to:
            torch._foreach_copy_(moved_to, moved_from)
        return results

    def abandon(self) -> None:
        """Leave what is still in flight; the gradients are copies from then on, into which nobody writes any more."""
        self.gradients = [None if gradient is None else gradient.clone() for gradient in self.gradients]
        self._pending = None


def _fill(slots: Sequence[Tensor], gradients: Sequence[Tensor | None], share: float) -> None:
    """Set each slot to ``share`` of its gradient; to zero where there is none."""
    pairs = list(zip(slots, gradients, strict=True))
    present = [(slot, gradient) for slot, gradient in pairs if gradient is not None]
    absent = [slot for slot, gradient in pairs if gradient is None]
    if absent:
        torch._foreach_zero_(absent)
    if share != 1.0:
        for slot, gradient in present:
            torch.mul(gradient, share, out=slot)
    elif present:
        to, of = zip(*present, strict=True)
        torch._foreach_copy_(to, of)


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


class SparseFlight:
    """A sparse gradient: its own collective, run when the dense ones have landed.

    The average is a coalesced sparse tensor over the rows that exist on any rank.
    """

    def __init__(self, plan: BucketPlan, gradient: Tensor | None, spec: ParameterSpec) -> None:
        self.plan = plan
        self.gradients = [gradient]
        self._spec = spec
        self.nbytes = 0

    def land(self, groups: Groups) -> Generator[Probe | None, None, Tensor]:
        """All-gather indices and values over the ranks, and average: steps that return the result."""
        local = self._local()
        indices, values = local.indices(), local.values()
        self.nbytes = indices.numel() * indices.element_size() + values.numel() * values.element_size()
        if groups.world_size > 1:
            # On CPUs, so that no GPU is waited for.
            parts = yield from _gathered(torch.tensor([indices.shape[1]]), groups.control)
            counts = [int(part) for part in parts]
            longest = max(counts)
            if longest:
                rows = yield from _gathered_rows(indices.t().contiguous(), counts, longest, groups.buckets)
                indices = rows.t()
                values = yield from _gathered_rows(values.contiguous(), counts, longest, groups.buckets)
        total = torch.sparse_coo_tensor(indices, values, self._spec.shape).coalesce()
        return total if groups.world_size == 1 else (total / groups.world_size).coalesce()

    def _local(self) -> Tensor:
        gradient = self.gradients[0]
        spec = self._spec
        if gradient is None:
            rows = (0, *spec.shape[1:])
            return torch.sparse_coo_tensor(
                torch.empty((1, 0), dtype=torch.int64, device=spec.device),
                torch.empty(rows, dtype=spec.dtype, device=spec.device),
                spec.shape,
                is_coalesced=True,
                check_invariants=False,
            )
        if not gradient.is_sparse:  # the weight was used densely as well
            return gradient.to_sparse(1).coalesce()
        return gradient.coalesce()


def _gathered(tensor: Tensor, group: ProcessGroup) -> Generator[Probe | None, None, list[Tensor]]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(parts, tensor, group=group, async_op=True)
    yield probe(work)
    work.wait()
    return parts


def _gathered_rows(
    rows: Tensor, counts: list[int], longest: int, group: ProcessGroup
) -> Generator[Probe | None, None, Tensor]:
    """All-gather tensors of different lengths along dimension 0."""
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    parts = yield from _gathered(padded, group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
