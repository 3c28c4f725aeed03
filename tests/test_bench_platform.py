"""Platforms of benchmarks: what is refused before ranks start, how ranks share a GPU, and which clock is read."""

import os
from unittest import mock

import pytest
import torch

from ppe_ddp import cli
from ppe_ddp.backends.cupy_nccl import nccl_version
from ppe_ddp.benchmarks import bench_platform
from ppe_ddp.benchmarks.bench_measure import tolerance
from ppe_ddp.benchmarks.bench_platform import BACKENDS, Platform
from ppe_ddp.cli.arguments import folder

NCCL = BACKENDS["cuda"][0]
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"


@pytest.fixture
def gpus(monkeypatch):
    """What torch says of itself on a machine with this many GPUs; no more than the platform asks for."""

    def pretend(count, nccl):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
        monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: nccl is not None)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl)
        monkeypatch.setattr(nccl_version, "loaded_files", tuple)
        monkeypatch.setattr(torch.cuda, "synchronize", mock.Mock())
        monkeypatch.delenv(SHARING, raising=False)

    with mock.patch.dict(os.environ):
        yield pretend


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("command", ["step", "collective"])
def test_without_a_gpu_one_line_says_so(command, capsys):
    with mock.patch("multiprocessing.process.BaseProcess.start", side_effect=AssertionError("a rank was started")):
        assert cli.main(["bench", command, "--device", "cuda"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 1
    assert "sees no GPU" in err


def test_a_backend_of_gpus_is_refused_on_the_cpu(capsys):
    assert cli.main(["bench", "step", "--backend", NCCL]) == 2
    assert f"--backend {NCCL} is not for --device cpu, which has gloo" in capsys.readouterr().err


def test_what_is_missing_is_named_with_a_remedy(gpus):
    gpus(1, None)
    assert Platform.of("cuda", "gloo") == Platform("cuda", "gloo")
    with pytest.raises(ValueError, match="built without NCCL; take --backend gloo"):
        Platform.of("cuda")
    with mock.patch.dict("sys.modules", {"cupy": None}), pytest.raises(ImportError, match="pip install"):
        Platform.of("cuda", "cupy_nccl")


@pytest.mark.parametrize("backend", [name for name in BACKENDS["cuda"] if name != "gloo"])
def test_more_ranks_than_gpus_need_an_nccl_that_shares_them(gpus, backend):
    platform = Platform("cuda", backend)
    gpus(2, (2, 29, 1))
    platform.admit(2)
    assert SHARING not in os.environ
    with pytest.raises(ValueError, match=r"2 ranks would share a GPU, which NCCL 2\.29\.1 .* take --backend gloo"):
        platform.admit(3)
    gpus(2, (2, 30, 0))
    platform.admit(3)
    assert os.environ[SHARING] == "1"


def test_gloo_shares_gpus_as_they_are(gpus):
    gpus(1, (2, 20, 0))
    Platform("cuda", "gloo").admit(4)
    assert SHARING not in os.environ


def test_the_command_refuses_before_it_starts(gpus, capsys):
    gpus(1, (2, 29, 1))
    for command in ("step", "collective"):
        assert cli.main(["bench", command, "--device", "cuda"]) == 2
        assert "2 ranks would share a GPU" in capsys.readouterr().err


def test_the_clock_is_read_when_the_device_is_at_rest(gpus, monkeypatch):
    gpus(1, (2, 30, 0))
    order = mock.Mock()
    monkeypatch.setattr(torch.cuda, "synchronize", order.synchronize)
    monkeypatch.setattr(bench_platform, "perf_counter", order.perf_counter)
    Platform("cuda", NCCL).clock()
    assert order.mock_calls == [mock.call.synchronize(), mock.call.perf_counter()]
    order.reset_mock()
    Platform().clock()
    assert order.mock_calls == [mock.call.perf_counter()]


def test_a_caption_says_on_what(gpus):
    assert str(Platform()) == "cpu over gloo"
    gpus(2, (2, 30, 3))
    assert str(Platform("cuda", NCCL)) == f"cuda (2 x Some GPU, NCCL 2.30.3) over {NCCL}"
    assert str(Platform("cuda", "gloo")) == "cuda (2 x Some GPU) over gloo"
    assert Platform("cuda", "nccl").facts() == {
        "device": "cuda",
        "device_name": "Some GPU",
        "devices": 2,
        "backend": "nccl",
        "nccl": "2.30.3",
    }


def test_coarse_types_may_differ_by_more():
    assert tolerance(torch.float32) == tolerance(torch.float64) == 1e-5
    assert 0.01 < tolerance(torch.bfloat16) < 0.05
    assert tolerance(torch.float32) < tolerance(torch.float16) < tolerance(torch.bfloat16)


def test_a_folder_is_made_and_what_cannot_be_one_is_refused(tmp_path, capsys):
    assert folder(str(tmp_path / "a" / "b")).is_dir()
    file = tmp_path / "file"
    file.write_text("kept")
    for wrong in (file, file / "below"):
        with pytest.raises(SystemExit) as caught:
            cli.main(["bench", "step", "--trace", str(wrong)])
        assert caught.value.code == 2
        assert "--trace" in capsys.readouterr().err
    assert file.read_text() == "kept"
