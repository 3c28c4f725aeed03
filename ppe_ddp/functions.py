"""The default reduce and broadcast functions, and wrappers of reduce functions."""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from ppe_ddp.contracts import AllPending, GradBucket, PendingThen, ReduceFunction, Waitable
from ppe_ddp.errors import clear_frames

F = TypeVar("F", bound="ReduceFunction")

_PIECE_BYTES = 32 << 20
_ALIGNMENT = 16  # bytes: of the widest dtype


def average(gradients: GradBucket, group: ProcessGroup | None = None) -> Waitable | None:
    """Average a bucket over the ranks by one all-reduce: the default reduce function.

    Divides before it sums, as torch does, so that half-precision sums do not overflow.

    Args:
        gradients: The bucket; changed in place.
        group: The process group; None is the default group.

    Returns:
        The Work of the all-reduce, or None if one rank is alone.
    """
    world_size = dist.get_world_size(group)
    gradients.divide(world_size)
    if world_size == 1:
        return None
    return dist.all_reduce(gradients.buffer(), group=group, async_op=True)  # type: ignore[no-any-return]


average.takes_divided = average.is_plain_average = True  # type: ignore[attr-defined]


def is_plain_average(function: object) -> bool:
    """Whether a reduce function declares that it averages, and nothing else."""
    return declares(function, "is_plain_average")


def declares(function: object, name: str) -> bool:
    """Whether ``function`` declares itself what the attribute ``name`` says.

    ``functools.wraps`` copies the attributes of a function to one around it, which may do more.

    Raises:
        ValueError: ``takes_divided`` was copied, so that nobody knows who is to divide.
    """
    value, own = getattr(function, name, False), getattr(function, "__dict__", {})
    if name not in own or getattr(own.get("__wrapped__"), name, None) is not value:
        return bool(value)
    if value and name == "takes_divided" and inspect.unwrap(function) is not average:  # type: ignore[arg-type]
        raise ValueError(
            f"functools.wraps has copied takes_divided from {name_of(own['__wrapped__'])} to a reduce_function around "
            "it: decorate that one with ppe_ddp.functions.takes_divided, too, if it is to get gradients divided by "
            "the world size already; else set its attribute takes_divided to False"
        )
    return False


def own_function(function: object) -> str:
    """The text by which ranks compare their reduce functions; empty for one that only averages."""
    return "" if is_plain_average(function) else "reduce_function of the user's own"


def takes_divided(function: F) -> F:
    """Declare that a reduce function only sums, so that it gets gradients that are divided by the world size.

    They are divided while they are copied into the bucket, which costs next to nothing::

        @takes_divided
        def sum_up(gradients, group):
            gradients.divide(dist.get_world_size(group))  # does nothing if they are divided already
            return dist.all_reduce(gradients.buffer(), group=group, async_op=True)

    Sets the attribute ``takes_divided`` of the function, and returns it. One that ``functools.wraps`` has copied from
    another function is refused.
    """
    # Another object than that which was copied.
    copied = "__wrapped__" in getattr(function, "__dict__", {})
    function.takes_divided = object() if copied else True  # type: ignore[attr-defined]
    return function


def broadcast(tensors: Sequence[Tensor], group: ProcessGroup | None = None, *, source: int = 0) -> Waitable | None:
    """Overwrite ``tensors`` by those of one rank of ``group``: the default broadcast function.

    They are sent as bytes, so that every dtype works over every backend; small ones are packed together.

    Args:
        tensors: Tensors of any dtypes and shapes, on one device, alike on every rank; changed in place.
        group: The process group; None is the default group.
        source: The rank of the group whose tensors are sent.

    Returns:
        What is in flight, whose ``wait()`` writes the tensors; None if one rank is alone.
    """
    if dist.get_world_size(group) == 1:
        return None
    return AllPending([_broadcast(piece, group, source) for piece in _pieces(tensors)])


def overlapped(function: ReduceFunction) -> ReduceFunction:
    """Run a blocking reduce function on a thread of its own, so that it overlaps with backward.

    One thread for each group reduces its buckets in their order, so all ranks communicate in the same order. The
    function must use only the process group that it is given, and may be called by several threads, one for each
    wrapper. If all cores are busy, or the transport waits by spinning (MPI), it is usually faster without this.

    Args:
        function: A reduce function that returns when the result is in place.

    Returns:
        A reduce function that returns a Future at once.
    """
    return _Overlapped(function)


