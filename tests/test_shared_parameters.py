"""Which wrappers a gradient is for, and in which order those that share parameters go: rules, without processes."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ppe_ddp.engine.completion import APART, SharedParameters, arrange
from ppe_ddp.errors import UnusableError

PARENT = SimpleNamespace(group_name="world")


class Wrapper:
    """What the rules see of one: its number is that of its group, and orders it."""

    def __init__(self, parameters, number, *others, parent=PARENT, exclusive=False):
        self.groups = SimpleNamespace(parent=parent, name=f"{number}", number=number, step=0, is_closed=False, rank=3)
        self.shared = SharedParameters(self.groups, exclusive=exclusive)
        self.has_hooks = True
        names = [f"p{i}" for i in range(len(parameters))]
        self.shared.share(SimpleNamespace(parameters=parameters, names=names), others)

    def remove_hooks(self):
        self.has_hooks = False
        self.shared.leave()


def parameters(count):
    return [nn.Parameter(torch.ones(1)) for _ in range(count)]


def pair():
    """Two wrappers that share the second of three parameters."""
    ours = parameters(3)
    first = Wrapper(ours[:2], 1)
    return ours, first, Wrapper(ours[1:], 2, first)


# --- whom a gradient is for


def test_a_gradient_is_for_the_wrapper_made_last_unless_one_is_used():
    (own, common, _), first, second = pair()

    def heard():
        return [not wrapper.shared.is_for_another(common) for wrapper in (first, second)]

    assert heard() == [False, True]
    first.shared.use()
    assert heard() == [True, False]
    second.shared.use()
    assert heard() == [True, True]
    first.shared.turn().end()
    assert heard() == [False, True]
    assert not first.shared.is_for_another(own)  # nobody else has it


def test_a_gradient_is_for_those_whose_outputs_backward_has_come_through():
    (_, common, _), first, second = pair()
    second.shared.use()
    first.shared.end_callback = lambda: first
    assert not first.shared.is_for_another(common)
    assert second.shared.is_for_another(common)
    second.shared.end_callback = lambda: second
    assert not second.shared.is_for_another(common)


def test_a_wrapper_that_is_gone_keeps_no_gradient_from_another():
    (_, common, _), first, second = pair()
    assert first.shared.is_for_another(common)
    assert first.shared.turn().is_held
    second.remove_hooks()
    assert not first.shared.is_for_another(common)
    assert first.shared.turn() is None


@pytest.mark.parametrize("exclusive", [(True, False), (False, True), (True, True)], ids=str)
def test_a_wrapper_with_buffers_takes_over_or_is_taken_over(exclusive):
    ours = parameters(3)
    first = Wrapper(ours[:2], 1, exclusive=exclusive[0])
    second = Wrapper(ours[1:], 2, first, exclusive=exclusive[1])
    assert not first.has_hooks
    with pytest.raises(UnusableError, match="rank 3: parameter 'p0' was wrapped again"):
        first.shared.check()
    second.shared.check()
    assert second.shared.turn() is None


# --- the order of turns


def turns_of(*wrappers):
    return [wrapper.shared.turn() for wrapper in wrappers]


def agree(*ranks):
    """Let the turns of the same wrappers on several ranks agree."""
    for turns in zip(*ranks, strict=True):
        apart = bytes(map(max, *(turn.apart for turn in turns)))
        for turn in turns:
            turn.agree(apart)


def advance(turn):
    """Let `turn` go on; whether it has come."""
    return not list(zip(range(1), turn.wait(), strict=False))


def test_turns_that_end_together_everywhere_go_by_name():
    _, first, second = pair()
    ranks = [turns_of(first, second) for _ in range(2)]
    arrange(ranks[0], [])
    arrange(ranks[1][::-1], [])
    agree(*ranks)
    for one, other in ranks:
        assert not advance(other)
        assert other.is_behind
        assert advance(one)
        assert not advance(other)
        one.end()
        assert advance(other)


def test_a_rank_that_ends_one_alone_is_not_kept_waiting():
    _, first, second = pair()
    together, alone = turns_of(first, second), turns_of(second)
    arrange(together, [])
    arrange(alone, [])
    together[1].agree(bytes(map(max, together[1].apart, alone[0].apart)))
    assert advance(together[1])
    together[0].agree(APART)
    assert not advance(together[0])  # one at a time
    together[1].end()
    assert advance(together[0])


def test_a_wrapper_in_another_step_is_another_one():
    _, first, second = pair()
    now = turns_of(first, second)
    arrange(now, [])
    first.groups.step = 1
    ahead = turns_of(first, second)
    arrange(ahead, [])
    agree(now, ahead)
    assert advance(now[1])


def test_no_other_wrapper_is_taken_for_one_that_is_not_ended():
    common = parameters(1)
    wrappers = [Wrapper(common, 1)]
    for number in range(2, 6):
        wrappers.append(Wrapper(common, number, *wrappers))
    *others, last = wrappers
    for step in range(40):
        others[0].groups.step = step
        for other in others[1:]:
            ranks = [turns_of(others[0], last), turns_of(other, last)]
            for turns in ranks:
                arrange(turns, [])
            agree(*(turns[1:] for turns in ranks))
            assert all(advance(turns[1]) for turns in ranks), step


def test_what_was_started_before_ends_together_with_what_shares_parameters_with_it():
    ours = parameters(4)
    first = Wrapper(ours[:2], 1)
    second = Wrapper(ours[1:3], 2, first)
    third = Wrapper(ours[2:], 3, second)
    others = parameters(1)
    fourth = Wrapper(others, 4)
    fifth = Wrapper(others, 5, fourth)
    a, b, c, d = turns_of(first, second, third, fifth)
    assert arrange([c], [d, a, b]) == [b, a]
    assert [turn.is_held for turn in (a, b, c, d)] == [False, False, False, True]
    assert arrange([d], []) == []


def test_turns_that_are_over_are_freed_at_once():
    turns = turns_of(*pair()[1:])
    arrange(turns, [])
    agree(turns, turns)
    seen = [weakref.ref(turn) for turn in turns]
    gc.disable()
    try:
        for turn in turns:
            turn.end()
        del turn, turns
        assert [one() for one in seen] == [None, None]
    finally:
        gc.enable()


# --- who averages


def test_a_gradient_is_claimed_once():
    turns = turns_of(*pair()[1:])
    arrange(turns, [])
    assert [turn.claim(bytes([1, 1])) for turn in turns] == [bytes([1, 1]), bytes([0, 1])]


def test_what_the_one_before_has_not_is_claimed():
    turns = turns_of(*pair()[1:])
    arrange(turns, [])
    turns[0].end()  # it could not connect again
    assert turns[1].claim(bytes([1, 0])) == bytes([1, 0])
    turns = turns_of(*pair()[1:])
    arrange(turns, [])
    assert [turn.claim(local) for turn, local in zip(turns, (b"\1\0", b"\1\1"), strict=True)] == [b"\1\0", b"\1\1"]


def test_what_the_one_before_will_find_is_left_to_it():
    turns = turns_of(*pair()[1:])
    arrange(turns, [])
    assert turns[1].claim(bytes([1, 1])) == bytes([0, 1])  # the one before still connects again


def test_an_average_over_other_ranks_is_no_average_here():
    ours = parameters(1)
    first = Wrapper(ours, 1)
    second = Wrapper(ours, 2, first, parent=SimpleNamespace(group_name="half"))
    turns = turns_of(first, second)
    arrange(turns, [])
    assert [turn.claim(b"\1") for turn in turns] == [b"\1", b"\1"]
