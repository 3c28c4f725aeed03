"""What compressors remember belongs to the step: over any sequence with dropped steps, sent + kept = given."""

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from library_warnings import without_warnings
from node_worlds import in_own_world
from one_process import Routes, assert_same_on_all_ranks, data, mean_gradients, seeded
from ppe_ddp import DistributedDataParallel, DistributedOptimizer, PpeDdpError
from ppe_ddp.compression import ByParameter, Compressor, ErrorFeedback, Int8, PowerSGD, RandomK, Sign, TopK, WarmUp
from ppe_ddp.compression.comm_state import CommState
from ppe_ddp.megatron import DistributedDataParallel as MegatronDataParallel
from ppe_ddp.megatron import DistributedDataParallelConfig
from rank_tests import on_two_ranks
from test_compression import residuals, way

METHODS = {
    "topk": ErrorFeedback(TopK(0.1, min_numel=20)),
    "randomk": ErrorFeedback(RandomK(0.1, min_numel=20)),
    "sign": ErrorFeedback(Sign(block=64)),
    "int8": ErrorFeedback(Int8(block=64)),
    "powersgd": ErrorFeedback(PowerSGD(1, min_compression=1)),
    "mixed": WarmUp(ErrorFeedback(ByParameter({"*.bias": TopK(0.5), "layers.0.*": PowerSGD(1)}, Sign(block=64))), 2),
}
TAKEN = ("taken", "accumulated", "resumed", "copied")
DROPPED = ("infinite", "raises", "raises first", "compressor raises")
OPTIONS = ({}, {"bucket_cap_mb": 1e-3}, {"overlap": False}, {"check_for_nan_in_grad": "skip", "bucket_cap_mb": 1e-3})

RAISING = set()


class Boom(Exception):
    """What one rank raises in a step that is dropped."""


@dataclass(frozen=True)
class Raising(Compressor):
    """Raises on the last rank, in the steps of RAISING, when what it keeps of its first bucket is stored."""

    compressor: Compressor

    def average(self, gradients, link):
        yield from self.compressor.average(gradients, link)
        is_last = dist.get_rank() == dist.get_world_size() - 1
        if is_last and gradients.step in RAISING:
            raise Boom("what it keeps is stored")
        yield from link.all_reduce(torch.ones(1))  # the others wait for the one that has raised


class Training:
    """A wrapper with a compressor, and an account of what was given and what was handed over."""

    def __init__(self, compressor, options):
        self.compressor = Raising(copy.deepcopy(compressor))
        self.options = options
        self.module = seeded(Routes, 16, 6)
        self.total = {name: torch.zeros_like(parameter) for name, parameter in self.module.named_parameters()}
        self.handed = copy.deepcopy(self.total)
        self.wrap()

    def wrap(self):
        self.wrapper = DistributedDataParallel(self.module, **self.options)
        self.wrapper.register_comm_hook(self.compressor)

    def backward(self, model, rank, number, factor=1.0):
        loss = model(data(5, 16, rank=rank, step=number), way(rank, number)).pow(2).sum()
        (factor * loss).backward()

    def step(self, number, fate):
        rank = dist.get_rank()
        if fate in ("resumed", "copied"):
            self.go_on_elsewhere(fate)
        numbers = [number + 100, number] if fate in ("accumulated", "infinite") else [number]
        expected = [mean_gradients(self.module, lambda m, r, n=n: self.backward(m, r, n)) for n in numbers]
        self.wrapper.zero_grad()
        if len(numbers) > 1:
            with self.wrapper.no_sync():
                self.backward(self.wrapper, rank, numbers[0])
        if fate in TAKEN:
            self.backward(self.wrapper, rank, number)
            self.account(expected)
        else:
            self.drop(number, fate)

    def account(self, expected):
        assert_same_on_all_ranks(self.module)
        for name, parameter in self.module.named_parameters():
            for one in expected:
                self.total[name] += 0 if one[name] is None else one[name]
            self.handed[name] += 0 if parameter.grad is None else parameter.grad

    def drop(self, number, fate):
        is_culprit = dist.get_rank() == 0
        kept_state = self.wrapper.comm_state_dict()
        kept = kept_state["parameters"]
        path = way(dist.get_rank(), number)
        layer = self.module.layers[path[-1 if fate == "raises first" else 0]]
        handle = layer.weight.register_hook(_boom) if is_culprit and fate.startswith("raises") else None
        if fate == "compressor raises":
            RAISING.add(kept_state["steps"])
        try:
            self.backward(
                self.wrapper, dist.get_rank(), number, float("inf") if is_culprit and fate == "infinite" else 1
            )
            assert fate == "infinite", "nobody has told"
        except (Boom, PpeDdpError):
            assert fate != "infinite"
        finally:
            RAISING.clear()
            if handle is not None:
                handle.remove()
        if fate == "infinite":  # a loop may leave a step out by clearing the gradients
            self.wrapper.zero_grad()
            torch.optim.SGD(self.module.parameters(), lr=1.0).step()
        still = self.wrapper.comm_state_dict()["parameters"]
        for name, entries in kept.items():
            assert entries.keys() == still[name].keys(), name
            assert all(torch.equal(value, still[name][key]) for key, value in entries.items()), name

    def go_on_elsewhere(self, fate):
        if fate == "copied":
            self.wrapper = copy.deepcopy(self.wrapper)
            self.module = self.wrapper.module
            return
        state = self.wrapper.comm_state_dict()
        self.module = copy.deepcopy(self.module)
        self.wrap()
        self.wrapper.load_comm_state_dict(state)

    def check(self):
        kept = residuals(self.wrapper)
        for name, total in self.total.items():
            torch.testing.assert_close(self.handed[name] + kept[name], total, rtol=1e-4, atol=1e-4, msg=name)


