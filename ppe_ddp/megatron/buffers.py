"""All buffers of one module, and whoever averages what lies in them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ppe_ddp.engine.arena import Arena
from ppe_ddp.engine.census import Census
from ppe_ddp.engine.collectives import ReduceScatter
from ppe_ddp.engine.groups import Groups, allocator
from ppe_ddp.engine.pool import Pool
from ppe_ddp.megatron.bucket import Bucket
from ppe_ddp.megatron.buffer import ParamAndGradBuffer
from ppe_ddp.megatron.communication import BufferCommunication
from ppe_ddp.megatron.lane import Lane
from ppe_ddp.megatron.layout import Item, Kind, lay_out
from ppe_ddp.megatron.main_gradients import MainGradients
from ppe_ddp.megatron.sharded import ShardedBuffers
from ppe_ddp.megatron.shared_weights import needs_own_bucket

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

    from ppe_ddp.engine.layout import ParameterSpec
    from ppe_ddp.megatron.signature import Setup

_HALF = (torch.bfloat16, torch.float16)
_ALIGNED = 8  # elements: a rank's share starts at a multiple of 16 bytes
_ALIGNED_FOR_NCCL = 1 << 16


class GradientBuffers:
    """Lays out the gradients of a module, and makes what averages them.

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
        self.census = Census(setup.module)
        parameters = self.census.parameters
        self.specs = [_main_spec(spec, fp32=config.grad_reduce_in_fp32) for spec in self.census.specs]
        self.groups = _duplicates(setup, default_group, self.census)
        self.lanes = self._lanes(setup, sums=sums)
        aligned = _ALIGNED_FOR_NCCL if config.pad_buckets_for_high_nccl_busbw else _ALIGNED
        self.layout = lay_out(
            self._items(setup),
            bucket_size=bucket_size,
            divisors=[lane.groups.world_size * aligned for lane in self.lanes],
        )
        self.buffers = [
            ParamAndGradBuffer(
                kind,
                size,
                [bucket for bucket in self.layout.buckets if bucket.buffer == number],
                parameters,
                self.specs,
                allocator(self.lanes[kind.lane].groups.buckets),
                with_params=config.use_distributed_optimizer,
            )
            for number, (kind, size) in enumerate(zip(self.layout.kinds, self.layout.sizes, strict=True))
        ]
        self._pool = Pool(allocator(self.groups[0].buckets))
        buckets = self._buckets(scatter=config.use_distributed_optimizer)
        main = {i: slot for b in buckets for i, slot in zip(b.extent.plan.members, b.slots, strict=True)}
        self.gradients = MainGradients(parameters, main)
        self.communication = BufferCommunication(
            self.lanes,
            self.layout,
            buckets,
            self.gradients,
            self.specs,
            parameters,
            check_finite=config.check_for_nan_in_grad,
        )

    def __del__(self) -> None:
        # The reducer gives back the first one, that of the dense parameters.
        if hasattr(self, "communication") and not self.communication.is_on_the_way:
            for groups in self.groups[1:]:
                groups.release()

    def _lanes(self, setup: Setup, *, sums: bool) -> list[Lane]:
        parameters = self.census.parameters
        named = list(setup.module.named_parameters(remove_duplicate=False))
        lanes = []
        for number, groups in enumerate(self.groups):
            indices = [i for i, parameter in enumerate(parameters) if _lane_of(parameter) == number]
            others = [name for name, parameter in named if _lane_of(parameter) != number]
            size = groups.world_size
            lane = Lane.of(
                groups,
                Census(setup.module, others),
                indices,
                [self.specs[i] for i in indices],
                setup.reduce_function,
                gain=float(size) if sums else size / self.groups[0].world_size,
                options=f"{setup.ddp_config.described()}, disable_bucketing {setup.disable_bucketing}, sums {sums}",
            )
            lane.consensus.check()
            lanes.append(lane)
        return lanes

    def _items(self, setup: Setup) -> list[Item]:
        config = setup.ddp_config
        alone = needs_own_bucket(setup.module) if config.use_distributed_optimizer else set()
        items = []
        for i, parameter in enumerate(self.census.parameters):
            if parameter.requires_grad:
                kind = Kind(_lane_of(parameter), parameter.dtype, self.specs[i].dtype, parameter.device)
                is_alone, is_row_major = id(parameter) in alone, self.specs[i].is_row_major
                items.append(Item(i, parameter.numel(), kind, is_alone, is_row_major))
        return items

    def _buckets(self, *, scatter: bool) -> list[Bucket]:
        arena = Arena(allocator(self.groups[0].buckets))
        buckets = []
        for extent in self.layout.buckets:
            lane, memory = self.lanes[extent.lane], self.buffers[extent.buffer].grads(extent)
            way = ReduceScatter.fitting(lane.groups, self._pool, memory.device) if scatter else None
            parameters = self.census.parameters
            buckets.append(Bucket(extent, memory, lane, arena, self.specs, parameters, scatter=way))
        return buckets

    def sharded(self, lane: int) -> ShardedBuffers:
        """The shards of one lane, for a distributed optimizer."""
        return ShardedBuffers(
            lane,
            self.lanes[lane],
            self.buffers,
            self.layout.buckets,
            self.gradients,
            self.specs,
            self.census.parameters,
            self.communication.settle,
            self._pool,
        )


def _lane_of(parameter: nn.Parameter) -> int:
    return 0 if getattr(parameter, "allreduce", True) else 1


def _main_spec(spec: ParameterSpec, *, fp32: bool) -> ParameterSpec:
    """The form of ``main_grad``: that of the parameter, dense, and in fp32 where that is asked for."""
    dtype = torch.float32 if fp32 and spec.dtype in _HALF else spec.dtype
    return replace(spec, dtype=dtype, sparse=False)


def _duplicates(setup: Setup, default_group: ProcessGroup, census: Census) -> list[Groups]:
    experts = [name for name, p in zip(census.names, census.parameters, strict=True) if _lane_of(p)]
    parents = [setup.groups.data or default_group]
    if experts:
        if setup.groups.expert is None:
            raise ValueError(
                f"parameter {experts[0]!r} is an expert's (allreduce = False), and no group averages experts: pass "
                "groups=ParallelGroups(expert=...) or expert_data_parallel_group=..., the ranks that hold the same "
                "experts"
            )
        parents.append(setup.groups.expert)
    return [Groups.duplicate(parent) for parent in parents]
