"""The shards of a Megatron wrapper: each bucket of a buffer is cut into equal parts, one a rank.

A cut may go through a parameter.

    bucket      |  weight 5      | bias 4 |   weight 3      . |
    ranks       |      0       |      1       |       2       |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppe_ddp.engine.torch_internals import version_of
from ppe_ddp.engine.zero.shard_collectives import all_gather
from ppe_ddp.engine.zero.shards import Shard, ShardedModel
from ppe_ddp.errors import UnusableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from ppe_ddp.contracts import Waitable
    from ppe_ddp.engine.memory import MemoryPool
    from ppe_ddp.engine.plan import ParameterSpec
    from ppe_ddp.megatron.buffer_layout import BucketRange
    from ppe_ddp.megatron.buffer_synchronizer import BufferSynchronizer
    from ppe_ddp.megatron.copies import CopiesOfParameters
    from ppe_ddp.megatron.main_gradients import MainGradients
    from ppe_ddp.megatron.param_and_grad_buffer import ParamAndGradBuffer
    from ppe_ddp.megatron.reduction_group import ReductionGroup


@dataclass(frozen=True, eq=False)
class _Assigned:
    """The gradient that a weight was given last.

    Attributes:
        revision: That of the averages.
        source_version: That of the buffer: it changes with each write into ``main_grad``.
        gradient: A view of the buffer, or where the dtypes differ a copy.
        version: That of the copy; it changes where the optimizer unscales or clips it.
    """

    revision: int
    source_version: int
    gradient: Tensor
    version: int


class ShardedBuffers(ShardedModel):
    """The shards of the buffers of one reduction group, for a distributed optimizer.

    Gathering is in place: parameters are views of the buffer. So between ``gather()`` and the end of its Work the
    parameters of that unit must not be used.

    Args:
        number: Of the reduction group whose parameters these are.
        reduction_group: The reduction group.
        buffers: All buffers of the module.
        buckets: All buckets of the module.
        gradients: Knows which averages there are.
        specs: Of all parameters.
        parameters: All parameters.
        synchronizer: Waits for a reduction that is in flight, and clears gradients.
        pool: Memory for messages.
        parallel: The groups that split the model, and say which parameters are copies.
    """

    def __init__(
        self,
        number: int,
        reduction_group: ReductionGroup,
        buffers: Sequence[ParamAndGradBuffer],
        buckets: Sequence[BucketRange],
        gradients: MainGradients,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[nn.Parameter],
        synchronizer: BufferSynchronizer,
        pool: MemoryPool,
        parallel: CopiesOfParameters,
    ) -> None:
        self._parallel = parallel
        self._groups = reduction_group.groups
        self._buffers = buffers
        # What backward reaches last, a forward needs first.
        self._buckets = [bucket for bucket in reversed(buckets) if bucket.reduction_group == number]
        self._gradients = gradients
        self._synchronizer = synchronizer
        self._pool = pool
        places = {i: (bucket, offset) for bucket in self._buckets for i, offset in _members(bucket)}
        self._indices = sorted(places)
        position = {i: k for k, i in enumerate(self._indices)}
        self.units = [[position[i] for i in reversed(bucket.plan.members)] for bucket in self._buckets]
        self.shards: list[Shard] = []
        self._weights: dict[int, Tensor] = {}
        self._assigned: dict[int, _Assigned] = {}
        self._starts: list[tuple[int, int]] = []
        for i in self._indices:
            bucket, offset = places[i]
            self._cut(bucket, offset, parameters[i], specs[i].name)

    @property
    def group(self) -> ProcessGroup:
        """The ranks that share the parameters."""
        return self._groups.parent

    @property
    def groups_of_model(self) -> Sequence[ProcessGroup]:
        """The data-parallel group, which has all experts too, and those that split the model."""
        return self._parallel.groups

    @property
    def are_splits_marked(self) -> bool:
        """Whether a parameter of the module has Megatron's mark, or no group splits tensors."""
        return self._parallel.are_splits_marked

    def counts(self, index: int, names: set[str]) -> bool:
        """Whether the shard at ``index`` adds to the norm; see :meth:`CopiesOfParameters.counts`."""
        shard = self.shards[index]
        return self._parallel.counts(shard.name, shard.parameter, names)

    def _cut(self, bucket: BucketRange, offset: int, parameter: nn.Parameter, name: str) -> None:
        groups = self._groups
        size = bucket.padded // groups.world_size
        first, numel = groups.rank * size, parameter.numel()
        start = min(max(first - offset, 0), numel)
        stop = max(min(first + size - offset, numel), start)
        self.shards.append(Shard(parameter, name, start, stop))
        self._starts.append((bucket.buffer, bucket.start + offset + start))

    def _slice(self, memory: Tensor, index: int) -> Tensor:
        return memory.narrow(0, self._starts[index][1], self.shards[index].numel)

    has_even_shards = False  # the bounds of a rank's part of a bucket may lie anywhere in a parameter

    @property
    def is_synchronized(self) -> bool:
        """Whether every gradient in the buffers is an average."""
        self._synchronizer.wait_for_results()
        return not self._gradients.is_dirty

    def gradients(self) -> list[Tensor | None]:
        """The averaged gradients of this rank's shards: views of the grad buffers.

        Returns:
            One for each shard, 1-D, in the dtype of ``main_grad``; None where no rank has a gradient.

        Raises:
            RuntimeError: Gradients were accumulated and not synchronized.
        """
        if not self.is_synchronized:
            raise RuntimeError(
                f"rank {self._groups.rank}: there are gradients that no synchronization has averaged; call "
                "finish_grad_sync() (or finalize_model_grads()) before the optimizer's step"
            )
        return [
            self._slice(self._buffers[self._starts[k][0]].grad_data, k) if self._gradients.averaged[i] else None
            for k, i in enumerate(self._indices)
        ]

    def attach(self, index: int, weight: Tensor) -> None:
        """Let ``weight.grad`` be the average: a view of the buffer, or where the dtypes differ a copy."""
        self._weights[index] = weight
        self._assigned.pop(index, None)

    def assign_gradients(self) -> list[bool]:
        """Give the weights what was averaged since, and what was written into ``main_grad``.

        Raises:
            RuntimeError: Gradients were accumulated and not synchronized; or a copy was unscaled or clipped, and
                then ``main_grad`` was changed.
        """
        gradients = self.gradients()
        for index, weight in self._weights.items():
            gradient = gradients[index]
            if gradient is None:
                weight.grad = None
                self._assigned.pop(index, None)
            elif self._has_changed(index, weight, gradient):
                weight.grad = gradient.to(weight.dtype)
                self._assigned[index] = _Assigned(
                    self._gradients.revision, version_of(gradient), weight.grad, version_of(weight.grad)
                )
        return [gradient is not None for gradient in gradients]

    def _has_changed(self, index: int, weight: Tensor, gradient: Tensor) -> bool:
        """Whether the average has changed since the weight was given it."""
        assigned = self._assigned.get(index)
        if assigned is None or assigned.revision != self._gradients.revision:
            return True
        if gradient.dtype == weight.dtype or version_of(gradient) == assigned.source_version:
            return False
        held = weight.grad
        if held is None or held.data_ptr() != assigned.gradient.data_ptr() or version_of(held) != assigned.version:
            raise RuntimeError(
                f"rank {self._groups.rank}: the gradient of {self.shards[index].name!r} was changed by its "
                "optimizer (unscaled or clipped), and then in main_grad, which has another dtype: change main_grad "
                "before the optimizer sees it, or the gradients in the optimizer's param_groups"
            )
        return True

    def zero_grad(self, indices: Sequence[int], *, set_to_none: bool = True) -> None:
        """Clear what is in ``.grad`` and in ``main_grad``: afterwards there is no gradient, however it is cleared.

        Megatron's train step leaves the buffers to this, where it calls ``zero_grad_buffer(zero_buffer=False)``.
        """
        super().zero_grad(indices)
        self._synchronizer.clear_some([self._indices[index] for index in indices])
        for index in indices:
            if index in self._weights:
                self._weights[index].grad = None

    def write(self, index: int, values: Tensor) -> None:
        """Set the shard at ``index`` in the parameter buffer, on this rank only.

        Raises:
            UnusableError: The parameter was given other memory (``parameter.data = ...``) since it was wrapped.
        """
        self._slice(self._memory_of(index), index).copy_(values.detach())

    def write_in_place(self, indices: Sequence[int]) -> None:
        """Check that the parameters at ``indices`` are views of the buffer, so that their new values are there.

        Raises:
            UnusableError: As :meth:`write`.
        """
        for index in indices:
            self._memory_of(index)

    def _memory_of(self, index: int) -> Tensor:
        """The parameter buffer in which the shard at ``index`` lies."""
        memory = self._buffers[self._starts[index][0]].param_data
        assert memory is not None
        shard = self.shards[index]
        if shard.parameter.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr():
            raise UnusableError(
                f"rank {self._groups.rank}: parameter {shard.name!r} was given other memory since the module was "
                "wrapped, so it is no view of the parameter buffer; wrap the module again, on all ranks"
            )
        return memory

    def gather(self, unit: int) -> Waitable | None:
        """Start the all-gather of one bucket of parameters, in place."""
        bucket = self._buckets[unit]
        if bucket.padded == 0:
            return None
        values = self._buffers[bucket.buffer].values(bucket)
        groups = self._groups
        size = bucket.padded // groups.world_size
        return all_gather(values, values.narrow(0, groups.rank * size, size), groups.buckets, self._pool)

    def install(self, unit: int) -> None:
        """Nothing to do: parameters are views of what was gathered."""


def _members(bucket: BucketRange) -> list[tuple[int, int]]:
    return list(zip(bucket.plan.members, bucket.plan.offsets, strict=True))
