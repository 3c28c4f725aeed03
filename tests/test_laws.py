"""The laws on random dynamic models: real ranks against one process, under every combination of options."""

import functools
import itertools
import re
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.checkpoint import checkpoint

import ppe_ddp
from law_models import Kind, LayerRecipe, Recipe
from law_scenarios import check_case, every_variant
from law_steps import StepKind, TrainingStep, Zeroing
from laws import Case, Variant, breaches, observe, observe_all
from library_warnings import without_warnings
from one_process import assert_same_on_all_ranks, in_place_mean
from ppe_ddp.engine import negotiation
from ppe_ddp.engine.mask_exchange import MaskExchange
from ppe_ddp.testing import ConformanceError, RankError, Ranks
from ppe_ddp.testing.probes import Plugs
from rank_tests import on_two_ranks
from test_conformance import only_for_rank_0

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]
LAYERS = st.builds(LayerRecipe, st.sampled_from(Kind), st.sampled_from(DTYPES))
RECIPES = st.builds(
    Recipe,
    seed=st.integers(0, 999),
    layers=st.lists(LAYERS, min_size=1, max_size=6).map(tuple),
    width=st.sampled_from([3, 8]),
    heads=st.integers(1, 3),
    early_exit=st.booleans(),
    common_path=st.booleans(),
    container=st.integers(0, 2),
    needs_buffer=st.booleans(),
)
STEPS = st.builds(TrainingStep, st.sampled_from(StepKind), st.sampled_from(Zeroing), st.booleans())
CASES = st.builds(Case, RECIPES, st.lists(STEPS, min_size=1, max_size=3).map(tuple))


# Our own function, one of a user, and one of a user on a thread.
PLUGS = st.sampled_from([Plugs(), Plugs(in_place_mean), Plugs(ppe_ddp.overlapped(in_place_mean))])

# The same examples every time, so that a red run is real, and always the same time.
laws_hold = functools.partial(
    settings,
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def observed(case, plugs, variants):
    with without_warnings():
        seen = observe_all(case, variants, plugs)
    for observation in seen:
        observation.gradients = {}
    return seen


# Which half of the variants of options, as on a chessboard: each is tried in one of two examples.
HALVES = st.sampled_from([[place for place in range(24) if place.bit_count() % 2 == odd] for odd in (0, 1)])


def half_of_the_variants(case, half):
    variants = every_variant(common_path=case.recipe.common_path)
    return [variants[place] for place in half if place < len(variants)]


def assert_laws(ranks, case, plugs=None, variants=None):
    variants = variants or every_variant(common_path=case.recipe.common_path)
    by_rank = ranks.run(observed, case, plugs or Plugs(), variants, timeout=120)
    for seen in zip(*by_rank, strict=True):
        assert breaches(seen) == [], seen[0].title


@laws_hold(max_examples=4)
@given(case=CASES, plugs=PLUGS, half=HALVES)
def test_random_models_on_two_ranks(two_ranks, case, plugs, half):
    assert_laws(two_ranks, case, plugs, half_of_the_variants(case, half))


@laws_hold(max_examples=3)
@given(case=CASES, plugs=PLUGS)
def test_random_models_by_gloo_alone(three_ranks, case, plugs):
    variants = [Variant(shared_memory=False, bucket_mb=0.0002), Variant(shared_memory=False, overlap=False, views=True)]
    assert_laws(three_ranks, case, plugs, variants)


@laws_hold(max_examples=3)
@given(case=CASES, plugs=PLUGS, half=HALVES)
def test_random_models_on_three_ranks(three_ranks, case, plugs, half):
    assert_laws(three_ranks, case, plugs, half_of_the_variants(case, half))


EVERYTHING = tuple(LayerRecipe(kind, DTYPES[k % len(DTYPES)]) for k, kind in enumerate(Kind))


@pytest.mark.parametrize(
    ("world", "variants"),
    [("two_ranks", every_variant()[3::5]), ("three_ranks", every_variant()[1::5])],
    ids=["2", "3"],
)
def test_every_step_in_turn_on_a_model_of_every_layer(request, world, variants):
    """The other variants on two ranks are in test_shm_backend.py."""
    recipe = Recipe(1, EVERYTHING, width=8, heads=3, early_exit=True)
    steps = tuple(
        TrainingStep(kind, zeroing) for kind, zeroing in zip(StepKind, itertools.cycle(Zeroing), strict=False)
    )
    assert_laws(request.getfixturevalue(world), Case(recipe, steps), variants=variants)


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
def test_every_layer_with_the_same_graph_on_all_ranks(two_ranks, kind):
    recipe = Recipe(2, (LayerRecipe(Kind.LINEAR), LayerRecipe(kind), LayerRecipe(kind)), heads=2, common_path=True)
    kinds = [kind for kind in StepKind if Case(recipe, (TrainingStep(kind),)).supports(Variant(negotiate=False))]
    steps = tuple(TrainingStep(kind, zeroing) for kind, zeroing in zip(kinds, itertools.cycle(Zeroing), strict=False))
    variants = [variant for variant in every_variant(common_path=True) if not variant.negotiate]
    first = list(Kind).index(kind) % 4  # every size with each layer, and every variant with some
    assert_laws(two_ranks, Case(recipe, steps), variants=variants[first::4])


# ---------------------------------------------------------------- found by the tests above, in small


def test_the_last_bucket_that_is_sent_is_the_last_also_where_an_empty_one_follows(two_ranks):
    recipe = Recipe(3, (LayerRecipe(Kind.EMPTY, torch.float64), LayerRecipe(Kind.LINEAR)))
    assert_laws(two_ranks, Case(recipe), Plugs(in_place_mean))


def test_a_hook_counts_steps_by_is_last_where_a_sparse_gradient_comes_last(two_ranks):
    counts = two_ranks.run(count_last_buckets)
    assert counts == [3, 3]


def count_last_buckets():
    seen = []

    def count(gradients, group):
        seen.append(gradients.is_last())
        return ppe_ddp.average(gradients, group)

    module = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 3))
    wrapper = ppe_ddp.DistributedDataParallel(module, reduce_function=count, bucket_cap_mb=0.000001)
    for _ in range(3):
        wrapper(torch.tensor([dist.get_rank()])).sum().backward()
    return sum(seen)


class CheckpointedFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, batch):
        return self.outer(checkpoint(self.inner, batch, use_reentrant=True))


def keep_gradients_while_one_rank_is_late():
    """On rank 1 gradients arrive before the mask is back, on rank 0, which begins after that, when it is."""
    wrapper = ppe_ddp.DistributedDataParallel(CheckpointedFirst(), negotiate_grads=False, bucket_cap_mb=0.000001)
    store, begun = dist.distributed_c10d._get_default_store(), []

    def noted(*arguments):
        begun.append(MaskExchange(*arguments))
        return begun[-1]

    def wait_for_the_mask(_):
        deadline = time.monotonic() + 20
        while len(begun) == before or not begun[-1].done():
            assert time.monotonic() < deadline

    with mock.patch.object(negotiation, "MaskExchange", noted):
        for step in range(2):
            loss = wrapper(torch.ones(2, 3, requires_grad=True)).sum()
            outer = loss.grad_fn.next_functions[0][0]
            before = len(begun)
            if dist.get_rank() == 0:
                store.wait([f"arrived in step {step}"])
                outer.register_prehook(wait_for_the_mask)
            else:
                (inner,) = (node for node, _ in outer.next_functions if "Checkpoint" in node.name())
                inner.register_prehook(lambda _, step=step: store.set(f"arrived in step {step}", ""))
            loss.backward()
    return wrapper.module.inner.bias.grad


def test_what_comes_late_depends_on_time_also_where_all_ranks_have_the_same_gradients(two_ranks):
    first, second = two_ranks.run(keep_gradients_while_one_rank_is_late, timeout=90)
    assert torch.equal(first, second)


def counted_mean(counts, bucket):
    counts[bucket.index()] = counts.get(bucket.index(), 0) + 1
    return allreduce_hook(None, bucket)


def test_a_hook_with_a_state_loses_no_gradient_that_nobody_expected(two_ranks):
    recipe = Recipe(7, (LayerRecipe(Kind.REENTRANT), LayerRecipe(Kind.LINEAR)))
    assert_laws(two_ranks, Case(recipe), Plugs(hook=counted_mean, state={}))


