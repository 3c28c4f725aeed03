"""Steps in which one rank alone fails, where each rank has a shard: of gradients, of parameters, or of both."""

import random

import pytest
import torch
import torch.distributed as dist

from failing import WAYS, FailingNet, Switch, fail
from one_process import mean_gradients, seeded, square
from ppe_ddp import DistributedDataParallel, DistributedOptimizer
from ppe_ddp.engine.zero.shard_collectives import ReduceScatter
from ppe_ddp.engine.zero.shards import Rows
from ppe_ddp.megatron import DistributedDataParallel as MegatronDDP
from ppe_ddp.megatron import DistributedDataParallelConfig
from ppe_ddp.optim.master_weights import FlatStep
from ppe_ddp.waiting import probe

LEARNING_RATE = 0.05


class Sometimes(FailingNet):
    """Leaves out the middle layer in some forwards: nothing waits for its parameters then."""

    leaves_out = False

    def forward(self, x):
        if not self.leaves_out:
            return super().forward(x)
        kept = self.layers
        self.layers = kept[::2]
        try:
            return super().forward(x)
        finally:
            self.layers = kept


def refusing(owner, name, *, comes_first=True):
    """A way in which a method refuses, before its work or after it."""

    def way(patches, switch):
        plain = getattr(owner, name)

        def refuse(*arguments, **keywords):
            if comes_first:
                switch.refuse()
            result = plain(*arguments, **keywords)
            if not comes_first:
                switch.refuse()
            return result

        patches.setattr(owner, name, refuse)

    return way


def in_the_wait(patches, switch):
    start = ReduceScatter.start

    class PendingScatter:
        def __init__(self, work):
            self.work = work
            self.done = probe(work)

        def wait(self):
            self.work.wait()
            switch.refuse()

    patches.setattr(
        ReduceScatter, "start", lambda *arguments, **keywords: PendingScatter(start(*arguments, **keywords))
    )


PATCHES = {
    "in_packing": refusing(Rows, "fill"),
    "before_the_scatter": refusing(ReduceScatter, "start"),
    "in_the_wait": in_the_wait,
    "in_the_update": refusing(FlatStep, "step", comes_first=False),  # the optimizer's, of this rank's shards
}
SCATTERS = ("before_the_scatter", "in_the_wait")
PLUGS = ("before", "in_the_middle", "in_the_broadcast", "in_a_sync_hook", "in_backward")


def plugged(way, patches, switch):
    """The wrapper's arguments that make it fail in this way."""
    if way in PATCHES:
        PATCHES[way](patches, switch)
        return {}
    return WAYS[way](switch)


def updated(module, expected):
    """The parameters after a step of plain SGD."""
    parameters = dict(module.named_parameters())
    return {name: parameters[name] - LEARNING_RATE * mean for name, mean in expected.items()}


def assert_parameters(module, expected):
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter, expected[name], msg=lambda text, name=name: f"{name}: {text}")


def hold_optimizer(way, *, turns=2, seed=0, overlap=False, **options):
    """Random steps in which a random rank fails in this way, and right steps of the optimizer after each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator, switch = random.Random(f"{way} {seed}"), Switch()
    with pytest.MonkeyPatch.context() as patches:
        plugs = plugged(way, patches, switch)
        sync_hook, own = plugs.pop("sync_hook", None), plugs.pop("own", None)
        module = seeded(Sometimes, None)
        wrapper = DistributedDataParallel(module, bucket_cap_mb=4e-5, **plugs, **options)
        if sync_hook is not None:
            wrapper.register_comm_hook(sync_hook)
        optimizer = DistributedOptimizer(torch.optim.SGD, wrapper, overlap=overlap, lr=LEARNING_RATE)

        def update(model, _rank):
            square(model, rank)
            optimizer.step()

        for turn in range(turns):
            culprit = generator.randrange(size)
            calls = 1 if way in ("in_a_sync_hook", "in_the_broadcast", "in_the_update") else 2
            call = generator.randrange(calls)
            # of a failing step right after an optimizer's, whose parameters may still be under way
            module.leaves_out, module.switch = turn % 2 == 1, own
            switch.left = call if rank == culprit else -1
            fail(wrapper, way, culprit, update if way == "in_the_update" else square)
            switch.left, module.switch = -1, None
            if way == "in_the_update":  # each rank has its own parameters, until a step
                optimizer.zero_grad()
                update(wrapper, rank)
            for leaves_out in (False, turn % 3 == 1):
                module.leaves_out = leaves_out
                optimizer.zero_grad()
                optimizer.synchronize()
                expected = {
                    name: torch.zeros(()) if mean is None else mean
                    for name, mean in mean_gradients(module, square).items()
                }
                wanted = updated(module, expected)
                square(wrapper, rank)
                optimizer.step()
                if not leaves_out:
                    assert_parameters(module, wanted)
            optimizer.zero_grad()
        optimizer.synchronize()
        assert_parameters(module, wanted)


def hold_megatron(way, *, turns=2, seed=0, sharded=False, **options):
    """The same over Megatron's buffers; with shards of them that an optimizer updates, or without."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator, switch = random.Random(f"{way} {seed}"), Switch()
    with pytest.MonkeyPatch.context() as patches:
        plugs = plugged(way, patches, switch)
        own = plugs.pop("own", None)
        module = seeded(FailingNet, None)
        config = DistributedDataParallelConfig(bucket_size=1, use_distributed_optimizer=sharded, **options)
        wrapper = MegatronDDP(None, config, module, **plugs)
        optimizer = DistributedOptimizer(torch.optim.SGD, wrapper, lr=LEARNING_RATE) if sharded else None
        calls = 3 if config.overlap_grad_reduce and way != "in_the_update" else 1

        def step(model, _rank, *, updates=way == "in_the_update"):
            model.zero_grad_buffer()
            square(model, rank)
            model.finish_grad_sync()
            if updates:
                optimizer.step()

        for _ in range(turns):
            culprit = generator.randrange(size)
            call = generator.randrange(calls)
            switch.left = call if rank == culprit else -1
            module.switch = own
            fail(wrapper, way, culprit, step)
            switch.left, module.switch = -1, None
            one = torch.ones(1)
            dist.all_reduce(one)  # of the user's own
            assert one.item() == size
            if way == "in_the_update":  # each rank has its own parameters, until a step
                step(wrapper, rank)
            for _ in range(2):
                expected = mean_gradients(module, square)
                wanted = updated(module, expected)
                step(wrapper, rank, updates=False)
                if optimizer is None:
                    assert_main_gradients(module, expected)
                else:
                    optimizer.step()
                    assert_parameters(module, wanted)


def assert_main_gradients(module, expected):
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(parameter.main_grad, expected[name])
