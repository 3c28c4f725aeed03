"""`weigh()`: the mean over all samples, whatever each rank has of them."""

import copy
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from one_process import Routes, assert_gradients, data, gradients, mlp, seeded
from ppe_ddp import (
    DisagreementError,
    DistributedDataParallel,
    DistributedOptimizer,
    PeerAbortedError,
    UnusableError,
    megatron,
    weigh,
)
from ppe_ddp.compression import ByParameter, ErrorFeedback, Int8, LocalSGD, TopK, Uncompressed, WarmUp
from ppe_ddp.engine.gradients import has_nonzero
from ppe_ddp.waiting import progress_engine
from rank_tests import each_variant, on_three_ranks, on_two_ranks
from weighing import CLOSE, hold_optimizer, hold_random_model, hold_training, weighted_mean

OPTIONS = [{}, {"bucket_cap_mb": 1e-6}, {"overlap": False}, {"gradient_as_bucket_view": False}]


@pytest.mark.parametrize("seed", range(4))
@on_three_ranks
def test_random_models(seed):
    hold_random_model(seed, shared_memory=seed in (0, 3), **OPTIONS[seed])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("weighs", [False, True], ids=["plain", "weighed"])
@on_three_ranks
def test_random_models_averaged_where_they_are_used(seed, weighs):
    plug = [None, None, None, "function", "hook", Uncompressed()][seed % 6]
    used = True if seed % 2 else ["heads.*", "*.bias"]
    shared_memory = (seed // 2 + weighs) % 2 == 0
    hold_random_model(seed, weighs=weighs, used=used, plug=plug, shared_memory=shared_memory, **OPTIONS[seed % 4])


@on_three_ranks
def test_training_is_that_of_one_process():
    for option in (False, True):
        hold_optimizer(weighs=option, shared_memory=option)
        hold_training(shared_memory=option)


def loss_of(model, rank, step=0, rows=4):
    return model(data(rows, 4, rank=rank, step=step)).pow(2).mean()


def expected(module, counts):
    """The gradients of one process that has every rank's loss, with these counts."""
    tables = []
    for rank, count in enumerate(counts):
        module.zero_grad()
        if count:
            loss_of(module, rank).backward()
        tables.append((count, gradients(module)))
    module.zero_grad()
    return weighted_mean(tables)


@each_variant
@on_two_ranks
def test_a_rank_without_samples_takes_the_averages_whatever_its_loss_is(options):
    module = seeded(mlp, 4, 5, 2)
    wrapper = DistributedDataParallel(module, **options)
    rank = dist.get_rank()
    want = expected(module, [0, 7])
    for _ in range(3):
        wrapper.zero_grad()
        weigh(loss_of(wrapper, rank) * (1 if rank else torch.nan), 7 * rank).backward()
        assert_gradients(module, want)
        wrapper.zero_grad()
        weigh(loss_of(wrapper, rank), 0).backward()
        assert all(parameter.grad is None for parameter in module.parameters())
    with wrapper.no_sync():
        weigh(loss_of(wrapper, rank) * (1 if rank else torch.nan), 7 * rank).backward()
    wrapper.finish_grad_sync()
    assert_gradients(module, want)


@on_two_ranks
def test_all_weigh_or_none():
    module = seeded(mlp, 4, 5, 2)
    wrapper = DistributedDataParallel(module)
    rank = dist.get_rank()
    with pytest.raises(DisagreementError, match=r"rank 1 weighs its loss, and rank 0 has .* without a weight"):
        (weigh(loss_of(wrapper, rank), 3) if rank else loss_of(wrapper, rank)).backward()
    wrapper.zero_grad()
    weigh(loss_of(wrapper, rank), 3 + rank).backward()
    assert_gradients(module, expected(seeded(mlp, 4, 5, 2), [3, 4]))


@on_two_ranks
def test_counts_that_cannot_be():
    for count in (-1, torch.inf, torch.nan):
        with pytest.raises(ValueError, match="finite"):
            weigh(torch.ones(()), count)
    for count, dtype in ((1e39, torch.float64), (1e-46, torch.float32), (1e5, torch.float16)):
        with pytest.raises(ValueError, match="divide the counts of all ranks"):
            weigh(torch.ones((), dtype=dtype), count)
    wrapper = megatron.DistributedDataParallel(None, megatron.DistributedDataParallelConfig(), seeded(mlp, 4, 5, 2))
    weigh(loss_of(wrapper, 0), 3).backward()
    with pytest.raises(ValueError, match="not for Megatron's wrapper"):
        wrapper.finish_grad_sync()


@on_two_ranks
def test_what_was_dropped_does_not_count():
    """A micro-batch that the user has dropped, a loss without a backward, autograd.grad, a step that has failed."""
    module = seeded(mlp, 4, 5, 2)
    want, alone = expected(module, [3, 5]), expected(module, [3, 0])
    wrapper = DistributedDataParallel(module)
    rank = dist.get_rank()
    many = 1000 * (rank + 1)

    def in_no_sync():
        with wrapper.no_sync():
            weigh(loss_of(wrapper, rank), many).backward()

    def without_a_backward():
        return weigh(loss_of(wrapper, rank), many)

    def for_inputs():
        batch = data(4, 4).requires_grad_()
        with wrapper.no_sync():
            torch.autograd.grad(weigh(wrapper(batch).sum(), many), batch)

    def failing():
        output = wrapper(data(4, 4))
        output.register_hook(lambda gradient: 1 / 0 if rank else gradient)
        with pytest.raises(ZeroDivisionError if rank else PeerAbortedError):
            weigh(output.mean(), many).backward()

    for drop in (in_no_sync, without_a_backward, for_inputs, failing):
        for set_to_none in (True, False):
            wrapper.zero_grad()
            kept = drop()
            wrapper.zero_grad(set_to_none)
            weigh(loss_of(wrapper, rank), 3 + 2 * rank).backward()
            assert_gradients(module, want)
            wrapper.zero_grad()
            kept = drop()
            wrapper.zero_grad(set_to_none)
            if rank:  # which has no backward now
                wrapper.finish_grad_sync()
            else:
                weigh(loss_of(wrapper, rank), 3).backward()
            assert_gradients(module, alone)
            del kept


@pytest.mark.parametrize("fails", [False, True])
@on_two_ranks
def test_what_was_left_out_does_not_count_in_what_has_no_weight_after_it(fails):
    """In gradients that are set by hand, and in an outer step."""
    net, rank = seeded(nn.Linear, 4, 2), dist.get_rank()
    wrapper = DistributedDataParallel(net, check_for_nan_in_grad=not fails and "skip")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def leave_out():
        output = wrapper(data(4, 4))
        if fails:
            output.register_hook(lambda gradient: 1 / 0 if rank else gradient)
        with pytest.raises((ZeroDivisionError, PeerAbortedError)) if fails else nullcontext():
            weigh(output.mean() * (torch.nan if rank else 1.0), 64).backward()
        optimizer.zero_grad()

    leave_out()
    if not fails:  # else it would be that step, taken again
        net.weight.grad = torch.full((2, 4), 1.0 + rank)
        wrapper.finish_grad_sync()
        assert torch.equal(net.weight.grad, torch.full((2, 4), 1.5))
        optimizer.zero_grad()
        leave_out()
    twin = copy.deepcopy(net)
    (twin(data(4, 4)).sum() / 2).backward()
    LocalSGD(wrapper, optimizer, every=1)
    wrapper(data(4, 4)).sum().backward()
    optimizer.step()
    for parameter, other in zip(net.parameters(), twin.parameters(), strict=True):
        changes = [other.grad.clone() for _ in range(2)]
        dist.all_gather(changes, other.grad)
        torch.testing.assert_close(parameter, other - 0.1 * sum(changes))


@on_two_ranks
def test_what_was_dropped_does_not_count_where_the_next_step_fails_before_the_ranks_are_connected_again():
    """A rank has no backward in that step, so that it is not asked what its gradients stand for."""
    module = seeded(mlp, 4, 5, 2)
    want = expected(module, [3, 5])
    wrapper = DistributedDataParallel(module)
    rank = dist.get_rank()

    def failing():
        output = wrapper(data(4, 4))
        output.register_hook(lambda gradient: gradient if rank else 1 / 0)
        weigh(output.mean(), 1000).backward()

    for step in (failing, wrapper.finish_grad_sync if rank else failing):
        with pytest.raises(PeerAbortedError if rank else ZeroDivisionError):
            step()
        wrapper.zero_grad()
    weigh(loss_of(wrapper, rank), 3 + 2 * rank).backward()
    assert_gradients(module, want)


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1e-6}, {"overlap": False}])
@on_two_ranks
def test_a_rank_without_samples_takes_the_averages_of_what_wrappers_share(options):
    first, second = seeded(mlp, 4, 5, 2), seeded(mlp, 4, 5, 2)
    second[0] = first[0]
    both, rank = nn.ModuleList([first, second]), dist.get_rank()
    wrappers = [DistributedDataParallel(module, **options) for module in both]

    def loss(models, rank):
        return sum(loss_of(model, rank) for model in models)

    loss(both, 1).backward()
    want = gradients(both)
    both.zero_grad()
    weigh(loss(wrappers, rank), 5 * rank).backward()
    assert_gradients(both, want)


