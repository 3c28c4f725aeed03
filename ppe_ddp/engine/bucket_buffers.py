"""Flat buffers for buckets, reused as soon as nothing refers to their slots any more.

Fresh memory costs page faults, and where parameters are small, making views of it costs more than copying into them;
so buffers and their views are kept from step to step. A ``.grad`` may be one of these views: its buffer is not reused
for as long as anything refers to that view, whatever the next plan looks like.
"""

from __future__ import annotations

from itertools import groupby
from sys import getrefcount
from typing import TYPE_CHECKING

import torch

from ppe_ddp.torch_internals import storage_users, tensor_users, unflatten, users_of_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from ppe_ddp.engine.bucket_allocator import Allocator
    from ppe_ddp.engine.bucket_plan import BucketPlan, ParameterSpec

_LIES_AS = torch.Tensor.is_set_to
_ITEMSIZE = torch.Tensor.element_size
_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_SHORTEST_RUN = 3  # members; to concatenate fewer takes as long as to copy them
_UNIT_BYTES = 1 << 16  # capacities are multiples of it, so that buckets of about the same size share buffers


def sole_owner(tensor: Tensor) -> bool:
    """Whether ``tensor`` has only Python references, and no other tensor uses its memory."""
    return storage_users(tensor) <= 1 and tensor_users(tensor) <= 1


class BucketBuffer:
    """A flat buffer, laid out for one bucket.

    Attributes:
        bucket: What it is laid out for.
        flat: 1-D, of the bucket's size.
        slots: Views of it, one a member, in its shape and strides.
        runs: Views of it, one for each run of members that one call can concatenate there, with its length; none where
            a copy for each member is as quick.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.bucket: BucketPlan | None = None
        self.flat = memory
        self.slots: list[Tensor] = []
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
        self._at_rest = self._state()

    def is_free(self) -> bool:
        """Whether nothing outside refers to a slot or a view of one, and no slot was changed into something else."""
        return self._state() == self._at_rest and self.is_intact()

    def is_intact(self) -> bool:
        """Whether every slot has its memory, shape and dtype as laid out, which setting ``.data`` changes."""
        slots = self.slots
        if not all(map(_LIES_AS, slots, self._originals)):  # of these properties one call a slot is the quickest
            return False
        return self._itemsizes == set(map(_ITEMSIZE, slots))

    def _state(self) -> tuple[object, ...]:
        slots = self.slots
        return (
            storage_users(self.memory),
            list(map(getrefcount, slots)),  # who holds a slot itself: Python ...
            users_of_tensors(slots),  # ... or torch, as a .grad
            any(map(_REQUIRES_GRAD, slots)),
        )


class BucketBuffers:
    """Owns the buffers, and lends each for one backward at a time.

    Args:
        allocate: Makes the memory of a buffer.
    """

    def __init__(self, allocate: Allocator) -> None:
        self._allocate = allocate
        self._held: dict[tuple[torch.dtype, torch.device], list[BucketBuffer]] = {}
        self._used: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.memory.nbytes for held in self._held.values() for buffer in held)

    def buffer(
        self, bucket: BucketPlan, specs: Sequence[ParameterSpec], parameters: Sequence[nn.Parameter]
    ) -> BucketBuffer:
        """A free buffer, laid out for ``bucket`` with these members; its contents are arbitrary."""
        held = self._held.setdefault((bucket.dtype, bucket.device), [])
        found = None
        for buffer in held:
            if buffer.bucket is not bucket:
                continue
            if not buffer.is_free():
                self._used.add(id(buffer))  # gradients lie in it: it is the next step's, when they lie in this one's
            elif found is None:
                found = buffer
        if found is None:
            found = self._laid_out(held, bucket, specs, parameters)
        self._used.add(id(found))
        return found

    def _laid_out(
        self,
        held: list[BucketBuffer],
        bucket: BucketPlan,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[nn.Parameter],
    ) -> BucketBuffer:
        """One of ``held`` that was laid out for another bucket, or a new one."""
        fitting = sorted((b for b in held if b.memory.numel() >= bucket.numel), key=lambda b: b.memory.numel())
        buffer = next(filter(BucketBuffer.is_free, fitting), None)
        if buffer is None:
            unit = max(1, _UNIT_BYTES // bucket.dtype.itemsize)
            capacity = -(-bucket.numel // unit) * unit
            buffer = BucketBuffer(self._allocate(capacity, bucket.dtype, bucket.device))
            held.append(buffer)
        buffer.lay_out(bucket, specs, parameters)
        return buffer

    def bounds(self) -> list[int]:
        """The addresses at which buffers begin and end, sorted."""
        memories = [buffer.memory for held in self._held.values() for buffer in held]
        return sorted(bound for m in memories for bound in (m.data_ptr(), m.data_ptr() + m.nbytes))

    def trim(self) -> None:
        """Drop the buffers that were not used since the last trim; gradients that are views keep their memory alive."""
        for key, held in self._held.items():
            self._held[key] = [buffer for buffer in held if id(buffer) in self._used]
        self._used.clear()


def slots_of(
    buffer: Tensor, bucket: BucketPlan, specs: Sequence[ParameterSpec], parameters: Sequence[nn.Parameter]
) -> list[Tensor]:
    """Views of ``buffer``, one a member of ``bucket``, whose specs and parameters these are."""
    fits = [tuple(parameter.shape) == spec.shape for parameter, spec in zip(parameters, specs, strict=True)]
    if bucket.row_major and all(fits):  # not so after some changes
        return unflatten(buffer, parameters)
    base = buffer.storage_offset()
    return [
        buffer.as_strided(spec.shape, spec.stride, base + offset)
        for spec, offset in zip(specs, bucket.offsets, strict=True)
    ]


def _runs_of(flat: Tensor, slots: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Views of ``flat``, one for each run of slots that differ in their first size only, with its length."""
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
