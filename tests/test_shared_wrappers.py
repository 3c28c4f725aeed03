"""Wrappers that have parameters in common: each gradient is averaged once, in whatever order the ranks use them."""

import contextlib
import copy
import itertools
import random
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from one_process import (
    assert_gradients,
    assert_same_on_all_ranks,
    data,
    gradients,
    mean_gradients,
    mean_of,
    of_all_ranks,
    seeded,
)
from ppe_ddp import DistributedDataParallel, PeerAbortedError
from ppe_ddp.engine.backward import Phase
from ppe_ddp.engine.completion import SharedParameters, arrange
from ppe_ddp.engine.reduction import BLOCKING
from rank_tests import VARIANTS, each_variant, on_four_ranks, on_three_ranks, on_two_ranks


class Tied(nn.Module):
    """A layer of its own, with batch norm, and a layer that other modules have as well."""

    def __init__(self, tied):
        super().__init__()
        self.own, self.norm, self.tied = nn.Linear(3, 4), nn.BatchNorm1d(4), tied

    def forward(self, x):
        return self.tied(torch.tanh(self.norm(self.own(x))))


def same_module(count):
    """One module, for all wrappers."""
    return [seeded(Tied, nn.Linear(4, 2))] * count


def tied_weights(count):
    """Modules that have one layer in common."""
    tied = seeded(nn.Linear, 4, 2)
    return [seeded(Tied, tied) for _ in range(count)]


def chain(count):
    """Modules of which each has a layer in common with the next one."""
    layers = [seeded(nn.Linear, 4, 4) for _ in range(count + 1)]
    return [nn.Sequential(nn.Linear(3, 4), layers[k], nn.Tanh(), layers[k + 1]) for k in range(count)]


def nothing_in_common(count):
    return [seeded(Tied, seeded(nn.Linear, 4, 2)) for _ in range(count)]


KINDS = [same_module, tied_weights, chain]
each_kind = pytest.mark.parametrize("make", KINDS, ids=[make.__name__ for make in KINDS])


def loss_of(models, order, rank, step):
    """One loss through these models; autograd begins with that which was called last."""
    outputs = [models[k](data(4, 3, rank=rank, step=10 * step + k)) for k in order]
    return sum(output.pow(2).sum() for output in outputs)


def expected(models, programs, step):
    """The mean gradients of each model after each rank has run its program."""
    tables = [[] for _ in models]
    for rank, program in enumerate(programs):
        twins = copy.deepcopy(models)
        for order in program:
            if isinstance(order, tuple):
                loss_of(twins, order, rank, step).backward()
        for table, twin in zip(tables, twins, strict=True):
            table.append(gradients(twin))
    return [mean_of(table, len(programs)) for table in tables]


def run(wrappers, programs, step=0):
    """Let this rank run its program and look at what it has then.

    Args:
        wrappers: The wrappers.
        programs: For each rank what it does in turn: a tuple is one backward through these wrappers, a number a
            `finish_grad_sync()` of that one.
        step: Chooses the data.
    """
    models = [wrapper.module for wrapper in wrappers]
    want = expected(models, programs, step)
    for wrapper in wrappers:
        wrapper.zero_grad()
    for order in programs[dist.get_rank()]:
        if isinstance(order, tuple):
            loss_of(wrappers, order, dist.get_rank(), step).backward()
        else:
            wrappers[order].finish_grad_sync()
    for model, table in zip(models, want, strict=True):
        assert_gradients(model, table)
        assert_same_on_all_ranks(model)
        assert_same_buffers(model)


def assert_same_buffers(model):
    own = [buffer.clone() for buffer in model.buffers()]
    tables = of_all_ranks(own)
    for table in tables:
        assert all(map(torch.equal, table, own))


def wrapped(models, *, hook=None, **options):
    wrappers = [DistributedDataParallel(model, **options) for model in models]
    for wrapper in wrappers if hook is not None else ():
        wrapper.register_comm_hook(None, hook)
    return wrappers