@on_two_ranks
def test_a_rank_whose_losses_weigh_nothing_alone_uses_a_layer():
    """Its gradients arrive when the ranks have agreed that no rank has them."""
    module, rank = seeded(Routes, 128, 3), dist.get_rank()  # layers so large that each arrival looks for buckets
    wrapper = DistributedDataParallel(module)

    def loss(model, way):
        return model(data(3, 128, rank=0), way).pow(2).mean()

    loss(module, [0, 2]).backward()
    want = gradients(module)
    for _ in range(3):
        wrapper.zero_grad()
        wait = module.layers[2].bias.register_hook(lambda _: time.sleep(0.05 * rank))
        weigh(loss(wrapper, [0, 1, 2] if rank else [0, 2]), 1 - rank).backward()
        wait.remove()
        assert_gradients(module, want)


@pytest.mark.parametrize("options", [{}, {"negotiate_grads": False}, {"overlap": False}], ids=str)
@on_two_ranks
def test_where_no_rank_has_samples_none_has_gradients(options):
    module = seeded(mlp, 4, 2)
    wrapper = DistributedDataParallel(module, **options)
    weigh(wrapper(data(5, 4)).sum(), 0).backward()
    assert set(gradients(module).values()) == {None}
    for _ in range(2):  # rank 1 alone has samples
        wrapper.zero_grad()
        weigh(wrapper(data(5, 4)).sum(), dist.get_rank()).backward()
        own = torch.autograd.grad(module(data(5, 4, rank=1)).sum(), [*module.parameters()])
        torch.testing.assert_close([*gradients(module).values()], [*own])
    wrapper.zero_grad()
    weigh(wrapper(data(5, 4)).sum(), 0).backward()
    assert set(gradients(module).values()) == {None}


