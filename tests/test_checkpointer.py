"""What a checkpoint is for: to go on bit by bit, whatever has ended the job. Half of one is never taken for whole."""

import contextlib
import copy
import errno
import io
import itertools
import json
import os
import pickle
import re
import shutil
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

from checkpointing import NoisyTraining, failing, full_disk, killed_at, same
from library_warnings import library_warnings
from one_process import data, of_all_ranks, seeded
from ppe_ddp import (
    Checkpointer,
    CheckpointError,
    CommunicationError,
    DisagreementError,
    DistributedDataParallel,
    DistributedOptimizer,
    PeerAbortedError,
    megatron,
)
from ppe_ddp.checkpoints import checkpoint_files
from ppe_ddp.checkpoints.checkpoint_files import CheckpointFolder
from ppe_ddp.compression import ErrorFeedback, LocalSGD, TopK
from ppe_ddp.engine.failures import LostRanks
from ppe_ddp.testing import RankError, Ranks
from rank_tests import on_four_ranks, on_three_ranks, on_two_ranks


@pytest.fixture(scope="module")
def lone_rank():
    """A process without torch.distributed, where nothing else happens."""
    with Ranks(1, backend=None) as started:
        yield started


def shared_folder():
    """One folder for all ranks of a test, of its own."""
    folder = [None]
    if dist.get_rank() == 0:
        import tempfile

        folder = [tempfile.mkdtemp(prefix="ppe_ddp_test_")]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


# --- going on


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"sharded": True}, {"compressed": True, "inside": True}, {"compressed": True}),
        *({"outer": 5, "inside": True}, {"outer": 5}, {"outer": 3, "compressed": True}, {"outer": 3}),
    ],
    ids=lambda options: " ".join(f"{key}={value}" for key, value in options.items()) or "plain",
)
def test_a_training_goes_on_bit_by_bit(three_ranks, folder, options):
    three_ranks.run(go_on, folder, options, timeout=150)


def go_on(folder, options):
    first = NoisyTraining(folder, **options)
    first.step(5)
    first.checkpointer.save(5, position={"batch": torch.tensor(dist.get_rank())})
    first.step(5)
    wanted = first.bits()
    other = NoisyTraining(folder, seed=1, **options)
    other.step(2)
    restored = other.checkpointer.load()
    assert restored.step == 5
    assert [position["batch"].item() for position in restored.positions] == [0, 1, 2]
    assert restored.position["batch"] == dist.get_rank()
    other.step(5)
    assert same(wanted, other.bits())
    states = [training.model.comm_state_dict()["buckets"] for training in (first, other)]
    assert states[0] == states[1]
    assert states[0]["learned"] or "outer" in options  # three ranks add up in another order where buckets are others


def test_a_training_goes_on_with_another_compressor(three_ranks, folder):
    three_ranks.run(go_on_with_another_compressor, folder, timeout=150)


def go_on_with_another_compressor(folder):
    first = NoisyTraining(folder, compressed=True)
    first.step(3)
    first.checkpointer.save(3)
    for compressor in (None, ErrorFeedback(TopK(0.1))):
        other = NoisyTraining(folder, seed=1)
        if compressor is not None:
            other.model.register_comm_hook(compressor)
        with library_warnings() as texts:
            assert other.checkpointer.load().step == 3
        assert [text[:36] for text in texts] == ["this was saved with ErrorFeedback(co"][: dist.get_rank() == 0]
        assert all(map(torch.equal, first.model.state_dict().values(), other.model.state_dict().values()))
        kept = other.model.comm_state_dict()
        assert (kept.get("parameters", {}), kept.get("steps", 0)) == ({}, 0)  # a WarmUp begins anew as well
        other.step()


@on_two_ranks
def test_a_training_goes_on_with_the_other_wrapper_and_after_none():
    config = megatron.DistributedDataParallelConfig(use_distributed_optimizer=True)

    def parts(module, *, is_megatron):
        wrap = partial(megatron.DistributedDataParallel, None, config) if is_megatron else DistributedDataParallel
        wrapper = wrap(module)
        return {"model": wrapper, "optimizer": DistributedOptimizer(torch.optim.AdamW, wrapper, lr=0.1)}

    for is_megatron in (False, True):
        saved = parts(seeded(nn.Linear, 4, 3), is_megatron=is_megatron)
        folder, loaded = shared_folder(), parts(seeded(nn.Linear, 4, 3), is_megatron=not is_megatron)
        with torch.no_grad():
            loaded["model"].module.weight.zero_()
        if not is_megatron:
            saved["model"].register_comm_hook(ErrorFeedback(TopK(0.5)))
        Checkpointer(folder, saved).save(1)
        with library_warnings() as texts:
            assert Checkpointer(folder, loaded).load().step == 1
        warns = not is_megatron and dist.get_rank() == 0
        assert [text[:36] for text in texts] == ["this was saved with ErrorFeedback(co"] * warns
        assert all(map(torch.equal, saved["model"].parameters(), loaded["model"].parameters()))
        with torch.no_grad():
            loaded["model"].module.weight.zero_()
        Checkpointer(folder / "bare", {"model": saved["model"].module}).save(1)
        assert Checkpointer(folder / "bare", {"model": loaded["model"]}).load().step == 1
        assert all(map(torch.equal, saved["model"].parameters(), loaded["model"].parameters()))


@on_two_ranks
def test_what_a_compressor_has_kept_since_a_checkpoint_without_one_is_dropped():
    folder, dense = shared_folder(), seeded(nn.Linear, 8, 8)
    plain = megatron.DistributedDataParallel(None, megatron.DistributedDataParallelConfig(), dense)
    Checkpointer(folder, {"model": plain}).save(0)
    compressor = ErrorFeedback(TopK(0.1, min_numel=1))
    model = megatron.DistributedDataParallel(
        None, megatron.DistributedDataParallelConfig(), seeded(nn.Linear, 8, 8), reduce_function=compressor
    )
    other = DistributedDataParallel(seeded(nn.Linear, 8, 8))
    other.register_comm_hook(compressor)
    for one in (model, other):
        one(torch.randn(4, 8)).square().sum().backward()
    model.finish_grad_sync()
    assert model.comm_state_dict()[0]["parameters"]
    Checkpointer(folder, {"model": model}).load()
    Checkpointer(folder / "of the other", {"model": DistributedDataParallel(seeded(nn.Linear, 8, 8))}).save(0)
    Checkpointer(folder / "of the other", {"model": other}).load()
    for kept in (*model.comm_state_dict(), other.comm_state_dict()):
        assert (kept["parameters"], kept["steps"]) == ({}, 0)


