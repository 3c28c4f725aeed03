"""Masks by node: what the maxima of all ranks' messages tell of where each gradient exists, and who sends it."""

from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from one_process import Routes, check, data, seeded
from ppe_ddp.backends.group_internals import nodes_of
from ppe_ddp.engine.plan import NodeMasks
from rank_tests import on_three_ranks

BYTE = st.integers(0, 1)


def agreed(count, locals_by_rank, sizes):
    """What all ranks read; each is given by its node and its mask."""
    written = [map(bytes(local).translate, NodeMasks(node, count).tables) for node, local in locals_by_rank]
    maxima = [bytes(map(max, zip(*messages, strict=True))) for messages in zip(*written, strict=True)]
    read = {NodeMasks(node, count).read(*maxima, sizes) for node in {0, count // 2, count - 1}}
    assert len(read) == 1
    return read.pop()


@given(st.integers(2, 6), st.integers(1, 5), st.data())
def test_a_gradient_of_one_node_is_known_by_it(count, width, data):
    ranks = [(node, data.draw(st.lists(BYTE, min_size=width, max_size=width))) for node in range(count)]
    ranks += [(data.draw(st.integers(0, count - 1)), data.draw(st.lists(BYTE, min_size=width, max_size=width)))]
    having = [{node for node, local in ranks if local[i]} for i in range(width)]
    # The same size on every node: links are never busier than with sums.
    present, nodes = agreed(count, ranks, [1] * width)
    assert present == bytes(bool(found) for found in having)
    only = bytes(1 + min(found) if len(found) == 1 else 0 for found in having)
    assert nodes in (only, bytes(width))
    if count == 2:
        assert nodes == only


@pytest.mark.parametrize("count", [2, 254])
def test_each_node_is_told_from_the_others(count):
    ranks = [(node, [int(i == node) for i in range(count)]) for node in range(count)]
    assert agreed(count, ranks, [5] * count) == (bytes([1] * count), bytes(range(1, count + 1)))


def test_where_it_makes_no_difference_nothing_is_said():
    assert agreed(2, [(0, [1, 1]), (1, [0, 0])], [0, 8]) == (b"\1\1", b"\0\1")


@pytest.mark.parametrize(("sizes", "gains"), [((6, 1, 1, 0), True), ((7, 1, 1, 0), False), ((1, 1, 1, 1), True)])
def test_one_node_of_many_does_not_send_nearly_all(sizes, gains):
    """Its link would be busier than with sums: of four nodes it sends to two others, the one to the next."""
    ranks = [(node, [int(i == node) for i in range(4)]) for node in range(4)]
    present, nodes = agreed(4, ranks, sizes)
    assert present == b"\1\1\1\1"
    assert any(nodes) == gains


@pytest.mark.parametrize("nodes", [(), ((0, 1),), tuple((rank,) for rank in range(255))])
def test_one_node_or_too_many_have_no_such_masks(nodes):
    assert NodeMasks.of(nodes, 0) is None


def test_a_rank_is_counted_by_its_node():
    assert [NodeMasks.of(((0, 2), (1,)), rank) for rank in range(3)] == [
        NodeMasks(0, 2),
        NodeMasks(1, 2),
        NodeMasks(0, 2),
    ]


def test_in_a_group_of_torch_each_rank_counts_as_a_node(two_ranks):
    assert two_ranks.run(nodes_of_the_default_group) == [((0,), (1,))] * 2


def nodes_of_the_default_group():
    return nodes_of(dist.group.WORLD)


@on_three_ranks
def test_a_gradient_of_one_rank_is_broadcast_where_ranks_share_no_memory():
    """Layers 0 to 2 are each of one rank, layer 3 is of two; nobody uses layer 4."""
    ways = [(0, 3), (1, 3), (2,)]

    def step(model, rank):
        model(data(5, 4, rank=rank), ways[rank]).pow(2).sum().backward()

    with (
        mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast,
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce,
    ):
        wrapper = check(seeded(Routes, 4, 5), step, rounds=1, shared_memory=False)

    def of_gradients(sends):
        return [call for call in sends.call_args_list if call.args[0].is_floating_point()]

    sent = [(call.kwargs["group_src"], call.args[0].numel()) for call in of_gradients(broadcast)]
    assert sorted(sent) == [(0, 20), (1, 20), (2, 20)]
    assert [call.args[0].numel() for call in of_gradients(all_reduce)] == [20]
    assert wrapper.trace().gradient_nbytes == 4 * 80
