"""Makes duplicates of a process group, and ends them.

They are made the same on every rank: backends, options, names. The end of a group of gloo waits for gloo's threads. On
those run the callbacks of Futures, which a function or hook may have made with the group at hand; where such a callback
drops the last reference, the thread would wait for itself, and C++ ends the process: "Resource deadlock avoided".

    group (what Python refers to)  ──►  backend (has the threads)  ◄──  held here until the group is gone

A thread of gloo also gives up an operation a moment after it was waited for. If Python is at its end by then, C++ ends
the process: "terminate called without an active exception". So our groups end before (``Groups.end``).
"""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

from ppe_ddp.backends.collective_comparison import compares_collectives
from ppe_ddp.backends.group import PythonGroup
from ppe_ddp.backends.group_internals import (
    address_key_in_group,
    backend_for,
    backends_named,
    default_group,
    destroy_group,
    device_types,
    is_registered,
    new_group_named,
    registered_groups,
    store_of,
    timeout_of,
)
from ppe_ddp.backends.rank_store import WrittenKeys
from ppe_ddp.backends.shm import ShmOptions
from ppe_ddp.backends.shm.gloo_wire import CLOSING_THREAD, close_given_up
from ppe_ddp.errors import DisagreementError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Release = Callable[[Callable[[str, Any], list[Any]]], None]


class User(Protocol):
    """The object that communicates in a wrapper's groups."""

    @property
    def is_running(self) -> bool:
        """Whether a collective may be under way, so that the connections must not be ended."""
        ...

    @property
    def connections(self) -> Sequence[Any]:
        """The groups of the wrapper, which connect again one after another."""
        ...

    def note_failure(self) -> None:
        """This step has failed on this rank, behind its backward, and the others are told."""
        ...


class Life(enum.Enum):
    """What can be done with the groups of a wrapper."""

    BORROWED = enum.auto()
    """They are the user's own, and stay open whatever happens."""
    OPEN = enum.auto()
    """They are duplicates of it, which can be used."""
    CLOSED = enum.auto()
    """A rank has failed: they have to be made anew."""
    UNUSABLE = enum.auto()
    """They cannot be made anew."""
    ENDED = enum.auto()
    """Python ends."""


LIFE_BEFORE: dict[Life, tuple[Life, ...]] = {
    Life.OPEN: (Life.CLOSED,),
    Life.CLOSED: (Life.OPEN,),
    Life.UNUSABLE: (Life.CLOSED,),
    Life.ENDED: tuple(Life),
}
"""From where each is entered."""


def duplicates(
    parent: ProcessGroup,
    backends: dict[str, str],
    name: str,
    *,
    shared_memory: bool,
    before_each: Callable[[str], object] = bool,
) -> tuple[ProcessGroup, ProcessGroup]:
    """Make groups of the ranks of ``parent`` for buckets and for masks, with all of them.

    Args:
        parent: The group.
        backends: Its backends by type of device.
        name: New, and the same on every rank.
        shared_memory: Whether to use shared memory where the parent serves CPU tensors by gloo.
        before_each: Called with the name of each group before it is made: gloo waits there for ranks that do not come.
    """
    if backends.get("cpu") == "gloo" and (shared_memory or compares_collectives()):
        # gloo in C++ compares nothing; shm without shared memory is gloo, and does
        return _over_shm(parent, backends, name, ShmOptions(shared_memory=shared_memory), before_each)
    options = _options(parent) if "cpu" in device_types(parent) else None
    for_buckets = getattr(options, "for_buckets", lambda: options)
    for_control = getattr(options, "for_control", lambda: options)
    # torch would give them to every backend of a mixed group, and no other understands them.
    is_mixed = len(set(backends.values())) > 1
    config = str(dist.get_backend_config(parent))
    buckets = _new_group(
        parent, _config(backends, config), f"buckets/{name}", None if is_mixed else for_buckets(), before_each
    )
    # Only what serves CPUs: a second communicator of NCCL would take memory of the GPU for nothing.
    control = _new_group(parent, backends.get("cpu", "gloo"), f"control/{name}", for_control(), before_each)
    end_on_threads_of_python([buckets, control])
    return buckets, control


