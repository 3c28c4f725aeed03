"""Makes duplicates of a process group, and ends them.

Duplicates have the same backends, options and names on every rank.

The destructor of a gloo group joins gloo's threads. These threads also run the callbacks of Futures, and a callback of
a function or hook may hold the last reference to the group. The thread would then join itself, and C++ ends the
process: "Resource deadlock avoided". So this module holds the backend until the group object is gone:

    group (what Python refers to)  ──►  backend (has the threads)  ◄──  held here until the group is gone

A gloo thread also drops an operation only a moment after its wait has returned. If Python has ended by then, C++ ends
the process: "terminate called without an active exception". So duplicates end before Python does (``Groups.end``).
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import ProcessGroup

from ppe_ddp.backends.collective_comparison import compares_collectives
from ppe_ddp.backends.device_routed_group import DeviceRoutedGroup
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

Share = Callable[[str, Any], list[Any]]
Release = Callable[[Share], None]


class Life(enum.Enum):
    """The life cycle of a wrapper's groups."""

    BORROWED = enum.auto()
    """They are the user's group itself, which is never closed."""
    OPEN = enum.auto()
    """They are duplicates, and can be used."""
    CLOSED = enum.auto()
    """A rank has failed, so they have to be made anew."""
    UNUSABLE = enum.auto()
    """They cannot be made anew."""
    ENDED = enum.auto()
    """Python is ending."""


LIFE_BEFORE: dict[Life, tuple[Life, ...]] = {
    Life.OPEN: (Life.CLOSED,),
    Life.CLOSED: (Life.OPEN,),
    Life.UNUSABLE: (Life.CLOSED,),
    Life.ENDED: tuple(Life),
}
"""The states from which each state may be entered."""


def duplicates(
    parent: ProcessGroup,
    backends: dict[str, str],
    name: str,
    *,
    shared_memory: bool,
    share: Share | None = None,
    devices: Mapping[str, torch.device] | None = None,
) -> tuple[ProcessGroup, ProcessGroup]:
    """Make two groups of the ranks of ``parent``, one for buckets and one for masks. Collective.

    Args:
        parent: The group.
        backends: Its backends by device type.
        name: New, and the same on every rank.
        shared_memory: Whether to use shared memory if the parent serves CPU tensors by gloo.
        share: Exchanges words with all ranks; called before each group is made, as gloo would block.
        devices: This rank's devices of :func:`devices_used`, which are connected with those of the other ranks.
    """
    before = bool if share is None else lambda name: share(f"makes/{name}", "")
    buckets, control = _made(parent, backends, name, shared_memory=shared_memory, before=before)
    if share is not None and isinstance(buckets, DeviceRoutedGroup):
        _connect_devices(buckets, devices or {}, share)
    return buckets, control


def _made(
    parent: ProcessGroup, backends: dict[str, str], name: str, *, shared_memory: bool, before: Callable[[str], object]
) -> tuple[ProcessGroup, ProcessGroup]:
    if backends.get("cpu") == "gloo" and (shared_memory or compares_collectives()):
        # gloo in C++ does not compare collectives; the backend shm does, and without shared memory it sends by gloo.
        return _over_shm(parent, backends, name, ShmOptions(shared_memory=shared_memory), before)
    options = _options(parent) if "cpu" in device_types(parent) else None
    for_buckets = getattr(options, "for_buckets", lambda: options)
    for_control = getattr(options, "for_control", lambda: options)
    # torch would pass these options to every backend of a mixed group, and the other backends reject them.
    is_mixed = len(set(backends.values())) > 1
    config = str(dist.get_backend_config(parent))
    buckets = _new_group(
        parent, _config(backends, config), f"buckets/{name}", None if is_mixed else for_buckets(), before
    )
    # Masks are CPU tensors: a second NCCL communicator would only take GPU memory.
    control = _new_group(parent, backends.get("cpu", "gloo"), f"control/{name}", for_control(), before)
    end_on_threads_of_python([buckets, control])
    return buckets, control


