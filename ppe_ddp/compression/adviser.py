"""Whether compression would shorten a step: its exposed communication against what encoding takes on this machine.

without    |---- backward ----|
                |====== the link is busy ======|       exposed: what comes after backward
with       |---- backward ---- + encoding ----|
                |= less =|                             exposed: less, or only the last bucket

Nothing is communicated for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import torch

from ppe_ddp.compression.bf16 import BF16
from ppe_ddp.compression.error_feedback import ErrorFeedback
from ppe_ddp.compression.flat_gradients import FlatGradients, Segment
from ppe_ddp.compression.int8 import Int8
from ppe_ddp.compression.link import Exchange, Link
from ppe_ddp.compression.power_sgd import PowerSGD
from ppe_ddp.compression.top_k import TopK

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import Tensor

    from ppe_ddp.compression.compressor import Compressor
    from ppe_ddp.contracts import Waitable

_REPEATS = 3
_WORTH = 0.05  # of a step, below which a gain is not worth what is lost


class TracedBucket(Protocol):
    """What is needed of a bucket's trace: :class:`ppe_ddp.engine.trace.BucketTrace`."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Their names."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of its gradients."""
        ...

    @property
    def packed_ns(self) -> int:
        """When it was handed to the transport."""
        ...

    @property
    def done_ns(self) -> int:
        """When its result was in place."""
        ...


class TracedBackward(Protocol):
    """What is needed of a trace: :class:`ppe_ddp.engine.trace.Trace`."""

    @property
    def buckets(self) -> Sequence[TracedBucket]:
        """In the order of launch."""
        ...

    @property
    def backward_ns(self) -> int:
        """When autograd had finished."""
        ...

    @property
    def total_ns(self) -> int:
        """When the gradients were handed over."""
        ...


@dataclass(frozen=True)
class Forecast:
    """What one method would make of the traced backward.

    Attributes:
        compressor: The method.
        fraction: Of the bytes that are sent without it.
        encoding_seconds: What encoding and decoding take, as measured here.
        seconds: What the backward would take.
    """

    compressor: Compressor
    fraction: float
    encoding_seconds: float
    seconds: float


@dataclass(frozen=True)
class Advice:
    """Whether compression would pay.

    Attributes:
        seconds: What the backward took, communication included.
        exposed_seconds: The communication after autograd had finished.
        forecasts: The quickest first.
    """

    seconds: float
    exposed_seconds: float
    forecasts: tuple[Forecast, ...]

    @property
    def best(self) -> Compressor | None:
        """The method that would make the backward the shortest; None where none pays."""
        first = self.forecasts[0] if self.forecasts else None
        return first.compressor if first is not None and first.seconds < (1 - _WORTH) * self.seconds else None

    def __str__(self) -> str:
        """A summary of a few lines."""
        head = f"backward takes {self.seconds * 1e3:.1f} ms, {self.exposed_seconds * 1e3:.1f} of them exposed"
        verb = "compression would not pay" if self.best is None else f"{self.best!r} would pay"
        lines = [f"{head} communication: {verb}"]
        for one in self.forecasts:
            lines.append(
                f"  {one.compressor!r}: {one.seconds * 1e3:.1f} ms, {one.encoding_seconds * 1e3:.1f} of them encoding; "
                f"sends {one.fraction:.3f}"
            )
        return "\n".join(lines)


def advise(trace: TracedBackward, *, link_size: int = 2, candidates: Sequence[Compressor] = ()) -> Advice:
    """Say whether compression would shorten a step, and by which method. Not collective; takes some steps' time.

    It trusts what this rank has seen of one backward, made without a compressor: take one after some others. What is
    lost, and whether training minds, it does not know.

    Args:
        trace: ``ddp.trace()``.
        link_size: How many take part in an exchange: nodes, where ranks of a node share memory, or else ranks.
        candidates: Methods to choose among; by default one of each kind, with error feedback where it is wanted.

    Raises:
        ValueError: Nothing was sent in that backward.
    """
    buckets = [bucket for bucket in trace.buckets if bucket.nbytes and bucket.parameters]
    if not buckets:
        raise ValueError("nothing was sent in this backward: trace one whose gradients are averaged over several ranks")
    whole = sum(bucket.nbytes for bucket in buckets)
    begin, end = min(bucket.packed_ns for bucket in buckets), max(bucket.done_ns for bucket in buckets)
    total, exposed = trace.total_ns / 1e9, max(0.0, (trace.total_ns - trace.backward_ns) / 1e9)
    busy, hidden = max(0.0, (end - begin) / 1e9), max(0.0, (trace.backward_ns - begin) / 1e9)
    last = buckets[-1].nbytes / whole
    forecasts = []
    for compressor in candidates or (BF16(), Int8(), ErrorFeedback(TopK(0.01)), ErrorFeedback(PowerSGD(rank=4))):
        nbytes, encoding = _cost(compressor, buckets, link_size)
        less = busy * nbytes / whole
        after = max(less - hidden, less * last)
        forecasts.append(Forecast(compressor, nbytes / whole, encoding, total - exposed + encoding + after))
    return Advice(total, exposed, tuple(sorted(forecasts, key=lambda one: one.seconds)))


def _cost(compressor: Compressor, buckets: Sequence[TracedBucket], size: int) -> tuple[float, float]:
    """Bytes sent, in those of an all-reduce, and seconds of encoding and decoding, of all buckets."""
    nbytes, seconds = 0.0, 0.0
    known: dict[tuple[int, int], tuple[int, float]] = {}
    for bucket in buckets:
        like = (bucket.nbytes, len(bucket.parameters))
        if like not in known:
            known[like] = _measured(compressor, *like, size)
        nbytes += known[like][0]
        seconds += known[like][1]
    return nbytes, seconds


def _measured(compressor: Compressor, nbytes: int, parameters: int, size: int) -> tuple[int, float]:
    """The same of one bucket, as if its parameters were square matrices of one size."""
    side = max(1, round((nbytes / 4 / parameters) ** 0.5))
    segments = tuple(Segment(str(k), k * side * side, side * side, side, {}) for k in range(parameters))
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(parameters * side * side, generator=generator)
    best, sent = float("inf"), 0
    for step in range(_REPEATS):
        flat, link = given.clone(), _Mirror(size)
        start = perf_counter()
        for pending in compressor.average(FlatGradients(flat, flat, segments, False, flat.dtype, step, step), link):
            pending.wait()
        best, sent = min(best, perf_counter() - start), link.nbytes
    return round(sent * nbytes / given.nbytes), best


class _Mirror(Link):
    """A link on whose other end is the same: it costs nothing, and counts."""

    def __init__(self, size: int) -> None:
        super().__init__(None, 0, size, torch.device("cpu"))

    def all_reduce(self, tensor: Tensor) -> Exchange:
        self.nbytes += tensor.nbytes
        tensor.mul_(self.size)
        yield from ()

    def all_gather(self, message: Tensor) -> Generator[Waitable, None, Tensor]:
        self.nbytes += message.nbytes * self.size // 2
        yield from ()
        return message.repeat(self.size, *[1] * message.dim()).view(self.size, *message.shape)

    def all_to_all(self, rows: Tensor) -> Generator[Waitable, None, Tensor]:
        self.nbytes += rows.nbytes // 2
        yield from ()
        return rows.clone()