def _boom(_gradient):
    raise Boom("in the middle of backward")


def nothing_is_lost(name, options, fates):
    with without_warnings():
        training = Training(METHODS[name], options)
        for number, fate in enumerate(fates):
            training.step(number, fate)
        training.check()


class Towers(nn.Module):
    """Two towers that share nothing, and a table."""

    def __init__(self, *, sparse):
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))
        self.table = nn.Embedding(8, 16, sparse=sparse)

    def forward(self, x, *, factors=(1.0, 1.0, 1.0)):
        losses = [tower(x).pow(2).sum() for tower in self.towers]
        losses.append(self.table(torch.arange(3)).sum())
        return sum(factor * loss for factor, loss in zip(factors, losses, strict=True))


INF = float("inf")


@dataclass(frozen=True)
class Scaled:
    """One step of two optimizers under a scaler.

    Attributes:
        factors: Of the losses of both towers and of the table on the last rank.
        leaves: Which optimizer the loop does not step.
        fails: Whether the loss raises on rank 0.
    """

    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)
    leaves: int | None = None
    fails: bool = False

    def is_taken(self, k):
        """Whether the optimizer of tower ``k`` updates it."""
        own = self.factors[:1] if k == 0 else self.factors[1:]
        return self.leaves != k and not self.fails and INF not in own


NOBODY = None  # has a gradient
OF_SCALER = {
    "one is infinite": [Scaled(), Scaled((1.0, INF, 1.0)), Scaled(), Scaled((1.0, INF, 1.0), leaves=0), Scaled()],
    "then nobody has a gradient": [Scaled(), Scaled((1.0, INF, 1.0)), NOBODY, Scaled()],
    "then one fails": [Scaled(), Scaled((1.0, INF, 1.0)), Scaled(fails=True), Scaled()],
    "the table is infinite": [Scaled(), Scaled((1.0, 1.0, INF)), Scaled()],
}


@pytest.mark.parametrize("steps", OF_SCALER.values(), ids=OF_SCALER)
@pytest.mark.parametrize("kind", ["one bucket", "two buckets", "sharded", "megatron"])
@on_two_ranks
def test_of_two_optimizers_under_a_scaler_the_one_that_steps_commits(kind, steps):
    module, compressor = seeded(Towers, sparse="buckets" in kind), ErrorFeedback(TopK(0.1, min_numel=0))
    if kind == "megatron":
        config = DistributedDataParallelConfig(overlap_grad_reduce=True)
        wrapper = MegatronDataParallel(None, config, module, reduce_function=compressor)
    else:
        wrapper = DistributedDataParallel(module, bucket_cap_mb=1e-4 if kind == "two buckets" else 25)
        wrapper.register_comm_hook(compressor)
    first, second = module.towers
    optimizers = [torch.optim.SGD(own, lr=0.0) for own in ([first.weight], [second.weight, module.table.weight])]
    if kind == "sharded":
        optimizers = [DistributedOptimizer(one, wrapper) for one in optimizers]
    names = [f"towers.{k}.weight" for k in range(2)]
    total = {name: torch.zeros(16, 16) for name in names}
    handed = copy.deepcopy(total)

    def backward(model, rank, number, scaler=None, step=NOBODY):
        if step is not NOBODY and step.fails and rank == 0:
            raise Boom
        factors = step.factors if step is not NOBODY and rank else (1.0, 1.0, 1.0)
        loss = model(data(5, 16, rank=rank, step=number), factors=factors)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if kind == "megatron" and scaler is not None:
            model.finish_grad_sync()
            for parameter in module.parameters():
                parameter.grad = parameter.main_grad

    for number, step in enumerate(steps):
        expected = mean_gradients(module, lambda model, rank, number=number: backward(model, rank, number))
        wrapper.zero_grad_buffer() if kind == "megatron" else wrapper.zero_grad()
        if step is NOBODY:
            wrapper.finish_grad_sync()
            continue
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        try:
            backward(wrapper, dist.get_rank(), number, scaler, step)
        except (Boom, PpeDdpError):
            assert step.fails
            wrapper.abort_grad_sync()
            continue
        for k, optimizer in enumerate(optimizers):
            if k != step.leaves:
                scaler.step(optimizer)
            if step.is_taken(k):
                total[names[k]] += expected[names[k]]
                handed[names[k]] += whole_gradient(optimizer, module.towers[k].weight)
    kept = residuals(wrapper)
    for name in names:
        torch.testing.assert_close(handed[name] + kept[name], total[name], rtol=1e-4, atol=1e-4, msg=name)


