"""Compression on several nodes: ranks of a node sum exactly, and compress what goes between the nodes."""

import contextlib
import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import test_compression as flat
import test_dropped_steps as dropping
from node_worlds import in_own_world, some, worlds
from one_process import Routes, assert_gradients, assert_same_on_all_ranks, data, gradients, mean_gradients, mlp, seeded
from ppe_ddp import Checkpointer, DistributedDataParallel, PeerAbortedError
from ppe_ddp.compression import Compressor, ErrorFeedback, PowerSGD, Sign, TopK, Uncompressed
from ppe_ddp.compression.comm_state import SliceOwners, hierarchy_of
from ppe_ddp.engine.plan import ParameterSpec

on_each = pytest.mark.parametrize("world", worlds((2, 1), (2, 2), (1, 2, 1)), indirect=True)


def call(world, function, *arguments):
    """Call `function` on each rank, in a world of its own: what it has made ends with it."""
    return world.run(in_own_world, function, *arguments)


def wrapped(module, compressor, **options):
    wrapper = DistributedDataParallel(module, **options)
    wrapper.register_comm_hook(compressor)
    return wrapper


# ---------------------------------------------------------------- the laws


def nothing_is_lost(name):
    wrapper = flat.check_that_nothing_is_lost(name, bucket_cap_mb=2e-3)
    state = wrapper.comm_state_dict()
    return state["nodes"], {key for key, value in state["parameters"].items() if value}


@on_each
@pytest.mark.parametrize("name", some(flat.METHODS, few=("mixed",)))
def test_what_is_sent_and_what_is_kept_is_what_was_given(world, name):
    found = call(world, nothing_is_lost, name)
    nodes = found[0][0]
    assert sorted(itertools.chain(*nodes)) == list(range(len(found)))
    assert len(nodes) > 1
    held = [[found[rank][1] for rank in node] for node in nodes]
    assert len({frozenset().union(*node) for node in held}) == 1, "the nodes remember different parameters"
    for node in held:
        assert sum(map(len, node)) == len(set().union(*node)), "two ranks of a node remember the same parameter"
    if name not in ("fp16", "int8"):
        assert all(held[0])  # the arithmetic is shared


def exact(compressor):
    module = seeded(Routes, 16, 6)
    wrapper = wrapped(module, compressor, bucket_cap_mb=2e-3)
    for step in range(4):
        expected = mean_gradients(module, flat.walk(step))
        wrapper.zero_grad()
        flat.walk(step)(wrapper, dist.get_rank())
        assert_gradients(module, expected)
        assert_same_on_all_ranks(module)


@on_each
@pytest.mark.parametrize("compressor", [Uncompressed(), TopK(1.0, min_numel=0)], ids=["none", "all"])
def test_without_loss_of_information_averages_are_exact(world, compressor):
    call(world, exact, compressor)


@on_each
@pytest.mark.parametrize("name", some(("topk", "mixed"), few=("mixed",)))
def test_every_way_to_drop_a_step(world, name):
    fates = ["taken", "infinite", "taken", "raises", "resumed", "compressor raises", "accumulated", "infinite"]
    fates.append("resumed")
    call(world, dropping.nothing_is_lost, name, {"bucket_cap_mb": 1e-3}, fates)


class Seen(Compressor):
    """Notes what it was given, and averages it."""

    def __init__(self):
        self.names = []
        self.sizes = set()

    def __repr__(self):
        return "Seen()"

    def average(self, gradients, link):
        self.names += [segment.name for segment in gradients.segments]
        self.sizes.add(link.size)
        yield from Uncompressed().average(gradients, link)


def seen_by_compressor():
    seen = Seen()
    module = seeded(lambda: mlp(64, 64, 64, 64))
    wrapper = wrapped(module, seen)
    wrapper(data(5, 64)).sum().backward()
    return sorted(seen.names), seen.sizes, wrapper.trace().gradient_nbytes, sum(p.nbytes for p in module.parameters())


@on_each
def test_each_node_sends_each_gradient_once(world):
    found = call(world, seen_by_compressor)
    layout = call(world, layout_of)[0]
    names = sorted(name for name, _ in mlp(64, 64, 64, 64).named_parameters())
    for node in layout:
        assert sorted(itertools.chain(*(found[rank][0] for rank in node))) == names
        assert sum(found[rank][2] for rank in node) == found[0][3]
    assert all(sizes == {len(layout)} for _, sizes, *_ in found)


@pytest.mark.parametrize("world", worlds((2, 1), (2, 2)), indirect=True)
@pytest.mark.parametrize("closed_on", ["one rank", "every rank"])
def test_registered_after_a_failed_step_a_compressor_has_the_same_slices(world, closed_on):
    found = call(world, names_after_a_failed_step, closed_on)
    for usual, names in found:
        assert names == usual


