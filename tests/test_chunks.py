"""Chunks of parameters: they are torch.chunk's, and what is put into rows comes out of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppe_ddp.engine.plan import ParameterSpec
from ppe_ddp.engine.zero.shards import Rows, bounds_of, chunk_of, flattened, is_dense

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


def test_a_part_is_the_memory_of_its_row():
    layout, row = rows_of([5, 4], 1, 2), torch.zeros(5)
    for k, part in enumerate(layout.parts(row)):
        part.fill_(k + 1)
    assert row.tolist() == [1, 1, 0, 2, 2]  # what pads stays


def test_rows_by_example():
    layout, rows = rows_of([5, 4], 0, 2), torch.empty(2, 5)
    layout.fill(rows, numbered([5, 4]))
    assert rows.tolist() == [[1, 2, 3, 6, 7], [4, 5, 0, 8, 9]]


@pytest.mark.parametrize(
    "tensor",
    [torch.randn(3, 4), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(3, 4).t()],
    ids=["row-major", "channels last", "turned"],
)
def test_what_is_dense_is_flattened_where_it_lies(tensor):
    spec = spec_of(tensor)
    flat = flattened(tensor, spec)
    assert is_dense(tensor, spec)
    assert flat.data_ptr() == tensor.data_ptr()
    assert torch.equal(flat.as_strided(spec.shape, spec.stride), tensor)


def test_what_lies_otherwise_is_flattened_in_the_order_of_its_parameter():
    parameter = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    gradient = torch.randn(2, 3, 4, 5)
    assert not is_dense(gradient, spec_of(parameter))
    flat = flattened(gradient, spec_of(parameter))
    assert flat.tolist() == gradient.permute(0, 2, 3, 1).flatten().tolist()
    sparse = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([[5.0, 6.0]]), (3, 2), check_invariants=True)
    assert flattened(sparse, spec_of(torch.empty(3, 2))).tolist() == [0, 0, 5, 6, 0, 0]


def test_a_flattened_parameter_is_none_of_autograds_business():
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    assert not flattened(parameter, spec_of(parameter)).requires_grad
