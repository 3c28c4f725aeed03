"""Loads state_dicts into shards without a module: one function for rank 0, which sends, one for the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ppe_ddp.sharding.distribution import Distribution, LoadTerms
from ppe_ddp.sharding.load_group import LoadGroup
from ppe_ddp.sharding.load_options import LoadOptions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def broadcast_and_shard_state_dict(
    state_dict: Mapping[str, Any],
    meta_sharded_state_dict: Mapping[str, Any],
    sharded_state_dict: dict[str, Any],
    *,
    process_group: ProcessGroup | None = None,
    strict: bool = True,
) -> None:
    """Send the full tensors of ``state_dict`` to where they belong, and keep rank 0's own shards.

    Rank 0 calls this while all others call :func:`shard_broadcasted_state_dict`.

    Args:
        state_dict: The checkpoint: full tensors. Tensors that rank 0 needs whole are taken over without a copy.
        meta_sharded_state_dict: What rank 0's module has; DTensors and tensors, on the meta device or not.
        sharded_state_dict: Filled in place, with real tensors that a module can load with ``assign=True``.
        process_group: The ranks that load together; None for the default group.
        strict: Whether all keys must match; the same on every rank.

    Raises:
        ValueError: This is not rank 0 of the group. Nothing was sent.
        CheckpointError: On every rank, with the same text, as from ``DistModule.load_state_dict``.
        CommunicationError: The process group failed.
    """
    load_group = LoadGroup(process_group)
    if not load_group.is_source:
        raise ValueError(
            f"rank {load_group.rank} called broadcast_and_shard_state_dict, which is for rank 0 alone; call "
            "shard_broadcasted_state_dict here"
        )
    _fill(state_dict, meta_sharded_state_dict, sharded_state_dict, process_group, strict)


def shard_broadcasted_state_dict(
    meta_sharded_state_dict: Mapping[str, Any],
    sharded_state_dict: dict[str, Any],
    *,
    process_group: ProcessGroup | None = None,
    strict: bool = True,
) -> None:
    """Receive this rank's shards from rank 0, which calls :func:`broadcast_and_shard_state_dict` meanwhile.

    Args:
        meta_sharded_state_dict: What this rank's module has; DTensors and tensors, on the meta device or not.
        sharded_state_dict: Filled in place, with real tensors that a module can load with ``assign=True``.
        process_group: The ranks that load together; None for the default group.
        strict: Whether all keys must match; the same on every rank.

    Raises:
        ValueError: This is rank 0 of the group. Nothing was received.
        CheckpointError: On every rank, with the same text, as from ``DistModule.load_state_dict``.
        CommunicationError: The process group failed.
    """
    load_group = LoadGroup(process_group)
    if load_group.is_source:
        raise ValueError(
            "rank 0 called shard_broadcasted_state_dict, which is for the other ranks; call "
            "broadcast_and_shard_state_dict here"
        )
    _fill({}, meta_sharded_state_dict, sharded_state_dict, process_group, strict)


def _fill(
    state_dict: Mapping[str, Any],
    targets: Mapping[str, Any],
    result: dict[str, Any],
    process_group: ProcessGroup | None,
    strict: bool,
) -> None:
    terms = LoadTerms(fresh=True, strict=strict, options=LoadOptions(process_group), what="state_dict", lends=True)
    result.update(Distribution(lambda: state_dict, lambda: targets, terms).run().state_dict)
