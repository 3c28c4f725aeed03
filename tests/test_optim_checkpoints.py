"""Checkpoints of a distributed optimizer: each parameter keeps its own state, and all ranks load or none does."""

import copy
import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from one_process import data, seeded
from ppe_ddp import DistributedDataParallel, DistributedOptimizer, megatron
from rank_tests import on_two_ranks


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x, head):
        return self.heads[head](x)


def two_heads(wrapper, make):
    module = seeded(TwoHeads)
    if wrapper == "plain":
        model = DistributedDataParallel(module)
    else:
        config = megatron.DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = megatron.DistributedDataParallel(None, config, module)
    parameters = list(module.parameters())
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2]}]  # both heads in each
    return model, DistributedOptimizer(make(groups), model)


def train(model, optimizer, heads):
    for step, head in enumerate(heads):
        if hasattr(model, "zero_grad_buffer"):
            model.zero_grad_buffer()
        optimizer.zero_grad()
        model(data(5, 4, step=step), head).square().sum().backward()
        if hasattr(model, "zero_grad_buffer"):
            model.finish_grad_sync()
        optimizer.step()


def save(path, wrapper, make):
    model, optimizer = two_heads(wrapper, make)
    train(model, optimizer, [0, 0, 0, 1])
    group = optimizer.param_groups[0]
    group["lr"] = group["lr"] * 2  # not in place: torch gives all groups one tensor
    _quietly(dcp.save, {"model": model.state_dict(), "optimizer": optimizer}, checkpoint_id=path)
    train(model, optimizer, [1, 0])
    optimizer.synchronize()
    return [parameter.detach() for parameter in model.module.parameters()]


def load(path, wrapper, make):
    model, optimizer = two_heads(wrapper, make)
    state = model.state_dict()
    _quietly(dcp.load, {"model": state, "optimizer": optimizer}, checkpoint_id=path)
    model.load_state_dict(state)
    steps = [int(entries["step"]) for entries in optimizer.state_dict()["state"].values()]
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    train(model, optimizer, [1, 0])
    optimizer.synchronize()
    return steps, rates, [parameter.detach() for parameter in model.module.parameters()]


