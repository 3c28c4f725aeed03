"""Inner groups for the devices of another backend: the second half of ``"cpu:mpi4py,cuda:nccl"``.

torch makes a group written in Python the whole group, and tells its creator nothing of the rest.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import Backend, ProcessGroup

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["group_over", "wanted_backends"]


def wanted_backends() -> dict[str, str]:
    """Device types and their backends in the call of torch that makes a group now; empty if it cannot be seen."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_new_process_group_helper":
        frame = frame.f_back
    config = None if frame is None else frame.f_locals.get("backend_config")
    return dict(getattr(config, "device_backend_map", {}))


def group_over(backend: str, arguments: Any) -> Any:
    """Make a group over another backend for the same ranks, which call this together.

    Args:
        backend: ``gloo``, ``nccl``, or one that was registered with torch.
        arguments: torch's ``_DistributedBackendOptions`` for the group as a whole.

    Raises:
        ValueError: It cannot be made here.
    """
    rank, size = arguments.group_rank, arguments.group_size
    store = PrefixStore(f"beside/{backend}", arguments.store)
    plugin = Backend._plugins.get(backend.upper())
    made: Any
    if plugin is not None and plugin.extended_api:  # since torch 2.15 also its own backends
        own = type(arguments)()
        for name in ("group_rank", "group_size", "timeout", "group_id", "global_ranks_in_group"):
            setattr(own, name, getattr(arguments, name))
        own.store = store
        made = plugin.creator_fn(own, None)
        if isinstance(made, ProcessGroup):
            return made
    elif backend == "gloo":
        made = dist.ProcessGroupGloo(store, rank, size, timeout=arguments.timeout)
    elif backend == "nccl" and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        # As torch sets them; NCCL's watchdog tells by them which ranks of the job hang.
        options._timeout = arguments.timeout
        options.group_name = arguments.group_id
        options.global_ranks_in_group = arguments.global_ranks_in_group
        made = dist.ProcessGroupNCCL(store, rank, size, options)
    else:
        raise ValueError(f"rank {rank}: no {backend!r} group can be made here beside a group written in Python")
    if plugin is None:
        made._set_sequence_number_for_group()
    kind = Backend.backend_type_map[backend]
    group = ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    for device in Backend.backend_capability[backend]:
        group._register_backend(torch.device(device), kind, made)
    group._set_group_name(arguments.group_id)
    return group
