"""Lays gradients out in buffers, cuts these into buckets, and allocates them. No communication.

    parameters      0 1 2 3 4 5 6           as registered; those of one kind share a buffer
    buffer          | 6 5 4 . | 3 2 | 1 0 . |   in reverse, as backward reaches them; "." pads
    shares          |  0 |  1 | 0| 1| 0 | 1 |   each bucket divides by the number of ranks

A kind is the ranks that average it (all data-parallel ones, or those with the same experts), the dtype of the
parameter, that of the gradient, and the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from ppe_ddp.engine.plan import BucketPlan, Plan

if TYPE_CHECKING:
    import torch


_TICK_ELEMENTS = 1 << 14


@dataclass(frozen=True)
class BufferKind:
    """The properties that the gradients of one buffer share."""

    reduction_group: int  # 0 for dense parameters, 1 for experts, which other ranks average
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Item:
    """One trainable parameter."""

    index: int  # among all parameters of the module
    numel: int
    kind: BufferKind
    alone: bool = False  # it needs a bucket of its own, so that other pipeline stages shard it in the same way
    row_major: bool = True


@dataclass(frozen=True)
class BucketRange:
    """A range of a buffer that is reduced as one bucket."""

    plan: BucketPlan  # offsets are from the start of the range; the index counts the buckets of the module as sent
    buffer: int  # its number
    reduction_group: int
    start: int  # the first element in the buffer
    padded: int  # elements with padding; divides by the number of ranks


@dataclass(frozen=True)
class BufferLayout:
    """The buffers of one module."""

    kinds: tuple[BufferKind, ...]  # of each buffer
    sizes: tuple[int, ...]  # of each buffer, in elements
    buckets: tuple[BucketRange, ...]  # of all buffers, in the order in which every rank sends them
    bucket_of: dict[int, int]  # parameter index to position in ``buckets``
    launch_triggers: frozenset[int]  # the parameters at whose arrival the reducer launches the buckets that are ready

    def plan(self, present: bytes) -> Plan:
        """The buckets with a gradient on some rank; ``present`` has one byte a parameter, 0 where there is none."""
        chosen = tuple(b.plan for b in self.buckets if any(present[i] for i in b.plan.members))
        bucket_of = {i: k for k, bucket in enumerate(chosen) for i in bucket.members}
        return Plan(present, chosen, bucket_of, len(chosen) - 1)


def lay_out(items: Sequence[Item], *, bucket_size: int | None, divisors: Sequence[int]) -> BufferLayout:
    """Lay out buffers and buckets of the trainable parameters, in the order of their registration.

    A bucket is closed after ``bucket_size`` elements; with None there is one a buffer. ``divisors``: what the size of a
    bucket must divide by, for each reduction group.
    """
    reverse = list(reversed(items))
    kinds = tuple(dict.fromkeys(item.kind for item in reverse))
    sizes: list[int] = []
    drafts: list[BucketRange] = []
    for number, kind in enumerate(kinds):
        start = 0
        for members in _packed([item for item in reverse if item.kind == kind], bucket_size):
            drafts.append(_placed(members, number, start, divisors[kind.reduction_group]))
            start += drafts[-1].padded
        sizes.append(start)
    drafts.sort(key=lambda draft: -draft.plan.members[-1])  # in the order in which their last gradients arrive
    buckets = tuple(replace(draft, plan=replace(draft.plan, index=k)) for k, draft in enumerate(drafts))
    bucket_of = {i: k for k, bucket in enumerate(buckets) for i in bucket.plan.members}
    ends = accumulate(item.numel for item in reverse)
    ticks = {end // _TICK_ELEMENTS: item.index for item, end in zip(reverse, ends, strict=True)}
    triggers = frozenset([*ticks.values(), *(bucket.plan.members[-1] for bucket in buckets)])
    return BufferLayout(kinds, tuple(sizes), buckets, bucket_of, triggers)


def _packed(items: Sequence[Item], bucket_size: int | None) -> Iterator[list[Item]]:
    members: list[Item] = []
    size = 0
    for item in items:
        if item.alone and members:
            yield members
            members, size = [], 0
        members.append(item)
        size += item.numel
        if item.alone or (bucket_size is not None and size >= bucket_size):
            yield members
            members, size = [], 0
    if members:
        yield members


def _placed(members: Sequence[Item], buffer: int, start: int, divisor: int) -> BucketRange:
    *offsets, numel = accumulate((item.numel for item in members), initial=0)
    kind = members[0].kind
    plan = BucketPlan(
        index=0,
        members=tuple(item.index for item in members),
        offsets=tuple(offsets),
        numel=numel,
        dtype=kind.grad_dtype,
        device=kind.device,
        sparse=False,
        row_major=all(item.row_major for item in members),
    )
    return BucketRange(plan, buffer, kind.reduction_group, start, -(-numel // divisor) * divisor)
