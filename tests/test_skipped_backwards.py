"""Skipped backwards: every rank warns where one is a step behind, and none where all is right."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import test_megatron_graphs as graphs
from library_warnings import library_warnings
from one_process import data, mlp, seeded
from ppe_ddp import DisagreementError, DistributedDataParallel, PeerAbortedError
from rank_tests import on_three_ranks, on_two_ranks
from test_graphs_broken import Broken, Fuse

OUT_OF_STEP = "rank 0 is at mask of step {0}, rank 1 is at a comparison of parameters after step {1}, rank 2 is at mask"


def wrap(**options):
    return DistributedDataParallel(seeded(mlp, 3, 4, 2), **options)


def backward(wrapper, *, blows=False):
    Fuse.apply(wrapper(data(4, 3)), blows).sum().backward()


def raises_above_the_outputs(wrapper):
    with pytest.raises(Broken):
        backward(wrapper, blows=True)


def skips(wrapper):
    wrapper(data(4, 3)).sum()


def let_the_others_end(wrapper):
    """One synchronization for the others' last backward, which this rank is behind with."""
    wrapper.finish_grad_sync()


def hold(loses_step, wrapper, steps=4):
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    with library_warnings() as seen:
        if rank == last:
            loses_step(wrapper)
        for _ in range(steps - (rank == last)):
            backward(wrapper)
        if rank == last:
            let_the_others_end(wrapper)
    (text,) = seen
    counts = ", ".join(f"rank {other}: {int(other == last)}" for other in range(last + 1))
    assert text.startswith(f"rank {rank}: the ranks may be averaging gradients of different steps")
    assert f"({counts})" in text


@pytest.mark.parametrize("options", [{}, {"overlap": False}], ids=["overlap", "after"])
@pytest.mark.parametrize("loses_step", [raises_above_the_outputs, skips])
@on_three_ranks
def test_a_comparison_of_parameters_tells_that_a_rank_is_behind(loses_step, options):
    rank, wrapper = dist.get_rank(), wrap(**options)
    backward(wrapper)
    wrapper.check_in_sync()
    done = wrapper._reducer.groups.step  # a wrapper of before may have had these groups
    if rank == 1:
        loses_step(wrapper)
    with pytest.raises(DisagreementError, match=OUT_OF_STEP.format(done + 1, done)):
        wrapper.check_in_sync() if rank == 1 else backward(wrapper)
    wrapper.zero_grad()
    backward(wrapper)
    wrapper.check_in_sync()


@on_two_ranks
def test_a_rank_that_has_run_out_of_batches_goes_through_no_forwards():
    """As in the loop of a GAN, whose discriminator sees what the generator makes, detached."""
    wrapper = wrap()
    with library_warnings() as seen:
        for _ in range(2):
            with wrapper.join():
                for _ in range(2 + 4 * (dist.get_rank() == 0)):
                    wrapper(data(4, 3)).detach()
                    backward(wrapper)
        for _ in range(3):
            backward(wrapper)
    assert seen == []


@pytest.mark.parametrize("options", [{}, {"overlap": False}], ids=["overlap", "after"])
@pytest.mark.parametrize("loses_step", [raises_above_the_outputs, skips])
@on_two_ranks
def test_one_rank_goes_on_without_a_backward(loses_step, options):
    hold(loses_step, wrap(**options))


@on_two_ranks
def test_over_buffers_of_megatron():
    rank = dist.get_rank()
    wrapper = graphs.wrap(overlap_grad_reduce=True)
    with library_warnings() as seen:
        if rank == 1:
            graphs.loss(wrapper, rank, 0, taken=[0])
        for step in range(3):
            graphs.loss(wrapper, rank, step, taken=[0]).backward()
            wrapper.finish_grad_sync()
    (text,) = seen
    assert "(rank 0: 0, rank 1: 1)" in text


def evaluates(wrapper):
    wrapper.eval()
    wrapper(data(4, 3))
    wrapper.train()
    backward(wrapper)


