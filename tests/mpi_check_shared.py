"""Checks of sums in memory that the ranks share, over the backend `mpi4py`; run by mpi_checks.py."""

import functools
import gc
import itertools
import math
import os

import pytest
import torch
import torch.distributed as dist

from mpi_check_kit import DTYPES, assert_same, check, data, expected, group_options, ops_of, options, reductions
from mpi_check_torch import assert_trained, model_and_loss, train
from ppe_ddp.engine.memory import allocator

CPU = torch.device("cpu")
SHAPE = (12_001,)


@functools.cache
def shared_group(index=0):
    """A group of all ranks in which nearly everything goes through shared memory, in several pieces."""
    return dist.new_group(
        pg_options=group_options(shared_parts=True, shared_bytes=8, shared_piece_bytes=10_000), group_desc=str(index)
    )


def in_shared_memory(tensor, group):
    """A copy in memory that the group offers; where its ranks share none, in any, as the engine has it."""
    if dist.get_world_size() == 1:
        return tensor.clone()
    return allocator(group)(tensor.numel(), tensor.dtype, CPU).view(tensor.shape).copy_(tensor)


@check(*DTYPES)
def shared_all_reduce(dtype_name):
    """Tensors from anywhere, and tensors in shared memory, of which several are under way at a time."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = shared_group()
    for name, what, tensors, wanted, exact in reductions(DTYPES[dtype_name], size, shapes=((), (5,), (0,), SHAPE)):
        anywhere = tensors[rank].clone(memory_format=torch.preserve_format)
        made = options(dist.AllreduceOptions(), name)  # dist.all_reduce() takes complex ones apart
        group.allreduce([anywhere], made).wait()
        assert_same(anywhere, wanted, what, exact=exact)
        inside = [in_shared_memory(tensors[rank], group) for _ in range(3)]
        under_way = [group.allreduce([one], made) for one in inside]
        for work, one in reversed(list(zip(under_way, inside, strict=True))):
            assert work.wait()
            assert work.is_completed()
            assert work.result()[0] is one
            assert_same(one, wanted, f"{what}, in place", exact=exact)


@check(*DTYPES)
def shared_reduce_scatter(dtype_name):
    """Anywhere, in shared memory, and into a part of the input itself; the rest of the input stays."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype, group = DTYPES[dtype_name], shared_group()
    for name in ops_of(dtype):
        for shape in ((), (0,), SHAPE):
            wholes = [
                torch.stack([data(dtype, shape, (name, part), one) for part in range(size)]) for one in range(size)
            ]
            wanted = expected([whole[rank] for whole in wholes], name)
            made, exact = options(dist.ReduceScatterOptions(), name), name not in ("AVG", "PRODUCT")
            places = {"anywhere": wholes[rank].clone(), "in shared memory": in_shared_memory(wholes[rank], group)}
            for where, whole in places.items():
                apart, inside = torch.empty_like(wanted), whole.view(size, *shape)[rank]
                under_way = [group.reduce_scatter_single(out, whole, made) for out in (apart, inside)]
                for work, out in reversed(list(zip(under_way, (apart, inside), strict=True))):
                    assert work.wait()
                    assert work.is_completed()
                    assert_same(out, wanted, f"{name} of {dtype}, shape {shape}, {where}", exact=exact)
                if name == "SUM":
                    whole[rank] = wholes[rank][rank]
                    assert_same(whole, wholes[rank], f"shape {shape}, {where}, the input afterwards")