@pytest.mark.parametrize("options", [{}, {"sharded": True}, {"compressed": True}], ids=lambda options: "".join(options))
def test_a_training_goes_back_after_a_step_that_failed_and_on_bit_by_bit(three_ranks, folder, options):
    three_ranks.run(go_back_after_a_failure, folder, options, timeout=150)


def go_back_after_a_failure(folder, options):
    training = NoisyTraining(folder, **options)
    training.step(5)
    training.checkpointer.save(5)
    training.step(6)
    expected = training.bits()
    training.optimizer.zero_grad()
    outputs = training.model(torch.randn(8, 6))
    if dist.get_rank() == 1:
        outputs.register_hook(divide_by_zero)
    with pytest.raises((ZeroDivisionError, PeerAbortedError)):
        outputs.square().mean().backward()
    assert training.checkpointer.load().step == 5
    training.step(6)
    assert same(expected, training.bits())


def divide_by_zero(_gradient):
    raise ZeroDivisionError


def test_another_number_of_ranks_goes_on_with_model_and_optimizer(three_ranks, folder):
    three_ranks.run(go_on_with_two, folder, timeout=150)


def go_on_with_two(folder):
    first = NoisyTraining(folder, sharded=True)
    first.step(3)
    first.checkpointer.save(3, position=dist.get_rank())
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        other = NoisyTraining(folder, seed=1, sharded=True, compressed=True, group=group)
        other.step()
        chance = torch.get_rng_state()
        restored = other.checkpointer.load()
        kept = other.model.comm_state_dict()
        assert (kept["parameters"], kept["steps"]) == ({}, 0)
        assert (restored.step, restored.position, restored.positions) == (3, None, [0, 1, 2])
        assert torch.equal(chance, torch.get_rng_state())
        assert all(map(torch.equal, first.bits()[0], other.bits()[0]))
        assert other.schedule.state_dict() == first.schedule.state_dict()
        other.step()
        other.schedule.load_state_dict = None
        with pytest.raises(CheckpointError, match=r"'schedule' does not take the state that 3 ranks have saved"):
            other.checkpointer.load()
        parts = {"model": other.model, "optimizer": other.optimizer, "schedule": first.schedule, "more": first.schedule}
        with pytest.raises(CheckpointError, match=r"lacks 'ranks\.0\.own\.more': it was saved without this part"):
            Checkpointer(folder, parts, process_group=group).load()


@pytest.mark.parametrize("steps", [5, 6], ids=["between outer steps", "at an outer step"])
def test_another_number_of_ranks_goes_on_from_the_average_of_outer_steps(three_ranks, folder, steps):
    three_ranks.run(go_on_from_the_average, folder, steps, timeout=150)


def go_on_from_the_average(folder, steps):
    first = NoisyTraining(folder, outer=3)
    first.step(steps)
    first.checkpointer.save(steps)
    everyone = of_all_ranks(first.model.state_dict())
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        other = NoisyTraining(folder, seed=1, outer=3, compressed=True, group=group)
        other.step(3)
        assert other.model.comm_state_dict()["parameters"]
        other.checkpointer.load()
        assert not other.model.comm_state_dict()["parameters"]  # it is of what was trained before
        for name, value in other.model.state_dict().items():
            tables = [table[name].double() for table in everyone]
            mean = sum(tables) / 3 if value.is_floating_point() else tables[0]
            torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-7, msg=name)
        before = first.bits()[0]
        # Not even by rounding: an outer step would take that for a change, and add its momentum.
        assert torch.equal(other.model.module.never.weight, first.model.module.never.weight)
        other.step(3)
        assert other.optimizer.state_dict()["state"][0]["step"] == steps + 3
        moved = [(one - two).abs().max() for one, two in zip(other.bits()[0], before, strict=True) if one.dim() > 1]
        assert max(moved) < 0.2, "all of the training was applied once more"


@pytest.mark.parametrize("goes_on_with_outer_steps", [True, False])
def test_what_each_rank_has_after_an_outer_step_that_failed(three_ranks, folder, goes_on_with_outer_steps):
    """Is saved and goes on; or, where ranks are synchronized in each step from here on, is averaged."""
    three_ranks.run(go_on_after_a_failed_outer_step, folder, goes_on_with_outer_steps, timeout=150)


def go_on_after_a_failed_outer_step(folder, goes_on_with_outer_steps):
    first = NoisyTraining(folder, outer=3)
    first.step(2)
    reason = "not today"
    with pytest.MonkeyPatch.context() as patches:
        if dist.get_rank() == 1:
            patches.setattr(torch.Tensor, "any", lambda _change: failing_with(reason))
        with pytest.raises(RuntimeError if dist.get_rank() == 1 else PeerAbortedError, match=reason):
            first.step(1)
    first.checkpointer.save(3)
    everyone = of_all_ranks(first.model.state_dict())
    other = NoisyTraining(folder, seed=1, outer=3 if goes_on_with_outer_steps else 0)
    other.checkpointer.load()
    for name, value in other.model.state_dict().items():
        tables = [table[name].double() for table in everyone]
        mean = sum(tables) / 3 if value.is_floating_point() else tables[0]
        wanted = tables[dist.get_rank()] if goes_on_with_outer_steps else mean
        torch.testing.assert_close(value.double(), wanted, rtol=1e-6, atol=1e-7, msg=name)
    other.step(3)
    other.model.check_in_sync()


def failing_with(reason):
    raise RuntimeError(reason)


# --- buffers that ranks have for themselves


