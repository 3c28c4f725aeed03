"""How the ranks of a new group meet in its store."""

from datetime import timedelta
from types import SimpleNamespace

import torch.distributed as dist

from ppe_ddp.backends.rank_store import WrittenKeys, await_members


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
