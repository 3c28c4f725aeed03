"""`python -m ppe_ddp doctor` in a job: which ranks share a node, what goes through memory and what over a network."""

import sys

import pytest

from ppe_ddp import cli
from ppe_ddp.cli.compression_forecast import lines_of_forecast, of_slowest
from ppe_ddp.testing import Nodes
from reports import report_in
from subprocesses import MPIRUN, needs_mpirun, run

DOCTOR = [sys.executable, "-m", "ppe_ddp", "doctor"]


def routes(job):
    return {route["group"]: (route["ranks"], route["buckets"], route["masks"]) for route in job["routes"]}


@needs_mpirun
def test_in_a_job_on_one_node_its_own_ranks_are_examined():
    code, output, errors = run([MPIRUN, "-n", "2", *DOCTOR, "--json", "-"], timeout=150)
    assert code == 0, errors
    job = report_in(output)["job"]
    assert (job["launcher"], job["backend"], job["problems"]) == ("mpirun", "mpi4py", [])
    ((_, ranks),) = job["nodes"]
    assert ranks == [0, 1]
    assert routes(job) == {"all ranks": ([[0, 1]], "shared memory", "messages of mpi4py, within the node")}
    assert errors.count("ranks by mpirun") == 1
    forecast = job["compression"]
    assert forecast["nbytes"] == 4 << 20
    assert 0 < forecast["seconds"] < 10
    assert len(forecast["forecasts"]) == 4
    assert errors.count("are averaged in") == 1


@pytest.mark.nodes
@needs_mpirun
def test_under_mpirun_on_two_nodes_memory_and_wire_are_told():
    with Nodes(2) as nodes:
        done = nodes.launch("mpirun", [*DOCTOR, "--json", "-"], ranks=(2, 1), timeout=150)
    assert done.code == 0, done.errors
    job = report_in(done.output)["job"]
    assert job["nodes"] == [["n0", [0, 1]], ["n1", [2]]]
    found = routes(job)
    assert found["all ranks"][0] == [[0, 1, 2]]
    assert "between nodes" in found["all ranks"][1]
    assert found["of a node"] == ([[0, 1], [2]], "shared memory", "messages of mpi4py, within the node")
    assert found["one of each node"][0] == [[0, 2], [1]]
    assert "messages of mpi4py, over the network between nodes" in found["one of each node"][1]
    assert "  node n0: ranks 0 1\n  node n1: rank 2\n" in done.errors
    assert "  of a node (ranks 0 1 | 2)\n    buckets: shared memory" in done.errors


@pytest.mark.nodes(long=True)
def test_under_torchrun_on_two_nodes():
    with Nodes(2, mbit=100) as nodes:
        done = nodes.launch("torchrun", [*DOCTOR, "--json", "-"], ranks=(1, 1), timeout=150)
    assert done.code == 0, done.errors
    job = report_in(done.output)["job"]
    assert job["nodes"] == [["n0", [0]], ["n1", [1]]]
    forecast = job["compression"]
    assert forecast["seconds"] > 0.8 * forecast["nbytes"] * 8 / 100e6
    assert forecast["best"].startswith(("TopK", "PowerSGD"))
    assert forecast["forecasts"][forecast["best"]] < 0.5 * forecast["seconds"]
    assert f"    {forecast['best']} (forecast): " in done.errors


def test_what_the_slowest_rank_sees_decides_whether_compression_pays():
    slow, fast = [0.2, {"Int8": 0.1, "BF16": 0.05}], [0.1, {"Int8": 0.06, "BF16": 0.18}]
    found = of_slowest(4 << 20, [slow, fast])
    assert (found.seconds, found.forecasts, found.best) == (0.2, {"Int8": 0.1, "BF16": 0.18}, "Int8")
    assert lines_of_forecast(found) == [
        "  compression pays where backward hides less: 4.2 MB are averaged in 200.0 ms",
        "    Int8 (forecast): 100.0 ms",
    ]


def test_what_saves_nothing_does_not_pay():
    found = of_slowest(4 << 20, [[0.1, {"Int8": 0.096, "BF16": 0.2}]])
    assert found.best is None
    assert lines_of_forecast(found) == [
        "  compression would not pay: 4.2 MB are averaged in 100.0 ms",
        "    with it (forecast): 96.0 ms or more",
    ]


def test_the_forecast_fits_a_terminal():
    methods = ("TopK(0.01) with error feedback", "PowerSGD(4) with error feedback")
    for seconds in (1e-3, 60.0):
        found = of_slowest(4 << 20, [[seconds, {method: seconds / 10}] for method in methods[1:]])
        assert max(map(len, lines_of_forecast(found))) <= 80


def test_a_job_has_one_backend(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor", "--backend", "gloo", "--backend", "mpi4py"]) == 2
    assert "the ranks of a job have one backend" in capsys.readouterr().err


def test_a_launcher_whose_variables_are_wrong_is_named(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["doctor"]) == 1
    assert "WORLD_SIZE is not set" in capsys.readouterr().err
