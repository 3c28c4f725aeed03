"""Any parameter: frozen, added, moved, cast, shared, sparse, of any dtype, shape and memory format."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from library_warnings import library_warnings
from one_process import (
    assert_gradients,
    assert_same_on_all_ranks,
    check,
    data,
    gradients,
    mean_gradients,
    mean_of,
    mlp,
    seeded,
    square,
)
from ppe_ddp import DistributedDataParallel
from rank_tests import each_variant, on_two_ranks


def hold(wrapper, step=square, rounds=3, **tolerance):
    """Hold `step` on `wrapper` to what one process computes with its module as it is now."""
    for _ in range(rounds):
        expected = mean_gradients(wrapper.module, step)
        wrapper.zero_grad()
        step(wrapper, dist.get_rank())
        assert_gradients(wrapper.module, expected, **tolerance)
        assert_same_on_all_ranks(wrapper.module)


@each_variant
@on_two_ranks
def test_frozen_and_thawed(options):
    module = seeded(mlp, 4, 4, 4, 2)
    module[2].weight.requires_grad_(False)
    wrapper = DistributedDataParallel(module, **options)
    hold(wrapper)
    assert module[2].weight.grad is None
    module[2].weight.requires_grad_(True)
    module[0].requires_grad_(False)
    hold(wrapper)
    assert module[2].weight.grad is not None
    assert module[0].weight.grad is None
    module[0].requires_grad_(True)
    hold(wrapper)
    # All but the input's layer frozen, and the input wants a gradient: nothing to synchronize.
    module.requires_grad_(False)
    wrapper.zero_grad()
    x = data(5, 4).requires_grad_()
    wrapper(x).sum().backward()
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in module.parameters())
    module.requires_grad_(True)
    hold(wrapper)


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        for part in self.parts:
            x = torch.tanh(part(x))
        return x * getattr(self, "scale", 1)


@each_variant
@on_two_ranks
def test_added_replaced_and_removed(options):
    module = seeded(Growing)
    wrapper = DistributedDataParallel(module, **options)
    hold(wrapper)
    module.parts.append(seeded(nn.Linear, 4, 4))
    hold(wrapper)
    module.scale = nn.Parameter(torch.full((4,), 2.0))
    hold(wrapper)
    module.parts[0].weight = nn.Parameter(torch.eye(4))
    hold(wrapper)
    assert "parts.1.weight" in wrapper.trace().agreed
    del module.parts[1], module.scale
    hold(wrapper)
    assert sorted(wrapper.trace().agreed) == ["parts.0.bias", "parts.0.weight"]


@each_variant
@on_two_ranks
def test_cast_and_moved(options):
    module = seeded(nn.Conv2d, 4, 3, 3)
    wrapper = DistributedDataParallel(module, **options)

    def step(model, rank):
        x = data(2, 4, 5, 5, rank=rank).to(module.weight)
        model(x).pow(2).sum().backward()

    hold(wrapper, step)
    wrapper.double()
    hold(wrapper, step)
    assert module.weight.grad.dtype == torch.float64
    wrapper.to(torch.float32, memory_format=torch.channels_last)
    hold(wrapper, step)
    assert module.weight.grad.stride() == module.weight.stride()
    module.weight.data = module.weight.data.contiguous()
    hold(wrapper, step)
    # Cast while gradients of the old dtype are still there.
    wrapper.to(torch.float64)
    hold(wrapper, step)
    wrapper.to("cpu")
    hold(wrapper, step)


@on_two_ranks
def test_cast_there_and_back():
    # Nothing of it shows afterwards in shapes or dtypes, but autograd has made other nodes for the parameters.
    wrapper = DistributedDataParallel(seeded(mlp, 4, 4, 2))
    wrapper.double().float()
    hold(wrapper)
    wrapper.double().float()
    hold(wrapper)


@on_two_ranks
def test_another_dtype_at_the_same_address():
    # As it happens where the second of two casts gets the memory that the first has given back.
    module = seeded(mlp, 4, 4, 2)
    wrapper = DistributedDataParallel(module)

    def step(model, rank):
        model(data(5, 4, rank=rank).to(next(model.parameters()))).pow(2).sum().backward()

    hold(wrapper, step)
    for parameter in module.parameters():
        memory = parameter.data
        values = memory.to(torch.float16)
        parameter.data = memory.view(torch.float16).flatten()[: memory.numel()].view(memory.shape)
        parameter.data.copy_(values)
        assert parameter.data_ptr() == memory.data_ptr()
        parameter.grad = None
    hold(wrapper, step, rtol=1e-2, atol=1e-2)
    assert all(parameter.grad.dtype == torch.float16 for parameter in module.parameters())


class Strange(nn.Module):
    """Weights in memory orders other than rows first, some with holes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.holes = nn.Parameter(torch.randn(4, 8)[:, ::2])
        self.big = nn.Parameter(torch.randn(5, 2, 3, 4).permute(2, 0, 3, 1))

    def forward(self, x, uses_turned):
        y = self.conv(x).mean((2, 3)) @ self.holes
        if uses_turned:
            y = y @ self.turned[:4]
        return y.sum() * self.big.pow(2).sum()


