"""The interface of a compressor: the gradients that it gets, and the link over which it exchanges them."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from ppe_ddp.backends.collective_arguments import as_bytes
from ppe_ddp.backends.group_internals import backend_for
from ppe_ddp.contracts import AllPending, Waitable
from ppe_ddp.errors import FunctionError
from ppe_ddp.torch_internals import before_compiling

_PIECE_NBYTES = 1 << 18
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""The dtypes in which half-precision numbers are summed."""

Exchange = Generator[Waitable, None, None]
"""Yields an operation in flight; it is resumed when that has been waited for."""
_STEP, _NAME, _PLACE = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9  # their multiples are far apart
_MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def int64(number: int) -> int:
    """The int64 with the bits of ``number`` modulo ``2**64``."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def mix(numbers: Tensor) -> Tensor:
    """Make each of ``numbers`` (int64) 64 random bits that follow from it alone, on any device; in place.

    G. L. Steele, D. Lea and C. H. Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014
    (https://doi.org/10.1145/2660193.2660195).
    """
    for shift, factor in _MIXING:
        shifted = numbers >> shift
        numbers.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1)).mul_(int64(factor))
    return numbers


@dataclass(frozen=True, eq=False)
class Segment:
    """The place of one parameter in the flat tensors.

    Attributes:
        name: The name of the parameter in the wrapped module.
        start: The first element.
        numel: The number of elements.
        rows: The number of rows of the gradient as a matrix, each of ``numel // rows`` elements, in the order of
            memory: the first dimension of the parameter by all others. At most 1 for fewer than two dimensions.
        state: The compressors' state of this parameter, kept from step to step, by keys of their own: tensors and plain
            numbers. Part of ``comm_state_dict()``.
        shape: The shape of the gradient, with a last dimension of 2 if it is complex; empty for one dimension.
        stride: Its strides, in elements.
    """

    name: str
    start: int
    numel: int
    rows: int
    state: dict[str, Any]
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()

    @property
    def stop(self) -> int:
        """The element after the last."""
        return self.start + self.numel

    def seed(self, step: int) -> int:
        """A seed for random numbers of this parameter in this step: 64 bits, the same on every rank.

        It depends on the name, and not on the bucket: ranks of tensor parallelism, whose other parameters may have
        other sizes, draw the same for a parameter of which each has a copy.
        """
        return (step * _STEP + zlib.crc32(before_compiling(self.name).encode()) * _NAME) % (1 << 64)

    def seeds(self, step: int, count: int) -> Tensor:
        """``count`` different ones: ``(count,)``, int64, on the CPU."""
        return torch.arange(count, device="cpu").mul_(int64(_PLACE)).add_(int64(self.seed(step)))

    def shaped(self, flat: Tensor) -> Tensor:
        """This part of ``flat`` in the shape of the gradient: a view."""
        part = flat[self.start : self.stop]
        return part.as_strided(self.shape, self.stride) if self.shape else part


@dataclass(frozen=True, eq=False)
class FlatGradients:
    """The gradients of one bucket, to be averaged.

    A compressor must read and write only the :attr:`segments`: another compressor may have the rest of the tensors.

    Attributes:
        given: This rank's gradients: 1-D, float32 or float64. Zero for parameters without a gradient here.
        average: The tensor for the average, of the same size and dtype. It is ``given`` itself, unless ``keeps``.
        segments: The parameters, in ascending order of ``start``.
        keeps: Whether ``given`` must end as the part that this rank has not sent. Summed over the ranks, the old
            ``given`` must then equal world size * ``average`` + the new ``given``.
        dtype: The dtype of the parameters' gradients, which may be narrower.
        step: The number of completed synchronized backwards; the same on every rank. See :meth:`Segment.seed`.
    """

    given: Tensor
    average: Tensor
    segments: tuple[Segment, ...]
    keeps: bool
    dtype: torch.dtype
    step: int

    @property
    def numel(self) -> int:
        """The number of elements in the segments."""
        return sum(segment.numel for segment in self.segments)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The segments of ``flat``, 1-D each."""
        return [flat[segment.start : segment.stop] for segment in self.segments]

    def chosen(self, predicate: Callable[[Segment], bool]) -> FlatGradients:
        """Select the segments for which ``predicate`` holds; the tensors are the same."""
        return self.with_segments(filter(predicate, self.segments))

    def with_segments(self, segments: Iterable[Segment]) -> FlatGradients:
        """Select ``segments``; the tensors are the same."""
        return replace(self, segments=tuple(segments))

    def joined(self, flat: Tensor) -> Tensor | None:
        """One 1-D view of ``flat`` with all segments; None if they are not adjacent."""
        first, last = self.segments[0], self.segments[-1]
        return flat[first.start : last.stop] if last.stop - first.start == self.numel else None

    def packed(self, flat: Tensor) -> Tensor:
        """The segments of ``flat`` one after another, 1-D: a view if they are adjacent, else a copy."""
        view = self.joined(flat)
        return torch.cat(self.views(flat)) if view is None else view

    def unpack(self, values: Tensor, flat: Tensor) -> None:
        """Copy ``values``, in the layout of :meth:`packed`, into the segments of ``flat``, if they are not there."""
        if (target := self.joined(flat)) is not None:
            if not target.is_set_to(values):
                target.copy_(values)
            return
        torch._foreach_copy_(self.views(flat), list(values.split([segment.numel for segment in self.segments])))


class Link:
    """The process group over which a compressor communicates.

    All ranks must start the same collectives in the same order, with the same sizes. Each collective is a generator: it
    starts, yields the operation in flight, and returns its result when it is resumed. So a compressor is written as if
    it waited, ``rows = yield from link.all_gather(message)``, while several buckets are in flight.

    Args:
        group: The process group; None for a subclass that communicates otherwise.
        rank: The rank of this process in the group.
        size: The number of ranks.
        device: The device of the tensors.

    Attributes:
        nbytes: The bytes sent so far, as the size of an all-reduce with the same traffic. So it can be compared with
            the bytes of the gradients for any collectives.
    """

    def __init__(self, group: ProcessGroup | None, rank: int, size: int, device: torch.device) -> None:
        self._group = group
        self.rank = rank
        self.size = size
        self.device = device
        self.nbytes = 0

    def all_reduce(self, tensor: Tensor) -> Exchange:
        """Sum ``tensor`` (float32 or float64) over the ranks, in place."""
        if self.size > 1 and tensor.numel():
            self.nbytes += tensor.nbytes
            yield self._sum(tensor)

    def all_gather(self, message: Tensor) -> Generator[Waitable, None, Tensor]:
        """The messages of all ranks, ``(size, *message.shape)``: contiguous tensors of one shape and dtype."""
        if self.size == 1 or not message.numel():
            return message.expand(self.size, *message.shape)
        self.nbytes += message.nbytes * self.size // 2
        rows = message.new_empty((self.size, *message.shape))
        yield self._gather(rows, as_bytes(message))
        return rows

    def all_to_all(self, rows: Tensor) -> Generator[Waitable, None, Tensor]:
        """Send each rank its row of ``rows``, which is contiguous; returns the rows that all ranks have sent here."""
        if self.size == 1 or not rows.numel():
            return rows
        self.nbytes += rows.nbytes // 2
        received = torch.empty_like(rows)
        yield self._exchange(as_bytes(received), as_bytes(rows))
        return received

    def _sum(self, tensor: Tensor) -> Any:
        return dist.all_reduce(tensor, group=self._group, async_op=True)

    def _gather(self, rows: Tensor, message: Tensor) -> Any:
        if self._group is None or self.device.type != "cpu" or backend_for(self._group, self.device).name() != "gloo":
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            return gather(as_bytes(rows), message, group=self._group, async_op=True)
        # In pieces: long messages in both directions of a link delay each other's acknowledgements, so that gloo would
        # take 1.5 times as long as for an all-reduce.
        received, started = rows.view(self.size, -1).view(torch.uint8), []
        for begin in range(0, message.numel(), _PIECE_NBYTES):
            piece = slice(begin, begin + _PIECE_NBYTES)
            parts = [row[piece] for row in received]
            pending = dist.all_gather(parts, message[piece], group=self._group, async_op=True)
            assert pending is not None  # this rank is in the group
            started.append(pending)
        return AllPending(started)

    def _exchange(self, received: Tensor, sent: Tensor) -> Any:
        return dist.all_to_all_single(received, sent, group=self._group, async_op=True)


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether none of these dense tensors has NaN or infinity. The host waits for a GPU."""
    totals = [tensor.sum(dtype=WIDE.get(tensor.dtype)) for tensor in tensors]
    if all([bool(total.isfinite()) for total in totals]):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in tensors)  # a sum can overflow


class Compressor(ABC):
    """Averages gradients over the ranks of a link, and sends fewer bytes than an all-reduce.

    It is a value, whose fields never change. Its state is in the ``state`` of each parameter, since each step may have
    other buckets. Ranks compare its ``repr``, so this must tell it from any other compressor. Derive from
    :class:`~ppe_ddp.compression.quantization.BlockCodec` for a method that only encodes and decodes.
    """

    @abstractmethod
    def average(self, gradients: FlatGradients, link: Link) -> Exchange:
        """Average ``gradients`` over the ranks of ``link``, in place; a generator that yields before it waits.

        It is started when the bucket is complete on this rank, while backward is still running. It is resumed when the
        yielded operation has been waited for, in an order that is the same on every rank. Other buckets are in flight
        meanwhile.

        It must guarantee:

        - every rank gets the same ``gradients.average``, bit by bit;
        - an element that is not finite on some rank is not finite in the average, so that a ``GradScaler`` notices;
        - with ``gradients.keeps``, the part that was not sent is in ``gradients.given`` in the end;
        - entries of ``state`` are replaced by new tensors, and never written to. If the step is dropped, because it has
          failed on some rank or an average is not finite, the old entries are put back.
        """

    def start(self, gradients: FlatGradients, link: Link) -> Exchange:
        """Call :meth:`average`, and raise FunctionError if it is no generator."""
        exchange = self.average(gradients, link)
        if not isinstance(exchange, Iterator):
            raise FunctionError(
                f"average() of the compressor {self!r} has returned {type(exchange).__name__}: write it as a generator "
                "that yields each operation before it waits for it, as in `yield from link.all_reduce(values)`"
            )
        return exchange

    def has_residual(self, name: str | None = None, numel: int | None = None) -> bool:
        """Whether it keeps what it does not send of the parameter ``name`` (None: of any), as ``ErrorFeedback`` does.

        ``numel`` is the number of its elements, if that is known. By default it does if a compressor in one of its
        fields does, or in a mapping there.
        """
        fields = vars(self).values()
        parts = [one for field in fields for one in (field.values() if isinstance(field, Mapping) else (field,))]
        given = (name,) if numel is None else (name, numel)  # a class of the user's may take the name alone
        return any(part.has_residual(*given) for part in parts if isinstance(part, Compressor))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"


def together(exchanges: Iterable[Exchange]) -> Exchange:
    """Run several exchanges side by side; each round starts them in order."""
    running = list(exchanges)
    while running:
        started = [(exchange, pending) for exchange in running if (pending := next(exchange, None)) is not None]
        if started:
            yield AllPending([pending for _, pending in started])
        running = [exchange for exchange, _ in started]
