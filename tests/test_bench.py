"""`bench step`, `collective` and `compression`: what is measured is right, and what is told is what was measured.

Never how long anything takes. Those on a GPU are for `make test-gpu`: two ranks, which share one if there is no second.
"""

import argparse
import json
import math
import os
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from little_models import on_ranks_with_little_models
from ppe_ddp import cli
from ppe_ddp.backends.cupy_nccl import nccl_library
from ppe_ddp.cli import bench_step, benchmarking
from ppe_ddp.cli.bench_collective import OPERATIONS, count_wrong
from ppe_ddp.cli.bench_collective import measure as measure_collectives
from ppe_ddp.cli.bench_compression import METHODS
from ppe_ddp.cli.bench_step import WORKLOADS, GradientMismatchError, compare, measure, tolerance
from ppe_ddp.cli.benchmarking import BACKENDS, Platform, Spread, in_turn
from ppe_ddp.testing import RankError
from subprocesses import MPIRUN, needs_mpirun, run, warm_python

NCCL = BACKENDS["cuda"][0]
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
CONTESTANTS = ["ppe_ddp", "torch", "ppe", "bare"]


def reported(two_ranks, folder, *words):
    """What a command writes and prints, on two ranks that are there already."""
    file = folder / "result.json"
    with on_ranks_with_little_models(two_ranks):
        assert cli.main(["bench", *words, "--json", str(file)]) == 0
    return json.loads(file.read_text())


# --- models


def test_every_step_of_a_model_gives_gradients_that_are_numbers():
    for name, workload in WORKLOADS.items():
        if name == "transformer-bf16":
            continue  # some minutes on a CPU
        torch.manual_seed(0)
        model = workload.build()
        batch = workload.batch(torch.Generator().manual_seed(0))
        workload.loss(model(batch, *workload.route(0, 0)), batch).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert (len(gradients) < len(list(model.parameters()))) == workload.is_dynamic, name
        for gradient in gradients:
            assert gradient.isfinite().all()
            assert gradient.abs().max() > torch.finfo(torch.float32).tiny, name


def test_branches_follow_from_seed_and_step():
    common, own = WORKLOADS["supernet-common"], WORKLOADS["supernet-own"]
    for step in range(5):
        assert common.route(step, 0) == common.route(step, 0) == common.route(step, 1)
        (paths,) = zip(*(own.route(step, rank) for rank in range(4)), strict=True)
        for layer in zip(*paths, strict=True):
            assert sorted(layer) == [0, 1, 2, 3]
    assert len({common.route(step, 0) for step in range(5)}) > 1


# --- bench step


@pytest.fixture(scope="module")
def report(tmp_path_factory, two_ranks):
    words = ["--steps", "1", "--repeats", "2", "--model", "supernet-own", "--model", "small"]
    return reported(two_ranks, tmp_path_factory.mktemp("bench"), "step", *words)


def test_everything_is_in_the_report(report):
    assert report["versions"]["torch"] == torch.__version__
    assert report["machine"]["cores"] >= 1
    settings = report["settings"]
    assert (settings["steps"], settings["repeats"], settings["also"]) == (1, 2, [])
    assert settings["platform"]["backend"] == "gloo"
    assert [(model["name"], model["world_size"]) for model in report["models"]] == [("supernet-own", 2), ("small", 2)]
    for model in report["models"]:
        assert [result["name"] for result in model["contestants"]] == CONTESTANTS
        assert model["skipped"] == {}
        for result in model["contestants"]:
            assert len(result["steps_ms"]) == 2
            assert min(result["steps_ms"]) > 0
            assert math.isclose(result["milliseconds"]["median"], sum(result["steps_ms"]) / 2)
        assert set(model["contestants"][1]["ratio"].values()) == {1.0}


def test_what_is_sent_is_what_exists_and_presence_costs_less_than_ppes(report):
    for model, share in zip(report["models"], (2 / 4, 1), strict=True):
        exist, everything = model["existing_nbytes"], model["parameter_nbytes"]
        assert exist == share * everything
        sent = {result["name"]: result["gradient_nbytes"] for result in model["contestants"]}
        assert sent == {"ppe_ddp": exist, "torch": everything, "ppe": exist, "bare": 0}
        control = {result["name"]: result["control_nbytes"] for result in model["contestants"]}
        assert control["ppe"] == 8 * model["parameters"]
        # The fields of the mask beside presence are more than ppe's 512 bytes for the supernet's 64 parameters.
        assert 0 < control["ppe_ddp"] < max(control["ppe"], 700)


