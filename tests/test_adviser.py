"""`advise`: compression pays where the link is slow, and not where nothing is exposed; held to a run on nodes."""

from dataclasses import replace
from statistics import median
from time import perf_counter

import pytest
import torch
import torch.distributed as dist

from one_process import data, mlp, seeded
from ppe_ddp import DistributedDataParallel
from ppe_ddp.compression import FP16, ErrorFeedback, Int8, PowerSGD, TopK, Uncompressed, advise
from ppe_ddp.engine.trace import BucketTrace, Trace
from ppe_ddp.testing import JobStarter, Nodes, Ranks

MS = 1_000_000


def backward(*, busy_ms, backward_ms=100, number=4, nbytes=1 << 20):
    """A backward whose buckets are sent one after another, from the middle of it on, in so long."""
    begin = backward_ms // 2
    buckets = [
        BucketTrace(
            (f"w{k}",), nbytes, 0, 0, begin * MS, begin * MS, int((begin + busy_ms * (k + 1) / number) * MS), False
        )
        for k in range(number)
    ]
    end = max(backward_ms, begin + busy_ms)
    names = tuple(name for bucket in buckets for name in bucket.parameters)
    return Trace(names, names, tuple(buckets), 8, 0, backward_ms * MS, int(end * MS), ())


def test_a_slow_link_pays_and_methods_are_ordered_by_what_they_would_take():
    advice = advise(backward(busy_ms=5000))
    assert advice.seconds == pytest.approx(5.05)
    assert advice.exposed_seconds == pytest.approx(4.95)
    assert advice.best in (ErrorFeedback(TopK(0.01)), ErrorFeedback(PowerSGD(rank=4)))
    forecasts = {type(one.compressor).__name__ + repr(one.compressor): one for one in advice.forecasts}
    assert len(forecasts) == 4
    seconds = [one.seconds for one in advice.forecasts]
    assert seconds == sorted(seconds)
    by_bytes = sorted(advice.forecasts, key=lambda one: one.fraction)
    assert [round(one.fraction, 2) for one in by_bytes][2:] == [0.25, 0.5]
    assert by_bytes[-1].seconds == pytest.approx(0.1 + by_bytes[-1].encoding_seconds + 2.45, rel=1e-3)
    assert "would pay" in str(advice)


def test_nothing_pays_where_nothing_is_exposed():
    advice = advise(backward(busy_ms=40))
    assert advice.exposed_seconds == 0
    assert advice.best is None
    assert "compression would not pay" in str(advice)


def test_a_method_that_costs_more_than_it_saves_does_not_pay():
    advice = advise(backward(busy_ms=51, backward_ms=100, nbytes=16 << 20), candidates=[Int8()])
    assert advice.best is None
    assert advice.forecasts[0].encoding_seconds > 0.01


def test_what_is_sent_does_not_depend_on_the_number_of_ranks_where_the_method_does_not():
    slow, candidates = backward(busy_ms=5000), [FP16(), Uncompressed()]
    two, eight = (
        {one.compressor: one.fraction for one in advise(slow, link_size=size, candidates=candidates).forecasts}
        for size in (2, 8)
    )
    assert two == pytest.approx(eight, rel=0.01)


def test_a_backward_in_which_nothing_is_sent_is_refused():
    with pytest.raises(ValueError, match="nothing was sent in this backward"):
        advise(replace(backward(busy_ms=1), buckets=()))


def test_a_trace_with_much_waiting_points_there():
    assert "ppe_ddp.compression.advise" in str(backward(busy_ms=5000))
    assert "advise" not in str(backward(busy_ms=40))


def forecast_and_truth():
    torch.set_num_threads(1)
    taken = {}
    for name, compressor in (("none", None), ("int8", Int8())):
        wrapper = DistributedDataParallel(seeded(lambda: mlp(512, 512, 512, 512)))
        if compressor is not None:
            wrapper.register_comm_hook(compressor)
        seconds = []
        for _ in range(4):
            wrapper.zero_grad()
            loss = wrapper(data(5, 512)).sum()
            dist.barrier()
            start = perf_counter()
            loss.backward()
            seconds.append(perf_counter() - start)
        taken[name] = median(seconds[1:])
        if compressor is None:
            advice = advise(wrapper.trace(), candidates=[Int8()])
    return advice.best, advice.forecasts[0].seconds / advice.seconds, taken["int8"] / taken["none"]


@pytest.mark.nodes(long=True)  # it measures, which the load of a machine can spoil
def test_what_is_forecast_comes_true_on_nodes_with_a_slow_link():
    with Nodes(2, mbit=50) as nodes, Ranks(2, starter=JobStarter(nodes, "torchrun", (1, 1)), timeout=150) as ranks:
        for best, forecast, truth in ranks.run(forecast_and_truth):
            assert best == Int8()
            assert truth < 0.6
            assert abs(forecast - truth) < 0.25
