"""Tests that need a CUDA device: `make test-gpu`. Skipped, with a reason, without one or without a library.

Two ranks are on one GPU where there is no second one: over NCCL that needs a version that allows it (2.30). Without it,
one rank alone is tested.
"""

import contextlib
import copy
import functools
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gpu_checks
import nccl_checks
import nccl_stand_in
import ppe_ddp
from nccl_contract import check_library
from ppe_ddp.backends.cupy_nccl.nccl_library import NCCL_OF_SHARED_DEVICES, torch_nccl
from ppe_ddp.cli.doctor import Candidate, diagnose
from ppe_ddp.errors import CommunicationError
from ppe_ddp.testing import RankError, Ranks, World, check_backend, check_reduce_function
from subprocesses import MPIRUN, needs_mpirun, run

pytestmark = pytest.mark.gpu

# The first use of CUDA takes seconds, and processes that share a GPU take turns of milliseconds at it.
SECONDS = 240
NCCL, CUPY = "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:cupy_nccl"


@functools.cache
def missing(backend, size):
    """Why these ranks cannot have the backend; empty if they can."""
    if "nccl" in backend and not dist.is_nccl_available():
        return "this torch has no NCCL"
    if "cupy_nccl" in backend:
        nccl = pytest.importorskip("cupy.cuda.nccl", reason="needs CuPy: the extra cupy12 or cupy13")
        if not nccl.available:
            return "CuPy has found no NCCL"
    if "nccl" in backend and torch.cuda.device_count() < size and torch_nccl() < NCCL_OF_SHARED_DEVICES:
        return "needs two GPUs, or an NCCL that lets two ranks share one (2.30)"
    return ""


def needs(backend, size=1):
    if missing(backend, size):
        pytest.skip(missing(backend, size))


def prepare():
    """In each rank, before NCCL is loaded."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    # NVLink SHARP, where it is demanded and not just allowed, refuses ranks that share a GPU.
    os.environ.pop("NCCL_NVLS_ENABLE", None)
    nccl_stand_in.register()


def ranks_over(backend, size, **keywords):
    needs(backend, size)
    return Ranks(size, backend=backend, prepare=prepare, timeout=SECONDS, **keywords)


# ---------------------------------------------------------------- every backend conforms and keeps the laws


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("backend", ["nccl", NCCL, "cupy_nccl", CUPY])
def test_it_conforms(backend, size):
    needs(backend, size)
    check_backend(backend, prepare, device="cuda", world=World(sizes=(size,), timeout=SECONDS))


def test_two_ranks_on_one_device_conform_over_gloo():
    check_backend("gloo", device="cuda", world=World(sizes=(2,), timeout=SECONDS))


def summed(gradients, group):
    """Calls NCCL also where one rank is alone, which our own function does not."""
    gradients.buffer().div_(dist.get_world_size(group))
    return dist.all_reduce(gradients.buffer(), group=group, async_op=True)


@pytest.mark.parametrize("backend", [NCCL, "cupy_nccl"])
def test_one_rank_keeps_the_laws_with_all_reduces_in_flight(backend):
    needs(backend)
    world = World(sizes=(1,), backend=backend, setup=prepare, device="cuda", timeout=SECONDS)
    check_reduce_function(summed, dtypes=(torch.float32, torch.bfloat16), world=world)


LAWS = """
import sys, torch, torch.distributed as dist, ppe_ddp
from ppe_ddp.testing.probes import Plugs, probe_backend
from laws import Case
from law_scenarios import check_case
from law_models import Recipe
from weighing import own_average
ppe_ddp.init_process_group(sys.argv[1], init_method="mpi://", quiet=True)
assert dist.get_world_size() == int(sys.argv[2]), dist.get_world_size()
problems = probe_backend("cuda")
assert problems == [], problems
total = torch.ones(3)
dist.all_reduce(total)
assert total.tolist() == [dist.get_world_size()] * 3
for seed in range(4):
    # One rank alone sends something only by a function of a user's.
    check_case(Case(Recipe.random(seed)), plugs=Plugs(own_average), device="cuda")
    if dist.get_world_size() > 1:
        check_case(Case(Recipe.random(seed)), device="cuda")
