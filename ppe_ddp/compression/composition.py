"""Compressors that wrap others: error feedback, a warm-up, and a choice by parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from ppe_ddp.compression.comm_state import RESIDUAL
from ppe_ddp.compression.compressor import Compressor, Exchange, FlatGradients, Link, Segment, together
from ppe_ddp.compression.quantization import Uncompressed
from ppe_ddp.torch_internals import fits


@dataclass(frozen=True)
class ErrorFeedback(Compressor):
    """Adds the residual, the part of the gradients that ``compressor`` has not sent, to the next gradients.

    F. Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
    Speech DNNs, Interspeech 2014; why it converges: S. P. Karimireddy et al., Error Feedback Fixes SignSGD and other
    Gradient Compression Schemes, ICML 2019 (https://arxiv.org/abs/1901.09847).

    It takes memory of the size of the gradients (in float32 for half precision), and twice that while backward runs. If
    a step is dropped, because it has failed or an average is not finite, all residuals are as before its backward (but
    see docs/compression.md for DTensors). With a ``GradScaler`` residuals are of scaled gradients: after a change of
    the scale they count for twice or half as much, once. With Megatron's ``calculate_per_token_loss`` they are of sums.

    Attributes:
        compressor: Any compressor that has no ErrorFeedback in it.
    """

    compressor: Compressor

    def __post_init__(self) -> None:
        if self.compressor.has_residual():
            raise TypeError(f"{self!r} would add what was not sent twice: one ErrorFeedback is enough")

    def has_residual(self, name: str | None = None, numel: int | None = None) -> bool:
        return True

    def average(self, gradients: FlatGradients, link: Link) -> Exchange:
        if not gradients.segments:
            return
        corrected = torch.empty_like(gradients.given)
        torch._foreach_copy_(gradients.views(corrected), gradients.views(gradients.given))
        shaped = [segment.shaped(corrected) for segment in gradients.segments]
        for segment, part in zip(gradients.segments, shaped, strict=True):
            residual = segment.state.get(RESIDUAL)
            if residual is not None and residual.shape == part.shape:
                part.add_(residual.to(part.device))
        yield from self.compressor.start(replace(gradients, given=corrected, keeps=True), link)
        if gradients.keeps:  # the residual is kept here, so the caller must not keep it as well
            torch._foreach_zero_(gradients.views(gradients.given))
        for segment, part in zip(gradients.segments, shaped, strict=True):
            # A new tensor, since the old one is put back if the step is dropped; a view would keep the bucket alive.
            segment.state[RESIDUAL] = part.clone()


@dataclass(frozen=True)
class WarmUp(Compressor):
    """Compresses by ``compressor`` only after ``steps`` synchronized backwards, as gradients change fast at first.

    Like torch's PowerSGD hook (``start_powerSGD_iter``), and Y. Lin et al., Deep Gradient Compression, ICLR 2018
    (https://arxiv.org/abs/1712.01887). Backwards that a ``GradScaler`` skips count as well; those that fail do not.

    Attributes:
        compressor: The compressor after the warm-up.
        steps: The number of synchronized backwards of the warm-up.
        before: The compressor during the warm-up.
    """

    compressor: Compressor
    steps: int
    before: Compressor = field(default_factory=Uncompressed)

    def average(self, gradients: FlatGradients, link: Link) -> Exchange:
        chosen = self.before if gradients.step < self.steps else self.compressor
        yield from chosen.start(gradients, link)


@dataclass(frozen=True)
class ByParameter(Compressor):
    """Chooses the compressor by the name of the parameter. Each sends messages of its own, side by side.

    Attributes:
        patterns: From a shell pattern (``"*.bias"``, ``"encoder.*"``) to a compressor. The first pattern that matches
            the name in the wrapped module counts.
        otherwise: The compressor for names that match no pattern.
        min_numel: Parameters with fewer elements are sent uncompressed.
    """

    patterns: Mapping[str, Compressor]
    otherwise: Compressor = field(default_factory=Uncompressed)
    min_numel: int = 0

    def average(self, gradients: FlatGradients, link: Link) -> Exchange:
        chosen: dict[int, list[Segment]] = {}
        compressors = [*self.patterns.values(), self.otherwise, Uncompressed()]
        for segment in gradients.segments:
            chosen.setdefault(self._index(segment), []).append(segment)
        ordered = sorted(chosen.items())
        yield from together([compressors[k].start(gradients.with_segments(own), link) for k, own in ordered])

    def has_residual(self, name: str | None = None, numel: int | None = None) -> bool:
        if name is None:
            return super().has_residual()
        if numel is not None and numel < self.min_numel:
            return False
        return [*self.patterns.values(), self.otherwise][self._place(name)].has_residual(name, numel)

    def _index(self, segment: Segment) -> int:
        return len(self.patterns) + 1 if segment.numel < self.min_numel else self._place(segment.name)

    def _place(self, name: str) -> int:
        fitting = (k for k, pattern in enumerate(self.patterns) if fits(name, pattern))
        return next(fitting, len(self.patterns))
