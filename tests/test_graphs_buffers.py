"""Buffers that forward writes: who has which, beside what the laws hold of graphs that need them (law_models.py)."""

import contextlib
import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from one_process import data, of_all_ranks, seeded
from ppe_ddp import CommunicationError, DistributedDataParallel, PeerAbortedError, broadcast, weigh
from ppe_ddp.integrations.loading import loading
from rank_tests import on_three_ranks, on_two_ranks


class Scaled(nn.Module):
    """Divides by a running scale that each forward writes in place."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        x = self.first(x)
        self.scale.copy_(self.scale * 0.5 + x.detach().abs().mean(0))
        return self.last(torch.tanh(x / self.scale))


def loss(model, step):
    return model(data(5, 3, rank=dist.get_rank(), step=step)).pow(2).sum()


@on_two_ranks
def test_buffers_that_the_user_holds_stay_the_same_tensors_and_a_broadcast_function_gets_the_same_everywhere():
    lists = []

    def function(tensors, group):
        lists.append([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])
        return broadcast(tensors, group)

    wrapper = DistributedDataParallel(
        seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))), broadcast_function=function
    )
    kept = list(wrapper.buffers())
    for step in range(3):
        value = loss(wrapper, step)
        value.backward(retain_graph=dist.get_rank() == 1)
        (value if dist.get_rank() == 1 else loss(wrapper, 100 + step)).backward()
    everyone = of_all_ranks((lists, kept))
    (lists, buffers), (theirs, others) = everyone
    assert lists == theirs
    assert all(map(torch.equal, buffers, others))
    assert all(mine is now for mine, now in zip(kept, wrapper.buffers(), strict=True))


@on_two_ranks
def test_a_graph_whose_buffer_cannot_be_spared_is_refused_by_autograd():
    wrapper = DistributedDataParallel(seeded(Scaled))
    kept = wrapper.module.scale
    value = loss(wrapper, 0)
    value.backward(retain_graph=True)
    everyone = of_all_ranks(kept)
    assert torch.equal(everyone[0], everyone[1])
    error = RuntimeError if dist.get_rank() == 1 else PeerAbortedError
    with pytest.raises(
        error, match="modified by an inplace operation" if dist.get_rank() == 1 else "rank 1 failed in the"
    ):
        value.backward()
    loss(wrapper, 1).backward()


class Towers(nn.Module):
    """A stem for all, and towers with statistics of their own, of which each call uses some."""

    def __init__(self, count=3):
        super().__init__()
        self.stem = nn.BatchNorm1d(4)
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(count))

    def forward(self, x, used):
        x = self.stem(x)
        return sum((self.towers[k](x) for k in used), x)


def statistics(module):
    return {name: buffer.detach().clone() for name, buffer in module.named_buffers()}


def first_used(statistics_of, uses, before):
    """Of each submodule, the statistics of the first rank that has used it; else those of `before`."""
    found = dict(before)
    for other, used in reversed(list(enumerate(uses))):
        owners = ("stem.", *(f"towers.{k}." for k in used))
        found |= {name: value for name, value in statistics_of[other].items() if name.startswith(owners)}
    return found


def rank_0s(tensors, group):
    return broadcast(tensors, group)


@on_three_ranks
def test_after_a_failure_behind_the_broadcast_the_same_rank_sends_its_buffers_again():
    rank, wrapper = dist.get_rank(), DistributedDataParallel(seeded(Towers))
    synchronizer = wrapper._reducer.synchronizer

    def refuse():
        yield None
        raise CommunicationError("this step is not committed")

    def step(used):
        wrapper(data(5, 4, rank=rank), used).sum().backward()

    synchronizer.commits = refuse
    with pytest.raises((CommunicationError, PeerAbortedError)):
        step([1] if rank == 2 else [])
    synchronizer.commits = None
    written = wrapper.comm_state_dict().get("written", [])
    assert ("towers.1.1" in written) == (rank == 2)
    wrapper.finish_grad_sync()
    assert "written" not in wrapper.comm_state_dict()


@pytest.mark.parametrize(
    "options", [{}, {"overlap": False}, {"broadcast_function": rank_0s}], ids=["views", "after", "own"]
)
@on_three_ranks
def test_statistics_of_a_tower_are_those_of_a_rank_that_has_used_it(options):
    rank, uses_of = dist.get_rank(), torch.Generator().manual_seed(3)
    wrapper = DistributedDataParallel(seeded(Towers).double(), **options)
    twins = [copy.deepcopy(wrapper.module) for _ in range(3)]
    expected = statistics(wrapper.module)
    for step in range(12):
        # Two micro-batches; in some steps a rank has none, and one takes nothing but the stem.
        uses = [[k for k in range(3) if torch.rand((), generator=uses_of) < 0.3] for _ in range(3)]
        absent = step % 4  # 3: nobody
        for other, twin in enumerate(twins):
            twin.load_state_dict(expected, strict=False)
            for micro in range(0 if other == absent else 2):
                twin(data(5, 4, rank=other, step=2 * step + micro, dtype=torch.float64), uses[other])
        present = [[] if other == absent else used for other, used in enumerate(uses)]
        values = [statistics(twin) for twin in twins]
        if absent == 0:
            values[0] = values[1]  # who has no forward has not used the stem either
        expected = first_used(values, present, expected)
        if step == 6:
            wrapper.load_state_dict(wrapper.state_dict())  # is no use
        if rank == step % 3:
            wrapper.module.towers[0][0].weight.requires_grad_(step % 2 == 0)  # nor is another module state
        if rank == absent:
            wrapper.finish_grad_sync()
        else:
            for micro in range(2):
                with wrapper.no_sync() if micro == 0 else contextlib.nullcontext():
                    x = data(5, 4, rank=rank, step=2 * step + micro, dtype=torch.float64)
                    wrapper(x, uses[rank]).pow(2).sum().backward()
        torch.testing.assert_close(statistics(wrapper.module), expected)
    assert all(wrapper.module.towers[k][1].num_batches_tracked for k in range(3))


class Counting(nn.Linear):
    """Counts its calls, in a tensor that it writes or replaces."""

    def __init__(self, replaces):
        super().__init__(3, 3)
        self.replaces = replaces
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.replaces:
            self.calls = self.calls + 1
        else:
            self.calls += 1
        return super().forward(x)


class Pair(nn.Module):
    """A layer for all, and one for some."""

    def __init__(self, replaces=False, hook=lambda _: None):
        super().__init__()
        self.every, self.some, self.hook = Counting(replaces), Counting(replaces), hook

    def forward(self, x, uses_some):
        x = self.every(x)
        x.register_hook(self.hook)
        return x + self.some(x) if uses_some else x * 2


@pytest.mark.parametrize(
    ("fails_in", "replaces"),
    [("a hook", False), ("its backward", True), ("the broadcast", False), ("the broadcast", True)],
)
@on_two_ranks
def test_a_failed_step_forgets_no_statistic(fails_in, replaces):
    rank, due = dist.get_rank(), []

    def fail(place):
        if place in due:
            due.clear()
            raise MemoryError(place)

    def own_broadcast(tensors, group):
        fail("the broadcast")
        return broadcast(tensors, group)

    model = seeded(Pair, replaces, lambda _: fail("its backward"))
    wrapper = DistributedDataParallel(model, broadcast_function=own_broadcast)
    if fails_in == "its backward":  # the step goes on for the others, as a hook communicates in the user's group
        wrapper.register_comm_hook(None, lambda _, b: dist.all_reduce(b.buffer().div_(2), async_op=True).get_future())
    wrapper.register_comm_hook(lambda _: fail("a hook"))
    for step in range(5):
        wrapper.zero_grad()
        if step == 2 and rank == 0:
            due.append(fails_in)
        with pytest.raises((MemoryError, PeerAbortedError)) if step == 2 else contextlib.nullcontext():
            wrapper(torch.ones(1, 3), rank == 1 and step <= 2).sum().backward()
    assert model.some.calls == 3


class Observer(torch.autograd.Function):
    """Counts its backwards."""

    @staticmethod
    def forward(ctx, x, count):
        ctx.count = count
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.count.add_(1)
        return gradient, None


class Observed(nn.Linear):
    """Counts its backwards."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("backwards", torch.zeros(()))

    def forward(self, x):
        return Observer.apply(super().forward(x), self.backwards)


