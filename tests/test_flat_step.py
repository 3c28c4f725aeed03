"""Small weights are stepped together, bit for bit as if each were by itself; without ranks, but for the last test."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from one_process import data, seeded
from optim_runners import assert_same
from ppe_ddp import DistributedDataParallel, DistributedOptimizer
from ppe_ddp.optim import master_weights
from ppe_ddp.optim.master_weights import FlatStep
from ppe_ddp.tracing.rank_record import record
from rank_tests import on_two_ranks

SIZES = (3, 1, 0, 7, 20_000, 64, 5, 9)  # the fifth is too large to be copied
MAKES = {
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adam": lambda groups: torch.optim.Adam(groups, amsgrad=True),
    "adamax": torch.optim.Adamax,
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, foreach=True),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, fused=True),
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, centered=True, momentum=0.5),
    "rprop": torch.optim.Rprop,
    "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9, dampening=0.5),
    "sgd fused": lambda groups: torch.optim.SGD(groups, momentum=0.9, fused=True),
    "sgd plain": torch.optim.SGD,
}


class Calls(TorchDispatchMode):
    """Counts the calls of torch."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


class Pair:
    """The same weights twice: stepped by an optimizer alone, and laid end to end."""

    def __init__(self, make, sizes=SIZES):
        generator = torch.Generator().manual_seed(1)
        whole = [torch.randn(n, generator=generator, dtype=torch.float64) for n in (*sizes, *sizes)]
        self.plain, self.ours = ([nn.Parameter(tensor.clone()) for tensor in whole] for _ in range(2))
        self.optimizers = [
            make([{"params": weights[: len(sizes)], "lr": 0.01}, {"params": weights[len(sizes) :], "lr": 0.02}])
            for weights in (self.plain, self.ours)
        ]
        self.flat = FlatStep(self.optimizers[1], hooks=0)
        self._generator = generator

    def step(self, without=()):
        """One step of both; the number of torch's calls that each has made."""
        counts = []
        for k, (one, other) in enumerate(zip(self.plain, self.ours, strict=True)):
            one.grad = torch.randn(one.shape, generator=self._generator, dtype=one.dtype)
            other.grad = one.grad.clone()
            if k in without:
                one.grad = other.grad = None
        for step in (self.optimizers[0].step, self.flat.step):
            with torch.no_grad(), Calls() as calls:
                step()
            counts.append(calls.count)
        for one, other in zip(self.plain, self.ours, strict=True):
            assert torch.equal(other, one)
        return counts

    def assert_same_state(self):
        for one, other in zip(self.plain, self.ours, strict=True):
            states = [optimizer.state.get(w, {}) for optimizer, w in zip(self.optimizers, (one, other), strict=True)]
            assert states[1].keys() == states[0].keys()
            for key, value in states[0].items():
                torch.testing.assert_close(states[1][key], value, rtol=0, atol=0)


@pytest.mark.parametrize("name", MAKES)
def test_weights_and_state_are_those_of_single_steps(name):
    pair = Pair(MAKES[name])
    for without in ((), (), (), (1, 9), (1, 9), (1, 9), (), (), ()):
        pair.step(without)
        pair.assert_same_state()
    pair.flat.separate()
    pair.assert_same_state()
    pair.step()
    pair.assert_same_state()


def test_flat_tensors_have_a_largest_size(monkeypatch):
    monkeypatch.setattr(master_weights, "_MOST_BYTES", 400)
    pair = Pair(torch.optim.Adam, sizes=(10,) * 40)
    single = pair.step()[0]
    pair.step()
    assert 16 * single / 80 <= pair.step()[1] < single / 2  # eight flat tensors in each of two groups
    pair.assert_same_state()


def test_a_step_makes_few_calls_once_two_had_the_same_gradients():
    pair = Pair(torch.optim.AdamW, sizes=(5,) * 40)
    single, first = pair.step()
    assert first == single >= 400
    pair.step()  # lays them out
    assert pair.step()[1] < single / 5
    assert pair.step(without=(3,))[1] > single / 2


def test_the_lists_of_groups_and_the_keys_of_state_are_the_weights_between_steps(monkeypatch):
    pair = Pair(torch.optim.SGD)
    lists = [group["params"] for group in pair.optimizers[1].param_groups]
    for _ in range(3):
        pair.step()
        assert all(now["params"] is then for now, then in zip(pair.optimizers[1].param_groups, lists, strict=True))
        assert set(map(id, pair.optimizers[1].state)) <= set(map(id, pair.ours))
    monkeypatch.setattr(master_weights.FlatShards, "unpack", interrupted)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        pair.flat.step()
    monkeypatch.undo()
    pair.optimizers[1].param_groups[1]["lr"] = "none"  # an error in the second group
    assert all(now["params"] is then for now, then in zip(pair.optimizers[1].param_groups, lists, strict=True))
    assert set(map(id, pair.optimizers[1].state)) <= set(map(id, pair.ours))
    with pytest.raises(TypeError), torch.no_grad():
        pair.flat.step()
    assert all(now["params"] is then for now, then in zip(pair.optimizers[1].param_groups, lists, strict=True))
    assert set(map(id, pair.optimizers[1].state)) <= set(map(id, pair.ours))


