"""Timelines: the spans are true, the clocks are one, and nothing hangs or is lost when a rank leaves."""

import importlib.util
import itertools
import json
from pathlib import Path
from threading import Thread
from time import perf_counter_ns

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ppe_ddp
from one_process import of_all_ranks
from ppe_ddp import megatron
from ppe_ddp.backends.shared_memory.step_queue import StepParts
from ppe_ddp.backends.work import Work
from ppe_ddp.cli import main
from ppe_ddp.compression import Int8
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.record import EventLog, Recorder, Span
from ppe_ddp.testing import Ranks
from ppe_ddp.tracing import rank_record
from ppe_ddp.tracing.pictures import draw_presence, group_names
from ppe_ddp.tracing.rank_record import (
    KINDS,
    ClockOffset,
    RankRecord,
    Recording,
    length,
    measure_offset,
    merged,
    record,
    summarize,
)
from ppe_ddp.tracing.timeline import read_records, write_chrome_trace
from rank_tests import on_two_ranks


def net():
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())])


def spans_of(recording, kind):
    return [span for span in recording.result().spans if span.kind == kind]


# ---------------------------------------------------------------------- what is pure


def test_parts_that_overlap_are_drawn_as_one():
    spans = [Span("wire", "2", 40, 50, 3), Span("wire", "0", 10, 30, 1), Span("wire", "1", 20, 25, 2)]
    assert merged(spans) == [Span("wire", "0", 10, 30, 3), Span("wire", "2", 40, 50, 3)]


def record_of(*spans, backwards, rank=0, ranks=1, error=0):
    clock = ClockOffset("job", rank, ranks, 0, error)
    return RankRecord(clock, "host", [Span(kind, "", *times) for kind, *times in spans], list(backwards), [])


def test_what_is_hidden_is_what_is_under_way_while_nothing_waits():
    spans = [("backward", 0, 60), ("bucket", 20, 100), ("wait", 60, 110), ("vote", 100, 110)]
    summary = summarize([record_of(*spans, backwards=[(0, 110)])])
    assert summary.hidden == 40 / 80
    assert (summary.under_way_ms, summary.waiting_ms) == pytest.approx((80e-6, 50e-6))
    assert summarize([record_of(("backward", 0, 60), backwards=[(0, 60)])]).hidden is None


def test_who_is_slow_is_who_does_not_wait():
    def of(rank, own):
        spans = [("wait", 30 * k * 10**6 + own * 10**6, 30 * (k + 1) * 10**6) for k in range(5)]
        return record_of(*spans, rank=rank, backwards=[(30 * k * 10**6, 30 * k * 10**6) for k in range(6)])

    assert summarize([of(0, 20), of(1, 23), of(2, 20)]).slow == {}
    summary = summarize([of(0, 20), of(1, 29), of(2, 21)])
    assert summary.slow == {1: 8}
    assert "rank 1 is slow: it takes 8.0 ms a step longer than the median rank" in str(summary)


def log_of(*wrappers):
    """A log of backwards of 1 ms, in the order in which they began; each wrapper gives the begins of its own, in ms."""
    log = EventLog(lambda groups: None)
    recorders = [
        Recorder(names, begin * 10**6, b"\1", b"\1", wrapper=k)
        for k, (names, begins) in enumerate(wrappers)
        for begin in begins
    ]
    for recorder in sorted(recorders, key=lambda recorder: recorder.begin):
        recorder.backward_at = recorder.returned_at = recorder.done_at = recorder.begin + 10**6
        log.backwards.append(recorder)
    return log


def test_a_step_of_several_wrappers_is_one_and_each_has_its_own_picture(tmp_path):
    names = ("weight",)
    found = RankRecord.of(log_of((names, range(0, 100, 10)), (names, range(3, 100, 20))), ClockOffset())
    assert [one.local for one in found.presence] == [["1"] * 10, ["1"] * 5]
    summary = summarize([found])
    assert (summary.backwards, summary.step_ms) == (10, pytest.approx(10))
    # The other rank has left earlier, and has a module that rank 0 lacks.
    other = RankRecord.of(log_of((names, range(4)), (("bias",), range(4, 8))), ClockOffset(rank=1))
    pytest.importorskip("matplotlib", reason="needs the extra [pictures]")
    draw_presence([found, other], tmp_path / "of.png")
    assert len(list(tmp_path.iterdir())) == 3


def test_rows_of_the_heat_map_go_down_the_tree_as_far_as_there_is_room():
    few = ["stem.weight", "stem.bias"]
    assert group_names(few) == [("stem.weight", [0]), ("stem.bias", [1])]
    many = [f"blocks.{k}.{part}" for k in range(40) for part in ("weight", "bias")]
    assert group_names(many)[1] == ("blocks.1.*", [2, 3])
    assert len(group_names([f"a{k}" for k in range(100)])) == 1


