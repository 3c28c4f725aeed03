"""Who is gone, is stopped or does not come is named; and no call waits for a store that is silent."""

import multiprocessing
import os
import secrets
import signal
import time
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from failing import hold_told_wait
from ppe_ddp.backends.rank_store import BoundedStore, MeetingOutcome
from ppe_ddp.engine import failures as failures_module
from ppe_ddp.engine.failures import Failure, Failures, LostRank, LostRanks, Renewals
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.peer_processes import _GROUPS, Activity, Condition, PeerProcesses, Position, own_address
from ppe_ddp.errors import CommunicationError, PeerAbortedError
from rank_tests import on_three_ranks, on_two_ranks
from subprocesses import await_stop, run, warm_python


def note(processes, step, activity, bucket=0):
    Groups.note(SimpleNamespace(step=step, processes=processes), activity, bucket)


def be_peer(pipe):
    """Another process with a page, which does as it is told."""
    address = own_address()
    processes = PeerProcesses(1, address, [None, address.packed()])
    pipe.send(address.packed())
    while (call := pipe.recv()) is not None:
        note(processes, *call[1:]) if call[0] == "note" else getattr(processes, call[0])(*call[1:])
        pipe.send("done")


class Peer:
    def __init__(self):
        context = multiprocessing.get_context("forkserver")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=be_peer, args=(theirs,), daemon=True)
        self.process.start()
        address, self.address = own_address(), self.pipe.recv()
        self.processes = PeerProcesses(0, address, [address.packed(), self.address])

    def tell(self, *call):
        self.pipe.send(call)
        assert self.pipe.recv() == "done"

    def signal_and_await(self, number, condition):
        os.kill(self.process.pid, number)
        deadline = time.monotonic() + 10
        while self.processes.condition(1)[0] is not condition:
            assert time.monotonic() < deadline


@pytest.fixture
def peer():
    one = Peer()
    yield one
    one.process.kill()
    one.process.join()


def lost_ranks(peer, size=2, store=None):
    return LostRanks(BoundedStore(store or dist.HashStore()), "one", 0, size, peer.processes)


def test_what_a_process_has_done_last_can_be_read_when_it_is_dead(peer):
    peer.tell("note", 7, Activity.BUCKET, 3)
    assert peer.processes.condition(1) == (Condition.RUNNING, "")
    peer.signal_and_await(signal.SIGSTOP, Condition.STOPPED)
    (stopped,) = lost_ranks(peer).find()
    assert str(stopped) == "rank 1, which is stopped (it was at bucket 3 of step 7)"
    assert not lost_ranks(peer).gone()
    peer.signal_and_await(signal.SIGKILL, Condition.ENDED)
    (dead,) = lost_ranks(peer).gone()
    assert str(dead) == "rank 1, which has died (it was at bucket 3 of step 7)"
    assert (dead.step, dead.phase, dead.is_gone) == (7, "bucket", True)


def test_wrappers_that_come_and_go_leave_each_group_a_record_of_its_own():
    kept = own_address()
    taken = [own_address() for _ in range(3)]
    records = {one.record for one in taken}
    assert len(records | {kept.record}) == 4
    taken.clear()
    assert {own_address().record for _ in range(200)} <= records  # each of them goes back at once
    many = [own_address() for _ in range(_GROUPS + 76)]  # more than there are records: those that are left share one
    shared = max(one.record for one in many)
    assert kept.record not in {one.record for one in many}
    assert sum(one.record == shared for one in many) > 1
    alone = [one.record for one in many if one.record != shared]
    assert len(set(alone)) == len(alone)
    last = many.pop()
    del many
    again = [own_address() for _ in alone]
    assert {one.record for one in again} == set(alone)
    assert last.record == shared == own_address().record


