"""Shared memory of one node: one reservation a process, which the other processes map as a whole.

    rank 0   |== bucket ==|      |== control ==|     ...     a memfd as large as the machine's memory, and sparse:
    rank 1   |== control ==|  |==== bucket ====|     ...     only what is touched takes memory

A peer maps the reservation once, so a tensor in it is known to all by its position alone, and making one needs no
agreement.
"""

from __future__ import annotations

import functools
import mmap
import os
import secrets
import struct
import threading
import weakref
from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ppe_ddp.backends.shared_memory.memory_file import (
    TOKEN_BYTES,
    new_memory_file,
    node_name,
    open_memory_file,
    path_of,
)

if TYPE_CHECKING:
    from torch import Tensor

_ADDRESS = struct.Struct(f"<qqqq{TOKEN_BYTES}s{TOKEN_BYTES}s")
ADDRESS_BYTES = _ADDRESS.size


@dataclass(frozen=True)
class Address:
    """Where other processes of this node find a reservation.

    Attributes:
        pid: Of its owner.
        descriptor: Of its file, in the owner.
        nbytes: The size of the file.
        token: What it begins with.
        node: The name of the node: on another one, the number means another process for certain.
    """

    pid: int
    descriptor: int
    nbytes: int
    token: bytes
    node: bytes

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
    """The reservation of this process, and those of its peers.

    Raises:
        OSError: The system has no such memory, or allows this process none.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        nbytes = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
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
        """A 1-D tensor of zeros in the reservation; its memory goes back to the system with its last view.

        Raises:
            MemoryError: The reservation is full.
        """
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
        """Map the reservation of a process of this node.

        Raises:
            OSError: It is not on this node, or out of reach.
        """
        with self._lock:
            known = self._map if address == self.address else self._peers.get(address)
            if known is None:
                known = self._peers[address] = _opened(address)
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


def shared_memory() -> SharedMemory:
    """The reservation of this process.

    Raises:
        OSError: The system has none, or allows this process none (not Linux, a limit on address space).
    """
    return _made(os.getpid())


@functools.cache
def _made(_pid: int) -> SharedMemory:
    return SharedMemory()


def _whole_pages(nbytes: int) -> int:
    return max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE


def _opened(address: Address) -> mmap.mmap:
    if address.node != node_name():
        raise OSError(f"process {address.pid} is on another node")
    return open_memory_file(address.path, address.nbytes, address.token)


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted ranges with neighbours joined, and without empty ones."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return joined
