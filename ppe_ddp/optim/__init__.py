"""The distributed optimizer (ZeRO-1): each rank updates its shards, and keeps optimizer state for these only."""

from ppe_ddp.engine.zero.sharded_gradient import ShardedGradient
from ppe_ddp.optim.optimizer import DistributedOptimizer, clip_grad_norm_

__all__ = ["DistributedOptimizer", "ShardedGradient", "clip_grad_norm_"]