def test_what_begins_where_something_ends_does_so_for_readers_of_the_trace_who_add_up(tmp_path):
    moments = range(1_352_465_345, 1_419_102_111, 333_337)
    spans = [("backward" if k % 2 else "wait", *pair) for k, pair in enumerate(itertools.pairwise(moments))]
    write_chrome_trace([record_of(("forward", 17, 25), *spans, backwards=[])], tmp_path / "timeline.json")
    check_nesting(json.loads((tmp_path / "timeline.json").read_text())["traceEvents"], threads=1)


# ---------------------------------------------------------------------- on ranks


@on_two_ranks
def test_no_bucket_arrives_before_every_rank_has_launched_it():
    model = ppe_ddp.DistributedDataParallel(net(), bucket_cap_mb=0.02)
    with record() as recording:
        for _ in range(3):
            model(torch.randn(3, 64)).sum().backward()
    own = recording.result().on_one_clock()
    found = of_all_ranks(own)
    mine, theirs = ([s for s in one.spans if s.kind == "bucket"] for one in found)
    assert len(mine) == len(theirs) > 3
    error = max(one.clock.error_ns for one in found)
    for a, b in zip(mine, theirs, strict=True):
        assert a.name == b.name
        assert a.nbytes == b.nbytes > 0
        assert max(a.begin, b.begin) <= min(a.end, b.end) + error
    assert [s.kind for s in own.spans if s.kind in ("forward", "backward")] == ["forward", "backward"] * 3
    assert len([s for s in own.spans if s.kind == "mask"]) == 3
    assert sum(presence.local == ["1" * 8] * 3 for presence in own.presence) == 1


@on_two_ranks
def test_backwards_that_are_not_synchronized_are_there():
    model = ppe_ddp.DistributedDataParallel(net())
    with record() as recording:
        for _ in range(2):
            with model.no_sync():
                loss = model(torch.randn(3, 64)).sum() + model(torch.randn(3, 64)).sum()
                loss.backward(retain_graph=True)
                loss.register_hook(lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    loss.backward()  # is not over
                model(torch.randn(3, 64)).sum().backward()
            model(torch.randn(3, 64)).sum().backward()
    spans = sorted(spans_of(recording, "backward"), key=lambda span: span.begin)
    assert [span.name for span in spans] == ["in no_sync()", "in no_sync()", ""] * 2
    assert all(a.end <= b.begin for a, b in itertools.pairwise(spans))


@on_two_ranks
def test_what_ranks_of_a_node_sum_in_memory_is_a_part_of_its_bucket():
    model = ppe_ddp.DistributedDataParallel(net(), bucket_cap_mb=0.02)
    model(torch.randn(3, 64)).sum().backward()
    assert StepParts.listener is None
    with record() as recording:
        for _ in range(3):
            model(torch.randn(3, 64)).sum().backward()
    buckets, parts = spans_of(recording, "bucket"), spans_of(recording, "node")
    for bucket in buckets:
        inside = [part for part in parts if bucket.begin <= part.begin <= part.end <= bucket.end]
        assert bucket.nbytes in [part.nbytes for part in inside]
    assert spans_of(recording, "wire") == []
    model(torch.randn(3, 64)).sum().backward()
    assert StepParts.listener is None
    assert len(spans_of(recording, "node")) == len(parts)


@on_two_ranks
def test_a_timeline_asks_for_no_futures_which_would_poll_and_start_threads():
    asked, get_future = [], Work.get_future
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Work, "get_future", lambda work: asked.append(work) or get_future(work))
        model = ppe_ddp.DistributedDataParallel(net(), bucket_cap_mb=0.02)
        with record() as recording:
            for _ in range(3):
                model(torch.randn(3, 64)).sum().backward()
    assert asked == []
    assert len(spans_of(recording, "bucket")) > 3
    assert len(spans_of(recording, "vote")) == 3


@on_two_ranks
def test_clocks_that_differ_are_compared():
    shift = 5_000_000_000 * dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_record, "perf_counter_ns", lambda: perf_counter_ns() + shift)
        found = measure_offset(dist.group.WORLD)
    assert abs(found.offset_ns - shift) <= found.error_ns < 1_000_000_000
    jobs = of_all_ranks(found.job)
    assert jobs[0] == jobs[1]


@on_two_ranks
def test_ranks_whose_clocks_are_not_compared_have_files_of_their_own():
    recording = Recording()  # as if there were no process group yet
    recording.log.on_groups(Groups.duplicate(dist.new_group([dist.get_rank()], use_local_synchronization=True)))
    clock = recording.result().clock
    assert (clock.rank, clock.world_size, clock.is_compared) == (dist.get_rank(), 2, False)
    assert len({one.job for one in of_all_ranks(clock)}) == 1
    summary = summarize([record_of(backwards=[]), RankRecord(clock, "host", [], [], [])])
    assert "clocks were not compared" in str(summary)
    recording.clock = ClockOffset()  # as if it had begun in a group of this process alone, as elastic ranks do
    assert recording.result().clock.rank == dist.get_rank()