@each_variant
@on_two_ranks
def test_a_rank_whose_losses_weigh_nothing_keeps_its_gradients_if_another_one_fails(options):
    module, rank = seeded(mlp, 4, 5, 2), dist.get_rank()
    wrapper = DistributedDataParallel(module, **options)

    def fail(_):
        time.sleep(0.1)  # the other rank has come to the end of its backward
        raise ZeroDivisionError

    if not rank:
        module[0].weight.register_hook(fail)
    for _ in range(3):
        wrapper.zero_grad()
        with pytest.raises(PeerAbortedError if rank else ZeroDivisionError):
            weigh(loss_of(wrapper, rank), 1 - rank).backward()
        if rank:
            assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


@on_two_ranks
def test_a_compiled_step_of_one_wrapper_does_not_count_in_another():
    rank, counts = dist.get_rank(), [3, 5]
    modules = [seeded(mlp, 4, 5, 2), seeded(mlp, 4, 5, 2)]
    wants = [expected(modules[0], [30, 5]), expected(modules[1], counts)]
    wrappers = [DistributedDataParallel(module) for module in modules]
    step = torch.compile(lambda: weigh(loss_of(wrappers[0], rank), 30 - 25 * rank).backward(), backend="eager")
    for _ in range(2):
        for wrapper in wrappers:
            wrapper.zero_grad()
        step()
        weigh(loss_of(wrappers[1], rank), counts[rank]).backward()
        for module, want in zip(modules, wants, strict=True):
            assert_gradients(module, want)


@pytest.mark.parametrize("reason", ["NaN", "an error"])
@on_two_ranks
def test_a_step_that_all_ranks_drop_does_not_count_where_its_buckets_were_sent_in_backward(reason):
    module, rank, fails = seeded(nn.Linear, 128, 128, bias=False), dist.get_rank(), [reason == "an error"]

    tables = []
    for other, count in enumerate([3, 5]):
        module(data(4, 128, rank=other)).pow(2).mean().backward()
        tables.append((count, gradients(module)))
        module.zero_grad()

    def mean(bucket, group):
        if rank and fails.pop():
            raise MemoryError
        bucket.buffer().div_(2)
        return dist.all_reduce(bucket.buffer(), group=group, async_op=True)

    options = {"reduce_function": mean} if fails[0] else {"check_for_nan_in_grad": "skip"}
    wrapper = DistributedDataParallel(module, **options)

    def backward(count, factor):
        output = wrapper(data(4, 128, rank=rank))
        output.register_hook(lambda _: await_mask(wrapper))
        weigh(output.pow(2).mean() * factor, count).backward()

    if reason == "NaN":
        backward(1000 + rank, torch.nan if rank else 1)
        assert module.weight.grad is None
    else:
        with pytest.raises(MemoryError if rank else PeerAbortedError):
            backward(1000 + rank, 1)
    fails[:] = [False]
    wrapper.zero_grad()
    backward(3 + 2 * rank, 1)
    assert_gradients(module, weighted_mean(tables))


def await_mask(wrapper):
    backward = wrapper._reducer._backward  # without an exchange in the step after a failure, until backward is over
    assert progress_engine(os.getpid()).wait_until(lambda: backward.is_agreed, seconds=60)


@pytest.mark.parametrize("sharded", [False, True])
@on_two_ranks
def test_zeros_that_zero_grad_leaves_are_no_gradients(sharded):
    module = seeded(mlp, 4, 5, 2)
    counts, rank = [3, 5], dist.get_rank()
    wrapper = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    optimizer = DistributedOptimizer(optimizer, wrapper) if sharded else optimizer
    for without_backward in (None, 1, 1, None):
        optimizer.zero_grad(set_to_none=False)
        if rank == without_backward:
            wrapper.finish_grad_sync()
        else:
            weigh(loss_of(wrapper, rank), counts[rank]).backward()
        want = expected(seeded(mlp, 4, 5, 2), [count * (k != without_backward) for k, count in enumerate(counts)])
        if not sharded:
            assert_gradients(module, want)
        optimizer.step()
    if sharded:
        norm = torch.stack([one.norm() for one in want.values()]).norm()
        torch.testing.assert_close(optimizer.clip_grad_norm_(1e9), norm)


