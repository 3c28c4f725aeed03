"""Checks of every collective of the backend `mpi4py`, with every dtype and operation; run by mpi_checks.py."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import ReduceOp

from mpi_check_kit import (
    DTYPES,
    LARGE,
    assert_same,
    check,
    data,
    expected,
    is_over_mpi,
    ops_of,
    options,
    reductions,
    variants,
)

# torch 2.13 deprecates the older names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@check(*DTYPES)
def all_reduce(dtype_name, ops=None):
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, what, tensors, wanted, exact in reductions(DTYPES[dtype_name], size, ops):
        mine = tensors[rank].clone(memory_format=torch.preserve_format)
        dist.group.WORLD.allreduce([mine], options(dist.AllreduceOptions(), name)).wait()
        assert_same(mine, wanted, what, exact=exact)


@check(*DTYPES)
def reduce(dtype_name, ops=None):
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, what, tensors, wanted, exact in reductions(DTYPES[dtype_name], size, ops):
        mine, root = tensors[rank].clone(memory_format=torch.preserve_format), size - 1
        made = options(dist.ReduceOptions(), name)
        made.rootRank = root
        dist.group.WORLD.reduce([mine], made).wait()
        assert_same(mine, wanted if rank == root else tensors[rank], what, exact=exact)


@check(*DTYPES)
def reduce_scatter(dtype_name, ops=None):
    """List and tensor forms, where rank i's part is the i-th of `size` variants of the data."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype = DTYPES[dtype_name]
    for name in ops_of(dtype) if ops is None else ops:
        for shape in ((3, 4), (0,), LARGE):
            parts = [[data(dtype, shape, (name, part), reduction) for part in range(size)] for reduction in range(size)]
            wanted = expected([parts[reduction][rank] for reduction in range(size)], name)
            exact, what = name not in ("AVG", "PRODUCT"), f"{name} of {dtype}, shape {shape}"
            made = options(dist.ReduceScatterOptions(), name)
            out = torch.empty(shape, dtype=dtype)
            dist.group.WORLD.reduce_scatter([out], [parts[rank]], made).wait()
            assert_same(out, wanted, what, exact=exact)
            strided = torch.empty(shape[::-1], dtype=dtype).t() if len(shape) == 2 else torch.empty(shape, dtype=dtype)
            source = torch.stack(parts[rank])
            dist.group.WORLD.reduce_scatter_single(strided, source, made).wait()
            assert_same(strided, wanted, f"{what}, tensor form", exact=exact)
            assert_same(source, torch.stack(parts[rank]), f"{what}, its input")


