"""The private parts of torch that this library uses for process groups, their stores and names.

No other file of the package uses them (those of autograd, hooks and tensors are in ``torch_internals.py``). Each has a
trial in ``tests/group_internals_check.py``.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType
from typing import Any, ClassVar, TypeVar

import torch
from torch import distributed as dist

# torch documents these as names of torch.distributed, but type checkers find them only here.
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store  # imported by other files
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.distributed import Backend, ProcessGroup, Work
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from ppe_ddp.errors import TorchChangedError

_Kept = TypeVar("_Kept")

# ---------------------------------------------------------------------- torch's tables of groups


def is_registered(*groups: ProcessGroup) -> bool:
    """Whether torch.distributed has made each of ``groups``, and has not destroyed it since.

    torch's public functions raise for other groups, or answer for the default group.
    """
    return c10d._world.pg_map.keys() >= set(groups)


def registered_groups() -> Iterator[tuple[ProcessGroup, list[int]]]:
    """The groups that this process belongs to, in the order in which they were made, with the global ranks of each."""
    for group, ranks in c10d._world.pg_group_ranks.items():
        if isinstance(group, ProcessGroup):  # a number stands for a group that this process does not belong to
            yield group, list(ranks)


def default_group() -> ProcessGroup:
    """The default group; raises if there is none. ``dist.group.WORLD`` has an optional type."""
    return c10d._get_default_group()


def store_of(group: ProcessGroup) -> Store:
    """The store that the ranks of a registered group share, under a prefix of its own."""
    return c10d._get_process_group_store(group)


def address_key(rank: int) -> str:
    """The key under which gloo writes a rank's address to its store; gloo never deletes it."""
    return f"0/{rank}"


def address_key_in_group(rank: int) -> str:
    """The same key in :func:`store_of` of a registered group over gloo."""
    return f"cpu//{address_key(rank)}"


def destroy_group(group: ProcessGroup) -> None:
    """``dist.destroy_process_group()``, and remove the group's tag, which torch leaves in a table."""
    tag = c10d._world.pg_to_tag.get(group)
    dist.destroy_process_group(group)
    if tag is not None and not c10d._world.tags_to_pg.get(tag):
        c10d._world.tags_to_pg.pop(tag, None)


def kept_with(group: ProcessGroup, make: Callable[[], _Kept]) -> _Kept:
    """The object that ``make`` has made for a registered ``group``; made at the first call.

    A group takes no attributes, so torch's world object has it, which may differ between threads, as in torch's tests.
    """
    forget_destroyed()
    kept: dict[tuple[ProcessGroup, Callable[[], _Kept]], _Kept] = c10d._world.__dict__.setdefault("ppe_ddp_kept", {})
    if (group, make) not in kept:
        kept[group, make] = make()
    return kept[group, make]


def count_groups_anew() -> None:
    """Restart torch's count of groups, from which it names them: a group that failed on this rank alone has counted."""
    c10d._world.group_count = 0


def forget_destroyed() -> None:
    """Drop the objects of :func:`kept_with` of destroyed groups, whose connections end with the last reference."""
    kept: dict[tuple[ProcessGroup, Callable[[], Any]], Any] = c10d._world.__dict__.get("ppe_ddp_kept", {})
    for other in [other for other in kept if not is_registered(other[0])]:
        del kept[other]


# ---------------------------------------------------------------------- the parts of a group


def device_types(group: ProcessGroup) -> list[str]:
    """The device types that ``group`` serves ("cpu", "cuda"); also for a group that torch.distributed did not make."""
    return [device.type for device in group._device_types]


def backend_for(group: ProcessGroup, device: torch.device) -> Any:
    """The backend object of ``group`` for tensors on ``device``; raises if it has none."""
    return group._get_backend(device)


def nodes_of(group: ProcessGroup) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, if ``group`` spans several; none if all share memory. In torch's backends each is one."""
    backend = node_backend(group, torch.device("cpu"))
    if backend is None:
        return tuple((rank,) for rank in range(dist.get_world_size(group)))
    return backend.nodes


def node_backend(group: ProcessGroup, device: torch.device) -> Any | None:
    """The backend of ``group`` for ``device``, if it knows nodes and has ``sum_of_node``; else None."""
    backend = backend_for(group, device) if device.type in device_types(group) else None
    return backend if hasattr(backend, "sum_of_node") else None


