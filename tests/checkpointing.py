"""A training that depends on everything that a checkpoint has to keep, and the faults of a disk."""

import contextlib
import errno
import os
import random
import resource
import signal
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from ppe_ddp import Checkpointer, DistributedDataParallel, DistributedOptimizer
from ppe_ddp.compression import DiLoCo, ErrorFeedback, Sign


class NoisyRoutes(nn.Module):
    """Another path in each step on each rank, by Python's numbers; noise by NumPy's, dropout by torch's; a buffer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 40)
        self.branches = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))
        self.norm = nn.BatchNorm1d(40)
        self.head = nn.Linear(40, 3)
        self.never = nn.Linear(5, 5)  # an optimizer has no state of it

    def forward(self, x):
        x = self.stem(x) + float(np.random.rand())
        x = nn.functional.dropout(x + self.branches[random.randrange(4)](x), 0.3)
        return self.head(self.norm(x).relu())


class NoisyTraining:
    """A model, its optimizer and a schedule, all from a seed; on each rank with random numbers of its own."""

    def __init__(
        self, folder, seed=0, *, sharded=False, compressed=False, outer=0, inside=False, group=None, **options
    ):
        torch.manual_seed(seed)
        self.model = DistributedDataParallel(NoisyRoutes(), process_group=group, bucket_cap_mb=2e-3)
        if compressed:
            self.model.register_comm_hook(ErrorFeedback(Sign()))
        plain = torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.1)
        self.optimizer = DistributedOptimizer(plain, self.model) if sharded else plain
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        own = 1000 * seed + dist.get_rank()
        for set_seed in (random.seed, np.random.seed, torch.manual_seed):
            set_seed(own)
        saved = nn.ModuleDict({"net": self.model}) if inside else self.model
        parts = {"model": saved, "optimizer": self.optimizer, "schedule": self.schedule}
        if outer:  # inner steps to each outer one, with moments and, between them, parameters of its own on each rank
            parts["outer"] = DiLoCo(self.model, plain, every=outer, lr=0.9)
        self.checkpointer = Checkpointer(folder, parts, process_group=group, **options)

    def step(self, count=1):
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(torch.randn(8, 6)).square().mean().backward()
            self.optimizer.step()
            self.schedule.step()

    def bits(self):
        """All that the training has come to: parameters, buffers, learning rate, and what would come next."""
        state = [tensor.detach().clone() for tensor in self.model.state_dict().values()]
        chance = (random.random(), float(np.random.rand()), torch.rand(1).item())
        return state, self.schedule.get_last_lr(), chance


def same(ours, theirs):
    return all(map(torch.equal, ours[0], theirs[0])) and ours[1:] == theirs[1:]


@contextlib.contextmanager
def failing(patch, module, name, on_call):
    """Let a function of the system fail at one of its calls."""
    calls, original = 0, getattr(module, name)

    def call(*arguments, **keywords):
        nonlocal calls
        calls += 1
        if calls == on_call:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(*arguments, **keywords)

    with patch.context() as inner:
        inner.setattr(module, name, call)
        yield
    assert calls >= on_call, "it was never called so often"


@contextlib.contextmanager
def full_disk(nbytes):
    """Let this process write no file that is longer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


_TOUCHING = {"open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir", "shutil.rmtree"}


def killed_at(moment, call):
    """Call in a forked process, which is killed by SIGKILL where it touches the file system for the so-manieth time.

    Returns:
        Whether it was killed; not where it has ended before.
    """
    child = os.fork()
    if child == 0:
        left = moment

        def count(event, _=None):
            nonlocal left
            if event in _TOUCHING:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        fsync = os.fsync

        def counted(descriptor):
            count("open")
            fsync(descriptor)

        code = 1
        try:
            os.fsync = counted
            sys.addaudithook(count)
            call()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False
