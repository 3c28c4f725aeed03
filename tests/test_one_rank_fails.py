"""One rank alone fails in the communication: all ranks get an error, and the next step is right.

In each way once: their combinations, in all orders of events, are in tests/simulation.
"""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import failing
import failing_shards
from one_process import assert_gradients, assert_same_on_all_ranks, data, mean_gradients, mlp, seeded, square
from one_process import gradients as gradients_of
from ppe_ddp import DistributedDataParallel, DistributedOptimizer, PeerAbortedError, broadcast, megatron
from ppe_ddp.backends.group_internals import store_of
from ppe_ddp.backends.rank_store import SILENT
from ppe_ddp.engine import backward, reducer
from ppe_ddp.engine.completion import run
from ppe_ddp.engine.failures import Renewals
from ppe_ddp.engine.gradients import FiniteCheck
from ppe_ddp.engine.groups import Groups, renewing_all
from ppe_ddp.engine.negotiation import Negotiation
from ppe_ddp.engine.peer_processes import Activity
from ppe_ddp.errors import AbortedError, CommunicationError
from ppe_ddp.torch_internals import at_end_of_backward
from ppe_ddp.waiting import progress_engine
from rank_tests import on_three_ranks, on_two_ranks

WAYS_OF_SHARDS = (*failing_shards.PATCHES, *failing_shards.PLUGS)


@pytest.mark.parametrize("way", list(failing.WAYS))
@on_two_ranks
def test_of_two(way):
    failing.hold(way)


@pytest.mark.parametrize("way", ["on_a_thread", "in_packing"])  # all are in tests/simulation
@on_three_ranks
def test_after_backward(way):
    failing.hold(way, turns=3, seed=3, overlap=False)


@pytest.mark.parametrize("way", ["before", "in_the_wait", "in_a_sync_hook", "interrupted"])
@on_three_ranks
def test_in_a_synchronization_by_hand(way):
    failing.hold(way, turns=2, seed=4, step=failing.by_hand, shared_memory=way != "interrupted")


@pytest.mark.parametrize(("way", "shared_memory"), [("before", False), ("in_backward", True)])
@on_two_ranks
def test_nothing_is_left_of_failures(way, shared_memory):
    failing.hold_without_a_trace(way, shared_memory=shared_memory)


@on_three_ranks
def test_with_a_hook_in_the_default_group():
    failing.hold("in_backward", hook=failing.hook_in_a_users_group)


@on_two_ranks
def test_with_a_hook_of_torchs_own():
    failing.hold("in_backward", hook=failing.allreduce_hook)


@pytest.mark.parametrize("how", failing.HOOKS)
@on_two_ranks
def test_torch_hooks_of_two(how):
    failing.hold_hooks(how)


@pytest.mark.parametrize(("how", "overlap"), [("group", True), ("stateful", False)])
@on_three_ranks
def test_torch_hooks_of_three(how, overlap):
    failing.hold_hooks(how, seed=1, overlap=overlap)


@pytest.mark.parametrize(
    ("way", "overlap"), [("before", True), ("before", False), ("in_the_middle", False), ("on_a_thread", True)]
)
@on_two_ranks
def test_megatrons_wrapper(way, overlap):
    failing_shards.hold_megatron(way, overlap_grad_reduce=overlap)


# Without overlap a backward that raises sends nothing: that rank has skipped one, see test_skipped_backwards.py.
@pytest.mark.parametrize(
    ("way", "overlap"),
    [*itertools.product((*failing_shards.SCATTERS, "in_the_update"), (True, False)), ("in_backward", True)],
)
@on_two_ranks
def test_megatrons_shards(way, overlap):
    failing_shards.hold_megatron(way, sharded=True, overlap_grad_reduce=overlap)