@check(*DTYPES)
def shared_all_gather(dtype_name):
    """From anywhere, from shared memory, and from a part of the output itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype, group = DTYPES[dtype_name], shared_group()
    for shape in ((), (0,), SHAPE):
        wanted = torch.stack([data(dtype, shape, "gather", one) for one in range(size)])
        mine = wanted[rank]
        for into in (torch.zeros_like(wanted), in_shared_memory(torch.zeros_like(wanted), group)):
            for given in (mine.clone(), in_shared_memory(mine, group), into[rank]):
                into.copy_(torch.zeros_like(into))
                into[rank] = mine
                assert group.all_gather_single(into, given).wait()
                assert_same(into, wanted, f"all-gather of {dtype}, shape {shape}")


@check(ranks=2)
def shared_parts_that_overlap_otherwise():
    """Input and output may overlap anyhow, as in torch: also where another rank's part would be overwritten."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = shared_group()
    for given in (torch.clone, lambda tensor: in_shared_memory(tensor, group)):
        whole = given(torch.arange(size * 5_000.0) + rank)
        part = whole[1 : 1 + 5_000]
        group.reduce_scatter_single(part, whole).wait()
        wanted = size * torch.arange(rank * 5_000.0, (rank + 1) * 5_000.0) + size * (size - 1) / 2
        assert_same(part, wanted, "reduce-scatter")
        whole = given(torch.zeros(size * 5_000))
        group.all_gather_single(whole, whole[1 : 1 + 5_000].fill_(rank)).wait()
        assert_same(whole, torch.arange(float(size)).repeat_interleave(5_000), "all-gather")


@check(ranks=2)
def inference_mode():
    """Tensors made in it, before or after others, and waited for outside of it, as in validation between epochs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    wanted = {"AVG": (size + 1) / 2, "PRODUCT": math.factorial(size)}
    with torch.inference_mode():
        made_inside = shared_group(2)
    for group, is_inside, dtype in itertools.product(
        (dist.new_group(pg_options=dist.group.WORLD.pg_options), made_inside),
        (True, False, True),
        (torch.float32, torch.bfloat16),
    ):
        kept = in_shared_memory(torch.zeros(5_000, dtype=dtype), group)
        for name, result in wanted.items():
            made = options(dist.AllreduceOptions(), name)
            with torch.inference_mode(is_inside):
                tensors = [torch.empty(4_000, dtype=dtype), torch.empty((4, 3), dtype=dtype).t(), kept]
                works = [group.allreduce([tensor.fill_(rank + 1)], made) for tensor in tensors]
            for work, tensor in zip(works, tensors, strict=True):
                work.wait()
                assert tensor.unique().tolist() == [result]


@check(ranks=2)
def shared_by_some_ranks_alone():
    """A rank may bring a tensor in shared memory where another brings one from elsewhere."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = shared_group()
    for turn in range(size):
        tensors = [data(torch.float32, (size, *SHAPE), turn, one) for one in range(size)]
        mine = in_shared_memory(tensors[rank], group) if rank == turn else tensors[rank].clone()
        part, total = torch.empty(SHAPE), expected(tensors, "SUM")
        group.reduce_scatter_single(part, mine).wait()
        assert_same(part, total[rank], f"rank {turn} in shared memory, reduce-scatter")
        dist.all_reduce(mine, group=group)
        assert_same(mine, total, f"rank {turn} in shared memory, all-reduce")
        group.all_gather_single(mine, in_shared_memory(part, group) if rank == turn else part).wait()
        assert_same(mine, total, f"rank {turn} in shared memory, all-gather")


