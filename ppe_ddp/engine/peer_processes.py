"""Shows which processes of a group's ranks are alive, and what each has done last, without asking them.

    page of rank 0   | token | how it has left | step, activity, bucket of each of its groups |
    page of rank 1   | ...                                                                    |

Each process has some memory, called its page, into which it writes its position in a fraction of a microsecond. The
other processes of its node map the page when a group is made. They can read it even if the process is stopped or has
ended; /proc tells which.

Processes of other nodes, and of systems other than Linux, are not visible here: ``failures.py`` asks those ranks.
"""

from __future__ import annotations

import enum
import functools
import json
import mmap
import os
import secrets
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import distributed as dist

from ppe_ddp.backends.rank_store import BoundedStore, Reports
from ppe_ddp.backends.shared_memory.shared_reservation import (
    TOKEN_BYTES,
    new_memory_file,
    node_name,
    open_memory_file,
    path_of,
)
from ppe_ddp.errors import CommunicationError

_LEFT = struct.Struct("<q")  # 1 + the length of the text that follows; 0 as long as the process trains
_TEXT_BYTES = 2000
_RECORD = struct.Struct("<qqqq")  # step, activity, bucket, _RecordState
_STATE = 24  # offset of the _RecordState in a record
_RECORDS = 2048  # offset of the first record in the page
_GROUPS = 1024  # records in a page; groups beyond that share the last one
_PAGE_BYTES = _RECORDS + _GROUPS * _RECORD.size


class Activity(enum.IntEnum):
    """The activities of a rank in one step, in order."""

    NONE = 0
    """It has not begun the step."""
    MASK = 1
    """It has sent its mask."""
    BUCKET = 2
    """It has begun to pack and send a bucket."""
    VOTE = 3
    """It has sent all buckets and its vote."""
    LATE_BUCKET = 4
    """It has begun to pack and send a bucket of the second round."""
    DONE = 5
    """The step is complete on this rank."""
    SUM = 6
    """It has begun to sum numbers that complete the gradients (``finalize_model_grads``)."""
    SUMMED = 7
    """It has these sums."""
    GATHER = 8
    """It has begun to gather the updated parameters (``DistributedOptimizer``)."""
    GATHERED = 9
    """It has gathered the updated parameters."""


class _RecordState(enum.IntEnum):
    """Whether a rank works on its step, waits, or has left it."""

    WORKS = 0
    WAITS = 1
    CLOSED = 2
    """It needs nothing from other ranks."""


class Position(NamedTuple):
    """What a rank has done last."""

    step: int  # number of the synchronized backward, from 1
    activity: Activity  # its last activity in that step
    bucket: int  # number of the bucket, from 0
    waits: bool = False  # whether it waits for other ranks there, or has given up

    def __str__(self) -> str:
        """The position as a verb phrase, for messages."""
        return {
            Activity.NONE: "had begun no backward",
            Activity.MASK: f"was negotiating in step {self.step}",
            Activity.BUCKET: f"was at bucket {self.bucket} of step {self.step}",
            Activity.LATE_BUCKET: f"was at bucket {self.bucket} of the second round of step {self.step}",
            Activity.VOTE: f"had sent all buckets of step {self.step}",
            Activity.DONE: f"had completed step {self.step} and begun no other",
            Activity.SUM: f"was summing numbers over the ranks in step {self.step}, in finalize_model_grads()",
            Activity.SUMMED: f"had completed step {self.step} and begun no other",
            Activity.GATHER: f"was gathering the parameters of step {self.step}, in DistributedOptimizer.step()",
            Activity.GATHERED: f"had gathered the parameters of step {self.step} and begun no other",
        }[self.activity]

    @property
    def phase(self) -> str:
        """The activity's name, for the attribute ``phase`` of an error."""
        return self.activity.name.lower()

    def is_behind(self, other: Position) -> bool:
        """Whether a rank that is here has done less than one that is at ``other``."""
        mine, theirs = ((*_progress(*one[:3]), one.bucket, one.waits) for one in (self, other))
        return mine < theirs


class Condition(enum.Enum):
    """The state of a process."""

    RUNNING = "runs"
    STOPPED = "is stopped"
    LEFT = "has left: its program has ended"
    ENDED = "has died"


@dataclass(frozen=True)
class ProcessAddress:
    """The address at which other processes of a node find a process's page, and the record of one group in it."""

    node: str  # the name of the node, followed by that of the PID namespace
    pid: int  # the process's own PID
    started: int  # its start time in clock ticks; tells it from a later process with the same PID
    descriptor: int  # the page's file descriptor in that process
    token: str  # the first bytes of the page
    record: int  # the number of the group's record

    def packed(self) -> list[str | int]:
        """The fields as a list, for JSON."""
        return [self.node, self.pid, self.started, self.descriptor, self.token, self.record]

    @property
    def process(self) -> tuple[str | int, ...]:
        """The process, whichever group's record this is the address of; no later process is the same."""
        return self.node, self.pid, self.started


