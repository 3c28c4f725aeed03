"""The process of one rank that a test started: takes calls from a pipe and sends results, until it closes.

It is apart from `ppe_ddp.testing.ranks`, the other end of the pipe, which never imports what a test function needs.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist

# The first byte of an answer, so that the other end can tell them apart without unpickling.
RETURNED = b"\0"
RAISED = b"\1"


def serve(pipe: Connection, stack_file: str, environment: dict[str, str]) -> None:
    """Answers calls from the pipe until its other end closes.

    A call is a pickled `(sys.path, pickled (function, arguments))`. The answer is `RETURNED` with a pickled
    `(result, whether the default process group is the one joined last)`, or `RAISED` with a pickled
    `(one-line summary, traceback, pickled exception or None)`.

    Args:
        pipe: Where calls come from and answers go to.
        environment: That of the process which wants this rank; the one that it was forked from may be older.
        stack_file: Where the stacks of all threads are written on SIGUSR1 and on a crash.
    """
    # What was imported before is there to stay: without it, each look for garbage takes a tenth of a second less.
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    # Ctrl-C in a terminal reaches every process of the group; the parent decides what then happens here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, name="end with parent", daemon=True).start()
    with open(stack_file, "w") as stacks:
        faulthandler.enable(stacks)
        faulthandler.register(signal.SIGUSR1, stacks)
        joined: object = None
        while True:
            try:
                call = pipe.recv_bytes()
            except (EOFError, OSError):
                break
            answer, joined = _answer(call, joined)
            pipe.send_bytes(answer)
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()


def serve_job(address: str) -> None:
    """Answers calls as a rank that a launcher has started for :class:`~ppe_ddp.testing.JobStarter`.

    Args:
        address: Where the calls come from: a socket in the file system.
    """
    from ppe_ddp.launchers import detect

    connected = socket.socket(socket.AF_UNIX)
    connected.connect(address)
    pipe = Connection(connected.detach())
    pipe.send(detect(os.environ).rank)
    serve(pipe, pipe.recv(), dict(os.environ))


def set_up(prepare: Callable[[], object] | None) -> None:
    """Makes a fresh process ready to join a group; ``prepare`` is the user's own preparation."""
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()


def join_group(rank: int, backend: str | None, meeting: str, world_size: int, timeout: float) -> None:
    """Leaves the default process group, if there is one, and joins a fresh one.

    Args:
        rank: This rank.
        backend: The backend; None to stay without a group.
        meeting: A `file://` address that no group has used.
        world_size: How many ranks join.
        timeout: The group's timeout in seconds.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    if backend is None:
        return
    if "nccl" in backend and torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    patience = datetime.timedelta(seconds=timeout)
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world_size, timeout=patience)


def end_with_parent() -> None:
    """Ends this process, without ceremony, when the one that started it has ended."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        # The main thread may be deep in a collective that never returns, so no orderly exit.
        os._exit(1)


def _answer(call: bytes, joined: object) -> tuple[bytes, object]:
    try:
        sys.path[:], content = pickle.loads(call)
        function, args = pickle.loads(content)
        result = function(*args)
        group = dist.group.WORLD if dist.is_initialized() else None
        joined = group if function is join_group else joined
        return RETURNED + pickle.dumps((result, group is joined)), joined
    except BaseException as error:
        # Also SystemExit and the like: the rank goes on to serve, and the test gets it.
        return RAISED + _describe(error), joined


def _describe(error: BaseException) -> bytes:
    # Without our own frame, which is the first, the text starts in the test's function.
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    details = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    summary = traceback.format_exception_only(type(error), error)[-1].strip()
    pickled: bytes | None = None
    with contextlib.suppress(Exception):
        pickled = pickle.dumps(error)
    return pickle.dumps((summary, details, pickled))
