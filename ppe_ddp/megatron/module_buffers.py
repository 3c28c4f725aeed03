"""The gradient buffers of one module, built from its parameters; and their shards, for a distributed optimizer.

Each bucket of a buffer is cut into equal parts, one a rank. A cut may go through a parameter.

    bucket      |  weight 5      | bias 4 |   weight 3      . |
    ranks       |      0       |      1       |       2       |
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ppe_ddp.engine.bucket import BucketContext
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.memory import MemoryPool, allocator
from ppe_ddp.engine.module import ModuleState, refuse_distributed
from ppe_ddp.engine.zero.shard_collectives import ReduceScatter, all_gather
from ppe_ddp.engine.zero.shards import Shard, ShardedModel
from ppe_ddp.errors import UnusableError
from ppe_ddp.functions import own_function
from ppe_ddp.megatron.buffer_layout import BufferKind, Item, lay_out
from ppe_ddp.megatron.buffer_synchronizer import BufferSynchronizer
from ppe_ddp.megatron.gradient_buffers import BufferBucket, MainGradients, ParamAndGradBuffer, ReductionGroup
from ppe_ddp.megatron.parallel_groups import CopiesOfParameters, needs_own_bucket
from ppe_ddp.torch_internals import version_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from ppe_ddp.contracts import Waitable
    from ppe_ddp.engine.memory import Allocator
    from ppe_ddp.engine.plan import ParameterSpec
    from ppe_ddp.megatron.buffer_layout import BucketRange
    from ppe_ddp.megatron.config import Setup

_HALF = (torch.bfloat16, torch.float16)
_ALIGNED = 8  # elements: a rank's share starts at a multiple of 16 bytes
_ALIGNED_FOR_NCCL = 1 << 16


class GradientBuffers:
    """The gradient buffers of one module, its reduction groups, and the synchronizer for both.

    All ranks of the groups must make theirs together.

    Args:
        setup: The module, and how to synchronize it.
        default_group: Averages dense parameters where the setup names no group.
        sums: Sum gradients over the ranks instead of averaging them.
        bucket_size: Elements after which a bucket is closed; None for one bucket a buffer.
    """

    def __init__(self, setup: Setup, default_group: ProcessGroup, *, sums: bool, bucket_size: int | None) -> None:
        config = setup.ddp_config
        self.module_state = ModuleState(setup.module)
        tensors = self.module_state.distributed_tensors()
        refuse_distributed(tensors, "ppe_ddp.megatron", "use plain tensors, and ParallelGroups.from_mesh()")
        parameters = self.module_state.parameters
        self.copies = CopiesOfParameters(setup.module, setup.config, setup.groups.data or default_group, setup.groups)
        self.specs = [_main_spec(spec, fp32=config.grad_reduce_in_fp32) for spec in self.module_state.specs]
        self.groups = _duplicates(setup, default_group, self.module_state)
        self.reduction_groups = self._reduction_groups(setup, sums=sums)
        aligned = _ALIGNED_FOR_NCCL if config.pad_buckets_for_high_nccl_busbw else _ALIGNED
        self.layout = lay_out(
            self._items(setup),
            bucket_size=bucket_size,
            divisors=[reduction_group.groups.world_size * aligned for reduction_group in self.reduction_groups],
        )
        self.buffers = [
            ParamAndGradBuffer(
                kind,
                size,
                [bucket for bucket in self.layout.buckets if bucket.buffer == number],
                parameters,
                self.specs,
                self._allocator(setup, kind),
                with_params=config.use_distributed_optimizer,
            )
            for number, (kind, size) in enumerate(zip(self.layout.kinds, self.layout.sizes, strict=True))
        ]
        self.pool = MemoryPool(allocator(self.groups[0].buckets))
        buckets = self._buckets(scatter=config.use_distributed_optimizer)
        main = {i: slot for b in buckets for i, slot in zip(b.extent.plan.members, b.slots, strict=True)}
        self.gradients = MainGradients(parameters, main)
        self.synchronizer = BufferSynchronizer(
            self.reduction_groups,
            self.layout,
            buckets,
            self.gradients,
            self.module_state,
            check_finite=config.check_for_nan_in_grad,
        )

    def __del__(self) -> None:
        # The reducer gives back the first one, that of the dense parameters.
        if hasattr(self, "synchronizer") and not self.synchronizer.has_pending_results:
            for groups in self.groups[1:]:
                groups.release()

    def _allocator(self, setup: Setup, kind: BufferKind) -> Allocator:
        if setup.ddp_config.use_distributed_optimizer:  # buffers are sent as they are
            return allocator(self.reduction_groups[kind.reduction_group].groups.buckets)
        return lambda numel, dtype, device: torch.empty(numel, dtype=dtype, device=device)

    def _reduction_groups(self, setup: Setup, *, sums: bool) -> list[ReductionGroup]:
        parameters = self.module_state.parameters
        named = list(setup.module.named_parameters(remove_duplicate=False))
        options = f"{setup.ddp_config.described()}, disable_bucketing {setup.disable_bucketing}, sums {sums}"
        reduction_groups = []
        for number, groups in enumerate(self.groups):
            indices = [i for i, parameter in enumerate(parameters) if _reduction_group_of(parameter) == number]
            others = [name for name, parameter in named if _reduction_group_of(parameter) != number]
            size = groups.world_size
            reduction_group = ReductionGroup(
                groups,
                ModuleState(setup.module, others),
                indices,
                [self.specs[i] for i in indices],
                setup.reduce_function,
                gain=float(size) if sums else size / self.groups[0].world_size,
                options=", ".join(filter(None, (options, own_function(setup.reduce_function)))),
            )
            frozen = [repr(self.specs[i].name) for i in indices if not parameters[i].requires_grad]
            reduction_group.negotiation.use_plug("a parameter that was frozen when it was wrapped:", *frozen)
            reduction_group.negotiation.check()
            reduction_groups.append(reduction_group)
        return reduction_groups

    def _items(self, setup: Setup) -> list[Item]:
        is_sharded = setup.ddp_config.use_distributed_optimizer
        alone = needs_own_bucket(setup.module, setup.config) if is_sharded else set()
        items = []
        for i, (parameter, spec) in enumerate(zip(self.module_state.parameters, self.specs, strict=True)):
            if parameter.requires_grad:
                kind = BufferKind(_reduction_group_of(parameter), parameter.dtype, spec.dtype, parameter.device)
                items.append(Item(i, parameter.numel(), kind, id(parameter) in alone, spec.is_row_major))
        return items

    def _buckets(self, *, scatter: bool) -> list[BufferBucket]:
        buckets = []
        for extent in self.layout.buckets:
            of_group, memory = self.reduction_groups[extent.reduction_group], self.buffers[extent.buffer].grads(extent)
            transport = ReduceScatter.fastest(of_group.groups, self.pool, memory.device) if scatter else None
            context = BucketContext(self.specs, self.module_state.parameters, of_group.groups, of_group.reduction)
            buckets.append(BufferBucket(extent, memory, context, gain=of_group.gain, scatter=transport))
        return buckets

    def place_of(self, parameter: nn.Parameter) -> str:
        """Where the share of this rank lies in a gradient that is reduce-scattered; empty if it is all-reduced."""
        index = self.gradients.index_of(parameter)
        extent = self.layout.buckets[self.layout.bucket_of[index]]
        if self.buffers[extent.buffer].param_data is None:
            return ""
        offset = extent.plan.offsets[extent.plan.members.index(index)]
        groups = self.reduction_groups[extent.reduction_group].groups
        return f", at {offset} of {extent.padded} in shares {groups.rank} of {groups.world_size}"


def _reduction_group_of(parameter: nn.Parameter) -> int:
    return 0 if getattr(parameter, "allreduce", True) else 1


def _main_spec(spec: ParameterSpec, *, fp32: bool) -> ParameterSpec:
    """The form of ``main_grad``: that of the parameter, dense, and in fp32 where that is asked for."""
    dtype = torch.float32 if fp32 and spec.dtype in _HALF else spec.dtype
    return replace(spec, dtype=dtype, sparse=False)


def _duplicates(setup: Setup, default_group: ProcessGroup, module_state: ModuleState) -> list[Groups]:
    experts = [
        name for name, p in zip(module_state.names, module_state.parameters, strict=True) if _reduction_group_of(p)
    ]
    parents = [setup.groups.data or default_group]
    if experts:
        if setup.groups.expert is None:
            raise ValueError(
                f"parameter {experts[0]!r} is an expert's (allreduce = False), and no group averages experts: pass "
                "groups=ParallelGroups(expert=...) or expert_data_parallel_group=..., the ranks that hold the same "
                "experts"
            )
        parents.append(setup.groups.expert)
    return [Groups.duplicate(parent, shared_memory=True) for parent in parents]


class _Assigned(NamedTuple):
    """The gradient that a weight was given last, and the versions by which a change of it is seen."""

    revision: int  # of the averages
    source_version: int  # of the buffer: it changes with each write into main_grad
    gradient: Tensor  # a view of the buffer, or where the dtypes differ a copy
    version: int  # of the copy: it changes where the optimizer unscales or clips it


class ShardedBuffers(ShardedModel):
    """The shards of the buffers of one reduction group, for a distributed optimizer.

    Gathering is in place: parameters are views of the buffer. So between ``gather()`` and the end of its Work the
    parameters of that unit must not be used.
    """

    has_even_shards = False  # the bounds of a rank's part of a bucket may lie anywhere in a parameter

    def __init__(self, state: GradientBuffers, number: int) -> None:
        self.copies = state.copies
        self.groups = state.reduction_groups[number].groups
        self._buffers = state.buffers
        self._gradients = state.gradients
        self._synchronizer = state.synchronizer
        self._pool = state.pool
        # What backward reaches last, a forward needs first.
        self._buckets = [bucket for bucket in reversed(state.layout.buckets) if bucket.reduction_group == number]
        places = {
            i: (bucket, offset)
            for bucket in self._buckets
            for i, offset in zip(bucket.plan.members, bucket.plan.offsets, strict=True)
        }
        self._indices = sorted(places)
        position = {i: k for k, i in enumerate(self._indices)}
        self.units = [[position[i] for i in reversed(bucket.plan.members)] for bucket in self._buckets]
        self.shards: list[Shard] = []
        self._weights: dict[int, Tensor] = {}
        self._assigned: dict[int, _Assigned] = {}
        self._starts: list[tuple[int, int]] = []
        for i in self._indices:
            self._cut(*places[i], state.module_state.parameters[i], state.specs[i].name)

    @property
    def group(self) -> ProcessGroup:
        """The ranks that share the parameters."""
        return self.groups.parent

    def _cut(self, bucket: BucketRange, offset: int, parameter: nn.Parameter, name: str) -> None:
        groups = self.groups
        size = bucket.padded // groups.world_size
        first, numel = groups.rank * size, parameter.numel()
        start = min(max(first - offset, 0), numel)
        stop = max(min(first + size - offset, numel), start)
        self.shards.append(Shard(parameter, name, start, stop))
        self._starts.append((bucket.buffer, bucket.start + offset + start))

    def _slice(self, memory: Tensor, index: int) -> Tensor:
        return memory.narrow(0, self._starts[index][1], self.shards[index].numel)

    @property
    def is_synchronized(self) -> bool:
        """Whether every gradient in the buffers is an average."""
        self._synchronizer.wait_for_results()
        return not self._gradients.is_dirty

    def gradients(self) -> list[Tensor | None]:
        """The averages of this rank's shards: views of the grad buffers, in their dtype, or None."""
        if not self.is_synchronized:
            raise RuntimeError(
                f"rank {self.groups.rank}: there are gradients that no synchronization has averaged; call "
                "finish_grad_sync() (or finalize_model_grads()) before the optimizer's step"
            )
        return [
            self._slice(self._buffers[self._starts[k][0]].grad_data, k) if self._gradients.averaged[i] else None
            for k, i in enumerate(self._indices)
        ]

    def attach(self, index: int, weight: Tensor) -> None:
        """Let ``weight.grad`` be the average, in :meth:`assign_gradients`."""
        self._weights[index] = weight
        self._assigned.pop(index, None)

    def assign_gradients(self) -> list[bool]:
        """Give the weights what was averaged since, and what was written into ``main_grad``."""
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
        assigned = self._assigned.get(index)
        if assigned is None or assigned.revision != self._gradients.revision:
            return True
        if gradient.dtype == weight.dtype or version_of(gradient) == assigned.source_version:
            return False
        held = weight.grad
        if held is None or held.data_ptr() != assigned.gradient.data_ptr() or version_of(held) != assigned.version:
            raise RuntimeError(
                f"rank {self.groups.rank}: the gradient of {self.shards[index].name!r} was changed by its "
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
        """Set the shard at ``index`` in the parameter buffer, on this rank only."""
        self._slice(self._memory_of(index), index).copy_(values.detach())

    def write_in_place(self, indices: Sequence[int]) -> None:
        """Check that the parameters at ``indices`` are views of the buffer, so that their new values are there."""
        for index in indices:
            self._memory_of(index)

    def _memory_of(self, index: int) -> Tensor:
        memory = self._buffers[self._starts[index][0]].param_data
        assert memory is not None
        shard = self.shards[index]
        if shard.parameter.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr():
            raise UnusableError(
                f"rank {self.groups.rank}: parameter {shard.name!r} was given other memory since the module was "
                "wrapped, so it is no view of the parameter buffer; wrap the module again, on all ranks"
            )
        return memory

    def gather(self, unit: int) -> Waitable | None:
        """Start the all-gather of one bucket of parameters, in place."""
        bucket = self._buckets[unit]
        if bucket.padded == 0:
            return None
        values = self._buffers[bucket.buffer].values(bucket)
        groups = self.groups
        size = bucket.padded // groups.world_size
        return all_gather(values, values.narrow(0, groups.rank * size, size), groups.buckets, self._pool)

    def install(self, unit: int) -> None:
        """Nothing to do: parameters are views of what was gathered."""
