"""Every order of the loads and stores of ranks that share memory, and every order in which stores reach the others.

The library's own functions run; each load of another rank's word, and each store, is one step of a search that is
breadth first. A store reaches the others at any later time, before or after those of other words, but before a fence.
A rank goes on from where its function was by running that once more on a copy, with the answers that it has had.
"""

from array import array
from collections import deque
from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace
from unittest import mock

import pytest

from ppe_ddp.backends.shared_memory import shared_reservation, step_queue
from ppe_ddp.backends.shared_memory.shared_reservation import ControlPage, ControlPages
from ppe_ddp.backends.shared_memory.step_queue import StepQueue
from ppe_ddp.errors import CommunicationError
from simulation.mutants import Mutant


class Unsound(AssertionError):
    """Something happens in an order in which it must not."""


class Tape(BaseException):
    """The answers to what a function asks; raised where there is none yet."""

    def __init__(self, answers=()):
        Tape.now, self.left, self.asked = self, deque(answers), None


def ask(*what):
    if Tape.now.left and Tape.now.asked is None:
        return Tape.now.left.popleft()
    Tape.now.asked = Tape.now.asked or what
    raise Tape.now


class Fixed(SimpleNamespace):
    """What is the same in all copies."""

    def __deepcopy__(self, _memo):
        return self


class Page(Fixed):
    """The words of one ``owner`` from ``start`` on; a record of several counts as one word."""

    nbytes = 0

    def cast(self, _kind):
        return self

    def __getitem__(self, key):
        if not isinstance(key, slice):
            return ask("load", (self.owner, self.start + key), 0)
        if key.stop in (None, 1) or key.start >= 100:  # a part of a page, for a ControlPage
            return Page(owner=self.owner, start=self.start + (key.start or 0))
        return array("q", ask("load", (self.owner, self.start + key.start), (0,) * 4))

    def __setitem__(self, key, value):
        place, value = ((key.start or 0), tuple(value) or 0) if isinstance(key, slice) else (key, value)
        ask("store", (self.owner, self.start + place), value)


class Search:
    """All states of some ranks: ``run()`` does what comes next, ``key()`` tells a rank's states apart."""

    def __init__(self, ranks):
        self._kept, self._known = {}, {}
        start = (frozenset(), ((),) * len(ranks), tuple((self._keep(one), ()) for one in ranks), frozenset())
        self.before, left = {start: []}, deque([start])
        while left:
            state = left.popleft()
            for after in self._moves(*state):
                if after not in self.before:
                    self.before[after] = []
                    left.append(after)
                self.before[after].append(state)
        ends = [state for state in self.before if all(self._kept[key].is_over for key, _ in state[2])]
        can_end = set(ends)
        for state in ends:  # grows
            ends += set(self.before[state]) - can_end
            can_end.update(self.before[state])
        if stuck := self.before.keys() - can_end:
            raise Unsound(f"{len(stuck)} of {len(self.before)} states have no end, as {next(iter(stuck))}")

    def _keep(self, one):
        return self._kept.setdefault(one.key(), one).key()

    def _next(self, key, answers):
        """What a rank asks next, after these answers; or that its function ends, and the key that it has then."""
        if (key, answers) not in self._known:
            one = deepcopy(self._kept[key])
            try:
                Tape(answers)
                one.run()
                self._known[key, answers] = ("end", self._keep(one))
            except Tape as tape:
                self._known[key, answers] = tape.asked
        return self._known[key, answers]

    def _moves(self, memory, buffers, ranks, noted):
        asked = [("over",) if self._kept[key].is_over else self._next(key, answers) for key, answers in ranks]
        if all(kind == "meet" for kind, *_ in asked) and not any(buffers):  # a message goes behind what was stored
            words = tuple(word for _, word in asked)
            return [(memory, buffers, tuple((key, (*answers, words)) for key, answers in ranks), noted)]
        moves = []
        for rank, (kind, *what) in enumerate(asked):
            own, (key, answers) = buffers[rank], ranks[rank]

            def after(*answer, own=own, to=(key, answers), rank=rank, memory=memory, noted=noted):
                to = (to[0], to[1] + answer)
                return (
                    memory,
                    (*buffers[:rank], own, *buffers[rank + 1 :]),
                    (*ranks[:rank], to, *ranks[rank + 1 :]),
                    noted,
                )

            # What nobody else can see is the only move: it makes no difference when it comes.
            if kind == "store":
                return [after(None, own=(*own, tuple(what)))]
            if kind == "end":
                return [after(to=(what[0], ()))]
            if kind == "fence" and not own:
                return [after(None)]
            if kind == "load":
                values = [what[1], *(value for place, value in (*memory, *own) if place == what[0])]
                if what[0][0] == rank:
                    return [after(values[-1])]
                moves.append(after(values[-1]))
            elif kind == "choose":
                moves += [after(False), after(True)]
            elif kind == "note":
                self._kept[key].check(*what, noted)
                moves.append(after(None, noted=noted | {(rank, *what)}))
            for k, (place, value) in enumerate(own):
                if all(other != place for other, _ in own[:k]):
                    reached = {one for one in memory if one[0] != place} | {(place, value)}
                    moves.append(after(own=(*own[:k], *own[k + 1 :]), memory=frozenset(reached)))
        return moves


