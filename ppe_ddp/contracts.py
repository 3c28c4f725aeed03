"""The interfaces of what a user may plug in: functions and hooks, and the bucket that they get.

A *function* (:class:`ReduceFunction`, :class:`BroadcastFunction`) replaces the communication itself. A *hook* is
either pytorch-pfn-extras' (:class:`SyncHook`, called with the module before synchronization) or torch's
(:class:`CommHook`, called with a bucket and returning a Future). :class:`GradBucket` is what they receive.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

from ppe_ddp.scaling import scale

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup


@runtime_checkable
class Waitable(Protocol):
    """Something in flight: ``torch.distributed.Work``, ``torch.futures.Future`` or anything like them."""

    def wait(self) -> Any:
        """Block until the result is in place; raise what went wrong."""
        ...


Probe = Callable[[], object]
"""Returns, without waiting, whether something has completed; calling it may be what advances it."""


def probe(pending: object) -> Probe | None:
    """The method that tells whether a Work or a Future is done; None if it has none."""
    return getattr(pending, "done", None) or getattr(pending, "is_completed", None)


def is_completed(pending: Waitable) -> bool:
    """Whether waiting would return at once, without waiting."""
    is_done = probe(pending)
    return is_done is None or bool(is_done())


class AllPending:
    """Several things in flight, waited for as one."""

    def __init__(self, parts: Sequence[Waitable]) -> None:
        self.parts = parts

    def is_completed(self) -> bool:
        """Whether all of them are; asks each, since asking may be what advances it."""
        return all([is_completed(one) for one in self.parts])

    def wait(self) -> None:
        """Wait for one after another."""
        for one in self.parts:
            one.wait()


def is_waitable(value: object) -> TypeGuard[Waitable]:
    """Whether ``value`` is a :class:`Waitable`, found out in a hundredth of ``isinstance``'s time."""
    return callable(getattr(value, "wait", None))


class Division(enum.Enum):
    """Who divides the gradients of a bucket by the world size, so that their sum over the ranks is the mean."""

    BY_FUNCTION = enum.auto()
    """The function that gets it."""
    DONE = enum.auto()
    """They are divided already."""


class GradBucket(list["Tensor"]):
    """The gradients that travel together: a list of tensors that also has torch's ``GradBucket`` methods.

    The tensors have one dtype and one device, and the shapes of their parameters. All of them are views of
    the flat tensor ``buffer()``, so a function may work on either; what it leaves there is the result. A
    gradient that this rank does not have, but another rank has, is present as zeros.

    Every rank gets the same buckets in the same order, with the same parameters in each.
    """

    _buffer: Tensor
    _parameters: list[nn.Parameter]
    _names: tuple[str, ...]
    _index: int
    _is_last: bool
    _division: Division

    @classmethod
    def of(
        cls,
        gradients: Sequence[Tensor],
        buffer: Tensor,
        *,
        parameters: list[nn.Parameter],
        names: tuple[str, ...],
        index: int,
        is_last: bool,
        division: Division = Division.BY_FUNCTION,
    ) -> GradBucket:
        """Make a bucket of ``gradients``, which are views of ``buffer`` (1-D, their total size)."""
        bucket = cls(gradients)
        bucket._buffer = buffer
        bucket._parameters = parameters
        bucket._names = names
        bucket._index = index
        bucket._is_last = is_last
        bucket._division = division
        return bucket

    # A real list, not an abstract Sequence, because the C++ argument parser of torch wants one (and not a tuple,
    # because torch's own hooks take a tuple for one that holds the buffer).
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        """Buckets are equal when they are the same bucket: tensors do not compare to one truth value."""
        return self is other

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Refuse to be pickled."""
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
        """Their names in the wrapped module: the key for state that is kept for each parameter."""
        return self._names

    def index(self) -> int:  # type: ignore[override]  # torch's name, not list's
        """The number of this bucket: its place in this backward's launch order.

        For a torch hook with a state of its own, the number of a fixed set of parameters in every step,
        since such hooks keep state by index.
        """
        return self._index

    def is_last(self) -> bool:
        """Whether this is the last bucket of this backward."""
        return self._is_last

    def division(self) -> Division:
        """Who divides by the world size: the function that gets the bucket, unless it declares otherwise."""
        return self._division

    def divide(self, world_size: int) -> None:
        """Divide the gradients by the world size, in place, if that is left to the function."""
        if self._division is Division.BY_FUNCTION:
            scale(self._buffer, self._buffer, 1.0 / world_size)
            self._division = Division.DONE

    def set_buffer(self, buffer: Tensor) -> None:
        """Let ``buffer`` (1-D, same number of elements, any dtype) take the place of the flat gradients.

        The tensors of the bucket become views of it, and what is in it at the end is the result.
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

    A function may declare by attributes what it leaves to the wrapper; each is false where it is missing:

    ``takes_divided``: its gradients come divided by the world size, which costs next to nothing while they are
    copied into the bucket, and it only sums. :func:`ppe_ddp.functions.takes_divided` sets it.

    ``is_plain_average``: the wrapper averages by something else in its place (one all-reduce, a reduce-scatter where
    each rank needs its part only, nothing on one rank), and never calls it.

    Either all ranks have a function of their own or none, which is compared. That it is the same one is not: a rank may
    have one that logs, too, and its name says nothing of what it sends. ``PPE_DDP_DEBUG=1`` compares that.
    """

    def __call__(self, gradients: GradBucket, group: ProcessGroup | None, /) -> Waitable | None:
        """Average ``gradients`` over ``group`` in place.

        Called in the same order with the same buckets on every rank, at moments that differ from rank to
        rank, while backward is still running; so ``group`` is a process group of the wrapper's own, on which
        nobody else communicates.

        Args:
            gradients: Tensors of one dtype and device; see :class:`GradBucket`.
            group: The process group to communicate in.

        Returns:
            None when the result is in place; or a Work or Future whose ``wait()`` returns when it is: then
            the communication overlaps with backward.
        """
        ...


class BroadcastFunction(Protocol):
    """Copies tensors from the first rank of a group to all others, in place."""

    def __call__(self, tensors: Sequence[Tensor], group: ProcessGroup | None, /) -> Waitable | None:
        """Overwrite ``tensors`` (one dtype and device, any shapes) by those of the group's rank 0.

        Returns:
            None when done, or a Work or Future to wait for.
        """
        ...


class CommHook(Protocol):
    """A communication hook of ``torch.nn.parallel.DistributedDataParallel``."""

    def __call__(self, state: Any, bucket: GradBucket, /) -> torch.futures.Future[Any]:
        """Return a Future of the reduced flat tensor (or a list that holds it alone)."""
        ...


class SyncHook(Protocol):
    """A communication hook of pytorch-pfn-extras.

    Ranks may have different ones, or none, and nothing is compared: a hook sees this rank's gradients only, and what it
    sends, if anything, goes by a group of the user's.
    """

    def __call__(self, module: Any, /) -> None:
        """Called before synchronization; sees every local ``.grad`` and may change, set or remove it."""
        ...


class MixedPrecision(Protocol):
    """The dtypes that a wrapper computes and communicates in: torch's ``_MixedPrecision``, or what is like it."""

    @property
    def param_dtype(self) -> torch.dtype | None:
        """The dtype of parameters and inputs, and so of the computation; None to leave them as they are."""
        ...

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype of gradients while they are averaged; None for ``param_dtype``."""
        ...
