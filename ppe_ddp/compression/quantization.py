"""Compressors that encode each block of elements by itself, into as many bytes as any other block; and none at all.

Codes cannot be added up on the way, so each rank adds up what they stand for:

    two ranks    codes --all-gather--> decode, mean
    more         codes --all-to-all--> decode, mean of this rank's part --encode--> codes --all-gather--> decode

Either way a rank's link carries the codes twice, as with an all-reduce of them, however many ranks there are; and no
sum is made in a narrow type that could overflow.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ppe_ddp.compression.compressor import Compressor, Exchange, FlatGradients, Link, Segment, together

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
        """The result for a part, of all ranks: by default ``mean``, that of what was sent.

        Args:
            received: The codes of all ranks, ``(size, number, any)``.
            mean: ``(number, block)``; not to be changed.
        """
        return mean

    def average(self, gradients: FlatGradients, link: Link) -> Exchange:
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


class Blocks:
    """The segments of ``gradients`` as rows of ``block`` elements each.

    A block never holds elements of two parameters, so that their results do not depend on how buckets are packed;
    the last one of each is filled up by zeros.
    """

    def __init__(self, gradients: FlatGradients, block: int) -> None:
        self._gradients = gradients = gradients.chosen(lambda segment: segment.numel > 0)
        self._block = block
        self._counts = [-(-segment.numel // block) for segment in gradients.segments]
        self.number = sum(self._counts)
        self._is_padded = self.number * block != gradients.numel

    def cut(self, flat: Tensor) -> Tensor:
        """The segments of ``flat`` as ``(number, block)``: a view of it where they lie so, or else a copy."""
        if not self._is_padded:
            return self._gradients.packed(flat).view(self.number, self._block)
        values = flat.new_zeros(self.number, self._block)
        torch._foreach_copy_(self._parts(values), self._gradients.views(flat))
        return values

    def join(self, values: Tensor, flat: Tensor) -> None:
        """Copy ``values``, ``(number, block)``, into the segments of ``flat``, unless they lie there."""
        if self._is_padded:
            torch._foreach_copy_(self._gradients.views(flat), self._parts(values))
        else:
            self._gradients.unpack(values.view(-1), flat)

    def room(self, flat: Tensor) -> Tensor:
        """Where ``(number, block)`` values can be written that :meth:`join` brings to ``flat``; any contents."""
        view = None if self._is_padded else self._gradients.joined(flat)
        return flat.new_empty(self.number, self._block) if view is None else view.view(self.number, self._block)

    def sizes(self, like: Tensor) -> Tensor:
        """How many elements of each block are those of a parameter: ``(number,)``, to read, where ``like`` is."""
        if not self._is_padded:  # one number for all: with blocks of one element they would take twice the gradients
            return torch.full((1,), self._block, device=like.device).expand(self.number)
        sizes = torch.full((self.number,), self._block)
        ends = torch.tensor(self._counts).cumsum(0) - 1
        numels = torch.tensor([segment.numel for segment in self._gradients.segments])
        full = torch.tensor(self._counts) * self._block
        sizes[ends] -= full - numels
        return sizes.to(like.device)

    def _parts(self, values: Tensor) -> list[Tensor]:
        parts = values.split(self._counts)
        return [part.view(-1)[: segment.numel] for part, segment in zip(parts, self._gradients.segments, strict=True)]


class HalfCodec(BlockCodec):
    """Rounds to :attr:`kind`, and adds up in the precision of the gradients: a sum is rounded once, and fits."""

    block = 1
    kind: ClassVar[torch.dtype]

    def encode(self, values: Tensor, sizes: Tensor, seed: int) -> Tensor:
        """Two bytes an element."""
        return values.to(self.kind).view(torch.uint8)

    def decode(self, codes: Tensor, values: Tensor) -> None:
        values.copy_(codes.view(self.kind))


@dataclass(frozen=True)
class BF16(HalfCodec):
    """Sends gradients in bfloat16: half the bytes, the range of float32, and 8 bits of precision.

    D. Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019 (https://arxiv.org/abs/1905.12322).
    """

    kind = torch.bfloat16


@dataclass(frozen=True)
class FP16(HalfCodec):
    """Sends gradients in float16: half the bytes, and 11 bits of precision.

    What is larger than 65504 becomes infinite, in the average too; what is smaller than 6e-8 becomes zero.
    P. Micikevicius et al., Mixed Precision Training, ICLR 2018 (https://arxiv.org/abs/1710.03740), section 3.
    """

    kind = torch.float16


_LARGEST = 127


@dataclass(frozen=True)
class Int8(BlockCodec):
    """Sends a byte an element, and one scale a block.

    An element is wrong by at most half of 1/127 of the largest in its block (stochastic: by less than all of it), once
    on each rank and, with more than two ranks, once more for their mean. A block with NaN or infinity on any rank is
    NaN in the average.

    T. Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016 (https://arxiv.org/abs/1511.04561), in
    the reduce-scatter of codes of ZeRO++ (G. Wang et al., ICLR 2024, https://arxiv.org/abs/2306.10209); stochastic
    rounding as in QSGD, D. Alistarh et al., NeurIPS 2017 (https://arxiv.org/abs/1610.02132).

    Attributes:
        block: Elements that share a scale. Smaller ones are more precise, and cost 4 bytes each; a multiple of 8.
        stochastic: Round up or down at random, so that the expectation is exact: for use without error feedback, where
            rounding to the nearest would lose small elements for ever. Takes longer.
    """

    block: int = 256
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            raise ValueError(f"Int8(block={self.block}): a block has a multiple of 8 elements, and at least 8")

    def encode(self, values: Tensor, sizes: Tensor, seed: int) -> Tensor:
        """``block`` bytes, and the scale in the dtype of ``values``."""
        largest = torch.maximum(values.amax(1, keepdim=True), -values.amin(1, keepdim=True))
        # The smallest normal number keeps a block of zeros, or of numbers that are next to it, from dividing by zero.
        scales = (largest / _LARGEST).clamp_min_(torch.finfo(values.dtype).tiny)
        codes = torch.empty(len(values), self.block + values.element_size(), dtype=torch.uint8, device=values.device)
        scaled = values / scales
        if self.stochastic:
            scaled.add_(_noise(scaled, seed)).floor_().clamp_(-_LARGEST, _LARGEST)
        else:
            scaled.round_()
        codes[:, : self.block].view(torch.int8).copy_(scaled)
        codes[:, self.block :].view(values.dtype).copy_(scales)
        return codes

    def decode(self, codes: Tensor, values: Tensor) -> None:
        values.copy_(codes[:, : self.block].view(torch.int8))
        values.mul_(codes[:, self.block :].view(values.dtype))


def _noise(like: Tensor, seed: int) -> Tensor:
    """Uniform in [0, 1), in steps of 2**-16: a fifth of the time of ``torch.rand``."""
    generator = torch.Generator(like.device).manual_seed(seed)
    bits = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    bits.random_(-(2**63), None, generator=generator)
    lanes = bits.view(torch.int16)[: like.numel()].view(like.shape).to(like.dtype)
    return lanes.mul_(2**-16).add_(0.5)


_SCALE_BYTES = 8


@dataclass(frozen=True)
class Sign(BlockCodec):
    """Sends one bit an element, and one scale a block. Use it with error feedback: alone it is far from the gradient.

    J. Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, ICML 2018
    (https://arxiv.org/abs/1802.04434), for the vote; S. P. Karimireddy et al., Error Feedback Fixes SignSGD and other
    Gradient Compression Schemes, ICML 2019 (https://arxiv.org/abs/1901.09847), for the scale; both ways in one bit as
    in S. Zheng et al., Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback, NeurIPS 2019
    (https://arxiv.org/abs/1905.10936).

    Attributes:
        block: Elements that share a scale; a multiple of 64.
        majority: Let the ranks vote on the sign of each element instead of averaging; they all count alike, whatever
            their magnitudes, which one rank with wild gradients cannot outvote.
    """

    block: int = 1024
    majority: bool = False

    def __post_init__(self) -> None:
        if self.block < 64 or self.block % 64:
            raise ValueError(f"Sign(block={self.block}): a block has a multiple of 64 elements, and at least 64")

    def encode(self, values: Tensor, sizes: Tensor, seed: int) -> Tensor:
        """``block / 8`` bytes, and the scale in eight."""
        width = self.block // 8
        codes = torch.empty(len(values), width + _SCALE_BYTES, dtype=torch.uint8, device=values.device)
        integer = torch.int32 if values.dtype is torch.float32 else torch.int64
        sign = values.view(integer) >> (8 * values.element_size() - 1)  # all ones where it is negative
        planes = sign.to(torch.uint8).view(-1, 8, width)
        bits = planes[:, 0] & 1
        for k in range(1, 8):
            bits |= planes[:, k] & (1 << k)
        codes[:, :width] = bits
        codes[:, width:].view(torch.float64)[:, 0] = values.abs().sum(1) / sizes
        return codes

    def decode(self, codes: Tensor, values: Tensor) -> None:
        width = self.block // 8
        scales = codes[:, width:].view(torch.float64).to(values.dtype)
        bits = codes[:, :width]
        planes = values.view(-1, 8, width)
        for k in range(8):
            planes[:, k] = (bits >> k) & 1
        values.mul_(-2 * scales).add_(scales)

    def combine(self, received: Tensor, mean: Tensor) -> Tensor:
        """The mean, or what most ranks say with the mean of their scales; where they are even, the sign of the mean."""
        if not self.majority:
            return mean
        votes = torch.zeros_like(mean)
        for codes in received:
            votes.add_(self._decoded(codes, mean).sign_())
        scales = received[:, :, self.block // 8 :].view(torch.float64).mean(0).to(mean.dtype)
        return torch.where(votes == 0, mean, votes).sign_().mul_(scales)


@dataclass(frozen=True)
class Uncompressed(Compressor):
    """One all-reduce in the gradients' own precision; halves are added up in float32 and rounded once."""

    def average(self, gradients: FlatGradients, link: Link) -> Exchange:
        if not gradients.numel:
            return
        if gradients.dtype in (torch.float16, torch.bfloat16):
            own = FP16() if gradients.dtype is torch.float16 else BF16()
            yield from own.average(gradients, link)
            return
        # Divided before it is added up, as the default reduce function does, so that the results are the same.
        values = gradients.packed(gradients.given) * (1.0 / link.size)
        yield from link.all_reduce(values)
        gradients.unpack(values, gradients.average)
        if gradients.keeps:
            torch._foreach_zero_(gradients.views(gradients.given))


class SelectiveCompressor(Compressor):
    """Compresses the gradients for which that pays, and sends the others uncompressed."""

    def average(self, gradients: FlatGradients, link: Link) -> Exchange:
        itemsize = gradients.given.element_size()
        pays = {id(one): self._pays(one, itemsize, link.size) for one in gradients.segments}
        exchanges = [Uncompressed().average(gradients.chosen(lambda one: not pays[id(one)]), link)]
        if any(pays.values()):
            exchanges.insert(0, self._average(gradients.chosen(lambda one: pays[id(one)]), link))
        yield from together(exchanges)

    @abstractmethod
    def _pays(self, segment: Segment, itemsize: int, world_size: int) -> bool:
        """Whether a parameter is compressed; the same on every rank."""

    @abstractmethod
    def _average(self, gradients: FlatGradients, link: Link) -> Exchange:
        """Average parameters for which it pays."""
