"""What is per process in torch and in ppe_ddp, for each rank of a history: tables of groups, reducers, pages."""

import contextlib
import gc
import sys
import weakref
from collections import defaultdict
from random import Random
from unittest import mock

import torch
from torch.distributed import distributed_c10d as c10d

from ppe_ddp import weighing
from ppe_ddp.backends import group as group_of_ranks
from ppe_ddp.backends import rank_store
from ppe_ddp.backends.shm import shm_group
from ppe_ddp.engine import groups, peer_processes, plan
from ppe_ddp.engine.completion import TOGETHER, Completion, SharedParameters
from ppe_ddp.engine.gradients import Gradients
from ppe_ddp.engine.reducer import Reducer
from ppe_ddp.engine.replicas import BufferWrites
from ppe_ddp.optim import DistributedOptimizer

from .faults import Faults, has_one_node, packing
from .group import Network, SimulatedWaits, SimulatedWire
from .scheduler import Scheduler, simulated_time


class _World(c10d._World):
    """What torch knows of the groups of one rank."""

    pg_map = pg_names = pg_group_ranks = pg_backend_config = tags_to_pg = pg_to_tag = None
    group_count = 0
    apart = TOGETHER  # as ppe_ddp has it, beside those

    def __init__(self):
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config = {}, {}, {}, {}
        self.tags_to_pg, self.pg_to_tag = {}, {}


def use_world(world):
    """Let torch see the groups of one rank, and ppe_ddp its wrappers."""
    if isinstance(c10d._world, _World):
        c10d._world.apart = SharedParameters.apart
    c10d._world, SharedParameters.apart = world, world.apart


def new_worlds(count):
    """What torch knows of groups, for each of so many ranks: nothing."""
    return [_World() for _ in range(count)]


class _Own:
    """The objects of the rank that asks; where a process has them in no order, in one that the seed decides."""

    def __init__(self, *, is_shuffled=True):
        self._is_shuffled = is_shuffled
        self._of = defaultdict(list)  # by process, of which no two histories have the same

    def __setitem__(self, _identity, one):
        self.add(one)

    def add(self, one):
        own = self._of[Scheduler.current.pid()]
        if not any(other() is one for other in own):
            own.append(weakref.ref(one))

    def pop(self, identity, _default):
        own = self._of[Scheduler.current.pid()]
        own[:] = [one for one in own if id(one()) != identity]

    def valuerefs(self):
        scheduler = Scheduler.current
        own = [one for one in self._of[scheduler.pid()] if one() is not None]
        if self._is_shuffled:
            scheduler.draw.shuffle(own)
        return own

    def __iter__(self):
        return iter([one() for one in self.valuerefs()])

    def __len__(self):
        return sum(one() is not None for one in self._of[Scheduler.current.pid()])


class _OwnTables:
    """What the rank that asks knows of its buffers, by group."""

    def __init__(self):
        self._of = defaultdict(weakref.WeakKeyDictionary)  # by process

    def __get__(self, one, owner):
        return self._of[Scheduler.current.pid()]


class Pages:
    """The pages of memory in which the ranks of a node see one another.

    Args:
        nodes: By rank, the name of its node; empty where this rank's system has no such memory.
    """

    current = None

    def __init__(self, nodes):
        self._nodes = nodes
        self.memory = {}
        self.pages = {}

    def node(self):
        """The name of the node of the rank that asks."""
        return self._nodes[Scheduler.current.task.rank].encode()

    def new(self, nbytes):
        """Memory for the page of the rank that asks, by its process."""
        if not self.node():
            raise OSError("this system has no memfd_create")
        memory = self.memory[Scheduler.current.pid()] = bytearray(nbytes)
        return 0, memory


def _page(pid):
    pages = Pages.current.pages
    if pid not in pages:
        pages[pid] = peer_processes._Page()
    return pages[pid]


def _condition(address):
    scheduler = Scheduler.current
    is_dead = address.pid in map(scheduler.pid_of, scheduler.dead)
    return peer_processes.Condition.ENDED if is_dead else peer_processes.Condition.RUNNING