dist.destroy_process_group()
"""


@needs_mpirun
@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py: the extra [mpi]")
@pytest.mark.parametrize(("backend", "size"), [("mpi4py", 2), ("cpu:mpi4py,cuda:nccl", 1), ("cpu:mpi4py,cuda:nccl", 2)])
def test_ranks_keep_the_laws_over_mpi4py(tmp_path, backend, size):
    needs(backend, size)
    script = tmp_path / "hold_to_laws.py"
    script.write_text(LAWS)
    # Open MPI refuses root, and more ranks than cores, unless it is told.
    environment = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environment["PYTHONPATH"] = f"{Path(__file__).parent.parent}:{Path(__file__).parent}"
    environment |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    command = [MPIRUN, "-n", size, sys.executable, script, backend, size]
    code, output, errors = run(command, timeout=SECONDS, environment=environment)
    assert code == 0, output + errors


# ---------------------------------------------------------------- the stand-in is like the real library


def test_the_real_library_keeps_the_contract_of_the_stand_in():
    needs("cupy_nccl")
    from cupy.cuda import nccl

    check_library(nccl, "cuda", torch.cuda.Stream().cuda_stream, torch.cuda.synchronize)


@pytest.mark.parametrize("size", [1, 2])
def test_the_real_library_gets_the_calls_that_the_stand_in_gets(size):
    """And all of them compute what they should."""
    # float8 is reduced by GPUs of compute capability 9 only.
    float8 = torch.cuda.get_device_capability() >= (9, 0)
    with ranks_over("cupy_nccl", size) as ranks:
        real = ranks.run(everything, "cuda", float8)
    with ranks_over("cupy_stand_in", size) as ranks:
        assert real == ranks.run(everything, "cpu", float8)


def everything(device, float8):
    # int8 goes to gloo beside the stand-in.
    return nccl_checks.everything(device, float8=float8, without=["int8"])


def one_dtype_more():
    nccl_checks.reductions("int8", "cuda")
    nccl_checks.moving("int8", "cuda")


def barriers():
    """By NCCL's stream, where a device is named; by gloo, where none is."""
    dist.barrier(device_ids=[0])
    dist.barrier()


def made_again():
    for _ in range(2):
        group = dist.new_group(backend="cupy_nccl")
        tensor = torch.ones(3, device="cuda")
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [dist.get_world_size()] * 3
        dist.destroy_process_group(group)


@pytest.mark.parametrize("body", [one_dtype_more, barriers, made_again])
def test_one_rank_over_the_real_library(one, body):
    one.run(body)


@pytest.fixture(scope="module")
def one():
    with ranks_over("cupy_nccl", 1) as ranks:
        yield ranks


def never_comes():
    dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(1, device="cuda"), async_op=True)
        torch.cuda.synchronize()  # until the watchdog breaks it off
        with pytest.raises(CommunicationError, match="all_reduce is not over after the group's timeout of 20 s"):
            work.wait()
    torch.ones(1, device="cuda").item()  # the device goes on


def test_what_never_ends_on_the_device_is_broken_off_and_named():
    with ranks_over("cupy_nccl", 2, group_timeout=20) as ranks:
        ranks.run(never_comes, grace=60)


@pytest.mark.parametrize("backend", ["nccl", "cupy_nccl"])
def test_doctor_finds_it_well(backend):
    needs(backend)
    found = diagnose(Candidate(backend, "cuda"), SECONDS)
    assert found.outcome == "ok", found


# ---------------------------------------------------------------- training


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, width)

    def forward(self, batch):
        return self.head(self.layer(batch))


def transformer_beside_torch(function):
    """Three steps in bfloat16, beside torch's wrapper over torch's NCCL."""
    torch.manual_seed(0)
    ours, theirs = Block().cuda().bfloat16(), Block().cuda().bfloat16()
    theirs.load_state_dict(ours.state_dict())
    nccl = dist.new_group(backend="nccl")
    models = (
        ppe_ddp.DistributedDataParallel(ours, reduce_function=function),
        nn.parallel.DistributedDataParallel(theirs, process_group=nccl),
    )
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(3):
        batch = torch.randn(8, 16, 64, device="cuda", dtype=torch.bfloat16) * (1 + dist.get_rank() + step)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
        for first, second in zip(ours.parameters(), theirs.parameters(), strict=True):
            largest = second.grad.abs().max().item()
            torch.testing.assert_close(first.grad, second.grad, rtol=2e-2, atol=2e-2 * largest)
        theirs_before = [parameter.detach().clone() for parameter in theirs.parameters()]
        for optimizer in optimizers:
            optimizer.step()
        assert any(not torch.equal(old, new) for old, new in zip(theirs_before, theirs.parameters(), strict=True))


def step_without_waiting(function):
    """A steady step under torch's sync debug mode, in which what makes the host wait for the device raises."""
    torch.manual_seed(0)
    model = ppe_ddp.DistributedDataParallel(Block().cuda(), reduce_function=function)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    batch = torch.randn(8, 16, 64, device="cuda")

    def step():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    for _ in range(9):  # the last order of arrival is learned by then
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            batch[0, 0, 0].item()
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("body", [transformer_beside_torch, step_without_waiting])
@pytest.mark.parametrize("backend", [NCCL, "cupy_nccl"])
@pytest.mark.parametrize(
    ("size", "function"), [(1, None), (1, summed), (2, None)], ids=["alone", "alone by NCCL", "two"]
)
def test_a_transformer_trains(backend, size, function, body):
    with ranks_over(backend, size) as ranks:
        ranks.run(body, function)


