"""The fault suite: one rank commits a fault in a step; what do the others see, and how soon? Prints a table.

python tests/fault_suite.py            all of it, within five minutes
python tests/fault_suite.py --write    and writes the table into docs/failures.md

With --launchers only their columns are written.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import importlib.util
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path

import failing
import fault_program
from fault_program import TIMEOUT
from ppe_ddp.testing import Nodes, Ranks, nodes_missing
from subprocesses import MPIRUN

HERE = Path(__file__).parent
RANKS = 3
KNOWN_SECONDS = 2.0
"""Within which the others are to hear of what can be known."""
_LATE_SECONDS = 2.0  # over the timeout, which no error may be
_LAUNCHER_SECONDS = 10.0  # that a launcher has to end the whole job: no time of ours
_LIMIT = 90.0  # for one job, of which a busy machine takes most to start it
_ORPHAN_SECONDS = 3.0  # that processes have to end after their launcher
_MARK = "PPE_DDP_FAULT_JOB"


KINDS = {
    "raise": ("forward", "negotiate", "bucket 0", "bucket 1", "vote", "finish"),
    "out of memory": ("packing",),
    "crash": ("forward", "negotiate", "bucket 1", "optimizer", "gather", "checkpoint"),
    "SIGKILL": ("forward", "negotiate", "bucket 0", "bucket 1", "vote", "finish", "optimizer", "gather", "checkpoint"),
    "os._exit": ("forward", "bucket 0", "optimizer"),
    "sys.exit": ("forward", "bucket 0", "optimizer"),
    "normal end": ("forward", "bucket 1", "optimizer"),
    "NaN": ("backward",),
    "full disk": ("checkpoint",),
    "wrong shape": ("forward",),
    "wrong dtype": ("forward",),
    "extra backward": ("backward",),
    "missing backward": ("backward",),
    "SIGSTOP": ("forward", "bucket 0", "finish", "optimizer"),
    "slow": ("forward", "bucket 1", "optimizer"),
    "cut network": ("forward", "bucket 0", "optimizer"),
}
"""Each fault with the phases in which it is committed."""
ENDED_BY_LAUNCHERS = ("crash", "SIGKILL", "os._exit", "sys.exit")
"""What launchers may end the whole job for, some ranks sooner than others."""
LATE = ("SIGSTOP", "slow", "cut network")
"""What nobody can know before the group's timeout."""
LAUNCHERS = {
    "none": "no launcher, gloo",
    "shm": "no launcher, shm",
    "torchrun": "torchrun, gloo",
    "mpirun": "mpirun, mpi4py",
    "nodes": "two nodes, gloo",
}
_ALIKE = ("extra backward", "missing backward", "wrong shape", "wrong dtype", "NaN", "full disk")
SKIPPED = {
    "none": ("cut network",),
    "shm": ("cut network", "extra backward", "missing backward", "wrong shape", "full disk"),
    "torchrun": ("cut network", *_ALIKE),
    "mpirun": ("cut network", *_ALIKE),
    "nodes": ("os._exit", "normal end", "out of memory", "slow", *_ALIKE),
}
"""What is left out: what needs nodes, and what is the same under every launcher."""
_SURVIVES = ("finish",)  # where the others may have all they need, and go on


@dataclass(frozen=True)
class FaultCase:
    """One fault of one rank under one launcher; the timeout is that of ranks without one."""

    launcher: str
    kind: str
    phase: str
    culprit: int
    step: int
    timeout: float = TIMEOUT

    def __str__(self) -> str:
        return f"{self.kind} of rank {self.culprit} in {self.phase} of step {self.step}, {self.launcher}"


