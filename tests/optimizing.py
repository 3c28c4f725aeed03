"""Shared by tests of the distributed optimizer: a model with every kind of parameter, and its training."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from one_process import data, seeded
from ppe_ddp import DistributedDataParallel, DistributedOptimizer
from ppe_ddp.optim import ShardedGradient


class Everything(nn.Module):
    """Tied, frozen, unused, empty, scalar, strided and channels-last parameters; branches, an LSTM and attention."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.convolve = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.read = nn.LSTM(8, 8)
        self.attend = nn.MultiheadAttention(8, 2)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.late = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.strided = nn.Parameter(torch.randn(8, 10)[:, ::2])
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)

    def forward(self, words, image, branch, late):
        x = self.embed(words) + self.frozen
        x = self.read(x)[0]
        x = x + self.attend(x, x, x, need_weights=False)[0]
        x = x + torch.tanh(self.branches[branch](x))
        if late:  # whose gradients no rank expects
            x = x + checkpoint(self.late, x, use_reentrant=True)
        x = self.norm(x) * self.gain + self.convolve(image).mean((1, 2, 3))[:, None] + self.empty.sum()
        x = x + (x @ self.strided).sum(-1, keepdim=True)
        return F.linear(x, self.embed.weight)


def everything(dtype=torch.float64):
    return seeded(Everything).to(dtype)


def loss_of(model, step, rank):
    """One micro-batch's loss; the branch differs from rank to rank, and none uses the last one at first."""
    dtype = next(p for p in model.parameters()).dtype
    generator = torch.Generator().manual_seed(77 * step + rank)
    words = torch.randint(11, (6, 5), generator=generator)
    image = data(5, 3, 6, 6, rank=rank, step=step, dtype=dtype)
    branch = (step + rank) % 3 if step < 3 else (step + rank) % 4
    return F.cross_entropy(model(words, image, branch, step % 2 == 1).flatten(0, 1), words.flatten().roll(1))


def groups_of(model):
    """Two groups with options of their own."""
    parameters = list(model.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.05, "lr": 0.01}]


def scheduled(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


class OneProcess:
    """Trains on the batches of all ranks at once."""

    def __init__(self, module, make, world_size):
        self.module = module
        self.optimizer = make(groups_of(module))
        self.schedule = scheduled(self.optimizer)
        self._world_size = world_size

    def step(self, step, *, max_norm=None, norm_type=2.0, micro_batches=1):
        self.optimizer.zero_grad()
        for batch in range(micro_batches):
            for rank in range(self._world_size):
                (loss_of(self.module, step + 100 * batch, rank) / self._world_size).backward()
        norm = None
        if max_norm is not None:
            # torch knows no largest element of nothing
            parameters = [parameter for parameter in self.module.parameters() if parameter.numel()]
            norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        self.optimizer.step()
        self.schedule.step()
        return norm


class DistributedRun:
    """The same training on the ranks of a group."""

    def __init__(self, module, make, group=None, **options):
        self.wrapper = DistributedDataParallel(module, process_group=group, **options)
        self.module = module
        self.optimizer = DistributedOptimizer(make(groups_of(self.wrapper)), self.wrapper)
        self.schedule = scheduled(self.optimizer)
        self._rank = dist.get_rank(group)

    def step(self, step, *, max_norm=None, norm_type=2.0, micro_batches=1):
        self.optimizer.zero_grad()
        for batch in range(micro_batches - 1):
            with self.wrapper.no_sync():
                loss_of(self.wrapper, step + 100 * batch, self._rank).backward()
        loss_of(self.wrapper, step + 100 * (micro_batches - 1), self._rank).backward()
        assert all(type(parameter.grad) in (type(None), ShardedGradient) for parameter in self.wrapper.parameters())
        norm = None if max_norm is None else self.optimizer.clip_grad_norm_(max_norm, norm_type)
        self.optimizer.step()
        self.schedule.step()
        return norm

    def state_numbers(self):
        """How many numbers this rank keeps as optimizer state."""
        states = self.optimizer.state.values()
        return sum(v.numel() for state in states for v in state.values() if torch.is_tensor(v) and v.dim())


def assert_same(module, expected, **tolerance):
    state = module.state_dict()  # waits for what is under way
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True, foreach=True),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, centered=True),
}


def hold_to_one_process(make, *, group=None, steps=6, **options):
    """Train both, with clipping and micro-batches, and compare the parameters after every step."""
    ours = DistributedRun(everything(), make, group, **options)
    theirs = OneProcess(everything(), make, dist.get_world_size(group))
    for step in range(steps):
        how = {"max_norm": 0.3 if step % 2 else None, "micro_batches": 1 + (step == 4)}
        norm, expected = ours.step(step, **how), theirs.step(step, **how)
        if expected is not None:
            torch.testing.assert_close(norm, expected)
        if step % 3 == 2:
            assert_same(ours.wrapper, theirs.module)
    assert_same(ours.module, theirs.module)
    return ours, theirs
