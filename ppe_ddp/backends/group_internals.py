"""The parts of torch that this library uses and torch does not promise: process groups, their stores and names.

Nothing else in the package touches them (autograd, hooks and tensors have ``torch_internals.py``). Each is a
function with the reason for it, and each has a trial in ``tests/group_internals_check.py``. What can be told
where it is used raises there: :class:`ppe_ddp.errors.TorchChangedError`.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import distributed as dist

# torch documents them as names of torch.distributed, and type checkers find them only here.
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store  # noqa: TC002  # for others
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch.distributed import Backend, ProcessGroup
from torch.distributed import distributed_c10d as c10d

from ppe_ddp.errors import TorchChangedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from torch.distributed import Work
    from torch.distributed.device_mesh import DeviceMesh

_Kept = TypeVar("_Kept")

# ---------------------------------------------------------------------- what torch knows of its groups


def is_registered(*groups: ProcessGroup) -> bool:
    """Whether torch.distributed has made each of ``groups``, and has not destroyed it since.

    The public functions raise for others, or answer for the default group.
    """
    return c10d._world.pg_map.keys() >= set(groups)


def registered_groups() -> Iterator[tuple[ProcessGroup, list[int]]]:
    """The groups that this process is in, in the order in which they were made, each with the global ranks in it."""
    for group, ranks in c10d._world.pg_group_ranks.items():
        if isinstance(group, ProcessGroup):  # and not the number that stands for groups of others
            yield group, list(ranks)


def default_group() -> ProcessGroup:
    """The group itself, which ``dist.group.WORLD`` is for type checkers only at times; raises where there is none."""
    group: ProcessGroup = c10d._get_default_group()
    return group


def store_of(group: ProcessGroup) -> Store:
    """The store that the ranks of a registered group share, under a prefix of its own."""
    store: Store = c10d._get_process_group_store(group)
    return store


def address_key(rank: int) -> str:
    """Under which gloo writes to its store where a rank can be reached; it leaves it there."""
    return f"0/{rank}"


def address_key_in_group(rank: int) -> str:
    """The same in :func:`store_of` of a registered group over gloo."""
    return f"cpu//{address_key(rank)}"


def destroy_group(group: ProcessGroup) -> None:
    """``dist.destroy_process_group()``, after which torch keeps nothing: it leaves the tag of each group in a table."""
    tag = c10d._world.pg_to_tag.get(group)
    dist.destroy_process_group(group)
    if tag is not None and not c10d._world.tags_to_pg.get(tag):
        c10d._world.tags_to_pg.pop(tag, None)


def kept_with(group: ProcessGroup, make: Callable[[], _Kept]) -> _Kept:
    """The object of this ``make`` that is kept with a registered ``group``; made when it is first asked for.

    It hangs on torch's own object for all that it knows of groups, which can be another one in each thread (torch's
    tests make ranks of threads); and a group itself takes no attributes.
    """
    forget_destroyed()
    kept: dict[tuple[ProcessGroup, Callable[[], _Kept]], _Kept] = c10d._world.__dict__.setdefault("ppe_ddp_kept", {})
    if (group, make) not in kept:
        kept[group, make] = make()
    return kept[group, make]


def count_groups_anew() -> None:
    """Let the next default group have the first name: one that could not be made has taken it, on this rank alone."""
    c10d._world.group_count = 0


def forget_destroyed() -> None:
    """Drop what is kept with groups that were destroyed, whose connections end with the last reference."""
    kept: dict[tuple[ProcessGroup, Callable[[], Any]], Any] = c10d._world.__dict__.get("ppe_ddp_kept", {})
    for other in [other for other in kept if not is_registered(other[0])]:
        del kept[other]


# ---------------------------------------------------------------------- what a group is made of


def device_types(group: ProcessGroup) -> list[str]:
    """The kinds of devices that ``group`` serves: "cpu", "cuda"; also of one that torch.distributed has not made."""
    return [device.type for device in group._device_types]


def backend_for(group: ProcessGroup, device: torch.device) -> Any:
    """The object that does the collectives of ``group`` for tensors on ``device``; raises where it serves none."""
    return group._get_backend(device)


def backends_named(config: str) -> dict[str, str]:
    """The backends by type of device that torch makes of ``config``, such as "gloo" or "cpu:gloo,cuda:nccl"."""
    return dict(c10d.BackendConfig(dist.Backend(config)).get_device_backend_map())


def timeout_of(group: ProcessGroup) -> timedelta | None:
    """After which time collectives of ``group`` fail, which a group made beside it does not inherit by itself.

    None for torch's default, where no backend of the group tells: users' own ones, and those that torch wraps for
    TORCH_DISTRIBUTED_DEBUG=DETAIL.
    """
    for kind in device_types(group):
        options = getattr(backend_for(group, torch.device(kind)), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, timedelta):
            return timeout
    return None


def start_coalescing(group: ProcessGroup, device: torch.device) -> None:
    """Begin calls of ``group`` that belong together, as ``dist.batch_isend_irecv`` does."""
    group._start_coalescing(device)


def end_coalescing(group: ProcessGroup, device: torch.device) -> Work:
    """End the calls that belong together; what comes back stands for all."""
    return group._end_coalescing(device)


def source_of(message: Work) -> int:
    """The rank of its group that has sent a message, which has arrived; torch warns of the public name."""
    return int(message._source_rank())


# ---------------------------------------------------------------------- making groups

NAMING = "_process_group_name"
MAKING = "_new_process_group_helper"


class _Naming:
    """Stands in for torch's function that names groups, while threads of this process make groups by name."""

    lock: ClassVar[threading.Lock] = threading.Lock()  # not held while a group is made: that waits for other ranks

    def __init__(self, torchs: Callable[..., Any]) -> None:
        self.torchs = torchs  # the function of torch
        self.wanted: dict[int, str] = {}  # the names that threads wait to give, by thread
        self.users = 0  # the number of threads that make a group now

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        name = self.wanted.pop(threading.get_ident(), None)
        return self.torchs(*arguments, **keywords) if name is None else name

    @classmethod
    @contextmanager
    def of(cls, name: str) -> Iterator[None]:
        """Name the next group of this thread ``name``; the last thread to leave puts torch's function back."""
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
    """Make a group of exactly these ranks, called by them alone and together, under a name that they have agreed on.

    ``new_group()`` would name it by the number of groups that this process has, which may be another one on each
    rank; and ranks that use different names wait for one another until they time out. No version of torch from 2.9
    on has a parameter for it, so the function that torch asks for a name is replaced while threads make such groups;
    other threads get torch's names. What is below ``new_group()`` takes a name, but has had other parameters
    in almost every version, and leaves it to the caller to enter the group into torch's tables.

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
    """Device types and their backends in the call of torch that makes a group now, on this thread.

    torch makes a group written in Python the whole group, and tells its creator nothing of the other devices.

    Raises:
        TorchChangedError: Nothing is known of such a call.
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
    """The function that is registered with torch to make groups over ``backend`` from (arguments, options), or None.

    torch registers its own in this form since 2.15, when they are first asked for; those that take other arguments
    count as nothing.
    """
    register: Callable[[str], None] | None = getattr(Backend, "_ensure_backend_registered", None)
    if register is not None:
        register(backend)
    plugin = Backend._plugins.get(backend.upper())
    return plugin.creator_fn if plugin is not None and plugin.extended_api else None


