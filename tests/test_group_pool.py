"""Duplicates of groups that no wrapper uses any more: taken again if all ranks can use them, given back else."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from one_process import square
from ppe_ddp import DistributedDataParallel
from ppe_ddp.backends.group_internals import registered_groups
from ppe_ddp.engine.completion import run
from ppe_ddp.engine.groups import Groups
from ppe_ddp.errors import AbortedError
from rank_tests import on_three_ranks, on_two_ranks


def fail(groups):
    groups.fail(RuntimeError("after all others were through"), "finish")


def count():
    return len(list(registered_groups()))


def assert_works(groups):
    for group in (groups.buckets, groups.control):
        ones = torch.ones(3)
        dist.all_reduce(ones, group=group)
        assert ones.tolist() == [groups.world_size] * 3


@pytest.mark.parametrize("shared_memory", [False, True])
@on_two_ranks
def test_what_one_rank_has_closed_is_given_back_on_all(shared_memory):
    world, before = dist.group.WORLD, count()
    for _ in range(4):
        groups = Groups.duplicate(world, shared_memory=shared_memory)
        assert_works(groups)
        dist.barrier()
        if dist.get_rank():
            fail(groups)
        groups.release()
        assert count() == before + 2 * (1 - dist.get_rank())
    groups = Groups.duplicate(world, shared_memory=shared_memory)
    assert count() == before + 2
    assert_works(groups)
    # torch names these by how many groups there are on a rank
    own = dist.new_group([0, 1], use_local_synchronization=True)
    dist.barrier(group=own)


@on_three_ranks
def test_what_a_rank_still_uses_is_closed_when_it_is_through():
    world, before, rank = dist.group.WORLD, count(), dist.get_rank()
    first = Groups.duplicate(world)
    dist.barrier()
    if rank == 1:
        fail(first)
    if rank != 2:
        first.release()
    second = Groups.duplicate(world)
    assert second is not first
    assert_works(second)
    assert count() == before + (2 if rank == 1 else 4)
    if rank == 2:
        first.release()
    third = Groups.duplicate(world)
    assert third not in (first, second)
    assert_works(third)
    assert count() == before + 4


@on_two_ranks
def test_what_all_have_closed_is_not_taken_again():
    world = dist.group.WORLD
    first, second = Groups.duplicate(world), Groups.duplicate(world)
    fail(first)
    first.release()
    second.release()
    assert Groups.duplicate(world) is second


@on_two_ranks
def test_a_wrapper_that_is_dropped_after_its_last_step_has_failed_leaves_no_groups():
    before, counts = count(), []

    for _ in range(4):
        wrapper = DistributedDataParallel(nn.Linear(4, 2))
        square(wrapper, dist.get_rank())
        if dist.get_rank():
            fail(wrapper._reducer.groups)
        counts.append(count())
        del wrapper
        gc.collect()
        dist.barrier()
    assert counts[1:] == [counts[0]] * 3
    assert counts[0] == before + 2 * (1 - dist.get_rank())


@on_two_ranks
def test_a_parent_that_is_made_again_under_its_name_begins_anew():
    """The store has what was reported and decided in the first one."""
    for turn in range(3):
        parent = dist.new_group([0, 1], backend="shm", use_local_synchronization=True)
        groups = Groups.duplicate(parent)
        for generation in range(2):
            assert not groups.has_failed
            assert groups.generation == generation
            dist.barrier()
            groups.fail(RuntimeError("not today") if dist.get_rank() == turn % 2 else AbortedError(), "begun")
            if generation == 0:
                run(groups.renewing())
        del groups
        dist.barrier()
        dist.destroy_process_group(parent)
