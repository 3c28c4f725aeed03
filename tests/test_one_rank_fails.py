"""One rank alone fails in the communication: all ranks get an error, and the next step is right."""

import pytest

import failing
from rank_tests import on_three_ranks, on_two_ranks

# Over gloo, what a thread of `overlapped` waits for ends only at the timeout; over mpi4py it is tested.
each_way = pytest.mark.parametrize("way", [way for way in failing.WAYS if way != "on_a_thread"])


@each_way
@on_two_ranks
def test_of_two(way):
    failing.hold(way)


@each_way
@on_three_ranks
def test_of_three(way):
    failing.hold(way, turns=4, seed=1, gradient_as_bucket_view=False)


@pytest.mark.parametrize("way", ["before", "in_packing", "in_the_wait"])
@on_two_ranks
def test_after_backward(way):
    failing.hold(way, turns=4, seed=2, overlap=False)
