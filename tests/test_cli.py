"""The command line: commands are found, arguments checked, help and tables fit 80 columns; `env` tells what is here."""

import argparse
import contextlib
import json
import os
import sys

import pytest
import torch

from benchmarks import COMMANDS as BENCHMARKS
from ppe_ddp import cli, torch_internals
from ppe_ddp.backends.cupy_nccl import nccl_library
from ppe_ddp.cli import doctor
from ppe_ddp.cli.benchmarking import Spread, print_table
from ppe_ddp.cli.command_line import count, size_of
from ppe_ddp.cli.doctor import candidates, many_ranks_a_device
from subprocesses import run, warm_python

# --- finding a command


def test_help_lists_every_command(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert command.words in out
        assert command.summary in out


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_half_a_command_lists_what_could_follow(words, capsys):
    assert cli.main(words) == 2
    assert "bench step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "wrong", "right"),
    [
        (["doctr"], "doctr", "doctor"),
        (["bench", "steps"], "bench steps", "bench step"),
        (["bench", "--quick"], "bench --quick", ""),
    ],
)
def test_an_unknown_command_is_named_with_the_nearest(words, wrong, right, capsys):
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert repr(wrong) in err.splitlines()[0]
    assert not right or f"did you mean {right!r}?" in err
    assert "bench step" in err


