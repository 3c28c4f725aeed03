"""The first steps uncompressed, or by a milder method: gradients change fast there, and most.

As in T. Vogels et al., PowerSGD, NeurIPS 2019 (https://arxiv.org/abs/1905.13727), as torch has it
(``start_powerSGD_iter``), and Y. Lin et al., Deep Gradient Compression, ICLR 2018 (https://arxiv.org/abs/1712.01887).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ppe_ddp.compression.compressor import Compressor
from ppe_ddp.compression.uncompressed import Uncompressed

if TYPE_CHECKING:
    from ppe_ddp.compression.flat_gradients import FlatGradients
    from ppe_ddp.compression.link import Exchange, Link


@dataclass(frozen=True)
class WarmUp(Compressor):
    """Compresses by ``compressor`` after ``steps`` synchronized backwards.

    All that begin count: also one that has failed on some rank, and one whose optimizer step a ``GradScaler`` skips.

    Attributes:
        compressor: From then on.
        steps: The number of synchronized backwards before.
        before: Until then.
    """

    compressor: Compressor
    steps: int
    before: Compressor = field(default_factory=Uncompressed)

    def average(self, gradients: FlatGradients, link: Link) -> Exchange:
        """See :meth:`Compressor.average`."""
        chosen = self.before if gradients.step < self.steps else self.compressor
        yield from chosen.average(gradients, link)
