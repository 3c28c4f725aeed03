"""The command line: what is called how, and what a measurement says. Never how long anything takes."""

import argparse
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ppe_ddp import cli
from ppe_ddp.cli import bench_contestants, bench_measure
from ppe_ddp.cli.arguments import size_of
from ppe_ddp.cli.bench_collective import OPERATIONS, _wrong
from ppe_ddp.cli.bench_contestants import CONTESTANTS, Ours, Ppe, Traffic
from ppe_ddp.cli.bench_measure import RankResult, Settings, measure, workload_named
from ppe_ddp.cli.bench_models import WORKLOADS
from ppe_ddp.cli.bench_optimizer import CONTESTANTS as OPTIMIZER_CONTESTANTS
from ppe_ddp.cli.bench_optimizer import measure as measure_optimizers
from ppe_ddp.cli.bench_result import Spread, combine
from ppe_ddp.testing import RankError

NAMES = [kind.name for kind in CONTESTANTS]
TINY_RUN = ["bench", "step", "--quick", "--steps", "1", "--repeats", "2"]


def ppe_ddp(*words, launcher=(), path=None):
    command = [sys.executable, *launcher, "-m", "ppe_ddp", *words]
    paths = [str(path or ""), *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)


# --- finding a command


def test_help_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert " ".join(command.words) in out
        assert command.summary in out


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_half_a_command_lists_what_could_follow(words, capsys):
    assert cli.main(words) == 2
    assert "bench step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "wrong", "right"),
    [
        (["bnch"], "bnch", "bench"),
        (["bench", "steps"], "steps", "step"),
        (["bench", "--quick"], "--quick", ""),
    ],
)
def test_an_unknown_command_is_named_with_the_nearest(words, wrong, right, capsys):
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert repr(wrong) in err.splitlines()[0]
    assert not right or f"did you mean {right!r}?" in err
    assert "bench step" in err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--model", "huge"],
        ["--ranks", "0"],
        ["--steps", "-1"],
        ["--repeats", "many"],
        ["--bucket-cap-mb", "nan"],
        ["--json", "no/such/folder/result.json"],
    ],
    ids=lambda words: words[0],
)
def test_a_wrong_argument_is_named_before_anything_runs(wrong, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "step", *wrong])
    assert caught.value.code == 2
    assert wrong[0] in capsys.readouterr().err


# --- what is measured


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_every_step_of_a_model_gives_gradients_that_are_numbers(workload):
    torch.manual_seed(0)
    model = workload.build()
    batch = workload.batch(torch.Generator().manual_seed(0))
    workload.loss(model(batch, *workload.route(0, 0, 0)), batch).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert (len(gradients) < len(list(model.parameters()))) == workload.is_dynamic
    smallest_normal = torch.finfo(torch.float32).tiny
    for gradient in gradients:
        assert gradient.isfinite().all()
        assert gradient.abs().max() > smallest_normal


def test_branches_follow_from_seed_and_step():
    common, own = workload_named("supernet-common"), workload_named("supernet-own")
    for step in range(5):
        assert common.route(3, step, 0) == common.route(3, step, 0) == common.route(3, step, 1)
        (paths,) = zip(*(own.route(3, step, rank) for rank in range(4)), strict=True)
        for layer in zip(*paths, strict=True):
            assert sorted(layer) == [0, 1, 2, 3]
    assert len({common.route(3, step, 0) for step in range(5)}) > 1


def measure_wrongly(monkey):
    def sum_only(gradients, group):
        for gradient in gradients:
            torch.distributed.all_reduce(gradient, group=group)

    wrap = Ours._wrap
    Ours._wrap = lambda self, module, is_dynamic, options: wrap(self, module, is_dynamic, {"reduce_function": sum_only})
    try:
        return measure(monkey, Settings(steps=1, repeats=1))
    finally:
        Ours._wrap = wrap


def test_contestants_that_compute_something_else_are_not_timed(two_ranks):
    with pytest.raises(RankError) as caught:
        two_ranks.run(measure_wrongly, "supernet-common")
    for error in caught.value.exceptions.values():
        assert isinstance(error, bench_measure.GradientMismatchError)
        assert "step 0" in str(error)
        assert "ppe_ddp has a gradient of 'branches." in str(error)


def test_ppe_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_pfn_extras.nn.parallel", None)
    with pytest.raises(ImportError, match="pytorch-pfn-extras is not installed"):
        Ppe(nn.Linear(1, 1), is_dynamic=False, options={})


# --- what is made of it


def rank_result(seconds, present, skipped=()):
    traffic = {name: Traffic(8, 1) for name in seconds}
    return RankResult(seconds, traffic, bytes(present), (4, 40, 400), dict(skipped))


