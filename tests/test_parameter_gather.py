"""Gathering parameters: every use waits for the new values, and no use starts a collective."""

import copy
import io
import os
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ppe_ddp import CommunicationError, UnusableError
from ppe_ddp.engine.plan import ParameterSpec
from ppe_ddp.engine.zero.parameter_gather import ParameterGather
from ppe_ddp.engine.zero.shards import Shard, ShardedModel
from ppe_ddp.nested_tensors import Inputs

X = torch.ones(2, 3)


def spec_of(p, k):
    return ParameterSpec(f"parameter {k}", tuple(p.shape), p.stride(), p.dtype, p.device)


class Late(ShardedModel):
    """Parameters of zeros, which become ones when their unit is waited for, and not before."""

    failures = SimpleNamespace(wait=lambda pending, _device: pending.wait())
    groups = SimpleNamespace(
        step=0,
        generation=0,
        is_closed=False,
        failures=failures,
        fail=lambda error, phase: None,
        gathers=set(),
        user=lambda: None,
    )
    is_synchronized = True

    def __init__(self, *units):
        flat = [parameter for unit in units for parameter in unit]
        self.shards = [Shard(p, spec_of(p, k), 0, p.numel()) for k, p in enumerate(flat)]
        numbers = iter(range(len(flat)))
        self.units = [[next(numbers) for _ in unit] for unit in units]
        self.waited = []
        self.fails, self.error = set(), RuntimeError("the other rank is gone")

    def gradients(self):
        return [None] * len(self.shards)

    def attach(self, index, weight):
        raise AssertionError

    def assign_gradients(self):
        raise AssertionError

    def write(self, index, values):
        raise AssertionError

    def write_in_place(self, indices):
        raise AssertionError

    def zero_grad(self, indices, *, set_to_none=True):
        raise AssertionError

    def gather(self, unit, group=None):
        return Wait(self, unit)

    def install(self, unit):
        for index in self.units[unit]:
            self.shards[index].parameter.detach().fill_(1.0)


class Wait:
    def __init__(self, model, unit):
        self._model, self._unit = model, unit

    def wait(self):
        self._model.waited.append(self._unit)
        if self._unit in self._model.fails:
            raise self._model.error


def zeros(*modules):
    for module in modules:
        nn.init.zeros_(module.weight)
    return modules if len(modules) > 1 else modules[0]


def under_way(*units):
    """A gather of these units, that nobody has waited for."""
    model = Late(*units)
    gather = ParameterGather([model])
    gather.start(overlap=True)
    assert model.waited == []
    return gather, model


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def loaded(save, p):
    file = io.BytesIO()
    save(p, file)
    file.seek(0)
    return file


@torch.no_grad()
def average(p):
    shadow = [torch.zeros(3, 3)]
    torch._foreach_lerp_(shadow, [p], 0.5)
    return shadow[0] * 2


USES = {
    "linear": lambda p: F.linear(torch.eye(3), p).T,
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "save": lambda p: torch.load(loaded(torch.save, p)),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "storage": lambda p: torch.empty(0).set_(p.untyped_storage()).view(3, 3),
    "address": lambda p: p.data_ptr() and p,
    "index": lambda p: torch.stack([p[k] for k in range(3)]),
    "iterate": lambda p: torch.stack(list(p)),
    "convert": lambda p: p.to(torch.float64).float(),
    "in a list": lambda p: torch.stack([torch.ones(3, 3), p])[1],
    "by keyword": lambda p: torch.add(input=torch.zeros(3, 3), other=p),
    "operator": lambda p: torch.ops.aten.mul.Tensor(p, 1.0),
    "moving average": average,
    "copied from": lambda p: torch.zeros(3, 3).copy_(p.data),
    "vector": lambda p: nn.utils.parameters_to_vector([p]).view(3, 3),
    "autograd function": Scale.apply,
    "vmap": lambda p: torch.vmap(lambda row: row * 1.0)(p),
    "functional call": lambda p: torch.func.functional_call(nn.Linear(3, 3, False), {"weight": p}, torch.eye(3)).T,
    "another thread": lambda p: in_a_thread(lambda: p * 1.0),
}


