"""What every rank does for tests/test_mpi_backend.py: run by mpirun, prints one JSON line a check on rank 0.

Data come from seeds that every rank knows, so that each rank computes what all must have got without asking them.
Floats are multiples of 1/8 whose float32 sums are exact: a half-precision result is right only if it was rounded once.
"""

import functools
import json
import shutil
import sys
import tempfile
import traceback
import warnings
import zlib
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import ReduceOp

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex32,
        torch.complex64,
        torch.complex128,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    )
}
OPS = ("SUM", "AVG", "PREMUL_SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
LARGE = (40_007,)  # more than one piece, in any dtype but the narrowest
PIECE_BYTES = 1 << 16
CHECKS = {}

# torch 2.13 deprecates the older names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def check(*names, ranks=1):
    """Register a check under its own name, or under one name for each of `names`, which it gets as its argument."""

    def register(body):
        if names:
            CHECKS.update({f"{body.__name__}-{name}": (functools.partial(body, name), ranks) for name in names})
        else:
            CHECKS[body.__name__] = (body, ranks)
        return body

    return register


def names_for(size):
    return [name for name, (_, ranks) in CHECKS.items() if ranks <= size]


def data(dtype, shape, seed, rank):
    generator = torch.Generator().manual_seed(zlib.crc32(repr((str(dtype), tuple(shape), seed, rank)).encode()))

    def draw(low, high):
        return torch.randint(low, high + 1, shape, generator=generator)

    if dtype is torch.bool:
        return draw(0, 1).bool()
    if dtype.is_complex:
        return torch.complex(draw(-16, 16) / 8, draw(-16, 16) / 8).to(dtype)
    if dtype.is_floating_point:
        return (draw(-4, 4) if dtype.itemsize == 1 else draw(-64, 64)).div(8).to(dtype)
    return draw(0 if dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64) else -3, 3).to(dtype)


def op_named(name, rank):
    return dist._make_nccl_premul_sum(factor_of(rank)) if name == "PREMUL_SUM" else ReduceOp(getattr(ReduceOp, name))


def factor_of(rank):
    return 0.5 * (rank + 1)


def expected(tensors, name):
    """Reduce over the ranks in a dtype with room, and round to the tensors' own once; None where it means nothing."""
    dtype, size = tensors[0].dtype, len(tensors)
    number = dtype.is_floating_point or dtype.is_complex
    if (name in ("BAND", "BOR", "BXOR") and number) or (name == "PREMUL_SUM" and not number):
        return None
    if (name in ("MIN", "MAX") and dtype.is_complex) or (
        name == "AVG" and dtype in (torch.bool, torch.uint16, torch.uint32, torch.uint64)
    ):
        return None
    if dtype is torch.bool:
        fold = {"SUM": "or", "MAX": "or", "BOR": "or", "PRODUCT": "and", "MIN": "and", "BAND": "and", "BXOR": "xor"}[
            name
        ]
        return functools.reduce(getattr(torch, f"logical_{fold}"), tensors)
    wide = torch.complex128 if dtype.is_complex else torch.float64 if number else torch.int64
    parts = [tensor.to(wide) for tensor in tensors]
    if name == "PREMUL_SUM":
        parts = [part * factor_of(rank) for rank, part in enumerate(parts)]
    folds = {
        "PRODUCT": torch.mul,
        "MIN": torch.minimum,
        "MAX": torch.maximum,
        "BAND": torch.bitwise_and,
        "BOR": torch.bitwise_or,
        "BXOR": torch.bitwise_xor,
    }
    result = functools.reduce(folds.get(name, torch.add), parts)
    if name == "AVG":
        result = result.div(size, rounding_mode=None if number else "trunc")
    # float64 to half goes by float32, as the backend does; the sums are exact in both
    if dtype.itemsize < 4 and number:
        result = result.to(torch.complex64 if dtype.is_complex else torch.float32)
    return result.to(dtype)


