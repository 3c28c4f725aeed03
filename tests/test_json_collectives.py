"""Plain values between ranks: the same on all, of any length, on every backend; and never a pickle."""

import json

import pytest
import torch.distributed as dist

from ppe_ddp.backends.json_collectives import all_gather_json, broadcast_json
from rank_tests import on_three_ranks


def of(rank):
    return {"rank": rank, "text": "é\N{SNOWMAN}" * rank * 1000, "list": [None, True, 0.1, [rank]]}


@on_three_ranks
def test_every_rank_gets_every_value():
    group = dist.group.WORLD
    assert all_gather_json(of(dist.get_rank()), group) == [of(rank) for rank in range(3)]
    assert all_gather_json("", group) == ["", "", ""]


@on_three_ranks
def test_every_rank_gets_the_value_of_the_source():
    rank = dist.get_rank()
    own = dist.new_group([1, 2])
    if rank:
        for source in (1, 2):
            assert broadcast_json(of(source) if rank == source else object(), source, own) == of(source)


@on_three_ranks
def test_what_is_no_plain_value_is_refused_before_anything_is_sent():
    with pytest.raises(TypeError, match="not JSON serializable"):
        all_gather_json(object(), dist.group.WORLD)
    assert all_gather_json(1, dist.group.WORLD) == [1, 1, 1]


@on_three_ranks
def test_a_pickle_is_not_loaded():
    """A rank that sends a pickle, as torch's object collectives do, gets an error from the others, and no call."""
    content = b"cos\nabort\n(tR."  # which would end the process
    if dist.get_rank() == 1:
        import ppe_ddp.backends.json_collectives as sender

        class Sender:
            @staticmethod
            def dumps(_):
                return content.decode()

            loads = staticmethod(json.loads)

        sender.json = Sender
    try:
        with pytest.raises(json.JSONDecodeError):
            all_gather_json("plain", dist.group.WORLD)
    finally:
        if dist.get_rank() == 1:
            sender.json = json