TOGETHER = [[[(0, 1)], [(0, 1)]], [[(0, 1)], [(1, 0)]], [[(1, 0)], [(0, 1)]]]
APART = [
    [[(0,), (1,)], [(0,), (1,)]],
    [[(1,), (0,)], [(1,), (0,)]],
    [[(0, 1)], [(0,), (1,)]],
    [[(0, 1)], [(1,), (0,)]],
    [[(1,), (0,)], [(1, 0)]],
]
ALONE = [
    [[(0, 1)], [(0,), 1]],
    [[(0, 1)], [1, (0,)]],
    [[(0,), 1], [(1, 0)]],
    [[(1, 0)], [0, 1]],
    [[1, 0], [(0, 1)]],
    [[(0,), 1], [0, (1,)]],
    [[0, 1], [0, 1]],
]


@each_kind
@pytest.mark.parametrize("options", [*VARIANTS, {"shared_memory": False}], ids=str)
@on_two_ranks
def test_each_rank_ends_its_backwards_in_its_own_order(make, options):
    """Without shared memory a gradient of one rank is sent by it; the other may have an average of it already."""
    wrappers = wrapped(make(2), **options)
    for step, programs in enumerate([*TOGETHER, *APART, *ALONE]):
        run(wrappers, programs, step)


def random_programs(draw, count, world_size):
    """Programs in which all ranks synchronize in one order, and end neighbours in it together at will."""
    order = [k for _ in range(draw.choice((1, 1, 2))) for k in range(count)]
    draw.shuffle(order)
    programs = []
    for _ in range(world_size):
        program, rest = [], order
        while rest:
            most = next((k for k in range(len(rest)) if rest[k] in rest[:k]), len(rest))
            size = draw.randint(1, most)
            together, rest = draw.sample(rest[:size], size), rest[size:]
            program.append(together[0] if size == 1 and draw.random() < 0.5 else tuple(together))
        programs.append(program)
    return programs


def hold_random_programs(seed, make, **options):
    draw = random.Random(seed)
    wrappers = wrapped(make(3), **options)
    for step in range(6):
        programs = random_programs(draw, len(wrappers), dist.get_world_size())
        run(wrappers, programs, step)


@each_kind
@pytest.mark.parametrize("shared_memory", [True, False])
@on_two_ranks
def test_random_programs_on_two_ranks(make, shared_memory):
    hold_random_programs(KINDS.index(make), make, shared_memory=shared_memory)


def hook_in_the_default_group(state, bucket):
    return allreduce_hook(state, bucket)


@pytest.mark.parametrize("hook", [hook_in_the_default_group, allreduce_hook])
@on_two_ranks
def test_hooks_in_one_group_of_the_users(hook):
    for make in (nothing_in_common, *KINDS):
        wrappers = wrapped(make(2), hook=hook, bucket_cap_mb=1e-6)
        for step, programs in enumerate([*TOGETHER, *APART, *ALONE] if make is nothing_in_common else TOGETHER):
            run(wrappers, programs, step)
    hold_random_programs(0, nothing_in_common, hook=hook)


def blocking_broadcast(tensors, group):
    for tensor in tensors:
        dist.broadcast(tensor, group=group, group_src=0)


def blocking_mean(bucket, group):
    dist.all_reduce(bucket.buffer(), group=group)
    bucket.buffer().div_(dist.get_world_size(group))


class Waiting:
    """The least that a function may return: nobody can ask whether it is done, so waiting for it blocks."""

    def __init__(self, bucket, group):
        self.work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        self.finish = partial(bucket.buffer().div_, dist.get_world_size(group))

    def wait(self):
        self.work.wait()
        self.finish()


FUNCTIONS = [
    {"broadcast_function": blocking_broadcast},
    {"reduce_function": blocking_mean},
    {"reduce_function": Waiting},
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=["broadcast", "reduce", "reduce, and wait alone"])
@on_two_ranks
def test_functions_that_block(function):
    hold_random_programs(0, nothing_in_common, bucket_cap_mb=1e-6, **function)
    models = [DistributedDataParallel(nn.BatchNorm1d(4), **function) for _ in range(2)]
    for _ in range(2):
        sum(model(torch.ones(3, 4)).sum() for model in models).backward()
    assert all(model._reducer.synchronizer.turns >= BLOCKING for model in models)


