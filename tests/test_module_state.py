"""The parameters and buffers of a module: what is listed, and which changes of the module are noticed."""

import pytest
import torch
from torch import nn

from ppe_ddp.engine.module import ModuleState


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2, bias=False)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def put(module, name, value):
    setattr(module, name, value)


def swap(net):
    net.first, net.last = net.last, net.first


def same_shape(net):
    net.last.weight = nn.Parameter(net.last.weight.detach().clone())


CHANGES = {
    "a parameter more": lambda net: net.register_parameter("more", nn.Parameter(torch.ones(1))),
    "a submodule more": lambda net: net.add_module("more", nn.Identity()),
    "a parameter deep down": lambda net: net.first.register_parameter("more", nn.Parameter(torch.ones(1))),
    "one fewer": lambda net: delattr(net.first, "bias"),
    "the last one gone": lambda net: delattr(net.last, "weight"),
    "one is None": lambda net: put(net.first, "bias", None),
    "another of the same shape": same_shape,
    "another submodule": lambda net: put(net, "first", nn.Linear(3, 4)),
    "two in each other's place": swap,
    "frozen": lambda net: net.first.weight.requires_grad_(False),
    "another dtype": lambda net: net.double(),
    "another shape": lambda net: put(net.last.weight, "data", torch.ones(2, 5)),
    "another memory format": lambda net: put(net.last.weight, "data", torch.ones(4, 2).t()),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_noticed(kind):
    net = Net()
    module_state = ModuleState(net)
    assert module_state.is_current(net)
    CHANGES[kind](net)
    assert not module_state.is_current(net)
    assert ModuleState(net).is_current(net)


def test_another_dtype_at_the_same_address_is_noticed():
    net = Net().half()
    module_state = ModuleState(net)
    net.last.weight.data = net.last.weight.data.view(torch.bfloat16)
    assert not module_state.is_current(net)


def step(net):
    net(torch.randn(5, 3)).sum().backward()
    for parameter in net.parameters():
        parameter.data -= parameter.grad


def moved(net):
    for parameter in net.parameters():
        parameter.data = parameter.data.clone()


SAME = {
    "a step": step,
    "other memory of the same kind": moved,
    "other values": lambda net: net.load_state_dict(Net().state_dict()),
    "evaluation": lambda net: net.eval(),
    "an attribute": lambda net: put(net, "note", "text"),
    "another buffer": lambda net: net.norm.register_buffer("more", torch.ones(1)),
}


@pytest.mark.parametrize("kind", SAME)
def test_nothing_else_is(kind):
    net = Net()
    module_state = ModuleState(net)
    SAME[kind](net)
    assert module_state.is_current(net)


def test_what_has_no_shape_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'0\.weight' is lazy and has no shape yet: run one forward"):
        ModuleState(nn.Sequential(nn.LazyLinear(3)))