@dataclass
class FaultOutcome:
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

    def survivors(self, case: FaultCase) -> list[dict[str, object]]:
        """Who is to have an error: the others; where one rank has run a backward more, it waits for them."""
        waits = case.kind == "extra backward"
        return [one for rank, one in self.seen.items() if (rank == case.culprit) is waits and one["error"]]

    def slowest(self, case: FaultCase) -> float:
        return max((float(one["seconds"]) for one in self.survivors(case)), default=self.seconds)

    def is_named(self, case: FaultCase) -> bool:
        """Whether every error names the rank at fault, and no error another one."""
        if case.kind == "extra backward":
            return all("which has left" in str(one["text"]) for one in self.survivors(case))
        own = f"rank {case.culprit}"
        others = [f"{rank}, which {word}" for rank in range(RANKS) if rank != case.culprit for word in ("has", "is")]
        texts = [str(one["text"]) for one in self.survivors(case)]
        return all(own in text and not any(other in text for other in others) for text in texts)

    def complaints(self, case: FaultCase, known_seconds: float = KNOWN_SECONDS) -> list[str]:
        """What is not as it should be."""
        limit = case.timeout + _LATE_SECONDS if case.kind in LATE else known_seconds
        survivors = self.survivors(case)
        is_ended_by_launcher = case.launcher in ("torchrun", "mpirun") and case.kind in ENDED_BY_LAUNCHERS
        if is_ended_by_launcher and not survivors:
            limit = _LAUNCHER_SECONDS
        found = []
        if self.slowest(case) > limit:
            found.append(f"{self.slowest(case):.1f} s, not {limit:g}")
        if not self.is_named(case):
            found.append("another rank is named, or nobody")
        expected = 1 if case.kind == "extra backward" else RANKS - 1
        if len(survivors) < expected and not is_ended_by_launcher and case.phase not in _SURVIVES:
            found.append(f"only {len(survivors)} of the others have an error")
        if len({one["digest"] for one in survivors}) > 1:
            found.append("the others have different parameters")
        if case.kind in ("raise", "out of memory", "NaN", "full disk") and any(
            one["next"] != "right" for one in survivors
        ):
            found.append("the next step is not right")
        if case.kind == "cut network" and not self.seen.get(case.culprit, {}).get("error"):
            found.append("the rank that is cut off has no error")
        if self.orphans and case.kind != "SIGSTOP":  # one that is stopped does not see that its launcher has ended
            found.append(f"processes are left: {self.orphans}")
        return found

    def described(self, case: FaultCase) -> str:
        note = "" if self.is_named(case) else ", **not told which rank**"
        if not self.survivors(case):
            note = f", ended by {case.launcher}"
        return f"{self.slowest(case):.1f} s{note}"


def run(case: FaultCase) -> FaultOutcome:
    """Run the case; nothing of it is left."""
    with tempfile.TemporaryDirectory(prefix="ppe_ddp_fault_") as folder, _marked() as mark:
        errors = STARTERS[case.launcher](case, folder, mark)
        end = time.monotonic()
        orphans = _left_with(mark)
        place = Path(folder, "fault")
        committed = float(place.read_text()) if place.exists() else end
        seen = {int(path.stem): json.loads(path.read_text()) for path in Path(folder).glob("[0-9]*.json")}
    return FaultOutcome(seen, end - committed, errors, orphans)


@contextmanager
def _marked() -> Iterator[dict[str, str]]:
    """What all processes of a job have in their environment, so that what is left of it is found, and ended."""
    mark = {_MARK: f"{os.getpid()}-{time.monotonic_ns()}"}
    try:
        yield mark
    finally:
        for pid in _processes_with(mark):
            os.kill(pid, signal.SIGKILL)


