"""What a rank has written to a store is deleted, and nothing else."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from ppe_ddp.backends.collective_comparison import CollectiveComparison
from ppe_ddp.backends.rank_store import Meeting, MeetingOutcome, WrittenKeys, exchange
from ppe_ddp.backends.work import Work
from ppe_ddp.errors import CommunicationError
from rank_tests import on_three_ranks, on_two_ranks


def test_what_was_written_is_deleted_and_nothing_else():
    store = dist.HashStore()
    store.set("of another", "1")
    keys = WrittenKeys(store)
    keys.set("set", "1")
    assert keys.add("sum", 2) == 2
    assert keys.compare_set("first", "", "mine") == b"mine"
    keys.under("part").set("key", "1")
    keys.under("part").note("by gloo")
    store.set("part/by gloo", "1")
    assert keys.check(["set", "sum", "first", "part/key", "part/by gloo"])
    assert keys.get("set") == b"1"
    keys.under("part").delete_key("key")
    store.set("part/key", "again, by another")
    keys.delete_all()
    assert [store.check([key]) for key in ("set", "sum", "first", "part/by gloo")] == [False] * 4
    assert store.check(["of another", "part/key"])
    keys.delete_all()  # of nothing


def test_a_store_that_cannot_delete_keeps_all():
    class Store(dist.Store):
        def set(self, key, value):
            pass

    keys = WrittenKeys(Store())
    keys.set("one", "1")
    keys.set("two", "2")
    keys.delete_all()


def test_a_rank_that_has_come_and_left_is_not_waited_for_in_vain():
    store = dist.HashStore()
    here, there = (Meeting(WrittenKeys(store), "all come", rank, 2) for rank in range(2))

    def find_lost():
        there.come("b")  # and its program has ended before this rank has read that all have come
        raise CommunicationError("rank 1 has left")

    assert here.words("a", find_lost, 60, may_leave=True).words == ["a", "b"]


def test_who_speaks_first_decides_for_all_ranks():
    store = dist.HashStore()

    def meetings(name):
        return [Meeting(WrittenKeys(store), name, rank, 3) for rank in range(3)]

    first, second, third = meetings("all come")
    first.come("a")
    third.come({"c": 1})
    assert first.outcome() is None
    assert first.absent() == [1]
    second.come(None)
    assert all(one.outcome() == MeetingOutcome(["a", None, {"c": 1}], 1) for one in (first, second, third))
    assert first.refuse("too late").words
    first, second, third = meetings("one refuses")
    second.come("b")
    assert first.refuse("not I") == MeetingOutcome([], 0, "not I")
    third.come("c")
    first.come("after all")
    assert [one.outcome() for one in (second, third)] == [MeetingOutcome([], 0, "not I")] * 2


@on_three_ranks
def test_an_exchange_that_one_rank_leaves_ends_on_all_at_once():
    rank = dist.get_rank()

    def look():
        if rank == 0:
            raise KeyboardInterrupt

    if rank < 2:  # rank 2 never comes
        error, text = (CommunicationError, "rank 0 has left .KeyboardInterrupt") if rank else (KeyboardInterrupt, "")
        with pytest.raises(error, match=text):
            exchange(dist.group.WORLD, "left", "word", look)


@on_two_ranks
def test_the_words_of_exchanges_that_are_over_are_deleted():
    store = dist.group.WORLD.get_group_store()
    for turn in range(60):
        assert exchange(dist.group.WORLD, f"of a test/{turn}", [turn, dist.get_rank()]) == [[turn, 0], [turn, 1]]
    dist.barrier()
    assert sum(store.check([f"ppe_ddp/of a test/{turn}/{rank}"]) for turn in range(60) for rank in range(2)) < 60


def test_many_keys_are_read_from_stores_that_can_do_so_at_once_and_from_others(tmp_path):
    for store in (dist.HashStore(), dist.FileStore(str(tmp_path / "store"), 1)):
        keys = WrittenKeys(store).under("part")
        for turn in range(3):
            keys.set(f"{turn}", f"word {turn}")
        assert keys.multi_get(["2", "0"]) == [b"word 2", b"word 0"]
        assert keys.multi_get([]) == []


def test_a_comparison_of_collectives_leaves_none_behind():
    store, waits = dist.HashStore(), SimpleNamespace(at_failure=[], progress=lambda: None, is_given_up=bool)
    comparison = CollectiveComparison(WrittenKeys(store), 0, 1, waits)

    def barrier():
        return Work("barrier", waits, lambda: True)

    for _ in range(20):
        work = comparison.append(barrier, [()])
        while not work.is_completed():
            comparison.advance()
    assert store.num_keys() < 5
