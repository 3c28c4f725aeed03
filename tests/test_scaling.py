"""Scaling: the target is the factor times the source in the more precise dtype; a factor of 1 changes nothing."""

import pytest
import torch

from ppe_ddp.scaling import scale

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
PAIRS = [(a, b) for a in DTYPES for b in DTYPES if torch.promote_types(a, b) in (a, b)]
FACTORS = [1 / 3, 0.5, 1.0, 3.0]


def numbers(dtype, *shape):
    return torch.linspace(-2, 2, torch.Size(shape).numel(), dtype=torch.float64).view(shape).to(dtype)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(("source_dtype", "target_dtype"), PAIRS)
def test_a_copy_is_rounded_once(source_dtype, target_dtype, factor):
    source = numbers(source_dtype, 5, 7)
    kept, target = source.clone(), torch.full((5, 7), torch.nan, dtype=target_dtype)
    scale(target, source, factor)
    wider = torch.promote_types(source_dtype, target_dtype)
    assert torch.equal(target, (source.to(wider) * factor).to(target_dtype))
    assert torch.equal(source, kept)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("alias", [lambda x: x, torch.Tensor.detach, lambda x: x.view(-1).view(5, 7)])
def test_in_place_the_factor_is_applied_once(alias, factor):
    tensor = numbers(torch.float32, 5, 7)
    expected = tensor * factor
    scale(alias(tensor), tensor, factor)
    assert torch.equal(tensor, expected)


def test_one_leaves_memory_as_it_is():
    tensor = numbers(torch.float32, 3)
    before = tensor._version
    scale(tensor, tensor, 1.0)
    assert tensor._version == before


def test_other_strides_and_nothing_at_all():
    source, target = numbers(torch.float32, 4, 6).t(), torch.empty(6, 4)
    scale(target, source, 0.25)
    assert torch.equal(target, source * 0.25)
    scale(torch.empty(0), torch.empty(0), 0.5)


def test_a_sparse_tensor_is_scaled_in_place():
    sparse = torch.tensor([[0.0, 2.0], [4.0, 0.0]]).to_sparse()
    scale(sparse, sparse, 0.5)
    assert torch.equal(sparse.to_dense(), torch.tensor([[0.0, 1.0], [2.0, 0.0]]))