class _DirectCaller:
    """Calls the store in the thread that asks."""

    def result(self, function, _seconds):
        return function()


def _ended_by_nobody(_pid):
    return weakref.WeakSet()


@contextlib.contextmanager
def simulated():
    """While this is entered, ranks that are threads of a scheduler can use ppe_ddp as if each was a process."""
    patches = [
        mock.patch.object(rank_store, "_caller", _DirectCaller),
        mock.patch.multiple(
            peer_processes,
            _page=_page,
            _condition=_condition,
            _state_and_start=lambda _pid: ("R", 0),
            _pid_namespace=str,
            node_name=lambda: Pages.current.node(),
            new_memory_file=lambda nbytes: Pages.current.new(nbytes),
            path_of=lambda pid, _descriptor: pid,
            open_memory_file=lambda pid, _nbytes, _token, *, is_writable: Pages.current.memory[pid],
        ),
        mock.patch.object(groups, "ended_at_exit", _ended_by_nobody),
        mock.patch.object(shm_group, "ended_at_exit", _ended_by_nobody),
        mock.patch.object(shm_group, "GlooWire", SimulatedWire.of),
        mock.patch.object(group_of_ranks, "Waits", SimulatedWaits),
        mock.patch.object(shm_group, "_over_gloo", lambda arguments, keys, _=None: (arguments, keys)),
        mock.patch.object(Reducer, "_all", _Own()),
        mock.patch.object(Completion, "_open", _Own()),
        mock.patch.object(SharedParameters, "apart", TOGETHER),
        mock.patch.object(SharedParameters, "_all", _Own(is_shuffled=False)),
        mock.patch.object(SharedParameters, "_with_places", _Own(is_shuffled=False)),
        mock.patch.object(Gradients, "_all", _Own(is_shuffled=False)),
        mock.patch.object(DistributedOptimizer, "_everyone", _Own()),
        mock.patch.object(BufferWrites, "_tables", _OwnTables()),
        mock.patch.object(weighing.Weights, "_all", _Own(is_shuffled=False)),
        mock.patch.object(weighing._Weigh, "alive", _Own(is_shuffled=False)),
        mock.patch("ppe_ddp.waiting._SPINS", 1),
        mock.patch.object(sys, "excepthook", sys.excepthook),  # torch wraps it for each group
        packing(),
        simulated_time(),
        torch.autograd.set_multithreading_enabled(False),
    ]
    world = c10d._world
    usual = sys.unraisablehook

    def hook(unraisable):
        if Scheduler.current is not None and not Scheduler.current.is_over:
            usual(unraisable)  # else it is of what a dead rank has left

    patches.append(mock.patch.object(sys, "unraisablehook", hook))
    with contextlib.ExitStack() as stack:
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        for patch in patches:
            stack.enter_context(patch)
        try:
            yield
        finally:
            gc.collect()  # generators that were abandoned end here: where Python ends, no thread starts for the store
            torch._C._distributed_c10d._set_thread_isolation_mode(False)
            c10d._world = world


def run_ranks(program, scheduler, faults, train):
    """Run one history to its end: ``train(rank)`` is what each rank does."""
    is_mute = Random(f"mute {program.seed}").random() < 0.3
    # As over MPI: its ranks see the processes of their node, and of one node they all are.
    is_blind = not is_mute and has_one_node(program) and Random(f"blind {program.seed}").random() < 0.7
    Network.current, Faults.current = Network(scheduler.draw.random() < 0.3, is_mute, is_blind), faults
    Pages.current = Pages(program.nodes)
    scheduler.at_death = Network.current.die
    # From which size an arrival looks for buckets to launch: each, each weight, or none, as nothing here is large.
    trigger = Random(f"trigger {program.seed}").choice([1, 20, plan._TRIGGER_BYTES])
    weighing.Weights.were_used = False
    with mock.patch.object(plan, "_TRIGGER_BYTES", trigger):
        scheduler.run([lambda rank=rank: train(rank) for rank in range(len(faults.steps))])