@on_two_ranks
def test_a_wrapper_whose_module_changes_in_each_step_is_one():
    module = net()
    model = ppe_ddp.DistributedDataParallel(module)
    with record() as recording:
        for step in range(4):
            module[0].requires_grad_(step % 2 == 0)
            if step == 3:
                module.add_module("new", torch.nn.Linear(64, 64))
            model(torch.randn(3, 64)).sum().backward()
    found = recording.result()
    assert len(found.backwards) == 4
    assert [len(one.local) for one in found.presence] == [3, 1]


def test_a_compressor_shows_what_it_encodes_sends_and_decodes(two_ranks):
    two_ranks.run(train_compressed)


def train_compressed():
    model = ppe_ddp.DistributedDataParallel(net(), bucket_cap_mb=0.02)
    model.register_comm_hook(Int8())
    with record() as recording:
        model(torch.randn(3, 64)).sum().backward()
    count = len(model.trace().buckets)
    assert len(spans_of(recording, "encode")) == count
    assert len(spans_of(recording, "decode")) >= count
    assert len(spans_of(recording, "bucket")) >= count
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert 0 < sum(span.nbytes for span in spans_of(recording, "bucket")) < whole / 2


@on_two_ranks
def test_a_function_that_blocks_is_waited_for():
    def blocking(gradients, group):
        for gradient in gradients:
            dist.all_reduce(gradient.div_(2), group=group)

    model = ppe_ddp.DistributedDataParallel(net(), bucket_cap_mb=0.02, reduce_function=blocking)
    with record() as recording:
        model(torch.randn(3, 64)).sum().backward()
    one = recording.result()
    sent = [(span.begin, span.end) for span in one.spans if span.kind == "bucket"]
    waits = [(span.begin, span.end) for span in one.spans if span.kind == "wait"]
    assert length([*sent, *waits]) == length(waits) > 0  # nothing is sent but while it waits
    assert length(sent) > 0


