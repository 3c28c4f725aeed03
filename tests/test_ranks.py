"""The launcher of ranks: results, the errors of ranks that fail, and that no process is left behind."""

import ctypes
import os
import pickle
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ppe_ddp.testing import Outcome, RankError, RankFailure, Ranks
from subprocesses import all_end, warm_python


class OnlyPickles(Exception):
    """Cannot be made anew from its `args`, as many exceptions of libraries."""

    def __init__(self, *, code):
        super().__init__(f"code {code}")


def add_up(value):
    total = torch.tensor(value)
    dist.all_reduce(total)
    return dist.get_rank(), total


def whereabouts():
    return os.getpid(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def echo(*values):
    return values


def raise_on(rank, error):
    if dist.get_rank() == rank:
        raise error


def fall_out_of_step():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3), async_op=True)
    raise ValueError(f"rank {dist.get_rank()} has had enough")


def leave_group():
    dist.destroy_process_group()


def exit_on(rank, code):
    if dist.get_rank() == rank:
        os._exit(code)
    dist.barrier()


def crash():
    ctypes.string_at(0)


def sleep_for_good_on(rank):
    if dist.get_rank() == rank:
        threading.Event().wait()


def unpicklable():
    return threading.Lock()


def use_module_from_path():
    import only_on_the_path

    return only_on_the_path.VALUE


@pytest.fixture
def pids(two_ranks):
    """The process ids of `two_ranks`, which a test is meant to leave as they are."""
    return [pid for pid, _, _ in two_ranks.run(whereabouts)]


def test_results_come_back_by_rank(two_ranks, three_ranks):
    for ranks in (two_ranks, three_ranks):
        results = ranks.run(add_up, 2.0)
        assert [rank for rank, _ in results] == list(range(ranks.world_size))
        assert all(total == 2.0 * ranks.world_size for _, total in results)


def test_arguments_by_rank(three_ranks):
    results = three_ranks.run_each(add_up, [(1.0,), (2.0,), (4.0,)])
    assert all(total == 7.0 for _, total in results)
    with pytest.raises(ValueError, match="1 sequences of arguments for 3 ranks"):
        three_ranks.run_each(add_up, [(1.0,)])


def test_tensors_travel_by_value(two_ranks):
    sent = [torch.arange(4), torch.randn(2, 3, dtype=torch.bfloat16), torch.zeros(0), torch.ones(2, 2).t()]
    before = [tensor.clone() for tensor in sent]
    for received in two_ranks.run(echo, *sent):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(sent, received, strict=True))
        assert not any(tensor.is_shared() for tensor in received)
        received[0].add_(1)
    assert all(torch.equal(a, b) for a, b in zip(sent, before, strict=True))


def test_one_set_of_processes_with_one_thread_each(two_ranks, pids):
    environment = os.environ.get("OMP_NUM_THREADS")
    assert two_ranks.run(whereabouts) == [(pid, 1, "1") for pid in pids]
    assert two_ranks.pids == pids
    assert os.getpid() not in pids
    assert os.environ.get("OMP_NUM_THREADS") == environment


def test_an_exception_carries_its_rank_traceback_and_type(two_ranks, pids):
    with pytest.raises(RankError) as caught:
        two_ranks.run(raise_on, 1, KeyError("lost"))
    error = caught.value
    assert isinstance(error.exceptions[1], KeyError)
    assert error.ranks == {1: Outcome.RAISED}
    assert "1 of 2 ranks failed: rank 1 raised: KeyError: 'lost'" in str(error)
    assert "in raise_on" in str(error)
    assert "testing/ranks.py" not in str(error)
    assert two_ranks.alive
    assert two_ranks.pids == pids


def test_every_failing_rank_is_heard(three_ranks):
    with pytest.raises(RankError) as caught:
        three_ranks.run(fall_out_of_step)
    assert set(caught.value.exceptions) == {0, 1, 2}
    assert all(f"rank {rank} has had enough" in str(caught.value) for rank in range(3))


def test_a_failed_run_does_not_leave_the_group_out_of_step(two_ranks, pids):
    with pytest.raises(RankError):
        two_ranks.run(fall_out_of_step)
    assert [total for _, total in two_ranks.run(add_up, 1.0)] == [2.0, 2.0]
    assert two_ranks.pids == pids


def test_a_destroyed_group_is_replaced(two_ranks, pids):
    two_ranks.run(leave_group)
    assert [total for _, total in two_ranks.run(add_up, 1.0)] == [2.0, 2.0]
    assert two_ranks.pids == pids


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_not_even_an_exit_ends_a_rank(two_ranks, pids, error):
    with pytest.raises(RankError) as caught:
        two_ranks.run(raise_on, 0, error)
    assert type(caught.value.exceptions[0]) is type(error)
    assert two_ranks.pids == pids


