"""Training on several nodes, under each launcher: the laws, the conformance kit, and all that is built on groups.

Every world is started once; `make test` has the smallest ones and a few scenarios, `make test-nodes` everything.
"""

import itertools
import json
import socket
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import mpi_check_torch
import mpi_megatron
import ppe_ddp
import sharding_checks
import test_checkpointer as checkpoints
import test_optim as optim
import test_optim_checkpoints as loading
from law_scenarios import every_variant, scenario
from laws import breaches, observe_all
from library_warnings import without_warnings
from mpi_check_kit import CHECKS, DTYPES, assert_same, data, expected, names_for
from node_worlds import BACKENDS, in_own_world, long_on_nodes, some, worlds
from one_process import in_place_mean
from optim_programs import Program
from optim_runners import hold
from ppe_ddp.testing import (
    Nodes,
    World,
    check_backend,
    check_broadcast_function,
    check_comm_hook,
    check_reduce_function,
)
from ppe_ddp.tracing.rank_record import record
from random_training import differences, train
from subprocesses import needs_mpirun

HERE = Path(__file__).parent
SCENARIOS = 20
pytestmark = pytest.mark.nodes
LAYOUTS = [(1, 1), (2, 1), (2, 2)]


on_all = pytest.mark.parametrize("world", worlds(*LAYOUTS), indirect=True)
on_four = pytest.mark.parametrize("world", worlds((2, 2)), indirect=True)
over_mpi = pytest.mark.parametrize("world", worlds(*LAYOUTS, launchers=["mpirun"]), indirect=True)


# ---------------------------------------------------------------- the laws


def observed(seed, options):
    """What this rank sees of a scenario, in a group with these options."""
    case, plugs = scenario(seed)
    group = group_with(options) if options is not None else None
    with without_warnings():
        seen = observe_all(case, every_variant()[seed % 6 :: 6], plugs, group=group)
    for observation in seen:
        observation.gradients = {}
    dist.barrier()
    dist.destroy_process_group()
    return seen


def assert_laws(world, seed, options=None):
    for seen in zip(*world.run(observed, seed, options), strict=True):
        assert breaches(seen) == [], seen[0].title


@on_all
@pytest.mark.parametrize("seed", some(range(SCENARIOS), few=(13,)))
def test_the_laws_hold(world, seed):
    assert_laws(world, seed)


@pytest.mark.parametrize("world", worlds((2, 1), (2, 2)), indirect=True)
@pytest.mark.parametrize("seed", some(range(5), few=(4,)))
def test_the_laws_hold_where_all_that_can_goes_through_two_levels(world, seed):
    assert_laws(world, seed, {"shared_bytes": 16, "two_level_bytes": 16, "shared_piece_bytes": 4096})


@pytest.mark.parametrize("world", worlds((2, 1), (2, 2)), indirect=True)
def test_sums_of_every_kind_go_through_two_levels(world):
    for same in zip(*world.run(sums), strict=True):
        assert len(set(same)) == 1


class Branches(torch.nn.Module):
    """One of several layers, that which is asked for; each of half a mebibyte."""

    def __init__(self, count):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(512, 256, bias=False) for _ in range(count))

    def forward(self, x, index):
        return self.layers[index](x)


def sent_bytes():
    """What this node has sent to the others so far."""
    (line,) = [line for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in line]
    return int(line.split(":")[1].split()[8])


