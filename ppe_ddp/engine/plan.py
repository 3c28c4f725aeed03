"""Bucket plans: which gradients are reduced together, in which order, at which offsets. Pure, no communication.

    agreed mask     1 0 1 1 0 1           the parameters that have a gradient on some rank
    order           5 3 2 0               these parameters, as backward reaches them
    buckets         [5 3] [2] [0]         packed up to a size; a large gradient alone

A plan depends only on the mask, the nodes, the order, the parameters' specifications and the packing. So ranks that
agree on these compute the same plan and issue the same collectives.

On several nodes, gradients that exist on one node only have buckets of their own. They need no sum over the nodes:
their node sends them, which is half the traffic. Where ranks share no memory, each rank counts as a node. The same MAX
over the ranks finds the node:

    a rank of node k, of n nodes, sends     1 + k, n - k    for a gradient that it has
                                            0, 0            for a gradient that it lacks
    the maxima of all ranks are             0, 0            if no rank has it
                                            1 + k, n - k    if only ranks of node k have it
                                            a, b            if several nodes have it: a + b > n + 1
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import compress

import torch
from torch import Tensor

_TRIGGER_BYTES = 1 << 16  # a gradient of this size takes longer to compute than a check of the buckets
_TRIGGERS = 16  # launch triggers a bucket: a bucket is launched late by at most this fraction of its size
_BUCKET_CAP_MB = 4.0
_GPU_BUCKET_CAP_MB = 25.0  # the default of torch's DDP
_ADOPTED_FROM = 8  # buckets: a gradient of this size (32 MiB by default) has a bucket of its own
_KEPT_PLANS = 32  # a model may switch between so many sets of gradients without new plans


@dataclass(frozen=True)
class ParameterSpec:
    """The properties of one parameter that all ranks must agree on."""

    name: str  # the name in the wrapped module
    shape: tuple[int, ...]  # of the parameter and its gradient
    stride: tuple[int, ...]  # of the gradient: the parameter's own if that is dense, else row-major
    dtype: torch.dtype  # of the parameter and its gradient
    device: torch.device  # of the gradient; its index may differ from rank to rank
    sparse: bool = False  # whether the gradient is a sparse tensor (an embedding with ``sparse=True``)
    placements: str = ""  # of a DTensor, for messages; the other fields describe its local tensor

    @cached_property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """The size of a dense gradient in bytes."""
        return self.numel * self.dtype.itemsize

    @cached_property
    def is_row_major(self) -> bool:
        """Whether the elements of a gradient lie in the order of their indices."""
        return is_packed(zip(reversed(self.stride), reversed(self.shape), strict=True))

    def described(self) -> str:
        """The properties that must be the same on all ranks, as text for fingerprints and messages."""
        # A scalar and a vector of one element give the same message; programs for pytorch-pfn-extras mix them.
        shape, stride = self.shape or (1,), self.stride or (1,)
        layout = "sparse" if self.sparse else f"strides {stride}"
        part = f", {self.placements}" if self.placements else ""
        return f"{self.name!r} {self.dtype} {shape} {layout} on {self.device.type}{part}"


@dataclass(frozen=True)
class Packing:
    """How gradients are packed into buckets."""

    # A bucket is closed when it has reached this size. Small buckets are launched early; large ones pay the latency of
    # a message less often.
    bucket_bytes: int
    adopt_bytes: int  # a gradient of at least this size has a bucket of its own
    # A bucket always has the same parameters, and is sent whole if any of them has a gradient. This costs bytes; hooks
    # that keep state by bucket index need it.
    fixed: bool = False
    first_bytes: tuple[int, ...] = ()  # sizes of the buckets that are launched first, instead of ``bucket_bytes``
    # The first steps are measured to choose ``bucket_bytes`` (``negotiation.py``).
    measured: bool = False

    @classmethod
    def of(
        cls,
        caps_mb: Sequence[float] | None,
        specs: Sequence[ParameterSpec] = (),
        *,
        fixed: bool = False,
        measured: bool = False,
    ) -> Packing:
        """The packing for buckets of these sizes in MiB, in launch order; the last size is for all further buckets.

        None is the default, which depends on the parameters' device. With ``measured``, CPU parameters and the default,
        the size is measured.
        """
        on_gpu = any(spec.device.type == "cuda" for spec in specs)
        measured = measured and caps_mb is None and not on_gpu and not fixed
        if caps_mb is None:
            caps_mb = (_GPU_BUCKET_CAP_MB if on_gpu else _BUCKET_CAP_MB,)
        *first_bytes, bucket_bytes = (int(cap * 2**20) for cap in caps_mb)
        largest = max(bucket_bytes, *first_bytes, 0)
        return cls(bucket_bytes, _ADOPTED_FROM * largest, fixed, tuple(first_bytes), measured)

    def capacity(self, index: int) -> int:
        """The size at which the bucket that is launched as number ``index`` is closed."""
        return self.first_bytes[index] if index < len(self.first_bytes) else self.bucket_bytes


@dataclass(frozen=True)
class BucketPlan:
    """One bucket."""

    index: int  # its number, ``GradBucket.index()``
    members: tuple[int, ...]  # parameter indices in the order in which they lie in the bucket
    offsets: tuple[int, ...]  # the start of each member, in elements from the start of the bucket
    numel: int  # its size in elements
    dtype: torch.dtype  # of all members
    device: torch.device  # of all members
    sparse: bool  # whether its only member is sparse
    row_major: bool  # whether all members are row-major
    # The only node on which its gradients exist; None if several nodes have some, or nodes are not known.
    node: int | None = None

    @cached_property
    def nbytes(self) -> int:
        """The size of the message in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Plan:
    """The buckets of one backward, in launch order. Plans are cached, and compared by identity."""

    present: bytes  # one byte a parameter: whether some rank has its gradient
    buckets: tuple[BucketPlan, ...]  # in the order in which every rank launches them
    bucket_of: dict[int, int]  # from parameter index to position in ``buckets``
    last: int  # position of the last bucket that a function or hook gets, neither sparse nor empty; -1 if none


