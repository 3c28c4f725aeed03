"""Compressors that encode blocks of elements, each into the same number of bytes; and the one that does not compress.

Codes cannot be summed by the transport, so each rank decodes them and sums the values:

    two ranks    codes --all-gather--> decode, mean
    more         codes --all-to-all--> decode, mean of this rank's part --encode--> codes --all-gather--> decode

In both cases a rank's link carries the codes twice, as an all-reduce of them would, for any number of ranks. No sum is
computed in a narrow dtype that could overflow.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ppe_ddp.compression.compressor import Compressor, Exchange, FlatGradients, Link, Segment, int64, mix, together

# Multiples of them are far apart, also from those of seeds: for the ranks, and for elements of a block.
_RANK, _ELEMENTS = 0x27D4EB2F165667C5, 0x85EBCA77C2B2AE63

_CACHED = 1 << 18  # elements that are decoded at a time; fewer would cost more calls than they save


class BlockCodec(Compressor):
    """A compressor with :meth:`encode` and :meth:`decode`; both must be pure, and the same on every rank.

    Attributes:
        block: Elements a block.
    """

    block: int

    @abstractmethod
    def encode(self, values: Tensor, sizes: Tensor, seeds: Callable[[], Tensor]) -> Tensor:
        """Encode ``values``.

        Args:
            values: ``(number, block)``, float32 or float64; must not be changed.
            sizes: ``(number,)``, int64: the number of elements of each block that count; the rest is zero.
            seeds: Returns seeds for random numbers, ``(number,)``, int64: another one for each block, on each rank and
                in each step. They do not depend on what else is in the bucket.

        Returns:
            The codes: ``(number, any)``, uint8. Codes of zero bytes must decode to finite values.
        """

    @abstractmethod
    def decode(self, codes: Tensor, values: Tensor) -> None:
        """Decode ``codes``, ``(number, any)``, into ``values``, ``(number, block)``."""

    def combine(self, received: Tensor, mean: Tensor) -> Tensor:
        """The result for some blocks, given the codes of all ranks; by default ``mean``.

        Args:
            received: The codes of all ranks, ``(size, number, any)``.
            mean: The mean of the decoded codes, ``(number, block)``; must not be changed.
        """
        return mean

    def average(self, gradients: FlatGradients, link: Link) -> Exchange:
        if not gradients.numel:
            return
        blocks = Blocks(gradients, self.block)
        values = blocks.cut(gradients.given)
        sizes = blocks.sizes(values)
        codes = self.encode(values, sizes, lambda: blocks.seeds(gradients.step, values) + int64(link.rank * _RANK))
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
            yield from self._in_parts(codes, sizes, result, kept, partial(blocks.seeds, gradients.step, values), link)
        if kept is not None:
            blocks.join(kept, gradients.given)
        blocks.join(result, gradients.average)

    def _in_parts(
        self,
        codes: Tensor,
        sizes: Tensor,
        result: Tensor,
        kept: Tensor | None,
        seeds: Callable[[], Tensor],
        link: Link,
    ) -> Exchange:
        """Average a part of the blocks on each rank, and send the result to all ranks."""
        number = len(codes)
        share = -(-number // link.size)
        missing = share * link.size - number
        rows = pad(codes, (0, 0, 0, missing)).view(link.size, share, -1)
        received = yield from link.all_to_all(rows)
        mean = self._mean(received, result.new_empty(share, self.block))
        part = self.combine(received, mean)
        mine = slice(link.rank * share, min((link.rank + 1) * share, number))
        own = slice(link.rank * share, (link.rank + 1) * share)
        own_sizes = pad(sizes, (0, missing), value=1)[own]
        again = self.encode(  # by the seeds of a further rank: whose part a block is depends on other parameters
            _cleared(part, own_sizes), own_sizes, lambda: pad(seeds(), (0, missing))[own] + int64(link.size * _RANK)
        )
        everything = yield from link.all_gather(again)
        self.decode(everything.view(link.size * share, -1)[:number], result)
        if kept is not None and mine.start < number:
            lost = mean[: mine.stop - mine.start] - result[mine]
            kept[mine].add_(lost, alpha=link.size)  # the loss of the second encoding, for all ranks

    def _mean(self, received: Tensor, mean: Tensor) -> Tensor:
        """Decode ``received``, ``(size, number, any)``, and write the mean over the ranks into ``mean``.

        It decodes as many blocks at a time as stay in the cache: fresh memory for a whole bucket would cost three times
        as much as a copy.
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
    """Set the elements of each block behind the first ``sizes`` to zero, in place; returns ``values``."""
    places = torch.arange(values.shape[1], device=values.device)
    if values.is_cuda:  # whose host would wait for the number of them
        return values.masked_fill_(places >= sizes[:, None], 0.0)
    cut = (sizes < values.shape[1]).nonzero().view(-1)
    if len(cut):
        values[cut] = values[cut].where(places < sizes[cut, None], 0.0)
    return values


