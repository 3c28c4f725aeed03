"""Memory for buckets and messages: the backend's own if it offers some, such as shared memory, else torch's.

Fresh memory costs page faults, and for small parameters making a view costs more than copying into it. So buffers and
their views are kept from step to step. A ``.grad`` may be one of these views; its buffer is not reused as long as
anything refers to that view.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import chain, groupby
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ppe_ddp.backends.group_internals import backend_for, device_types
from ppe_ddp.backends.memory_pool import Allocator, allocated, fresh
from ppe_ddp.engine.plan import BucketPlan, ParameterSpec
from ppe_ddp.torch_internals import base_of, storage_users, tensor_users, unflatten, users_of_tensors

_LIES_AS = torch.Tensor.is_set_to
_ITEMSIZE = torch.Tensor.element_size
REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_SHORTEST_RUN = 3  # members; concatenating fewer takes as long as copying them


def offers_memory(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the backend of ``group`` allocates memory for messages on ``device`` (``supports_tensor_alloc()``).

    CPUs only: the gain by NCCL's memory pool was not measured.
    """
    offers = getattr(backend_for(group, device), "supports_tensor_alloc", None)
    return device.type == "cpu" and offers is not None and bool(offers(device))


def allocator(group: ProcessGroup) -> Allocator:
    """Return an allocator for ``group``: of the backend's own memory, as long as it offers some."""
    cpu = torch.device("cpu")
    is_offered = cpu.type in device_types(group) and offers_memory(group, cpu)
    # Hold no backend that offers no memory, such as gloo: its connections end with the last reference.
    backend: Any = backend_for(group, cpu) if is_offered else None

    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        # Ask each time: the ranks may have found out that they share no memory, on several nodes or if it is short.
        if backend is not None and device.type == "cpu" and backend.supports_tensor_alloc(device):
            # The backend may refuse with any of these errors; torch's memory will do.
            with contextlib.suppress(MemoryError, ValueError, RuntimeError):
                memory: Tensor = backend.allocate_tensor(numel, dtype=dtype, device=device)
                return memory
        return fresh(numel, dtype, device)

    return allocate


_OF_BUCKETS = "_ppe_ddp_of_buckets"


def lies_in_bucket(gradient: Tensor) -> bool:
    """Whether a gradient is a view of the memory of a bucket, of any wrapper, also of one that is no more."""
    base = base_of(gradient)
    if base is None or not hasattr(base, _OF_BUCKETS):
        return False
    start = base.data_ptr()  # the user may have given the gradient other memory (``.grad.data = ...``)
    return start <= gradient.data_ptr() < start + base.nbytes


