"""Uneven numbers of steps: torch's Join protocol, and synchronization without a backward."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as TorchDDP

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
from ppe_ddp import DistributedDataParallel, DistributedOptimizer, UnusableError
from rank_tests import each_variant, on_three_ranks, on_two_ranks


def train(wrapper, context, count):
    """Train for `count` steps in `context`; returns copies of the gradients of each step."""
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    seen = []
    with context:
        for step in range(count):
            optimizer.zero_grad()
            wrapper(data(5, 4, step=step)).pow(2).sum().backward()
            seen.append(gradients(wrapper.module))
            optimizer.step()
    return seen


def assert_same_parameters(module):
    tables = [None] * dist.get_world_size()
    dist.all_gather_object(tables, [tensor.detach() for tensor in (*module.parameters(), *module.buffers())])
    for table in tables[1:]:
        assert all(torch.equal(a, b) for a, b in zip(table, tables[0], strict=True))


@pytest.mark.parametrize("by_all", [True, False], ids=["by all", "by those left"])
@pytest.mark.parametrize("counts", [(2, 5, 3), (4, 4, 4), (0, 1, 6)], ids=str)
@each_variant
@on_three_ranks
def test_uneven_inputs_as_torch_trains_them(by_all, counts, options):
    module = seeded(mlp, 4, 4, 2)
    twin = copy.deepcopy(module)
    ours, theirs = DistributedDataParallel(module, **options), TorchDDP(twin)
    count = counts[dist.get_rank()]
    for _ in range(2):
        got = train(ours, ours.join(divide_by_initial_world_size=by_all), count)
        wanted = train(theirs, theirs.join(divide_by_initial_world_size=by_all), count)
        for one, other in zip(got, wanted, strict=True):
            for name, gradient in other.items():
                torch.testing.assert_close(one[name], gradient)
        # All ranks end with what the last one has.
        assert_same_parameters(module)
        for a, b in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a, b)


def accumulate(model, count, rank):
    """As docs/training.md does it: `no_sync()` is around backward alone, and the last of `count` is synchronized."""
    for k in range(count):
        loss = model(data(5, 4, rank=rank, step=k)).pow(2).sum()
        with model.no_sync() if k + 1 < count and isinstance(model, DistributedDataParallel) else nullcontext():
            loss.backward()


@pytest.mark.parametrize("counts", [(4, 7), (7, 4)], ids=str)
@each_variant
@on_two_ranks
def test_no_sync_around_backward_alone(counts, options):
    # What counts is where backward() is called, which no forward knows.
    module, rank = seeded(mlp, 4, 2), dist.get_rank()
    wrapper = DistributedDataParallel(module, **options)
    for _ in range(2):
        expected = mean_gradients(module, lambda model, r: accumulate(model, counts[r], r))
        wrapper.zero_grad()
        with wrapper.join():
            accumulate(wrapper, counts[rank], rank)
        assert_gradients(module, expected)
    assert_same_parameters(module)


@on_two_ranks
def test_a_forward_without_gradients_inside_a_join():
    rank = dist.get_rank()
    wrapper = DistributedDataParallel(seeded(mlp, 4, 2))
    with wrapper.join():
        for k in range(1 + 2 * rank):
            for _ in range(2 - rank):  # the rank with fewer batches evaluates more
                with torch.no_grad():
                    wrapper(data(5, 4, step=k))
            wrapper.zero_grad()
            wrapper(data(5, 4, step=k)).pow(2).sum().backward()
    assert_same_parameters(wrapper.module)


def sum_in_own_group(group, bucket):
    work = dist.all_reduce(bucket.buffer().div_(2), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class SlotState:
    """A state without a `__dict__`, as that of torch's PowerSGD is."""

    __slots__ = ("process_group",)

    def __init__(self, group):
        self.process_group = group


@on_two_ranks
def test_a_hook_in_the_group_in_which_join_counts_is_refused():
    refused = DistributedDataParallel(seeded(mlp, 4, 2))
    refused.register_comm_hook(None, sum_in_own_group)
    with pytest.raises(UnusableError, match=r"sum_in_own_group .* a group of its own"):
        train(refused, refused.join(), 1)
    wrapper = DistributedDataParallel(seeded(mlp, 4, 2))
    state = SlotState(dist.new_group())
    wrapper.register_comm_hook(state, lambda state, bucket: sum_in_own_group(state.process_group, bucket))
    train(wrapper, wrapper.join(), 1 + 2 * dist.get_rank())
    assert_same_parameters(wrapper.module)


