"""Low-rank approximation of each gradient matrix by one step of power iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ppe_ddp.compression.compressor import Exchange, FlatGradients, Link, Segment
from ppe_ddp.compression.quantization import SelectiveCompressor

_STATE = "power_sgd"


@dataclass(frozen=True)
class PowerSGD(SelectiveCompressor):
    """Sends two thin matrices P and Q for each gradient matrix M, so that M is about P Q. Use it with error feedback.

    Each of them is linear in M if the other one is given, so they are summed by all-reduce. P is made orthonormal in
    between. If no rank has a gradient, or its rank is below that of P, the rest of P is zero.

    T. Vogels, S. P. Karimireddy and M. Jaggi, PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization, NeurIPS 2019 (https://arxiv.org/abs/1905.13727).

    Attributes:
        rank: The rank of the approximation. Precision, bytes and arithmetic grow with it.
        warm_start: Begin with the Q of the last step, kept in the state, instead of a random one. Then one step of the
            power iteration is enough for gradients that change slowly.
        min_compression: A matrix is compressed if it has at least this many times the elements of P and Q together.
            Vectors and other matrices are sent uncompressed.
    """

    rank: int = 4
    warm_start: bool = True
    min_compression: float = 2.0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"PowerSGD(rank={self.rank}): the rank is at least 1")

    def _pays(self, segment: Segment, itemsize: int, world_size: int) -> bool:
        if segment.rows <= 1 or not segment.numel:
            return False
        rows, columns = segment.rows, segment.numel // segment.rows
        return min(self.rank, rows, columns) * (rows + columns) * self.min_compression <= segment.numel

    def _average(self, gradients: FlatGradients, link: Link) -> Exchange:
        """Average matrices. The factors are stored transposed, so that the products read them in order of memory."""
        segments = gradients.segments
        matrices = _matrices(gradients.given, segments)
        right = [self._start(segment, gradients) for segment in segments]
        flat, left = _rows_of([(len(q), len(matrix)) for q, matrix in zip(right, matrices, strict=True)], right[0])
        for p, q, matrix in zip(left, right, matrices, strict=True):
            torch.mm(q, matrix.mT, out=p)
        yield from link.all_reduce(flat.mul_(1.0 / link.size))
        left = _orthonormal(left)
        flat, right = _rows_of([tuple(q.shape) for q in right], flat)
        for p, q, matrix in zip(left, right, matrices, strict=True):
            torch.mm(p, matrix, out=q)
            if gradients.keeps:
                matrix.addmm_(p.mT, q, alpha=-1)
        yield from link.all_reduce(flat.mul_(1.0 / link.size))
        for average, p, q in zip(_matrices(gradients.average, segments), left, right, strict=True):
            torch.mm(p.mT, q, out=average)
        if self.warm_start:
            for segment, q in zip(segments, _next_starts(right, segments, gradients.step), strict=True):
                segment.state[_STATE] = q

    def _start(self, segment: Segment, gradients: FlatGradients) -> Tensor:
        """The initial Q, ``(rank, columns)``: that of the last step, or a random one."""
        columns = segment.numel // segment.rows
        shape = (min(self.rank, segment.rows, columns), columns)
        known: Tensor | None = segment.state.get(_STATE) if self.warm_start else None
        if known is not None and known.shape == shape and known.dtype is gradients.given.dtype:
            return known
        drawn = _random(shape, segment, 0 if self.warm_start else gradients.step, gradients.given)
        return orthonormal([drawn])[0]


def _matrices(flat: Tensor, segments: Sequence[Segment]) -> list[Tensor]:
    return [flat[segment.start : segment.stop].view(segment.rows, -1) for segment in segments]


def _rows_of(shapes: Sequence[tuple[int, ...]], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    sizes = [rows * columns for rows, columns in shapes]
    flat = like.new_empty(sum(sizes))
    return flat, [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def _orthonormal(factors: Sequence[Tensor]) -> list[Tensor]:
    """Make the rows of each factor orthonormal; factors of one rank are done in one batch."""
    results: list[Tensor] = list(factors)
    by_rank = sorted(range(len(factors)), key=lambda k: len(factors[k]))
    for _, group in groupby(by_rank, key=lambda k: len(factors[k])):
        members = list(group)
        for k, basis in zip(members, orthonormal([factors[k] for k in members]), strict=True):
            results[k] = basis
    return results


def _next_starts(right: Sequence[Tensor], segments: Sequence[Segment], step: int) -> list[Tensor]:
    """The initial matrices of the next step, with orthonormal rows, so that small directions stay distinct.

    Missing rows, for a gradient of lower rank, are random: rows of zeros would stay zero.
    """
    starts = _orthonormal(right)
    lacking = torch.stack([(q != 0).any(1).all() for q in starts]).logical_not_().nonzero().view(-1)
    for k in lacking.tolist():
        drawn = _random(starts[k].shape, segments[k], step, starts[k])
        starts[k] = torch.where((starts[k] != 0).any(1, keepdim=True), starts[k], drawn)
    return starts


def _random(shape: tuple[int, ...], segment: Segment, step: int, like: Tensor) -> Tensor:
    # On the CPU, so that ranks with different devices draw the same numbers.
    generator = torch.Generator().manual_seed(segment.seed(step) >> 32)  # which takes 32 bits
    numbers: Tensor = torch.randn(shape, generator=generator, dtype=like.dtype, device="cpu").to(like.device)
    return numbers


# Fraction of the largest eigenvalue. Smaller ones are rounding errors of float32: 1e-5 of the largest singular value.
_NEGLIGIBLE = 1e-10


def orthonormal(bases: Sequence[Tensor]) -> list[Tensor]:
    """An orthonormal basis of the rows of each of ``bases``: ``(r, n)`` each, with one r and any n.

    The Gram matrices have one size for any length of the vectors, so one batched eigendecomposition is enough. Unlike
    Gram-Schmidt it does not divide by zero for dependent rows. If the rank of a basis is below r, its other rows are
    zero. If it is not finite, all are NaN.
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
