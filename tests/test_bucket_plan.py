"""Bucket plans for random parameters: their members, their order, and that every rank computes the same."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppe_ddp.engine.plan import Packing, ParameterSpec, Planner, fingerprint, make_plan

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
SPECS = st.lists(
    st.builds(
        lambda shape, dtype, sparse: ParameterSpec(
            "", tuple(shape), torch.empty(shape, device="meta").stride(), dtype, CPU, sparse
        ),
        st.lists(st.integers(0, 6), max_size=3),
        st.sampled_from(DTYPES),
        st.booleans(),
    ),
    max_size=10,
)
SIZES = st.integers(0, 300)


def spec(numel, dtype=torch.float32, *, name="weight", device=CPU, sparse=False):
    return ParameterSpec(name, (numel,), (1,), dtype, device, sparse)


@st.composite
def situations(draw, fixed=None):
    """Parameters, which of them exist, an order, and how they are packed."""
    specs = draw(SPECS)
    count = len(specs)
    present = bytes(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)))
    order = draw(st.permutations(range(count)))
    is_fixed = draw(st.booleans()) if fixed is None else fixed
    return present, specs, order, Packing(draw(SIZES), draw(SIZES), is_fixed)


def in_buckets_order(bucket, specs, order, packing):
    """In the order of arrival, but those together that one call concatenates."""
    arrived = sorted(bucket.members, key=order.index)
    if packing.fixed or not bucket.row_major:
        return arrived
    kinds = [specs[i].shape[1:] if specs[i].shape else "scalar" for i in arrived]
    return [i for kind in dict.fromkeys(kinds) for i, own in zip(arrived, kinds, strict=True) if own == kind]


# --- plans


@given(situations())
def test_every_gradient_that_exists_has_one_place(situation):
    present, specs, order, packing = situation
    plan = make_plan(*situation)
    placed = [i for bucket in plan.buckets for i in bucket.members]
    assert len(set(placed)) == len(placed)
    assert {i for i, here in enumerate(present) if here} <= set(placed)
    assert packing.fixed or all(present[i] for i in placed)
    assert plan.bucket_of == {i: k for k, bucket in enumerate(plan.buckets) for i in bucket.members}
    for bucket in plan.buckets:
        assert any(present[i] for i in bucket.members)
        assert list(bucket.members) == in_buckets_order(bucket, specs, order, packing)
        sizes = [specs[i].numel for i in bucket.members]
        assert list(bucket.offsets) == [0, *itertools.accumulate(sizes)][:-1]
        assert bucket.numel == sum(sizes)
        assert bucket.nbytes == sum(specs[i].nbytes for i in bucket.members)
        assert {specs[i].dtype for i in bucket.members} == {bucket.dtype}
        assert bucket.row_major == all(specs[i].is_row_major for i in bucket.members)


@given(situations())
def test_a_bucket_is_closed_when_it_is_full_and_not_before(situation):
    _, specs, order, packing = situation
    plan = make_plan(*situation)
    ends, open_ends, kinds = [], [], []
    for bucket in plan.buckets:
        last = max(bucket.members, key=order.index)
        is_large = specs[last].nbytes >= packing.adopt_bytes
        assert bucket.sparse == specs[last].sparse
        if bucket.sparse or is_large:
            assert len(bucket.members) == 1
            ends.append(order.index(last))
            continue
        assert not any(specs[i].sparse or specs[i].nbytes >= packing.adopt_bytes for i in bucket.members)
        assert len(bucket.members) == 1 or bucket.nbytes - specs[last].nbytes < packing.bucket_bytes
        if bucket.nbytes >= packing.bucket_bytes:
            ends.append(order.index(last))
        else:
            open_ends.append(order.index(last))
            kinds.append(bucket.dtype)
    # The full ones as they fill, then what is left: one a dtype, as each got its last member.
    assert ends == sorted(ends)
    assert open_ends == sorted(open_ends)
    assert len(set(kinds)) == len(kinds)
    places = [max(map(order.index, bucket.members)) for bucket in plan.buckets]
    assert places == ends + open_ends


@given(situations())
def test_the_last_bucket_of_a_function_is_known_beforehand(situation):
    plan = make_plan(*situation)
    given_to_functions = [k for k, bucket in enumerate(plan.buckets) if bucket.numel and not bucket.sparse]
    assert plan.last == (given_to_functions[-1] if given_to_functions else -1)


@given(situations(fixed=False), st.data())
def test_what_exists_nowhere_changes_nothing(situation, data):
    present, specs, order, packing = situation
    plan = make_plan(*situation)
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    others = [one if present[i] else dataclasses.replace(one, shape=(99,), stride=(1,)) for i, one in enumerate(specs)]
    moved = data.draw(st.permutations([i for i in order if not present[i]]))
    among = [i for i in order if present[i]]
    for i in moved:
        among.insert(data.draw(st.integers(0, len(among))), i)
    assert make_plan(present, others, among, packing).buckets == plan.buckets


@given(situations(), st.data())
def test_names_and_numbers_of_parameters_mean_nothing(situation, data):
    present, specs, order, packing = situation
    number_of = data.draw(st.permutations(range(len(specs))))  # the new number of each parameter
    old_of = sorted(range(len(specs)), key=number_of.__getitem__)
    renamed = [dataclasses.replace(specs[i], name=f"parameter {i}") for i in old_of]
    plan = make_plan(bytes(7 * present[i] for i in old_of), renamed, [number_of[i] for i in order], packing)
    expected = make_plan(*situation)
    assert [tuple(old_of[i] for i in bucket.members) for bucket in plan.buckets] == [
        bucket.members for bucket in expected.buckets
    ]
    for ours, theirs in zip(plan.buckets, expected.buckets, strict=True):
        assert dataclasses.replace(ours, members=()) == dataclasses.replace(theirs, members=())


@given(situations(fixed=True))
def test_fixed_buckets_always_carry_the_same(situation):
    present, specs, order, packing = situation
    whole = make_plan(bytes([1]) * len(specs), specs, order, packing)
    chosen = [bucket for bucket in whole.buckets if any(present[i] for i in bucket.members)]
    assert list(make_plan(present, specs, order, packing).buckets) == chosen
    nodes = bytes(2 * here for here in present)  # of which fixed buckets know nothing
    assert list(make_plan(present, specs, order, packing, nodes).buckets) == chosen
    assert [bucket.index for bucket in whole.buckets] == list(range(len(whole.buckets)))


@given(situations(fixed=False), st.data())
def test_what_one_node_has_alone_is_sent_by_itself(situation, data):
    present, specs, order, packing = situation
    nodes = bytes(data.draw(st.integers(0, 2)) if here else 0 for here in present)
    plan = make_plan(*situation, nodes)
    for bucket in plan.buckets:
        assert {nodes[i] for i in bucket.members} == {0 if bucket.node is None else 1 + bucket.node}
    # The buckets of one kind are as if there were no others, apart from their numbers and turns.
    for kind in set(nodes):
        alone = bytes(here and nodes[i] == kind for i, here in enumerate(present))
        wanted = [bucket.members for bucket in make_plan(alone, specs, order, packing).buckets]
        assert sorted(b.members for b in plan.buckets if nodes[b.members[0]] == kind) == sorted(wanted)


# --- what is planned for


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_row_major_is_what_torch_calls_contiguous(shape, data):
    tensor = torch.empty(shape).permute(data.draw(st.permutations(range(len(shape)))))
    one = ParameterSpec("", tuple(tensor.shape), tensor.stride(), tensor.dtype, CPU)
    assert one.is_row_major == tensor.is_contiguous()
    assert (one.numel, one.nbytes) == (tensor.numel(), tensor.nbytes)


def test_a_description_has_what_ranks_must_agree_on():
    one = spec(3)
    changes = [
        {"name": "bias"},
        {"shape": (4,)},
        {"stride": (2,)},
        {"dtype": torch.float64},
        {"device": torch.device("cuda", 0)},
        {"sparse": True},
    ]
    texts = {dataclasses.replace(one, **change).described() for change in [{}, *changes]}
    assert len(texts) == 1 + len(changes)
    on_gpu = [dataclasses.replace(one, device=torch.device("cuda", k)).described() for k in range(2)]
    assert on_gpu[0] == on_gpu[1]  # a rank has its own
    assert spec(1).described() == dataclasses.replace(one, shape=(), stride=()).described()


def test_the_size_of_a_bucket_is_given_in_mebibytes_and_by_default_follows_the_device():
    assert Packing.of([0.5]).bucket_bytes == 1 << 19
    assert Packing.of([0.5]).adopt_bytes > Packing.of([0.5]).bucket_bytes
    on_gpu = Packing.of(None, [spec(1), spec(1, device=torch.device("cuda", 0))])
    assert on_gpu.bucket_bytes > Packing.of(None, [spec(1)]).bucket_bytes
    assert Packing.of([1], fixed=True) == dataclasses.replace(Packing.of([1]), fixed=True)


@given(st.lists(st.text("ab", max_size=3), max_size=4), st.lists(st.text("ab", max_size=3), max_size=4))
def test_fingerprints_are_equal_where_the_lines_are(first, second):
    assert (fingerprint(first) == fingerprint(second)) == (first == second)
    assert len(fingerprint(first)) == 16


# --- the planner


def planner(count=4, **packing):
    return Planner([spec(2)] * count, Packing(**{"bucket_bytes": 8, "adopt_bytes": 10**6} | packing))


def members(plan):
    return [bucket.members for bucket in plan.buckets]


def test_parameters_are_expected_in_reverse_until_their_order_is_learned():
    ours, everything = planner(), bytes([1] * 4)
    assert members(ours.plan(everything)) == [(3,), (2,), (1,), (0,)]
    assert ours.has_unlearned(everything)
    ours.learn([0.0, None, 0.9, None])
    assert not ours.has_unlearned(bytes([1, 0, 1, 0]))
    assert ours.has_unlearned(bytes([1, 1, 0, 0]))
    # 3 and 1 stay where they were guessed: at 0 and at a half.
    assert members(ours.plan(everything)) == [(3,), (0,), (1,), (2,)]
    ours.learn([None, 0.1, None, 0.2])
    assert not ours.has_unlearned(everything)
    assert sorted(ours.order) == [0, 1, 2, 3]


def test_fixed_buckets_have_one_order_whatever_was_learned_or_loaded():
    ours, everything = planner(), bytes([1] * 4)
    before = members(ours.plan(everything))
    ours.learn([0.0, 0.1, 0.2, 0.3])
    assert members(ours.plan(everything)) != before
    ours.repack(dataclasses.replace(ours.packing, fixed=True))
    assert members(ours.plan(everything)) == before
    ours.restore([0, 1, 2, 3], [0, 1, 2, 3])
    assert members(ours.plan(everything)) == before


@given(st.lists(st.none() | st.floats(0, 1, exclude_max=True), min_size=6, max_size=6))
def test_what_was_seen_is_ordered_as_it_was_seen(positions):
    ours = planner(6)
    ours.learn(positions)
    assert sorted(ours.order) == list(range(6))
    seen = [positions[i] for i in ours.order if positions[i] is not None]
    assert seen == sorted(seen)
    assert ours.has_unlearned(bytes([1] * 6)) == (None in positions)


def test_a_plan_is_the_same_object_for_as_long_as_it_is_kept():
    ours = planner()
    first, second = (bytes([1, 0, 0, k]) for k in range(2))
    plan = ours.plan(first)
    assert ours.plan(second).present == second
    assert ours.plan(first) is plan
    elsewhere = ours.plan(second, bytes([2, 0, 0, 0]))
    assert [bucket.node for bucket in elsewhere.buckets if 0 in bucket.members] == [1]
    assert ours.plan(second, bytes([2, 0, 0, 0])) is elsewhere


@given(st.lists(st.integers(0, 1 << 15), max_size=40), st.sampled_from([1, 1 << 20, 1 << 22]))
def test_a_launch_is_triggered_by_each_large_gradient_and_by_so_many_bytes_of_small_ones(numels, bucket_bytes):
    ours = Planner([spec(numel) for numel in numels], Packing(1, 1))
    ours.repack(Packing(bucket_bytes, 1))
    most, size = max(1 << 16, bucket_bytes >> 4), 0
    for i in ours.order:
        nbytes = ours.specs[i].nbytes
        size += nbytes
        assert (i in ours.launch_triggers) == (nbytes >= 1 << 16 or size >= most)
        size = 0 if i in ours.launch_triggers else size


@pytest.mark.parametrize(("numel", "does"), [((1 << 14) - 1, False), (1 << 14, True)])
def test_a_gradient_of_just_the_size_triggers_and_is_alone(numel, does):
    ours = Planner([spec(numel)], Packing(1 << 20, 1 << 16))
    assert (0 in ours.launch_triggers) is does
    beside = Planner([spec(1), spec(numel)], Packing(1 << 20, 1 << 16))
    assert members(beside.plan(b"\1\1")) == ([(1,), (0,)] if does else [(1, 0)])
