"""A job on nodes: the processes of its launcher, what they print, and the end of all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ppe_ddp.testing.namespaces import Namespaces

__all__ = ["Finished", "NodeJob"]

_TIMED_OUT = 124
_GRACE_SECONDS = 5.0
_LOOK_SECONDS = 0.01


@dataclass(frozen=True)
class Finished:
    """The result of a job.

    Attributes:
        code: The first exit code that is not 0, in the order of nodes; 124 if there is none but some were killed.
        output: What the job has printed, node by node.
        errors: The same of its standard error.
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
