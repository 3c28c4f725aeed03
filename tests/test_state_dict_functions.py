"""torch.distributed.checkpoint.state_dict with a wrapper gives what it gives for the bare module, and takes it."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from one_process import data
from ppe_ddp import DistributedDataParallel
from rank_tests import on_two_ranks


class Branches(nn.Module):
    """Takes another branch on each rank; nobody ever uses the third."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.norm = nn.LayerNorm(3)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.norm(self.branches[dist.get_rank()](x)) * self.scale


class Named(Branches):
    """Has a child of the very name that `named_parameters()` has in front."""

    def __init__(self):
        super().__init__()
        self.module = self._modules.pop("norm")

    def forward(self, x):
        return self.module(self.branches[dist.get_rank()](x))


class Larger(nn.Module):
    """Has the wrapper as one of its parts."""

    def __init__(self, part):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.part = part

    def forward(self, x):
        return self.part(self.first(x))


def in_larger():
    return Larger(Branches())


def adam(model):
    return torch.optim.AdamW(
        [{"params": list(model.parameters())[:2], "lr": 0.3}, {"params": list(model.parameters())[2:]}]
    )


def trained(model, optimizer):
    for step in range(2):
        optimizer.zero_grad()
        model(data(5, 3, rank=dist.get_rank(), step=step)).pow(3).sum().backward()
        optimizer.step()


def assert_same(one, two):
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert set(one) == set(two)
        for key in one:
            assert_same(one[key], two[key])
    elif isinstance(one, list):
        assert len(one) == len(two)
        for parts in zip(one, two, strict=True):
            assert_same(*parts)
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, two)
    else:
        assert one == two


def wrapped(module, wrap):
    """`module`, or the part of it that is to be wrapped, in `wrap`."""
    if isinstance(module, Larger):
        module.part = wrap(module.part)
        return module
    return wrap(module)


@pytest.mark.parametrize("kind", [Branches, Named, in_larger], ids=["plain", "named", "larger"])
@on_two_ranks
def test_states_are_those_of_torchs_class(kind):
    ours, theirs = kind(), kind()
    theirs.load_state_dict(ours.state_dict())
    model = wrapped(ours, DistributedDataParallel)
    torchs = wrapped(theirs, lambda module: TorchDDP(module, find_unused_parameters=True))
    if isinstance(theirs, Larger):  # what is not wrapped is not averaged
        theirs.first.requires_grad_(False)
        ours.first.requires_grad_(False)
    optimizers = adam(model), adam(torchs)
    for each, optimizer in zip((model, torchs), optimizers, strict=True):
        trained(each, optimizer)
    state, wanted = get_state_dict(model, optimizers[0]), get_state_dict(torchs, optimizers[1])
    for part, same in zip(state, wanted, strict=True):
        assert_same(part, same)
    assert not any("branches.2" in name for name in state[1]["state"])
    frozen = StateDictOptions(ignore_frozen_params=True)
    model.get_parameter(next(iter(dict(model.named_parameters())))).requires_grad_(False)
    torchs.get_parameter(next(iter(dict(torchs.named_parameters())))).requires_grad_(False)
    assert_same(get_model_state_dict(model, options=frozen), get_model_state_dict(torchs, options=frozen))


def compiled(module):
    return torch.compile(module, backend="eager")


WAYS = {
    "inside": lambda wrapper: wrapper(compiled(Named())),
    "inside and outside": lambda wrapper: compiled(wrapper(compiled(Named()))),
    "in a larger one": lambda wrapper: compiled(Larger(wrapper(compiled(Named())))),
}


def stepped(model):
    """An optimizer with state, without a forward, which would be compiled."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("way", WAYS)
@on_two_ranks
def test_names_are_those_of_torchs_class_where_modules_are_compiled(way):
    model, torchs = WAYS[way](DistributedDataParallel), WAYS[way](TorchDDP)
    full = StateDictOptions(full_state_dict=True, strict=False)  # what has another name is left out, silently
    state = get_state_dict(model, stepped(model), options=full)
    for part, wanted in zip(state, get_state_dict(torchs, stepped(torchs), options=full), strict=True):
        assert list(part) == list(wanted)
    assert list(state[1]["state"]) == [name for name in state[0] if "scale" not in name]
    values = {name: value.clone() for name, value in state[0].items()}
    for other in (torchs, WAYS[way](DistributedDataParallel)):
        optimizer = stepped(other)
        parts = copy.deepcopy(state)
        set_state_dict(other, optimizer, model_state_dict=parts[0], optim_state_dict=parts[1], options=full)
        assert_same(dict(get_model_state_dict(other)), values)
        assert_same(get_state_dict(other, optimizer, options=full)[1]["state"], state[1]["state"])


@on_two_ranks
def test_states_load_into_another_wrapper():
    model = DistributedDataParallel(Branches())
    optimizer = adam(model)
    trained(model, optimizer)
    state = copy.deepcopy(get_state_dict(model, optimizer))
    fresh = DistributedDataParallel(Branches())
    other = adam(fresh)
    # What was never used has no state, which torch takes for a mistake if it is not told otherwise.
    set_state_dict(
        fresh, other, model_state_dict=state[0], optim_state_dict=state[1], options=StateDictOptions(strict=False)
    )
    for each, its in ((model, optimizer), (fresh, other)):
        trained(each, its)
    assert_same(dict(fresh.state_dict()), dict(model.state_dict()))


@on_two_ranks
def test_rank_0_alone_has_the_state():
    model, fresh = DistributedDataParallel(Branches()), DistributedDataParallel(Branches())
    given = get_model_state_dict(model) if dist.get_rank() == 0 else {}
    set_model_state_dict(fresh, given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    assert_same(dict(fresh.state_dict()), dict(model.state_dict()))


@on_two_ranks
def test_through_a_checkpoint_and_back_into_a_bare_module(tmp_path):
    model = DistributedDataParallel(Branches())
    trained(model, adam(model))
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path)
    bare = Branches()
    state = get_model_state_dict(bare)
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(bare, state)
    assert_same(dict(bare.state_dict()), dict(model.state_dict()))