class Towers(nn.Module):
    """Two towers with running statistics, of which a forward uses some."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))

    def forward(self, x, used):
        x = self.stem(x)
        return sum((self.towers[k](x) for k in used), x)


class TowerTraining:
    """A training in which a rank may alone have written buffers that were not broadcast since."""

    def __init__(self, folder, how):
        torch.manual_seed(7)
        options = {"own buffers": {"broadcast_buffers": False}, "dropped": {"check_for_nan_in_grad": "skip"}}
        self.model = DistributedDataParallel(Towers(), **options.get(how, {}))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.parts = {"model": self.model, "optimizer": self.optimizer}
        if how == "outer steps":
            self.parts["outer"] = LocalSGD(self.model, self.optimizer, every=3)
        self.checkpointer = Checkpointer(folder, self.parts)
        self.how = how

    def first_step(self, uses):
        """A step after which buffers differ by rank, as only one has used a tower and they were not broadcast."""
        factor = float("inf") if self.how == "dropped" else 1.0
        with self.model.no_sync() if self.how == "accumulating" else contextlib.nullcontext():
            self.loss(0, uses).mul(factor).backward()
        if self.how == "accumulating":
            self.optimizer.zero_grad()  # gradients are not saved
        self.optimizer.step()

    def loss(self, step, uses):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        self.optimizer.zero_grad()
        return self.model(torch.randn(5, 4, generator=generator), uses[dist.get_rank()]).square().mean()

    def steps(self):
        """What there is after each of some steps, in which ranks use different towers."""
        for step, uses in enumerate([[[], [0]], [[1], [0, 1]], [[0], [1]]], 1):
            self.loss(step, uses).backward()
            self.optimizer.step()
            yield self.state()

    def state(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}


@pytest.mark.parametrize("uses", [[[0], []], [[], [1]], [[0], [0, 1]]], ids=["rank 0", "rank 1", "both"])
@pytest.mark.parametrize("how", ["outer steps", "dropped", "accumulating", "own buffers"])
def test_buffers_that_were_not_broadcast_go_on_from_what_each_rank_has_written(two_ranks, folder, how, uses):
    two_ranks.run(go_on_from_own_buffers, folder, how, uses, timeout=150)


def go_on_from_own_buffers(folder, how, uses):
    first = TowerTraining(folder, how)
    first.first_step(uses)
    first.checkpointer.save(1)
    saved = copy.deepcopy([part.state_dict() for part in first.parts.values()] + [first.model.comm_state_dict()])
    wanted = [first.state(), *first.steps()]
    other = TowerTraining(folder, how)
    other.checkpointer.load()
    by_hand = TowerTraining(folder, how)
    for part, state in zip(by_hand.parts.values(), saved, strict=False):
        part.load_state_dict(state)
    by_hand.model.load_comm_state_dict(saved[-1])
    for training in (other, by_hand):
        for step, (ours, theirs) in enumerate(zip([training.state(), *training.steps()], wanted, strict=True)):
            differing = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
            assert not differing, f"{step} steps after the checkpoint: {differing}"


def test_buffers_that_are_never_broadcast_are_each_ranks_own_or_rank_0s(two_ranks, folder):
    """Megatron's wrapper broadcasts none. Another number of ranks gets those of one rank, not a mixture."""
    two_ranks.run(go_on_from_never_broadcast, folder, timeout=150)


def go_on_from_never_broadcast(folder):
    def made():
        torch.manual_seed(7)
        return megatron.DistributedDataParallel(None, megatron.DistributedDataParallelConfig(), Towers())

    model = made()
    for used in [[0], [0, 1]][: 1 + dist.get_rank()]:
        model(torch.randn(5, 4) + dist.get_rank(), used)
    Checkpointer(folder, {"model": model}).save(1)
    everyone = of_all_ranks({name: value.clone() for name, value in model.state_dict().items()})
    assert not torch.equal(*(state["towers.0.1.running_var"] for state in everyone))
    again = made()
    Checkpointer(folder, {"model": again}).load()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in everyone[dist.get_rank()].items())
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    module = Towers()
    Checkpointer(folder, {"model": module}, process_group=alone).load()
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in everyone[0].items())


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


