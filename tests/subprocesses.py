"""Runs programs for tests: with a time limit, and with all their processes ended."""

import atexit
import functools
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest

MPIRUN = shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")
needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="needs an mpirun: the extra [mpi]")


_SERVER = "WARM_PYTHON_OF_TESTS"  # the variable with its name, for the processes that this one starts


@functools.cache
def warm_python():
    """The words that start Python where torch has been imported already, as `sys.executable` does where it has not."""
    program = str(Path(__file__).parent / "warm_python.py")
    if _SERVER not in os.environ:
        os.environ[_SERVER] = _start_server(program)
    return [sys.executable, "-IS", program, os.environ[_SERVER]]


def _start_server(program):
    name = f"{tempfile.gettempdir()}/ppe_ddp-{uuid.uuid4()}"
    server = subprocess.Popen(
        [sys.executable, program, name],
        stdin=subprocess.PIPE,  # which closes with this process
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    atexit.register(server.__exit__, None, None, None)
    assert server.stdout.readline() == b"listening\n"
    return name


@functools.cache
def warm_executable():
    """A program that is such a Python, where one word is wanted."""
    python = warm_python()
    program = Path(f"{python[-1]}-{os.getpid()}.sh")
    program.write_text(f'#!/bin/sh\nexec {shlex.join(python)} "$@"\n')
    program.chmod(0o700)
    atexit.register(program.unlink)
    return str(program)


def await_stop(pid, seconds=20):
    """Returns when a process stands still to which SIGSTOP was sent: each of its threads takes it by itself."""
    deadline = time.monotonic() + seconds
    while any(state_of(task) != "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} has not stopped in {seconds} s"
        os.sched_yield()


def all_end(pidfds, seconds):
    """Whether the processes all end in time; closes their descriptors."""
    deadline = time.monotonic() + seconds
    waiting = set(pidfds)
    while waiting and time.monotonic() < deadline:
        ready, _, _ = select.select(waiting, [], [], deadline - time.monotonic())
        waiting -= set(ready)
    for descriptor in pidfds:
        os.close(descriptor)
    return not waiting


def state_of(task):
    return (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]


def without_gloo(output):
    """What a program has printed, without the lines that gloo prints for each group in torch 2.10."""
    return "".join(line for line in output.splitlines(keepends=True) if not line.startswith("[Gloo] Rank "))


def run(command, *, timeout, environment=None):
    """Exit code, output and errors of a command; after the timeout it is killed with all that it has started."""
    process = subprocess.Popen(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", **(environment or {})},
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        errors += f"\nkilled after {timeout} s"
    return process.returncode, without_gloo(output), errors
