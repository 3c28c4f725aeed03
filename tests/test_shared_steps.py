"""Collectives in shared memory, on one node or several: who owns what, and sums; one process plays all ranks."""

import mmap
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from ppe_ddp.backends.memory_pool import MemoryPool
from ppe_ddp.backends.shared_memory.shared_steps import (
    AllGatherStep,
    AllReduceStep,
    NodeLayout,
    ReduceScatterStep,
    Region,
    Scratch,
    TwoLevelAllGatherStep,
    TwoLevelAllReduceStep,
    TwoLevelReduceScatterStep,
    describe_record,
    pieces,
)

KINDS = {"SUM": ReduceOp.RedOpType.SUM, "AVG": ReduceOp.RedOpType.AVG, "MAX": ReduceOp.RedOpType.MAX}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int16, torch.uint8]
NAMES = st.lists(st.sampled_from("abc"), min_size=1, max_size=8) | st.integers(2, 4).map("a".__mul__)  # by rank, a node
PIECES = st.sampled_from([64, 500, 9999])
SPACE = 1 << 16
BEFORE = 192  # bytes of somebody else's in front of what a rank shows
collective = settings(deadline=None, max_examples=100)
ALONE = NodeLayout.of("aaa", 0)


def all_reduce_steps(flat, kind, piece_bytes, layout=ALONE, source=None, **options):
    make = partial(TwoLevelAllReduceStep, source=source) if len(layout.nodes) > 1 else AllReduceStep
    return [make(piece, kind, layout, **options) for (piece,) in pieces(piece_bytes, flat)]


def reduce_scatter_steps(result, rows, kind, piece_bytes, layout=ALONE, **options):
    make = TwoLevelReduceScatterStep if len(layout.nodes) > 1 else ReduceScatterStep
    return [make(part, piece, kind, layout, **options) for piece, part in pieces(piece_bytes, rows, result)]


def all_gather_steps(rows, share, piece_bytes, layout=ALONE, **options):
    make = TwoLevelAllGatherStep if len(layout.nodes) > 1 else AllGatherStep
    return [make(part, piece, layout, **options) for part, piece in pieces(piece_bytes, rows, share)]


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
    assert NodeLayout.of("abc", 0).slices == 1
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


class Nodes:
    """Ranks of some nodes, and the memory that each of them shows to those of its own.

    Args:
        names: By rank, its node.
        sharing: The bits say by rank whether it brings a tensor that lies in shared memory already.
    """

    def __init__(self, names, sharing):
        self.size = len(names)
        self.sharing = [bool(sharing >> rank & 1) for rank in range(self.size)]
        self.layouts = [NodeLayout.of(names, rank) for rank in range(self.size)]
        self.are_several = len(set(names)) > 1
        self._spaces = [mmap.mmap(-1, SPACE) for _ in names]
        self._pools = [MemoryPool() for _ in names]

    def bring(self, rank, tensor):
        """A copy of the tensor: in the rank's shared memory, or anywhere."""
        if not self.sharing[rank] or not tensor.numel():
            return tensor.clone()
        flat = torch.frombuffer(self._spaces[rank], dtype=tensor.dtype, count=tensor.numel(), offset=BEFORE)
        return flat.view(tensor.shape).copy_(tensor)

    def run(self, steps_of, *, ends=False):
        """Play the steps that each rank makes of `rank, options`: one after another on all."""
        each = [
            steps_of(rank, {"layout": layout, "is_shared": is_shared})
            for rank, (layout, is_shared) in enumerate(zip(self.layouts, self.sharing, strict=True))
        ]
        for steps in zip(*each, strict=True):
            self._play(steps, ends)

    def _play(self, steps, ends):
        """Each node's ranks publish, sum and send, and write when all has arrived; in any order."""
        assert len({(step.code, step.local.numel()) for step in steps}) == 1
        regions = []
        for step, space in zip(steps, self._spaces, strict=True):
            if step.shared is None:
                step.stage(torch.frombuffer(space, dtype=torch.uint8)[BEFORE:])
            start = torch.frombuffer(space, dtype=torch.uint8).data_ptr()
            regions.append(
                Region(space, step.shared.data_ptr() - start if step.shared.numel() else BEFORE, step.stride)
            )
        links = [Link(len(self.layouts[0].nodes)) for _ in range(self.layouts[0].slices)]
        crossings = []
        for step, layout, pool in zip(steps, self.layouts, self._pools, strict=True):
            step.prepare([regions[rank] for rank in layout.local])
            if self.are_several:
                own = [links[index] for index in layout.own_slices]
                place = layout.nodes.index(layout.local)
                crossings.append(step.cross([link.end(place) for link in own] if ends else own, pool))
        for rank in reversed(range(self.size)):
            if self.are_several:
                assert crossings[rank].done()
                steps[rank].spread(crossings[rank])
            else:
                steps[rank].act(Scratch())
        for step in steps:
            step.finish()


