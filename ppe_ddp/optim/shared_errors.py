"""Shares errors before a checkpoint is loaded, so that all ranks load it or none does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import distributed as dist

from ppe_ddp.engine.json_collectives import all_gather_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup


def raise_together(error: Exception | None, collectives: Sequence[str], group: ProcessGroup) -> None:
    """Raise on all ranks if one has an error, or if they are about to call different collectives.

    Args:
        error: What is wrong on this rank.
        collectives: The collectives that this rank is about to call, in order.
        group: The ranks; all of them must call this.

    Raises:
        ValueError: On every rank, with the errors of all.
    """
    world_size = dist.get_world_size(group)
    told = all_gather_json([None if error is None else _text(error), list(collectives)], group)
    texts = [text for text, _ in told]
    if any(texts):
        ranks: dict[str, list[int]] = {}
        for rank, text in enumerate(texts):
            if text is not None:
                ranks.setdefault(text, []).append(rank)
        errors = "; ".join(
            f"rank {', '.join(map(str, which))} of {world_size}: {text}" for text, which in ranks.items()
        )
        raise ValueError(f"the checkpoint does not fit, and nothing was loaded on any rank: {errors}") from error
    for rank, (_, others) in enumerate(told):
        if others != told[0][1]:
            which = sorted(set(others) ^ set(told[0][1]))[:3] or "their order"
            raise ValueError(
                f"rank 0 and rank {rank} have different checkpoints, and nothing was loaded on any: they differ in "
                f"{which}; save and load by torch.distributed.checkpoint, or load the files of one step"
            )


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
