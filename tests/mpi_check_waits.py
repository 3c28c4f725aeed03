"""Checks of waits that end, well or with an error, over the backend `mpi4py`; run by mpi_checks.py."""

from datetime import timedelta
from time import monotonic

import pytest
import torch
import torch.distributed as dist

from failing import SECONDS
from mpi_check_kit import check, group_options, is_over_mpi
from mpi_check_shared import in_shared_memory, shared_group
from ppe_ddp import CommunicationError
from ppe_ddp.testing.probes import probe_backend


def begin_calls(group):
    """Begin one collective of each kind, each in the way that it goes; what is to be seen when all are over."""
    rank, size = dist.get_rank(), dist.get_world_size()
    small, large, pieces, half = (torch.ones(count, dtype=kind) for count, kind in KINDS)
    inside = in_shared_memory(torch.ones(1000), group)
    sent, rows, parts = torch.full((3,), float(rank)), torch.zeros(size, 3), [torch.zeros(3) for _ in range(size)]
    first = torch.full((5,), float(rank))
    works = [dist.all_reduce(one, group=group, async_op=True) for one in (small, large, inside, pieces, half)]
    works += [
        dist.broadcast(first, 0, group=group, async_op=True),
        group.all_gather_single(rows, sent),
        dist.all_gather(parts, sent, group=group, async_op=True),
        dist.barrier(group, async_op=True),
    ]

    def check():
        for total in (small, large, inside, pieces, half):
            assert set(total.tolist()) == {size}
        assert first.tolist() == [0.0] * 5
        assert rows.tolist() == torch.stack(parts).tolist() == [[float(other)] * 3 for other in range(size)]

    return works, check


KINDS = ((1, torch.float32), (1000, torch.float32), (30_000, torch.int32), (1000, torch.bfloat16))


@check("by messages", "in shared memory", ranks=2)
def waits_move_what_is_outstanding_on_other_groups(way):
    """Ranks begin the collectives of two groups in another order, and wait for them: no wait stands in the way."""
    rank = dist.get_rank()
    shared = way == "in shared memory"
    made = shared_group().pg_options
    if not shared:
        made = group_options(shared_bytes=1 << 30, **({"piece_bytes": 1000} if is_over_mpi() else {}))
    groups = [dist.new_group(pg_options=made, timeout=timedelta(seconds=SECONDS)) for _ in range(2)]
    for turn in range(3):
        begun = [begin_calls(group) for group in (groups if (rank + turn) % 2 else reversed(groups))]
        for works, check_all in begun:
            if turn == 2:
                torch.futures.collect_all([work.get_future() for work in works]).wait()
            for work in works if turn else reversed(works):
                work.wait()
            check_all()


def calls_of(group):
    """One call of each way to wait, by name; not to be made by all ranks."""
    size = dist.get_world_size()
    inside = in_shared_memory(torch.ones(1000), group)
    return {
        "all_reduce": lambda: dist.all_reduce(torch.ones(1), group=group),
        "all_reduce in shared memory": lambda: dist.all_reduce(inside, group=group),
        "broadcast": lambda: dist.broadcast(torch.ones(1), size - 1, group=group),
        "all_gather": lambda: dist.all_gather([torch.ones(1) for _ in range(size)], torch.ones(1), group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.ones(size), torch.ones(size), group=group),
        "barrier": lambda: dist.barrier(group),
        "receive": lambda: dist.recv(torch.ones(1), size - 1, group=group),
    }


def new_group():
    return dist.new_group(pg_options=shared_group().pg_options, timeout=timedelta(seconds=SECONDS))


def impatient_group():
    """Its waits are soon over; the ranks have more time to make it, on a machine that may be busy."""
    group = new_group()
    group._waits.timeout = 0.05
    return group


CALLS = ("all_reduce", "all_reduce in shared memory", "broadcast", "all_gather", "all_to_all", "barrier", "receive")


