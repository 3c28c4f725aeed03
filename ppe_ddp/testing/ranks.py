"""Ranks for tests: processes that are started once, and then call one function after another.

Functions, arguments and results are sent through pipes as plain pickles. So a tensor arrives as a copy, which does not
need its rank any more.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import faulthandler
import gc
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist

from ppe_ddp.launchers import detect

T = TypeVar("T")
Call = tuple[list[str], bytes]

_START_SECONDS = 120.0  # ten times what importing torch takes on a busy machine
_GRACE_SECONDS = 5.0
_STOP_SECONDS = 5.0
_DUMP_SECONDS = 2.0


class Outcome(enum.Enum):
    """The ways in which a rank fails."""

    RAISED = "raised"
    DIED = "died"
    SILENT = "did not answer"


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank.

    Attributes:
        rank: The rank.
        outcome: How it failed.
        summary: The exception, the exit code, or how long there was no answer, in one line.
        details: The traceback of the exception, or the stacks of all threads; may be empty.
        exception: The exception without its traceback and causes; None if it could not be pickled.
        exit_code: The exit code of a process that died, negative for a signal; None if it did not die.
    """

    rank: int
    outcome: Outcome
    summary: str
    details: str = ""
    exception: BaseException | None = None
    exit_code: int | None = None

    @classmethod
    def raised(cls, rank: int, content: bytes) -> RankFailure:
        """The failure of a rank whose function raised; ``content`` is the rank's answer."""
        summary, details, pickled = pickle.loads(content)
        exception = None
        # Exceptions whose constructor takes more than a message can often be pickled, but not unpickled.
        with contextlib.suppress(Exception):
            exception = pickle.loads(pickled)
        return cls(rank, Outcome.RAISED, summary, details, exception)

    @classmethod
    def died(cls, rank: int, exit_code: int | None, stacks: str) -> RankFailure:
        """The failure of a rank whose process has ended, or if there is no exit code has closed its pipe."""
        if exit_code is None:
            cause = "closed its pipe"
        elif exit_code < 0:
            cause = f"ended by signal {-exit_code} ({signal.strsignal(-exit_code)})"
        else:
            cause = f"ended with exit code {exit_code}"
        return cls(rank, Outcome.DIED, f"its process {cause}", stacks, exit_code=exit_code)


class RankError(RuntimeError):
    """Some ranks failed; the message has the traceback of each.

    Args:
        world_size: How many ranks were asked.
        failures: One for each failing rank, in the order in which they failed.
    """

    def __init__(self, world_size: int, failures: Sequence[RankFailure]) -> None:
        super().__init__(world_size, tuple(failures))
        self.world_size = world_size
        self.failures = tuple(failures)

    def __str__(self) -> str:
        short = "; ".join(f"rank {f.rank} {f.outcome.value}: {f.summary}" for f in self.failures)
        sections = [
            f"--- rank {f.rank} {f.outcome.value} ---\n{f.details.rstrip()}" for f in self.failures if f.details
        ]
        return "\n\n".join([f"{len(self.failures)} of {self.world_size} ranks failed: {short}", *sections])

    @property
    def exceptions(self) -> dict[int, BaseException]:
        """The exceptions by rank, of those ranks that raised one which could be pickled."""
        return {f.rank: f.exception for f in self.failures if f.exception is not None}

    @property
    def ranks(self) -> dict[int, Outcome]:
        """The outcome of each failing rank, in the order in which they failed."""
        return {f.rank: f.outcome for f in self.failures}


# ---------------------------------------------------------------------- processes


class ForeignProcess:
    """A process that another one has started, with the methods of ``multiprocessing.Process`` that `Ranks` calls."""

    exitcode = None  # known to its parent only

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.sentinel = os.pidfd_open(pid)

    def is_alive(self) -> bool:  # noqa: D102
        return not select.select([self.sentinel], [], [], 0)[0]

    def join(self, timeout: float | None = None) -> None:  # noqa: D102
        select.select([self.sentinel], [], [], timeout)

    def kill(self) -> None:  # noqa: D102
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, signal.SIGKILL)

    def close(self) -> None:  # noqa: D102
        os.close(self.sentinel)