@on_two_ranks
def test_a_wrapper_connects_again_beside_a_function_that_blocks():
    options = [{}, {"reduce_function": blocking_mean, "bucket_cap_mb": 1e-6}]
    models = [DistributedDataParallel(nn.Linear(4, 2), **own) for own in options]

    def fail(gradient):
        if dist.get_rank() == 1:
            raise ArithmeticError("planned")

    handle = models[0].module.weight.register_hook(fail)
    with pytest.raises((ArithmeticError, PeerAbortedError)):
        models[0](torch.ones(3, 4)).sum().backward()
    handle.remove()
    for model in models:
        model.zero_grad()
    sum(model(torch.full((3, 4), 1.0 + dist.get_rank())).sum() for model in models).backward()
    assert all(model.module.weight.grad.eq(4.5).all() for model in models)


def test_a_function_that_blocks_is_called_after_a_wrapper_behind_it_has_connected_again():
    groups = [
        SimpleNamespace(parent=SimpleNamespace(group_name="0"), number=k, name=f"0/{k}", step=1, is_closed=k == 2)
        for k in (1, 2)
    ]
    shared = [SharedParameters(one, exclusive=False, turns=lambda: BLOCKING) for one in groups]
    for one in shared:
        one.take_turns()
    blocking, connecting = turns = [one.turn() for one in shared]
    arrange(turns, [])
    blocking.agree(blocking.apart)
    has_come = next(blocking.wait())
    assert not has_come()
    groups[1].is_closed = False
    assert has_come()
    connecting.agree(connecting.apart)
    assert not next(connecting.wait())()


@on_three_ranks
def test_hooks_in_one_group_of_three_ranks():
    hold_random_programs(1, nothing_in_common, hook=hook_in_the_default_group)


@pytest.mark.parametrize("options", [{"bucket_cap_mb": 1e-6}, {"gradient_as_bucket_view": False}], ids=str)
@each_kind
@on_three_ranks
def test_random_programs_on_three_ranks(make, options):
    hold_random_programs(10 + KINDS.index(make), make, **options)


@pytest.mark.parametrize("make", [*KINDS, nothing_in_common])
@on_two_ranks
def test_started_by_hand_and_ended_in_another_order(make):
    wrappers = wrapped(make(2))
    rank = dist.get_rank()
    models = [wrapper.module for wrapper in wrappers]
    for step in range(2):
        want = expected(models, [[(0, 1)]] * 2, step)
        for wrapper in wrappers:
            wrapper.zero_grad()
        with wrappers[0].no_sync(), wrappers[1].no_sync():
            loss_of(wrappers, (0, 1), rank, step).backward()
        for k in (rank, 1 - rank):
            wrappers[k].start_grad_sync()
        for k in (0, 1) if step else (1 - rank, rank):
            wrappers[k].finish_grad_sync()
        for model, table in zip(models, want, strict=True):
            assert_gradients(model, table)
            assert_same_on_all_ranks(model)


class OnlyWaits:
    """The result of a function of the user's that cannot tell whether it is there."""

    def __init__(self, works, tensors):
        self.works, self.tensors = works, tensors

    def wait(self):
        for work in self.works:
            work.wait()
        for tensor in self.tensors:
            tensor.div_(2)


@on_two_ranks
def test_what_was_sent_where_another_set_ended_is_finished_in_any_order():
    def reduce(tensors, group):
        return OnlyWaits([dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors], tensors)

    rank, (other,) = dist.get_rank(), wrapped(nothing_in_common(1))
    wrappers = wrapped(same_module(2), reduce_function=reduce)
    want = expected([wrapper.module for wrapper in wrappers], [[(0, 1)]] * 2, 0)
    with wrappers[0].no_sync(), wrappers[1].no_sync():
        loss_of(wrappers, (0, 1), rank, 0).backward()
    for wrapper in wrappers:
        wrapper.start_grad_sync()
    loss_of([other], [0], rank, 0).backward()
    for wrapper in reversed(wrappers):
        wrapper.finish_grad_sync()
    assert_gradients(wrappers[0].module, want[0])


@each_kind
@on_two_ranks
def test_a_backward_in_no_sync_is_not_taken_for_that_of_another_wrapper(make):
    """The other one has a forward whose backward is still to come, or was ended by hand before."""
    rank, wrappers = dist.get_rank(), wrapped(make(2))
    for step in range(2):
        want = expected([wrapper.module for wrapper in wrappers], [[(0,), (step,)], [(step,)]], step)
        for wrapper in wrappers:
            wrapper.start_grad_sync()
        for wrapper in wrappers:
            wrapper.finish_grad_sync()
        later = loss_of(wrappers, (step,), rank, step)
        with wrappers[0].no_sync():
            if rank == 0:
                loss_of(wrappers, (0,), rank, step).backward()
        later.backward()
        assert_gradients(wrappers[step].module, want[step])
        for wrapper in wrappers:
            wrapper.zero_grad()


