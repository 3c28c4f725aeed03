"""`python -m ppe_ddp bench nodes`: `bench step` on nodes made for it; and what is exposed of communication."""

import os

import pytest

from ppe_ddp import cli
from ppe_ddp.benchmarks.bench_contestants import Traffic
from ppe_ddp.benchmarks.bench_measure import RankResult, workload_named
from ppe_ddp.benchmarks.bench_result import combine
from reports import report_in
from subprocesses import needs_mpirun


def exposed(seconds, ranks=2):
    rank = RankResult(seconds, {name: Traffic() for name in seconds}, bytes([1]), (4,), {})
    results = combine(workload_named("mlp"), 1, [rank] * ranks).contestants
    return {result.name: result.exposed for result in results}


def test_exposed_is_what_a_step_takes_beyond_the_bare_one_by_medians():
    seconds = {"ppe_ddp": [2.0, 9.0, 1.5], "torch": [5.0, 4.0, 5.0], "bare": [1.0, 1.0, 1.0], "ppe": [9.0, 8.0, 9.0]}
    assert exposed(seconds) == {"ppe_ddp": 0.25, "torch": 1.0, "bare": 0.0, "ppe": 2.0}
    assert exposed({**seconds, "torch": [1.0] * 3})["ppe_ddp"] is None
    assert exposed(seconds, ranks=1)["ppe_ddp"] is None


def test_where_nodes_cannot_be_made_the_reason_is_told(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main(["bench", "nodes"]) == 2
    assert (
        "nodes cannot be made here: nodes are made of namespaces, which only root may make" in capsys.readouterr().err
    )


@pytest.mark.nodes(long=True)
@needs_mpirun
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_all_contestants_are_measured_on_nodes(launcher, tmp_path, capsys):
    report = tmp_path / "report.json"
    words = ["--quick", "--model", "small", "--ranks", "1", "--mbit", "5000", "--launcher", launcher]
    assert cli.main(["bench", "nodes", *words, "--json", str(report)]) == 0
    found = report_in(report.read_text())
    assert found["settings"] == {"nodes": 2, "ranks": [1, 1], "mbit": 5000}
    (model,) = found["launchers"][launcher]["models"]
    assert (model["name"], model["world_size"]) == ("small", 2)
    measured = {one["name"] for one in model["contestants"] if one["milliseconds"]}
    assert measured >= {"ppe_ddp", "torch", "bare"} | ({"over mpi4py"} if launcher == "mpirun" else set())
    text = capsys.readouterr().out
    assert text.startswith(f"{launcher}, 2 nodes x 1 ranks, 5000 Mbit/s")
    assert "exposed" in text


@pytest.mark.nodes
@needs_mpirun
def test_a_job_that_fails_is_told_with_its_last_lines(monkeypatch, capsys):
    monkeypatch.setattr(
        "ppe_ddp.benchmarks.bench_nodes._step_command", lambda *_: ["/bin/sh", "-c", "echo oh >&2; exit 3"]
    )
    assert cli.main(["bench", "nodes", "--launcher", "mpirun"]) == 1
    err = capsys.readouterr().err
    assert "mpirun ended with exit code" in err
    assert "\noh\n" in err