@check(*CALLS, ranks=2, most=2)
def waits_for_a_rank_that_gives_up(name):
    """The others leave their waits with an error that names it; other groups, and new ones, work."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(2):
        group = new_group()
        calls = calls_of(group)
        dist.barrier()
        if rank == size - 1:
            group.abort()
        else:
            start = monotonic()
            with pytest.raises(CommunicationError, match=f"failed: rank {size - 1} has given this group up"):
                calls[name]()
            assert monotonic() - start < SECONDS
            with pytest.raises(CommunicationError, match=f"rank {rank} of {size}.*failed: rank {size - 1}"):
                dist.barrier(group)
        dist.destroy_process_group(group)
        one = torch.ones(1)
        dist.all_reduce(one)
        assert one.item() == size


@check(*CALLS[:-1], ranks=2, most=2)
def waits_for_a_rank_that_does_not_come(name):
    """They end at the timeout, with an error; the rank that comes later is told."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = impatient_group()
    calls = calls_of(group)
    dist.barrier()
    if rank == 0:
        is_known = not group.nodes or not is_over_mpi()
        who = "rank 1.* did" if is_known else "another rank did"
        with pytest.raises(CommunicationError, match=f"{name.split()[0]}.* timeout of 0.05 s: {who} not make the call"):
            calls[name]()
    dist.barrier()
    with pytest.raises(CommunicationError, match=r"all_reduce over (MPI|shm) failed"):
        calls["all_reduce"]()
    dist.destroy_process_group(group)
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == size


@check("by messages", "in shared memory", ranks=2, most=2)
def futures_that_no_other_rank_completes(way):
    """A thread waits for them: it ends at the timeout, too, and who waits for the future gets the error."""
    group = impatient_group()
    total = torch.ones(1000 if way == "in shared memory" else 1)
    dist.barrier()
    if dist.get_rank() == 0:
        future = dist.all_reduce(total, group=group, async_op=True).get_future()
        assert not future.done()
        with pytest.raises(CommunicationError, match=r"all_reduce has waited for the group's timeout of 0\.05 s"):
            future.wait()
    dist.barrier()


@check(ranks=2)
def waits_that_an_interrupt_ends():
    """Ctrl-C comes through, and what was waited for goes on: the ranks stay in step."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), new_group()
    inside = in_shared_memory(torch.ones(1000), group)
    totals = [torch.ones(1), torch.ones(1000), inside]

    def interrupt(*_):
        raise KeyboardInterrupt

    if rank == 0:
        for total in totals:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(group._waits), "until", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    dist.all_reduce(total, group=group)
    dist.barrier()  # nobody else has come before
    if rank > 0:
        for total in totals:
            dist.all_reduce(total, group=group)
    dist.barrier(group)
    dist.all_reduce(torch.ones(1000), group=group)  # what was begun before it is over, in shared memory too
    assert [set(total.tolist()) for total in totals] == [{size}] * 3


@check(ranks=2, most=2)
def a_group_that_one_rank_does_not_make():
    if dist.get_rank() == 1:
        with pytest.raises(
            CommunicationError, match=r"rank 1: making group .* of ranks \[0, 1\] .* of 0.5 s: rank 0 did"
        ):
            dist.new_group([0, 1], timedelta(seconds=0.5), use_local_synchronization=True)


def groups_missing_here(number):
    numbers = [0] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return max(numbers) - number


@check(most=2)
def the_probes_hold_again_and_again():
    # torch names groups that only their ranks make by how many groups a process has, and a newer torch by how many it
    # has made, those included that have failed: checks before have left some of either.
    world = dist.distributed_c10d._world
    for _ in range(groups_missing_here(len(world.pg_names))):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for _ in range(groups_missing_here(world.group_count)):
        dist.destroy_process_group(dist.new_group([dist.get_rank()], use_local_synchronization=True))
    for _ in range(2):
        assert probe_backend("cpu") == []
