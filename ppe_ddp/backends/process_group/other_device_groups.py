"""Inner groups for the devices of another backend: the second half of ``"cpu:mpi4py,cuda:nccl"``."""

from __future__ import annotations

from typing import Any

from torch import distributed as dist
from torch.distributed import ProcessGroup

from ppe_ddp.backends.group_internals import PrefixStore, creator_of, nccl_options, process_group_over

__all__ = ["group_over"]


def group_over(backend: str, arguments: Any) -> ProcessGroup:
    """Make a group over another backend for the same ranks, which call this together.

    Args:
        backend: ``gloo``, ``nccl``, or one that was registered with torch.
        arguments: torch's ``_DistributedBackendOptions`` for the group as a whole.

    Raises:
        ValueError: It cannot be made here.
    """
    rank, size = arguments.group_rank, arguments.group_size
    store = PrefixStore(f"beside/{backend}", arguments.store)
    creator = creator_of(backend)
    made: Any
    if creator is not None:  # since torch 2.15 also for its own backends
        own = type(arguments)()
        for name in ("group_rank", "group_size", "timeout", "group_id", "global_ranks_in_group"):
            setattr(own, name, getattr(arguments, name))
        own.store = store
        made = creator(own, None)
        if isinstance(made, ProcessGroup):
            return made
    elif backend == "gloo":
        made = dist.ProcessGroupGloo(store, rank, size, timeout=arguments.timeout)
    elif backend == "nccl" and dist.is_nccl_available():
        made = dist.ProcessGroupNCCL(store, rank, size, nccl_options(arguments))
    else:
        raise ValueError(f"rank {rank}: no {backend!r} group can be made here beside a group written in Python")
    return process_group_over(made, backend, arguments.group_id, store)
