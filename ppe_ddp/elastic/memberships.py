"""Memberships: they find out which processes are alive, and let processes join. ``training.py`` has the step.

    StoreMembership        a TCPStore, served by a process that does not train
    LighthouseMembership   torchft's lighthouse
    MpiMembership          Open MPI's ULFM, under ``mpirun --with-ft ulfm``; nobody can join

All have the method :meth:`Membership.meet`: every live process brings a word and gets a :class:`Quorum`.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torch import distributed as dist

from ppe_ddp.backends.group_internals import HashStore, PrefixStore, Store, TCPStore
from ppe_ddp.backends.rank_store import BoundedStore, Reports, wait_for
from ppe_ddp.engine.peer_processes import PeerProcesses, own_address
from ppe_ddp.errors import UnusableError
from ppe_ddp.waiting import Repeated, paced

_BEAT = 0.2  # seconds between heartbeats
_FLAG_BITS = 31  # bits that one MPI agreement takes
_START_SECONDS = 600.0
_TAG, _TURNS = 27_000, 1_000  # the first tag, and the number of tags, of our messages in MPI.COMM_WORLD
_SOON = timedelta(seconds=2)  # in which a live process that serves a store answers
_LONGEST_MEETING = timedelta(hours=1)


@dataclass(frozen=True)
class Quorum:
    """Processes that have agreed to take part.

    Attributes:
        number: The name of this quorum; no other quorum has it.
        names: The names of the members, by their new rank.
        words: The word of each member, by rank.
        rank: The rank of this process.
        store: A store that the members share; empty at first.
    """

    number: str
    names: Sequence[str]
    words: Sequence[dict[str, Any]]
    rank: int
    store: Store


class Membership(ABC):
    """Finds out which processes are alive. Each process has one membership.

    Args:
        timeout: Seconds for which a live member may keep the others waiting. After that they go on without it.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        """The name of this process; no other process has it."""
        self._beats: Repeated | None = None  # sends its heartbeats
        if dist.is_initialized():
            raise UnusableError("this process is in a process group already: leave init_process_group() out")
        # A group of one process, so that a module can be wrapped before the first meeting.
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)

    @abstractmethod
    def meet(self, word: dict[str, Any]) -> Quorum:
        """Bring a word, wait until all live processes have brought theirs, and return their quorum.

        Args:
            word: A dictionary that JSON can encode.

        Raises:
            UnusableError: The other processes took this one for dead and have gone on without it.
        """

    @abstractmethod
    def is_asked(self) -> bool:
        """Whether the processes should meet between two steps, as another process may want to join."""

    def silent(self, names: Sequence[str]) -> Sequence[str]:
        """The processes of ``names`` without a heartbeat for too long; none if this membership has no heartbeats."""
        return ()

    def leave(self, word: dict[str, Any]) -> None:
        """Leave the training, so that the other processes do not wait for this one; ``word`` as in :meth:`meet`."""
        if self._beats is not None:
            self._beats.end()