class Counting(nn.Linear):
    """Counts the rows that it has seen, in its extra state."""

    seen = 0

    def forward(self, x):
        self.seen += len(x)
        return super().forward(x)

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def with_differences(how):
    """The parts of a training whose ranks come to differ in ``how``, and the module that is called."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), Counting(4, 4) if how == "extra state" else nn.Linear(4, 4))
    if how == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["1.weight", "1.bias"])
    model = DistributedDataParallel(net[0] if how == "outer steps" else net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    parts = {"net": net, "optimizer": optimizer}
    if how == "outer steps":
        parts["outer"] = LocalSGD(model, optimizer, every=5)
    elif how != "extra state":
        model.train_apart()
    return parts, nn.Sequential(model, net[1]) if how == "outer steps" else model


@pytest.mark.parametrize("how", ["apart", "ignored", "extra state", "outer steps"])
@on_two_ranks
def test_what_differs_between_ranks_goes_on_on_each(how):
    rank, folder = dist.get_rank(), shared_folder()
    parts, model = with_differences(how)
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        parts["optimizer"].zero_grad()
        model(torch.randn(3 + rank, 4)).square().mean().backward()
        if step or rank == 0:  # the state of rank 1 begins later
            parts["optimizer"].step()
    wanted = copy.deepcopy([part.state_dict() for part in parts.values()])
    everyone = of_all_ranks(wanted)
    assert not equal(everyone[0][0], everyone[1][0])
    Checkpointer(folder, parts).save(1)
    again, _ = with_differences(how)
    Checkpointer(folder, dict(reversed(again.items())) if rank else again).load()
    assert equal([part.state_dict() for part in again.values()], wanted)
    alone = [dist.new_group([one]) for one in range(2)][rank]
    net = nn.Sequential(nn.Linear(4, 4), type(again["net"][1])(4, 4))
    Checkpointer(folder, {"net": net}, process_group=alone).load()
    first, second = (state[0] for state in everyone)
    for name, value in net.state_dict().items():
        assert equal(value, (first[name] + second[name]) / 2 if how == "outer steps" else first[name])


@on_two_ranks
def test_each_rank_has_the_optimizer_state_that_it_had():
    rank, folder = dist.get_rank(), shared_folder()

    def made():
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        return net, torch.optim.AdamW(net.parameters(), lr=0.1)

    net, optimizer = made()
    net(torch.ones(2, 4)).sum().backward()
    if rank == 0:
        net.bias.grad = None
    optimizer.step()
    Checkpointer(folder, {"optimizer": optimizer}).save(1)
    _, again = made()
    Checkpointer(folder, {"optimizer": again}).load()
    assert equal(again.state_dict(), optimizer.state_dict())
    assert len(again.state) == 1 + rank


@on_two_ranks
def test_parts_that_communicate_do_so_in_one_order_and_none_waits_for_a_rank_that_raises():
    class Refusing:
        def state_dict(self):
            if self.refuses:
                raise self.refuses
            return {}

        def load_state_dict(self, state):
            self.state_dict()

    config = megatron.DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = megatron.DistributedDataParallel(None, config, nn.Linear(5, 3))
    other = Refusing()
    other.refuses = None
    parts = {"a": other, "model": model, "z": DistributedOptimizer(torch.optim.AdamW(model.parameters()), model)}
    rank = dist.get_rank()
    checkpointer = Checkpointer(shared_folder(), dict(reversed(parts.items())) if rank else parts)
    checkpointer.save(1)
    assert checkpointer.load().step == 1
    for error in (ArithmeticError("no state"), KeyboardInterrupt("no state")):
        other.refuses = error if rank == 1 else None
        is_own = rank == 1 and isinstance(error, KeyboardInterrupt)
        for call in (lambda: checkpointer.save(2), checkpointer.load):
            with pytest.raises(KeyboardInterrupt if is_own else CheckpointError, match=r"(rank 1: \w+: |^)no state"):
                call()
    other.refuses = None
    checkpointer.save(3)


@on_two_ranks
def test_a_plain_optimizer_goes_on_under_tensor_parallelism():
    mesh, folder = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")), shared_folder()

    def made():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        model = DistributedDataParallel(net, device_mesh=mesh["dp"])
        return model, torch.optim.AdamW(net.parameters(), lr=0.1)

    def step(model, optimizer):
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = made()
    step(model, optimizer)
    Checkpointer(folder, {"model": model, "optimizer": optimizer}).save(1)
    again, its_optimizer = made()
    Checkpointer(folder, {"model": again, "optimizer": its_optimizer}).load()
    step(model, optimizer)
    step(again, its_optimizer)
    for own, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(own.to_local(), other.to_local()) if isinstance(own, DTensor) else torch.equal(own, other)


def test_modules_get_the_versions_with_which_they_were_saved(tmp_path):
    class Doubled(nn.Linear):
        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
            if local_metadata.get("version", 1) < self._version:
                state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    saved, loaded = nn.ModuleList([Doubled(2, 2)]), nn.ModuleList([Doubled(2, 2)])
    Checkpointer(tmp_path, {"model": saved}).save(1)
    loaded[0]._version = 2
    for factor in (2, 1):
        Checkpointer(tmp_path, {"model": loaded}).load()
        assert torch.equal(loaded[0].weight, saved[0].weight * factor)
        Checkpointer(tmp_path, {"model": loaded}).save(2)
        saved = copy.deepcopy(loaded)


@on_two_ranks
def test_outer_steps_that_are_not_saved_are_an_error():
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = LocalSGD(model, optimizer, every=2)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    parts = {"model": model, "optimizer": optimizer, "module": model.module, "head": model.module[1]}
    for name, part in parts.items():
        checkpointer = Checkpointer(shared_folder(), {name: part})
        with pytest.raises(CheckpointError, match=f"'{name}' is trained by a LocalSGD, which is not among"):
            checkpointer.save(1)
    Checkpointer(shared_folder(), {"frozen": model.module[0]}).save(1)
    outer.synchronize()
    for part in (model, model.module):  # all ranks have the same
        of_all = Checkpointer(shared_folder(), {"model": part})
        of_all.save(2)
        assert of_all.load().step == 2


@pytest.mark.parametrize("lazy", [0, 1])
@on_two_ranks
def test_ranks_that_have_counted_inner_steps_apart_go_on_each_with_its_own(lazy):
    def made():
        model = DistributedDataParallel(seeded(nn.Linear, 2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = LocalSGD(model, optimizer, every=2)
        return {"model": model, "optimizer": optimizer, "outer": outer}

    first, folder = made(), shared_folder()
    for _ in range(2 if dist.get_rank() == lazy else 3):  # so that rank ``lazy`` is at an outer step
        first["model"](torch.randn(3, 2)).sum().backward()
        first["optimizer"].step()
    Checkpointer(folder, first).save(3)
    other = made()
    Checkpointer(folder, other).load()
    assert equal(first["model"].state_dict(), other["model"].state_dict())


def test_another_number_of_ranks_goes_on_from_the_average_of_parts_of_a_model(three_ranks, folder):
    three_ranks.run(go_on_from_the_average_of_parts, folder, timeout=150)


def go_on_from_the_average_of_parts(folder):
    def made(group=None):
        net = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        model = DistributedDataParallel(net, process_group=group)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        outer = LocalSGD(model, optimizer, every=3)
        parts = {"first": net[0], "last": net[1], "optimizer": optimizer, "outer": outer}
        return model, optimizer, Checkpointer(folder, parts, process_group=group)

    model, optimizer, checkpointer = made()
    torch.manual_seed(dist.get_rank())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    checkpointer.save(1)
    everyone, group = of_all_ranks(model.state_dict()), dist.new_group([0, 1])
    if dist.get_rank() < 2:
        again, _, checkpointer = made(group)
        checkpointer.load()
        for name, value in again.state_dict().items():
            torch.testing.assert_close(value, sum(table[name] for table in everyone) / 3)


class Counter:
    """Anything with a state."""

    def __init__(self, count):
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@on_two_ranks
def test_modules_with_other_names_and_shapes_on_each_rank_go_on_on_each():
    rank, folder = dist.get_rank(), shared_folder()

    def made():
        net = nn.ModuleDict({"shared": nn.Linear(2, 2 + rank), f"stage{rank}": nn.Linear(2, 2)})
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        sum(layer(torch.ones(2)).sum() for layer in net.values()).backward()
        optimizer.step()
        return {"net": net, "optimizer": optimizer, "same": Counter(5), "other": Counter(rank)}

    parts, again = made(), made()
    Checkpointer(folder, parts).save(1)
    Checkpointer(folder, again).load()
    for name in ("net", "optimizer"):
        assert equal(again[name].state_dict(), parts[name].state_dict())
    alone = [dist.new_group([one]) for one in range(2)][rank]
    counters = {"same": Counter(0), "other": Counter(7)}
    Checkpointer(folder, counters, process_group=alone).load()
    assert [one.count for one in counters.values()] == [5, 7]  # one process cannot have both
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=alone)
    optimizer = DistributedOptimizer(torch.optim.Adam, model)
    with pytest.raises(ValueError, match=r"'optimizer' has shards on 1 ranks, .* and this Checkpointer has 2"):
        Checkpointer(folder, {"optimizer": optimizer})


def test_a_process_alone(lone_rank, folder):
    lone_rank.run(go_on_alone, folder)


def go_on_alone(folder):
    def made():
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, Checkpointer(folder, {"model": model, "optimizer": optimizer})

    model, optimizer, checkpointer = made()
    assert checkpointer.load() is None
    checkpointer.save(0)  # an optimizer without state

    def step(model, optimizer):
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()

    step(model, optimizer)
    checkpointer.save(1, position=[1, ("two", 3.0)])
    step(model, optimizer)
    again, its_optimizer, its_checkpointer = made()
    assert its_checkpointer.load().position == [1, ("two", 3.0)]
    again.zero_grad()
    for parameter, other in zip(model.parameters(), again.parameters(), strict=True):
        other.grad = None if parameter.grad is None else parameter.grad.clone() * 0
    step(again, its_optimizer)
    assert its_checkpointer.load(0).step == 0
    assert its_optimizer.state == {}
    with pytest.raises(CheckpointError, match=r"it is a Hostile with .*, and loading that would run code"):
        its_checkpointer.save(2, position=Hostile())
    with pytest.raises(CheckpointError, match="step is how many steps were taken, not -1"):
        its_checkpointer.save(-1)
    its_optimizer.state[next(again.parameters())][0] = 1.0
    with pytest.raises(CheckpointError, match=r"optimizer\.state\.0\.0 cannot be saved: a key there must be a text"):
        its_checkpointer.save(2)
    assert its_checkpointer.steps() == [0, 1]
    with pytest.raises(CheckpointError, match=r"lacks \['model.more.*and has \['model.bias'"):
        Checkpointer(folder, {"model": nn.ParameterDict({"weight": torch.ones(3, 3), "more": torch.ones(1)})}).load()


def test_the_last_are_kept_and_the_newest_is_the_last_that_was_saved(lone_rank, folder):
    lone_rank.run(keep_two, folder)


def keep_two(folder):
    model = nn.Linear(1, 1)
    checkpointer = Checkpointer(folder, {"model": model}, keep=2)
    for step in (10, 20, 30):
        nn.init.constant_(model.weight, step)
        checkpointer.save(step)
    assert checkpointer.steps() == [20, 30]
    assert checkpointer.load(20).step == 20
    assert model.weight == 20
    checkpointer.save(25)  # on another way than the 30 was
    assert Checkpointer(folder, {"model": model}).load().step == 25
    assert checkpointer.steps() == [30, 25]


# --- never torn


def test_a_kill_at_any_moment_loses_no_more_than_the_last_steps(lone_rank, folder):
    assert lone_rank.run(kill_at_every_moment, folder, timeout=300)[0] > 30


def kill_at_every_moment(folder):
    model = nn.Linear(50, 50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = Checkpointer(folder, {"model": model, "optimizer": optimizer}, keep=2)

    def save(step):
        nn.init.constant_(model.weight, step)
        checkpointer.save(step, position=step)

    save(1)
    save(2)
    last = 2
    for moment in itertools.count():
        step = 3 + moment
        was_killed = killed_at(moment, lambda step=step: save(step))
        restored = checkpointer.load()
        assert restored.step in ((last, step) if was_killed else (step,))
        assert restored.position == restored.step
        assert (model.weight == restored.step).all()
        last = restored.step
        if not was_killed:
            assert sorted(os.listdir(folder)) == sorted(name.text for name in CheckpointFolder(folder).complete())
            return moment


FAULTS = {
    "begin": lambda patch: failing(patch, Path, "mkdir", 1),
    "fsync_of_a_file": lambda patch: failing(patch, os, "fsync", 1),
    "fsync_of_a_folder": lambda patch: failing(patch, checkpoint_files, "_sync_folder", 1),
    "fsync_of_the_parent": lambda patch: failing(patch, checkpoint_files, "_sync_folder", 2),
    "rename": lambda patch: failing(patch, os, "rename", 2),  # torch renames its metadata
}


@pytest.mark.parametrize(("fault", "rank"), [*((name, 0) for name in FAULTS), ("fsync_of_a_file", 1)])
def test_a_failure_of_one_rank_is_known_to_all(two_ranks, folder, fault, rank):
    two_ranks.run(fail_on_one, folder, fault, rank, timeout=150)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_of_one_rank_is_known_to_all(folder, rank):
    with Ranks(2) as ranks:  # of their own: the file of a store that tests have used is too long to be written to
        ranks.run(fail_on_one, folder, "disk", rank, timeout=150)


def fail_on_one(folder, fault, rank):
    training = NoisyTraining(folder)
    training.step()
    training.checkpointer.save(1)
    saved = training.bits()[0]
    training.step()
    mine = dist.get_rank() == rank
    with pytest.MonkeyPatch.context() as patch:
        if mine:
            failure = full_disk(4000) if fault == "disk" else FAULTS[fault](patch)
            with failure, pytest.raises(CheckpointError, match=f"rank {rank}: .*(Error|failed)"):
                training.checkpointer.save(2)
        else:
            with pytest.raises(CheckpointError, match=f"rank {rank}: .*(Error|failed)"):
                training.checkpointer.save(2)
    dist.barrier()
    assert os.listdir(folder) == ["000001-step-1"]
    assert training.checkpointer.load().step == 1
    assert all(map(torch.equal, saved, training.bits()[0]))
    training.checkpointer.save(3)
    assert training.checkpointer.steps() == [1, 3]


def test_everything_is_on_the_disk_before_it_gets_its_name(lone_rank, folder):
    lone_rank.run(follow_the_disk, folder)


def follow_the_disk(folder):
    done = []
    with pytest.MonkeyPatch.context() as patch:
        fsync, rename = os.fsync, os.rename
        patch.setattr(os, "fsync", lambda file: (done.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
        patch.setattr(os, "rename", lambda old, new: (done.append((Path(old).name, Path(new).name)), rename(old, new)))
        path = Checkpointer(folder, {"model": nn.Linear(2, 2)}).save(7)
    place = next(k for k, what in enumerate(done) if isinstance(what, tuple) and what[1] == path.name)
    synced = [Path(what).name for what in done[:place] if isinstance(what, str)]
    assert set(os.listdir(path)) <= set(synced)
    assert synced[-1] == done[place][0]  # its folder, last
    assert done[place + 1 :] == [str(folder)]


@on_two_ranks
def test_ranks_at_different_steps_save_nothing():
    folder = shared_folder()
    training = NoisyTraining(folder)
    with pytest.raises(DisagreementError, match=r"rank 1 saves a checkpoint of step 1 .* and rank 0 of step 0"):
        training.checkpointer.save(dist.get_rank())
    training.checkpointer.save(4)
    assert training.checkpointer.steps() == [4]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def test_a_sparse_tensor_is_refused_by_name(tmp_path):
    net = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.tensor([1])).sum().backward()
    optimizer.step()
    with pytest.raises(CheckpointError, match=r"'optimizer.state.0.momentum_buffer' cannot be saved: it is a sparse"):
        Checkpointer(tmp_path, {"net": net, "optimizer": optimizer}).save(1)


class Tagged(torch.Tensor):
    """A class of the user's."""


