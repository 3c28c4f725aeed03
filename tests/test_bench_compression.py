"""`bench compression`: each method is measured, and what it says fits together."""

from contextlib import nullcontext
from unittest import mock

import pytest

from ppe_ddp import cli
from ppe_ddp.benchmarks import bench_compression, bench_ranks
from ppe_ddp.benchmarks.bench_compression import METHODS
from ppe_ddp.benchmarks.bench_training import CONTESTANTS, ends_in_turns, joined, reached_at
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


def trained(two_ranks, tmp_path, *words):
    file = tmp_path / "result.json"
    with mock.patch.object(bench_compression, "Ranks", return_value=nullcontext(two_ranks)):
        assert cli.main(["bench", "compression", "--json", str(file), *words]) == 0
    return report_in(file.read_text())["training"]


def test_a_task_is_trained_by_each_method_and_drawn(two_ranks, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra [pictures]")
    picture = tmp_path / "loss.png"
    words = ["--task", "trees", "--steps", "20", "--seeds", "2", "--out", str(picture)]
    lines = trained(two_ranks, tmp_path, *words, *(f"--method={name}" for name in ("torch DDP", "none", "Int8")))
    assert [line["name"] for line in lines] == ["torch DDP", "none", "Int8"]
    for line in lines:
        assert (line["task"], line["ranks"], len(line["losses"])) == ("trees", 2, 20)
        assert sum(line["losses"][-5:]) < 0.8 * sum(line["losses"][:5])
        assert line["seconds"] == sorted(line["seconds"])
        assert len(line["accuracies"]) == 2
        assert all(0.2 < accuracy <= 1 for accuracy in line["accuracies"])
    torchs, ours, int8 = lines
    assert ours["losses"] == pytest.approx(torchs["losses"], rel=1e-3)
    assert torchs["nbytes"] is None
    assert 0 < int8["nbytes"] < 0.3 * ours["nbytes"] < 0.3 * ours["whole_nbytes"]
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_every_method_trains(two_ranks, tmp_path):
    lines = trained(two_ranks, tmp_path, "--task", "digits", "--steps", "40")
    assert [line["name"] for line in lines] == list(CONTESTANTS)
    for line in lines:
        assert sum(line["losses"][-10:]) < 0.5 * sum(line["losses"][:10]), line["name"]


def test_a_loss_is_reached_when_the_mean_of_ten_is():
    losses = [2.0] * 10 + [1.0] * 10
    assert reached_at(losses, 1.5) == 14
    assert reached_at(losses, 2.0) == 9
    assert reached_at(losses, 0.9) is None


def test_a_turn_is_over_when_its_last_rank_is():
    quick_at_first = list(ends_in_turns([1.0, 3.0] * 5 + [2.0] * 3))
    quick_at_last = list(ends_in_turns([3.0, 1.0] * 5 + [1.0] * 3))
    assert quick_at_first[:2] + quick_at_first[10:] == [1.0, 4.0, 2.0, 4.0, 6.0]
    over = joined([max(both) for both in zip(quick_at_first, quick_at_last, strict=True)])
    assert over[:4] == [3.0, 4.0, 7.0, 8.0]  # and not 3, 6, 9, 12
    assert over[9:] == [20.0, 22.0, 24.0, 26.0]
