"""Probes of a function, hook or backend: calls with known results, made directly on every rank.

Each probe runs on all ranks together and returns what is wrong, as sentences. It is apart from the laws because
it tells which promise is broken, where a model that trains wrongly only tells that one is.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ppe_ddp.contracts import Division, GradBucket, is_waitable
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.reduction import FunctionReduction, HookReduction, Reduction
from ppe_ddp.functions import average, broadcast

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ppe_ddp.testing.training import Plugs

_Shape = tuple[int, ...]
_BUCKETS: tuple[tuple[_Shape, ...], ...] = (
    ((5,),),
    ((3, 4), (0, 2), (), (7,)),
    ((1,),),
    ((1 << 16,), (33,)),
)
_GUARD = 16
_ROUNDINGS = 16
_SIZES = (1, 5, 100_003)
_MODULUS = 5


def probe_reduction(plugs: Plugs, dtypes: Sequence[torch.dtype], device: str) -> list[str]:
    """Pass known buckets of these dtypes to a reduce function or hook, several in flight at a time.

    A function is also asked in groups that split the world: one of rank 0 alone, one of all others. A hook is
    given no group, so there it would not know.
    """
    problems: list[str] = []
    for group in _groups(split=plugs.hook is None):
        groups = Groups.duplicate(group, shared_memory=True)
        reduction = _reduction(plugs, groups)
        for dtype in dtypes:
            problems.extend(_reduced(reduction, groups, dtype, device, plugs.tolerance))
    return problems


def _reduction(plugs: Plugs, groups: Groups) -> Reduction:
    if plugs.hook is not None:
        return HookReduction(copy.deepcopy(plugs.state), plugs.hook, groups)
    function = plugs.reduce_function or average
    # What our own function declares lets the engine do more in its place; here it is to answer for itself.
    return FunctionReduction(functools.partial(average) if function is average else function, groups)


def _groups(*, split: bool) -> Iterator[ProcessGroup]:
    """All ranks; then this rank's part of a world that is split into rank 0 and the others."""
    everyone = dist.group.WORLD
    assert everyone is not None
    yield everyone
    if split and dist.get_world_size() > 2:
        others = list(range(1, dist.get_world_size()))
        yield dist.new_group([0] if dist.get_rank() == 0 else others, use_local_synchronization=True)


def _reduced(
    reduction: Reduction, groups: Groups, dtype: torch.dtype, device: str, tolerance: float | None
) -> Iterator[str]:
    division = reduction.division(torch.device(device))
    asked = [_KnownBucket(k, shapes, groups, dtype, device, division) for k, shapes in enumerate(_BUCKETS)]
    with torch.no_grad():
        for together in [[one] for one in asked] if reduction.one_at_a_time else [asked]:
            pending = [reduction.start(question.bucket) for question in together]
            for question, work in zip(together, pending, strict=True):
                reduction.finish(question.bucket, work, question.memory)
    members = dist.get_process_group_ranks(groups.parent)
    where = f"a bucket of {dtype} over ranks {members}"
    if len(members) < dist.get_world_size():
        where += " (does it use the group that it is given?)"
    for question in asked:
        yield from (f"{where}: {problem}" for problem in question.problems(tolerance))


