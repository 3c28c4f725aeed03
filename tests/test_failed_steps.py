"""Law 8: after a failed step `.grad` is what this rank had computed, bit by bit, and the step can be taken again."""

import contextlib
import copy
import gc
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import failing_shards
from failing import WAYS, FailingNet, Refused, Switch
from one_process import data, gradients, mean_of, of_all_ranks, seeded, square
from ppe_ddp import DistributedDataParallel, DistributedOptimizer
from ppe_ddp.megatron import DistributedDataParallel as MegatronDDP
from ppe_ddp.megatron import DistributedDataParallelConfig
from rank_tests import on_three_ranks


def own_gradients(module, step):
    """What `step` leaves in `.grad` on this rank alone, from what is there now."""
    twin = copy.deepcopy(module)
    for parameter, ours in zip(twin.parameters(), module.parameters(), strict=True):
        parameter.grad = None if ours.grad is None else ours.grad.detach().clone()
    with contextlib.suppress(Refused):  # of its own backward
        step(twin)
    return {name: parameter.grad for name, parameter in twin.named_parameters()}


def assert_same_bits(got, expected, before=None, unreached=()):
    """Where an error has ended backward on its way, parameters that it has not reached have what was there before."""
    for name in expected:
        is_as_before = name.startswith(unreached) and are_same(got[name], before[name])
        assert is_as_before or are_same(got[name], expected[name]), name


def are_same(one, other):
    if one is None or other is None:
        return one is other
    return torch.equal(*(tensor.to_dense() if tensor.is_sparse else tensor for tensor in (one, other)))


def failed(step, model):
    """Whether `step` has failed on this rank."""
    try:
        step(model)
    except (Refused, RuntimeError):
        return True
    return False


@pytest.mark.parametrize("way", ["in_packing", *failing_shards.SCATTERS])
@on_three_ranks
def test_gradients_that_are_to_be_sharded_are_as_they_were(way):
    rank, switch = dist.get_rank(), Switch()
    module = seeded(FailingNet, None)
    wrapper = DistributedDataParallel(module, bucket_cap_mb=4e-5)
    optimizer = DistributedOptimizer(torch.optim.SGD, wrapper, lr=0.1)
    with pytest.MonkeyPatch.context() as patches:
        failing_shards.PATCHES[way](patches, switch)
        for culprit in range(3):
            optimizer.zero_grad()
            expected = own_gradients(module, lambda model: square(model, rank))
            switch.left = 1 if rank == culprit else -1
            there = gradients(module)
            if failed(lambda model: square(model, rank), wrapper):
                assert_same_bits(gradients(module), expected, there, ("layers.0.",))
            else:
                assert rank != culprit
                assert way == "in_the_wait"
            switch.left = -1


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("way", failing_shards.SCATTERS)
@on_three_ranks
def test_what_was_accumulated_for_shards_is_as_it_was(way, overlap):
    rank, switch = dist.get_rank(), Switch()
    module = seeded(FailingNet, None).to(torch.bfloat16)
    config = DistributedDataParallelConfig(
        bucket_size=1, grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=overlap
    )
    wrapper = MegatronDDP(None, config, module)

    def step(model, batch=0):
        model(data(5, 4, step=batch, dtype=torch.bfloat16)).pow(2).sum().backward()

    with pytest.MonkeyPatch.context() as patches:
        failing_shards.PATCHES[way](patches, switch)
        for culprit in range(3):
            wrapper.zero_grad_buffer()
            with wrapper.no_sync():
                step(wrapper, 1)
            there = main_gradients(module)
            expected = main_gradients(module)
            for name, gradient in own_gradients(module, step).items():
                expected[name].add_(gradient)
            switch.left = 0 if rank == culprit else -1
            has_failed = failed(step, wrapper)
            has_failed = failed(MegatronDDP.finish_grad_sync, wrapper) or has_failed  # tells of it, also once more
            switch.left = -1
            if has_failed:
                unreached = ("layers.0.", "layers.1.", "layers.2.weight") if overlap else ()  # a bucket each
                assert_same_bits(main_gradients(module), expected, there, unreached)
            assert has_failed or (rank != culprit and way == "in_the_wait")
            if way != "in_the_wait":  # where some may have the averages
                kept = main_gradients(module)
                wrapper.finish_grad_sync()
                assert_shards(wrapper, kept)
            wrapper.zero_grad_buffer()
            step(wrapper)
            wrapper.finish_grad_sync()
            assert_shards(wrapper, own_gradients(module, step))


