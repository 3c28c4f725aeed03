"""Several wrappers in one backward, in an order that differs from rank to rank: no deadlock."""

import itertools
import random
import threading
import time
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import test_megatron_graphs as graphs
from failing import shorten_timeout
from law_models import Recipe, losses
from one_process import (
    assert_gradients,
    assert_same_on_all_ranks,
    data,
    gradients,
    in_place_mean,
    mean_gradients,
    mean_of,
    of_all_ranks,
    seeded,
    square,
)
from ppe_ddp import CommunicationError, DistributedDataParallel, PeerAbortedError, UnusableError
from ppe_ddp.engine import reducer
from ppe_ddp.testing import Ranks
from rank_tests import on_three_ranks, on_two_ranks
from test_graphs_broken import Broken, Fused
from test_graphs_broken import step as one_step

VARIANTS = [{}, {"bucket_cap_mb": 1e-6}, {"overlap": False}]
each_variant = pytest.mark.parametrize("options", VARIANTS, ids=["packed", "adopted", "after"])


def wrapped(modules, **options):
    return [DistributedDataParallel(module, **options) for module in modules]


def use_in_one_backward(wrappers, order, loss):
    """Run the backward of `loss()`, which uses the wrappers in `order`, when the first is due; finish the others."""
    for wrapper in wrappers:
        wrapper.zero_grad()
    for k in range(len(wrappers)):
        if k not in order:
            wrappers[k].finish_grad_sync()
        elif k == min(order):
            loss().backward()


def random_orders(draw, count, world_size):
    """For each rank some neighbours of the models, in any order: what the others wait for never comes in a ring."""
    orders = []
    for _ in range(world_size):
        start = draw.randrange(count)
        order = list(range(start, draw.randint(start, count)))
        draw.shuffle(order)
        orders.append(order)
    return orders


def run_path(model, recipe, rank, step):
    return sum(losses(model(recipe.batch(step, rank), recipe.path(step, rank))))


def hold_random_models(seed, *, hooked=False):
    """Hold random models to one process; the seed says which.

    Args:
        hooked: Whether each has a hook of torch's, in a group of its own, as their order differs.
    """
    draw, rank, world_size = random.Random(seed), dist.get_rank(), dist.get_world_size()
    recipes = [Recipe.random(10 * seed + k) for k in range(3)]
    models = [recipe.build() for recipe in recipes]
    twins = [recipe.build() for recipe in recipes]
    options = draw.choice(VARIANTS)
    wrappers = wrapped(models, **options, broadcast_buffers=draw.random() < 0.7)
    for wrapper in wrappers if hooked else ():
        wrapper.register_comm_hook(dist.new_group(), allreduce_hook)
    for step in range(3):
        orders = random_orders(draw, len(models), world_size)
        want = [[] for _ in models]
        for other, order in enumerate(orders):
            for k, twin in enumerate(twins):
                twin.zero_grad()
                if k in order:
                    run_path(twin, recipes[k], other, step).backward()
                want[k].append(gradients(twin))
        used = orders[rank]
        use_in_one_backward(
            wrappers,
            used,
            lambda: sum(run_path(wrappers[k], recipes[k], rank, step) for k in used),  # noqa: B023
        )
        for wrapper, tables in zip(wrappers, want, strict=True):
            assert_gradients(wrapper.module, mean_of(tables, world_size))
            assert_same_on_all_ranks(wrapper.module)


@pytest.mark.parametrize("seed", range(4))
@on_two_ranks
def test_random_models_on_two_ranks(seed):
    hold_random_models(seed, hooked=seed > 1)


@pytest.mark.parametrize("seed", range(10, 13))
@on_three_ranks
def test_random_models_on_three_ranks(seed):
    hold_random_models(seed, hooked=seed == 12)


@pytest.mark.parametrize("has_tied", [True, False], ids=["tied", "no_sync"])
@each_variant
@on_two_ranks
def test_one_error_ends_the_backward_of_one_that_it_has_not_come_to(options, has_tied):
    models = [seeded(Fused) for _ in range(2)]
    if has_tied:
        models[1].layers[0] = models[0].layers[0]
    wrappers = wrapped(models, **options)
    rank = dist.get_rank()
    for turn in range(2):
        with nullcontext() if has_tied else wrappers[1].no_sync():
            outputs = [wrappers[0](data(5, 4)), wrappers[1](data(5, 4), place=2 if rank == turn else None)]
            with pytest.raises(Broken if rank == turn else PeerAbortedError):
                sum(outputs).pow(2).sum().backward()
        for wrapper in wrappers:
            wrapper.zero_grad()
        one_step(wrappers[0], rank)
        assert_gradients(models[0], mean_gradients(models[0], one_step))


class Skipped(nn.Module):
    """One layer, or nothing but the layer that it shares with another module, if there is one."""

    def __init__(self, shared=None):
        super().__init__()
        self.shared, self.layer = shared or nn.Identity(), nn.Linear(4, 4)

    def forward(self, x, *, skips=False):
        x = self.shared(x * 1.0)
        return x if skips else self.layer(x)