@each_variant
@on_two_ranks
def test_what_one_rank_has_frozen_and_keeps_a_gradient_of_is_averaged_once(options):
    rank = dist.get_rank()
    wrappers = wrapped(tied_weights(2), **options)
    tied, total = wrappers[0].module.tied, 0
    for step in range(4):
        is_frozen = step in (1, 2)
        twins = copy.deepcopy([wrapper.module for wrapper in wrappers])
        twins[0].tied.requires_grad_()
        for other in (1,) if is_frozen else (0, 1):
            loss_of(twins, (0, 1), other, step).backward()
        total = total + twins[0].tied.weight.grad / 2
        tied.requires_grad_(rank == 1 or not is_frozen)
        loss_of(wrappers, (0, 1) if rank else (1, 0), rank, step).backward()
        torch.testing.assert_close(tied.weight.grad, total)


@pytest.mark.parametrize("together", [True, False])
@each_variant
@on_two_ranks
def test_what_one_rank_freezes_and_thaws_between_forwards_is_averaged_once(together, options):
    wrappers = wrapped(tied_weights(2), **options)

    def step(models, tied, flags, rank):
        losses = []
        for k, model in enumerate(models):
            tied.requires_grad_(flags[k] or rank == 1)
            losses.append(model(data(5, 3, rank=rank, step=k)).pow(2).sum())
        tied.requires_grad_(flags[2] or rank == 1)
        for loss in [sum(losses)] if together else losses:
            loss.backward()

    for flags in itertools.product([True, False], repeat=3):
        twins = [copy.deepcopy([wrapper.module for wrapper in wrappers]) for _ in range(2)]
        for rank, modules in enumerate(twins):
            step(modules, modules[0].tied, flags, rank)
        step(wrappers, wrappers[0].module.tied, flags, dist.get_rank())
        for k, wrapper in enumerate(wrappers):
            assert_gradients(wrapper.module, mean_of([gradients(modules[k]) for modules in twins], 2))
        for wrapper in wrappers:
            wrapper.zero_grad()


@each_kind
@on_two_ranks
def test_each_rank_has_a_backward_of_another_one_alone(make):
    rank = dist.get_rank()
    wrappers = [DistributedDataParallel(module) for module in make(2)]
    for step in range(3):
        want = expected([wrapper.module for wrapper in wrappers], [[(0,)], [(1,)]], step)
        wrappers[1 - rank].start_grad_sync()
        loss_of(wrappers, [rank], rank, step).backward()
        wrappers[1 - rank].finish_grad_sync()
        for wrapper, table in zip(wrappers, want, strict=True):
            assert_gradients(wrapper.module, table)
        for wrapper in wrappers:
            wrapper.zero_grad()


@each_kind
@on_three_ranks
def test_ranks_have_backwards_of_some_and_start_the_others(make):
    """There are two pairs that share parameters, and a rank may use none of a pair, or none at all."""
    draw, rank = random.Random(KINDS.index(make)), dist.get_rank()
    wrappers = wrapped([*make(2), *make(2)])
    for step in range(8):
        used = [draw.sample(range(4), draw.randint(0, 4)) for _ in range(3)]
        want = expected([wrapper.module for wrapper in wrappers], [[tuple(own)] if own else [] for own in used], step)
        orders = [[draw.sample([k for k in range(4) if k not in own], 4 - len(own)) for _ in "12"] for own in used]
        for k in orders[rank][0]:
            wrappers[k].start_grad_sync()
        if used[rank]:
            loss_of(wrappers, used[rank], rank, step).backward()
        for k in orders[rank][1]:
            wrappers[k].finish_grad_sync()
        for wrapper, table in zip(wrappers, want, strict=True):
            assert_gradients(wrapper.module, table)
        for wrapper in wrappers:
            wrapper.zero_grad()


