"""Steps in which one rank alone fails, and checks of what all ranks see, for any backend and launcher."""

import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from one_process import assert_gradients, data, mean_gradients, seeded
from ppe_ddp import DistributedDataParallel, PeerAbortedError, average, broadcast, overlapped
from ppe_ddp.engine import flight

SECONDS = 5.0  # for a rank to hear of it; the groups' timeouts are longer


class Refused(Exception):
    """The error that is raised on the failing rank."""


class Switch:
    """Makes this rank fail, at a given call from then on."""

    def __init__(self):
        self.left = -1

    def refuse(self):
        self.left -= 1
        if self.left == -1:
            raise Refused("not today")


class Net(nn.Module):
    """Three buckets, and a buffer that is broadcast."""

    def __init__(self, switch):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("count", torch.zeros(3))
        self.switch = switch

    def forward(self, x):
        for layer in self.layers:
            x = Fuse.apply(torch.tanh(layer(x)), self.switch)
        return x


class Fuse(torch.autograd.Function):
    """Passes through, and may fail in backward."""

    @staticmethod
    def forward(ctx, x, switch):
        ctx.switch = switch
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.switch is not None:
            ctx.switch.refuse()
        return gradient, None


def blocking(gradients, group):
    for gradient in gradients:
        dist.all_reduce(gradient, group=group)
        gradient.div_(dist.get_world_size(group))


def before(switch):
    def reduce(gradients, group):
        switch.refuse()
        blocking(gradients, group)

    return {"reduce_function": reduce}


def after(switch):
    def reduce(gradients, group):
        blocking(gradients, group)
        switch.refuse()

    return {"reduce_function": reduce}


def in_the_middle(switch):
    """Fails between two collectives of one bucket."""

    def reduce(gradients, group):
        for gradient in gradients:
            switch.refuse()
            dist.all_reduce(gradient, group=group)
            gradient.div_(dist.get_world_size(group))

    return {"reduce_function": reduce}


def on_a_thread(switch):
    return {"reduce_function": overlapped(before(switch)["reduce_function"])}


def in_the_wait(switch):
    """Fails where the result is waited for: when the vote has left."""

    class Pending:
        def __init__(self, work):
            self.work = work

        def wait(self):
            self.work.wait()
            switch.refuse()

    return {"reduce_function": lambda gradients, group: Pending(average(gradients, group))}


def in_the_broadcast(switch):
    """Of buffers, after all."""

    def send(tensors, group):
        switch.refuse()
        return broadcast(tensors, group)

    return {"broadcast_function": send}


def in_a_sync_hook(switch):
    return {"sync_hook": lambda _wrapper: switch.refuse()}


def in_packing(switch):
    fill = flight._fill

    def refuse(*arguments):
        switch.refuse()
        fill(*arguments)

    return {"patch": refuse}


def in_backward(switch):
    return {"own": switch}


WAYS = {
    way.__name__: way
    for way in (
        before,
        after,
        in_the_middle,
        on_a_thread,
        in_the_wait,
        in_the_broadcast,
        in_a_sync_hook,
        in_packing,
        in_backward,
    )
}
# Where the other ranks may have what they need already: they go on, and are in step with the one that has failed.
LATE = ("in_the_wait", "in_the_broadcast")


def square(model, rank):
    model(data(5, 4, rank=rank)).pow(2).sum().backward()


def wrapped(way, switch, **options):
    plugs = WAYS[way](switch)
    sync_hook = plugs.pop("sync_hook", None)
    patch, own = plugs.pop("patch", None), plugs.pop("own", None)
    module = seeded(Net, None)
    expected = mean_gradients(module, square)
    module.switch = own
    wrapper = DistributedDataParallel(module, bucket_cap_mb=4e-5, **plugs, **options)
    if sync_hook is not None:
        wrapper.register_comm_hook(sync_hook)
    return wrapper, expected, patch


def hold(way, *, turns=8, seed=0, **options):
    """Random steps in which a random rank fails in this way, and right ones after each."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator, switch = random.Random(f"{way} {seed}"), Switch()
    wrapper, expected, patch = wrapped(way, switch, **options)
    with pytest.MonkeyPatch.context() as patches:
        if patch is not None:
            patches.setattr(flight, "_fill", patch)
        for _ in range(turns):
            culprit = generator.randrange(size)
            call = 0 if way in ("in_a_sync_hook", "in_the_broadcast") else generator.randrange(3)
            switch.left = call if rank == culprit else -1
            wrapper.zero_grad()
            fail(wrapper, way, culprit)
            switch.left = -1
            one = torch.ones(1)
            if way != "in_backward":  # of which the others hear at this rank's next forward
                dist.all_reduce(one)  # of the user's own
                assert one.item() == size
            for _ in range(generator.randrange(1, 3)):
                wrapper.zero_grad()
                square(wrapper, rank)
                assert_gradients(wrapper.module, expected)


def fail(wrapper, way, culprit):
    """One step in which rank `culprit` fails."""
    rank, start = dist.get_rank(), time.monotonic()
    if rank == culprit:
        with pytest.raises(Refused, match="not today"):
            square(wrapper, rank)
        return
    try:
        square(wrapper, rank)
    except PeerAbortedError as error:
        text = str(error)
        assert f"rank {culprit} " in text, text
        if way not in ("in_backward", "in_a_sync_hook"):  # which say it in the vote
            assert "Refused: not today" in text, text
    else:
        assert way in LATE
    assert time.monotonic() - start < SECONDS
