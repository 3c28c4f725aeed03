"""One training run for every integration: each rank on another branch at every step, one layer never used.

`trained_alone` is the same run in one process, without the tool.
"""

import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

RANKS = 2


class RoutedNet(nn.Module):
    """Two branches that the input chooses from, and one that no input ever takes."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, index):
        i = int(index)
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i))
        return self.head(self.branches[(i // RANKS + i) % 2](self.stem(x).relu()))

    def loss(self, index):
        return self(index).pow(2).mean()


def made():
    """The module as every run begins with it."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return RoutedNet()


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def indices(count):
    """What a rank of several sees in turn."""
    return [RANKS * step + dist.get_rank() for step in range(count)]


def items_of(index):
    """What a loss stands for, from none to four."""
    return (3 * int(index) + 1) % 5


def trained_alone(count, *, accumulated=1, clip=None, items=lambda _: 1):
    """The parameters after `count` micro-batches on each rank, of `items` each; `accumulated` of them are one step."""
    module = made()
    optimizer = sgd(module)
    for step in range(0, count, accumulated):
        optimizer.zero_grad()
        some = [i for i in range(RANKS * step, RANKS * (step + accumulated)) if items(i)]
        for i in some:
            (module.loss(i) * items(i) / sum(map(items, some))).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return module.state_dict()


def assert_trained(module, expected):
    """`module` has the parameters `expected`, and nothing was ever done to the layer that nobody used."""
    torch.testing.assert_close(dict(module.state_dict()), dict(expected), rtol=1e-5, atol=1e-6)
    assert all(parameter.grad is None for parameter in module.branches[2].parameters())


class Counter:
    """A communication hook of torch's kind, which counts synchronized backwards."""

    def __init__(self):
        self.steps = 0

    def __call__(self, _, bucket):
        self.steps += bucket.is_last()
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])


@contextmanager
def started_by_torchrun():
    """The environment that torchrun gives this rank, in which tools look for their place."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    given |= {"GROUP_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "test"}
    kept = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
