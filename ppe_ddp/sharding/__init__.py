"""Load a checkpoint once, on rank 0, and give each rank its shard."""

from ppe_ddp.sharding.checkpoint_reader import Checkpoint, load_state_dict
from ppe_ddp.sharding.dist_module import DistModule, patch_accelerate
from ppe_ddp.sharding.distribution import broadcast_and_shard_state_dict, shard_broadcasted_state_dict

__all__ = [
    "Checkpoint",
    "DistModule",
    "broadcast_and_shard_state_dict",
    "load_state_dict",
    "patch_accelerate",
    "shard_broadcasted_state_dict",
]
