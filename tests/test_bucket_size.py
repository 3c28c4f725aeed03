"""`bucket_cap_mb=None`: the size of buckets is chosen by what the first steps have measured, alike on every rank."""

import copy
import itertools
import os
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ppe_ddp
from node_worlds import in_own_world, worlds
from ppe_ddp.engine import negotiation
from ppe_ddp.engine.negotiation import MEASURED_STEPS, MeasuredSpeed

MIB = 1 << 20
DEFAULT = 4 * MIB


def speed(backward, nbytes, latency, per_byte, *taken):
    return MeasuredSpeed(backward, nbytes, latency, per_byte, *taken).best_bucket_bytes(DEFAULT)


def test_where_nothing_is_gained_the_default_stays():
    assert speed(0.04, 32 * MIB, 1e-4, 5e-11) == DEFAULT  # two ranks of one node
    assert speed(0.04, 32 * MIB, 4e-4, 8e-9) == DEFAULT  # 1 Gbit/s: all that counts is the bytes
    assert speed(0.0, 0, 0.0, 0.0) == DEFAULT


def test_the_slower_the_link_behind_a_long_backward_the_smaller_the_last_bucket():
    assert speed(0.25, 16 * MIB, 4e-4, 8e-9) <= MIB


def test_the_longer_the_latency_the_larger_the_buckets():
    assert speed(0.3, 64 * MIB, 0.1, 1e-10) >= 16 * MIB


def test_where_the_transport_takes_the_cores_that_ranks_compute_on_there_are_fewer_buckets():
    small_model = 0.01, 3_328_000, 4e-4, 1e-9
    assert speed(*small_model) == MIB
    assert speed(*small_model, 3e-4, 5e-10) > MIB
    assert speed(*small_model, 2e-3, 1e-9) == DEFAULT


class Net(nn.Module):
    """Eight layers of 0.25 MiB; backward may fail in the middle."""

    def __init__(self):
        super().__init__()
        self.first, self.last = (nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]) for _ in range(2))

    def forward(self, x, fails=False):
        middle = self.first(x)
        if fails:
            middle.register_hook(fail)
        return self.last(middle)


def fail(_gradient):
    raise RuntimeError("oh")


def packing_of(model):
    return model._reducer.synchronizer.negotiation._packing


@contextmanager
def chosen(size):
    """Let every measurement end in this choice, whatever this machine is busy with."""
    before, MeasuredSpeed.best_bucket_bytes = MeasuredSpeed.best_bucket_bytes, lambda self, default: size
    try:
        yield
    finally:
        MeasuredSpeed.best_bucket_bytes = before


def train(model, steps, start=0):
    for step in range(start, start + steps):
        torch.manual_seed(10 * step + dist.get_rank())
        model.zero_grad()
        model(torch.randn(4, 256)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def choose_after_first_steps():
    torch.manual_seed(0)
    with chosen(MIB // 2):
        model = ppe_ddp.DistributedDataParallel(Net())
        plain = ppe_ddp.DistributedDataParallel(Net(), bucket_cap_mb=4)
        plain.load_state_dict(model.state_dict())
        train(model, MEASURED_STEPS - 1)
        assert packing_of(model).measured
        assert packing_of(model).bucket_bytes == DEFAULT
        train(model, 1)
        assert len(model.trace().buckets) == 1
        found = train(model, 3)
        assert len(model.trace().buckets) >= 3
        expected = train(plain, 3)
        assert not packing_of(plain).measured
    again = ppe_ddp.DistributedDataParallel(Net())
    again.load_comm_state_dict(model.comm_state_dict())
    assert packing_of(again) == packing_of(model)
    return packing_of(model), all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


def test_all_ranks_change_the_size_after_the_same_step(two_ranks):
    for packing, is_same in two_ranks.run(choose_after_first_steps):
        assert packing.bucket_bytes == MIB // 2
        assert is_same


def measure(cores=1):
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(os, "sched_getaffinity", lambda _pid: range(cores))
        model = ppe_ddp.DistributedDataParallel(Net(), shared_memory=False)
        train(model, MEASURED_STEPS)
        return model._reducer.synchronizer.negotiation._bucket_size.speed


def test_the_slowest_rank_counts_on_all(two_ranks):
    first, second = two_ranks.run(measure)
    assert first == second
    assert first.nbytes == 8 * (256 * 256 + 256) * 4
    assert first.backward > 0
    assert first.latency > 0
    assert first.taken > 0


def test_threads_of_a_transport_that_have_cores_of_their_own_take_none(two_ranks):
    first, second = two_ranks.run(measure, 1000)
    assert first == second
    assert (first.taken, first.taken_per_byte) == (0, 0)


def fail_in_between(rank_that_fails, step_that_fails):
    with chosen(MIB // 2):
        model = ppe_ddp.DistributedDataParallel(Net())
        train(model, step_that_fails)
        with pytest.raises(RuntimeError, match=r"oh|rank 1 failed in the"):
            model(torch.randn(4, 256), fails=dist.get_rank() == rank_that_fails).sum().backward()
        train(model, MEASURED_STEPS - 1)
        before = packing_of(model).bucket_bytes
        train(model, 1)
        return before, packing_of(model).bucket_bytes


@pytest.mark.parametrize("step", [3, MEASURED_STEPS + 2])
def test_after_a_failure_all_ranks_measure_again(two_ranks, step):
    assert two_ranks.run(fail_in_between, 1, step) == [(DEFAULT, MIB // 2)] * 2


def fail_while_it_is_measured(culprit, call):
    """One rank has no memory for one of the messages that are timed; the next step is right, and all measure again."""
    rank, measure, calls = dist.get_rank(), negotiation.all_reduced, itertools.count()

    def refuse(*arguments):
        if rank == culprit and next(calls) == call:
            raise torch.OutOfMemoryError("no memory is left")
        return measure(*arguments)

    with chosen(MIB // 2), pytest.MonkeyPatch.context() as patches:
        model = ppe_ddp.DistributedDataParallel(Net())
        train(model, MEASURED_STEPS - 1)
        patches.setattr(negotiation, "all_reduced", refuse)
        own = torch.OutOfMemoryError if rank == culprit else ppe_ddp.PeerAbortedError
        with pytest.raises(own, match="no memory is left" if rank == culprit else f"rank {culprit} failed in the "):
            train(model, 1)
        kept = [parameter.grad.clone() for parameter in model.parameters()]
        torch.manual_seed(dist.get_rank())
        twin = copy.deepcopy(model.module)
        twin.zero_grad()
        twin(torch.randn(4, 256)).square().mean().backward()
        assert all(torch.equal(*pair) for pair in zip(kept, (p.grad for p in twin.parameters()), strict=True))
        train(model, MEASURED_STEPS - 1)
        before = packing_of(model).bucket_bytes
        train(model, 1)
        return before, packing_of(model).bucket_bytes


# Of the two times four all-reduces that are timed, and the last, by which the ranks agree.
@pytest.mark.parametrize(("culprit", "call"), [(1, 0), (0, 5), (1, 8)])
def test_one_rank_fails_while_it_is_measured(two_ranks, culprit, call):
    assert two_ranks.run(fail_while_it_is_measured, culprit, call) == [(DEFAULT, MIB // 2)] * 2


@pytest.mark.parametrize("world", worlds((1, 1), (2, 1), short=()), indirect=True)
@pytest.mark.parametrize("call", [0, 8])
def test_one_rank_fails_while_it_is_measured_on_nodes(world, call):
    for found in world.run(in_own_world, fail_while_it_is_measured, 1, call):
        assert found == (DEFAULT, MIB // 2)
