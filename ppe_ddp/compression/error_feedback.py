"""What a compressor does not send in one step is added to what it gets in the next.

F. Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
DNNs, Interspeech 2014; why it converges: S. P. Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient
Compression Schemes, ICML 2019 (https://arxiv.org/abs/1901.09847).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ppe_ddp.compression.compressor import Compressor

if TYPE_CHECKING:
    from torch import Tensor

    from ppe_ddp.compression.flat_gradients import FlatGradients, Segment
    from ppe_ddp.compression.link import Exchange, Link

_STATE = "residual"


@dataclass(frozen=True)
class ErrorFeedback(Compressor):
    """Keeps the residual of each parameter: what ``compressor`` has not sent of its gradients so far.

    Takes memory for it, of the size of the gradients (of halves: in float32), and as much again while backward runs. A
    parameter that is in no bucket keeps its residual; one that only other ranks have in a step sends it. Where a step
    is dropped (it has failed, or an average is not finite, which an optimizer has to leave out), all residuals are what
    they were before its backward: of several synchronized backwards to one step, those before stay sent. With a
    ``GradScaler`` they are residuals of scaled gradients, which count for twice or half as much, once, when the scale
    has changed.

    Attributes:
        compressor: Any but another ErrorFeedback.
    """

    compressor: Compressor

    def __post_init__(self) -> None:
        """Refuse what would keep residuals twice."""
        if isinstance(self.compressor, ErrorFeedback):
            raise TypeError("ErrorFeedback(ErrorFeedback(...)) would add what was not sent twice: one is enough")

    def average(self, gradients: FlatGradients, link: Link) -> Exchange:
        """See :meth:`Compressor.average`."""
        if not gradients.segments:
            return
        corrected = torch.empty_like(gradients.given)
        parts = gradients.views(corrected)
        torch._foreach_copy_(parts, gradients.views(gradients.given))
        known = [
            (part, r)
            for part, s in zip(parts, gradients.segments, strict=True)
            if (r := _residual(s, part)) is not None
        ]
        if known:
            torch._foreach_add_([part for part, _ in known], [residual for _, residual in known])
        yield from self.compressor.average(replace(gradients, given=corrected, keeps=True), link)
        if gradients.keeps:  # nobody else shall send it once more
            torch._foreach_zero_(gradients.views(gradients.given))
        for segment, part in zip(gradients.segments, parts, strict=True):
            # A new tensor: the old one is put back where the step is dropped. A copy: a view would keep the bucket.
            segment.state[_STATE] = part.clone()


def _residual(segment: Segment, part: Tensor) -> Tensor | None:
    residual: Tensor | None = segment.state.get(_STATE)
    if residual is None or residual.shape != part.shape or residual.dtype is not part.dtype:
        return None
    return residual
