"""`python -m ppe_ddp env`: what it lists exists, and what is missing has a reason and a remedy."""

import os
import sys

import pytest
import torch

from ppe_ddp.backends.cupy_nccl import nccl_version
from ppe_ddp.backends.cupy_nccl.nccl_version import version_text
from ppe_ddp.cli import env, libraries
from ppe_ddp.cli.backend_candidates import candidates, many_ranks_a_device
from ppe_ddp.cli.libraries import CupyLibrary, MpiLibrary, cupy_library, mpi_library
from reports import report_in
from subprocesses import run

HAS = MpiLibrary("4.1", "MPICH Version: 5.0", "5.0", "on PATH")
HAS_CUPY = CupyLibrary("14.2", "2.27.7", 1)


def test_it_tells_people_and_programs_the_same():
    script = "import sys; from ppe_ddp.cli import main; code = main(['env', '--json', '-']); "
    script += "assert 'mpi4py.MPI' not in sys.modules and 'cupy' not in sys.modules; sys.exit(code)"
    code, output, text = run([sys.executable, "-c", script], timeout=90)
    assert code == 0, text
    report = report_in(output)
    assert report["command"] == "env"
    assert f"torch:           {torch.__version__}" in text
    assert [backend["name"] for backend in report["backends"]] == ["gloo", "mpi4py", "nccl", "cupy_nccl"]
    for backend in report["backends"]:
        assert bool(backend["missing"]) == bool(backend["remedy"])
        assert f"  {backend['name']}:" in text
        assert backend["missing"] in text
    assert "launcher:        alone, rank 0 of 1" in text
    assert report["torch_internals"] == []
    assert "torch internals: as expected\n" in text


@pytest.mark.parametrize(
    ("name", "mpi", "cupy", "missing", "remedy"),
    [
        ("mpi4py", HAS, HAS_CUPY, "", ""),
        ("mpi4py", MpiLibrary(None, None, None, "on PATH", "no module"), HAS_CUPY, "mpi4py is not installed", "[mpi]"),
        ("mpi4py", MpiLibrary("4.1", None, None, None, "no libmpi.so"), HAS_CUPY, "no libmpi.so", "[mpi]"),
        ("mpi4py", MpiLibrary("4.1", "MPICH", "5.0", None), HAS_CUPY, "no mpirun", "mpirun of MPICH on PATH"),
        ("cupy_nccl", HAS, HAS_CUPY, "", ""),
        ("cupy_nccl", HAS, CupyLibrary(None, None, 0, "No module named 'cupy'"), "not installed", "[cupy12]"),
        ("cupy_nccl", HAS, CupyLibrary(None, None, 0, "no libcuda"), "cannot be imported (no libcuda)", "[cupy12]"),
        ("cupy_nccl", HAS, CupyLibrary("14.2", None, 0), "CuPy 14.2 finds no NCCL", "before CuPy"),
        ("cupy_nccl", HAS, CupyLibrary("14.2", "2.27.7", 2), "two different NCCLs", "[cupy12]"),
        ("nccl", HAS, HAS_CUPY, "no NCCL", "torch for CUDA"),
    ],
)
def test_why_a_backend_cannot_be_made_on_a_machine_with_cuda(monkeypatch, name, mpi, cupy, missing, remedy):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    (found,) = (candidate for candidate in candidates(mpi, cupy) if candidate.name == name)
    assert missing in found.missing
    assert remedy in found.remedy
    assert bool(found.missing) == bool(missing)


@pytest.mark.parametrize(("cuda", "reason"), [(None, "without CUDA"), ("13.0", "no CUDA device is visible")])
def test_without_a_device_both_reasons_are_told(monkeypatch, cuda, reason):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = candidates(HAS, CupyLibrary(None, None, 0, "No module named 'cupy'"))[-1]
    assert reason in found.missing
    assert "CuPy is not installed" in found.missing
    assert "[cupy13]" in found.remedy


@pytest.mark.parametrize(("number", "text"), [(22707, "2.27.7"), (2708, "2.7.8"), (21805, "2.18.5")])
def test_versions_of_nccl_are_read_as_people_write_them(number, text):
    assert version_text(number) == text