def wrap_what_only_some_ranks_have():
    pair = dist.new_group([1, 2])
    if dist.get_rank() > 0:
        ppe_ddp.DistributedDataParallel(nn.Linear(2, 2), process_group=pair)
    check_case(Case(Recipe(8, (LayerRecipe(Kind.LINEAR),)), (TrainingStep(),)))


def test_ranks_that_have_wrapped_different_numbers_of_modules_can_wrap_one_together():
    with Ranks(3) as ranks:
        ranks.run(wrap_what_only_some_ranks_have)


# ---------------------------------------------------------------- the laws can be broken


def observe_with_a_reach_of_everything(case):
    with mock.patch("torch._C._will_engine_execute_node", return_value=True):
        return observe(case, Variant())


def test_law_3_hears_of_gradients_that_exist_nowhere(two_ranks):
    case = Case(Recipe(4, (LayerRecipe(Kind.UNUSED), LayerRecipe(Kind.LINEAR))), (TrainingStep(),))
    found = breaches(two_ranks.run(observe_with_a_reach_of_everything, case))
    assert any("law 3" in problem and "too many ['layers.0.maps.0.bias'" in problem for problem in found), found


def test_check_case_raises_the_same_on_every_rank(two_ranks):
    case = Case(Recipe(5, (LayerRecipe(Kind.LINEAR),)), (TrainingStep(),))
    two_ranks.run(check_case, case)
    with pytest.raises(RankError) as caught:
        two_ranks.run(check_case, case, Variant(), Plugs(only_for_rank_0))
    first, second = (str(caught.value.exceptions[rank]) for rank in (0, 1))
    assert isinstance(caught.value.exceptions[0], ConformanceError)
    assert first == second
    assert "rank 1: step 0 (ONE_BACKWARD), backward 0: law 2: the gradient of layers.0.maps.0.weight is off" in first
    assert "law 2: after synchronization 0, rank 1 and rank 0 have different bits in" in first


def test_breaches_compare_what_ranks_did(two_ranks):
    case = Case(Recipe(6, (LayerRecipe(Kind.LINEAR),)), (TrainingStep(),))
    first, second = two_ranks.run(observe, case, Variant(), Plugs(in_place_mean))
    assert breaches([first, second]) == []
    second.buckets[0].reverse()
    second.buckets[0].append((("more",), False))
    second.collectives[0].pop()
    assert [re.sub(r"differ.*", "differ", problem) for problem in breaches([first, second])] == [
        "law 1: in synchronization 0, rank 1 and rank 0 differ"
    ] * 2


# ---------------------------------------------------------------- the models


def described(recipe):
    weights = recipe.build().state_dict()
    paths = [recipe.path(step, rank) for step in range(3) for rank in range(3)]
    return weights, paths, recipe.batch(1, 2), Recipe.random(7)


@laws_hold(max_examples=5)
@given(recipe=RECIPES)
def test_a_description_means_the_same_in_every_process(two_ranks, recipe):
    own = described(recipe)
    for weights, paths, batch, drawn in two_ranks.run(described, recipe):
        assert all(torch.equal(tensor, own[0][name]) for name, tensor in weights.items())
        assert (paths, drawn) == (own[1], own[3])
        assert torch.equal(batch, own[2])


@laws_hold(max_examples=50)
@given(recipe=RECIPES)
def test_paths_differ_unless_they_are_common(recipe):
    paths = [[recipe.path(step, rank) for step in range(8)] for rank in range(2)]
    assert (paths[0] == paths[1]) == recipe.common_path
    assert all(path.heads for path in paths[0])


@on_two_ranks
def test_ranks_that_must_have_the_same_gradients_may_announce_them_at_other_times():
    """A rank with a hook of ppe's kind does so behind its backward, when it has that of a reentrant checkpoint, too."""
    wrapper = ppe_ddp.DistributedDataParallel(CheckpointedFirst(), negotiate_grads=False)
    if dist.get_rank() == 0:
        wrapper.register_comm_hook(lambda _: None)
    for _ in range(2):
        wrapper.zero_grad()
        wrapper(torch.ones(2, 3, requires_grad=True)).sum().backward()
        assert_same_on_all_ranks(wrapper.module)
    with wrapper.join():
        for _ in range(1 + dist.get_rank()):
            wrapper(torch.ones(2, 3, requires_grad=True)).sum().backward()
    wrapper.check_in_sync()
