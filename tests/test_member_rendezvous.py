"""How the ranks of a new group meet in its store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from ppe_ddp.backends.rank_store import WrittenKeys, await_members, looking
from ppe_ddp.errors import CommunicationError


class CountingStore:
    def __init__(self):
        self.checks = 0
        self._store = dist.HashStore()

    def check(self, keys):
        self.checks += 1
        return self._store.check(keys)

    def __getattr__(self, name):
        return getattr(self._store, name)


def test_the_groups_of_one_name_are_numbered_and_soon_found():
    """torch gives a group that only its ranks make the name of one that was destroyed."""
    store = CountingStore()
    arguments = SimpleNamespace(store=store, group_rank=0, group_id="again", timeout=timedelta(seconds=20))
    for turn in range(1, 301):
        store.checks = 0
        assert await_members(arguments, [0], None, WrittenKeys(store)) == turn
        assert store.checks < 25


def test_who_comes_to_a_group_that_another_rank_has_left_is_told_at_once():
    store = dist.HashStore()

    def make(rank):
        arguments = SimpleNamespace(store=store, group_rank=rank, group_id="left", timeout=timedelta(seconds=20))
        return await_members(arguments, [0, 1], None, WrittenKeys(store))

    def interrupt():
        raise KeyboardInterrupt

    with looking(interrupt), pytest.raises(KeyboardInterrupt):
        make(1)
    with pytest.raises(CommunicationError, match=r"has failed on rank 1 \(KeyboardInterrupt"):
        make(0)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(make, (0, 1))) == [2, 2]


def test_who_comes_to_a_group_is_told_which_rank_another_one_has_lost():
    store = dist.HashStore()

    def make(rank):
        arguments = SimpleNamespace(store=store, group_rank=rank, group_id="lost", timeout=timedelta(seconds=20))
        return await_members(arguments, [0, 1, 2], None, WrittenKeys(store))

    def lose():
        error = CommunicationError("rank 2 has died")
        error.ranks = (2,)
        raise error

    with looking(lose), pytest.raises(CommunicationError):
        make(1)
    with pytest.raises(CommunicationError, match=r"has failed .*rank 2 has died") as told:
        make(0)
    assert told.value.ranks == (2,)