def assert_same(actual, wanted, message, *, exact=True):
    assert actual.dtype == wanted.dtype, message
    assert actual.shape == wanted.shape, message
    if actual.dtype.is_complex:
        actual, wanted = torch.view_as_real(actual), torch.view_as_real(wanted)
    if exact or not actual.dtype.is_floating_point:
        assert torch.equal(to_plain(actual), to_plain(wanted)), (
            f"{message}: {actual.flatten()[:9]} != {wanted.flatten()[:9]}"
        )
    else:
        rtol = max(1e-6, torch.finfo(wanted.dtype).eps)
        actual, wanted = to_plain(actual), to_plain(wanted)
        torch.testing.assert_close(actual, wanted, msg=lambda text: f"{message}: {text}", rtol=rtol, atol=0)


def to_plain(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor.to(torch.int64)


def variants(dtype, seed, ranks, *, shapes=((), (5,), (3, 4), (0,), LARGE)):
    """Yield (what, the ranks' tensors): contiguous ones of each shape, and a transposed one."""
    for shape in shapes:
        yield f"shape {shape}", [data(dtype, shape, seed, rank) for rank in range(ranks)]
    yield "transposed", [data(dtype, (4, 6), seed, rank).t() for rank in range(ranks)]


def reductions(dtype, ranks, **keywords):
    for name in OPS:
        for what, tensors in variants(dtype, name, ranks, **keywords):
            wanted = expected(tensors, name)
            if wanted is not None:
                # AVG by three ranks and products are not exact
                yield name, f"{name} of {dtype}, {what}", tensors, wanted, name not in ("AVG", "PRODUCT")


@check(*DTYPES)
def all_reduce(dtype_name):
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, what, tensors, wanted, exact in reductions(DTYPES[dtype_name], size):
        mine = tensors[rank].clone(memory_format=torch.preserve_format)
        dist.group.WORLD.allreduce([mine], options(dist.AllreduceOptions(), op_named(name, rank))).wait()
        assert_same(mine, wanted, what, exact=exact)


def options(made, op):
    made.reduceOp = op
    return made


@check(*DTYPES)
def reduce(dtype_name):
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, what, tensors, wanted, exact in reductions(DTYPES[dtype_name], size):
        mine, root = tensors[rank].clone(memory_format=torch.preserve_format), size - 1
        made = options(dist.ReduceOptions(), op_named(name, rank))
        made.rootRank = root
        dist.group.WORLD.reduce([mine], made).wait()
        assert_same(mine, wanted if rank == root else tensors[rank], what, exact=exact)


@check(*DTYPES)
def reduce_scatter(dtype_name):
    """List and tensor forms, where rank i's part is the i-th of `size` variants of the data."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dtype = DTYPES[dtype_name]
    for name in OPS:
        for shape in ((3, 4), (0,), LARGE):
            parts = [[data(dtype, shape, (name, part), sender) for part in range(size)] for sender in range(size)]
            wanted = expected([parts[sender][rank] for sender in range(size)], name)
            if wanted is None:
                continue
            exact, what = name not in ("AVG", "PRODUCT"), f"{name} of {dtype}, shape {shape}"
            made = options(dist.ReduceScatterOptions(), op_named(name, rank))
            out = torch.empty(shape, dtype=dtype)
            dist.group.WORLD.reduce_scatter([out], [parts[rank]], made).wait()
            assert_same(out, wanted, what, exact=exact)
            strided = torch.empty(shape[::-1], dtype=dtype).t() if len(shape) == 2 else torch.empty(shape, dtype=dtype)
            dist.group.WORLD.reduce_scatter_single(strided, torch.stack(parts[rank]), made).wait()
            assert_same(strided, wanted, f"{what}, tensor form", exact=exact)


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
    wanted = torch.cat([torch.full((rank + 1, 2), 10.0 * sender + rank) for sender in range(size)])
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


@check()
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
def errors():
    for wrong in (
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


@check(ranks=2)
def messages():
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype, shape in ((torch.float32, (3,)), (torch.bfloat16, (400_000,)), (torch.int64, (0,))):
        tensors = [data(dtype, shape, "messages", index) for index in range(size)]
        got = torch.empty_like(tensors[0])
        # All send before any receives: a send that waits for its receiver would hang here.
        sends = [dist.isend(tensors[rank], (rank + 1) % size, tag=4)]
        receive = dist.irecv(got, (rank - 1) % size, tag=4)
        assert receive.wait()
        assert sends[0].wait(timedelta(seconds=10))
        assert_same(got, tensors[rank - 1], f"ring of {dtype}")
        got.zero_()
        ops = [dist.P2POp(dist.isend, tensors[rank], (rank + 1) % size), dist.P2POp(dist.irecv, got, (rank - 1) % size)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert_same(got, tensors[rank - 1], f"batch of {dtype}")


@check(ranks=2)
def messages_into_strided_tensors():
    rank, size = dist.get_rank(), dist.get_world_size()
    wanted = torch.arange(6.0).view(2, 3)
    got = torch.zeros(3, 2).t()
    if rank == 0:
        dist.send(torch.arange(6.0).view(2, 3).t().contiguous().t(), size - 1)
    elif rank == size - 1:
        dist.recv(got, 0)
        assert_same(got, wanted, "strided")
    dist.barrier()


@check(ranks=2)
def messages_from_anyone():
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        seen = set()
        for _ in range(1, size):
            got = torch.empty(1)
            source = dist.recv(got, tag=7)
            assert got.item() == source
            seen.add(source)
        assert seen == set(range(1, size))
    else:
        dist.send(torch.tensor([float(rank)]), 0, tag=7)


@check(ranks=2)
def message_that_nobody_sends():
    from ppe_ddp import CommunicationError

    group = dist.new_group()
    if dist.get_rank() == 0:
        work = dist.irecv(torch.empty(1), group=group, group_src=1, tag=99)
        assert not work.is_completed()
        with pytest.raises(CommunicationError, match=r"rank 1 \(tag 99\)"):
            work.wait(timedelta(milliseconds=50))
        future = work.get_future()
        dist.barrier(group)
        assert future.wait()[0].item() == 5
    else:
        dist.barrier(group)
        if dist.get_rank() == 1:
            dist.send(torch.full((1,), 5.0), group=group, group_dst=0, tag=99)


@check(ranks=2)
def monitored_barrier():
    from ppe_ddp import CommunicationError

    group = dist.new_group()
    group.monitored_barrier(timedelta(seconds=20))
    if dist.get_rank() == dist.get_world_size() - 1:
        return
    last = dist.get_world_size() - 1
    missing = rf"ranks \[{last}\] did not reach" if dist.get_rank() == 0 else "no answer from rank 0"
    with pytest.raises(CommunicationError, match=missing):
        group.monitored_barrier(timedelta(milliseconds=200), wait_all_ranks=True)


@check()
def objects():
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert [one["rank"] for one in gathered] == list(range(size))
    sent = [{"from": rank}, "y" * 1000] if rank == 0 else [None, None]
    dist.broadcast_object_list(sent, 0)
    assert sent == [{"from": 0}, "y" * 1000]
    at_last = [None] * size if rank == size - 1 else None
    dist.gather_object(rank, at_last, dst=size - 1)
    assert at_last in (None, list(range(size)))
    own = [None]
    dist.scatter_object_list(own, [str(index) for index in range(size)] if rank == 0 else None, 0)
    assert own == [str(rank)]


@check(ranks=2)
def subgroups():
    rank, size = dist.get_rank(), dist.get_world_size()
    for ranks in ([0, 1], list(range(size)), [size - 1, 0], list(range(0, size, 2)), [1]):
        group = dist.new_group(ranks)
        if rank not in ranks:
            continue
        total = torch.tensor([2.0**rank])
        dist.all_reduce(total, group=group)
        assert total.item() == sum(2.0**member for member in ranks)
        # torch sorts the ranks of a group
        assert dist.get_group_rank(group, rank) == sorted(ranks).index(rank)
        dist.destroy_process_group(group)


@check(ranks=2)
def subgroups_that_only_members_make():
    rank, size = dist.get_rank(), dist.get_world_size()
    ranks = [0, 1] if rank < 2 else list(range(2, size))
    group = dist.new_group(ranks, use_local_synchronization=True)
    gathered = [None] * len(ranks)
    dist.all_gather_object(gathered, rank, group=group)
    assert gathered == ranks
    dist.barrier()


@check(ranks=2)
def many_groups():
    """An MPI has few communicators (2048 in MPICH): those of destroyed groups must come back."""
    if dist.get_world_size() > 2:
        return
    for _ in range(2200):
        dist.destroy_process_group(dist.new_group([dist.get_rank()], use_local_synchronization=True))


@check()
def mixed_with_gloo():
    group = dist.new_group(backend="gloo")
    total = torch.ones(2)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [dist.get_world_size()] * 2


def model_and_loss(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))
    return model, lambda output: output.square().mean()


def batch(step, rank):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def train_alone(size, steps=2):
    model, loss_of = model_and_loss(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model(torch.cat([batch(step, rank) for rank in range(size)]))).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(wrapped, loss_of, steps=2):
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(wrapped(batch(step, dist.get_rank()))).backward()
        optimizer.step()


def assert_trained(parameters, rtol=1e-5):
    for actual, wanted in zip(parameters, train_alone(dist.get_world_size()), strict=True):
        torch.testing.assert_close(actual.detach(), wanted, rtol=rtol, atol=rtol)


@check("plain", "fp16_compress", "power_sgd")
def torch_ddp(hook):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    model, loss_of = model_and_loss(3)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    if hook == "power_sgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook != "plain":
        wrapped.register_comm_hook(None, getattr(default_hooks, f"{hook}_hook"))
    train(wrapped, loss_of)
    assert_trained(model.parameters(), rtol={"plain": 1e-5, "power_sgd": 1e-1}.get(hook, 2e-2))


@check()
def own_ddp():
    import ppe_ddp

    model, loss_of = model_and_loss(3)
    train(ppe_ddp.DistributedDataParallel(model), loss_of)
    assert_trained(model.parameters())


@check()
def zero_redundancy():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # torch's own
        from torch.distributed.optim import ZeroRedundancyOptimizer

    model, loss_of = model_and_loss(3)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(wrapped(batch(step, dist.get_rank()))).backward()
        optimizer.step()
    assert_trained(model.parameters())


@check()
def dtensor():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,))
    full = torch.arange(7.0 * 3).view(7, 3)
    shard = distribute_tensor(full, mesh, [Shard(0)])
    assert_same(shard.full_tensor(), full, "shard, gather")
    assert_same(shard.redistribute(mesh, [Shard(1)]).full_tensor(), full, "shard 0 to 1")
    assert_same(shard.redistribute(mesh, [Replicate()]).to_local(), full, "replicate")
    partial = DTensor.from_local(torch.ones(4, 2), mesh, [Partial()])
    assert_same(partial.redistribute(mesh, [Shard(0)]).full_tensor(), torch.full((4, 2), float(size)), "partial")
    assert_same(torch.mm(shard.t(), shard).full_tensor(), full.t() @ full, "matrix product")


@check(ranks=2)
def fsdp2():
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model, loss_of = model_and_loss(3)
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, loss_of)
    assert_trained([parameter.full_tensor() for parameter in model.parameters()])


@check(ranks=2)
def checkpoint():
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor

    size = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (size,))
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where, 0)
    full = torch.arange(10.0).view(5, 2)
    dcp.save({"weight": distribute_tensor(full, mesh, [Shard(0)]), "step": 3}, checkpoint_id=where[0])
    loaded = {"weight": distribute_tensor(torch.zeros(5, 2), mesh, [Shard(1)]), "step": 0}
    dcp.load(loaded, checkpoint_id=where[0])
    assert_same(loaded["weight"].full_tensor(), full, "loaded")
    assert loaded["step"] == 3
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(where[0])


def main():
    from mpi4py import MPI

    from ppe_ddp.backends.mpi import MpiOptions

    options = MpiOptions(piece_bytes=PIECE_BYTES)
    dist.init_process_group("mpi4py", init_method="mpi://", timeout=timedelta(seconds=20), pg_options=options)
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    own = MPI.COMM_WORLD.Dup()
    for name in names_for(dist.get_world_size()):
        error = None
        try:
            CHECKS[name][0]()
        except Exception:
            error = f"rank {dist.get_rank()}:\n{traceback.format_exc()}"
            print(name, error, file=sys.stderr, flush=True)  # the other ranks may hang in this check
        errors = [text for text in own.allgather(error) if text]
        if dist.get_rank() == 0:
            print(json.dumps({"name": name, "errors": errors}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