def _over_shm(
    parent: ProcessGroup, backends: dict[str, str], name: str, options: ShmOptions, before: Callable[[str], object]
) -> tuple[ProcessGroup, ProcessGroup]:
    """Make the duplicates with the backend ``shm`` for CPU tensors."""
    # gloo also lists types of which this process has no devices.
    exists = {kind: kind != "cpu" and torch.get_device_module(kind).is_available() for kind in backends}
    others = [f"{kind}:{backend}" for kind, backend in backends.items() if exists[kind]]
    config = ",".join(["cpu:shm", *others]) if others else "shm"
    buckets = _new_group(parent, config, f"buckets/{name}", None if others else options, before)
    return buckets, _new_group(parent, "shm", f"control/{name}", options.for_control(), before)


def _config(backends: dict[str, str], config: str) -> str:
    """The backend's name alone, if it stands for the same backends as ``config``; else ``config``.

    Once a backend was registered, torch sets no default backend for a config of several entries, except for NCCL and
    the backend that was registered first. It then warns when the group is destroyed.
    """
    name = backends.get("cpu", "")
    return name if name and backends_named(name) == backends else config


def _options(group: ProcessGroup) -> Any:
    """The ``pg_options`` of the backend that serves CPUs, or None."""
    return getattr(backend_for(group, torch.device("cpu")), "pg_options", None)


def devices_used(group: ProcessGroup) -> dict[str, torch.device]:
    """By device type, the device on which this rank has used ``group``; of types that connect at their first call."""
    return group.devices_used() if isinstance(group, DeviceRoutedGroup) else {}


def _connect_devices(group: DeviceRoutedGroup, devices: Mapping[str, torch.device], share: Share) -> None:
    """Connect ``group`` on the device types that some rank has used before.

    NCCL connects in its first call, which would wait for ranks that wait for this one in another group.
    """
    for kind in sorted(set().union(*share("devices", list(devices)))):
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=devices.get(kind, torch.device(kind))), group=group)


def _new_group(
    parent: ProcessGroup, config: str, name: str, options: Any, before: Callable[[str], object]
) -> ProcessGroup:
    """Call ``before`` with the name, and make a group of the ranks of ``parent``, which only these ranks do."""
    before(name)
    ranks = dist.get_process_group_ranks(parent)
    return new_group_named(f"{_prefix(parent)}{name}", ranks, timeout_of(parent), config, options)


def _prefix(parent: ProcessGroup) -> str:
    return f"{parent.group_name}/ppe_ddp/"


def registered_duplicates(parent: ProcessGroup, name: str) -> list[ProcessGroup]:
    """The groups of this ``name`` that :func:`duplicates` had made when it was interrupted."""
    names = [f"{_prefix(parent)}{kind}/{name}" for kind in ("buckets", "control")]
    return [group for group, _ in registered_groups() if group.group_name in names]


def check_wanted(rank: int, wanted: Sequence[Mapping[str, Any]]) -> None:
    """Raise DisagreementError unless all ranks want the same duplicates; ``wanted`` has the options of each rank."""
    for option in wanted[0]:
        values = [one.get(option) for one in wanted]
        if len(set(values)) > 1:
            each = ", ".join(f"{value} on rank {other}" for other, value in enumerate(values))
            raise DisagreementError(f"rank {rank}: {option} is not the same on all ranks: {each}")


def backends_of(group: ProcessGroup) -> dict[str, str]:
    """The backends of ``group`` by device type; empty for a group that torch.distributed did not make."""
    config = str(dist.get_backend_config(group)) if is_registered(group) else ""
    return dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)


def devices_on_host(group: ProcessGroup) -> set[str]:
    """The device types for whose collectives the host waits: "cpu", and all that a backend without streams serves."""
    return {"cpu", *(kind for kind, backend in backends_of(group).items() if backend in ("gloo", "mpi"))}


def is_over_gloo(group: ProcessGroup) -> bool:
    """Whether ``group`` communicates over gloo alone."""
    return type(group) is ProcessGroup and all(
        isinstance(backend_for(group, torch.device(kind)), dist.ProcessGroupGloo) for kind in device_types(group)
    )