class TaggedLayer(nn.Module):
    """A layer whose parameter and buffer are of that class."""

    def __init__(self, values):
        super().__init__()
        self.weight = nn.Parameter(values.as_subclass(Tagged))
        self.register_buffer("seen", values.clone().as_subclass(Tagged))

    def forward(self, x):
        self.seen += 1
        return (x @ self.weight).as_subclass(torch.Tensor)


@on_three_ranks
def test_tensors_of_a_users_class_go_on_with_another_number_of_ranks():
    rank, folder = dist.get_rank(), shared_folder()
    group = dist.new_group([0, 1])
    before, after = DistributedDataParallel(TaggedLayer(torch.randn(3, 2))), None
    before(torch.ones(4, 3) * rank).sum().backward()
    Checkpointer(folder, {"model": before}).save(1)
    if rank < 2:
        after = DistributedDataParallel(TaggedLayer(torch.zeros(3, 2)), process_group=group)
        Checkpointer(folder, {"model": after}, process_group=group).load()
        for (name, want), got in zip(before.state_dict().items(), after.state_dict().values(), strict=True):
            assert torch.equal(got, want), name
        assert type(after.module.seen) is Tagged
        after(torch.ones(4, 3) * rank).sum().backward()
        torch.testing.assert_close(after.module.weight.grad.as_subclass(torch.Tensor), torch.full((3, 2), 2.0))


