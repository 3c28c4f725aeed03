"""Gradient memory: one flat buffer a (dtype, device), and views of it where a plan says.

The buffers are kept from step to step, since fresh memory costs page faults. What lies in them is laid out
anew by every plan; if gradients that a user still holds as ``.grad`` lie there, they keep their memory and
the arena takes a new one.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ppe_ddp.engine.layout import BucketPlan, ParameterSpec, Plan

_KEPT_LAYOUTS = 8


class Segment(NamedTuple):
    """The memory of one bucket: ``buffer`` is flat, ``slots`` are its members' views of it."""

    buffer: Tensor
    slots: list[Tensor]


class Arena:
    """Owns the flat buffers; gives out the segments of a plan."""

    def __init__(self, specs: Sequence[ParameterSpec]) -> None:
        self._specs = specs
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._layouts: OrderedDict[int, tuple[Plan, list[Segment | None]]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def segments(self, plan: Plan) -> list[Segment | None]:
        """The memory of each bucket of ``plan``; None for one that needs none (adopted, sparse).

        The contents of all other plans' segments are given up.
        """
        known = self._layouts.get(id(plan))
        if known is not None:
            self._layouts.move_to_end(id(plan))
            return known[1]
        for key, numel in plan.arena_numel.items():
            held = self._buffers.get(key)
            if held is None or held.numel() < numel:
                self._buffers[key] = torch.empty(numel, dtype=key[0], device=key[1])
                self._layouts.clear()  # views of the buffer that was too small would keep it alive
        segments = [None if bucket.adopted or bucket.sparse else self._segment(bucket) for bucket in plan.buckets]
        # The plan is kept with its segments, so that its id stays its own.
        self._layouts[id(plan)] = (plan, segments)
        if len(self._layouts) > _KEPT_LAYOUTS:
            self._layouts.popitem(last=False)
        return segments

    def renew(self) -> None:
        """Leave the present buffers to the gradients that lie in them, and start with new ones."""
        self._buffers.clear()
        self._layouts.clear()

    def _segment(self, bucket: BucketPlan) -> Segment:
        buffer = self._buffers[bucket.dtype, bucket.device].narrow(0, bucket.start, bucket.numel)
        return Segment(buffer, slots_of(buffer, bucket, self._specs))


def slots_of(buffer: Tensor, bucket: BucketPlan, specs: Sequence[ParameterSpec]) -> list[Tensor]:
    """Views of the flat ``buffer``, one a member, in its shape and strides."""
    base = buffer.storage_offset()
    return [
        buffer.as_strided(specs[i].shape, specs[i].stride, base + offset)
        for i, offset in zip(bucket.members, bucket.offsets, strict=True)
    ]