@on_two_ranks
def test_groups_made_after_many_were_taken_again_still_tell_what_they_did_last():
    world = dist.group.WORLD
    for _ in range(_GROUPS + 76):
        Groups.duplicate(world).release()
    kept = [Groups.duplicate(world) for _ in range(80)]  # as wrappers of single layers have them
    steps = (3, 1, 2)
    groups = [Groups.duplicate(world) for _ in steps]
    for one, one.step in zip(groups, steps, strict=True):
        one.note(Activity.DONE)
    dist.barrier()
    assert [one.processes.position(1 - one.rank).step for one in groups] == [*steps]
    assert {one.processes.position(1 - one.rank).step for one in kept} == {1}
    for one in (*kept, *groups):
        one.release()


def test_one_that_leaves_says_so_before_it_is_gone(peer):
    peer.tell("leave", "an error that nobody has caught, KeyError: 'x'")
    (left,) = lost_ranks(peer).find()
    assert str(left) == (
        "rank 1, which has left: its program has ended by an error that nobody has caught, KeyError: 'x' (it had begun "
        "no backward)"
    )
    told = Failures(BoundedStore(dist.HashStore()), "one", 0, None).lost_error([left], "")
    assert told.reason == "KeyError: 'x'"


@pytest.mark.parametrize(
    ("theirs", "is_completing"),
    [
        ((3, Activity.VOTE), True),
        ((3, Activity.DONE), True),  # and has still to gather
        ((3, Activity.GATHER), True),
        ((3, Activity.GATHERED), False),
        ((4, Activity.MASK), False),
    ],
)
def test_what_a_rank_still_receives_is_seen_by_those_that_have_completed_it(peer, theirs, is_completing):
    note(peer.processes, 3, Activity.DONE)
    note(peer.processes, 3, Activity.GATHERED)
    note(peer.processes, 4, Activity.BUCKET)
    peer.tell("note", *theirs)
    assert peer.processes.completing() == [1] * is_completing
    peer.tell("note_closed")
    assert not peer.processes.completing()
    peer.tell("note_open")
    assert peer.processes.completing() == [1] * is_completing


def test_who_has_not_begun_to_gather_for_a_second_optimizer_is_behind_those_that_have():
    """And those have completed what it has."""
    behind, ahead = Position(3, Activity.GATHERED, 1), Position(3, Activity.GATHER, 2)
    assert behind.is_behind(ahead)
    assert not ahead.is_behind(behind)
    assert Position(3, Activity.BUCKET, 1).is_behind(Position(3, Activity.BUCKET, 2))


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_what_a_rank_still_receives_that_does_not_run(peer, number):
    peer.tell("note", 3, Activity.VOTE)
    note(peer.processes, 3, Activity.DONE)
    assert peer.processes.completing() == [1]
    peer.signal_and_await(number, Condition.STOPPED if number == signal.SIGSTOP else Condition.ENDED)
    assert not peer.processes.completing()
    assert peer.processes.completing(stopped=True) == [1] * (number == signal.SIGSTOP)


def test_what_was_sent_to_other_nodes_has_a_while_to_arrive(peer, monkeypatch):
    waits = []
    engine = SimpleNamespace(wait_until=lambda done, **limits: waits.append((done(), limits["seconds"])))
    monkeypatch.setattr(failures_module, "progress_engine", lambda _: engine)
    lost_ranks(peer, size=3).await_completion()
    of_this_node = [(True, failures_module._STOPPED_SECONDS), (True, failures_module._COMPLETING_SECONDS)]
    assert waits == [(False, failures_module._ARRIVING_SECONDS), *of_this_node]
    note(peer.processes, 1, Activity.BUCKET)  # all have begun this step
    waits.clear()
    lost_ranks(peer, size=3).await_completion()
    assert waits == of_this_node


@pytest.mark.parametrize(("activity", "is_late"), [(Activity.MASK, True), (Activity.VOTE, False)])
def test_one_that_computes_is_late_if_it_is_behind(peer, activity, is_late):
    note(peer.processes, 3, Activity.BUCKET, 1)
    peer.processes.note_wait()
    peer.tell("note", 3, activity)
    assert [one.rank for one in lost_ranks(peer).find()] == ([1] if is_late else [])


