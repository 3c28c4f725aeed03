"""What one rank alone does to its module or wrapper decides no collective: training goes on with the right averages.

Where it cannot, every rank has an error that names the rank, the parameter and the remedy.
"""

import copy
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from one_process import (
    Routes,
    assert_gradients,
    assert_same_on_all_ranks,
    data,
    gradients,
    mean_of,
    mlp,
    of_all_ranks,
    seeded,
    square,
)
from ppe_ddp import DisagreementError, DistributedDataParallel, PeerAbortedError, UnusableError
from ppe_ddp.backends.shared_memory.shared_reservation import shared_memory
from ppe_ddp.compression import Compressor, RandomK, WarmUp
from ppe_ddp.engine import completion
from ppe_ddp.megatron import DistributedDataParallel as MegatronDDP
from ppe_ddp.megatron import DistributedDataParallelConfig
from ppe_ddp.optim import DistributedOptimizer
from rank_tests import on_three_ranks, on_two_ranks
from test_shared_wrappers import expected, loss_of, run, tied_weights, wrapped

STEPS = 14  # the bucket size is chosen after ten
WAYS = [(2, 0, 3, 1), (1, 4, 2), (3, 0)]  # not in the order of registration, so that there is an order to learn
_KEPT = []


def frozen(module, _):
    module.layers[2].requires_grad_(False)


def registered_anew(module, _):
    for name, layer in reversed([*module.layers.named_children()]):
        delattr(module.layers, name)
        module.layers.add_module(name, layer)


def without_bias(module, _):
    module.layers[0].bias = None


def all_frozen(module, _):
    module.requires_grad_(False)


def thawed(module, _):
    module.requires_grad_(True)


def replaced(module, _):
    module.layers[0].weight = nn.Parameter(module.layers[0].weight.detach().clone())


def moved(module, _):
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def grown_and_shrunk(module, wrapper):
    module.more = nn.Linear(2, 2)
    if wrapper is not None:
        wrapper(data(5, 4), (0,))  # which sees it
    del module.more


def hooked(module, _):
    _KEPT.append(module.layers[2].weight.register_hook(lambda gradient: 2 * gradient))
    _KEPT.append(module.layers[1].register_full_backward_hook(lambda *_: None))
    _KEPT.append(module.layers[0].weight.register_post_accumulate_grad_hook(lambda _: None))


def passed_by(module, _):
    _KEPT.append(module.register_forward_hook(lambda _, inputs, output: 2 * inputs[0]))


def unhooked(_module, _wrapper):
    while _KEPT:
        _KEPT.pop().remove()


def with_sync_hook(_, wrapper):
    if wrapper is not None:
        _KEPT.append(wrapper.register_comm_hook(lambda _: None))


def evaluated(module, wrapper):
    module.eval()
    if wrapper is not None:
        wrapper.eval()
        with torch.no_grad():
            wrapper(data(5, 4), (0,))


def trained(module, wrapper):
    (wrapper or module).train()


def loaded(module, wrapper):
    (wrapper or module).load_state_dict({k: v.clone() for k, v in (wrapper or module).state_dict().items()})


def order_loaded(_, wrapper):
    if wrapper is not None:
        state = wrapper.comm_state_dict()
        state["buckets"]["order"].reverse()
        wrapper.load_comm_state_dict(state)


CHANGES = {
    "freezes": [frozen],
    "freezes and thaws": [frozen, thawed],
    "freezes all": [all_frozen, frozen, thawed, all_frozen, thawed],
    "passes all by": [passed_by, unhooked],
    "toggles": [frozen, thawed, frozen, thawed, frozen],
    "moves": [moved, moved],
    "hooks": [hooked, unhooked],
    "evaluates": [evaluated, trained],
    "loads": [loaded],
}
OF_PLAIN = {
    "grows and shrinks": [grown_and_shrunk],
    "replaces": [replaced],
    "adds a sync hook": [with_sync_hook, unhooked],
    "loads an order": [order_loaded],
}
OF_MEGATRON = {"registers anew": [registered_anew], "registers anew and removes": [registered_anew, without_bias]}
VARIANTS = [{}, {"bucket_cap_mb": 1e-4}, {"overlap": False}, {"gradient_as_bucket_view": False, "shared_memory": False}]


def step(model, rank, number):
    inputs = data(5, 4, rank=rank, step=number).requires_grad_()
    model(inputs, WAYS[(rank + number) % len(WAYS)]).pow(2).sum().backward()


