"""Exchanges a word a rank through the store of a process group, without its backend.

What the threads of a backend have done for us they give up a moment after this rank has gone on, and gloo's need Python
for it: where that is at its end by then, C++ aborts the process (``exit_order.py``). Our own duplicates of a group are
ended before; the user's group is not ours to end, so nothing of ours goes through it.
"""

from __future__ import annotations

import json
from collections import deque
from contextlib import suppress
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed import default_pg_timeout

from ppe_ddp.backends.group_internals import backend_for, device_types, kept_with, store_of, timeout_of
from ppe_ddp.backends.rank_store import multi_get
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

_SHORTEST_NAP = 0.001  # seconds between looks at the store
_LONGEST_NAP = 0.02
_LAST = 16  # exchanges whose words stay in the store; all have read the one before, but threads may be in several


def exchange(group: ProcessGroup, name: str, word: Any, look: Callable[[], None] = lambda: None) -> list[Any]:
    """The words of all ranks of ``group``, in their order; all of them must call this together.

    Args:
        group: One that torch.distributed has made.
        name: Of this exchange: the same on every rank, and new.
        word: This rank's: what JSON can write.
        look: Called now and then; raises what ends the wait.

    Raises:
        CommunicationError: Not all ranks have come within the group's timeout; names them.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    store, advance = store_of(group), progress_of(group)
    keys = [f"ppe_ddp/{name}/{other}" for other in range(world_size)]
    count, joined = f"ppe_ddp/{name}/count", f"ppe_ddp/{name}/all"
    said = kept_with(group, _keys_of_this_rank)
    said.append((keys[rank],))
    store.set(keys[rank], json.dumps(word))
    if store.add(count, 1) == world_size:  # the last to come joins what the others have said: each reads one key
        said.append((count, joined))
        store.set(joined, json.dumps([json.loads(text) for text in multi_get(store, keys)]))
    seconds, nap = (timeout_of(group) or default_pg_timeout).total_seconds(), _SHORTEST_NAP
    end = monotonic() + seconds
    while not store.check([joined]):
        if monotonic() > end:
            absent = tuple(other for other, key in enumerate(keys) if not store.check([key]))
            error = CommunicationError(
                f"rank {rank} of {world_size}: rank {', '.join(map(str, absent))} did not come within the group's "
                f"timeout of {seconds:g} s. All ranks of the group must wrap the module together"
            )
            error.ranks = absent
            raise error
        advance()  # another rank may wait for a message of the user's before it comes
        look()
        sleep(nap)
        nap = min(2 * nap, _LONGEST_NAP)
    words: list[Any] = json.loads(store.get(joined))
    while len(said) > _LAST:
        for key in said.popleft():
            with suppress(RuntimeError):  # a store of the user's that cannot delete
                store.delete_key(key)
    return words


def _keys_of_this_rank() -> deque[tuple[str, ...]]:
    """Those that are still in the store, of one group."""
    return deque()


def progress_of(group: ProcessGroup) -> Callable[[], object]:
    """The method that advances what is under way in ``group``, which backends written in Python have for CPUs."""
    backend = backend_for(group, torch.device("cpu")) if "cpu" in device_types(group) else None
    progress: Callable[[], object] = getattr(backend, "progress", lambda: None)
    return progress