@check(ranks=2)
def shared_sums_under_way_beside_other_calls():
    """Each rank waits in another order and makes other calls meanwhile, some of which block: nobody hangs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [shared_group(0), shared_group(1)]
    tensors = [data(torch.float32, SHAPE, "beside", one) for one in range(size)]
    mine = [in_shared_memory(tensors[rank], group) for group in groups]
    message = torch.empty(200_000)
    arriving = dist.irecv(message, (rank - 1) % size, tag=3)
    under_way = [dist.all_reduce(one, group=group, async_op=True) for one, group in zip(mine, groups, strict=True)]
    leaving = dist.isend(torch.full((200_000,), float(rank)), (rank + 1) % size, tag=3)
    for work in under_way if rank % 2 else [*reversed(under_way), arriving]:
        work.wait()
    arriving.wait()
    leaving.wait()
    assert message[-1].item() == (rank - 1) % size
    again = dist.all_reduce(mine[0], group=groups[0], async_op=True)
    dist.barrier()  # of another group
    again.get_future().wait()
    assert_same(mine[0], size * expected(tensors, "SUM"), "summed twice")
    assert_same(mine[1], expected(tensors, "SUM"), "summed once")


@check(ranks=2)
def shared_sums_that_nobody_waits_for():
    """More than there are records, and dropped without a look; the group may be destroyed after them."""
    group = dist.new_group(pg_options=shared_group().pg_options)
    ones = in_shared_memory(torch.ones(7), group)
    for _ in range(200):
        dist.all_reduce(ones.fill_(1.0), group=group, async_op=True)
    dist.destroy_process_group(group)
    dist.barrier()


@check(ranks=2)
def shared_sums_of_different_tensors():
    """Ranks that bring different sizes or dtypes get the same error, and go on."""
    from ppe_ddp import CommunicationError

    rank, size = dist.get_rank(), dist.get_world_size()
    group = shared_group()
    for mine, told in (
        (torch.ones(100 + rank), "rank 1 101 x float32 \\(all_reduce SUM\\)"),
        (torch.ones(8, dtype=torch.float64 if rank else torch.float32), "rank 1 8 x float64"),
    ):
        for given in (mine.clone(), in_shared_memory(mine, group)):
            with pytest.raises(CommunicationError, match=told):
                dist.all_reduce(given, group=group)
    whole, part = torch.ones(100 * size), torch.ones(100 + rank)
    for given in (whole, in_shared_memory(whole, group)):
        scatter = functools.partial(group.reduce_scatter_single, torch.empty(100))
        with pytest.raises(CommunicationError, match=f"rank 0 {100 * size} x float32 \\(all_reduce SUM\\), rank 1 "):
            (scatter if rank else group.allreduce)(given).wait()
        with pytest.raises(CommunicationError, match="rank 1 101 x float32 \\(all_gather\\)"):
            group.all_gather_single(torch.empty(part.numel() * size), part).wait()
    total = torch.ones(100)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [size] * 100


def no_holes():
    """Memory that fills what earlier checks have left free: what is allocated next lies behind it, and alone."""
    from ppe_ddp.backends.shared_memory.shared_reservation import shared_memory

    gc.collect()
    return [shared_memory().allocate(1, torch.uint8) for _ in range(500)]


@check(ranks=2)
def shared_steps_are_cut_once_for_the_same_memory():
    """The second collective cuts nothing; one rank that brings another place is followed; no tensor is kept alive."""
    from ppe_ddp.backends.shared_memory.shared_reservation import shared_memory
    from ppe_ddp.backends.shared_memory.shared_steps import Region

    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(pg_options=shared_group().pg_options)
    fillers = no_holes()
    total, rows = in_shared_memory(torch.ones(5000), group), in_shared_memory(torch.ones(size * 5000), group)
    cut, view = [], Region.view

    def noted(self, *arguments):
        cut.append(arguments)
        return view(self, *arguments)

    def run(mine, count):
        group.allreduce([mine.fill_(1.0)]).wait()
        assert mine.tolist() == [size] * 5000
        part = rows.fill_(1.0)[rank * 5000 : (rank + 1) * 5000]
        group.reduce_scatter_single(part, rows).wait()
        group.all_gather_single(rows, part).wait()
        assert rows.tolist() == [size] * rows.numel()
        assert (len(cut) > 0) == count, f"views cut: {cut}"
        cut.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Region, "view", noted)
        run(total, count=True)
        run(total, count=False)
        other = in_shared_memory(torch.ones(5000), group)
        run(other if rank == 0 else total, count=True)
        run(total, count=rank != 0)
        run(total, count=False)
    dist.barrier()
    position = shared_memory().position(total)
    del total
    again = group.allocate_tensor(5000, dtype=torch.float32, device=CPU)
    assert shared_memory().position(again) == position  # kept steps do not hold it
    del fillers
    run(again, count=False)  # and serve what lies there now
    group.allreduce([again.view(50, 100).t().fill_(2.0)]).wait()  # not in the order of memory: not by these steps
    assert again.tolist() == [2.0 * size] * 5000


@check(ranks=2)
def shared_steps_are_kept_for_so_many_collectives_only():
    from ppe_ddp.backends.shared_memory import shared_group as module

    group = dist.new_group(pg_options=shared_group().pg_options)
    whole = in_shared_memory(torch.ones(200), group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MOST_KEPT", 3)
        for _ in range(2):
            for start in range(0, 200, 20):
                group.allreduce([whole[start : start + 20]]).wait()
        assert len(group._shared._kept) == 3
    assert whole.tolist() == [dist.get_world_size() ** 2] * 200


@check(ranks=2)
def shared_memory_goes_back():
    """To the system with the last view of a tensor, and to the next tensor of its size."""
    from ppe_ddp.backends.shared_memory.shared_reservation import shared_memory

    memory, fillers = shared_memory(), no_holes()
    used = os.fstat(memory.address.descriptor).st_blocks * 512
    large = memory.allocate(1 << 20, torch.float32).fill_(1.0)
    view, position = large[5:], memory.position(large)
    del large
    assert os.fstat(memory.address.descriptor).st_blocks * 512 >= used + (4 << 20)
    del view
    assert os.fstat(memory.address.descriptor).st_blocks * 512 <= used
    again = memory.allocate(1 << 20, torch.float32)
    assert memory.position(again) == position
    del fillers
    assert not again.any()
    assert memory.position(torch.ones(3)) == -1
    with pytest.raises(MemoryError, match="in a row"):
        memory.allocate(memory.address.nbytes, torch.uint8)


@check(ranks=2)
def shared_memory_out_of_reach():
    """One rank cannot map another's memory (containers): the sums go through messages on every rank."""
    from ppe_ddp.backends.shared_memory.shared_reservation import SharedMemory

    def refuse(*_):
        raise PermissionError("on purpose")

    rank, size = dist.get_rank(), dist.get_world_size()
    assert shared_group().supports_tensor_alloc(CPU)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(SharedMemory, "attach", refuse)
        group = dist.new_group(pg_options=shared_group().pg_options)
    for total in (torch.ones(500), in_shared_memory(torch.ones(500), shared_group())):
        dist.all_reduce(total, group=group)
        assert total.tolist() == [size] * 500
    assert not group.supports_tensor_alloc(CPU)
    with pytest.raises(ValueError, match=f"rank {rank} of {size}.* no shared memory"):
        group.allocate_tensor(1, dtype=torch.float32, device=CPU)


