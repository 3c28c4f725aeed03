"""Megatron's wrapper over mpi4py, under a real mpirun."""

import json
import sys
from pathlib import Path

from subprocesses import MPIRUN, needs_mpirun, run

HERE = Path(__file__).parent


@needs_mpirun
def test_over_mpi():
    code, output, errors = run([MPIRUN, "-n", 2, sys.executable, HERE / "mpi_megatron.py"], timeout=90)
    assert code == 0, errors
    report = json.loads(output.splitlines()[-1])
    assert report == {"passed": 25, "backend": "mpi4py"}