class StoreMembership(Membership):
    """Membership by a ``TCPStore`` that outlives the ranks: a process that does not train serves it.

    That process only has to call ``TCPStore(host, port, is_master=True, wait_for_workers=False)`` and to wait. A
    process counts as dead if it has ended, on this node; or if the others have seen no heartbeat of it for ``silence``
    seconds.

    Args:
        address: The address of the store: ``tcp://host:port``.
        size: The number of processes that begin together; later ones join.
        timeout: See :class:`Membership`.
        silence: Seconds without a heartbeat after which a process of another node counts as dead.
    """

    def __init__(self, address: str, *, size: int = 1, timeout: float = 30.0, silence: float = 3.0) -> None:
        super().__init__(timeout)
        place = urlsplit(address)
        if place.scheme != "tcp" or not place.hostname or not place.port:
            raise ValueError(f"the address of the store is tcp://host:port, not {address!r}")
        self._place = place.hostname, place.port
        self._size, self._silence = size, silence
        self._store = self._connect()
        self._bounded = BoundedStore(self._store, timeout)  # a TCPStore may answer late, or never
        self._epoch = 0
        self._members: list[tuple[str, dict[str, Any]]] = []  # of the last quorum
        self._is_member = False
        self._known: dict[str, tuple[int, float]] = {}  # by name: the last heartbeat, and when it was first seen
        self._asks = paced(self._is_joined, _BEAT)

    def _connect(self) -> Store:
        limit = timedelta(seconds=self.timeout)
        store = TCPStore(*self._place, is_master=False, wait_for_workers=False, timeout=limit)
        return PrefixStore("ppe_ddp/elastic", store)

    def meet(self, word: dict[str, Any]) -> Quorum:
        if self._beats is None:
            own = self._connect()  # a connection of its own, since each answers one call at a time
            self._beats = Repeated(lambda: own.add(f"beat/{self.name}", 1), _BEAT)
        while True:
            members = self._next_members(word)
            names = [name for name, _ in members]
            if self.name in names:
                self._is_member = True
                store = PrefixStore(f"quorum/{self._epoch}", self._store)
                return Quorum(str(self._epoch), names, [one for _, one in members], names.index(self.name), store)
            if self._is_member:
                raise UnusableError(
                    f"{self.name}: the others have gone on without this process, which has given no sign of life for "
                    f"{self._silence:g} s, or has kept them waiting for {self.timeout:g} s: start it again"
                )

    def _next_members(self, word: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """Come to the next quorum and return its members; this process may not be one of them."""
        before, self._epoch = self._members, self._epoch + 1
        self._come = Reports(self._bounded, f"come/{self._epoch}")
        key, since = f"members/{self._epoch}", time.monotonic()
        if not self._is_written(key):
            self._come.append(json.dumps([self.name, word]))
        seen = PeerProcesses(-1, own_address(), [one.get("process") for _, one in before])

        def is_decided() -> bool:
            if self._is_written(key):
                return True
            come = dict(json.loads(text) for text in self._come.look())
            old = [name for name, _ in before]
            here = seen.on_this_node
            gone = [old[rank] for rank in seen.lost()]
            gone += self.silent([name for rank, name in enumerate(old) if rank not in here])
            left = [name for name in old if name not in come and name not in gone]
            left = [name for name in left if not self._is_written(f"left/{name}")]
            is_late = self._is_member and time.monotonic() - since > self.timeout
            if (left and not is_late) or (not old and len(come) < self._size):
                return False
            if old and not come.keys() & set(old) and self._is_written(*(f"left/{name}" for name in old)):
                raise UnusableError(f"{self.name}: the training that this process wanted to join has ended")
            order = [*(name for name in old if name in come), *(name for name in come if name not in old)]
            members = json.dumps([[name, come[name]] for name in order])
            self._bounded.do(lambda store: store.compare_set(key, "", members))
            return True

        while not wait_for(is_decided, self.timeout):
            pass  # wait on, as long as the others live: they may come, or join
        self._members = [(name, one) for name, one in json.loads(self._bounded.do(lambda store: store.get(key)))]
        self._come = Reports(self._bounded, f"come/{self._epoch + 1}")
        return self._members

    def _is_written(self, *keys: str) -> bool:
        return self._bounded.do(lambda store: store.check(keys))

    def silent(self, names: Sequence[str]) -> Sequence[str]:
        return [name for name in names if self._is_silent(name)]

    def _is_silent(self, name: str) -> bool:
        # Not by the thread of BoundedStore: it may be the caller, while ranks connect, and would wait for itself.
        beat, now = self._store.add(f"beat/{name}", 0), time.monotonic()
        last, since = self._known.get(name, (-1, now))
        if beat != last:
            self._known[name] = beat, now
            return False
        return now - since > self._silence

    def _is_joined(self) -> bool:
        with suppress(RuntimeError):  # without the store nobody can join
            return bool(self._come.look())
        return False

    def is_asked(self) -> bool:
        return self._asks()

    def leave(self, word: dict[str, Any]) -> None:
        super().leave(word)
        with suppress(RuntimeError):
            self._bounded.do(lambda store: store.set(f"left/{self.name}", ""))


class _ServingMembership(Membership):
    """Membership in which a member serves the store of a quorum; each process has a store for that."""

    def __init__(self, timeout: float, host: str | None) -> None:
        super().__init__(timeout)
        self._limit = timedelta(seconds=timeout)
        # It listens on all interfaces, whatever host is given here.
        self._served = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=self._limit)
        self._place = f"{host or socket.gethostname()}:{self._served.port}"

    def _store_at(self, place: str, number: str) -> Store | None:
        """The store of a quorum; None if its server is gone, for which a TCPStore would wait until its timeout."""
        host, _, port = place.rpartition(":")
        store = self._served
        if place != self._place:
            soon = min(self._limit, _SOON)
            try:
                socket.create_connection((host, int(port)), timeout=soon.total_seconds()).close()
                store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=soon)
            except (OSError, dist.DistError):
                return None
            store.set_timeout(self._limit)
        return PrefixStore(f"quorum/{number}", store)


