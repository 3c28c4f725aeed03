"""A backward that raises: its error, the errors of the other ranks, and that the next step is right."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from one_process import assert_gradients, assert_same_on_all_ranks, data, mean_gradients, seeded
from ppe_ddp import DistributedDataParallel, PeerAbortedError
from rank_tests import each_variant, on_two_ranks


class Broken(Exception):
    """The error that the graph raises."""


class Fuse(torch.autograd.Function):
    """Passes through, and raises in backward where it is told to."""

    @staticmethod
    def forward(ctx, x, blows):
        ctx.blows = blows
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.blows:
            raise Broken("blown")
        return gradient, None


class Fused(nn.Module):
    """A fuse between its layers, and one before them: the last in backward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, place=None):
        x = x.clone().requires_grad_()
        for k, layer in enumerate(self.layers):
            x = Fuse.apply(x, place == k)
            x = torch.tanh(layer(x))
        return Fuse.apply(x, place == len(self.layers))


def step(model, rank, dtype=torch.float32, **kwargs):
    model(data(5, 4, rank=rank, dtype=dtype), **kwargs).pow(2).sum().backward()


# 4: before any gradient has arrived; 2: in the middle; 0: when all of them have.
each_place = pytest.mark.parametrize("place", [4, 2, 0])


@each_place
@each_variant
@on_two_ranks
def test_on_all_ranks_and_a_fresh_step(place, options):
    wrapper = DistributedDataParallel(seeded(Fused), **options)
    expected = mean_gradients(wrapper.module, step)
    for _ in range(3):
        with pytest.raises(Broken, match="blown"):
            step(wrapper, dist.get_rank(), place=place)
        wrapper.zero_grad()
        # The next one starts where the last broke off: on each rank the others have given up as well.
        try:
            step(wrapper, dist.get_rank())
        except PeerAbortedError:
            wrapper.zero_grad()
            step(wrapper, dist.get_rank())
        assert_gradients(wrapper.module, expected)
        assert_same_on_all_ranks(wrapper.module)


@on_two_ranks
def test_a_caught_error_that_is_kept_does_not_keep_the_backward():
    # A traceback holds the frames of the backward; the next forward has to see that it is over all the same.
    rank = dist.get_rank()
    wrapper = DistributedDataParallel(seeded(Fused))
    expected = mean_gradients(wrapper.module, step)
    kept = []
    gc.disable()
    try:
        for turn in range(2):
            try:
                step(wrapper, rank, place=1 if rank == turn else None)
            except (Broken, PeerAbortedError) as error:
                kept.append(error)
            wrapper.zero_grad()
            step(wrapper, rank)
            assert_gradients(wrapper.module, expected)
    finally:
        gc.enable()
    assert isinstance(kept[rank], Broken)
    assert isinstance(kept[1 - rank], PeerAbortedError)


@on_two_ranks
def test_in_no_sync_nobody_else_hears_of_it():
    rank = dist.get_rank()
    wrapper = DistributedDataParallel(seeded(Fused))
    expected = mean_gradients(wrapper.module, step)
    if rank == 0:
        with wrapper.no_sync(), pytest.raises(Broken):
            step(wrapper, rank, place=1)
        wrapper.zero_grad()
    step(wrapper, rank)
    assert_gradients(wrapper.module, expected)


class Normed(Fused):
    """With buffers, which are broadcast after each backward."""

    def __init__(self):
        super().__init__()
        self.layers.insert(2, nn.BatchNorm1d(4))
        self.register_buffer("spare", torch.zeros(2))


def freeze(wrapper):
    wrapper.module.layers[0].requires_grad_(False)


def append(wrapper):
    wrapper.module.layers.append(seeded(nn.Linear, 4, 4))


def remove(wrapper):
    del wrapper.module.layers[0]


def cast(wrapper):
    wrapper.module.double()


def assign(wrapper):
    state = {name: tensor.clone() for name, tensor in wrapper.state_dict().items()}
    wrapper.load_state_dict(state, assign=True)


def load_other_values(wrapper):
    wrapper.load_state_dict({name: torch.ones_like(tensor) for name, tensor in wrapper.state_dict().items()})


def change_buffers(wrapper):
    wrapper.module.spare = wrapper.module.spare.double()
    wrapper.module.register_buffer("another", torch.zeros(3))


def hook(wrapper):
    wrapper.register_comm_hook(None, allreduce_hook)


CHANGES = [freeze, append, remove, cast, assign, load_other_values, change_buffers, hook]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@on_two_ranks
def test_a_module_that_is_changed_before_the_others_go_on(change):
    rank = dist.get_rank()
    for turn, place in enumerate([5, 2]):
        wrapper = DistributedDataParallel(seeded(Normed))
        if rank == turn:
            with pytest.raises(Broken, match="blown"):
                step(wrapper, rank, place=place)
        else:
            with pytest.raises(PeerAbortedError, match=f"rank {turn} failed in"):
                step(wrapper, rank)
        wrapper.zero_grad()
        change(wrapper)
        dtype = wrapper.module.layers[0].weight.dtype

        def changed(model, rank, dtype=dtype):
            step(model, rank, dtype=dtype)

        for _ in range(2):
            expected = mean_gradients(wrapper.module, changed)
            wrapper.zero_grad()
            changed(wrapper, rank)
            assert_gradients(wrapper.module, expected)
            assert_same_on_all_ranks(wrapper.module)


@on_two_ranks
def test_shards_are_made_after_a_first_step_whose_mask_only_one_rank_has_read():
    rank = dist.get_rank()
    wrapper = DistributedDataParallel(seeded(lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))))
    if rank:
        handle = wrapper.module[90].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError if rank else PeerAbortedError):
        wrapper(torch.ones(1, 2)).sum().backward()
    if rank:
        handle.remove()
    sharded = wrapper.sharded()
    wrapper.zero_grad()
    wrapper(torch.ones(1, 2)).sum().backward()
    assert len(sharded.gradients()) == 200


@on_two_ranks
def test_shards_are_made_when_the_others_have_gone_on():
    rank = dist.get_rank()
    wrapper = DistributedDataParallel(seeded(Normed))
    with pytest.raises(Broken if rank else PeerAbortedError):
        step(wrapper, rank, place=2 if rank else None)
    freeze(wrapper)
    sharded = wrapper.sharded()
    step(wrapper, rank)
    assert sum(gradient is not None for gradient in sharded.gradients()) == len(list(wrapper.parameters())) - 2
