"""Process group that routes each collective to an inner group, by the device of its tensors.

For ``"cpu:gloo,cuda:cupy_nccl"`` torch takes a group written in Python as the *whole* group: it drops the backends that
it has made for other devices, and makes no further ones. So this group holds an inner group for each device type.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from torch import device
from torch import distributed as dist
from torch.distributed import ProcessGroup, Work

from ppe_ddp.backends.group import PythonGroup
from ppe_ddp.backends.group_internals import (
    PrefixStore,
    address_key,
    backend_for,
    creator_of,
    end_coalescing,
    nccl_options,
    process_group_over,
    start_coalescing,
)
from ppe_ddp.backends.rank_store import WrittenKeys, connecting
from ppe_ddp.errors import CommunicationError
from ppe_ddp.nested_tensors import tensors_in
from ppe_ddp.torch_internals import uncompiled_hook

_Own = TypeVar("_Own", bound=PythonGroup)
_ABORT_SECONDS = 2.0
_PAUSE_SECONDS = 1.0


def _routed(name: str) -> Any:
    def call(self: DeviceRoutedGroup, *arguments: Any, **keywords: Any) -> Any:
        group = self._group_for(arguments or tuple(keywords.values()), name)
        return getattr(group, name)(*arguments, **keywords)

    call.__name__ = name
    call.__doc__ = f"Do ``{name}`` in the group for the device of the tensors."
    return uncompiled_hook(call)


class DeviceRoutedGroup(PythonGroup):
    """A group for tensors on several devices; all ranks use the same device types in the same order.

    Args:
        device_types: Such as "cuda". The group for the first one also serves barriers that name no device.
        made: By device type, the inner groups that exist from the beginning, on every rank.
        makers: By other device types, the function that makes the group; called when the first tensor of this type
            comes, which may be on some ranks only.
        keys: The keys of inner groups in the store, which are deleted after a failure.
    """

    def __init__(
        self,
        arguments: Any,
        backend_name: str,
        device_types: Iterable[str],
        *,
        made: Mapping[str, ProcessGroup],
        makers: Mapping[str, Callable[[], Any]],
        keys: WrittenKeys,
    ) -> None:
        super().__init__(arguments, backend_name, device_types)
        self._makers = makers
        self._made: dict[str, Any] = dict(made)
        self._keys = keys
        self._devices: dict[str, device] = {}
        self._is_aborted = False
        _GROUPS.add(self)

    def devices_used(self) -> dict[str, device]:
        """By device type, the device of the first tensor; of types whose group connects at its first call."""
        return {kind: one for kind, one in self._devices.items() if kind in self._makers}

    def take_out(self, is_wanted: Callable[[Any], bool]) -> list[Any]:
        """Give up the inner groups that are wanted, and return them: they end with the last reference."""
        kinds = [kind for kind, group in self._made.items() if is_wanted(group)]
        return [*dict.fromkeys(map(self._made.pop, kinds))]  # one may serve several types

    def barrier(self, opts: Any = None, timeout: Any = None) -> Work:  # type: ignore[override]
        """A barrier in the group for the device that ``opts`` names."""
        named = getattr(opts, "device", None)
        kind = named.type if named is not None and named.type in self._types else self._types[0]
        work: Work = self._group(kind).barrier(opts)
        return work

    def _start_coalescing(self, device: device) -> None:
        start_coalescing(self._group(device.type), device)

    def _end_coalescing(self, device: device) -> Work:
        return end_coalescing(self._group(device.type), device)

    def _get_backend(self, device: device) -> Any:
        return backend_for(self._group(device.type), device)

    def shutdown(self) -> None:
        for kind, group in self._made.items():
            if not self._is_aborted or kind not in self._makers:
                group.shutdown()

    def abort(self) -> None:
        """Abort the inner groups, without communication; those of devices in a thread.

        NCCL frees memory as it aborts, which waits for all calls on the device, and lets other threads wait that use
        the device. Calls in other groups may never end until these are aborted, too. So if there are others, it begins
        a moment later, when these may have heard of the failure. If there are none, the host waits for it: a call of
        the user's that comes meanwhile may wait for a rank that waits for this one.
        """
        self._is_aborted = True
        is_alone = not any(one.devices_used() for one in _GROUPS if one is not self and not one._is_aborted)
        for kind, group in self._made.items():
            if kind not in self._makers:
                group.abort()
                continue
            timer = threading.Timer(0.0 if is_alone else _PAUSE_SECONDS, _abort, (group,))
            timer.daemon = True
            timer.start()
            if is_alone:
                timer.join(_ABORT_SECONDS)

    def release(self, exchange: Callable[[str, Any], list[Any]]) -> None:
        """Free the resources of the inner groups, and delete this rank's keys; see :class:`PythonGroup`."""
        for group in self._made.values():  # those that exist on some ranks only exchange nothing
            if isinstance(group, PythonGroup):
                group.release(exchange)
        self._keys.delete_all()

    def _group_for(self, arguments: tuple[Any, ...], name: str) -> Any:
        tensor = next(tensors_in(arguments), None)
        if tensor is None:
            raise ValueError(f"rank {self.rank()}: {name} of no tensors")
        kind = tensor.device.type
        group = self._group(kind)
        self._devices.setdefault(kind, tensor.device)
        return group

    def _group(self, kind: str) -> Any:
        if kind not in self._made:
            if self._is_aborted:
                raise CommunicationError(f"rank {self.rank()}: the group {self._group_name!r} was given up")
            if kind not in self._makers:
                known = ", ".join(self._types)
                raise TypeError(f"rank {self.rank()}: the group {self._group_name!r} is for {known}, not for {kind}")
            self._made[kind] = self._makers[kind]()
        return self._made[kind]