def drawn(dtype, *shape):
    return torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(shape[-1])).to(dtype)


def total(values, kind, dtype):
    stacked = values.double()
    result = {"SUM": stacked.sum(0), "AVG": stacked.mean(0), "MAX": stacked.amax(0)}[kind]
    return (result if dtype.is_floating_point else result.trunc()).to(dtype)


def assert_is(tensor, wanted):
    """Halves that are summed on each node and then over all are rounded twice where there is a mean."""
    rounding = {"rtol": 1e-2, "atol": 0} if tensor.dtype in (torch.bfloat16, torch.float16) else {}
    torch.testing.assert_close(tensor, wanted, **rounding)


EACH_SUM = (NAMES, st.integers(0, 255), st.sampled_from(DTYPES), st.sampled_from(sorted(KINDS)), PIECES)


@collective
@given(*EACH_SUM, st.integers(0, 300), st.none() | st.integers(0, 7))
def test_all_ranks_have_the_same_sum(names, sharing, dtype, kind, piece_bytes, numel, source):
    """Also where the ranks of one node alone have something to sum, and the others' tensors are zero."""
    nodes, values = Nodes(names, sharing), drawn(dtype, len(names), numel)
    source = None if source is None or not nodes.are_several else source % len(nodes.layouts[0].nodes)
    if source is not None:
        values[[rank for rank in range(nodes.size) if rank not in nodes.layouts[0].nodes[source]]] = 0
    mine = [nodes.bring(rank, value) for rank, value in enumerate(values)]
    nodes.run(
        lambda rank, options: all_reduce_steps(mine[rank], KINDS[kind], piece_bytes, source=source, **options),
        ends=source is not None,
    )
    for tensor in mine:
        assert torch.equal(tensor, mine[0])
        assert_is(tensor, total(values, kind, dtype))


@collective
@given(*EACH_SUM, st.integers(0, 120), st.booleans())
def test_each_rank_has_the_sum_of_its_row(names, sharing, dtype, kind, piece_bytes, width, in_place):
    nodes = Nodes(names, sharing)
    size, in_place = nodes.size, in_place and not nodes.are_several
    values = drawn(dtype, size, size, width)
    mine = [nodes.bring(rank, value) for rank, value in enumerate(values)]
    results = [rows[rank] if in_place else torch.empty(width, dtype=dtype) for rank, rows in enumerate(mine)]
    nodes.run(
        lambda rank, options: reduce_scatter_steps(results[rank], mine[rank], KINDS[kind], piece_bytes, **options),
        ends=True,
    )
    for rank, result in enumerate(results):
        assert_is(result, total(values, kind, dtype)[rank])
        if not nodes.are_several:
            others = [other for other in range(size) if other != rank or not in_place]
            assert torch.equal(mine[rank][others], values[rank][others])  # the input stays


