"""Trials of ``group_internals.py``: whether this torch behaves as the library needs it where torch promises nothing."""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed import Backend, ProcessGroup
from torch.distributed import distributed_c10d as c10d

from ppe_ddp.backends.group_internals import (
    MAKING,
    NAMING,
    HashStore,
    PrefixStore,
    abort_of_gloo,
    address_key,
    address_key_in_group,
    backend_for,
    backends_being_made,
    backends_named,
    connections_awaited,
    count_groups_anew,
    creator_of,
    default_group,
    destroy_group,
    device_types,
    end_coalescing,
    end_wait_for_connections,
    flattened_group,
    is_registered,
    kept_with,
    nccl_options,
    new_group_named,
    process_group_over,
    registered_groups,
    source_of,
    start_coalescing,
    store_of,
    timeout_of,
)
from torch_internals_check import problems_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["check"]


def check() -> Iterator[str]:
    """Try each use on one-rank groups over gloo; takes milliseconds, and leaves this process's groups alone.

    Not while another thread uses torch.distributed: it would see the groups of the trial.

    Yields:
        What does not behave as this library needs it, a line each, by the name of the function above; none if all is
        well.
    """
    return problems_of((function, partial(_in_job_of_one, trial)) for function, trial in _TRIALS)


def _in_job_of_one(trial: Callable[[ProcessGroup], bool]) -> bool:
    with _job_of_one() as group:
        return trial(group)


_SECONDS = timedelta(seconds=17)


class _Tables(SimpleNamespace):
    """torch's tables of its groups, replaced by empty ones; which tables there are depends on the version."""

    def __getattr__(self, name: str) -> dict[Any, Any]:
        table = self.__dict__[name] = {}
        return table


@contextmanager
def _job_of_one() -> Iterator[ProcessGroup]:
    """Let torch.distributed look as in a job of one process; the default group of that comes back."""
    kept = c10d._world
    world: Any = _Tables(comms=[], group_count=1)
    store = HashStore()
    group = process_group_over(
        dist.ProcessGroupGloo(store, 0, 1, timeout=_SECONDS), "gloo", "ppe_ddp/trial", PrefixStore("trial", store)
    )
    world.default_pg = group
    world.pg_map[group] = "gloo", store
    world.pg_names[group] = "ppe_ddp/trial"
    world.pg_group_ranks[group] = {0: 0}
    world.pg_backend_config[group] = "cpu:gloo"
    c10d.__dict__["_world"] = world
    _register_process_group(group.group_name, group)
    try:
        yield group
    finally:
        _unregister_process_group(group.group_name)
        for made in [made for made in world.pg_map if made is not group]:
            dist.destroy_process_group(made)
        c10d.__dict__["_world"] = kept


def _is_registered(group: ProcessGroup) -> bool:
    made = new_group_named("ppe_ddp/trial/made", [0], _SECONDS, "gloo", None)
    found = [is_registered(group), is_registered(made), is_registered(ProcessGroup(HashStore(), 0, 1))]
    dist.destroy_process_group(made)
    return [*found, is_registered(made)] == [True, True, False, False]


def _registered_groups(group: ProcessGroup) -> bool:
    made = new_group_named("ppe_ddp/trial/made", [0], _SECONDS, "gloo", None)
    return list(registered_groups()) == [(group, [0]), (made, [0])]


def _default_group(group: ProcessGroup) -> bool:
    return default_group() is group


def _store_of(_group: ProcessGroup) -> bool:
    first, second = (new_group_named(f"ppe_ddp/trial/{k}", [0], _SECONDS, "gloo", None) for k in "ab")
    store_of(first).set("key", "value")
    return bool(store_of(first).check(["key"]) and not store_of(second).check(["key"]))


def _address_key(_group: ProcessGroup) -> bool:
    store = HashStore()
    dist.ProcessGroupGloo(store, 0, 1, timeout=_SECONDS)
    return store.check([address_key(0)])


def _address_key_in_group(_group: ProcessGroup) -> bool:
    made = new_group_named("ppe_ddp/trial/made", [0], _SECONDS, "gloo", None)
    return bool(store_of(made).check([address_key_in_group(0)]))


def _destroy_group(_group: ProcessGroup) -> bool:
    before = list(c10d._world.tags_to_pg)
    made = new_group_named("ppe_ddp/trial/made", [0], _SECONDS, "gloo", None)
    destroy_group(made)
    return list(c10d._world.tags_to_pg) in (before, ["", *before]) and not is_registered(made)


def _count_groups_anew(_group: ProcessGroup) -> bool:
    names = []
    for _ in range(2):
        count_groups_anew()
        names.append(c10d._process_group_name([], use_hashed_name=False))
    return names == ["0", "0"]


def _kept_with(group: ProcessGroup) -> bool:
    made = new_group_named("ppe_ddp/trial/made", [0], _SECONDS, "gloo", None)
    kept = [kept_with(one, object) for one in (group, made)]
    if [kept_with(one, object) for one in (group, made)] != kept or kept[0] is kept[1]:
        return False
    dist.destroy_process_group(made)
    kept_with(group, object)
    return bool(made not in c10d._world.__dict__["ppe_ddp_kept"])


def _device_types(_group: ProcessGroup) -> bool:
    made = new_group_named("ppe_ddp/trial/made", [0], _SECONDS, "gloo", None)
    return "cpu" in device_types(made)


def _backend_for(group: ProcessGroup) -> bool:
    tensor = torch.ones(2)
    backend_for(group, tensor.device).allreduce([tensor]).wait()
    return bool(backend_for(group, tensor.device).size() == 1)


