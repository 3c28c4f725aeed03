"""Two backwards share no state."""

from types import SimpleNamespace

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
    assert first.fail() == "begun"
    assert (second.unexpected, second.arrivals, second.phase) == ([], [], Phase.BEGUN)


MOVES = {
    "negotiate": Backward.start_negotiating,
    "restart": Backward.restart,
    "launch": lambda backward: backward.start_launching(SimpleNamespace(record=None)),
    "finish": Backward.start_finishing,
    "end": Backward.end,
    "fail": Backward.fail,
}
# For each way to a phase, the moves that are allowed there.
ALLOWED = {
    "": {"negotiate", "end", "fail"},  # one rank alone ends at once
    "negotiate": {"restart", "launch", "fail"},
    "negotiate restart": {"negotiate", "end", "fail"},
    "negotiate launch": {"finish", "fail"},
    "negotiate launch finish": {"end", "fail"},
    "negotiate launch finish end": {"fail"},  # results that were left for later
    "negotiate launch fail": set(),
}


def went(way):
    backward = Backward(("a",))
    for move in way.split():
        MOVES[move](backward)
    return backward


@pytest.mark.parametrize("way", ALLOWED)
def test_a_backward_moves_on_as_it_should_and_in_no_other_way(way):
    for move in MOVES:
        backward = went(way)
        before = backward.phase
        if move in ALLOWED[way]:
            MOVES[move](backward)
            assert backward.phase is not before
        else:
            with pytest.raises(AssertionError, match="cannot go"):
                MOVES[move](backward)
            assert backward.phase is before


def test_who_begins_again_has_said_nothing():
    backward = Backward(("a",))
    backward.waiting, backward.exchange = bytearray(1), object()
    backward.start_negotiating()
    backward.restart()
    assert (backward.phase, backward.waiting, backward.exchange) == (Phase.BEGUN, None, None)


def test_a_failure_names_its_phase():
    assert went("negotiate launch").fail() == "launching"
    assert went("negotiate launch finish end").fail() == "finishing"


@pytest.mark.parametrize("silent", [True, False])
def test_who_aborts_is_silent_and_says_so(silent):
    backward = Backward(("a",), silent=silent)
    assert not backward.aborted
    backward.abort()
    assert (backward.silent, backward.aborted) == (True, True)
