"""Rendezvous of ranks that MPI has started, for torch.distributed: ``init_method="mpi://"``.

Owns the check that MPI's world is the one that the launcher meant to start.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlparse

from mpi4py import MPI
from torch.distributed import default_pg_timeout

from ppe_ddp.backends.group_internals import TCPStore
from ppe_ddp.backends.mpi.mpi_job import install_job_hooks
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

# Who sets the number of ranks, and under which name.
_LAUNCHERS = (
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
    ("MV2_COMM_WORLD_SIZE", "MVAPICH's mpirun"),
    ("PMI_SIZE", "an mpirun of the MPICH family (MPICH, Intel MPI)"),
    ("SLURM_STEP_NUM_TASKS", "Slurm's srun"),
    ("WORLD_SIZE", "torchrun, or another launcher that sets WORLD_SIZE"),
)

_ADDRESS_BYTES = 64  # of rank 0's address and port as JSON: the longest address is an IPv6 one of 39


def rendezvous(url: str, timeout: timedelta | None) -> tuple[TCPStore, int, int]:
    """Make one store that all ranks of MPI's world share; every rank of that world must call it together.

    Rank 0 serves the store on a free port: on the loopback interface where all ranks share one machine, else on
    all interfaces, and tells the others its address over MPI.

    Args:
        url: ``mpi://``, with a ``rank`` or ``world_size`` in its query where the user gave them.
        timeout: The store's; None for torch's default.

    Returns:
        The store, this process's rank and the number of ranks, both MPI's.

    Raises:
        CommunicationError: The launcher and the MPI library do not belong together.
        ValueError: ``rank`` or ``world_size`` was given, and MPI has another.
    """
    world = MPI.COMM_WORLD
    check_launcher(os.environ)
    rank, size = world.Get_rank(), world.Get_size()
    for name, values in parse_qs(urlparse(url).query).items():
        actual = {"rank": rank, "world_size": size}.get(name)
        if actual is not None and int(values[0]) != actual:
            raise ValueError(f"init_process_group() got {name}={values[0]}, and MPI says {actual}; leave it out")
    install_job_hooks(together=True)
    limit = timeout if timeout is not None else default_pg_timeout
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    one_node = node.Get_size() == size
    node.Free()
    address = bytearray(_ADDRESS_BYTES)
    if rank > 0:
        world.Bcast(address)
        host, port = json.loads(address)
        return TCPStore(host, port, size, is_master=False, timeout=limit), rank, size
    listener = socket.create_server(("127.0.0.1" if one_node else "", 0), backlog=max(size, 16))
    port = listener.getsockname()[1]
    host = "127.0.0.1" if one_node else _address_for_others()
    # It listens already, so that the others may come before the store serves; they hear of the port only afterwards.
    address[:] = json.dumps([host, port]).encode().ljust(_ADDRESS_BYTES)
    world.Bcast(address)
    store = TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, rank, size


def check_launcher(environment: Mapping[str, str]) -> None:
    """Refuse N worlds of one rank each, which is what the mpirun of another MPI library starts.

    Raises:
        CommunicationError: MPI's world has one rank, and the environment tells of more; with the remedy.
    """
    if MPI.COMM_WORLD.Get_size() > 1:
        return
    for variable, launcher in _LAUNCHERS:
        value = environment.get(variable, "")
        if value.isdigit() and int(value) > 1:
            raise CommunicationError(mismatch(int(value), f"{launcher} ({variable}={value})"))


def mismatch(expected: int, source: str) -> str:
    """What to say where MPI's world has not the number of ranks that ``source`` speaks of."""
    library = MPI.Get_library_version().strip("\0 \n").splitlines()[0]
    return (
        f"MPI's world has {MPI.COMM_WORLD.Get_size()} rank(s), but {source} says {expected}: these processes were not "
        f"started by the launcher of the MPI library that mpi4py has loaded, which is: {library}. Start them by that "
        "library's own mpirun (`pip install mpich` puts one into bin/ of the environment; see `which -a mpirun`), take "
        "an mpi4py that is built for the MPI whose mpirun you use, or, under torchrun, leave mpi4py and mpi:// out"
    )


def _address_for_others() -> str:
    """Where other machines reach this one: what its name stands for, or the way out where that is only itself."""
    address = socket.gethostbyname(socket.gethostname())
    if not ipaddress.ip_address(address).is_loopback:
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 1))  # sends nothing: it only asks the routing table
        return str(probe.getsockname()[0])