_GROUPS: weakref.WeakSet[DeviceRoutedGroup] = weakref.WeakSet()
"""All of this process."""


def _abort(group: Any) -> None:
    with suppress(Exception):  # the group's own timeout is over
        group.abort()


_ROUTED = (  # the last five are names of earlier versions of torch
    "allreduce allreduce_coalesced reduce broadcast allgather allgather_coalesced all_gather_single "
    "all_gather_single_coalesced reduce_scatter reduce_scatter_single reduce_scatter_single_coalesced "
    "all_to_all_single alltoall gather scatter send recv recv_anysource _allgather_base "
    "allgather_into_tensor_coalesced _reduce_scatter_base reduce_scatter_tensor_coalesced alltoall_base"
)
for _name in _ROUTED.split():
    setattr(DeviceRoutedGroup, _name, _routed(_name))


def beside_other_backends(own: _Own, backends: Mapping[str, str], arguments: Any) -> _Own | DeviceRoutedGroup:
    """Return ``own``, or if ``backends`` names others, a group that routes to it and to groups over those."""
    name = own.getBackendName()
    if set(backends.values()) <= {name}:
        return own
    existing: dict[str, ProcessGroup] = {name: own}
    keys = WrittenKeys(arguments.store)
    if "gloo" in backends.values():
        existing["gloo"] = gloo_beside(arguments, keys)
    made = {kind: existing[backend] for kind, backend in backends.items() if backend in existing}
    makers = {kind: partial(group_over, backend, arguments) for kind, backend in backends.items() if kind not in made}
    return DeviceRoutedGroup(arguments, name, backends, made=made, makers=makers, keys=keys)


def gloo_beside(arguments: Any, keys: WrittenKeys) -> ProcessGroup:
    """Make a group over gloo at once: it connects all ranks, and the first call may be one of some ranks."""
    keys.under("beside/gloo").note(address_key(arguments.group_rank))
    with connecting(arguments.store, arguments.timeout.total_seconds()) as store:
        group = group_over("gloo", copied_arguments(arguments, store))
    weakref.finalize(group, bool, store).atexit = False  # C++ does not keep a store written in Python alive
    return group


def copied_arguments(arguments: Any, store: Any) -> Any:
    """Copy torch's ``_DistributedBackendOptions``, with another store."""
    own = type(arguments)()
    for name in ("group_rank", "group_size", "timeout", "group_id", "global_ranks_in_group"):
        setattr(own, name, getattr(arguments, name))
    own.store = store
    return own


def group_over(backend: str, arguments: Any) -> ProcessGroup:
    """Make a group over another backend for the same ranks. Collective; ValueError if there is no such backend."""
    rank, size = arguments.group_rank, arguments.group_size
    store = PrefixStore(f"beside/{backend}", arguments.store)
    creator = creator_of(backend)
    made: Any
    if creator is not None:  # since torch 2.15 also for torch's own backends
        made = creator(copied_arguments(arguments, store), None)
        if isinstance(made, ProcessGroup):
            return made
    elif backend == "gloo":
        made = dist.ProcessGroupGloo(store, rank, size, timeout=arguments.timeout)
    elif backend == "nccl" and dist.is_nccl_available():
        made = dist.ProcessGroupNCCL(store, rank, size, nccl_options(arguments))
    else:
        raise ValueError(f"rank {rank}: no {backend!r} group can be made here beside a group written in Python")
    return process_group_over(made, backend, arguments.group_id, store)