def test_what_cannot_be_pickled_is_an_error_not_a_hang(two_ranks, pids):
    with pytest.raises(TypeError, match="use a function of a module"):
        two_ranks.run(lambda: None)
    with pytest.raises(TypeError, match="cannot be sent to the ranks"):
        two_ranks.run(echo, threading.Lock())
    with pytest.raises(RankError, match=r"cannot pickle '_thread\.lock' object"):
        two_ranks.run(unpicklable)
    assert two_ranks.pids == pids


def test_an_exception_that_cannot_be_made_anew_is_told_as_text(two_ranks):
    failure = RankFailure.raised(1, pickle.dumps(("OnlyPickles: code 4", "trace", b"no pickle")))
    assert failure.exception is None
    with pytest.raises(RankError, match="OnlyPickles: code 4") as caught:
        two_ranks.run(raise_only_pickles)
    assert caught.value.exceptions == {}
    assert set(caught.value.ranks) == {0, 1}


def raise_only_pickles():
    raise OnlyPickles(code=4)


def test_rank_error_survives_a_pickle():
    error = RankError(2, [RankFailure(1, Outcome.DIED, "its process ended", exit_code=3)])
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error) == "1 of 2 ranks failed: rank 1 died: its process ended"
    assert copy.failures == error.failures


def test_paths_added_after_the_start_reach_the_ranks(two_ranks, pids, tmp_path, monkeypatch):
    (tmp_path / "only_on_the_path.py").write_text("VALUE = 'found'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert two_ranks.run(use_module_from_path) == ["found", "found"]


def test_a_rank_that_exits_is_noticed_at_once(two_ranks):
    two_ranks.run(echo)
    with pytest.raises(RankError) as caught:
        two_ranks.run(exit_on, 1, 7, timeout=150)
    assert caught.value.ranks[1] is Outcome.DIED
    assert [failure.exit_code for failure in caught.value.failures if failure.rank == 1] == [7]
    assert "exit code 7" in str(caught.value)
    assert not two_ranks.alive
    assert [total for _, total in two_ranks.run(add_up, 1.0)] == [2.0, 2.0]
    assert two_ranks.alive


def test_a_rank_that_does_not_answer_is_named_with_its_stack(two_ranks):
    two_ranks.run(echo)
    gone = [os.pidfd_open(pid) for pid in two_ranks.pids]
    with pytest.raises(RankError) as caught:
        two_ranks.run(sleep_for_good_on, 1, timeout=3.0)
    assert caught.value.ranks[1] is Outcome.SILENT
    told = re.search(r"rank 1 did not answer: nothing for ([\d.]+) s", str(caught.value))
    assert float(told[1]) >= 3.0, caught.value
    assert "in sleep_for_good_on" in str(caught.value)
    assert all_end(gone, seconds=20)


def test_a_collective_that_hangs_raises_within_the_group_timeout_and_close_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Ranks(2, timeout=30, group_timeout=2) as ranks:
        assert not ranks.alive
        with pytest.raises(RankError, match="in add_up") as caught:
            ranks.run(call_on_rank_0, add_up, 1.0)
        assert caught.value.ranks == {0: Outcome.RAISED}
        assert ranks.alive
        assert list(tmp_path.iterdir())
        pidfds = [os.pidfd_open(pid) for pid in ranks.pids]
    assert all_end(pidfds, seconds=0.1)
    assert not list(tmp_path.iterdir())
    assert not ranks.alive


def call_on_rank_0(function, *args):
    return function(*args) if dist.get_rank() == 0 else None


def test_a_crash_in_the_preparation_is_an_error_of_the_start_with_its_stack():
    ranks = Ranks(1, prepare=crash)
    with pytest.raises(RankError, match=rf"signal 11 \({signal.strsignal(11)}\)") as caught:
        ranks.run(echo)
    assert caught.value.failures[0].exit_code == -signal.SIGSEGV
    assert "in crash" in str(caught.value)
    assert not ranks.alive
    assert ranks.pids == []


@pytest.mark.parametrize("wrong", [{"world_size": 0}, {"world_size": 1, "timeout": 0}], ids=str)
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValueError, match="should be positive"):
        Ranks(**wrong)


SCRIPT = """
import os, threading
from ppe_ddp.testing import run_ranks

def hang():
    os.write(1, f"{os.getpid()}\\n".encode())
    threading.Event().wait()

if __name__ == "__main__":
    os.write(1, f"{os.getpid()} ".encode())
    run_ranks(1, hang, backend=None, timeout=20)
"""


def test_ranks_end_with_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": root, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([*warm_python(), script], stdout=subprocess.PIPE, env=environment, text=True) as starter:
        parent, rank = map(int, starter.stdout.readline().split())
        pidfd = os.pidfd_open(rank)
        os.kill(parent, signal.SIGKILL)
    assert all_end([pidfd], seconds=10)
