"""Weighted means, held to one process that has all samples; for any backend and launcher."""

import random
from fnmatch import fnmatchcase

import torch
import torch.distributed as dist
from torch import nn

from law_models import Recipe, losses
from one_process import Routes, assert_gradients, assert_same_on_all_ranks, data, dense, gradients, seeded
from ppe_ddp import DistributedDataParallel, DistributedOptimizer, weigh

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


def mean_where_used(ranks, used):
    """The mean of each rank's sums by name, over the ranks that have any where the name fits ``used``.

    Args:
        ranks: Of each, how much it counts, and its gradients times counts by name.
        used: Patterns, or True.
    """
    means = {}
    for name in ranks[0][1]:
        present = [(count, table[name]) for count, table in ranks if count and table[name] is not None]
        is_used = used is True or any(fnmatchcase(name, pattern) for pattern in used or ())
        total = sum(count for count, _ in (present if is_used else ranks))
        means[name] = sum(gradient for _, gradient in present) / total if present else None
    return means


def accumulated(twin, recipe, step, rank, counts):
    """The gradients of one rank's backwards by name, each times its count."""
    tables = []
    for k, count in enumerate(counts):
        twin.zero_grad()
        run(twin, recipe, step, rank, k).backward()
        tables.append((count, gradients(twin)))
    sums = {}
    for name, _ in twin.named_parameters():
        present = [count * dense(table[name]) for count, table in tables if table[name] is not None]
        sums[name] = sum(present) if present else None
    return sums


def hold_random_model(seed, *, weighs=True, used=False, plug=None, **options):
    """A random dynamic model; each rank has backwards of its own, most of them in `no_sync()`, or none."""
    draw, rank, size = random.Random(f"weights {seed}"), dist.get_rank(), dist.get_world_size()
    recipe = Recipe.random(seed) if weighs else Recipe.random(seed, dtypes=(torch.float64,))
    module, twin = recipe.build(), recipe.build()
    options |= {"reduce_function": own_average} if plug == "function" else {}
    wrapper = DistributedDataParallel(module, broadcast_buffers=False, average_where_used=used, **options)
    if plug == "hook":
        wrapper.register_comm_hook(None, allreduce_hook)
    elif plug is not None and plug != "function":
        wrapper.register_comm_hook(plug)
    for step in range(4):
        counts = [[draw.choice(COUNTS) if weighs else 1 for _ in range(draw.randint(0, 3))] for _ in range(size)]
        tables = [accumulated(twin, recipe, step, other, own) for other, own in enumerate(counts)]
        wrapper.zero_grad()
        for k, count in enumerate(counts[rank]):
            loss = run(wrapper, recipe, step, rank, k)
            wrapper.require_backward_grad_sync = k == len(counts[rank]) - 1
            (weigh(loss, count) if weighs else loss).backward()
        wrapper.require_backward_grad_sync = True
        if not counts[rank]:
            wrapper.finish_grad_sync()
        divisors = [sum(own) if weighs else 1 for own in counts]
        if any(divisors):
            expected = mean_where_used(list(zip(divisors, tables, strict=True)), used)
            assert_gradients(module, expected, **(CLOSE if weighs else EXACT))
        assert_same_on_all_ranks(module)


def own_average(bucket, group):
    """A reduce function of the user's."""
    dist.all_reduce(bucket.buffer(), group=group)
    bucket.buffer().div_(dist.get_world_size(group))


def allreduce_hook(_, bucket):
    """A communication hook of torch's kind."""
    flat = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(flat, async_op=True).get_future().then(lambda done: done.value()[0])


def hold_optimizer(*, weighs, steps=4, **options):
    """A model whose layers each rank uses at times, with a `DistributedOptimizer`, trains as one process does."""
    rank, size = dist.get_rank(), dist.get_world_size()
    one, module = (seeded(Routes, 4, 5).double() for _ in range(2))
    wrapper = DistributedDataParallel(module, average_where_used=["layers.[0-3].*"], bucket_cap_mb=1e-4, **options)
    optimizer = DistributedOptimizer(torch.optim.SGD, wrapper, lr=0.1)
    plain = torch.optim.SGD(one.parameters(), lr=0.1)
    for step in range(steps):
        draw = random.Random(f"ways {step}")
        ways = [draw.sample(range(5), draw.randint(1, 4)) for _ in range(size)]
        counts = [draw.randint(0, 5) if weighs else 1 for _ in range(size)]
        batches = [data(3, 4, rank=other, step=step, dtype=torch.float64) for other in range(size)]
        ranks = []
        for count, way, batch in zip(counts, ways, batches, strict=True):
            plain.zero_grad()
            (count * one(batch, way).pow(2).mean()).backward()
            ranks.append((count, gradients(one)))
        for name, mean in mean_where_used(ranks, ["layers.[0-3].*"]).items():
            one.get_parameter(name).grad = mean
        loss = wrapper(batches[rank], ways[rank]).pow(2).mean()
        optimizer.zero_grad()
        (weigh(loss, counts[rank]) if weighs else loss).backward()
        optimizer.step()
        plain.step()
        for mine, expected in zip(module.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(mine, expected, **EXACT)


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


def hold_training(*, steps=20, dtype=torch.float64, **options):
    """Steps give the parameters of one process that has trained on all samples."""
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
        torch.testing.assert_close(mine, expected, **EXACT)
