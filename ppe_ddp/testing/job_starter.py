"""Ranks that a launcher starts on nodes, to be used like those on this machine.

    with Nodes(2) as nodes, Ranks(4, backend="mpi4py", starter=JobStarter(nodes, "mpirun", (2, 2))) as ranks:
        ranks.run(function)

Each connects to a socket in the file system, which all nodes have in common, and serves calls from there.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from ppe_ddp.testing.node_job import NodesError

if TYPE_CHECKING:
    from pathlib import Path

    from ppe_ddp.testing.node_job import NodeJob
    from ppe_ddp.testing.nodes import Nodes
    from ppe_ddp.testing.ranks import RankProcess

_RANK = "import sys; from ppe_ddp.testing.rank_process import serve_job; serve_job(sys.argv[1])"
_START_SECONDS = 120.0
_LOOK_SECONDS = 0.2
_TOLD = 4000


class JobStarter:
    """Starts ranks on nodes, as :class:`~ppe_ddp.testing.ranks.RankStarter` has it.

    Args:
        nodes: Where; they are in use as long as the ranks are.
        launcher: As for :meth:`ppe_ddp.testing.nodes.Nodes.launch`.
        ranks: How many on each node.
    """

    def __init__(self, nodes: Nodes, launcher: str, ranks: Sequence[int]) -> None:
        self._nodes = nodes
        self._launcher = launcher
        self._ranks = tuple(ranks)
        self._job: NodeJob | None = None

    def start(self, stack_files: Sequence[Path]) -> Iterator[tuple[RankProcess, Connection]]:
        """Start the job, and give each rank with its pipe, in their order.

        Raises:
            NodesError: The launcher has failed, or not all ranks have come.
            ValueError: These are not as many ranks as are for the nodes.
        """
        if len(stack_files) != sum(self._ranks):
            raise ValueError(f"{len(stack_files)} ranks are asked for, and {self._ranks} are for the nodes")
        with tempfile.TemporaryDirectory(prefix="ppe_ddp_job_") as folder, socket.socket(socket.AF_UNIX) as listener:
            address = os.path.join(folder, "calls")
            listener.bind(address)
            listener.listen(len(stack_files))
            words = [sys.executable, "-c", _RANK, address]
            self._job = self._nodes.start(self._launcher, words, ranks=self._ranks)
            arrived = dict(self._accepted(listener, len(stack_files)))
        for rank, file in enumerate(stack_files):
            process, pipe = arrived[rank]
            pipe.send(str(file))
            yield process, pipe

    def end(self) -> None:
        """End the launcher, and what is left on the nodes."""
        if self._job is not None:
            self._job.end()
            self._job = None

    def errors(self) -> str:
        """The last that the job has written to its standard error."""
        return "" if self._job is None else self._job.text("errors")[-_TOLD:]

    def _accepted(self, listener: socket.socket, count: int) -> Iterator[tuple[int, tuple[RankProcess, Connection]]]:
        deadline = time.monotonic() + _START_SECONDS
        for arrived in range(count):
            while not select.select([listener], [], [], _LOOK_SECONDS)[0]:
                assert self._job is not None
                if not self._job.is_running or time.monotonic() > deadline:
                    raise NodesError(f"{arrived} of {count} ranks have come by {self._launcher}:\n{self.errors()}")
            connected, _ = listener.accept()
            # The kernel tells the peer's process as this one sees it, and not by its number on the node.
            credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pipe = Connection(connected.detach())
            rank: int = pipe.recv()
            yield rank, (_ForeignProcess(struct.unpack("3i", credentials)[0]), pipe)


class _ForeignProcess:
    """A process that somebody else has started."""

    exitcode = None  # which only its parent gets

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.sentinel = os.pidfd_open(pid)

    def is_alive(self) -> bool:
        return not select.select([self.sentinel], [], [], 0)[0]

    def join(self, timeout: float | None = None) -> None:
        select.select([self.sentinel], [], [], timeout)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, signal.SIGKILL)

    def close(self) -> None:
        os.close(self.sentinel)