@check(*DTYPES)
def moving(dtype_name):
    """Broadcast, all-gather, gather, scatter and all-to-all in all their forms."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype = DTYPES[dtype_name]
    for what, tensors in variants(dtype, "moving", size, shapes=((), (5,), (0,), LARGE)):
        mine, root = tensors[rank], size - 1
        moved = mine.clone(memory_format=torch.preserve_format)
        dist.broadcast(moved, root)
        assert_same(moved, tensors[root], f"broadcast {what}")
        gathered = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(gathered, mine)
        for one, wanted in zip(gathered, tensors, strict=True):
            assert_same(one, wanted, f"all_gather {what}")
        gathered = [torch.empty_like(mine) for _ in range(size)]
        dist.gather(mine, gathered if rank == root else None, dst=root)
        if rank == root:
            for one, wanted in zip(gathered, tensors, strict=True):
                assert_same(one, wanted, f"gather {what}")
        own = torch.empty_like(mine)
        dist.scatter(own, tensors if rank == root else None, src=root)
        assert_same(own, tensors[rank], f"scatter {what}")
        swapped = [torch.empty_like(mine) for _ in range(size)]
        dist.all_to_all(swapped, [mine] * size)
        for one, wanted in zip(swapped, tensors, strict=True):
            assert_same(one, wanted, f"all_to_all {what}")
        into = torch.empty((size, *mine.shape), dtype=dtype)
        all_gather_single(into, mine)
        for one, wanted in zip(into, tensors, strict=True):
            assert_same(one, wanted, f"all_gather_single {what}")


@check()
def all_gather_of_different_sizes():
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [torch.empty(2 * index + 1) for index in range(size)]
    dist.all_gather(gathered, torch.full((2 * rank + 1,), float(rank)))
    assert [one.tolist() for one in gathered] == [[float(index)] * (2 * index + 1) for index in range(size)]


@check()
def reduce_scatter_of_different_sizes():
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        out = torch.empty(rank + 1, dtype=dtype)
        dist.reduce_scatter(out, [torch.full((index + 1,), float(index + 1), dtype=dtype) for index in range(size)])
        assert out.tolist() == [float(size * (rank + 1))] * (rank + 1)


@check()
def all_to_all_of_different_sizes():
    rank, size = dist.get_rank(), dist.get_world_size()
    send = torch.cat([torch.full((receiver + 1, 2), 10.0 * rank + receiver) for receiver in range(size)])
    out = torch.empty((rank + 1) * size, 2)
    dist.all_to_all_single(out, send, [rank + 1] * size, [receiver + 1 for receiver in range(size)])
    wanted = torch.cat([torch.full((rank + 1, 2), 10.0 * reduction + rank) for reduction in range(size)])
    assert_same(out, wanted, "uneven")
    even = torch.empty(size)
    dist.all_to_all_single(even, torch.arange(size) + 100.0 * rank)
    assert_same(even, torch.arange(size) * 100.0 + rank, "even")


@check()
def coalesced():
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    tensors = [torch.full((3,), rank + 1.0), torch.full((2, 2), 2.0 * rank)]
    group.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions()).wait()
    assert_same(tensors[0], torch.full((3,), size * (size + 1) / 2), "allreduce_coalesced")
    assert_same(tensors[1], torch.full((2, 2), float(size * (size - 1))), "allreduce_coalesced")
    for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"):
        outputs = [torch.empty(size * 2), torch.empty(size)]
        getattr(group, name)(outputs, [torch.full((2,), float(rank)), torch.tensor([rank + 0.5])]).wait()
        assert_same(outputs[0], torch.arange(float(size)).repeat_interleave(2), name)
        assert_same(outputs[1], torch.arange(size) + 0.5, name)
    for name in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"):
        outputs = [torch.empty(2), torch.empty(1)]
        inputs = [torch.ones(2 * size), torch.arange(float(size))]
        getattr(group, name)(outputs, inputs, dist.ReduceScatterOptions()).wait()
        assert_same(outputs[0], torch.full((2,), float(size)), name)
        assert_same(outputs[1], torch.tensor([float(size * rank)]), name)
    lists = [[torch.empty(2), torch.empty(1)] for _ in range(size)]
    group.allgather_coalesced(lists, [torch.full((2,), float(rank)), torch.tensor([-float(rank)])]).wait()
    for index, (first, second) in enumerate(lists):
        assert first.tolist() == [index, index]
        assert second.tolist() == [-index]
    with dist._coalescing_manager():
        for tensor in tensors:
            tensor.fill_(1)
            dist.all_reduce(tensor)
    assert tensors[0].tolist() == [size] * 3


@check(ranks=2, most=2)
def functional_collectives():
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    total = functional.all_reduce(torch.tensor([rank + 1.0]), "sum", group)
    assert total.tolist() == [size * (size + 1) / 2]
    gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
    scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
    assert gather(torch.tensor([rank]), 0, group).tolist() == list(range(size))
    assert scatter(torch.arange(size), "sum", 0, group).tolist() == [size * rank]
    swapped = functional.all_to_all_single(torch.arange(size) + 10 * rank, None, None, group)
    assert swapped.tolist() == [10 * other + rank for other in range(size)]
    assert functional.broadcast(torch.tensor([rank]), size - 1, group).tolist() == [size - 1]
    assert functional.all_reduce(torch.tensor([rank + 1j]), "sum", group).tolist() == [
        size * (size - 1) / 2 + size * 1j
    ]


@check()
def conjugate_views():
    rank, size = dist.get_rank(), dist.get_world_size()
    view = torch.tensor([rank + 1j, 2.0]).conj()
    out = [torch.empty(2, dtype=torch.complex64) for _ in range(size)]
    dist.group.WORLD.allgather([out], [view]).wait()
    assert [one[0].item() for one in out] == [index - 1j for index in range(size)]
    dist.group.WORLD.allreduce([view]).wait()
    assert view[0].item() == size * (size - 1) / 2 - size * 1j


@check()
def parameters_that_require_grad():
    rank, size = dist.get_rank(), dist.get_world_size()
    weight = torch.nn.Parameter(torch.full((4, 3), float(rank)))
    dist.broadcast(weight, 0)
    assert weight.detach().eq(0).all()
    with torch.no_grad():
        dist.all_reduce(weight.fill_(1.0).t(), op=ReduceOp.AVG)
        dist.all_reduce(weight.t())
    assert weight.detach().eq(size).all()


@check()
def outputs_that_are_part_of_the_input():
    """FSDP2 gathers from a slice of the output, and torch allows the same for reduce-scatter."""
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.full((size, 3), -1.0)
    whole[rank] = rank
    all_gather_single(whole, whole[rank])
    assert whole[:, 1].tolist() == list(range(size))
    whole = torch.arange(size * 3.0)
    reduce_scatter_single(whole[3 * rank : 3 * rank + 3], whole)
    assert whole[3 * rank : 3 * rank + 3].tolist() == [size * (3.0 * rank + column) for column in range(3)]


@check()
def one_element_with_any_stride():
    """Such a tensor is contiguous to torch, which keeps the stride in views."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.float32, torch.complex64):

        def one(dtype=dtype):
            return torch.full((1, 6), rank + 1, dtype=dtype)[:, 0]

        total, sent, parts = one(), one(), [one() for _ in range(size)]
        dist.group.WORLD.allreduce([total]).wait()
        dist.broadcast(sent, size - 1)
        dist.all_gather(parts, one())
        whole = torch.zeros(size, dtype=dtype)
        all_gather_single(whole, one())
        assert total.item() == size * (size + 1) / 2
        assert sent.item() == size
        assert torch.cat(parts).tolist() == whole.tolist() == list(range(1, size + 1))
        dist.broadcast(torch.zeros(0, 6)[:, 0], 0)


