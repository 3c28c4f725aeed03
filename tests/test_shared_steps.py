"""Collectives in shared memory: this process does the part of every rank, one after another."""

import mmap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from ppe_ddp.backends.shared_memory.shared_steps import Region, Scratch, describe_record, supports
from ppe_ddp.backends.shared_memory.two_level_steps import all_gather_steps, all_reduce_steps, reduce_scatter_steps

KINDS = {"SUM": ReduceOp.RedOpType.SUM, "AVG": ReduceOp.RedOpType.AVG, "MAX": ReduceOp.RedOpType.MAX}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.uint8]
BEFORE = 192  # bytes of somebody else's in front of what a rank shows


class Node:
    """The memory of every rank of a node; `run` does one collective on all of them.

    Args:
        sharing: By rank, whether it brings a tensor that lies in shared memory already.
    """

    def __init__(self, sharing):
        self.sharing = sharing
        self.size = len(sharing)
        self.spaces = [mmap.mmap(-1, 1 << 16) for _ in sharing]

    def bring(self, rank, tensor):
        """A copy of the tensor: in the rank's shared memory, or anywhere."""
        if not self.sharing[rank]:
            return tensor.clone()
        return self._memory(rank, tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def _memory(self, rank, nbytes):
        return torch.frombuffer(self.spaces[rank], dtype=torch.uint8, count=nbytes, offset=BEFORE) if nbytes else EMPTY

    def run(self, steps_by_rank, nbytes):
        """Play the steps: all stage, then all act, in any order, then all finish."""
        for steps in zip(*steps_by_rank, strict=True):
            assert len({(step.code, step.local.numel()) for step in steps}) == 1
            regions = []
            for rank, step in enumerate(steps):
                if step.shared is None:
                    step.stage(self._memory(rank, nbytes), rank, self.size)
                start = torch.frombuffer(self.spaces[rank], dtype=torch.uint8).data_ptr()
                position = step.shared.data_ptr() - start if step.shared.numel() else BEFORE
                regions.append(Region(self.spaces[rank], position, step.stride))
            for rank in reversed(range(self.size)):
                steps[rank].prepare(regions, rank)
                steps[rank].act(Scratch())
            for rank, step in enumerate(steps):
                step.finish(rank, self.size)


EMPTY = torch.empty(0, dtype=torch.uint8)
SHARING = st.lists(st.booleans(), min_size=2, max_size=4)  # a rank alone sends nothing


def values(dtype, *shape, seed):
    return torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def expected(tensors, name, dtype):
    stacked = torch.stack(tensors).to(torch.float64)
    result = {"SUM": stacked.sum(0), "AVG": stacked.mean(0), "MAX": stacked.amax(0)}[name]
    return (result if dtype.is_floating_point else result.trunc()).to(dtype)


@settings(max_examples=150)
@given(
    SHARING, st.sampled_from(DTYPES), st.sampled_from([*KINDS]), st.integers(0, 300), st.sampled_from([64, 500, 9999])
)
def test_an_all_reduce(sharing, dtype, name, numel, piece_bytes):
    node = Node(sharing)
    tensors = [values(dtype, numel, seed=rank) for rank in range(node.size)]
    mine = [node.bring(rank, tensor) for rank, tensor in enumerate(tensors)]
    steps = [all_reduce_steps(one, KINDS[name], piece_bytes, is_shared=sharing[k]) for k, one in enumerate(mine)]
    node.run(steps, piece_bytes)
    for one in mine:
        assert torch.equal(one, expected(tensors, name, dtype))


@settings(max_examples=150)
@given(
    SHARING,
    st.sampled_from(DTYPES),
    st.sampled_from([*KINDS]),
    st.integers(0, 120),
    st.sampled_from([64, 500, 9999]),
    st.booleans(),
)
def test_a_reduce_scatter(sharing, dtype, name, width, piece_bytes, in_place):
    node = Node(sharing)
    tensors = [values(dtype, node.size, width, seed=rank) for rank in range(node.size)]
    mine = [node.bring(rank, tensor) for rank, tensor in enumerate(tensors)]
    results = [rows[rank] if in_place else torch.empty(width, dtype=dtype) for rank, rows in enumerate(mine)]
    steps = [
        reduce_scatter_steps(results[k], rows, KINDS[name], piece_bytes, is_shared=sharing[k])
        for k, rows in enumerate(mine)
    ]
    node.run(steps, max(piece_bytes, node.size * dtype.itemsize))
    total = expected(tensors, name, dtype)
    for rank, (result, rows) in enumerate(zip(results, mine, strict=True)):
        assert torch.equal(result, total[rank])
        others = [other for other in range(node.size) if other != rank or not in_place]
        assert torch.equal(rows[others], tensors[rank][others])  # the input stays


@settings(max_examples=150)
@given(SHARING, st.sampled_from(DTYPES), st.integers(0, 120), st.sampled_from([64, 500, 9999]), st.booleans())
def test_an_all_gather(sharing, dtype, width, piece_bytes, in_place):
    node = Node(sharing)
    whole = values(dtype, node.size, width, seed=5)
    rows = [node.bring(rank, torch.zeros_like(whole)) for rank in range(node.size)]
    shares = []
    for rank, mine in enumerate(rows):
        # What is shared is a part of the rows, as there is no other shared memory here.
        is_part = in_place or sharing[rank]
        shares.append(mine[rank].copy_(whole[rank]) if is_part else whole[rank].clone())
    steps = [all_gather_steps(rows[k], share, piece_bytes, is_shared=sharing[k]) for k, share in enumerate(shares)]
    node.run(steps, max(piece_bytes, dtype.itemsize))
    for mine in rows:
        assert torch.equal(mine, whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_rounded_once(dtype):
    node = Node([True, False, True])
    small = torch.finfo(dtype).eps / 2  # lost beside 1 where every sum is rounded, and twice of it is not
    mine = [node.bring(rank, torch.full((70,), one, dtype=dtype)) for rank, one in enumerate([1.0, small, small])]
    node.run([all_reduce_steps(one, KINDS["SUM"], 999, is_shared=node.sharing[k]) for k, one in enumerate(mine)], 999)
    for one in mine:
        assert (one == 1 + 2 * small).all()


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
    assert "6 x int32 (reduce_scatter AVG)" in told.values()
    assert "3 x float64 (all_gather)" in told.values()


def test_what_is_served():
    assert all(supports(dtype, kind) for dtype in DTYPES for kind in KINDS.values())
    assert not supports(torch.complex64, KINDS["SUM"])
    assert not supports(torch.float32, ReduceOp.RedOpType.PRODUCT)


def test_scratch_is_kept():
    scratch = Scratch()
    first = scratch.take(10)
    assert first.shape == (10,)
    assert scratch.take(7).data_ptr() == first.data_ptr()
    assert scratch.take(1000).shape == (1000,)