def hold(changes, who, wrap, learn=lambda wrapper, means: None):
    """Train, with `changes` on rank `who` alone in the middle of it, and hold the averages to those of one process.

    Args:
        changes: Each is called as `change(module, wrapper)`; without the wrapper in one process.
        who: The rank.
        wrap: Makes the wrapper, and what reads the averages.
        learn: Called with them after each step.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    wrapper, averages = wrap(seeded(Routes, 4, 5))
    twins = [copy.deepcopy(seeded(Routes, 4, 5)) for _ in range(size)]
    left = list(changes)
    for number in range(STEPS):
        if number in (3, 4, 6, 9, 12) and left:
            change = left.pop(0)
            change(twins[who], None)
            if rank == who:
                change(wrapper.module, wrapper)
        for other, twin in enumerate(twins):
            twin.zero_grad()
            step(twin, other, number)
        means = mean_of([gradients(twin) for twin in twins], size)
        found = averages(number)
        for name, mean in means.items():
            assert (mean is None) == (found[name] is None), (number, name)
            if mean is not None:
                torch.testing.assert_close(found[name], mean, msg=lambda text, at=(number, name): f"{at}: {text}")
    unhooked(None, None)


def plain(options):
    def wrap(module):
        wrapper = DistributedDataParallel(module, **options)

        def averages(number):
            wrapper.zero_grad()
            step(wrapper, dist.get_rank(), number)
            assert_same_on_all_ranks(wrapper.module)
            buckets = [bucket.parameters for bucket in wrapper.trace().buckets]
            everywhere = of_all_ranks(buckets)
            assert everywhere == [buckets] * len(everywhere)
            return gradients(wrapper.module)

        return wrapper, averages

    return wrap


def optimized(options):
    def wrap(module):
        wrapper = DistributedDataParallel(module, **options)
        optimizer = DistributedOptimizer(torch.optim.SGD, wrapper, lr=1.0)

        def averages(number):
            optimizer.zero_grad()
            before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
            step(wrapper, dist.get_rank(), number)
            exists = {name: parameter.grad is not None for name, parameter in module.named_parameters()}
            optimizer.step()
            found = {
                name: before[name] - parameter.detach() if exists[name] else None
                for name, parameter in module.named_parameters()
            }
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    parameter.copy_(before[name])
            return found

        return wrapper, averages

    return wrap


def megatron(options):
    def wrap(module):
        wrapper = MegatronDDP(None, DistributedDataParallelConfig(**options), module)
        parameters = dict(module.named_parameters())  # also those that are removed later

        def averages(number):
            wrapper.zero_grad_buffer()
            step(wrapper, dist.get_rank(), number)
            wrapper.finish_grad_sync()
            agreed = set(wrapper.trace().agreed)
            return {
                name: parameter.main_grad.clone() if name in agreed else None for name, parameter in parameters.items()
            }

        return wrapper, averages

    return wrap


@pytest.mark.parametrize("kind", CHANGES | OF_PLAIN)
@on_two_ranks
def test_the_plain_wrapper(kind):
    place = list(CHANGES | OF_PLAIN).index(kind)
    for number in (place, place + 1):  # each change in two variants of four, each variant of neighbours
        hold((CHANGES | OF_PLAIN)[kind], number % 2, plain(VARIANTS[number % 4]))


@pytest.mark.parametrize("kind", CHANGES)
@on_two_ranks
def test_a_distributed_optimizer(kind):
    hold(CHANGES[kind], 1, optimized(VARIANTS[list(CHANGES).index(kind) % 3]))


@pytest.mark.parametrize("kind", CHANGES | OF_MEGATRON)
@on_two_ranks
def test_megatrons_wrapper(kind):
    options = {"overlap_grad_reduce": kind in OF_MEGATRON or list(CHANGES).index(kind) % 2 == 0, "bucket_size": 1}
    hold((CHANGES | OF_MEGATRON)[kind], 1, megatron(options))


def grown(module):
    module.more = nn.Linear(2, 2)


def reshaped(module):
    module.layers[1].bias = nn.Parameter(torch.ones(1))


def transposed(module):
    module.layers[1].weight.data = module.layers[1].weight.detach().t().contiguous().t()


def lazy(module):
    module.more = nn.LazyLinear(2)


def hold_each_wrapper():
    """The most of it in little time, for backends that take long."""
    changes = [all_frozen, moved, thawed, loaded, frozen]
    hold([frozen, grown_and_shrunk, thawed, replaced, frozen], 1, plain({}))
    hold(changes, 1, optimized({}))
    hold(changes, 1, megatron({"overlap_grad_reduce": True}))


EVERYWHERE, HERE_ALONE = "every rank", "the rank itself; the others hear of it"
REFUSALS = {
    "a parameter of its own": (plain({}), grown, EVERYWHERE, "rank 1 has parameter 'more.weight'.*which rank 0 lacks"),
    "another shape": (plain({}), reshaped, EVERYWHERE, "rank 1 has parameter 'layers.1.bias'.*where rank 0 has"),
    "other strides": (plain({}), transposed, EVERYWHERE, "rank 1 has parameter 'layers.1.weight'.*memory formats"),
    "a lazy parameter": (plain({}), lazy, HERE_ALONE, "parameter 'more.weight' is lazy.*run one forward"),
    "shards": (optimized({}), grown, HERE_ALONE, "rank 1: parameter 'more.weight'.*make a new optimizer"),
    "buffers": (megatron({}), grown, HERE_ALONE, "rank 1: parameter 'more.weight'.*wrap the module again"),
    "buffers, overlapped": (
        megatron({"overlap_grad_reduce": True}),
        grown,
        HERE_ALONE,
        "rank 1: parameter 'more.weight'.*wrap the module again",
    ),
}


@pytest.mark.parametrize("kind", REFUSALS)
@on_two_ranks
def test_where_it_cannot_go_on_every_rank_has_an_error(kind):
    wrap, change, where, text = REFUSALS[kind]
    rank, module = dist.get_rank(), seeded(Routes, 4, 5)
    before = copy.deepcopy(module)
    _, averages = wrap(module)
    for number in range(2):
        averages(number)
    twins = [copy.deepcopy(before) for _ in range(2)]
    layers = list(module.layers.parameters())
    kept = [(parameter, parameter.data) for parameter in layers]
    bias = module.layers[1].bias
    if rank == 1:
        change(module)
    expected = DisagreementError if where == EVERYWHERE else (ValueError, UnusableError) if rank else PeerAbortedError
    for number in (2, 3):
        with pytest.raises(expected, match=text):
            averages(number)
    if rank == 1:  # it puts it right
        module.layers[1].bias = bias
        for parameter, values in kept:
            parameter.data = values
        if hasattr(module, "more"):
            del module.more
    for number in (4, 5):
        found = averages(number)
        for other, twin in enumerate(twins):
            twin.zero_grad()
            step(twin, other, number)
        for name, mean in mean_of([gradients(twin) for twin in twins], 2).items():
            assert (mean is None) == (found[name] is None)
            if mean is not None:
                torch.testing.assert_close(found[name], mean)


@on_two_ranks
def test_what_keeps_a_layout_is_made_of_the_same_trainable_parameters():
    module = seeded(Routes, 4, 5)
    module.layers[2].weight.requires_grad_(dist.get_rank() == 0)
    text = "rank 1 has a parameter that was frozen when .*: 'layers.2.weight'"
    wrapper = DistributedDataParallel(module)
    with pytest.raises(DisagreementError, match=text):
        DistributedOptimizer(torch.optim.SGD, wrapper, lr=1.0)
    with pytest.raises(DisagreementError, match=text):
        MegatronDDP(None, DistributedDataParallelConfig(), seeded(Routes, 4, 5) if dist.get_rank() == 0 else module)
    module.layers[2].weight.requires_grad_(True)
    DistributedOptimizer(torch.optim.SGD, wrapper, lr=1.0)
    step(wrapper, dist.get_rank(), 0)


class _AllReduced(torch.autograd.Function):
    """Averages its gradient over the ranks, several times."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient / dist.get_world_size()
        for _ in range(20):
            dist.all_reduce(gradient)
            gradient = gradient / dist.get_world_size()
        return gradient