@on_two_ranks
def test_optimizer_and_gather_are_there():
    model = ppe_ddp.DistributedDataParallel(net())
    optimizer = ppe_ddp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, overlap=True)
    with record() as recording:
        for _ in range(2):
            model(torch.randn(3, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
    assert [span.name for span in spans_of(recording, "optimizer")] == ["DistributedOptimizer"] * 2
    gathered = spans_of(recording, "gather")
    assert sum(span.nbytes for span in gathered) == 2 * sum(parameter.nbytes for parameter in model.parameters())
    assert spans_of(recording, "bucket")


@on_two_ranks
def test_megatrons_wrapper_waits_where_its_results_are_asked_for():
    config = megatron.DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=5000)
    model = megatron.DistributedDataParallel(None, config, net())
    with record() as recording:
        model.zero_grad_buffer()
        model(torch.randn(3, 64)).sum().backward()
        model.finish_grad_sync()
    assert [span.name for span in spans_of(recording, "wait")][-1] == "for results"
    assert (
        len(spans_of(recording, "forward")) == len(spans_of(recording, "mask")) == len(spans_of(recording, "vote")) == 1
    )
    assert len(spans_of(recording, "bucket")) > 1


# ---------------------------------------------------------------------- the trace of one backward


def check_times(trace):
    assert len(trace.buckets) > 1
    before = 0
    for bucket in trace.buckets:
        times = [bucket.ready_ns, bucket.launch_ns, bucket.launched_ns, bucket.done_ns, trace.total_ns]
        assert times == sorted(times)
        assert before <= bucket.launch_ns < bucket.launched_ns
        before = bucket.launched_ns


@pytest.mark.parametrize("options", [{}, {"overlap": False}, {"gradient_as_bucket_view": False}], ids=str)
@on_two_ranks
def test_a_bucket_is_ready_then_launched_then_done(options):
    model = ppe_ddp.DistributedDataParallel(net(), bucket_cap_mb=0.02, **options)
    for _ in range(3):
        model(torch.randn(3, 64)).sum().backward()
        check_times(model.trace())


# ---------------------------------------------------------------------- files and pictures


@pytest.fixture(scope="module")
def ranks():
    """Two ranks that one test may leave out of step."""
    with Ranks(2) as started:
        yield started


def train_into(folder, pictures, failing=None):
    model = ppe_ddp.DistributedDataParallel(net())
    try:
        with ppe_ddp.timeline(folder, pictures=pictures):
            for _ in range(3):
                model(torch.randn(3, 64)).sum().backward()
            if dist.get_rank() == failing:
                raise ArithmeticError("this rank alone")
    except ArithmeticError:
        return "raised"
    return EventLog.current


def test_the_last_rank_leaves_files_and_pictures(ranks, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra [pictures]")
    (tmp_path / "rank-1.json").write_text(json.dumps({"of": "an earlier job"}))
    assert ranks.run(train_into, str(tmp_path), True, timeout=150) == [None, None]
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    check_fields(events)
    check_nesting(events)
    for name in ("timeline.png", "gradients.png"):
        assert (tmp_path / name).read_bytes()[:4] == b"\x89PNG"
    assert "% of the communication is hidden" in (tmp_path / "summary.txt").read_text()
    assert "all ranks on the clock of rank 0" in (tmp_path / "summary.txt").read_text()


def check_fields(events):
    """Each event has what Chrome's format asks for, and each thread that has any a name."""
    named, used = set(), set()
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            value = {"name": str, "sort_index": int}[event["name"].partition("_")[2]]
            assert [type(one) for one in event["args"].values()] == [value]
            named |= {(event["pid"], event["tid"])} if event["name"] == "thread_name" else set()
        else:
            assert (event["ph"], bool(event["name"]), event["cat"] in KINDS) == ("X", True, True)
            assert event["ts"] >= 0 <= event["dur"]
            used.add((event["pid"], event["tid"]))
    assert used <= named


def check_nesting(events, threads=5):
    """In Chrome's format, events of one thread lie inside of one another or apart."""
    rows = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(rows) >= threads
    for spans in rows.values():
        for (begin, end), (after, last) in zip(sorted(spans), sorted(spans)[1:], strict=False):
            assert after >= end or last <= end, (begin, end, after, last)


def test_a_rank_that_raises_leaves_its_record_and_keeps_nobody_waiting(ranks, tmp_path):
    assert ranks.run(train_into, str(tmp_path), False, 1) == [None, "raised"]
    assert [one.clock.rank for one in read_records(tmp_path)] == [0, 1]
    (tmp_path / "rank-1.json").unlink()
    with pytest.raises(ValueError, match=r"lacks the records of ranks \[1\] of 2"):
        read_records(tmp_path)


# ---------------------------------------------------------------------- in this process


def test_matplotlib_is_asked_for_before_anything_is_recorded(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "ppe-ddp\[pictures\]"'), ppe_ddp.timeline(tmp_path):
        raise AssertionError("it was entered")
    with ppe_ddp.timeline(tmp_path, pictures=False):
        pass
    assert (tmp_path / "timeline.json").exists()


def test_a_step_that_raises_hides_no_other_and_threads_have_their_own():
    one, other = (torch.optim.SGD([torch.ones(1, requires_grad=True)]) for _ in range(2))
    with record() as recording:
        with pytest.raises(ZeroDivisionError):
            one.step(lambda: 1 / 0)
        one.step(lambda: other.step())  # its step is a part of the first one's
        one.step(lambda: run_on_thread(other.step))
    assert len(spans_of(recording, "optimizer")) == 3


def run_on_thread(function):
    thread = Thread(target=function)
    thread.start()
    thread.join()


def test_one_timeline_at_a_time(tmp_path):
    with (
        ppe_ddp.timeline(tmp_path, pictures=False),
        pytest.raises(RuntimeError, match="already"),
        ppe_ddp.timeline(tmp_path, pictures=False),
    ):
        pass
    assert EventLog.current is None


def test_a_script_is_run_as_python_runs_it(tmp_path, monkeypatch, capsys):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, neighbour, torch, ppe_ddp\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['--epochs', '1']\n"
        "torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()\n"
    )
    (tmp_path / "neighbour.py").touch()
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    assert main(["trace", "--out", str(tmp_path / "out"), "--no-pictures", str(script), "--epochs", "1"]) == 0
    assert [span.kind for span in RankRecord.read(tmp_path / "out" / "rank-0.json").spans] == ["optimizer"]
    assert main(["timeline", "--no-pictures", str(tmp_path / "out")]) == 0
    assert "nothing was sent" in capsys.readouterr().out
    assert main(["trace", str(tmp_path / "none.py")]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert main(["trace", "-m", "no_such_module.train"]) == 2
    assert "there is no module 'no_such_module.train'" in capsys.readouterr().err
    assert main(["timeline", "--no-pictures", str(tmp_path)]) == 2
    assert "no timeline was recorded there" in capsys.readouterr().err


def test_a_record_that_is_none_is_named(tmp_path):
    Path(tmp_path, "rank-0.json").write_text("[]")
    with pytest.raises(ValueError, match=r"rank-0.json is no record of a timeline"):
        read_records(tmp_path)
