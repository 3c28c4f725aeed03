"""Tables of benchmarks fit a terminal of 80 columns, also with large numbers."""

import contextlib
import io

import pytest

from ppe_ddp.benchmarks import bench_collective, bench_compression, bench_load, bench_optimizer
from ppe_ddp.benchmarks.bench_collective import CollectiveResult
from ppe_ddp.benchmarks.bench_compression import CompressionLine
from ppe_ddp.benchmarks.bench_load import LoadResult
from ppe_ddp.benchmarks.bench_optimizer import OptimizerResult
from ppe_ddp.benchmarks.bench_result import ContestantResult, ModelResult, Spread, Traffic
from ppe_ddp.benchmarks.bench_table import print_step_table
from ppe_ddp.cli import COMMANDS, main

CAPTION = "2 ranks over gloo; a processor with a name of many words, as they have, @ 2.45GHz, 2 cores; torch 2.13.0+cpu"
TIME, RATIO = Spread(1234.5, 1198.7, 1301.2), Spread(1.06, 0.98, 1.12)


def step(file):
    contestants = [
        ContestantResult(name, None, TIME, RATIO, 12.345, Traffic(33600000, 123456))
        for name in ("torch", "over mpi4py")
    ]
    contestants += [
        ContestantResult("ppe_ddp", None, TIME, RATIO, None, Traffic(0, 0)),
        ContestantResult("ppe", "away"),
    ]
    models = [
        ModelResult(name, "a title", 2, 3, 9, 9, 9, "torch", tuple(contestants))
        for name in ("supernet-common", "transformer-bf16")
    ]
    print_step_table(models, CAPTION, file)


def optimizer(file):
    names = bench_optimizer.CONTESTANTS
    lines = [
        OptimizerResult("transformer", name, 2, time, ratio, ratio, 10**8)
        for name in names
        for time, ratio in ((TIME, RATIO), (Spread(53.62, 48.11, 62.05), Spread(9.12, 8.34, 10.56)))
    ]
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


def compression(file):
    lines = [
        CompressionLine(name, 2, nbytes, 10**9, 12.3456, 1.0, nbytes and 99999.9, nbytes and 1.0)
        for name in bench_compression.METHODS
        for nbytes in (10**9, None)
    ]
    bench_compression._print(lines, 100000, file)


@pytest.mark.parametrize("shown", [step, optimizer, load, collective, compression], ids=lambda shown: shown.__name__)
def test_tables_fit(shown):
    file = io.StringIO()
    shown(file)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80, max(lines, key=len)
    text = " ".join(file.getvalue().split())
    assert ("without compression" if shown is compression else "2.45GHz") in text  # nothing was cut off
    assert "…" not in text
    for word in ("target", "met", "missed"):
        assert word not in text.split()


@pytest.mark.parametrize("command", ["", "bench", *(" ".join(one.words) for one in COMMANDS)])
def test_help_fits(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.suppress(SystemExit):
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert "usage" in text
    assert max(map(len, text.splitlines())) <= 80
