"""`python -m ppe_ddp doctor`: working backends pass, broken ones are named, and no rank is left behind.

In a job it tells which ranks share a node, what goes through memory and what over a network.
"""

import json
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from ppe_ddp import cli
from ppe_ddp.cli import doctor
from ppe_ddp.cli.doctor import Candidate, Diagnosis, diagnose
from ppe_ddp.testing import Nodes, nodes
from subprocesses import MPIRUN, needs_mpirun, run, warm_executable, warm_python


@pytest.fixture
def bare(monkeypatch):
    """No MPI and no CuPy here, which are not asked for either."""
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)


def examined(capsys, *words):
    code = cli.main(["doctor", *words, "--json", "-"])
    captured = capsys.readouterr()
    return code, {one["backend"]: one for one in json.loads(captured.out)["diagnoses"]}, captured.err


def test_what_is_well_is_called_well_and_what_is_absent_is_skipped_with_a_remedy(bare, capsys):
    code, diagnoses, text = examined(capsys)
    assert code == 0
    assert list(diagnoses) == ["gloo", "mpi4py", "nccl", "cupy_nccl"]
    assert (diagnoses["gloo"]["outcome"], diagnoses["gloo"]["ranks"]) == ("ok", 2)
    assert "training" in diagnoses["gloo"]["reason"]
    assert "torch internals: tried with torch 2." in text
    assert diagnoses["mpi4py"]["outcome"] == "skipped"
    assert "gloo: ranks are starting" in text
    assert 'remedy: pip install "ppe-ddp[mpi]"' in text


