"""The backend ``shm``: shared memory within a node, and gloo for all else. Needs nothing but torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["ShmOptions"]

_FEW_RANKS, _MANY_RANKS = 16, 64
_DIRECT_BYTES = 4096


@dataclass(frozen=True)
class ShmOptions:
    """What can be chosen for a group over shared memory; ``pg_options`` of ``init_process_group`` and ``new_group``.

    All fields are the same on every rank.

    Attributes:
        shared_memory: Whether collectives go through memory that the ranks of a node share, where the system allows
            it; without it, all of them go by gloo.
        shared_parts: Whether reduce-scatters and all-gathers do so, too, and not all-reduces and barriers alone.
        shared_bytes: What is smaller goes by gloo. Of a reduce-scatter the input counts; of an all-gather, a 16th of
            the output. gloo has a latency of 0.1 to 1 ms, shared memory of some microseconds, so: nothing.
        two_level_bytes: In a group of several nodes, all-reduces of at least so many bytes (and ``shared_bytes``) are
            summed within each node first, and each part of that between the nodes by one rank of each. All else goes
            by gloo there: a message of a few bytes passes a ring of few ranks sooner. On two nodes of two ranks at
            1 Gbit/s both are about as fast at 64 KB, one by one; of eight under way at once two levels are faster from
            4 KB on. From 64 ranks on, all take two levels: a ring has two rounds a rank, one after another.
        direct_bytes: All-reduces and all-gathers of up to so many bytes that go by gloo, among few ranks, are sent from
            each rank to each at once, and added up in the wait. In gloo's ring each of twice as many rounds as ranks
            waits for a thread to get a core: on two nodes of two ranks, which shared two cores, a mask alone took 3.2
            ms so and 1.5 ms directly (medians). By default nothing, as a wait that an interrupt ends never brings the
            result.
        shared_piece_bytes: What is larger goes through shared memory in pieces of this size. A tensor that lies
            elsewhere takes as much of it for each of two pieces.
    """

    shared_memory: bool = True
    shared_parts: bool = True
    shared_bytes: int = 0
    two_level_bytes: int = 64 << 10
    direct_bytes: int = 0
    shared_piece_bytes: int = 4 << 20

    def two_levels_from(self, size: int) -> int:
        """The fewest bytes that take two levels in a group of so many ranks on several nodes."""
        return 0 if size >= _MANY_RANKS else self.two_level_bytes

    def direct_up_to(self, size: int) -> int:
        """How many bytes at most each of ``size`` ranks sends to each at once, where they go by gloo."""
        return self.direct_bytes if size <= _FEW_RANKS else 0

    def for_buckets(self) -> ShmOptions:
        """The same for a group whose messages lie in memory that it has allocated."""
        return replace(self, shared_parts=True)

    def for_control(self) -> ShmOptions:
        """The same for a group of small messages that are to be under way while the caller goes on."""
        return replace(self, shared_bytes=0, direct_bytes=_DIRECT_BYTES)