@pytest.mark.parametrize("other", ["note_wait", "note_closed"])
def test_of_two_at_one_place_the_one_that_does_not_wait_is_late(peer, other):
    note(peer.processes, 3, Activity.MASK)
    peer.processes.note_wait()
    peer.tell("note", 3, Activity.MASK)
    assert [one.condition for one in lost_ranks(peer).find()] == ["has not come"]
    peer.tell(other)
    assert lost_ranks(peer).find() == []


def test_a_long_wait_is_told_by_one_rank_with_whom_it_needs(peer, caplog):
    note(peer.processes, 4, Activity.MASK)
    peer.processes.note_wait()
    peer.tell("note", 3, Activity.DONE)
    lost_ranks(peer).tell_wait(20.5)
    peer.signal_and_await(signal.SIGSTOP, Condition.STOPPED)
    lost_ranks(peer).tell_wait(60.5)
    late, stopped = (record.message for record in caplog.records)
    assert "rank 0: step 4 has waited for 20 s for rank 1, which has not come (it had completed step 3" in late
    assert late.endswith("for uneven numbers of batches train in `with model.join():`")
    assert "waited for 60 s for rank 1, which is stopped" in stopped


def test_a_long_wait_for_another_node_is_told_by_the_lowest_rank_there(peer, caplog):
    note(peer.processes, 4, Activity.MASK)
    peer.processes.note_wait()
    peer.tell("note", 4, Activity.MASK)
    peer.tell("note_wait")
    lost_ranks(peer, 2).tell_wait(20.0)
    assert not caplog.records  # both wait, and there is nobody else
    lost_ranks(peer, 3).tell_wait(20.0)
    assert "for a rank of another node" in caplog.text


@pytest.mark.parametrize("shared_memory", [False, True], ids=["gloo", "shm"])
@on_three_ranks
def test_ranks_that_wait_long_say_for_whom(shared_memory):
    hold_told_wait(shared_memory=shared_memory)


@pytest.mark.parametrize(
    "error",
    [
        "",
        " by an error that nobody has caught, RuntimeError: [x.cc:78] Timed out waiting 25000ms for recv",
        " by an error that nobody has caught, CommunicationError: barrier has waited for the group's timeout of 25 s",
    ],
)
def test_where_a_rank_has_ended_well_or_waited_in_vain_the_others_are_told_to_join(error):
    lost = LostRank(1, f"has left: its program has ended{error}", is_gone=True)
    told = Failures(BoundedStore(dist.HashStore()), "one", 0, None).lost_error([lost], "")
    assert "If it had fewer batches: for uneven numbers of batches train in `with model.join():`" in str(told)


def test_a_failure_that_is_explained_needs_nobody(peer):
    peer.signal_and_await(signal.SIGKILL, Condition.ENDED)
    assert lost_ranks(peer).find(lambda: True) == []


def test_the_rank_that_was_waited_for_in_vain_is_told():
    own, other = LostRank(1, "has not come"), LostRank(2, "has died", is_gone=True)
    bounded = BoundedStore(dist.HashStore())
    failures = Failures(bounded, "one", 1, LostRanks(bounded, "one", 1, 3, PeerProcesses(1)))
    late = failures.error([Failure(0, 3, "negotiating", "late", lost=[own])])
    assert str(late).startswith("rank 1: this rank came too late, and rank 0 has given this step up")
    dead = failures.error([Failure(0, 3, "negotiating", "dead", lost=[own, other])])
    assert dead.ranks == (2,)


