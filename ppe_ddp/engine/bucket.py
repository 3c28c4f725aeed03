"""The buckets of a plan, kept as long as the plan, their states in one backward, and the schedule that launches them.

    hold        takes this rank's gradients; .grad is None meanwhile
    launch      packs them into a buffer and starts its reduction; in plan order, when all have arrived
    finish      waits for the result
    averages    after all buckets have succeeded: one average a member
    put_back    after a failure: gives this rank's gradients back, as they were
    release     drops the references that belong to one backward

Names, parameters and layout are computed once. Buffers are borrowed for one backward only, because averages may be
views of them: another backward may use the same plan while the averages of the first are alive.

From ``hold`` on a gradient belongs to its bucket, and ``.grad`` is None. A gradient that arrives after that makes a
``.grad`` of its own instead of being added to a message in flight; the second round averages it. Nobody writes into
this rank's gradients before all buckets have succeeded, so a failure loses nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from time import perf_counter_ns
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup

from ppe_ddp.contracts import GradBucket, Waitable
from ppe_ddp.engine.completion import Steps
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.memory import REQUIRES_GRAD, BucketBuffers
from ppe_ddp.engine.plan import BucketPlan, ParameterSpec, Plan
from ppe_ddp.engine.record import BucketRecord, EventLog, RoundRecord, span, watch
from ppe_ddp.engine.reduction import Reduction
from ppe_ddp.scaling import scale
from ppe_ddp.torch_internals import EXISTS, is_future, sole_owner, storage_users
from ppe_ddp.waiting import Probe, probe

_SHAPE = attrgetter("shape")
_PLANS = 32  # that keep their buckets
# From this mean size of a gradient on, dividing while copying costs less than one more pass over the bucket.
_LARGE_BYTES = 16 << 10


@dataclass(frozen=True, eq=False)
class BucketContext:
    """The arguments that the buckets of all plans share."""

    specs: Sequence[ParameterSpec]  # of every parameter of the module
    parameters: Sequence[nn.Parameter]  # of the module
    groups: Groups
    reduction: Reduction


class Bucket(ABC):
    """A bucket of gradients that are reduced together.

    ``present`` has one byte a parameter: whether some rank has its gradient. None stands for all members.
    """

    def __init__(self, plan: BucketPlan, context: BucketContext, present: bytes | None = None) -> None:
        members = plan.members
        self.plan = plan
        self.specs = [context.specs[i] for i in members]
        self.parameters = [context.parameters[i] for i in members]
        self.names = tuple(spec.name for spec in self.specs)
        self.nbytes = plan.nbytes  # what this rank sends
        # When the last launch had packed the gradients, by ``perf_counter_ns()``; 0 if nothing was packed.
        self.packed_at = 0
        # The members of which some rank has a gradient.
        self.expected = members if present is None else tuple(i for i in members if present[i])
        # Whether all members are expected. Only a fixed bucket may have others.
        self.is_exact = len(self.expected) == len(members)
        # This rank's gradients, one a member, or None; empty between backwards. Nobody writes into them before
        # :meth:`averages`.
        self.gradients: list[Tensor | None] = []
        self.pending: Waitable | None = None  # the reduction in flight
        self.weight = 1.0  # factor of this rank's gradients before they are averaged
        self._views = self._is_received = False
        self._in_place: Collection[int] = ()

    def hold(
        self,
        gradients: list[Tensor | None],
        *,
        views: bool = False,
        in_place: Collection[int] = (),
        weight: float | None = None,
        is_received: bool = False,
    ) -> None:
        """Take this rank's gradients, one for each of :attr:`expected` or None, to be reduced by :meth:`launch`.

        With ``views`` the averages may be views of the buffer; without, those of parameters ``in_place`` are written
        into gradients in any memory, the others only where no other tensor has it. Gradients are multiplied by
        ``weight`` as they are packed. ``is_received`` says that another rank sends the whole buffer.
        """
        assert not self.gradients, f"bucket {self.plan.index} is under way already"
        if not self.is_exact:
            found = dict(zip(self.expected, gradients, strict=True))
            gradients = [found.get(i) for i in self.plan.members]
        self.gradients = gradients
        self._views, self._in_place, self._is_received = views, in_place, is_received
        self.weight = 1.0 if weight is None else weight

    def expected_of(self, averages: list[Tensor]) -> list[Tensor]:
        """Select the averages of the parameters in :attr:`expected` from one average a member."""
        expected = set(self.expected)
        return [average for i, average in zip(self.plan.members, averages, strict=True) if i in expected]

    @abstractmethod
    def launch(self, *, is_last: bool) -> None:
        """Pack the gradients and start their reduction; ``is_last`` if the function or hook gets no later bucket."""

    @abstractmethod
    def finish(self) -> Steps:
        """Wait for the result."""

    @abstractmethod
    def averages(self) -> list[Tensor]:
        """One average a member, to be set as ``.grad``; it may lie in this rank's own gradient tensor."""

    def done(self) -> bool:
        """Whether no reduction is in flight."""
        done = probe(self.pending)
        return self.pending is None or (done is not None and bool(done()))

    def check(self) -> None:  # noqa: B027  # most cannot know
        """Raise the error of the reduction, if it is known to have failed."""

    def wait(self) -> None:  # noqa: B027  # only buckets of a function or hook need it
        """Wait for the pending reduction; :meth:`finish` takes its result."""

    def give_back(self) -> list[tuple[int, Tensor]]:
        """Give this rank's gradients back as they were, by parameter index; the reduction goes on for other ranks."""
        pairs = zip(self.plan.members, self.gradients, strict=bool(self.gradients))
        kept = [(i, gradient) for i, gradient in pairs if gradient is not None]
        self.gradients = [None] * len(self.gradients)
        return kept

    def put_back(self) -> list[tuple[int, Tensor]]:
        """Abandon the reduction and give this rank's gradients back as they were, by parameter index."""
        kept = self.give_back()
        self.release()
        return kept

    def release(self) -> None:
        """Drop what belongs to one backward."""
        self.gradients = []
        self.pending = None


