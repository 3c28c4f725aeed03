"""Memory that the ranks of a node share is for the same user only."""

import mmap
import os
import stat
import weakref

import pytest

from ppe_ddp.backends.shared_memory.shared_reservation import SharedMemory, new_memory_file, reservation_bytes


def test_nobody_else_may_open_the_memory():
    memory = SharedMemory()
    status = os.stat(f"/proc/{os.getpid()}/fd/{memory.address.descriptor}")
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.geteuid()
    assert not os.get_inheritable(memory.address.descriptor)


def test_memory_of_a_process_that_has_ended_is_given_up():
    memory, ended, other, last = (SharedMemory() for _ in range(4))
    mapped, kept = weakref.ref(memory.attach(ended.address)), weakref.ref(memory.attach(other.address))
    os.close(ended.address.descriptor)  # as at the end of its process
    memory.attach(last.address)
    assert mapped() is None
    assert kept() is not None


@pytest.mark.parametrize("told", ["64", None])
def test_those_of_64_ranks_fit_into_one_process(told, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda _: (2 << 40) // mmap.PAGESIZE)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if told:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    nbytes = reservation_bytes()
    files = [new_memory_file(nbytes) for _ in range(64)]
    for descriptor, memory in files:
        os.close(descriptor)
        memory.close()
    assert nbytes == 1 << 40