class _KnownBucket:
    """A bucket whose mean is known, in memory with guard elements before and after it."""

    def __init__(
        self,
        index: int,
        shapes: Sequence[_Shape],
        groups: Groups,
        dtype: torch.dtype,
        device: str,
        division: Division,
    ) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        count = sum(sizes)
        members = dist.get_process_group_ranks(groups.parent)
        shares = [_numbers(count, dtype, index, rank) for rank in members]
        self._mean = torch.stack([share.double() for share in shares]).mean(0)
        self._guarded = torch.full((count + 2 * _GUARD,), 77.0, dtype=dtype, device=device)
        self._flat = self._guarded[_GUARD : _GUARD + count]
        self._flat.copy_(shares[groups.rank])
        if division is Division.DONE:
            self._flat.mul_(1.0 / groups.world_size)
        starts = [0, *itertools.accumulate(sizes)]
        self.memory = [
            self._flat[start : start + size].view(shape)
            for start, size, shape in zip(starts, sizes, shapes, strict=False)
        ]
        self._parameters = [nn.Parameter(torch.full(shape, 3.0, dtype=dtype, device=device)) for shape in shapes]
        self.bucket = GradBucket.of(
            [view.detach() for view in self.memory],
            buffer=self._flat.detach(),
            parameters=self._parameters,
            names=tuple(f"bucket{index}.{k}" for k in range(len(shapes))),
            index=index,
            is_last=index == len(_BUCKETS) - 1,
            division=division,
        )

    def problems(self, tolerance: float | None) -> Iterator[str]:
        """The errors in the result."""
        result = self.bucket.buffer().detach().reshape(-1).double().cpu()
        largest = float(self._mean.abs().max())
        allowed = (_ROUNDINGS * torch.finfo(self._flat.dtype).eps if tolerance is None else tolerance) * largest
        offset = 0
        for name, gradient in zip(self.bucket.names(), self.memory, strict=True):
            chunk = slice(offset, offset + gradient.numel())
            offset += gradient.numel()
            if not gradient.numel():
                continue
            error = float((result[chunk] - self._mean[chunk]).abs().max())
            if not error <= allowed:
                yield f"{name} is off the mean by {error:.3g}, where {allowed:.3g} is allowed"
        if not ((self._guarded[:_GUARD] == 77).all() and (self._guarded[-_GUARD:] == 77).all()):
            yield f"memory outside of bucket {self.bucket.index()} was written to"
        if not all((parameter == 3).all() for parameter in self._parameters):
            yield f"parameters of bucket {self.bucket.index()} were changed; only gradients may be"


def _numbers(count: int, dtype: torch.dtype, *seeds: int) -> Tensor:
    """Numbers of a rank that every other rank can make too; most are not the same on any two ranks."""
    seed = sum(value * 1009**k for k, value in enumerate(seeds))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(dtype)


def probe_broadcast(plugs: Plugs, dtypes: Sequence[torch.dtype], device: str) -> list[str]:
    """Let a broadcast function copy known tensors of these dtypes, over all ranks and over parts of them."""
    function = plugs.broadcast_function or broadcast
    problems: list[str] = []
    for group in _groups(split=True):
        members = dist.get_process_group_ranks(group)
        for dtype in dtypes:
            tensors = _assorted(dtype, device, dist.get_rank())
            wanted = _assorted(dtype, device, members[0])
            with torch.no_grad():
                work = function(tensors, group)
                if is_waitable(work):
                    work.wait()
                elif work is not None:
                    problems.append(f"it returned {type(work).__name__}, not None, a Work or a Future")
            wrong = [
                f"{tuple(tensor.shape)} (strides {tensor.stride()})"
                for tensor, want in zip(tensors, wanted, strict=True)
                if not torch.equal(tensor, want)
            ]
            if wrong:
                problems.append(
                    f"tensors of {dtype} over ranks {members}: those of shape {', '.join(wrong)} are not those of the "
                    "group's rank 0"
                )
    return problems


def _assorted(dtype: torch.dtype, device: str, rank: int) -> list[Tensor]:
    numbers = [_numbers(math.prod(shape), torch.float64, k, rank) for k, shape in enumerate(_BUCKETS[1])]
    plain = [(number * 8).view(shape) for number, shape in zip(numbers, _BUCKETS[1], strict=True)]
    plain.append((_numbers(12, torch.float64, 9, rank) * 8).view(3, 4).t())
    # Negative numbers have no unsigned counterpart that all platforms agree on.
    return [(tensor if dtype.is_signed else tensor.abs()).to(dtype).to(device) for tensor in plain]


# ---------------------------------------------------------------------- backends


def probe_backend(device: str) -> list[str]:
    """Call every operation that the engine uses on the default process group. All ranks must call this together."""
    probes = (_all_reduce, _in_flight, _copies, _objects, _subgroup)
    return [problem for probe in probes for problem in probe(device)]


def _integers(size: int, dtype: torch.dtype, device: str, rank: int | None = None) -> Tensor:
    """Small integers, so that their sums are exact in every dtype; different on every rank."""
    rank = dist.get_rank() if rank is None else rank
    return ((torch.arange(size) + 2 * rank) % _MODULUS + rank).to(dtype).to(device)


def _everyone(size: int, dtype: torch.dtype, device: str) -> Tensor:
    """The integers of all ranks, by rank."""
    return torch.stack([_integers(size, dtype, device, rank) for rank in range(dist.get_world_size())])


