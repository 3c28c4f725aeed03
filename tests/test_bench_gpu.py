"""The benchmarks on a GPU: `make test-gpu`. Two ranks, which share one where there is no second."""

import gzip
import json

import pytest
import torch

from ppe_ddp import cli
from ppe_ddp.benchmarks.bench_platform import BACKENDS
from reports import report_in

pytestmark = pytest.mark.gpu


def called(capfd, *words):
    """What the command prints; skipped, with its own reason, where it refuses to run."""
    code = cli.main(words)
    out, err = capfd.readouterr()
    if code == 2:
        pytest.skip(err.strip())
    assert code == 0, err
    return out


@pytest.mark.parametrize("backend", BACKENDS["cuda"])
def test_all_train_the_same_over_each_backend_and_leave_traces(backend, tmp_path, capfd):
    file, traces = tmp_path / "result.json", tmp_path / "traces"
    words = ["bench", "step", "--device", "cuda", "--backend", backend, "--quick"]
    words += ["--model", "supernet-own", "--model", "transformer-bf16", "--trace", str(traces), "--json", str(file)]
    assert f"over {backend}" in called(capfd, *words)
    data = report_in(file.read_text())
    platform = data["settings"]["platform"]
    assert (platform["device_name"], platform["backend"]) == (torch.cuda.get_device_name(), backend)
    assert (platform["nccl"] is not None) == ("nccl" in backend)
    for model in data["models"]:
        ours = next(result for result in model["contestants"] if result["name"] == "ppe_ddp")
        assert ours["launches"] > 0
        for name in ("ppe_ddp", "torch"):
            for rank in (0, 1):
                content = gzip.decompress((traces / f"{model['name']}-{name}-rank{rank}.json.gz").read_bytes())
                events = json.loads(content)["traceEvents"]
                assert any(event.get("cat") == "kernel" for event in events)
                assert any("ppe_ddp.launch[0]" in event["name"] for event in events) == (name == "ppe_ddp")


def test_collectives_are_right_over_both_nccls(tmp_path, capfd):
    file = tmp_path / "result.json"
    words = ["--op", "all_reduce", "--op", "all_gather", "--op", "reduce_scatter", "--op", "broadcast"]
    words += ["--max-size", "64K", "--repeats", "2", "--json", str(file)]
    assert "x nccl" in called(capfd, "bench", "collective", "--device", "cuda", *words)
    lines = report_in(file.read_text())["lines"]
    assert lines[0]["backend"] == "nccl"
    assert {line["wrong"] for line in lines} == {0}