@each_kind
@on_two_ranks
def test_what_was_unfrozen_is_averaged_once_where_one_wrapper_starts_before_another_ones_forward(make):
    rank = dist.get_rank()
    wrappers = [DistributedDataParallel(module) for module in make(2)]
    for step in range(3):
        for is_trained in (False, True):
            for wrapper in wrappers:
                wrapper.zero_grad()
                wrapper.module.requires_grad_(is_trained)
            if not is_trained:
                loss_of(wrappers, [0, 1], rank, step)
        want = expected([wrapper.module for wrapper in wrappers], [[(0,)]] * 2, step)
        wrappers[1].start_grad_sync()
        loss_of(wrappers, [0], rank, step).backward()
        wrappers[1].finish_grad_sync()
        for wrapper, table in zip(wrappers, want, strict=True):
            assert_gradients(wrapper.module, table)


@each_kind
@on_two_ranks
def test_a_rank_fails_between_what_it_has_started_and_its_backward(make):
    hold_failed_steps(make, (False, True, False, True, False), forwards=False)


@each_kind
@on_two_ranks
def test_after_a_failed_step_what_was_started_has_a_forward_of_which_no_backward_follows(make):
    hold_failed_steps(make, (False, True, False, True, True, False), forwards=True)


def hold_failed_steps(make, steps, *, forwards):
    """Each rank starts the other one's wrapper, and in steps that are True rank 1 fails; with ``forwards`` of both."""
    rank = dist.get_rank()
    wrappers = [DistributedDataParallel(module) for module in make(2)]
    for fails in steps:
        want = expected([wrapper.module for wrapper in wrappers], [[(0,)], [(1,)]], 0)
        wrappers[1 - rank].start_grad_sync()
        unused = [wrapper(data(4, 3)) for wrapper in wrappers] if forwards else []
        if fails and rank == 1:
            for wrapper in wrappers:
                wrapper.abort_grad_sync("its loss has raised")
        else:
            with pytest.raises(PeerAbortedError, match="its loss") if fails else contextlib.nullcontext():
                loss_of(wrappers, [rank], rank, 0).backward()
                wrappers[1 - rank].finish_grad_sync()
        for wrapper, table in zip(wrappers, want, strict=True):
            if not fails:
                assert_gradients(wrapper.module, table)
        for wrapper in wrappers:
            wrapper.zero_grad()
        del unused


@on_two_ranks
def test_what_is_shared_is_sent_once():
    wrappers = wrapped(tied_weights(2))
    for step, programs in enumerate(TOGETHER):
        run(wrappers, programs, step)
        assert [[name for name in wrapper.trace().agreed if "tied" in name] for wrapper in wrappers] == [
            ["tied.weight", "tied.bias"],
            [],
        ]


@each_kind
@on_two_ranks
def test_a_wrapper_that_was_only_saved_and_compared_is_not_used(make):
    rank = dist.get_rank()
    used, idle = wrapped(make(2))
    run([used, idle], [[(0, 1)]] * 2)
    for wrapper in (used, idle):
        wrapper.load_comm_state_dict(wrapper.comm_state_dict())
        wrapper.check_in_sync()
    for step in range(2):
        used.zero_grad()
        idle.zero_grad()
        tables = []
        for other in range(2):
            twin = copy.deepcopy(used.module)
            for micro in range(1 if other else 2):
                loss_of([twin], [0], other, micro + step).backward()
            tables.append(gradients(twin))
        with used.no_sync() if rank == 0 else contextlib.nullcontext():
            loss_of([used], [0], rank, step).backward()
        if rank == 0:
            loss_of([used], [0], rank, 1 + step).backward()
        assert_gradients(used.module, mean_of(tables, 2))


@on_two_ranks
def test_a_wrapper_that_is_dropped_shares_nothing_any_more():
    wrappers = wrapped(tied_weights(2))
    phases = []

    def look(_):
        phases.append(wrappers[0]._reducer._backward.phase is Phase.BEGUN)

    for count in (2, 1):
        del wrappers[count:]
        run(wrappers, [[(0,), *range(1, count)]] * 2, count)
        handle = wrappers[0].module.own.weight.register_hook(look)
        loss_of(wrappers, (0,), dist.get_rank(), 0).backward()
        handle.remove()
        for k in range(1, count):
            wrappers[k].finish_grad_sync()
    assert phases == [True, False]  # what nobody else has is asked for while backward runs