@on_two_ranks
def test_a_step_that_is_taken_again_has_the_weights_of_the_first_time():
    module = seeded(mlp, 4, 5, 2)
    want = expected(module, [3, 5])
    rank, fails = dist.get_rank(), [True]

    def mean(bucket, group):
        if rank and fails:
            fails.pop()
            raise MemoryError
        dist.all_reduce(bucket.buffer(), group=group)
        bucket.buffer().div_(2)

    wrapper = DistributedDataParallel(module, reduce_function=mean)
    with pytest.raises(MemoryError if rank else PeerAbortedError):
        weigh(loss_of(wrapper, rank), 3 + 2 * rank).backward()
    wrapper.finish_grad_sync()
    assert_gradients(module, want)


class Skippable(nn.Module):
    """A layer that is left out on request: a backward comes to the wrapper, and to no parameter."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1, bias=False)

    def forward(self, x, *, skips=False):
        return x.sum(1, keepdim=True) * 1.0 if skips else self.layer(x)


def weighed_ones(wrapper, count, *, skips=False):
    """The gradient of each weight is the share of the samples that were not skipped."""
    return weigh(wrapper(torch.ones(count, 4).requires_grad_(), skips=skips).mean(), count)


@on_two_ranks
def test_a_micro_batch_that_uses_no_parameter_counts():
    wrapper, rank = DistributedDataParallel(seeded(Skippable)), dist.get_rank()
    for _ in range(3):
        wrapper.zero_grad()
        with wrapper.no_sync():
            weighed_ones(wrapper, 3 if rank else 1, skips=rank == 1).backward()
        weighed_ones(wrapper, 1).backward()
        assert_gradients(wrapper.module, {"layer.weight": torch.full((1, 4), 3 / 6)})


@pytest.mark.parametrize("drops", ["another rank", "by hand", "by hand in no_sync"])
@on_two_ranks
def test_samples_that_use_no_parameter_do_not_count_when_their_step_was_dropped(drops):
    """There is no gradient that could be dropped with them."""
    wrapper, rank = DistributedDataParallel(seeded(Skippable)), dist.get_rank()
    for _ in range(2):
        wrapper.zero_grad()
        if rank == 1 and drops == "by hand in no_sync":
            with wrapper.no_sync():
                weighed_ones(wrapper, 3, skips=True).backward()
        if rank == 1 and drops != "another rank":
            wrapper.abort_grad_sync()
        else:
            loss = weighed_ones(wrapper, 3, skips=rank == 1)
            handle = wrapper.module.layer.weight.register_hook(lambda _: 1 / 0) if drops == "another rank" else None
            with pytest.raises(PeerAbortedError if drops != "another rank" or rank else ZeroDivisionError):
                loss.backward()
            if handle is not None:
                handle.remove()
        wrapper.zero_grad()
        weighed_ones(wrapper, 1, skips=rank == 0).backward()
        assert_gradients(wrapper.module, {"layer.weight": torch.full((1, 4), 1 / 2)})


@on_two_ranks
def test_samples_that_use_no_parameter_do_not_count_when_their_step_was_dropped_for_another_wrapper():
    first, second = (DistributedDataParallel(seeded(Skippable)) for _ in range(2))
    rank = dist.get_rank()
    for _ in range(2):
        for wrapper in (first, second):
            wrapper.zero_grad()
        with second.no_sync():
            weighed_ones(second, 3, skips=rank == 1).backward()
        handle = first.module.layer.weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError if rank == 0 else PeerAbortedError):
            weighed_ones(first, 1, skips=rank == 1).backward()
        handle.remove()
        torch.optim.SGD(second.parameters(), 0.1).zero_grad()
        weighed_ones(second, 1, skips=rank == 0).backward()
        assert_gradients(second.module, {"layer.weight": torch.full((1, 4), 1 / 2)})


@on_two_ranks
def test_zero_grad_of_the_wrapper_drops_samples_that_use_no_parameter():
    wrapper, rank = DistributedDataParallel(seeded(Skippable)), dist.get_rank()
    for set_to_none in (True, False, True):
        with wrapper.no_sync():
            weighed_ones(wrapper, 3, skips=rank == 1).backward()
        wrapper.zero_grad(set_to_none)
        weighed_ones(wrapper, 1, skips=rank == 0).backward()
        assert_gradients(wrapper.module, {"layer.weight": torch.full((1, 4), 1 / 2)})
        wrapper.zero_grad(set_to_none)


@on_two_ranks
def test_samples_that_use_no_parameter_count_when_their_step_is_taken_again():
    rank, fails = dist.get_rank(), [True]

    def mean(bucket, group):
        if not rank and fails:
            fails.pop()
            raise MemoryError
        dist.all_reduce(bucket.buffer(), group=group)
        bucket.buffer().div_(2)

    wrapper = DistributedDataParallel(seeded(Skippable), reduce_function=mean)
    with pytest.raises(PeerAbortedError if rank else MemoryError):
        weighed_ones(wrapper, 3 if rank else 1, skips=rank == 1).backward()
    wrapper.finish_grad_sync()
    assert_gradients(wrapper.module, {"layer.weight": torch.full((1, 4), 1 / 4)})


@pytest.mark.parametrize("use_reentrant", [True, False])
@on_two_ranks
def test_a_wrapper_inside_a_checkpoint(use_reentrant):
    module = seeded(mlp, 4, 5, 2)
    want = expected(module, [3, 5])
    wrapper = DistributedDataParallel(module)
    rank = dist.get_rank()
    for _ in range(2):
        wrapper.zero_grad()
        batch = data(4, 4).requires_grad_()
        weigh(checkpoint(wrapper, batch, use_reentrant=use_reentrant).pow(2).mean(), 3 + 2 * rank).backward()
        assert_gradients(module, want)


@on_two_ranks
def test_several_losses_wrappers_and_backwards():
    modules = [seeded(mlp, 4, 5, 2) for _ in range(2)]
    first, second = map(DistributedDataParallel, modules)
    rank = dist.get_rank()
    want = expected(modules[0], [3, 5])
    loss = sum(loss_of(wrapper, rank) for wrapper in ((first, second) if rank else (second, first)))
    weigh(loss, 3 + 2 * rank).backward()
    for module in modules:
        assert_gradients(module, want)
        module.zero_grad()
    weigh(loss_of(first, rank), 3 + 2 * rank).backward()
    with pytest.raises(UnusableError if rank else (UnusableError, PeerAbortedError), match="clear them first"):
        weigh(loss_of(first, rank), 8 - 6 * rank).backward()
    assert_gradients(modules[0], want)


@on_two_ranks
def test_beside_a_scaler_and_a_compressor():
    rank = dist.get_rank()
    want = expected(seeded(mlp, 4, 5, 2), [3, 5])
    module = seeded(mlp, 4, 5, 2)
    wrapper = DistributedDataParallel(module)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(weigh(loss_of(wrapper, rank), 3 + 2 * rank)).backward()
    assert_gradients(module, {name: 1024.0 * gradient for name, gradient in want.items()}, atol=1e-2)
    module = seeded(mlp, 4, 5, 2)
    wrapper = DistributedDataParallel(module)
    wrapper.register_comm_hook(Int8(block=8))
    weigh(loss_of(wrapper, rank), 3 + 2 * rank).backward()
    assert_gradients(module, want, rtol=5e-2, atol=5e-2)


@on_two_ranks
def test_ranks_that_have_run_out_count_for_nothing():
    module = seeded(mlp, 4, 5, 2)
    wrapper = DistributedDataParallel(module)
    rank = dist.get_rank()
    for by_all in (True, False):
        with wrapper.join(divide_by_initial_world_size=by_all):
            for step in range(1 + rank):
                want = expected(seeded(mlp, 4, 5, 2), [0 if step else 3, 5])
                wrapper.zero_grad()
                weigh(loss_of(wrapper, rank), 3 + 2 * rank).backward()
                assert_gradients(module, want, **CLOSE)


@on_two_ranks
def test_ranks_that_have_run_out_are_not_counted_where_used():
    module = seeded(mlp, 4, 5, 2)
    wrapper = DistributedDataParallel(module, average_where_used="2.*")
    rank = dist.get_rank()
    for by_all in (True, False):
        with wrapper.join(divide_by_initial_world_size=by_all):
            for step in range(1 + rank):
                tables = [gradients_of_rank(other) for other in range(step, 2)]
                wrapper.zero_grad()
                loss_of(wrapper, rank).backward()
                divisors = {name: len(tables) if name[0] == "2" or not by_all else 2 for name in tables[0]}
                want = {name: sum(table[name] for table in tables) / divisors[name] for name in tables[0]}
                assert_gradients(module, want)


@pytest.mark.parametrize("is_sharded", [False, True])
@on_two_ranks
def test_a_rank_with_an_average_from_before_counts_where_used(is_sharded):
    module = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
    wrapper = DistributedDataParallel(module, average_where_used="1.*")
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=1.0)
    optimizer = DistributedOptimizer(optimizer, wrapper) if is_sharded else optimizer
    updates = []
    for to_none, counts in ((True, [1, 1]), (False, [2, 1]), (False, [1])):
        before = module[1].weight.item()
        for step, count in enumerate(counts):
            used = module[: 1 + (dist.get_rank() == step)]  # rank `step` alone uses the second layer
            sum(layer.weight.sum() * count for layer in used).backward()
            wrapper.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
        updates.append(round(before - module[1].weight.item(), 4))
    assert updates == [1.5, 2.5, 0.5]


def gradients_of_rank(rank):
    twin = seeded(mlp, 4, 5, 2)
    loss_of(twin, rank).backward()
    return gradients(twin)


@on_two_ranks
def test_names_that_cannot_be_averaged_where_used():
    rank = dist.get_rank()
    with pytest.raises(ValueError, match=r"no name of a parameter fits 'head\.\*' \(the nearest: .*weight"):
        DistributedDataParallel(seeded(mlp, 4, 5, 2), average_where_used=["0.*", "head.*"])
    DistributedDataParallel(torch.compile(seeded(mlp, 4, 5, 2)), average_where_used="0.*")
    for wrong in (3, None, [0], {0: "0.*"}):
        with pytest.raises(TypeError, match="average_where_used is True or patterns"):
            DistributedDataParallel(seeded(mlp, 4, 5, 2), average_where_used=wrong)
    for names in ("2.*", "head.*"):
        with pytest.raises(DisagreementError, match=r"rank 1 .*average_where_used \('" + names[0]):
            DistributedDataParallel(seeded(mlp, 4, 5, 2), average_where_used=names if rank else {"0.*"})
    names = ["0.*", "2.*"][:: 1 - 2 * rank]
    wrapper = DistributedDataParallel(seeded(mlp, 4, 5, 2), average_where_used=iter(names), bucket_cap_mb=iter([1, 2]))
    assert wrapper._options.where_used == ("0.*", "2.*")
    if rank:
        wrapper.finish_grad_sync()
    else:
        loss_of(wrapper, 0).backward()
    assert_gradients(wrapper.module, gradients_of_rank(0))
    wrapper = DistributedDataParallel(seeded(mlp, 4, 5, 2), average_where_used="*.weight")
    prune.l1_unstructured(wrapper.module[0], "weight", 0.5)
    with pytest.raises(ValueError, match=r"'0\.weight_orig' .* no pattern of average_where_used fits this one"):
        wrapper(data(3, 4))


@on_two_ranks
def test_averaging_where_used_takes_no_message_more():
    sent, send = [], dist.all_reduce

    def counting(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return send(tensor, *args, **kwargs)

    found = []
    for used in (False, True):
        wrapper = DistributedDataParallel(seeded(mlp, 4, 5, 2), average_where_used=used, shared_memory=False)
        for _ in range(3):
            wrapper.zero_grad()
            loss_of(wrapper, dist.get_rank()).backward()
        wrapper.zero_grad()
        del sent[:]
        with mock.patch.object(dist, "all_reduce", counting):
            loss_of(wrapper, dist.get_rank()).backward()
        found.append(sent.copy())
    assert len(found[0]) == len(found[1]) > 0


def test_anything_but_zeros_is_found_wherever_it_is():
    zeros = [torch.zeros(300, 40), torch.zeros(()), torch.zeros(0, 3), torch.zeros(3, 2).to_sparse(1), torch.zeros(9)]
    assert not has_nonzero([])
    assert not has_nonzero(zeros)
    for k, shape in enumerate(one.shape for one in zeros):
        if shape.numel():
            other = torch.zeros(shape)
            other.view(-1)[-1] = 1e-40
            assert has_nonzero([*zeros[:k], other.to_sparse(1) if zeros[k].is_sparse else other, *zeros[k:]])


class Tied(nn.Module):
    """Layers by letter, of which a call uses some, one after another."""

    def __init__(self, *shared):
        super().__init__()
        self.a, self.e = shared or (nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        self.b = nn.Linear(4, 4, bias=False)

    def forward(self, x, letters):
        for letter in letters:
            x = getattr(self, letter)(x)
        return x


@pytest.mark.parametrize("used", [("e", "a"), ("e", "ab"), ("b", "ea")])
@pytest.mark.parametrize("dropped", ["nothing", "in an error", "in no_sync()"])
@on_two_ranks
def test_wrappers_with_tied_layers_of_which_gradients_come_before_the_backward_reaches_each(dropped, used):
    """All ranks have the same data, so that the mean is one rank's gradient, whatever their counts are."""
    first = seeded(Tied)
    second = Tied(first.a, first.e)
    second.b.load_state_dict(first.b.state_dict())
    modules, rank = (first, second), dist.get_rank()
    wrappers = [DistributedDataParallel(module) for module in modules]
    own = {id(p): p for module in modules for p in module.parameters()}.values()

    def loss(models, letters):
        return sum(model(torch.ones(2, 4), some).sum() for model, some in zip(models, letters, strict=True))

    for step in range(3):
        letters = used if step == 2 else ("eb", "ab")
        expected = torch.autograd.grad(loss(modules, letters), list(own), allow_unused=True)
        for parameter in own:
            parameter.grad = None
        weighed = weigh(loss(wrappers, letters), 3 + 2 * rank)
        if step == 1 and dropped == "in no_sync()":
            with wrappers[0].no_sync(), wrappers[1].no_sync():
                weighed.backward()
            continue
        if step == 1 and dropped == "in an error":
            handle = first.b.weight.register_hook(_broken) if rank == 1 else None
            with pytest.raises(ArithmeticError if rank == 1 else PeerAbortedError):
                weighed.backward()
            if handle is not None:
                handle.remove()
            continue
        weighed.backward()
        for parameter, want in zip(own, expected, strict=True):
            torch.testing.assert_close(parameter.grad, want)


