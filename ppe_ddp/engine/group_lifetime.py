"""The end of process groups: closes their connections, on threads of Python's only.

The end of a group of gloo waits for gloo's threads. On those run the callbacks of Futures, which a function or hook may
have made with the group at hand; where such a callback drops the last reference, the thread would wait for itself, and
C++ ends the process: "Resource deadlock avoided".

    group (what Python refers to)  ──►  backend (has the threads)  ◄──  held here until the group is gone
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ProcessGroup

from ppe_ddp.backends.group import PythonGroup
from ppe_ddp.backends.group_internals import (
    address_key_in_group,
    backend_for,
    destroy_group,
    device_types,
    is_registered,
    store_of,
)
from ppe_ddp.backends.rank_store import WrittenKeys
from ppe_ddp.backends.shm.gloo_wire import CLOSING_THREAD, close_given_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Release = Callable[[Callable[[str, Any], list[Any]]], None]


def close(groups: list[ProcessGroup]) -> dict[str, Release]:
    """Close the connections of these, so that ranks that wait in them leave with an error; empties the list.

    torch has forgotten them when this returns, on every rank that has closed them: it names a group that only its ranks
    make by how many groups each of them has.

    Returns:
        What is to be called on all ranks together, when all have closed theirs, by the name of the group: MPI has only
        so many communicators.
    """
    releases: dict[str, Release] = {}
    for group in groups:
        if type(group) is not ProcessGroup:  # written in Python: it tells the others by itself
            group.abort()
        if isinstance(group, PythonGroup):
            releases[group.group_name] = group.release
        elif is_registered(group) and "cpu" in device_types(group):  # destroyed by the user meanwhile, or NCCL's alone
            keys = WrittenKeys(store_of(group))
            keys.note(address_key_in_group(group.rank()))
            releases[group.group_name] = functools.partial(_delete, keys)
        del group
    ending = list(groups)
    destroy(groups)
    close_given_up(ending)
    return releases


def release_all(releases: dict[str, Release], exchange: Callable[[str, Any], list[Any]]) -> None:
    """Give back what closed groups have; every rank calls this when all have closed theirs; empties the table.

    A group that not all ranks have made, as one was interrupted, or released, is let go as it is.

    Args:
        releases: What :func:`close` has returned.
        exchange: Brings a word of each rank, under a name, to all.
    """
    known = exchange("names", list(releases))
    for name in [name for name in known[0] if all(name in names for names in known)]:
        releases[name](functools.partial(_exchange_in, exchange, name))
        del releases[name]
    releases.clear()


def _delete(keys: WrittenKeys, _exchange: Callable[[str, Any], list[Any]]) -> None:
    keys.delete_all()


def _exchange_in(exchange: Callable[[str, Any], list[Any]], name: str, what: str, word: Any) -> list[Any]:
    return exchange(f"{name}/{what}", word)


def destroy(groups: list[ProcessGroup]) -> None:
    """Destroy these; empties the list. Their connections end with the last references."""
    while groups:
        with contextlib.suppress(RuntimeError, ValueError):  # destroyed by the user meanwhile
            destroy_group(groups.pop())


def end_on_threads_of_python(groups: Iterable[ProcessGroup]) -> None:
    """Let each of ``groups`` end on a thread of Python's; those that are written in Python are left alone."""
    for group in groups:
        if type(group) is ProcessGroup:
            backends = [backend_for(group, torch.device(kind)) for kind in device_types(group)]
            weakref.finalize(group, _let_go, backends).atexit = False


def _let_go(backends: list[Any]) -> None:
    """Drop what is in ``backends``, the last references; by another thread, if this one may belong to one of them."""
    thread = threading.current_thread()
    if thread is threading.main_thread() or thread.name == CLOSING_THREAD:
        backends.clear()
        return
    try:
        threading.Thread(target=backends.clear, name="ppe_ddp-end", daemon=True).start()
    except RuntimeError:  # Python is ending: nothing need end by itself any more
        backends.append(backends)