class LighthouseMembership(_ServingMembership):
    """Membership by torchft's lighthouse (``torchft_lighthouse``, in the extra ``ppe-ddp[torchft]``).

    A process counts as dead if the lighthouse has had no heartbeat of it for ``--heartbeat_timeout_ms``, 5 s by
    default. At the start the lighthouse waits for more processes, until ``--join_timeout_ms`` is over or there are
    ``--min_replicas``.

    Args:
        address: The address of the lighthouse: ``http://host:port``; by default that in ``TORCHFT_LIGHTHOUSE``.
        size: The number of processes that begin together; later ones join.
        timeout: See :class:`Membership`.
        every: Seconds between two meetings, in which processes can join.
        host: The host name under which the others reach this process, if it has to serve the store of a quorum.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        size: int = 1,
        timeout: float = 30.0,
        every: float = 1.0,
        host: str | None = None,
    ) -> None:
        try:
            from torchft import coordination
        except ImportError as error:
            raise ImportError(
                f"LighthouseMembership needs torchft: pip install 'ppe-ddp[torchft]' ({error})"
            ) from error
        super().__init__(timeout, host)
        address = address or os.environ.get("TORCHFT_LIGHTHOUSE", "")
        if not address:
            raise ValueError("where is the lighthouse? Give http://host:port, or set TORCHFT_LIGHTHOUSE")
        self._new_client: Callable[[], Any] = lambda: coordination.LighthouseClient(address, self._limit)
        self._client, self._size = self._new_client(), size
        self._every, self._met = every, time.monotonic()

    def meet(self, word: dict[str, Any]) -> Quorum:
        if self._beats is None:  # not earlier: the others wait for a process that sends heartbeats
            client = self._new_client()
            self._beats = Repeated(lambda: client.heartbeat(self.name), _BEAT / 2)
        begin = 0.0
        while (found := self._found(word)) is None:
            begin = begin or time.monotonic()
            if time.monotonic() - begin > self.timeout:
                raise UnusableError(f"{self.name}: the lighthouse knows of members, and of none that can be reached")
            time.sleep(_BEAT)
        self._met = time.monotonic()
        return found

    def _found(self, word: dict[str, Any]) -> Quorum | None:
        """The quorum of the lighthouse; None if the member that serves the quorum's store has died."""
        while True:
            found = self._client.quorum(
                replica_id=self.name,
                timeout=_LONGEST_MEETING,  # the lighthouse itself goes on without processes that do not come
                store_address=self._place,
                step=max(0, word["committed"]),
                world_size=1,
                data={"word": json.dumps(word)},
            )
            words = {one.replica_id: json.loads(one.data["word"]) for one in found.participants}
            if len(words) >= self._size or any(one["committed"] >= 0 for one in words.values()):
                break
            time.sleep(_BEAT)
        # A member that has trained serves the store.
        names = sorted(words, key=lambda name: (-words[name]["committed"], name))
        (place,) = [one.store_address for one in found.participants if one.replica_id == names[0]]
        number = f"{found.quorum_id}-{found.created.seconds}-{found.created.nanos}"
        store = self._store_at(place, number)
        if store is None:
            return None
        return Quorum(number, names, [words[name] for name in names], names.index(self.name), store)

    def is_asked(self) -> bool:
        return time.monotonic() - self._met > self._every