@on_two_ranks
def test_one_rank_loads_an_order_before_a_backward_with_communication_of_the_users_own():
    """A rank that has the masks early waits for no other within its backward, as that one may wait for its message."""
    first, second = seeded(nn.Linear, 300, 300), seeded(nn.Linear, 300, 300)
    wrapper = DistributedDataParallel(nn.Sequential(first, second), bucket_cap_mb=0.1)
    inputs = torch.ones(2, 300)
    for number in range(4):
        if number == 3 and dist.get_rank():
            order_loaded(None, wrapper)
        wrapper.zero_grad()
        uses_second = number < 3 or dist.get_rank() == 0
        wrapper.module.forward = lambda x, uses_second=uses_second: _AllReduced.apply(
            (second if uses_second else nn.Identity())(_AllReduced.apply(first(x)))
        )
        wrapper(inputs).sum().backward()
    assert_same_on_all_ranks(wrapper)


@on_two_ranks
def test_one_rank_loads_a_state_of_the_compressor():
    """What it counts decides what a compressor sends: which elements, and when a warm-up is over."""
    wrapper = DistributedDataParallel(seeded(Routes, 4, 5))
    wrapper.register_comm_hook(WarmUp(RandomK(0.5), 4))
    for number in range(3):
        step(wrapper, dist.get_rank(), number)
    if dist.get_rank():
        state = wrapper.comm_state_dict()
        wrapper.load_comm_state_dict({**state, "steps": state["steps"] + 2})
    with pytest.raises(DisagreementError, match=r"rank 1 has a state .* after step 5, and rank 0 has one after step 3"):
        step(wrapper, dist.get_rank(), 3)