def steps_with_own_branches(count):
    """Each rank trains a branch of its own; the averages as bytes, and what its node has sent in each step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    wrapper = ppe_ddp.DistributedDataParallel(Branches(size))
    sent, found = [], []
    for step in range(count):
        wrapper.zero_grad()
        dist.barrier()
        before = sent_bytes()
        dist.barrier()
        wrapper(torch.full((1, 512), rank + step + 1.0), rank).sum().backward()
        dist.barrier()
        sent.append(sent_bytes() - before)
        gradients = [layer.weight.grad for layer in wrapper.module.layers]
        for other, gradient in enumerate(gradients):
            torch.testing.assert_close(gradient, torch.full((256, 512), (other + step + 1) / size))
        found.append(b"".join(gradient.numpy().tobytes() for gradient in gradients))
        dist.barrier()
    return sent, found


@pytest.mark.parametrize("world", worlds(*LAYOUTS), indirect=True)
def test_what_one_node_has_alone_is_sent_by_it_and_by_no_other(world):
    """Half the bytes of a sum over the nodes, in which each sends as much as all of them have."""
    layer, names = 4 * 256 * 512, world.run(socket.gethostname)
    seen = world.run(steps_with_own_branches, 4)
    assert len({tuple(found) for _, found in seen}) == 1
    for name, (sent, _) in zip(names, seen, strict=True):
        own = names.count(name) * layer
        assert min(sent) > own
        assert sorted(sent)[1] < 1.25 * own + layer // 4  # and what TCP and masks take


def ends_by_itself():
    """Whether a sum ends while this thread calls no backend."""
    total = torch.ones(1 << 18)
    group = dist.new_group()
    work = group.allreduce([total])
    end = time.monotonic() + 20
    while not work.done() and time.monotonic() < end:
        time.sleep(0.001)
    is_over = work.done()
    work.wait()
    assert set(total.tolist()) == {dist.get_world_size()}
    return is_over


@pytest.mark.parametrize("world", worlds(*LAYOUTS, launchers=["mpirun"]), indirect=True)
def test_messages_move_while_no_backend_is_called(world):
    assert world.run(ends_by_itself) == [True] * world.world_size


@pytest.mark.parametrize("world", worlds((2, 1), (2, 2)), indirect=True)
def test_a_timeline_tells_what_is_on_the_wire(world):
    for kinds, sent, wires in world.run(recorded):
        assert {"node", "wire"} <= kinds
        assert 0 < wires <= sent


def recorded():
    """The kinds of the parts of two steps, and their bytes on the wire and in the node."""
    torch.manual_seed(0)
    model = ppe_ddp.DistributedDataParallel(torch.nn.Linear(512, 512))
    with record() as recording:
        for _ in range(2):
            model(torch.randn(2, 512)).sum().backward()
    spans = recording.result().spans
    nbytes = [sum(span.nbytes for span in spans if span.kind == kind) for kind in ("node", "wire")]
    result = {span.kind for span in spans}, *nbytes
    dist.barrier()
    dist.destroy_process_group()
    return result


def group_with(fields):
    """A group that knows shared memory, with these options."""
    from ppe_ddp.backends.mpi import MpiOptions
    from ppe_ddp.backends.shm import ShmOptions

    over_mpi = dist.get_backend() == "mpi4py"
    options = MpiOptions(**fields) if over_mpi else ShmOptions(**fields)
    return dist.new_group(backend="mpi4py" if over_mpi else "shm", pg_options=options)


def sums():
    """Sums, means and maxima over the ranks, from shared memory and from elsewhere; their bytes, the same on all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = group_with({"shared_parts": True, "shared_bytes": 0, "two_level_bytes": 0, "shared_piece_bytes": 4096})
    assert group.supports_tensor_alloc(torch.device("cpu"))
    found = []
    for name, numel, dtype, is_shared in itertools.product(
        ("SUM", "AVG", "MAX"), (1, 3000), ("float32", "bfloat16", "int16", "uint8", "complex64"), (False, True)
    ):
        if dtype == "complex64" and name == "MAX":
            continue
        values = data(DTYPES[dtype], (numel,), name, rank)
        total = values.clone()
        if is_shared:
            total = group.allocate_tensor(numel, dtype=values.dtype, device=torch.device("cpu")).copy_(values)
        dist.all_reduce(total, getattr(dist.ReduceOp, name), group=group)
        wanted = expected([data(DTYPES[dtype], (numel,), name, other) for other in range(size)], name)
        assert_same(total, wanted, f"{name} of {numel} x {dtype}", exact=name != "AVG")
        found.append(total.view(torch.uint8).numpy().tobytes())
    empty = torch.empty(0)
    dist.all_reduce(empty, group=group)
    for dtype, is_shared in itertools.product(("float32", "bfloat16"), (False, True)):
        found.append(scattered_and_gathered(group, DTYPES[dtype], 3000, is_shared=is_shared))
    return found