def _left_with(mark: dict[str, str]) -> list[int]:
    """The processes of a job that do not end by themselves when it is over."""
    deadline = time.monotonic() + _ORPHAN_SECONDS
    while (left := _processes_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _processes_with(mark: dict[str, str]) -> list[int]:
    found = []
    text = f"{_MARK}={mark[_MARK]}".encode()
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            if int(place.parent.name) != os.getpid() and text in place.read_bytes():
                found.append(int(place.parent.name))
        except OSError:
            continue
    return found


# ---------------------------------------------------------------------- launchers


def start_fork_server() -> None:
    """Ranks without a launcher are forked from a process that has imported all they need, and belongs to no case."""
    # They also run what imports this file as their main module, and so need what that imports.
    forkserver.set_forkserver_preload(["fault_suite", *fault_program.IMPORTED_FOR_OPTIMIZERS])
    forkserver.ensure_running()


def _alone(case: FaultCase, folder: str, mark: dict[str, str]) -> str:
    """Processes without a launcher, which are forked where torch was imported, and end as scripts do."""
    context = multiprocessing.get_context("forkserver")
    common = {"WORLD_SIZE": str(RANKS), "INIT": f"file://{folder}/meeting", **mark}
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


def _be_rank(rank: int, case: FaultCase, folder: str, common: dict[str, str]) -> None:
    gc.freeze()  # what was imported before is there to stay
    with open(f"{folder}/stderr{rank}", "w") as file:
        os.dup2(file.fileno(), 2)
    os.environ |= common
    code = 0
    try:
        from datetime import timedelta

        import torch.distributed as dist

        dist.init_process_group(
            BACKENDS[case.launcher],
            init_method=common["INIT"],
            rank=rank,
            world_size=RANKS,
            timeout=timedelta(seconds=case.timeout),
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


def _launched(command: Sequence[str], case: FaultCase, folder: str, mark: dict[str, str]) -> str:
    words = [*command, str(HERE / "fault_program.py"), case.kind, case.phase, str(case.culprit), str(case.step), folder]
    with open(f"{folder}/stderr", "w+") as file:
        environment = os.environ | _environment() | mark
        process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True, env=environment
        )
        deadline = time.monotonic() + _LIMIT
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
            if case.kind == "SIGSTOP" and len(list(Path(folder).glob("[0-9]*.json"))) == RANKS - 1:
                os.killpg(process.pid, signal.SIGKILL)  # it would wait for the one that is stopped
                process.wait()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
        file.seek(0)
        return file.read()


def _torchrun(case: FaultCase, folder: str, mark: dict[str, str]) -> str:
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    return _launched([sys.executable, *words], case, folder, mark)


def _mpirun(case: FaultCase, folder: str, mark: dict[str, str]) -> str:
    return _launched([str(MPIRUN), "-n", str(RANKS), sys.executable], case, folder, mark)


def _nodes(case: FaultCase, folder: str, mark: dict[str, str]) -> str:
    """Two ranks on the first node and one on the second; each by itself, as no launcher should end them."""
    words = [sys.executable, str(HERE / "fault_program.py"), case.kind, case.phase, str(case.culprit), str(case.step)]
    with Nodes(2) as nodes:
        job = nodes.start("ranks", [*words, folder], ranks=(RANKS - 1, 1), environment=_environment() | mark)
        deadline = time.monotonic() + _LIMIT
        while job.is_running and time.monotonic() < deadline:
            time.sleep(0.02)
            if case.kind == "SIGSTOP" and len(list(Path(folder).glob("[0-9]*.json"))) == RANKS - 1:
                break
        job.end()
        return job.text("errors") if job.is_running else ""


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]), "OMP_NUM_THREADS": "1"}


BACKENDS = {"none": "gloo", "shm": "shm"}
"""Of ranks without a launcher."""
STARTERS = {"none": _alone, "shm": _alone, "torchrun": _torchrun, "mpirun": _mpirun, "nodes": _nodes}


def missing(launcher: str) -> str:
    """Why a launcher cannot be tried here; empty where it can."""
    if launcher == "mpirun":
        return "" if MPIRUN and importlib.util.find_spec("mpi4py") else "there is no mpirun, or no mpi4py"
    return nodes_missing() if launcher == "nodes" else ""


def cases(launcher: str, seed: int, *, kinds: Sequence[str] = tuple(KINDS), most: int = 99) -> list[FaultCase]:
    """A schedule: each fault in so many of its phases, of a random rank in a random step."""
    generator = random.Random(f"{launcher} {seed}")
    made = []
    for kind in kinds:
        phases = () if kind in SKIPPED[launcher] else KINDS[kind]
        for phase in generator.sample(phases, min(most, len(phases))):
            culprit = RANKS - 1 if kind == "cut network" else generator.randrange(RANKS)
            made.append(FaultCase(launcher, kind, phase, culprit, generator.randrange(1, 3)))
    return made