def test_a_step_takes_as_long_as_on_the_slowest_rank_and_ratios_are_taken_within_a_repetition():
    first = {"ppe_ddp": [1.0, 8.0, 3.0], "torch": [2.0, 2.0, 1.0], "bare": [1.0, 1.0, 1.0]}
    second = {"ppe_ddp": [2.0, 1.0, 1.0], "torch": [1.0, 4.0, 2.0], "bare": [1.0, 1.0, 1.0]}
    ranks = [
        rank_result(first, [1, 0, 0], {"ppe": "away"}),
        rank_result(second, [1, 0, 1], {"ppe": "away"}),
    ]
    model = combine(workload_named("mlp"), 5, ranks)
    assert model.ours.steps_ms == (2000.0, 8000.0, 3000.0)
    assert model.ours.ratio == Spread(median=1.5, lower=1.25, upper=1.75)
    assert (model.at_most, model.met) == (1.0, False)
    assert (model.parameter_nbytes, model.existing_nbytes) == (444, 404)
    assert [result.name for result in model.contestants] == NAMES
    assert [result.skipped for result in model.contestants] == [None, None, "away", None]


def test_a_target_holds_for_its_number_of_ranks_only():
    rank = rank_result({"ppe_ddp": [1.0], "torch": [2.0], "ppe": [2.0], "bare": [1.0]}, [1, 1, 1])
    met = [combine(workload_named("small"), 1, [rank] * count).met for count in (1, 2, 3)]
    assert met == [None, True, None]


# --- the whole command


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """One run of the real command: its result as data, and as text."""
    file = tmp_path_factory.mktemp("bench") / "result.json"
    models = [f"--model={name}" for name in ("supernet-own", "tiny")]
    done = ppe_ddp(*TINY_RUN, *models, "--no-views", "--json", str(file))
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done


def results_of(model):
    return {result["name"]: result for result in model["contestants"]}


def test_everything_is_in_the_report(report):
    data, done = report
    assert data["versions"]["torch"] == torch.__version__
    assert data["machine"]["cores"] >= 1
    assert (data["settings"]["steps"], data["settings"]["repeats"], data["settings"]["views"]) == (1, 2, False)
    assert [model["name"] for model in data["models"]] == ["supernet-own", "tiny"]
    assert [model["world_size"] for model in data["models"]] == [2, 1]
    assert [model["at_most"] for model in data["models"]] == [0.8, 1.2]
    for model in data["models"]:
        assert [result["name"] for result in model["contestants"]] == NAMES
        assert model["name"] in done.stdout
        assert f"<= {model['at_most']:.2f}" in done.stdout
    assert len(done.stderr.splitlines()) == len(data["models"])


def test_medians_and_ratios_are_those_of_the_repetitions(report):
    for model in report[0]["models"]:
        results = results_of(model)
        for result in results.values():
            assert result["skipped"] is None
            assert len(result["steps_ms"]) == 2
            assert min(result["steps_ms"]) > 0
            assert math.isclose(result["milliseconds"]["median"], sum(result["steps_ms"]) / 2)
        assert set(results[model["reference"]]["ratio"].values()) == {1.0}
        assert model["met"] == (results["ppe_ddp"]["ratio"]["median"] <= model["at_most"])


def test_what_is_sent_is_what_exists(report):
    shares = {"supernet-own": 2 / 4, "tiny": 1}
    for model in report[0]["models"]:
        assert model["existing_nbytes"] == shares[model["name"]] * model["parameter_nbytes"]
        sent = {name: result["traffic"]["gradient_nbytes"] for name, result in results_of(model).items()}
        alone = model["world_size"] == 1
        exist, everything = (0, 0) if alone else (model["existing_nbytes"], model["parameter_nbytes"])
        assert sent == {"ppe_ddp": exist, "torch": everything, "ppe": exist, "bare": 0}


def test_presence_costs_less_than_ppes(report):
    for model in report[0]["models"]:
        control = {name: result["traffic"]["control_nbytes"] for name, result in results_of(model).items()}
        if model["world_size"] > 1:
            assert 0 < control["ppe_ddp"] < control["ppe"] == 8 * model["parameters"]


def test_the_ranks_of_a_launcher_are_used_and_ppe_may_be_missing(tmp_path):
    (tmp_path / "pytorch_pfn_extras.py").write_text("raise ImportError('not here')")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    words = [*TINY_RUN, "--model=supernet-own", "--json=-"]
    done = ppe_ddp(*words, launcher=launcher, path=tmp_path)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert [model["world_size"] for model in data["models"]] == [2]
    for model in data["models"]:
        assert "not here" in results_of(model)["ppe"]["skipped"]
    assert "ppe skipped: pytorch-pfn-extras is not installed (not here)" in done.stderr
    ours = results_of(data["models"][0])["ppe_ddp"]
    assert ours["traffic"]["gradient_nbytes"] == data["models"][0]["existing_nbytes"]