def close(groups: list[ProcessGroup]) -> dict[str, Release]:
    """Close the connections of ``groups``, so that ranks that wait in them leave with an error; empties the list.

    torch unregisters the groups before this returns. It derives the names of new groups from the number of registered
    ones, so that number must be the same on all ranks.

    Returns:
        By the name of each group a function that frees its resources, such as MPI communicators. All ranks have to call
        it together, when all have closed the group.
    """
    releases: dict[str, Release] = {}
    for group in groups:
        if type(group) is not ProcessGroup:  # a group written in Python tells the other ranks
            group.abort()
        if isinstance(group, PythonGroup):
            releases[group.group_name] = group.release
        elif is_registered(group) and "cpu" in device_types(group):  # not destroyed by the user, and not NCCL alone
            keys = WrittenKeys(store_of(group))
            keys.note(address_key_in_group(group.rank()))
            releases[group.group_name] = functools.partial(_delete, keys)
        del group
    routed = (group.take_out(is_over_gloo) for group in groups if isinstance(group, DeviceRoutedGroup))
    ending = [*groups, *itertools.chain.from_iterable(routed)]
    destroy(groups)
    close_given_up(ending)
    return releases


def release_all(releases: dict[str, Release], exchange: Share) -> None:
    """Free the resources of closed groups; empties the table. All ranks call this together, once all have closed them.

    A group that some rank did not make (it was interrupted), or has released already, is dropped without that.
    ``exchange(name, word)`` returns the words of all ranks.
    """
    known = exchange("names", list(releases))
    for name in [name for name in known[0] if all(name in names for names in known)]:
        releases[name](functools.partial(_exchange_in, exchange, name))
        del releases[name]
    releases.clear()


def _delete(keys: WrittenKeys, _exchange: Share) -> None:
    keys.delete_all()


def _exchange_in(exchange: Share, name: str, what: str, word: Any) -> list[Any]:
    return exchange(f"{name}/{what}", word)


def destroy(groups: list[ProcessGroup]) -> None:
    """Destroy ``groups``; empties the list. The connections end with the last references."""
    while groups:
        with contextlib.suppress(RuntimeError, ValueError):  # destroyed by the user meanwhile
            destroy_group(groups.pop())


def end_on_threads_of_python(groups: Iterable[ProcessGroup]) -> None:
    """Let each of ``groups`` end on a Python thread; groups that are written in Python are left alone."""
    for group in groups:
        if type(group) is ProcessGroup:
            backends = [backend_for(group, torch.device(kind)) for kind in device_types(group)]
            weakref.finalize(group, _let_go, backends).atexit = False


def _let_go(backends: list[Any]) -> None:
    """Drop the last references to ``backends``; in another thread, if this one may be a thread of such a backend."""
    thread = threading.current_thread()
    if thread is threading.main_thread() or thread.name == CLOSING_THREAD:
        backends.clear()
        return
    try:
        threading.Thread(target=backends.clear, name="ppe_ddp-end", daemon=True).start()
    except RuntimeError:  # Python is ending and starts no thread
        backends.append(backends)  # a reference cycle keeps the backends alive until the process ends


class GroupHandle:
    """Holds a process group in a module that may be copied or pickled.

    A copy in the same process shares the group. A copy that is unpickled elsewhere finds the group by its ranks when it
    is first needed.
    """

    def __init__(self, group: ProcessGroup | None, ranks: list[int] | None = None) -> None:
        self._group = group
        self._ranks = ranks

    def group(self) -> ProcessGroup:
        """Return the group; the default group if none was named.

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

    @property
    def ranks(self) -> list[int] | None:
        """The ranks of the group; None for the default group."""
        group = self._group
        if group is None or group is dist.group.WORLD or not is_registered(group):
            return self._ranks
        return dist.get_process_group_ranks(group)

    def __deepcopy__(self, memo: dict[int, object]) -> GroupHandle:
        """The handle itself: a group is a connection, not a value."""
        return self

    def __reduce__(self) -> tuple[type[GroupHandle], tuple[None, list[int] | None]]:
        """Only the ranks are pickled, and none for the default group."""
        return GroupHandle, (None, self.ranks)
