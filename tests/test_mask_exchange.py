"""The exchange of masks: ranks are threads here, with groups of their own."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.mask_exchange import (
    MaskExchange,
    MaskExchanger,
    highest_digits,
    is_same,
    lowest_digits,
    ranks_named,
    with_complement,
)

PATIENCE = timedelta(seconds=20)


def groups_of(rank, size, store):
    group = dist.ProcessGroup(store, rank, size)
    gloo = dist.ProcessGroupGloo(store, rank, size, PATIENCE)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return Groups(group, group, group, rank, size, pid=0, number=0)


class Threads:
    """An exchanger for each rank, each on a thread of its own."""

    def __init__(self, size):
        self._pool, store = ThreadPoolExecutor(size), dist.HashStore()
        made = [self._pool.submit(groups_of, rank, size, store) for rank in range(size)]
        self.exchangers = [MaskExchanger(one.result(timeout=20)) for one in made]

    def exchange(self, *messages):
        """What each rank gets for its `(digest, mask, more)`, and the bytes that it sent."""
        answers = [
            self._pool.submit(self._exchange, exchanger, message)
            for exchanger, message in zip(self.exchangers, messages, strict=True)
        ]
        return [answer.result(timeout=20) for answer in answers]

    def _exchange(self, exchanger, message):
        digest, mask, more = message
        exchange = MaskExchange(exchanger, digest, {"mask": mask, "more": more})
        answer = exchange.result()
        return answer, exchange.nbytes

    def close(self):
        self._pool.shutdown()


@pytest.fixture(scope="module")
def pair():
    """Two ranks that tests share."""
    ranks = Threads(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("count", [3, 1000])
@pytest.mark.parametrize("odd", [0, 1])
def test_one_rank_with_another_digest_is_noticed_by_all_whatever_it_has(pair, count, odd):
    messages = [(bytes(16), b"\1\1\1", b"")] * 2
    messages[odd] = (bytes([5]) + bytes(15), bytes([1]) * count, b"")
    assert [answer for answer, _ in pair.exchange(*messages)] == [(False, {})] * 2
    # They can go on.
    answers = pair.exchange((bytes(16), b"\1\0", b""), (bytes(16), b"\0\0", b""))
    assert [answer.fields["mask"] for answer, _ in answers] == [b"\1\0"] * 2


def test_a_long_mask_goes_in_one_message_from_the_second_time_on(monkeypatch):
    ranks, sent, send = Threads(2), [], MaskExchanger.send

    def counted(self, content):
        sent.append(len(content))
        return send(self, content)

    monkeypatch.setattr(MaskExchanger, "send", counted)
    messages = [(bytes(16), bytes([1, 0]) * 5_000, b"")] * 2
    for count in (2, 1, 1):
        sent.clear()
        answers = ranks.exchange(*messages)
        assert len(sent) == 2 * count
        assert [nbytes for _, nbytes in answers] == [sum(sent) // 2] * 2
        assert 10_000 <= sum(sent) // 2 < 25_000
    ranks.close()


@given(st.lists(st.tuples(*[st.sets(st.integers(0, most), max_size=4) for most in (64_999, 254)]), max_size=5))
def test_the_lowest_rank_is_named_by_two_digits(users):
    """Of ranks that are known at the first digit already, and of some that are known at the second one."""
    ranks = sorted(set().union(*(those | late for those, late in users), {0}))
    first = [highest_digits([rank in those for those, _ in users], rank) for rank in ranks]
    agreed = bytes(map(max, zip(*first, strict=True)))
    second = [lowest_digits(agreed, [rank in those | late for those, late in users], rank) for rank in ranks]
    named = ranks_named(agreed, bytes(map(max, zip(*second, strict=True))), default=-1)
    for (those, late), rank in zip(users, named, strict=True):
        known = not those or min(those) < 255
        assert rank == min(those | late if known else those, default=-1)


@given(st.lists(st.binary(min_size=16, max_size=16), min_size=1, max_size=3))
def test_maxima_tell_whether_all_ranks_have_sent_the_same(digests):
    sent = [with_complement(digest) for digest in digests]
    assert is_same(bytes(map(max, zip(*sent, strict=True)))) == (len(set(digests)) == 1)