class Note(nn.Module):
    """Its outputs cannot be seen: only what lands says that there is a backward."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return Hidden(self.layer(x))


class Hidden:
    def __init__(self, value):
        self.value = value


@on_two_ranks
def test_outputs_that_cannot_be_seen():
    rank = dist.get_rank()
    layer = seeded(nn.Linear, 3, 2)
    wrappers = wrapped([Note(layer), Note(layer)])
    twin = copy.deepcopy(layer)
    for step, orders in enumerate([[(0, 1), (1, 0)], [(0,), ()], [(), (1,)], [(1, 0), (0, 1)]]):
        tables = []
        for other, order in enumerate(orders):
            twin.zero_grad()
            if order:
                sum(twin(data(4, 3, rank=other, step=10 * step + k)).pow(2).sum() for k in order).backward()
            tables.append(gradients(twin))
        layer.zero_grad()
        outputs = [wrappers[k](data(4, 3, step=10 * step + k)).value for k in orders[rank]]
        if outputs:
            sum(output.pow(2).sum() for output in outputs).backward()
        else:
            wrappers[orders[1 - rank][0]].finish_grad_sync()
        assert_gradients(layer, mean_of(tables, 2))
        assert_same_on_all_ranks(layer)


class Late(nn.Module):
    """Nobody expects the gradient of what others have as well, inside a reentrant checkpoint."""

    def __init__(self, tied):
        super().__init__()
        self.own, self.tied = nn.Linear(3, 3), tied

    def forward(self, x):
        return checkpoint(self.tied, self.own(x), use_reentrant=True)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied_weights", "same_module"])
@on_two_ranks
def test_reentrant_checkpoints(is_tied):
    tied = seeded(nn.Linear, 3, 2)
    first = seeded(Late, tied)
    wrappers = wrapped([first, seeded(Late, tied) if is_tied else first])
    for step, programs in enumerate([*TOGETHER, *APART]):
        run(wrappers, programs, step)


@on_four_ranks
def test_a_module_is_averaged_over_its_row_and_then_over_its_column():
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "column"))
    module = seeded(nn.Linear, 3, 2)
    along = [DistributedDataParallel(module, device_mesh=mesh[name]) for name in ("row", "column")]
    for step in range(20):
        want = mean_gradients(module, lambda twin, one, k=step: loss_of([twin, twin], (0, 1), one, k).backward())
        module.zero_grad()
        loss_of(along, (0, 1), rank, step).backward()
        assert_gradients(module, want)


@pytest.mark.parametrize(("groups", "wrappers"), [(16, 1), (5, 3), (1, 16)])
def test_wrappers_of_groups_made_one_after_another_have_places_of_their_own(monkeypatch, groups, wrappers):
    monkeypatch.setattr(SharedParameters, "_all", weakref.WeakSet())
    monkeypatch.setattr(SharedParameters, "apart", SharedParameters.apart)
    made = [
        SimpleNamespace(parent=SimpleNamespace(group_name=str(7 + k)), number=1 + n)
        for k in range(groups)
        for n in range(wrappers)
    ]
    assert len({SharedParameters(one, exclusive=False).slot for one in made}) == groups * wrappers


def test_a_rank_without_the_other_wrapper_agrees_to_any_order(monkeypatch):
    def turns_of(*names):
        """On one rank with these wrappers: their turns, and what is sent for each."""
        monkeypatch.setattr(SharedParameters, "_all", weakref.WeakSet())
        monkeypatch.setattr(SharedParameters, "_with_places", weakref.WeakSet())
        monkeypatch.setattr(SharedParameters, "apart", SharedParameters.apart)
        groups = [
            SimpleNamespace(parent=SimpleNamespace(group_name=name), number=1, name=name, step=1, is_closed=False)
            for name in names
        ]
        shared = [SharedParameters(one, exclusive=False, turns=lambda: BLOCKING) for one in groups]
        for one in shared:
            one.take_turns()
        turns = [one.turn() for one in shared]
        arrange(filter(None, turns), [])
        return shared, turns, [SharedParameters.apart if turn is None else turn.apart for turn in turns]

    _some, (first, second), (of_first, of_second) = turns_of("1", "2")
    _others, (alone,), (elsewhere,) = turns_of("2")
    assert alone is None
    first.agree(of_first)
    second.agree(bytes(map(max, of_second, elsewhere)))
    has_come = next(second.wait())
    assert not has_come()
    first.end()
    assert has_come()