def _quietly(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own
        function(*args, **kwargs)


def adamw(groups):
    return torch.optim.AdamW(groups, lr=torch.tensor(0.01), foreach=False)


def nadam(groups):
    return torch.optim.NAdam(groups, lr=0.01)


@pytest.mark.parametrize("wrapper", ["plain", "megatron"])
@pytest.mark.parametrize("make", [adamw, nadam])
def test_every_parameter_gets_its_own_step_and_every_group_its_own_rate(tmp_path, two_ranks, wrapper, make):
    expected = two_ranks.run(save, str(tmp_path), wrapper, make)[0]
    steps, rates, trained = two_ranks.run(load, str(tmp_path), wrapper, make)[0]
    assert steps == [3, 1, 3, 1]
    assert rates == pytest.approx([0.02, 0.01], rel=1e-6)  # one is a float32 tensor
    torch.testing.assert_close(trained, expected, rtol=0.0, atol=0.0)


@on_two_ranks
def test_no_two_entries_are_one_tensor():
    model, optimizer = two_heads("plain", adamw)
    train(model, optimizer, [0])
    for saved in (optimizer.state_dict(), two_heads("plain", adamw)[1].state_dict()):
        tensors = [value for part in ("state", "exists", "master") for value in _tensors(saved[part])]
        tensors += [group["lr"] for group in saved["param_groups"]]
        addresses = [tensor.data_ptr() for tensor in tensors]
        assert len(set(addresses)) == len(tensors) >= 18
    assert not {group["lr"].data_ptr() for group in optimizer.param_groups} & set(addresses)


def _tensors(tree):
    for value in tree.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        else:
            yield value.to_local() if hasattr(value, "to_local") else value


@pytest.mark.parametrize("wrapper", ["plain", "megatron"])
@on_two_ranks
def test_the_error_of_one_rank_is_told_on_all(wrapper):
    """Though with Megatron's wrapper the others have shards to ask for."""
    model, optimizer = two_heads(wrapper, adamw)
    train(model, optimizer, [0, 1])
    good = optimizer.state_dict()
    before = {name: parameter.detach().clone() for name, parameter in model.module.named_parameters()}
    bad = copy.copy(good)
    if dist.get_rank():
        bad["layout"] = {**good["layout"], "heads.1.bias": "another"}
    with pytest.raises(ValueError, match=r"nothing was loaded on any rank: rank 1 of 2: the state of 'heads\.1\.bias'"):
        optimizer.load_state_dict(bad)
    bad = {**good, "exists": {}} if dist.get_rank() else {"state": {}}
    text = r"rank 0 of 2: this is no state_dict of a Dist.*; rank 1 of 2: KeyError: 'heads\.0\.weight'"
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(bad)
    if wrapper == "megatron":
        bad = copy.deepcopy(good) if not dist.get_rank() else good
        if not dist.get_rank():
            del bad["state"]["heads.0.bias"]["exp_avg"]
        with pytest.raises(ValueError, match=re.escape("differ in ['heads.0.bias exp_avg']")):
            optimizer.load_state_dict(bad)
    optimizer.load_state_dict(good)
    for name, parameter in model.module.named_parameters():
        assert torch.equal(parameter, before[name])


# --- the precision of state


def adagrad(groups):
    return torch.optim.Adagrad(groups, lr=0.01)


def halves(make, master_dtype):
    """A bf16 model of one weight, and its optimizer."""
    module = nn.Linear(4, 3, bias=False).bfloat16()
    model = DistributedDataParallel(module)
    return model, DistributedOptimizer(make(module.parameters()), model, master_dtype=master_dtype)


def sums(optimizer, key="sum"):
    return optimizer.state[optimizer.param_groups[0]["params"][0]][key]


@on_two_ranks
def test_state_that_is_there_before_the_first_step_is_as_precise_as_the_weights():
    """Adagrad's, which stays where it is as soon as a square is less than half of its last place."""
    model, optimizer = halves(adagrad, torch.float32)
    for size in (1.0, *[2.0**-6] * 4):
        optimizer.zero_grad()
        model(torch.full((1, 4), size, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    found = sums(optimizer)
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.full((6,), 1.0 + 4 * 2.0**-12))


@on_two_ranks
def test_state_that_is_loaded_is_as_precise_as_the_weights():
    """As torch's own ``load_state_dict()`` does it."""
    _, saved = halves(adagrad, torch.float32)
    _, optimizer = halves(adagrad, torch.float64)
    optimizer.load_state_dict(saved.state_dict())
    assert sums(optimizer).dtype == torch.float64


@on_two_ranks
def test_state_of_a_trained_optimizer_becomes_as_precise_as_the_weights():
    module = nn.Linear(4, 3, bias=False).bfloat16()
    plain = adamw(module.parameters())
    module(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    plain.step()
    module.zero_grad()
    optimizer = DistributedOptimizer(plain, DistributedDataParallel(module))
    assert sums(optimizer, "exp_avg").dtype == torch.float32
    assert sums(optimizer, "exp_avg").tolist() == pytest.approx([0.1] * 6, rel=1e-2)


# --- memory formats in Megatron's buffers


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolve = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.read = nn.Linear(4, 3)
        self.strided = nn.Parameter(torch.randn(3, 6)[:, ::2])

    def forward(self, x):
        return self.read(self.convolve(x).mean((2, 3))) @ self.strided


class Images:
    """A Megatron wrapper's training, held to one process."""

    def __init__(self, group, options):
        self.group = group
        self.module, self.twin = seeded(Image), seeded(Image)
        config = megatron.DistributedDataParallelConfig(use_distributed_optimizer=True, **options)
        self.model = megatron.DistributedDataParallel(None, config, self.module, data_parallel_group=group)
        assert self.module.convolve.weight.is_contiguous(memory_format=torch.channels_last)
        self.optimizer = DistributedOptimizer(torch.optim.AdamW, self.model, lr=0.01)
        self.plain = torch.optim.AdamW(self.twin.parameters(), lr=0.01)

    def train_twin(self, steps, world_size):
        for step in steps:
            self.plain.zero_grad()
            for rank in range(world_size):
                (self.twin(data(2, 3, 5, 5, rank=rank, step=step)).square().mean() / world_size).backward()
            nn.utils.clip_grad_norm_(self.twin.parameters(), 0.1)
            self.plain.step()

    def train(self, steps):
        rank = dist.get_rank(self.group)
        for step in steps:
            self.model.zero_grad_buffer()
            self.model(data(2, 3, 5, 5, rank=rank, step=step)).square().mean().backward()
            self.model.finish_grad_sync()
            self.optimizer.clip_grad_norm_(0.1)
            self.optimizer.step()
            self.optimizer.synchronize()
            self.train_twin([step], dist.get_world_size(self.group))
            self.compare()

    def compare(self):
        for parameter, want in zip(self.module.parameters(), self.twin.parameters(), strict=True):
            torch.testing.assert_close(parameter, want, rtol=1e-4, atol=1e-5)


def images(group, options):
    trained = Images(group, options)
    trained.train(range(2))
    trained.optimizer.load_state_dict(trained.optimizer.state_dict())
    trained.train(range(2, 4))


IMAGE_OPTIONS = [{}, {"overlap_grad_reduce": True, "bucket_size": 20}]


@pytest.mark.parametrize("options", IMAGE_OPTIONS)
@on_two_ranks
def test_a_parameter_that_is_not_row_major(options):
    images(None, options)
    images([dist.new_group([rank]) for rank in range(2)][dist.get_rank()], options)


def save_images(path, options):
    trained = Images(None, options)
    trained.train(range(2))
    _quietly(dcp.save, {"model": trained.model.state_dict(), "optimizer": trained.optimizer}, checkpoint_id=path)


def load_images(path, options, saved_by):
    loaded = Images(None, options)
    model = loaded.model.state_dict()
    _quietly(dcp.load, {"model": model, "optimizer": loaded.optimizer}, checkpoint_id=path)
    loaded.model.load_state_dict(model)
    loaded.train_twin(range(2), saved_by)
    loaded.compare()
    loaded.train(range(2, 4))


@pytest.mark.parametrize("options", IMAGE_OPTIONS)
@pytest.mark.parametrize("grows", [True, False])
def test_it_is_loaded_by_another_number_of_ranks(tmp_path, two_ranks, three_ranks, grows, options):
    """Whose shards begin and end elsewhere in its memory."""
    savers, loaders = (two_ranks, three_ranks) if grows else (three_ranks, two_ranks)
    savers.run(save_images, str(tmp_path), options)
    loaders.run(load_images, str(tmp_path), IMAGE_OPTIONS[0], 2 if grows else 3)
