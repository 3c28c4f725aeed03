"""Memory for buckets: the backend's own where it offers some, as shared memory, else torch's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ppe_ddp.backends.group_internals import backend_for, device_types

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Allocator = Callable[[int, torch.dtype, torch.device], Tensor]
"""Makes a 1-D tensor of so many elements, with arbitrary contents."""


def offers_memory(group: ProcessGroup, device: torch.device) -> bool:
    """Whether ``group`` has memory of its own for messages on ``device``, as torch's contract has it.

    CPU only: what NCCL's own memory pool gains was not measured.
    """
    offers = getattr(backend_for(group, device), "supports_tensor_alloc", None)
    return device.type == "cpu" and offers is not None and bool(offers(device))


def allocator(group: ProcessGroup) -> Allocator:
    """Makes buckets for ``group``: in memory that its backend offers for them, as long as it does."""
    cpu = torch.device("cpu")
    is_offered = cpu.type in device_types(group) and offers_memory(group, cpu)
    # Of a group without memory, as of gloo, nothing is held: its connections end with the last reference to it.
    backend: Any = backend_for(group, cpu) if is_offered else None

    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        # Asked each time: ranks on several nodes, or where memory is short, may have found out that they share none.
        if backend is not None and device.type == "cpu" and backend.supports_tensor_alloc(device):
            # A backend may refuse with whatever error it likes; any memory will do.
            with contextlib.suppress(MemoryError, ValueError, RuntimeError):
                memory: Tensor = backend.allocate_tensor(numel, dtype=dtype, device=device)
                return memory
        return torch.empty(numel, dtype=dtype, device=device)

    return allocate
