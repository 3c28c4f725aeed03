"""Any output of the module, and backwards that no step of law_steps.py has: the gradients are those of one process."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from one_process import assert_gradients, check, data, mean_gradients, seeded
from ppe_ddp import DistributedDataParallel
from ppe_ddp.nested_tensors import mapped, tensors_in
from rank_tests import each_variant, on_two_ranks


class Pair(NamedTuple):
    left: torch.Tensor
    right: object


@dataclasses.dataclass(frozen=True)
class Record:
    value: torch.Tensor
    note: str = "not a tensor"


class Opaque:
    def __init__(self, tensor):
        self.tensor = tensor


class Outputs(nn.Module):
    """Gives its three heads out in the structure that `shape` names."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.heads = nn.ModuleList(nn.Linear(3, 2) for _ in range(3))

    def forward(self, x):
        a, b, c = (head(x) for head in self.heads)
        constant = x.detach() * 2
        self.given = {
            "tensor": a + b + c,
            "tuple": (a, None, (b, [c, constant])),
            "dict": {"a": a, 1: {"b": b}, "rest": (c, None)},
            "named tuple": Pair(a, Pair(b, {"c": c, "constant": constant})),
            "dataclass": Record([Record(a), Record((b, c))]),
            "opaque": Opaque({"all": a * b * c}),
            "none": None,
            "no grad": constant,
        }[self.shape]
        return self.given


def leaves(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Opaque):
        yield from leaves(value.tensor)
    elif dataclasses.is_dataclass(value):
        yield from leaves(value.value)
    elif isinstance(value, dict):
        yield from leaves(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)


@pytest.mark.parametrize("shape", ["tensor", "tuple", "dict", "named tuple", "dataclass", "opaque"])
@on_two_ranks
def test_any_structure_of_outputs(shape):
    def step(model, rank):
        given = model(data(4, 3, rank=rank))
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        assert given is inner.given
        sum((tensor**2).sum() for tensor in leaves(given) if tensor.requires_grad).backward()

    check(seeded(Outputs, shape), step)


@on_two_ranks
def test_outputs_without_gradients_are_the_same_objects_and_start_nothing():
    for shape in ("none", "no grad"):
        wrapper = DistributedDataParallel(seeded(Outputs, shape))
        x = data(4, 3).requires_grad_()
        given = wrapper(x)
        assert given is wrapper.module.given
        if given is not None:
            assert not given.requires_grad
            assert not given._backward_hooks
        assert wrapper.trace() is None
    wrapper = DistributedDataParallel(nn.Identity())
    assert wrapper(x) is x
    sparse = torch.eye(3).to_sparse().requires_grad_()  # has no views
    assert DistributedDataParallel(seeded(Skippable))(sparse, skips=True)["x"][0] is sparse


class Labelled(list):
    def __init__(self, label, items=()):
        super().__init__(items)
        self.label = label


def test_containers_that_are_there_several_times_or_in_themselves():
    tensor = torch.ones(1)
    level = [tensor]
    for _ in range(60):  # 2 ** 60 ways to the tensor
        level = Record([level, level])
    assert list(tensors_in(level)) == [tensor]
    twice = mapped(torch.neg, {"a": level, "b": level})
    assert twice["a"] is twice["b"]
    assert [item.item() for item in tensors_in(twice)] == [-1]
    node = Record([tensor], note={})
    node.note["parent"] = node
    assert list(tensors_in(node)) == [tensor]
    assert mapped(lambda one: one, node) is node
    with pytest.raises(ValueError, match="a Record has itself somewhere in it"):
        mapped(torch.neg, node)


def test_a_list_of_another_kind_keeps_what_else_it_has():
    before = Labelled("heads", [torch.ones(1), None])
    after = mapped(torch.neg, before)
    assert (type(after), after.label, after[0].item(), after[1]) == (Labelled, "heads", -1, None)
    assert before[0].item() == 1


class Slotted:
    __slots__ = "item"  # one name is not a tuple

    def __init__(self, item):
        self.item = item