class Blocks:
    """The segments of ``gradients`` as rows of ``block`` elements each.

    A block never has elements of two parameters, so results do not depend on how buckets are packed. The last block of
    each parameter is padded by zeros.
    """

    def __init__(self, gradients: FlatGradients, block: int) -> None:
        self._gradients = gradients = gradients.chosen(lambda segment: segment.numel > 0)
        self._block = block
        self._counts = [-(-segment.numel // block) for segment in gradients.segments]
        self.number = sum(self._counts)
        self._is_padded = self.number * block != gradients.numel

    def cut(self, flat: Tensor) -> Tensor:
        """The segments of ``flat`` as ``(number, block)``: a view if possible, else a copy."""
        if not self._is_padded:
            return self._gradients.packed(flat).view(self.number, self._block)
        values = flat.new_zeros(self.number, self._block)
        torch._foreach_copy_(self._parts(values), self._gradients.views(flat))
        return values

    def join(self, values: Tensor, flat: Tensor) -> None:
        """Copy ``values``, ``(number, block)``, into the segments of ``flat``, if they are not there."""
        if self._is_padded:
            torch._foreach_copy_(self._gradients.views(flat), self._parts(values))
        else:
            self._gradients.unpack(values.view(-1), flat)

    def room(self, flat: Tensor) -> Tensor:
        """Memory for ``(number, block)`` values, to be passed to :meth:`join`: a view of ``flat`` if possible."""
        view = None if self._is_padded else self._gradients.joined(flat)
        return flat.new_empty(self.number, self._block) if view is None else view.view(self.number, self._block)

    def sizes(self, like: Tensor) -> Tensor:
        """The number of elements of each block without padding: ``(number,)``, read-only, on the device of ``like``."""
        if not self._is_padded:  # an expanded number: for blocks of one element a tensor would be twice the gradients
            return torch.full((1,), self._block, device=like.device).expand(self.number)
        sizes = torch.full((self.number,), self._block, device="cpu")
        ends = torch.tensor(self._counts, device="cpu").cumsum(0) - 1
        numels = torch.tensor([segment.numel for segment in self._gradients.segments], device="cpu")
        full = torch.tensor(self._counts, device="cpu") * self._block
        sizes[ends] -= full - numels
        return _moved(sizes, like)

    def seeds(self, step: int, like: Tensor) -> Tensor:
        """A seed for each block in this step: ``(number,)``, int64, on the device of ``like``."""
        pairs = zip(self._gradients.segments, self._counts, strict=True)
        return _moved(torch.cat([segment.seeds(step, count) for segment, count in pairs]), like)

    def _parts(self, values: Tensor) -> list[Tensor]:
        parts = values.split(self._counts)
        return [part.view(-1)[: segment.numel] for part, segment in zip(parts, self._gradients.segments, strict=True)]


def _moved(numbers: Tensor, like: Tensor) -> Tensor:
    """``numbers``, on the CPU, on the device of ``like``; no host waits for a GPU."""
    return numbers.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else numbers.to(like.device)


class HalfCodec(BlockCodec):
    """Rounds to :attr:`kind`, and sums in the precision of the gradients, so a sum is rounded once and fits."""

    block = 1
    kind: ClassVar[torch.dtype]

    def encode(self, values: Tensor, sizes: Tensor, seeds: Callable[[], Tensor]) -> Tensor:
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

    Numbers above 65504 become infinite, also in the average; numbers below 6e-8 become zero.
    P. Micikevicius et al., Mixed Precision Training, ICLR 2018 (https://arxiv.org/abs/1710.03740), section 3.
    """

    kind = torch.float16


_LARGEST = 127


@dataclass(frozen=True)
class Int8(BlockCodec):
    """Sends one byte an element, and one scale a block.

    The error of an element is at most 1/254 of the largest element of its block, or less than 1/127 with stochastic
    rounding. It occurs once on each rank, and with more than two ranks once more for the mean. A block with NaN or
    infinity on any rank is NaN in the average.

    T. Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016 (https://arxiv.org/abs/1511.04561), in
    the reduce-scatter of codes of ZeRO++ (G. Wang et al., ICLR 2024, https://arxiv.org/abs/2306.10209); stochastic
    rounding as in QSGD, D. Alistarh et al., NeurIPS 2017 (https://arxiv.org/abs/1610.02132).

    Attributes:
        block: The number of elements that share a scale, a multiple of 8. Smaller blocks are more precise; each scale
            costs 4 bytes.
        stochastic: Round up or down at random, so that the expectation is exact. Use it without error feedback, where
            rounding to the nearest would always lose small elements. It takes longer.
    """

    block: int = 256
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.block < 8 or self.block % 8:
            raise ValueError(f"Int8(block={self.block}): a block has a multiple of 8 elements, and at least 8")

    def encode(self, values: Tensor, sizes: Tensor, seeds: Callable[[], Tensor]) -> Tensor:
        """``block`` bytes, and the scale in the dtype of ``values``."""
        largest = torch.maximum(values.amax(1, keepdim=True), -values.amin(1, keepdim=True))
        # At least the smallest normal number, so that a block of (almost) zeros does not divide by zero.
        scales = (largest / _LARGEST).clamp_min_(torch.finfo(values.dtype).tiny)
        codes = torch.empty(len(values), self.block + values.element_size(), dtype=torch.uint8, device=values.device)
        scaled = values / scales
        if self.stochastic:
            rows = len(values) if values.is_cuda else max(1, _CACHED // self.block)
            for part, own in zip(scaled.split(rows), seeds().split(rows), strict=True):
                part.add_(_noise(own, part)).floor_().clamp_(-_LARGEST, _LARGEST)
        else:
            scaled.round_()
        codes[:, : self.block].view(torch.int8).copy_(scaled)
        codes[:, self.block :].view(values.dtype).copy_(scales)
        return codes

    def decode(self, codes: Tensor, values: Tensor) -> None:
        values.copy_(codes[:, : self.block].view(torch.int8))
        values.mul_(codes[:, self.block :].view(values.dtype))


def _noise(seeds: Tensor, like: Tensor) -> Tensor:
    """Uniform random numbers in [0, 1), in steps of 2**-16, for rows of a multiple of four: four from each 64 bits."""
    places = torch.arange(like.shape[1] // 4, device=like.device).mul_(int64(_ELEMENTS))
    return mix(seeds[:, None] + places).view(torch.int16).to(like.dtype).mul_(2**-16).add_(0.5)


_SCALE_BYTES = 8


@dataclass(frozen=True)
class Sign(BlockCodec):
    """Sends one bit an element, and one scale a block. Use it with error feedback, as it is a rough approximation.

    J. Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, ICML 2018
    (https://arxiv.org/abs/1802.04434), for the vote; S. P. Karimireddy et al., Error Feedback Fixes SignSGD and other
    Gradient Compression Schemes, ICML 2019 (https://arxiv.org/abs/1901.09847), for the scale; both ways in one bit as
    in S. Zheng et al., Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback, NeurIPS 2019
    (https://arxiv.org/abs/1905.10936).

    Attributes:
        block: The number of elements that share a scale, a multiple of 64.
        majority: Let the ranks vote on the sign of each element instead of averaging. All ranks count equally, so one
            rank with huge gradients cannot outvote the others.
    """

    block: int = 1024
    majority: bool = False

    def __post_init__(self) -> None:
        if self.block < 64 or self.block % 64:
            raise ValueError(f"Sign(block={self.block}): a block has a multiple of 64 elements, and at least 64")

    def encode(self, values: Tensor, sizes: Tensor, seeds: Callable[[], Tensor]) -> Tensor:
        """``block / 8`` bytes, and the scale in eight bytes."""
        width = self.block // 8
        codes = torch.empty(len(values), width + _SCALE_BYTES, dtype=torch.uint8, device=values.device)
        integer = torch.int32 if values.dtype is torch.float32 else torch.int64
        sign = values.view(integer) >> (8 * values.element_size() - 1)  # all bits are 1 for a negative number
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
        """The mean; or the sign of most ranks times the mean of scales, with the sign of the mean for a tie."""
        if not self.majority:
            return mean
        votes = torch.zeros_like(mean)
        for codes in received:
            votes.add_(self._decoded(codes, mean).sign_())
        scales = received[:, :, self.block // 8 :].view(torch.float64).mean(0).to(mean.dtype)
        return torch.where(votes == 0, mean, votes).sign_().mul_(scales)


@dataclass(frozen=True)
class Uncompressed(Compressor):
    """One all-reduce in the gradients' own precision; half precision is summed in float32 and rounded once."""

    def average(self, gradients: FlatGradients, link: Link) -> Exchange:
        if not gradients.numel:
            return
        if gradients.dtype in (torch.float16, torch.bfloat16):
            own = FP16() if gradients.dtype is torch.float16 else BF16()
            yield from own.average(gradients, link)
            return
        # Divide before the sum, as the default reduce function does, so that the results are equal.
        values = gradients.packed(gradients.given) * (1.0 / link.size)
        yield from link.all_reduce(values)
        gradients.unpack(values, gradients.average)
        if gradients.keeps:
            torch._foreach_zero_(gradients.views(gradients.given))


class SelectiveCompressor(Compressor):
    """Compresses the parameters for which compression pays, and sends the others uncompressed."""

    def average(self, gradients: FlatGradients, link: Link) -> Exchange:
        itemsize = gradients.given.element_size()
        pays = {id(one): self._pays(one, itemsize, link.size) for one in gradients.segments}
        exchanges = [Uncompressed().average(gradients.chosen(lambda one: not pays[id(one)]), link)]
        if any(pays.values()):
            exchanges.insert(0, self._average(gradients.chosen(lambda one: pays[id(one)]), link))
        yield from together(exchanges)

    @abstractmethod
    def _pays(self, segment: Segment, itemsize: int, world_size: int) -> bool:
        """Whether to compress a parameter; the same on every rank."""

    @abstractmethod
    def _average(self, gradients: FlatGradients, link: Link) -> Exchange:
        """Average the parameters to be compressed."""