def evaluates_without_gradients(wrapper):
    with torch.no_grad():
        wrapper(data(4, 3))
    backward(wrapper)


def sums_forwards(wrapper):
    sum(wrapper(data(4, 3)).sum() for _ in range(3)).backward()


def accumulates(wrapper):
    with wrapper.no_sync():
        for _ in range(3):
            backward(wrapper)
        wrapper(data(4, 3))
    backward(wrapper)


def only_synchronizes(wrapper):
    wrapper.finish_grad_sync()


def synchronizes_instead_of_its_backward(wrapper):
    loss = wrapper(data(4, 3)).sum()
    wrapper.finish_grad_sync()
    del loss


def differentiates_inputs(wrapper):
    x = data(4, 3).requires_grad_()
    torch.autograd.grad(wrapper(x).sum(), x)
    backward(wrapper)


def computes_twice(wrapper):
    x = data(4, 3).requires_grad_()
    checkpoint(wrapper, x, use_reentrant=False).sum().backward()


LEGAL = [
    evaluates,
    evaluates_without_gradients,
    sums_forwards,
    accumulates,
    only_synchronizes,
    synchronizes_instead_of_its_backward,
    differentiates_inputs,
    computes_twice,
]


@pytest.mark.parametrize("step", LEGAL)
@on_two_ranks
def test_what_one_rank_may_do_alone(step):
    wrapper = wrap()
    with library_warnings() as seen:
        for _ in range(4):
            (step if dist.get_rank() else backward)(wrapper)
    assert seen == []


def fails_between_two_forwards(first, second, *, blows):
    between = Fuse.apply(first(data(4, 3)), blows).sum()
    second(data(4, 3) * between).sum().backward()


@pytest.mark.parametrize("before", [evaluates_without_gradients, skips])
@pytest.mark.parametrize("wrappers", [1, 2])
@on_two_ranks
def test_a_step_that_fails_before_it_reaches_a_forward(wrappers, before):
    first = wrap()
    second = wrap() if wrappers == 2 else first
    with library_warnings() as seen:
        for step in range(5):
            before(first)
            with pytest.raises((Broken, PeerAbortedError)) if step == 1 else contextlib.nullcontext():
                fails_between_two_forwards(first, second, blows=step == 1 and dist.get_rank() == 0)
    assert seen == []


@on_two_ranks
def test_a_skipped_backward_counts_though_the_next_one_fails():
    wrapper, rank = wrap(), dist.get_rank()
    with library_warnings() as seen:
        if rank:
            skips(wrapper)
        for step in range(4 - rank):
            with pytest.raises((Broken, PeerAbortedError)) if step == 0 else contextlib.nullcontext():
                fails_between_two_forwards(wrapper, wrapper, blows=rank == 1 and step == 0)
        if rank:
            let_the_others_end(wrapper)
    (text,) = seen
    assert "(rank 0: 0, rank 1: 1)" in text


@on_two_ranks
def test_what_all_ranks_do():
    wrapper = wrap()
    with library_warnings() as seen:
        for _ in range(4):
            skips(wrapper)
            loss = wrapper(data(4, 3)).sum()
            loss.backward(retain_graph=True)
            loss.backward()
    assert seen == []


@on_two_ranks
def test_join():
    wrapper = wrap()
    with library_warnings() as seen, wrapper.join():
        for _ in range(2 + 3 * dist.get_rank()):
            backward(wrapper)
    assert seen == []


def test_a_graph_that_is_kept_may_still_have_its_backward():
    from ppe_ddp.engine.grad_hooks import ForwardCounter

    forwards, layer = ForwardCounter(), nn.Linear(2, 2)

    def forward():
        output = layer(torch.ones(2))
        forwards.watch([output], lambda: None, counts=True)
        return output

    first, second = forward(), forward()
    second.sum().backward()
    assert forwards.count_dropped() == 0
    first.sum().backward()
    del first, second
    assert forwards.count_dropped() == 0
    forward()
    assert forwards.count_dropped() == 1
    forward()
    forwards.excuse(dropped=True)
    assert forwards.count_dropped() == 1
