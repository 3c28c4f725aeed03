"""The backend `mpi4py` under mpirun: each check of tests/mpi_checks.py, on each number of ranks, is a test here."""

import functools
import importlib.util
import json
import os
import re
import signal
from pathlib import Path

import pytest

from mpi_checks import names_for
from subprocesses import MPIRUN, needs_mpirun, run, warm_python

HERE = Path(__file__).parent
# One launcher and one library: that of the environment that the tests run in.
RANKS = (1, 2, 3)
pytestmark = [pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py"), needs_mpirun]


def mpirun(ranks, script, *, timeout=90, by=(), **keywords):
    command = [MPIRUN, "-n", str(ranks), *warm_python(), "-W", "error", *by, "-c", script]
    return run(command, timeout=timeout, **keywords)


@functools.cache
def results(ranks):
    """All checks on so many ranks, started once."""
    command = [MPIRUN, "-n", str(ranks), *warm_python(), "-W", "error", str(HERE / "mpi_checks.py")]
    code, output, errors = run(command, timeout=300)
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return code, {one["name"]: one["errors"] for one in found}, errors[-6000:]


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks in RANKS for name in names_for(ranks)])
def test_on_ranks(ranks, name):
    _, found, errors = results(ranks)
    assert name in found, f"the check did not end; stderr of the run:\n{errors}"
    assert not found[name], "\n".join(found[name])


@pytest.mark.parametrize("ranks", RANKS)
def test_the_run_ends_well(ranks):
    code, _, errors = results(ranks)
    assert code == 0, errors


START = """
import sys, datetime
import torch, torch.distributed as dist
import ppe_ddp.backends
dist.init_process_group("mpi4py", init_method="mpi://", timeout=datetime.timedelta(seconds={timeout}))
rank = dist.get_rank()
"""


def test_an_exception_on_one_rank_ends_all():
    script = START.format(timeout=60) + "dist.barrier()\nif rank == 1: raise KeyError('lost')\ndist.barrier()"
    code, _, errors = mpirun(2, script)
    assert code not in (0, -signal.SIGKILL)
    assert errors.count("\n[rank1]: KeyError: 'lost'") == errors.count("[rank1]: Traceback") == 1
    # What the MPI library has to say about the end comes after it, if mpirun still passes it on.
    aborts = re.search(r"MPI_Abort|MPI_ABORT|non-zero status", errors)
    assert not aborts or errors.index("KeyError: 'lost'") < aborts.start(), errors


def test_a_code_of_one_rank_ends_all_that_mpi4py_runs():
    script = START.format(timeout=60) + "dist.barrier()\nif rank == 1: sys.exit(3)\ndist.barrier()"
    code, _, errors = mpirun(2, script, by=("-m", "mpi4py"))
    assert code not in (0, -signal.SIGKILL)
    assert errors.count("rank 1 of 2 has left with code 3, so the job is ended") == 1
    assert "Traceback" not in errors


def test_ranks_that_do_not_come_are_waited_for_no_longer_than_the_timeout():
    # To meet, ranks on a busy machine need more time.
    impatient = "waits = dist.group.WORLD._waits\nassert waits.timeout == 60\nwaits.timeout = 0.2\n"
    script = START.format(timeout=60) + impatient + "if rank == 0: dist.all_reduce(torch.ones(3))"
    code, _, errors = mpirun(2, script)
    assert code not in (0, -signal.SIGKILL)
    assert "rank 0 of 2, group '0': all_reduce has waited for the group's timeout of 0.2 s" in errors
    assert 'File "<string>"' in errors


# Exit handlers run in the reverse order: this one right before that of the backend, which waits for the other ranks.
IN_TURN = """
import atexit, os
atexit.register(lambda: rank and open(os.path.join({folder!r}, str(rank)), "w").close())
if rank < 2:
    open(os.path.join({folder!r}, str(rank + 1))).read()  # returns when the next rank is about to leave
"""


def test_ranks_may_leave_one_after_another_in_any_good_way(tmp_path):
    for rank in (1, 2):
        os.mkfifo(tmp_path / str(rank))
    ends = "try:\n sys.exit((4, 0, None)[rank])\nexcept SystemExit:\n if rank: raise\nprint('rank', rank)"
    script = START.format(timeout=60) + IN_TURN.format(folder=str(tmp_path)) + ends
    code, output, errors = mpirun(3, script, by=("-m", "mpi4py"))
    assert (code, output) == (0, "rank 0\n"), errors


def test_a_lone_process_needs_no_mpirun_and_is_told_of_the_launcher_of_another_mpi():
    script = """
import os, sys, torch.distributed as dist
import ppe_ddp.backends
assert "mpi4py" not in sys.modules  # importing starts no MPI
os.environ["OMPI_COMM_WORLD_SIZE"] = "4"
try:
    dist.init_process_group("mpi4py", init_method="mpi://")
except Exception as error:
    print(error)
del os.environ["OMPI_COMM_WORLD_SIZE"]
dist.init_process_group("mpi4py", init_method="mpi://")
print("rank", dist.get_rank())
"""
    code, output, errors = run([*warm_python(), "-c", script], timeout=90)
    assert code == 0, errors
    assert "MPI's world has 1 rank(s), but Open MPI's mpirun (OMPI_COMM_WORLD_SIZE=4) says 4" in output
    assert "Start them by that library's own mpirun" in output
    assert output.endswith("\nrank 0\n")


@pytest.mark.long
def test_mpi_meets_for_other_backends_and_ranks_of_another_rendezvous_are_refused():
    script = """
import torch, torch.distributed as dist
import ppe_ddp.backends
try:
    dist.init_process_group("mpi4py", store=dist.HashStore(), rank=0, world_size=1)
except Exception as error:
    refusal = str(error)
dist.init_process_group("gloo", init_method="mpi://")
total = torch.ones(1)
dist.all_reduce(total)
group = dist.new_group(backend="mpi4py")
dist.all_reduce(total, group=group)
if dist.get_rank() == 0:
    print(refusal, total.item())
dist.destroy_process_group()
"""
    code, output, errors = mpirun(2, script)
    assert code == 0, errors
    assert "MPI's world has 2 rank(s), but torch.distributed says 1" in output
    assert output.endswith(" 4.0\n")


def test_some_ranks_of_a_gloo_job_may_have_a_group_of_their_own(tmp_path):
    script = f"""
import os, torch, torch.distributed as dist
from ppe_ddp.launchers import detect
import ppe_ddp.backends
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=detect(os.environ).rank, world_size=3)
group = dist.new_group([0, 2], backend="mpi4py")
if dist.get_rank() != 1:
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == 2
else:
    from mpi4py import MPI
dist.barrier()
"""
    code, _, errors = mpirun(3, script)
    assert code == 0, errors
