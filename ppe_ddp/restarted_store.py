"""The store of ranks that torchrun has started again: it must not tell them of the ranks that were there before.

torchrun's agent keeps its store while it starts ranks anew (``--max-restarts``), with all that they have written. A
rank that comes first then finds the addresses of the others' predecessors, and waits for them until its timeout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