def test_a_parameter_of_a_users_class_goes_on_bit_by_bit(tmp_path):
    net, other = TaggedLayer(torch.randn(3, 2)), TaggedLayer(torch.zeros(3, 2))
    Checkpointer(tmp_path, {"model": net}).save(1)
    assert Checkpointer(tmp_path, {"model": other}).load().step == 1
    for name, tensor in net.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert type(other.seen) is type(net.seen) is Tagged


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad])
def test_a_fused_optimizer_goes_on_where_weights_are_in_another_order_of_memory(tmp_path, optimizer):
    """It goes through a weight and its moments in their order of memory, not by index."""

    def training():
        net = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        return net, optimizer(net.parameters(), lr=0.1, fused=True)

    def step(net, inner):
        inner.zero_grad()
        net(torch.arange(27.0).view(1, 3, 3, 3)).square().sum().backward()
        inner.step()

    (net, inner), (other, its) = training(), training()
    step(net, inner)
    Checkpointer(tmp_path, {"model": net, "optimizer": inner}).save(1)
    Checkpointer(tmp_path, {"model": other, "optimizer": its}).load()
    for one in ((net, inner), (other, its)):
        step(*one)
    assert torch.equal(other.weight, net.weight)


def test_a_tensor_that_keeps_its_values_in_others_is_refused_by_name(tmp_path):
    net = torch.nn.Module()
    net.register_buffer("pair", TwoTensor(torch.ones(2), torch.zeros(2)))
    with pytest.raises(CheckpointError, match=r"'model\.pair' cannot be saved: it is a TwoTensor, which keeps"):
        Checkpointer(tmp_path, {"model": net}).save(1)


@on_three_ranks
def test_what_one_rank_cannot_save_is_an_error_of_all():
    folder = shared_folder()
    training = NoisyTraining(folder)
    position = object() if dist.get_rank() == 2 else 3
    with pytest.raises(CheckpointError, match=r"rank 2: .*'ranks.2.position' cannot be saved: it is a object"):
        training.checkpointer.save(1, position=position)
    training.checkpointer.save(1)
    if dist.get_rank() == 1:
        training.schedule.load_state_dict = None
    with pytest.raises(CheckpointError, match="rank 1: TypeError"):
        training.checkpointer.load()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)


def test_a_rank_that_is_killed_while_it_saves_leaves_the_last_checkpoint(folder):
    with Ranks(2, timeout=120) as ranks:
        for moment in ("fsync", "rename"):
            ranks.run(save_one, folder)
            with pytest.raises(RankError) as caught:
                ranks.run(save_and_die, folder, moment, timeout=90)
            assert [type(error) for error in caught.value.exceptions.values()] == [CommunicationError]
            assert ranks.run(load_one, folder) == [1, 1]


def save_one(folder):
    shutil.rmtree(folder, ignore_errors=True) if dist.get_rank() == 0 else None
    dist.barrier()
    training = NoisyTraining(folder)
    training.checkpointer.save(1)


def save_and_die(folder, moment):
    training = NoisyTraining(folder)

    def die(*_):
        os.kill(os.getpid(), 9)

    if (dist.get_rank() == 1) == (moment == "fsync"):  # only rank 0 renames
        setattr(os, moment, die)
    training.checkpointer.save(2)


