"""Compressors that send a part of each gradient's elements, uncompressed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ppe_ddp.compression.compressor import Exchange, FlatGradients, Link, Segment, are_finite, mix
from ppe_ddp.compression.quantization import SelectiveCompressor


@dataclass(frozen=True)
class Sparsification(SelectiveCompressor):
    """Sends a part of the elements of large parameters, and all elements of small ones."""

    ratio: float
    min_numel: int = 1024

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(
                f"{type(self).__name__}(ratio={self.ratio}): the part that is sent is above 0 and at most 1"
            )

    def _pays(self, segment: Segment, itemsize: int, world_size: int) -> bool:
        return segment.numel >= max(1, self.min_numel)


def count_of(segment: Segment, ratio: float) -> int:
    """The number of elements of a parameter that are sent: at least one, unless it is empty."""
    return min(segment.numel, max(1, math.ceil(segment.numel * ratio)))


_SAMPLED_FROM = 1 << 15  # elements; for fewer a sample is too imprecise, and choosing among all is fast
_SAMPLES = 1 << 12
_MARGIN = 3.0  # allowed error of the sample, in standard deviations


@dataclass(frozen=True)
class TopK(Sparsification):
    """Sends the largest elements of each parameter's gradient by magnitude. Use it with error feedback.

    Each rank sends its own choice by all-gather, so the received bytes grow with the number of ranks. If an all-reduce
    of the whole gradient takes fewer bytes, or the gradient is small, it is sent uncompressed.

    A. F. Aji and K. Heafield, Sparse Communication for Distributed Gradient Descent, EMNLP 2017
    (https://arxiv.org/abs/1704.05021); the threshold from a sample is that of Y. Lin et al., Deep Gradient Compression,
    ICLR 2018 (https://arxiv.org/abs/1712.01887).

    Attributes:
        ratio: The part of the elements that is sent, of each parameter; in (0, 1].
        min_numel: Parameters with fewer elements are sent uncompressed.
    """

    def _pays(self, segment: Segment, itemsize: int, world_size: int) -> bool:
        gathered = count_of(segment, self.ratio) * (itemsize + 4) * (world_size - 1)
        reduced = 2 * segment.numel * itemsize * (world_size - 1) / world_size
        return super()._pays(segment, itemsize, world_size) and gathered <= reduced

    def _average(self, gradients: FlatGradients, link: Link) -> Exchange:
        given = gradients.given
        indices = torch.cat(
            [largest(given[one.start : one.stop], count_of(one, self.ratio)) + one.start for one in gradients.segments]
        )
        values = given[indices]
        if gradients.keeps:
            given[indices] = 0
        narrow = torch.int32 if given.numel() <= torch.iinfo(torch.int32).max else torch.int64
        # Pad values and indices to whole words of the other's size, so that the row of each rank is aligned.
        count, words = len(values), indices.to(narrow)
        words, values = (
            pad(one, (0, -count % max(1, other.element_size() // one.element_size())))
            for one, other in ((words, values), (values, words))
        )
        rows = yield from link.all_gather(torch.cat([values, words.view(values.dtype)]))
        torch._foreach_zero_(gradients.views(gradients.average))
        for row in rows:  # rank by rank: no index occurs twice in one row, so the order of additions is fixed
            places = row[len(values) :].view(narrow)[:count]
            gradients.average.index_add_(0, places, row[:count] * (1.0 / link.size))


def largest(values: Tensor, count: int) -> Tensor:
    """The indices, int64, of the ``count`` elements of 1-D ``values`` with the largest magnitude; NaN is the largest.

    It estimates a threshold from a sample, which somewhat more elements reach, and chooses among these. This takes a
    fifth of the time of ``topk`` of all elements.
    """
    magnitudes = values.abs()
    candidates = _candidates(magnitudes, count)
    if candidates is None:
        return magnitudes.topk(count, sorted=False).indices
    if len(candidates) == count:
        return candidates
    return candidates[magnitudes[candidates].topk(count, sorted=False).indices]


def _candidates(magnitudes: Tensor, count: int) -> Tensor | None:
    """Indices that include the ``count`` largest elements; None if sampling does not find few enough."""
    numel = magnitudes.numel()
    if numel < _SAMPLED_FROM or count * 4 > numel:
        return None
    sample = magnitudes[:: numel // _SAMPLES]
    expected = len(sample) * count / numel
    rank = math.ceil(expected + _MARGIN * math.sqrt(expected) + 1)
    threshold = sample.topk(rank, sorted=True).values[-1]
    found = (magnitudes < threshold).logical_not_().nonzero().view(-1)  # includes NaN
    return found if count <= len(found) <= numel // 2 else None


@dataclass(frozen=True)
class RandomK(Sparsification):
    """Sends one random element of each stretch of ``1 / ratio`` elements, another one in each step, by all-reduce.

    With error feedback elements are sent unchanged. Without it they are multiplied by the length of their stretch, so
    that the expectation is the gradient; the variance grows by the same factor.

    All ranks draw the same places, so no indices are sent. J. Konečný et al., Federated Learning: Strategies for
    Improving Communication Efficiency, 2016 (https://arxiv.org/abs/1610.05492); with memory: S. U. Stich et al.,
    Sparsified SGD with Memory, NeurIPS 2018 (https://arxiv.org/abs/1809.07599).

    Attributes:
        ratio: The part of the elements that is sent, of each parameter; in (0, 1].
        min_numel: Parameters with fewer elements are sent uncompressed.
    """

    def _average(self, gradients: FlatGradients, link: Link) -> Exchange:
        given = gradients.given
        indices, lengths = places(gradients.segments, self.ratio, gradients.step, given.device)
        values = given[indices]
        if not are_finite(views := gradients.views(given)):
            # NaN or infinity must show in the average of its parameter, even if that element is not sent.
            counts = [count_of(one, self.ratio) for one in gradients.segments]
            for part, view in zip(values.split(counts), views, strict=True):
                if not are_finite([view]):
                    part.fill_(torch.nan)
        if gradients.keeps:
            given[indices] = 0
        else:
            values.mul_(lengths)
        values.mul_(1.0 / link.size)
        yield from link.all_reduce(values)
        torch._foreach_zero_(gradients.views(gradients.average))
        gradients.average[indices] = values


def places(segments: Sequence[Segment], ratio: float, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """One random index (int64) in each of the stretches into which ``ratio`` cuts the segments; and their lengths."""
    starts, stops, seeds = [], [], []
    for segment in segments:
        count = count_of(segment, ratio)
        bounds = torch.arange(count + 1, device="cpu") * segment.numel // count + segment.start
        starts.append(bounds[:-1])
        stops.append(bounds[1:])
        seeds.append(segment.seeds(step, count))
    start, lengths = torch.cat(starts), torch.cat(stops) - torch.cat(starts)
    drawn = mix(torch.cat(seeds)).bitwise_and_((1 << 53) - 1).double() * 2**-53
    indices = start + (drawn * lengths).long()
    return indices.to(device), lengths.to(device)