class Step:
    """A step of a tensor in shared memory, which lies at another place for each rank and number."""

    title, stride, shared, code = "all_reduce", 0, (), 1
    local = SimpleNamespace(numel=lambda: 1, nbytes=8)

    def __init__(self, rank, number):
        self.number, self.records = number, None
        self.record = array("q", (10 * number + rank, 0, 1, 1))

    def prepare(self, regions):
        if [region.position for region in regions] != [10 * self.number + rank for rank in range(len(regions))]:
            raise ArithmeticError("an old record")

    def act(self, _scratch):
        ask("note", "acts", self.number)

    def end(self):
        ask("note", "has its result", self.number)


def _give_up(text):
    if Tape.now.asked is None:  # else the run is only cut off here
        raise Unsound(text)


class QueueRank:
    """A rank that launches some steps and waits for one after another; the last rank may give the group up."""

    def __init__(self, rank, size, steps, *, can_be_given_up):
        waits = Fixed(at_failure=[], failure="given up", place="", look_now=bool, give_up=_give_up)
        progress = Fixed(lock=nullcontext(), fence=lambda: ask("fence"), add=id, progress=bool)
        pages = [SimpleNamespace(space=other, words=Page(owner=other, start=0)) for other in range(size)]
        layout = Fixed(local_rank=rank, local=range(size), nodes=range(1))
        self.queue = StepQueue(SimpleNamespace(waits=waits, progress=progress), None, layout, pages, 8)
        Tape([0])
        self.steps = self.queue.launch([Step(rank, number + 1) for number in range(steps)], None)
        for one in self.steps:
            one.when_done = one.step.end
        self.rank, self.size, self.ended, self.phase = rank, size, 0, "advance"
        self.can_be_given_up, self.may_give_up = can_be_given_up, can_be_given_up and rank == size - 1

    is_over = property(lambda self: self.ended == len(self.steps))

    def key(self):
        queue = self.queue
        numbers = [tuple(one.number for one in each) for each in (queue._waiting, queue._arriving, queue._held)]
        return (self.rank, self.ended, self.phase, self.may_give_up, queue._done, *numbers)

    def run(self):
        if self.phase == "advance":
            if self.may_give_up and ask("choose"):
                self.may_give_up = False
                self.queue._close()
            self.queue.advance()
            self.phase = "wait"
        elif self.phase == "look":
            if self.queue.is_closed_elsewhere():
                self.queue._close()
            self.phase = "advance"
        else:
            try:
                has_ended = "succeeds" if self.queue.done([self.steps[self.ended]]) else ""
            except CommunicationError:
                has_ended = "fails"
            if has_ended:
                self.ended += 1
                ask("note", has_ended, self.ended)
            self.phase = "wait" if has_ended else "look" if self.can_be_given_up else "advance"

    def check(self, what, number, noted):
        if (
            what == "acts"
            and {(rank, end, number) for rank in range(self.size) for end in ("succeeds", "fails")} & noted
        ):
            raise Unsound(f"rank {self.rank} acts in memory that a rank has freed in step {number}")
        if what == "has its result" and not all((rank, "acts", number) in noted for rank in range(self.size)):
            raise Unsound(f"rank {self.rank} has its result of step {number} too early")
        if what == "fails" and (self.size - 1, "succeeds", number) in noted:
            raise Unsound(f"rank {self.rank} fails in step {number}, from which the rank that gives up had gone on")


