"""Checks of messages and of groups over the backend `mpi4py`; run by mpi_checks.py."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mpi_check_communicators import few_communicators
from mpi_check_kit import assert_same, check, data, is_over_mpi
from ppe_ddp.errors import UnusableError


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


@check()
def a_forked_process_is_refused():
    group = dist.new_group()
    pid, group._pid = group._pid, 0  # as in another process
    total = torch.ones(3)
    with pytest.raises(UnusableError, match="all_reduce in a process that was forked"):
        dist.all_reduce(total, group=group)
    with pytest.raises(UnusableError, match="send in a process that was forked"):
        group.send([total], 0)
    group.shutdown()  # as `destroy_process_group()` does there
    group._pid = pid
    dist.all_reduce(total, group=group)
    assert total.tolist() == [group.size()] * 3
    dist.destroy_process_group(group)


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


@check(most=1)
def a_message_is_not_tested_by_two_threads_at_once():
    """MPI frees the request in the test that finds it complete, and the other one would read freed memory."""
    if not is_over_mpi():
        return
    from ppe_ddp.backends.mpi.mpi_wire import MpiMessage

    class Request:
        tests = 0

        def Test(self, status):
            self.tests += 1
            if self.tests == 1:
                self.other.start()
                self.other.join(0.1)  # it waits for this one, or tests, too
            return True

    request = Request()
    message = MpiMessage(lambda: request, torch.empty(1), bool)
    request.other = threading.Thread(target=message.done)
    assert message.start()
    assert message.done()
    request.other.join()
    assert request.tests == 1


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
def messages_from_anyone_keep_their_order():
    """A receive gets the first message that fits, in the order of the calls, whichever is waited for first."""
    rank = dist.get_rank()
    mixed = [[None, 1], [1, None], [None, 1, None]] if is_over_mpi() else []  # gloo has no such order
    for sources in ([None, None], *mixed):
        got = [torch.zeros(1) for _ in sources]
        if rank == 0:
            works = [dist.irecv(one, source, tag=5) for one, source in zip(got, sources, strict=True)]
            other = dist.irecv(torch.zeros(1), 1, tag=6)
        dist.barrier()
        if rank == 1:
            dist.send(torch.zeros(1), 0, tag=6)
            for number in range(len(sources)):
                dist.send(torch.full((1,), float(number)), 0, tag=5)
        if rank == 0:
            for work in [other, *reversed(works)]:
                work.wait()
            assert [one.item() for one in got] == [*range(len(sources))]
            assert [work.source_rank() for work in works] == [1] * len(works)


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


@check(ranks=2, most=2)
def many_groups():
    """An MPI has few communicators (2048 in MPICH): those of destroyed groups must come back."""
    with few_communicators():
        for _ in range(20):
            dist.destroy_process_group(dist.new_group([dist.get_rank()], use_local_synchronization=True))


@check()
def another_backend_for_other_devices():
    rank, size = dist.get_rank(), dist.get_world_size()
    own = dist.get_backend()
    group = dist.new_group(backend=f"cpu:{own},cuda:gloo")
    total = torch.ones(2)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [size] * 2
    assert group._group("cpu").name() == own
    assert group._get_backend(torch.device("cuda")).name() == "gloo"
    group._group("cuda").allreduce([total]).wait()
    assert total.tolist() == [size**2] * 2
    half = dist.new_group(list(range(0, size, 2)), backend=f"cpu:{own},cuda:gloo")
    if rank % 2 == 0:
        dist.all_reduce(total, group=half)
    dist.destroy_process_group(group)


@check()
def mixed_with_gloo():
    group = dist.new_group(backend="gloo")
    total = torch.ones(2)
    dist.all_reduce(total, group=group)
    assert total.tolist() == [dist.get_world_size()] * 2


@check(ranks=2)
def coalesced_calls_are_waited_for_together():
    """MpiMessages, a sum in shared memory and calls on the thread: whose own Works torch throws away."""
    from mpi_check_shared import in_shared_memory, shared_group

    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [None, shared_group()]
    if is_over_mpi():
        from mpi_check_thread import thread_group

        groups.append(thread_group())
    for group in groups:
        known = group or dist.group.WORLD
        allocate = in_shared_memory if group is shared_group() else lambda tensor, _: tensor
        total = allocate(torch.full((50_000,), float(rank)), known)
        received, sent = torch.zeros(3), torch.full((3,), float(rank))
        known._start_coalescing(torch.device("cpu"))
        known.allreduce([total])
        dist.irecv(received, group=group, group_src=(rank - 1) % size)
        dist.isend(sent, group=group, group_dst=(rank + 1) % size)
        work = known._end_coalescing(torch.device("cpu"))
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert received.tolist() == [(rank - 1) % size] * 3
        assert set(total.tolist()) == {size * (size - 1) / 2}
        assert work.get_future().wait() == work.result()
