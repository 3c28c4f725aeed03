"""How a wrapper synchronizes its gradients, as one frozen value that the engine is made with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ppe_ddp.contracts import BroadcastFunction


@dataclass(frozen=True)
class Policy:
    """How a wrapper synchronizes; the same on every rank.

    Attributes:
        negotiate: Ranks may have different gradients. Without it, a difference is an error.
        overlap: Communicate while backward runs. Without it, all of it comes after.
        views: ``.grad`` may be a view of the buffers: no copy back, but a kept one keeps its whole bucket.
        broadcast_buffers: Broadcasts buffers after each synchronized backward; None to leave them alone.
        ranges: Mark launches for torch's profiler, at a few microseconds each.
        check_finite: Look for NaN and infinity in gradients before they are sent; ``"skip"`` drops such a step on all
            ranks, else it raises on all.
        agreed: What else must be the same on every rank, for people to read.
    """

    negotiate: bool = True
    overlap: bool = True
    views: bool = False
    broadcast_buffers: BroadcastFunction | None = None
    ranges: bool = False
    check_finite: bool | Literal["skip"] = False
    agreed: str = ""
