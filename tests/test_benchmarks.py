"""`python -m benchmarks`: what makes the documentation's figures runs, and what it says fits together."""

import contextlib
import json
import os
from dataclasses import replace
from unittest import mock

import pytest

import ppe_ddp
from benchmarks import COMMANDS, load, mask, memory, scaling, timeline, training
from benchmarks.scaling import Cluster, Constants, Load, all_reduce_seconds, mask_seconds, noticed, predict
from little_models import on_ranks_with_little_models
from ppe_ddp import cli
from ppe_ddp.cli.benchmarking import Platform
from ppe_ddp.engine.replicas import DriftCheck
from ppe_ddp.stragglers import RankTimes
from ppe_ddp.tracing.pictures import draw_steps

MIB = 1 << 20
WIRE = 8e-9  # a byte at 1 Gbit/s
SLOW = Constants(node_latency=1e-4, node_per_byte=1e-10, wire_latency=2e-4, wire_per_byte=WIRE)
BARE_WIRE = replace(SLOW, node_latency=0.0, node_per_byte=0.0, wire_latency=0.0)


def called(*words):
    return cli.main(words, program="python -m benchmarks", commands=COMMANDS)


# --- nodes


@pytest.mark.parametrize("name", ["scaling", "timeline", "training"])
def test_where_nodes_cannot_be_made_the_reason_is_told(name, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    words = {"timeline": ["--nodes", "2", "--out", str(tmp_path / "x.png"), "--no-torch"], "training": ["--nodes", "2"]}
    assert called(name, *words.get(name, [])) == 2
    assert "nodes are made of namespaces, which only root may make" in capsys.readouterr().err


# --- memory


def test_the_peak_of_each_wrapper_is_measured(tmp_path, two_ranks, capsys):
    file = tmp_path / "result.json"
    with on_ranks_with_little_models(two_ranks):
        assert called("memory", "--model", "small", "--json", str(file)) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    (line,) = json.loads(file.read_text())["lines"]
    assert line.pop("model") == "small"
    assert list(line) == list(memory.NAMES)
    assert all(100 * MIB < peak < 10_000 * MIB for peak in line.values())


# --- mask


def test_what_a_mask_carries_is_measured(tmp_path, two_ranks, capsys):
    file = tmp_path / "result.json"
    with on_ranks_with_little_models(two_ranks):
        assert called("mask", "--ranks", "2", "--model", "supernet-own", "--repeats", "1", "--json", str(file)) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    (line,) = json.loads(file.read_text())["lines"]
    assert all(line[mode]["median"] > 0 for mode in ("weights", "times", "digests", "all"))


def _calls_by_mode():
    Platform().enter()
    found = {}
    for mode, take in mask._modes("supernet-own").items():
        with (
            mock.patch.object(ppe_ddp, "weigh", side_effect=ppe_ddp.weigh) as weigh,
            mock.patch.object(RankTimes, "note", autospec=True, side_effect=RankTimes.note) as note,
            mock.patch.object(DriftCheck, "field", autospec=True, side_effect=DriftCheck.field) as field,
        ):
            take(8)
            found[mode] = (weigh.call_count, note.call_count, field.call_count)
    return found


def test_each_mode_of_a_mask_does_what_it_says(two_ranks):
    expected = {"none": (0, 0, 0), "weights": (8, 0, 0), "times": (0, 8, 0), "digests": (0, 0, 1), "all": (8, 8, 1)}
    with on_ranks_with_little_models(two_ranks):
        assert two_ranks.run(_calls_by_mode) == [expected] * 2


# --- load


def test_loads_side_by_side(tmp_path, two_ranks, capsys):
    file = tmp_path / "result.json"
    with on_ranks_with_little_models(two_ranks):
        assert called("load", "--ranks", "2", "--size", "200K", "--repeats", "1", "--json", str(file)) == 0
    out = capsys.readouterr().out
    assert "One load" in out
    assert max(map(len, out.splitlines())) <= 80
    lines = {line["name"]: line for line in json.loads(file.read_text())["lines"]}
    assert list(lines) == list(load.CONTESTANTS)
    for line in lines.values():
        assert not line["is_wrong"]
    assert lines["torch"]["ratio"]["median"] == 1


# --- training


@pytest.mark.long
def test_a_task_is_trained_by_each_method_and_drawn(two_ranks, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs the extra [pictures]")
    file, picture = tmp_path / "result.json", tmp_path / "loss.png"
    words = ["--task", "trees", "--steps", "20", "--seeds", "2", "--out", str(picture), "--json", str(file)]
    names = ["torch DDP", "none", "Int8"]
    with mock.patch.object(training, "started_ranks", return_value=contextlib.nullcontext(two_ranks)):
        assert called("training", *words, *(f"--method={name}" for name in names)) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    lines = json.loads(file.read_text())["lines"]
    assert [line["name"] for line in lines] == names
    for line in lines:
        assert (line["task"], line["ranks"], len(line["losses"])) == ("trees", 2, 20)
        assert sum(line["losses"][-5:]) < 0.8 * sum(line["losses"][:5])
        assert len(line["seconds"]) == 2
        assert 0 < line["seconds"][0] < line["seconds"][1]
        assert len(line["accuracies"]) == 2
        assert all(0.2 < accuracy <= 1 for accuracy in line["accuracies"])
    torchs, ours, int8 = lines
    assert ours["losses"] == pytest.approx(torchs["losses"], rel=1e-3)
    assert torchs["nbytes"] is None
    assert 0 < int8["nbytes"] < 0.3 * ours["nbytes"] < 0.3 * ours["whole_nbytes"]
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.long
def test_every_method_trains(two_ranks):
    lines = two_ranks.run(training.train, "digits", list(training.METHODS), 40, timeout=150)[0]
    assert [line["name"] for line in lines] == list(training.METHODS)
    for line in lines:
        assert sum(line["losses"][-10:]) < 0.5 * sum(line["losses"][:10]), line["name"]


# --- timeline


def test_every_contestant_tells_what_it_sends_and_when_it_waits(two_ranks, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra [pictures]")
    panels, sent = {}, []
    for name in ("torch DDP", "ppe_ddp", "ppe_ddp, int8"):
        with on_ranks_with_little_models(two_ranks):
            records = two_ranks.run(timeline.record_steps, name, "small", 3, timeout=150)
        panels[name] = [one.on_one_clock() for one in records]
        for record in panels[name]:
            assert len(record.backwards) == 3
            kinds = ("forward", "backward", "bucket", "wait")
            spans = {kind: [span for span in record.spans if span.kind == kind] for kind in kinds}
            assert len(spans["forward"]) == len(spans["backward"]) == len(spans["wait"]) == 3
            for backward, wait, (begin, end) in zip(spans["backward"], spans["wait"], record.backwards, strict=True):
                assert begin == backward.begin < backward.end == wait.begin < wait.end <= end
            first, last = record.backwards[0][0], record.backwards[-1][1]
            assert all(first < bucket.begin < bucket.end <= last for bucket in spans["bucket"])
            sent.append(sum(bucket.nbytes for bucket in spans["bucket"]))
    assert sent[0] == sent[1] == sent[2] == sent[3] > 2 * sent[4] == 2 * sent[5] > 0
    draw_steps(panels, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"


# --- scaling: the model


def step_of(backward, **changes):
    return Load(16 * MIB, 16, 0.01, backward, **changes)


def test_a_step_takes_what_its_bytes_need_and_on_one_rank_nothing_is_added():
    assert predict(step_of(0.1), Cluster(1, 1), SLOW).step == pytest.approx(0.11)
    for nodes in (2, 3, 4, 100):
        wire = 2 * (nodes - 1) / nodes * 16 * MIB * WIRE
        assert predict(step_of(0.0), Cluster(nodes, 2), BARE_WIRE).exposed == pytest.approx(wire, rel=0.01)
    for bucket in (MIB, 4 * MIB):  # behind a long backward the last bucket alone shows
        times = predict(step_of(10.0, bucket_bytes=bucket), Cluster(2, 1), BARE_WIRE)
        assert times.exposed == pytest.approx(bucket * WIRE, rel=0.01)
    doubling = replace(BARE_WIRE, algorithm="doubling")  # sends more and hides nothing
    for nodes, volume in ((2, 1), (3, 3), (4, 2), (8, 3)):
        wire = volume * 16 * MIB * WIRE
        for backward in (0.0, 1.0):
            assert predict(step_of(backward), Cluster(nodes, 1), doubling).exposed == pytest.approx(wire, rel=0.01)


def test_a_mask_shows_where_it_takes_longer_than_the_first_bucket():
    hidden, late = (predict(step_of(0.4), Cluster(nodes, 1), SLOW) for nodes in (100, 400))
    assert hidden.mask < 0.1 < late.mask  # the first of four buckets is complete after 0.1 s
    assert hidden.mask_delay == 0.0
    assert late.mask_delay == pytest.approx(noticed(late.mask, step_of(0.4)) - 0.1)
    assert noticed(0.03, step_of(0.4)) == pytest.approx(0.05)  # a gradient comes every 25 ms


def test_the_mask_takes_two_levels_where_a_ring_of_all_ranks_would_be_long():
    few, many = (mask_seconds(step_of(0.1), Cluster(nodes, 8), SLOW) for nodes in (7, 8))
    assert few == pytest.approx(2 * 55 * 2e-4, rel=0.01)
    assert many == pytest.approx(2 * 7 * 2e-4 + 1e-4, rel=0.01)
    for nodes, ranks in ((4, 1), (2, 8)):
        assert mask_seconds(step_of(0.1), Cluster(nodes, ranks), SLOW) == 2e-4  # directly
    doubling = replace(SLOW, algorithm="doubling")
    assert mask_seconds(step_of(0.1), Cluster(8, 8), doubling) == pytest.approx(6 * 2e-4, rel=0.02)


# --- scaling: measured and drawn


def test_the_constants_explain_what_was_measured():
    node = {64: 1e-4, 4 * MIB: 5e-4}
    wire = {size: all_reduce_seconds(size, Cluster(2, 1), SLOW) for size in (64, 4 * MIB)}
    found = scaling.constants_of(node, wire, 1e-10, "ring")
    assert found.node_latency + found.node_per_byte * (4 * MIB - 64) == pytest.approx(5e-4)
    assert found.wire_latency == pytest.approx(2e-4, rel=0.01)
    assert found.wire_per_byte == pytest.approx(WIRE)
    assert scaling.constants_of(node, wire, 0.0, "doubling").wire_latency == pytest.approx(4e-4, rel=0.01)
    assert (found.pack_per_byte, found.algorithm) == (1e-10, "ring")


def test_steps_and_constants_are_measured_on_ranks(two_ranks):
    times = two_ranks.run(scaling.all_reduce_times, (64, MIB), 5)
    assert times[0] == times[1]
    assert min(times[0].values()) > 0
    step = two_ranks.run(scaling.measure_step, MIB, 4, 0.004, 0.02, 0.25, 3)[0]
    assert step.forward >= 0.004
    assert step.backward >= 0.02
    assert step.step > 0.024
    assert step.pack_per_byte > 0


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    assert scaling.scaling_curves({"ring": SLOW})[1].first_late_mask() > 64
    scaling.draw_scaling({"ring": SLOW, "doubling": replace(SLOW, algorithm="doubling")}, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nodes(long=True)
def test_the_model_is_right_on_nodes(tmp_path, capsys):
    report = tmp_path / "report.json"
    assert called("scaling", "--launcher", "torchrun", "--repeats", "5", "--json", str(report)) == 0
    lines = json.loads(report.read_text())["lines"]
    assert {(line["nodes"], line["ranks"]) for line in lines} == {(2, 2), (3, 1), (4, 1)}
    # Other programs take the cores of nodes that are none.
    assert sorted(abs(line["error"]) for line in lines)[len(lines) // 2] < 0.15
    assert "largest error" in capsys.readouterr().out
