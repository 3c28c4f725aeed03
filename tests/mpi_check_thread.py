"""Checks of collectives that the progress thread advances, over the backend `mpi4py`; run by mpi_checks.py."""

import functools
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from mpi_check_kit import DTYPES, assert_same, check, data, expected, ops_of, options
from mpi_check_torch import assert_trained, model_and_loss, train


@functools.cache
def thread_group():
    from ppe_ddp.backends.mpi import MpiOptions

    return dist.new_group(pg_options=MpiOptions(thread=True))


@check()
def thread_runs_collectives_in_the_order_of_their_calls():
    """Of two groups, too; and the caller goes on at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [thread_group(), dist.new_group(pg_options=thread_group().pg_options)]
    tensors = [torch.full((1000,), float(rank + turn)) for turn in range(20)]
    works = [dist.all_reduce(one, group=groups[turn % 2], async_op=True) for turn, one in enumerate(tensors)]
    followed = dist.broadcast(tensors[0], size - 1, group=groups[0], async_op=True)
    for turn, (work, one) in enumerate(zip(works, tensors, strict=True)):
        assert work.wait(timedelta(seconds=20))
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.result()[0] is one
        assert one.tolist() == [sum(other + turn for other in range(size))] * 1000
    assert followed.get_future().wait()[0] is tensors[0]


@check(ranks=2)
def thread_advances_what_nobody_waits_for():
    """A sum in several pieces, while this rank calls no backend."""
    from mpi4py import MPI

    apart, total = MPI.COMM_WORLD.Dup(), torch.ones(1 << 20)
    work = dist.all_reduce(total, group=thread_group(), async_op=True)
    end = time.monotonic() + 20
    while not work.done() and time.monotonic() < end:
        time.sleep(0.001)  # calls no backend
    assert work.done()
    apart.Barrier()
    assert work.wait()
    assert total.unique().tolist() == [dist.get_world_size()]


@check("float32", "bfloat16", "int64", "bool")
def thread_all_reduce(dtype_name):
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in ops_of(DTYPES[dtype_name]):
        tensors = [data(DTYPES[dtype_name], (400_003,), name, one) for one in range(size)]
        mine = tensors[rank].clone()
        thread_group().allreduce([mine], options(dist.AllreduceOptions(), name)).wait()
        assert_same(mine, expected(tensors, name), name, exact=name not in ("AVG", "PRODUCT"))


@check("own", "torch", most=2)
def thread_ddp(kind):
    import ppe_ddp

    wrapper = ppe_ddp.DistributedDataParallel if kind == "own" else torch.nn.parallel.DistributedDataParallel
    model, loss_of = model_and_loss(3)
    train(wrapper(model, process_group=thread_group()), loss_of)
    assert_trained(model.parameters())