def in_a_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("use", USES)
def test_whoever_uses_a_parameter_has_its_new_values(use):
    linear, other = zeros(nn.Linear(3, 3), nn.Linear(3, 3))
    gather, model = under_way([linear.weight, linear.bias], [other.weight])
    value = USES[use](linear.weight)
    torch.testing.assert_close(value.detach(), torch.ones(3, 3))
    assert model.waited == [0]  # and for nothing else
    assert type(linear.weight) is nn.Parameter
    assert type(linear.bias) is nn.Parameter
    assert not vars(linear.weight)  # nothing of ours is left
    assert type(value) in (nn.Parameter, torch.Tensor)
    gather.finish()
    assert model.waited == [0, 1]
    assert other.weight.eq(1).all()


class ReadsItsChild(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = nn.Linear(3, 3, bias=False)

    def forward(self, x):
        return F.linear(x, self.child.weight)


MODULES = {
    "child": ReadsItsChild,
    "LSTM": lambda: nn.LSTM(3, 3),
    "GRU cell": lambda: nn.GRUCell(3, 3),
    "attention": lambda: Attention(),
    "embedding": lambda: Embedding(),
    "layer norm": lambda: nn.LayerNorm(3),
    "encoder": lambda: nn.TransformerEncoderLayer(3, 1, 5, dropout=0.0),
    "shared": lambda: nn.Sequential(*[nn.Linear(3, 3)] * 2),
}


class Attention(nn.MultiheadAttention):
    def __init__(self):
        super().__init__(3, 1)

    def forward(self, x):
        return super().forward(x, x, x)[0]


class Embedding(nn.Embedding):
    def __init__(self):
        super().__init__(3, 3)

    def forward(self, x):
        return super().forward(x.long())


@pytest.mark.parametrize("is_watched", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_modules_have_the_new_values(name, is_watched):
    module = MODULES[name]()
    twin = copy.deepcopy(module)
    for parameter in twin.parameters():
        nn.init.ones_(parameter)
    # each parameter a unit of its own, as if each came separately
    gather, _ = under_way(*[[parameter] for parameter in module.parameters()])
    if is_watched:
        gather.watch(module)
    for now, want in zip(flat(module(X)), flat(twin(X)), strict=True):
        torch.testing.assert_close(now, want)


def flat(outputs):
    return [outputs] if torch.is_tensor(outputs) else [tensor for part in outputs for tensor in flat(part)]


def test_a_watched_module_waits_before_code_that_cannot_be_seen():
    linear, other = zeros(nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    net = nn.Sequential(linear, other)
    gather, model = under_way([linear.weight], list(other.parameters()))
    gather.watch(net)
    early = []
    # as an extension in C++ does
    linear.forward = lambda x: early.append(list(model.waited)) or unseen(linear.weight)
    net[0](X)
    assert early == [[0]]
    assert model.waited == [0]
    gather.unwatch()
    gather.start(overlap=True)
    net[0](X)
    assert model.waited == [0, 1]  # the start has waited for what was left, the forward for nothing
    gather.finish()


def unseen(parameter):
    with torch._C.DisableTorchFunctionSubclass():
        return parameter * 1.0


def test_gradients_may_be_looked_at_and_cleared_and_inputs_moved_meanwhile():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    inputs = Inputs(net)
    gather, model = under_way(list(net.parameters()))
    inputs.to_device((X,), {})  # a forward begins with it
    for parameter in net.parameters():
        parameter.grad = None
        assert parameter.grad is None
        assert parameter.requires_grad
        assert parameter.is_leaf
    net.zero_grad()
    assert isinstance(net[0].weight, nn.Parameter)
    assert net[0].weight in set(net.parameters())
    assert model.waited == []
    gather.finish()


def test_what_is_written_meanwhile_is_not_overwritten():
    linear = nn.Linear(3, 3)
    gather, _ = under_way(list(linear.parameters()))
    linear.load_state_dict({"weight": torch.full((3, 3), 5.0), "bias": torch.full((3,), 5.0)})
    gather.finish()
    assert all(parameter.eq(5).all() for parameter in linear.parameters())


def test_a_graph_from_before_the_step_does_not_go_backward():
    linear = nn.Linear(3, 3)
    loss = linear(X.clone().requires_grad_()).sum()
    gather, _ = under_way(list(linear.parameters()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    gather.finish()


def test_a_failure_is_raised_where_its_parameters_are_used_and_the_next_gather_works():
    first, second = zeros(nn.Linear(3, 3), nn.Linear(3, 3))
    gather, model = under_way([first.weight, first.bias], [second.weight])
    model.fails = {0}
    assert second.weight.eq(1).all()
    with pytest.raises(CommunicationError, match=r"'parameter 0'.*the other rank is gone"):
        first(X)
    model.fails.clear()
    gather.start(overlap=True)
    assert first.weight.eq(1).all()
    gather.start(overlap=True)
    model.fails, model.waited = {0}, []
    with pytest.raises(CommunicationError):
        gather.finish()
    assert model.waited == [0, 1]  # what has come is there all the same
    gather.finish()


def test_after_an_interrupt_the_next_use_waits_again():
    first, second = zeros(nn.Linear(3, 3), nn.Linear(3, 3))
    gather, model = under_way([first.weight, first.bias], [second.weight])
    model.error = KeyboardInterrupt()
    model.fails = {0}
    for use in (lambda: first(X), gather.finish):
        with pytest.raises(KeyboardInterrupt):
            use()
    model.fails.clear()
    assert first.weight.eq(1).all()
    assert model.waited == [0, 0, 0]


def test_it_outlives_who_has_started_it():
    linear = zeros(nn.Linear(3, 3))
    gather, _ = under_way([linear.weight])
    del gather
    assert linear.weight.eq(1).all()


def test_a_parameter_of_a_class_of_its_own_is_waited_for_at_once():
    class Own(nn.Parameter):
        pass

    parameter = Own(torch.zeros(3))
    model = Late([parameter])
    ParameterGather([model]).start(overlap=True)
    assert model.waited == [0]
    assert type(parameter) is Own


def test_two_gathers_of_the_same_parameters_come_one_after_the_other():
    linear = zeros(nn.Linear(3, 3))
    model = Late([linear.weight], [linear.bias])
    one, other = ParameterGather([model]), ParameterGather([model])
    one.start([0, 1], overlap=True)
    other.start([0], overlap=True)
    assert model.waited == [0]
    assert linear.weight.eq(1).all()
    assert linear.bias.eq(1).all()
    assert model.waited == [0, 0, 1]
    assert not one.is_under_way
    assert not other.is_under_way


def test_copies_of_a_watched_module_wait_for_nothing():
    linear = zeros(nn.Linear(3, 3))
    gather, model = under_way(list(linear.parameters()))
    gather.watch(linear)
    twin = copy.deepcopy(linear)
    assert type(twin.weight) is nn.Parameter
    assert twin.weight.eq(1).all()
    gather.start(overlap=True)
    model.waited.clear()
    pickle.loads(pickle.dumps(twin))(X)
    twin(X)
    assert model.waited == []
    gather.finish()


def test_a_forked_process_is_told(monkeypatch):
    linear = nn.Linear(3, 3)
    gather, _ = under_way([linear.weight])
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(UnusableError, match="was forked"):
            linear(X)
    gather.finish()


def test_what_an_argument_hides_is_refused():
    class Hidden:
        def __init__(self, tensor):
            self.tensor = tensor

        def norm(self):
            if torch.overrides.has_torch_function((self.tensor,)):
                return torch.overrides.handle_torch_function(Hidden.norm, (self.tensor,), self)
            return self.tensor.norm()

    linear = zeros(nn.Linear(3, 3))
    gather, _ = under_way([linear.weight])
    with pytest.raises(UnusableError, match=r"norm uses a parameter.*synchronize\(\)"):
        Hidden(linear.weight).norm()
    gather.finish()
    assert Hidden(linear.weight).norm() == 3


def test_making_a_parameter_of_one_is_refused_once():
    linear = zeros(nn.Linear(3, 3))
    gather, _ = under_way([linear.weight])
    with pytest.raises(RuntimeError, match="Creating a Parameter"):  # torch's: it looks at the class before it reads
        nn.Parameter(linear.weight)
    assert nn.Parameter(linear.weight).eq(1).all()
    gather.finish()
