"""What needs a CUDA device: `make test-gpu`. Skipped, with the reason, where there is none or a library is missing."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import nccl_checks
import ppe_ddp
from ppe_ddp.testing import Ranks, World, check_backend
from subprocesses import run

pytestmark = pytest.mark.gpu

MPIRUN = shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")


def needs(backend):
    """Skip where the backend cannot be made, with the reason."""
    if "nccl" in backend and not dist.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    if backend == "cupy_nccl":
        nccl = pytest.importorskip("cupy.cuda.nccl", reason="needs CuPy: the extra cupy12 or cupy13")
        if not nccl.available:
            pytest.skip("CuPy has found no NCCL")


def needs_shared_devices():
    if torch.cuda.device_count() < 2 and (not dist.is_nccl_available() or torch.cuda.nccl.version()[:2] < (2, 30)):
        pytest.skip("needs two GPUs, or an NCCL that lets two ranks share one (2.30)")


def share_devices():
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"


@pytest.mark.parametrize("backend", ["nccl", "cupy_nccl", "cpu:gloo,cuda:cupy_nccl"])
def test_one_rank_conforms(backend):
    needs(backend.rpartition(":")[2])
    check_backend(backend, device="cuda", world=World(sizes=(1,), timeout=120))


@pytest.mark.parametrize("backend", ["nccl", "cupy_nccl"])
def test_two_ranks_conform(backend):
    needs(backend)
    needs_shared_devices()
    check_backend(backend, share_devices, device="cuda", world=World(sizes=(2,), timeout=120))


def test_two_ranks_on_one_device_conform_over_gloo():
    check_backend("gloo", device="cuda", world=World(sizes=(2,), timeout=120))


@pytest.mark.parametrize("size", [1, 2])
def test_every_collective_of_the_real_communicator(size):
    """What the stand-in is held to in tests/test_cupy_nccl.py, of CuPy's own NCCL."""
    needs("cupy_nccl")
    if size > 1:
        needs_shared_devices()
    with Ranks(size, backend="cupy_nccl", prepare=share_devices, timeout=120) as ranks:
        # float8 is reduced by GPUs of compute capability 9 only.
        float8 = torch.cuda.get_device_capability() >= (9, 0)
        ranks.run(everything_on_cuda, float8)


def everything_on_cuda(float8):
    nccl_checks.everything("cuda", float8=float8)


def test_the_real_communicator_is_called_as_the_stand_in_is():
    """The contract of tests/nccl_stand_in.py: the places of arguments, ids of 128 bytes, errors by number."""
    needs("cupy_nccl")
    from cupy.cuda import nccl

    unique_id = nccl.get_unique_id()
    assert isinstance(unique_id, bytes | tuple)
    assert len(unique_id) == 128
    communicator = nccl.NcclCommunicator(1, unique_id, 0)
    assert (communicator.size(), communicator.rank_id()) == (1, 0)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    source, target = torch.arange(5, device="cuda", dtype=torch.bfloat16), torch.zeros(5, device="cuda").bfloat16()
    torch.cuda.synchronize()
    addresses = source.data_ptr(), target.data_ptr()
    for name, arguments in {
        "allReduce": (5, 9, 4),
        "reduce": (5, 9, 0, 0),
        "broadcast": (10, 1, 0),
        "reduceScatter": (5, 9, 0),
        "allGather": (10, 1),
    }.items():
        target.zero_()
        torch.cuda.synchronize()
        getattr(communicator, name)(*addresses, *arguments, stream.cuda_stream)
        stream.synchronize()
        assert torch.equal(source, target), name
    target.zero_()
    torch.cuda.synchronize()
    nccl.groupStart()
    communicator.send(addresses[0], 10, 1, 0, stream.cuda_stream)
    communicator.recv(addresses[1], 10, 1, 0, stream.cuda_stream)
    nccl.groupEnd()
    stream.synchronize()
    assert torch.equal(source, target)
    with pytest.raises(nccl.NcclError):
        communicator.allReduce(*addresses, 5, 99, 0, stream.cuda_stream)
    communicator.check_async_error()
    communicator.destroy()


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, width)

    def forward(self, batch):
        return self.head(self.layer(batch))


def transformer_beside_torch():
    torch.manual_seed(0)
    ours, theirs = Block().cuda().bfloat16(), Block().cuda().bfloat16()
    theirs.load_state_dict(ours.state_dict())
    wrapped = ppe_ddp.DistributedDataParallel(ours), nn.parallel.DistributedDataParallel(theirs)
    batch = torch.randn(8, 16, 64, device="cuda", dtype=torch.bfloat16) * (1 + dist.get_rank())
    for model in wrapped:
        model(batch).square().mean().backward()
    for first, second in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(first.grad, second.grad, rtol=2e-2, atol=2e-3)


def step_without_waiting():
    """A steady step under torch's sync debug mode, in which what makes the host wait for the device raises."""
    torch.manual_seed(0)
    model = ppe_ddp.DistributedDataParallel(Block().cuda())
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
        for _ in range(3):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("body", [transformer_beside_torch, step_without_waiting])
@pytest.mark.parametrize(("backend", "size"), [("cpu:gloo,cuda:nccl", 2), ("cupy_nccl", 2), ("cupy_nccl", 1)])
def test_a_transformer_trains(backend, size, body):
    needs(backend.rpartition(":")[2])
    if size > 1:
        needs_shared_devices()
    with Ranks(size, backend=backend, prepare=share_devices, timeout=120) as ranks:
        ranks.run(body)


def overlapped_on_a_side_stream():
    """The result of a thread reaches a stream that is not the default one."""

    def slow(gradients, group):
        torch.cuda._sleep(200_000_000)
        gradients.buffer().mul_(3.0)

    with torch.cuda.stream(torch.cuda.Stream()):
        module = nn.Linear(2, 1, bias=False).cuda()
        model = ppe_ddp.DistributedDataParallel(module, reduce_function=ppe_ddp.overlapped(slow))
        model(torch.ones(1, 2, device="cuda")).sum().backward()
        assert module.weight.grad.tolist() == [[3.0, 3.0]]


def test_what_a_thread_computes_is_waited_for_by_the_callers_stream():
    with Ranks(1, backend="gloo", timeout=120) as ranks:
        ranks.run(overlapped_on_a_side_stream)


SCRIPT = """
import torch, torch.distributed as dist, ppe_ddp
from ppe_ddp.testing.backend_probes import probe_backend
from ppe_ddp.testing.cases import Case
from ppe_ddp.testing.laws import check_case
from ppe_ddp.testing.models import Recipe
ppe_ddp.init_process_group("mpi4py", init_method="mpi://", quiet=True)
problems = probe_backend("cuda")
assert problems == [], problems
for seed in range(4):
    check_case(Case(Recipe.random(seed)), device="cuda")
dist.destroy_process_group()
"""


@pytest.mark.skipif(MPIRUN is None, reason="needs an mpirun: the extra [mpi]")
def test_two_ranks_on_one_device_keep_the_laws_over_mpi4py(tmp_path):
    script = tmp_path / "laws.py"
    script.write_text(SCRIPT)
    code, _, errors = run([MPIRUN, "-n", "2", sys.executable, script], timeout=180)
    assert code == 0, errors
