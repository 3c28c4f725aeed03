"""Sharded loading: the checks of sharding_checks.py over gloo and mpi4py, and what needs no ranks."""

import functools
import importlib.util
import json
import sys
from pathlib import Path

import pytest

import sharding_checks
from ppe_ddp.testing import Ranks
from subprocesses import run

HERE = Path(__file__).parent
MPIRUN = Path(sys.executable).parent / "mpirun"


def skip_without(*modules):
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")


@pytest.fixture(scope="module")
def four_ranks():
    with Ranks(sharding_checks.RANKS) as ranks:
        yield ranks


@pytest.mark.parametrize("name", sharding_checks.CHECKS)
def test_over_gloo(four_ranks, name):
    skip_without(*sharding_checks.needs(name))
    four_ranks.run(sharding_checks.run, name, timeout=60)


@functools.cache
def under_mpirun():
    names = [name for name in sharding_checks.CHECKS if all(map(importlib.util.find_spec, sharding_checks.needs(name)))]
    command = [MPIRUN, "-n", sharding_checks.RANKS, sys.executable, HERE / "sharding_checks.py", *names]
    code, output, errors = run(command, timeout=150)
    return code, {json.loads(line)["name"] for line in output.splitlines() if line.startswith("{")}, errors[-4000:]


@pytest.mark.skipif(not MPIRUN.exists(), reason="needs an mpirun in the environment (pip install mpich)")
@pytest.mark.parametrize("name", sharding_checks.CHECKS)
def test_over_mpi(name):
    skip_without("mpi4py", *sharding_checks.needs(name))
    _, done, errors = under_mpirun()
    assert name in done, errors


def test_the_run_over_mpi_ends_well():
    skip_without("mpi4py")
    code, _, errors = under_mpirun()
    assert code == 0, errors
