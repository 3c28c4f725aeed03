"""`bench timeline`: torch's wrapper is seen as it works, and the picture is there."""

import pytest

from ppe_ddp.benchmarks.bench_timeline import record_steps
from ppe_ddp.tracing.timeline_picture import Panel, draw_timeline

STEPS = 3


def test_every_contestant_tells_what_it_sends_and_when_it_waits(two_ranks, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra [pictures]")
    panels = []
    for name in ("torch DDP", "ppe_ddp", "ppe_ddp, int8"):
        records = two_ranks.run(record_steps, name, "small", STEPS, timeout=150)
        panels.append(Panel(name, [one.on_one_clock() for one in records]))
    sent = []
    for panel in panels:
        for record in panel.records:
            assert len(record.backwards) == STEPS
            spans = {
                kind: [s for s in record.spans if s.kind == kind] for kind in ("forward", "backward", "bucket", "wait")
            }
            assert len(spans["forward"]) == len(spans["backward"]) == len(spans["wait"]) == STEPS
            for backward, wait, (begin, end) in zip(spans["backward"], spans["wait"], record.backwards, strict=True):
                assert begin == backward.begin < backward.end == wait.begin < wait.end <= end
            first, last = record.backwards[0][0], record.backwards[-1][1]
            assert all(first < bucket.begin < bucket.end <= last for bucket in spans["bucket"])
            sent.append(sum(bucket.nbytes for bucket in spans["bucket"]))
    assert sent[0] == sent[1] == sent[2] == sent[3] > 2 * sent[4] == 2 * sent[5] > 0
    draw_timeline(panels, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"
