"""The store that the ranks share, torch's tables of groups for each rank, and what else of ppe_ddp is per process."""

import contextlib
import weakref
from datetime import timedelta
from unittest import mock

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from ppe_ddp.backends import rank_store
from ppe_ddp.backends.shm import shm_group
from ppe_ddp.engine import groups
from ppe_ddp.engine.reducer import Reducer

from .group import SimulatedWire
from .scheduler import Scheduler, simulated_time


class SimulatedStore(dist.Store):
    """A store that answers every call at once; another rank may come before it."""

    def __init__(self):
        super().__init__()
        self._values = {}

    def _begin(self, what, key):
        scheduler = Scheduler.current
        if scheduler is not None and scheduler.task is not None:
            scheduler.interrupt()
            if what:
                scheduler.note("store", what, key)
                scheduler.change()

    def set(self, key, value):
        self._begin("set", key)
        self._values[key] = bytes(value)

    def add(self, key, amount):
        self._begin("add" if amount else "", key)
        self._values[key] = str(int(self._values.get(key, b"0")) + amount).encode()
        return int(self._values[key])

    def compare_set(self, key, expected, value):
        self._begin("compare_set", key)
        if self._values.get(key, b"") == bytes(expected):
            self._values[key] = bytes(value)
        return self._values.get(key, bytes(expected))

    def get(self, key):
        self.wait([key], timedelta(seconds=300))
        return self._values[key]

    def multi_get(self, keys):
        return [self.get(key) for key in keys]

    def check(self, keys):
        self._begin("", "")
        return all(key in self._values for key in keys)

    def wait(self, keys, timeout=timedelta(seconds=300)):
        self._begin("", "")
        if not Scheduler.current.wait(lambda: all(key in self._values for key in keys), timeout.total_seconds()):
            raise dist.DistStoreError(f"wait timeout for {keys}")

    def deleteKey(self, key):  # noqa: N802  # torch's name
        self._begin("delete", key)
        return self._values.pop(key, None) is not None

    delete_key = deleteKey

    def has_extended_api(self):
        return True


class _World(c10d._World):
    """What torch knows of the groups of one rank."""

    pg_map = pg_names = pg_group_ranks = pg_backend_config = tags_to_pg = pg_to_tag = None
    group_count = 0

    def __init__(self):
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config = {}, {}, {}, {}
        self.tags_to_pg, self.pg_to_tag = {}, {}


def use_world(world):
    """Let torch see the groups of one rank."""
    c10d._world = world


def new_worlds(count):
    """What torch knows of groups, for each of so many ranks: nothing."""
    return [_World() for _ in range(count)]


class _OwnReducers:
    """The reducers of the rank that asks, in an order that the seed decides: a process has them in no order."""

    def __init__(self):
        self._all = []

    def add(self, reducer):
        self._all = [(pid, one) for pid, one in self._all if one() is not None]
        self._all.append((Scheduler.current.pid(), weakref.ref(reducer)))

    def __iter__(self):
        scheduler = Scheduler.current
        own = [one() for pid, one in self._all if pid == scheduler.pid()]
        own = [one for one in own if one is not None]
        scheduler.draw.shuffle(own)
        return iter(own)


class _DirectCaller:
    """Calls the store in the thread that asks."""

    def result(self, function, _seconds):
        return function()


@contextlib.contextmanager
def simulated():
    """While this is entered, ranks that are threads of a scheduler can use ppe_ddp as if each was a process."""
    patches = [
        mock.patch.object(rank_store, "_caller", lambda _pid: _DirectCaller()),
        mock.patch.object(groups, "own_address", lambda: None),
        mock.patch.object(groups, "ended_at_exit", lambda _pid: weakref.WeakSet()),
        mock.patch.object(shm_group, "ended_at_exit", lambda _pid: weakref.WeakSet()),
        mock.patch.object(shm_group, "GlooWire", SimulatedWire.of),
        mock.patch.object(shm_group, "_over_gloo", lambda arguments, keys: (arguments, keys)),
        mock.patch.object(Reducer, "_all", _OwnReducers()),
        mock.patch("ppe_ddp.waiting._SPINS", 1),
        simulated_time(),
        torch.autograd.set_multithreading_enabled(False),
    ]
    world = c10d._world
    with contextlib.ExitStack() as stack:
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        for patch in patches:
            stack.enter_context(patch)
        try:
            yield
        finally:
            torch._C._distributed_c10d._set_thread_isolation_mode(False)
            c10d._world = world