@pytest.mark.long  # as in a job of mpirun, below
@needs_mpirun
def test_mpi4py_is_examined_under_mpirun(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    found = diagnose(Candidate("mpi4py", "cpu"), 30)
    assert (found.outcome, found.ranks, found.details) == ("ok", 2, "")


def test_wrong_sums_are_called_wrong(bare, capsys):
    code, diagnoses, text = examined(capsys, "--backend", "wrong", "--setup", "broken_backends:register_wrong")
    assert code == 1
    assert diagnoses["wrong"]["outcome"] == "failed"
    assert "all_reduce(SUM) of 1 torch.float32, async_op=False, is wrong" in diagnoses["wrong"]["reason"]
    assert "int64" not in diagnoses["wrong"]["reason"]  # which it adds up rightly
    assert "remedy: " in text


def test_a_rank_that_hangs_is_killed_and_named(bare, capsys):
    words = ("--backend", "hanging", "--setup", "broken_backends:register_hanging", "--timeout", "4")
    code, diagnoses, text = examined(capsys, *words)
    assert code == 1
    assert diagnoses["hanging"]["outcome"] == "failed"
    assert "rank 1 did not answer" in diagnoses["hanging"]["reason"]
    assert "remedy: " in text


# What is in the place of mpirun, given `-n 2` and the command of a rank.
LAUNCHERS = {
    "fails": "echo no such host >&2; exit 3",
    "of another MPI": """shift 2; OTHER=0 "$@" & OTHER=1 "$@" & wait""",
    "starts one": """shift 2; PMI_RANK=0 PMI_SIZE=2 "$@" & exec tail -f /dev/null""",
}


@pytest.mark.parametrize(
    ("launcher", "reason"),
    [
        ("fails", "0 of 2 ranks have come by mpirun"),
        ("of another MPI", "2 ranks, and they take themselves for ranks [0]: it is that of another MPI"),
        pytest.param("starts one", "1 of 2 ranks have come by mpirun", marks=pytest.mark.long),
    ],
)
def test_what_mpirun_can_do_wrong(tmp_path, monkeypatch, launcher, reason):
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\n{LAUNCHERS[launcher]}\n")
    program.chmod(0o700)
    monkeypatch.setattr(nodes, "find_mpirun", lambda: str(program))
    monkeypatch.setattr(nodes, "sys", SimpleNamespace(executable=warm_executable()))
    monkeypatch.setattr(nodes, "_START_SECONDS", 100.0 if launcher != "starts one" else 15.0)
    found = diagnose(Candidate("mpi4py", "cpu"), 60)
    assert found.outcome == "failed"
    assert reason in found.reason
    assert "mpirun" in found.remedy
    assert launcher != "fails" or found.details == "no such host"


def test_asking_for_what_cannot_be_made_is_a_failure(bare, capsys):
    code, diagnoses, _ = examined(capsys, "--backend", "mpi4py")
    assert code == 1
    assert {name: one["outcome"] for name, one in diagnoses.items()} == {"mpi4py": "skipped"}


@pytest.mark.parametrize(("able", "wanted", "ranks"), [(True, "1", 2), (True, "0", 1), (False, "1", 1)])
@pytest.mark.parametrize("backend", ["nccl", "cupy_nccl"])
def test_ranks_that_would_have_to_share_a_device(monkeypatch, backend, able, wanted, ranks):
    """One rank, unless this NCCL lets several share one, and the user asks it to."""
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", wanted)
    started = []

    class Ranks:
        def __init__(self, size, **keywords):
            started.append(size)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def run(self, function, dtypes, device):
            return [[]] * started[0]

    with (
        mock.patch.object(doctor, "many_ranks_a_device", return_value=able),
        mock.patch.object(doctor, "Ranks", Ranks),
        mock.patch("torch.cuda.device_count", return_value=1),
    ):
        found = diagnose(Candidate(backend, "cuda"), 1)
    assert (found.outcome, found.ranks) == ("ok", ranks)
    assert isinstance(found, Diagnosis)


# --- in a job

DOCTOR = [sys.executable, "-m", "ppe_ddp", "doctor", "--json", "-"]


@needs_mpirun
def test_in_a_job_on_one_node_its_own_ranks_are_examined():
    code, output, errors = run([MPIRUN, "-n", "2", *warm_python(), *DOCTOR[1:]], timeout=150)
    assert code == 0, errors
    job = json.loads(output)["job"]
    assert (job["launcher"], job["backend"], job["problems"]) == ("mpirun", "mpi4py", [])
    ((_, ranks),) = job["nodes"]
    assert ranks == [0, 1]
    assert (job["buckets"], job["masks"]) == ("shared memory", "messages of mpi4py, within the node")
    assert errors.count("ranks by mpirun") == 1
    assert "  ok: collectives and training" in errors


@pytest.mark.nodes(long=True)
@needs_mpirun
def test_under_mpirun_on_two_nodes_memory_and_wire_are_told():
    with Nodes(2) as nodes:
        done = nodes.launch("mpirun", DOCTOR, ranks=(2, 1), timeout=150)
    assert done.code == 0, done.errors
    job = json.loads(done.output)["job"]
    assert job["nodes"] == [["n0", [0, 1]], ["n1", [2]]]
    assert job["buckets"] == "shared memory in a node, messages of mpi4py between nodes"
    assert job["masks"] == "messages of mpi4py, over the network between nodes"
    assert "  node n0: ranks 0 1\n  node n1: rank 2\n  buckets: shared memory" in done.errors


@pytest.mark.nodes(long=True)
def test_under_torchrun_on_two_nodes():
    with Nodes(2) as nodes:
        done = nodes.launch("torchrun", DOCTOR, ranks=(1, 1), timeout=150)
    assert done.code == 0, done.errors
    assert json.loads(done.output)["job"]["nodes"] == [["n0", [0]], ["n1", [1]]]


def test_a_job_has_one_backend(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor", "--backend", "gloo", "--backend", "mpi4py"]) == 2
    assert "the ranks of a job have one backend" in capsys.readouterr().err


def test_a_launcher_whose_variables_are_wrong_is_named(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["doctor"]) == 1
    assert "WORLD_SIZE is not set" in capsys.readouterr().err
