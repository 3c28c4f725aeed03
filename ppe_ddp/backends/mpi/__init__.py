"""The backend ``mpi4py``: a process group over MPI. Importing this package loads neither mpi4py nor MPI."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class MpiOptions:
    """The options of a group over MPI; ``pg_options`` of ``init_process_group`` and ``new_group``.

    Attributes:
        piece_bytes: The size of pieces in which larger all-reduces, reduces and broadcasts are sent, so that they stay
            in the cache; small pieces cost more calls. The same on every rank.
        shared_memory: Whether sums of at least ``shared_bytes`` over the ranks of one node go through memory that they
            share, if the system allows it. The same on every rank.
        shared_parts: Whether reduce-scatters and all-gathers use shared memory, too. This is faster if their input lies
            there already (``allocate_tensor``), as in the groups of this library's wrappers. All-gathers of other
            memory are slower than messages. The same on every rank.
        shared_bytes: Smaller collectives are faster by messages, and use them. The size is that of the input for a
            reduce-scatter, and a 16th of the output for an all-gather, which is fast by messages. The same on every
            rank.
        two_level_bytes: In a group of several nodes, all-reduces of at least this size (and ``shared_bytes``) have two
            levels: a sum within each node, then a sum of each part between the nodes, by one rank of each node. Other
            collectives use messages there. On two nodes of two ranks at 1 Gbit/s both are as fast at 32 to 64 KB, one
            by one; with eight in flight two levels are faster at any size. The same on every rank.
        shared_piece_bytes: The size of pieces in which larger tensors go through shared memory. The same on every rank.
        thread: Whether a thread advances collectives on CPU tensors while the caller computes. None: only if the group
            has several nodes and MPI supports calls of several threads. MPI advances messages only in calls. On one
            node a thread is slower, as it takes a core from the ranks.
        gpu_aware: Whether this MPI can read and write CUDA memory, so that CUDA tensors are passed to it directly.
            Otherwise they are copied to pinned memory and back. A wrong True crashes.
    """

    piece_bytes: int = 2 << 20
    shared_memory: bool = True
    shared_parts: bool = False
    shared_bytes: int = 256 << 10
    two_level_bytes: int = 64 << 10
    shared_piece_bytes: int = 4 << 20
    thread: bool | None = None
    gpu_aware: bool = False

    def agreed(self) -> MpiOptions:
        """These options, with defaults for those that may differ between ranks."""
        return replace(self, thread=False, gpu_aware=False)

    def for_buckets(self) -> MpiOptions:
        """These options for a group whose messages lie in memory that it has allocated."""
        return replace(self, shared_parts=True)

    def for_control(self) -> MpiOptions:
        """These options for a group of small messages that overlap with computation."""
        return replace(self, shared_bytes=0, shared_parts=False)