def _broken(_):
    raise ArithmeticError("planned")


class SumOfRanks(torch.autograd.Function):
    """The sum over all ranks, as batch statistics of all ranks are made of."""

    @staticmethod
    def forward(ctx, own):
        total = own.clone()
        dist.all_reduce(total)
        return total

    backward = forward


@on_two_ranks
def test_a_graph_that_communicates():
    module, rank, counts = seeded(mlp, 4, 5, 2), dist.get_rank(), [3, 100]
    wrapper = DistributedDataParallel(module)

    def losses_of(outputs, mean):
        return [(output - mean).pow(2).mean() + (output * mean).mean() for output in outputs]

    outputs = [module(data(4, 4, rank=other)) for other in range(2)]
    losses = losses_of(outputs, sum(output.mean() for output in outputs) / 2)
    (sum(count * loss for count, loss in zip(counts, losses, strict=True)) / sum(counts)).backward()
    want = gradients(module)
    module.zero_grad()
    output = wrapper(data(4, 4))
    (loss,) = losses_of([output], SumOfRanks.apply(output.mean()) / 2)
    weigh(loss, counts[rank]).backward()
    assert_gradients(module, want)


@on_two_ranks
def test_a_compressor_keeps_nothing_of_what_is_averaged_where_used():
    wrapper = DistributedDataParallel(seeded(mlp, 4, 5, 2), average_where_used="2.*")
    keeping = ErrorFeedback(TopK(0.5))
    for compressor in (keeping, WarmUp(keeping, 2), ByParameter({"0.*": TopK(0.5)}, keeping)):
        with pytest.raises(ValueError, match=r"'2\.weight'.*average_where_used.*ByParameter\(\{'2\.\*'"):
            wrapper.register_comm_hook(compressor)
    wrapper.register_comm_hook(ByParameter({"0.*": keeping, "2.0.*": keeping}))
    loss_of(wrapper, dist.get_rank()).backward()
    assert wrapper.module[2].weight.grad is not None
    wrapper.module[2] = nn.Sequential(wrapper.module[2])  # its parameters have other names now
    with pytest.raises(ValueError, match=r"'2\.0\.weight'"):
        loss_of(wrapper, dist.get_rank())