def make_plan(
    present: bytes, specs: Sequence[ParameterSpec], order: Sequence[int], packing: Packing, nodes: bytes = b""
) -> Plan:
    """Plan the buckets for the gradients in ``present``: one byte a parameter, nonzero if some rank has the gradient.

    ``order`` has all parameter indices, as backward is expected to reach them. ``nodes`` has one byte a parameter: 1 +
    the only node that has the gradient, else 0. It is empty if nodes are not known, or do not matter.
    """
    chosen = order if packing.fixed else [i for i in order if present[i]]
    nodes = nodes if nodes and not packing.fixed else bytes(len(specs))
    groups = _pack(chosen, specs, packing, nodes)
    buckets: list[BucketPlan] = []
    for index, members in enumerate(groups):
        if not any(present[i] for i in members):
            continue  # only a fixed bucket can be empty
        buckets.append(_place(index, members, specs, packing, nodes[members[0]] - 1))
    bucket_of = {i: k for k, bucket in enumerate(buckets) for i in bucket.members}
    last = max((k for k, bucket in enumerate(buckets) if bucket.numel and not bucket.sparse), default=-1)
    return Plan(present, tuple(buckets), bucket_of, last)


def _pack(chosen: Sequence[int], specs: Sequence[ParameterSpec], packing: Packing, nodes: bytes) -> list[list[int]]:
    """Group parameter indices; groups are in the order of their last members in ``chosen``."""
    groups: list[list[int]] = []
    open_groups: OrderedDict[tuple[torch.dtype, torch.device, int], list[int]] = OrderedDict()
    sizes: dict[tuple[torch.dtype, torch.device, int], int] = {}
    for i in chosen:
        spec = specs[i]
        if spec.sparse or spec.nbytes >= packing.adopt_bytes:
            groups.append([i])
            continue
        key = (spec.dtype, spec.device, nodes[i])
        open_groups.setdefault(key, []).append(i)
        open_groups.move_to_end(key)
        size = sizes.get(key, 0) + spec.nbytes
        if size >= packing.capacity(len(groups)):
            groups.append(open_groups.pop(key))
            size = 0
        sizes[key] = size
    groups.extend(open_groups.values())
    return groups


def _place(index: int, members: list[int], specs: Sequence[ParameterSpec], packing: Packing, node: int) -> BucketPlan:
    """Give the members their offsets; ``node`` is -1 if they are not on one node only."""
    first = specs[members[0]]
    row_major = all(specs[i].is_row_major for i in members)
    if row_major and not packing.fixed:
        members = _alike_together(members, specs)
    offsets, numel = [], 0
    for i in members:
        offsets.append(numel)
        numel += specs[i].numel
    return BucketPlan(
        index,
        tuple(members),
        tuple(offsets),
        numel,
        first.dtype,
        first.device,
        first.sparse,
        row_major,
        node if node >= 0 else None,
    )


def _alike_together(members: Sequence[int], specs: Sequence[ParameterSpec]) -> list[int]:
    """Put members next to each other that one call can concatenate: their shapes are equal except in dimension 0."""
    alike: dict[object, list[int]] = {}
    for i in members:
        shape = specs[i].shape
        alike.setdefault(shape[1:] if shape else None, []).append(i)
    return [i for same in alike.values() for i in same]