@check("own", "torch", most=2)
def shared_ddp(kind):
    import ppe_ddp

    wrapper = ppe_ddp.DistributedDataParallel if kind == "own" else torch.nn.parallel.DistributedDataParallel
    model, loss_of = model_and_loss(3)
    wrapped = wrapper(model, process_group=shared_group())
    train(wrapped, loss_of)
    assert_trained(model.parameters())
    if kind == "own" and dist.get_world_size() > 1:  # the gradients are views of shared buckets
        from ppe_ddp.backends.shared_memory.shared_reservation import shared_memory

        wrapped(torch.ones(2, 6)).sum().backward()
        assert all(shared_memory().position(parameter.grad) >= 0 for parameter in model.parameters())


@check(ranks=2)
def shared_masks_move_beside_a_function_that_blocks():
    """It waits in MPI for ranks whose masks need this one to come by, and this one's main thread waits for it."""
    from ppe_ddp import DistributedDataParallel, overlapped

    size = dist.get_world_size()

    def by_all_gather(bucket, group):
        parts = [torch.empty_like(bucket.buffer()) for _ in range(size)]
        dist.all_gather(parts, bucket.buffer(), group=group)
        bucket.buffer().copy_(torch.stack(parts).mean(0))

    torch.manual_seed(3)
    module = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
    alone = [parameter.detach().clone().requires_grad_() for parameter in module.parameters()]
    model = DistributedDataParallel(
        module, process_group=shared_group(1), reduce_function=overlapped(by_all_gather), bucket_cap_mb=0.02
    )
    for step in range(6):
        batches = [torch.randn(3, 64, generator=torch.Generator().manual_seed(9 * step + rank)) for rank in range(size)]
        model.zero_grad()
        model(batches[dist.get_rank()]).square().mean().backward()
        named = dict(zip((name for name, _ in module.named_parameters()), alone, strict=True))
        output = torch.func.functional_call(module, named, (torch.cat(batches),))
        for parameter, wanted in zip(
            module.parameters(), torch.autograd.grad(output.square().mean(), alone), strict=True
        ):
            torch.testing.assert_close(parameter.grad, wanted)
