"""Checks of what threads and ranks do to shared memory at a time, over the backend `mpi4py`; run by mpi_checks.py."""

import threading

import pytest
import torch
import torch.distributed as dist

from mpi_check_kit import barrier_apart, check
from mpi_check_shared import in_shared_memory, shared_group
from ppe_ddp.backends.shared_memory import shared_reservation


@check()
def shared_memory_of_two_threads():
    """A reduce function's thread and the main thread allocate at the same time: they get different memory."""

    memory, join_ranges = shared_reservation.SharedMemory(), shared_reservation.joined_ranges
    of_the_thread = []
    thread = threading.Thread(target=lambda: of_the_thread.append(memory.allocate(5, torch.float32)))

    def interrupted(ranges):
        joined = join_ranges(ranges)
        if threading.current_thread() is not thread:
            thread.start()
            thread.join(0.1)  # it must not come through before this allocation is over
        return joined

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_reservation, "joined_ranges", interrupted)
        mine = memory.allocate(5, torch.float32)
        thread.join()
    assert memory.position(mine) != memory.position(of_the_thread[0])


@check(ranks=2)
def shared_sums_that_are_dropped_keep_their_memory():
    """Until every rank has done its part: it would write into what lies there by then."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group, meet = shared_group(), barrier_apart()
    last = in_shared_memory(torch.ones(1000), group)
    dist.all_reduce(last, group=group)  # all is connected, and nothing is under way
    if rank < size - 1:
        work = dist.all_reduce(last, group=group, async_op=True)
        meet()  # all the others have come, and none has done its part
        meet()
    else:
        dropped = in_shared_memory(torch.ones(1000), group)
        meet()
        work = dist.all_reduce(dropped, group=group, async_op=True)  # does this rank's part
        del work, dropped
        again = in_shared_memory(torch.full((1000,), 7.0), group)
        meet()
    if rank < size - 1:
        work.wait()
        meet()
    else:
        meet()
        assert again.tolist() == [7.0] * 1000


@check(ranks=2)
def shared_stages_are_left_alone_until_all_have_read_them():
    """More sums of tensors from elsewhere than there are stages, while the others have not done their part."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group, meet = shared_group(), barrier_apart()
    place = in_shared_memory if rank < size - 1 else lambda tensor, _: tensor
    tensors = [place(torch.full((1000,), float(value)), group) for value in range(5)]
    works = []
    if rank < size - 1:
        works = [dist.all_reduce(one, group=group, async_op=True) for one in tensors]
        meet()  # all the others have come, and none has done its part
        meet()
    else:
        meet()
        works = [dist.all_reduce(one, group=group, async_op=True) for one in tensors]
        meet()
    for work in works:
        work.wait()
    assert [set(one.tolist()) for one in tensors] == [{float(size * value)} for value in range(5)]
