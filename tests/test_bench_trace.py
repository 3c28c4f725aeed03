"""Traces: the times of a bucket are in order, in every engine that records them."""

from time import perf_counter_ns

import pytest
import torch
from torch import nn

import ppe_ddp
from ppe_ddp import megatron
from rank_tests import on_two_ranks


def net():
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())])


def check_times(trace):
    assert len(trace.buckets) > 1
    before = 0
    for bucket in trace.buckets:
        times = [bucket.ready_ns, bucket.launch_ns, bucket.launched_ns, bucket.done_ns, trace.total_ns]
        assert times == sorted(times)
        assert before <= bucket.launch_ns < bucket.launched_ns
        before = bucket.launched_ns


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"gradient_as_bucket_view": False}], ids=str)
@on_two_ranks
def test_a_bucket_is_ready_then_launched_then_done(options):
    model = ppe_ddp.DistributedDataParallel(net(), bucket_cap_mb=0.02, **options)
    for _ in range(3):
        model(torch.randn(3, 64)).sum().backward()
        check_times(model.trace())


@on_two_ranks
def test_so_it_is_in_megatrons_buffers():
    config = megatron.DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=5000)
    model = megatron.DistributedDataParallel(None, config, net())
    for _ in range(2):
        model.zero_grad_buffer()
        model(torch.randn(3, 64)).sum().backward()
        model.finish_grad_sync()
        check_times(model.trace())


@on_two_ranks
def test_a_function_that_blocks_is_part_of_the_launch():
    inside = []

    def blocking(gradients, group):
        start = perf_counter_ns()
        for gradient in gradients:
            torch.distributed.all_reduce(gradient.div_(2), group=group)
        inside.append(perf_counter_ns() - start)

    model = ppe_ddp.DistributedDataParallel(net(), bucket_cap_mb=0.02, reduce_function=blocking)
    model(torch.randn(3, 64)).sum().backward()
    check_times(model.trace())
    launches = [bucket.launched_ns - bucket.launch_ns for bucket in model.trace().buckets]
    assert all(launch > part for launch, part in zip(launches, inside, strict=True))
