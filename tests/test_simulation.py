"""Simulated ranks (tests/simulation): every order of events from a seed, against one process."""

import subprocess
import time
from pathlib import Path
from random import Random
from unittest import mock

import pytest

from simulation import scheduler
from subprocesses import warm_python

ROOT = Path(__file__).parent.parent
SEEDS = 15


def simulate(*arguments):
    """The end of `python -m tests.simulation`, and whether all was sound."""
    command = [*warm_python(), "-m", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert not done.stderr, done.stderr
    return done.stdout, done.returncode == 0


def test_seeds_are_sound():
    """The same few in every run; `make seeds` runs thousands that nobody has seen."""
    output, is_sound = simulate("tests.simulation", "--seeds", f"0:{SEEDS}")
    assert is_sound, output


def test_a_seed_replays_the_same_history():
    first, second = (simulate("tests.simulation", "--seed", "7")[0] for _ in range(2))
    assert first == second
    assert first.endswith("sound\n")


def test_what_was_found_stays_mended():
    output, is_sound = simulate("tests.simulation", "--found")
    assert is_sound, output


def test_every_planted_bug_can_be_planted():
    output, _ = simulate("tests.simulation.mutants", "--seeds", "0:0")
    assert "\n0 of " in output, output
    assert int(output.split()[-2]) >= 50, output


def test_a_planted_bug_is_found():
    output, _ = simulate("tests.simulation.mutants", "--seeds", "0:5", "--only", "already is not negotiated")
    assert output.endswith("1 of 1 found\n"), output


def test_a_rank_that_computes_without_end_is_stopped_and_named():
    def spin():
        end = time.monotonic() + 60  # without end, but for a scheduler that does not stop it
        while time.monotonic() < end:
            pass

    history = scheduler.Scheduler(Random(0), [None, None], lambda world: None)
    with (
        mock.patch.object(scheduler, "_MOST_CPU_SECONDS", 0.1),
        pytest.raises(scheduler.Unsound, match="a rank neither waits nor ends: rank 0 is in"),
    ):
        history.run([spin, lambda: history.sleep(1.0)])
