"""The command line: its commands and arguments, and the form of results. Never how long anything takes."""

import argparse
import contextlib
import gzip
import importlib.util
import io
import json
import math
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ppe_ddp import cli
from ppe_ddp.benchmarks import bench_contestants, bench_load, bench_measure, bench_optimizer
from ppe_ddp.benchmarks.bench_collective import OPERATIONS, _wrong
from ppe_ddp.benchmarks.bench_collective import measure as measure_collectives
from ppe_ddp.benchmarks.bench_contestants import CONTESTANTS, Ours, Ppe, Traffic
from ppe_ddp.benchmarks.bench_measure import RankResult, Settings, measure, workload_named
from ppe_ddp.benchmarks.bench_models import WORKLOADS, TransformerBf16
from ppe_ddp.benchmarks.bench_optimizer import CONTESTANTS as OPTIMIZER_CONTESTANTS
from ppe_ddp.benchmarks.bench_optimizer import measure as measure_optimizers
from ppe_ddp.benchmarks.bench_platform import Platform
from ppe_ddp.benchmarks.bench_result import Spread, combine
from ppe_ddp.cli.arguments import size_of
from ppe_ddp.testing import RankError
from reports import report_in
from subprocesses import MPIRUN, needs_mpirun, run

NAMES = [kind.name for kind in CONTESTANTS]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
TINY_RUN = ["bench", "step", "--quick", "--steps", "1", "--repeats", "2"]


