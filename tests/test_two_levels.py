"""All-reduces over several nodes: who owns which slice, and the sums; this process does the part of every rank."""

import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from ppe_ddp.backends.shared_memory.node_layout import NodeLayout
from ppe_ddp.backends.shared_memory.shared_steps import Region
from ppe_ddp.backends.shared_memory.two_level_steps import (
    WireMemory,
    all_gather_steps,
    all_reduce_steps,
    reduce_scatter_steps,
)

KINDS = {"SUM": ReduceOp.RedOpType.SUM, "AVG": ReduceOp.RedOpType.AVG, "MAX": ReduceOp.RedOpType.MAX}
NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=8)  # the node of each rank
SPACE = 1 << 16


@given(NAMES, st.integers(0, 300), st.sampled_from([1, 2, 4, 8]))
def test_each_slice_has_one_owner_on_every_node(names, numel, itemsize):
    layouts = [NodeLayout.of(names, rank) for rank in range(len(names))]
    first = layouts[0]
    assert sorted(rank for node in first.nodes for rank in node) == list(range(len(names)))
    assert all(len({names[rank] for rank in node}) == 1 for node in first.nodes)
    for rank, layout in enumerate(layouts):
        assert layout.nodes == first.nodes
        assert layout.local[layout.local_rank] == rank
        assert sorted([*layout.local, *layout.elsewhere]) == list(range(len(names)))
        assert len(layout.own_slices) > 0
        for index in range(layout.slices):
            assert (index in layout.own_slices) == (rank in layout.owners(index))
    for index in range(first.slices):
        assert [names[rank] for rank in first.owners(index)] == [names[node[0]] for node in first.nodes]
    bounds = first.bounds(numel, itemsize)
    assert len(bounds) == first.slices + 1
    assert (bounds[0], bounds[-1]) == (0, numel)
    assert bounds == sorted(bounds)
    assert all(bound * itemsize % 64 == 0 for bound in bounds[:-1])  # no two ranks write into one cache line


def test_unlike_nodes_share_the_work():
    layout = NodeLayout.of("aab", 0)
    assert layout.nodes == ((0, 1), (2,))
    assert [layout.owners(index) for index in range(2)] == [(0, 2), (1, 2)]
    assert NodeLayout.of("aab", 2).own_slices == range(2)
    assert not NodeLayout.of("abc", 0).shares_memory
    assert layout.bounds(32, 4) == [0, 16, 32]
    assert layout.bounds(3, 4) == [0, 0, 3]


class Link:
    """Joins ranks that are played one after another: sums when all have begun."""

    def __init__(self, size):
        self.size = size
        self.begun = []

    def all_reduce(self, flat, kind):
        assert kind in (KINDS["SUM"], KINDS["MAX"])
        assert flat.dtype not in (torch.bfloat16, torch.float16, torch.int16)
        self.begun.append(flat)
        if len(self.begun) == self.size:
            stacked = torch.stack(self.begun)
            total = stacked.sum(0) if kind == KINDS["SUM"] else stacked.amax(0)
            for one in self.begun:
                one.copy_(total)
        return self

    def broadcast(self, flat, source):
        return self.end(len(self.begun)).broadcast(flat, source)

    def done(self):
        return len(self.begun) == self.size

    def end(self, place):
        """The link as the rank of this node has it."""
        return End(self, place)


class End:
    """One end of a link, for exchanges and broadcasts."""

    def __init__(self, link, place):
        self.link = link
        self.place = place

    def broadcast(self, flat, source):
        begun = self.link.begun
        begun.append((self.place, flat))
        if len(begun) == self.link.size:
            sent = dict(begun)[source]
            for _, one in begun:
                one.copy_(sent)
        return self.link

    def all_to_all(self, output, flat, receiving, sending):
        assert (output.numel(), flat.numel()) == (sum(receiving), sum(sending))
        begun = self.link.begun
        begun.append((self.place, output.split(receiving), flat.split(sending)))
        if len(begun) == self.link.size:
            begun.sort(key=lambda one: one[0])
            for place, received, _ in begun:
                for other, part in enumerate(received):
                    part.copy_(begun[other][2][place])
        return self.link


@settings(deadline=None, max_examples=60)
@given(
    NAMES,
    st.integers(1, 300),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int16, torch.uint8]),
    st.sampled_from(sorted(KINDS)),
    st.integers(0, 255),
    st.none() | st.integers(0, 7),
)
def test_all_ranks_have_the_same_sum(names, numel, dtype, kind, sharing, source):
    """Also where the ranks of one node alone have something to sum, and the others' tensors are zero."""
    size = len(names)
    generator = torch.Generator().manual_seed(numel)
    values = [torch.randint(0, 20, (numel,), generator=generator).to(dtype) for _ in names]
    if source is not None:
        nodes = NodeLayout.of(names, 0).nodes
        source %= len(nodes)
        values = [value if rank in nodes[source] else 0 * value for rank, value in enumerate(values)]
    spaces = [mmap.mmap(-1, SPACE) for _ in names]
    layouts = [NodeLayout.of(names, rank) for rank in range(size)]
    memories = [WireMemory() for _ in names]
    tensors = []
    for rank, value in enumerate(values):
        is_shared = bool(sharing >> rank & 1)
        tensors.append(
            torch.frombuffer(spaces[rank], dtype=dtype, count=numel) if is_shared else torch.empty_like(value)
        )
        tensors[-1].copy_(value)
    for steps in zip(
        *(
            all_reduce_steps(tensors[r], KINDS[kind], 256, layouts[r], source, is_shared=bool(sharing >> r & 1))
            for r in range(size)
        ),
        strict=True,
    ):
        play(steps, layouts, spaces, memories, ends=source is not None)
    stacked = torch.stack([value.double() for value in values])
    wanted = {"SUM": stacked.sum(0), "AVG": stacked.mean(0), "MAX": stacked.amax(0)}[kind]
    wanted = (wanted if dtype.is_floating_point else wanted.trunc()).to(dtype)
    for tensor in tensors:
        assert torch.equal(tensor, tensors[0])
        torch.testing.assert_close(tensor, wanted, rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=0)