def overlapped_on_a_side_stream():
    """The result of a thread reaches a stream that is not the default one."""
    with torch.cuda.stream(torch.cuda.Stream()):
        module = nn.Linear(2, 1, bias=False).cuda()
        model = ppe_ddp.DistributedDataParallel(module, reduce_function=ppe_ddp.overlapped(slow))
        model(torch.ones(1, 2, device="cuda")).sum().backward()
        assert module.weight.grad.tolist() == [[3.0, 3.0]]


def slow(gradients, group):
    torch.cuda._sleep(200_000_000)
    gradients.buffer().mul_(3.0)


def test_what_a_thread_computes_is_waited_for_by_the_callers_stream():
    with Ranks(1, backend="gloo", timeout=SECONDS) as ranks:
        ranks.run(overlapped_on_a_side_stream)


def late(gradient):
    """On the stream of the parameter's accumulation, where hooks on parameters run."""
    torch.cuda._sleep(20_000_000)
    return gradient * 1.0


def landing_on_three_streams():
    """Buckets hold gradients of layers whose accumulation nodes were made on different streams."""
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]).cuda()
    alone = copy.deepcopy(module)
    streams, kept = [torch.cuda.Stream() for _ in range(3)], []
    for layer, stream in zip(module, 2 * streams, strict=True):
        with torch.cuda.stream(stream):
            kept += [parameter.view_as(parameter) for parameter in layer.parameters()]  # and with them the nodes
    torch.cuda.synchronize()
    for parameter in module.parameters():
        parameter.register_hook(late)
    model = ppe_ddp.DistributedDataParallel(module, reduce_function=summed, bucket_cap_mb=0.6)
    for _ in range(3):  # the first sees the streams, the later ones know them
        batch = torch.randn(8, 256, device="cuda")
        for each in (model, alone):
            each.zero_grad()
            each(batch).square().mean().backward()
        for ours, theirs in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    assert kept


def test_buckets_are_packed_behind_all_landings(one):
    one.run(landing_on_three_streams)


WORLDS = [("gloo", 2), (NCCL, 1), (NCCL, 2), (CUPY, 2)]


@pytest.fixture(scope="module")
def world():
    """Ranks by backend and number, started when the first test wants them."""
    with contextlib.ExitStack() as stack:
        started = {}

        def of(backend, size):
            needs(backend, size)
            if (backend, size) not in started:
                started[backend, size] = stack.enter_context(ranks_over(backend, size))
            return started[backend, size]

        yield of


@pytest.mark.parametrize(("backend", "size"), WORLDS)
@pytest.mark.parametrize("name", gpu_checks.CHECKS)
def test_training(world, name, backend, size):
    world(backend, size).run(gpu_checks.run, name, timeout=120)


def captured():
    model = ppe_ddp.DistributedDataParallel(nn.Linear(4, 4).cuda())
    x = torch.ones(2, 4, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(x).sum().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ppe_ddp.UnusableError, match="a CUDA graph is being captured"), torch.cuda.graph(graph):
        model(x).sum().backward()


@pytest.mark.parametrize(("backend", "size"), [("gloo", 1), (NCCL, 1)])
def test_a_cuda_graph_is_refused(backend, size):
    with ranks_over(backend, size) as ranks:
        ranks.run(captured)


@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), (NCCL, 2), (CUPY, 2)])
def test_the_others_are_told_that_a_rank_has_died(backend, size):
    """The first ends with the error; the other one has no answer to give."""
    with ranks_over(backend, size) as ranks, pytest.raises(RankError) as caught:
        ranks.run(gpu_checks.dies, 3, timeout=120, grace=60)
    assert set(caught.value.ranks) == {size - 1}, caught.value


# ---------------------------------------------------------------- as a user has it


ALONE = """
import torch, torch.distributed as dist, ppe_ddp
job = ppe_ddp.init_process_group(quiet=True)
assert str(job.device) == "cuda:0", job
assert job.backend == "cpu:gloo,cuda:nccl", job
tensor = torch.ones(3, device=job.device)
dist.all_reduce(tensor)
assert tensor.tolist() == [1.0] * 3
dist.barrier()
dist.destroy_process_group()
"""


def test_a_lone_process_gets_the_device_and_both_backends():
    needs("nccl")
    code, output, errors = run([sys.executable, "-c", ALONE], timeout=SECONDS)
    assert code == 0, output + errors


def test_env_tells_what_is_here():
    needs("nccl")
    code, output, errors = run([sys.executable, "-m", "ppe_ddp", "env"], timeout=SECONDS)
    assert code == 0, errors
    assert torch.cuda.get_device_name(0) in output
    for backend in ("nccl", "cupy_nccl"):
        is_told = f"{f'backend {backend}:':<20}yes, for cuda tensors" in output
        assert is_told == (importlib.util.find_spec("cupy") is not None or backend == "nccl"), output
