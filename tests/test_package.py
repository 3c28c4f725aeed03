"""The wheel and the source distribution: what is in them, and that the wheel works away from the repository."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import ppe_ddp

ROOT = Path(__file__).parent.parent
# setuptools' own entry points, as pip calls them; the folder that they build in is a copy, and stays clean.
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # setuptools changes the arguments
build_meta.build_wheel(folder)
build_meta.build_sdist(folder)
"""
SMOKE = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, ppe_ddp
assert ppe_ddp.__file__.startswith(sys.argv[1]), ppe_ddp.__file__
ppe_ddp.init_process_group(quiet=True)
model = ppe_ddp.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = ppe_ddp.DistributedOptimizer(torch.optim.AdamW, model, lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
import ppe_ddp.__main__, ppe_ddp.megatron, ppe_ddp.sharding, ppe_ddp.testing
"""

# A program that imports nothing of ours, with the backend that it asks torch for by name.
BY_NAME = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch, torch.distributed as dist
dist.init_process_group(sys.argv[2], store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert tensor.tolist() == [1, 1, 1]
gathered = [torch.zeros(3)]
dist.gather(tensor, gathered)
assert gathered[0].tolist() == [1, 1, 1]
assert dist.distributed_c10d._use_torchcomms_enabled() is (os.environ["TORCH_DISTRIBUTED_USE_TORCHCOMMS"] == "1")
assert dist.is_backend_available("cupy_nccl")
assert sys.modules["ppe_ddp"].__file__.startswith(sys.argv[1])
dist.destroy_process_group()
"""


# What torch imports of TorchComms, which here can make no backend.
TORCHCOMMS = {
    "__init__": "def is_backend_built(name): return False\nnew_comm = None",
    "_comms": "_BackendWrapper = None\ndef _is_backend_registered(name): return False",
    "hooks": "FlightRecorderHook = None",
}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    copied = folder / "source"
    subprocess.run(["git", "clone", "-q", "--shared", ROOT, copied], check=True, timeout=150)
    command = [sys.executable, "-W", "ignore", "-c", BUILD, folder]
    subprocess.run(command, cwd=copied, check=True, capture_output=True, timeout=120)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def test_the_wheel_has_every_file_of_the_package_and_works_elsewhere(distributions, tmp_path):
    wheel, _ = distributions
    listed = subprocess.run(["git", "ls-files", "ppe_ddp"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with zipfile.ZipFile(wheel) as content:
        assert {name for name in content.namelist() if name.startswith("ppe_ddp/")} == set(listed.split())
        content.extractall(tmp_path)
    result = subprocess.run(
        [sys.executable, "-I", "-c", SMOKE, tmp_path], cwd="/", capture_output=True, text=True, timeout=60, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(
    not hasattr(torch.distributed.Backend, "_ensure_backend_registered"), reason="this torch does not look for backends"
)
@pytest.mark.parametrize(("backend", "torchcomms"), [("shm", "0"), ("mpi4py", "1"), ("cpu:shm", "1")])
def test_torch_finds_backends_that_no_program_has_imported(distributions, tmp_path, monkeypatch, backend, torchcomms):
    if backend == "mpi4py":
        pytest.importorskip("mpi4py")
    with zipfile.ZipFile(distributions[0]) as content:
        content.extractall(tmp_path)
    monkeypatch.setenv("TORCH_DISTRIBUTED_USE_TORCHCOMMS", torchcomms)
    if torchcomms == "1":  # torch looks whether this package can be imported
        for name, code in TORCHCOMMS.items():
            (tmp_path / "torchcomms").mkdir(exist_ok=True)
            (tmp_path / "torchcomms" / f"{name}.py").write_text(code)
    result = subprocess.run(
        [sys.executable, "-I", "-c", BY_NAME, tmp_path, backend],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_the_source_has_what_its_readers_need(distributions):
    with tarfile.open(distributions[1]) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "ppe_ddp/py.typed"} <= names


def test_versions_agree():
    version = ppe_ddp.__version__
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
