"""With PPE_DDP_DEBUG=1 what the ranks call is compared before it runs, and an error on all of them says who differs."""

import pytest
import torch
import torch.distributed as dist

import failing
from one_process import assert_gradients, data, mean_gradients, mlp, seeded
from ppe_ddp import DisagreementError, DistributedDataParallel
from ppe_ddp.backends.shm import ShmOptions
from rank_tests import on_three_ranks, on_two_ranks

ODD = {
    "dtype": (lambda one, group: dist.all_reduce(one.double(), group=group), r"all_reduce\(float64 x 6, SUM\)"),
    "size": (lambda one, group: dist.all_reduce(one[1:], group=group), r"all_reduce\(float32 x 5, SUM\)"),
    "operation": (lambda one, group: dist.broadcast(one, 0, group=group), r"broadcast\(float32 x 6, root 0\)"),
    "reduction": (
        lambda one, group: dist.all_reduce(one, dist.ReduceOp.MAX, group=group),
        r"all_reduce\(float32 x 6, MAX\)",
    ),
}
"""What one rank calls where the others add up six numbers."""


def debug(monkeypatch):
    monkeypatch.setenv("PPE_DDP_DEBUG", "1")


@pytest.mark.parametrize("shared", [True, False], ids=["shm", "gloo"])
@pytest.mark.parametrize("kind", ODD)
@on_three_ranks
def test_one_rank_calls_something_else(kind, shared):
    rank = dist.get_rank()
    odd, text = ODD[kind]
    with pytest.MonkeyPatch.context() as patch:
        debug(patch)
        group = dist.new_group(backend="shm", pg_options=ShmOptions(shared_memory=shared))
        dist.all_reduce(torch.ones(2), group=group)
        one = torch.ones(6)
        with pytest.raises(
            DisagreementError, match=rf"rank {rank} of 3, .*, number 2 of this group: .*rank 1 has called {text}"
        ) as caught:
            odd(one, group) if rank == 1 else dist.all_reduce(one, group=group)
        assert "rank 0, 2 has called all_reduce(float32 x 6, SUM)" in str(caught.value)
        assert set(one.tolist()) == {1.0}  # nothing was sent
        with pytest.raises(DisagreementError):
            dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)


def in_other_orders(shared):
    """The order of calls on different groups is free, as without the comparison."""
    rank = dist.get_rank()
    groups = [dist.new_group(backend="shm", pg_options=ShmOptions(shared_memory=shared)) for _ in range(2)]
    works = []
    totals = [torch.ones(3) for _ in range(4)]
    for place in (0, 1, 2, 3) if rank else (1, 0, 3, 2):
        works.append(dist.all_reduce(totals[place], group=groups[place % 2], async_op=True))
    for work in works:
        work.wait()
    assert all(set(total.tolist()) == {2.0} for total in totals)


@pytest.mark.parametrize("shared", [True, False], ids=["shm", "gloo"])
@on_two_ranks
def test_calls_that_agree_go_as_without_it(shared):
    with pytest.MonkeyPatch.context() as patch:
        debug(patch)
        in_other_orders(shared)
        group = dist.new_group(backend="shm", pg_options=ShmOptions(shared_memory=shared))
        rank, size = dist.get_rank(), dist.get_world_size()
        uneven = [torch.zeros(1 + other) for other in range(size)]
        dist.all_gather(uneven, torch.full((1 + rank,), float(rank)), group=group)
        assert [part.tolist() for part in uneven] == [[0.0], [1.0, 1.0]]
        gathered = [torch.zeros(1) for _ in range(size)] if rank == 0 else None
        dist.gather(torch.full((1,), float(rank)), gathered, 0, group=group)
        assert rank or [part.item() for part in gathered] == [0.0, 1.0]
        dist.barrier(group)


def square(model, rank):
    model(data(5, 4, rank=rank)).pow(2).sum().backward()


@pytest.mark.parametrize("shared", [True, False], ids=["shm", "gloo"])
@on_two_ranks
def test_a_reduce_function_that_differs_on_one_rank(shared):
    rank, calls = dist.get_rank(), []

    def add_up(gradients, group):
        calls.append(len(gradients))
        for gradient in gradients:
            wire = gradient.double() if rank and len(calls) == 1 else gradient
            dist.all_reduce(wire, group=group)
            gradient.copy_(wire / 2)

    module = seeded(mlp, 4, 2)
    mean = mean_gradients(module, square)
    with pytest.MonkeyPatch.context() as patch:
        debug(patch)
        wrapper = DistributedDataParallel(module, reduce_function=add_up, shared_memory=shared)
        with pytest.raises(DisagreementError, match=r"rank 1 has called all_reduce\(float64 x "):
            square(wrapper, rank)
        for _ in range(2):
            wrapper.zero_grad()
            square(wrapper, rank)
            assert_gradients(module, mean)


@pytest.mark.parametrize("way", ["in_the_middle", "in_backward"])
@on_two_ranks
def test_one_rank_that_fails_is_told_as_without_it(way):
    with pytest.MonkeyPatch.context() as patch:
        debug(patch)
        failing.hold(way, turns=2)


@on_two_ranks
def test_it_is_on_for_all_ranks_or_none():
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            debug(patch)
        with pytest.raises(DisagreementError, match=r"rank 1 with .*PPE_DDP_DEBUG=1|rank 1 makes it with .*DEBUG=1"):
            dist.new_group(backend="shm")
