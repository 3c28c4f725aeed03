"""Weighted means, held to one process that has all samples; for any backend and launcher."""

import random

import torch
import torch.distributed as dist
from torch import nn

from law_models import Recipe, losses
from one_process import assert_gradients, assert_same_on_all_ranks, data, dense, gradients, seeded
from ppe_ddp import DistributedDataParallel, weigh

COUNTS = [0, 1, 3, 5, 64, 4097]
EXACT = {"rtol": 1e-12, "atol": 1e-12}
CLOSE = {"rtol": 2e-6, "atol": 2e-6}


def weighted_mean(tables):
    """The mean of pairs of a count and gradients by name: None where there are none."""
    total = sum(count for count, _ in tables)
    means = {}
    for name in tables[0][1]:
        present = [count * dense(table[name]) for count, table in tables if table[name] is not None]
        means[name] = sum(present) / total if present else None
    return means


def hold_random_model(seed, **options):
    """A random dynamic model; each rank has backwards of its own, most of them in `no_sync()`, or none."""
    draw, rank, size = random.Random(f"weights {seed}"), dist.get_rank(), dist.get_world_size()
    recipe = Recipe.random(seed)
    module, twin = recipe.build(), recipe.build()
    wrapper = DistributedDataParallel(module, broadcast_buffers=False, **options)
    for step in range(4):
        counts = [[draw.choice(COUNTS) for _ in range(draw.randint(0, 3))] for _ in range(size)]
        twin.zero_grad()
        tables = [(0, gradients(twin))]
        for other, own in enumerate(counts):
            for k, count in enumerate(own):
                twin.zero_grad()
                if any(own):  # else nothing of them is taken
                    run(twin, recipe, step, other, k).backward()
                tables.append((count, gradients(twin)))
        wrapper.zero_grad()
        for k, count in enumerate(counts[rank]):
            loss = weigh(run(wrapper, recipe, step, rank, k), count)
            wrapper.require_backward_grad_sync = k == len(counts[rank]) - 1
            loss.backward()
        wrapper.require_backward_grad_sync = True
        if not counts[rank]:
            wrapper.finish_grad_sync()
        if any(map(sum, counts)):
            assert_gradients(module, weighted_mean(tables), **CLOSE)
        assert_same_on_all_ranks(module)


def run(model, recipe, step, rank, forward):
    return sum(losses(model(recipe.batch(step, rank, forward), recipe.path(step, rank, forward))))


class Text(nn.Module):
    """A text and an image tower; a batch has images or not."""

    def __init__(self, dtype):
        super().__init__()
        self.text, self.image, self.head = (nn.Linear(4, 4, dtype=dtype) for _ in range(3))

    def forward(self, text, image):
        hidden = self.text(text)
        if image is not None:
            hidden = hidden + self.image(image)
        return self.head(hidden.tanh()).pow(2).mean(-1)


def samples(rank, step, dtype):
    """Text and images of a batch: from none to six samples, images on some ranks."""
    count = (5 * rank + 3 * step) % 7
    text, image = data(2, count, 4, rank=rank, step=step, dtype=dtype)
    return text, image if (rank + step) % 2 else None


def hold_training(dtype, tolerance, *, steps=50, **options):
    """Fifty steps give the parameters of one process that has trained on all samples."""
    rank, size = dist.get_rank(), dist.get_world_size()
    one, module = seeded(Text, dtype), seeded(Text, dtype)
    wrapper = DistributedDataParallel(module, **options)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, wrapper)]
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        every = [one(*samples(other, step, dtype)) for other in range(size)]
        torch.cat(every).mean().backward()
        own = wrapper(*samples(rank, step, dtype))
        weigh(own.mean(), len(own)).backward()  # NaN where there are none
        for optimizer in optimizers:
            optimizer.step()
    for mine, expected in zip(module.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, **tolerance)
