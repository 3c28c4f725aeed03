"""Tables of benchmarks fit a terminal of 80 columns, also with large numbers."""

import contextlib
import io

import pytest

from ppe_ddp.benchmarks import bench_collective, bench_load, bench_optimizer
from ppe_ddp.benchmarks.bench_collective import CollectiveResult
from ppe_ddp.benchmarks.bench_load import LoadResult
from ppe_ddp.benchmarks.bench_optimizer import OptimizerResult
from ppe_ddp.benchmarks.bench_result import ContestantResult, ModelResult, Spread, Traffic
from ppe_ddp.benchmarks.bench_table import print_step_table
from ppe_ddp.cli import main

BENCHMARKS = ("step", "optimizer", "load", "collective")
CAPTION = "2 ranks over gloo; a processor with a name of many words, as they have, @ 2.45GHz, 2 cores; torch 2.13.0+cpu"
TIME, RATIO = Spread(1234.5, 1198.7, 1301.2), Spread(1.06, 0.98, 1.12)


def step(file):
    contestants = [
        ContestantResult(name, None, TIME, RATIO, Traffic(33600000, 123456)) for name in ("torch", "over mpi4py")
    ]
    contestants += [ContestantResult("ppe_ddp", None, TIME, RATIO, Traffic(0, 0)), ContestantResult("ppe", "away")]
    models = [
        ModelResult(name, "a title", 2, 3, 9, 9, 9, "torch", 0.5, False, tuple(contestants))
        for name in ("supernet-common", "transformer-bf16")
    ]
    print_step_table(models, CAPTION, file)


def optimizer(file):
    names = ["ppe_ddp", "zero", "torch", "over mpi4py"]
    lines = [OptimizerResult("transformer", name, 2, TIME, RATIO, RATIO, 10**8) for name in names]
    bench_optimizer._print_table(lines, CAPTION, file)


def load(file):
    lines = [
        LoadResult(name, bench_load.CONTESTANTS[name][0], TIME, RATIO, [10**10, 10**10], 0)
        for name in bench_load.CONTESTANTS
    ]
    bench_load._print_table(lines, CAPTION, file)


def collective(file):
    backends = ("nccl", "cupy_nccl")
    lines = [
        CollectiveResult("reduce_scatter", name, 2**30, "float32", 123456.7, 12.345, 12.345, 0) for name in backends
    ]
    bench_collective._print_table(lines, CAPTION, file)


@pytest.mark.parametrize("shown", [step, optimizer, load, collective], ids=lambda shown: shown.__name__)
def test_tables_fit(shown):
    file = io.StringIO()
    shown(file)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    text = " ".join(file.getvalue().split())
    assert "2.45GHz" in text  # nothing was cut off
    assert "…" not in text
    for word in ("target", "met", "missed"):
        assert word not in text.split()


@pytest.mark.parametrize("command", ["", "env", "doctor", "bench", *(f"bench {one}" for one in BENCHMARKS)])
def test_help_fits(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert "usage" in text
    assert max(map(len, text.splitlines())) <= 80
