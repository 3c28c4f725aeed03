"""Buffers that forward writes: their broadcast leaves graphs that still need them alone."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from one_process import assert_same_on_all_ranks, data, gradients, mean_of, seeded
from ppe_ddp import DistributedDataParallel, PeerAbortedError, broadcast
from rank_tests import VARIANTS, on_three_ranks, on_two_ranks


class Scaled(nn.Module):
    """Divides by a running scale that each forward writes: in place, or as a new tensor."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        new = self.scale * 0.5 + x.detach().abs().mean(0)
        if self.in_place:
            self.scale.copy_(new)
        else:
            self.scale = new
        return x / self.scale


def batch_norm():
    return nn.BatchNorm1d(4)


def new_scale():
    return Scaled(in_place=False)


def scale_in_place():
    return Scaled(in_place=True)


class Net(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(3, 4), layer(), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.layer(self.first(x))))


def loss(model, rank, step):
    return model(data(5, 3, rank=rank, step=step)).pow(2).sum()


def retained(model, rank, step):
    value = loss(model, rank, step)
    for retain in (True, True, False):
        value.backward(retain_graph=retain)
        yield


def two_losses(model, rank, step):
    output = model(data(5, 3, rank=rank, step=step))
    output.pow(2).sum().backward(retain_graph=True)
    yield
    output.exp().sum().backward()
    yield


def two_forwards(model, rank, step):
    values = loss(model, rank, step), loss(model, rank, step + 100)
    for value in values:
        value.backward()
        yield


def one_rank_retains(model, rank, step):
    value = loss(model, rank, step)
    value.backward(retain_graph=rank == 1)
    yield
    (value if rank == 1 else loss(model, rank, step + 100)).backward()
    yield