def _backends_named(_group: ProcessGroup) -> bool:
    return backends_named("cpu:gloo,cuda:nccl") == {"cpu": "gloo", "cuda": "nccl"} and "cpu" in backends_named("gloo")


def _timeout_of(group: ProcessGroup) -> bool:
    made = new_group_named("ppe_ddp/trial/made", [0], 2 * _SECONDS, "gloo", None)
    bare = ProcessGroup(HashStore(), 0, 1)
    return [timeout_of(one) for one in (group, made, bare)] == [_SECONDS, 2 * _SECONDS, None]


def _coalescing(group: ProcessGroup) -> bool:
    refused = []
    for call in (start_coalescing, end_coalescing):
        try:
            call(group, torch.device("cpu"))
        except RuntimeError as error:  # gloo cannot do it
            refused.append("oalescing" in str(error))
    return refused == [True, True]


def _source_of(_group: ProcessGroup) -> bool:  # a process cannot send to itself
    message: Any = SimpleNamespace(_source_rank=lambda: 3)
    return source_of(message) == 3 and callable(dist.Work._source_rank)


def _new_group_named(_group: ProcessGroup) -> bool:
    torchs = c10d.__dict__[NAMING]
    made = new_group_named("ppe_ddp/trial/made", [0], _SECONDS, "gloo", None)
    value = torch.ones(())
    dist.all_reduce(value, group=made)
    return made.group_name == "ppe_ddp/trial/made" and c10d.__dict__[NAMING] is torchs


def _backends_being_made(_group: ProcessGroup) -> bool:
    # Only a backend that was registered, for good, would see torch's own call: this one has its name and variables.
    variables = c10d.__dict__[MAKING].__code__.co_varnames

    def call(backend_config: Any) -> dict[str, str]:
        return backends_being_made()

    call.__code__ = call.__code__.replace(co_name=MAKING)
    seen = call(c10d.BackendConfig(Backend("cpu:gloo,cuda:nccl")))
    return {"backend_config", "creator_fn"} <= set(variables) and seen == {"cpu": "gloo", "cuda": "nccl"}


def _creator_of(_group: ProcessGroup) -> bool:
    return callable(creator_of("mpi4py")) and creator_of("ppe_ddp_trial") is None


def _nccl_options(_group: ProcessGroup) -> bool:
    if not dist.is_nccl_available():
        return True
    wanted = SimpleNamespace(timeout=_SECONDS, group_id="trial", global_ranks_in_group=[0])
    options = nccl_options(wanted)
    return bool(options._timeout == _SECONDS and options.group_name == "trial")


def _process_group_over(group: ProcessGroup) -> bool:
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    return (group.rank(), group.size(), group.group_name) == (0, 1, "ppe_ddp/trial")


def _abort_of_gloo(_group: ProcessGroup) -> bool:
    store = HashStore()
    made: list[Any] = []

    def make(rank: int) -> None:
        ends = dist.ProcessGroupGloo(store, rank, 2, timeout=_SECONDS)
        made.append(process_group_over(ends, "gloo", "ppe_ddp/trial/pair", store))

    other = threading.Thread(target=make, args=(1,))
    other.start()
    make(0)
    other.join()
    first, second = sorted(made, key=ProcessGroup.rank)
    under_way = [first.allreduce([torch.ones(2)]), second.recv([torch.ones(2)], 0, 0)]
    abort_of_gloo(first)()
    return all(_has_failed(work) for work in under_way)


def _end_wait_for_connections(_group: ProcessGroup) -> bool:
    store = HashStore()

    def make() -> None:
        with suppress(RuntimeError):
            made.append(dist.ProcessGroupGloo(store, 0, 2, timeout=_SECONDS))

    made: list[Any] = []
    one = threading.Thread(target=make, daemon=True)
    one.start()
    store.wait([address_key(0)], _SECONDS)
    content = store.get(address_key(0))
    _, port, numbers = connections_awaited(content) or ("", 0, [])
    # The one at the higher port connects; this other rank never does.
    store.set(address_key(1), content.replace(port.to_bytes(2, "big"), b"\xff\xff", 1))
    end_wait_for_connections(content)
    one.join(_SECONDS.total_seconds())
    return len(numbers) == 2 and not one.is_alive() and connections_awaited(b"17") is None


def _has_failed(work: dist.Work) -> bool:
    try:
        work.wait()
    except RuntimeError as error:
        return "Timed out" not in str(error)
    return False


def _flattened_group(_group: ProcessGroup) -> bool:
    from torch.distributed.device_mesh import DeviceMesh

    made = flattened_group(DeviceMesh("cpu", [[0]], mesh_dim_names=("outer", "inner")))
    return (made.rank(), made.size()) == (0, 1) and is_registered(made)


_TRIALS: tuple[tuple[Callable[..., Any], Callable[[ProcessGroup], bool]], ...] = (
    (is_registered, _is_registered),
    (registered_groups, _registered_groups),
    (default_group, _default_group),
    (store_of, _store_of),
    (address_key, _address_key),
    (address_key_in_group, _address_key_in_group),
    (destroy_group, _destroy_group),
    (count_groups_anew, _count_groups_anew),
    (kept_with, _kept_with),
    (device_types, _device_types),
    (backend_for, _backend_for),
    (backends_named, _backends_named),
    (timeout_of, _timeout_of),
    (start_coalescing, _coalescing),
    (source_of, _source_of),
    (new_group_named, _new_group_named),
    (backends_being_made, _backends_being_made),
    (creator_of, _creator_of),
    (nccl_options, _nccl_options),
    (process_group_over, _process_group_over),
    (abort_of_gloo, _abort_of_gloo),
    (connections_awaited, _end_wait_for_connections),
    (end_wait_for_connections, _end_wait_for_connections),
    (flattened_group, _flattened_group),
)
