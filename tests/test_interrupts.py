"""Ctrl-C and SIGTERM end all ranks of a job under any launcher, with one traceback and not one a rank."""

import os
import select
import signal
import subprocess
import sys
import time

import pytest

from subprocesses import MPIRUN, all_end, needs_mpirun, warm_python

SCRIPT = """
import os, sys, torch, ppe_ddp
job = ppe_ddp.init_process_group(timeout=30, quiet=True)
model = ppe_ddp.DistributedDataParallel(torch.nn.Linear(4, 4))
step = 0
while True:
    model(torch.randn(3, 4)).sum().backward()
    step += 1
    if step == 3:
        with open(sys.argv[1], "w") as told:
            told.write(f"{os.getpid()}\\n")
"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--no-python"]


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        ("torchrun", "Ctrl-C"),
        ("torchrun", "SIGKILL"),
        pytest.param("mpirun", "SIGTERM", marks=needs_mpirun),
        pytest.param("torchrun", "SIGTERM", marks=pytest.mark.long),
        pytest.param("mpirun", "Ctrl-C", marks=[needs_mpirun, pytest.mark.long]),
    ],
)
def test_all_ranks_end(launcher, how, tmp_path):
    script, here = tmp_path / "train.py", tmp_path / "here"
    script.write_text(SCRIPT)
    os.mkfifo(here)
    told = os.open(here, os.O_RDWR)
    python = [sys.executable] if how == "SIGKILL" else warm_python()  # whose ranks are no children of the launcher
    torchrun = [*(warm_python() if how == "SIGKILL" else [sys.executable]), *TORCHRUN]  # hears Ctrl-C with its ranks
    starts = torchrun if launcher == "torchrun" else [MPIRUN, "-n", "2"]
    with subprocess.Popen(
        [*starts, *python, script, here],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            ranks = [os.pidfd_open(pid) for pid in await_pids(told, process)]
            if how == "Ctrl-C":
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            else:
                process.send_signal(signal.Signals[how])
            _, errors = process.communicate(timeout=150)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            os.close(told)
    assert process.returncode != 0
    assert all_end(ranks, seconds=5)
    lines = [line.partition("]: ")[2] if line.startswith("[rank") else line for line in errors.splitlines()]
    tracebacks = lines.count("Traceback (most recent call last):") - errors.count("SignalException: Process")
    chained = errors.count("another exception occurred:") + errors.count("direct cause of the following exception:")
    assert tracebacks - chained <= (how == "Ctrl-C"), errors  # beside that of torchrun
    if how == "Ctrl-C":
        assert sum(line.startswith("KeyboardInterrupt") for line in lines) <= 1, errors
    elif how == "SIGKILL":
        assert errors.count("ends, as torchrun is no more") == 2, errors


def await_pids(told, process):
    """The pids of both ranks, once they train."""
    launcher, text, deadline = os.pidfd_open(process.pid), "", time.monotonic() + 150
    while text.count("\n") < 2:
        ready, _, _ = select.select([told, launcher], [], [], max(0.0, deadline - time.monotonic()))
        assert told in ready, process.stderr.read() if launcher in ready else "the ranks have not begun in time"
        text += os.read(told, 100).decode()
    os.close(launcher)
    return map(int, text.split())
