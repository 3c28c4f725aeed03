"""Changes of ``.grad`` between two backwards: the next averages are those of one process."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from one_process import assert_gradients, assert_same_on_all_ranks, data, gradients, mean_of, seeded
from ppe_ddp import DistributedDataParallel, PeerAbortedError
from rank_tests import on_two_ranks

VARIANTS = [{"gradient_as_bucket_view": False}, {"bucket_cap_mb": 1e-6}, {}, {"overlap": False}]
each_variant = pytest.mark.parametrize("options", VARIANTS, ids=["copied", "adopted", "views", "after"])


class Layers(nn.Module):
    """Square layers, the last of which is used by rank 0 alone."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x, rank):
        for layer in list(self.layers)[: 3 - rank]:
            x = torch.tanh(layer(x))
        return x


def weights(module):
    return [layer.weight for layer in module.layers]


def new_data(module):
    for parameter in module.parameters():
        parameter.grad.data = parameter.grad.data.clone()


def cast_there_and_back(module):
    module.double()
    module.float()


def exchange_data(module):
    first, second, third = (weight.grad for weight in weights(module))
    first.data, second.data, third.data = second.data, third.data, first.data


def turn_data(module):
    for weight in weights(module):
        weight.grad.data = weight.grad.data.t()


def set_memory(module):
    for parameter in module.parameters():
        parameter.grad.set_(parameter.grad.clone())


def resize(module):
    for parameter in module.parameters():
        shape, values = parameter.shape, parameter.grad.clone()
        parameter.grad.resize_(0).resize_(shape).copy_(values)


def swap_with_another(module):
    for parameter in module.parameters():
        gradient = parameter.grad
        parameter.grad = None
        torch.utils.swap_tensors(gradient, gradient.clone())
        parameter.grad = gradient


def exchange(module):
    first, second, third = weights(module)
    first.grad, second.grad, third.grad = third.grad, first.grad, second.grad


def share(module):
    first, second, third = weights(module)
    first.grad = third.grad = second.grad


def share_memory(module):
    first, second, third = weights(module)
    first.grad = second.grad.view(3, 3)
    third.grad = second.grad.t()


def detach(module):
    for parameter in module.parameters():
        parameter.grad = parameter.grad.detach()


def another_format(module):
    for weight in weights(module):
        weight.grad = weight.grad.t().contiguous().t()


def another_dtype(module):
    for parameter in module.parameters():
        parameter.grad.data = parameter.grad.data.double()


def make_sparse(module):
    for weight in weights(module):
        weight.grad = weight.grad.to_sparse()


def require_grad(module):
    for parameter in module.parameters():
        parameter.grad.requires_grad_()


def own_values(module):
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)


def edit(module):
    for parameter in module.parameters():
        parameter.grad.add_(1).mul_(2)


CHANGES = [
    new_data,
    cast_there_and_back,
    exchange_data,
    turn_data,
    set_memory,
    resize,
    swap_with_another,
    exchange,
    share,
    share_memory,
    detach,
    another_format,
    another_dtype,
    make_sparse,
    require_grad,
    own_values,
    edit,
]


def backward(model, rank, step):
    model(data(4, 3, rank=rank, step=step), rank).pow(2).sum().backward()


class OneProcess:
    """All ranks in one process."""

    def __init__(self, module):
        self.twins = [copy.deepcopy(module) for _ in range(dist.get_world_size())]

    def average(self):
        means = mean_of([gradients(twin) for twin in self.twins], len(self.twins))
        for twin in self.twins:
            for name, parameter in twin.named_parameters():
                if means[name] is not None:
                    means[name] = means[name].to(parameter.dtype)
                    parameter.grad = means[name].clone()
        return means


@each_variant
@on_two_ranks
def test_changed_gradients_are_averaged_as_they_are(options):
    rank = dist.get_rank()
    wrapper = DistributedDataParallel(seeded(Layers), **options)
    one_process = OneProcess(wrapper.module)
    actors = [*enumerate(one_process.twins), (rank, wrapper.module)]
    plans = itertools.product(CHANGES, [[0, 1], [0], [1]], [True, False])
    for step, (change, ranks, zeroes) in enumerate([(None, [], True), *plans]):
        for r, module in actors:
            if zeroes:
                module.zero_grad(set_to_none=False)
            if r in ranks:
                change(module)
            backward(wrapper if module is wrapper.module else module, r, step)
        try:
            assert_gradients(wrapper.module, one_process.average())
            assert_same_on_all_ranks(wrapper.module)
        except AssertionError as error:
            raise AssertionError(f"after {change} on ranks {ranks}, zeroed {zeroes}: {error}") from error


@each_variant
@on_two_ranks
def test_memory_of_the_users_own_gets_the_averages(options):
    rank = dist.get_rank()
    wrapper = DistributedDataParallel(seeded(Layers), **options)
    one_process = OneProcess(wrapper.module)
    parameters = list(wrapper.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    views = [view.view_as(p) for view, p in zip(flat.split([p.numel() for p in parameters]), parameters, strict=True)]
    for step in range(4):
        flat.zero_()
        if step in (1, 3) or rank == 0:
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view
        backward(wrapper, rank, step)
        for r, twin in enumerate(one_process.twins):
            twin.zero_grad(set_to_none=False)
            backward(twin, r, step)
        means = one_process.average()
        assert_gradients(wrapper.module, means)
        if step in (1, 3) or rank == 0:
            torch.testing.assert_close(flat, torch.cat([mean.flatten() for mean in means.values()]))
        wrapper.zero_grad()


@each_variant
@on_two_ranks
def test_a_gradient_that_no_average_fits_into_is_replaced(options):
    # Expanded, for a parameter that only the other rank uses: one process never writes there.
    rank = dist.get_rank()
    wrapper = DistributedDataParallel(seeded(Layers), **options)
    one_process = OneProcess(wrapper.module)
    for step in range(2):
        for r, module in [*enumerate(one_process.twins), (rank, wrapper.module)]:
            module.zero_grad()
            if r == 1:
                module.layers[2].weight.grad = torch.ones(1, 3).expand(3, 3)
            backward(wrapper if module is wrapper.module else module, r, step)
        assert_gradients(wrapper.module, one_process.average())
        assert_same_on_all_ranks(wrapper.module)


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
