"""`abort_grad_sync()`: one rank gives a step up by hand, the others are told, and the next step works."""

import contextlib
import copy
import gc
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import test_megatron_graphs as graphs
from failing import SECONDS
from one_process import (
    assert_gradients,
    assert_same_on_all_ranks,
    data,
    gradients,
    mean_gradients,
    mlp,
    of_all_ranks,
    seeded,
    square,
)
from ppe_ddp import DistributedDataParallel, PeerAbortedError
from ppe_ddp.compression import RandomK
from ppe_ddp.megatron import DistributedDataParallel as Megatron
from ppe_ddp.megatron import DistributedDataParallelConfig
from rank_tests import on_three_ranks, on_two_ranks
from test_graphs_broken import Broken, Fuse


def give_up(wrapper, culprit, *reason):
    """One rank gives its step up after forward; the others' error of it, None there."""
    if dist.get_rank() == culprit:
        wrapper(data(5, 4)).sum()
        wrapper.abort_grad_sync(*reason)
        return None
    with pytest.raises(PeerAbortedError) as caught:
        square(wrapper, dist.get_rank())
    wrapper.abort_grad_sync("in an except for any error")  # which all know of
    return caught.value


@on_three_ranks
def test_a_step_is_given_up_by_hand():
    rank, module = dist.get_rank(), seeded(mlp, 4, 2)
    wrapper = DistributedDataParallel(module)
    mean, steps = mean_gradients(module, square), wrapper._reducer.groups.step  # those of a wrapper that is gone
    for culprit in range(3):
        wrapper.zero_grad()
        start = time.monotonic()
        error = give_up(wrapper, culprit, "the loss is no number")
        if error is None:
            wrapper.abort_grad_sync("once more")  # which they know
        else:
            assert time.monotonic() - start < SECONDS
            assert re.search(f"rank {culprit} failed in .* the loss is no number", str(error))
            assert (error.rank, error.step, error.phase) == (culprit, steps + 2 * culprit + 1, "begun")
            assert error.reason == "AbortedError: the loss is no number"
        wrapper.zero_grad()
        square(wrapper, rank)
        assert_gradients(module, mean)


@on_two_ranks
def test_the_first_step_of_a_copy_is_given_up_before_its_forward():
    """The other ranks make its engine in that step."""
    rank, module = dist.get_rank(), seeded(mlp, 4, 2)
    wrapper = copy.deepcopy(DistributedDataParallel(module))
    if rank == 0:
        wrapper.abort_grad_sync("no batch")
    else:
        with pytest.raises(PeerAbortedError, match=r"rank 0 failed in .* no batch"):
            square(wrapper, rank)
    wrapper.zero_grad()
    square(wrapper, rank)
    assert_gradients(wrapper.module, mean_gradients(module, square))


@on_two_ranks
def test_a_synchronization_that_was_begun_is_given_up():
    rank, module = dist.get_rank(), seeded(mlp, 4, 2)
    wrapper = DistributedDataParallel(module)
    mean = mean_gradients(module, square)
    with wrapper.no_sync():
        square(wrapper, rank)
    own = [parameter.grad.clone() for parameter in module.parameters()]
    wrapper.start_grad_sync()
    if rank == 1:
        wrapper.abort_grad_sync()
    else:
        with pytest.raises(PeerAbortedError, match="rank 1"):
            wrapper.finish_grad_sync()
    assert all(torch.equal(*pair) for pair in zip(own, (one.grad for one in module.parameters()), strict=True))
    wrapper.finish_grad_sync()
    assert_gradients(module, mean)


