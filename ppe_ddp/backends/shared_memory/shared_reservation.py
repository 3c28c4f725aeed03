"""Shared memory of one node: one reservation a process, which the other processes map as a whole.

    rank 0   |== bucket ==|      |== control ==|     ...     a memfd as large as the machine's memory if all ranks' fit
    rank 1   |== control ==|  |==== bucket ====|     ...     into one process, and sparse: what is touched takes memory

A peer maps the reservation once, so a tensor in it is known to all by its position alone, and making one needs no
agreement. The file has no name and is opened by process number and descriptor, so that nothing is left of a process
that is killed. Only processes of the same user can open it. It begins with a token, as the same number may mean another
process elsewhere (containers).

In a control page of each rank for each group the others see how far it has come:

    life of a page    0: of its first group     1: its rank has left that group, or has a page of another one here
    rank 0 leaves     its page goes from 0 to 1; rank 1 may look at it all the same
    rank 1 leaves     its page goes from 0 to 1, so both are unused: each rank takes its own again, for another group
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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ppe_ddp.waiting import each_process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

TOKEN_BYTES = 16

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_ADDRESS = struct.Struct(f"<qqqq{TOKEN_BYTES}s{TOKEN_BYTES}s")
ADDRESS_BYTES = _ADDRESS.size
_ADDRESS_SPACE = 1 << 46  # half of what a process has on x86-64
_LIFE_WORDS = 8  # a cache line of its own


@dataclass(frozen=True)
class Address:
    """Where other processes of this node find a reservation."""

    pid: int  # of its owner
    descriptor: int  # of its file, in the owner
    nbytes: int  # the size of the file
    token: bytes  # what it begins with
    node: bytes  # the name of the node: on another one, the number means another process for certain

    @property
    def path(self) -> str:
        """The file, as other processes of this node may open it."""
        return path_of(self.pid, self.descriptor)

    def packed(self, position: int) -> bytes:
        """It and a position in it, in ``ADDRESS_BYTES`` bytes."""
        return _ADDRESS.pack(self.pid, self.descriptor, self.nbytes, position, self.token, self.node)

    @classmethod
    def unpacked(cls, packed: bytes | bytearray) -> tuple[Address, int]:
        """What :meth:`packed` was made of."""
        pid, descriptor, nbytes, position, token, node = _ADDRESS.unpack(packed)
        return cls(pid, descriptor, nbytes, token, node), position


class SharedMemory:
    """The reservation of this process, and those of its peers; OSError where the system allows it none."""

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
        """A 1-D tensor of zeros in the reservation, given back with its last view; MemoryError where that is full."""
        nbytes = _whole_pages(numel * dtype.itemsize)
        start = self._take(nbytes)
        memory = memoryview(self._map)[start : start + nbytes]
        weakref.finalize(memory, self._give_back, start, nbytes).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=numel) if numel else torch.empty(0, dtype=dtype)

    def reserve(self, nbytes: int) -> int:
        """The position of zeros that stay as long as the process: others may read them after it has done with them."""
        return self._take(_whole_pages(nbytes))

    def position(self, tensor: Tensor) -> int:
        """Where a contiguous tensor begins in the reservation, in bytes; -1 for a tensor that is elsewhere."""
        position = tensor.data_ptr() - self._base
        return position if 0 <= position < self.address.nbytes else -1

    def view_of(self, tensor: Tensor) -> Tensor:
        """A view of the memory of a 1-D tensor in the reservation that does not keep it from being given back."""
        return torch.frombuffer(self._map, dtype=tensor.dtype, count=tensor.numel(), offset=self.position(tensor))

    def attach(self, address: Address) -> mmap.mmap:
        """Map the reservation of a process of this node; OSError where it is on another, or out of reach."""
        with self._lock:
            known = self._map if address == self.address else self._peers.get(address)
            if known is None:
                if address.node != node_name():
                    raise OSError(f"process {address.pid} is on another node")
                known = self._peers[address] = open_memory_file(address.path, address.nbytes, address.token)
            return known

    def has_ended(self, address: Address) -> bool:
        """Whether the process that made another reservation has ended, or is nothing but an exit code."""
        if address == self.address:
            return False
        try:
            os.stat(address.path)
        except FileNotFoundError:
            return True
        except OSError:  # such as one that has changed its user: no sign of an end
            return False
        return False

    def _take(self, nbytes: int) -> int:
        with self._lock:
            while self._given_back:  # filled by finalizers, which may run in the middle of anything, also of this
                insort(self._free, self._given_back.pop())
            self._free = _joined(self._free)
            for index, (start, stop) in enumerate(self._free):
                if stop - start >= nbytes:
                    self._free[index] = (start + nbytes, stop)
                    return start
        raise MemoryError(f"no {nbytes} bytes in a row are left of {self.address.nbytes} bytes of shared memory")

    def _give_back(self, start: int, nbytes: int) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has no say in it
        self._map.madvise(mmap.MADV_REMOVE, start, nbytes)
        self._given_back.append((start, start + nbytes))


def reservation_bytes() -> int:
    """As much as the machine has, or less where the reservations of all ranks here would not fit into one process."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks = int(told) if told.isdecimal() and int(told) else os.cpu_count() or 1
    return min(os.sysconf("SC_PHYS_PAGES"), _ADDRESS_SPACE // ranks // mmap.PAGESIZE) * mmap.PAGESIZE


@each_process
def shared_memory() -> SharedMemory:
    """The reservation of this process; OSError where there can be none (not Linux, a limit on address space)."""
    return SharedMemory()


class ControlPage:
    """The page of one rank for one group; made before that rank can know that this one has all it needs, and leave.

    Attributes:
        space: The reservation of that rank.
        position: Where the page begins in it.
    """

    def __init__(self, space: mmap.mmap, position: int) -> None:
        page = memoryview(space)[position : position + mmap.PAGESIZE].cast("q")
        self.space, self.position = space, position
        self.words = page[_LIFE_WORDS:]  # what the rank shows, as int64; zeros at first. Only that rank writes there
        self._life = page[:1]
        self._first_seen = self._life[0]

    @property
    def is_left(self) -> bool:
        return bool(self._life[0] != self._first_seen)

    def leave(self) -> None:
        """Show the others that this rank, whose page it is, looks at no page of the group any more."""
        self._life[0] = self._first_seen + 1

    def clear(self) -> None:
        """Make it zeros again for another group; it has the same life until that is left."""
        self.words[:] = memoryview(bytes(self.words.nbytes)).cast("q")


class ControlPages:
    """The control pages of this process, in its reservation ``memory``."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # Filled by finalizers, which may run in the middle of anything: never under the lock.
        self._left: list[tuple[int, Sequence[ControlPage]]] = []

    def take(self) -> int:
        """The position of a page for a group that is being made; MemoryError where the reservation is full."""
        with self._lock:
            for place, (position, pages) in enumerate(self._left):
                if all([page.is_left for page in pages]):
                    del self._left[place]
                    ControlPage(self._memory.attach(self._memory.address), position).clear()
                    return position
        return self._memory.reserve(mmap.PAGESIZE)

    def give_back(self, position: int) -> None:
        """A page that no rank has come to look at."""
        self._left.append((position, ()))

    def leave_with(self, user: object, own: int, pages: Sequence[ControlPage]) -> None:
        """Leave a group as soon as ``user`` is no more."""
        weakref.finalize(user, self._leave, own, pages).atexit = False

    def _leave(self, own: int, pages: Sequence[ControlPage]) -> None:
        if os.getpid() == self._pid:  # a forked child has no say in it
            pages[own].leave()
            self._left.append((pages[own].position, pages))


@each_process
def control_pages() -> ControlPages:
    """The control pages of this process; raises OSError where it has no reservation."""
    return ControlPages(shared_memory())


def new_memory_file(nbytes: int) -> tuple[int, mmap.mmap]:
    """A file of ``nbytes`` zeros, which take memory only as they are touched: its descriptor, and a map of it.

    Raises OSError where the system has no such memory, or allows this process none.
    """
    try:
        descriptor = os.memfd_create("ppe_ddp")
    except AttributeError:
        raise OSError("this system has no memfd_create") from None
    try:
        os.fchmod(descriptor, 0o600)  # it is made for everybody
        os.ftruncate(descriptor, nbytes)
        return descriptor, _mapped(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise


def open_memory_file(path: str, nbytes: int, token: bytes, *, is_writable: bool = True) -> mmap.mmap:
    """Map the file of another process; OSError where it is out of reach, or another file."""
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
    """The file that process ``pid`` has made, as others of its node may open it."""
    return f"/proc/{pid}/fd/{descriptor}"


def node_name() -> bytes:
    """What tells this machine from others, and its containers from one another; OSError where the system hides it."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        name = file.read() + socket.gethostname().encode()
    return hashlib.sha256(name).digest()[:TOKEN_BYTES]


def _mapped(descriptor: int, nbytes: int, *, is_writable: bool = True) -> mmap.mmap:
    access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    return mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | _NORESERVE, prot=access)


def _whole_pages(nbytes: int) -> int:
    return max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted ranges with neighbours joined, and without empty ones."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return joined
