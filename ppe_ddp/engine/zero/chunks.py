"""Cuts flattened parameters into even chunks, one a rank, and lays chunks out in rows. No communication.

    parameter A  (5 elements)     0 1 2 | 3 4          rank 0 owns 0 1 2, rank 1 owns 3 4
    parameter B  (4 elements)     5 6   | 7 8
    rows         chunk 0 of all   0 1 2 5 6            the message: one row a rank, so that rows can be
                 chunk 1 of all   3 4 . 7 8            reduce-scattered and all-gathered in equal parts

Any parameters make up such rows: no buffer is laid out beforehand, so a bucket can be what this step has. A tensor
is flattened in the order of its memory where that is dense (``channels_last`` too), else in the order of indices.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from ppe_ddp.torch_internals import chunk_cat

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ppe_ddp.engine.plan import ParameterSpec


def chunk_of(numel: int, world_size: int) -> int:
    """The length of every chunk but the last ones, which may be shorter or empty: that of ``torch.chunk``."""
    return -(-numel // world_size)


def bounds_of(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Start and stop of the chunk of ``rank``."""
    chunk = chunk_of(numel, world_size)
    return min(rank * chunk, numel), min((rank + 1) * chunk, numel)


def is_dense(tensor: Tensor, spec: ParameterSpec) -> bool:
    """Whether the memory of ``tensor`` is the flattened tensor."""
    return tensor.layout is torch.strided and tuple(tensor.stride()) == spec.stride


def flattened(tensor: Tensor, spec: ParameterSpec) -> Tensor:
    """``tensor`` in one dimension: its own memory where that is dense, else a copy."""
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if not is_dense(tensor, spec):
        laid_out = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device=tensor.device)
        tensor = laid_out.copy_(tensor)
    return tensor.detach().as_strided((spec.numel,), (1,))


class Rows:
    """The flattened tensors of some parameters as one row of chunks a rank.

    Args:
        specs: The parameters.
        rank: Whose chunks :meth:`parts` gives.
        world_size: The number of rows.
    """

    def __init__(self, specs: Sequence[ParameterSpec], rank: int, world_size: int) -> None:
        numels = [spec.numel for spec in specs]
        self._world_size = world_size
        self._chunks = [chunk_of(numel, world_size) for numel in numels]
        self.width = sum(self._chunks)
        """The length of a row."""
        self._offsets = [0, *accumulate(self._chunks)][:-1]
        own = [stop - start for start, stop in (bounds_of(numel, rank, world_size) for numel in numels)]
        self._short = [(k, size) for k, size in enumerate(own) if size != self._chunks[k]]
        self.is_full = not self._short
        """Whether no chunk of this rank is padded."""

    @property
    def numel(self) -> int:
        """Elements of all rows."""
        return self.width * self._world_size

    def fill(self, rows: Tensor, flats: Sequence[Tensor]) -> None:
        """Put flattened tensors into ``rows`` (world size x width). What is behind a short chunk becomes zero.

        One whose first dimension is a multiple of the world size need not be flattened.
        """
        present = [flat for flat in flats if flat.numel()]
        chunk_cat(present, self._world_size, out=rows)

    def parts(self, row: Tensor) -> list[Tensor]:
        """Views of one row: the chunk of this rank, without padding, of each parameter."""
        parts = list(row.split(self._chunks))
        for k, size in self._short:
            parts[k] = parts[k][:size]
        return parts

    def pairs(self, rows: Tensor, flats: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Views of ``flats`` and of ``rows`` that hold the same elements, to copy the one into the other."""
        whole: list[Tensor] = []
        cut: list[Tensor] = []
        for flat, chunk, offset in zip(flats, self._chunks, self._offsets, strict=True):
            if chunk == 0:
                continue
            full = flat.numel() // chunk
            rest = flat.numel() - full * chunk
            whole.append(flat[: full * chunk].view(full, chunk))
            cut.append(rows[:full, offset : offset + chunk])
            if rest:
                whole.append(flat[full * chunk :])
                cut.append(rows[full, offset : offset + rest])
        return whole, cut
