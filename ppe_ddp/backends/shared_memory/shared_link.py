"""The transport under a group in shared memory: an all-gather of bytes, waits, and a progress engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppe_ddp.backends.process_group.pending_work import FailableWaits
    from ppe_ddp.backends.process_group.progress_engine import ProgressEngine
    from ppe_ddp.backends.shared_memory.node_link import NodeLink


@dataclass(frozen=True)
class SharedLink:
    """How the ranks of one group reach each other besides their shared memory.

    Attributes:
        rank: This process in the group.
        size: How many ranks the group has.
        all_gather: Brings the bytes of every rank, as many from each, to all; every rank calls it together.
        waits: How to wait for other ranks.
        progress: Advances the group's collectives whenever this process calls any backend.
        join: Joins this rank with those of its group that own a slice of this number on other nodes; all of these call
            it together, for one slice after another. None where nodes cannot be joined.
    """

    rank: int
    size: int
    all_gather: Callable[[bytes], list[bytes]]
    waits: FailableWaits
    progress: ProgressEngine
    join: Callable[[int, Sequence[int]], NodeLink] | None = None


@dataclass(frozen=True)
class SharedMemoryConfig:
    """Which collectives go through shared memory; the same on every rank.

    Attributes:
        is_enabled: Whether any does.
        parts: Whether reduce-scatters and all-gathers do, too.
        smallest_bytes: Below it a message is faster. Of a reduce-scatter the input counts; of an all-gather, a 16th
            of the output.
        two_level_bytes: In a group of several nodes what is smaller than this goes by messages, too.
        piece_bytes: What is larger goes in pieces of this size.
    """

    is_enabled: bool
    parts: bool
    smallest_bytes: int
    two_level_bytes: int
    piece_bytes: int