def take_turns():
    """Rank 1 is slow in the first contestant alone, and counts what each takes."""
    taken, now = {"a": [], "b": []}, [0.0]

    class Clock(Platform):
        def clock(self):
            return now[0]

    def take(name, steps):
        taken[name].append(steps)
        now[0] += steps * (1 + dist.get_rank() if name == "a" else 1)

    takes = {name: lambda steps, name=name: take(name, steps) for name in taken}
    return in_turn(takes, {"a": 2, "b": 3}, 4, Clock(), None), taken


def test_a_step_takes_as_long_as_on_the_slowest_rank_behind_one_that_warms_caches(two_ranks):
    taken = {"a": [1, 2] * 4, "b": [1, 3] * 4}
    assert two_ranks.run(take_turns) == [({"a": [2.0] * 4, "b": [1.0] * 4}, taken)] * 2


def compared(seconds, ranks=2):
    found = compare(seconds, {name: (8, 1) for name in seconds}, ranks)
    assert found["reference"] == ("torch" if ranks > 1 else "bare")
    return {result["name"]: result for result in found["contestants"]}


def test_ratios_are_taken_within_a_repetition():
    ours = compared({"ppe_ddp": [2.0, 8.0, 3.0], "torch": [2.0, 4.0, 2.0], "bare": [1.0, 1.0, 1.0]})["ppe_ddp"]
    assert ours["steps_ms"] == [2000.0, 8000.0, 3000.0]
    assert ours["ratio"] == Spread(median=1.5, lower=1.25, upper=1.75)
    assert (ours["gradient_nbytes"], ours["control_nbytes"]) == (8, 1)


def test_what_a_step_takes_beyond_the_bare_one_by_medians():
    seconds = {"ppe_ddp": [2.0, 9.0, 1.5], "torch": [5.0, 4.0, 5.0], "bare": [1.0, 1.0, 1.0]}
    found = {name: result["over_bare_ms"] for name, result in compared(seconds).items()}
    assert found == {"ppe_ddp": 1000.0, "torch": 4000.0, "bare": 0.0}


def measure_wrongly(settings):
    def sum_only(gradients, group):
        for gradient in gradients:
            dist.all_reduce(gradient, group=group)

    wrap = bench_step._ours
    with mock.patch.object(bench_step, "_ours", lambda options, *rest: wrap({"reduce_function": sum_only}, *rest)):
        measure(settings, Platform())


def test_contestants_that_compute_something_else_are_not_timed(two_ranks):
    settings = {"models": ["supernet-common"], "steps": 1, "repeats": 1, "also": [], "adamw": False}
    with pytest.raises(RankError) as caught:
        two_ranks.run(measure_wrongly, settings)
    for error in caught.value.exceptions.values():
        assert isinstance(error, GradientMismatchError)
        assert "step 0" in str(error)
        assert "ppe_ddp has a gradient of 'branches." in str(error)


def test_coarse_types_may_differ_by_more():
    assert tolerance(torch.float32) == tolerance(torch.float64) == 1e-5
    assert 0.01 < tolerance(torch.bfloat16) < 0.05
    assert tolerance(torch.float32) < tolerance(torch.float16) < tolerance(torch.bfloat16)


@needs_mpirun
def test_the_ranks_of_a_launcher_are_used_and_ppe_may_be_missing(tmp_path):
    (tmp_path / "pytorch_pfn_extras.py").write_text("raise ImportError('not here')")
    words = ["--quick", "--steps=1", "--repeats=1", "--model=supernet-own", "--json=-", "--also", "shared_memory=False"]
    words = ["bench", "step", *words, "--also=bucket_cap_mb=0.5"]
    command = [MPIRUN, "-n", "2", *warm_python(), "-m", "ppe_ddp", *words]
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]), "COLUMNS": "80"}
    code, output, errors = run(command, timeout=150, environment=environment)
    assert code == 0, errors
    (model,) = json.loads(output)["models"]
    assert "ppe skipped: pytorch-pfn-extras is not installed (not here)" in errors
    assert "not here" in model["skipped"]["ppe"]
    results = {result["name"]: result for result in model["contestants"]}
    assert [*results] == ["ppe_ddp", "shared_memory=False", "bucket_cap_mb=0.5", "over mpi4py", "torch", "bare"]
    assert results["ppe_ddp"]["gradient_nbytes"] == model["existing_nbytes"]
    assert all(name in errors for name in results)
    assert max(map(len, errors.splitlines())) <= 80


def test_optimizers_are_measured_and_their_state_counted(two_ranks, tmp_path, capsys):
    words = ["--model", "small", "--steps", "1", "--repeats", "1", "--adamw"]
    (model,) = reported(two_ranks, tmp_path, "step", *words)["models"]
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "state MB" in out
    state = {result["name"]: result["state_nbytes"] for result in model["contestants"]}
    assert list(state) == ["ppe_ddp", "ppe_ddp, sharded", "ppe_ddp, overlap", "torch, zero", "torch", "ppe", "bare"]
    whole, sharded = state["torch"], state["ppe_ddp, sharded"]
    assert list(state.values()) == [whole, sharded, sharded, sharded, whole, whole, whole]
    assert whole == 2 * sharded == 2 * model["parameter_nbytes"]