MOST = {"none": 99, "shm": 2, "torchrun": 1, "mpirun": 2, "nodes": 1}
"""Phases of each fault: starting ranks by a launcher takes seconds."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", default=",".join(LAUNCHERS))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failures", type=int, default=1000, help="one after another in the same processes, over gloo")
    parser.add_argument("--write", action="store_true", help="write the table into docs/failures.md")
    arguments = parser.parse_args()
    start_fork_server()
    launchers, schedule = arguments.launchers.split(","), list[FaultCase]()
    for launcher in launchers:
        if missing(launcher):
            print(f"skipped: {LAUNCHERS[launcher]}: {missing(launcher)}")
        else:
            schedule += cases(launcher, arguments.seed, kinds=arguments.kinds.split(","), most=MOST[launcher])
    begin, outcomes = time.monotonic(), dict[FaultCase, FaultOutcome]()
    for batch, at_once in batches(schedule):
        with ThreadPoolExecutor(at_once) as threads:
            for case, outcome in zip(batch, threads.map(run, batch), strict=True):
                outcomes[case] = outcome
                report(case, outcome)
    print(f"{len(outcomes)} cases in {time.monotonic() - begin:.0f} s", flush=True)
    cells: dict[tuple[str, str], list[tuple[FaultCase, FaultOutcome]]] = {}
    for case in schedule:
        cells.setdefault((case.kind, case.launcher), []).append((case, outcomes[case]))
    entries = {place: slowest_of(found) for place, found in cells.items()}
    print(table_of(entries), flush=True)
    if arguments.failures and "none" in launchers:
        fail_many(arguments.failures)
    failed = any(outcome.complaints(case) for case, outcome in outcomes.items())
    if arguments.write and not failed:
        write(entries)
    return int(failed)


def batches(schedule: Sequence[FaultCase]) -> list[tuple[list[FaultCase], int]]:
    """The cases that may run beside one another, with how many of them at a time.

    Where all wait for the group's timeout they leave the cores to others. A launcher needs them to start its ranks, the
    first of which waits for the last no longer than that timeout.
    """
    prompt = [case for case in schedule if case.kind not in LATE]
    late = [case for case in schedule if case.kind in LATE]
    forked = [case for case in late if case.launcher in BACKENDS]
    return [(prompt, 1), (forked, 4), ([case for case in late if case not in forked], 2)]


def report(case: FaultCase, outcome: FaultOutcome) -> None:
    complaints = outcome.complaints(case)
    print(f"{case!s:60} {outcome.described(case):28} {'; '.join(complaints)}", flush=True)
    if complaints:
        print("\n".join(f"    {one['text']}" for one in outcome.survivors(case)), outcome.errors[-1500:])


def fail_many(count: int) -> None:
    """So many failures of single ranks, one after another in the same processes."""
    with Ranks(RANKS, timeout=600) as ranks:
        start = time.monotonic()
        ranks.run(failing.hold_many, count)
        print(f"{count} failures in one process, each with a right step after it: {time.monotonic() - start:.0f} s")


def slowest_of(found: list[tuple[FaultCase, FaultOutcome]]) -> str:
    """One cell: the slowest of those that were told by an error, if there are any."""
    told = [(case, outcome) for case, outcome in found if outcome.survivors(case)]
    case, outcome = max(told or found, key=lambda one: one[1].slowest(one[0]))
    return outcome.described(case)


def table_of(entries: dict[tuple[str, str], str]) -> str:
    """What was found of each fault under each launcher, as Markdown."""
    launchers = [launcher for launcher in LAUNCHERS if any(there == launcher for _, there in entries)]
    lines = [["one rank", *(LAUNCHERS[launcher] for launcher in launchers)], ["---"] * (len(launchers) + 1)]
    for kind, title in TITLES.items():
        line = [entries.get((kind, launcher), "") for launcher in launchers]
        if any(line):
            lines.append([title, *line])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def entries_in(table: str) -> dict[tuple[str, str], str]:
    """What :func:`table_of` was given."""
    lines = [[word.strip() for word in line.strip("| ").split(" | ")] for line in table.strip().split("\n")]
    launchers = [{title: launcher for launcher, title in LAUNCHERS.items()}[title] for title in lines[0][1:]]
    kinds = {title: kind for kind, title in TITLES.items()}
    return {
        (kinds[title], launcher): cell
        for title, *line in lines[2:]
        for launcher, cell in zip(launchers, line, strict=False)  # the last may be empty
        if cell
    }


TITLES = {
    "raise": "raises, and goes on",
    "out of memory": "runs out of memory in packing, and goes on",
    "crash": "raises, and nobody catches it",
    "SIGKILL": "is killed",
    "os._exit": "ends by `os._exit(7)`",
    "sys.exit": "ends by `sys.exit(3)`",
    "normal end": "comes to the end of its program",
    "NaN": "has NaN in its gradients (`check_for_nan_in_grad`)",
    "full disk": "has no room on its disk when all save a checkpoint",
    "wrong shape": "has a parameter of another shape",
    "wrong dtype": "has parameters of another dtype",
    "extra backward": "runs one backward more (seen when it has ended)",
    "missing backward": "runs one backward less (seen when it has ended)",
    "SIGSTOP": "is stopped",
    "slow": "is slower than the timeout",
    "cut network": "is cut off from the network",
}
_BEGIN, _END = "<!-- table of the fault suite -->\n", "<!-- end of the table -->\n"


def write(entries: dict[tuple[str, str], str]) -> None:
    """Put the table where docs/failures.md has it; columns that were not tried stay as they are."""
    page = HERE.parent / "docs" / "failures.md"
    before, _, rest = page.read_text().partition(_BEGIN)
    table, _, after = rest.partition(_END)
    tried = {launcher for _, launcher in entries}
    kept = {place: cell for place, cell in entries_in(table).items() if place[1] not in tried}
    page.write_text(f"{before}{_BEGIN}\n{table_of(kept | entries)}\n\n{_END}{after}")


if __name__ == "__main__":
    sys.exit(main())
