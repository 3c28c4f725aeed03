"""Megatron's wrapper over mpi4py, under a real mpirun."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from subprocesses import run

HERE = Path(__file__).parent
MPIRUN = shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")


@pytest.mark.skipif(MPIRUN is None, reason="needs an mpirun: the extra [mpi]")
def test_over_mpi():
    code, output, errors = run([MPIRUN, "-n", 2, sys.executable, HERE / "mpi_megatron.py"], timeout=90)
    assert code == 0, errors
    report = json.loads(output.splitlines()[-1])
    assert report == {"passed": 20, "backend": "mpi4py"}
