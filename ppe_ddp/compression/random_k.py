"""Elements at random places that all ranks know, so that no index travels and the rest can be added up.

J. Konečný et al., Federated Learning: Strategies for Improving Communication Efficiency, 2016
(https://arxiv.org/abs/1610.05492); with memory: S. U. Stich et al., Sparsified SGD with Memory, NeurIPS 2018
(https://arxiv.org/abs/1809.07599).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ppe_ddp.compression.flat_gradients import is_finite
from ppe_ddp.compression.sparsification import Sparsification, count_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ppe_ddp.compression.flat_gradients import FlatGradients, Segment
    from ppe_ddp.compression.link import Exchange, Link


@dataclass(frozen=True)
class RandomK(Sparsification):
    """Sends one element of each stretch of ``1 / ratio`` elements, other ones in every step, and sums them up.

    With error feedback the elements are sent as they are. Without, they are multiplied by the length of their stretch,
    so that the expectation is the gradient; its variance is as many times larger.

    Attributes:
        ratio: The part of the elements that is sent, of each parameter; in (0, 1].
        min_numel: Parameters with fewer elements are sent uncompressed.
    """

    def _average(self, gradients: FlatGradients, link: Link) -> Exchange:
        if not gradients.segments:
            return
        given = gradients.given
        indices, lengths = places(gradients.segments, self.ratio, gradients.seed, given.device)
        values = given[indices]
        if not all(map(is_finite, gradients.views(given))):
            values.fill_(torch.nan)  # what is wrong elsewhere must show in the average
        if gradients.keeps:
            given[indices] = 0
        else:
            values.mul_(lengths)
        values.mul_(1.0 / link.size)
        yield from link.all_reduce(values)
        torch._foreach_zero_(gradients.views(gradients.average))
        gradients.average[indices] = values


def places(segments: Sequence[Segment], ratio: float, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """One random index, int64, in each of the stretches into which ``ratio`` cuts the segments; and their lengths."""
    starts, stops = [], []
    for segment in segments:
        count = count_of(segment, ratio)
        bounds = torch.arange(count + 1) * segment.numel // count + segment.start
        starts.append(bounds[:-1])
        stops.append(bounds[1:])
    start, lengths = torch.cat(starts), torch.cat(stops) - torch.cat(starts)
    # On the CPU, so that ranks with unlike devices have the same numbers.
    drawn = torch.rand(len(start), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    indices = start + (drawn * lengths).long()
    return indices.to(device), lengths.to(device)
