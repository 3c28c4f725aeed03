"""Shared memory of one node: one reservation a process, which the other processes map as a whole.

It is a memfd as large as the machine's memory, if those of all ranks fit into one process, and sparse: what is touched
takes memory. So a position identifies a tensor in it for all processes, and allocating one needs no agreement. The file
has no name, and is opened by PID and descriptor, so nothing is left of a killed process. Only processes of the same
user can open it. It begins with a token, as the same PID may be another process in a container.

Each rank has a control page for each group, in which the others see its progress:

    life of a page    0: of its first group     1: its rank has left that group, or uses the page for another one
    rank 0 leaves     its page goes from 0 to 1; rank 1 may still read it
    rank 1 leaves     its page goes from 0 to 1, so both are unused: each rank reuses its own for another group
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import socket
import stat
import struct
import threading
import weakref
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ppe_ddp.waiting import each_process

TOKEN_BYTES = 16

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_ADDRESS = struct.Struct(f"<qqqq{TOKEN_BYTES}s{TOKEN_BYTES}s")
ADDRESS_BYTES = _ADDRESS.size
_ADDRESS_SPACE = 1 << 46  # half of a process's address space on x86-64
_LIFE_WORDS = 8  # the life of a page has a cache line of its own


@dataclass(frozen=True)
class Address:
    """The address of a reservation, for other processes of its node."""

    pid: int  # of its owner
    descriptor: int  # of its file, in the owner
    nbytes: int  # the size of the file
    token: bytes  # the first bytes of the file
    node: bytes  # the name of the node; on another node the PID is another process

    @property
    def path(self) -> str:
        return path_of(self.pid, self.descriptor)

    def packed(self, position: int) -> bytes:
        """Pack the address and a position in the reservation into ``ADDRESS_BYTES`` bytes."""
        return _ADDRESS.pack(self.pid, self.descriptor, self.nbytes, position, self.token, self.node)

    @classmethod
    def unpacked(cls, packed: bytes | bytearray) -> tuple[Address, int]:
        pid, descriptor, nbytes, position, token, node = _ADDRESS.unpack(packed)
        return cls(pid, descriptor, nbytes, token, node), position


class SharedMemory:
    """The reservation of this process, and the mapped ones of its peers; OSError if the system allows none."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        nbytes = reservation_bytes()
        node = node_name()
        descriptor, self._map = new_memory_file(nbytes)
        self._lock = threading.Lock()  # a reduce function's thread allocates beside the main thread
        self._base = torch.frombuffer(self._map, dtype=torch.uint8, count=1).data_ptr()
        self._free = [(0, nbytes)]
        self._given_back: list[tuple[int, int]] = []
        self._peers: dict[Address, mmap.mmap] = {}
        self.address = Address(self._pid, descriptor, nbytes, secrets.token_bytes(TOKEN_BYTES), node)
        self._token = self.allocate(TOKEN_BYTES, torch.uint8)
        self._token.copy_(torch.frombuffer(bytearray(self.address.token), dtype=torch.uint8))

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of zeros in the reservation, freed with its last view; MemoryError if there is no space."""
        nbytes = _whole_pages(numel * dtype.itemsize)
        start = self._take(nbytes)
        memory = memoryview(self._map)[start : start + nbytes]
        weakref.finalize(memory, self._give_back, start, nbytes).atexit = False
        return (
            torch.frombuffer(memory, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype, device="cpu")
        )

    def reserve(self, nbytes: int) -> int:
        """Reserve zeros that are never freed, as other processes may read them; returns their position."""
        return self._take(_whole_pages(nbytes))

    def position(self, tensor: Tensor) -> int:
        """The position of a contiguous tensor in the reservation, in bytes; -1 for a tensor in other memory."""
        position = tensor.data_ptr() - self._base
        return position if 0 <= position < self.address.nbytes else -1

    def view_of(self, tensor: Tensor) -> Tensor:
        """A view of a 1-D tensor in the reservation that does not keep its memory from being freed."""
        return torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=self.position(tensor))

    def attach(self, address: Address) -> mmap.mmap:
        """Map the reservation of a process of this node; OSError if it is on another node, or not accessible."""
        with self._lock:
            known = self._map if address == self.address else self._peers.get(address)
            if known is None:
                if address.node != node_name():
                    raise OSError(f"process {address.pid} is on another node")
                # What an ended process has touched takes memory as long as another one maps it.
                self._peers = {peer: space for peer, space in self._peers.items() if not self.has_ended(peer)}
                known = self._peers[address] = open_memory_file(address.path, address.nbytes, address.token)
            return known

    def has_ended(self, address: Address) -> bool:
        """Whether the owner of a reservation has ended, or is a zombie."""
        try:
            os.stat(address.path)
        except OSError as error:  # another one if it is not accessible, for instance as it has changed its user
            return isinstance(error, FileNotFoundError)
        return False

    def _take(self, nbytes: int) -> int:
        with self._lock:
            while self._given_back:  # filled by finalizers, which may run at any time, also here
                insort(self._free, self._given_back.pop())
            self._free = joined_ranges(self._free)
            for index, (start, stop) in enumerate(self._free):
                if stop - start >= nbytes:
                    self._free[index] = (start + nbytes, stop)
                    return start
        raise MemoryError(f"no {nbytes} bytes in a row are left of {self.address.nbytes} bytes of shared memory")

    def _give_back(self, start: int, nbytes: int) -> None:
        if os.getpid() != self._pid:
            return  # a forked child does not own the memory
        self._map.madvise(mmap.MADV_REMOVE, start, nbytes)
        self._given_back.append((start, start + nbytes))


def reservation_bytes() -> int:
    """The machine's memory, or less if the reservations of all local ranks would not fit into one address space."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(told) if told.isdecimal() and int(told) else os.cpu_count() or 1
    return min(os.sysconf("SC_PHYS_PAGES"), _ADDRESS_SPACE // ranks // mmap.PAGESIZE) * mmap.PAGESIZE


@each_process
def shared_memory() -> SharedMemory:
    """The reservation of this process; OSError if there can be none (not Linux, a limit on address space)."""
    return SharedMemory()


class ControlPage:
    """One rank's control page for one group, in the reservation ``space`` of that rank; made before it can leave."""

    def __init__(self, space: mmap.mmap, position: int) -> None:
        page = memoryview(space)[position : position + mmap.PAGESIZE].cast("q")
        self.space, self.position = space, position
        self.words = page[_LIFE_WORDS:]  # int64, zeros at first; only that rank writes here
        self._life = page[:1]
        self._first_seen = self._life[0]

    @property
    def is_left(self) -> bool:
        return bool(self._life[0] != self._first_seen)

    def leave(self) -> None:
        """Show the other ranks that this rank, the page's owner, reads no page of the group any more."""
        self._life[0] = self._first_seen + 1

    def clear(self) -> None:
        """Set the words to zero for another group; the life stays until that group is left."""
        self.words[:] = memoryview(bytes(self.words.nbytes)).cast("q")


class ControlPages:
    """The control pages of this process, in its reservation ``memory``."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # Filled by finalizers, which may run at any time, and so must not take the lock.
        self._left: list[tuple[int, Sequence[ControlPage]]] = []

    def take(self) -> int:
        """Take a page for a new group; returns its position. MemoryError if the reservation is full."""
        with self._lock:
            for place, (position, pages) in enumerate(self._left):
                if all([page.is_left for page in pages]):
                    del self._left[place]
                    ControlPage(self._memory.attach(self._memory.address), position).clear()
                    return position
        return self._memory.reserve(mmap.PAGESIZE)

    def give_back(self, position: int) -> None:
        """Give back a page that no other rank has mapped."""
        self._left.append((position, ()))

    def leave_with(self, user: object, own: int, pages: Sequence[ControlPage]) -> None:
        """Leave a group as soon as ``user`` is freed."""
        weakref.finalize(user, self._leave, own, pages).atexit = False

    def _leave(self, own: int, pages: Sequence[ControlPage]) -> None:
        if os.getpid() == self._pid:  # a forked child does not own the pages
            pages[own].leave()
            self._left.append((pages[own].position, pages))


@each_process
def control_pages() -> ControlPages:
    """The control pages of this process; OSError if it has no reservation."""
    return ControlPages(shared_memory())


def new_memory_file(nbytes: int) -> tuple[int, mmap.mmap]:
    """Make a file of ``nbytes`` zeros, which take memory only when touched; returns its descriptor and a map of it.

    Raises OSError if the system has no such memory, or does not allow it to this process.
    """
    try:
        descriptor = os.memfd_create("ppe_ddp")
    except AttributeError:
        raise OSError("this system has no memfd_create") from None
    try:
        os.fchmod(descriptor, 0o600)  # memfd_create() makes it accessible for all users
        os.ftruncate(descriptor, nbytes)
        return descriptor, _mapped(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise


def open_memory_file(path: str, nbytes: int, token: bytes, *, is_writable: bool = True) -> mmap.mmap:
    """Map the file of another process; OSError if it is not accessible, or another file."""
    access = os.O_RDWR if is_writable else os.O_RDONLY
    descriptor = os.open(path, access | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
            raise OSError(f"{path} is not what was announced")
        memory = _mapped(descriptor, nbytes, is_writable=is_writable)
    finally:
        os.close(descriptor)
    if memory[:TOKEN_BYTES] != token:
        raise OSError(f"{path} is of another process here")
    return memory


def path_of(pid: int, descriptor: int) -> str:
    """The path of the file that process ``pid`` has made, for other processes of its node."""
    return f"/proc/{pid}/fd/{descriptor}"


def node_name() -> bytes:
    """A name that identifies this machine, and a container on it; OSError if the system hides it."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        name = file.read() + socket.gethostname().encode()
    return hashlib.sha256(name).digest()[:TOKEN_BYTES]


def _mapped(descriptor: int, nbytes: int, *, is_writable: bool = True) -> mmap.mmap:
    access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    return mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | _NORESERVE, prot=access)


def _whole_pages(nbytes: int) -> int:
    return max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def joined_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join adjacent ones of sorted ranges, each with its start and stop, and drop empty ones."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return joined
