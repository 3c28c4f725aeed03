"""A callback on a thread of gloo may have the last reference to its group: the process lives on."""

import gc
import threading
import weakref
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from closing import await_closing, calls_that_no_rank_ends
from one_process import assert_gradients, mean_gradients, mlp, seeded, square
from ppe_ddp import DistributedDataParallel, PeerAbortedError
from ppe_ddp.backends.group_internals import registered_groups
from ppe_ddp.backends.shm import gloo_wire
from ppe_ddp.engine.failures import is_of_transport
from ppe_ddp.engine.group_duplicates import close
from rank_tests import on_three_ranks, on_two_ranks

SECONDS = 60.0


class Refused(Exception):
    pass


def reduced(tensor, group):
    return dist.all_reduce(tensor, group=group, async_op=True).get_future()


def has_ended(group):
    """An event that is set when the group is gone; a process that cannot end it is gone before."""
    ended = threading.Event()
    weakref.finalize(group, ended.set)
    return ended


@on_two_ranks
@mock.patch.object(gloo_wire, "_COMPLETING_SECONDS", 0.3)  # nothing under way completes
def test_a_reduce_function_whose_callback_has_the_group_when_another_bucket_fails():
    rank, go, ends = dist.get_rank(), threading.Event(), []

    def reduce(gradients, group):
        if go.is_set():
            dist.all_reduce(gradients.buffer(), group=group)
            gradients.divide(2)
            return None
        if ends and rank == 0:
            raise Refused
        ends.append(has_ended(group))

        def divide(_future):
            assert rank or go.wait(SECONDS)
            gradients.divide(2)
            assert group is not None

        if rank and not ends[1:]:
            dist.barrier()  # so that nothing is complete before rank 0 has added its callback
        averaged = reduced(gradients.buffer(), group).then(divide)
        if rank == 0:
            dist.barrier()
        return averaged

    module = seeded(mlp, 4, 8, 2)
    expected = mean_gradients(module, square)
    # Over gloo alone: a group that has memory for buckets is held by those, and its futures have no threads of gloo's.
    wrapper = DistributedDataParallel(module, bucket_cap_mb=1e-6, reduce_function=reduce, shared_memory=False)
    with pytest.raises(PeerAbortedError if rank else Refused):
        square(wrapper, rank)
    for thread in threading.enumerate():
        if thread.name == "ppe_ddp-close":
            thread.join(SECONDS)  # which has dropped the wrapper's references then
    go.set()
    assert ends[0].wait(SECONDS)
    wrapper.zero_grad()
    square(wrapper, rank)
    assert_gradients(module, expected)


@on_two_ranks
def test_a_hook_whose_callback_has_the_group_when_it_is_destroyed():
    rank, go, under_way = dist.get_rank(), threading.Event(), threading.Event()

    def hook(group, bucket):
        if rank:
            dist.barrier()  # so that nothing is complete before rank 0 has added its callbacks
            return reduced(bucket.buffer(), group).then(lambda done: done.value()[0] / 2)
        future = reduced(bucket.buffer(), group)

        def linger(_future):
            under_way.set()
            assert go.wait(SECONDS)
            assert group is not None

        averaged = future.then(lambda done: done.value()[0] / 2)
        future.add_done_callback(linger)  # called after that, when nobody waits any more
        dist.barrier()
        return averaged

    wrapper = DistributedDataParallel(nn.Linear(4, 2))
    group = dist.new_group()
    wrapper.register_comm_hook(group, hook)
    square(wrapper, rank)
    assert rank or under_way.wait(SECONDS)
    ended = has_ended(group)
    dist.destroy_process_group(group)
    del group, wrapper
    gc.collect()
    assert rank or not ended.is_set()
    go.set()
    assert ended.wait(SECONDS)
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == 2


@on_two_ranks
def test_torch_does_not_count_groups_that_are_closed():
    """It names a group that only its ranks make by their number, and gloo may take long to end one."""
    go = threading.Event()
    before = len(list(registered_groups()))
    groups = [dist.new_group(backend="shm"), dist.new_group()]
    weakref.finalize(groups[1], go.wait, SECONDS)  # as if gloo took long
    close(groups)
    own = dist.new_group([0, 1], use_local_synchronization=True, timeout=timedelta(seconds=SECONDS))
    assert len(list(registered_groups())) == before + 1
    dist.barrier(group=own)
    go.set()


@on_three_ranks
@mock.patch.object(gloo_wire, "_COMPLETING_SECONDS", 0.3)  # nothing under way completes
def test_what_is_under_way_ends_with_the_connections():
    """No rank comes to what another waits for, and gloo would let each wait until its timeout."""
    group = dist.new_group(timeout=timedelta(minutes=5))
    works = calls_that_no_rank_ends(group)
    dist.barrier()
    close([group])
    await_closing()
    for work in works:
        with pytest.raises(RuntimeError) as caught:
            work.wait(timedelta(seconds=SECONDS))
        assert is_of_transport(caught.value)
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == 3
