"""Memory of one process that others of its node map: a file without a name, opened by process number and descriptor.

Nothing lies in the file system, so that nothing is left of a process that is killed. Only processes of the same user
can open it. It begins with a token, as the same number may mean another process elsewhere (containers).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import socket
import stat

TOKEN_BYTES = 16

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def new_memory_file(nbytes: int) -> tuple[int, mmap.mmap]:
    """A file of ``nbytes`` zeros, which take memory only as they are touched: its descriptor, and a map of it.

    Raises:
        OSError: The system has no such memory, or allows this process none.
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
    """Map the file of another process.

    Args:
        path: What :func:`path_of` gives.
        nbytes: Its size.
        token: What it begins with.
        is_writable: Whether this process may write there.

    Raises:
        OSError: It is out of reach, or another file.
    """
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
    """What tells this machine from others, and its containers from one another: ``TOKEN_BYTES`` bytes.

    Raises:
        OSError: The system does not show it.
    """
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        name = file.read() + socket.gethostname().encode()
    return hashlib.sha256(name).digest()[:TOKEN_BYTES]


def _mapped(descriptor: int, nbytes: int, *, is_writable: bool = True) -> mmap.mmap:
    access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    return mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED | _NORESERVE, prot=access)
