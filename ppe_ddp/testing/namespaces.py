"""Linux namespaces that live as long as this process holds them; with them a part of a machine is as good as another.

They have no names that another run could meet. Their first process reads from a pipe that this process alone holds,
so they end, with every process in them, however this one ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Sequence
from typing import IO

__all__ = ["Namespaces", "NodesError"]

_READY = "ready"
_SECONDS = 20.0
# A process of an earlier PID namespace sees the one that it makes for its children only by this name.
_FILES = {"net": "net", "mount": "mnt", "ipc": "ipc", "uts": "uts", "pid": "pid_for_children"}
_LAST_WORDS = f"echo {_READY}; exec cat > /dev/null"


class NodesError(RuntimeError):
    """This process cannot make nodes on this machine; the message says why not."""


class Namespaces:
    """New namespaces, and a shell that prepares them and keeps them until :meth:`close`.

    Args:
        kinds: Of ``net``, ``mount``, ``ipc``, ``uts`` and ``pid``; with the last, ``/proc`` is new as well.
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
