"""Trials of ``group_internals.py``: whether this torch behaves as the library needs it where torch promises nothing."""

import importlib
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed import Backend, ProcessGroup
from torch.distributed import distributed_c10d as c10d

from torch_internals_check import problems_of, trials_in

internals = importlib.import_module("ppe_ddp.backends.group_internals")  # which renamed_names.py may have replaced


def check():
    """Try each use on one-rank groups over gloo; takes milliseconds, and leaves this process's groups alone.

    Not while another thread uses torch.distributed: it would see the groups of the trial.
    """
    return problems_of({name: partial(_in_job_of_one, trial) for name, trial in trials_in(globals()).items()})


def _in_job_of_one(trial):
    with _job_of_one() as group:
        return trial(group)


_SECONDS = timedelta(seconds=17)


class _Tables(SimpleNamespace):
    """torch's tables of its groups, replaced by empty ones; which tables there are depends on the version."""

    def __getattr__(self, name):
        table = self.__dict__[name] = {}
        return table


@contextmanager
def _job_of_one():
    """Let torch.distributed look as in a job of one process; the default group of that comes back."""
    kept = c10d._world
    world = _Tables(comms=[], group_count=1)
    store = dist.HashStore()
    group = internals.process_group_over(
        dist.ProcessGroupGloo(store, 0, 1, timeout=_SECONDS),
        "gloo",
        "ppe_ddp/trial",
        dist.PrefixStore("trial", store),
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


def _new_group(name="made", timeout=_SECONDS):
    return internals.new_group_named(f"ppe_ddp/trial/{name}", [0], timeout, "gloo", None)


def try_is_registered(group):
    made = _new_group()
    found = [
        internals.is_registered(group),
        internals.is_registered(made),
        internals.is_registered(ProcessGroup(dist.HashStore(), 0, 1)),
    ]
    dist.destroy_process_group(made)
    return [*found, internals.is_registered(made)] == [True, True, False, False]


def try_registered_groups(group):
    made = _new_group()
    return list(internals.registered_groups()) == [(group, [0]), (made, [0])]


def try_default_group(group):
    return internals.default_group() is group


def try_store_of(_group):
    first, second = (_new_group(k) for k in "ab")
    internals.store_of(first).set("key", "value")
    return internals.store_of(first).check(["key"]) and not internals.store_of(second).check(["key"])


def try_address_key(_group):
    store = dist.HashStore()
    dist.ProcessGroupGloo(store, 0, 1, timeout=_SECONDS)
    return store.check([internals.address_key(0)])


def try_address_key_in_group(_group):
    made = _new_group()
    return internals.store_of(made).check([internals.address_key_in_group(0)])


def try_destroy_group(_group):
    before = list(c10d._world.tags_to_pg)
    made = _new_group()
    internals.destroy_group(made)
    return list(c10d._world.tags_to_pg) in (before, ["", *before]) and not internals.is_registered(made)


def try_count_groups_anew(_group):
    names = []
    for _ in range(2):
        internals.count_groups_anew()
        names.append(c10d._process_group_name([], use_hashed_name=False))
    return names == ["0", "0"]


def try_kept_with(group):
    made = _new_group()
    kept = [internals.kept_with(one, object) for one in (group, made)]
    if [internals.kept_with(one, object) for one in (group, made)] != kept or kept[0] is kept[1]:
        return False
    dist.destroy_process_group(made)
    internals.kept_with(group, object)
    return made not in c10d._world.__dict__["ppe_ddp_kept"]


def try_device_types(_group):
    made = _new_group()
    return "cpu" in internals.device_types(made)


def try_backend_for(group):
    tensor = torch.ones(2)
    internals.backend_for(group, tensor.device).allreduce([tensor]).wait()
    return internals.backend_for(group, tensor.device).size() == 1


def try_backends_named(_group):
    return internals.backends_named("cpu:gloo,cuda:nccl") == {
        "cpu": "gloo",
        "cuda": "nccl",
    } and "cpu" in internals.backends_named("gloo")


def try_timeout_of(group):
    made = _new_group(timeout=2 * _SECONDS)
    bare = ProcessGroup(dist.HashStore(), 0, 1)
    return [internals.timeout_of(one) for one in (group, made, bare)] == [_SECONDS, 2 * _SECONDS, None]


def try_start_coalescing(group):
    refused = []
    for call in (internals.start_coalescing, internals.end_coalescing):
        try:
            call(group, torch.device("cpu"))
        except RuntimeError as error:  # gloo cannot do it
            refused.append("oalescing" in str(error))
    return refused == [True, True]


def try_source_of(_group):  # a process cannot send to itself
    message = SimpleNamespace(_source_rank=lambda: 3)
    return internals.source_of(message) == 3 and callable(dist.Work._source_rank)


def try_new_group_named(_group):
    torchs = c10d.__dict__[internals.NAMING]
    made = _new_group()
    value = torch.ones(())
    dist.all_reduce(value, group=made)
    return made.group_name == "ppe_ddp/trial/made" and c10d.__dict__[internals.NAMING] is torchs


def try_backends_being_made(_group):
    # Only a backend that was registered, for good, would see torch's own call: this one has its name and variables.
    variables = c10d.__dict__[internals.MAKING].__code__.co_varnames

    def call(backend_config):
        return internals.backends_being_made()

    call.__code__ = call.__code__.replace(co_name=internals.MAKING)
    seen = call(c10d.BackendConfig(Backend("cpu:gloo,cuda:nccl")))
    return {"backend_config", "creator_fn"} <= set(variables) and seen == {"cpu": "gloo", "cuda": "nccl"}


def try_creator_of(_group):
    return callable(internals.creator_of("mpi4py")) and internals.creator_of("ppe_ddp_trial") is None


def try_nccl_options(_group):
    if not dist.is_nccl_available():
        return True
    wanted = SimpleNamespace(timeout=_SECONDS, group_id="trial", global_ranks_in_group=[0])
    options = internals.nccl_options(wanted)
    return options._timeout == _SECONDS and options.group_name == "trial"


def try_process_group_over(group):
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    return (group.rank(), group.size(), group.group_name) == (0, 1, "ppe_ddp/trial")


def try_abort_of_gloo(_group):
    store = dist.HashStore()
    made = []

    def make(rank):
        ends = dist.ProcessGroupGloo(store, rank, 2, timeout=_SECONDS)
        made.append(internals.process_group_over(ends, "gloo", "ppe_ddp/trial/pair", store))

    other = threading.Thread(target=make, args=(1,))
    other.start()
    make(0)
    other.join()
    first, second = sorted(made, key=ProcessGroup.rank)
    under_way = [first.allreduce([torch.ones(2)]), second.recv([torch.ones(2)], 0, 0)]
    internals.abort_of_gloo(first)()
    return all(_has_failed(work) for work in under_way)


def try_connections_awaited(_group):
    store = dist.HashStore()

    def make():
        with suppress(RuntimeError):
            made.append(dist.ProcessGroupGloo(store, 0, 2, timeout=_SECONDS))

    made = []
    one = threading.Thread(target=make, daemon=True)
    one.start()
    store.wait([internals.address_key(0)], _SECONDS)
    content = store.get(internals.address_key(0))
    _, port, numbers = internals.connections_awaited(content) or ("", 0, [])
    # The one at the higher port connects; this other rank never does.
    store.set(internals.address_key(1), content.replace(port.to_bytes(2, "big"), b"\xff\xff", 1))
    internals.end_wait_for_connections(content)
    one.join(_SECONDS.total_seconds())
    return len(numbers) == 2 and not one.is_alive() and internals.connections_awaited(b"17") is None


def _has_failed(work):
    try:
        work.wait()
    except RuntimeError as error:
        return "Timed out" not in str(error)
    return False


def try_flattened_group(_group):
    from torch.distributed.device_mesh import DeviceMesh

    made = internals.flattened_group(DeviceMesh("cpu", [[0]], mesh_dim_names=("outer", "inner")))
    return (made.rank(), made.size()) == (0, 1) and internals.is_registered(made)
