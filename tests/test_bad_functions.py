"""Functions and hooks that raise, return nonsense or change shapes: an error that names them, and no loss."""

import traceback

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.checkpoint import checkpoint

from one_process import assert_gradients, mean_gradients, mlp, seeded, square
from ppe_ddp import DistributedDataParallel, FunctionError, average, broadcast, overlapped
from rank_tests import each_variant, on_two_ranks


class Refused(Exception):
    """The error that a user's function raises."""


class Turns:
    """Does the wrong thing while `fails` is set, and the right one else."""

    def __init__(self, right, wrong):
        self.right = right
        self.wrong = wrong
        self.fails = False

    def __call__(self, *arguments):
        return (self.wrong if self.fails else self.right)(*arguments)


def hold(wrapper, turns, error, match, named, *, keeps=True):
    """A step that works, one that fails by `turns`, and two that work again.

    Args:
        wrapper: Has `turns` as its function or hook.
        turns: A `Turns`.
        error: What comes out of `backward()`.
        match: What its text has.
        named: What its text, or its traceback, names.
        keeps: Whether this rank's gradients are still what they were.
    """
    rank = dist.get_rank()
    module = wrapper.module
    expected = mean_gradients(module, square)
    own = mean_gradients(module, lambda m, _: square(m, rank), world_size=1)
    for fails in (False, True, True, False, False):
        wrapper.zero_grad()
        turns.fails = fails
        if not fails:
            square(wrapper, rank)
            assert_gradients(module, expected)
            continue
        with pytest.raises(error, match=match) as caught:
            square(wrapper, rank)
        assert type(caught.value) is error
        assert named in "".join(traceback.format_exception(caught.value))
        arrived = [name for name, parameter in module.named_parameters() if parameter.grad is not None]
        assert arrived
        if keeps:
            for name in arrived:
                torch.testing.assert_close(module.get_parameter(name).grad, own[name])


def refuse(*_):
    raise Refused("not today")


def refuse_in_the_future(*_):
    future = torch.futures.Future()
    future.set_exception(Refused("not today"))
    return future


def refuse_after_the_reduction(gradients, group):
    average(gradients, group).wait()
    raise Refused("not today")


@pytest.mark.parametrize("wrong", [refuse, refuse_in_the_future, refuse_after_the_reduction])
@each_variant
@on_two_ranks
def test_a_reduce_function_that_raises(wrong, options):
    turns = Turns(average, wrong)
    wrapper = DistributedDataParallel(seeded(mlp, 4, 8, 8, 2), reduce_function=turns, **options)
    # A view of the bucket is the reduced gradient from the start, and cannot be taken back.
    keeps = wrong is not refuse_after_the_reduction or options.get("gradient_as_bucket_view") is False
    hold(wrapper, turns, Refused, "not today", "in reduce_function Turns on rank", keeps=keeps)


@each_variant
@on_two_ranks
def test_an_overlapped_function_that_raises(options):
    turns = Turns(average, refuse)
    wrapper = DistributedDataParallel(seeded(mlp, 4, 8, 2), reduce_function=overlapped(turns), **options)
    hold(wrapper, turns, Refused, "not today", "in refuse")


def tensor(*_):
    return torch.ones(3)


def number(*_):
    return 3


@pytest.mark.parametrize(("wrong", "kind"), [(tensor, "Tensor"), (number, "int")])
@each_variant
@on_two_ranks
def test_a_reduce_function_that_returns_the_wrong_type(wrong, kind, options):
    turns = Turns(average, wrong)
    wrapper = DistributedDataParallel(seeded(mlp, 4, 8, 2), reduce_function=turns, **options)
    text = rf"reduce_function Turns returned {kind} \(rank \d, bucket \d"
    hold(wrapper, turns, FunctionError, text, "return None, or a Work or Future")


def turn_gradients(gradients, group):
    for gradient in gradients:
        gradient.t_()


def widen_gradients(gradients, group):
    for gradient in gradients:
        gradient.unsqueeze_(0)


def shrink_buffer(gradients, group):
    gradients.buffer().resize_(1)


def replace_data(gradients, group):
    for gradient in gradients:
        gradient.data = torch.zeros(7)


@pytest.mark.parametrize("wrong", [turn_gradients, widen_gradients, shrink_buffer, replace_data])
@each_variant
@on_two_ranks
def test_a_reduce_function_that_changes_shapes(wrong, options):
    turns = Turns(average, wrong)
    wrapper = DistributedDataParallel(seeded(mlp, 4, 8, 2), reduce_function=turns, **options)
    hold(wrapper, turns, FunctionError, "changed the shape of", "reduce_function Turns", keeps=False)
    for parameter in wrapper.parameters():
        assert parameter.grad.shape == parameter.shape


def set_a_short_buffer(gradients, group):
    gradients.set_buffer(torch.zeros(1))


