"""Communication of the user's own, in forward, in backward and after an error: no deadlock at any speed."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from one_process import assert_gradients, assert_same_on_all_ranks, data, mean_gradients, seeded
from ppe_ddp import DistributedDataParallel, PeerAbortedError
from rank_tests import each_variant, on_three_ranks, on_two_ranks
from test_graphs_broken import Broken, Fused
from test_graphs_broken import step as one_step


class Busy(torch.autograd.Function):
    """Keeps backward busy for a while."""

    @staticmethod
    def forward(ctx, x, rounds):
        ctx.rounds = rounds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        square = torch.ones(200, 200)
        for _ in range(ctx.rounds):
            square = square @ square / 200
        return gradient * square[0, 0], None


class AllToAll(torch.autograd.Function):
    """Row r of each rank goes to rank r; in backward its gradient comes back."""

    @staticmethod
    def forward(ctx, rows):
        return _exchanged(rows)

    @staticmethod
    def backward(ctx, gradient):
        return _exchanged(gradient)


def _exchanged(rows):
    output = torch.empty_like(rows)
    dist.all_to_all_single(output, rows.contiguous())
    return output


class Experts(nn.Module):
    """A router's map before the exchange, an expert's after it, twice; every rank may be slow where it likes."""

    def __init__(self):
        super().__init__()
        self.before = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.after = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.used = [True, True]
        self.rounds = 0

    def forward(self, rows):
        for before, after, is_used in zip(self.before, self.after, self.used, strict=True):
            rows = AllToAll.apply(Busy.apply(torch.tanh(before(rows)), self.rounds))
            rows = torch.tanh(after(rows)) if is_used else rows
        return rows


def in_one_process(module, used, step):
    """The mean gradients, with the rows of all ranks in one batch."""
    size, twin = dist.get_world_size(), copy.deepcopy(module)
    twin.zero_grad()
    rows = [data(size, 3, rank=rank, step=step) for rank in range(size)]
    for k in range(2):
        sent = [torch.tanh(twin.before[k](one)) for one in rows]
        rows = [torch.stack([sent[source][rank] for source in range(size)]) for rank in range(size)]
        rows = [torch.tanh(twin.after[k](one)) if used[rank][k] else one for rank, one in enumerate(rows)]
    sum(one.pow(2).sum() for one in rows).backward()
    return {
        name: None if parameter.grad is None else parameter.grad / size for name, parameter in twin.named_parameters()
    }


@each_variant
@on_three_ranks
def test_all_to_all_in_backward(options):
    rank, size, module = dist.get_rank(), dist.get_world_size(), seeded(Experts)
    wrapper = DistributedDataParallel(module, **options)
    for step in range(4):
        used = [[(step + other) % 2 == 0, step == 3] for other in range(size)]  # the second by nobody, at first
        want = in_one_process(module, used, step)
        module.used, module.rounds = used[rank], 40 if rank == step % size else 0
        wrapper.zero_grad()
        wrapper(data(size, 3, step=step)).pow(2).sum().backward()
        assert_gradients(module, want)
        assert_same_on_all_ranks(module)


@each_variant
@on_two_ranks
def test_a_collective_in_a_hook_of_one_parameter(options):
    """Called when its gradient comes, before or after others: which buckets are under way by then differs."""
    rank, module = dist.get_rank(), seeded(Fused)
    sums = []
    wrapper = DistributedDataParallel(module, **options)

    def add_up(parameter):
        total = torch.ones(300)
        dist.all_reduce(total)
        sums.append(total[-1].item())

    for step in range(3):
        layer = module.layers[step]
        handle = layer.weight.register_post_accumulate_grad_hook(add_up)
        want = mean_gradients(copy.deepcopy(module), one_step)  # copies have no hooks
        wrapper.zero_grad()
        one_step(wrapper, rank)
        assert_gradients(module, want)
        handle.remove()
    assert sums == [2.0] * 3


@each_variant
@on_two_ranks
def test_a_flag_is_reduced_after_an_error_that_was_caught(options):
    """Does any rank skip this step? All do, and the next one is right; by the group that the wrapper was given."""
    rank, module = dist.get_rank(), seeded(Fused)
    wrapper = DistributedDataParallel(module, **options)
    want = mean_gradients(module, one_step)
    for step in range(4):
        wrapper.zero_grad()
        breaks = {1: 0, 2: 1}.get(step)
        flag, raised = torch.zeros(1), None
        try:
            one_step(wrapper, rank, place=2 if rank == breaks else None)
        except (Broken, PeerAbortedError) as error:
            raised = type(error)
            flag += 1
        dist.all_reduce(flag)
        assert raised is (None if breaks is None else Broken if rank == breaks else PeerAbortedError)
        assert flag.item() == (0 if breaks is None else 2)
        if breaks is None:
            assert_gradients(module, want)


@pytest.mark.parametrize("slow", [0, 1])
@on_two_ranks
def test_a_rank_communicates_while_the_other_is_in_backward(slow):
    """One has begun a sum of its own before its backward, the other begins it afterwards."""
    rank, module = dist.get_rank(), seeded(Fused)
    wrapper = DistributedDataParallel(module)
    want = mean_gradients(module, one_step)
    for _ in range(2):
        wrapper.zero_grad()
        total = torch.ones(300)
        work = dist.all_reduce(total, async_op=True) if rank == slow else None
        one_step(wrapper, rank)
        work = work or dist.all_reduce(total, async_op=True)
        work.wait()
        assert total.tolist() == [2.0] * 300
        assert_gradients(module, want)