@settings(deadline=None, max_examples=60)
@given(
    NAMES,
    st.integers(1, 60),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int16]),
    st.sampled_from(sorted(KINDS)),
    st.integers(0, 255),
)
def test_each_rank_has_the_sum_of_its_row(names, width, dtype, kind, sharing):
    size = len(names)
    generator = torch.Generator().manual_seed(width)
    values = [torch.randint(0, 20, (size, width), generator=generator).to(dtype) for _ in names]
    spaces = [mmap.mmap(-1, SPACE) for _ in names]
    layouts = [NodeLayout.of(names, rank) for rank in range(size)]
    results = [torch.empty(width, dtype=dtype) for _ in names]
    each = []
    for rank, value in enumerate(values):
        is_shared = bool(sharing >> rank & 1)
        rows = torch.empty_like(value)
        if is_shared:
            rows = torch.frombuffer(spaces[rank], dtype=dtype, count=size * width).view(size, width)
        steps = reduce_scatter_steps(
            results[rank], rows.copy_(value), KINDS[kind], 256, layouts[rank], is_shared=is_shared
        )
        each.append(steps)
    memories = [WireMemory() for _ in names]
    for steps in zip(*each, strict=True):
        play(steps, layouts, spaces, memories, ends=True)
    stacked = torch.stack([value.double() for value in values])
    wanted = {"SUM": stacked.sum(0), "AVG": stacked.mean(0), "MAX": stacked.amax(0)}[kind]
    wanted = (wanted if dtype.is_floating_point else wanted.trunc()).to(dtype)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result, wanted[rank], rtol=1e-2 if dtype is torch.bfloat16 else 1e-6, atol=0)


@settings(deadline=None, max_examples=60)
@given(
    NAMES,
    st.integers(1, 60),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int16]),
    st.integers(0, 255),
    st.booleans(),
)
def test_all_ranks_have_all_shares(names, width, dtype, sharing, in_place):
    size = len(names)
    whole = torch.arange(size * width).view(size, width).to(dtype)
    spaces = [mmap.mmap(-1, SPACE) for _ in names]
    layouts = [NodeLayout.of(names, rank) for rank in range(size)]
    outputs, each = [], []
    for rank in range(size):
        is_shared = bool(sharing >> rank & 1)
        rows = torch.zeros(size, width, dtype=dtype)
        if is_shared:
            rows = torch.frombuffer(spaces[rank], dtype=dtype, count=size * width).view(size, width)
        share = rows[rank].copy_(whole[rank]) if in_place else whole[rank].clone()
        outputs.append(rows)
        each.append(all_gather_steps(rows, share, 256, layouts[rank], is_shared=is_shared))
    memories = [WireMemory() for _ in names]
    for steps in zip(*each, strict=True):
        play(steps, layouts, spaces, memories, ends=True)
    for rows in outputs:
        assert torch.equal(rows, whole)


def play(steps, layouts, spaces, memories, *, ends=False):
    """One step of every rank: each node's ranks publish, sum and send, and write when all has arrived."""
    size = len(steps)
    regions = []
    for step, layout, space in zip(steps, layouts, spaces, strict=True):
        if step.shared is None:
            step.stage(torch.frombuffer(space, dtype=torch.uint8), layout.local_rank, len(layout.local))
        start = torch.frombuffer(space, dtype=torch.uint8).data_ptr()
        regions.append(Region(space, step.shared.data_ptr() - start, step.stride))
    links = [Link(len(layouts[0].nodes)) for _ in range(layouts[0].slices)]
    crossings = []
    for step, layout, memory in zip(steps, layouts, memories, strict=True):
        step.prepare([regions[rank] for rank in layout.local], layout.local_rank)
        own = [links[index] for index in layout.own_slices]
        place = layout.nodes.index(layout.local)
        crossings.append(step.cross([link.end(place) for link in own] if ends else own, memory))
    for rank in reversed(range(size)):
        assert crossings[rank].done()
        steps[rank].spread(crossings[rank], memories[rank])
    for step, layout in zip(steps, layouts, strict=True):
        step.finish(layout.local_rank, len(layout.local))


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_under_way_between_nodes_is_no_memory_of_the_gradients(rank):
    """Which a transport would change in a group that was given up."""
    space = mmap.mmap(-1, SPACE)
    tensor = torch.frombuffer(space, dtype=torch.float32, count=100).fill_(1.0)
    layout = NodeLayout.of("ab", rank)
    (step,) = all_reduce_steps(tensor, KINDS["SUM"], 4096, layout, is_shared=True)
    step.prepare([Region(space, 0, 0)], 0)
    link = Link(2)
    crossing = step.cross([link], WireMemory())
    assert not crossing.done()
    link.begun[0].fill_(7.0)
    assert set(tensor.tolist()) == {1.0}
