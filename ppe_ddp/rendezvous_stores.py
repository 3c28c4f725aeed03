"""The stores at which ranks meet, where torch's own is not the right one.

torch's server listens on all interfaces of the machine, whatever address the ranks use, and serves whoever comes: ranks
that meet on the loopback interface get a server that listens there alone.

torchrun's agent keeps its store while it starts ranks anew (``--max-restarts``), with all that they have written. A
rank that comes first then finds the addresses of the others' predecessors, and waits for them until its timeout: the
ranks of each start get names of their own.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from torch.distributed import default_pg_timeout

from ppe_ddp.backends.group_internals import PrefixStore, TCPStore

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from ppe_ddp.backends.group_internals import Store
    from ppe_ddp.launchers import Rendezvous


def restarted_store(place: Rendezvous, timeout: timedelta | None, environment: Mapping[str, str]) -> Store | None:
    """The agent's store, under names that only this start of the ranks has; None where torch's will do.

    On several nodes it is None: each agent counts its own starts, and nothing that ranks are told is the same on all
    nodes and new with each start.
    """
    start = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_one_node = environment.get("LOCAL_WORLD_SIZE") == str(place.world_size)
    if place.init_method != "env://" or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    if start == "0" or not is_one_node:
        return None
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    limit = default_pg_timeout if timeout is None else timeout
    store = TCPStore(host, port, place.world_size, is_master=False, timeout=limit)
    return PrefixStore(f"ppe_ddp/start_{start}", store)


def loopback_store(place: Rendezvous, timeout: timedelta | None, environment: Mapping[str, str]) -> Store | None:
    """The store for ranks that meet at a loopback address, which all of them must then make; None for all others.

    Args:
        place: Where they meet, and which of them this is; rank 0 serves.
        timeout: The store's; None for torch's default.
        environment: Where ``env://`` finds the address.

    Returns:
        None also where torchrun's agent serves already, or where rank 0 finds the port in use: torch shares a server
        that this process has made before, and says what is wrong in other cases.
    """
    found = _address(place.init_method or "", environment)
    if found is None:
        return None
    served = _served(*found, place, default_pg_timeout if timeout is None else timeout)
    # As torch has it, which rank 0 may leave it to: the keys of the others must be the same.
    return None if served is None else PrefixStore("default_pg", served)


def _served(host: str, port: int, place: Rendezvous, timeout: timedelta) -> Store | None:
    if place.rank > 0:
        return TCPStore(host, port, place.world_size, is_master=False, timeout=timeout)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=max(place.world_size, 16))
    except OSError:
        return None
    return TCPStore(
        host,
        port,
        place.world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _address(init_method: str, environment: Mapping[str, str]) -> tuple[str, int] | None:
    """The loopback address and port that ``init_method`` names, where rank 0 is to serve there."""
    parts = urlsplit(init_method)
    if parts.scheme == "tcp":
        host, port = parts.hostname, parts.port
    elif parts.scheme == "env" and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        host, port = environment.get("MASTER_ADDR"), int(environment.get("MASTER_PORT", 0))
    else:
        return None
    if host == "localhost":
        host = "127.0.0.1"
    try:
        is_loopback = ipaddress.ip_address(host or "").is_loopback
    except ValueError:  # a name
        return None
    return (host or "", port) if is_loopback and port else None