@on_two_ranks
@pytest.mark.parametrize("steps", [(0, 1), (1, 0), (3, 2)])
def test_the_ranks_load_states_of_the_compressor_that_are_one_step_apart(steps):
    wrapper = DistributedDataParallel(seeded(Routes, 4, 5))
    wrapper.register_comm_hook(RandomK(0.5, min_numel=0))
    wrapper.load_comm_state_dict({**wrapper.comm_state_dict(), "steps": steps[dist.get_rank()]})
    step(wrapper, dist.get_rank(), 0)
    assert_same_on_all_ranks(wrapper.module)
    assert wrapper.comm_state_dict()["steps"] == max(steps) + 1


class _FailsBehindItsLastMessage(Compressor):
    def __init__(self, rank):
        self.compressor, self.rank, self.in_step = RandomK(0.5, min_numel=0), rank, None

    def __repr__(self):
        return "FailsBehindItsLastMessage()"

    def average(self, gradients, link):
        yield from self.compressor.average(gradients, link)
        if (link.rank, gradients.step) == (self.rank, self.in_step):
            raise MemoryError("no memory to decode")


@on_two_ranks
def test_a_state_that_was_saved_after_a_step_which_one_rank_has_lost_is_loaded():
    """Such ranks have completed different numbers of steps; they agree on one number, which decides what is sent."""
    for rank in range(2):
        compressor = _FailsBehindItsLastMessage(rank)
        wrapper = DistributedDataParallel(seeded(Routes, 4, 5))
        wrapper.register_comm_hook(compressor)
        step(wrapper, dist.get_rank(), 0)
        compressor.in_step, has_lost = 1, False
        try:
            step(wrapper, dist.get_rank(), 1)
        except MemoryError:
            assert dist.get_rank() == rank
            has_lost = True
        except PeerAbortedError:  # where the other rank has closed its connections before its last message has arrived
            assert dist.get_rank() != rank
            has_lost = True
        assert has_lost or dist.get_rank() != rank
        state, compressor.in_step = wrapper.comm_state_dict(), None
        assert state["steps"] == (1 if has_lost else 2)
        most = max(of_all_ranks(state["steps"]))
        resumed = DistributedDataParallel(seeded(Routes, 4, 5))
        resumed.register_comm_hook(compressor)
        resumed.load_comm_state_dict(state)
        for number in (most, most + 1):
            resumed.zero_grad()
            step(resumed, dist.get_rank(), number)
            assert any(mean is not None for mean in gradients(resumed).values())
            assert_same_on_all_ranks(resumed)
            assert resumed.comm_state_dict()["steps"] == number + 1


@on_two_ranks
def test_an_optimizer_in_a_hook_updates_what_one_rank_alone_has_frozen():
    module, rank = seeded(nn.Linear, 4, 2), dist.get_rank()

    def step(parameter):
        parameter.data -= 0.1 * parameter.grad

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    wrapper = DistributedDataParallel(module)
    for is_frozen in (False, True, True, False):
        module.weight.requires_grad_(rank > 0 or not is_frozen)
        wrapper.zero_grad()
        before = module.weight.detach().clone()
        wrapper(data(5, 4, rank=rank)).sum().backward()
        torch.testing.assert_close(module.weight.detach(), before - 0.1 * module.weight.grad)
    wrapper.check_in_sync()


