"""Functions and hooks that raise, return nonsense or change shapes: an error that names them, and no loss."""

import gc
import itertools
import math
import re
import traceback
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from failing import ending_within
from one_process import assert_gradients, mean_gradients, mlp, of_all_ranks, seeded, square
from ppe_ddp import DistributedDataParallel, FunctionError, PeerAbortedError, average, broadcast, overlapped
from ppe_ddp.engine import reduction
from rank_tests import VARIANTS, each_variant, on_two_ranks


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


def hold(wrapper, turns, error, match, named, *, culprits=((0,), (1,)), is_late=False, tells_why=True):
    """Steps that fail by `turns` on some ranks, between steps that work; all ranks hear of it, and none loses anything.

    Args:
        wrapper: Has `turns` as its function or hook.
        turns: A `Turns`.
        error: What comes out of `backward()` on a rank that fails.
        match: What its text has.
        named: What its text, or its traceback, names.
        culprits: The ranks that fail, for each step that does.
        is_late: Whether the other ranks may have their averages by then.
        tells_why: Whether the other ranks hear more than who it was.
    """
    rank, module = dist.get_rank(), wrapper.module
    expected = mean_gradients(module, square)
    own = mean_gradients(module, lambda m, _: square(m, rank), world_size=1)
    for failing in itertools.chain.from_iterable(((), failing) for failing in culprits):
        wrapper.zero_grad()
        turns.fails = rank in failing
        if not failing:
            square(wrapper, rank)
            assert_gradients(module, expected)
            continue
        caught = fails(lambda: square(wrapper, rank), is_sure=turns.fails or not is_late)
        if caught is None:
            assert_gradients(module, expected)
            continue
        assert type(caught) is (error if turns.fails else PeerAbortedError), caught
        text = "".join(traceback.format_exception(caught))
        if turns.fails:
            assert named in text
        else:
            assert any(f"rank {culprit} " in str(caught) for culprit in failing)
        assert re.search(match, str(caught)) or not (turns.fails or tells_why), text
        assert_gradients(module, own, rtol=0, atol=0)
    turns.fails = False


def fails(step, *, is_sure):
    """The error that `step` raises, which it has to where that `is_sure`."""
    try:
        step()
    except Exception as error:
        return error
    assert not is_sure, "this step should have failed"
    return None


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
    hold(wrapper, turns, Refused, "not today", "in reduce_function Turns on rank")


@on_two_ranks
def test_a_reduce_function_that_raises_on_all_ranks_at_once():
    turns = Turns(average, refuse)
    wrapper = DistributedDataParallel(seeded(mlp, 4, 8, 8, 2), reduce_function=turns)
    hold(wrapper, turns, Refused, "not today", "in reduce_function Turns on rank", culprits=((0, 1), (0, 1)))


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
    hold(wrapper, turns, FunctionError, "changed the shape of", "reduce_function Turns")
    for parameter in wrapper.parameters():
        assert parameter.grad.shape == parameter.shape


def replace_tensors(gradients, group):
    gradients[:] = [gradient / 2 for gradient in gradients]


def empty_the_list(gradients, group):
    gradients.clear()


def leave_the_sum_in_the_future(gradients, group):
    total = gradients.buffer() / 2
    return dist.all_reduce(total, group=group, async_op=True).get_future().then(lambda future: future.value()[0])


def average_by_numpy(gradients, group):
    """Writes what has no version, and leaves another tensor in its Future."""
    future = leave_the_sum_in_the_future(gradients, group)

    def copy(future):
        gradients.buffer().numpy()[:] = future.value().numpy()
        return future.value()

    return future.then(copy)


NOT_IN_PLACE = [
    (replace_tensors, "put other tensors in the place of"),
    (empty_the_list, r"left 0 of \d+ tensors"),
    (leave_the_sum_in_the_future, "the Future of reduce_function Turns holds another tensor"),
]


@on_two_ranks
def test_a_reduce_function_whose_result_is_not_in_the_bucket():
    for k, (wrong, text) in enumerate(NOT_IN_PLACE):
        turns = Turns(average_by_numpy if k else average, wrong)
        wrapper = DistributedDataParallel(seeded(mlp, 4, 8, 2), reduce_function=turns, **VARIANTS[k % len(VARIANTS)])
        is_late = wrong is leave_the_sum_in_the_future
        hold(wrapper, turns, FunctionError, text, "reduce_function Turns", culprits=[[0, 1]], is_late=is_late)