@pytest.mark.parametrize("is_forgotten", [False, True])
@on_two_ranks
def test_what_one_rank_has_started_is_over_where_another_gives_the_step_up(is_forgotten):
    """Rank 0 has no use for the first of two wrappers in every other step."""
    rank = dist.get_rank()
    first, second = (DistributedDataParallel(seeded(mlp, 4, 2)) for _ in range(2))
    for step in range(4):
        is_started, fails = rank == 0 and step % 2 == 1, step == 1
        for wrapper in (first, second):
            wrapper.zero_grad()
        if is_started:
            first.start_grad_sync()
        outputs = [wrapper(data(5, 4)).sum() for wrapper in ((second,) if is_started else (first, second))]
        if fails and rank:
            first.abort_grad_sync("its loss is no number")
            second.abort_grad_sync("its loss is no number")
            continue
        with pytest.raises(PeerAbortedError) if fails else contextlib.nullcontext():
            sum(outputs).backward()
        if is_started and not fails:
            first.finish_grad_sync()
        elif is_started and not is_forgotten:
            first.abort_grad_sync()
        if not fails:
            sums = [wrapper.module[0].bias.grad.sum().item() for wrapper in (first, second)]
            assert sums == ([10.0, 10.0] if step % 2 == 0 else [5.0, 10.0])


@on_two_ranks
def test_what_one_rank_has_started_is_over_where_it_hears_in_another_wrapper_that_the_step_has_failed():
    first, second = (DistributedDataParallel(seeded(mlp, 4, 2)) for _ in range(2))

    def fail(_gradient):
        raise ArithmeticError("this rank alone")

    for number in range(12):  # which of the two wrappers' connections the ranks find closed first is chance
        first.zero_grad()
        second.zero_grad()
        is_bad, x = number % 2 == 0, data(3, 4, rank=dist.get_rank(), step=number)
        with (
            pytest.raises(ArithmeticError if dist.get_rank() == 0 else PeerAbortedError)
            if is_bad
            else contextlib.nullcontext()
        ):
            if is_bad and dist.get_rank():
                first.start_grad_sync()
                second(x).sum().backward()
                first.finish_grad_sync()
            else:
                outputs = [first(x), second(x)]
                if is_bad:
                    outputs[1].register_hook(fail)
                sum(outputs).sum().backward()


@pytest.mark.parametrize("late", [0, 1])
@on_two_ranks
def test_what_one_rank_has_started_is_over_where_the_other_tells_of_the_failure_in_one_wrapper_after_another(late):
    wrappers = [DistributedDataParallel(seeded(mlp, 4, 2)) for _ in range(2)]
    first, second = wrappers[late], wrappers[1 - late]
    abort = first._reducer.synchronizer.abort

    def abort_late(*args):
        time.sleep(0.3)
        return abort(*args)

    def fail(_gradient):
        raise ArithmeticError("this rank alone")

    first._reducer.synchronizer.abort = abort_late
    for number in range(4):
        first.zero_grad()
        second.zero_grad()
        x, is_bad = data(3, 4, rank=dist.get_rank(), step=number), number % 2 == 0
        if is_bad and dist.get_rank():
            first.start_grad_sync()
            with pytest.raises(PeerAbortedError):
                second(x).sum().backward()
            continue
        outputs = [first(x), second(x)]
        if is_bad:
            outputs[1].register_hook(fail)
        with pytest.raises(ArithmeticError) if is_bad else contextlib.nullcontext():
            sum(outputs).sum().backward()
        if not is_bad:
            assert_same_on_all_ranks(first)


@on_two_ranks
def test_what_was_started_and_given_up_is_over_though_garbage_is_not_collected_yet():
    """Its error refers to itself. A later failure was noted in it, for its wrapper, whose next step nobody gave up."""
    rank = dist.get_rank()
    wrappers = [DistributedDataParallel(seeded(mlp, 4, 2)) for _ in range(2)]
    gc.disable()
    try:
        for step, (culprit, unused) in enumerate([(1, ()), (0, (1,)), (0, (0,)), (None, ()), (None, ())]):
            x = data(5, 4, rank=0, step=step)
            for wrapper in wrappers:
                wrapper.zero_grad()
            if rank == culprit:
                started = [wrappers[i] for i in unused]
                used = [wrapper for wrapper in wrappers if wrapper not in started]
                for wrapper in started:
                    wrapper.start_grad_sync()
                for wrapper in used:
                    wrapper(x)
                for wrapper in (*started, *used):
                    wrapper.abort_grad_sync()
                continue
            with contextlib.nullcontext() if culprit is None else pytest.raises(PeerAbortedError):
                sum(wrapper(x).sum() for wrapper in wrappers).backward()
            if culprit is None:
                for wrapper in wrappers:
                    mean = mean_gradients(wrapper.module, lambda model, _, x=x: model(x).sum().backward())
                    assert_gradients(wrapper.module, mean)
    finally:
        gc.enable()


