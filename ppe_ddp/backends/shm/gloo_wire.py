"""The wire over gloo, whose threads move the bytes; and the closing of gloo's connections."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup, Work

from ppe_ddp.backends.collective_arguments import as_bytes
from ppe_ddp.backends.group_internals import UNSENT_TAG, abort_of_gloo, source_of
from ppe_ddp.errors import CommunicationError
from ppe_ddp.waiting import each_process, is_done

CLOSING_THREAD = "ppe_ddp-close"
_COMPLETING_SECONDS = 5.0
_LOOK_SECONDS = 0.05
_AT_EXIT_SECONDS = 5.0
_MOMENT = timedelta(milliseconds=1)
_NO_TIMEOUT = timedelta(days=3650)  # at the end of a message's timeout gloo closes all connections of the group


class GlooCall:
    """A collective of gloo in flight."""

    def __init__(self, work: Work, place: str) -> None:
        self._work: Work | None = work
        self._place = place

    def done(self) -> bool:
        work = self._work
        if work is None:
            return True
        if not work.is_completed():
            return False
        try:
            work.wait()
        except RuntimeError as error:
            raise CommunicationError(f"{self._place}{error}") from None
        self._work = None  # gloo's Work keeps the tensors alive
        return True

    def block(self) -> None:
        work = self._work
        if work is not None:
            with suppress(RuntimeError):
                work.wait(_MOMENT)

    def when_done(self, call: Callable[[], None]) -> None:
        """Let gloo's thread call ``call`` when it is done."""
        work = self._work
        if work is not None:
            work.get_future().add_done_callback(lambda _: call())


class GlooMessage:
    """A message of gloo. Only a wait inside gloo tells that it has arrived, so a thread waits, one of ``threads``."""

    def __init__(self, work: Work, threads: weakref.WeakSet[threading.Thread]) -> None:
        self.source = -1
        self._is_done = threading.Event()
        self._reason = ""
        thread = threading.Thread(target=self._await, args=(work,), name="ppe_ddp-message", daemon=True)
        threads.add(thread)
        thread.start()

    def _await(self, work: Work) -> None:
        try:
            work.wait(_NO_TIMEOUT)
            with suppress(RuntimeError):  # a message that this rank sends has no source
                self.source = source_of(work)
        except RuntimeError as error:
            self._reason = str(error) or "gloo gives no reason"
        self._is_done.set()

    def done(self) -> bool:
        if self._reason:
            raise CommunicationError(self._reason)
        return self._is_done.is_set()

    def block(self) -> None:
        self._is_done.wait(_MOMENT.total_seconds())


