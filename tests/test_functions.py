"""What a reduce function declares, and who divides then."""

import contextlib
import functools
import gc
import pickle
import threading
import weakref
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from one_process import assert_gradients, mean_gradients, mlp, square
from ppe_ddp import DistributedDataParallel, average, broadcast, overlapped
from ppe_ddp.backends.group_internals import store_of
from ppe_ddp.contracts import GradBucket
from ppe_ddp.functions import takes_divided
from ppe_ddp.testing import ConformanceError, World, check_reduce_function
from rank_tests import each_variant, on_two_ranks


def undeclared_sum(gradients, group):
    return dist.all_reduce(gradients.buffer(), group=group, async_op=True)


@takes_divided
def declared_sum(gradients, group):
    assert gradients.is_divided()
    return dist.all_reduce(gradients.buffer(), group=group, async_op=True)


class DeclaredByAttribute:
    takes_divided = True

    def __call__(self, gradients, group):
        return declared_sum(gradients, group)


def average_within(gradients, group):
    assert not gradients.is_divided()
    return average(gradients, group)


GOOD = [declared_sum, DeclaredByAttribute(), overlapped(declared_sum), overlapped(average), average_within, average]
NAMES = ["declared", "by attribute", "overlapped", "overlapped average", "average within", "average"]


@pytest.mark.parametrize("function", GOOD, ids=NAMES)
@each_variant
@on_two_ranks
def test_the_mean_is_divided_once(function, options):
    module = mlp(4, 8, 2)
    wrapper = DistributedDataParallel(module, reduce_function=function, **options)
    for _ in range(2):
        wrapper.zero_grad()
        square(wrapper, dist.get_rank())
        assert_gradients(module, mean_gradients(module, square))


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shm", "gloo"])
@on_two_ranks
def test_the_work_of_a_message_is_waited_for_once_and_to_its_end(shared_memory):
    """Rank 0 sends later than the others look for failures; two wrappers take turns in one backward."""
    rank, sent = dist.get_rank(), []

    def swap(gradients, group):
        if rank == 0 and not sent[1:]:  # the store waits for a second at least
            with contextlib.suppress(RuntimeError):
                store_of(dist.group.WORLD).wait(["nobody sets this"], timedelta(seconds=0.5))
        sent.append(dist.isend(gradients.buffer().clone(), group=group, group_dst=1 - rank))
        return dist.irecv(gradients.buffer(), group=group, group_src=1 - rank)

    modules = [torch.nn.Linear(2, 2, bias=False) for _ in range(2)]
    wrappers = [DistributedDataParallel(one, reduce_function=swap, shared_memory=shared_memory) for one in modules]
    for step in range(2):
        for one in modules:
            one.zero_grad()
        sum(wrapper(torch.full((1, 2), 1.0 + rank + step)).sum() for wrapper in wrappers).backward()
        assert [set(one.weight.grad.unique().tolist()) for one in modules] == [{2.0 - rank + step}] * 2
    for work in sent:
        work.wait()


@pytest.mark.parametrize("shared_memory", [True, False], ids=["shm", "gloo"])
@on_two_ranks
def test_buffers_may_be_broadcast_by_a_message(shared_memory):
    def send(tensors, group):
        assert len(tensors) == 1
        if dist.get_rank(group) == 0:
            return dist.isend(tensors[0], group=group, group_dst=1)
        return dist.irecv(tensors[0], group=group, group_src=0)

    module = torch.nn.Linear(2, 1, bias=False)
    wrapper = DistributedDataParallel(module, broadcast_function=send, shared_memory=shared_memory)
    wrapper(torch.ones(1, 2)).sum().backward()
    weights = [torch.empty_like(module.weight) for _ in range(2)]
    dist.all_gather(weights, module.weight.detach())
    assert torch.equal(*weights)


@on_two_ranks
def test_a_buffer_of_one_element_may_have_any_stride():
    buffer = torch.full((1, 6), float(dist.get_rank()))[:, 0]
    broadcast([buffer], source=1).wait()
    assert buffer.item() == 1


@on_two_ranks
def test_who_only_sums_and_does_not_say_so_gets_the_sum():
    module = mlp(4, 8, 2)
    wrapper = DistributedDataParallel(module, reduce_function=undeclared_sum)
    square(wrapper, dist.get_rank())
    assert_gradients(module, {name: 2 * mean for name, mean in mean_gradients(module, square).items()})


@pytest.mark.parametrize("function", [declared_sum, average_within, average], ids=["declared", "within", "average"])
@on_two_ranks
def test_gradients_are_divided_in_the_dtype_that_they_are_reduced_in(function):
    module = torch.nn.Linear(1, 1, bias=False).half()
    config = SimpleNamespace(param_dtype=None, reduce_dtype=torch.float32, buffer_dtype=None)
    wrapper = DistributedDataParallel(module, reduce_function=function_in_float32(function), mixed_precision=config)
    tiny = torch.finfo(torch.float16).smallest_normal / 1024  # half of it is zero in float16
    (wrapper(torch.ones(1, 1).half()) * tiny).sum().backward()
    assert module.weight.grad.item() == tiny