@on_two_ranks
def test_what_has_its_averages_already_is_not_given_up():
    """Else the next step would be, and the ranks would be a step apart from then on."""
    rank = dist.get_rank()
    first, second, third = (DistributedDataParallel(seeded(mlp, 4, 2)) for _ in range(3))
    for step in range(4):
        for wrapper in (first, second):
            wrapper.zero_grad()
            with wrapper.no_sync():
                square(wrapper, rank, step)
        second.start_grad_sync()
        first.finish_grad_sync()  # which drives the other one, too
        for _ in range(5):
            third.finish_grad_sync()
        if rank == 1 and step == 1:
            second.abort_grad_sync()
            second.abort_grad_sync("once more")
            continue
        with contextlib.suppress(PeerAbortedError) if step == 1 else contextlib.nullcontext():
            second.finish_grad_sync()
        if step != 1:
            mean = mean_gradients(second.module, lambda model, other, step=step: square(model, other, step))
            assert_gradients(second.module, mean)


@pytest.mark.parametrize("has_hook", [False, True], ids=["", "in_a_users_group"])
@pytest.mark.parametrize("place", [2, 0])
@on_two_ranks
def test_a_step_is_given_up_while_its_backward_runs(place, has_hook):
    """What is left of the backward is of the step that was given up, and so are the optimizers in its hooks."""
    rank, module = dist.get_rank(), seeded(mlp, 4, 64, 64, 2)
    wrapper = DistributedDataParallel(module, bucket_cap_mb=1e-6)
    if has_hook:
        wrapper.register_comm_hook(dist.new_group(), allreduce_hook)
    expected, calls = mean_gradients(module, square), []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(calls.append)
    square(wrapper, rank)
    own = copy.deepcopy(module)
    own.zero_grad()
    square(own, rank)
    wrapper.zero_grad()
    calls.clear()

    def give_up_twice(_gradient):
        wrapper.abort_grad_sync("NaN")
        wrapper.abort_grad_sync("once more")

    if rank == 0:
        handle = module[place].weight.register_hook(give_up_twice)
        square(wrapper, rank)
        handle.remove()
    else:
        with pytest.raises(PeerAbortedError, match="NaN"):
            square(wrapper, rank)
    assert not calls
    assert_gradients(module, gradients(own), rtol=0, atol=0)
    for _ in range(2):
        wrapper.zero_grad()
        square(wrapper, rank)
        assert_gradients(module, expected)
        assert_same_on_all_ranks(module)


@pytest.mark.parametrize("by_hand", [False, True])
@on_two_ranks
def test_a_step_is_given_up_in_a_hook_that_is_called_before_gradients_are_synchronized(by_hand):
    rank, module, calls = dist.get_rank(), seeded(mlp, 4, 5, 2), []
    wrapper = DistributedDataParallel(module)
    expected, own = (mean_gradients(module, square, world_size=size) for size in (2, 1))
    module[0].weight.register_post_accumulate_grad_hook(calls.append)

    def give_up(wrapper):
        module[0].weight.grad.zero_()
        wrapper.abort_grad_sync("too bad")

    def step():
        wrapper.zero_grad()
        with wrapper.no_sync() if by_hand else contextlib.nullcontext():
            square(wrapper, rank)
        if by_hand:
            calls.clear()
            wrapper.finish_grad_sync()

    handle = wrapper.register_comm_hook(give_up if rank == 0 else calls.append)
    with pytest.raises(PeerAbortedError, match="too bad") if rank else contextlib.nullcontext():
        step()
    if rank == 0:
        assert_gradients(module, own, rtol=0, atol=0)
        assert not calls
    handle.remove()
    for _ in range(2):
        step()
        assert_gradients(module, expected)