@collective
@given(NAMES, st.integers(0, 255), st.sampled_from(DTYPES), PIECES, st.integers(0, 60), st.booleans())
def test_all_ranks_have_all_shares(names, sharing, dtype, piece_bytes, width, in_place):
    nodes = Nodes(names, sharing)
    whole = torch.arange(nodes.size * width).view(nodes.size, width).to(dtype)
    outputs = [nodes.bring(rank, torch.zeros_like(whole)) for rank in range(nodes.size)]
    shares = [
        # What is shared is a part of the rows, as there is no other shared memory here.
        rows[rank].copy_(whole[rank]) if in_place or nodes.sharing[rank] else whole[rank].clone()
        for rank, rows in enumerate(outputs)
    ]
    nodes.run(lambda rank, options: all_gather_steps(outputs[rank], shares[rank], piece_bytes, **options), ends=True)
    for rows in outputs:
        assert torch.equal(rows, whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_rounded_once(dtype):
    nodes = Nodes("aaa", 0b101)
    small = torch.finfo(dtype).eps / 2  # lost beside 1 where every sum is rounded, and twice of it is not
    mine = [nodes.bring(rank, torch.full((70,), one, dtype=dtype)) for rank, one in enumerate([1.0, small, small])]
    nodes.run(lambda rank, options: all_reduce_steps(mine[rank], KINDS["SUM"], 999, **options))
    for one in mine:
        assert (one == 1 + 2 * small).all()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_under_way_between_nodes_is_no_memory_of_the_gradients(rank):
    """Which a transport would change in a group that was given up."""
    space = mmap.mmap(-1, SPACE)
    tensor = torch.frombuffer(space, dtype=torch.float32, count=100).fill_(1.0)
    layout = NodeLayout.of("ab", rank)
    (step,) = all_reduce_steps(tensor, KINDS["SUM"], 4096, layout, is_shared=True)
    step.prepare([Region(space, 0, 0)])
    link = Link(2)
    crossing = step.cross([link], MemoryPool())
    assert not crossing.done()
    link.begun[0].fill_(7.0)
    assert set(tensor.tolist()) == {1.0}


def test_a_step_is_cut_alike_wherever_the_tensor_lies():
    flat = torch.zeros(1000)
    for is_shared in (True, False):
        # Of about the same size: a small rest would take as long as a round trip between nodes.
        assert [len(step.local) for step in all_reduce_steps(flat, KINDS["SUM"], 1200, is_shared=is_shared)] == [
            256
        ] * 3 + [232]
    rows = torch.zeros(3, 100)
    assert [step.local.shape for step in reduce_scatter_steps(rows[0], rows, KINDS["SUM"], 480, is_shared=True)] == [
        (3, 40),
        (3, 40),
        (3, 20),
    ]
    assert [step.local.numel() for step in all_gather_steps(rows, rows[0], 480, is_shared=True)] == [40, 40, 20]
    assert len([*all_reduce_steps(flat, KINDS["SUM"], 1, is_shared=True)]) == 1000  # an element at least


def test_codes_tell_collectives_kinds_and_dtypes_apart():
    told = {}
    for dtype in DTYPES:
        flat = torch.zeros(6, dtype=dtype)
        rows = flat.view(2, 3)
        steps = [*all_gather_steps(rows, rows[0], 999, is_shared=True)]
        for kind in KINDS.values():
            steps += [
                *all_reduce_steps(flat, kind, 999, is_shared=True),
                *reduce_scatter_steps(rows[0], rows, kind, 999, is_shared=True),
            ]
        told |= {step.code: describe_record(step.local.numel(), step.code) for step in steps}
    assert len(told) == len(set(told.values())) == len(DTYPES) * 7
    assert "6 x bfloat16 (all_reduce MAX)" in told.values()
    assert "6 x int16 (reduce_scatter AVG)" in told.values()
    assert "3 x float64 (all_gather)" in told.values()
