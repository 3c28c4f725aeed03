"""The model of a step, and `python -m ppe_ddp bench scaling`, which checks it on nodes and draws it."""

import os
from dataclasses import replace

import pytest

from ppe_ddp import cli
from ppe_ddp.benchmarks.bench_scaling import constants_of
from ppe_ddp.benchmarks.scaling_measure import all_reduce_times, measure_step
from ppe_ddp.benchmarks.scaling_picture import first_late_mask, scaling_curves
from ppe_ddp.benchmarks.step_model import Cluster, Constants, Load, all_reduce_seconds, mask_seconds, noticed, predict
from reports import report_in

MIB = 1 << 20
WIRE = 8e-9  # a byte at 1 Gbit/s
SLOW = Constants(node_latency=1e-4, node_per_byte=1e-10, wire_latency=2e-4, wire_per_byte=WIRE)
BARE_WIRE = replace(SLOW, node_latency=0.0, node_per_byte=0.0, wire_latency=0.0)


def load(backward, **changes):
    return Load(16 * MIB, 16, 0.01, backward, **changes)


def test_on_one_rank_nothing_is_added():
    assert predict(load(0.1), Cluster(1, 1), SLOW).step == pytest.approx(0.11)


def test_a_step_that_computes_nothing_takes_what_its_bytes_need():
    for nodes in (2, 3, 4, 100):
        wire = 2 * (nodes - 1) / nodes * 16 * MIB * WIRE
        assert predict(load(0.0), Cluster(nodes, 2), BARE_WIRE).exposed == pytest.approx(wire, rel=0.01)


def test_behind_a_long_backward_the_last_bucket_alone_shows():
    for bucket in (MIB, 4 * MIB):
        times = predict(load(10.0, bucket_bytes=bucket), Cluster(2, 1), BARE_WIRE)
        assert times.exposed == pytest.approx(bucket * WIRE, rel=0.01)


def test_two_levels_send_less_than_one_ring_and_wait_for_fewer_rounds():
    levels, ring = Cluster(2, 2), Cluster(2, 2, is_flat=True)
    assert all_reduce_seconds(MIB, ring, BARE_WIRE) == pytest.approx(1.5 * all_reduce_seconds(MIB, levels, BARE_WIRE))
    latency = replace(SLOW, node_latency=0.0, node_per_byte=0.0, wire_per_byte=0.0)
    assert all_reduce_seconds(1, Cluster(10, 8), latency) == pytest.approx(18 * 2e-4)
    assert all_reduce_seconds(1, Cluster(10, 8, is_flat=True), latency) == pytest.approx(158 * 2e-4)
    doubling = replace(latency, algorithm="doubling")
    assert all_reduce_seconds(1, Cluster(16, 8), doubling) == pytest.approx(4 * 2e-4)
    assert all_reduce_seconds(1, Cluster(10, 8), doubling) == pytest.approx(5 * 2e-4)


def test_a_mask_shows_where_it_takes_longer_than_the_first_bucket():
    hidden, late = (predict(load(0.4), Cluster(nodes, 1), SLOW) for nodes in (100, 400))
    assert hidden.mask < 0.1 < late.mask  # the first of four buckets is complete after 0.1 s
    assert hidden.mask_delay == 0.0
    assert late.mask_delay == pytest.approx(noticed(late.mask, load(0.4)) - 0.1)
    assert noticed(0.03, load(0.4)) == pytest.approx(0.05)  # a gradient comes every 25 ms


def test_the_mask_takes_two_levels_where_a_ring_of_all_ranks_would_be_long():
    few, many = (mask_seconds(load(0.1), Cluster(nodes, 8), SLOW) for nodes in (7, 8))
    assert few == pytest.approx(2 * 55 * 2e-4, rel=0.01)
    assert many == pytest.approx(2 * 7 * 2e-4 + 1e-4, rel=0.01)
    for nodes, ranks in ((4, 1), (2, 8)):
        assert mask_seconds(load(0.1), Cluster(nodes, ranks), SLOW) == 2e-4  # directly
    doubling = replace(SLOW, algorithm="doubling")
    assert mask_seconds(load(0.1), Cluster(8, 8), doubling) == pytest.approx(6 * 2e-4, rel=0.01)


