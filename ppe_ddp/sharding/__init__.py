"""Load a checkpoint once, on rank 0, and give each rank its shard."""

from ppe_ddp.sharding.functions import broadcast_and_shard_state_dict, shard_broadcasted_state_dict
from ppe_ddp.sharding.module import DistModule

__all__ = ["DistModule", "broadcast_and_shard_state_dict", "shard_broadcasted_state_dict"]
