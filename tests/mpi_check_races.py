"""Checks of what threads and ranks do to shared memory at a time, over the backend `mpi4py`; run by mpi_checks.py."""

import threading

import pytest
import torch
import torch.distributed as dist

from mpi_check_kit import check
from mpi_check_shared import in_shared_memory, shared_group
from ppe_ddp.backends.shared_memory import shared_reservation


@check()
def shared_memory_of_two_threads():
    """A reduce function's thread and the main thread allocate at the same time: they get different memory."""

    memory, join_ranges = shared_reservation.SharedMemory(), shared_reservation._joined
    of_the_thread = []
    thread = threading.Thread(target=lambda: of_the_thread.append(memory.allocate(5, torch.float32)))

    def interrupted(ranges):
        joined = join_ranges(ranges)
        if threading.current_thread() is not thread:
            thread.start()
            thread.join(0.1)  # it must not come through before this allocation is over
        return joined

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_reservation, "_joined", interrupted)
        mine = memory.allocate(5, torch.float32)
        thread.join()
    assert memory.position(mine) != memory.position(of_the_thread[0])


@check(ranks=2)
def shared_sums_that_are_dropped_keep_their_memory():
    """Until every rank has done its part: it would write into what lies there by then."""
    from mpi4py import MPI

    rank, size = dist.get_rank(), dist.get_world_size()
    group, apart = shared_group(), MPI.COMM_WORLD.Dup()
    last = in_shared_memory(torch.ones(1000), group)
    dist.all_reduce(last, group=group)  # all is connected, and nothing is under way
    if rank < size - 1:
        work = dist.all_reduce(last, group=group, async_op=True)
        apart.Barrier()  # all the others have come, and none has done its part
        apart.Barrier()
    else:
        dropped = in_shared_memory(torch.ones(1000), group)
        apart.Barrier()
        work = dist.all_reduce(dropped, group=group, async_op=True)  # does this rank's part
        del work, dropped
        again = in_shared_memory(torch.full((1000,), 7.0), group)
        apart.Barrier()
    if rank < size - 1:
        work.wait()
        apart.Barrier()
    else:
        apart.Barrier()
        assert again.tolist() == [7.0] * 1000


@check(ranks=2)
def shared_stages_are_left_alone_until_all_have_read_them():
    """A collective that ends with an error leaves its copy under way, which the next one must not overwrite."""
    from mpi4py import MPI

    from ppe_ddp import CommunicationError
    from ppe_ddp.backends.shared_memory.shared_steps import AllReduceStep
    from ppe_ddp.backends.shared_memory.step_queue import StepQueue

    rank, size = dist.get_rank(), dist.get_world_size()
    group, apart = shared_group(), MPI.COMM_WORLD.Dup()
    dist.all_reduce(torch.ones(1000), group=group)
    if rank < size - 1:
        ones = [in_shared_memory(torch.ones(1000), group) for _ in range(2)]
        works = [dist.all_reduce(one, group=group, async_op=True) for one in ones]
        apart.Barrier()  # all the others have come, and none has done its part
        apart.Barrier()
        for work in works:
            work.wait()
        assert [one.tolist() for one in ones] == [[size] * 1000, [size + 6] * 1000]
        return
    stage, staged = AllReduceStep.stage, threading.Event()

    def note_stage(self, *arguments):
        stage(self, *arguments)
        staged.set()

    def fail(self, step):
        raise CommunicationError("on purpose")

    apart.Barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepQueue, "finish", fail)
        with pytest.raises(CommunicationError, match="on purpose"):
            dist.all_reduce(torch.ones(1000), group=group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AllReduceStep, "stage", note_stage)
        thread = threading.Thread(target=lambda: dist.all_reduce(torch.full((1000,), 7.0), group=group))
        thread.start()
        staged.wait(0.1)  # it must not come so far before the others have done their part
        apart.Barrier()
        thread.join()