@pytest.mark.parametrize(
    ("files", "number"),
    [(["/there/libnccl.so.2"], 23203), (["/there/libnccl.so.2", "/here/libnccl.so.2"], 22809), ([], 22809)],
    ids=["one that pip has upgraded", "another one of CuPy's", "a part of torch"],
)
def test_it_is_the_nccl_version_that_counts(monkeypatch, files, number):
    """torch tells what it was compiled with."""

    class Library:
        def __init__(self, file):
            assert file == files[0]

        def ncclGetVersion(self, place):
            place._obj.value = 23203
            return 0

    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9, "suffix"))
    monkeypatch.setattr(nccl_version, "loaded_files", lambda: files)
    monkeypatch.setattr(nccl_version.ctypes, "CDLL", Library)
    assert nccl_version.torch_nccl() == number
    assert many_ranks_a_device() == (number >= 23000)


@pytest.mark.parametrize(
    ("torch_nccl", "cupy", "clash"),
    [
        ("2.27.7", HAS_CUPY, ""),
        (None, CupyLibrary(None, None, 0), ""),
        ("2.26.2", HAS_CUPY, "torch calls NCCL 2.26.2, and CuPy calls 2.27.7"),
        ("2.27.7", CupyLibrary("14.2", "2.27.7", 2), "2 different libnccl files"),
    ],
)
def test_two_nccls_clash(torch_nccl, cupy, clash):
    assert clash in env._clash(torch_nccl, cupy)
    assert bool(clash) == bool(env._clash(torch_nccl, cupy))


def test_wrong_variables_of_a_launcher_are_told(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert env._launcher().startswith("its variables are wrong: WORLD_SIZE")


def install(tmp_path, monkeypatch, modules):
    """Put modules of these contents before those that are installed."""
    for name, content in modules.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))


MPI4PY = "__version__ = '4.0'\nclass rc: pass\n"


@pytest.mark.parametrize(
    ("content", "library", "problem"),
    [
        ("Get_library_version = lambda: 'Open  MPI v5\\nmore\\0'\nGet_version = lambda: (3, 1)", "Open MPI v5", ""),
        ("raise RuntimeError('cannot load MPI library')", None, "RuntimeError: cannot load MPI library"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGABRT)", None, "ended with exit code -6"),
    ],
    ids=["works", "fails", "crashes"],
)
def test_an_mpi_is_asked_apart_from_this_process(tmp_path, monkeypatch, content, library, problem):
    install(tmp_path, monkeypatch, {"mpi4py/__init__.py": MPI4PY, "mpi4py/MPI.py": content})
    found = mpi_library()
    assert found.library == library
    assert problem in found.problem
    assert bool(problem) == bool(found.problem)
    assert found.mpi4py == (None if "crashes" in problem or "-6" in problem else "4.0")


def test_cupys_nccl_is_asked_for(tmp_path, monkeypatch):
    nccl = "available = True\nget_version = lambda: 22707"
    files = {"cupy/__init__.py": "__version__ = '14'", "cupy/cuda/__init__.py": "", "cupy/cuda/nccl.py": nccl}
    install(tmp_path, monkeypatch, files)
    assert cupy_library() == CupyLibrary("14", "2.27.7", len(nccl_version.loaded_files()))


def test_a_library_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(libraries, "_SECONDS", 1.0)
    install(tmp_path, monkeypatch, {"mpi4py.py": "import threading\nthreading.Event().wait()"})
    assert mpi_library().problem == "it has not answered within 1 s"


def test_a_torch_that_has_changed_is_told_of(monkeypatch):
    monkeypatch.setattr(env, "changes_of_torch", lambda: ("version_of: torch 9: it is gone",))
    monkeypatch.setattr(env, "mpi_library", lambda: HAS)
    monkeypatch.setattr(env, "cupy_library", lambda: HAS_CUPY)
    text = env.text_of(env.inspect_environment())
    assert "torch internals: 1 changed" in text
    assert "\n                 version_of: torch 9: it is gone\n" in text