@on_two_ranks
def test_gradients_stay_in_shared_memory_where_one_rank_changes_after_a_failed_step():
    rank, module = dist.get_rank(), seeded(mlp, 4, 64)
    wrapper = DistributedDataParallel(module)
    memory = shared_memory()
    for step in range(3):
        if step == 1:
            if rank == 1:
                wrapper(data(5, 4)).sum()
                wrapper.abort_grad_sync()
            else:
                with pytest.raises(PeerAbortedError):
                    square(wrapper, rank)
                module[0].bias.requires_grad_(False)
        wrapper.zero_grad()
        square(wrapper, rank)
        assert memory.position(module[0].weight.grad) >= 0


@pytest.mark.parametrize("views", [True, False])
@on_two_ranks
def test_no_rank_has_a_gradient_in_a_step_that_is_left_out_though_one_has_listed_its_module_anew(views):
    """Zeros in the memory of earlier buckets would move its parameters, by momentum and weight decay."""
    rank, module = dist.get_rank(), seeded(mlp, 3, 4, 2)
    wrapper = DistributedDataParallel(module, check_for_nan_in_grad="skip", gradient_as_bucket_view=views)
    for step in range(3):
        module.zero_grad(set_to_none=False)
        module[0].bias.requires_grad_(step < 2 or rank == 0)
        (wrapper(data(5, 3, step=step)).sum() * (torch.nan if step == 2 and rank == 0 else 1)).backward()
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("is_started", [False, True], ids=["in its backward", "started by hand"])
@on_three_ranks
def test_a_rank_that_has_frozen_what_is_shared_ends_both_wrappers_in_the_order_of_the_others(is_started):
    wrappers, rank = wrapped(tied_weights(2)), dist.get_rank()
    models = [wrapper.module for wrapper in wrappers]
    run(wrappers, [[(0, 1)]] * 3)
    want = expected(models, [[(0, 1)], [(0, 1)], []], 1)
    twins = copy.deepcopy(models)
    twins[0].tied.requires_grad_(False)
    if not is_started:
        loss_of(twins, (0, 1), 2, 1).backward()
    own = [gradients(twin) for twin in twins]
    for wrapper in wrappers:
        wrapper.zero_grad()
    models[0].tied.requires_grad_(rank != 2)
    losses = [loss_of(wrappers, [k], rank, 1) for k in (0, 1)]
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:  # it sees both masks at once, but rank 0 that of the second wrapper first
            patch.setattr(completion, "_await_any", late(completion._await_any, 0, 0.6))
        if rank == 2:
            first = wrappers[0]._reducer.synchronizer
            patch.setattr(first, "start_negotiation", late(first.start_negotiation, 0.3))
        if rank < 2 or not is_started:
            sum(losses).backward()  # autograd begins with the second one
        else:
            for wrapper in reversed(wrappers):
                wrapper.start_grad_sync()
            for wrapper in wrappers:
                wrapper.finish_grad_sync()
    for model, table, there in zip(models, want, own, strict=True):
        assert_gradients(model, {n: mean if there[n] is None else mean + there[n] / 3 for n, mean in table.items()})


@on_two_ranks
def test_a_wrapper_that_shares_what_is_frozen_is_started_by_hand_beside_a_backward_of_another_one():
    models, rank = tied_weights(2), dist.get_rank()
    models[0].tied.requires_grad_(False)
    first, _, other = wrapped([*models, seeded(nn.Linear, 3, 2)])
    for step in range(2):
        want = [
            expected([one.module], [[(0,)] if one is other or not r else [] for r in (0, 1)], step)
            for one in (first, other)
        ]
        first.zero_grad()
        other.zero_grad()
        if rank == 0:
            loss_of([first], [0], rank, step).backward()
        else:
            first.start_grad_sync()
        loss_of([other], [0], rank, step).backward()
        if rank:
            first.finish_grad_sync()
        for one, (table,) in zip((first, other), want, strict=True):
            assert_gradients(one.module, table)


def late(function, *seconds):
    """The function, whose first calls sleep for so long before."""
    left = iter(seconds)

    def call(*args):
        time.sleep(next(left, 0))
        return function(*args)

    return call