class PagesRank:
    """A rank that makes groups, looks at the pages of each, and leaves it at once or when it has another one."""

    def __init__(self, rank, groups):
        self.rank, self.missing, self.groups, self.taken = rank, groups, [], 0
        self.pages = ControlPages(Fixed(attach=lambda address: address, address=rank, reserve=self._reserve))
        self.pages._lock = nullcontext()

    def _reserve(self, _nbytes):
        self.taken += 100
        return self.taken

    is_over = property(lambda self: not (self.missing or self.groups))

    def key(self):
        there = [[(page.words.start, page._first_seen) for page in pages] for _, pages in self.groups]
        left = [(place, [page._first_seen for page in pages]) for place, pages in self.pages._left]
        return (self.rank, self.missing, self.taken, str(there), str(left))

    def run(self):
        if self.groups and (not self.missing or self.groups[1:] or ask("choose")):
            number, pages = self.groups.pop(0)
            for rank, page in enumerate(pages):
                if rank != self.rank and page.words[0] not in (0, number):
                    ask("note", "sees another group's words")
            self.pages._leave(self.rank, pages)
            return
        positions = ask("meet", self.pages.take())
        pages = [ControlPage(rank, position) for rank, position in enumerate(positions)]
        ask("meet", 0)
        pages[self.rank].words[0] = self.missing
        self.groups.append((self.missing, pages))
        self.missing -= 1

    def check(self, what, _noted):
        raise Unsound(f"rank {self.rank} {what}")


def search_queue(size, steps, *, can_be_given_up=False):
    """How many states there are; with one place for records, which each step takes again."""
    with mock.patch.object(step_queue, "_PLACES", 1):
        ranks = [QueueRank(rank, size, steps, can_be_given_up=can_be_given_up) for rank in range(size)]
        return len(Search(ranks).before)


def search_pages(size, groups):
    def view(of):
        return Page(owner=of, start=0) if isinstance(of, int) else memoryview(of)

    with mock.patch.object(shared_reservation, "memoryview", view, create=True):
        return len(Search([PagesRank(rank, groups) for rank in range(size)]).before)


def search_all():
    return search_queue(2, 2), search_queue(2, 2, can_be_given_up=True), search_pages(2, 3)


def test_every_order_is_sound():
    assert min(search_all()) > 10_000


@pytest.mark.long
def test_every_order_of_three_ranks_is_sound():
    assert min(search_queue(3, 1), search_pages(3, 2)) > 10_000


FENCE = "    fence()  # a rank that closes either sees that this one acts, or this one sees that it has closed\n"
BUGS = [
    Mutant("a rank acts before others can see that", StepQueue, "_act", FENCE, ""),
    Mutant("memory is free while others act in it", StepQueue, "done", " or any(map(_acting, self._controls))", ""),
    Mutant("a step is published before its record", StepQueue, "_publish", "self._progress.fence()", "pass"),
    Mutant("a record's place is taken early", StepQueue, "_publish", "> self._done:", "> self._done + 1:"),
    Mutant("a result is taken early", StepQueue, "_finish_acted", "min(map(_acted", "max(map(_acted"),
    Mutant("a step that is done is not shown", StepQueue, "advance", "self._own[_ACTED] = launched.number", "pass"),
    Mutant("what all have done fails", StepQueue, "_close", "self._finish_acted()", "pass"),
    Mutant(
        "a rank is seen closed before what it has done", StepQueue, "_close", "self._progress.fence()  #", "pass  #"
    ),
    Mutant("a page is taken while a rank looks at it", ControlPages, "take", "if all(", "if any("),
]


@pytest.mark.parametrize("bug", BUGS, ids=[bug.title for bug in BUGS])
def test_a_planted_bug_is_found(bug):
    with bug.planted(), pytest.raises(Unsound):
        _ = search_pages(2, 3) if bug.owner is ControlPages else search_all()
