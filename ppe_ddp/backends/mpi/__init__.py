"""The backend ``mpi4py``: a process group over MPI. Importing this package loads neither mpi4py nor MPI."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["MpiOptions"]


@dataclass(frozen=True)
class MpiOptions:
    """What can be chosen for a group over MPI; ``pg_options`` of ``init_process_group`` and ``new_group``.

    Attributes:
        piece_bytes: Larger all-reduces, reduces and broadcasts go in pieces of this size, which stay in the cache;
            small pieces cost more calls. The same on every rank.
        shared_memory: Whether sums of at least ``shared_bytes`` over the ranks of one node go through memory that they
            share, where the system allows it. The same on every rank.
        shared_parts: Whether reduce-scatters and all-gathers do so, too. Gains where their input lies in that memory
            already (``allocate_tensor``), as in our wrappers, whose own groups have it so; all-gathers of other memory
            are slower than messages. The same on every rank.
        shared_bytes: Below it a message is faster. Of a reduce-scatter the input counts; of an all-gather, for which
            messages are good, a 16th of the output. The same on every rank.
        two_level_bytes: In a group of several nodes, all-reduces of at least so many bytes (and ``shared_bytes``) are
            summed within each node first, and each part of that between the nodes by one rank of each. Other
            collectives go by messages there. On two nodes of two ranks at 1 Gbit/s both are as fast at 32 to 64 KB, one
            by one; of eight under way at once two levels are faster at any size. The same on every rank.
        shared_piece_bytes: What is larger goes through shared memory in pieces of this size. The same on every rank.
        thread: Whether a thread advances collectives on CPU tensors while the caller goes on. None: where the group
            has several nodes, and the MPI lets several threads call it. MPI moves messages in calls only; on one node
            a thread is slower, as it takes a core from the ranks.
        gpu_aware: Whether this MPI takes CUDA memory, so that CUDA tensors are handed to it as they are. Otherwise they
            are copied to pinned memory and back. A wrong True crashes.
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
        """What of them must be the same on every rank; the rest as it is by default."""
        return replace(self, thread=False, gpu_aware=False)

    def for_buckets(self) -> MpiOptions:
        """The same for a group whose messages lie in memory that it has allocated."""
        return replace(self, shared_parts=True)

    def for_control(self) -> MpiOptions:
        """The same for a group of small messages that are to be under way while the caller goes on."""
        return replace(self, shared_bytes=0, shared_parts=False)
