"""Chunks of parameters: they are torch.chunk's, and what is put into rows comes out of them; state is cut alike."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ppe_ddp.engine.module import ModuleState
from ppe_ddp.engine.plan import ParameterSpec
from ppe_ddp.engine.zero.shards import Rows, Shard, bounds_of, chunk_of
from ppe_ddp.optim.master_weights import MasterWeight
from ppe_ddp.optim.optimizer_state import shard_of

NUMELS = st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any)
WORLDS = st.integers(1, 5)


def spec_of(tensor):
    return ParameterSpec("weight", tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def rows_of(numels, rank, size):
    return Rows([spec_of(torch.empty(numel)) for numel in numels], rank, size)


def numbered(numels):
    """Flat tensors in which every element is another number, and none is zero."""
    return list(torch.arange(1.0, sum(numels) + 1).split(numels))


@given(st.integers(0, 50), WORLDS)
def test_chunks_are_those_of_torch(numel, size):
    cut = [chunk.tolist() for chunk in torch.arange(numel).chunk(size)] if numel else []
    cut += [[]] * (size - len(cut))  # torch gives no empty ones
    assert [list(range(*bounds_of(numel, rank, size))) for rank in range(size)] == cut
    assert chunk_of(numel, size) == len(cut[0])


@given(NUMELS, WORLDS)
def test_a_row_a_rank_has_every_element_once(numels, size):
    flats = numbered(numels)
    rows = torch.full((size, rows_of(numels, 0, size).width), -1.0)
    rows_of(numels, 0, size).fill(rows, flats)
    assert rows_of(numels, 0, size).numel == rows.numel()
    assert sorted(rows[rows != 0].tolist()) == torch.cat(flats).tolist()
    for rank in range(size):
        parts = rows_of(numels, rank, size).parts(rows[rank])
        for part, flat in zip(parts, flats, strict=True):
            assert torch.equal(part, flat[slice(*bounds_of(len(flat), rank, size))])


@given(NUMELS, WORLDS, st.booleans())
def test_pairs_copy_rows_there_and_back(numels, size, by_copying):
    flats = numbered(numels)
    layout = rows_of(numels, 0, size)
    rows = torch.zeros(size, layout.width)
    if by_copying:
        whole, cut = layout.pairs(rows, flats)
        torch._foreach_copy_(cut, whole)
        filled = torch.zeros_like(rows)
        layout.fill(filled, flats)
        assert torch.equal(rows, filled)
    else:
        layout.fill(rows, flats)
    back = [torch.full_like(flat, -1) for flat in flats]
    whole, cut = layout.pairs(rows, back)
    torch._foreach_copy_(whole, cut)
    assert all(torch.equal(ours, flat) for ours, flat in zip(back, flats, strict=True))


def test_state_of_a_parameter_with_holes_is_cut_like_its_values():
    net = nn.Module()
    net.weight = nn.Parameter(torch.arange(24.0).view(6, 4)[:, ::2].t())  # neither dense nor row-major
    (spec,) = ModuleState(net).specs
    master = MasterWeight(0, Shard(net.weight, spec, 3, 9), torch.float64)
    cut = shard_of({"momentum_buffer": net.weight.detach().clone()}, master)
    assert torch.equal(cut["momentum_buffer"], master.weight)