def _sum(tensor: Tensor, ranks: Sequence[int] | None = None) -> Tensor:
    everyone = _everyone(tensor.numel(), torch.float64, tensor.device.type)
    return (everyone if ranks is None else everyone[list(ranks)]).sum(0).to(tensor.dtype)


def _all_reduce(device: str) -> Iterator[str]:
    floating = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    kinds = [("MAX", torch.uint8), ("MAX", torch.int64), ("SUM", torch.int64), *(("SUM", dtype) for dtype in floating)]
    for (name, dtype), size, is_async in itertools.product(kinds, _SIZES, (False, True)):
        tensor = _integers(size, dtype, device)
        work = dist.all_reduce(tensor, getattr(dist.ReduceOp, name), async_op=is_async)
        if is_async:
            work.wait()
        if not torch.equal(tensor, _everyone(size, dtype, device).amax(0) if name == "MAX" else _sum(tensor)):
            yield f"all_reduce({name}) of {size} {dtype}, async_op={is_async}, is wrong"


def _in_flight(device: str) -> Iterator[str]:
    """Several at once, in a group for buckets and one for small messages; a Work tells without blocking if it is done.

    Communication hooks go on from a Work's Future.
    """
    tensors = [_integers(size, torch.float32, device) for size in (*_SIZES, 2)]
    groups = [dist.new_group(list(range(dist.get_world_size())), use_local_synchronization=True) for _ in range(2)]
    works = [dist.all_reduce(tensor, group=groups[k % 2], async_op=True) for k, tensor in enumerate(tensors)]
    for tensor, work in reversed(list(zip(tensors, works, strict=True))):
        if not isinstance(work.is_completed(), bool):
            yield "Work.is_completed() does not return a bool"
        work.wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)  # there wait() only makes the stream wait
        if not work.is_completed():
            yield "Work.is_completed() is False after wait()"
        if not torch.equal(tensor, _sum(tensor)):
            yield "of several all_reduces in flight, in two groups at a time, one is wrong"
    tensor = _integers(5, torch.float32, device)
    future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    if not torch.equal(future.wait(), 2 * _sum(tensor)):
        yield "Work.get_future() does not hold a list of the reduced tensor"


def _copies(device: str) -> Iterator[str]:
    world = range(dist.get_world_size())
    for dtype, size, source in itertools.product((torch.uint8, torch.float32, torch.int64), _SIZES, world):
        tensor = _integers(size, dtype, device)
        dist.broadcast(tensor, group_src=source, async_op=True).wait()
        if not torch.equal(tensor, _integers(size, dtype, device, source)):
            yield f"broadcast of {size} {dtype} from rank {source} is wrong"
    for dtype, size in itertools.product((torch.int64, torch.float32, torch.bfloat16), _SIZES):
        parts = [torch.zeros(size, dtype=dtype, device=device) for _ in world]
        dist.all_gather(parts, _integers(size, dtype, device))
        if not torch.equal(torch.stack(parts), _everyone(size, dtype, device)):
            yield f"all_gather of {size} {dtype} is wrong"


def _objects(device: str) -> Iterator[str]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found: list[object] = [None] * world_size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * 1000 * rank})
    if found != [{"rank": k, "text": "x" * 1000 * k} for k in range(world_size)]:
        yield f"all_gather_object (on {device}) of objects of different sizes is wrong"
    dist.barrier(device_ids=[torch.cuda.current_device()] if device.startswith("cuda") else None)


def _subgroup(device: str) -> Iterator[str]:
    """A group of some ranks, made by these alone, in an order of its own."""
    members = list(range(1, dist.get_world_size()))
    if dist.get_rank() not in members:
        # torch names such a group by how many groups a process has: equally many on all ranks, for those to come
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return
    group = dist.new_group(members, use_local_synchronization=True)
    if dist.get_world_size(group) != len(members) or dist.get_rank(group) != dist.get_rank() - 1:
        yield f"new_group({members}, use_local_synchronization=True) has other ranks than it was asked for"
    tensor = _integers(5, torch.float32, device)
    wanted = _sum(tensor, members)
    dist.all_reduce(tensor, group=group)
    if not torch.equal(tensor, wanted):
        yield f"all_reduce in a group of ranks {members} is wrong"
    dist.broadcast(tensor, group=group, group_src=len(members) - 1)
    if not torch.equal(tensor, wanted):
        yield f"broadcast in a group of ranks {members} is wrong"
