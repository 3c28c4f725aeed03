"""Allocates the gradient buffers of one module, and builds its reduction groups, buckets and synchronizer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ppe_ddp.engine.bucket import BucketContext
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.memory import MemoryPool, allocator
from ppe_ddp.engine.module import ModuleState, refuse_distributed
from ppe_ddp.engine.zero.shard_collectives import ReduceScatter
from ppe_ddp.functions import own_function
from ppe_ddp.megatron.buffer_bucket import BufferBucket, ReductionGroup
from ppe_ddp.megatron.buffer_layout import BufferKind, Item, ParamAndGradBuffer, lay_out
from ppe_ddp.megatron.buffer_synchronizer import BufferSynchronizer
from ppe_ddp.megatron.main_gradients import MainGradients
from ppe_ddp.megatron.parallel_groups import CopiesOfParameters, needs_own_bucket

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

    from ppe_ddp.engine.memory import Allocator
    from ppe_ddp.engine.plan import ParameterSpec
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
        sums: Whether gradients are to be summed over the ranks instead of averaged.
        bucket_size: Elements after which a bucket is closed; None for one bucket a buffer.

    Raises:
        DisagreementError: On every rank, if their parameters or options differ; names the first.
        ValueError: There are experts and no group for them; names the first.
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
            self.specs,
            parameters,
            check_finite=config.check_for_nan_in_grad,
        )

    def __del__(self) -> None:
        # The reducer gives back the first one, that of the dense parameters.
        if hasattr(self, "synchronizer") and not self.synchronizer.has_pending_results:
            for groups in self.groups[1:]:
                groups.release()

    def _allocator(self, setup: Setup, kind: BufferKind) -> Allocator:
        """Makes the memory of buffers: what the group offers, where they are sent as they are."""
        if setup.ddp_config.use_distributed_optimizer:
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