def scattered_and_gathered(group, dtype, width, *, is_shared):
    """The sums of all rows, each made on its rank and brought to all, as bytes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows, whole = data(dtype, (size, width), "rows", rank), torch.zeros(size, width, dtype=dtype)
    if is_shared:
        memory = [group.allocate_tensor(size * width, dtype=dtype, device=torch.device("cpu")) for _ in range(2)]
        rows, whole = memory[0].view(size, width).copy_(rows), memory[1].view(size, width)
    share = whole[rank] if is_shared else torch.empty(width, dtype=dtype)
    for _ in range(2):
        whole.zero_()
        dist.reduce_scatter_tensor(share, rows, group=group)
        dist.all_gather_into_tensor(whole, share, group=group)
    wanted = expected([data(dtype, (size, width), "rows", other) for other in range(size)], "SUM")
    assert_same(whole, wanted, f"{dtype}", exact=True)
    return whole.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("world", worlds(*LAYOUTS, short=()), indirect=True)
def test_one_rank_that_fails_is_named_and_the_next_step_works(world):
    for told in world.run(fail_on, dist_last(world)):
        assert told == f"rank {dist_last(world)}"


def dist_last(world):
    return world.world_size - 1


def fail_on(rank):
    """One rank's function raises in a step; every rank says whom its error names, and then trains on."""
    failing = [dist.get_rank() == rank]

    def mean_that_fails(gradients, group):
        if failing[0]:
            raise KeyError("on purpose")
        return ppe_ddp.average(gradients, group)

    wrapper = ppe_ddp.DistributedDataParallel(torch.nn.Linear(3, 2), reduce_function=mean_that_fails)
    told = ""
    try:
        wrapper(torch.ones(1, 3)).sum().backward()
    except ppe_ddp.PeerAbortedError as error:
        told = f"rank {rank}" if f"rank {rank}" in str(error) else str(error)
    except KeyError:
        told = f"rank {dist.get_rank()}"
    failing[0] = False
    wrapper.check_in_sync()
    wrapper.zero_grad()
    wrapper(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
    mean = (dist.get_world_size() - 1) / 2
    assert wrapper.module.weight.grad.tolist() == [[mean] * 3] * 2
    return told


@pytest.mark.parametrize("world", worlds((2, 1), launchers=["torchrun"]), indirect=True)
def test_a_state_is_loaded_where_one_rank_alone_has_not_heard_of_a_failure(world):
    world.run(in_own_world, load_after_a_failure)


def load_after_a_failure():
    for wrapper in ("plain", "megatron"):
        loading.test_a_state_is_loaded_where_one_rank_alone_has_heard_of_a_failure.__wrapped__(wrapper)


@pytest.mark.parametrize("world", worlds((2, 1), (1, 2, 1)), indirect=True)
def test_one_rank_changes_its_module_after_a_failed_step(world):
    world.run(freeze_after_a_failed_step)


def freeze_after_a_failed_step():
    """Masks say on which nodes gradients exist, also on a rank that lists its module anew before it has connected."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    wrapper = ppe_ddp.DistributedDataParallel(Branches(size))
    layers = wrapper.module.layers

    def step(fails=False):
        x = torch.full((1, 512), rank + 1.0, requires_grad=True)
        if fails:
            x.register_hook(raise_on_purpose)
        wrapper.zero_grad()
        wrapper(x, rank).sum().backward()

    step()
    with pytest.raises(KeyError if rank == size - 1 else ppe_ddp.PeerAbortedError):
        step(fails=rank == size - 1)
    if rank == 0:
        layers[1].weight.requires_grad_(False)
    for _ in range(2):
        step()
        for other in range(size):
            if layers[other].weight.requires_grad:
                torch.testing.assert_close(layers[other].weight.grad, torch.full((256, 512), (other + 1) / size))


def raise_on_purpose(_gradient):
    raise KeyError("on purpose")


# ---------------------------------------------------------------- the conformance kit


@pytest.mark.parametrize("world", worlds(*LAYOUTS, short=()), indirect=True)
def test_the_conformance_kit_certifies_what_is_right(world):
    there = World(ranks=(world,))
    backend = BACKENDS["mpirun" if "mpi4py" in world.run(dist.get_backend) else "torchrun"]
    check_backend(backend, world=there)
    check_reduce_function(ppe_ddp.overlapped(in_place_mean), world=there)
    check_comm_hook(None, allreduce_hook, world=there)
    check_broadcast_function(ppe_ddp.broadcast, world=there)


# ---------------------------------------------------------------- what torch and this library build on groups


TORCH_CHECKS = [
    name for name, (body, _) in CHECKS.items() if getattr(body, "func", body).__module__ == mpi_check_torch.__name__
]


def run_check(name):
    in_own_world(CHECKS[name][0])


@over_mpi
@pytest.mark.parametrize("name", some(TORCH_CHECKS, few=("torch_ddp-plain", "fsdp2")))
def test_what_torch_builds_on_groups(world, name):
    if world.world_size < (least := CHECKS[name][1].start):
        pytest.skip(f"needs {least} ranks")
    world.run(run_check, name)


@pytest.mark.parametrize("world", worlds((1, 1), short=()), indirect=True)
@pytest.mark.parametrize(
    "part", [mpi_megatron.gathers, mpi_megatron.dynamic_graphs, mpi_megatron.splits], ids=lambda part: part.__name__
)
def test_megatrons_wrapper(world, part):
    world.run(in_own_world, part)


def hold_the_optimizer(name):
    hold(Program.plain(name, 3))


@on_all
def test_the_distributed_optimizer_trains_as_one_process_does(world):
    world.run(in_own_world, hold_the_optimizer, "adamw")


@pytest.mark.parametrize("world", worlds((2, 1)), indirect=True)
@pytest.mark.parametrize("options", [{"outer": 3, "compressed": True}, {"sharded": True}], ids=lambda one: "".join(one))
def test_a_training_goes_on_from_a_checkpoint(world, tmp_path, options):
    world.run(in_own_world, checkpoints.go_on, tmp_path / "on", options)
    if "outer" not in options:
        world.run(in_own_world, checkpoints.go_back_after_a_failure, tmp_path / "back", options)


@pytest.mark.parametrize("world", worlds((1, 1), (2, 1)), indirect=True)
def test_hyper_parameters_that_come_apart_are_an_error_on_all(world):
    world.run(in_own_world, train_with_other_rates)


def train_with_other_rates():
    optim.test_hyper_parameters_that_come_apart_later_are_an_error_on_all.__wrapped__(is_megatron=False)


def trained(seeds):
    made = train(seeds)
    dist.barrier()
    dist.destroy_process_group()
    return made


@pytest.mark.parametrize("world", worlds((1, 1), (2, 1), short=()), indirect=True)
def test_users_do_to_gradients_what_they_like(world):
    made = world.run(trained, range(3))
    assert [problem for problems, _ in made for problem in problems] + differences(
        [results for _, results in made]
    ) == []


@on_four
@pytest.mark.parametrize("name", [name for name in sharding_checks.CHECKS if not sharding_checks.needs(name)])
def test_sharded_loading(world, name):
    world.run(in_own_world, sharding_checks.run, name)


# ---------------------------------------------------------------- scripts


SCRIPT = """
import os, socket, torch, torch.distributed as dist, ppe_ddp
job = ppe_ddp.init_process_group(quiet=True)
model = ppe_ddp.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
model(torch.full((1, 2), job.rank + 1.0)).sum().backward()
# In one piece, since the ranks write side by side.
line = f"{job.rank} of {job.world_size} on {socket.gethostname()} as {job.local_rank}: "
os.write(1, f"{line}{model.module.weight.grad[0, 0].item()} {job.backend} {job.launcher}\\n".encode())
dist.destroy_process_group()
"""


@long_on_nodes
@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        pytest.param("mpirun", "mpi4py mpirun", marks=needs_mpirun),
        ("torchrun", "gloo torchrun"),
        ("ranks", "gloo torchrun"),
    ],
)
def test_one_script_under_every_launcher(tmp_path, launcher, how):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with Nodes(2) as nodes:
        done = nodes.launch(launcher, [sys.executable, str(script)], ranks=(2, 1), timeout=150)
    assert done.code == 0, done.errors
    where = ["0 of 3 on n0 as 0", "1 of 3 on n0 as 1", "2 of 3 on n1 as 0"]
    assert sorted(done.output.splitlines()) == [f"{rank}: 2.0 {how}" for rank in where]


def needs_one_node(name):
    body = CHECKS[name][0]
    return getattr(body, "func", body).__module__ in ("mpi_check_shared", "mpi_check_races")


@long_on_nodes
@needs_mpirun
@pytest.mark.parametrize("layout", [(1, 1), (2, 1)], ids=str)
def test_the_backend_by_itself(layout):
    """All checks of tests/mpi_checks.py but those of memory that all ranks share."""
    import mpi_checks  # noqa: F401  # which registers them

    # MPICH 5.0.2 over UCX loses messages between nodes for receives from any rank that are posted before they come.
    lost = {"messages_from_anyone"}
    names = [name for name in names_for(sum(layout)) if not needs_one_node(name) and name not in lost]
    with Nodes(2) as nodes:
        command = [sys.executable, "-W", "error", str(HERE / "mpi_checks.py"), *names]
        done = nodes.launch("mpirun", command, ranks=layout, timeout=400)
    found = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    problems = {one["name"]: one["errors"] for one in found if one["errors"]}
    assert (problems, [one["name"] for one in found]) == ({}, names), done.errors[-4000:]
    assert done.code == 0, done.errors
