"""A rank is lost, or fails alone, where all get what they start from: the others are told of it, and by name."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import test_megatron_graphs as graphs
from failing import SECONDS, Refused
from one_process import assert_gradients, mean_gradients, mlp, seeded, square
from ppe_ddp import CommunicationError, DistributedDataParallel, PeerAbortedError, broadcast
from ppe_ddp.engine.groups import Groups
from ppe_ddp.testing import RankError, Ranks
from rank_tests import on_three_ranks


def interrupt(*_, **__):
    raise KeyboardInterrupt


def of_the_others(tensors, group):
    return broadcast(tensors, group)


def before_it_sends(tensors, group):
    os._exit(9)


def when_it_has_sent(tensors, group):
    broadcast(tensors, group).wait()
    os._exit(9)


def start(culprit, function):
    """Wrap a module; the error that this rank gets, if it is not the one that is lost."""
    begin, is_culprit = time.monotonic(), dist.get_rank() == culprit
    with pytest.raises(CommunicationError) as caught:
        DistributedDataParallel(nn.Linear(300, 300), broadcast_function=function if is_culprit else of_the_others)
    assert time.monotonic() - begin < SECONDS
    assert caught.value.ranks == (culprit,), caught.value
    raise caught.value


@pytest.mark.parametrize(("culprit", "function"), [(0, before_it_sends), (1, when_it_has_sent)])
def test_a_rank_that_is_lost_is_named(culprit, function):
    with Ranks(3, timeout=120) as ranks, pytest.raises(RankError) as caught:
        ranks.run(start, culprit, function, grace=SECONDS)
    found = caught.value.exceptions
    assert sorted(found) == [rank for rank in range(3) if rank != culprit]
    for error in found.values():
        assert isinstance(error, CommunicationError), error
        assert f"rank {culprit}, which has died" in str(error)


@on_three_ranks
def test_one_rank_fails_in_its_broadcast_function():
    rank, module = dist.get_rank(), seeded(mlp, 4, 2)
    mean = mean_gradients(module, square)
    for culprit in range(3):

        def send(tensors, group, culprit=culprit):
            if rank == culprit:
                raise Refused("not today")
            return broadcast(tensors, group)

        begin = time.monotonic()
        if rank == culprit:
            with pytest.raises(Refused):
                DistributedDataParallel(module, broadcast_function=send)
        else:
            text = rf"rank {culprit} failed where all ranks get the parameters of rank 0: Refused: not today"
            with pytest.raises(PeerAbortedError, match=text):
                DistributedDataParallel(module, broadcast_function=send)
        assert time.monotonic() - begin < SECONDS
        wrapper = DistributedDataParallel(module)
        wrapper.zero_grad()
        square(wrapper, rank)
        assert_gradients(module, mean)


@pytest.mark.parametrize("place", ["ppe_ddp.engine.negotiation.Negotiation.check", "ppe_ddp.ddp.broadcast_all"])
@on_three_ranks
def test_one_rank_is_interrupted_in_its_start(place):
    rank, module = dist.get_rank(), seeded(mlp, 4, 2)
    mean, begin = mean_gradients(module, square), time.monotonic()
    with pytest.MonkeyPatch.context() as patches:
        if rank == 1:
            patches.setattr(place, interrupt)
        with pytest.raises(KeyboardInterrupt if rank == 1 else PeerAbortedError) as caught:
            DistributedDataParallel(module)
    assert time.monotonic() - begin < SECONDS
    assert rank == 1 or caught.value.rank == 1
    wrapper = DistributedDataParallel(module)
    wrapper.zero_grad()
    square(wrapper, rank)
    assert_gradients(module, mean)


@on_three_ranks
def test_one_rank_fails_between_the_broadcast_and_the_others():
    """Of Megatron's wrapper, whose parameters are broadcast when it is told to."""
    rank, model = dist.get_rank(), graphs.wrap()
    await_start = Groups.await_start

    def refuse(groups):
        if rank == 2:
            raise Refused("not today")
        await_start(groups)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Groups, "await_start", refuse)
        with pytest.raises(Refused if rank == 2 else PeerAbortedError, match="not today"):
            model.broadcast_params()
    graphs.loss(model, rank, 0, taken=[rank]).backward()
    model.finish_grad_sync()
    graphs.hold(model, graphs.mean_of(model.module, *((r, 0, {"taken": [r]}) for r in range(3))))
    model.broadcast_params()
    assert torch.isfinite(model.module.unused).all()