class function_in_float32:
    def __init__(self, function):
        self.function = function
        self.takes_divided = getattr(function, "takes_divided", False)

    def __call__(self, gradients, group):
        assert gradients.buffer().dtype is torch.float32
        return self.function(gradients, group)


def test_the_conformance_kit_knows_the_declaration(two_ranks):
    world = World(ranks=(two_ranks,))
    check_reduce_function(declared_sum, world=world)
    with pytest.raises(ConformanceError):
        check_reduce_function(undeclared_sum, world=world)


def test_an_overlapped_function_that_has_failed_holds_no_bucket():
    """No collector finds a cycle that goes through a Future."""

    def refuse(gradients, group):
        raise ValueError("not today")

    function, bucket = overlapped(refuse), FlatBucket()
    seen, future = weakref.ref(bucket), function(bucket, None)
    with contextlib.suppress(ValueError):
        future.wait()
    del bucket, future
    function(FlatBucket(), None)  # the thread lets go of one call when it takes the next
    for _ in range(100):
        gc.collect()
        if seen() is None:
            return
        threading.Event().wait(0.05)
    raise AssertionError(gc.get_referrers(seen()))


class FlatBucket:
    def __init__(self, index=0):
        self._index = index

    def buffer(self):
        return torch.zeros(1)

    def index(self):
        return self._index


def around(function):
    """What `functools.wraps` makes, with a call that copies none of its attributes."""

    @functools.wraps(function)
    def calls(gradients, group):
        gradients.buffer().clamp_(max=1.0)
        return function(gradients, group)

    return calls


@on_two_ranks
def test_declarations_that_functools_has_copied_do_not_count():
    module = torch.nn.Linear(1, 1, bias=False)
    function, divided = around(average), takes_divided(around(declared_sum))
    # It is called: cut to 1 as it comes, or divided by two ranks already and then summed.
    for reduces, expected in ((function, 1), (overlapped(function), 1), (around(function), 1), (divided, 2)):
        wrapper = DistributedDataParallel(module, reduce_function=reduces)
        wrapper.zero_grad()
        wrapper(torch.full((1, 1), 4.0)).backward()
        assert module.weight.grad.item() == expected
    for refused in (around(declared_sum), overlapped(around(declared_sum)), around(around(declared_sum))):
        with pytest.raises(ValueError, match="copied takes_divided from"):
            DistributedDataParallel(module, reduce_function=refused)


@pytest.mark.parametrize(("function", "declared"), [(average, True), (declared_sum, True), (undeclared_sum, False)])
def test_an_overlapped_function_declares_the_same_also_as_a_copy(function, declared):
    assert overlapped(function).takes_divided is declared
    assert pickle.loads(pickle.dumps(overlapped(function))).takes_divided is declared


def test_a_bucket_is_divided_once():
    flat = torch.full((2,), 8.0)
    bucket = GradBucket([flat], flat, parameters=[], names=("a",), index=0, is_last=True)
    for _ in range(2):
        bucket.divide(4)
        assert flat.tolist() == [2.0, 2.0]


class Group:
    """A key, which stands for a process group."""


def test_an_overlapped_function_reduces_each_group_on_a_thread_of_its_own():
    """A rank of one group may wait for one that is in the other group first."""
    first, second, is_there = Group(), Group(), threading.Event()

    def wait_for_the_second(gradients, group):
        if group is second:
            is_there.set()
        elif not is_there.wait(20):
            raise TimeoutError

    function = overlapped(wait_for_the_second)
    for future in [function(FlatBucket(), first), function(FlatBucket(), second)]:
        future.wait()


def test_an_overlapped_function_that_has_failed_in_one_group_has_not_in_another():
    calls = []

    def fail_in_the_first(gradients, group):
        calls.append((gradients.index(), group is first))
        if group is first:
            raise ValueError("not today")

    first, second, function = Group(), Group(), overlapped(fail_in_the_first)
    for index in range(2):
        with pytest.raises(ValueError, match="not today"):
            function(FlatBucket(index), first).wait()
        function(FlatBucket(index), second).wait()
    assert calls == [(0, True), (0, False), (1, False)]
    with pytest.raises(ValueError, match="not today"):
        function(FlatBucket(0), first).wait()
    assert calls[-1] == (0, True)  # another step


@on_two_ranks
def test_an_overlapped_function_that_has_failed_works_in_the_next_step_of_one_rank_alone():
    """Also where the bucket in which it has failed is a sparse one there, which functions do not get."""
    is_failing = [True]

    def fail_once(gradients, group):
        if is_failing.pop():
            raise ValueError("not today")

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.layer = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2)

        def forward(self, x):
            return self.layer(x if x.is_floating_point() else self.embedding(x)).sum()

    alone = dist.new_subgroups(1)[0]
    wrapper = DistributedDataParallel(Branches(), process_group=alone, reduce_function=overlapped(fail_once))
    with pytest.raises(ValueError, match="not today"):
        wrapper(torch.ones(3, 4)).backward()
    is_failing[:] = [False] * 3
    for _ in range(2):
        wrapper(torch.arange(3)).backward()