def _pieces(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    pieces: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        nbytes = tensor.nbytes
        if nbytes == 0:
            continue
        if nbytes > room:
            pieces.append([])
            room = _PIECE_BYTES
        pieces[-1].append(tensor)
        room -= nbytes
    return pieces


def _broadcast(tensors: Sequence[Tensor], group: ProcessGroup | None, source: int) -> Waitable:
    """One message of a broadcast; ``wait()`` copies it into the tensors if they were packed."""
    tensors, slots = [tensor.detach() for tensor in tensors], []
    first = tensors[0]
    if len(tensors) == 1 and first.is_contiguous() and not (first.is_conj() or first.is_neg()):
        message = first.as_strided((first.numel(),), (1,)).view(torch.uint8)  # one element may have any stride
    else:
        offsets = [0, *accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)]
        message = torch.empty(offsets[-1], dtype=torch.uint8, device=first.device)
        for tensor, offset in zip(tensors, offsets, strict=False):
            slots.append(message[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        torch._foreach_copy_(slots, tensors)
    work: dist.Work = dist.broadcast(message, group=group, group_src=source, async_op=True)
    return PendingThen(work, functools.partial(torch._foreach_copy_, tensors, slots)) if slots else work


class _Overlapped:
    """The result of :func:`overlapped`; the first bucket in a group starts the thread of that group."""

    def __init__(self, function: ReduceFunction) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function
        # By group, as ranks may begin the buckets of two groups in different orders. Weakly: its connections end with
        # the last reference.
        self._threads: WeakKeyDictionary[object, _ReduceThread] = WeakKeyDictionary()

    @property
    def takes_divided(self) -> bool:
        return declares(self._function, "takes_divided")

    def __call__(self, gradients: GradBucket, group: ProcessGroup | None, /) -> Waitable:
        key = self if group is None else group
        if key not in self._threads:
            self._threads[key] = _ReduceThread(self._function)
        return self._threads[key].start(gradients, group)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_threads"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._threads = WeakKeyDictionary()


class _ReduceThread:
    """Calls a function for the buckets of one process group, one after another."""

    def __init__(self, function: ReduceFunction) -> None:
        self._function = function
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ppe_ddp-reduce")
        # Not arguments of submit(): an error's traceback would keep the pool's frames, and so the process group, whose
        # connections end with the last reference.
        self._calls: deque[tuple[Any, Any, GradBucket, ProcessGroup | None]] = deque()
        self._failed: tuple[int, Exception] | None = None

    def start(self, gradients: GradBucket, group: ProcessGroup | None) -> Waitable:
        """Call the function after those that have been started; returns its Future."""
        device = gradients.buffer().device
        # A Future that knows its devices makes the streams wait for one another.
        future: torch.futures.Future[Any] = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        self._calls.append((future, ready, gradients, group))
        self._pool.submit(self._run)
        return future

    def _run(self) -> None:
        future, ready, gradients, group = self._calls.popleft()
        index = gradients.index()
        failed = self._failed_before(index)
        if failed is None and (failed := self._error_of(ready, gradients, group)) is not None:
            is_alone = isinstance(group, ProcessGroup) and group.size() == 1
            self._failed = None if is_alone else (index, failed)
            clear_frames(failed)
        del group  # whose connections end with the last reference
        if failed is not None:
            future.set_exception(failed)
        else:
            # The value, as a Future makes streams wait only for the tensors in it.
            future.set_result(gradients.buffer())
        # An error's traceback keeps this frame, and so the future that has the error; the collector does not see the
        # part of that cycle in C++.
        del future, gradients, failed

    def _error_of(self, ready: Any, gradients: GradBucket, group: ProcessGroup | None) -> Exception | None:
        try:
            with torch.no_grad():
                if ready is not None:
                    torch.cuda.set_device(gradients.buffer().device)
                    torch.cuda.current_stream().wait_event(ready)
                pending = self._function(gradients, group)
                if pending is not None:
                    pending.wait()
        except Exception as error:
            return error
        return None

    def _failed_before(self, index: int) -> Exception | None:
        """The error of an earlier bucket of this step, after which other ranks would take this bucket for that one."""
        if self._failed is not None:
            failed_index, error = self._failed
            if index > failed_index:
                return error
            self._failed = None  # this is another step
        return None


def name_of(function: object) -> str:
    """The qualified name of a function, or the type of another callable; for messages."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__