def fail_a_step(wrapper, *, known):
    """Rank 1 gives a step up; with `known` the other ranks hear of it in this step, and else in what they do next."""
    if known:
        give_up(wrapper, 1)
    elif dist.get_rank() == 1:
        wrapper(data(5, 4)).sum()
        wrapper.abort_grad_sync()


@on_three_ranks
def test_parameters_are_compared_after_a_failed_step():
    rank, module = dist.get_rank(), seeded(mlp, 4, 2)
    wrapper = DistributedDataParallel(module)
    mean = mean_gradients(module, square)
    for known in (False, True, False):
        fail_a_step(wrapper, known=known)
        wrapper.check_in_sync()
        wrapper.zero_grad()
        square(wrapper, rank)
        assert_gradients(module, mean)


@on_three_ranks
def test_a_compressor_is_registered_after_a_failed_step():
    """Its ranks draw the same elements if they count the same steps."""
    rank = dist.get_rank()
    for known in (False, True):
        wrapper = DistributedDataParallel(seeded(mlp, 4, 2))
        square(wrapper, rank)
        fail_a_step(wrapper, known=known)
        wrapper.register_comm_hook(RandomK(0.5, min_numel=0))
        assert len(set(of_all_ranks(wrapper.comm_state_dict()["steps"]))) == 1
        square(wrapper, rank)
        wrapper.check_in_sync()


def reloaded(wrapper, before):
    wrapper.load_comm_state_dict(before)
    return wrapper


def resumed(wrapper, _before):
    other = DistributedDataParallel(seeded(mlp, 4, 16))
    other.register_comm_hook(RandomK(0.3, min_numel=0))
    other.load_state_dict(wrapper.state_dict())
    other.load_comm_state_dict(wrapper.comm_state_dict())
    return other


def copied(wrapper, _before):
    return copy.deepcopy(wrapper)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("go_on", [reloaded, resumed, copied])
@on_three_ranks
def test_a_compressor_counts_alike_on_ranks_that_have_not_heard_of_a_failed_step(go_on, known):
    """Else the ranks would draw different elements."""
    rank = dist.get_rank()
    wrapper = DistributedDataParallel(seeded(mlp, 4, 16))
    wrapper.register_comm_hook(RandomK(0.3, min_numel=0))
    for _ in range(2):
        square(wrapper, rank)
    before = wrapper.comm_state_dict()
    fail_a_step(wrapper, known=known)
    hears_later = not known and rank != 1 and go_on is reloaded
    wrapper = go_on(wrapper, before)
    if hears_later:
        with pytest.raises(PeerAbortedError):
            square(wrapper, rank)
    for number in range(2):
        wrapper.zero_grad()
        square(wrapper, rank)
        assert_same_on_all_ranks(wrapper.module)
        assert wrapper.comm_state_dict()["steps"] == 3 + number


def give_megatrons_up(model, culprit, step, how):
    """One rank gives its step up, by one of `WAYS`; the others' error of it, None where there is none."""
    rank = dist.get_rank()
    try:
        if rank == culprit:
            WAYS[how](model, step)
            model.abort_grad_sync("the loss is no number")
            model.abort_grad_sync("once more")  # which they know
        else:
            graphs.loss(model, rank, step, taken=[rank]).backward()
            model.finish_grad_sync()
    except PeerAbortedError as error:
        assert rank != culprit
        model.abort_grad_sync("in an except for any error")  # which all know of
        return str(error)
    return None


def after_forward(model, step):
    graphs.loss(model, dist.get_rank(), step, taken=[2])


def after_an_error_above_the_outputs(model, step):
    with pytest.raises(Broken):
        Fuse.apply(graphs.loss(model, dist.get_rank(), step, taken=[2]), True).backward()


def after_backward(model, step):
    graphs.loss(model, dist.get_rank(), step, taken=[2]).backward()


WAYS = {way.__name__: way for way in (after_forward, after_an_error_above_the_outputs, after_backward)}