@each_variant
@on_two_ranks
def test_a_buffer_of_the_wrong_size_is_refused_where_it_is_set(options):
    turns = Turns(average, set_a_short_buffer)
    wrapper = DistributedDataParallel(seeded(mlp, 4, 8, 2), reduce_function=turns, **options)
    hold(wrapper, turns, ValueError, r"set_buffer\(\) of bucket \d+ needs", "in set_a_short_buffer")


def future_of(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def hook_that_returns_a_tensor(state, bucket):
    return bucket.buffer()


def hook_whose_future_holds_text(state, bucket):
    return future_of("text")


def hook_whose_future_is_short(state, bucket):
    return future_of(bucket.buffer()[:1])


def hook_whose_callback_raises(state, bucket):
    return allreduce_hook(state, bucket).then(refuse)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (refuse, Refused, "not today"),
        (hook_whose_callback_raises, RuntimeError, "not today"),
        (
            hook_that_returns_a_tensor,
            FunctionError,
            r"hook Turns returned Tensor .*must return a torch\.futures",
        ),
        (hook_whose_future_holds_text, FunctionError, "the Future of communication hook Turns holds str"),
        (hook_whose_future_is_short, FunctionError, r"hook Turns holds 1 elements, the bucket has \d+"),
    ],
)
@each_variant
@on_two_ranks
def test_a_hook_of_torch_that_is_wrong(wrong, error, text, options):
    turns = Turns(allreduce_hook, wrong)
    wrapper = DistributedDataParallel(seeded(mlp, 4, 8, 2), **options)
    wrapper.register_comm_hook(None, turns)
    keeps = wrong is not hook_whose_callback_raises
    # torch makes errors of callbacks its own: their type is lost, their text is not.
    hold(wrapper, turns, error, text, "communication hook Turns", keeps=keeps)


@each_variant
@on_two_ranks
def test_a_hook_of_ppe_that_raises(options):
    turns = Turns(lambda wrapper: None, refuse)
    wrapper = DistributedDataParallel(seeded(mlp, 4, 8, 2), **options)
    wrapper.register_comm_hook(turns)
    hold(wrapper, turns, Refused, "not today", "in refuse")


def leave_a_wrong_shape(wrapper):
    # torch refuses this itself, where it happens.
    for parameter in wrapper.parameters():
        parameter.grad = torch.zeros(7)


@on_two_ranks
def test_a_hook_of_ppe_that_changes_shapes():
    turns = Turns(lambda wrapper: None, leave_a_wrong_shape)
    wrapper = DistributedDataParallel(seeded(mlp, 4, 8, 2))
    wrapper.register_comm_hook(turns)
    hold(wrapper, turns, RuntimeError, "assign a gradient of size", "in leave_a_wrong_shape")


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x):
        self.count += x.abs().sum()
        return self.layer(x)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (refuse, Refused, "not today"),
        (refuse_in_the_future, Refused, "not today"),
        (
            number,
            FunctionError,
            r"rank \d: broadcast_function returned int; it must change the",
        ),
    ],
)
@on_two_ranks
def test_a_broadcast_function_that_is_wrong(wrong, error, text):
    turns = Turns(broadcast, wrong)
    wrapper = DistributedDataParallel(seeded(Counting), broadcast_function=turns)
    hold(wrapper, turns, error, text, "broadcast_function", keeps=False)
    counts = [None] * 2
    dist.all_gather_object(counts, wrapper.module.count)
    assert torch.equal(*counts)


class Late(nn.Module):
    """Nobody expects the gradient of its inner map, inside a reentrant checkpoint."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.outer(checkpoint(self.inner, x.clone().requires_grad_(), use_reentrant=True))


def refuse_what_is_late(bucket, group):
    if any(name.startswith("inner") for name in bucket.names()):
        raise Refused("late")
    return average(bucket, group)


@on_two_ranks
def test_gradients_that_came_late_are_not_lost():
    rank = dist.get_rank()
    turns = Turns(average, refuse_what_is_late)
    wrapper = DistributedDataParallel(seeded(Late), reduce_function=turns)
    expected = mean_gradients(wrapper.module, square)
    own = mean_gradients(wrapper.module, lambda model, _: square(model, rank), world_size=1)
    for step, fails in enumerate((False, True, False, False)):
        wrapper.zero_grad()
        turns.fails = fails
        if not fails:
            square(wrapper, rank)
            # After a failure the ranks connect again when backward is over: nothing comes late then.
            assert wrapper.trace().repaired == (() if step == 2 else ("inner.weight", "inner.bias"))
            assert_gradients(wrapper.module, expected)
            continue
        with pytest.raises(Refused, match="late"):
            square(wrapper, rank)
        for name in ("inner.weight", "inner.bias"):
            torch.testing.assert_close(wrapper.module.get_parameter(name).grad, own[name])
