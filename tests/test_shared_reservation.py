"""Memory that the ranks of a node share is for the same user only."""

import os
import stat

from ppe_ddp.backends.shared_memory.shared_reservation import SharedMemory


def test_nobody_else_may_open_the_memory():
    memory = SharedMemory()
    status = os.stat(f"/proc/{os.getpid()}/fd/{memory.address.descriptor}")
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.geteuid()
    assert not os.get_inheritable(memory.address.descriptor)