@pytest.mark.parametrize(
    ("way", "overlap"),
    [*itertools.product(["before", "in_the_middle", "in_the_wait"], [True, False]), ("in_backward", True)],
)
@on_three_ranks
def test_what_was_accumulated_is_as_it_was(way, overlap):
    rank, switch = dist.get_rank(), Switch()
    plugs = WAYS[way](switch)
    module = seeded(FailingNet, plugs.pop("own", None))
    config = DistributedDataParallelConfig(bucket_size=1, overlap_grad_reduce=overlap)
    wrapper = MegatronDDP(None, config, module, **plugs)

    def step(model, batch=0):
        model(data(5, 4, step=batch)).pow(2).sum().backward()

    for culprit in range(3):
        wrapper.zero_grad_buffer()
        with wrapper.no_sync():
            step(wrapper, 1)
        there, expected = main_gradients(module), main_gradients(module)
        switch.left = culprit if rank == culprit else -1  # another bucket each time
        for name, gradient in own_gradients(module, step).items():
            if gradient is not None:
                expected[name].add_(gradient)
        has_failed = failed(step, wrapper)
        has_failed = failed(MegatronDDP.finish_grad_sync, wrapper) or has_failed
        switch.left = -1
        if has_failed:
            is_cut_short = overlap and (way != "in_backward" or rank != culprit)
            assert_same_bits(main_gradients(module), expected, there, "layers." if is_cut_short else ())
        assert has_failed or (rank != culprit and way == "in_the_wait") or (culprit and not overlap)
        if way != "in_the_wait":  # where some may have the averages
            tables = of_all_ranks(main_gradients(module))
            if has_failed:
                wrapper.finish_grad_sync()
                mean = mean_of(tables, 3)
                for name, parameter in module.named_parameters():
                    torch.testing.assert_close(parameter.main_grad, mean[name])


def main_gradients(module):
    return {name: parameter.main_grad.clone() for name, parameter in module.named_parameters()}


def assert_shards(wrapper, own_table):
    """This rank's shards are those of the mean of what the ranks have."""
    tables = of_all_ranks({name: gradient.float() for name, gradient in own_table.items()})
    mean, sharded = mean_of(tables, len(tables)), wrapper.sharded()
    for shard, gradient in zip(sharded.shards, sharded.gradients(), strict=True):
        torch.testing.assert_close(gradient, mean[shard.name].flatten()[shard.start : shard.stop])


@on_three_ranks
def test_a_checkpoint_right_after_a_failed_step_holds_no_order_that_the_ranks_forget():
    rank, switch = dist.get_rank(), Switch()
    wrapper = DistributedDataParallel(seeded(FailingNet, None), **WAYS["before"](switch))

    def learned():
        return wrapper.comm_state_dict()["buckets"]["learned"]

    square(wrapper, rank)
    assert learned()
    switch.left = 0 if rank == 1 else -1
    assert failed(lambda model: square(model, rank), wrapper)
    assert not learned()
    square(wrapper, rank)
    assert learned()


@pytest.mark.parametrize("takes_turns", [False, True])
@on_three_ranks
def test_gradients_are_as_they_were_before_hooks_and_hooks_apply_once(takes_turns):
    rank, switch = dist.get_rank(), Switch()
    gc.collect()  # wrappers of other tests
    module = seeded(FailingNet, None)
    wrapper = DistributedDataParallel(module, **WAYS["before"](switch))
    other = DistributedDataParallel(nn.Linear(2, 2), **WAYS["before"](Switch())) if takes_turns else nn.Identity()
    other(torch.ones(2, 2))

    def halve(wrapped):
        for parameter in wrapped.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.mul_(0.5) + 0.0  # in place, and into other memory
        if switch.refuses_in_hook:
            raise Refused

    wrapper.register_comm_hook(halve)
    for in_hook in (False, True):
        module.zero_grad()
        own = own_gradients(module, lambda model: square(model, rank))
        mean = mean_of(of_all_ranks(own), 3)
        switch.left, switch.refuses_in_hook = 0 if rank == 1 and not in_hook else -1, rank == 1 and in_hook
        assert failed(lambda model: square(model, rank), wrapper)
        switch.left, switch.refuses_in_hook = -1, False
        assert_same_bits(gradients(module), own)
        wrapper.finish_grad_sync()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, None if mean[name] is None else mean[name] * 0.5)
