"""`check_for_nan_in_grad`: NaN and infinity on one rank are named on all, or the step is skipped by all."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from library_warnings import library_warnings
from one_process import assert_gradients, data, gradients, mean_gradients, mlp, seeded, square
from ppe_ddp import DistributedDataParallel, DistributedOptimizer, NonFiniteGradientError
from ppe_ddp.compression import ErrorFeedback, Int8
from ppe_ddp.engine.gradients import NON_FINITE, FiniteCheck
from rank_tests import each_variant, on_three_ranks, on_two_ranks


def spoiled(model, name, value):
    """A step in which one element of one gradient is `value`."""

    def spoil(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[0] = value
        return gradient

    handle = dict(model.module.named_parameters())[name].register_hook(spoil)
    try:
        square(model, dist.get_rank())
    finally:
        handle.remove()


def step(model, culprits, name="0.weight", value=float("nan")):
    model.zero_grad()
    if dist.get_rank() in culprits:
        spoiled(model, name, value)
    else:
        square(model, dist.get_rank())


@each_variant
@on_three_ranks
def test_it_is_named_on_all_ranks(options):
    module = seeded(mlp, 4, 8, 2)
    model = DistributedDataParallel(module, check_for_nan_in_grad=True, **options)
    mean = mean_gradients(module, square)
    twin = seeded(mlp, 4, 8, 2)
    square(twin, dist.get_rank())
    own = gradients(twin)
    for culprit, value, name in [
        (0, float("nan"), "0.weight"),
        (1, float("inf"), "2.bias"),
        (2, -float("inf"), "0.bias"),
    ]:
        with pytest.raises(NonFiniteGradientError, match=rf"averaged: rank {culprit} in '{name}' \(ranks of the 3"):
            step(model, [culprit], name, value)
        if dist.get_rank() != culprit:
            assert all(torch.equal(gradient, own[name]) for name, gradient in gradients(module).items())
        step(model, [])
        assert_gradients(module, mean)


@on_two_ranks
def test_each_rank_is_named_with_its_own():
    model = DistributedDataParallel(seeded(mlp, 4, 8, 2), check_for_nan_in_grad=True)
    own = ("0.bias", "2.weight")[dist.get_rank()]
    with pytest.raises(NonFiniteGradientError, match=r"averaged: rank 0 in '0\.bias'; rank 1 in '2\.weight'"):
        step(model, [0, 1], own)


@on_two_ranks
def test_all_ranks_skip_the_step():
    module = seeded(mlp, 4, 8, 2)
    model = DistributedDataParallel(module, check_for_nan_in_grad="skip")
    mean = mean_gradients(module, square)
    for culprit in range(2):
        with library_warnings() as seen:
            step(model, [culprit])
        assert all(parameter.grad is None for parameter in module.parameters())
        (text,) = seen
        assert f"rank {dist.get_rank()} skips this step" in text
        assert f"rank {culprit} in '0.weight'" in text
        step(model, [])
        assert_gradients(module, mean)


@on_two_ranks
def test_what_two_wrappers_share_is_skipped_if_one_has_a_compressor():
    module, groups = seeded(mlp, 4, 8, 2), (None, dist.new_group())
    models = [DistributedDataParallel(module, process_group=group, check_for_nan_in_grad="skip") for group in groups]
    with library_warnings():
        models[1].register_comm_hook(ErrorFeedback(Int8()))
        loss = sum(model(data(5, 4)).pow(2).sum() for model in models)
        (loss * (float("nan") if dist.get_rank() == 1 else 1.0)).backward()
    assert all(parameter.grad is None for parameter in module.parameters())


@on_two_ranks
def test_shards_are_skipped():
    module = seeded(mlp, 4, 8, 2)
    model = DistributedDataParallel(module, check_for_nan_in_grad="skip")
    optimizer = DistributedOptimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9)
    for culprits in ([], [1], []):
        before = [parameter.detach().clone() for parameter in module.parameters()]
        step(model, culprits)
        optimizer.step()
        moved = [not torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True)]
        assert any(moved) is (not culprits)
        assert all(parameter.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("width", [8, 2048])
@on_two_ranks
def test_large_numbers_are_not_mistaken(width):
    model = DistributedDataParallel(seeded(mlp, 4, width, 2), check_for_nan_in_grad=True)
    step(model, [1], value=3e38)  # whose norm overflows
    with pytest.raises(NonFiniteGradientError, match=r"averaged: rank 1 in '0\.weight' "):
        step(model, [1])


class Table(nn.Module):
    """A sparse gradient."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(x + self.table(torch.arange(len(x)) % 3))