def backends_named(config: str) -> dict[str, str]:
    """The backends by device type for ``config``, such as "gloo" or "cpu:gloo,cuda:nccl"."""
    return dict(c10d.BackendConfig(dist.Backend(config)).get_device_backend_map())


def timeout_of(group: ProcessGroup) -> timedelta | None:
    """The timeout of ``group``; None if no backend tells it: a user's own, or one that torch wraps for debugging."""
    for kind in device_types(group):
        options = getattr(backend_for(group, torch.device(kind)), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def start_coalescing(group: ProcessGroup, device: torch.device) -> None:
    """Begin to coalesce calls of ``group``, as ``dist.batch_isend_irecv`` does."""
    group._start_coalescing(device)


def end_coalescing(group: ProcessGroup, device: torch.device) -> Work:
    """End the coalesced calls; returns one Work for all."""
    return group._end_coalescing(device)


def source_of(message: Work) -> int:
    """The rank, in its group, of the sender of a message that has arrived; torch's public name for it warns."""
    return int(message._source_rank())


# ---------------------------------------------------------------------- making groups

NAMING = "_process_group_name"
MAKING = "_new_process_group_helper"


class _Naming:
    """Replaces torch's function that names groups, while threads of this process make groups with given names."""

    lock: ClassVar[threading.Lock] = threading.Lock()  # not held while a group is made, which waits for other ranks

    def __init__(self, torchs: Callable[..., Any]) -> None:
        self.torchs = torchs  # torch's function
        self.wanted: dict[int, str] = {}  # by thread, the name of the group that it makes
        self.users = 0  # the number of threads that make a group now

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        name = self.wanted.pop(threading.get_ident(), None)
        return self.torchs(*arguments, **keywords) if name is None else name

    @classmethod
    @contextmanager
    def of(cls, name: str) -> Iterator[None]:
        """Name the next group of this thread ``name``; the last thread to leave restores torch's function."""
        names = c10d.__dict__
        with cls.lock:
            naming = names[NAMING]
            if not isinstance(naming, cls):
                naming = names[NAMING] = cls(naming)
            naming.users += 1
            naming.wanted[threading.get_ident()] = name
        try:
            yield
        finally:
            with cls.lock:
                naming.wanted.pop(threading.get_ident(), None)
                naming.users -= 1
                if not naming.users:
                    names[NAMING] = naming.torchs


def new_group_named(
    name: str, ranks: list[int], timeout: timedelta | None, config: str | None, options: Any
) -> ProcessGroup:
    """Make a group of exactly these ranks under a name that they have agreed on; only these ranks call it, together.

    ``new_group()`` would derive the name from the number of groups of this process, which may differ between ranks, and
    ranks with different names wait for one another. The private function below it takes a name, but its parameters
    change in almost every version, and it does not enter the group into torch's tables.

    Raises:
        TorchChangedError: The group has another name; it is destroyed again.
    """
    with _Naming.of(name):
        group: ProcessGroup = dist.new_group(ranks, timeout, config, pg_options=options, use_local_synchronization=True)
    if group.group_name != name:
        found = group.group_name
        dist.destroy_process_group(group)
        raise TorchChangedError(
            f"new_group_named: torch {torch.__version__} has named a group {found!r}, where {name!r} was asked for: it "
            f"does not ask torch.distributed.distributed_c10d.{NAMING}() any more"
        )
    return group


def backends_being_made() -> dict[str, str]:
    """The backends by device type of the group that torch is making on this thread, read from torch's stack frame.

    torch does not tell its creator the other devices. TorchChangedError if there is no such frame or variable.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != MAKING:
        frame = frame.f_back
    backends = getattr(None if frame is None else frame.f_locals.get("backend_config"), "device_backend_map", None)
    if not backends:
        what = "is not being called" if frame is None else "has no 'backend_config' with a 'device_backend_map'"
        raise TorchChangedError(
            "backends_being_made: which backends the group is to have for other devices cannot be seen: "
            f"torch.distributed.distributed_c10d.{MAKING}() {what} in torch {torch.__version__}. Groups over "
            "backends written in Python are made by init_process_group() and new_group() only"
        )
    return dict(backends)


def creator_of(backend: str) -> Callable[[Any, Any], Any] | None:
    """The function registered with torch that makes groups over ``backend`` from (arguments, options), or None.

    Since 2.15 torch registers its own backends in this form, when they are first used.
    """
    register: Callable[[str], None] | None = getattr(Backend, "_ensure_backend_registered", None)
    if register is not None:
        register(backend)
    plugin = Backend._plugins.get(backend.upper())
    return plugin.creator_fn if plugin is not None and plugin.extended_api else None


def nccl_options(arguments: Any) -> Any:
    """Options of NCCL, as torch sets them; NCCL's watchdog uses them to name the ranks that hang."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = arguments.timeout
    options.group_name = arguments.group_id
    options.global_ranks_in_group = arguments.global_ranks_in_group
    return options


def process_group_over(made: Any, backend: str, name: str, store: Any) -> ProcessGroup:
    """Make a ProcessGroup around ``made``, one of torch's own backends, as a part of a registered group of the name."""
    if creator_of(backend) is None:
        made._set_sequence_number_for_group()  # registered creators call this themselves
    kind = Backend.backend_type_map[backend]
    group = ProcessGroup(store, made.rank(), made.size())
    group._set_default_backend(kind)
    for device in Backend.backend_capability[backend]:
        group._register_backend(torch.device(device), kind, made)
    group._set_group_name(name)  # type: ignore[arg-type,unused-ignore]  # a NewType of str in some versions
    return group


# A tag that no message has, so that a receive with it never completes.
UNSENT_TAG = (1 << 31) - 1
_SOON = timedelta(milliseconds=1)


def abort_of_gloo(group: ProcessGroup) -> Callable[[], None]:
    """Return a function that closes the connections of ``group`` at once if it is over gloo: operations in flight fail.

    gloo's ``abort()`` and ``shutdown()`` do nothing. Destroying a group waits for its operations in flight, which may
    never end, as other ranks may wait in the same way, or gloo's thread may poll data for ever that is never read.

    But gloo closes all connections of a group when one call times out. So the function lets receives, which were begun
    before, time out. It holds the connections, not the group.
    """
    receives: list[Any] = []
    for kind in device_types(group):
        backend = backend_for(group, torch.device(kind))
        gloo = getattr(backend, "wrapped_pg", backend)  # torch wraps it for TORCH_DISTRIBUTED_DEBUG=DETAIL
        is_gloo = dist.is_gloo_available() and isinstance(gloo, dist.ProcessGroupGloo)
        for peer in set(range(group.size())) - {group.rank()} if is_gloo else ():
            with suppress(RuntimeError):  # this connection may be closed while others are open
                receives.append(gloo.recv([torch.empty(1, dtype=torch.uint8, device="cpu")], peer, UNSENT_TAG))

    def abort() -> None:
        for receive in receives:
            with suppress(RuntimeError):  # the timeout is expected
                receive.wait(_SOON)

    return abort


def connections_awaited(content: bytes) -> tuple[str, int, list[int]] | None:
    """Decode the address that gloo writes to its store: host, port, and the number with which each rank identifies.

    None for any other value. gloo writes the host name, then ``sockaddr_storage`` and a number, each after its length,
    and then a number for each rank.
    """
    with suppress(struct.error, OverflowError):
        (host,) = struct.unpack_from("=Q", content)
        nbytes, family, port, address = struct.unpack_from("=QH2s20s", content, 8 + host)
        numbers = content[16 + host + nbytes :]
        if nbytes == _ADDRESS_BYTES and len(numbers) % 8 == 0 and family in (socket.AF_INET, socket.AF_INET6):
            at = address[:4] if family == socket.AF_INET else address[4:]
            found = [number for (number,) in struct.iter_unpack("=q", numbers)]
            return socket.inet_ntop(family, at), int.from_bytes(port, "big"), found
    return None


_ADDRESS_BYTES = 136


def end_wait_for_connections(content: bytes) -> None:
    """End gloo's wait for connections, in another thread of this process, after the group has failed.

    gloo waits in C++, for five times the group's timeout, for a rank that dies before it has connected. So this
    connects in its place, by the ``content`` that gloo has written to its store on this rank.
    """
    host, port, numbers = connections_awaited(content) or ("", 0, [])
    for number in numbers:
        with suppress(OSError), socket.create_connection((host, port), timeout=1) as connection:
            connection.sendall(struct.pack("=q", number))


def flattened_group(mesh: DeviceMesh) -> ProcessGroup:
    """The group of all ranks of ``mesh``, with any number of dimensions; made once for each mesh."""
    return mesh._flatten("_".join(mesh.mesh_dim_names or ())).get_group()
