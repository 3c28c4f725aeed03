"""Wrappers that have parameters in common, with hooks and optimizers of the user's, Join, errors and Megatron."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join

from one_process import (
    assert_gradients,
    data,
    gradients,
    mean_gradients,
    mean_of,
    seeded,
    square,
)
from ppe_ddp import DistributedDataParallel, PeerAbortedError, UnusableError
from ppe_ddp.megatron import DistributedDataParallel as Megatron
from ppe_ddp.megatron import DistributedDataParallelConfig
from rank_tests import on_three_ranks, on_two_ranks
from test_graphs_broken import Broken, Fused
from test_graphs_broken import step as one_step
from test_shared_wrappers import APART, TOGETHER, each_kind, expected, loss_of, run, tied_weights, wrapped


@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)], ids=str)
@on_two_ranks
def test_an_optimizer_in_backward_steps_once_on_the_average(used):
    rank = dist.get_rank()
    models = tied_weights(2)
    tied, twins = models[0].tied, copy.deepcopy(models)
    steps = []

    def descend(parameter):
        steps.append(parameter)
        parameter.data -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in tied.parameters():
        parameter.register_post_accumulate_grad_hook(descend)
    wrappers = wrapped(models)
    loss_of(wrappers, (0, 1), rank, 0)  # both have seen the hook
    order = used[::-1] if rank else used
    want = expected(twins, [[order]] * 2, 1)[0]
    loss_of(wrappers, order, rank, 1).backward()
    assert len(steps) == 2
    for name, parameter in tied.named_parameters():
        before = twins[0].tied.get_parameter(name)
        torch.testing.assert_close(parameter.data, before - 0.1 * want[f"tied.{name}"])


@each_kind
@on_two_ranks
def test_hooks_that_take_one_bucket_at_a_time(make):
    wrappers = wrapped(make(2), bucket_cap_mb=1e-6)
    for wrapper in wrappers:
        wrapper.register_comm_hook(None, allreduce_hook)
    for step, programs in enumerate(TOGETHER):
        run(wrappers, programs, step)


@on_two_ranks
def test_the_same_gradients_on_all_ranks_are_held_to_it():
    wrappers = wrapped(tied_weights(2), negotiate_grads=False)
    for step, programs in enumerate([*TOGETHER, *APART]):
        run(wrappers, programs, step)


@pytest.mark.parametrize("by_all", [True, False], ids=["by all", "by those left"])
@each_kind
@on_three_ranks
def test_uneven_inputs(make, by_all):
    wrappers = wrapped(make(2))
    models = [wrapper.module for wrapper in wrappers]
    rank, counts = dist.get_rank(), (3, 1, 2)
    with Join(wrappers, divide_by_initial_world_size=by_all):
        for step in range(counts[rank]):
            active = [other for other in range(3) if counts[other] > step]
            orders = [[(0, 1) if other else (1, 0)] for other in active]
            for wrapper in wrappers:
                wrapper.zero_grad()
            tables = []
            for other, program in zip(active, orders, strict=True):
                twins = copy.deepcopy(models)
                loss_of(twins, program[0], other, step).backward()
                tables.append([gradients(twin) for twin in twins])
            loss_of(wrappers, (0, 1) if rank else (1, 0), rank, step).backward()
            for k, model in enumerate(models):
                assert_gradients(model, mean_of([table[k] for table in tables], 3 if by_all else len(active)))


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied_weights", "same_module"])
@on_two_ranks
def test_one_error_ends_the_backward_of_all(is_tied):
    first, second = seeded(Fused), seeded(Fused)
    second.layers[1] = first.layers[1]
    models = [first, second if is_tied else first]
    wrappers = wrapped(models)
    rank = dist.get_rank()
    for turn in range(2):
        # The last node of all: by then both wrappers have begun.
        outputs = [wrappers[0](data(5, 4), place=0 if rank == turn else None), wrappers[1](data(5, 4))]
        with pytest.raises(Broken if rank == turn else PeerAbortedError):
            sum(outputs).pow(2).sum().backward()
        for k in (turn, 1 - turn):
            for wrapper in wrappers:
                wrapper.zero_grad()
            one_step(wrappers[k], rank)
            assert_gradients(models[k], mean_gradients(models[k], one_step))


@on_two_ranks
def test_megatrons_wrapper_shares_nothing():
    rank = dist.get_rank()
    module = seeded(nn.Linear, 4, 2)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    plain, old, new = DistributedDataParallel(module), Megatron(None, config, module), Megatron(None, config, module)
    for wrapper in (plain, old):
        for use in (lambda wrapper=wrapper: wrapper(data(5, 4)), wrapper.finish_grad_sync):
            with pytest.raises(UnusableError, match=rf"rank {rank}: parameter 'weight' was wrapped again since"):
                use()
    want = mean_gradients(module, square)
    for _ in range(2):
        new.zero_grad_buffer()
        square(new, rank)
        new.finish_grad_sync()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.main_grad, want[name])