@on_two_ranks
def test_ranks_that_average_with_others_load_what_the_first_has_saved(tmp_path):
    """On another mesh, ranks that must be equal now may have differed."""
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    for group, expected in ((None, dist.get_rank()), (None, dist.get_rank()), (alone, 0)):
        wrapper = DistributedDataParallel(nn.BatchNorm1d(3), process_group=group, broadcast_buffers=False)
        checkpointer = Checkpointer(tmp_path, {"model": wrapper})
        if checkpointer.load() is None:
            wrapper.module.running_mean.fill_(dist.get_rank())
            checkpointer.save(1)
        assert wrapper.module.running_mean.tolist() == [expected] * 3


@on_two_ranks
def test_another_mesh_of_as_many_ranks_is_as_another_number_of_ranks(tmp_path):
    rank = dist.get_rank()
    alone = [dist.new_group([one]) for one in range(2)][rank]

    def made(group=None):
        wrapper = DistributedDataParallel(seeded(nn.Linear, 4, 4), process_group=group)
        wrapper.register_comm_hook(ErrorFeedback(TopK(0.3, min_numel=0)))
        return {"model": wrapper, "same": Counter(3), "other": Counter(rank)}

    parts = made()
    parts["model"](data(4, 4)).sum().backward()
    Checkpointer(tmp_path, parts).save(1, position=rank)
    torch.manual_seed(rank)
    with library_warnings() as texts:
        parts = made(alone)
        parts["same"].count, chance = 0, torch.get_rng_state()
        restored = Checkpointer(tmp_path, parts).load()
    assert (restored.position, restored.positions) == (None, [0, 1])
    assert torch.equal(torch.get_rng_state(), chance)
    assert [parts[name].count for name in ("same", "other")] == [3, rank]
    assert parts["model"].comm_state_dict()["parameters"] == {}
    found = "the checkpoint was saved by 2 ranks on another mesh: .* nor other, whose states differ"
    assert [bool(re.match(found, text)) for text in texts] == [True] * (rank == 0)


