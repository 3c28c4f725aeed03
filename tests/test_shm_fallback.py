"""Where ranks cannot share memory, the wrapper goes by messages: all agree on it, and each warns once of the reason.

The rank that cannot is made so for real, by what systems do to processes; its processes serve one test alone.
"""

import ctypes
import logging
import os
import re
import resource

import pytest
import torch
import torch.distributed as dist

from ppe_ddp import DistributedDataParallel
from ppe_ddp.backends.shm import shm_group  # noqa: F401  # for who cannot import it any more
from ppe_ddp.testing import Ranks

CPU = torch.device("cpu")
NOBODY = 65534
_NEW_MOUNTS, _NEW_PIDS, _PRIVATE = 0x00020000, 0x20000000, 1 << 18 | 1 << 14


def system_call(name, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), name)


def without_memfd():
    """As seccomp has it."""

    def refuse(*_):
        raise PermissionError("Operation not permitted")

    os.memfd_create = refuse


def with_little_address_space():
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))


def without_proc():
    system_call("unshare", _NEW_MOUNTS)
    system_call("mount", None, b"/", None, _PRIVATE, None)
    system_call("mount", b"none", b"/proc", b"tmpfs", 0, None)


def as_another_user():
    """Who may not read what it would import later."""
    model = DistributedDataParallel(torch.nn.Linear(3, 1), shared_memory=False)
    model(torch.ones(1, 3)).sum().backward()
    os.setresuid(NOBODY, NOBODY, NOBODY)


def in_other_processes():
    """A namespace in which this rank's number is that of another process for the other rank."""
    system_call("unshare", _NEW_PIDS)
    child = os.fork()
    if child:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


WAYS = {
    without_memfd: "rank 1: it has none: PermissionError",
    with_little_address_space: "rank 1: it has none: OSError: .* Cannot allocate memory",
    without_proc: "rank 1: it has none: FileNotFoundError",
    as_another_user: "rank 1: it does not reach rank 0: PermissionError",
    in_other_processes: "rank 0: it does not reach rank 1: ",
}


def train(rank, port, spoil):
    """What this rank was told, and whether the gradients are the means."""
    if rank == 1 and spoil is in_other_processes:
        spoil()
    store = dist.TCPStore("127.0.0.1", port, None, False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if rank == 1 and spoil is not in_other_processes:
        spoil()
    elif spoil is as_another_user:
        DistributedDataParallel(torch.nn.Linear(3, 1), shared_memory=False)(torch.ones(1, 3)).sum().backward()
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append((record.levelname, record.getMessage()))
    logger = logging.getLogger("ppe_ddp")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 3), 1.0 + rank)).sum().backward()
        assert model.module.weight.grad.tolist() == [[1.5] * 3]
    return [line for line in told if "shared memory" in line[1]]


@pytest.mark.parametrize("spoil", WAYS, ids=lambda spoil: spoil.__name__)
def test_all_ranks_go_by_messages(spoil):
    if spoil in (without_proc, as_another_user, in_other_processes) and os.geteuid() != 0:
        pytest.skip("only root may change users and make namespaces")
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    with Ranks(2, backend=None) as ranks:
        told = ranks.run_each(train, [(rank, store.port, spoil) for rank in range(2)], timeout=90)
    for rank, lines in enumerate(told):
        assert len(lines) == 2, lines  # for each of the wrapper's two groups
        assert [level for level, _ in lines] == ["WARNING", "DEBUG"]
        for _, line in lines:
            assert re.search(f"rank {rank} of 2, .*: no shared memory, so all goes by messages: {WAYS[spoil]}", line)