class Chosen(nn.Module):
    """Layers that count, for some ranks, before a head of its own."""

    def __init__(self, some=None):
        super().__init__()
        self.some, self.head = some or nn.Sequential(Counting(False), Observed()), nn.Linear(3, 1)

    def forward(self, x, uses_some):
        return self.head(self.some(x) if uses_some else x)


@pytest.mark.parametrize("groups", [[None], [None, None], [None, [0, 1]]], ids=["one", "two", "of two groups"])
@on_two_ranks
def test_what_one_wrapper_broadcasts_is_no_write_for_another(groups):
    first, count = Chosen(), len(groups)
    groups = [ranks and dist.new_group(ranks) for ranks in groups]
    wrappers = [DistributedDataParallel(Chosen(first.some), process_group=group) for group in groups]
    for step in range(4):
        wrappers[step % count](torch.ones(1, 3), dist.get_rank() == 1).sum().backward()
        assert (first.some[0].calls, first.some[1].backwards) == (step + 1, step + 1)


@on_three_ranks
def test_what_arrives_over_a_group_of_some_ranks_is_no_write_for_all():
    rank, first, x = dist.get_rank(), Chosen(), torch.ones(1, 3)
    everyone = DistributedDataParallel(Chosen(first.some))
    group = dist.new_group([0, 1])
    some = DistributedDataParallel(Chosen(first.some), process_group=group) if rank < 2 else None
    everyone(x, False).sum().backward()
    for calls in (1, 3):
        if some is not None:
            some(x, False).sum().backward()  # rank 1 gets what rank 0 has
        everyone(x, rank == 2).sum().backward()
        assert first.some[0].calls == calls
        if some is not None:
            some(x, rank == 1).sum().backward()
            assert first.some[0].calls == calls + 1
        everyone(x, False).sum().backward()
        assert first.some[0].calls == calls + 1


