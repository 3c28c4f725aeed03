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
