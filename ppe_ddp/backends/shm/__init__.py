"""The backend ``shm``: shared memory within a node, and gloo otherwise. It needs only torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

_FEW_RANKS, _MANY_RANKS = 16, 64
_DIRECT_BYTES = 4096


@dataclass(frozen=True)
class ShmOptions:
    """The options of a group over shared memory; ``pg_options`` of ``init_process_group`` and ``new_group``.

    All fields must be the same on every rank.

    Attributes:
        shared_memory: Whether collectives go through memory that the ranks of a node share, if the system allows it.
            Without it all collectives go by gloo.
        shared_parts: Whether reduce-scatters and all-gathers use shared memory, in addition to all-reduces and
            barriers.
        shared_bytes: Smaller collectives go by gloo. The size is that of the input for a reduce-scatter, and a 16th of
            the output for an all-gather. The default is 0, as the latency of gloo is 0.1 to 1 ms, and that of shared
            memory some microseconds.
        two_level_bytes: In a group of several nodes, all-reduces of at least this size (and ``shared_bytes``) have two
            levels: a sum within each node, then a sum of each part between the nodes, by one rank of each node. Other
            collectives go by gloo there: a small message passes a ring of few ranks sooner. On two nodes of two ranks
            at 1 Gbit/s both are about as fast at 64 KB, one by one; with eight in flight two levels are faster from
            4 KB on. From 64 ranks on all all-reduces have two levels, as a ring has two sequential rounds a rank.
        direct_bytes: Among few ranks, all-reduces and all-gathers by gloo of up to this size are sent from each rank to
            each other one at once, and summed in the wait. In gloo's ring each round waits for a thread to get a core,
            and there are two rounds a rank. On two nodes of two ranks, which shared two cores, a mask took 3.2 ms by
            the ring and 1.5 ms directly (medians). The default is 0, as a wait that was interrupted never gets the
            result.
        shared_piece_bytes: The size of pieces in which larger tensors go through shared memory. A tensor in other
            memory takes two pieces of shared memory.
    """

    shared_memory: bool = True
    shared_parts: bool = True
    shared_bytes: int = 0
    two_level_bytes: int = 64 << 10
    direct_bytes: int = 0
    shared_piece_bytes: int = 4 << 20

    def two_levels_from(self, size: int) -> int:
        """The smallest size with two levels, in a group of ``size`` ranks on several nodes."""
        return 0 if size >= _MANY_RANKS else self.two_level_bytes

    def direct_up_to(self, size: int) -> int:
        """The largest size that is sent directly by gloo, in a group of ``size`` ranks."""
        return self.direct_bytes if size <= _FEW_RANKS else 0

    def for_buckets(self) -> ShmOptions:
        """These options for a group whose messages lie in memory that it has allocated."""
        return replace(self, shared_parts=True)

    def for_control(self) -> ShmOptions:
        """These options for a group of small messages that overlap with computation."""
        return replace(self, shared_bytes=0, direct_bytes=_DIRECT_BYTES)