@each_variant
@on_two_ranks
def test_memory_formats(options):
    def step(model, rank):
        x = data(2, 3, 5, 5, rank=rank).to(memory_format=torch.channels_last)
        model(x, uses_turned=rank == 1).backward()

    wrapper = check(seeded(Strange), step, **options)
    for name in ("conv.weight", "turned", "big"):
        parameter = wrapper.module.get_parameter(name)
        assert parameter.grad.stride() == parameter.stride(), name


class Words(nn.Module):
    """Sparse gradients; the second table is also used densely where it is asked for."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 4, sparse=True)
        self.tied = nn.Embedding(7, 4, sparse=True)
        self.bag = nn.EmbeddingBag(6, 4, mode="sum", sparse=True)
        self.head = nn.Linear(4, 3)

    def forward(self, words, uses):
        h = sum(getattr(self, name)(words % getattr(self, name).num_embeddings).sum(0) for name in uses)
        y = self.head(h)
        return y.sum() + (h @ self.tied.weight.t()).pow(2).sum() if "tied" in uses and words[0, 0] else y.sum()


@pytest.mark.parametrize(
    "uses",
    [
        (("table",), ("table",)),
        (("table",), ("bag",)),
        (("tied",), ("tied", "table")),
        (("table", "tied", "bag"), ("bag",)),
    ],
    ids=str,
)
@each_variant
@on_two_ranks
def test_sparse_embeddings(uses, options):
    def step(model, rank):
        words = torch.tensor([[rank, 3], [5, 3 + rank]])
        model(words, uses[rank]).backward()

    wrapper = check(seeded(Words), step, **options)
    for name in ("table", "bag"):
        gradient = getattr(wrapper.module, name).weight.grad
        assert gradient is None or gradient.is_sparse
    if uses == (("table",), ("bag",)):
        gradient = wrapper.module.table.weight.grad.coalesce()
        assert gradient.indices().tolist() == [[0, 3, 5]]
    torch.optim.SparseAdam([wrapper.module.table.weight]).step()


class OneStorage(nn.Module):
    """Autograd gives both parameters views of one memory as their gradients."""

    def __init__(self, n):
        super().__init__()
        self.a = nn.Parameter(torch.randn(n * n))
        self.b = nn.Parameter(torch.randn(n * n))
        self.c = nn.Parameter(torch.randn(n, n))
        self.n = n

    def forward(self, x):
        n = self.n
        return ((self.a.view(n, n) + self.b.view(n, n) + self.c) * x).sum()


# The large one is above the size from which a gradient is reduced where it lies, whatever the bucket's.
@pytest.mark.parametrize("n", [2, 600])
@each_variant
@on_two_ranks
def test_gradients_that_share_one_storage(n, options):
    check(seeded(OneStorage, n), lambda model, rank: model(data(n, n, rank=rank)).backward(), **options)


@pytest.mark.parametrize("n", [2, 600])
@each_variant
@on_two_ranks
def test_gradients_that_the_user_keeps_stay_as_they_were(n, options):
    module = seeded(OneStorage, n)
    wrapper = DistributedDataParallel(module, **options)
    kept = []
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: kept.append(gradient))
    for step in range(3):
        kept.clear()
        wrapper.zero_grad()
        output = wrapper(data(n, n, step=step))
        output.register_hook(lambda gradient: kept.append(gradient))
        output.backward()
        own = data(n, n, step=step)
        mean = (own + data(n, n, rank=1 - dist.get_rank(), step=step)) / 2
        assert len(kept) == 4
        for gradient in kept[1:]:
            torch.testing.assert_close(gradient.view(n, n), own, rtol=0, atol=0)
        for parameter in module.parameters():
            torch.testing.assert_close(parameter.grad.view(n, n), mean)


@on_two_ranks
def test_a_module_without_parameters_or_with_frozen_ones_only():
    wrapper = DistributedDataParallel(nn.Dropout(0.0))
    x = data(3, 2).requires_grad_()
    wrapper(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 2))
    frozen = seeded(nn.Linear, 2, 2).requires_grad_(False)
    wrapper = DistributedDataParallel(frozen)
    F.mse_loss(wrapper(x), torch.zeros(3, 2)).backward()
    assert frozen.weight.grad is None


@on_two_ranks
def test_another_module_in_the_place_of_the_wrapped_one():
    first, second = seeded(mlp, 4, 2), seeded(mlp, 4, 3, 2)
    wrapper = DistributedDataParallel(first)
    for module in (first, second, first):
        wrapper.module = module
        hold(wrapper, rounds=2)


class Scheduled(nn.Module):
    """Freezes and thaws all layers but the first by turns, in its forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, step):
        for k, layer in enumerate(self.layers):
            layer.requires_grad_(k == 0 or (k + step) % 2 == 0)
            x = x + torch.tanh(layer(x))
        return x


