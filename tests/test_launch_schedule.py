"""Buckets are launched in the order of their plan, each when its gradients are there."""

import pytest
import torch

from ppe_ddp.engine.bucket import LaunchSchedule
from ppe_ddp.engine.plan import Packing, ParameterSpec, make_plan

CPU = torch.device("cpu")


class Written:
    """A bucket that writes down what happens to it."""

    is_exact, nbytes, under_way, packed_at = True, 8, False, 0

    def __init__(self, plan, log):
        self.plan, self.log = plan, log
        self.expected = plan.members

    def check(self):
        self.log.append(f"check {self.plan.index}")

    def launch(self, *, is_last):
        self.under_way = True
        self.log.append(f"launch {self.plan.index}" + (" last" if is_last else ""))

    @property
    def pending(self):
        return self if self.under_way else None

    def done(self):
        return not self.under_way

    def wait(self):
        self.log.append(f"wait {self.plan.index}")
        self.under_way = False

    def finish(self):
        yield self.done
        self.log.append(f"finish {self.plan.index}")

    def averages(self):
        return [torch.zeros(())] * len(self.expected)

    def put_back(self):
        return [(i, torch.zeros(())) for i in self.expected]

    def release(self):
        self.log.append(f"release {self.plan.index}")


class Case:
    """Six parameters in three buckets of two; the second pair is sparse, alone, where asked for."""

    def __init__(self, waiting=(1,) * 6, *, sparse=(), **options):
        specs = [ParameterSpec(f"p{i}", (2,), (1,), torch.float32, CPU, i in sparse) for i in range(6)]
        self.plan = make_plan(bytes([1] * 6), specs, range(6), Packing(16, 10**9))
        self.log = []
        buckets = [Written(bucket, self.log) for bucket in self.plan.buckets]
        self.schedule = LaunchSchedule(
            self.plan, buckets, bytes(waiting), lambda b: self.log.append(f"prepare {b.plan.index}"), **options
        )

    def arrive(self, *indices):
        for i in indices:
            self.schedule.mark_arrived([i])
            self.schedule.launch_ready()

    @property
    def launched(self):
        return [int(entry.split()[1]) for entry in self.log if entry.startswith("launch")]


@pytest.mark.parametrize(
    ("arrived", "launched"),
    [
        ([0], []),
        ([0, 1], [0]),
        ([2, 3], []),
        ([2, 3, 4, 5], []),
        ([2, 3, 1, 0], [0, 1]),
        ([5, 4, 3, 2, 1, 0], [0, 1, 2]),
    ],
)
def test_a_bucket_is_launched_when_its_gradients_are_there_and_the_one_before_was_launched(arrived, launched):
    case = Case()
    case.arrive(*arrived)
    assert case.launched == launched


def test_what_this_rank_does_not_expect_delays_nothing():
    case = Case(waiting=(0, 0, 0, 1, 0, 0))
    case.schedule.launch_ready()
    assert case.launched == [0]
    case.arrive(3)
    assert case.launched == [0, 1, 2]


def test_gradients_are_put_in_right_before_and_the_bucket_ahead_is_looked_at():
    case = Case()
    case.arrive(*range(6))
    expected = ["prepare 0", "launch 0", "check 0", "prepare 1", "launch 1", "check 1", "prepare 2", "launch 2 last"]
    assert case.log == expected


@pytest.mark.parametrize("ranges", [True, False])
def test_in_the_end_all_are_launched_and_none_is_waited_for(ranges):
    case = Case(ranges=ranges)
    case.arrive(0, 1)
    assert list(case.schedule.launch_all()) == []
    assert case.launched == [0, 1, 2]
    assert [entry for entry in case.log if entry.startswith("wait") or entry.endswith("last")] == ["launch 2 last"]


def test_one_at_a_time():
    case = Case(one_at_a_time=True)
    case.arrive(*range(6))
    assert case.launched == [0]
    steps = case.schedule.launch_all()
    is_done = next(steps)  # waits for the first
    assert not is_done()
    list(steps)
    assert [entry for entry in case.log if entry[0] in "lw"] == [
        "launch 0", "wait 0", "launch 1", "wait 1", "launch 2 last",
    ]  # fmt: skip


def test_sparse_ones_are_waited_for_last_and_averages_are_handed_over_after_all():
    case, got = Case(sparse=[0]), []
    list(case.schedule.launch_all())
    case.log.clear()
    list(case.schedule.finish())
    dense = [bucket for bucket in case.plan.buckets if not bucket.sparse]
    sparse = [bucket for bucket in case.plan.buckets if bucket.sparse]
    assert case.plan.buckets[0].sparse
    assert case.log == [f"finish {bucket.index}" for bucket in [*dense, *sparse]]
    assert all(case.schedule.record.done)
    case.schedule.hand_over(lambda indices, averages: got.append((indices, len(averages))))
    assert got == [(bucket.members, len(bucket.members)) for bucket in case.plan.buckets]
    assert [entry for entry in case.log if "release" in entry] == [f"release {b.index}" for b in case.plan.buckets]


def test_what_was_not_launched_is_not_put_back():
    case = Case()
    case.arrive(0, 1, 2, 3)
    assert [i for i, _ in case.schedule.put_back()] == [0, 1, 2, 3]