def nccl_options(arguments: Any) -> Any:
    """Options of NCCL, as torch sets them; NCCL's watchdog tells by them which ranks of the job hang."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = arguments.timeout
    options.group_name = arguments.group_id
    options.global_ranks_in_group = arguments.global_ranks_in_group
    return options


def process_group_over(made: Any, backend: str, name: str, store: Any) -> ProcessGroup:
    """The ProcessGroup around ``made``, one of torch's own backends, on all devices that it serves.

    ``dist.new_group`` makes one for all ranks of the job or with a name of its own; this is a part of a larger group.
    """
    if creator_of(backend) is None:
        made._set_sequence_number_for_group()  # those that are registered do it when they are made
    kind = Backend.backend_type_map[backend]
    group = ProcessGroup(store, made.rank(), made.size())
    group._set_default_backend(kind)
    for device in Backend.backend_capability[backend]:
        group._register_backend(torch.device(device), kind, made)
    group._set_group_name(name)  # type: ignore[arg-type,unused-ignore]  # a NewType of str in some versions
    return group


# A tag that no message has: what is received is never sent.
UNSENT_TAG = (1 << 31) - 1
_SOON = timedelta(milliseconds=1)


def abort_of_gloo(group: ProcessGroup) -> Callable[[], None]:
    """What ends the connections of ``group`` at once, where it is over gloo: what is under way fails.

    It holds the connections, and not the group, whose end waits for what is under way there. Other ranks may never come
    to that: they may be waiting in the same way. ``abort()`` and ``shutdown()`` do nothing for gloo. Among three ranks
    and more it does not even rest meanwhile: what comes for a collective that has failed here, since one of its peers
    has closed, is never read, and the thread that looks after the connections finds it there again and again.

    But gloo closes all connections of a group when the time of a single call is over.
    """
    receives: list[Any] = []
    for kind in device_types(group):
        backend = backend_for(group, torch.device(kind))
        gloo = getattr(backend, "wrapped_pg", backend)  # torch wraps it for TORCH_DISTRIBUTED_DEBUG=DETAIL
        is_gloo = dist.is_gloo_available() and isinstance(gloo, dist.ProcessGroupGloo)
        for peer in set(range(group.size())) - {group.rank()} if is_gloo else ():
            with suppress(RuntimeError):  # this connection is closed, and others may be open
                receives.append(gloo.recv([torch.empty(1)], peer, UNSENT_TAG))

    def abort() -> None:
        for receive in receives:
            with suppress(RuntimeError):  # the time is over
                receive.wait(_SOON)

    return abort


def connections_awaited(content: bytes) -> tuple[str, int, list[int]] | None:
    """Where gloo waits for connections, and the numbers that they are to say, from what it writes to its store.

    None for anything else that a store may be given. gloo writes the name of the host, then ``sockaddr_storage`` and a
    number, each after its length, and then a number for each rank.
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
    """End gloo's wait, in another thread of this process, for ranks that were to connect to it; the group has failed.

    A rank that dies after it has written where it is, and before it has connected, is waited for by those that it
    was to connect to, for five times the time of the group, in C++. So this connects in its place.

    Args:
        content: What gloo has written to its store on this rank.
    """
    host, port, numbers = connections_awaited(content) or ("", 0, [])
    for number in numbers:
        with suppress(OSError), socket.create_connection((host, port), timeout=1) as connection:
            connection.sendall(struct.pack("=q", number))


def flattened_group(mesh: DeviceMesh) -> ProcessGroup:
    """The group of all ranks of ``mesh``, whatever dimensions it has, made once for each mesh."""
    return mesh._flatten("_".join(mesh.mesh_dim_names or ())).get_group()