@pytest.mark.parametrize("has_tied", [True, False], ids=["tied", "nothing"])
@each_variant
@on_two_ranks
def test_one_error_ends_the_backward_of_one_of_which_its_graph_uses_no_parameter(options, has_tied):
    first = seeded(Fused)
    second = seeded(Skipped, first.layers[0] if has_tied else None)
    wrappers = wrapped([first, second], **options)
    rank = dist.get_rank()
    for turn in range(2):
        # Backward begins with what was called last.
        given = data(5, 4).requires_grad_()
        outputs = [wrappers[1](given, skips=rank == turn), wrappers[0](given, place=4 if rank == turn else None)]
        with pytest.raises(Broken if rank == turn else PeerAbortedError):
            sum(output.pow(2).sum() for output in outputs).backward()
        for wrapper in wrappers:
            wrapper.zero_grad()
        for module, wrapper in zip((first, second), wrappers, strict=True):
            one_step(wrapper, rank)
            assert_gradients(module, mean_gradients(module, one_step))
            wrapper.zero_grad()


@pytest.mark.parametrize("overlap", [True, False])
@on_two_ranks
def test_an_error_in_megatrons_wrapper_ends_the_backward_of_a_plain_one(overlap):
    models, rank = [seeded(Fused) for _ in range(2)], dist.get_rank()
    plain, megatron = DistributedDataParallel(models[0]), graphs.wrap(models[1], overlap_grad_reduce=overlap)
    for turn in range(2):
        outputs = [plain(data(5, 4)), megatron(data(5, 4), place=2 if rank == turn else None)]
        with pytest.raises(Broken if rank == turn else PeerAbortedError):
            sum(outputs).pow(2).sum().backward()
        if not overlap:
            megatron.abort_grad_sync()
        plain.zero_grad()
        megatron.zero_grad_buffer()
        one_step(plain, rank)
        one_step(megatron, rank)
        megatron.finish_grad_sync()
        want = mean_gradients(seeded(Fused), one_step)
        assert_gradients(models[0], want)
        for name, parameter in models[1].named_parameters():
            torch.testing.assert_close(parameter.main_grad, want[name])
        plain.zero_grad()
        megatron.zero_grad_buffer()


def waits_in_vain_in_three_wrappers():
    models = [DistributedDataParallel(seeded(nn.Linear, 2, 2)) for _ in range(3)]

    def step():
        x = torch.ones(1, 2)
        for model in models:
            x = model(x)
        x.sum().backward()

    step()
    if dist.get_rank() == 1:  # it has no second step
        return None
    for model in models:
        shorten_timeout(model, 2)
    with pytest.raises(CommunicationError) as caught:
        step()
    error = caught.value
    return error.ranks, error.job_rank, error.step, error.phase


def test_an_error_at_the_timeout_tells_of_the_late_rank_as_with_one_wrapper():
    with Ranks(2) as ranks:
        told, _ = ranks.run(waits_in_vain_in_three_wrappers)
    assert told == ((1,), 1, 1, "done")


@on_two_ranks
def test_what_was_started_advances_at_the_end_of_a_backward_on_another_thread():
    """For a GPU a backward ends on a thread of autograd."""
    modules = [seeded(nn.Linear, 4, 2) for _ in range(2)]
    first, second = wrapped(modules)
    rank = dist.get_rank()
    steps = [lambda module, of: square(module, of) if of else None, square]
    expected = [mean_gradients(module, step) for module, step in zip(modules, steps, strict=True)]
    for _ in range(3):
        first.zero_grad()
        second.zero_grad()
        if rank:
            square(first, rank)
            square(second, rank)
        else:
            first.start_grad_sync()
            backward = threading.Thread(target=square, args=(second, rank))
            backward.start()
            backward.join()
            first.finish_grad_sync()
        for module, want in zip(modules, expected, strict=True):
            assert_gradients(module, want)


@on_two_ranks
def test_a_backward_on_another_thread_does_not_wait_for_what_is_being_finished():
    """What the other rank has still to do for the first wrapper comes after the backward of the second."""
    modules = [seeded(nn.Linear, 4, 2) for _ in range(2)]
    first, second = wrapped(modules)
    rank = dist.get_rank()
    expected = [
        mean_gradients(modules[0], lambda m, r: square(m, 1) if r else None),
        mean_gradients(modules[1], square),
    ]

    @torch.enable_grad()
    def inside(_):
        time.sleep(0.1)
        square(second, rank)

    for _ in range(3):
        first.zero_grad()
        second.zero_grad()
        dist.barrier()
        if rank:
            time.sleep(0.3)
            handle = modules[0].weight.register_hook(inside)
            square(first, rank)
            handle.remove()
        else:
            first.start_grad_sync()
            backward = threading.Thread(target=square, args=(second, rank))
            backward.start()
            time.sleep(0.1)
            first.finish_grad_sync()
            backward.join()
        for module, want in zip(modules, expected, strict=True):
            assert_gradients(module, want)


