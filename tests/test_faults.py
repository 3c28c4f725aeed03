"""A short part of the fault suite, with a fixed seed; all of it is `make test-faults`."""

import random

import pytest

import failing
import fault_suite
from fault_suite import FaultCase
from rank_tests import on_two_ranks

TIMEOUT = 60.0  # for which nobody waits, on a machine that may be busy
CASES = [
    FaultCase("none", kind, random.Random(kind).choice(phases), random.Random(kind).randrange(3), 1, timeout=TIMEOUT)
    for kind, phases in fault_suite.KINDS.items()
    if kind not in fault_suite.LATE
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind.replace(" ", "-"))
def test_all_are_told(case):
    outcome = fault_suite.run(case)
    complaints = outcome.complaints(case, known_seconds=TIMEOUT)
    texts = [one["text"] for one in outcome.seen.values()]
    assert not complaints, f"{case}: {complaints}\n{texts}\n{outcome.errors[-2000:]}"


@pytest.mark.nodes(long=True)
def test_a_rank_that_is_cut_off_is_named():
    case = FaultCase("nodes", "cut network", "bucket 0", fault_suite.RANKS - 1, 1)
    outcome = fault_suite.run(case)
    assert not outcome.complaints(case), [one["text"] for one in outcome.seen.values()]


@on_two_ranks
def test_many_failures_in_one_process_are_followed_by_right_steps():
    failing.hold_many(16)