class MpiMembership(_ServingMembership):
    """Membership by ULFM of Open MPI 5: the processes of one ``mpirun --with-ft ulfm``; none can join.

    MPI tells which processes are dead within milliseconds. It is used for that alone: gradients go over the backend
    that :class:`~ppe_ddp.elastic.ElasticTraining` is given. The training goes on only if processes have died. If one
    hangs, all raise an error after the timeout.

    Args:
        timeout: Seconds for which a member may keep the others waiting before they give up; at least ten minutes at the
            start.
        host: The host name under which the others reach this process, if it has to serve the store of a quorum.

    Raises:
        UnusableError: This is not Open MPI, or it was started without ``--with-ft ulfm``.
    """

    def __init__(self, *, timeout: float = 30.0, host: str | None = None) -> None:
        try:
            import mpi4py

            mpi4py.rc.finalize = False  # MPI_Finalize may wait for dead processes for ever
            from mpi4py import MPI
        except ImportError as error:
            raise ImportError(f"MpiMembership needs mpi4py: pip install 'ppe-ddp[openmpi]' ({error})") from error
        library = MPI.Get_library_version().splitlines()[0]
        is_enabled = os.environ.get("OMPI_MCA_mpi_ft_enable", "0")  # noqa: SIM112
        if "Open MPI" not in library or is_enabled in ("0", "false"):
            raise UnusableError(
                "MpiMembership needs ULFM, by which MPI goes on when a rank has died: Open MPI 5 or newer, started by "
                f"`mpirun --with-ft ulfm`. This is {library}, "
                f"{'without --with-ft ulfm' if 'Open MPI' in library else 'which does not have it'}"
            )
        super().__init__(timeout, host)
        self._mpi, self._error = MPI, MPI.Exception
        self._comm, self._turn = MPI.COMM_WORLD, 0
        self._alive: list[int] = []

    def meet(self, word: dict[str, Any]) -> Quorum:
        met: queue.SimpleQueue[Quorum | BaseException] = queue.SimpleQueue()

        def meet() -> None:
            try:
                met.put(self._meet(word))
            except BaseException as error:
                met.put(error)

        seconds = self.timeout if self._alive else max(self.timeout, _START_SECONDS)
        threading.Thread(target=meet, name="ppe_ddp-mpi", daemon=True).start()
        try:
            found = met.get(timeout=seconds)
        except queue.Empty:
            raise UnusableError(
                f"{self.name}: the ranks have not agreed in {seconds:g} s on who is alive: one hangs or is stopped, or "
                "MPI hangs after several deaths at a time. Start again from a checkpoint"
            ) from None
        if isinstance(found, BaseException):
            raise found
        return found

    def _meet(self, word: dict[str, Any]) -> Quorum:
        while True:
            self._turn += 1
            self._alive = self._agreed()
            told = self._exchanged(self._alive, [self.name, self._turn, self._place, word])
            if told:
                (first, turn, place, _), rank = told[0], self._alive.index(self._comm.Get_rank())
                number = f"{first}-{turn}"
                store = self._store_at(place, number)
                if store is not None:
                    return Quorum(number, [name for name, *_ in told], [one[3] for one in told], rank, store)

    def _agreed(self) -> list[int]:
        """The ranks that are alive, the same on all of them.

        It uses MPI's agreement alone. Making a communicator, as ``Dup()`` and ``Shrink()`` do, may crash or hang Open
        MPI 5.0 if a rank dies meanwhile.
        """
        comm, everyone = self._comm, self._comm.Get_group()
        size = comm.Get_size()
        while True:
            comm.Ack_failed()
            gone = {*comm.Get_failed().Translate_ranks(group=everyone)}
            bits = [
                sum(1 << rank - first for rank in range(first, min(first + _FLAG_BITS, size)) if rank not in gone)
                for first in range(0, size, _FLAG_BITS)
            ]
            try:
                bits = [comm.Agree(part) for part in bits]
            except self._error:  # some rank did not know of a death yet; all ranks get this error
                continue
            return [rank for rank in range(size) if bits[rank // _FLAG_BITS] >> rank % _FLAG_BITS & 1]

    def _exchanged(self, ranks: Sequence[int], word: list[Any]) -> list[Any]:
        """The words of these ranks, collected by the first rank; empty if a rank has died meanwhile.

        If the first rank dies while it sends them, some ranks have the words and others have none. Those that have them
        then cannot connect to its store.
        """
        comm, first = self._comm, ranks[0]
        if comm.Get_rank() != first:
            try:
                self._send(word, first)
                return self._received(first)
            except self._error:
                return []
        told = [word]
        for rank in ranks[1:]:
            with suppress(self._error):
                told.append(self._received(rank))
        for rank in ranks[1:]:
            with suppress(self._error):
                self._send(told if len(told) == len(ranks) else [], rank)
        return told if len(told) == len(ranks) else []

    def _send(self, word: list[Any], rank: int) -> None:
        self._comm.Send(json.dumps(word).encode(), rank, _TAG + self._turn % _TURNS)

    def _received(self, rank: int) -> list[Any]:
        tag, status = _TAG + self._turn % _TURNS, self._mpi.Status()
        self._comm.Probe(rank, tag, status)
        content = bytearray(status.Get_count(self._mpi.BYTE))
        self._comm.Recv(content, rank, tag)
        return list(json.loads(content))

    def is_asked(self) -> bool:
        return False

    def leave(self, word: dict[str, Any]) -> None:
        while not all(one.get("ends") for one in self.meet({**word, "ends": True}).words):
            pass
        if len(self._alive) == self._comm.Get_size() and not self._mpi.Is_finalized():
            self._mpi.Finalize()