@on_two_ranks
def test_sparse_gradients():
    model = DistributedDataParallel(seeded(Table), check_for_nan_in_grad=True)
    loss = model(data(5, 4)).pow(2).sum() * (float("nan") if dist.get_rank() == 1 else 1)
    with pytest.raises(
        NonFiniteGradientError, match=r"averaged: rank 1 in 'table\.weight', 'out\.weight', 'out\.bias' "
    ):
        loss.backward()
    model.zero_grad()
    square(model, dist.get_rank())


def test_one_process(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(seeded(mlp, 4, 8, 2), check_for_nan_in_grad=True)
        with pytest.raises(NonFiniteGradientError, match=r"averaged: rank 0 in '0.weight'"):
            step(model, [0])
        step(model, [])
    finally:
        dist.destroy_process_group()


def test_what_it_may_be():
    with pytest.raises(ValueError, match="check_for_nan_in_grad is True, False or \"skip\", not 'raise'"):
        DistributedDataParallel(nn.Linear(2, 2), check_for_nan_in_grad="raise")


@on_two_ranks
def test_parameters_of_several_dtypes_are_looked_at_together():
    model = DistributedDataParallel(Mixed(), check_for_nan_in_grad=True)
    for name in ("in_single", "in_half", "in_double"):
        with pytest.raises(NonFiniteGradientError, match=rf"averaged: rank 1 in '{name}' \("):
            model(name if dist.get_rank() == 1 else None).backward()
        model.zero_grad()
        model(None).backward()
        assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
        model.zero_grad()


class Mixed(nn.Module):
    """Parameters of several dtypes, the loss of which is infinite in one of them."""

    def __init__(self):
        super().__init__()
        self.in_single = nn.Parameter(torch.ones(4))
        self.in_half = nn.Parameter(torch.ones(4, dtype=torch.float16))
        self.in_double = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, broken):
        scale = {name: float("inf") if name == broken else 1.0 for name in ("in_single", "in_half", "in_double")}
        return sum((parameter * scale[name]).sum().double() for name, parameter in self.named_parameters())


class Elsewhere(torch.Tensor):
    """Stands in for a tensor on another device, where there is none: what it is computed with has to be there, too."""

    @staticmethod
    def __new__(cls, values):
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device="cuda:0")
        made.values_here = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        tensors = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        is_list = "_foreach" in str(func)  # whose tensors are computed one by one
        if not is_list and len({tensor.device for tensor in tensors}) > 1:
            raise RuntimeError("Expected all tensors to be on the same device")
        here = tree_map_only(Elsewhere, lambda tensor: tensor.values_here, (args, kwargs or {}))
        results = func(*here[0], **here[1])
        if is_list:
            return [Elsewhere(r) if type(t) is Elsewhere else r for r, t in zip(results, tensors, strict=True)]
        return tree_map_only(torch.Tensor, Elsewhere, results)


@pytest.mark.parametrize("size", [4, 40_000])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("broken", [None, 0, 1])
def test_gradients_on_two_devices(broken, together, size):
    values = [torch.ones(size), torch.ones(size)]
    if broken is not None:
        values[broken][1] = float("inf")
    gradients = [values[0], Elsewhere(values[1])]
    check = FiniteCheck(["here", "there"])
    if together:
        check.look([0, 1], gradients)
    else:
        check.look([0], gradients[:1])
        check.look([1], gradients[1:])
    assert check.status == (0 if broken is None else NON_FINITE)
    if broken is not None:
        error = check.error_alone(SimpleNamespace(world_size=1, job_rank_of=lambda rank: 3 + rank))
        assert f"rank 0 in {['here', 'there'][broken]!r} (" in str(error)
        assert error.job_rank == 3