def test_the_constants_explain_what_was_measured():
    node = {64: 1e-4, 4 * MIB: 5e-4}
    wire = {size: all_reduce_seconds(size, Cluster(2, 1), SLOW) for size in (64, 4 * MIB)}
    found = constants_of(node, wire, 1e-10, "ring")
    assert found.node_latency + found.node_per_byte * (4 * MIB - 64) == pytest.approx(5e-4)
    assert found.wire_latency == pytest.approx(2e-4, rel=0.01)
    assert found.wire_per_byte == pytest.approx(WIRE)
    assert constants_of(node, wire, 0.0, "doubling").wire_latency == pytest.approx(4e-4, rel=0.01)
    assert (found.pack_per_byte, found.algorithm) == (1e-10, "ring")


def test_what_goes_by_doubling_sends_more_and_hides_nothing():
    doubling = replace(BARE_WIRE, algorithm="doubling")
    for nodes, volume in ((2, 1), (3, 3), (4, 2), (8, 3)):
        wire = volume * 16 * MIB * WIRE
        for backward in (0.0, 1.0):
            assert predict(load(backward), Cluster(nodes, 1), doubling).exposed == pytest.approx(wire, rel=0.01)


def test_in_the_picture_large_buckets_keep_what_small_ones_lose_in_a_ring():
    flat, ring, large, doubling = scaling_curves({"ring": SLOW, "doubling": replace(SLOW, algorithm="doubling")})
    steps = [curve.at(1250).step for curve in (flat, ring, large)]
    assert sorted(steps, reverse=True) == steps
    found = first_late_mask(flat), first_late_mask(ring), first_late_mask(doubling)
    assert found[0] < found[1]
    assert found[2] is None


def test_constants_are_measured_on_ranks(two_ranks):
    times = two_ranks.run(all_reduce_times, (64, MIB), 5)
    assert times[0] == times[1]
    assert 0 < times[0][64] < times[0][MIB]


def test_a_step_that_sleeps_is_measured_without_and_with_the_wrapper(two_ranks):
    step = two_ranks.run(measure_step, MIB, 4, 0.004, 0.02, 0.25, 3)[0]
    assert step.forward >= 0.004
    assert step.backward >= 0.02
    assert step.step > 0.024
    assert 0 < step.mask < step.step
    assert step.pack_per_byte > 0


def test_where_nodes_cannot_be_made_the_reason_is_told(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cli.main(["bench", "scaling"]) == 2
    assert "nodes are made of namespaces, which only root may make" in capsys.readouterr().err


@pytest.mark.nodes(long=True)
def test_the_model_is_right_on_nodes_and_drawn_again_from_the_report(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    report, picture = tmp_path / "report.json", tmp_path / "scaling.png"
    words = ["bench", "scaling", "--launcher", "torchrun", "--repeats", "5", "--json", str(report)]
    assert cli.main(words) == 0
    lines = report_in(report.read_text())["lines"]
    assert {(line["nodes"], line["ranks"]) for line in lines} == {(2, 2), (3, 1), (4, 1)}
    # Other programs take the cores of nodes that are none.
    assert sorted(abs(line["error"]) for line in lines)[len(lines) // 2] < 0.15
    assert "largest error" in capsys.readouterr().out
    assert cli.main(["bench", "scaling", "--read", str(report), "--out", str(picture)]) == 0
    assert picture.stat().st_size > 10_000


def test_a_picture_is_drawn_from_a_report(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    report, picture = tmp_path / "report.json", tmp_path / "scaling.png"
    report.write_text(
        '{"constants": {"torchrun": {"node_latency": 1e-4, "node_per_byte": 1e-10, "wire_latency": 2e-4, '
        '"wire_per_byte": 8e-9}}, "lines": []}'
    )
    assert cli.main(["bench", "scaling", "--read", str(report), "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "two levels over gloo: the mask shows from" in capsys.readouterr().out
    report.write_text("{}")
    assert cli.main(["bench", "scaling", "--read", str(report)]) == 2