class DenseBucket(Bucket, ABC):
    """Dense gradients in one flat tensor, reduced by a function or hook; subclasses provide its memory."""

    def __init__(self, plan: BucketPlan, context: BucketContext, present: bytes | None = None) -> None:
        super().__init__(plan, context, present)
        self._reduction = context.reduction
        self._is_divided = context.reduction.takes_divided(plan.device)
        # Factor of the gradients as they are packed.
        self.factor = context.reduction.mean_factor if self._is_divided else 1.0
        self._sent: GradBucket | None = None
        self._flat: Tensor | None = None
        self._tensors: list[Tensor] = []

    @abstractmethod
    def _pack(self) -> tuple[Tensor, list[Tensor]]:
        """Return the flat tensor and a view of it for each member, which hold the gradients times :attr:`factor`."""

    def launch(self, *, is_last: bool) -> None:
        """Pack the gradients and pass them to the function or hook."""
        self._flat, self._tensors = self._pack()
        self.packed_at = perf_counter_ns()
        if self.plan.numel == 0:
            return
        reduction = self._reduction
        if reduction.is_plain_average:
            self.pending = reduction.start_average(self._flat, self.plan, self.names)
            return
        tensors, flat = self._tensors_for_user(*self._as_given())
        self._sent = GradBucket(
            tensors,
            flat,
            parameters=self.parameters,
            names=self.names,
            index=self.plan.index,
            is_last=is_last,
            is_divided=self._is_divided,
        )
        self.pending = reduction.start(self._sent)

    def _as_given(self) -> tuple[Tensor, list[Tensor]]:
        """The flat tensor and its views in the form in which the function or hook gets them."""
        assert self._flat is not None
        if self._reduction.takes_real and self._flat.is_complex():
            return torch.view_as_real(self._flat).view(-1), [*map(torch.view_as_real, self._tensors)]
        return self._flat, self._tensors

    def _tensors_for_user(self, flat: Tensor, tensors: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Aliases of the tensors for the user's function, so that a change of shape there does not change ours."""
        if not self._reduction.may_resize:
            return [tensor.detach() for tensor in tensors], flat.detach()
        copy = flat.clone()  # a hook that resizes the flat tensor must not overwrite the memory behind it
        base = flat.storage_offset()
        views = [copy.as_strided(t.shape, t.stride(), t.storage_offset() - base) for t in tensors]
        return views, copy

    def finish(self) -> Steps:
        """Wait for the result."""
        if self._reduction.is_plain_average:
            if self.pending is not None:
                yield self.done
                self._reduction.finish_average(self.pending, self.plan.device, self.names, self.plan.index)
                self.pending = None
            return
        if self.pending is not None:
            yield probe(self.pending)
        sent = self._sent  # read after the yield: an abandoned generator would keep it alive
        if sent is None:
            return
        flat, tensors = self._as_given()
        sent_nbytes = self._reduction.finish(sent, self.pending, tensors)
        self.nbytes = self.plan.nbytes if sent_nbytes is None else sent_nbytes
        self.pending = None
        result = sent.buffer()
        if result is not flat and (result.data_ptr() != flat.data_ptr() or result.dtype != flat.dtype):
            flat.copy_(result)

    def check(self) -> None:
        """Raise the error of the reduction, if it is known to have failed."""
        pending, sent = self.pending, self._sent
        if sent is None or not is_future(pending) or self.plan.device.type != "cpu":
            return
        if pending.done():
            self._reduction.wait(sent, pending)

    def wait(self) -> None:
        """Wait for the pending reduction."""
        if self.pending is not None and self._sent is not None:
            self._reduction.wait(self._sent, self.pending)

    def release(self) -> None:
        """Drop what belongs to one backward; a reference to a slot would mark the buffer as in use."""
        self.gradients = []
        self.pending = self._sent = self._flat = None
        self._tensors = []

    def _copy_to_gradients(self) -> list[Tensor]:
        """Copy each average into this rank's own gradient tensor, if that can hold it, else into a new tensor."""
        results: list[Tensor] = []
        moved_to, moved_from = [], []
        for i, gradient, tensor in zip(self.plan.members, self.gradients, self._tensors, strict=True):
            if gradient is None or not _can_hold(gradient, tensor, of_others=i in self._in_place):
                results.append(tensor.clone())  # the buffer will be reused
                continue
            results.append(gradient)
            moved_to.append(gradient)
            moved_from.append(tensor)
        if moved_to:
            torch._foreach_copy_(moved_to, moved_from)
        return results


class PackedBucket(DenseBucket):
    """Gradients packed into a buffer, which ``pool`` lends."""

    def __init__(
        self, plan: BucketPlan, context: BucketContext, present: bytes | None = None, *, pool: BucketBuffers
    ) -> None:
        super().__init__(plan, context, present)
        self._pool = pool
        self._shapes = [spec.shape for spec in self.specs]
        self._is_fused = plan.nbytes >= _LARGE_BYTES * len(plan.members)

    def _pack(self) -> tuple[Tensor, list[Tensor]]:
        """Copy the gradients into a free buffer; a gradient may still be a view of the previous step's buffer."""
        gradients, factor = self.gradients, self.factor * self.weight
        if self._views and any(map(REQUIRES_GRAD, filter(EXISTS, gradients))):
            self._views = False  # a gradient with a graph of its own (create_graph) keeps its tensor
        buffer = self._pool.buffer(self.plan, self.specs, self.parameters)
        if self._is_received:
            pass  # another rank's values overwrite all of it
        elif self._is_fused:
            fill(buffer.slots, gradients, factor)
        else:
            if not (buffer.runs and concatenate(buffer.runs, self._shapes, gradients)):
                fill(buffer.slots, gradients, 1.0)
            if factor != 1.0:
                buffer.flat.mul_(factor)
        return buffer.flat, list(buffer.slots)  # these references mark the buffer as in use

    def averages(self) -> list[Tensor]:
        """One average a member: views of the buffer, or copies in this rank's own gradient tensors."""
        return self._tensors if self._views else self._copy_to_gradients()


def fill(slots: Sequence[Tensor], gradients: Sequence[Tensor | None], factor: float) -> None:
    """Set each slot to ``factor`` times its gradient, or to zero if there is none."""
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) == len(slots):
        filled = list(slots)
    else:
        pairs = list(zip(slots, gradients, strict=True))
        filled = [slot for slot, gradient in pairs if gradient is not None]
        torch._foreach_zero_([slot for slot, gradient in pairs if gradient is None])
    if factor != 1.0:
        for slot, gradient in zip(filled, present, strict=True):
            scale(slot, gradient, factor)
    elif present:
        torch._foreach_copy_(filled, present)