@pytest.mark.parametrize("program", [cli.COMMANDS, BENCHMARKS], ids=["ppe_ddp", "benchmarks"])
def test_help_fits_a_terminal(program, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    for words in ("", *(command.words for command in program)):
        with contextlib.suppress(SystemExit):
            cli.main([*words.split(), "--help"], program="python -m of_this", commands=program)
        text = capsys.readouterr().out
        assert "usage: python -m of_this" in text
        assert max(map(len, text.splitlines())) <= 80, words


# --- arguments and tables


@pytest.mark.parametrize(
    "words",
    [
        ["bench step", "--model", "huge"],
        ["bench step", "--ranks", "0"],
        ["bench step", "--steps", "-1"],
        ["bench step", "--also", "bucket_cap_mb=0"],
        ["bench step", "--also", "bucket_size=1"],
        ["bench step", "--json", "no/such/folder/result.json"],
        ["bench collective", "--max-size", "4KB"],
        ["doctor", "--setup", "no_such_module:register"],
        ["doctor", "--setup", "broken_backends"],
        ["doctor", "--timeout", "soon"],
    ],
    ids=" ".join,
)
def test_a_wrong_argument_is_named_before_anything_runs(words, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main([*words[0].split(), *words[1:]])
    assert caught.value.code == 2
    assert words[1] in capsys.readouterr().err


def test_values_of_arguments():
    sizes = {"4": 4, "64K": 65536, "32m": 32 << 20, "1G": 1 << 30}
    assert {text: size_of(text) for text in sizes} == sizes
    assert count("12") == 12
    for read, texts in ((size_of, ["0", "-1", "1.5M", ""]), (count, ["0", "1.5", "²", "much"])):
        for text in texts:
            with pytest.raises(argparse.ArgumentTypeError, match="should be"):
                read(text)


def test_a_table_fits_a_terminal_and_cuts_nothing_off(capsys):
    time = Spread(1234.5, 1198.7, 1301.2)
    rows = [("transformer-bf16, 2 ranks", time.text(1), time.text(2), "+1234.5", "1234.56"), (), ("a[mpi]",)]
    headings = ["", "ms a step", "ratio", "ms over bare", "MB sent"]
    print_table(argparse.Namespace(json="-"), "Of [what]", "a caption of many words, " * 5, headings, iter(rows))
    text = capsys.readouterr().err
    assert max(map(len, text.splitlines())) <= 80
    for part in ("1234 (1199-1301)", "1234.56", "a[mpi]", "Of [what]", torch.__version__):
        assert part in text
    assert "…" not in text
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([2.0, 9.0], beside=[1.0, 3.0]) == Spread(2.5, 2.25, 2.75)


# --- env


def test_env_tells_people_and_programs_the_same():
    script = "import sys; from ppe_ddp.cli import main; code = main(['env', '--json', '-']); "
    script += "assert 'mpi4py.MPI' not in sys.modules and 'cupy' not in sys.modules; sys.exit(code)"
    code, output, text = run([*warm_python(), "-c", script], timeout=150, environment={"COLUMNS": "80"})
    assert code == 0, text
    report = json.loads(output)
    assert report["command"] == "env"
    assert report["versions"]["torch"] == torch.__version__
    assert f"torch:              {torch.__version__}" in text
    assert [backend["name"] for backend in report["backends"]] == ["gloo", "mpi4py", "nccl", "cupy_nccl"]
    for backend in report["backends"]:
        assert bool(backend["missing"]) == bool(backend["remedy"])
        assert f"backend {backend['name']}:" in text
        assert backend["missing"] in " ".join(text.split())
    assert "launcher:           alone, rank 0 of 1" in text
    assert "torch internals:    tried with torch 2." in text
    assert max(map(len, text.splitlines())) <= 80
    assert os.path.dirname(sys.executable) not in output + text


@pytest.fixture
def here(monkeypatch):
    """Candidates by name, on a machine with CUDA 12 and these packages, whose libraries answer so."""

    def found(*packages, mpi=("MPICH 5", ""), cupy=("CuPy 14.2, NCCL 2.27.7", ""), mpirun="/mpirun"):
        monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: name if name in packages else None)
        monkeypatch.setattr(doctor, "_ask", {doctor._ASK_MPI: mpi, doctor._ASK_CUPY: cupy}.get)
        monkeypatch.setattr(doctor, "find_mpirun", lambda: mpirun)
        return {one.name: one for one in candidates()}

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    return found


@pytest.mark.parametrize(
    ("name", "packages", "changes", "missing", "remedy"),
    [
        ("mpi4py", ["mpi4py"], {}, "", ""),
        ("mpi4py", [], {}, "mpi4py is not installed", "[mpi]"),
        ("mpi4py", ["mpi4py"], {"mpi": ("", "no libmpi.so")}, "finds no MPI library (no libmpi.so)", "[mpi]"),
        ("mpi4py", ["mpi4py"], {"mpirun": None}, "no mpirun", "mpirun of MPICH 5"),
        ("cupy_nccl", ["cupy"], {}, "", ""),
        ("cupy_nccl", [], {}, "CuPy is not installed", "[cupy12]"),
        ("cupy_nccl", ["cupy"], {"cupy": ("", "no libcuda")}, "CuPy finds no NCCL (no libcuda)", "[cupy12]"),
        ("cupy_nccl", ["cupy"], {"cupy": ("CuPy 14.2, NCCL 2.27.7!", "")}, "two different NCCLs", "[cupy12]"),
        ("nccl", [], {}, "no NCCL", "torch for CUDA"),
    ],
)
def test_why_a_backend_cannot_be_made_on_a_machine_with_cuda(here, name, packages, changes, missing, remedy):
    found = here(*packages, **changes)[name]
    assert missing in found.missing
    assert remedy in found.remedy
    assert bool(found.missing) == bool(missing)
    assert bool(found.library) == (not missing)


@pytest.mark.parametrize(("cuda", "reason"), [(None, "without CUDA"), ("13.0", "no CUDA device is visible")])
def test_without_a_device_both_reasons_are_told(here, monkeypatch, cuda, reason):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = here()["cupy_nccl"]
    assert reason in found.missing
    assert "CuPy is not installed" in found.missing
    assert "[cupy13]" in found.remedy


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
    monkeypatch.setattr(nccl_library, "loaded_files", lambda: files)
    monkeypatch.setattr(nccl_library.ctypes, "CDLL", Library)
    assert nccl_library.torch_nccl() == number
    assert many_ranks_a_device() == (number >= 23000)


def test_wrong_variables_of_a_launcher_are_told(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert doctor.launcher_here().startswith("its variables are wrong: WORLD_SIZE")


@pytest.mark.parametrize("words", ["env", "env --foo", "env --help", "bench stp"])
def test_of_the_ranks_of_a_job_the_first_tells(words, monkeypatch, capsys):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with contextlib.suppress(SystemExit):
        cli.main(words.split())
    assert capsys.readouterr() == ("", "")


def test_a_library_is_asked_apart_from_this_process(tmp_path, monkeypatch):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: pass\n")
    (tmp_path / "mpi4py" / "MPI.py").write_text("Get_library_version = lambda: 'Open  MPI v5\\nmore\\0'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor._ask(doctor._ASK_MPI) == ("Open MPI v5", "")
    assert doctor._ask("raise RuntimeError('cannot load it')") == ("", "RuntimeError: cannot load it")
    assert doctor._ask("import os, signal; os.kill(os.getpid(), signal.SIGABRT)")[1].endswith("exit code -6")
    monkeypatch.setattr(doctor, "_ASK_SECONDS", 0.5)
    assert doctor._ask("import threading; threading.Event().wait()") == ("", "it has not answered within 0.5 s")


def test_a_torch_that_was_not_tried_is_told_of(monkeypatch):
    assert torch_internals.tried_versions().endswith(f"this is {torch.__version__}")
    monkeypatch.setattr(torch, "__version__", "9.1.0")
    told = torch_internals.tried_versions()
    assert "this is 9.1.0: in a checkout of ppe_ddp, `python -m pytest tests/test_torch_internals.py` tries it" in told