# --- what is refused


@pytest.fixture
def gpus(monkeypatch):
    """What torch says of itself on a machine with this many GPUs; no more than the platform asks for."""

    def pretend(count, nccl):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl is not None)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)
        monkeypatch.setattr(nccl_library, "loaded_files", tuple)
        monkeypatch.delenv(SHARING, raising=False)

    with mock.patch.dict(os.environ):
        yield pretend


def test_what_cannot_be_measured_is_refused_before_a_rank_starts(gpus, capsys):
    gpus(0, None)
    with mock.patch("multiprocessing.process.BaseProcess.start", side_effect=AssertionError("a rank was started")):
        for command in ("step", "collective"):
            assert cli.main(["bench", command, "--device", "cuda"]) == 2
            out, err = capsys.readouterr()
            assert (out, len(err.splitlines())) == ("", 1)
            assert "sees no GPU" in err
        assert cli.main(["bench", "step", "--backend", NCCL]) == 2
        assert f"--backend {NCCL} is not for --device cpu, which has gloo" in capsys.readouterr().err
        assert cli.main(["bench", "collective", "--min-size", "64", "--max-size", "4"]) == 2
        assert "--min-size 64 is more than --max-size 4" in capsys.readouterr().err
        with pytest.raises(SystemExit):  # no file can be made there
            cli.main(["bench", "step", "--json", "/proc/result.json"])
        assert "'/proc/result.json' cannot be written" in capsys.readouterr().err
        gpus(1, (2, 29, 1))
        for command in ("step", "collective"):
            assert cli.main(["bench", command, "--device", "cuda"]) == 2
            assert "2 ranks would share 1 GPUs" in capsys.readouterr().err


