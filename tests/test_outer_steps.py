"""LocalSGD and DiLoCo against a training of all ranks in one process."""

import copy
import gc
import itertools
import math
import pickle
from collections import deque
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import AveragedModel

from library_warnings import library_warnings
from one_process import Routes, assert_same_on_all_ranks, data, mlp, of_all_ranks, seeded
from ppe_ddp import (
    Checkpointer,
    DisagreementError,
    DistributedDataParallel,
    NonFiniteGradientError,
    PeerAbortedError,
    UnusableError,
    average,
    weigh,
)
from ppe_ddp.compression import Compressor, DiLoCo, ErrorFeedback, Int8, LocalSGD, TopK, Uncompressed
from ppe_ddp.compression.outer_steps import OuterSteps
from rank_tests import on_three_ranks, on_two_ranks
from test_compression import Failing

EVERY = 3


def inner(model, optimizer, rank, step):
    optimizer.zero_grad()
    # The last layer is never used, the third by rank 1 alone.
    way = [0, 1] if step % 2 else [1]
    model(data(5, 8, rank=rank, step=step), [2, *way] if rank == 1 else way).pow(2).sum().backward()
    optimizer.step()


def reference(size, steps, lr, momentum):
    """What every rank has after each step: Nesterov's outer step written out."""
    models = [seeded(Routes, 8, 4) for _ in range(size)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    last = [parameter.detach().clone() for parameter in models[0].parameters()]
    velocity = [torch.zeros_like(parameter) for parameter in last]
    for step in range(steps):
        for rank in range(size):
            inner(models[rank], optimizers[rank], rank, step)
        if (step + 1) % EVERY:
            continue
        for k, ranks in enumerate(zip(*(model.parameters() for model in models), strict=True)):
            change = sum(last[k] - parameter.detach() for parameter in ranks) / size
            if change.any():
                velocity[k] = momentum * velocity[k] + change
                last[k] = last[k] - lr * (change + momentum * velocity[k])
            for parameter in ranks:
                parameter.data.copy_(last[k])
    return models


def train(make, steps):
    wrapper = DistributedDataParallel(seeded(Routes, 8, 4))
    optimizer = torch.optim.AdamW(wrapper.parameters(), lr=0.01)
    outer = make(wrapper, optimizer)
    for step in range(steps):
        inner(wrapper, optimizer, dist.get_rank(), step)
    return wrapper, optimizer, outer


METHODS = {
    "local sgd": (lambda ddp, optimizer: LocalSGD(ddp, optimizer, every=EVERY), 1.0, 0.0),
    "diloco": (lambda ddp, optimizer: DiLoCo(ddp, optimizer, every=EVERY), 0.7, 0.9),
    "plain": (lambda ddp, optimizer: DiLoCo(ddp, optimizer, every=EVERY, lr=0.5, momentum=0.0), 0.5, 0.0),
}


def check(name):
    make, lr, momentum = METHODS[name]
    for steps in (2, 3, 10):
        expected = reference(dist.get_world_size(), steps, lr, momentum)[dist.get_rank()]
        wrapper, _, _ = train(make, steps)
        for one, other in zip(wrapper.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
@on_two_ranks
def test_as_in_one_process(name):
    check(name)


@on_three_ranks
def test_as_in_one_process_on_three_ranks():
    check("diloco")


@on_two_ranks
def test_nothing_is_sent_between_outer_steps_and_only_what_changed_then():
    wrapper, optimizer, _ = train(METHODS["diloco"][0], 2)
    assert wrapper.trace() is None
    inner(wrapper, optimizer, dist.get_rank(), 2)
    trace = wrapper.trace()
    assert set(trace.agreed) == {f"layers.{k}.{kind}" for k in range(3) for kind in ("weight", "bias")}
    inner(wrapper, optimizer, dist.get_rank(), 3)
    assert wrapper.trace() == trace


@on_two_ranks
def test_outer_steps_are_compressed():
    def run(compressor):
        wrapper = DistributedDataParallel(seeded(lambda: mlp(4, 64, 64, 4)))
        if compressor is not None:
            wrapper.register_comm_hook(compressor)
        optimizer = torch.optim.AdamW(wrapper.parameters(), lr=0.01)
        DiLoCo(wrapper, optimizer, every=EVERY)
        for step in range(30):
            optimizer.zero_grad()
            loss = (wrapper(data(8, 4, step=step)) - 1).pow(2).mean()
            loss.backward()
            optimizer.step()
        same = of_all_ranks([parameter.detach() for parameter in wrapper.parameters()])
        assert all(torch.equal(one, other) for one, other in zip(*same, strict=True))
        return float(loss), wrapper.trace().gradient_nbytes

    plain, bytes_of_all = run(None)
    assert plain < 0.4
    # Ten outer steps are few for what is sent late.
    for compressor, part, at_most in ((Int8(), 0.3, 1.1 * plain), (ErrorFeedback(TopK(0.1, min_numel=500)), 0.35, 0.9)):
        loss, nbytes = run(compressor)
        assert nbytes < part * bytes_of_all
        assert loss < at_most


@on_two_ranks
def test_stopped():
    wrapper, optimizer, outer = train(METHODS["local sgd"][0], EVERY)
    outer.stop()
    assert wrapper.require_backward_grad_sync
    inner(wrapper, optimizer, dist.get_rank(), 0)
    assert_same_on_all_ranks(wrapper.module)


def same_on_all_ranks(module):
    tables = of_all_ranks([parameter.detach() for parameter in module.parameters()])
    return all(all(map(torch.equal, tables[0], table)) for table in tables)


def unfreeze(net):
    net[0].requires_grad_(True)


def unfreeze_on_one_rank(net):
    net[0].requires_grad_(dist.get_rank() == 1)


def freeze(net):
    net[2].requires_grad_(False)


def add(net):
    net.append(seeded(nn.Linear, 4, 4))


def replace(net):
    net[2] = seeded(nn.Linear, 16, 4)


@pytest.mark.parametrize("method", [LocalSGD, DiLoCo])
@pytest.mark.parametrize("change", [unfreeze, unfreeze_on_one_rank, freeze, add, replace])
@pytest.mark.parametrize("at", [3, 4])
@on_two_ranks
def test_what_changes_later_is_averaged(method, change, at):
    net = seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    net[0].requires_grad_(change is freeze or change not in (unfreeze, unfreeze_on_one_rank))
    wrapper = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    method(wrapper, optimizer, every=EVERY)
    before = net[0].weight.detach().clone()
    for step in range(9):
        if step == at:
            known = set(net.parameters())
            change(net)
            if new := [parameter for parameter in net.parameters() if parameter not in known]:
                optimizer.add_param_group({"params": new})
        optimizer.zero_grad()
        wrapper(data(4, 8, step=step)).square().mean().backward()
        optimizer.step()
        assert (step + 1) % EVERY or same_on_all_ranks(net), step
    assert not torch.equal(before, net[0].weight)


@pytest.mark.parametrize("method", [LocalSGD, DiLoCo])
@on_two_ranks
def test_what_changes_later_is_averaged_where_another_optimizer_steps_first(method):
    net = seeded(mlp, 8, 16, 4)
    net[0].requires_grad_(False)
    wrapper = DistributedDataParallel(net)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (net[0], net[2])]
    method(wrapper, optimizers[1], every=EVERY)
    for step in range(9):
        if step == 3:
            net[0].requires_grad_(True)
        if step == 7:
            wrapper.load_state_dict(seeded(mlp, 8, 16, 4).state_dict())
        wrapper.zero_grad()
        wrapper(data(4, 8, step=step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        assert (step + 1) % EVERY or same_on_all_ranks(net), step


@on_two_ranks
def test_a_frozen_layer_in_the_place_of_another_one_stays_as_it_is():
    net = seeded(mlp, 8, 16, 4)
    wrapper = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    DiLoCo(wrapper, optimizer, every=1)
    for step in range(3):
        if step == 1:
            net[2] = nn.Linear(16, 4).requires_grad_(False)
            wrapper.load_state_dict(seeded(mlp, 8, 16, 4).state_dict())
        wrapper.zero_grad()
        wrapper(data(4, 8, step=step)).square().mean().backward()
        optimizer.step()
    assert torch.equal(net[2].weight, seeded(mlp, 8, 16, 4)[2].weight)


@pytest.mark.parametrize("method", [LocalSGD, DiLoCo])
@pytest.mark.parametrize("overflow", [None, 3, 5, 8])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("kind", ["adam", "fused"])
@on_two_ranks
def test_inner_steps_that_a_scaler_skips_count(method, overflow, unscale, kind):
    def run(scaler):
        net = seeded(nn.Linear, 8, 4)
        wrapper = DistributedDataParallel(net)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01, fused=kind == "fused")
        method(wrapper, optimizer, every=EVERY)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        for step in range(9):
            optimizer.zero_grad()
            is_wrong = step == overflow and dist.get_rank() == 1
            loss = wrapper(data(4, 8, step=step)).square().mean() * (float("inf") if is_wrong else 1.0)
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
            if not (is_wrong and not scaler.is_enabled()):
                scaler.step(optimizer)
            scaler.update()
            schedule.step()
            assert (step + 1) % EVERY or overflow == step or same_on_all_ranks(net), step
        assert same_on_all_ranks(net)
        return [parameter.detach() for parameter in net.parameters()]

    found = run(torch.amp.GradScaler("cpu", init_scale=8.0))
    if overflow is None:  # a power of two changes nothing
        for one, other in zip(found, run(torch.amp.GradScaler("cpu", enabled=False)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["sgd", "fused"])
@on_two_ranks
def test_a_step_that_a_scaler_skips_counts_for_all_wrappers_of_its_optimizer(kind):
    nets = [seeded(nn.Linear, 8, 4), seeded(nn.Linear, 8, 4)]
    wrappers = [DistributedDataParallel(net) for net in nets]
    parameters = [parameter for net in nets for parameter in net.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01, fused=kind == "fused")
    outer = [LocalSGD(wrapper, optimizer, every=EVERY) for wrapper in wrappers]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(2 * EVERY):
        optimizer.zero_grad()
        loss = sum(wrapper(data(4, 8, step=step)).square().mean() for wrapper in wrappers)
        scaler.scale(loss * (float("inf") if step == 1 and dist.get_rank() == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert all(map(same_on_all_ranks, nets))
    outer.pop().stop()
    assert optimizer.outer_steps == outer


@pytest.mark.parametrize("check_drift", [True, "raise"])
@on_two_ranks
def test_parameters_of_each_ranks_own_are_no_drift_and_no_loss_has_a_weight(check_drift):
    net = seeded(nn.Linear, 8, 4)
    wrapper = DistributedDataParallel(net, check_drift=check_drift)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    outer = LocalSGD(wrapper, optimizer, every=2)
    with library_warnings() as texts:
        for step in range(6):
            optimizer.zero_grad()
            wrapper(data(4, 8, rank=dist.get_rank(), step=step)).square().mean().backward()
            optimizer.step()
    assert texts == []
    optimizer.zero_grad()
    for one in (wrapper, copy.deepcopy(wrapper)):
        with pytest.raises(UnusableError, match="LocalSGD or DiLoCo lets each rank train by itself"):
            weigh(one(data(4, 8)).square().mean(), 4).backward()
    outer.stop()
    optimizer.zero_grad()
    weigh(wrapper(data(4, 8)).square().mean(), 4 + dist.get_rank()).backward()
    assert same_on_all_ranks(net)


@pytest.mark.parametrize("done", [0, 1, 3], ids=["before a step", "between outer steps", "after an outer step"])
@pytest.mark.parametrize("part", ["all", "layer", "added layer"])
@on_two_ranks
def test_what_is_loaded_is_where_the_next_outer_step_begins(done, part):
    target = seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(1.0)
    net = seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
    wrapper = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    DiLoCo(wrapper, optimizer, every=EVERY)
    if part == "added layer":
        net[0] = seeded(nn.Linear, 8, 16)
        optimizer.add_param_group({"params": list(net[0].parameters())})
    for step in range(6):
        if step == done:
            loaded = (net, target) if part == "all" else (net[0], target[0])
            loaded[0].load_state_dict(loaded[1].state_dict())
        optimizer.zero_grad()
        net(data(4, 8, step=step)).square().mean().backward()
        optimizer.step()
        if step > done:
            assert (
                max(float((p - q).abs().max()) for p, q in zip(*map(nn.Module.parameters, loaded), strict=True)) < 0.1
            ), step
    assert same_on_all_ranks(net)
    copy.deepcopy(net).load_state_dict(pickle.loads(pickle.dumps(net)).state_dict())


@on_two_ranks
def test_an_outer_step_that_fails_leaves_each_rank_what_it_had():
    def make(wrapper, optimizer):
        wrapper.register_comm_hook(Failing(1))
        return DiLoCo(wrapper, optimizer, every=EVERY)

    wrapper, optimizer, _ = train(make, 5)
    before = [parameter.detach().clone() for parameter in wrapper.parameters()]
    with pytest.raises(KeyError if dist.get_rank() else PeerAbortedError):
        inner(wrapper, optimizer, dist.get_rank(), 5)
    assert all(parameter.grad is None for parameter in wrapper.parameters())
    moved = max(float((one - two).abs().max()) for one, two in zip(before, wrapper.parameters(), strict=True))
    assert 0 < moved < 0.02  # by the inner step alone
    for step in (6, 7, 8):
        inner(wrapper, optimizer, dist.get_rank(), step)
    assert same_on_all_ranks(wrapper)


class FailingBehind(Compressor):
    """Raises once on rank 1 behind the last message, when rank 0 has taken the step alone, if it does so.

    In the third step the ranks learn no order, for which rank 0 would wait.
    """

    def __init__(self):
        self.has_failed = dist.get_rank() == 0

    def __repr__(self):
        return "FailingBehind()"

    def average(self, gradients, link):
        yield from Uncompressed().average(gradients, link)
        if gradients.step == 2 and not self.has_failed:
            self.has_failed = True
            with suppress(RuntimeError):  # rank 0 waits for this one, as it should
                dist.distributed_c10d._get_default_store().wait(["taken alone"], timedelta(seconds=0.3))
            raise KeyError("behind the last message")


@on_two_ranks
def test_an_outer_step_that_fails_on_one_rank_behind_the_last_message_is_taken_by_none():
    wrapper = DistributedDataParallel(seeded(nn.Linear, 4, 2))
    wrapper.register_comm_hook(FailingBehind())
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    LocalSGD(wrapper, optimizer, every=1)
    for step in range(4):
        optimizer.zero_grad()
        wrapper(data(4, 4, step=step)).sum().backward()
        with pytest.raises(KeyError if dist.get_rank() else PeerAbortedError) if step == 2 else nullcontext():
            optimizer.step()
            if step == 2:
                dist.distributed_c10d._get_default_store().set("taken alone", "")
    assert same_on_all_ranks(wrapper)


@pytest.mark.parametrize("assigns", [False, True])
@on_two_ranks
def test_a_state_that_is_loaded_before_the_module_can_be_saved_before_the_next_step(assigns):
    make = METHODS["diloco"][0]
    before, _, outer = train(make, 5)
    saved = outer.state_dict()
    new = saved["last"].popitem()[0]  # as if it had been frozen
    wrapper, _, outer = train(make, 0)
    outer.load_state_dict(saved)
    wrapper.load_state_dict(copy.deepcopy(before.state_dict()), assign=assigns)
    found = outer.state_dict()
    assert torch.equal(found["last"].pop(new), before.state_dict()[new])
    assert found["last"].keys() == saved["last"].keys()
    assert all(torch.equal(found["last"][name], value) for name, value in saved["last"].items())


@pytest.mark.parametrize("width", [2, 4])
@on_two_ranks
def test_a_head_that_is_replaced_behind_the_load_of_its_state_begins_anew(width):
    heads = {}
    for loads in (False, True):
        net = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
        wrapper = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        outer = DiLoCo(wrapper, optimizer, every=2)
        for step in range(6):
            if step == 4:
                if loads:
                    saved = copy.deepcopy([one.state_dict() for one in (outer, wrapper)])
                    outer.load_state_dict(saved[0])
                    wrapper.load_state_dict(saved[1])
                net[1] = seeded(nn.Linear, 8, width)
                optimizer.param_groups[0]["params"] = [*net.parameters()]
            optimizer.zero_grad()
            wrapper(data(4, 8, step=step)).square().mean().backward()
            optimizer.step()
        heads[loads] = net[1].weight
    assert torch.equal(heads[True], heads[False])


@on_two_ranks
def test_after_an_outer_step_that_a_check_drops_each_rank_has_its_own_to_save():
    wrapper = DistributedDataParallel(seeded(nn.Linear, 4, 2), check_for_nan_in_grad="skip")
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    outer = LocalSGD(wrapper, optimizer, every=2)
    for step in range(2):
        optimizer.zero_grad()
        wrapper(data(4, 4, rank=dist.get_rank())).sum().backward()
        if step and dist.get_rank():
            nn.init.constant_(wrapper.module.bias, torch.inf)
        optimizer.step()
    assert not same_on_all_ranks(wrapper)
    assert outer.is_between


@on_two_ranks
def test_what_an_outer_step_with_an_infinite_average_has_sent_of_others_is_not_kept():
    wrapper = DistributedDataParallel(seeded(nn.Linear, 8, 4))
    wrapper.register_comm_hook(ErrorFeedback(TopK(0.1, min_numel=0)))
    weight = wrapper.module.weight.detach().clone()
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    LocalSGD(wrapper, optimizer, every=2)
    for step in range(2):
        optimizer.zero_grad()
        (wrapper(data(4, 8, step=step)) * (float("inf") if step else 1.0)).sum().backward()
        wrapper.module.weight.grad = weight + step  # finite, the same on all ranks
        optimizer.step()
    kept = wrapper.comm_state_dict()["parameters"]["weight"]["residual"].view_as(weight)
    torch.testing.assert_close(weight - wrapper.module.weight + kept, 0.1 * (2 * weight + 1))


@on_two_ranks
def test_tools_unscale_gradients_before_they_clip_them():
    """As Lightning and Fabric, which leave that to optimizers that say that they unscale by themselves."""
    wrapper = DistributedDataParallel(seeded(mlp, 4, 8, 2))
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    outer, scaler = LocalSGD(wrapper, optimizer, every=3), torch.amp.GradScaler("cpu", init_scale=1024.0)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        loss = wrapper(data(4, 4, step=step)).square().sum()
        own = torch.autograd.grad(loss, [*wrapper.parameters()], retain_graph=True)
        scaler.scale(loss * (math.inf if step == 1 and dist.get_rank() else 1.0)).backward()
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)
        norms.append(float(nn.utils.clip_grad_norm_(wrapper.parameters(), 0.5)))
        assert not math.isfinite(norms[-1]) or norms[-1] == pytest.approx(float(nn.utils.get_total_norm(own)))
        scaler.step(optimizer)  # rank 1 skips the second one, which counts
        scaler.update()
    assert not outer.is_between
    assert same_on_all_ranks(wrapper)


@pytest.mark.parametrize("kind", ["adam", "fused"])
@on_two_ranks
def test_a_scaler_divides_by_its_scale_once_after_an_outer_step_that_failed(kind):
    def run(fails):
        net = seeded(nn.Linear, 8, 4)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01, eps=1.0, fused=kind == "fused")
        wrapper = DistributedDataParallel(net)
        if fails:
            LocalSGD(wrapper, optimizer, every=EVERY)
        else:
            wrapper.require_backward_grad_sync = False
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(EVERY + 1):
            optimizer.zero_grad()
            scaler.scale(wrapper(data(4, 8, step=step)).square().mean()).backward()
            with pytest.MonkeyPatch.context() as patches:
                if fails and step == EVERY - 1:
                    patches.setattr(torch.Tensor, "any", no_memory)
                    with pytest.raises(MemoryError):
                        scaler.step(optimizer)
                else:
                    scaler.step(optimizer)
            scaler.update()
        return [parameter.detach() for parameter in net.parameters()]

    for found, wanted in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(found, wanted)


class Refusing:
    """Lets this rank raise at a call of ``torch.Tensor.copy_``, from the moment at which it is armed."""

    def __init__(self, patches):
        self.left, self.plain = -1, torch.Tensor.copy_
        patches.setattr(torch.Tensor, "copy_", lambda *arguments: self(*arguments))

    def __call__(self, *arguments):
        self.left -= 1
        if self.left == -1:
            raise KeyboardInterrupt
        return self.plain(*arguments)


@pytest.mark.parametrize("method", [LocalSGD, DiLoCo])
@on_two_ranks
def test_one_rank_alone_is_interrupted_in_an_outer_step_or_cannot_begin_it(method):
    culprit = dist.get_rank() == 1
    net = seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
    wrapper = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    method(wrapper, optimizer, every=EVERY)

    def step(number):
        optimizer.zero_grad()
        wrapper(data(4, 8, step=number)).square().mean().backward()
        optimizer.step()

    for turn in range(5):  # the last one cannot begin
        for number in range(EVERY - 1):
            step(10 * turn + number)
        with pytest.MonkeyPatch.context() as patches:
            refusing, finish = Refusing(patches), wrapper._reducer.finish
            raised = KeyboardInterrupt if turn < 4 else MemoryError
            if culprit and turn < 4:

                def finish_and_arm(turn=turn, refusing=refusing, finish=finish):
                    finish()
                    refusing.left = turn

                patches.setattr(wrapper._reducer, "finish", finish_and_arm)
            elif culprit:
                patches.setattr(torch.Tensor, "any", no_memory)
            if culprit or turn == 4:
                with pytest.raises(raised if culprit else PeerAbortedError, match=None if culprit else "no memory"):
                    step(10 * turn + EVERY)
            else:
                step(10 * turn + EVERY)
        for number in range(EVERY):
            step(10 * turn + EVERY + number)
        assert same_on_all_ranks(net), turn


def normed():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


@pytest.mark.parametrize("method", [LocalSGD, DiLoCo])
@pytest.mark.parametrize("views", [False, True])
@on_three_ranks
def test_one_rank_alone_is_interrupted_behind_the_vote_of_an_outer_step(method, views):
    """Some of the others go on, and have taken it."""
    rank, net = dist.get_rank(), seeded(normed)
    wrapper = DistributedDataParallel(net, gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    outer = method(wrapper, optimizer, every=2)
    saved = outer.state_dict()
    synchronizer = wrapper._reducer.synchronizer
    places = [(synchronizer.negotiation, "learn"), (synchronizer, "_broadcast_buffers")]
    places += [(synchronizer.gradients, "hand_over"), (synchronizer, "_hand_over")]

    def step(number):
        optimizer.zero_grad()
        wrapper(data(6, 8, rank=rank, step=number)).square().mean().backward()
        optimizer.step()

    for turn, (owner, name) in enumerate(places):
        step(10 * turn)
        with pytest.MonkeyPatch.context() as patches, suppress(PeerAbortedError, KeyboardInterrupt):
            if rank == 1:
                patches.setattr(owner, name, handed_over(owner.hand_over) if name == "hand_over" else interrupt)
            step(10 * turn + 1)
        step(10 * turn + 2)
        is_lost = name == "_hand_over"  # before anything was handed over
        told = pytest.raises(DisagreementError, match=r"of which \d+ were taken \(if one was lost")
        with told if is_lost else nullcontext():
            step(10 * turn + 3)
        assert same_on_all_ranks(net) is not is_lost, name
    wrapper.load_state_dict(seeded(normed).state_dict())
    outer.load_state_dict(saved)
    for number in range(2):
        step(number)
    assert same_on_all_ranks(net)


@pytest.mark.parametrize("method", [LocalSGD, DiLoCo])
@on_two_ranks
def test_an_interrupt_in_one_wrappers_outer_step_does_not_leave_out_that_of_another(method):
    rank, nets = dist.get_rank(), [seeded(nn.Linear, 8, 4) for _ in range(2)]
    wrappers = [DistributedDataParallel(net) for net in nets]
    optimizer = torch.optim.SGD([parameter for net in nets for parameter in net.parameters()], lr=0.1)
    for wrapper in wrappers:
        method(wrapper, optimizer, every=EVERY)
    for number in range(3 * EVERY):
        optimizer.zero_grad()
        x = data(4, 8, rank=rank, step=number)
        sum(wrapper(x).square().mean() for wrapper in wrappers).backward()
        with pytest.MonkeyPatch.context() as patches, suppress(KeyboardInterrupt):
            if rank == 1 and number == EVERY - 1:
                patches.setattr(OuterSteps, "_outcome", interrupt)
            optimizer.step()
    assert all(map(same_on_all_ranks, nets))


def interrupt(*_, **__):
    raise KeyboardInterrupt


def handed_over(take):
    """Interrupts this rank where it has taken some averages."""

    def interrupted(*arguments):
        take(*arguments)
        raise KeyboardInterrupt

    return interrupted


def no_memory(_change):
    raise MemoryError("no memory")


def test_an_outer_step_follows_an_inner_one_of_the_same_parameters():
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="every=0: an outer step"):
        LocalSGD(DistributedDataParallel(module), torch.optim.SGD(module.parameters(), lr=0.1), every=0)
    others = torch.optim.SGD(copy.deepcopy(module).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="the optimizer has no parameter of the model"):
        LocalSGD(DistributedDataParallel(module), others, every=2)


@on_two_ranks
def test_a_step_that_is_compiled_and_that_a_scaler_may_skip():
    found = []
    for compiles in (False, True):
        wrapper = DistributedDataParallel(seeded(nn.Linear, 4, 2))
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
        LocalSGD(wrapper, optimizer, every=2)
        if compiles:
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(6):
            optimizer.zero_grad()
            loss = wrapper(data(3, 4, step=step)).sum()
            scaler.scale(loss * float("inf") if step == 2 and dist.get_rank() == 0 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        found.append(wrapper.module.weight)
    assert torch.equal(*found)


@on_two_ranks
def test_nan_in_a_step_that_is_compiled():
    found = []
    for compiles in (False, True):
        wrapper = DistributedDataParallel(seeded(nn.Linear, 4, 2), check_for_nan_in_grad="skip")
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
        LocalSGD(wrapper, optimizer, every=2)
        step = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step
        for number in range(6):
            optimizer.zero_grad()
            factor = math.nan if number == 2 and dist.get_rank() == 0 else 1.0
            (factor * wrapper(data(3, 4, step=number)).sum()).backward()
            step()
        found.append(wrapper.module.weight)
    assert torch.equal(*found)


@on_two_ranks
def test_what_was_not_sent_of_gradients_is_not_added_to_parameters_nor_the_reverse():
    module = seeded(mlp, 8, 8)
    wrapper = DistributedDataParallel(module)
    wrapper.register_comm_hook(ErrorFeedback(TopK(0.05, min_numel=0)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def steps(count, factor=1.0):
        for step in range(count):
            optimizer.zero_grad()
            (factor * wrapper(data(4, 8, rank=dist.get_rank(), step=step)).square().mean()).backward()
            optimizer.step()

    steps(10)
    optimizer.param_groups[0]["lr"] = 1e-6
    before = copy.deepcopy(module.state_dict())
    outer = LocalSGD(wrapper, optimizer, every=2)
    steps(4)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=1e-4)
    optimizer.param_groups[0]["lr"] = 1.0
    steps(4)
    outer.synchronize()
    saved = wrapper.comm_state_dict()
    assert all(bool(own["residual"].any()) for own in saved["parameters"].values())
    outer.stop()
    optimizer.param_groups[0]["lr"] = 0.0
    for state in ({}, saved):  # also where what was kept is loaded
        if state:
            wrapper.load_comm_state_dict(state)
        steps(1, factor=1e-8)
        assert all(parameter.grad.abs().max() < 1e-6 for parameter in module.parameters())


@pytest.mark.parametrize("method", [LocalSGD, DiLoCo])
@on_two_ranks
def test_parameters_that_the_wrapper_ignores_are_each_ranks_own(method):
    module = seeded(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    module._ddp_params_and_buffers_to_ignore = ["1.weight"]
    wrapper, own = DistributedDataParallel(module), module[1].weight
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    method(wrapper, optimizer, every=1)
    wrapper(data(3, 2)).sum().backward()
    expected = own.detach() - 0.1 * own.grad
    optimizer.step()
    torch.testing.assert_close(own.detach(), expected)
    assert own.grad is not None
    assert module[0].weight.grad is None


@on_two_ranks
def test_a_parameter_that_was_removed_leaves_no_momentum_and_nothing_to_save():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    wrapper = DistributedDataParallel(module)
    outer = DiLoCo(wrapper, optimizer, every=1)

    def step():
        optimizer.zero_grad()
        optimizer.param_groups[0]["params"] = list(module.parameters())
        wrapper(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    step()
    removed = module.pop(1)
    step()
    module.append(copy.deepcopy(removed))
    before = module[1].bias.detach().clone()
    step()
    torch.testing.assert_close(module[1].bias.detach(), before - 0.7 * (0.1 + 0.9 * 0.1))
    module.pop(1)
    outer.load_state_dict(outer.state_dict())


@on_two_ranks
def test_two_outer_steps_of_one_parameter_are_refused():
    shared = nn.Linear(2, 2)
    first, second = (DistributedDataParallel(nn.Sequential(shared, nn.Tanh())) for _ in range(2))
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.1)
    outer = DiLoCo(first, optimizer, every=1)
    with pytest.raises(ValueError, match=r"'0.weight' would get two outer steps"):
        DiLoCo(second, optimizer, every=1)
    assert second.require_backward_grad_sync
    outer.stop()
    for wrapper in (first, second):
        LocalSGD(wrapper, optimizer, every=1)


@on_two_ranks
def test_gradients_are_each_ranks_own_and_hooks_see_nothing_else():
    wrapper, seen = DistributedDataParallel(seeded(nn.Linear, 4, 2)), []
    weight, own = wrapper.module.weight, float(dist.get_rank() + 1)
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    hook = wrapper.register_comm_hook(lambda _: None)
    with pytest.raises(UnusableError, match="of pytorch-pfn-extras' kind"):
        LocalSGD(wrapper, optimizer, every=2)
    hook.remove()
    LocalSGD(wrapper, optimizer, every=2)
    with pytest.raises(UnusableError, match="of pytorch-pfn-extras' kind"):
        wrapper.register_comm_hook(lambda _: None)
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(float(parameter.grad[0, 0])))
    for _ in range(4):
        wrapper.require_backward_grad_sync = True  # as loops set it that accumulate gradients
        optimizer.zero_grad()
        (own * wrapper(torch.ones(1, 4)).sum()).backward()
        optimizer.step()
    assert seen == [own] * 4
    assert same_on_all_ranks(wrapper)
    with pytest.raises(UnusableError, match=r"join\(\) is not for LocalSGD, DiLoCo"), wrapper.join():
        pass


def test_those_of_a_wrapper_that_is_no_longer_used_tell_how_to_end_them():
    def fail():
        raise UnusableError("the process group of this wrapper was destroyed")

    module = nn.Linear(2, 2)
    ddp = SimpleNamespace(module=module, train_apart=lambda: None, _used=fail, _outer_steps=[], _negotiate=True)
    synchronizer = SimpleNamespace(handed_over=0, negotiation=SimpleNamespace(use_plug=lambda *_: None))
    groups = SimpleNamespace(world_size=2)
    ddp._options = SimpleNamespace(check_for_nan_in_grad=False)
    ddp._reducer = SimpleNamespace(synchronizer=synchronizer, groups=groups, begin_step=lambda: None)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    LocalSGD(ddp, optimizer, every=1)
    with pytest.raises(UnusableError, match=r"was destroyed\. If you no longer use it, call stop\(\) of its LocalSGD"):
        optimizer.step()


class Prepared(torch.optim.Optimizer):
    """Wraps an optimizer as Accelerate does, without hooks of its own."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups


@on_two_ranks
def test_another_optimizer_of_the_model_keeps_its_gradients_and_takes_no_outer_step():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapper = DistributedDataParallel(module)
    one, other = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in module)
    outer = DiLoCo(wrapper, Prepared(one), every=1)
    wrapper(torch.ones(1, 2)).sum().backward()
    kept = module[1].weight.grad
    one.step()
    assert module[0].weight.grad is None
    assert module[1].weight.grad is kept
    later = DiLoCo(wrapper, other, every=1)
    other.step()  # one may go on with a new optimizer
    with pytest.raises(UnusableError, match=r"would get two outer steps in place of one: make one for each wrapper"):
        one.step()
    outer.stop()
    assert not wrapper.require_backward_grad_sync
    later.stop()
    copy.deepcopy(wrapper)
    DiLoCo(wrapper, other, every=1)


def steps(wrapper, optimizer, count):
    """Take these steps, one after another; yields the number of each behind it."""
    for number in range(count):
        optimizer.zero_grad()
        wrapper(data(4, 8, step=number)).square().mean().backward()
        optimizer.step()
        yield number


@pytest.mark.parametrize("method", [LocalSGD, DiLoCo])
@pytest.mark.parametrize("is_alone", [False, True])
@on_two_ranks
def test_an_optimizer_that_is_made_anew_without_them_is_an_error_and_with_them_the_ranks_come_together(
    method, is_alone
):
    net = seeded(mlp, 8, 16, 4)
    wrapper = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    method(wrapper, optimizer, every=EVERY)
    done = [*steps(wrapper, optimizer, EVERY + 1)]
    is_new = not is_alone or dist.get_rank() == 1
    if is_new:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        gc.collect()
    remedy = f"Make a {method.__name__} of the optimizer that you use, on all ranks"
    with pytest.raises(UnusableError if is_new else PeerAbortedError, match=remedy):
        done.extend(steps(wrapper, optimizer, EVERY + 2))
    assert len(done) == (2 * EVERY + 2 if is_new else EVERY + 2)
    assert not same_on_all_ranks(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    method(wrapper, optimizer, every=EVERY)
    for number in steps(wrapper, optimizer, 2 * EVERY):
        assert same_on_all_ranks(net) is ((number + 1) % EVERY == 0)


@pytest.mark.parametrize("method", [LocalSGD, DiLoCo])
@on_two_ranks
def test_those_made_anew_with_their_optimizer_between_two_outer_steps_go_on_from_the_last_one(method):
    wrapper, made = DistributedDataParallel(seeded(mlp, 8, 16, 4)), []
    for count in (EVERY + 1, EVERY):
        optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
        made.append(method(wrapper, optimizer, every=EVERY))
        assert len([*steps(wrapper, optimizer, count)]) == count
    assert same_on_all_ranks(wrapper)
    for outer in made:
        assert not wrapper.require_backward_grad_sync
        outer.stop()
    assert wrapper.require_backward_grad_sync


@on_two_ranks
def test_other_optimizers_of_the_same_parameters_are_no_error_beside_the_one_that_is_counted_or_without_the_wrapper():
    net = seeded(mlp, 8, 16, 4)
    wrapper = DistributedDataParallel(net)
    counted, other = (torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2))
    outer = LocalSGD(wrapper, counted, every=1)
    for number in range(4):
        counted.zero_grad()
        wrapper(data(4, 8, step=number)).square().mean().backward()
        other.step()
        counted.step()
    assert same_on_all_ranks(net)
    for number in range(4):  # the wrapper may have been dropped, and not be collected yet
        net(data(4, 8, step=number)).square().mean().backward()
        other.step()
    outer.stop()


@pytest.mark.parametrize("compiled", [False, True])
@on_two_ranks
def test_parameters_to_ignore_are_left_to_each_rank(compiled):
    net, twin = (seeded(mlp, 4, 2) for _ in range(2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.bias"])
    wrapper = DistributedDataParallel(torch.compile(net, backend="eager") if compiled else net)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (net, twin)]
    DiLoCo(wrapper, optimizers[0], every=1)
    for one, optimizer in zip((wrapper, twin), optimizers, strict=True):
        one(data(3, 4)).sum().backward()
        optimizer.step()
    assert torch.equal(net[0].bias, twin[0].bias)
    assert not torch.equal(net[0].weight, twin[0].weight)


@on_two_ranks
def test_two_local_sgds_of_the_same_parameters_may_take_turns():
    net = seeded(mlp, 8, 16, 4)
    wrapper = DistributedDataParallel(net)
    counted, other = (torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2))
    firsts = [LocalSGD(wrapper, counted, every=1), LocalSGD(wrapper, other, every=1)]
    for used in (counted, other, counted):
        for number in range(4):
            used.zero_grad()
            wrapper(data(4, 8, step=number)).square().mean().backward()
            used.step()
            assert same_on_all_ranks(net)
    for one in firsts:
        one.stop()
    assert wrapper.require_backward_grad_sync


AT_ODDS = {
    "every": (partial(LocalSGD, every=2), partial(LocalSGD, every=3)),
    "lr": (partial(DiLoCo, every=2), partial(DiLoCo, every=2, lr=0.5)),
    "momentum": (partial(DiLoCo, every=2), partial(DiLoCo, every=2, momentum=0.5)),
    "method": (partial(LocalSGD, every=2), partial(DiLoCo, every=2)),
    "one rank": (partial(LocalSGD, every=2), None),
}


@pytest.mark.parametrize("what", AT_ODDS)
@on_two_ranks
def test_ranks_whose_outer_steps_differ_are_told_so(what):
    wrapper, make = DistributedDataParallel(seeded(nn.Linear, 8, 4)), AT_ODDS[what][dist.get_rank()]
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    outer = None if make is None else make(wrapper, optimizer)
    with pytest.raises(DisagreementError, match=r"outer steps of (LocalSGD|DiLoCo)\(every="):
        [*steps(wrapper, optimizer, 4)]
    if outer is not None:
        outer.stop()
    optimizer.zero_grad()
    wrapper(data(4, 8)).square().mean().backward()
    assert_same_on_all_ranks(wrapper.module)


@on_two_ranks
def test_a_forward_looks_at_parameters_only_where_the_wrapper_lists_them_anew():
    net, looks = seeded(nn.Linear, 8, 4), []
    wrapper = DistributedDataParallel(net)
    LocalSGD(wrapper, torch.optim.SGD(net.parameters(), lr=0.1), every=1)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(OuterSteps, "_note", lambda _self, name, _parameter, **_: looks.append(name))
        for count in (2, 2, 4, 4):
            net.bias.requires_grad_(count == 2)
            wrapper(data(4, 8))
            assert looks == ["weight", "bias"] * (count // 2)


class Plain(nn.Module):
    """A parametrization that changes nothing."""

    def forward(self, x):
        return x


RENAMED = {
    "pruned": lambda net: prune.identity(net[0], "weight"),
    "parametrized": lambda net: parametrize.register_parametrization(net[0], "weight", Plain()),
    "moved": lambda net: net.add_module("moved", net._modules.pop("2")),
    "wrapped": lambda net: net.__setitem__(0, nn.Sequential(net[0])),
}


@pytest.mark.parametrize("method", [LocalSGD, DiLoCo])
@pytest.mark.parametrize("rename", RENAMED)
@pytest.mark.parametrize("saves", [False, True])
@on_two_ranks
def test_a_parameter_that_gets_another_name_between_two_outer_steps_is_averaged_as_before(method, rename, saves):
    def run(change):
        net = seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
        own, wrapper = list(net.parameters()), DistributedDataParallel(net)
        optimizer = torch.optim.SGD(own, lr=0.1, momentum=0.5)
        outer = method(wrapper, optimizer, every=EVERY)
        for number in steps(wrapper, optimizer, 4 * EVERY):
            if number == EVERY:
                if saves:
                    outer.load_state_dict(outer.state_dict())
                change(net)
            assert (number + 1) % EVERY or same_on_all_ranks(net), number
        return own

    for one, other in zip(run(RENAMED[rename]), run(lambda _net: None), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("method", [LocalSGD, DiLoCo])
@on_two_ranks
def test_steps_that_torch_takes_to_describe_an_optimizer_are_not_counted(method):
    def run(*, saves):
        net = seeded(mlp, 8, 16, 4)
        wrapper = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)  # which never has state
        method(wrapper, optimizer, every=EVERY)
        for number in steps(wrapper, optimizer, 3 * EVERY):
            optimizer.zero_grad()
            if saves and (number % 2 or dist.get_rank() == 0):
                get_optimizer_state_dict(net, optimizer)
        return list(net.parameters())

    assert all(map(torch.equal, run(saves=False), run(saves=True)))


@pytest.mark.parametrize(
    ("method", "assigns", "saves"),
    [*((LocalSGD, False, False), (LocalSGD, True, True)), *itertools.product([DiLoCo], [False, True], [False, True])],
)
@on_two_ranks
def test_an_evaluation_of_other_values_changes_nothing(method, assigns, saves):
    def run(*, evaluates):
        net = seeded(mlp, 8, 16, 4)
        wrapper, smooth = DistributedDataParallel(net), AveragedModel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        outer = method(wrapper, optimizer, every=EVERY)
        for number in steps(wrapper, optimizer, 3 * EVERY):
            assert (number + 1) % EVERY or same_on_all_ranks(net), number
            smooth.update_parameters(net)
            if evaluates:
                own = dict(net.named_parameters()) if assigns else copy.deepcopy(net.state_dict())
                wrapper.load_state_dict(copy.deepcopy(smooth.module.state_dict()), assign=assigns)
                net.eval()
                wrapper(data(4, 8))  # with gradients, which nobody asks for
                if saves:
                    outer.state_dict()
                net.train()
                net.load_state_dict(own, assign=assigns)  # under other names than the wrapper's
        return list(net.parameters())

    assert all(map(torch.equal, run(evaluates=False), run(evaluates=True)))


WITH_NAN = {
    "one optimizer": [
        *(("loop", True, "aborts", DiLoCo), ("loop", True, "", LocalSGD), ("loop", "skip", "", DiLoCo)),
        *(("closure", True, "aborts", LocalSGD), ("closure", "skip", "", LocalSGD)),
    ],
    "two optimizers": [
        *(("two", True, "", DiLoCo), ("two", "skip", "", LocalSGD), ("two", True, "aborts", LocalSGD)),
        *(("two, of the first", True, "", DiLoCo), ("two, of the first", True, "aborts", LocalSGD)),
        *(("two, no forward", True, "", LocalSGD), ("two, a forward between", True, "", LocalSGD)),
        *(("two outer steps", True, "", LocalSGD), ("two outer steps", "skip", "", LocalSGD)),
    ],
}


@pytest.mark.parametrize("cases", WITH_NAN)
@on_two_ranks
def test_a_rank_with_nan_leaves_its_inner_step_out(cases):
    for case in WITH_NAN[cases]:
        leave_nan_out(*case)


def leave_nan_out(how, check, after, method):
    rank, twins, told = dist.get_rank(), [], 0
    for bad in (None, 4):
        net = seeded(mlp, 8, 16, 4)
        wrapper = DistributedDataParallel(net, check_for_nan_in_grad=check)
        layers = [net[0], net[2]] if "two" in how else [net]
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]
        for optimizer in optimizers if "two outer" in how else optimizers[-1:]:
            method(wrapper, optimizer, every=EVERY)

        def backward(step, bad=bad, wrapper=wrapper, net=net):
            wrapper.zero_grad()
            inputs = data(4, 8, rank=rank, step=step)
            if rank == 0 and step == bad and "of the first" not in how:
                inputs[0, 0] = torch.nan
            (net if "no forward" in how else wrapper)(inputs).square().sum().backward()
            if rank == 0 and step == 4 and bad is None:
                wrapper.zero_grad()  # the other twin leaves it out by hand
            elif rank == 0 and step == bad and "of the first" in how:
                net[0].weight.grad[0, 0] = torch.nan

        for step in range(4 * EVERY):
            closure = partial(backward, step) if how == "closure" else None
            if closure is None:
                backward(step)
            for optimizer in optimizers:
                if "a forward between" in how:
                    wrapper(data(4, 8))
                try:
                    optimizer.step(closure)
                except NonFiniteGradientError:
                    told += 1
                    if after == "aborts":
                        wrapper.abort_grad_sync()
        assert same_on_all_ranks(net)
        twins.append(list(net.parameters()))
    assert all(map(torch.equal, *twins))
    assert told == (0 if check == "skip" or rank else 2 if "two outer" in how else 1)


@on_two_ranks
def test_what_rank_0_had_is_loaded_on_all_ranks_after_an_evaluation():
    net = seeded(mlp, 8, 16, 4)
    wrapper = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    LocalSGD(wrapper, optimizer, every=EVERY)
    for number in steps(wrapper, optimizer, 3 * EVERY):
        assert (number + 1) % EVERY or same_on_all_ranks(net), number
        if number == EVERY:
            own = dict(net.named_parameters())
            wrapper.load_state_dict(seeded(mlp, 8, 16, 4).state_dict(), assign=True)
            net.load_state_dict(own, assign=True)
            wrapper(data(4, 8))
            wrapper.load_state_dict(of_all_ranks(net.state_dict())[0])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("at", [EVERY - 1, EVERY], ids=["after an outer step", "between outer steps"])
@on_two_ranks
def test_what_rank_0_had_may_be_loaded_on_all_ranks(at, tied):
    net = seeded(mlp, 8, 16, 4)
    if tied:  # one load comes to it under both names
        net.add_module("again", nn.Identity())
        net.again.weight = net[0].weight
    wrapper = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    LocalSGD(wrapper, optimizer, every=EVERY)
    for number in steps(wrapper, optimizer, 3 * EVERY):
        assert (number + 1) % EVERY or same_on_all_ranks(net), number
        if number == at:
            wrapper.load_state_dict(of_all_ranks(net.state_dict())[0])


@on_two_ranks
def test_what_is_loaded_when_a_scaler_has_skipped_the_first_step_after_a_checkpoint_on_one_rank():
    net = seeded(mlp, 8, 16, 4)
    wrapper = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    outer, scaler = LocalSGD(wrapper, optimizer, every=EVERY), torch.amp.GradScaler("cpu", init_scale=4.0)
    outer.load_state_dict(outer.state_dict())
    target = seeded(mlp, 8, 16, 4)
    nn.init.ones_(target[0].weight)
    for step in range(2 * EVERY):
        if step == 1:
            wrapper.load_state_dict(target.state_dict())
        optimizer.zero_grad()
        factor = float("inf") if step == 0 and dist.get_rank() else 1.0
        scaler.scale(factor * wrapper(data(4, 8, step=step)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (step + 1) % EVERY or same_on_all_ranks(net)


def load_own(net, optimizer):
    net.load_state_dict(seeded_by_rank().state_dict())


def replace_by_own(net, optimizer):
    net[2] = seeded_by_rank()[2]
    optimizer.add_param_group({"params": list(net[2].parameters())})


def seeded_by_rank():
    torch.manual_seed(dist.get_rank())
    return mlp(8, 16, 4)


@pytest.mark.parametrize("change", [load_own, replace_by_own])
@on_two_ranks
def test_ranks_that_would_go_on_from_other_values_are_told_so(change):
    net = seeded(mlp, 8, 16, 4)
    wrapper = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    LocalSGD(wrapper, optimizer, every=EVERY)
    assert [*steps(wrapper, optimizer, EVERY + 1)][-1] == EVERY
    change(net, optimizer)
    done = []
    with pytest.raises(DisagreementError, match=r"different values of parameter '[02]\.weight' in the last outer"):
        done.extend(steps(wrapper, optimizer, EVERY))
    assert len(done) == EVERY - 2
    wrapper.load_state_dict(seeded(mlp, 8, 16, 4).state_dict())
    for number in steps(wrapper, optimizer, EVERY):
        assert number < EVERY - 1 or same_on_all_ranks(net)


@pytest.mark.parametrize("saved", [None, "the wrapper", "its modules"])
@on_two_ranks
def test_outer_steps_of_a_wrapper_that_was_made_before_the_ranks_met(tmp_path, saved):
    def made():
        net = mlp(8, 16, 4)
        torch.nn.init.constant_(net[0].bias, rank)
        wrapper = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        modules = {"model": wrapper} if saved == "the wrapper" else {f"layer{k}": one for k, one in enumerate(net)}
        parts = {"optimizer": optimizer, "outer": LocalSGD(wrapper, optimizer, every=2)}
        return wrapper, optimizer, parts | modules

    rank, done = dist.get_rank(), 3 if saved else 0  # between two outer steps
    if saved:
        before, optimizer, parts = made()
        deque(steps(before, optimizer, done), maxlen=0)
        Checkpointer(tmp_path / "saved", parts).save(done)
    dist.destroy_process_group()
    wrapper, optimizer, parts = made()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
    if saved:
        Checkpointer(tmp_path / "saved", parts).load()
        wrapper(data(4, 8))
        assert all(map(torch.equal, wrapper.parameters(), before.parameters()))
    for number in steps(wrapper, optimizer, 4):
        assert (number + done) % 2 == 0 or same_on_all_ranks(wrapper.module)


@on_two_ranks
def test_a_rank_that_leaves_an_inner_step_out_stays_beside_the_others():
    net = seeded(mlp, 8, 16, 4)
    wrapper = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    LocalSGD(wrapper, optimizer, every=EVERY)
    for left_out in (1, 2, 2):  # an outer step follows the last inner one
        for step in range(EVERY):
            if step == left_out and dist.get_rank():
                wrapper(data(4, 8))
                wrapper.abort_grad_sync("a batch that cannot be read")
            else:
                optimizer.zero_grad()
                wrapper(data(4, 8, step=step)).square().mean().backward()
                optimizer.step()
        assert same_on_all_ranks(net)


@on_two_ranks
def test_a_rank_that_gives_up_a_failed_outer_step_and_the_next_inner_one_has_counted_both_once():
    net, fails = seeded(mlp, 8, 16, 4), False

    def average_or_fail(bucket, group):
        if fails and dist.get_rank():
            raise ArithmeticError
        return average(bucket, group)

    wrapper = DistributedDataParallel(net, reduce_function=average_or_fail)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    LocalSGD(wrapper, optimizer, every=EVERY)
    for step in range(3 * EVERY):
        fails = step == EVERY - 1
        if step == EVERY and dist.get_rank():  # its batch cannot be read, before a forward
            wrapper.abort_grad_sync()
            continue
        try:
            optimizer.zero_grad()
            wrapper(data(4, 8, step=step)).square().mean().backward()
            optimizer.step()
        except (ArithmeticError, PeerAbortedError):
            assert fails
            wrapper.abort_grad_sync()
        assert (step + 1) % EVERY or fails or same_on_all_ranks(net), step


@pytest.mark.parametrize("method", [LocalSGD, DiLoCo])
@on_two_ranks
def test_without_negotiation_changes_that_cancel_out_are_averaged(method):
    net = seeded(nn.Linear, 8, 1)
    wrapper = DistributedDataParallel(net, negotiate_grads=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    method(wrapper, optimizer, every=1)
    before = net.bias.item()
    (wrapper(torch.zeros(1, 8)).sum() * (1 - 2 * dist.get_rank())).backward()
    optimizer.step()
    assert net.bias.item() == before


@on_two_ranks
def test_a_rank_without_a_backward_does_not_meet_the_others_outer_step():
    def run(*, calls):
        net = seeded(mlp, 8, 16, 4)
        wrapper = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        LocalSGD(wrapper, optimizer, every=EVERY)
        for step in range(2 * EVERY):
            optimizer.zero_grad()
            if step != 1 or dist.get_rank() == 0:
                wrapper(data(4, 8, step=step)).square().mean().backward()
            elif calls:
                wrapper.start_grad_sync()
                wrapper.finish_grad_sync()
            optimizer.step()
        assert same_on_all_ranks(net)
        return list(net.parameters())

    assert all(map(torch.equal, run(calls=True), run(calls=False)))


@pytest.mark.parametrize("every", [1, 3])
@on_two_ranks
def test_a_step_that_calls_its_closure_several_times(every):
    net = seeded(mlp, 8, 16, 4)
    wrapper = DistributedDataParallel(net)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=8)
    LocalSGD(wrapper, optimizer, every=every)
    for number in range(2 * every):

        def closure(number=number):
            optimizer.zero_grad()
            loss = wrapper(data(4, 8, step=number)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert (number + 1) % every or same_on_all_ranks(net)


@on_two_ranks
def test_embeddings_that_a_forward_scales_down_are_updated_by_no_other_optimizer():
    net = seeded(lambda: nn.Sequential(nn.Embedding(20, 8, max_norm=0.5), nn.Linear(8, 4)))
    wrapper = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    LocalSGD(wrapper, optimizer, every=2)
    for number in range(4):
        optimizer.zero_grad()
        for micro in range(6):
            wrapper(torch.arange(5) + 3 * micro // 2).square().mean().backward()
        optimizer.step()
        assert number % 2 == 0 or same_on_all_ranks(net)


@on_two_ranks
def test_without_negotiation_a_rank_may_have_changed_nothing():
    def run(*, negotiates):
        net = seeded(mlp, 8, 16, 4)
        wrapper = DistributedDataParallel(net, negotiate_grads=negotiates)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        DiLoCo(wrapper, optimizer, every=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step, skipping in enumerate([(), (), (1,), (0, 1), ()]):
            optimizer.zero_grad()
            factor = float("inf") if dist.get_rank() in skipping else 1.0
            scaler.scale(factor * wrapper(data(4, 8, step=step)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert same_on_all_ranks(net)
        return list(net.parameters())

    for one, other in zip(run(negotiates=True), run(negotiates=False), strict=True):
        torch.testing.assert_close(one, other)


@on_two_ranks
def test_an_optimizer_that_updates_each_parameter_on_one_rank_is_refused():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = seeded(nn.Linear, 8, 4)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(TypeError, match="a ZeroRedundancyOptimizer updates each on one rank alone"):
        LocalSGD(DistributedDataParallel(net), optimizer, every=2)
