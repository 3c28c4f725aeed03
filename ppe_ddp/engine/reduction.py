"""Calls the reduce function or communication hook on a bucket, and checks that it keeps its contract."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ProcessGroup

from ppe_ddp.backends.group_internals import default_group, node_backend
from ppe_ddp.contracts import CommHook, GradBucket, ReduceFunction, SyncHook, Waitable, is_waitable
from ppe_ddp.engine.completion import ends_soon
from ppe_ddp.engine.failures import HookProgress
from ppe_ddp.engine.group_duplicates import backends_of, end_on_threads_of_python
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.module import ModuleState
from ppe_ddp.engine.plan import BucketPlan
from ppe_ddp.errors import CommunicationError, FunctionError, PeerAbortedError
from ppe_ddp.functions import declares, is_plain_average, name_of
from ppe_ddp.nested_tensors import attributes_of
from ppe_ddp.torch_internals import version_of
from ppe_ddp.waiting import Probe, awaited_once, probe

logger = logging.getLogger("ppe_ddp")

_LATER_SECONDS = 1.0
BLOCKING = frozenset({"a function that blocks"})
# Backends with ReduceOp.AVG, which divides before it adds, so that half-precision sums do not overflow.
_AVERAGING = ("nccl", "cupy_nccl")


class Reduction(ABC):
    """Starts and finishes the reduction of buckets, by a function or a hook.

    Attributes:
        mean_factor: Factor of gradients, so that their sum over the ranks is their mean.
        keeps_state_by_index: Whether a bucket index has to stand for the same parameters in every step.
        turns: Names of resources that only one wrapper may use at a time: any function that blocks, or one group.
        may_resize: Whether the function or hook may enlarge the flat buffer.
        one_at_a_time: Whether a bucket must not be launched before the previous one is complete.
        is_all_reduce: Whether it is one all-reduce in this library's group, so that errors are those of the transport.
        is_plain_average: Whether no function or hook is called: buckets are averaged by :meth:`start_average` and
            :meth:`finish_average`.
        sends_nothing: Whether nothing is sent at all: a rank alone has its averages already.
        takes_real: Whether it gets complex numbers as pairs of real ones, as in torch's wrapper.
        sends_kept: Whether an average may include values that were kept from earlier steps (error feedback).
        may_write_parameters: Whether parameters may change before all buckets are complete: a hook of torch's kind may
            step an optimizer.
        may_launch: Tells whether the next bucket can be launched without waiting for earlier ones; None if it always
            can.
        agreed: Its identity, which has to be the same on all ranks; empty for functions, which may differ.
    """

    keeps_state_by_index = False
    may_resize = False
    one_at_a_time = False
    is_all_reduce = False
    turns: frozenset[str] = frozenset()
    is_plain_average = False
    sends_nothing = False
    takes_real = False
    sends_kept = False
    may_write_parameters = False
    may_launch: Probe | None = None
    agreed = ""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._has_warned = False
        self.mean_factor = 1.0 / groups.world_size
        self._averaging = {kind for kind, name in backends_of(groups.buckets).items() if name in _AVERAGING}

    @property
    def progress(self) -> HookProgress | None:
        """Its progress in process groups of the user's; None if it uses none."""
        return None

    def takes_divided(self, device: torch.device) -> bool:
        """Whether gradients on ``device`` are to be divided by the world size before they are reduced."""
        return False

    @property
    @abstractmethod
    def title(self) -> str:
        """Its name, for messages."""

    def start_average(self, flat: Tensor, plan: BucketPlan, names: Sequence[str]) -> Waitable | None:
        """Start one all-reduce; for a bucket of one node only, start the message of that node instead."""
        groups, node = self._groups, plan.node
        if groups.world_size == 1:
            return None
        try:
            op = dist.ReduceOp.AVG if flat.device.type in self._averaging else dist.ReduceOp.SUM
            if node is None:
                return dist.all_reduce(flat, op, groups.buckets, async_op=True)  # type: ignore[no-any-return]
            backend = node_backend(groups.buckets, flat.device)
            if backend is not None:
                return backend.sum_of_node(flat, node)  # type: ignore[no-any-return]
            (source,) = groups.nodes[node]
            if op == dist.ReduceOp.AVG and source == groups.rank:
                flat.mul_(self.mean_factor)
            return dist.broadcast(flat, group=groups.buckets, group_src=source, async_op=True)  # type: ignore[no-any-return]
        except Exception as error:
            annotate(error, f"in {self.title} on {self._described(names, plan.index)}")
            raise

    def finish_average(
        self,
        pending: Waitable,
        device: torch.device,
        names: Sequence[str],
        index: int,
        what: str = "the all-reduce failed",
    ) -> object:
        """Wait for a collective of this library; converts errors of the transport to CommunicationError."""
        try:
            return self._groups.failures.wait(pending, device)
        except PeerAbortedError:
            raise
        except RuntimeError as error:
            raise self.failure(error, names, index, what) from error

    def failure(self, error: RuntimeError, names: Sequence[str], index: int, what: str) -> CommunicationError:
        """The error to raise for an ``error`` of the transport."""
        return CommunicationError(
            f"{self._described(names, index)}: {what}: {error}. An error or a crash on another rank ends "
            "here: look for the first traceback of all ranks."
        )

    def start(self, bucket: GradBucket) -> Waitable | None:
        """Start the reduction of ``bucket`` by the function or hook; returns None if it is complete already."""
        try:
            return self._call(bucket)
        except Exception as error:
            self._annotate(error, bucket)
            raise

    def wait(self, bucket: GradBucket, pending: Waitable) -> object:
        """Wait for ``pending``, and return its result."""
        device = bucket.buffer().device
        try:
            if self.is_all_reduce:
                return self.finish_average(pending, device, bucket.names(), bucket.index())
            title = f"{self.title} ({self.describe(bucket)})"
            return self._groups.failures.wait(pending, device, partial(refuse_late, self._groups, title))
        except Exception as error:
            self._annotate(error, bucket)
            raise

    def finish(self, bucket: GradBucket, pending: Waitable | None, memory: Sequence[Tensor]) -> int | None:
        """Wait for ``pending`` and check that the result is in the buffer of ``bucket``, an alias of ``memory``.

        Returns the bytes that this rank has sent; None stands for the whole bucket.
        """
        value = None if pending is None else self.wait(bucket, pending)
        try:
            self._accept(bucket, value)
            if len(bucket) != len(memory):
                raise FunctionError(
                    f"{self.title} left {len(bucket)} of {len(memory)} tensors in its list ({self.describe(bucket)}); "
                    "it must change their values only"
                )
            wrong = [name for name, *pair in zip(bucket.names(), bucket, memory, strict=True) if _differ(*pair)]
            if wrong or bucket.buffer().numel() != sum(tensor.numel() for tensor in memory):
                raise FunctionError(
                    f"{self.title} changed the shape of {wrong or 'the flat buffer'} ({self.describe(bucket)}); "
                    "it must change values only"
                )
            pairs = zip(bucket.names(), bucket, memory, strict=True)
            if elsewhere := [name for name, tensor, slot in pairs if _has_moved(tensor, slot, bucket)]:
                raise FunctionError(
                    f"{self.title} put other tensors in the place of {elsewhere} ({self.describe(bucket)}); it must "
                    "change the values of those in the bucket, as copy_() does, or call set_buffer()"
                )
        except Exception as error:
            self._annotate(error, bucket)
            raise
        return None

    @abstractmethod
    def _call(self, bucket: GradBucket) -> Waitable | None: ...

    def _accept(self, bucket: GradBucket, value: object) -> None:  # noqa: B027  # functions reduce in place
        """Put ``value``, the result of the wait, into ``bucket``."""

    def _annotate(self, error: Exception, bucket: GradBucket) -> None:
        annotate(error, f"in {self.title} on {self.describe(bucket)}")

    def abandon(self) -> None:
        """Abandon the step after a failure: nothing of it will be waited for any more."""
        return

    def has_finite_averages(self) -> bool:
        """Whether all averages of a compressor are finite."""
        return True

    def nonzero_averages(self) -> Collection[str]:
        """The names of parameters whose averages are not zero; none if it keeps nothing of earlier steps."""
        return ()

    def commit(self, module_state: ModuleState, *, is_finite: bool | None = None) -> None:
        """Commit the step of ``module_state``, which all ranks take: nothing of it will be put back.

        Unless it ``is_finite`` (None: looks for itself), an optimizer may skip it, and its parameters are as before.
        """
        return

    def note_sparse(self, name: str, _average: Tensor) -> None:
        """Warn once that sparse gradients, such as that of ``name``, are averaged without this function or hook."""
        if not self.is_plain_average and not self._has_warned:
            self._has_warned = True
            logger.warning("sparse gradients (%s) are averaged by all-gather, not by %s", name, self.title)

    def describe(self, bucket: GradBucket) -> str:
        """Rank, bucket and parameters, for messages."""
        return self._described(bucket.names(), bucket.index())

    def _described(self, names: Sequence[str], index: int) -> str:
        some = ", ".join(repr(name) for name in names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
        return f"rank {self._groups.rank}, bucket {index} with {some}"


class FunctionReduction(Reduction):
    """Calls a reduce function."""

    def __init__(self, function: ReduceFunction, groups: Groups) -> None:
        super().__init__(groups)
        self._function = function
        self._takes_divided = declares(function, "takes_divided")
        self.is_plain_average = self.is_all_reduce = is_plain_average(function)
        self.sends_nothing = groups.world_size == 1 and self.is_plain_average
        self.turns = frozenset() if self.is_plain_average else BLOCKING
        self._given: dict[int, tuple[int, int]] = {}  # address and version of each buffer, by the index of its bucket

    def takes_divided(self, device: torch.device) -> bool:
        """As the function declares; for plain averages True unless the backend has ReduceOp.AVG."""
        return device.type not in self._averaging if self.is_plain_average else self._takes_divided

    @property
    def title(self) -> str:
        """The function's name."""
        return f"reduce_function {name_of(self._function)}"

    def _call(self, bucket: GradBucket) -> Waitable | None:
        self._given[bucket.index()] = bucket.buffer().data_ptr(), version_of(bucket.buffer())
        pending = self._function(bucket, self._groups.buckets)
        if pending is None:
            return pending
        if is_waitable(pending):
            self.turns = BLOCKING if probe(pending) is None else frozenset()  # an object with wait() alone blocks there
            return awaited_once(pending, bucket.buffer().device)  # type: ignore[no-any-return]
        raise FunctionError(
            f"{self.title} returned {type(pending).__name__} ({self.describe(bucket)}); it must change the gradients "
            "in place and return None, or a Work or Future to wait for"
        )

    def _accept(self, bucket: GradBucket, value: object) -> None:
        """Refuse averages in another tensor, while those in ``bucket`` are as they were given to the function."""
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        flat, given = bucket.buffer(), self._given.pop(bucket.index())
        if not isinstance(value, Tensor) or value.numel() != flat.numel() or value.dtype is not flat.dtype:
            return
        is_untouched = value.data_ptr() != flat.data_ptr() and given == (flat.data_ptr(), version_of(flat))
        # Writes by NumPy or ``.data`` have no version.
        if is_untouched and not torch.allclose(value.reshape(-1), flat, rtol=0, atol=0, equal_nan=True):
            raise FunctionError(
                f"the Future of {self.title} holds another tensor, and those in the bucket are as they were "
                f"({self.describe(bucket)}); it must change them in place, or call set_buffer()"
            )


class HookReduction(Reduction):
    """Calls a communication hook of torch.

    torch's default hooks get this library's group in place of the user's group with the same ranks. Nobody else
    communicates in it, and a failure can end it. All other hooks communicate in the user's groups.
    """

    takes_real = True

    def __init__(self, state: Any, hook: CommHook, groups: Groups) -> None:
        super().__init__(groups)
        users = [] if _can_be_given(hook, state, groups.parent) else _groups_in(state)
        end_on_threads_of_python(users)
        self.turns = frozenset(group.group_name for group in users)
        # A hook may start a second collective when its first one is done (PowerSGD does), on any thread. With two
        # buckets in flight, the ranks would issue these collectives in different orders.
        self.one_at_a_time = self.may_write_parameters = bool(users)
        self.is_all_reduce = not users
        self._state = state
        self._hook = hook
        self._calls = 0
        self._last: Waitable | None = None
        self._is_unfinished = False
        # A hook that keeps no state has None or a process group as its state.
        self.agreed = self.title
        self.keeps_state_by_index = self.may_resize = not (state is None or isinstance(state, ProcessGroup))

    @property
    def title(self) -> str:
        """The hook's name."""
        return f"communication hook {name_of(self._hook)}"

    @property
    def progress(self) -> HookProgress | None:
        """The number of its calls, if it communicates in the user's groups; None if it gets this library's group."""
        return HookProgress(self.title, self._calls, self._is_unfinished) if not self.is_all_reduce else None

    def abandon(self) -> None:
        """Note whether the last call is still in flight: it may never end, as other ranks may not have called it."""
        done = probe(self._last)
        self._is_unfinished = self._last is not None and not (done is not None and ends_soon(done))
        self._last = None

    def _call(self, bucket: GradBucket) -> Waitable:
        self._calls += 1
        self._last = None
        future = self._hook(self._groups.buckets if self.is_all_reduce else self._state, bucket)
        if is_waitable(future):
            self._last = future
            return future
        raise FunctionError(
            f"{self.title} returned {type(future).__name__} ({self.describe(bucket)}); it must return a "
            "torch.futures.Future of the reduced flat tensor"
        )

    def _accept(self, bucket: GradBucket, value: object) -> None:
        if bucket.is_last():
            self._last = None
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        if not isinstance(value, Tensor):
            raise FunctionError(
                f"the Future of {self.title} holds {type(value).__name__} ({self.describe(bucket)}); it must hold the "
                "reduced flat tensor"
            )
        total = sum(parameter.numel() << parameter.is_complex() for parameter in bucket.parameters())
        if value.numel() != total:
            raise FunctionError(
                f"the Future of {self.title} holds {value.numel()} elements, the bucket has {total} "
                f"({self.describe(bucket)}); it must hold the reduced flat tensor"
            )
        if value is not bucket.buffer():
            bucket.set_buffer(value)


def _differ(tensor: Tensor, memory: Tensor) -> bool:
    """Whether ``tensor`` differs from ``memory`` in shape or strides."""
    return tensor.shape != memory.shape or tensor.stride() != memory.stride()


def _has_moved(tensor: Tensor, memory: Tensor, bucket: GradBucket) -> bool:
    """Whether ``tensor`` is neither where it was, in ``memory``, nor in the buffer of ``bucket``."""
    flat, address = bucket.buffer(), tensor.data_ptr()
    start = flat.data_ptr()
    return tensor.numel() > 0 and address != memory.data_ptr() and not start <= address < start + flat.nbytes


def _can_be_given(hook: CommHook, state: object, parent: ProcessGroup) -> bool:
    """Whether ``hook`` is one of torch's that do one all-reduce, and ``state`` a group of the ranks of ``parent``."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    single = (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)
    group = default_group() if state is None else state
    if not any(hook is one for one in single) or not isinstance(group, ProcessGroup):
        return False
    return dist.get_process_group_ranks(group) == dist.get_process_group_ranks(parent)


def _groups_in(state: object) -> list[ProcessGroup]:
    """The groups in which a hook of torch's kind with this state may communicate."""
    found = [one for one in (state, *attributes_of(state)) if isinstance(one, ProcessGroup)]
    return found or ([default_group()] if dist.is_initialized() else [])


def call_sync_hooks(hooks: Mapping[int, SyncHook], wrapper: object, rank: int) -> None:
    """Call hooks of pytorch-pfn-extras' kind; an error gets a note with the hook and the rank."""
    for hook in list(hooks.values()):  # a hook may remove itself
        try:
            hook(wrapper)
        except Exception as error:
            annotate(error, f"in hook {name_of(hook)} on rank {rank}, before gradients are synchronized")
            raise


def refuse_late(groups: Groups, title: str, seconds: float) -> None:
    """Raise if the Future of a function has taken ``seconds``, by which messages that take so long have raised."""
    limit = groups.timeout_seconds
    if seconds > limit + _LATER_SECONDS:
        raise FunctionError(
            f"what {title} returned is not done after the group's timeout of {limit:g} s: a Future must be completed "
            "whatever happens, as by set_exception()"
        )


def annotate(error: Exception, note: str) -> None:
    """Add ``note`` to ``error``, if this Python can do that."""
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(note)