@pytest.mark.parametrize("place", [0, 1])
@each_variant
@on_two_ranks
def test_a_backward_that_one_wrapper_refuses_on_one_rank_ends_in_the_others_as_well(options, place):
    """The refusal of the wrapper at `place`, in the order in which a backward reaches them."""
    modules, rank = [seeded(nn.Linear, 4, 4) for _ in range(3)], dist.get_rank()
    wrappers = wrapped(modules, **options)

    def step():
        for wrapper in wrappers:
            wrapper.zero_grad()
        sum(wrapper(data(5, 4)).sum() for wrapper in wrappers).backward()

    step()
    expected = [
        mean_gradients(module, lambda model, of: model(data(5, 4, rank=of)).sum().backward()) for module in modules
    ]
    is_compiled = (bool(rank) and k == place for k in itertools.count())
    with (
        mock.patch.object(reducer, "is_in_compiled_autograd", side_effect=is_compiled),
        pytest.raises(UnusableError if rank else PeerAbortedError),
    ):
        step()
    for _ in range(2):
        step()
        for module, want in zip(modules, expected, strict=True):
            assert_gradients(module, want)


def interrupted_once():
    """A reduce function that raises an interrupt when it is armed."""

    def reduce(gradients, group):
        if armed:
            raise armed.pop()
        in_place_mean(gradients, group)

    armed = []
    return reduce, armed


@pytest.mark.parametrize("place", [1, 0])
@on_two_ranks
def test_hooks_of_one_that_is_complete_are_called_though_an_interrupt_ends_the_other(place):
    """The other ranks have the averages of the first and call its hooks; optimizers in them have to step everywhere."""
    rank, modules = dist.get_rank(), [seeded(nn.Linear, 4, 4) for _ in range(2)]
    reduce, armed = interrupted_once()
    # Functions that block are called one after another: the second one when the first wrapper is complete.
    functions = [reduce, in_place_mean] if place == 0 else [in_place_mean, reduce]
    wrappers = [DistributedDataParallel(m, reduce_function=f) for m, f in zip(modules, functions, strict=True)]
    calls = []
    for parameter in modules[0].parameters():
        parameter.register_post_accumulate_grad_hook(calls.append)

    def step():
        sum(wrapper(data(5, 4)).sum() for wrapper in wrappers).backward()

    step()
    calls.clear()
    dist.barrier()
    if rank == 0:
        armed.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt if rank == 0 else PeerAbortedError) as caught:
        step()
    assert of_all_ranks(len(calls)) == [2 * place] * 2
    error = caught.value
    while rank and error:  # those of both wrappers
        assert not isinstance(error, PeerAbortedError) or error.reason.startswith("KeyboardInterrupt")
        error = error.__context__


@on_two_ranks
def test_what_was_started_and_interrupted_in_a_backward_of_another_is_over():
    rank, modules = dist.get_rank(), [seeded(nn.Linear, 4, 4) for _ in range(2)]
    first, second = wrapped(modules)
    schedules = mock.patch.object(first._reducer.synchronizer, "make_schedule", side_effect=KeyboardInterrupt)
    expected = [mean_gradients(module, square) for module in modules]

    def end():
        output.backward()
        first.finish_grad_sync()

    for finishes in (False, True):
        first.zero_grad()
        with first.no_sync():
            square(first, rank)
        output = second(data(5, 4)).pow(2).sum()
        first.start_grad_sync()
        while rank == 0 and not first._reducer._started.is_ready:  # so that the backward goes on with it
            time.sleep(0.001)
        with (
            schedules if rank == 0 else nullcontext(),
            pytest.raises(KeyboardInterrupt if rank == 0 else PeerAbortedError),
        ):
            end()
        if finishes and rank == 0:
            with pytest.raises(PeerAbortedError, match="failed here already: KeyboardInterrupt"):
                first.finish_grad_sync()
        for wrapper, want in zip((first, second), expected, strict=True):
            wrapper.zero_grad()
            square(wrapper, rank)
            assert_gradients(wrapper.module, want)
            wrapper.zero_grad()


@on_two_ranks
def test_an_error_in_one_backward_is_not_the_cause_of_one_on_another_thread():
    rank, modules = dist.get_rank(), [seeded(nn.Linear, 4, 4) for _ in range(2)]
    first, second = wrapped(modules)
    has_begun, has_failed, errors = threading.Event(), threading.Event(), []

    def wait(_):
        has_begun.set()
        assert has_failed.wait(30)
        if rank == 0:
            raise ArithmeticError("of the first alone")

    def run():
        try:
            square(first, rank)
        except Exception as error:
            errors.append(error)

    modules[0].bias.register_hook(wait)
    if rank:
        modules[1].bias.register_hook(lambda _: 1 / 0)
    backward = threading.Thread(target=run)
    backward.start()
    assert has_begun.wait(30)
    with pytest.raises(ZeroDivisionError if rank else PeerAbortedError):
        square(second, rank)
    has_failed.set()
    backward.join()
    assert isinstance(errors[0], PeerAbortedError if rank else ArithmeticError)
    assert not rank or errors[0].job_rank == 0