def interrupted(*_):
    raise KeyboardInterrupt


def test_hyper_parameters_and_state_that_a_user_changes_count():
    pair = Pair(torch.optim.AdamW)
    for _ in range(3):
        pair.step()
    for optimizer, weights in zip(pair.optimizers, (pair.plain, pair.ours), strict=True):
        optimizer.param_groups[0]["lr"] = 0.5
        optimizer.state[weights[0]]["exp_avg"] = torch.ones(3, dtype=torch.float64)
        optimizer.state[weights[1]]["exp_avg"].fill_(2.0)
    for _ in range(3):
        pair.step()
    for optimizer in pair.optimizers:
        optimizer.load_state_dict(optimizer.state_dict())
    for _ in range(3):
        pair.step()
        pair.assert_same_state()
    for optimizer, weights in zip(pair.optimizers, (pair.plain, pair.ours), strict=True):
        optimizer.state[weights[0]]["step"] += 5  # of this one alone
    for _ in range(3):
        pair.step()
        pair.assert_same_state()
    for forget in (lambda state, _: state.clear(), lambda state, weight: state.pop(weight)):
        for optimizer, weights in zip(pair.optimizers, (pair.plain, pair.ours), strict=True):
            forget(optimizer.state, weights[0])
        for _ in range(3):
            pair.step()
            pair.assert_same_state()


def test_state_of_weights_that_were_separated_has_its_own_memory():
    pair = Pair(torch.optim.AdamW)
    for _ in range(3):
        pair.step()
    pair.flat.separate()
    tensors = [value for state in pair.optimizers[1].state.values() for value in state.values() if value.numel()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors)


def test_who_looks_on_sees_each_weight():
    seen = []
    pair = Pair(torch.optim.SGD)
    pair.step()
    pair.step()
    hook = pair.optimizers[1].register_step_pre_hook(
        lambda optimizer, *_: seen.append([len(group["params"]) for group in optimizer.param_groups])
    )
    pair.step()
    hook.remove()
    pair.step()
    pair.optimizers[1].step = lambda step=pair.optimizers[1].step: (
        seen.append([len(group["params"]) for group in pair.optimizers[1].param_groups]),
        step(),
    )
    pair.step()
    assert seen == [[len(SIZES)] * 2] * 2


def test_a_timeline_changes_no_step():
    pair = Pair(torch.optim.SGD)
    counts = [pair.step() for _ in range(3)]
    with record():
        assert pair.step() == counts[-1] != counts[0]


@on_two_ranks
def test_a_distributed_optimizer_trains_on_as_before_a_look_at_its_state():
    model, twin = (seeded(deep) for _ in range(2))
    wrapper = DistributedDataParallel(model)
    ours = DistributedOptimizer(torch.optim.AdamW(wrapper.parameters(), lr=0.01), wrapper)
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.01)
    counts = []
    for step in range(9):
        ours.zero_grad()
        theirs.zero_grad()
        wrapper(data(4, 6, step=step, dtype=torch.float64)).sum().backward()
        (sum(twin(data(4, 6, rank=rank, step=step, dtype=torch.float64)).sum() for rank in range(2)) / 2).backward()
        with Calls() as calls:
            ours.step()
        theirs.step()
        counts.append(calls.count)
        assert_same(wrapper, twin)
        if step == 3:
            assert {float(state["step"]) for state in ours.state.values()} == {4.0}
        if step == 5:
            ours.load_state_dict(ours.state_dict())
    assert counts[3] < counts[0] / 3
    assert counts[8] < counts[0] / 3


@pytest.mark.parametrize("compiled", ["step", "step of the wrapped optimizer"])
@on_two_ranks
def test_a_step_that_was_compiled(compiled):
    model, twin = (seeded(deep, 3) for _ in range(2))
    wrapper = DistributedDataParallel(model)
    inner = torch.optim.AdamW(wrapper.parameters(), lr=0.01)
    ours, theirs = DistributedOptimizer(inner, wrapper), torch.optim.AdamW(twin.parameters(), lr=0.01)
    step = ours.step
    if compiled == "step":
        step = torch.compile(step, backend="eager")
    else:
        inner.step = torch.compile(inner.step, backend="eager")
    for number in range(4):
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        wrapper(data(4, 6, step=number, dtype=torch.float64)).sum().backward()
        x = [data(4, 6, rank=rank, step=number, dtype=torch.float64) for rank in range(2)]
        (sum(twin(one).sum() for one in x) / 2).backward()
        step()
        theirs.step()
    assert_same(wrapper, twin, rtol=1e-4, atol=1e-6)  # compiled, Adam corrects its bias in single precision


def deep(count=10):
    return nn.Sequential(*[layer for _ in range(count) for layer in (nn.Linear(6, 6), nn.Tanh())]).double()