class Hidden(nn.Module):
    """A layer that is left out on request, in an object two levels deep."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, skips):
        return Opaque([Slotted(2 * x if skips else self.layer(x))])


@on_two_ranks
def test_a_rank_that_uses_no_parameter_of_outputs_in_objects_takes_part():
    wrapper = DistributedDataParallel(seeded(Hidden))
    for step in range(3):

        def run(model, rank, step=step):
            x = data(4, 3, rank=rank, step=step).requires_grad_()
            (model(x, rank == step % 2).tensor[0].item ** 2).sum().backward()

        wrapper.zero_grad()
        expected = mean_gradients(wrapper.module, run)
        run(wrapper, dist.get_rank())
        assert_gradients(wrapper.module, expected)


class Skippable(nn.Module):
    """A layer that is left out on request: then the output is the input itself, and no parameter is used."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, *, skips):
        return {"x": [x if skips else self.layer(x)]}


@each_variant
@on_two_ranks
def test_an_input_that_is_passed_on_starts_a_backward(options):
    """It is a leaf, the same in each step; on the other rank there is a layer behind it, or on none."""
    x = data(4, 3).requires_grad_()

    def step(model, rank, number):
        own = x if model is wrapper else data(4, 3, rank=rank)
        (model(own.requires_grad_(), skips=rank == 1 or number == 2)["x"][0] ** 2).sum().backward()

    wrapper = DistributedDataParallel(seeded(Skippable), **options)
    for number in range(5):
        wrapper.zero_grad()
        x.grad = None
        expected = mean_gradients(wrapper.module, lambda model, rank, number=number: step(model, rank, number))
        step(wrapper, dist.get_rank(), number)
        skips = number == 2 or dist.get_rank() == 1
        assert_gradients(wrapper.module, expected)
        if skips:
            assert torch.equal(x.grad, 2 * x)
    assert wrapper.trace().agreed


@each_variant
@on_two_ranks
def test_one_output_of_several_changed_in_place(options):
    def step(model, rank):
        outputs = model(data(4, 3, rank=rank))
        # Rank 1 leaves a head out, and changes an output in place.
        loss = outputs[0].mul_(3).sum() if rank else (outputs[0] * outputs[2][1][0]).sum()
        loss.backward()

    check(seeded(Outputs, "tuple"), step, **options)


class Branches(nn.Module):
    """A trunk, and a branch for each way that the input goes."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x, way):
        h = torch.tanh(self.trunk(x))
        return self.head(torch.tanh(self.branches[way](h)))


class OnlyCheckpoints(nn.Module):
    """The layers that it is told to use, each in a checkpoint."""

    order = ()

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for k in self.order:
            x = torch.tanh(checkpoint(self.layers[k], x, use_reentrant=True))
        return x


@each_variant
@on_two_ranks
def test_different_numbers_of_reentrant_checkpoints(options):
    # Nothing but checkpoints: the backward from outside reaches no parameter, each of its parts reaches some.
    def step(model, rank):
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        inner.order = (0, 1, 2) if rank else (1, 3)
        model(data(5, 4, rank=rank).requires_grad_()).pow(2).sum().backward()

    wrapper = check(seeded(OnlyCheckpoints), step, **options)
    assert len({*wrapper.trace().agreed, *wrapper.trace().repaired}) == 8


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@each_variant
@on_two_ranks
def test_the_whole_wrapper_in_a_checkpoint(reentrant, options):
    def step(model, rank):
        x = data(5, 3, rank=rank).requires_grad_()
        y = checkpoint(lambda x: model(x, rank), x * 2, use_reentrant=reentrant)
        z = checkpoint(lambda x: model(x, 2), x * 3, use_reentrant=reentrant)
        (y * z).sum().backward()

    check(seeded(Branches), step, **options)


@each_variant
@on_two_ranks
def test_gradient_penalty(options):
    def step(model, rank):
        x = data(4, 3, rank=rank).requires_grad_()
        output = model(x, way=rank)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (output.pow(2).mean() + (slope.norm(dim=1) - 1).pow(2).mean()).backward()

    check(seeded(Branches), step, **options)


@each_variant
@on_two_ranks
def test_backward_that_makes_a_graph(options):
    # The gradient has a history of its own, which an average in place must not break.
    def step(model, rank):
        model(data(4, 3, rank=rank), way=rank).pow(2).sum().backward(create_graph=True)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach()

    check(seeded(Branches), step, **options)