@pytest.mark.parametrize("where_used", [False, "1.*"])
@on_two_ranks
def test_what_a_compressor_keeps_in_a_join_has_the_divisor_of_its_step(where_used):
    module = nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 1))
    nn.init.ones_(module[1].weight)
    wrapper = DistributedDataParallel(module, average_where_used=where_used)
    wrapper.register_comm_hook(ByParameter({"0.*": ErrorFeedback(TopK(0.25, min_numel=1))}))
    averages, inputs = [], [[8.0, 4.0, 0.0, 0.0], [0.0] * 4, [2.0, 0.0, 0.0, 0.0]]
    with wrapper.join(divide_by_initial_world_size=False):
        for x in inputs[: 1 if dist.get_rank() else 3]:
            wrapper.zero_grad()
            wrapper(torch.tensor([x])).sum().backward()
            averages.append(module[0].weight.grad.flatten().tolist())
            assert module[1].bias.grad.item() == 1
    assert averages == [[8.0, 0.0, 0.0, 0.0], [0.0, 4.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]][: len(averages)]


@on_two_ranks
def test_two_reentrant_checkpoints_around_a_wrapper():
    """Each has a backward of its own, so that the second one begins with averages."""
    module, rank = seeded(mlp, 4, 5, 2), dist.get_rank()
    want = expected(module, [3, 5])
    wrapper = DistributedDataParallel(module)
    for _ in range(2):
        parts = [checkpoint(wrapper, data(4, 4, step=k).requires_grad_(), use_reentrant=True) for k in range(2)]
        with pytest.raises((UnusableError, PeerAbortedError), match="use_reentrant=False"):
            weigh(sum(part.pow(2).mean() for part in parts), 3 + 2 * rank).backward()
        wrapper.zero_grad()
        weigh(loss_of(wrapper, rank), 3 + 2 * rank).backward()
        assert_gradients(module, want)
        wrapper.zero_grad()