def concatenate(
    runs: Sequence[tuple[int, Tensor]], shapes: list[tuple[int, ...]], gradients: Sequence[Tensor | None]
) -> bool:
    """Concatenate the gradients into ``runs`` and return True; do nothing and return False if their shapes differ.

    For small gradients this takes a quarter of the time of one copy each. It requires equal ``shapes``: a gradient of
    another shape (``.grad.data = ...``) would silently move those behind it.
    """
    present: list[Tensor] = list(filter(EXISTS, gradients))
    if list(map(_SHAPE, present)) != shapes:
        return False
    start = 0
    for count, run in runs:
        torch.cat(present[start : start + count], out=run)
        start += count
    return True


def _can_hold(gradient: Tensor, average: Tensor, *, of_others: bool) -> bool:
    """Whether ``average`` can be copied into ``gradient``, which the user may have replaced (``.grad.data = …``).

    Autograd may have given several gradients one memory; that ``of_others`` may be written all the same.
    """
    if gradient.dtype is not average.dtype or gradient.device != average.device or gradient.is_inference():
        return False
    if gradient.is_conj() or gradient.is_neg() or not (gradient.is_contiguous() or 0 not in gradient.stride()):
        return False
    return of_others or storage_users(gradient) == 1


def reducible_in_place(gradient: Tensor, spec: ParameterSpec) -> bool:
    """Whether the memory of ``gradient`` may be handed to the transport without a copy.

    Autograd can use one storage for the gradients of two parameters, or go on computing with it. So the storage must
    have no other user.
    """
    return (
        gradient.shape == spec.shape
        and gradient.dtype == spec.dtype
        and gradient.device == spec.device
        and gradient.stride() == spec.stride
        and not gradient.requires_grad
        and not gradient.is_neg()
        and not gradient.is_conj()
        and not gradient.is_inference()
        and sole_owner(gradient)
    )


