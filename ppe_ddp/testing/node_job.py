"""Linux namespaces as nodes, and jobs on them: how they begin, what they print, and the end of all of their processes.

Namespaces have no names that another run could meet. Their first process reads from a pipe that this process alone
holds, so they end, with every process in them, however this one ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

_READY = "ready"
_SECONDS = 20.0
# A process of an earlier PID namespace sees the one that it makes for its children only by this name.
_FILES = {"net": "net", "mount": "mnt", "ipc": "ipc", "uts": "uts", "pid": "pid_for_children"}
_LAST_WORDS = f"echo {_READY}; exec cat > /dev/null"
_TIMED_OUT = 124
_GRACE_SECONDS = 5.0
_LOOK_SECONDS = 0.01


class NodesError(RuntimeError):
    """This process cannot make nodes on this machine; the message says why not."""


class Namespaces:
    """New namespaces, and a shell that prepares them and keeps them until :meth:`close`.

    Args:
        kinds: Some of ``net``, ``mount``, ``ipc``, ``uts`` and ``pid``; with the last, ``/proc`` is new as well.
        script: What the shell does first, as ``sh`` understands it.
        *words: The script's ``$1``, ``$2`` and so on.

    Raises:
        NodesError: They cannot be made here, or the script failed.
    """

    def __init__(self, kinds: Sequence[str], script: str, *words: str) -> None:
        own = ["--fork", "--kill-child", "--mount-proc"] if "pid" in kinds else []
        shell = ["sh", "-e", "-c", f"{script}\n{_LAST_WORDS}", "sh", *words]
        self._kinds = tuple(kinds)
        try:
            self._process = subprocess.Popen(
                ["unshare", *[f"--{kind}" for kind in kinds], *own, *shell],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # a Ctrl-C is for this process, which then ends them
            )
        except OSError as error:
            raise NodesError(f"unshare cannot be run ({error}); it comes with util-linux") from error
        try:
            self._await_script()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """A process of theirs, as this process sees it: for what takes a network namespace by a process."""
        return self._process.pid

    def entering(self, words: Sequence[str], *, folder: str | None = None) -> list[str]:
        """The command that does ``words`` in these namespaces.

        Args:
            words: A command; programs are looked up in there.
            folder: Where; the root by default.
        """
        files = [f"--{kind}=/proc/{self.pid}/ns/{_FILES[kind]}" for kind in self._kinds]
        there = [] if folder is None else ["env", "-C", folder]
        return ["nsenter", *files, "--", *there, *words]

    def do(self, words: Sequence[str], *, text: str = "") -> str:
        """Run a short command in there, and give what it prints.

        Args:
            words: The command.
            text: What it reads from its standard input.

        Raises:
            NodesError: It failed.
        """
        try:
            done = subprocess.run(
                self.entering(words), input=text, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NodesError(f"{' '.join(words)}: {error}") from error
        if done.returncode:
            raise NodesError(f"{' '.join(words)}: {_one_line(done.stderr) or f'exit code {done.returncode}'}")
        return done.stdout

    def end_processes(self) -> None:
        """End all processes in there but the shell that keeps them; only where there is a PID namespace."""
        assert "pid" in self._kinds, "every process of this machine would end"
        subprocess.run(self.entering(["sh", "-c", "kill -KILL -1"]), stderr=subprocess.DEVNULL, check=False)

    def close(self) -> None:
        """End them, and where there is a PID namespace every process in there; returns when they are gone."""
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            self._process.wait(_SECONDS)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise

    def _await_script(self) -> None:
        output, errors = self._process.stdout, self._process.stderr
        assert output is not None
        assert errors is not None
        if not _is_readable(output) or output.readline().strip() != _READY:
            self._process.kill()
            text = _one_line(errors.read()) if _is_readable(errors) else ""
            raise NodesError(text or f"unshare has not made {', '.join(self._kinds)} within {_SECONDS:g} s")


def _is_readable(stream: IO[str]) -> bool:
    return bool(select.select([stream], [], [], _SECONDS)[0])


def _one_line(text: str) -> str:
    return "; ".join(" ".join(line.split()) for line in text.strip().splitlines())


@dataclass(frozen=True)
class Finished:
    """The result of a job.

    Attributes:
        code: The first exit code that is not 0, in the order of nodes; 124 if there is none but some were killed.
        output: What the job has printed, node by node.
        errors: What it has written to its standard error, node by node.
    """

    code: int
    output: str
    errors: str


class NodeJob:
    """Commands that run at the same time, and have the nodes for themselves: with them every process there ends.

    Args:
        started: Each command, with what it has besides this process's environment.
        nodes: Where all processes end with this job.
    """

    def __init__(self, started: Sequence[tuple[Sequence[str], Mapping[str, str]]], nodes: Sequence[Namespaces]) -> None:
        self._nodes = nodes
        # Files without a name: pipes would fill up while nobody reads.
        self._texts = {kind: [tempfile.TemporaryFile() for _ in started] for kind in ("output", "errors")}  # noqa: SIM115
        self._processes: list[subprocess.Popen[bytes]] = []
        self._result: Finished | None = None
        try:
            for number, (words, environment) in enumerate(started):
                process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=self._texts["output"][number],
                    stderr=self._texts["errors"][number],
                    start_new_session=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                )
                self._processes.append(process)
        except BaseException:
            self.end()
            raise

    @property
    def is_over(self) -> bool:
        """Whether its processes have been ended."""
        return self._result is not None

    @property
    def is_running(self) -> bool:
        """Whether a command has not ended by itself."""
        return not self.is_over and any(process.poll() is None for process in self._processes)

    def wait(self, timeout: float) -> Finished:
        """Wait for the end of all commands, but no longer than ``timeout`` seconds; then end what is left.

        Once one has failed, the others have a few seconds: a launcher may wait for ranks that are not coming.
        """
        start = time.monotonic()
        deadline = start + timeout
        failed = False
        try:
            while self.is_running and time.monotonic() < deadline:
                if not failed and any(process.poll() for process in self._processes):
                    failed = True
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                time.sleep(_LOOK_SECONDS)
        finally:
            seconds = time.monotonic() - start
            self.end(f"killed after {seconds:.1f} s" if self.is_running else "")
        assert self._result is not None
        return self._result

    def end(self, reason: str = "") -> None:
        """End the commands, and whatever they have left on the nodes.

        Args:
            reason: What the result says of that, if it was before their time.
        """
        if self._result is not None:
            return
        codes = [process.poll() for process in self._processes]
        for process, code in zip(self._processes, codes, strict=True):
            if code is None:  # otherwise the number may be that of another process by now
                os.killpg(process.pid, signal.SIGKILL)
        for node in self._nodes:
            node.end_processes()  # torchrun's and Hydra's children have sessions of their own
        for process in self._processes:
            process.wait()
        code = next((code for code in codes if code), _TIMED_OUT if reason else 0)
        self._result = Finished(code, self.text("output"), "\n".join(filter(None, (self.text("errors"), reason))))
        for file in (*self._texts["output"], *self._texts["errors"]):
            file.close()

    def text(self, kind: str) -> str:
        """The output so far.

        Args:
            kind: ``"output"`` or ``"errors"``.
        """
        # By its size and place: the offset is that of the processes, which write on.
        read = (os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0) for file in self._texts[kind])
        return b"".join(read).decode(errors="replace")
