"""Probes of a torch.distributed backend: every operation that the engine uses, with known results.

Owns the collectives, dtypes and groups that this library relies on, a generator for each; it is apart from the
probes of functions because a backend is asked in torch's words, not in ours.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch import distributed as dist

__all__ = ["probe_backend"]

_SIZES = (1, 5, 100_003)
_MODULUS = 5


def probe_backend(device: str) -> list[str]:
    """Call every operation that the engine uses on the default process group. All ranks must call this together.

    Args:
        device: Of tensors.
    """
    probes = (
        _all_reduce,
        _in_flight,
        _futures,
        _broadcast,
        _all_gather,
        _objects,
        _barrier,
        _two_groups,
        _subgroup,
    )
    return [problem for probe in probes for problem in probe(device)]


def _numbers(size: int, dtype: torch.dtype, device: str, rank: int | None = None) -> Tensor:
    """Small integers, so that their sums are exact in every dtype; different on every rank."""
    rank = dist.get_rank() if rank is None else rank
    return ((torch.arange(size) + 2 * rank) % _MODULUS + rank).to(dtype).to(device)


def _everyone(size: int, dtype: torch.dtype, device: str) -> Tensor:
    numbers = [_numbers(size, dtype, device, rank) for rank in range(dist.get_world_size())]
    return torch.stack(numbers)


def _all_reduce(device: str) -> Iterator[str]:
    kinds = [
        (torch.uint8, dist.ReduceOp.MAX),
        (torch.int64, dist.ReduceOp.MAX),
        (torch.int64, dist.ReduceOp.SUM),
        (torch.float32, dist.ReduceOp.SUM),
        (torch.float64, dist.ReduceOp.SUM),
        (torch.bfloat16, dist.ReduceOp.SUM),
        (torch.float16, dist.ReduceOp.SUM),
    ]
    for dtype, operation in kinds:
        for size in _SIZES:
            everyone = _everyone(size, dtype, device)
            takes_largest = operation == dist.ReduceOp.MAX
            wanted = everyone.amax(0) if takes_largest else everyone.double().sum(0).to(dtype)
            for is_async in (False, True):
                tensor = _numbers(size, dtype, device)
                work = dist.all_reduce(tensor, operation, async_op=is_async)
                if is_async:
                    work.wait()
                if not torch.equal(tensor, wanted):
                    name = "MAX" if takes_largest else "SUM"
                    yield f"all_reduce({name}) of {size} {dtype}, async_op={is_async}, is wrong"


def _in_flight(device: str) -> Iterator[str]:
    """Several at once, waited for in order; a Work tells whether it is done without blocking."""
    tensors = [_numbers(size, torch.float32, device) for size in (*_SIZES, 2)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for tensor, work in zip(tensors, works, strict=True):
        if not isinstance(work.is_completed(), bool):
            yield "Work.is_completed() does not return a bool"
        work.wait()
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)  # there wait() only makes the stream wait
        if not work.is_completed():
            yield "Work.is_completed() is False after wait()"
        if not torch.equal(tensor, _everyone(tensor.numel(), torch.float32, device).sum(0)):
            yield "of several all_reduces in flight, one is wrong"


def _futures(device: str) -> Iterator[str]:
    """Communication hooks go on from a Work's Future."""
    tensor = _numbers(5, torch.float32, device)
    future = dist.all_reduce(tensor, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    if not torch.equal(future.wait(), 2 * _everyone(5, torch.float32, device).sum(0)):
        yield "Work.get_future() does not hold a list of the reduced tensor"


def _broadcast(device: str) -> Iterator[str]:
    for dtype in (torch.uint8, torch.float32, torch.int64):
        for source in range(dist.get_world_size()):
            for size in _SIZES:
                tensor = _numbers(size, dtype, device)
                dist.broadcast(tensor, group_src=source, async_op=True).wait()
                if not torch.equal(tensor, _numbers(size, dtype, device, source)):
                    yield f"broadcast of {size} {dtype} from rank {source} is wrong"


def _all_gather(device: str) -> Iterator[str]:
    for dtype in (torch.int64, torch.float32, torch.bfloat16):
        for size in _SIZES:
            parts = [torch.zeros(size, dtype=dtype, device=device) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, _numbers(size, dtype, device))
            if not torch.equal(torch.stack(parts), _everyone(size, dtype, device)):
                yield f"all_gather of {size} {dtype} is wrong"


def _objects(device: str) -> Iterator[str]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found: list[object] = [None] * world_size
    dist.all_gather_object(found, {"rank": rank, "text": "x" * 1000 * rank})
    if found != [{"rank": k, "text": "x" * 1000 * k} for k in range(world_size)]:
        yield f"all_gather_object (on {device}) of objects of different sizes is wrong"


def _barrier(device: str) -> Iterator[str]:
    yield from ()
    if device.startswith("cuda"):
        dist.barrier(device_ids=[torch.cuda.current_device()])
    else:
        dist.barrier()


def _two_groups(device: str) -> Iterator[str]:
    """The engine has a group for buckets and one for small messages, both at work at a time."""
    groups = [dist.new_group(list(range(dist.get_world_size())), use_local_synchronization=True) for _ in range(2)]
    tensors = [_numbers(size, torch.float32, device) for size in (100_003, 5)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor, group in zip(tensors, groups, strict=True)]
    for tensor, work in reversed(list(zip(tensors, works, strict=True))):
        work.wait()
        if not torch.equal(tensor, _everyone(tensor.numel(), torch.float32, device).sum(0)):
            yield "all_reduces in two groups at a time are wrong"


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
    tensor = _numbers(5, torch.float32, device)
    dist.all_reduce(tensor, group=group)
    wanted = torch.stack([_numbers(5, torch.float32, device, rank) for rank in members]).sum(0)
    if not torch.equal(tensor, wanted):
        yield f"all_reduce in a group of ranks {members} is wrong"
    dist.broadcast(tensor, group=group, group_src=len(members) - 1)
    if not torch.equal(tensor, wanted):
        yield f"broadcast in a group of ranks {members} is wrong"