class SparseBucket(Bucket):
    """A sparse gradient. It communicates only in :meth:`finish`, when no function of the user's runs.

    The average is a coalesced sparse tensor over the rows that exist on any rank.
    """

    def __init__(self, plan: BucketPlan, context: BucketContext, present: bytes | None = None) -> None:
        super().__init__(plan, context, present)
        self._groups = context.groups
        self._reduction = context.reduction
        self._spec = self.specs[0]
        self._average: list[Tensor] = []

    def launch(self, *, is_last: bool) -> None:
        """Do nothing: see :meth:`finish`."""

    def finish(self) -> Steps:
        """All-gather indices and values over the ranks, and average."""
        groups = self._groups
        local = self._local()
        indices, values = local.indices(), local.values()
        if self.weight != 1.0:
            values = values * self.weight
        self.nbytes = indices.nbytes + values.nbytes
        if groups.world_size == 1:
            self._take(self._of(indices, values))
            return
        # Over the control group, on CPUs, so that the host does not wait for a GPU.
        parts = yield from _gathered(torch.tensor([indices.shape[1]], device="cpu"), groups.control, groups)
        counts = [int(part) for part in parts]
        longest = max(counts)
        if longest:
            rows = yield from _gathered_rows(indices.t().contiguous(), counts, longest, groups)
            indices = rows.t()
            values = yield from _gathered_rows(values.contiguous(), counts, longest, groups)
        average = self._of(indices, values)
        scale(average.values(), average.values(), self._reduction.mean_factor)
        self._take(average)

    def _take(self, average: Tensor) -> None:
        self._reduction.note_sparse(self._spec.name, average)
        self._average = [average]

    def averages(self) -> list[Tensor]:
        """The average."""
        return self._average

    def release(self) -> None:
        """Forget what belongs to one backward."""
        super().release()
        self._average = []

    def _of(self, indices: Tensor, values: Tensor) -> Tensor:
        """Make a coalesced gradient. Its indices come from existing sparse tensors, so they are not checked again."""
        return torch.sparse_coo_tensor(
            indices, values, self._spec.shape, check_invariants=False, device=values.device
        ).coalesce()

    def _local(self) -> Tensor:
        gradient = self.gradients[0]
        spec = self._spec
        if gradient is None:
            rows = (0, *spec.shape[1:])
            return torch.sparse_coo_tensor(
                torch.empty((1, 0), dtype=torch.int64, device=spec.device),
                torch.empty(rows, dtype=spec.dtype, device=spec.device),
                spec.shape,
                is_coalesced=True,
                check_invariants=False,
                device=spec.device,
            )
        if not gradient.is_sparse:  # the weight was used densely as well
            return gradient.to_sparse(1).coalesce()
        return gradient.coalesce()