class PeerProcesses:
    """The processes of those ranks of one group that are on this node.

    ``own`` is this rank's :func:`own_address` for the group. ``addresses`` has the address of each rank, packed.
    """

    def __init__(
        self, rank: int, own: ProcessAddress | None = None, addresses: Sequence[Sequence[str | int] | None] = ()
    ) -> None:
        self._rank = rank
        self._own = own
        self.completed = 0, Activity.DONE, 0  # the last step, activity and bucket that were complete on this rank
        self._pages: dict[int, tuple[ProcessAddress, mmap.mmap]] = {}
        self._gone: list[int] = []  # ranks that ended before this process could map their pages
        self._addresses = {rank: ProcessAddress(*one) for rank, one in enumerate(addresses) if one is not None}  # type: ignore[arg-type]
        page = None if own is None else _page(os.getpid())
        for other, address in self._addresses.items():
            if page is None or other == rank:
                continue
            mapped = page.peer(address)
            if mapped is not None:
                self._pages[other] = (address, mapped)
            elif address.node == page.node and _has_ended(address):
                self._gone.append(other)
        # Writes this rank's step, activity, bucket and _RecordState into its record.
        self.write = (lambda *_: None) if page is None or own is None else page.writer(own.record)

    @property
    def on_this_node(self) -> Sequence[int]:
        """The other ranks of this node whose pages are mapped."""
        return list(self._pages)

    def process_of(self, rank: int) -> Sequence[str | int]:
        """The process of a rank, on any node; empty if it is not known."""
        return self._addresses[rank].process if rank in self._addresses else ()

    def ranks_of(self, process: Sequence[str | int]) -> Sequence[int]:
        """The rank whose process this is, on any node; empty if it is none of these ranks."""
        return [rank for rank, address in self._addresses.items() if address.process == tuple(process)]

    def note_wait(self) -> None:
        """Note that this rank waits for other ranks, until its next note."""
        self._note_state(_RecordState.WAITS)

    def note_closed(self) -> None:
        """Note that this rank has left its step after a failure, until its next note."""
        self._note_state(_RecordState.CLOSED)

    def note_open(self) -> None:
        """Note that this rank connects again after a failure, or that a wait outside of a step is over."""
        self._note_state(_RecordState.WORKS)

    def _note_state(self, state: _RecordState) -> None:
        if self._own is not None:
            _page(os.getpid()).note_state(self._own.record, state)

    def completing(self, *, stopped: bool = False) -> Sequence[int]:
        """The running ranks of this node, and the ``stopped`` ones, that have not completed this rank's last step."""
        alive = (Condition.RUNNING, Condition.STOPPED) if stopped else (Condition.RUNNING,)
        completed = _progress(*self.completed)
        return [
            rank
            for rank, (address, page) in self._pages.items()
            if _progress(*_position(page, address.record)[:3]) < completed
            and _state(page, address.record) is not _RecordState.CLOSED
            and self.condition(rank)[0] in alive
        ]

    def leave(self, text: str) -> None:
        """Note that this process is about to end; ``text`` is the reason, or empty."""
        if self._own is not None:
            _page(os.getpid()).leave(text)

    def position(self, rank: int) -> Position | None:
        """The position of a rank; None if its page is not mapped."""
        if rank == self._rank and self._own is not None:
            return _page(os.getpid()).position(self._own.record)
        if rank not in self._pages:
            return None
        address, page = self._pages[rank]
        return _position(page, address.record)

    def condition(self, rank: int) -> tuple[Condition, str]:
        """The state of the process of a rank of this node, and the reason that it has left, if any."""
        address, page = self._pages[rank]
        (length,) = _LEFT.unpack_from(page, TOKEN_BYTES)
        if length:
            start = TOKEN_BYTES + _LEFT.size
            return Condition.LEFT, page[start : start + length - 1].decode(errors="replace")
        return _condition(address), ""

    def lost(self) -> Mapping[int, tuple[Condition, str]]:
        """The ranks of this node whose processes do not run, with their :meth:`condition`."""
        found = {rank: self.condition(rank) for rank in self._pages}
        found.update((rank, (Condition.ENDED, "")) for rank in self._gone)
        return {rank: one for rank, one in found.items() if one[0] is not Condition.RUNNING}


class Deaths:
    """The deaths that ranks of the job have seen on their nodes, as far as they concern the ranks of one group.

    A group that has ranks of other nodes may have no rank on the node of one that has died. So whoever sees a death
    tells the ranks of all groups.

    Args:
        store: A store of all ranks of the job; None if nobody is to be told.
        processes: The processes of the group's ranks.
    """

    def __init__(self, store: BoundedStore | None, processes: PeerProcesses) -> None:
        self._reports = None if store is None else Reports(store, "ppe_ddp/deaths")
        self._processes = processes
        self._told: set[int] = set()

    def tell(self, rank: int, condition: str, reason: str) -> None:
        """Tell all ranks of the job that ``rank`` is gone; does nothing at the next call for this rank."""
        process = self._processes.process_of(rank)
        if self._reports is not None and process and rank not in self._told:
            with suppress(dist.DistError, CommunicationError):  # without the store the others wait for the timeout
                self._reports.append(json.dumps([process, condition, reason]))
                self._told.add(rank)

    def look(self) -> Mapping[int, tuple[str, str]]:
        """The condition and the reason of each rank that is gone; empty if the store does not answer."""
        told: Iterable[bytes] = ()
        if self._reports is not None:
            with suppress(dist.DistError, CommunicationError):
                told = self._reports.look()
        deaths = map(json.loads, told)
        return {rank: (how, why) for process, how, why in deaths for rank in self._processes.ranks_of(process)}