def test_a_launchers_environment_that_is_wrong_is_named(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert cli.main(["bench", "step"]) == 2
    assert "MASTER_PORT" in capsys.readouterr().err


def test_what_is_missing_is_named_with_a_remedy(gpus):
    gpus(1, None)
    assert Platform.of("cuda", "gloo") == Platform("cuda", "gloo")
    with pytest.raises(ValueError, match="built without NCCL; take --backend gloo"):
        Platform.of("cuda")
    with mock.patch.dict("sys.modules", {"cupy": None}), pytest.raises(ImportError, match="pip install"):
        Platform.of("cuda", "cupy_nccl")


@pytest.mark.parametrize("backend", BACKENDS["cuda"])
def test_more_ranks_than_gpus_need_an_nccl_that_shares_them(gpus, backend):
    platform = Platform("cuda", backend)
    gpus(2, (2, 29, 1))
    platform.start(2)
    assert SHARING not in os.environ
    if backend == "gloo":
        platform.start(3)
        return
    with pytest.raises(ValueError, match=r"3 ranks would share 2 GPUs, which NCCL 2\.29\.1 .* take --backend gloo"):
        platform.start(3)
    gpus(2, (2, 30, 0))
    platform.start(3)
    assert os.environ[SHARING] == "1"


def test_the_clock_is_read_when_the_device_is_at_rest_and_a_caption_says_on_what(gpus, monkeypatch):
    gpus(2, (2, 30, 3))
    order = mock.Mock()
    monkeypatch.setattr(torch.cuda, "synchronize", order.synchronize)
    monkeypatch.setattr(benchmarking, "perf_counter", order.perf_counter)
    Platform("cuda", NCCL).clock()
    assert order.mock_calls == [mock.call.synchronize(), mock.call.perf_counter()]
    assert str(Platform()) == "cpu over gloo"
    assert str(Platform("cuda", NCCL)) == f"cuda (2 x Some GPU, NCCL 2.30.3) over {NCCL}"
    assert str(Platform("cuda", "gloo")) == "cuda (2 x Some GPU) over gloo"


# --- bench collective


@pytest.mark.long
@needs_mpirun
def test_collectives_side_by_side_under_the_mpirun_of_this_environment(tmp_path, monkeypatch, capfd):
    file = tmp_path / "result.json"
    words = [word for name in OPERATIONS for word in ("--op", name)]
    words += ["--min-size", "256", "--max-size", "3K", "--repeats", "1", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["ppe_ddp", "bench", "collective", *words])
    monkeypatch.setenv("COLUMNS", "80")
    code = cli.main(sys.argv[1:])
    output, errors = capfd.readouterr()
    assert code == 0, errors
    data = json.loads(file.read_text())
    assert data["settings"]["ranks"] == 2
    lines = data["lines"]
    assert [(line["operation"], line["backend"]) for line in lines[::6]] == [(name, "gloo") for name in OPERATIONS]
    assert {line["wrong"] for line in lines} == {0}
    for gloo, mpi in zip(lines[::2], lines[1::2], strict=True):
        assert (gloo["backend"], mpi["backend"], mpi["nbytes"]) == ("gloo", "mpi4py", gloo["nbytes"])
        assert mpi["algbw"] == pytest.approx(mpi["nbytes"] / mpi["microseconds"] / 1e3)
        factor = 1.0 if mpi["operation"] in ("all_reduce", "broadcast") else 0.5
        assert mpi["busbw"] == pytest.approx(factor * mpi["algbw"])
    assert [line["nbytes"] for line in lines[:6:2]] == [256, 2048, 3072]
    for text in ("Collectives", "2 ranks on cpu", "busbw", "x gloo"):
        assert text in output
    assert max(map(len, output.splitlines())) <= 80


def test_collectives_on_ranks_of_its_own(two_ranks):
    """As with --device cuda, where the first backend is NCCL."""
    arguments = argparse.Namespace(op=["reduce_scatter"], dtype="int64", min_size=64, max_size=64, repeats=1)
    for (line,) in two_ranks.run(measure_collectives, arguments, Platform()):
        found = line["operation"], line["backend"], line["nbytes"], line["wrong"]
        assert found == ("reduce_scatter", "gloo", 64, 0)


def test_a_wrong_sum_is_counted(two_ranks):
    assert two_ranks.run(count_wrong_sums) == [5, 5]


def count_wrong_sums():
    def broken(whole, _part, _group):
        return whole  # sums nothing

    with mock.patch.dict(OPERATIONS, {"all_reduce": (broken, *OPERATIONS["all_reduce"][1:])}):
        return count_wrong("all_reduce", torch.zeros(5), torch.zeros(2), dist.group.WORLD)


# --- bench compression


def test_every_compressor_sends_what_it_says_and_pays_on_a_slow_link(two_ranks, tmp_path, capsys):
    words = ["--width", "128", "--mbit", "1", "--repeats", "2"]
    report = reported(two_ranks, tmp_path, "compression", *words)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    assert [line["name"] for line in report["lines"]] == list(METHODS)
    assert report["settings"] == {"ranks": 2, "width": 128, "mbit": 1, "repeats": 2}
    lines = {line["name"]: line for line in report["lines"]}
    parts = {name: line["nbytes"] / line["whole_nbytes"] for name, line in lines.items() if line["nbytes"]}
    assert parts["none"] == 1.0
    assert parts["FP16"] == parts["BF16"] == 0.5
    assert 0.25 < parts["Int8"] < 0.27
    assert 0.03 < parts["Sign"] < 0.04
    assert parts["TopK(0.01)"] < 0.04
    assert parts["PowerSGD(4)"] < 0.1
    assert lines["none"]["error"] < 1e-6 < lines["FP16"]["error"] < lines["Int8"]["error"] < lines["Sign"]["error"] < 2
    assert (lines["none"]["pays_below"], lines["none"]["ratio"]) == (None, 1.0)
    for name in ("Int8", "TopK(0.01)", "PowerSGD(4)"):
        assert lines[name]["pays_below"] > 1
        assert lines[name]["ratio"] < 0.6


# --- on a GPU


def called(capfd, *words):
    """What the command prints; skipped, with its own reason, where it refuses to run."""
    code = cli.main(words)
    out, err = capfd.readouterr()
    if code == 2:
        pytest.skip(err.strip())
    assert code == 0, err
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS["cuda"])
def test_all_train_the_same_over_each_backend(backend, tmp_path, capfd):
    file = tmp_path / "result.json"
    words = ["bench", "step", "--device", "cuda", "--backend", backend, "--quick", "--json", str(file)]
    words += ["--model", "supernet-own", "--model", "transformer-bf16"]
    assert f"over {backend}" in called(capfd, *words)
    platform = json.loads(file.read_text())["settings"]["platform"]
    assert (platform["device_name"], platform["backend"]) == (torch.cuda.get_device_name(), backend)
    assert (platform["nccl"] is not None) == ("nccl" in backend)


@pytest.mark.gpu
def test_collectives_are_right_over_both_nccls(tmp_path, capfd):
    file = tmp_path / "result.json"
    words = [word for name in OPERATIONS for word in ("--op", name)]
    words += ["--max-size", "64K", "--repeats", "2", "--json", str(file)]
    assert "x nccl" in called(capfd, "bench", "collective", "--device", "cuda", *words)
    lines = json.loads(file.read_text())["lines"]
    assert lines[0]["backend"] == "nccl"
    assert {line["wrong"] for line in lines} == {0}
