"""The progress engine: waits that leave the cores to others."""

import os
import signal
import time
from types import SimpleNamespace

import pytest

from ppe_ddp import waiting
from ppe_ddp.waiting import ProgressEngine, ProgressThread


class Busy:
    """A group that never ends, and takes a hundredth of a millisecond to be advanced."""

    def advance(self):
        end = time.perf_counter() + 1e-5
        while time.perf_counter() < end:
            pass
        return False


def test_most_of_a_long_wait_is_slept_where_there_are_more_ranks_than_cores():
    """The others need the cores, and so does what moves messages between nodes."""
    engine = ProgressEngine()
    engine.expect(1 << 20)
    engine.add(Busy())
    begin, used = time.monotonic(), time.thread_time()
    engine.wait_until(lambda: time.monotonic() - begin > 0.3, lambda: None)
    assert time.thread_time() - used < 0.15


@pytest.mark.parametrize(("seconds", "yields"), [(0.00001, 80), (0.002, 1)])
def test_a_core_that_another_program_uses_is_not_yielded_again(monkeypatch, seconds, yields):
    """It would come back some milliseconds later. After a nap it comes back at once."""
    now, yielded = [1.0], []

    def sleep(length):
        now[0] += length

    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(os, "sched_yield", lambda: yielded.append(sleep(seconds)))
    engine = ProgressEngine()
    rounds = iter(range(100))
    for last in (40, 81):
        engine.wait_until(lambda: next(rounds) == last)  # noqa: B023  # called here alone
    assert len(yielded) == yields
    now[0] += 1.0
    engine.wait_until(lambda: len(yielded) > yields)  # it tries once more


def test_a_second_interrupt_does_not_end_the_wait_for_a_thread_at_the_exit(monkeypatch):
    """Python ends the process where a thread comes back from torch after that."""
    progress = ProgressThread(os.getpid(), "waits", long_nap=0.001, short_nap=0.001, rest_after=1)
    thread, interrupts = progress._thread, [KeyboardInterrupt, KeyboardInterrupt]

    def join():
        if interrupts:
            raise interrupts.pop()
        thread.join()

    monkeypatch.setattr(
        progress, "_thread", SimpleNamespace(join=join, is_alive=lambda: interrupts or thread.is_alive())
    )
    progress._end()
    assert not thread.is_alive()


class Interrupting:
    """A count at whose increase Ctrl-C arrives."""

    def __iadd__(self, other):
        raise KeyboardInterrupt


def test_an_interrupt_does_not_end_all_progress():
    engine, advanced = ProgressEngine(), []
    group = Busy()
    group.advance = lambda: advanced.append(True)
    engine.add(group)
    engine.turns = Interrupting()
    with pytest.raises(KeyboardInterrupt):
        engine.progress()
    engine.turns = 0
    engine.progress()
    assert advanced


def test_an_interrupt_leaves_no_fence_locked():
    engine, interrupts = ProgressEngine(), 0

    def interrupt(_number, frame):
        if frame.f_code is ProgressEngine.fence.__code__:
            raise KeyboardInterrupt

    before, end = signal.signal(signal.SIGALRM, interrupt), time.monotonic() + 0.5
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        while time.monotonic() < end and not engine._fence.locked():
            try:
                engine.fence()
            except KeyboardInterrupt:
                interrupts += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 1
    assert not engine._fence.locked()