class Meeting(torch.autograd.Function):
    """Its backward waits until that of each thread has come."""

    barrier = threading.Barrier(2)

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Meeting.barrier.wait(20)
        return gradient


@on_two_ranks
def test_backwards_on_two_threads():
    rank, counts = dist.get_rank(), [[3, 5], [50, 7]]
    modules = [seeded(mlp, 4, 5, 2) for _ in counts]
    wants = [expected(module, own) for module, own in zip(modules, counts, strict=True)]
    wrappers = [DistributedDataParallel(module) for module in modules]
    losses = [
        weigh(Meeting.apply(loss_of(one, rank).cpu()), own[rank]) for one, own in zip(wrappers, counts, strict=True)
    ]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda loss: loss.backward(), losses))
    for module, want in zip(modules, wants, strict=True):
        assert_gradients(module, want)


@on_two_ranks
def test_a_loss_without_a_weight_after_weighed_ones():
    module, rank = seeded(mlp, 4, 5, 2), dist.get_rank()
    wrapper = DistributedDataParallel(module)
    for drops in (False, True):
        with wrapper.no_sync():
            weigh(loss_of(wrapper, rank), 3 + 2 * rank).backward()
        if drops:
            torch.optim.SGD(module.parameters(), 0.1).zero_grad()
        refusal = pytest.raises((UnusableError, PeerAbortedError), match="without a weight would add")
        with nullcontext() if drops else refusal:
            loss_of(wrapper, rank).backward()
        if drops:
            assert_gradients(module, expected(seeded(mlp, 4, 5, 2), [1, 1]))
        wrapper.zero_grad()


