"""Compressors that encode each block of elements by itself, into as many bytes as any other block.

Codes cannot be added up on the way, so each rank adds up what they stand for:

    two ranks    codes --all-gather--> decode, mean
    more         codes --all-to-all--> decode, mean of this rank's part --encode--> codes --all-gather--> decode

Either way a rank's link carries the codes twice, as with an all-reduce of them, however many ranks there are; and no
sum is made in a narrow type that could overflow.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from ppe_ddp.compression.blocks import Blocks
from ppe_ddp.compression.compressor import Compressor

if TYPE_CHECKING:
    from torch import Tensor

    from ppe_ddp.compression.flat_gradients import FlatGradients
    from ppe_ddp.compression.link import Exchange, Link

_SECOND = 1 << 31  # apart from the seeds of the first encoding, in the 32 bits that generators look at

_CACHED = 1 << 18  # elements: fewer cost more calls than they save


class BlockCodec(Compressor):
    """A compressor with :meth:`encode` and :meth:`decode`; both must be pure, and the same on every rank.

    Attributes:
        block: Elements a block.
    """

    block: int

    @abstractmethod
    def encode(self, values: Tensor, sizes: Tensor, seed: int) -> Tensor:
        """The codes of ``values``.

        Args:
            values: ``(number, block)``, float32 or float64; not to be changed.
            sizes: ``(number,)``, int64: how many elements of each block count; those behind them are zero.
            seed: For random numbers; another one on each rank.

        Returns:
            ``(number, any)``, uint8. Bytes that are all zero must stand for something finite.
        """

    @abstractmethod
    def decode(self, codes: Tensor, values: Tensor) -> None:
        """Write what ``codes``, ``(number, any)``, stand for into ``values``, ``(number, block)``."""

    def combine(self, received: Tensor, mean: Tensor) -> Tensor:
        """What the ranks together shall get for a part: by default ``mean``, that of what was sent.

        Args:
            received: The codes of all ranks, ``(size, number, any)``.
            mean: ``(number, block)``; not to be changed.
        """
        return mean

    def average(self, gradients: FlatGradients, link: Link) -> Exchange:
        """See :meth:`Compressor.average`."""
        if not gradients.numel:
            return
        blocks = Blocks(gradients, self.block)
        values = blocks.cut(gradients.given)
        sizes = blocks.sizes(values)
        codes = self.encode(values, sizes, gradients.seed + link.rank)
        kept = values if gradients.keeps else None
        if kept is not None:
            kept = kept.sub_(self._decoded(codes, kept))
        result = blocks.room(gradients.average)
        if link.size <= 2:
            received = yield from link.all_gather(codes)
            mean = self._mean(received, result)
            result = self.combine(received, mean)
            if kept is not None and result is not mean:
                kept.add_(mean).sub_(result)
        else:
            yield from self._in_parts(codes, sizes, result, kept, gradients.seed, link)
        if kept is not None:
            blocks.join(kept, gradients.given)
        blocks.join(result, gradients.average)

    def _in_parts(
        self, codes: Tensor, sizes: Tensor, result: Tensor, kept: Tensor | None, seed: int, link: Link
    ) -> Exchange:
        """Average a part of the blocks on each rank, and tell the others."""
        number = len(codes)
        share = -(-number // link.size)
        missing = share * link.size - number
        rows = pad(codes, (0, 0, 0, missing)).view(link.size, share, -1)
        received = yield from link.all_to_all(rows)
        mean = self._mean(received, result.new_empty(share, self.block))
        part = self.combine(received, mean)
        mine = slice(link.rank * share, min((link.rank + 1) * share, number))
        own_sizes = pad(sizes, (0, missing), value=1)[link.rank * share : (link.rank + 1) * share]
        again = self.encode(_cleared(part, own_sizes), own_sizes, seed + _SECOND + link.rank)
        everything = yield from link.all_gather(again)
        self.decode(everything.view(link.size * share, -1)[:number], result)
        if kept is not None and mine.start < number:
            lost = mean[: mine.stop - mine.start] - result[mine]
            kept[mine].add_(lost, alpha=link.size)  # that of all ranks, which none of them has kept

    def _mean(self, received: Tensor, mean: Tensor) -> Tensor:
        """The mean of what ``received``, ``(size, number, any)``, stands for, in ``mean``.

        Some blocks at a time, as many as stay in the cache: fresh memory for a whole bucket costs three times a copy.
        """
        rows = max(1, _CACHED // self.block)
        scratch = torch.empty_like(mean[:rows])
        for codes, part in zip(received.split(rows, dim=1), mean.split(rows), strict=True):
            self.decode(codes[0], part)
            for one in codes[1:]:
                other = scratch[: len(part)]
                self.decode(one, other)
                part.add_(other)
            part.mul_(1.0 / len(received))
        return mean

    def _decoded(self, codes: Tensor, like: Tensor) -> Tensor:
        values = torch.empty_like(like)
        self.decode(codes, values)
        return values


def _cleared(values: Tensor, sizes: Tensor) -> Tensor:
    """``values`` with zeros behind the first ``sizes`` elements of each block, in place."""
    cut = (sizes < values.shape[1]).nonzero().view(-1)
    if len(cut):
        places = torch.arange(values.shape[1], device=values.device)
        values[cut] = values[cut].where(places < sizes[cut, None], 0.0)
    return values
