"""Fixtures: ranks that all test files share, started when the first test needs them."""

import contextlib
import functools
import gc
import os
from collections import Counter, defaultdict
from multiprocessing import forkserver, resource_tracker, spawn
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import settings

from node_worlds import BACKENDS
from ppe_ddp.testing import JobStarter, Nodes, Ranks, nodes, nodes_missing
from rank_tests import make_tensors_on
from subprocesses import warm_executable

# An example that starts ranks takes seconds; in CI the same examples every time, so that a red run is real.
settings.register_profile("ppe_ddp", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("ppe_ddp")

# Where it is set, as in many containers, print() writes each argument and line end by itself, and ranks write between.
os.environ.pop("PYTHONUNBUFFERED", None)
# Else whoever asks torch whether there is a GPU starts CUDA, which does not work in a fork of that process any more.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# torch.optim and torch.utils.checkpoint import torch._dynamo where they are used first, which takes two seconds.
IMPORTED_BY_TESTS = ["torch._dynamo", "torch.distributed.checkpoint", "hypothesis", "pytest"]


# Two runs under mpirun beside each other would spin in each other's way: these are one after another.
UNDER_MPIRUN = [
    "test_mpi_backend",
    "test_sharding",
    "test_mpi_laws",
    "test_nodes",
    "test_nodes_training",
    "test_node_compression",
    "test_doctor",
]
# Ranks that have imported Transformers, Accelerate and scikit-learn, for seconds, serve these in turn.
WITH_TRANSFORMERS = ["test_examples", "test_transformers", "test_accelerate", "test_lightning"]
TOGETHER = {"mpirun": UNDER_MPIRUN, "transformers": WITH_TRANSFORMERS}
# What takes longest comes first, so that all workers are busy to the end.
LONGEST = [
    "test_shm_backend",
    "test_elastic",
    "test_simulation",
    "test_one_rank_fails",
    "test_megatron_failures",
    "test_megatron_parallel",
    "test_conformance",
    "test_ranks",
    "test_compression",
    "test_shared_wrappers",
    "test_bench",
    "test_bad_input",
    "test_laws",
    "test_package",
    "test_checkpointer",
    "test_weighing",
    "test_architecture",
    "test_cupy_nccl",
    "test_faults",
    "test_interrupts",
    "test_tensor_parallel",
    "test_outer_steps",
    "test_megatron",
    "test_megatron_optim",
    "test_compressors",
    "test_lost_ranks",
    "test_graphs_tools",
    "test_memory",
]


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also the tests that take long")
    help = "let two, three and four ranks be on two nodes, started by mpirun over mpi4py or by torchrun over gloo"
    parser.addoption("--ranks-on-nodes", choices=["mpirun", "torchrun"], help=help)
    help = "let two, three and four ranks, over gloo, make their tensors there; tests that name a device fail then"
    parser.addoption("--device", choices=["cpu", "cuda"], help=help)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    """The workers, and all that they start, are forked from one process that has imported torch."""
    for spec in specs:
        spec.python = warm_executable()
    gc.freeze()


def pytest_collection_finish(session):
    gc.freeze()  # what was imported, which each collection of garbage would go through, also pytest's own at the end


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    _mark_many(items)
    if not config.getoption("--long"):
        long = [item for item in items if _is_long(item)]
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)
    first = {name: place for place, name in enumerate([*UNDER_MPIRUN, *WITH_TRANSFORMERS, *LONGEST])}
    items.sort(key=lambda item: first.get(item.path.stem, len(first)))
    missing = {"gpu": functools.partial(str, "" if torch.cuda.is_available() else "needs a CUDA device")}
    missing["nodes"] = functools.cache(functools.partial(nodes_missing, mbit=100))
    for item in items:
        for name, reason in missing.items():
            if item.get_closest_marker(name) and reason():
                item.add_marker(pytest.mark.skip(reason=reason()))


