"""Control pages are taken again for other groups, as soon as no rank looks at them, and not before."""

import gc
import os

import torch
import torch.distributed as dist

from ppe_ddp.backends.shared_memory.shared_reservation import ControlPage, ControlPages, SharedMemory, shared_memory
from ppe_ddp.testing import Ranks

GROUPS = 12


class Rank:
    """One rank of a node, which this process plays."""

    def __init__(self):
        self.memory = SharedMemory()
        self.space = self.memory.attach(self.memory.address)
        self.pages = ControlPages(self.memory)


class Group:
    """What a rank has of a group."""


def join(ranks):
    """What each of the ranks has of a new group, and where their pages are."""
    positions = [rank.pages.take() for rank in ranks]
    groups = [Group() for _ in ranks]
    for own, (rank, group) in enumerate(zip(ranks, groups, strict=True)):
        seen = [ControlPage(other.space, position) for other, position in zip(ranks, positions, strict=True)]
        group.words = seen[own].words
        rank.pages.leave_with(group, own, seen)
    return groups, positions


def test_pages_are_taken_again_when_all_ranks_have_left():
    ranks = [Rank(), Rank()]
    kept, theirs = join(ranks)
    for _ in range(4):
        groups, positions = join(ranks)
        assert set(positions).isdisjoint(theirs)
        assert not any(groups[0].words)
        groups[0].words[-1] = 7
        groups.clear()
        again, there = join(ranks)
        assert there == positions
        assert not any(again[0].words)
        again.clear()
    assert len(kept) == 2


def test_a_page_that_another_rank_looks_at_is_left_alone():
    ranks = [Rank(), Rank(), Rank()]
    (first, second, third), positions = join(ranks)
    first.words[3] = 5
    del first
    assert ranks[0].pages.take() != positions[0]
    del second
    assert ranks[0].pages.take() != positions[0]
    page = memoryview(ranks[0].space)[positions[0] :].cast("q")
    assert 5 in page[:64].tolist()
    del third
    assert ranks[0].pages.take() == positions[0]
    assert 5 not in page[:64].tolist()


def test_a_forked_child_leaves_no_group():
    ranks = [Rank(), Rank()]
    groups, positions = join(ranks)
    child = os.fork()
    if child == 0:
        groups.clear()
        os._exit(0)
    os.waitpid(child, 0)
    assert ranks[0].pages.take() != positions[0]
    groups.clear()
    assert ranks[0].pages.take() == positions[0]


def pages_of_groups():
    """How many pages of memory the reservation takes, after each of some groups."""
    counts = []
    for _ in range(GROUPS):
        group = dist.new_group(backend="shm")
        dist.all_reduce(torch.ones(8), group=group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        dist.barrier()
        counts.append(os.stat(f"/proc/self/fd/{shared_memory().address.descriptor}").st_blocks * 512 // 4096)
    return counts


def test_groups_that_are_made_and_destroyed_take_no_more_memory():
    with Ranks(2) as ranks:
        for counts in ranks.run(pages_of_groups):
            assert counts[-1] <= counts[2] + 1, counts
