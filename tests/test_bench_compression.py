"""`bench compression`: each method is measured, and what it says fits together."""

from contextlib import nullcontext
from unittest import mock

import pytest

from ppe_ddp import cli
from ppe_ddp.benchmarks import bench_ranks
from ppe_ddp.benchmarks.bench_compression import METHODS
from reports import report_in


@pytest.fixture(scope="module")
def report(two_ranks, tmp_path_factory):
    file = tmp_path_factory.mktemp("bench") / "result.json"
    with mock.patch.object(bench_ranks, "Ranks", return_value=nullcontext(two_ranks)):
        words = ["bench", "compression", "--width", "128", "--mbit", "1", "--repeats", "2", "--json", str(file)]
        assert cli.main(words) == 0
    return report_in(file.read_text())


def test_every_method_has_a_line(report):
    assert [line["name"] for line in report["lines"]] == list(METHODS)
    assert report["settings"] == {"width": 128, "mbit": 1, "repeats": 2}


def test_what_is_sent_less_is_what_the_method_says(report):
    lines = {line["name"]: line for line in report["lines"]}
    parts = {name: line["nbytes"] / line["whole_nbytes"] for name, line in lines.items() if line["nbytes"]}
    assert parts["none"] == 1.0
    assert parts["FP16"] == parts["BF16"] == 0.5
    assert 0.25 < parts["Int8"] < 0.27
    assert 0.03 < parts["Sign"] < 0.04
    assert parts["TopK(0.01)"] < 0.04
    assert parts["PowerSGD(4)"] < 0.1
    assert lines["none"]["error"] < 1e-6 < lines["FP16"]["error"] < lines["Int8"]["error"] < lines["Sign"]["error"] < 2


def test_a_slow_link_pays(report):
    lines = {line["name"]: line for line in report["lines"]}
    assert lines["none"]["pays_below"] is None
    assert lines["none"]["ratio"] == 1.0
    for name in ("Int8", "TopK(0.01)", "PowerSGD(4)"):
        assert lines[name]["pays_below"] > 1
        assert lines[name]["ratio"] < 0.35
