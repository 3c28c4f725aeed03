"""The laws over mpi4py, under a real mpirun; and one script under every launcher."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from subprocesses import run

HERE = Path(__file__).parent
MPIRUN = shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")

pytestmark = pytest.mark.skipif(MPIRUN is None, reason="needs an mpirun: the extra [mpi]")


# More ranks than cores spin in each other's way: fewer cases there.
@pytest.mark.parametrize(
    ("ranks", "cases", "way"),
    [
        (1, 0, "messages"),
        (2, 3, "messages"),
        (2, 5, "shared"),
        (2, 2, "thread"),
        (3, 1, "messages"),
        (3, 2, "shared"),
        (4, 1, "shared"),
    ],
)
def test_the_laws_hold_over_mpi(ranks, cases, way):
    command = [MPIRUN, "-n", ranks, sys.executable, HERE / "mpi_laws.py", cases, way]
    code, output, errors = run(command, timeout=120)
    assert code == 0, errors
    report = json.loads(output.splitlines()[-1])
    assert report["problems"] == []
    assert report["backend"] == "mpi4py"
    assert ranks == 1 or report["cases"] >= 2 * cases


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_distributed_optimizer_over_mpi(ranks):
    code, output, errors = run([MPIRUN, "-n", ranks, sys.executable, HERE / "mpi_optim.py"], timeout=120)
    assert code == 0, errors
    assert output.splitlines() == ["as one process does, over mpi4py"]


SCRIPT = """
import os, torch, torch.distributed as dist, ppe_ddp
job = ppe_ddp.init_process_group()
model = ppe_ddp.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
model(torch.full((1, 2), job.rank + 1.0)).sum().backward()
# In one piece, since the ranks write side by side.
line = f"grad {{model.module.weight.grad[0, 0].item()}} {{job.backend}} {{job.launcher}}\\n"
os.write(1, line.encode())
{more}
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ([MPIRUN, "-n", "2"], "grad 1.5 mpi4py mpirun"),
        ([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python"], None),
        ([], "grad 1.0 gloo alone"),
    ],
    ids=["mpirun", "torchrun", "alone"],
)
def test_one_script_under_every_launcher(tmp_path, launcher, expected):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(more=""))
    code, output, errors = run([*launcher, sys.executable, script], timeout=120)
    assert code == 0, errors
    expected = expected or "grad 1.5 gloo torchrun"
    assert output.splitlines() == [expected] * (2 if launcher else 1)


def test_one_exception_on_one_rank_ends_the_job_with_its_traceback(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(more='if job.rank == 1: raise KeyError("on purpose")\ndist.barrier()'))
    code, _, errors = run([MPIRUN, "-n", "3", sys.executable, script], timeout=60)
    assert code != 0
    assert "KeyError: 'on purpose'" in errors
    assert errors.count("Traceback") == 1
