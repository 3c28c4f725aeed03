"""Checks that failed steps leave no communicators behind, of which MPI has only so many; run by mpi_checks.py."""

import gc
import itertools
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

import failing
import failing_shards
from mpi_check_kit import check
from one_process import assert_gradients, mean_gradients, seeded, square
from ppe_ddp import DisagreementError, DistributedDataParallel, PeerAbortedError, broadcast
from ppe_ddp.backends.rank_store import exchange
from ppe_ddp.engine.groups import Groups

_MOST = 2100  # MPICH has 2048; an MPI without such a limit passes
_FEW = 6
_turns = itertools.count()


@contextmanager
def few_communicators():
    """So few are left that a step that loses two soon ends in an error; called by all ranks together."""
    from mpi4py import MPI

    left = [MPI.COMM_WORLD.Dup() for _ in range(_FEW)]
    taken = []
    try:
        while len(taken) < _MOST:
            taken.append(MPI.COMM_SELF.Dup())  # which needs no other rank, and takes a number all the same
    except MPI.Exception:
        pass
    for one in left:
        one.Free()
    try:
        yield
    finally:
        for one in taken:
            one.Free()


@check("in_the_wait", "in_backward", ranks=2, most=2)
def failed_steps_give_their_communicators_back(way):
    with few_communicators():
        failing.hold(way, turns=5)


@check(ranks=2, most=2)
def nothing_is_left_of_failures():
    failing.hold_without_a_trace("in_backward")


@check(ranks=2, most=2)
def failed_steps_of_shards_give_their_communicators_back():
    with few_communicators():
        failing_shards.hold_optimizer("before_the_scatter", turns=5)


@check("sending", "before_the_others", ranks=2, most=2)
def failed_starts_give_their_communicators_back(when):
    rank, size = dist.get_rank(), dist.get_world_size()
    with few_communicators():
        for culprit in [*range(size)] * 2:
            with failing_start(when, is_culprit=rank == culprit) as function:
                expected = failing.Refused if rank == culprit else PeerAbortedError
                with pytest.raises(expected, match="not today"):
                    DistributedDataParallel(nn.Linear(3, 3), broadcast_function=function)
            gc.collect()
        module = seeded(nn.Linear, 4, 2)
        wrapper, expected = DistributedDataParallel(module), mean_gradients(module, square)
        square(wrapper, rank)
        assert_gradients(module, expected)


@contextmanager
def failing_start(when, *, is_culprit):
    """A broadcast function; one rank fails in it, or when it has received what it starts from."""

    def send(tensors, group):
        if is_culprit and when == "sending":
            raise failing.Refused("not today")
        return broadcast(tensors, group)

    def refuse(_groups):
        raise failing.Refused("not today")

    with pytest.MonkeyPatch.context() as patches:
        if is_culprit and when == "before_the_others":
            patches.setattr(Groups, "await_start", refuse)
        yield send


@check(ranks=2, most=2)
def groups_that_one_rank_has_closed_and_no_wrapper_uses_give_their_communicators_back():
    rank, total = dist.get_rank(), torch.ones(1)
    with few_communicators():
        for culprit in [*range(dist.get_world_size())] * 3:
            groups = Groups.duplicate(dist.group.WORLD)
            dist.all_reduce(total, group=groups.buckets)
            dist.barrier()
            if rank == culprit:
                groups.fail(RuntimeError("after all others were through"), "finish")
            groups.release()


def calls_on(group):
    """Collectives that a rank can begin before the others, by name, with all memory that MPI may write.

    All numbers are the same, so that what comes from a rank that has begun it changes nothing.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    one, rows = torch.full((6,), 3.0), torch.full((6 * size,), 3.0)
    uneven = [torch.full((2 + other,), 3.0) for other in range(size)]
    sent = [torch.full((2 + rank,), 3.0) for _ in range(size)]
    begun = {"group": group, "async_op": True}
    return {
        "all_reduce": (lambda: dist.all_reduce(one, **begun), [one]),
        "reduce": (lambda: dist.reduce(one, size - 1, **begun), []),  # adds what has come by then
        "broadcast of the first": (lambda: dist.broadcast(one, 0, **begun), [one]),
        "broadcast of the last": (lambda: dist.broadcast(one, size - 1, **begun), [one]),
        "all_gather": (lambda: group.all_gather_single(rows, one), [rows, one]),
        "all_gather of lists": (lambda: dist.all_gather(uneven, uneven[rank].clone(), **begun), uneven),
        "reduce_scatter": (lambda: group.reduce_scatter_single(one, rows), [rows, one]),
        "all_to_all": (lambda: dist.all_to_all(uneven, sent, **begun), [*uneven, *sent]),
        "barrier": (lambda: dist.barrier(group, async_op=True), []),
    }


CALLS = (
    "all_reduce",
    "reduce",
    "broadcast of the first",
    "broadcast of the last",
    "all_gather",
    "all_gather of lists",
    "reduce_scatter",
    "all_to_all",
    "barrier",
)


def give_up(group):
    dist.barrier()  # else the group might have ended before another rank has begun what it is to begin
    group.abort()
    turn = next(_turns)
    group.release(lambda what, word: exchange(dist.group.WORLD, f"communicators/{turn}/{what}", word))
    dist.destroy_process_group(group)


@check(*CALLS, ranks=2, most=2)
def a_call_that_some_ranks_have_not_made_is_made_up(name):
    """By zeros that nobody sees: memory stays as it is, and new groups get what they send themselves."""
    size = dist.get_world_size()
    with few_communicators():
        for culprit in [*range(size)] * 5:
            group = dist.new_group()
            call, memory = calls_on(group)[name]
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            assert total.item() == size
            if dist.get_rank() != culprit:
                call()
            give_up(group)
            assert {value for tensor in memory for value in tensor.tolist()} <= {3.0}


@check(ranks=2, most=2)
def calls_that_do_not_belong_together_are_left():
    """Nothing is freed in which messages of a user's may be under way, or other collectives than on the other ranks."""
    rank = dist.get_rank()
    for way in ("message", "collective"):
        group = dist.new_group()
        if way == "message" and rank == 0:
            dist.isend(torch.ones(1), 1, group=group)
        elif way == "collective":
            calls_on(group)["all_gather" if rank else "all_reduce"][0]()
        give_up(group)
        total = torch.ones(1)
        dist.all_reduce(total, group=dist.new_group())
        assert total.item() == dist.get_world_size()


@check(ranks=2, most=2)
def options_that_one_rank_has_otherwise():
    from ppe_ddp.backends.mpi import MpiOptions

    rank = dist.get_rank()
    with pytest.raises(DisagreementError, match=r"rank 1 .*piece_bytes=2000.*Give the same on every rank"):
        dist.new_group(pg_options=MpiOptions(piece_bytes=2000 if rank == 1 else 1000))
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group(pg_options=MpiOptions(thread=rank == 1)))  # which may be so
    assert total.item() == dist.get_world_size()