@pytest.mark.parametrize("how", ["in a reentrant checkpoint", "in two parts", "without a wrapper"])
@on_two_ranks
def test_a_backward_that_comes_to_no_wrapper(how):
    module, rank = seeded(mlp, 4, 5, 2), dist.get_rank()
    wrapper = DistributedDataParallel(module)
    output = (seeded(mlp, 4, 5, 2) if how == "without a wrapper" else wrapper)(data(4, 4))
    if how == "in a reentrant checkpoint":
        loss = checkpoint(lambda part: weigh(part.mean(), 3), output, use_reentrant=True)
    else:
        loss = weigh((output.detach().requires_grad_() if how == "in two parts" else output).mean(), 3)
    with pytest.raises((UnusableError, PeerAbortedError), match="has come to no wrapper"):
        loss.backward()
    del output, loss
    wrapper.zero_grad()
    weigh(loss_of(wrapper, rank), 3 + 2 * rank).backward()
    assert_gradients(module, expected(seeded(mlp, 4, 5, 2), [3, 5]))


def test_a_backward_before_init_process_group():
    with pytest.raises(UnusableError, match=r"needs init_process_group\(\)"):
        weigh(nn.Linear(4, 2)(torch.ones(3, 4)).mean(), 3).backward()


@on_two_ranks
def test_a_loss_has_one_weight_which_a_backward_takes():
    module, rank = seeded(mlp, 4, 5, 2), dist.get_rank()
    wrapper = DistributedDataParallel(module)
    counts = [257, 2 * 257]  # which bfloat16 rounds alike

    def loss(step=0):
        return loss_of(wrapper, rank, step)

    with pytest.raises(UnusableError, match="has a weight already"):
        weigh(weigh(loss(), 2), 3)
    with pytest.raises((UnusableError, PeerAbortedError), match="has a weight already"):
        weigh(loss() + weigh(loss(), 2), 3).backward()
    wrapper.zero_grad()
    parameters = list(module.parameters())
    with pytest.raises(UnusableError, match=r"autograd.grad\(weigh\(loss, count\), parameters\)"):
        torch.autograd.grad(weigh(loss(), 2), parameters)
    for roots in (
        lambda: [weigh(loss(), counts[rank]), 2 * weigh(0 * loss(), 0)],
        lambda: [weigh(loss().bfloat16(), counts[rank])],
    ):
        wrapper.zero_grad()
        torch.autograd.backward(roots())
        assert_gradients(module, expected(seeded(mlp, 4, 5, 2), counts))
    if parameters[0].is_cuda:
        return
    wrapper.zero_grad()
    with wrapper.no_sync():
        weigh(0 * loss(), 100).backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    with pytest.raises((UnusableError, PeerAbortedError), match="all zero, have been changed in place"):
        weigh(loss(), 3).backward()


@on_two_ranks
def test_wrappers_of_one_rank_that_share_parameters():
    """Of one module, and one inside the other."""
    group, module = dist.new_subgroups(1)[0], seeded(mlp, 4, 5, 2)
    first = DistributedDataParallel(module, process_group=group)
    second = DistributedDataParallel(nn.Sequential(module), process_group=group)
    outer = DistributedDataParallel(nn.Sequential(first), process_group=group)
    for wrappers in ([first, second], [outer]):
        loss = sum(one(data(4, 4)) for one in wrappers).pow(2).mean()
        want = torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
        weigh(loss, 3).backward()
        assert_gradients(module, dict(zip(gradients(module), want, strict=True)))
        module.zero_grad()


@on_two_ranks
def test_wrappers_of_other_ranks_that_share_parameters():
    inner = DistributedDataParallel(seeded(mlp, 4, 5, 2), process_group=dist.new_subgroups(1)[0])
    outer = DistributedDataParallel(nn.Sequential(inner))
    with pytest.raises((UnusableError, PeerAbortedError), match="need one group of ranks"):
        weigh(loss_of(outer, dist.get_rank()), 3).backward()


@pytest.mark.parametrize("skips", [False, True])
@on_two_ranks
def test_a_rank_whose_losses_weigh_nothing_sends_no_buffers(skips):
    """The other rank has written the same ones, or none (`skips`)."""
    module, rank = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), dist.get_rank()
    wrapper = DistributedDataParallel(module)
    for _ in range(2):
        if skips and rank:
            module[1].eval()
        weigh(wrapper(data(4, 3) * (1 if rank else torch.nan)).pow(2).mean(), 4 * rank).backward()
        wrapper.zero_grad()
        means = [torch.empty(3) for _ in range(2)]
        dist.all_gather(means, module[1].running_mean)
        assert means[0].isfinite().all()
        assert bool(means[0].any()) is not skips
        assert means[0].equal(means[1])


@on_two_ranks
def test_a_rank_that_refuses_its_gradients_without_a_backward_is_not_a_step_behind():
    module, rank = seeded(mlp, 4, 5, 2), dist.get_rank()
    wrapper = DistributedDataParallel(module)
    if rank == 0:
        with wrapper.no_sync():
            weigh(loss_of(wrapper, rank), 0).backward()
        for parameter in module.parameters():
            parameter.grad.mul_(0.5)
        with pytest.raises(UnusableError, match="all zero, have been changed in place"):
            wrapper.finish_grad_sync()
    else:
        with pytest.raises(PeerAbortedError, match="rank 0"):
            weigh(loss_of(wrapper, rank), 3).backward()
    wrapper.zero_grad()
    weigh(loss_of(wrapper, rank), 3 + 2 * rank).backward()
    assert_gradients(module, expected(seeded(mlp, 4, 5, 2), [3, 5]))