class BucketBuffer:
    """A flat buffer that is laid out for one bucket at a time."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        setattr(memory, _OF_BUCKETS, True)  # gradients may outlive this object, and hold the memory by themselves
        self.bucket: BucketPlan | None = None  # the bucket it is laid out for
        self.flat = memory  # 1-D, of the bucket's size
        self.slots: list[Tensor] = []  # views of it, one a member, with the member's shape and strides
        # Views of it, one for each run of members that one call can concatenate, with the length of the run. Empty if
        # one copy a member is as fast.
        self.runs: list[tuple[int, Tensor]] = []
        self._originals: list[Tensor] = []
        self._itemsizes = {memory.element_size()}
        self._at_rest: tuple[object, ...] = ()

    def lay_out(self, bucket: BucketPlan, specs: Sequence[ParameterSpec], parameters: Sequence[nn.Parameter]) -> None:
        """Make the slots for ``bucket``, with the specs and parameters of its members."""
        self.slots, self._originals, self.runs = [], [], []
        self.flat = self.memory.narrow(0, 0, bucket.numel)
        self.slots = slots_of(self.flat, bucket, specs, parameters)
        self.bucket = bucket
        self._originals = slots_of(self.flat, bucket, specs, parameters)
        self.runs = _runs_of(self.flat, self.slots) if bucket.row_major else []
        self._at_rest = self._users()

    def is_free(self) -> bool:
        """Whether nothing else refers to the memory, and no slot was changed, as ``.data = ...`` does."""
        slots = self.slots
        if self._users() != self._at_rest or not all(map(_LIES_AS, slots, self._originals)):
            return False  # is_set_to() compares memory, shape and strides in one call
        return self._itemsizes == set(map(_ITEMSIZE, slots))

    def _users(self) -> tuple[object, ...]:
        slots = self.slots
        return (
            storage_users(self.memory),
            list(map(getrefcount, slots)),  # references to a slot: of Python ...
            users_of_tensors(slots),  # ... and of torch, such as a .grad
            tensor_users(self.flat),  # a message that was given up may still write into it
            any(map(REQUIRES_GRAD, slots)),
        )


class BucketBuffers:
    """Owns the buffers of buckets. A buffer is lent until nothing refers to it; no call returns it."""

    def __init__(self, allocate: Allocator) -> None:
        self._allocate = allocate
        self._held: dict[tuple[torch.dtype, torch.device], list[BucketBuffer]] = {}
        self._used: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.memory.nbytes for buffer in chain.from_iterable(self._held.values()))

    def buffer(
        self, bucket: BucketPlan, specs: Sequence[ParameterSpec], parameters: Sequence[nn.Parameter]
    ) -> BucketBuffer:
        """Lend a free buffer that is laid out for ``bucket``; its contents are arbitrary.

        ``specs`` and ``parameters`` are those of the members.
        """
        held = self._held.setdefault((bucket.dtype, bucket.device), [])
        found = None
        for buffer in held:
            if buffer.bucket is not bucket:
                continue
            if not buffer.is_free():
                # Gradients of the last step lie in it. The next step will use it, when gradients lie in this step's.
                self._used.add(id(buffer))
            elif found is None:
                found = buffer
        if found is None:
            fitting = sorted((b for b in held if b.memory.numel() >= bucket.numel), key=lambda b: b.memory.numel())
            found = next(filter(BucketBuffer.is_free, fitting), None)
            if found is None:
                memory = allocated(self._allocate, bucket.numel, bucket.dtype, bucket.device)
                held.append(found := BucketBuffer(memory))
            found.lay_out(bucket, specs, parameters)
        self._used.add(id(found))
        return found

    def trim(self) -> None:
        """Drop what was not used since the last trim. Gradients that are views keep their memory alive themselves."""
        if len(self._used) < sum(map(len, self._held.values())):
            for key, held in self._held.items():
                self._held[key] = [buffer for buffer in held if id(buffer) in self._used]
        self._used.clear()


def slots_of(
    buffer: Tensor, bucket: BucketPlan, specs: Sequence[ParameterSpec], parameters: Sequence[nn.Parameter]
) -> list[Tensor]:
    """Views of ``buffer``, one a member of ``bucket``; ``specs`` and ``parameters`` are those of the members."""
    fits = [tuple(parameter.shape) == spec.shape for parameter, spec in zip(parameters, specs, strict=True)]
    if bucket.row_major and all(fits):  # the user may have changed the shape of a parameter
        return unflatten(buffer, parameters)
    base = buffer.storage_offset()
    return [
        buffer.as_strided(spec.shape, spec.stride, base + offset)
        for spec, offset in zip(specs, bucket.offsets, strict=True)
    ]


def _runs_of(flat: Tensor, slots: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Views of ``flat``, one for each run of slots that differ in their first dimension only, with its length."""
    runs: list[tuple[int, Tensor]] = []
    start = 0
    for shape, same in groupby(slots, lambda slot: slot.shape[1:] if slot.dim() else None):
        members = list(same)
        stop = start + sum(map(torch.Tensor.numel, members))
        if shape is None:
            return []  # torch concatenates no scalars
        runs.append((len(members), flat[start:stop].view(sum(slot.shape[0] for slot in members), *shape)))
        start = stop
    return runs if _SHORTEST_RUN * len(runs) <= len(slots) else []