def _gathered(tensor: Tensor, group: ProcessGroup, groups: Groups) -> Generator[Probe | None, None, list[Tensor]]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(parts, tensor, group=group, async_op=True)
    yield probe(work)
    groups.failures.wait(work, tensor.device)
    return parts


def _gathered_rows(
    rows: Tensor, counts: list[int], longest: int, groups: Groups
) -> Generator[Probe | None, None, Tensor]:
    """All-gather tensors of different lengths along dimension 0."""
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    parts = yield from _gathered(padded, groups.buckets, groups)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def buckets_of_plans(
    context: BucketContext,
    pool: BucketBuffers,
    scattered: Callable[[BucketPlan, BucketContext, bytes], Bucket] | None = None,
) -> Callable[[Plan], Sequence[Bucket]]:
    """Return a function that makes the buckets of a plan, and caches them for the most recently used plans.

    ``pool`` lends memory to packed buckets. ``scattered`` makes reduce-scattered buckets of dense gradients; without it
    they are all-reduced.
    """

    def made(plan: BucketPlan, present: bytes) -> Bucket:
        if plan.sparse:
            return SparseBucket(plan, context, present)
        if scattered is not None:
            return scattered(plan, context, present)
        return PackedBucket(plan, context, present, pool=pool)

    return lru_cache(_PLANS)(lambda plan: [made(bucket, plan.present) for bucket in plan.buckets])


B = TypeVar("B", bound=Bucket)


