"""Wrappers that have parameters in common, with hooks and optimizers of the user's, Join, errors and Megatron."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from one_process import data, mean_gradients, seeded, square
from ppe_ddp import DistributedDataParallel, UnusableError
from ppe_ddp.megatron import DistributedDataParallel as Megatron
from ppe_ddp.megatron import DistributedDataParallelConfig
from rank_tests import on_two_ranks
from test_shared_wrappers import APART, TOGETHER, expected, loss_of, run, tied_weights, wrapped


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


@on_two_ranks
def test_the_same_gradients_on_all_ranks_are_held_to_it():
    wrappers = wrapped(tied_weights(2), negotiate_grads=False)
    for step, programs in enumerate([*TOGETHER, *APART]):
        run(wrappers, programs, step)


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
