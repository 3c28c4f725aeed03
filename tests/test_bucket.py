"""A bucket is made once a plan; what it lends and holds belongs to one backward."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ppe_ddp.contracts import Division
from ppe_ddp.engine.bucket import BucketContext, PackedBucket, SparseBucket, buckets_of_plans
from ppe_ddp.engine.completion import run
from ppe_ddp.engine.memory import MemoryPool
from ppe_ddp.engine.plan import Packing, ParameterSpec, make_plan
from ppe_ddp.engine.reduction import FunctionReduction
from ppe_ddp.functions import takes_divided

CPU = torch.device("cpu")
SHAPES = [(3, 3), (5,), (2, 2)]
GROUPS = SimpleNamespace(
    world_size=4, rank=0, buckets=None, failures=SimpleNamespace(wait=lambda pending, device: pending.wait())
)


def triple(bucket, group):
    """What other ranks add, as it were."""
    bucket.buffer().mul_(3)


class Setting:
    """Parameters, and the buckets of plans for them."""

    def __init__(self, function=triple, packing=None):
        self.parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        self.specs = [
            ParameterSpec(f"p{i}", tuple(p.shape), p.stride(), p.dtype, CPU) for i, p in enumerate(self.parameters)
        ]
        self.packing = packing or Packing(10**9, 10**9)
        context = BucketContext(self.specs, self.parameters, GROUPS, FunctionReduction(function, GROUPS))
        self.allocated = 0
        self.buckets_of = buckets_of_plans(context, MemoryPool(self._allocate), capacity=2)

    def _allocate(self, numel, dtype, device):
        self.allocated += 1
        return torch.empty(numel, dtype=dtype, device=device)

    def plan(self, *present):
        return make_plan(bytes(i in present for i in range(3)), self.specs, [0, 1, 2], self.packing)

    def gradients(self, members, value=1.0):
        return [torch.full(SHAPES[i], value) for i in members]


def used(bucket, gradients, *, views=True):
    bucket.hold(gradients, views=views)
    bucket.launch(is_last=True)
    run(bucket.finish())
    averages = bucket.averages()
    bucket.release()
    return averages


def test_a_plan_has_the_same_buckets_for_as_long_as_it_is_kept():
    setting = Setting()
    plan, others = setting.plan(0, 1, 2), [setting.plan(0), setting.plan(1)]
    (bucket,) = setting.buckets_of(plan)
    assert bucket.names == ("p0", "p1", "p2")
    assert all(a is b for a, b in zip(bucket.parameters, setting.parameters, strict=True))
    assert setting.buckets_of(plan)[0] is bucket
    for other in others:
        assert setting.buckets_of(other)[0] is not bucket
    assert setting.buckets_of(plan)[0] is not bucket  # there were two since then


@pytest.mark.parametrize("views", [True, False])
def test_averages_stay_while_another_backward_has_the_same_plan(views):
    setting = Setting()
    (bucket,) = setting.buckets_of(setting.plan(0, 1, 2))
    first = used(bucket, setting.gradients(range(3)), views=views)
    second = used(bucket, setting.gradients(range(3), 2.0), views=views)
    for k in range(3):
        torch.testing.assert_close(first[k], torch.full(SHAPES[k], 3.0))
        torch.testing.assert_close(second[k], torch.full(SHAPES[k], 6.0))


def test_memory_is_lent_again_when_nobody_holds_averages():
    setting = Setting()
    (bucket,) = setting.buckets_of(setting.plan(0, 1, 2))
    place = used(bucket, setting.gradients(range(3)))[0].data_ptr()
    assert used(bucket, setting.gradients(range(3)))[0].data_ptr() == place
    held = used(bucket, setting.gradients(range(3)))
    assert used(bucket, setting.gradients(range(3)))[0].data_ptr() != place
    assert held[0].data_ptr() == place


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_what_this_rank_has_not_is_zero(missing):
    setting = Setting()
    (bucket,) = setting.buckets_of(setting.plan(0, 1, 2))
    used(bucket, setting.gradients(range(3), 9.0))
    gradients = setting.gradients(range(3))
    gradients[missing] = None
    for k, average in enumerate(used(bucket, gradients)):
        torch.testing.assert_close(average, torch.full(SHAPES[k], 0.0 if k == missing else 3.0))


@pytest.mark.parametrize("packing", [None, Packing(1, 1)], ids=["packed", "alone"])
def test_without_views_the_gradients_themselves_become_averages(packing):
    setting = Setting(packing=packing)
    buckets = setting.buckets_of(setting.plan(0, 1, 2))
    assert {type(bucket) for bucket in buckets} == {PackedBucket}
    for bucket in buckets:
        gradients = setting.gradients(bucket.plan.members)
        places = [gradient.data_ptr() for gradient in gradients]
        averages = used(bucket, list(gradients), views=False)
        assert [average.data_ptr() for average in averages] == places
        assert all((average == 3.0).all() for average in averages)


@pytest.mark.parametrize("packing", [None, Packing(1, 1)], ids=["packed", "alone"])
def test_who_takes_divided_gradients_gets_them_divided(packing):
    seen = []

    @takes_divided
    def look(bucket, group):
        seen.append((bucket.division(), bucket.buffer().unique().tolist()))

    setting = Setting(look, packing)
    for bucket in setting.buckets_of(setting.plan(0, 1, 2)):
        averages = used(bucket, setting.gradients(bucket.plan.members))
        assert all((average == 0.25).all() for average in averages)
    assert set(map(str, seen)) == {str((Division.DONE, [0.25]))}


def test_a_bucket_is_held_by_one_backward_at_a_time():
    setting = Setting()
    (bucket,) = setting.buckets_of(setting.plan(0, 1, 2))
    bucket.hold(setting.gradients(range(3)))
    with pytest.raises(AssertionError, match="under way"):
        bucket.hold(setting.gradients(range(3)))
    bucket.release()
    bucket.hold(setting.gradients(range(3)))


@pytest.mark.parametrize("packing", [None, Packing(1, 1)], ids=["packed", "alone"])
@pytest.mark.parametrize("views", [True, False])
def test_what_is_put_back_is_what_was_there_also_after_the_reduction(packing, views):
    setting = Setting(packing=packing)
    for bucket in setting.buckets_of(setting.plan(0, 1, 2)):
        gradients = setting.gradients(bucket.plan.members, 0.1)
        gradients[0] = gradients[0] if packing else None
        bucket.hold(list(gradients), views=views)
        bucket.launch(is_last=True)
        run(bucket.finish())
        back = bucket.put_back()
        assert [i for i, _ in back] == [
            i for i, one in zip(bucket.plan.members, gradients, strict=True) if one is not None
        ]
        assert all(one is gradients[bucket.plan.members.index(i)] for i, one in back)
        assert all(torch.equal(one, torch.full(SHAPES[i], 0.1)) for i, one in back)
        assert bucket.put_back() == []


def test_gradients_that_are_slots_already_are_packed_into_another_buffer_and_both_are_kept():
    setting = Setting()
    (bucket,) = setting.buckets_of(setting.plan(0, 1, 2))
    buffers = bucket._pool
    averages = used(bucket, setting.gradients(range(3)))
    for turn in range(5):
        buffers.trim()
        before, averages = averages, used(bucket, list(averages))
        assert averages[0].data_ptr() != before[0].data_ptr()
        torch.testing.assert_close(averages[0], 3 * before[0])
        del before
        assert setting.allocated == 2, turn


def test_what_is_given_back_is_not_put_back_too():
    setting = Setting()
    (bucket,) = setting.buckets_of(setting.plan(0, 1, 2))
    bucket.hold(setting.gradients(range(3)), views=True)
    bucket.launch(is_last=True)
    assert [i for i, _ in bucket.give_back()] == [0, 1, 2]
    run(bucket.finish())
    assert bucket.put_back() == []


def test_a_fixed_bucket_asks_for_what_some_rank_has():
    setting = Setting(packing=Packing(10**9, 10**9, fixed=True))
    (bucket,) = setting.buckets_of(setting.plan(0, 2))
    assert (bucket.expected, bucket.is_exact) == ((0, 2), False)
    averages = used(bucket, setting.gradients(bucket.expected))
    assert [average.unique().tolist() for average in averages] == [[3.0], [0.0], [3.0]]
    assert [tuple(average.shape) for average in bucket.expected_of(averages)] == [SHAPES[0], SHAPES[2]]


def test_a_sparse_gradient_alone_is_its_average():
    spec = ParameterSpec("table", (4, 2), (2, 1), torch.float32, CPU, sparse=True)
    groups = SimpleNamespace(world_size=1, rank=0, buckets=None)
    context = BucketContext([spec], [nn.Parameter(torch.zeros(4, 2))], groups, FunctionReduction(triple, groups))
    (plan,) = make_plan(b"\1", [spec], [0], Packing(1, 1)).buckets
    bucket = SparseBucket(plan, context, b"\1")
    gradient = torch.sparse_coo_tensor([[1, 1, 3]], torch.ones(3, 2), (4, 2), check_invariants=False)
    (average,) = used(bucket, [gradient])
    assert average.is_coalesced()
    assert average.to_dense().tolist() == [[0, 0], [2, 2], [0, 0], [1, 1]]
    assert bucket.nbytes == 2 * 8 + 4 * 4