def hold(layer, steps, *, keeps=False, **options):
    """Hold a wrapper to all ranks in one process, whose buffers are the first writer's after each backward."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    wrapper = DistributedDataParallel(seeded(Net, layer), **options)
    twins = [copy.deepcopy(wrapper.module) for _ in range(world_size)]
    kept = list(wrapper.buffers()) if keeps else []
    shared = [buffer.clone() for buffer in wrapper.buffers()]
    for number, step in enumerate(steps):
        for model in (wrapper, *twins):
            model.zero_grad()
        runs = [step(twin, r, number) for r, twin in enumerate(twins)]
        # One rank's buffers are given to the others when the graphs are gone: no graph may see them.
        for k, _ in enumerate(zip(step(wrapper, rank, number), *runs, strict=True)):
            means = mean_of([gradients(twin) for twin in twins], world_size)
            for twin in twins:
                for name, parameter in twin.named_parameters():
                    parameter.grad = means[name].clone()
            for name, parameter in wrapper.module.named_parameters():
                torch.testing.assert_close(parameter.grad, means[name], msg=lambda t, at=(k, name): f"{at}: {t}")
            assert_same_on_all_ranks(wrapper.module)
            writers = [twin for twin in twins if not all(map(torch.equal, twin.buffers(), shared))]
            first = {name: buffer.clone() for name, buffer in [*writers, twins[0]][0].named_buffers()}
            shared = list(first.values())
            for twin in twins:
                for name in first:
                    owner, _, key = name.rpartition(".")
                    setattr(twin.get_submodule(owner), key, first[name].clone())
            torch.testing.assert_close(dict(wrapper.module.named_buffers()), first)
    assert all(mine is now for mine, now in zip(kept, wrapper.buffers(), strict=False))


STEPS = [retained, two_losses, two_forwards, one_rank_retains]


@on_two_ranks
def test_backwards_through_buffers_that_forward_writes():
    """As new tensors; batch norm is in random_training.py."""
    for options in VARIANTS:
        hold(new_scale, [*STEPS, *STEPS[::-1]], **options)


@on_two_ranks
def test_a_scale_written_in_place_survives_as_long_as_it_does_in_one_process():
    hold(scale_in_place, [retained, two_losses, retained])


@on_two_ranks
def test_buffers_that_the_user_holds_stay_the_same_tensors():
    hold(batch_norm, [*STEPS, *STEPS], keeps=True)


@on_two_ranks
def test_a_broadcast_function_gets_the_same_tensors_on_every_rank():
    lists = []

    def function(tensors, group):
        lists.append([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
        return broadcast(tensors, group)

    hold(batch_norm, [one_rank_retains, two_losses], broadcast_function=function)
    tables = [None] * dist.get_world_size()
    dist.all_gather_object(tables, lists)
    assert tables[0] == tables[1]


@on_two_ranks
def test_a_graph_whose_buffer_cannot_be_spared_is_refused_by_autograd():
    wrapper = DistributedDataParallel(seeded(Net, scale_in_place))
    kept = wrapper.module.layer.scale
    value = loss(wrapper, dist.get_rank(), 0)
    value.backward(retain_graph=True)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, kept)
    assert torch.equal(everyone[0], everyone[1])
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.backward()
    else:
        with pytest.raises(PeerAbortedError, match="rank 1 failed in the"):
            value.backward()
    loss(wrapper, dist.get_rank(), 1).backward()


class Towers(nn.Module):
    """A stem for all, and towers with statistics of their own, of which each call uses some."""

    def __init__(self, count=3):
        super().__init__()
        self.stem = nn.BatchNorm1d(4)
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(count))

    def forward(self, x, used):
        x = self.stem(x)
        return sum((self.towers[k](x) for k in used), x)


def statistics(module):
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def first_used(statistics_of, uses, before):
    """Of each submodule, the statistics of the first rank that has used it; else those of `before`."""
    found = dict(before)
    for other, used in reversed(list(enumerate(uses))):
        owners = ("stem.", *(f"towers.{k}." for k in used))
        found |= {name: value for name, value in statistics_of[other].items() if name.startswith(owners)}
    return found


def rank_0s(tensors, group):
    return broadcast(tensors, group)


@pytest.mark.parametrize(
    "options", [{}, {"overlap": False}, {"broadcast_function": rank_0s}], ids=["views", "after", "own"]
)
@on_three_ranks
def test_statistics_of_a_tower_are_those_of_a_rank_that_has_used_it(options):
    rank, uses_of = dist.get_rank(), torch.Generator().manual_seed(3)
    wrapper = DistributedDataParallel(seeded(Towers).double(), **options)
    twins = [copy.deepcopy(wrapper.module) for _ in range(3)]
    expected = statistics(wrapper.module)
    for step in range(12):
        # Two micro-batches; in some steps a rank has none, and one takes nothing but the stem.
        uses = [[k for k in range(3) if torch.rand((), generator=uses_of) < 0.3] for _ in range(3)]
        absent = step % 4  # 3: nobody
        for other, twin in enumerate(twins):
            twin.load_state_dict(expected, strict=False)
            for micro in range(0 if other == absent else 2):
                twin(data(5, 4, rank=other, step=2 * step + micro, dtype=torch.float64), uses[other])
        present = [[] if other == absent else used for other, used in enumerate(uses)]
        values = [statistics(twin) for twin in twins]
        if absent == 0:
            values[0] = values[1]  # who has no forward has not used the stem either
        expected = first_used(values, present, expected)
        if step == 6:
            wrapper.load_state_dict(wrapper.state_dict())  # is no use
        if rank == step % 3:
            wrapper.module.towers[0][0].weight.requires_grad_(step % 2 == 0)  # nor is another module state
        if rank == absent:
            wrapper.finish_grad_sync()
        else:
            for micro in range(2):
                with wrapper.no_sync() if micro == 0 else contextlib.nullcontext():
                    x = data(5, 4, rank=rank, step=2 * step + micro, dtype=torch.float64)
                    wrapper(x, uses[rank]).pow(2).sum().backward()
        torch.testing.assert_close(statistics(wrapper.module), expected)
    assert all(wrapper.module.towers[k][1].num_batches_tracked for k in range(3))