@on_two_ranks
def test_early_termination_raises_on_every_rank():
    wrapper = DistributedDataParallel(seeded(mlp, 4, 2))
    steps = 0
    text = "Rank 0 exhausted all inputs" if dist.get_rank() == 0 else "at least one rank that exhausted inputs"

    def train():
        nonlocal steps
        with wrapper.join(throw_on_early_termination=True):
            for step in range(2 + dist.get_rank()):
                wrapper(data(5, 4, step=step)).sum().backward()
                steps += 1

    with pytest.raises(RuntimeError, match=text):
        train()
    assert steps == 2


def hold_that_a_forward_tells_nobody(wrapper):
    rank = dist.get_rank()
    wrapper.zero_grad()
    if rank == 0:
        wrapper.finish_grad_sync()  # without a forward, and so without a word of it in the user's group
    else:
        square(wrapper, rank)
    total = torch.tensor([10.0 + rank])
    dist.all_reduce(total)
    assert total.item() == 21.0


@each_variant
@on_two_ranks
def test_after_a_join_a_forward_tells_nobody(options):
    wrapper = DistributedDataParallel(seeded(mlp, 4, 2), **options)
    train(wrapper, wrapper.join(), 1 + dist.get_rank())
    hold_that_a_forward_tells_nobody(wrapper)


@pytest.mark.parametrize("make", [Join, DistributedDataParallel.join], ids=["torch's", "ours"])
@on_two_ranks
def test_after_a_join_that_has_ended_early_a_forward_tells_nobody(make):
    rank, wrapper = dist.get_rank(), DistributedDataParallel(seeded(mlp, 4, 2))

    def train():
        with make([wrapper] if make is Join else wrapper, throw_on_early_termination=True):
            for step in range(1 + rank):
                wrapper(data(5, 4, step=step)).sum().backward()

    with pytest.raises(RuntimeError, match="exhausted"):
        train()
    hold_that_a_forward_tells_nobody(wrapper)


@on_two_ranks
def test_a_join_leaves_what_is_ignored_alone():
    rank, module = dist.get_rank(), seeded(mlp, 4, 2)
    module.register_parameter("own", torch.nn.Parameter(torch.full((1 + rank,), float(rank))))
    module.register_buffer("kept", torch.full((2,), float(rank)))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["own", "kept"])
    wrapper = DistributedDataParallel(module)
    train(wrapper, wrapper.join(), 1 + rank)
    assert torch.equal(module.own, torch.full((1 + rank,), float(rank)))
    assert torch.equal(module.kept, torch.full((2,), float(rank)))
    assert torch.equal(*of_all_ranks(module[0].weight.detach()))


@on_two_ranks
def test_a_disabled_join_leaves_an_optimizer_of_shards_alone():
    wrapper = DistributedDataParallel(seeded(mlp, 4, 2))
    optimizer = DistributedOptimizer(torch.optim.SGD(wrapper.parameters(), lr=0.1), wrapper)
    with wrapper.join(enable=False):
        wrapper(data(5, 4)).sum().backward()
        optimizer.step()
    with pytest.raises(UnusableError, match="is not for a model with a DistributedOptimizer"), wrapper.join():
        pass


@on_two_ranks
def test_a_disabled_join_does_nothing():
    module = seeded(mlp, 4, 2)
    wrapper = DistributedDataParallel(module)
    got = train(wrapper, wrapper.join(enable=False), 2)
    assert len(got) == 2
    assert_same_on_all_ranks(module)


@each_variant
@on_two_ranks
def test_gradients_that_are_set_by_hand_are_averaged(options):
    rank = dist.get_rank()
    module = seeded(mlp, 4, 4, 2)
    wrapper = DistributedDataParallel(module, **options)
    if rank == 1:
        module[0].bias.grad = torch.full((4,), 6.0)
    wrapper.finish_grad_sync()
    assert torch.equal(module[0].bias.grad, torch.full((4,), 3.0))
    assert module[0].weight.grad is None


@on_two_ranks
def test_starts_and_finishes_out_of_turn():
    rank = dist.get_rank()
    module = seeded(mlp, 4, 2)
    wrapper = DistributedDataParallel(module)
    wrapper.start_grad_sync()
    with pytest.raises(RuntimeError, match=rf"rank {rank}: .* under way already"):
        wrapper.start_grad_sync()
    text = r"between start_grad_sync\(\) and finish_grad_sync\(\); finish first"
    with pytest.raises(RuntimeError, match=text):
        square(wrapper, rank)
    with wrapper.no_sync(), pytest.raises(RuntimeError, match=text):  # what is not announced would stay its own
        square(wrapper, rank)
    wrapper.zero_grad()
    wrapper.finish_grad_sync()
    wrapper.zero_grad()
    square(wrapper, rank)
    assert_gradients(module, mean_gradients(module, square))