@on_two_ranks
def test_a_reduce_function_that_writes_by_numpy_averages_nan():
    wrapper = DistributedDataParallel(nn.Linear(1, 1), reduce_function=average_by_numpy)
    wrapper(torch.tensor([[math.nan if dist.get_rank() else 1.0]])).sum().backward()
    assert wrapper.module.weight.grad.isnan().item()
    assert wrapper.module.bias.grad.item() == 1


def return_what_never_ends(*_):
    return torch.futures.Future()


@on_two_ranks
def test_a_future_that_never_ends():
    rank, turns = dist.get_rank(), Turns(average, return_what_never_ends)
    kinds = {
        "reduce_function": {"reduce_function": turns},
        "broadcast_function": {"broadcast_function": turns},
        "hook": {},
    }
    for kind, options in kinds.items():
        turns.right = {"reduce_function": average, "broadcast_function": broadcast, "hook": allreduce_hook}[kind]
        wrapper = DistributedDataParallel(seeded(Counting), **options)
        if kind == "hook":
            wrapper.register_comm_hook(dist.new_group(), turns)
        square(wrapper, rank)
        turns.fails = True
        with mock.patch.object(reduction, "_LATER_SECONDS", -math.inf):  # as if the timeout was over
            error = fails(lambda wrapper=wrapper: square(wrapper, rank), is_sure=True)
        assert re.search(rf"what .*{kind} Turns .* returned is not done after", str(error)), error
        turns.fails = False


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


WRONG_HOOKS = [
    (refuse, Refused, "not today"),
    (hook_that_returns_a_tensor, FunctionError, r"hook Turns returned Tensor .*must return a torch\.futures"),
    (hook_whose_future_holds_text, FunctionError, "the Future of communication hook Turns holds str"),
    (hook_whose_future_is_short, FunctionError, r"hook Turns holds 1 elements, the bucket has \d+"),
    (hook_whose_callback_raises, RuntimeError, "not today"),
]


@on_two_ranks
def test_a_hook_of_torch_that_is_wrong():
    for k, (wrong, error, text) in enumerate(WRONG_HOOKS):
        with ending_within(1.0 if wrong is hook_whose_callback_raises else 0.2):
            hold_hook(wrong, error, text, k % 2, VARIANTS[k % len(VARIANTS)])
        gc.collect()  # what still holds a hook's group on one rank keeps the other waiting when it destroys its own


def hold_hook(wrong, error, text, culprit, options):
    """A hook communicates where nobody can connect the ranks anew: each failure takes a wrapper and a group."""
    turns = Turns(allreduce_hook, wrong)
    wrapper = DistributedDataParallel(seeded(mlp, 4, 8, 2), **options)
    wrapper.register_comm_hook(dist.new_group(), turns)
    is_late = wrong is hook_whose_callback_raises  # when all is sent
    # torch makes errors of callbacks its own: their type is lost, their text is not.
    hold(wrapper, turns, error, text, "communication hook Turns", culprits=[[culprit]], is_late=is_late)


@pytest.mark.parametrize("options", [*VARIANTS, {"negotiate_grads": False}])
@on_two_ranks
def test_a_hook_of_ppe_that_raises(options):
    turns = Turns(lambda wrapper: None, refuse)
    wrapper = DistributedDataParallel(seeded(mlp, 4, 8, 2), **options)
    wrapper.register_comm_hook(turns)
    hold(wrapper, turns, Refused, "not today", "in refuse", tells_why=False)


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
        (number, FunctionError, r"rank \d: broadcast_function returned int; it must change the"),
    ],
)
@on_two_ranks
def test_a_broadcast_function_that_is_wrong(wrong, error, text):
    turns = Turns(broadcast, wrong)
    wrapper = DistributedDataParallel(seeded(Counting), broadcast_function=turns)
    hold(wrapper, turns, error, text, "broadcast_function", is_late=True)
    wrapper.zero_grad()
    square(wrapper, dist.get_rank())
    counts = of_all_ranks(wrapper.module.count)
    assert torch.equal(*counts)
