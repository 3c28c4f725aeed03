"""A rank that a launcher has started for :class:`~ppe_ddp.testing.JobStarter`: run as a module, it answers calls."""

from __future__ import annotations

import os
import socket
import sys
from multiprocessing.connection import Connection

from ppe_ddp.launchers import detect
from ppe_ddp.testing.rank_process import serve


def _main(address: str) -> None:
    """Answer the calls that come from ``address``, a socket in the file system."""
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(address)
    pipe = Connection(connected.detach())
    pipe.send(detect(os.environ).rank)
    serve(pipe, pipe.recv(), dict(os.environ))


if __name__ == "__main__":
    _main(sys.argv[1])