class Masked(nn.Linear):
    """Has a buffer without memory, and one that forward replaces by a tensor whose elements share memory."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("mask", None)
        self.register_buffer("like", torch.empty(2, device="meta"))

    def forward(self, x):
        self.mask = torch.full((1, 3), 1.0 + dist.get_rank()).expand(2, 3)
        return super().forward(x)


@on_two_ranks
def test_buffers_into_which_nothing_can_be_written():
    wrapper = DistributedDataParallel(Masked())
    for _ in range(2):
        wrapper(torch.ones(1, 3)).sum().backward()
        wrapper.check_in_sync()
        assert wrapper.module.mask.equal(torch.ones(2, 3))
    assert wrapper.module.like.is_meta


@on_two_ranks
def test_a_retained_graph_keeps_its_buffers_where_another_wrapper_has_them_too():
    module = seeded(Scaled)
    wrapper, _other = DistributedDataParallel(module), DistributedDataParallel(nn.Sequential(module))
    value = loss(wrapper, 0)
    value.backward(retain_graph=True)
    value.backward()
    everyone = of_all_ranks(module.scale)
    assert torch.equal(everyone[0], everyone[1])


@on_two_ranks
def test_a_rank_without_samples_still_sends_what_it_had_written():
    rank, module, x = dist.get_rank(), Chosen(), torch.ones(1, 3)
    wrapper = DistributedDataParallel(module, check_for_nan_in_grad="skip")
    weigh(wrapper(x if rank else x * torch.nan, rank == 1), 3).sum().backward()  # dropped
    weigh(wrapper(x, False), 3 * (rank == 0)).sum().backward()
    assert (module.some[0].calls, module.some[1].backwards) == (1, 1)
    with wrapper.join():
        for step in range(1 if rank == 0 else 3):
            with wrapper.no_sync() if step == 0 else contextlib.nullcontext():
                wrapper(x, rank == 0).sum().backward()
            if rank == 1:
                assert module.some[0].calls == 1 + (step > 0)


@on_two_ranks
def test_buffers_that_a_copy_gets_before_its_first_forward_are_broadcast():
    twin = copy.deepcopy(DistributedDataParallel(seeded(nn.Linear, 4, 2)))
    twin.module.register_buffer("scale", torch.full((1,), float(dist.get_rank())))
    twin(torch.ones(1, 4)).sum().backward()
    assert of_all_ranks(twin.module.scale.item()) == [0.0, 0.0]


@on_two_ranks
def test_a_copy_sends_what_its_original_had_written():
    wrapper, x = DistributedDataParallel(Chosen()), torch.ones(1, 3)
    with wrapper.no_sync():
        wrapper(x, dist.get_rank() == 1).sum().backward()
    twin = pickle.loads(pickle.dumps(copy.deepcopy(wrapper)))
    twin(x, False).sum().backward()
    assert twin.module.some[0].calls == 1


@pytest.mark.parametrize("place", ["itself", "a larger module", "the module, by a tool"])
@pytest.mark.parametrize("loads_it", [False, True])
@on_two_ranks
def test_a_checkpoint_of_some_keys_forgets_no_other_statistic(loads_it, place):
    wrapper, rank = DistributedDataParallel(seeded(Pair)), dist.get_rank()
    outer = nn.ModuleDict({"part": wrapper})
    with wrapper.no_sync():
        wrapper(torch.ones(1, 3), rank == 1).sum().backward()
    state = {"every.bias": torch.zeros(3)} | ({"module.some.calls": torch.tensor(7.0)} if loads_it else {})
    load(place, outer, state)
    wrapper(torch.ones(1, 3), False).sum().backward()
    assert wrapper.module.some.calls == (7 if loads_it else 1)
    load(place, outer, wrapper.state_dict())
    wrapper(torch.ones(1, 3), rank == 1).sum().backward()
    assert wrapper.module.some.calls == (8 if loads_it else 2)


def load(place, outer, state):
    """Load into the wrapper in ``outer``."""
    if place == "itself":
        outer["part"].load_state_dict(state, strict=False)
    elif place == "a larger module":
        outer.load_state_dict({f"part.{name}": value for name, value in state.items()}, strict=False)
    else:
        with loading(outer["part"]):
            state = {name.removeprefix("module."): value for name, value in state.items()}
            outer["part"].module.load_state_dict(state, strict=False)


class Masking(nn.Module):
    """Registers a causal mask, which is as long as the batch, in its first forward."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x):
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(len(x), len(x)).tril(), persistent=False)
        return self.last(self.mask @ self.first(x))


@pytest.mark.parametrize("lists_anew", [(1,), (0, 1)], ids=["one rank", "all ranks"])
@on_two_ranks
def test_a_buffer_that_comes_later_stays_each_ranks_own(lists_anew):
    rank = dist.get_rank()
    wrapper = DistributedDataParallel(seeded(Masking))
    for step in range(4):
        wrapper.module.first.requires_grad_(step % 2 == 0 or rank not in lists_anew)
        wrapper(torch.ones(3 + rank, 3)).sum().backward()
        wrapper.check_in_sync()
    assert wrapper.module.mask.shape == (3 + rank, 3 + rank)


@on_two_ranks
def test_a_cast_is_no_write():
    rank, wrapper = dist.get_rank(), DistributedDataParallel(seeded(Towers))
    dtypes = [torch.float32, torch.float64, torch.float64, torch.float32]
    for step, dtype in enumerate(dtypes):
        wrapper.to(dtype)
        wrapper(data(5, 4, rank=rank, step=step, dtype=dtype), [rank]).sum().backward()
        assert [int(tower[1].num_batches_tracked) for tower in wrapper.module.towers] == [step + 1, step + 1, 0]