class LaunchSchedule(Generic[B]):
    """Launches each bucket of a plan when its gradients have arrived and the bucket before it has been launched.

    Args:
        waiting: One byte a parameter: the number of its gradients that are expected here and have not arrived.
        prepare: Called with a bucket right before its launch, to give it this rank's gradients.
        one_at_a_time: Whether a bucket must not be launched before the previous one is complete.
        may_launch: Tells whether a bucket can be launched without waiting; None if it always can.
        repair: Whether this is a second round.
        ranges: Whether to mark launches for torch's profiler.
    """

    def __init__(
        self,
        plan: Plan,
        buckets: Sequence[B],
        waiting: bytes | bytearray,
        prepare: Callable[[B], None],
        *,
        one_at_a_time: bool = False,
        may_launch: Probe | None = None,
        repair: bool = False,
        ranges: bool = False,
    ) -> None:
        self.plan = plan
        self.buckets = buckets
        self.record = RoundRecord(plan, repair)  # clock readings
        self._prepare = prepare
        self._one_at_a_time = one_at_a_time
        self._may_launch = may_launch
        self._ranges = ranges
        self._gone = 0
        self._previous: B | None = None
        self._missing: list[int] = []  # by bucket, how many gradients it waits for
        for bucket in plan.buckets:
            self._missing.append(sum(map(waiting.__getitem__, bucket.members)))
            self.record.buckets.append(BucketRecord())

    def mark_arrived(self, indices: Sequence[int]) -> None:
        """Count the gradients of these parameters as arrived."""
        for k, count in Counter(map(self.plan.bucket_of.get, indices)).items():
            if k is None:  # only this rank has these, and its losses weigh nothing
                continue
            self._missing[k] -= count
            if self._missing[k] == 0:
                self.record.buckets[k].ready = perf_counter_ns()

    def launch_ready(self) -> None:
        """Launch buckets in order, up to the first that still waits for a gradient of this rank."""
        while self._gone < len(self.buckets) and self._missing[self._gone] <= 0:
            if self._one_at_a_time and not self.done():
                break
            if self._may_launch is not None and not self._may_launch():
                break
            with torch.no_grad():
                self._launch()

    def launch_all(self) -> Steps:
        """Launch the remaining buckets, as steps; called after the last gradient has arrived."""
        while self._gone < len(self.buckets):
            previous = self._previous
            if self._one_at_a_time and previous is not None:
                if previous.pending is not None:
                    yield probe(previous.pending)
                previous.wait()
            if self._may_launch is not None and not self._may_launch():
                yield self._may_launch
            self._launch()

    def _launch(self) -> None:
        k = self._gone
        bucket, record = self.buckets[k], self.record.buckets[k]
        self._gone += 1
        record.launch = perf_counter_ns()
        if self._previous is not None:
            # If the previous bucket failed here and this one were sent, the other ranks would match it with that one.
            self._previous.check()
        self._prepare(bucket)
        if not bucket.plan.sparse:
            self._previous = bucket
        if self._ranges:
            with span(f"launch[{k}]"):
                bucket.launch(is_last=k == self.plan.last)
        else:
            bucket.launch(is_last=k == self.plan.last)
        record.launched = perf_counter_ns()
        record.packed, record.nbytes = bucket.packed_at, bucket.nbytes
        if EventLog.current is not None:
            pending = bucket.pending
            record.goes_in_turns = getattr(pending, "goes_in_turns", False)
            if pending is not None:
                watch(pending, record.note_arrival)
            elif not bucket.plan.sparse:
                record.arrived = record.launched

    def done(self) -> bool:
        """Whether all launched buckets are complete."""
        return all(bucket.done() for bucket in self.buckets[: self._gone])

    def finish(self) -> Steps:
        """Wait for the buckets in order, as steps. Sparse buckets come last, since they communicate only now."""
        for is_sparse in (False, True):
            for bucket, record in zip(self.buckets, self.record.buckets, strict=True):
                if bucket.plan.sparse is not is_sparse:
                    continue
                yield from bucket.finish()
                record.done, record.nbytes = perf_counter_ns(), bucket.nbytes

    @property
    def held(self) -> set[int]:
        """The parameters of which this rank has given gradients to launched buckets."""
        gone = self.buckets[: self._gone]
        pairs = (pair for bucket in gone for pair in zip(bucket.plan.members, bucket.gradients, strict=False))
        return {i for i, gradient in pairs if gradient is not None}

    def hand_over(
        self,
        take: Callable[[Sequence[int], list[Tensor]], None],
        factors: Mapping[int, float] | None = None,
        but: Collection[int] = (),
    ) -> None:
        """Call ``take(parameter indices, averages)`` for each bucket; called when all buckets have succeeded.

        Averages are first multiplied by ``factors``, by parameter index. The parameters in ``but`` are left out.
        An error or interrupt is raised when all buckets are handed over: the other ranks have these averages.
        """
        first_error: BaseException | None = None
        for bucket in self.buckets:
            try:
                averages, expected = bucket.averages(), bucket.expected
                averages = averages if bucket.is_exact else bucket.expected_of(averages)
                if but:
                    averages = [average for i, average in zip(expected, averages, strict=True) if i not in but]
                    expected = tuple(i for i in expected if i not in but)
                if factors:
                    for i, average in zip(expected, averages, strict=True):
                        scale(average, average, factors.get(i, 1.0))
                bucket.release()  # else put_back() would add this rank's gradients to averages
                take(expected, averages)
            except BaseException as error:
                first_error = first_error or error
        self._previous = None
        if first_error is not None:
            try:
                raise first_error
            finally:
                del first_error  # a reference cycle with this frame would keep the averages

    def give_back(self) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's gradients as they were, by parameter index; the reductions go on."""
        for bucket in self.buckets[: self._gone]:
            yield from bucket.give_back()

    def put_back(self) -> Iterator[tuple[int, Tensor]]:
        """Abandon the launched buckets, and yield this rank's gradients as they were, by parameter index."""
        for bucket in self.buckets[: self._gone]:
            yield from bucket.put_back()

    def release(self) -> None:
        """Let the buckets drop what belongs to this backward."""
        for bucket in self.buckets:
            bucket.release()
        self._previous = None