@pytest.mark.parametrize("how", list(WAYS))
@graphs.each_variant
@on_three_ranks
def test_megatrons_wrapper(options, how):
    model, rank = graphs.wrap(**options), dist.get_rank()
    # Where a backward has sent all that the others need, they may go on.
    is_late = how == "after_backward" and model.ddp_config.overlap_grad_reduce
    for step in range(6):
        culprit = step // 2
        model.zero_grad_buffer()
        before = graphs.main_gradients(model)
        text = give_megatrons_up(model, culprit, step, how)
        if rank == culprit and how != "after_backward":
            assert_same(graphs.main_gradients(model), before)
        if rank != culprit and not is_late:
            assert re.search(rf"rank {culprit}( failed in .*)?: (AbortedError: )?the loss is no number", text), text
        if step % 2:  # the next may be given up before the ranks are connected again
            model.zero_grad_buffer()
            graphs.loss(model, rank, step, taken=[rank]).backward()
            model.finish_grad_sync()
            graphs.hold(model, graphs.mean_of(model.module, *((r, step, {"taken": [r]}) for r in range(3))))


@pytest.mark.parametrize("sharded", [False, True])
@on_two_ranks
def test_what_megatrons_wrapper_has_accumulated_is_kept(sharded):
    model, rank = (
        graphs.wrap(overlap_grad_reduce=True, bucket_size=60, use_distributed_optimizer=sharded),
        dist.get_rank(),
    )
    model.zero_grad_buffer()
    with model.no_sync():
        graphs.loss(model, rank, 0, taken=[rank]).backward()
        graphs.loss(model, rank, 1, taken=[0]).backward()
    own = graphs.main_gradients(model)
    model.zero_grad_buffer()
    with model.no_sync():
        graphs.loss(model, rank, 0, taken=[rank]).backward()
    last = graphs.loss(model, rank, 1, taken=[0])
    if rank == 1:
        last.backward()
        model.abort_grad_sync()
        assert_same(graphs.main_gradients(model), own)
        with pytest.raises(PeerAbortedError, match=r"failed here already.* it has called abort_grad_sync\(\)"):
            model.finish_grad_sync()
        assert_same(graphs.main_gradients(model), own)
    else:
        with contextlib.suppress(PeerAbortedError):  # it may have all that it needs
            last.backward()
            model.finish_grad_sync()
    model.zero_grad_buffer()
    graphs.loss(model, rank, 2, taken=[rank]).backward()
    model.finish_grad_sync()
    graphs.hold(model, graphs.mean_of(model.module, *((r, 2, {"taken": [r]}) for r in range(2))))


def blow(_):
    raise Broken("blown")


def assert_same(tables, others):
    assert tables.keys() == others.keys()
    assert all(torch.equal(table, others[name]) for name, table in tables.items())


@pytest.mark.parametrize("ways", [("hook", "loss"), ("loss", "hook"), ("loss",), ("hook",)], ids=" ".join)
@on_two_ranks
def test_megatrons_wrapper_after_a_failure_of_which_the_failing_rank_had_not_heard(ways):
    """Rank 0 fails with connections that rank 1 has closed: it has no part in rank 1's attempt to connect again."""
    rank, store, has_averages = dist.get_rank(), dist.distributed_c10d._get_default_store(), f"averages {ways}"
    model = Megatron(None, DistributedDataParallelConfig(overlap_grad_reduce=True), nn.Linear(4, 2))
    fates = ["", "behind", *ways, "", ""]
    for step, way in enumerate(fates):
        gives_up = way and rank == (way == "behind")
        model.zero_grad_buffer()
        loss = model(torch.ones(3, 4)).sum()
        handle = model.module.weight.register_hook(blow) if gives_up and way == "hook" else None
        try:
            if gives_up and way == "loss":
                model.abort_grad_sync("behind forward")
            else:
                loss.backward()
            if gives_up and way == "behind":
                store.wait([has_averages])
                model.abort_grad_sync("behind backward")
            model.finish_grad_sync()
            assert not gives_up
            assert way in ("", "behind")
            assert torch.equal(model.module.weight.main_grad, torch.full((2, 4), 3.0))
        except (Broken, PeerAbortedError):
            assert way
            model.abort_grad_sync("in an except for any error")  # which all know of
        if handle is not None:
            handle.remove()
        if rank == 0 and step == 1:
            store.set(has_averages, "")