@pytest.mark.parametrize("way", WAYS_OF_SHARDS)
@on_two_ranks
def test_the_distributed_optimizer(way):
    failing_shards.hold_optimizer(way, overlap=WAYS_OF_SHARDS.index(way) // 2 % 2 == 0)


@on_two_ranks
def test_groups_without_a_backend_for_cpus_are_connected_again():
    groups = Groups.duplicate(dist.new_group(backend="cuda:gloo"))
    groups.await_start()  # else a rank closes them that another one still connects
    groups.fail(RuntimeError(), "begun")
    run(groups.renewing())
    assert (groups.is_closed, groups.generation) == (False, 1)


def over_each_in_turn(*moments):
    """Each moment by gloo or in shared memory; test_mpi_backend.py has most of them."""
    pairs = [(moment, place // 2 % 2 == 0) for place, moment in enumerate(moments)]
    ids = [f"{moment}-{'shm' if shared else 'gloo'}" for moment, shared in pairs]
    return pytest.mark.parametrize(("moment", "shared_memory"), pairs, ids=ids)


@over_each_in_turn(*failing.Interrupted.MOMENTS)
@on_two_ranks
def test_interrupted_while_the_ranks_connect_again(moment, shared_memory):
    failing.hold_interrupted(moment, shared_memory=shared_memory)


@over_each_in_turn("as_it_comes", "while_it_waits", "when_it_has_heard", "when_it_has_made_them")
@on_three_ranks
def test_one_of_three_is_interrupted_while_the_ranks_connect_again(moment, shared_memory):
    failing.hold_interrupted(moment, times=1, shared_memory=shared_memory)


@pytest.mark.parametrize("shared_memory", [False, True], ids=["gloo", "shm"])
@pytest.mark.parametrize("order", failing.ORDERS)
@on_three_ranks
def test_the_ranks_come_to_two_wrappers_in_different_orders(order, shared_memory):
    failing.hold_order(order, shared_memory=shared_memory)


@pytest.mark.parametrize(
    ("order", "hook"),
    [("started_before_the_other", failing.hook_in_a_users_group), ("one_after_the_other", failing.allreduce_hook)],
)
@on_three_ranks
def test_hooks_of_two_wrappers_in_different_orders(order, hook):
    failing.hold_order(order, hook)


@pytest.mark.parametrize("place", [0, 1])
@on_two_ranks
def test_interrupted_while_the_first_of_two_groups_is_connected_again(place):
    both = [Groups.duplicate(dist.group.WORLD) for _ in range(2)]
    dist.barrier()  # who closes its end now ends the attempt of one that still connects
    for groups in both:
        groups.fail(AbortedError(), "begun")
    with pytest.MonkeyPatch.context() as patches:
        if dist.get_rank() == 0:
            patches.setattr(both[place], "_agree", lambda: [signal.raise_signal(signal.SIGINT)])
        with pytest.raises((KeyboardInterrupt, PeerAbortedError)):
            run(renewing_all(both))
    with contextlib.suppress(PeerAbortedError):  # of the second step of those who were connected before the interrupt
        run(renewing_all(both))
    dist.barrier()
    for groups in both:
        groups.fail(AbortedError(), "begun")
    run(renewing_all(both))
    assert [groups.is_closed for groups in both] == [False, False]


@pytest.mark.parametrize("cause", [KeyboardInterrupt, OSError])
@on_two_ranks
def test_whose_connection_is_closed_while_the_ranks_connect_again_waits_to_hear_who_has_failed(cause):
    rank, store = dist.get_rank(), store_of(dist.group.WORLD)
    groups = Groups.duplicate(dist.group.WORLD)
    dist.barrier()
    groups.fail(AbortedError(), "begun")

    def make(*_, **__):
        if rank == 0:
            store.set("is closed", "")
            raise RuntimeError("gloo: connection closed by peer")
        store.wait(["is closed"])
        raise cause("it has stopped")

    with mock.patch("ppe_ddp.engine.groups.duplicates", make):
        error = (KeyboardInterrupt, CommunicationError) if rank else PeerAbortedError
        with pytest.raises(error, match="it has stopped" if rank else "rank 1 failed .*it has stopped"):
            run(renewing_all([groups]))
    run(renewing_all([groups]))
    assert not groups.is_closed
    store.delete_key("is closed")


@on_two_ranks
def test_a_store_that_is_slow_to_answer_is_asked_again_while_the_ranks_connect():
    groups, outcome = Groups.duplicate(dist.group.WORLD), Renewals.outcome
    dist.barrier()
    groups.fail(AbortedError(), "begun")
    silent = [CommunicationError(SILENT)] * 3

    def ask(renewals):
        if silent:
            raise silent.pop()
        return outcome(renewals)

    with mock.patch.object(Renewals, "outcome", ask):
        run(renewing_all([groups]))
    assert (silent, groups.is_closed) == ([], False)


@on_two_ranks
def test_a_store_that_has_gone_with_its_rank_is_told_in_our_words():
    groups = Groups.duplicate(dist.group.WORLD)
    dist.barrier()
    groups.fail(AbortedError(), "begun")
    gone = mock.Mock(side_effect=dist.DistNetworkError("Broken pipe"))
    with (
        mock.patch.object(groups.failures, "of_others", gone),
        pytest.raises(CommunicationError, match="could not connect again after a failure failed: Broken pipe"),
    ):
        run(renewing_all([groups]))
    assert gone.called


@on_three_ranks
def test_no_rank_begins_before_all_have_their_parameters():
    """One that fails in its first step closes the connections, by which another may still receive."""
    rank, store = dist.get_rank(), store_of(dist.group.WORLD)

    def send(tensors, group):
        broadcast(tensors, group).wait()
        if rank == 1:
            with contextlib.suppress(RuntimeError):
                store.wait(["has begun"], timedelta(seconds=0.3))
            store.set("has received", "")

    DistributedDataParallel(nn.Linear(2, 1), broadcast_function=send)
    assert store.check(["has received"])
    store.set("has begun", "")


@on_two_ranks
def test_no_rank_begins_before_all_have_compared_megatrons_buffers():
    rank, store = dist.get_rank(), store_of(dist.group.WORLD)
    check = Negotiation.check

    def slow(negotiation):
        check(negotiation)
        if rank == 1:
            with contextlib.suppress(RuntimeError):
                store.wait(["has begun"], timedelta(seconds=0.3))
            store.set("has compared", "")

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Negotiation, "check", slow)
        megatron.DistributedDataParallel(None, megatron.DistributedDataParallelConfig(), nn.Linear(2, 1))
    assert store.check(["has compared"])
    store.set("has begun", "")


@pytest.mark.parametrize("shared_memory", [True, False])
@on_two_ranks
def test_what_was_sent_in_a_step_still_arrives_when_its_sender_fails_in_the_next(shared_memory):
    rank, groups = dist.get_rank(), Groups.duplicate(dist.group.WORLD, shared_memory=shared_memory)
    value, groups.step = torch.tensor([rank + 1.0]), 1
    groups.note(Activity.VOTE)
    dist.barrier()
    if rank == 0:
        _sent = dist.broadcast(value, 0, group=groups.buckets, async_op=True)
        groups.note(Activity.DONE)
        groups.fail(RuntimeError("not today"), "begun")
        return
    while not groups.failures.of_others():
        time.sleep(0.01)
    dist.broadcast(value, 0, group=groups.buckets)
    assert value.item() == 1
    groups.note(Activity.DONE)


def await_mask(model):
    """In a backward, wait until the ranks have agreed on the mask, so that the next arrivals launch buckets."""
    (exchange,) = model._reducer._backward.exchanges
    progress_engine(os.getpid()).wait_until(exchange.done, seconds=failing.SECONDS)


def holding_the_graph(held):
    """A patch: the callback of a backward, which shows whether its graph is still held, is kept in ``held``."""

    def late(callback):
        held.append(callback)
        at_end_of_backward(callback)

    return mock.patch.object(reducer, "at_end_of_backward", late)


@pytest.mark.parametrize("after", ["a backward", "no backward"])
@on_two_ranks
def test_autograd_lets_go_of_the_graph_late(after):
    """For a GPU a thread of autograd runs the graph, and still holds it when the error has been raised."""
    module = seeded(mlp, 4, 5, 2)
    expected = mean_gradients(module, square)
    model, rank, held = DistributedDataParallel(module), dist.get_rank(), []

    def fail():
        output = model(data(5, 4))
        output.register_hook(lambda _: 1 / 0)
        with holding_the_graph(held), pytest.raises(ZeroDivisionError):
            output.sum().backward()

    square(model, rank)
    for _ in range(2):
        model.zero_grad()
        if rank:
            fail()
            threading.Timer(0.05, held.clear).start()
        else:
            with pytest.raises(PeerAbortedError):
                square(model, rank)
        model.zero_grad()
        if after == "a backward" or not rank:
            square(model, rank)
        else:
            model.finish_grad_sync()
        if after == "a backward":
            assert_gradients(module, expected)
        assert_same_on_all_ranks(module)


@on_two_ranks
def test_gradients_that_are_cleared_before_autograd_lets_go_of_the_graph_stay_away():
    """The gradients of launched buckets are put back when the graph is gone."""
    module = seeded(mlp, 4, 300, 300, 2)  # its layers are so large that arrivals launch buckets
    expected = mean_gradients(module, square)
    model = DistributedDataParallel(module, bucket_cap_mb=1e-6)
    rank, held = dist.get_rank(), []

    def fail():
        hooks = [
            module[4].bias.register_hook(lambda _: await_mask(model)),
            module[0].weight.register_hook(lambda _: 1 / 0),
        ]
        with holding_the_graph(held), pytest.raises(ZeroDivisionError):
            square(model, rank)
        for hook in hooks:
            hook.remove()

    square(model, rank)
    for _ in range(2):
        model.zero_grad()
        if rank:
            fail()
            assert module[2].weight.grad is None  # it is launched
            threading.Timer(0.05, held.clear).start()
        else:
            with pytest.raises(PeerAbortedError):
                square(model, rank)
        model.zero_grad()
        square(model, rank)
        assert_gradients(module, expected)
        assert_same_on_all_ranks(module)


class Interrupts:
    """Calls a function; then raises an interrupt, once."""

    def __init__(self, function):
        self.function, self.count = function, 0

    def __call__(self, *args, **keywords):
        self.function(*args, **keywords)
        self.count += 1
        if self.count == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("views", [False, True])
@on_two_ranks
def test_an_interrupt_while_averages_are_handed_over_comes_when_all_are(views):
    """The other rank has them."""
    module, rank = seeded(mlp, 4, 5, 2), dist.get_rank()
    expected = mean_gradients(module, square)
    model = DistributedDataParallel(module, bucket_cap_mb=1e-6, gradient_as_bucket_view=views)
    gradients = model._reducer.synchronizer.gradients
    if rank == 0:
        gradients.hand_over = Interrupts(gradients.hand_over)
    with pytest.raises(KeyboardInterrupt) if rank == 0 else contextlib.nullcontext():
        square(model, rank)
    for _ in range(2):
        assert_gradients(module, expected)
        model.zero_grad()
        square(model, rank)


@on_two_ranks
def test_an_interrupt_between_steps_of_a_backward_is_told_while_its_error_is_kept():
    """Also where the mask has been sent and the backward has not noted that yet."""
    module, rank = seeded(mlp, 4, 5, 2), dist.get_rank()
    expected = mean_gradients(module, square)
    model = DistributedDataParallel(module, bucket_cap_mb=1e-6)
    reducer, negotiation = model._reducer, model._reducer.synchronizer.negotiation
    places = ((reducer._arrivals, "start_recording"), (reducer, "_completion"), (negotiation, "start"))
    interrupts = [mock.patch.object(owner, name, Interrupts(getattr(owner, name))) for owner, name in places]
    for interrupt in (*interrupts, interrupted_as_backward_ends()):
        with interrupt if rank == 0 else contextlib.nullcontext():
            with pytest.raises(KeyboardInterrupt if rank == 0 else PeerAbortedError) as _kept:
                square(model, rank)
            dist.barrier()
        model.zero_grad()
        square(model, rank)
        assert_gradients(module, expected)
        model.zero_grad()


@contextlib.contextmanager
def interrupted_as_backward_ends():
    """Python hears of a signal where it enters a function: after a long backward, that is the callback at its end."""
    before = sys.gettrace()

    def enter(frame, *_):
        if frame.f_code.co_filename == backward.__file__ and frame.f_back.f_code.co_name == "_engine_run_backward":
            sys.settrace(before)
            raise KeyboardInterrupt

    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


@on_two_ranks
def test_an_interrupt_as_a_backward_begins_whose_error_is_kept_does_not_end_the_synchronization():
    module, rank = seeded(mlp, 4, 5, 2), dist.get_rank()
    expected = mean_gradients(module, square)
    model = DistributedDataParallel(module)
    interrupt = mock.patch.object(reducer, "Backward", side_effect=KeyboardInterrupt)
    raises = pytest.raises(KeyboardInterrupt if rank == 0 else PeerAbortedError)
    with raises as _kept, interrupt if rank == 0 else contextlib.nullcontext():
        square(model, rank)
    if rank == 0:
        model.abort_grad_sync("interrupted before this backward was known")
    model.zero_grad()
    square(model, rank)
    assert_gradients(module, expected)


@on_two_ranks
def test_gradients_are_put_back_when_the_look_for_nan_in_them_fails():
    module, rank = seeded(mlp, 4, 5, 2), dist.get_rank()
    model = DistributedDataParallel(module, check_for_nan_in_grad=True)
    with model.no_sync():
        square(model, rank)
    own = gradients_of(module)
    with (
        mock.patch.object(FiniteCheck, "look", side_effect=MemoryError if rank == 0 else None),
        pytest.raises(MemoryError if rank == 0 else PeerAbortedError),
    ):
        model.finish_grad_sync()
    assert_gradients(module, own, rtol=0, atol=0)


@on_two_ranks
def test_a_gather_of_parameters_that_was_given_up_does_not_write_into_the_next_one():
    model = DistributedDataParallel(seeded(nn.Linear, 3, 5), shared_memory=False)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    shards, addresses = model._reducer.synchronizer.sharded_parameters, []
    for other in range(2):
        for _ in range(2 if dist.get_rank() == other else 0):
            shards.write_in_place([0])
            shards.gather(0)
            addresses.append(shards._gathers[0]._message[0].data_ptr())
            if len(addresses) == 1:
                shards.abandon()
        dist.barrier()
    shards.install(0)
    assert dist.get_rank() or addresses[0] != addresses[1]
    del optimizer
