"""The progress engine: waits that leave the cores to others."""

import time

import pytest

from ppe_ddp.waiting import ProgressEngine


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
