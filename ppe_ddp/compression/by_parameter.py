"""Another method for each kind of parameter."""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ppe_ddp.compression.compressor import Compressor, together
from ppe_ddp.compression.uncompressed import Uncompressed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ppe_ddp.compression.flat_gradients import FlatGradients, Segment
    from ppe_ddp.compression.link import Exchange, Link


@dataclass(frozen=True)
class ByParameter(Compressor):
    """Chooses the method by the name of the parameter.

    Each method sends messages of its own, side by side with those of the others.

    Attributes:
        patterns: From a pattern of shells (``"*.bias"``, ``"encoder.*"``) to a compressor. The first that fits the name
            in the wrapped module counts.
        otherwise: For names that none fits.
        min_numel: Parameters with fewer elements are sent uncompressed, whatever their names.
    """

    patterns: Mapping[str, Compressor]
    otherwise: Compressor = field(default_factory=Uncompressed)
    min_numel: int = 0

    def average(self, gradients: FlatGradients, link: Link) -> Exchange:
        """See :meth:`Compressor.average`."""
        chosen: dict[int, list[Segment]] = {}
        compressors = [*self.patterns.values(), self.otherwise, Uncompressed()]
        for segment in gradients.segments:
            chosen.setdefault(self._index(segment), []).append(segment)
        yield from together(
            [
                compressors[index].average(gradients.with_segments(segments), link)
                for index, segments in sorted(chosen.items())
            ]
        )

    def _index(self, segment: Segment) -> int:
        if segment.numel < self.min_numel:
            return len(self.patterns) + 1
        fitting = (k for k, pattern in enumerate(self.patterns) if fnmatchcase(segment.name, pattern))
        return next(fitting, len(self.patterns))