class RankStarter(ABC):
    """Starts the processes of a world, each of which answers calls by :func:`serve`."""

    @abstractmethod
    def start(self, stack_files: Sequence[Path]) -> Iterator[tuple[BaseProcess | ForeignProcess, Connection]]:
        """Start a process for each file of stacks; yield each with the pipe to it, in the order of ranks."""

    def end(self) -> None:  # noqa: B027
        """End what else was started, such as a launcher; called after the processes have ended."""

    def errors(self) -> str:
        """More about a process that has died than its exit code."""
        return ""


class ForkStarter(RankStarter):
    """Starts ranks on this machine by forking a process that has imported torch, which saves each rank the import."""

    def start(self, stack_files: Sequence[Path]) -> Iterator[tuple[BaseProcess | ForeignProcess, Connection]]:
        """Fork one process for each file."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        # OpenMP reads it while torch is imported, before our code runs.
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
            for rank, file in enumerate(stack_files):
                ours, theirs = context.Pipe()
                args = (theirs, str(file), dict(os.environ))
                process = context.Process(target=serve, args=args, name=f"rank {rank}", daemon=True)
                process.start()
                theirs.close()
                yield process, ours


class Ranks(contextlib.AbstractContextManager["Ranks"]):
    """Processes that run functions for tests, one for each rank, with a default process group.

    The first run starts the processes, each with one thread; later runs use them again. They meet through a file, not a
    port. Use it as a context manager, or call `close`; when this process ends in any way, they end too. Use it from one
    thread at a time. The processes are daemons, so a function in them cannot start `multiprocessing` children, such as
    a DataLoader with workers.

    If a function raises, or leaves the default process group destroyed or replaced, the next run gets a new default
    process group, as ranks may be out of step in the old one. If a rank dies or does not answer, all processes are
    ended, and the next run starts new ones.

    Args:
        world_size: The number of ranks.
        backend: The backend of the default process group; None for processes without one. For NCCL each rank's current
            device is that of its number, modulo the number of devices.
        timeout: Seconds that a run may take, unless it is given another.
        group_timeout: Seconds that a collective of the default process group may take; by default half of `timeout`,
            so that a collective that hangs raises before its rank is killed.
        prepare: A function of a module, called without arguments in each new process before it joins the group, such as
            to register a backend.
        starter: Starts the processes elsewhere, such as :class:`~ppe_ddp.testing.JobStarter` on nodes.

    Raises:
        ValueError: `world_size` or a timeout is not positive.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str | None = "gloo",
        timeout: float = 60.0,
        group_timeout: float | None = None,
        prepare: Callable[[], object] | None = None,
        starter: RankStarter | None = None,
    ) -> None:
        group_timeout = timeout / 2 if group_timeout is None else group_timeout
        if world_size < 1 or timeout <= 0 or group_timeout <= 0:
            raise ValueError(
                "world_size, timeout and group_timeout should be positive, but they are "
                f"{world_size}, {timeout} and {group_timeout}"
            )
        self.world_size = world_size
        self._backend, self._prepare, self._starter = backend, prepare, starter or ForkStarter()
        self._timeout, self._group_timeout = timeout, group_timeout
        self._processes: list[BaseProcess | ForeignProcess] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._groups = 0
        self._fresh_group_due = False

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """True while all processes run."""
        started = len(self._processes) == self.world_size
        return started and all(process.is_alive() for process in self._processes)

    @property
    def pids(self) -> list[int]:
        """The process ids by rank; empty before the first run."""
        return [process.pid for process in self._processes if process.pid is not None]

    def run(
        self, function: Callable[..., T], *args: object, timeout: float | None = None, grace: float = _GRACE_SECONDS
    ) -> list[T]:
        """Calls `function(*args)` on every rank and waits for all of them.

        Args:
            function: A function of a module, not a lambda or closure, as the ranks import it.
            *args: Its arguments, the same on all ranks; copied by pickle.
            timeout: Seconds until ranks that have not answered are killed; by default that of the constructor.
            grace: Seconds that the other ranks have to answer once one has failed.

        Returns:
            The results by rank, copied by pickle, on the devices that they were on.

        Raises:
            RankError: A rank raised, died or did not answer. In the last two cases all processes are
                killed.
            TypeError: The function or an argument cannot be pickled; nothing was called.
        """
        return self.run_each(function, [args] * self.world_size, timeout=timeout, grace=grace)

    def run_each(
        self,
        function: Callable[..., T],
        args_by_rank: Sequence[Sequence[object]],
        *,
        timeout: float | None = None,
        grace: float = _GRACE_SECONDS,
    ) -> list[T]:
        """Calls `function(*args_by_rank[rank])` on each rank; otherwise as `run`.

        Raises:
            ValueError: There are not as many argument sequences as ranks.
        """
        if len(args_by_rank) != self.world_size:
            raise ValueError(f"{len(args_by_rank)} sequences of arguments for {self.world_size} ranks")
        calls = [_pickle_call(function, args) for args in args_by_rank]
        if not self.alive:
            self.restart()
        elif self._fresh_group_due:
            self._join()
        return self._call(calls, self._timeout if timeout is None else timeout, grace)

    def restart(self) -> None:
        """Ends the processes, if there are any, and starts new ones.

        Raises:
            RankError: A rank could not start or join its process group.
        """
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="ppe_ddp_ranks_")
        files = [self._stack_file(rank) for rank in range(self.world_size)]
        for file in files:
            file.touch()
        try:
            for process, pipe in self._starter.start(files):
                self._processes.append(process)
                self._pipes.append(pipe)
        except BaseException:
            self._kill()
            raise
        # Not in one call with joining the group, whose timeout may be shorter than the import of torch.
        self._call_or_kill([_pickle_call(_set_up, (self._prepare,))] * self.world_size)
        self._join()

    def close(self) -> None:
        """Ends the processes; the next run would start new ones."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _join(self) -> None:
        meeting = (self._stack_file(0).parent / f"group{self._groups}").as_uri()
        self._groups += 1
        group = (self._backend, meeting, self.world_size, self._group_timeout)
        self._call_or_kill([_pickle_call(_join_group, (rank, *group)) for rank in range(self.world_size)])

    def _call_or_kill(self, calls: list[Call]) -> None:
        try:
            self._call(calls, _START_SECONDS, _GRACE_SECONDS)
        except RankError:
            self._kill()
            raise

    def _call(self, calls: list[Call], timeout: float, grace: float) -> list[Any]:
        try:
            for pipe, call in zip(self._pipes, calls, strict=True):
                # A rank that died since the last call is found by waiting for it.
                with contextlib.suppress(OSError):
                    pipe.send(call)
            answers, failures = self._collect(timeout, grace)
        except BaseException:
            # Also after a KeyboardInterrupt, or the next call would take the answers to this one for its own.
            self._kill()
            raise
        if any(failure.outcome is not Outcome.RAISED for failure in failures):
            self._kill()
        if failures:
            self._fresh_group_due = True
            raise RankError(self.world_size, failures)
        decoded = [pickle.loads(answers[rank]) for rank in range(self.world_size)]
        self._fresh_group_due = not all(intact for _, intact in decoded)
        return [value for value, _ in decoded]

    def _collect(self, timeout: float, grace: float) -> tuple[dict[int, bytes], list[RankFailure]]:
        answers: dict[int, bytes] = {}
        failures: list[RankFailure] = []
        waiting = set(range(self.world_size))
        start = time.monotonic()
        deadline = start + timeout
        while waiting:
            sources = [self._pipes[rank] for rank in waiting]
            ends = [self._processes[rank].sentinel for rank in waiting]
            if not wait([*sources, *ends], max(0.0, deadline - time.monotonic())):
                failures += self._give_up(sorted(waiting), f"nothing for {time.monotonic() - start:.1f} s")
                break
            arrived = [self._receive(rank) for rank in sorted(waiting)]
            failed = [item for item in arrived if isinstance(item, RankFailure)]
            # A death explains the errors of its peers, so it comes before those that arrived with it.
            failures += sorted(failed, key=lambda failure: failure.outcome is not Outcome.DIED)
            answers.update(item for item in arrived if isinstance(item, tuple))
            waiting -= answers.keys() | {failure.rank for failure in failed}
            if failed:
                deadline = min(deadline, time.monotonic() + grace)
        return answers, failures

    def _receive(self, rank: int) -> tuple[int, bytes] | RankFailure | None:
        pipe, process = self._pipes[rank], self._processes[rank]
        # Asked before the poll, as an answer may arrive after it and the process end.
        ended = not process.is_alive()
        try:
            if pipe.poll():
                has_returned, content = pipe.recv()
                return (rank, content) if has_returned else RankFailure.raised(rank, content)
        except (EOFError, OSError):
            ended = True
        if not ended:
            return None
        process.join(_STOP_SECONDS)
        stacks = self._stack_file(rank).read_text()
        return RankFailure.died(rank, process.exitcode, stacks + self._starter.errors())

    def _give_up(self, ranks: Sequence[int], summary: str) -> list[RankFailure]:
        for rank in ranks:
            os.kill(self.pids[rank], signal.SIGUSR1)
        stacks = {rank: _settled_text(self._stack_file(rank)) for rank in ranks}
        return [RankFailure(rank, Outcome.SILENT, summary, stacks[rank]) for rank in ranks]

    def _stack_file(self, rank: int) -> Path:
        assert self._folder is not None
        return Path(self._folder.name, f"stacks{rank}.txt")

    def _kill(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
            process.close()
        self._pipes, self._processes = [], []
        self._starter.end()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        self._fresh_group_due = False


def run_ranks(
    world_size: int, function: Callable[..., T], *args: object, backend: str | None = "gloo", timeout: float = 60.0
) -> list[T]:
    """Starts ranks, calls `function(*args)` on each, ends them and returns the results by rank.

    Arguments, result and errors are those of :class:`Ranks` and :meth:`Ranks.run`.
    """
    with Ranks(world_size, backend=backend, timeout=timeout) as ranks:
        return ranks.run(function, *args)


def _pickle_call(function: Callable[..., object], args: Sequence[object]) -> Call:
    try:
        content = pickle.dumps((function, tuple(args)))
    except Exception as error:
        raise TypeError(
            f"{function!r} and its arguments cannot be sent to the ranks ({error}); use a function of a "
            "module, no lambda or closure, and arguments that can be pickled"
        ) from error
    # With the current search path: that of a test module may have been added since the processes started.
    return list(sys.path), content


def _settled_text(path: Path) -> str:
    # A signal handler writes the stacks, and does not say when it is done.
    deadline = time.monotonic() + _DUMP_SECONDS
    before, text = "", path.read_text()
    while (not text or text != before) and time.monotonic() < deadline:
        time.sleep(0.02)
        before, text = text, path.read_text()
    # Without the thread that waits for the parent, which every rank has.
    return "\n\n".join(stack for stack in text.split("\n\n") if " in _end_with_parent" not in stack)


# ---------------------------------------------------------------------- in the process of a rank


def serve(pipe: Connection, stack_file: str, environment: dict[str, str]) -> None:
    """Answers calls from the pipe until its other end closes.

    A call is `(sys.path, pickled (function, arguments))`. The answer is True with a pickled
    `(result, whether the default process group is the one joined last)`, or False with a pickled
    `(one-line summary, traceback, pickled exception or None)`.
    """
    # Garbage collection takes a tenth of a second less without all that was imported.
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    # Ctrl-C reaches all processes of a terminal; the parent decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()
    with open(stack_file, "w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks)
        joined: object = None
        while True:
            try:
                call = pipe.recv()
            except (EOFError, OSError):
                break
            answer, joined = _answer(call, joined)
            pipe.send(answer)
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()


def serve_job(address: str) -> None:
    """Answers calls from a socket in the file system, in a rank that a launcher has started."""
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(address)
    pipe = Connection(connected.detach())
    pipe.send(detect(os.environ).rank)
    serve(pipe, pipe.recv(), dict(os.environ))


def _set_up(prepare: Callable[[], object] | None) -> None:
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()


def _join_group(rank: int, backend: str | None, meeting: str, world_size: int, timeout: float) -> None:
    """Leave the default process group, if there is one, and join a new one at a file that has not been used."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if backend is None:
        return
    if "nccl" in backend and torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    patience = datetime.timedelta(seconds=timeout)
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world_size, timeout=patience)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        # Not sys.exit(), as the main thread may be in a collective that never returns.
        os._exit(1)


def _answer(call: Call, joined: object) -> tuple[tuple[bool, bytes], object]:
    try:
        sys.path[:], content = call
        function, args = pickle.loads(content)
        result = function(*args)
        group = dist.group.WORLD if dist.is_initialized() else None
        joined = group if function is _join_group else joined
        return (True, pickle.dumps((result, group is joined))), joined
    except BaseException as error:
        # Also SystemExit: the test gets it, and the rank goes on serving.
        return (False, _describe(error)), joined


def _describe(error: BaseException) -> bytes:
    # Without the first frame, which is ours.
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    details = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    pickled: bytes | None = None
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(error)
    return pickle.dumps((summary, details, pickled))