class GlooWire:
    """See :class:`~ppe_ddp.backends.wire.Wire`.

    Args:
        groups: Gloo groups of these ranks. The wire has the only references, with which the connections end. As a
            group has two threads, each for one collective, broadcasts of several roots use several groups.
    """

    dtypes = frozenset((torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64))
    piece_bytes = 0
    largest_tag = UNSENT_TAG - 1  # UNSENT_TAG is the largest tag of gloo

    def __init__(self, groups: list[ProcessGroup], place: str = "") -> None:
        self.size = groups[0].size()
        self._groups = groups
        self._place = place
        self._begun: deque[GlooCall] = deque()
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # which wait for messages

    @property
    def is_idle(self) -> bool:
        return all([is_done(call) for call in self._begun])

    def all_reduce(self, flat: Tensor, kind: Any) -> GlooCall:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(kind)
        return self._call(self._group().allreduce([flat], options))

    def broadcast(self, flat: Tensor, root: int) -> GlooCall:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._call(self._group(root).broadcast([as_bytes(flat)], options))

    def all_gather(self, rows: Tensor, flat: Tensor) -> GlooCall:
        whole = as_bytes(rows)
        parts = list(whole.view(self.size, -1)) if whole.numel() else [whole] * self.size
        return self._call(self._group().allgather([parts], [as_bytes(flat)]))

    def all_to_all(self, output: Tensor, flat: Tensor, receiving: Sequence[int], sending: Sequence[int]) -> GlooCall:
        group, size = self._group(), flat.itemsize
        call = getattr(group, "alltoall_base", None) or group.all_to_all_single
        bytes_in, bytes_out = [count * size for count in receiving], [count * size for count in sending]
        return self._call(call(as_bytes(output), as_bytes(flat), bytes_in, bytes_out))

    def barrier(self) -> GlooCall:
        return self._call(self._group().barrier())

    def send(self, flat: Tensor, peer: int, tag: int) -> GlooMessage:
        return GlooMessage(self._group().send([flat], peer, tag), self._threads)

    def receive(self, flat: Tensor, peer: int | None, tag: int) -> GlooMessage:
        group = self._group()
        work = group.recv_anysource([flat], tag) if peer is None else group.recv([flat], peer, tag)
        return GlooMessage(work, self._threads)

    def close(self) -> None:
        """Drop the references; gloo completes what this rank has in flight, which other ranks may still need."""
        self._groups.clear()

    def end(self) -> None:
        """Close the connections at the exit of Python; a thread whose wait ends later would abort the process."""
        waiting = list(self._threads)
        aborts = [abort_of_gloo(group) for group in self._groups if waiting]
        self.close()
        for abort in aborts:
            abort()
        for thread in waiting:
            thread.join(_AT_EXIT_SECONDS)

    def give_up(self) -> None:
        """Close the connections soon; operations in flight then fail."""
        close_given_up(self._groups)

    def _group(self, root: int = 0) -> Any:
        groups = self._groups
        if not groups:
            raise CommunicationError(f"{self._place}the connections of gloo were given up")
        return groups[root % len(groups)]

    def _call(self, work: Work) -> GlooCall:
        call = GlooCall(work, self._place)
        while self._begun and is_done(self._begun[0]):
            self._begun.popleft()
        self._begun.append(call)
        return call


def close_given_up(groups: list[ProcessGroup]) -> None:
    """Drop process groups, in a thread, and abort gloo groups that do not end by themselves; empties the list.

    Operations that all ranks have begun get five seconds to complete: if a large all-gather is aborted, torch frees
    memory that gloo still uses.
    """
    ending = groups.copy()
    groups.clear()
    if ending:
        _closings().start(ending)


class _Closings:
    """The threads that close groups; one that frees gloo's tensors after Python's end would abort the process."""

    def __init__(self) -> None:
        self._is_exit = threading.Event()
        self._threads: list[threading.Thread] = []
        atexit.register(self._end)

    def start(self, groups: list[ProcessGroup]) -> None:
        thread = threading.Thread(target=_close, args=(groups, self._is_exit), name=CLOSING_THREAD, daemon=True)
        self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        thread.start()
        if not threading.main_thread().is_alive():  # Python is ending already
            self._end()

    def _end(self) -> None:
        self._is_exit.set()
        with suppress(KeyboardInterrupt):  # a second Ctrl-C, while the process is ending after the first one
            for thread in self._threads:
                thread.join(_AT_EXIT_SECONDS)


_closings = each_process(_Closings)


def _close(groups: list[ProcessGroup], is_exit: threading.Event) -> None:
    until = monotonic() + _COMPLETING_SECONDS
    in_cpp = [group for group in groups if type(group) is ProcessGroup]
    aborts, alive = [*map(abort_of_gloo, in_cpp)], [*map(weakref.ref, in_cpp)]
    in_cpp.clear()
    ending = threading.Thread(target=groups.clear, name=CLOSING_THREAD, daemon=True)
    ending.start()
    while ending.is_alive() and monotonic() < until and not is_exit.is_set():
        ending.join(_LOOK_SECONDS)
    # A group has not ended as long as something else refers to it, such as a traceback.
    if any(group() is not None for group in alive):
        is_exit.wait(max(0.0, until - monotonic()))
    for abort in aborts:
        abort()
    ending.join(_AT_EXIT_SECONDS)  # if it were still running when Python ends, C++ would end the process