def _mark_many(items):
    """Of options of the wrapper times something else, every second test is long, as on a chessboard.

    Each value is tested, with half of the values of the other parameters. So it is with other tests on ranks that have
    many cases; of one parameter it is every second value. Where there are very many, two of three are long.
    """
    short = [item for item in items if _needs_ranks(item) and not _is_long(item)]
    counts = Counter((item.path, item.originalname) for item in short if item.path.stem not in _ALL_VALUES)
    places = defaultdict(dict)  # by axis: the place of each value on it
    for item in short:
        axes = [_names(mark) for mark in item.iter_markers("parametrize")]
        if (["options"] in axes and len(axes) > 1) or counts[item.path, item.originalname] >= _MANY:
            total = 0
            for names in axes:
                of_axis = places[(item.path, item.originalname, *names)]
                total += of_axis.setdefault(tuple(id(item.callspec.params[name]) for name in names), len(of_axis))
            if total % (3 if counts[item.path, item.originalname] >= _VERY_MANY else 2):
                item.add_marker("long")


_MANY, _VERY_MANY = 4, 12
# What these cost is the start of their ranks, which many tests share.
_ALL_VALUES = {"test_mpi_backend", "test_shm_backend"}


def _names(mark):
    names = mark.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _is_long(item):
    return item.get_closest_marker("long") or any(mark.kwargs.get("long") for mark in item.iter_markers("nodes"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """The workers take file by file; those of a row in TOGETHER are one to them."""
    from xdist.scheduler import LoadFileScheduling

    class InOrder(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return next((name for name, files in TOGETHER.items() if Path(file).stem in files), file)

    config.option.loadscopereorder = False  # by the number of tests, which tells nothing of the time
    return InOrder(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(scope="session", autouse=True)
def _fork_server(request):
    """Ranks are forked from a process that has imported what each of them would import for seconds."""
    if any("Ranks" in vars(item.module) or _needs_ranks(item) for item in request.session.items):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")  # as Ranks does
            resource_tracker.ensure_running()  # which needs nothing imported
            patch.setattr(spawn, "_python_exe", os.fsencode(warm_executable()))
            forkserver.set_forkserver_preload(["ppe_ddp.testing.ranks", *IMPORTED_BY_TESTS])
            forkserver.ensure_running()


def _needs_ranks(item):
    return any(name.endswith("_ranks") for name in item.fixturenames)


@contextlib.contextmanager
def ranks_of(config, *layout):
    """Ranks on this machine; or as many on each node as `layout` says, where the command line asks for it."""
    launcher, device = config.getoption("--ranks-on-nodes"), config.getoption("--device")
    if launcher is None:
        prepare = functools.partial(make_tensors_on, device) if device else None
        with Ranks(sum(layout), timeout=120, prepare=prepare) as ranks:  # groups have 60 s: see failing.SECONDS
            yield ranks
        return
    backend = BACKENDS[launcher]
    with (
        Nodes(len(layout)) as nodes,
        Ranks(sum(layout), backend=backend, starter=JobStarter(nodes, launcher, layout), timeout=120) as ranks,
    ):
        yield ranks


@pytest.fixture(scope="session")
def two_ranks(request):
    """Two processes over gloo; they start anew by themselves after a test that broke them."""
    with ranks_of(request.config, 1, 1) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def three_ranks(request):
    """Three processes over gloo, as `two_ranks`."""
    with ranks_of(request.config, 2, 1) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def four_ranks(request):
    """Four processes over gloo, as `two_ranks`."""
    with ranks_of(request.config, 2, 2) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def _worlds():
    """The worlds of the fixture `world`, with what ends them, by launcher and layout; the oldest first."""
    started = {}
    yield started
    for _, stack in started.values():
        stack.close()


class WarmStarter(JobStarter):
    """Starts ranks, and torchrun's agents, that have imported torch before they come to their nodes."""

    def start(self, stack_files):
        with mock.patch.object(nodes, "sys", SimpleNamespace(executable=warm_executable())):
            yield from super().start(stack_files)


@pytest.fixture(scope="module")
def world(request, _worlds):
    """Ranks that a launcher has started on several nodes; its parameters are `node_worlds.worlds()`.

    Their start takes seconds, so that the last two worlds are kept for the next files.
    """
    if request.param not in _worlds:
        if len(_worlds) == 2:
            _worlds.pop(next(iter(_worlds)))[1].close()
        launcher, layout = request.param
        with contextlib.ExitStack() as stack:
            starter = WarmStarter(stack.enter_context(Nodes(len(layout))), launcher, layout)
            ranks = Ranks(sum(layout), backend=BACKENDS[launcher], starter=starter, timeout=120)
            _worlds[request.param] = stack.enter_context(ranks), stack.pop_all()
    return _worlds[request.param][0]
