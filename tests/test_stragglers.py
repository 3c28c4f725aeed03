"""Who is slow is named, by times that each rank's vote carries."""

import math
import random
from bisect import bisect
from time import perf_counter

import pytest
import torch
import torch.distributed as dist

from library_warnings import library_warnings
from one_process import data, mlp, of_all_ranks, seeded
from ppe_ddp import DistributedDataParallel
from ppe_ddp.stragglers import _LIMITS, NBYTES, WINDOW, RankTimes
from rank_tests import on_three_ranks, on_two_ranks


def field_of(times):
    """What the ranks together say of these milliseconds, (compute, other) a rank."""
    return bytes(bisect(_LIMITS, 1e6 * ms) if ms is not None else 0 for pair in times for ms in pair)


def logged(times, rows):
    with library_warnings() as texts:
        for row in rows:
            times.note(field_of(row))
    return texts


@pytest.mark.parametrize("milliseconds", [0.001, 0.0105, 1.0, 33.3, 1e4, 6e5])
def test_a_byte_tells_a_time_to_a_twentieth(milliseconds):
    times = RankTimes(0)
    times.note(field_of([(milliseconds, milliseconds)]))
    (row,) = times.table()
    assert math.isclose(row.compute_ms, milliseconds, rel_tol=0.05)
    assert row.compute_ms == row.other_ms


def test_a_slow_rank_is_named_once_and_again_when_it_ends():
    times = RankTimes(0)
    slow = [[(80, 20), (80, 20), (104, 28), (80, 20)]]
    equal = [[(80, 20)] * 4]
    assert logged(times, equal * 40) == []
    (text,) = logged(times, slow * WINDOW)
    assert text.startswith("rank 2 is slow, and the others wait for it: in ")
    assert "in forward and backward" in text
    assert [row.rank for row in times.table() if row.is_slow] == [2]
    assert logged(times, slow * 40) == []
    assert logged(times, equal * 40) == ["rank 2 is no longer slower than the others"]
    assert not any(row.is_slow for row in times.table())


def test_what_a_rank_spends_outside_of_the_model_is_told_apart():
    (text,) = logged(RankTimes(0), [[(20, 2), (20, 30)]] * 60)
    assert "rank 1 is slow" in text
    assert "(19.5 in forward and backward, 30.0 in data loader" in text


def test_a_rank_that_has_less_of_a_shared_core_for_a_second_is_not_named():
    """Short steps, of which a window is over before the operating system has moved what runs there."""
    times = RankTimes(0)
    slow, equal = [[(4, 1), (9, 1)]], [[(4, 1)] * 2]
    assert logged(times, (slow * 100 + equal * 20) * 10) == []
    (text,) = logged(times, slow * 220)
    assert "rank 1 is slow" in text


def test_ranks_whose_graphs_differ_from_step_to_step_are_not_slow():
    draw = random.Random(0)
    rows = [[(draw.choice([5, 40]), 2) for _ in range(3)] for _ in range(1000)]
    assert logged(RankTimes(0), rows) == []


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_no_rank_is_named_by_chance(ranks):
    """A thousand steps of equal ranks on a busy machine: every fourth step of each takes up to three times as long."""
    for seed in range(10):
        draw = random.Random(seed)

        def noisy(draw=draw):
            return 10 * draw.lognormvariate(0, 0.3) * (draw.uniform(1, 3) if draw.random() < 0.25 else 1)

        assert logged(RankTimes(0), [[(noisy(), 1) for _ in range(ranks)] for _ in range(1000)]) == []


def test_steps_without_a_forward_are_left_out():
    times = RankTimes(0)
    assert times.table() == []
    rows = [[(20, 5), (None, None)], [(20, 5), (20, 5)]] * WINDOW
    assert logged(times, rows) == []
    assert [round(row.compute_ms, 1) for row in times.table()] == [19.5, 19.5]
    nothing = RankTimes(0)
    logged(nothing, [[(None, None)] * 2] * WINDOW)
    assert all(math.isnan(row.compute_ms) for row in nothing.table())


@on_three_ranks
def test_a_rank_that_is_slowed_is_named_within_a_window():
    module, rank = seeded(mlp, 4, 5, 2), dist.get_rank()
    wrapper = DistributedDataParallel(module)

    def busy(*_):
        end = perf_counter() + 0.11 * (rank == 1)
        while perf_counter() < end:
            pass

    module.register_forward_pre_hook(busy)
    with library_warnings() as texts:
        for _ in range(WINDOW + 2):
            wrapper.zero_grad()
            wrapper(data(4, 4, rank=rank)).sum().backward()
    table = wrapper.rank_times()
    assert table[1].is_slow
    assert table[1].compute_ms > 100
    tables = of_all_ranks(table)
    assert tables == [table] * 3
    assert [text for text in texts if "rank 1 is slow" in text] == texts[:1] if rank == 0 else not texts


@on_two_ranks
def test_the_time_of_a_rank_has_no_place_in_a_mask():
    wrapper = DistributedDataParallel(seeded(mlp, 4, 5, 2))
    assert wrapper.rank_times() == []
    wrapper(torch.ones(1, 4)).sum().backward()
    assert wrapper.trace().control_nbytes > 2 * NBYTES
    wrapper(torch.ones(1, 4)).sum().backward()
    assert [row.rank for row in wrapper.rank_times()] == [0, 1]
