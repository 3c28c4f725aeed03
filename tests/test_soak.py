"""Nothing grows under random faults; and what does grow is seen. `make soak` looks for longer."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest

import soak
from ppe_ddp.testing import Ranks
from subprocesses import MPIRUN, needs_mpirun, run

HERE = Path(__file__).parent
ROUNDS = 24  # of which most samples are taken when caches are full


def some_rounds():
    return soak.soak(math.inf, rounds=ROUNDS)


def test_over_gloo():
    with Ranks(2) as ranks:
        for found in ranks.run(some_rounds, timeout=150)[0]:
            assert found["rounds"] == ROUNDS, found
            assert soak.leaks(found) == []


@pytest.mark.long
@needs_mpirun
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py")
def test_over_mpi():
    command = [MPIRUN, "-n", "2", sys.executable, HERE / "soak.py", "--seconds", "inf", "--rounds", ROUNDS]
    code, text, errors = run(command, timeout=150)
    assert (code, text.splitlines()[-1]) == (0, "flat"), text + errors


@pytest.mark.long
@pytest.mark.parametrize(("leak", "seen"), [("all", list(soak.BOUNDS)), ("wrappers", ["descriptors", "threads"])])
def test_a_leak_is_seen(leak, seen):
    with Ranks(2) as ranks:
        for found in ranks.run(leak_quickly, leak, timeout=150)[0]:
            texts = soak.leaks(found)
            assert [name for name in seen if not any(text.startswith(f"{name}: ") for text in texts)] == [], found


def leak_quickly(leak):
    soak.SAMPLE_EVERY = 1
    return soak.soak(math.inf, rounds=20, deeds=["grow"], leak=leak)


def test_a_spike_is_no_leak():
    rounds = list(range(0, 120, 4))
    assert soak.slope(rounds, [100.0] * 20 + [900.0] + [100.0] * 9) == 0
    assert soak.slope(rounds, [100.0] * 15 + [140.0] * 15) < 0.4
    assert soak.slope(rounds, [100.0 + turn for turn in rounds]) == 1


def test_some_pages_for_each_failure_are_a_leak():
    found = {"rounds": 1000, "growth": {"kilobytes": 16.0, "descriptors": 0.0, "threads": 0.0}}
    assert soak.leaks(found) == ["kilobytes: 16.00 a round"]
