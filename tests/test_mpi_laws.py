"""The laws over mpi4py, under a real mpirun; and one script under every launcher."""

import functools
import json
import re
import sys
from pathlib import Path

import pytest

from subprocesses import MPIRUN, needs_mpirun, run, warm_python

HERE = Path(__file__).parent

pytestmark = needs_mpirun


# More ranks than cores spin in each other's way: fewer cases there.
WAYS = {
    2: {"messages": 1, "shared": 2, "thread": 1},
    3: {"messages": 1, "shared": 1},
    4: {"shared": 1},
}


@functools.cache
def reports(ranks):
    """What each way has come to, by its name; all of them in one run, which has optimizer and Megatron as well."""
    command = [MPIRUN, "-n", ranks, *warm_python(), HERE / "mpi_laws.py", json.dumps(WAYS[ranks])]
    code, output, errors = run(command, timeout=400)
    return json.loads(output.splitlines()[-1]) if code == 0 else errors  # a run that fails is not tried again


@pytest.mark.parametrize(
    ("ranks", "way"),
    [pytest.param(ranks, way, marks=[pytest.mark.long] * (ranks == 4)) for ranks, ways in WAYS.items() for way in ways],
)
def test_the_laws_hold_over_mpi(ranks, way):
    found = reports(ranks)
    assert isinstance(found, dict), found
    report = found[way]
    assert report["problems"] == []
    assert report["backend"] == "mpi4py"
    assert report["cases"] >= 2 * WAYS[ranks][way]


@pytest.mark.parametrize(("ranks", "count"), [(2, 20), (3, 8)])
def test_several_wrappers_over_mpi(ranks, count):
    found = reports(ranks)
    assert isinstance(found, dict), found
    assert found["wrappers"] == count


def test_megatrons_wrapper_over_mpi():
    found = reports(2)
    assert isinstance(found, dict), found
    assert found["megatron"] == {"passed": 37, "backend": "mpi4py"}


SCRIPT = """
import os, torch, torch.distributed as dist, ppe_ddp
job = ppe_ddp.init_process_group()
model = ppe_ddp.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
model(torch.full((1, 2), job.rank + 1.0)).sum().backward()
# In one piece, since the ranks write side by side.
line = f"grad {model.module.weight.grad[0, 0].item()} {job.backend} {job.launcher}\\n"
os.write(1, line.encode())
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ([MPIRUN, "-n", "2"], "grad 1.5 mpi4py mpirun"),
        pytest.param(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python"],
            "grad 1.5 gloo torchrun",
            marks=pytest.mark.long,
        ),
        pytest.param([], "grad 1.0 gloo alone", marks=pytest.mark.long),
    ],
    ids=["mpirun", "torchrun", "alone"],
)
def test_one_script_under_every_launcher(tmp_path, launcher, expected):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    code, output, errors = run([*launcher, *warm_python(), script], timeout=120)
    assert code == 0, errors
    told = re.findall(r"grad \S+ \S+ \S+", output)  # some versions of gloo write to the output too
    assert told == [expected] * (2 if launcher else 1)