class _Page:
    """The page of this process, and the mapped pages of other processes."""

    def __init__(self) -> None:
        self.node = node_name().hex() + _pid_namespace()
        self.descriptor, self._map = new_memory_file(_PAGE_BYTES)
        token = secrets.token_bytes(TOKEN_BYTES)
        self._map[:TOKEN_BYTES] = token
        self.token = token.hex()
        self._free = list(reversed(range(_GROUPS - 1)))
        self._peers: dict[str, mmap.mmap] = {}

    def take_record(self) -> int:
        try:
            record = self._free.pop()
        except IndexError:
            return _GROUPS - 1
        self.writer(record)(1, Activity.NONE, 0, _RecordState.WORKS)
        return record

    def give_back(self, record: int) -> None:
        if record < _GROUPS - 1:
            self._free.append(record)

    def writer(self, record: int) -> Callable[[int, int, int, int], object]:
        """Return a function that writes a record. It is called several times a step, so it has no Python frame."""
        return functools.partial(_RECORD.pack_into, self._map, _RECORDS + record * _RECORD.size)

    def note_state(self, record: int, state: _RecordState) -> None:
        self._map[_RECORDS + record * _RECORD.size + _STATE] = state

    def position(self, record: int) -> Position:
        return _position(self._map, record)

    def leave(self, text: str) -> None:
        content = text.encode()[:_TEXT_BYTES]
        start = TOKEN_BYTES + _LEFT.size
        self._map[start : start + len(content)] = content
        _LEFT.pack_into(self._map, TOKEN_BYTES, len(content) + 1)

    def peer(self, address: ProcessAddress) -> mmap.mmap | None:
        """The page of another process; None if it is on another node or cannot be mapped."""
        if address.node != self.node:
            return None
        if address.token not in self._peers:
            try:
                path = path_of(address.pid, address.descriptor)
                page = open_memory_file(path, _PAGE_BYTES, bytes.fromhex(address.token), is_writable=False)
            except (OSError, ValueError):
                return None
            self._peers[address.token] = page
        return self._peers[address.token]


@functools.cache
def _page(_pid: int) -> _Page:
    """The page of this process, cached by PID: a forked child has a page of its own."""
    return _Page()


def own_address() -> ProcessAddress | None:
    """Take a record in this process's page and return its address; the record is free again when the address is gone.

    Returns None if the system has no such memory.
    """
    try:
        page, (_, started) = _page(os.getpid()), _state_and_start("self")
    except OSError:
        return None
    address = ProcessAddress(page.node, os.getpid(), started, page.descriptor, page.token, page.take_record())
    weakref.finalize(address, page.give_back, address.record).atexit = False
    return address


def _position(page: mmap.mmap, record: int) -> Position:
    step, activity, bucket, state = _RECORD.unpack_from(page, _RECORDS + record * _RECORD.size)
    return Position(step, Activity(activity), bucket, state != _RecordState.WORKS)


def _progress(step: int, activity: Activity, bucket: int) -> tuple[int, int, Activity]:
    """A key that orders progress. From ``GATHER`` on, ``bucket`` counts the gathers after one backward."""
    return step, bucket if activity >= Activity.GATHER else -1, activity


def _state(page: mmap.mmap, record: int) -> _RecordState:
    return _RecordState(page[_RECORDS + record * _RECORD.size + _STATE])


def _condition(address: ProcessAddress) -> Condition:
    try:
        state, started = _state_and_start(str(address.pid))
    except (FileNotFoundError, ProcessLookupError):
        return Condition.ENDED
    except (OSError, ValueError, IndexError):  # as where this process has too many open files
        return Condition.RUNNING
    if state in "ZXx" or started != address.started:
        return Condition.ENDED
    return Condition.STOPPED if state in "Tt" else Condition.RUNNING


def _pid_namespace() -> str:
    """The name of this process's PID namespace; OSError if /proc belongs to another namespace."""
    if int(os.readlink("/proc/self")) != os.getpid():
        raise OSError("/proc does not show this process by its number")
    return os.readlink("/proc/self/ns/pid")


def _has_ended(address: ProcessAddress) -> bool:
    """Whether a process whose page cannot be mapped has ended; False if that cannot be told, for another user's."""
    try:
        os.kill(address.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _condition(address) is Condition.ENDED


def _state_and_start(pid: str) -> tuple[str, int]:
    # The program's name comes before the last ")", and may contain spaces and brackets.
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19])