class Planner:
    """Makes plans for agreed masks, and caches the most recently used plans."""

    def __init__(self, specs: Sequence[ParameterSpec], packing: Packing) -> None:
        self.specs = tuple(specs)
        self.packing = packing
        self._learned: set[int] = set()
        # Until the order is learned: backward reaches parameters roughly in the reverse order of registration.
        self._set_order(list(range(len(self.specs)))[::-1])

    def repack(self, packing: Packing) -> None:
        """Plan by ``packing`` from now on."""
        self.packing = packing
        self._set_order(self.order)

    def has_unlearned(self, present: bytes) -> bool:
        """Whether ``present`` has a parameter whose place in the order is not learned yet.

        Always False for fixed buckets: another order would change their parameters.
        """
        return not self.packing.fixed and any(here and i not in self._learned for i, here in enumerate(present))

    def learn(self, positions: Sequence[float | None]) -> None:
        """Set the order by agreed arrival positions in [0, 1), None for parameters that arrived on no rank.

        Every rank must pass the same numbers.
        """
        count = len(self.specs)
        guess = {i: place / count for place, i in enumerate(self.order)}
        keys = [guess[i] if position is None else position for i, position in enumerate(positions)]
        self._learned.update(i for i, position in enumerate(positions) if position is not None)
        self._set_order(sorted(range(count), key=lambda i: (keys[i], -i)))

    @property
    def learned(self) -> list[int]:
        """The parameters whose places in the order are learned."""
        return sorted(self._learned)

    def restore(self, order: Sequence[int], learned: Sequence[int]) -> None:
        """Set a saved order; every rank must pass the same."""
        self._learned = set(learned)
        self._set_order(list(order))

    def _set_order(self, order: list[int]) -> None:
        if self.packing.fixed:  # the same after a failure, where the ranks forget what they have learned
            order = list(range(len(self.specs)))[::-1]
        self.order = order
        specs, packing = self.specs, self.packing
        self.plan = lru_cache(_KEPT_PLANS)(lambda present, nodes=b"": make_plan(present, specs, order, packing, nodes))
        self.learned_digest = fingerprint([f"{order} {self.learned}"]).hex()
        """The digest of the order, and of which places in it are learned."""
        self.launch_triggers: set[int] = set()
        """The parameters at whose arrival the reducer launches the buckets that are ready: all large parameters, and
        some of the small ones in each bucket."""
        most = max(_TRIGGER_BYTES, self.packing.bucket_bytes // _TRIGGERS)
        size = 0
        for i in order:
            size += self.specs[i].nbytes
            if size >= most or self.specs[i].nbytes >= _TRIGGER_BYTES:
                self.launch_triggers.add(i)
                size = 0


def fingerprint(lines: Sequence[str]) -> bytes:
    """Sixteen bytes that differ when the lines differ."""
    digest = hashlib.blake2b(digest_size=16)
    for line in lines:
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.digest()


_MOST_NODES = 254  # that fit into a byte
_IS_PRESENT = bytes([0, *[1] * 255])


@dataclass(frozen=True)
class NodeMasks:
    """Encodes and decodes masks that tell the node of each gradient."""

    node: int  # the number of this rank's node
    count: int  # the number of nodes

    @classmethod
    def of(cls, nodes: Sequence[Sequence[int]], rank: int) -> NodeMasks | None:
        """The masks of ``rank`` if each of ``nodes`` has these ranks; None for one node, or too many."""
        if not 1 < len(nodes) <= _MOST_NODES:
            return None
        return cls(next(number for number, ranks in enumerate(nodes) if rank in ranks), len(nodes))

    @cached_property
    def tables(self) -> tuple[bytes, bytes]:
        """Tables for ``bytes.translate``: from a nonzero byte for each gradient here to the two fields of a mask."""
        return bytes([0, *[1 + self.node] * 255]), bytes([0, *[self.count - self.node] * 255])

    def read(self, first: bytes, second: bytes, sizes: Sequence[int]) -> tuple[bytes, bytes]:
        """The agreed mask, and for each parameter 1 + the only node that has its gradient, else 0.

        Args:
            first: The maxima of the first field.
            second: The maxima of the second field.
            sizes: The bytes of each gradient; 0 if its node makes no difference.
        """
        present = first.translate(_IS_PRESENT)
        only = self.count + 1
        nodes = bytes(a if a + b == only and size else 0 for a, b, size in zip(first, second, sizes, strict=True))
        return present, nodes if self._gains(nodes, sizes) else bytes(len(nodes))

    def _gains(self, nodes: bytes, sizes: Sequence[int]) -> bool:
        """Whether sending by nodes is faster than summing: the root of a broadcast tree sends several times."""
        each = [sum(compress(sizes, nodes.translate(_only(number)))) for number in range(1, self.count + 1)]
        times = (self.count - 1).bit_length()
        return 0 < max(each) * times * self.count <= 2 * (self.count - 1) * sum(each)


@cache
def _only(number: int) -> bytes:
    return bytes(int(value == number) for value in range(256))


def is_packed(dimensions: Iterable[tuple[int, int]]) -> bool:
    """Whether dimensions, given as (stride, size) from the innermost on, have neither holes nor overlap."""
    expected = 1
    for stride, size in dimensions:
        if size != 1 and stride != expected:
            return False
        expected *= max(size, 1)
    return True


def is_non_overlapping_and_dense(tensor: Tensor) -> bool:
    """Whether the tensor fills its memory without holes or overlap, for some order of its dimensions."""
    return is_packed(sorted(zip(tensor.stride(), tensor.shape, strict=True)))