@each_variant
@on_two_ranks
def test_thawed_in_a_forward(options):
    wrapper = DistributedDataParallel(seeded(Scheduled), **options)
    for place in (0, 1, 0, 1):
        hold(wrapper, lambda model, r, k=place: model(data(5, 4, rank=r), k + r).pow(2).sum().backward(), rounds=1)


@each_variant
@on_two_ranks
def test_frozen_for_a_second_forward_alone(options):
    # As a part of a discriminator may be while the generator's loss is computed.
    wrapper = DistributedDataParallel(seeded(mlp, 4, 4, 2), **options)

    def step(model, rank):
        module = getattr(model, "module", model)
        first = model(data(5, 4, rank=rank)).pow(2).sum()
        module[0].requires_grad_(False)
        second = model(data(5, 4, rank=rank, step=1)).pow(2).sum()
        module[0].requires_grad_(True)
        (first + second).backward()

    hold(wrapper, step)


class Lazy(nn.Module):
    """Makes its second layer in the second forward."""

    def __init__(self):
        super().__init__()
        self.layers, self.calls = nn.ModuleList([nn.Linear(4, 4)]), 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 2:
            self.layers.append(seeded(nn.Linear, 4, 4))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@each_variant
@on_two_ranks
def test_added_in_a_forward(options):
    wrapper = DistributedDataParallel(seeded(Lazy), **options)
    for step in range(3):
        twins = [copy.deepcopy(wrapper.module) for _ in range(2)]
        for rank, twin in enumerate(twins):
            twin.zero_grad()
            square(twin, rank, step)
        wrapper.zero_grad()
        square(wrapper, dist.get_rank(), step)
        assert_gradients(wrapper.module, mean_of(list(map(gradients, twins)), 2))


@on_two_ranks
def test_a_head_that_is_exchanged_for_a_second_forward_is_told_of():
    wrapper = DistributedDataParallel(seeded(mlp, 4, 4, 2))
    first = wrapper(data(5, 4)).sum()
    wrapper.module[2] = nn.Linear(4, 2)
    second = wrapper(data(5, 4)).sum()
    with library_warnings() as texts:
        (first + second).backward()
    assert re.search(r"reaches '2\.weight', which the module had .* is not averaged", "".join(texts))


@on_two_ranks
def test_pruned_on_all_ranks_and_then_frozen_on_one():
    # Nothing but a parameter's name has changed, which a rank that lists its module anew alone would notice alone.
    wrapper = DistributedDataParallel(nn.Sequential(*(seeded(nn.Linear, 4, 4, bias=False) for _ in range(2))))

    def step(model, rank):
        getattr(model, "module", model)[1].requires_grad_(rank == 0)
        square(model, rank)

    hold(wrapper)
    for change in (prune.identity, prune.remove):
        change(wrapper.module[0], "weight")
        for steps in (square, step):
            wrapper.module.requires_grad_(True)
            with torch.no_grad():
                wrapper(data(5, 4))  # a pruned weight with a graph cannot be copied
            hold(wrapper, steps, rounds=1)


@each_variant
@on_two_ranks
def test_data_of_another_shape(options):
    # A vocabulary or a layer that grows in place: autograd's node for the parameter has the old shape.
    wrapper = DistributedDataParallel(seeded(mlp, 4, 4, 2), **options)
    hold(wrapper)
    last = wrapper.module[2]
    for parameter in last.parameters():
        parameter.data = torch.cat([parameter.data, parameter.data])
    hold(wrapper)
    assert last.weight.grad.shape == (4, 4)