@pytest.mark.parametrize("outer", [False, True])
@on_four_ranks
def test_stages_under_the_same_names_are_not_mixed_on_another_mesh(tmp_path, outer):
    rank = dist.get_rank()
    pairs = [[dist.new_group(pair) for pair in pairs] for pairs in ([(0, 1), (2, 3)], [(0, 2), (1, 3)])]

    def made(stage, group):
        torch.manual_seed(stage)
        model = DistributedDataParallel(nn.Linear(3, 3), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        more = {"optimizer": optimizer, "outer": LocalSGD(model, optimizer, every=3)} if outer else {}
        if outer and stage != 7:  # between two outer steps
            model(data(2, 3, rank=rank)).square().sum().backward()
            optimizer.step()
        return {"model": model, **more}

    parts, again = made(rank // 2, pairs[0][rank // 2]), made(7, pairs[0][rank // 2])
    Checkpointer(tmp_path, parts).save(1)
    Checkpointer(tmp_path, again).load()
    assert all(map(torch.equal, again["model"].parameters(), parts["model"].parameters()))
    again = made(rank % 2, pairs[1][rank % 2])
    with pytest.raises(
        CheckpointError, match=r"'(model|outer)' in the checkpoint is another part of a model for each group"
    ):
        Checkpointer(tmp_path, again).load()
    alone = [dist.new_group([one]) for one in range(4)][rank]
    with pytest.raises(CheckpointError, match="save by a Checkpointer for each part"):
        Checkpointer(tmp_path, made(0, alone), process_group=alone).load()


@pytest.mark.parametrize("how", ["fewer parts", "other ranks of the job", "the bare module"])
@on_four_ranks
def test_the_mesh_is_the_same_with(how, tmp_path):
    """What differs goes on on each rank where each wrapper averages over the same ranks of the Checkpointer."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = halves[dist.get_rank() // 2]

    def made(group=None):
        first = DistributedDataParallel(nn.BatchNorm1d(3), broadcast_buffers=False, process_group=group)
        second = DistributedDataParallel(nn.Linear(2, 2), process_group=group)
        second.register_comm_hook(ErrorFeedback(TopK(0.3, min_numel=0)))
        return {"first": first, "second": second}

    group = half if how == "other ranks of the job" else None
    saves, loads = (dist.get_rank() in pair for pair in ((2, 3), (0, 1))) if group is half else (True, True)
    parts, again = made(group), made(group)
    parts["first"].module.running_mean.fill_(dist.get_rank() % 2)
    if saves:
        parts["second"](data(3, 2)).sum().backward()
        Checkpointer(tmp_path, parts, process_group=group).save(1)
    dist.barrier()
    if how == "fewer parts":
        del again["second"]
    elif how == "the bare module":
        again["first"] = again["first"].module
    if loads:
        Checkpointer(tmp_path, again, process_group=group).load()
        assert again["first"].state_dict()["running_mean"].tolist() == [dist.get_rank() % 2] * 3
        assert "second" not in again or again["second"].comm_state_dict()["parameters"]


def test_what_one_rank_has_saved_is_loaded_without_a_process_group(folder):
    with Ranks(1, timeout=120) as ranks:
        ranks.run(save_compressed, folder)
    with library_warnings() as texts:
        wrapper = DistributedDataParallel(nn.Linear(2, 2))
        wrapper.register_comm_hook(ErrorFeedback(TopK(0.5, min_numel=1)))
        assert Checkpointer(folder, {"model": wrapper}).load().step == 1
    assert "what the compressor had not sent then is not loaded" in texts[-1]
    assert torch.equal(wrapper.module.weight, torch.full((2, 2), 3.0))


def save_compressed(folder):
    wrapper = DistributedDataParallel(nn.Linear(2, 2))
    wrapper.register_comm_hook(ErrorFeedback(TopK(0.5, min_numel=1)))
    wrapper(torch.ones(1, 2)).sum().backward()
    nn.init.constant_(wrapper.module.weight, 3.0)
    Checkpointer(folder, {"model": wrapper}).save(1)


def test_a_rank_that_has_left_since_is_not_named(folder, tmp_path):
    os.mkfifo(tmp_path / "held")
    with Ranks(3, timeout=120) as ranks, pytest.raises(RankError) as caught:
        ranks.run(save_and_leave_one_after_another, folder, tmp_path / "held")
    text = str(caught.value.exceptions[2])
    assert "rank 1 has found" in text
    assert "rank 0, which has died" in text
    assert "rank 1, which" not in text


def save_and_leave_one_after_another(folder, fifo):
    training, rank = NoisyTraining(folder), dist.get_rank()
    training.checkpointer.save(1)
    held = open(fifo, "w" if rank == 1 else "r") if rank else None  # noqa: SIM115  # for as long as the process
    if rank == 0:
        os.kill(os.getpid(), 9)
    if rank == 1:
        with pytest.raises(CommunicationError, match="rank 0, which has died"):
            training.checkpointer.save(2)
        os._exit(0)
    find = LostRanks.find

    def find_later(*arguments):
        held.read()  # to its end, which is that of the process
        return find(*arguments)

    LostRanks.find = find_later
    training.checkpointer.save(2)


def load_one(folder):
    return NoisyTraining(folder, seed=1).checkpointer.load().step


# --- damage and malice


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_what_may_have_been_meant_is_told_where_nothing_is_found(tmp_path, caplog):
    parts = {"model": nn.Linear(3, 3)}
    Checkpointer(tmp_path / "run", parts).save(4)
    with caplog.at_level("WARNING", logger="ppe_ddp"):
        assert Checkpointer(tmp_path / "other", parts).load() is None  # the first start of another job
        assert Checkpointer(tmp_path / "runs", parts).load() is None
    run = tmp_path / "run"
    assert [record.getMessage() for record in caplog.records if record.name == "ppe_ddp"] == [
        f"nothing is loaded: {run}s has no checkpoint; there is one in {run}",
    ]
    with pytest.raises(CheckpointError, match=r"run has no checkpoint of step 3: it has \[4\]"):
        Checkpointer(tmp_path / "run", parts).load(3)


DAMAGES = {"flipped": flip, "cut": lambda file: os.truncate(file, file.stat().st_size // 2), "gone": Path.unlink}


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog, name, damage):
    model = nn.Linear(3, 3)
    checkpointer = Checkpointer(tmp_path, {"model": model}, keep=2)
    for step in (1, 2):
        nn.init.constant_(model.weight, step)
        path = checkpointer.save(step)
    DAMAGES[damage](path / name)
    with caplog.at_level("WARNING", logger="ppe_ddp"):
        assert checkpointer.load().step == 1
    assert (model.weight == 1).all()
    assert name in caplog.text
    checkpointer.save(3)
    assert checkpointer.steps() == [1, 3]  # what is damaged goes first
    for one in tmp_path.iterdir():
        DAMAGES[damage](one / name)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole: .*(damaged|No such file)"):
        checkpointer.load()


def test_what_cannot_be_read_for_once_is_passed_over_and_stays(tmp_path, caplog, monkeypatch):
    checkpointer = Checkpointer(tmp_path, {"model": nn.Linear(3, 3)})
    for step in (1, 2):
        checkpointer.save(step)
    errors = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]
    with monkeypatch.context() as patches:
        digest = checkpoint_files._digest
        patches.setattr(checkpoint_files, "_digest", lambda file: raise_(errors.pop()) if errors else digest(file))
        assert checkpointer.load().step == 1
    assert "000002-step-2 cannot be read: [Errno 24]" in caplog.text
    checkpointer.save(3)
    assert checkpointer.steps() == [1, 2, 3]


def raise_(error):
    raise error


@pytest.mark.parametrize("rank", [0, 1])
def test_the_damage_of_one_file_is_known_to_all(two_ranks, folder, rank):
    two_ranks.run(go_back, folder, rank, timeout=150)


def go_back(folder, rank):
    training = NoisyTraining(folder)
    for step in (1, 2):
        path = training.checkpointer.save(step)
    dist.barrier()
    if dist.get_rank() == 0:
        flip(path / f"__{rank}_0.distcp")
    dist.barrier()
    assert training.checkpointer.load().step == 1


class Hostile:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def signed_again(path):
    """Make the manifest fit the files, as somebody would who means harm."""
    manifest = path / "manifest.json"
    files = json.loads(json.loads(manifest.read_text())["content"])["files"]
    content = json.dumps({"files": {name: list(checkpoint_files.sync(path / name)) for name in files}})
    manifest.write_text(json.dumps({"content": content, "sha256": sha256(content.encode()).hexdigest()}))


class AsPython3110:
    """An attribute, pickled as Python 3.11.0 to 3.11.3 pickles members of enumerations."""

    def __init__(self, *owner_and_name):
        self.place = owner_and_name

    def __reduce__(self):
        return getattr, self.place


def test_metadata_that_another_python_has_written_is_read():
    member = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    content = pickle.dumps(AsPython3110(type(member), member.name))
    assert checkpoint_files._MetadataUnpickler(io.BytesIO(content)).load() is member


def test_nothing_in_a_checkpoint_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpointer = Checkpointer(tmp_path / "all", {"model": nn.Linear(2, 2)})
    path = checkpointer.save(1)
    metadata = path / ".metadata"
    original = metadata.read_bytes()
    for hostile in (Hostile(), {"state_dict_metadata": Hostile()}, AsPython3110(torch.Size, "numel")):
        metadata.write_bytes(pickle.dumps(hostile))
        signed_again(path)
        with pytest.raises(CheckpointError, match=r"UnpicklingError: \.metadata wants .*refused"):
            checkpointer.load()
    metadata.write_bytes(original.replace(b"__0_0.distcp", b"../../../xyz"))
    signed_again(path)
    with pytest.raises(CheckpointError, match="not a file beside it"):
        checkpointer.load()
    assert not Path("executed").exists()


def test_nothing_in_an_entry_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:

        def dump(value):
            torch.save(value, content := io.BytesIO())
            return content.getvalue()

        patch.setattr(checkpoint_files, "dump_plain", dump)
        Checkpointer(tmp_path / "all", {"model": nn.Linear(2, 2)}).save(1, position=Hostile())
    with pytest.raises(CheckpointError, match="UnpicklingError"):
        Checkpointer(tmp_path / "all", {"model": nn.Linear(2, 2)}).load()
    assert not Path("executed").exists()
