"""The interfaces that users may implement: functions and hooks, and the bucket that they get.

A *function* (:class:`ReduceFunction`, :class:`BroadcastFunction`) replaces the communication itself. A *hook* is
either pytorch-pfn-extras' (:class:`SyncHook`, called with the module before synchronization) or torch's
(:class:`CommHook`, called with a bucket and returning a Future). Reduce functions and torch's hooks get a
:class:`GradBucket`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ppe_ddp.scaling import scale
from ppe_ddp.waiting import is_done


@runtime_checkable
class Waitable(Protocol):
    """An operation in flight: a ``torch.distributed.Work``, a ``torch.futures.Future``, or an object like them."""

    def wait(self) -> Any:
        """Block until the result is in place; raise the operation's error."""


class AllPending:
    """Several operations in flight, waited for as one."""

    def __init__(self, parts: Sequence[Waitable]) -> None:
        self.parts = parts

    def done(self) -> bool:
        """Whether all of them are; asks each one, since that may advance it."""
        return all([is_done(one) for one in self.parts])

    def wait(self) -> None:
        """Wait for all of them."""
        for one in self.parts:
            one.wait()


class PendingThen:
    """An operation in flight, and a function that the first ``wait()`` calls after it."""

    def __init__(self, work: Waitable, then: Callable[[], object]) -> None:
        self.work = work
        self._then: Callable[[], object] | None = then

    def done(self) -> bool:
        """Whether the operation is done."""
        return is_done(self.work)

    def wait(self) -> None:
        """Wait for the operation, and call the function."""
        self.work.wait()
        then, self._then = self._then, None
        if then is not None:
            with torch.no_grad():
                then()


def is_waitable(value: object) -> TypeGuard[Waitable]:
    """Whether ``value`` is a :class:`Waitable`; takes a hundredth of the time of ``isinstance``."""
    return callable(getattr(value, "wait", None))


class GradBucket(list["Tensor"]):
    """The gradients that are reduced together: a list of tensors that also has torch's ``GradBucket`` methods.

    The tensors have one dtype and one device, and the shapes of their parameters. All of them are views of
    the flat tensor ``buffer()``, so a function may change either; the values at its end are the result. A
    gradient that this rank does not have, but another rank has, is present as zeros.

    Every rank gets the same buckets in the same order, with the same parameters in each.
    """

    def __init__(
        self,
        gradients: Sequence[Tensor],
        buffer: Tensor,
        *,
        parameters: list[nn.Parameter],
        names: tuple[str, ...],
        index: int,
        is_last: bool,
        is_divided: bool = False,
    ) -> None:
        super().__init__(gradients)
        self._buffer = buffer
        self._parameters, self._names = parameters, names
        self._index, self._is_last = index, is_last
        self._is_divided = is_divided

    # A real list, not an abstract Sequence, because the C++ argument parser of torch requires one. Not a tuple,
    # because torch's own hooks treat a tuple as one that holds the buffer.
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        """Buckets are equal when they are the same bucket: tensors do not compare to one truth value."""
        return self is other

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("a GradBucket is a view of gradient memory and cannot be pickled; copy its tensors")

    def buffer(self) -> Tensor:
        """The flat gradients: 1-D, on the bucket's device, of its dtype; change it in place."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """The gradients as one tensor a parameter, in the parameters' shapes; the same memory."""
        return list(self)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients these are, in the same order."""
        return list(self._parameters)

    def names(self) -> tuple[str, ...]:
        """The names of the parameters in the wrapped module; use them as keys for state of each parameter."""
        return self._names

    def index(self) -> int:  # type: ignore[override]  # torch's name, not list's
        """The number of this bucket: its place in this backward's launch order.

        Torch hooks with a state of their own keep state by index. For these a number stands for the same parameters
        in every step.
        """
        return self._index

    def is_last(self) -> bool:
        """Whether this is the last bucket of this backward."""
        return self._is_last

    def is_divided(self) -> bool:
        """Whether the gradients are divided by the world size already, as for a function that ``takes_divided``."""
        return self._is_divided

    def divide(self, world_size: int) -> None:
        """Divide the gradients by the world size, in place, unless they are divided already."""
        if not self._is_divided:
            scale(self._buffer, self._buffer, 1.0 / world_size)
            self._is_divided = True

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the flat gradients by ``buffer`` (1-D, same number of elements, any dtype).

        The tensors of the bucket become views of it, and its values at the end are the result.
        """
        before = self._buffer
        if buffer.numel() != before.numel():
            raise ValueError(
                f"set_buffer() of bucket {self._index} needs {before.numel()} elements, not {buffer.numel()}"
            )
        self._buffer = buffer = buffer.reshape(-1)
        shift = buffer.storage_offset() - before.storage_offset()
        self[:] = [buffer.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() + shift) for tensor in self]


class ReduceFunction(Protocol):
    """Averages the gradients of one bucket over the ranks of a group, in place.

    A function may have two attributes, which default to False:

    ``takes_divided``: the function only sums. The wrapper divides by the world size as it copies gradients into the
    bucket, which costs next to nothing. :func:`ppe_ddp.functions.takes_divided` sets it.

    ``is_plain_average``: the wrapper never calls the function. It averages by one all-reduce instead, by a
    reduce-scatter if each rank needs only its shard, or not at all on one rank.

    Either all ranks have a function of their own, or none has; this is compared. The functions themselves are not: one
    rank's function may also log, for instance. ``PPE_DDP_DEBUG=1`` compares what they send.
    """

    def __call__(self, gradients: GradBucket, group: ProcessGroup | None, /) -> Waitable | None:
        """Average ``gradients`` over ``group`` in place.

        Every rank calls it with the same buckets in the same order, while backward is still running, and so at
        different moments. Hence ``group`` is a process group of the wrapper's own, in which nobody else
        communicates.

        Args:
            gradients: Tensors of one dtype and device; see :class:`GradBucket`.
            group: The process group to communicate in.

        Returns:
            None if the result is in place. Or a Work or Future whose ``wait()`` returns when it is; then the
            communication overlaps with backward.
        """


class BroadcastFunction(Protocol):
    """Copies tensors from the first rank of a group to all others, in place.

    Either all ranks have a function of their own, or none has; this is compared.
    """

    def __call__(self, tensors: Sequence[Tensor], group: ProcessGroup | None, /) -> Waitable | None:
        """Overwrite ``tensors`` (one dtype and device, any shapes) by those of the group's rank 0.

        Returns:
            None when done, or a Work or Future to wait for.
        """


class CommHook(Protocol):
    """A communication hook of ``torch.nn.parallel.DistributedDataParallel``.

    As there, complex numbers are pairs of real ones in the bucket.
    """

    def __call__(self, state: Any, bucket: GradBucket, /) -> torch.futures.Future[Any]:
        """Return a Future of the reduced flat tensor (or a list that holds it alone)."""


class SyncHook(Protocol):
    """A communication hook of pytorch-pfn-extras.

    Ranks may have different hooks, or none; nothing is compared. A hook sees this rank's gradients only. If it
    communicates, it does so in a group of the user's.
    """

    def __call__(self, module: Any, /) -> None:
        """Called before synchronization; sees every local ``.grad`` and may change, set or remove it."""


class MixedPrecision(Protocol):
    """The dtypes in which a wrapper computes and communicates: torch's ``_MixedPrecision``, or an object like it."""

    @property
    def param_dtype(self) -> torch.dtype | None:
        """The dtype of parameters and inputs, and so of the computation; None to leave them as they are."""

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype of gradients while they are averaged; None for ``param_dtype``."""
