"""Megatron-Core's interface for data parallelism, without Megatron: the same engine, any backend, any graph."""

from ppe_ddp.megatron.config import DistributedDataParallelConfig
from ppe_ddp.megatron.distributed_data_parallel import DistributedDataParallel, DistributedDataParallelBase
from ppe_ddp.megatron.finalize import finalize_model_grads
from ppe_ddp.megatron.gradient_buffers import ParamAndGradBuffer
from ppe_ddp.megatron.parallel_groups import ParallelGroups

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelBase",
    "DistributedDataParallelConfig",
    "ParallelGroups",
    "ParamAndGradBuffer",
    "finalize_model_grads",
]
