"""Two backwards share no state."""

import pytest

from ppe_ddp.engine.backward import Backward, Phase


def test_a_backward_starts_with_nothing_said():
    first, second = Backward(("a",)), Backward(("a",), silent=True)
    assert first.phase is second.phase is Phase.BEGUN
    assert (first.silent, second.silent) == (False, True)
    assert first.waiting is first.exchange is None
    assert first.alive() is not None
    first.unexpected.append(0)
    first.arrivals.append(0)
    first.phase = Phase.FAILED
    assert (second.unexpected, second.arrivals, second.phase) == ([], [], Phase.BEGUN)


@pytest.mark.parametrize("before", [Phase.BEGUN, Phase.NEGOTIATING, Phase.LAUNCHING, Phase.FINISHING])
def test_phases_are_declared_in_the_order_in_which_they_come(before):
    assert before.value < Phase.OVER.value < Phase.FAILED.value
