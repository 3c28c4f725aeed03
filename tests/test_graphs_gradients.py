"""Gradients that a user puts into ``.grad`` before a backward; other changes of them are in random_training.py."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from one_process import assert_gradients, assert_same_on_all_ranks, check, data, mean_gradients, seeded
from ppe_ddp import DistributedDataParallel, PeerAbortedError
from rank_tests import each_variant, on_two_ranks


class Layers(nn.Module):
    """Square layers, the last of which is used by rank 0 alone."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, rank):
        for layer in list(self.layers)[: 3 - rank]:
            x = torch.tanh(layer(x))
        return x


def backward(model, rank, step):
    model(data(4, 3, rank=rank, step=step), rank).pow(2).sum().backward()


@each_variant
@on_two_ranks
def test_memory_of_the_users_own_gets_the_averages(options):
    rank = dist.get_rank()
    wrapper = DistributedDataParallel(seeded(Layers), **options)
    parameters = list(wrapper.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    views = [view.view_as(p) for view, p in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)]
    for step in range(4):
        flat.zero_()
        expected = mean_gradients(wrapper.module, lambda model, rank, step=step: backward(model, rank, step))
        if step in (1, 3) or rank == 0:
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view
        backward(wrapper, rank, step)
        assert_gradients(wrapper.module, expected)
        if step in (1, 3) or rank == 0:
            torch.testing.assert_close(flat, torch.cat([mean.flatten() for mean in expected.values()]))
        wrapper.zero_grad()


@each_variant
@on_two_ranks
def test_a_gradient_that_no_average_fits_into_is_replaced(options):
    # Expanded, for a parameter that only the other rank uses: one process never writes there.
    def step(model, rank):
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        if rank == 1:
            inner.layers[2].weight.grad = torch.ones(1, 3).expand(3, 3)
        backward(model, rank, 0)

    check(seeded(Layers), step, **options)


@each_variant
@on_two_ranks
def test_what_is_made_in_inference_mode_is_of_use_outside(options):
    module = seeded(Layers)
    with torch.inference_mode():
        model = DistributedDataParallel(module, **options)
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, dist.get_rank())
        model.finish_grad_sync()
    assert {parameter.grad.mean().item() for parameter in module.parameters()} == {0.5}
    expected = mean_gradients(module, lambda model, rank: backward(model, rank, 0))
    for _ in range(3):
        model.zero_grad()
        backward(model, dist.get_rank(), 0)
        assert_gradients(module, expected)


@on_two_ranks
def test_a_gradient_of_another_shape_is_an_error_and_moves_no_other():
    module = seeded(Layers)
    model = DistributedDataParallel(module)
    with model.no_sync():
        model(data(2, 3), 0).sum().backward()
    grad = module.layers[1].weight.grad
    if dist.get_rank() == 1:
        grad.data = torch.ones(2, 3)
        with pytest.raises(RuntimeError, match="size"):
            model.finish_grad_sync()
        grad.data = torch.ones(3, 3)
    else:
        with pytest.raises(PeerAbortedError, match="rank 1"):
            model.finish_grad_sync()
    model.zero_grad()
    model(data(2, 3), 0).sum().backward()
    assert_same_on_all_ranks(module)
