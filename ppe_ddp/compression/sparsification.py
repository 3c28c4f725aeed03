"""What the methods have in common that send a part of each gradient's elements as they are."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ppe_ddp.compression.compressor import Compressor, together
from ppe_ddp.compression.uncompressed import Uncompressed

if TYPE_CHECKING:
    from ppe_ddp.compression.flat_gradients import FlatGradients, Segment
    from ppe_ddp.compression.link import Exchange, Link


@dataclass(frozen=True)
class Sparsification(Compressor):
    """Sends a part of the elements of the parameters for which that pays, and the others uncompressed.

    Attributes:
        ratio: The part of the elements that is sent, of each parameter; in (0, 1].
        min_numel: Parameters with fewer elements are sent uncompressed.
    """

    ratio: float
    min_numel: int = 1024

    def __post_init__(self) -> None:
        """Refuse a ratio that cannot be meant."""
        if not 0 < self.ratio <= 1:
            raise ValueError(
                f"{type(self).__name__}(ratio={self.ratio}): the part that is sent is above 0 and at most 1"
            )

    def average(self, gradients: FlatGradients, link: Link) -> Exchange:
        """See :meth:`Compressor.average`."""
        pays = partial(self._pays, itemsize=gradients.given.element_size(), world_size=link.size)
        sparse = gradients.chosen(pays)
        dense = gradients.chosen(lambda segment: not pays(segment))
        yield from together([self._average(sparse, link), Uncompressed().average(dense, link)])

    def _pays(self, segment: Segment, *, itemsize: int, world_size: int) -> bool:
        return segment.numel >= max(1, self.min_numel)

    @abstractmethod
    def _average(self, gradients: FlatGradients, link: Link) -> Exchange:
        """Average parameters for which it pays; there may be none."""


def count_of(segment: Segment, ratio: float) -> int:
    """How many elements of a parameter are sent: at least one, if there is any."""
    return min(segment.numel, max(1, math.ceil(segment.numel * ratio)))