def test_of_one_that_has_failed_in_a_later_step_and_died_the_death_is_told(peer):
    lost = lost_ranks(peer)
    failures = Failures(BoundedStore(dist.HashStore()), "one", 0, lost)
    groups = SimpleNamespace(step=3, is_duplicate=True, is_renewing=False, failures=failures, _lost=lost)

    def told(step):
        failures.of_others = lambda: [Failure(1, step, "begun", "KeyError: 'x'")]
        return Groups.explained(groups, RuntimeError("gloo: connection reset"), "gathering parameters")

    assert {type(told(step)) for step in (3, 4)} == {PeerAbortedError}
    peer.signal_and_await(signal.SIGKILL, Condition.ENDED)
    assert type(told(3)) is PeerAbortedError  # its failure has ended this step
    assert isinstance(told(4), CommunicationError)
    assert told(4).is_final


def test_a_death_that_is_seen_here_counts_more_than_what_a_rank_of_another_node_has_found(peer):
    failures = Failures(BoundedStore(dist.HashStore()), "one", 0, lost_ranks(peer, 3))
    reports = [Failure(2, 3, "negotiating", "late", lost=[LostRank(1, "has not come")])]
    assert not failures.error(reports).is_final
    peer.signal_and_await(signal.SIGKILL, Condition.ENDED)
    told = failures.error(reports)
    assert (told.ranks, told.is_final) == ((1,), True)
    assert "rank 1, which has died" in str(told)


def test_a_death_is_known_in_groups_that_have_nobody_on_its_node(peer):
    job, store = BoundedStore(dist.HashStore()), BoundedStore(dist.HashStore())
    # The dead process is rank 1 of a group on its node, and rank 0 of another one whose other rank is elsewhere.
    sees = LostRanks(store, "here", 0, 2, peer.processes, job)
    far = PeerProcesses(1, None, [["another node", *peer.address[1:]], None])
    assert far.on_this_node == []
    elsewhere = PeerProcesses(1, None, [peer.address, None])
    is_told, is_not = (LostRanks(store, "across", 1, 2, one, job) for one in (elsewhere, far))
    assert sees.gone() == is_told.gone() == []
    peer.signal_and_await(signal.SIGKILL, Condition.ENDED)
    assert is_told.gone() == []
    assert [one.rank for one in sees.gone()] == [1]
    (dead,) = is_told.gone()
    assert str(dead) == "rank 0, which has died"
    assert dead.is_gone
    assert is_told.find() == is_told.behind([0]) == [dead]
    assert is_not.gone() == []  # another process with that number


def test_who_has_died_before_its_page_could_be_mapped_is_lost(peer):
    address, lives = own_address(), Peer()
    # With another token than that of the page: it cannot be mapped.
    packed = [[*one.address[:4], secrets.token_hex(16), one.address[5]] for one in (peer, lives)]
    peer.process.kill()
    peer.process.join()
    processes = PeerProcesses(0, address, [None, *packed, ["another node", *packed[0][1:]]])
    assert processes.lost() == {1: (Condition.ENDED, "")}
    assert processes.on_this_node == []
    lives.process.kill()
    lives.process.join()


def test_ranks_elsewhere_are_asked_by_the_store(peer):
    store = dist.HashStore()
    other = LostRanks(BoundedStore(store), "one", 2, 3, PeerProcesses(2))
    assert [(one.rank, one.condition) for one in lost_ranks(peer, 3, store).find()] == [(2, "does not answer")]
    alone = lost_ranks(peer, 3, store)
    alone._told = mock.Mock(side_effect=dist.DistNetworkError("Broken pipe"))  # its server has died
    assert "rank 2, which cannot be asked, as the store" in str(*alone.find())
    other._tell([])
    assert lost_ranks(peer, 3, store).find() == []
    other._tell([other._lost(2, "has died", Position(5, Activity.VOTE, 0), is_gone=True)])
    (dead,) = lost_ranks(peer, 3, store).find()
    assert str(dead) == "rank 2, which has died (it had sent all buckets of step 5)"


