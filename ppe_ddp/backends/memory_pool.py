"""Memory for messages, kept and lent again, as fresh memory costs page faults."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ppe_ddp.torch_internals import sole_owner

Allocator = Callable[[int, torch.dtype, torch.device], Tensor]
"""Makes a 1-D tensor with the given number of elements, dtype and device; its contents are arbitrary."""

_UNIT_BYTES = 1 << 16  # capacities are multiples of it, so that tensors of similar size share memory


def fresh(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """New memory of torch's."""
    return torch.empty(numel, dtype=dtype, device=device)


def allocated(allocate: Allocator, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """New memory for at least ``numel`` elements."""
    unit = max(1, _UNIT_BYTES // dtype.itemsize)
    return allocate(-(-max(numel, 1) // unit) * unit, dtype, device)


class MemoryPool:
    """Lends memory to messages until nothing refers to it, neither the caller nor a transport; no call returns it."""

    def __init__(self, allocate: Allocator = fresh) -> None:
        self._allocate = allocate
        self._held: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._used: set[int] = set()

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Lend memory for ``numel`` elements, with arbitrary contents, as long as a view of it lives."""
        held = self._held.setdefault((dtype, device), [])
        most = 2 * numel + max(1, _UNIT_BYTES // dtype.itemsize)
        fitting = sorted([memory for memory in held if numel <= memory.numel() <= most], key=Tensor.numel)
        memory = next(filter(sole_owner, fitting), None)
        if memory is None:
            held.append(memory := allocated(self._allocate, numel, dtype, device))
        self._used.add(id(memory))
        return memory.narrow(0, 0, numel)

    def trim(self) -> None:
        """Drop the memory that was not used since the last trim, unless a message there is still alive."""
        for key, held in self._held.items():
            self._held[key] = [memory for memory in held if id(memory) in self._used or not sole_owner(memory)]
        self._used.clear()
