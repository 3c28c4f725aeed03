"""The fault suite: one rank commits a fault in a step; what do the others see, and how soon? Prints a table.

python tests/fault_suite.py            all of it, within five minutes
python tests/fault_suite.py --write    and writes the table into docs/failures.md
"""

from __future__ import annotations

import argparse
import atexit
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path

import fault_program
from fault_program import TIMEOUT
from subprocesses import MPIRUN

HERE = Path(__file__).parent
RANKS = 3
KNOWN_SECONDS = 2.0
"""Within which the others are to hear of what can be known."""
_LATE_SECONDS = 2.0  # over the timeout, which no error may be
_LIMIT = 40.0  # for one job
_ORPHAN_SECONDS = 3.0  # that processes have to end after their launcher
_MARK = "PPE_DDP_FAULT_JOB"


@dataclass(frozen=True)
class Case:
    """One fault of one rank under one launcher."""

    launcher: str
    kind: str
    phase: str
    culprit: int
    step: int

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.culprit} in {self.phase} of step {self.step}, {self.launcher}"


@dataclass
class Outcome:
    """What has come of a case.

    Attributes:
        seen: What each rank has written, by rank.
        codes: The exit codes that are known.
        seconds: How long the job went on after the fault.
        errors: What the job has written to stderr.
        orphans: Processes that were left.
    """

    seen: dict[int, dict[str, object]]
    seconds: float
    errors: str = ""
    orphans: list[int] = field(default_factory=list)

    def survivors(self, case: Case) -> list[dict[str, object]]:
        return [one for rank, one in self.seen.items() if rank != case.culprit and one["error"]]

    def slowest(self, case: Case) -> float:
        return max((float(one["seconds"]) for one in self.survivors(case)), default=self.seconds)

    def is_named(self, case: Case) -> bool:
        name = f"rank {case.culprit}"
        return all(name in str(one["text"]) for one in self.survivors(case))


def run(case: Case) -> Outcome:
    """Run the case; nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="ppe_ddp_fault_") as folder, _marked() as mark:
        errors = STARTERS[case.launcher](case, folder)
        end = time.monotonic()
        orphans = _left_with(mark)
        place = Path(folder, "fault")
        committed = float(place.read_text()) if place.exists() else end
        seen = {int(path.stem): json.loads(path.read_text()) for path in Path(folder).glob("[0-9]*.json")}
    return Outcome(seen, end - committed, errors, orphans)


@contextmanager
def _marked() -> Iterator[str]:
    """Mark all processes of a job, so that what is left of it is found, and ended."""
    mark = f"{_MARK}={os.getpid()}-{time.monotonic_ns()}"
    os.environ[_MARK] = mark.partition("=")[2]
    try:
        yield mark
    finally:
        del os.environ[_MARK]
        for pid in _processes_with(mark):
            os.kill(pid, signal.SIGKILL)


def _left_with(mark: str) -> list[int]:
    """The processes of a job that do not end by themselves when it is over."""
    deadline = time.monotonic() + _ORPHAN_SECONDS
    while (left := _processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _processes_with(mark: str) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            if int(place.parent.name) != os.getpid() and mark.encode() in place.read_bytes():
                found.append(int(place.parent.name))
        except OSError:
            continue
    return found


# ---------------------------------------------------------------------- launchers


def start_fork_server() -> None:
    """Ranks without a launcher are forked from a process that has imported torch, and belongs to no case."""
    forkserver.set_forkserver_preload(["fault_program"])
    forkserver.ensure_running()


def _alone(case: Case, folder: str) -> str:
    """Processes without a launcher, which are forked where torch was imported, and end as scripts do."""
    context = multiprocessing.get_context("forkserver")
    common = {"WORLD_SIZE": str(RANKS), "INIT": f"file://{folder}/meeting", _MARK: os.environ[_MARK]}
    processes = [context.Process(target=_be_rank, args=(rank, case, folder, common)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + _LIMIT
    others = [process for rank, process in enumerate(processes) if rank != case.culprit or case.kind != "SIGSTOP"]
    for process in others:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    return "".join(path.read_text() for path in sorted(Path(folder).glob("stderr*")))


def _be_rank(rank: int, case: Case, folder: str, common: dict[str, str]) -> None:
    with open(f"{folder}/stderr{rank}", "w") as file:
        os.dup2(file.fileno(), 2)
    os.environ |= common
    code = 0
    try:
        from datetime import timedelta

        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=common["INIT"], rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT)
        )
        fault_program.main(case.kind, case.phase, str(case.culprit), str(case.step), folder)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except BaseException as error:  # as Python does at the end of a script
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    os._exit(code)


def _launched(command: Sequence[str], case: Case, folder: str) -> str:
    words = [*command, str(HERE / "fault_program.py"), case.kind, case.phase, str(case.culprit), str(case.step), folder]
    with open(f"{folder}/stderr", "w+") as file:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True)
        deadline = time.monotonic() + _LIMIT
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
            if case.kind == "SIGSTOP" and len(list(Path(folder).glob("[0-9]*.json"))) == RANKS - 1:
                break  # the launcher waits for the one that is stopped
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        file.seek(0)
        return file.read()


def _torchrun(case: Case, folder: str) -> str:
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    return _launched([sys.executable, *words], case, folder)


def _mpirun(case: Case, folder: str) -> str:
    return _launched([str(MPIRUN), "-n", str(RANKS), sys.executable], case, folder)


STARTERS = {"none": _alone, "torchrun": _torchrun, "mpirun": _mpirun}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launchers", default="none,torchrun,mpirun")
    parser.add_argument("--kinds", default="raise,crash,SIGKILL,os._exit,sys.exit,normal end,SIGSTOP,slow")
    parser.add_argument("--phases", default="forward,bucket 0,optimizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--texts", action="store_true")
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    start_fork_server()
    for launcher in arguments.launchers.split(","):
        for kind in arguments.kinds.split(","):
            for phase in arguments.phases.split(","):
                case = Case(launcher, kind, phase, generator.randrange(RANKS), generator.randrange(1, 3))
                outcome = run(case)
                errors = {str(one["error"]) for one in outcome.survivors(case)}
                nexts = {str(one["next"])[:150] for one in outcome.seen.values()}
                print(
                    f"{case!s:70} {outcome.slowest(case):6.2f} s {'named' if outcome.is_named(case) else 'NOT NAMED'} "
                    f"{len(outcome.survivors(case))} {errors} next {nexts} orphans {outcome.orphans}",
                    flush=True,
                )
                if arguments.texts:
                    for one in outcome.survivors(case):
                        print("      ", one["text"])
                    print(outcome.errors[-1500:])


if __name__ == "__main__":
    sys.exit(main())