@check()
def work_and_future():
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work.wait()
    assert work.wait(timedelta(seconds=1))
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    size = dist.get_world_size()
    assert work.result()[0].tolist() == [size] * 3
    assert work.get_future().then(lambda future: future.value()[0] * 2).wait().tolist() == [2 * size] * 3
    assert dist.barrier(async_op=True).get_future().wait() is None


@check()
def extremes_of_nan():
    """NaN on all ranks, or gloo's number on all: what one rank decides by them, the others do, too."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        for dtype in (torch.float64, torch.bfloat16):
            mine = torch.ones(size, dtype=dtype)
            mine[rank] = float("nan")
            dist.all_reduce(mine, op)
            of_all = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(of_all, mine)
            assert all(torch.equal(one.isnan(), mine.isnan()) for one in of_all)
            assert mine.isnan().all() or not is_over_mpi()


@check()
def errors():
    rank, size = dist.get_rank(), dist.get_world_size()
    own = [torch.ones(4 + (other == rank)) for other in range(size)]
    for wrong in (
        lambda: dist.all_to_all([torch.empty(4)] * size, own),
        lambda: dist.gather(torch.ones(4), own, dst=rank),
        lambda: all_gather_single(torch.empty(7), torch.empty(6)),
        lambda: reduce_scatter_single(torch.empty(6), torch.empty(7)),
        lambda: dist.all_to_all_single(torch.empty(3), torch.empty(3), [1] * 9, [1] * 9),
        lambda: dist.send(torch.ones(1), 1 if dist.get_rank() == 0 else 0, tag=1 << 40),
    ):
        with pytest.raises(ValueError, match="rank"):
            wrong()
    for wrong in (
        lambda: dist.all_reduce(torch.ones(2), ReduceOp.BAND),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), dist._make_nccl_premul_sum(2.0)),
        lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), ReduceOp.AVG),
        lambda: dist.broadcast(torch.ones(2).to_sparse(), 0),
    ):
        with pytest.raises(TypeError):
            wrong()
