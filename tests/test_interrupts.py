"""Ctrl-C and SIGTERM end all ranks of a job under any launcher, with one traceback and not one a rank."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from subprocesses import MPIRUN, needs_mpirun

SCRIPT = """
import os, sys, torch, ppe_ddp
job = ppe_ddp.init_process_group(timeout=30, quiet=True)
model = ppe_ddp.DistributedDataParallel(torch.nn.Linear(4, 4))
step = 0
while True:
    model(torch.randn(3, 4)).sum().backward()
    step += 1
    if step == 3:
        open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
"""
COMMANDS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"],
    "mpirun": ["-n", "2", sys.executable],
}


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        ("torchrun", "Ctrl-C"),
        pytest.param("mpirun", "SIGTERM", marks=needs_mpirun),
        pytest.param("torchrun", "SIGTERM", marks=pytest.mark.long),
        pytest.param("mpirun", "Ctrl-C", marks=[needs_mpirun, pytest.mark.long]),
    ],
)
def test_all_ranks_end(launcher, how, tmp_path):
    script, here = tmp_path / "train.py", tmp_path / "here"
    script.write_text(SCRIPT)
    here.mkdir()
    starter = MPIRUN if launcher == "mpirun" else sys.executable
    with subprocess.Popen(
        [starter, *COMMANDS[launcher], script, here],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            pids = [int(pid) for pid in await_files(here, process)]
            if how == "Ctrl-C":
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            else:
                process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=150)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode != 0
    await_end(pids)
    lines = [line.partition("]: ")[2] if line.startswith("[rank") else line for line in errors.splitlines()]
    tracebacks = lines.count("Traceback (most recent call last):") - errors.count("SignalException: Process")
    assert tracebacks <= (how == "Ctrl-C"), errors  # beside that of torchrun
    if how == "Ctrl-C":
        assert errors.count("KeyboardInterrupt") <= 1, errors


def await_files(folder, process):
    deadline = time.monotonic() + 60
    while len(found := os.listdir(folder)) < 2:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
    return found


def await_end(pids):
    deadline = time.monotonic() + 5
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, left


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