def _over_shm(
    parent: ProcessGroup, backends: dict[str, str], name: str, options: ShmOptions, before_each: Callable[[str], object]
) -> tuple[ProcessGroup, ProcessGroup]:
    """The same, with the backend ``shm`` for CPU tensors."""
    others = [f"{kind}:{backend}" for kind, backend in backends.items() if kind != "cpu" and _exists(kind)]
    config = ",".join(["cpu:shm", *others]) if others else "shm"
    buckets = _new_group(parent, config, f"buckets/{name}", None if others else options, before_each)
    return buckets, _new_group(parent, "shm", f"control/{name}", options.for_control(), before_each)


def _exists(kind: str) -> bool:
    """Whether this process may have tensors on such a device: gloo serves more kinds than there are."""
    return bool(torch.get_device_module(kind).is_available())


def _config(backends: dict[str, str], config: str) -> str:
    """The name alone of the backend that serves all devices, where it stands for the same; else ``config``.

    For a config of several entries torch sets no default backend once any backend is registered, save for NCCL and the
    one that was registered first, and warns of that when the group is destroyed.
    """
    name = backends.get("cpu", "")
    return name if name and backends_named(name) == backends else config


def _options(group: ProcessGroup) -> Any:
    """The options of the backend that serves CPUs, if it has them as an attribute."""
    return getattr(backend_for(group, torch.device("cpu")), "pg_options", None)


def _new_group(
    parent: ProcessGroup, config: str, name: str, options: Any, before: Callable[[str], object]
) -> ProcessGroup:
    """A group of the ranks of ``parent``, made by these alone, once ``before`` was called with its name."""
    before(name)
    ranks = dist.get_process_group_ranks(parent)
    return new_group_named(f"{_prefix(parent)}{name}", ranks, timeout_of(parent), config, options)


def _prefix(parent: ProcessGroup) -> str:
    return f"{parent.group_name}/ppe_ddp/"


def registered_duplicates(parent: ProcessGroup, name: str) -> list[ProcessGroup]:
    """Those of this ``name`` that :func:`duplicates` has made before it was interrupted."""
    names = [f"{_prefix(parent)}{kind}/{name}" for kind in ("buckets", "control")]
    return [group for group, _ in registered_groups() if group.group_name in names]


def check_wanted(rank: int, wanted: Sequence[Mapping[str, Any]]) -> None:
    """Raise DisagreementError where not all ranks want the same of their duplicates; ``wanted`` has options by rank."""
    for option in wanted[0]:
        values = [one.get(option) for one in wanted]
        if len(set(values)) > 1:
            each = ", ".join(f"{value} on rank {other}" for other, value in enumerate(values))
            raise DisagreementError(f"rank {rank}: {option} is not the same on all ranks: {each}")


def backends_of(group: ProcessGroup) -> dict[str, str]:
    """The backends of ``group`` by type of device; empty for one that torch.distributed did not make."""
    config = str(dist.get_backend_config(group)) if is_registered(group) else ""
    return dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)


def is_over_gloo(group: ProcessGroup) -> bool:
    """Whether ``group`` communicates over gloo alone."""
    return type(group) is ProcessGroup and all(
        isinstance(backend_for(group, torch.device(kind)), dist.ProcessGroupGloo) for kind in device_types(group)
    )


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

    A group that not all ranks have made, as one was interrupted, or released, is let go as it is. ``exchange`` brings a
    word of each rank, under a name, to all.
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


class GroupHandle:
    """Holds a process group in a module that may be copied or pickled.

    A copy in the same process shares the group. In another process it is found again by its ranks, when it
    is first needed.
    """

    def __init__(self, group: ProcessGroup | None, ranks: list[int] | None = None) -> None:
        self._group = group
        self._ranks = ranks

    def group(self) -> ProcessGroup:
        """The group; the default group if none was named.

        Raises:
            ValueError: This process has no group of these ranks.
        """
        if self._group is not None:
            return self._group
        if self._ranks is not None:
            for group, ranks in registered_groups():
                if ranks == self._ranks:
                    return group
            raise ValueError(
                f"the unpickled wrapper wants a process group of ranks {self._ranks}, and there is none: make it with "
                "torch.distributed.new_group() first"
            )
        return default_group()

    def __deepcopy__(self, memo: dict[int, object]) -> GroupHandle:
        """The handle itself: a group is a connection, not a value."""
        return self

    def __reduce__(self) -> tuple[type[GroupHandle], tuple[None, list[int] | None]]:
        """Only the ranks are pickled, and none for the default group."""
        group = self._group
        if group is None or group is dist.group.WORLD or not is_registered(group):
            return GroupHandle, (None, self._ranks)
        return GroupHandle, (None, dist.get_process_group_ranks(group))
