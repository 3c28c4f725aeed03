"""Orthonormal bases of many small sets of vectors at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# Of the largest eigenvalue. What lies below is rounding of float32 inputs: a singular value of 1e-5 of the largest.
_NEGLIGIBLE = 1e-10


def orthonormal(bases: Sequence[Tensor]) -> list[Tensor]:
    """An orthonormal basis of the rows of each of ``bases``.

    The Gram matrices are all of one size, whatever the vectors' length, so one batched eigendecomposition does; no
    division by zero, as Gram-Schmidt has where a row depends on others.

    Args:
        bases: ``(r, n)`` each, with one r and any n; float32 or float64.

    Returns:
        The same shapes and dtypes: orthonormal rows, and rows of zeros in place of those that the rank of the basis
        lacks. All NaN where a basis is not finite.
    """
    wide = [basis.double() for basis in bases]
    gram = torch.stack([rows @ rows.mT for rows in wide])
    finite = torch.isfinite(gram).all(-1).all(-1)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    values, vectors = torch.linalg.eigh(torch.where(finite[:, None, None], gram, eye))
    largest = values[:, -1:]
    keeps = (values > largest * _NEGLIGIBLE) & (largest > 0)
    factors = torch.where(keeps, values.clamp_min(torch.finfo(values.dtype).tiny).rsqrt(), 0.0)
    factors = torch.where(finite[:, None], factors, torch.nan)
    whitening = factors[:, :, None] * vectors.mT
    return [(matrix @ rows).to(basis.dtype) for matrix, rows, basis in zip(whitening, wide, bases, strict=True)]
