"""Gradients that a user puts into ``.grad`` before a backward; other changes of them are in random_training.py."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from one_process import assert_gradients, assert_same_on_all_ranks, check, data, mean_gradients, seeded
from ppe_ddp import DistributedDataParallel, PeerAbortedError, weigh
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
def test_memory_of_the_users_own_gets_the_averages_where_losses_weigh_nothing_and_zeros_where_a_step_is_skipped(
    options,
):
    rank, flat = dist.get_rank(), torch.full((3,), 7.0)
    wrapper = DistributedDataParallel(nn.Linear(2, 1), check_for_nan_in_grad="skip", **options)
    alone = as_one_rank(nn.Linear(2, 1))

    def backward(wrapper, count):
        module = wrapper.module
        module.weight.grad, module.bias.grad = flat[:2].view(1, 2), flat[2:]
        factor = float("nan") if rank or count == 0 else 1
        weigh(flat.zero_().sum() + wrapper(torch.ones(1, 2)).sum() * factor, count).backward()
        assert module.weight.grad.data_ptr() == flat.data_ptr()
        return flat.tolist()

    assert backward(wrapper, 2 - 2 * rank) == [1.0] * 3
    assert backward(wrapper, 2) == backward(alone, 0) == [0.0] * 3


def as_one_rank(module):
    return DistributedDataParallel(module, process_group=dist.new_subgroups(1)[0])


class Embeddings(nn.Module):
    """Autograd gives the gradients of all but the last parameter one memory."""

    def __init__(self):
        super().__init__()
        self.row, self.column = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
        self.parts = nn.ParameterList(torch.ones(rows, 2) for rows in (1, 2))
        self.last = nn.Parameter(torch.ones(2))

    def forward(self, x, rank):
        whole = self.row.unsqueeze(0)
        if rank == 0:
            whole = whole + self.column.unsqueeze(0) + torch.cat([*self.parts]).unsqueeze(0)
        return whole * x * self.last


class Row(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self):
        return self.weight.unsqueeze(0)


@each_variant
@on_two_ranks
def test_gradients_to_which_autograd_gave_one_memory(options):
    rank = dist.get_rank()

    def step(model, rank):
        model(torch.arange(6.0).view(1, 3, 2) * (1 + rank), rank).sum().backward()

    expected = mean_gradients(Embeddings(), step)
    check(Embeddings(), step, **options)
    wrapper = DistributedDataParallel(Embeddings(), average_where_used=True, **options)
    step(wrapper, rank)
    alone = {"column", "parts.0", "parts.1"}  # of rank 0
    assert_gradients(wrapper.module, {name: mean * (1 + (name in alone)) for name, mean in expected.items()})
    wrapper = as_one_rank(module := Embeddings())
    weigh(wrapper(torch.ones(1, 3, 2), 0).sum(), 4).backward()
    assert [parameter.grad.unique().item() for parameter in module.parameters()] == [1.0, 1.0, 9.0, 1.0, 1.0]
    x, wrappers = torch.ones(2), [DistributedDataParallel(Row(), **options) for _ in range(2)]
    first, second = wrappers
    with first.no_sync(), second.no_sync():  # rank 0 has one memory for both
        ((first() + second()) * x if rank == 0 else first() * 9 + second() * 99).sum().backward()
    for one in wrappers:
        one.finish_grad_sync()
    assert [one.module.weight.grad.tolist() for one in wrappers] == [[5.0] * 2, [50.0] * 2]
    first, second = wrappers = [as_one_rank(Row()) for _ in range(2)]
    weigh(((first() + second()) * x).sum(), 4).backward()
    assert [one.module.weight.grad.tolist() for one in wrappers] == [[1.0] * 2] * 2


@on_two_ranks
def test_a_gradient_that_is_lazily_conjugated():
    def step(model, rank):
        model(torch.tensor([1j, 2]) * (1 + rank)).abs().backward()

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))

        def forward(self, x):
            return (self.weight.conj() * x).sum()

    check(Product(), step, gradient_as_bucket_view=False)


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


@pytest.mark.parametrize("in_hook", [False, True])
@on_two_ranks
def test_gradients_of_another_dtype_are_put_back_when_a_step_fails(in_hook):
    rank, module = dist.get_rank(), nn.Linear(2, 1)
    wrapper = DistributedDataParallel(module)
    wrapper.register_comm_hook(lambda _: in_hook and halve())
    wrapper.register_comm_hook(lambda _: 1 / 0 if rank else None)

    def halve():
        for parameter in module.parameters():
            parameter.grad.data = 3 * parameter.grad.data.half()

    with wrapper.no_sync():
        wrapper(torch.ones(1, 2) * (1 + rank)).sum().backward()
    if not in_hook:
        halve()
    before = [(parameter.grad, parameter.grad.clone()) for parameter in module.parameters()]
    with pytest.raises(ZeroDivisionError if rank else PeerAbortedError):
        wrapper.finish_grad_sync()
    for parameter, (gradient, copy) in zip(module.parameters(), before, strict=True):
        assert parameter.grad is gradient
        torch.testing.assert_close(gradient, copy, rtol=0, atol=0)