def test_a_launchers_environment_that_is_wrong_is_named(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert cli.main(["bench", "step"]) == 2
    assert "MASTER_PORT" in capsys.readouterr().err


def test_gradient_bytes_are_those_that_are_there():
    module = nn.ModuleList([nn.Linear(2, 3), nn.Linear(2, 3)])
    module[0](torch.zeros(1, 2)).sum().backward()
    assert bench_contestants.gradient_nbytes(module) == 4 * (2 * 3 + 3)


# --- collectives

MPIRUN = shutil.which("mpirun", path=Path(sys.executable).parent)
needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="needs the extra [mpi]")


@needs_mpirun
def test_collectives_side_by_side_under_the_mpirun_of_this_environment(tmp_path):
    file = tmp_path / "result.json"
    words = [word for name in OPERATIONS for word in ("--op", name)]
    done = ppe_ddp("bench", "collective", "--max-size", "3K", "--repeats", "2", *words, "--json", str(file))
    assert done.returncode == 0, done.stderr
    data = json.loads(file.read_text())
    assert data["settings"]["ranks"] == 2
    assert [(line["operation"], line["backend"]) for line in data["lines"][::10]] == [
        (name, "gloo") for name in OPERATIONS
    ]
    assert {line["wrong"] for line in data["lines"]} == {0}
    for gloo, mpi in zip(data["lines"][::2], data["lines"][1::2], strict=True):
        assert (gloo["backend"], mpi["backend"], mpi["nbytes"]) == ("gloo", "mpi4py", gloo["nbytes"])
        assert mpi["algbw"] == pytest.approx(mpi["nbytes"] / mpi["microseconds"] / 1e3)
        factor = 1.0 if mpi["operation"] in ("all_reduce", "broadcast") else 0.5
        assert mpi["busbw"] == pytest.approx(factor * mpi["algbw"])
    assert [line["nbytes"] for line in data["lines"][:10:2]] == [4, 32, 256, 2048, 3072]
    for text in ("Collectives", "busbw GB/s", "x gloo"):
        assert text in done.stdout


def test_a_wrong_sum_is_counted_and_is_an_exit_code(two_ranks):
    assert two_ranks.run(count_wrong_sums) == [5, 5]


def count_wrong_sums():
    whole, part = torch.zeros(5), torch.zeros(2)

    def broken(whole, _part, _group):
        return whole  # sums nothing

    operations = {"all_reduce": (broken, *OPERATIONS["all_reduce"][1:])}
    with mock.patch.dict(OPERATIONS, operations):
        return _wrong("all_reduce", whole, part, dist.group.WORLD)


def test_loads_side_by_side(tmp_path):
    file = tmp_path / "result.json"
    done = ppe_ddp("bench", "load", "--ranks", "2", "--size", "1M", "--repeats", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    data = json.loads(file.read_text())
    assert data["settings"] == {"ranks": 2, "backend": "gloo", "size": 1 << 20, "repeats": 1}
    lines = {line["name"]: line for line in data["lines"]}
    assert [*lines][:2] == ["torch", "ppe_ddp"]
    installed = importlib.util.find_spec("accelerate") is not None
    assert ("ppe_ddp, files" in lines) == ("accelerate" in lines) == installed
    for line in lines.values():
        assert line["wrong"] == 0
        assert len(line["peak_nbytes"]) == 2
    assert lines["torch"]["ratio"]["median"] == 1
    for text in ("One load", "others MB", "in memory"):
        assert text in done.stdout


@pytest.mark.parametrize(("text", "size"), [("4", 4), ("64K", 65536), ("32m", 32 << 20), ("1G", 1 << 30)])
def test_sizes(text, size):
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["0", "-1", "1.5M", "4KB", "", "many"])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="number of bytes"):
        size_of(text)


@needs_mpirun
def test_a_step_under_mpirun_has_more_contestants(tmp_path):
    file = tmp_path / "result.json"
    command = [MPIRUN, "-n", "2", sys.executable, "-m", "ppe_ddp", *TINY_RUN, "--model", "small"]
    command += ["--mpi-thread", "--json", str(file)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    names = [result["name"] for result in json.loads(file.read_text())["models"][0]["contestants"]]
    assert names == ["ppe_ddp", "over mpi4py", "mpi thread", "torch", "ppe", "bare"]
    assert "over mpi4py" in done.stdout


def test_optimizers_are_measured_and_their_state_counted(two_ranks):
    lines, same = two_ranks.run(measure_optimizers, ["small"], 1, 2, 0)
    assert [line.name for line in lines] == list(OPTIMIZER_CONTESTANTS)
    assert lines == same
    state = {line.name: line.state_nbytes for line in lines}
    assert state["torch"] == state["ppe_ddp, whole"] == 2 * state["ppe_ddp"] == 2 * state["zero"]
    assert all(line.milliseconds.median > 0 for line in lines)
    assert next(line.to_zero.median for line in lines if line.name == "zero") == 1.0