def whole_gradient(optimizer, parameter):
    """The average of ``parameter``, gathered where each rank has a share."""
    if not isinstance(optimizer, DistributedOptimizer):
        return parameter.grad
    own = optimizer.param_groups[0]["params"][0].grad
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return torch.cat(parts).view(parameter.shape)


@pytest.mark.parametrize("overlap", [False, True])
@on_two_ranks
def test_a_step_of_megatrons_wrapper_that_is_not_finite_leaves_what_was_kept(overlap):
    config = DistributedDataParallelConfig(overlap_grad_reduce=overlap, bucket_size=300)
    model = MegatronDataParallel(None, config, seeded(Routes, 16, 6), reduce_function=ErrorFeedback(TopK(0.1, 20)))

    def run(number, factor=1.0):
        model.zero_grad_buffer()
        handle = model.module.layers[1].weight.register_hook(lambda gradient: gradient * factor)
        model(data(5, 16, step=number), [0, 1, 2]).pow(2).sum().backward()
        handle.remove()
        model.finish_grad_sync()
        return model.comm_state_dict()[0]["parameters"]

    kept = run(0)
    assert any(kept.values())
    still = run(1, float("inf") if dist.get_rank() else 1.0)
    assert all(torch.equal(kept[name][key], still[name][key]) for name in kept for key in kept[name])
    moved = run(2)
    assert any(not torch.equal(kept[name][key], moved[name][key]) for name in kept for key in kept[name])


@pytest.mark.parametrize(
    ("name", "options"), [*((name, OPTIONS[3]) for name in METHODS), *(("topk", one) for one in OPTIONS)]
)
def test_every_way_to_drop_a_step(two_ranks, name, options):
    fates = ["taken", *(fate for dropped in DROPPED for fate in (dropped, "taken"))]
    fates += ["infinite", "resumed", "accumulated", "copied", "raises", "taken"]
    two_ranks.run(in_own_world, nothing_is_lost, name, options, fates, timeout=120)


class ClearingSGD(torch.optim.SGD):
    """Clears the gradients at the end of its step."""

    def step(self):
        super().step()
        self.zero_grad()


def undecided_state(parameter):
    """The state after a step that has changed it from 1 to 2, and that an optimizer may take."""
    state = CommState(can_revoke=True)
    state.of("a")["residual"] = 1
    state.keep(["a"])
    state.of("a")["residual"] = 2
    state.put_back_unless_stepped({"a": parameter})
    return state


@pytest.mark.parametrize("clears_before", [False, True])
def test_a_step_that_clears_gradients_itself_commits(clears_before):
    parameter = nn.Parameter(torch.ones(2))
    state = undecided_state(parameter)
    parameter.grad = None if clears_before else torch.ones(2)
    ClearingSGD([parameter], lr=1.0).step()
    state.decide()
    assert state.of("a") == {"residual": 1 if clears_before else 2}


def test_the_step_that_torch_takes_to_describe_an_optimizer_commits_nothing():
    module = nn.Linear(1, 1)
    state = undecided_state(module.weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    get_optimizer_state_dict(module, optimizer)
    optimizer.step()  # without gradients
    state.decide()
    assert state.of("a") == {"residual": 1}


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_step_that_fails_before_it_sends_leaves_the_one_before(is_taken):
    parameter = nn.Parameter(torch.ones(2))
    state = undecided_state(parameter)
    if is_taken:
        parameter.grad = torch.ones(2)
        torch.optim.SGD([parameter], lr=1.0).step()
    groups = SimpleNamespace(taken=4)
    state.revoke(groups)
    assert groups.taken == 4
    assert state.of("a") == {"residual": 2 if is_taken else 1}


def test_a_state_that_is_copied_before_an_optimizer_steps_is_not_decided_by_that():
    parameter = nn.Parameter(torch.ones(2))
    state = undecided_state(parameter)
    assert copy.deepcopy(state).of("a") == {"residual": 1}
    parameter.grad = torch.ones(2)
    torch.optim.SGD([parameter], lr=1.0).step()
    assert copy.deepcopy(state).of("a") == {"residual": 2}
    state.decide()
    assert state.of("a") == {"residual": 2}


def test_a_step_with_sparse_gradients_alone_leaves_what_was_decided_before_it():
    parameter = nn.Parameter(torch.ones(2))
    state = undecided_state(parameter)
    parameter.grad = torch.ones(2)
    torch.optim.SGD([parameter], lr=1.0).step()
    state.put_back_unless_stepped({})  # it keeps nothing, and its average is not finite
    state.decide()
    assert state.of("a") == {"residual": 2}
