"""Checks of collectives on the communication thread, over the backend `mpi4py`; run by mpi_checks.py."""

import functools
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mpi_check_kit import DTYPES, OPS, assert_same, check, data, expected, op_named, options
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


@check()
def thread_is_not_the_caller():
    seen = []
    group = thread_group()
    run = group._over.barrier
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group._over, "barrier", lambda: (seen.append(threading.current_thread().name), run()))
        dist.barrier(group)
    assert seen == ["ppe_ddp-communication_0"]


@check("float32", "bfloat16", "int64", "bool")
def thread_all_reduce(dtype_name):
    rank, size = dist.get_rank(), dist.get_world_size()
    for name in OPS:
        tensors = [data(DTYPES[dtype_name], (400_003,), name, one) for one in range(size)]
        wanted = expected(tensors, name)
        if wanted is not None:
            mine = tensors[rank].clone()
            thread_group().allreduce([mine], options(dist.AllreduceOptions(), op_named(name, rank))).wait()
            assert_same(mine, wanted, name, exact=name not in ("AVG", "PRODUCT"))


@check(ranks=2)
def thread_hands_on_errors():
    work = dist.all_to_all_single(torch.empty(3), torch.empty(3), [1] * 9, [1] * 9, group=thread_group(), async_op=True)
    with pytest.raises(ValueError, match="splits"):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), ValueError)
    with pytest.raises(ValueError, match="splits"):
        work.get_future().wait()


@check("own", "torch")
def thread_ddp(kind):
    import ppe_ddp

    wrapper = ppe_ddp.DistributedDataParallel if kind == "own" else torch.nn.parallel.DistributedDataParallel
    model, loss_of = model_and_loss(3)
    train(wrapper(model, process_group=thread_group()), loss_of)
    assert_trained(model.parameters())