def test_a_process_may_show_its_end_after_all_other_nodes_have_answered(peer, monkeypatch):
    store, looks, lost = dist.HashStore(), [], peer.processes.lost
    LostRanks(BoundedStore(store), "one", 2, 3, PeerProcesses(2))._tell([])

    def look():
        looks.append(lost())
        if len(looks) == 2:  # the others have answered after the first look
            peer.signal_and_await(signal.SIGKILL, Condition.ENDED)
        return looks[-1]

    monkeypatch.setattr(peer.processes, "lost", look)
    for name in ("_HERE_SECONDS", "_ELSEWHERE_SECONDS"):  # on a machine that may be busy
        monkeypatch.setattr(failures_module, name, 60.0)
    (dead,) = lost_ranks(peer, 3, store).find()
    assert (dead.rank, dead.is_gone) == (1, True)
    assert looks[:2] == [{}, {}]


class CountingStore(dist.Store):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.store = dist.HashStore()

    def _count(name):
        def call(self, *arguments):
            self.calls += 1
            return getattr(self.store, name)(*arguments)

        return call

    set, get, add, check = map(_count, ("set", "get", "add", "check"))
    multi_get, compare_set, delete_key = map(_count, ("multi_get", "compare_set", "delete_key"))

    def has_extended_api(self):
        return True

    def calls_of(self, function):
        self.calls = 0
        function()
        return self.calls


@pytest.mark.parametrize("size", [2, 64])
def test_a_look_at_the_store_costs_the_same_however_many_ranks_there_are(size, monkeypatch):
    store = CountingStore()
    bounded = BoundedStore(store)
    everyone = [LostRanks(bounded, "one", rank, size, PeerProcesses(rank)) for rank in range(size)]
    failures = Failures(bounded, "one", 0, everyone[0])
    assert store.calls_of(everyone[0].gone) == store.calls_of(failures.check) == 1
    for one in everyone[1:]:
        one._tell([])
    bounded.do(lambda keys: keys.add("ppe_ddp/present/one/count", 1))  # one that has died before it has written
    assert store.calls_of(everyone[0].gone) < 9 + size  # it answers once
    assert store.calls_of(everyone[0].gone) < 8  # and reads its own answer
    assert store.calls_of(everyone[0].gone) < 5
    assert sorted(everyone[0]._told()) == [*range(1, size)]
    monkeypatch.setattr(failures_module, "_next_place", int)
    attempts = [Renewals(lambda: bounded, "one", rank, size) for rank in range(size)]
    for one in attempts:
        one.begin()
        assert one.outcome() is None
        assert store.calls_of(one.outcome) == 1
        assert store.calls_of(lambda one=one: one.come(one._rank)) < 5
    assert store.calls_of(attempts[0].outcome) == 2
    assert all(one.outcome() == MeetingOutcome([*range(size)], size - 1) for one in attempts)


def serve(pipe):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def test_what_python_finalizes_at_its_end_waits_for_no_store():
    script = """
import torch.distributed as dist
from ppe_ddp.backends.rank_store import BoundedStore

class Kept:
    store = BoundedStore(dist.HashStore(), 600.0)

    def __del__(self):
        self.store.do(lambda one: one.set("key", "value"))

kept = Kept()
"""
    code, _, errors = run([*warm_python(), "-c", script], timeout=150)
    assert (code, "CommunicationError: this process ends" in errors) == (0, True), errors


def test_a_store_that_is_silent_is_not_waited_for():
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        store = dist.TCPStore("127.0.0.1", ours.recv(), is_master=False, timeout=timedelta(seconds=20))
        bounded = BoundedStore(store, 0.3)
        bounded.do(lambda one: one.set("key", "value"), seconds=20)
        assert bounded.do(lambda one: one.get("key"), seconds=20) == b"value"
        os.kill(process.pid, signal.SIGSTOP)
        await_stop(process.pid)
        for _ in range(100):  # of which the first one waits for 0.3 s, and none for the answer
            with pytest.raises(CommunicationError, match="does not answer"):
                bounded.do(lambda one: one.check(["key"]))
        os.kill(process.pid, signal.SIGCONT)
        bounded._store.get("key")  # when the calls before it have ended
    finally:
        process.kill()
        process.join()