def names_after_a_failed_step(closed_on):
    """The parameters that this rank compresses: in a new wrapper, and after a failed step."""

    def step(model, rank):
        model(data(5, 64, rank=rank)).sum().backward()

    rank, fresh, late = dist.get_rank(), Seen(), Seen()
    new = wrapped(seeded(lambda: mlp(64, 64, 64, 64)), fresh)
    step(new, rank)
    module = seeded(lambda: mlp(64, 64, 64, 64))
    wrapper = DistributedDataParallel(module)
    step(wrapper, rank)
    if closed_on == "every rank" or rank == 1:
        wrapper.abort_grad_sync()
    wrapper.register_comm_hook(late)
    expected = mean_gradients(module, step)
    for _ in range(2):  # the first is lost where a rank hears of the failure in it
        late.names.clear()
        wrapper.zero_grad()
        with contextlib.suppress(PeerAbortedError):
            step(wrapper, rank)
    assert_gradients(module, expected)
    return sorted(fresh.names), sorted(late.names)


@pytest.mark.parametrize("world", worlds((2, 1), (2, 2)), indirect=True)
def test_a_copy_leaves_parameters_that_were_added_to_the_rank_that_remembers_them(world):
    call(world, nothing_is_lost_of_what_is_added)


def nothing_is_lost_of_what_is_added():
    module, rank = seeded(lambda: mlp(16, 16, 16, 16)), dist.get_rank()
    wrapper = wrapped(module, ErrorFeedback(TopK(0.1, min_numel=0)))
    wrapper(data(5, 16, rank=rank)).sum().backward()
    module.extend(seeded(lambda: mlp(16, 16, 16, 16)))
    given, handed = {}, {}
    for number in range(4):

        def step(model, rank, number=number):
            model(data(5, 16, rank=rank, step=number)).sum().backward()

        expected = mean_gradients(wrapper.module, step)
        wrapper.zero_grad()
        step(wrapper, rank)
        for name, parameter in wrapper.module[5:].named_parameters():
            given[name] = given.get(name, 0) + expected[name]
            handed[name] = handed.get(name, 0) + parameter.grad
        if number == 1:
            wrapper = copy.deepcopy(wrapper)
    kept = flat.residuals(wrapper)
    for name, total in given.items():
        torch.testing.assert_close(handed[name] + kept[name], total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("world", worlds((2, 1), (2, 2)), indirect=True)
@pytest.mark.parametrize("rename", [flat.move, flat.swap])
def test_what_is_kept_follows_its_parameter_to_another_name(world, rename):
    call(world, flat.check_that_nothing_is_lost_of_what_is_renamed, rename)


def layout_of():
    wrapper = wrapped(seeded(Routes, 16, 6), Seen())
    return hierarchy_of(wrapper._ready().groups.buckets).layout.nodes


@on_each
@pytest.mark.parametrize("name", some(("topk", "powersgd", "mixed"), few=("mixed",)))
def test_a_resumed_run_equals_an_uninterrupted_one(world, name):
    call(world, flat.check_resumed, name)


def of_other_nodes():
    wrapper = wrapped(seeded(Routes, 16, 6), Sign())
    flat.walk(0)(wrapper, dist.get_rank())
    state = wrapper.comm_state_dict()
    with pytest.raises(ValueError, match=r"of nodes \[\], and here it is \[\[0, 1\], \[2\]\]"):
        wrapper.load_comm_state_dict({**state, "nodes": []})


on_three = pytest.mark.parametrize("world", worlds((2, 1), short=[("torchrun", (2, 1))]), indirect=True)


@on_three
def test_a_state_is_that_of_ranks_on_these_nodes(world):
    call(world, of_other_nodes)


def from_other_nodes(folder, first, then):
    """As if ranks that share memory were on other nodes: as many ranks, but each of them alone, or the reverse."""
    saving = wrapped(mlp(6, 6, 2), ErrorFeedback(TopK(0.3, min_numel=0)), shared_memory=first)
    for step in range(2):
        saving(data(5, 6, rank=dist.get_rank(), step=step)).sum().backward()
    Checkpointer(folder, {"model": saving}).save(2)
    loading = wrapped(mlp(6, 6, 2), ErrorFeedback(TopK(0.3, min_numel=0)), shared_memory=then)
    assert Checkpointer(folder, {"model": loading}).load().step == 2
    fresh = wrapped(copy.deepcopy(saving.module), ErrorFeedback(TopK(0.3, min_numel=0)), shared_memory=then)
    state = loading.comm_state_dict()
    assert state["steps"] == 0  # a WarmUp begins anew
    assert state["nodes"] == fresh.comm_state_dict()["nodes"] != saving.comm_state_dict()["nodes"]
    for step in range(2):
        for wrapper in (loading, fresh):
            wrapper.zero_grad()
            wrapper(data(5, 6, rank=dist.get_rank(), step=step)).sum().backward()
        assert_gradients(loading.module, gradients(fresh.module))
        assert_same_on_all_ranks(loading.module)


@pytest.mark.parametrize("world", worlds((2, 1), launchers=["torchrun"]), indirect=True)
@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True)])
def test_a_checkpoint_of_ranks_on_other_nodes(world, first, then, tmp_path):
    call(world, from_other_nodes, tmp_path, first, then)


