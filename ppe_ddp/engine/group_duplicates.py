"""Makes duplicates of a process group: which backends and options they have, and what they are called.

Apart from ``groups.py``, which owns how long they live, because here is what has to be the same on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from ppe_ddp.backends.collective_comparison import compares_collectives
from ppe_ddp.backends.group_internals import (
    backend_for,
    backends_named,
    device_types,
    is_registered,
    new_group_named,
    registered_groups,
    timeout_of,
)
from ppe_ddp.backends.shm import ShmOptions
from ppe_ddp.engine.group_lifetime import end_on_threads_of_python
from ppe_ddp.errors import DisagreementError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import ProcessGroup


def duplicates(
    parent: ProcessGroup, backends: dict[str, str], name: str, *, shared_memory: bool
) -> tuple[ProcessGroup, ProcessGroup]:
    """Make groups of the ranks of ``parent`` for buckets and for masks, with all of them.

    Args:
        parent: The group.
        backends: Its backends by type of device.
        name: New, and the same on every rank.
        shared_memory: Whether to use shared memory where the parent serves CPU tensors by gloo.
    """
    if backends.get("cpu") == "gloo" and (shared_memory or compares_collectives()):
        # gloo in C++ compares nothing; shm without shared memory is gloo, and does
        return _over_shm(parent, backends, name, ShmOptions(shared_memory=shared_memory))
    options = _options(parent) if "cpu" in device_types(parent) else None
    for_buckets = getattr(options, "for_buckets", lambda: options)
    for_control = getattr(options, "for_control", lambda: options)
    # torch would give them to every backend of a mixed group, and no other understands them.
    is_mixed = len(set(backends.values())) > 1
    config = str(dist.get_backend_config(parent))
    buckets = _new_group(parent, _config(backends, config), f"buckets/{name}", None if is_mixed else for_buckets())
    # Only what serves CPUs: a second communicator of NCCL would take memory of the GPU for nothing.
    control = _new_group(parent, backends.get("cpu", "gloo"), f"control/{name}", for_control())
    end_on_threads_of_python([buckets, control])
    return buckets, control


def _over_shm(
    parent: ProcessGroup, backends: dict[str, str], name: str, options: ShmOptions
) -> tuple[ProcessGroup, ProcessGroup]:
    """The same, with the backend ``shm`` for CPU tensors."""
    others = [f"{kind}:{backend}" for kind, backend in backends.items() if kind != "cpu" and _exists(kind)]
    config = ",".join(["cpu:shm", *others]) if others else "shm"
    buckets = _new_group(parent, config, f"buckets/{name}", None if others else options)
    return buckets, _new_group(parent, "shm", f"control/{name}", options.for_control())


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


def _new_group(parent: ProcessGroup, config: str, name: str, options: Any) -> ProcessGroup:
    """A group of the ranks of ``parent``, made by these alone."""
    ranks = dist.get_process_group_ranks(parent)
    return new_group_named(f"{_prefix(parent)}{name}", ranks, timeout_of(parent), config, options)


def _prefix(parent: ProcessGroup) -> str:
    return f"{parent.group_name}/ppe_ddp/"


def registered_duplicates(parent: ProcessGroup, name: str) -> list[ProcessGroup]:
    """Those of this ``name`` that :func:`duplicates` has made before it was interrupted."""
    names = [f"{_prefix(parent)}{kind}/{name}" for kind in ("buckets", "control")]
    return [group for group, _ in registered_groups() if group.group_name in names]


def check_wanted(rank: int, wanted: Sequence[Mapping[str, Any]]) -> None:
    """See that all ranks want the same of their duplicates.

    Args:
        rank: This one.
        wanted: By rank, what each wants, by option.

    Raises:
        DisagreementError: They do not.
    """
    for option in wanted[0]:
        values = [one[option] for one in wanted]
        if len(set(values)) > 1:
            each = ", ".join(f"{value} on rank {other}" for other, value in enumerate(values))
            raise DisagreementError(f"rank {rank}: {option} is not the same on all ranks: {each}")


def backends_of(group: ProcessGroup) -> dict[str, str]:
    """The backends of ``group`` by type of device; empty for one that torch.distributed did not make."""
    config = str(dist.get_backend_config(group)) if is_registered(group) else ""
    return dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