def called(*words):
    """The command in this process: its exit code, output and errors, without a process of its own."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


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


class SmallTransformerBf16(TransformerBf16):
    vocabulary, width, depth, sequences, length = 101, 128, 2, 2, 8


SMALL = [SmallTransformerBf16() if isinstance(one, TransformerBf16) else one for one in WORKLOADS]


@pytest.mark.parametrize("workload", SMALL, ids=lambda workload: workload.name)
def test_every_step_of_a_model_gives_gradients_that_are_numbers(workload):
    torch.manual_seed(0)
    model = workload.build()
    batch = workload.batch(torch.Generator().manual_seed(0))
    workload.loss(model(batch, *workload.route(0, 0, 0)), batch).backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert (len(gradients) < len(list(model.parameters()))) == workload.is_dynamic
    smallest_normal = torch.finfo(torch.float32).tiny
    half = workload.name == "transformer-bf16"
    for gradient in gradients:
        assert gradient.dtype == (torch.bfloat16 if half else torch.float32)
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
    launches = {"ppe_ddp": [1e-6 * len(seconds), 3e-6]}
    return RankResult(seconds, traffic, bytes(present), (4, 40, 400), dict(skipped), launches)


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
    assert (model.parameter_nbytes, model.existing_nbytes) == (444, 404)
    assert [result.name for result in model.contestants] == NAMES
    assert [result.skipped for result in model.contestants] == [None, None, "away", None]
    assert model.ours.launch_us == Spread.of([3.0, 3.0, 3.0, 3.0])
    assert [result.launches for result in model.contestants] == [4, 0, 0, 0]


# --- the whole command


@pytest.fixture(scope="module")
def report(tmp_path_factory, two_ranks):
    """One run of the command: its result as data, and as text. Two ranks are those that are there already."""
    file = tmp_path_factory.mktemp("bench") / "result.json"
    models = [f"--model={name}" for name in ("supernet-own", "tiny")]
    start = Platform.start

    def started(platform, ranks):
        return contextlib.nullcontext(two_ranks) if ranks == 2 else start(platform, ranks)

    with mock.patch.object(Platform, "start", started):
        done = called(*TINY_RUN, *models, "--no-views", "--json", str(file))
    assert done.returncode == 0, done.stderr
    return report_in(file.read_text()), done


def results_of(model):
    return {result["name"]: result for result in model["contestants"]}


def test_everything_is_in_the_report(report):
    data, done = report
    assert data["versions"]["torch"] == torch.__version__
    assert data["machine"]["cores"] >= 1
    assert data["settings"]["platform"] == {
        "device": "cpu",
        "device_name": None,
        "devices": 0,
        "backend": "gloo",
        "nccl": None,
    }
    assert "cpu over gloo" in done.stdout
    assert (data["settings"]["steps"], data["settings"]["repeats"], data["settings"]["views"]) == (1, 2, False)
    assert [model["name"] for model in data["models"]] == ["supernet-own", "tiny"]
    assert [model["world_size"] for model in data["models"]] == [2, 1]
    for model in data["models"]:
        assert [result["name"] for result in model["contestants"]] == NAMES
        assert model["name"] in done.stdout
        assert max(map(len, done.stdout.splitlines())) <= 80
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
    traces = tmp_path / "new" / "traces"
    launcher = [MPIRUN, "-n", "2", sys.executable] if MPIRUN else [sys.executable, *TORCHRUN]
    command = [
        *launcher,
        "-m",
        "ppe_ddp",
        *TINY_RUN,
        "--model=supernet-own",
        "--json=-",
        f"--trace={traces}",
        "--by-gloo",
        "--bucket-size=0.5",
    ]
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    code, output, errors = run([*command, *(["--mpi-thread"] if MPIRUN else [])], timeout=150, environment=environment)
    assert code == 0, errors
    (model,) = report_in(output)["models"]
    assert model["world_size"] == 2
    results = results_of(model)
    assert "ppe skipped: pytorch-pfn-extras is not installed (not here)" in errors
    assert "not here" in results["ppe"]["skipped"]
    assert results["ppe_ddp"]["traffic"]["gradient_nbytes"] == model["existing_nbytes"]
    more = ["by gloo", *(["over mpi4py", "mpi thread"] if MPIRUN else [])]
    assert [*results] == ["ppe_ddp", "0.5 MiB", *more, "torch", "ppe", "bare"]
    assert all(name in errors for name in results)
    assert f"traces: {traces}/" in errors
    check_traces(traces)


def check_traces(folder):
    """One picture a contestant and rank: three steps with their collectives, and in ours what the engine does."""
    names = [f"supernet-own-{name}-rank{rank}.json.gz" for name in ("ppe_ddp", "torch") for rank in (0, 1)]
    assert sorted(file.name for file in folder.iterdir()) == names
    for name in names:
        events = json.loads(gzip.decompress((folder / name).read_bytes()))["traceEvents"]
        spans = [event["name"] for event in events if event.get("ph") == "X"]
        if "torch" in name:  # of sums in shared memory torch's profiler sees nothing
            assert sum("allreduce" in span or "all_reduce" in span for span in spans) >= 3
        assert {"step 0", "step 1", "step 2"} <= set(spans)
        ours = {span for span in spans if span.startswith("ppe_ddp.")}
        expected = {"ppe_ddp.negotiate", "ppe_ddp.launch[0]", "ppe_ddp.finish"}
        assert expected <= ours if "ppe_ddp" in name else not ours


def test_the_hosts_time_for_a_bucket_is_in_the_report(report):
    data, _ = report
    for model in data["models"]:
        results = results_of(model)
        sends = ["ppe_ddp"] if model["world_size"] > 1 else []
        assert [name for name, result in results.items() if result["launch_us"]] == sends
        assert [name for name, result in results.items() if result["launches"]] == sends
    for model in data["models"][:1]:
        ours = results_of(model)["ppe_ddp"]
        assert ours["launches"] >= 2 * model["world_size"]  # a bucket or more in each repetition, on each rank
        assert 0 < ours["launch_us"]["lower"] <= ours["launch_us"]["upper"] < 1e3 * max(ours["steps_ms"])


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


@needs_mpirun
def test_collectives_side_by_side_under_the_mpirun_of_this_environment(tmp_path, monkeypatch, capfd):
    file = tmp_path / "result.json"
    words = [word for name in OPERATIONS for word in ("--op", name)]
    words += ["--min-size", "256", "--max-size", "3K", "--repeats", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["ppe_ddp", "bench", "collective", *words])
    code = cli.main(sys.argv[1:])
    output, errors = capfd.readouterr()
    assert code == 0, errors
    data = report_in(file.read_text())
    assert data["settings"]["ranks"] == 2
    assert [(line["operation"], line["backend"]) for line in data["lines"][::6]] == [
        (name, "gloo") for name in OPERATIONS
    ]
    assert {line["wrong"] for line in data["lines"]} == {0}
    for gloo, mpi in zip(data["lines"][::2], data["lines"][1::2], strict=True):
        assert (gloo["backend"], mpi["backend"], mpi["nbytes"]) == ("gloo", "mpi4py", gloo["nbytes"])
        assert mpi["algbw"] == pytest.approx(mpi["nbytes"] / mpi["microseconds"] / 1e3)
        factor = 1.0 if mpi["operation"] in ("all_reduce", "broadcast") else 0.5
        assert mpi["busbw"] == pytest.approx(factor * mpi["algbw"])
    assert [line["nbytes"] for line in data["lines"][:6:2]] == [256, 2048, 3072]
    for text in ("Collectives", "2 ranks on cpu", "busbw", "x gloo"):
        assert text in output


def test_collectives_on_ranks_of_its_own(two_ranks):
    """As with --device cuda, where the first backend is NCCL."""
    arguments = argparse.Namespace(op=["reduce_scatter"], dtype="int64", min_size=64, max_size=64, repeats=1)
    for (line,) in two_ranks.run(measure_collectives, arguments, Platform()):
        assert (line.operation, line.backend, line.nbytes, line.wrong) == ("reduce_scatter", "gloo", 64, 0)


def test_a_wrong_sum_is_counted_and_is_an_exit_code(two_ranks):
    assert two_ranks.run(count_wrong_sums) == [5, 5]


def count_wrong_sums():
    whole, part = torch.zeros(5), torch.zeros(2)

    def broken(whole, _part, _group):
        return whole  # sums nothing

    operations = {"all_reduce": (broken, *OPERATIONS["all_reduce"][1:])}
    with mock.patch.dict(OPERATIONS, operations):
        return _wrong("all_reduce", whole, part, dist.group.WORLD)


def test_loads_side_by_side(tmp_path, two_ranks):
    file = tmp_path / "result.json"
    with mock.patch.object(bench_load, "Ranks", return_value=contextlib.nullcontext(two_ranks)):
        done = called("bench", "load", "--ranks", "2", "--size", "200K", "--repeats", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    data = report_in(file.read_text())
    assert data["settings"] == {"ranks": 2, "backend": "gloo", "size": 200 << 10, "repeats": 1}
    lines = {line["name"]: line for line in data["lines"]}
    assert [*lines][:2] == ["torch", "ppe_ddp"]
    installed = importlib.util.find_spec("accelerate") is not None
    assert ("ppe_ddp, files" in lines) == ("accelerate" in lines) == installed
    for line in lines.values():
        assert line["wrong"] == 0
        assert len(line["peak_nbytes"]) == 2
    assert lines["torch"]["ratio"]["median"] == 1
    for text in ("One load", "others", "from memory"):
        assert text in done.stdout


@pytest.mark.parametrize(("text", "size"), [("4", 4), ("64K", 65536), ("32m", 32 << 20), ("1G", 1 << 30)])
def test_sizes(text, size):
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["0", "-1", "1.5M", "4KB", "", "many"])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="number of bytes"):
        size_of(text)


def test_optimizers_are_measured_and_their_state_counted(two_ranks, capsys):
    lines, same = two_ranks.run(measure_optimizers, ["small"], 1, 1, 0)
    assert [line.name for line in lines] == list(OPTIMIZER_CONTESTANTS)
    bench_optimizer._publish(argparse.Namespace(json="-", steps=1, repeats=1), lines)
    printed = capsys.readouterr()
    assert [line["name"] for line in report_in(printed.out)["lines"]] == list(OPTIMIZER_CONTESTANTS)
    assert max(map(len, printed.err.splitlines())) <= 80
    assert lines == same
    state = {line.name: line.state_nbytes for line in lines}
    assert state["torch"] == state["ppe_ddp, whole"] == 2 * state["ppe_ddp"] == 2 * state["zero"]
    assert all(line.milliseconds.median > 0 for line in lines)
    assert next(line.to_zero.median for line in lines if line.name == "zero") == 1.0