# ---------------------------------------------------------------- what is special


def of_one_rank(rank):
    module = seeded(Routes, 16, 6)
    wrapper = wrapped(module, PowerSGD(16, min_compression=0))
    own = dist.get_rank() == rank

    def step(model, other):
        if other == rank:
            model(data(5, 16, rank=other), [2, 4]).sum().backward()

    expected = mean_gradients(module, step)
    step(wrapper, dist.get_rank())
    if not own:
        wrapper.finish_grad_sync()
    assert_gradients(module, expected, rtol=1e-4, atol=1e-4)
    assert_same_on_all_ranks(module)


@on_three
@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_alone_has_a_gradient(world, rank):
    call(world, of_one_rank, rank)


def of_dtype(dtype):
    module = seeded(lambda: nn.Linear(40, 30)).to(dtype)
    wrapper = wrapped(module, Uncompressed())
    for turn in range(2):
        for parameter in module.parameters():
            parameter.grad = data(*parameter.shape, step=turn).to(dtype)
        wrapper.finish_grad_sync()
        assert_same_on_all_ranks(module)
        size = dist.get_world_size()
        for parameter in module.parameters():
            given = [data(*parameter.shape, rank=rank, step=turn).to(dtype) for rank in range(size)]
            wide = sum(one.to(torch.complex128 if dtype.is_complex else torch.float64) for one in given) / size
            tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-6  # which are rounded between the nodes, too
            torch.testing.assert_close(parameter.grad, wide.to(dtype), rtol=tolerance, atol=tolerance)


@on_three
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_sums_within_a_node_are_those_of_its_dtype(world, dtype):
    call(world, of_dtype, dtype)


class Uneven(Compressor):
    """As many rounds more as the first parameter's name says: other ranks of the node have other numbers."""

    def __repr__(self):
        return "Uneven()"

    def average(self, gradients, link):
        for _ in range(sum(map(len, (segment.name for segment in gradients.segments))) % 5):
            stamp = torch.ones(3)
            yield from link.all_reduce(stamp)
            assert stamp.eq(link.size).all()
        yield from Uncompressed().average(gradients, link)


class Named(nn.Module):
    """Parameters whose names have all lengths."""

    def __init__(self):
        super().__init__()
        for k in range(12):
            self.register_parameter("p" * (k + 1), nn.Parameter(torch.ones(64, 64 + k)))

    def forward(self, x):
        return sum((x[:, :1] * parameter).pow(2).sum() for parameter in self.parameters())


def of_uneven_rounds():
    module = Named()
    wrapper = wrapped(module, Uneven(), bucket_cap_mb=4e-2)
    for step in range(3):

        def run(model, rank, step=step):
            model(data(64, 1, rank=rank, step=step)).backward()

        expected = mean_gradients(module, run)
        wrapper.zero_grad()
        run(wrapper, dist.get_rank())
        assert_gradients(module, expected)


@on_each
def test_ranks_of_a_node_may_have_different_numbers_of_rounds(world):
    call(world, of_uneven_rounds)


@on_three
def test_a_compressor_that_raises_is_named_and_the_next_step_works(world):
    call(world, flat.check_a_compressor_that_raises)


# ---------------------------------------------------------------- who owns what


def specs(*numels):
    return [
        ParameterSpec(f"p{k}", (numel,), (1,), torch.float32, torch.device("cpu")) for k, numel in enumerate(numels)
    ]


def test_slices_have_about_as_many_elements_and_small_parameters_go_with_the_one_before():
    owners = SliceOwners()
    owners.add(specs(10_000, 100, 10_000, 100, 20_000, 5, 30_000), 2)
    assert [owners.of(f"p{k}") for k in range(7)] == [0, 0, 1, 1, 0, 0, 1]


def test_a_parameter_stays_with_its_slice_whatever_is_added():
    owners = SliceOwners()
    owners.add(specs(10_000, 20_000), 2)
    before = dict(owners.of_names)
    owners.add(specs(10_000, 20_000, 50_000, 60_000)[1:], 2)
    assert {name: owners.of(name) for name in before} == before
    again = SliceOwners()
    again.of_names = dict(owners.of_names)
    assert [again.of(f"p{k}") for k in range(4)] == [owners.of(f"p{k}") for k in range(4)] == [0, 1, 0, 1]
