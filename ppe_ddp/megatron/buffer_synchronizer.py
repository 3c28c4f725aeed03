"""The synchronizer of gradients in buffers: results are waited for after backward, in ``finish_grad_sync()``.

    backward                mask ── buckets ── vote             called by the reducer
    finish_grad_sync()      results ── second round ── errors

Several reduction groups (dense parameters, experts) exchange masks one after another, and all their buckets are
launched in one order that every rank has: no rank waits in one group for a rank that waits for it in another.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch

from ppe_ddp.engine.backward import Phase
from ppe_ddp.engine.bucket import BucketContext, buckets_of_plans
from ppe_ddp.engine.completion import Completion
from ppe_ddp.engine.launch_schedule import LaunchSchedule
from ppe_ddp.engine.memory import MemoryPool, allocator
from ppe_ddp.engine.peer_processes import Activity
from ppe_ddp.engine.record import EventLog
from ppe_ddp.engine.synchronizer import RAISED, Synchronizer
from ppe_ddp.engine.unused_forwards import DroppedForwards, pack_status
from ppe_ddp.megatron.buffer_bucket import is_finite
from ppe_ddp.megatron.step_status import RankStatus, StepStatus

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor, nn

    from ppe_ddp.engine.backward import Backward
    from ppe_ddp.engine.bucket import Bucket
    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.engine.gradients import GradientStreams
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.mask_exchange import MaskExchange
    from ppe_ddp.engine.module import ModuleState
    from ppe_ddp.engine.plan import ParameterSpec
    from ppe_ddp.errors import PpeDdpError
    from ppe_ddp.megatron.buffer_bucket import BufferBucket
    from ppe_ddp.megatron.buffer_layout import BufferLayout
    from ppe_ddp.megatron.main_gradients import MainGradients
    from ppe_ddp.megatron.reduction_group import ReductionGroup


class BufferSynchronizer(Synchronizer):
    """Synchronizes the gradients in the buffers of one module.

    Args:
        reduction_groups: The parameters that are averaged together, with their process groups.
        layout: The layout of the buffers.
        buckets: The buckets of the layout.
        gradients: The accumulated gradients.
        specs: Of all parameters, with the dtypes of ``main_grad``.
        parameters: All parameters of the module.
        check_finite: Whether to look for NaN and infinity before gradients are sent.

    Attributes:
        is_sent: Whether the gradients were sent since the last ``finish_grad_sync()`` or ``zero_grad_buffer()``, and
            nothing was accumulated after them. That a rank has waited for the results makes no difference: a rank that
            looks at its gradients must not be the only one to send them again.
    """

    empties_grad = True

    def __init__(
        self,
        reduction_groups: Sequence[ReductionGroup],
        layout: BufferLayout,
        buckets: Sequence[BufferBucket],
        gradients: MainGradients,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[nn.Parameter],
        *,
        check_finite: bool,
    ) -> None:
        super().__init__()
        self._reduction_groups = reduction_groups
        self._dropped_forwards = [DroppedForwards(reduction_group.groups.rank) for reduction_group in reduction_groups]
        self._layout = layout
        self._buckets = buckets
        self._specs = specs
        self._parameters = parameters
        self._check_finite = check_finite
        self._exchanges: list[MaskExchange] = []
        self._pending_results: Completion | None = None
        self._unfinished: Backward | None = None
        self._holds_averages = False
        self.is_sent = False
        self.gradients = gradients
        self.step_status = StepStatus(reduction_groups)

    # ------------------------------------------------------------------ what the reducer asks for

    @property
    def groups(self) -> Sequence[Groups]:
        """The process groups of all reduction groups."""
        return [reduction_group.groups for reduction_group in self._reduction_groups]

    @property
    def sends_nothing(self) -> bool:
        """Never: also one rank alone has its reduce function called."""
        return False

    @property
    def unfinished(self) -> Backward | None:
        """The backward whose results :meth:`wait_for_results` has to wait for, if they have not failed."""
        backward = self._unfinished
        return None if backward is None or backward.phase is Phase.FAILED else backward

    @property
    def launch_triggers(self) -> Collection[int]:
        """The last parameter of each bucket, and some in between."""
        return self._layout.launch_triggers

    @property
    def nbytes(self) -> int:
        """The size of the gradient buffers, and of what they are all-reduced in."""
        buffers = sum(bucket.extent.padded * bucket.extent.plan.dtype.itemsize for bucket in self._buckets)
        return buffers + sum(bucket.message_nbytes for bucket in self._buckets)

    def use_module(self, module_state: ModuleState, streams: GradientStreams | None) -> None:
        """Set the streams; the buffers belong to one module state."""
        self.gradients.streams = streams

    def on_accumulated(self, indices: Sequence[int]) -> None:
        """Add these gradients to ``main_grad``; waits for pending results first."""
        self.is_sent = False
        if self._pending_results is not None:
            self.wait_for_results()
        if self._holds_averages:
            with torch.no_grad():
                for i in indices:
                    if i in self._layout.bucket_of:
                        self._buckets[self._layout.bucket_of[i]].reopen()
        self.gradients.add(indices)

    def start_negotiation(self, backward: Backward) -> None:
        """Start to agree on which gradients exist: those expected in this backward, and those accumulated before."""
        self.wait_for_results()
        self.step_status.forget_failure()
        self.renew()
        local = self.gradients.existing(backward.waiting or bytes(len(self._parameters)))
        backward.recorder.local = bytes(local)
        self._exchanges = [
            reduction_group.negotiation.start(reduction_group.local(local), RankStatus.FINE)
            for reduction_group in self._reduction_groups
        ]
        backward.recorder.asked_at = perf_counter_ns()
        backward.start_negotiating()

    def is_agreed(self, backward: Backward) -> bool:
        """Whether the agreed masks of all reduction groups have arrived."""
        return all(exchange.done() for exchange in self._exchanges)

    def make_schedule(self, backward: Backward) -> LaunchSchedule[BufferBucket]:
        """Wait for the agreed masks, and make the schedule that launches their buckets."""
        present = self._answers(self._exchanges, backward.recorder.local)
        backward.recorder.control_nbytes += sum(exchange.nbytes for exchange in self._exchanges)
        backward.recorder.agreed = bytes(present)
        backward.recorder.agreed_at = perf_counter_ns()
        self._note_averaged(present)
        waiting = backward.waiting or bytes(len(self._parameters))
        plan = self._layout.plan(bytes(present))
        buckets = [self._buckets[bucket.index] for bucket in plan.buckets]
        schedule = LaunchSchedule(plan, buckets, waiting, self._prepare, may_launch=self._may_launch)
        backward.start_launching(schedule)
        return schedule

    def complete(self, backward: Backward) -> Steps:
        """Launch the remaining buckets and start the vote; :meth:`wait_for_results` does the rest."""
        if backward.schedule is None:
            for exchange in self._exchanges:
                yield exchange.done
        schedule = backward.schedule or self.make_schedule(backward)
        yield from schedule.launch_all()
        backward.start_finishing()
        backward.late = late = self.gradients.take(backward.unexpected)
        if self._check_finite:
            self.step_status.note_non_finite(
                self._specs[i].name for i, gradient in late.items() if not is_finite(gradient)
            )
        status = RankStatus.ABORTED if backward.aborted else self.step_status.status
        mask = bytearray(len(self._parameters))
        for i in late:
            mask[i] = 1
        word = pack_status(status, backward.dropped)
        backward.recorder.vote_at = perf_counter_ns()
        votes = [
            reduction_group.negotiation.start(reduction_group.local(mask), word, is_vote=True)
            for reduction_group in self._reduction_groups
        ]
        if EventLog.current is not None:
            for vote in votes:
                vote.watch(backward.recorder.note_vote)
        pending = _PendingResults(backward, schedule, votes, late)
        self._pending_results = Completion(
            self._finish_results(pending), self._reduction_groups[0].groups, threading.RLock()
        )
        self._pending_results.keep_open()
        self.is_sent = True
        self._unfinished = backward
        self.gradients.is_dirty = False
        backward.averaged = bytes(len(self._parameters))  # no hook of the user's may step yet

    def fail(self, backward: Backward, error: BaseException) -> PpeDdpError | None:
        """End the communication for all ranks; ``finish_grad_sync()`` will tell of it, and begin nothing."""
        self.is_sent = False
        instead = super().fail(backward, error)
        self.step_status.note_failure(instead or error)
        return instead

    def abort(self, backward: Backward, reason: str = RAISED) -> bool:
        """End the communication for all ranks at once, also where only results are still waited for."""
        is_unfinished = backward is self._unfinished
        has_ended = super().abort(backward, reason)
        if has_ended and is_unfinished:
            completion = self._forget_pending_results()
            assert completion is not None
            completion.close()
            self.is_sent = False
        return has_ended

    def put_back(self, backward: Backward) -> None:
        """Abandon what is in flight, and make ``main_grad`` all that this rank has computed, late gradients too."""
        for reduction_group in self._reduction_groups:
            reduction_group.reduction.abandon()
        for bucket in self._buckets:
            bucket.put_back()
        self._exchanges = []
        self.gradients.add(range(len(self._parameters)))  # those that have arrived since the last launch
        self.gradients.put_back(backward.late)
        backward.late = {}
        backward.forget_rounds()

    # ------------------------------------------------------------------ afterwards

    @property
    def has_pending_results(self) -> bool:
        """Whether there are results that :meth:`wait_for_results` has to wait for."""
        return self._pending_results is not None

    def wait_for_results(self) -> None:
        """Wait for the results of the last synchronized backward, with a second round if the ranks voted so.

        Errors of any rank are kept in ``step_status``.
        """
        completion = self._forget_pending_results()
        if completion is not None:
            begin = perf_counter_ns()
            completion.finish()
            if EventLog.current is not None:
                EventLog.current.add("wait", "for results", begin)

    def _forget_pending_results(self) -> Completion | None:
        completion, self._pending_results, self._unfinished = self._pending_results, None, None
        return completion

    def _finish_results(self, pending: _PendingResults) -> Steps:
        try:
            yield from self._take_results(pending)
        except GeneratorExit:  # the step has failed before
            raise
        except BaseException as error:
            peer_error = self.fail(pending.backward, error)
            if peer_error is None:
                raise
            raise peer_error from error

    def _take_results(self, pending: _PendingResults) -> Steps:
        self.gradients.revision += 1
        yield from pending.schedule.finish()
        for vote in pending.votes:
            yield vote.done
        outcomes = [
            reduction_group.negotiation.finish(vote, b"")
            for reduction_group, vote in zip(self._reduction_groups, pending.votes, strict=True)
        ]
        repairs: list[tuple[ReductionGroup, LaunchSchedule[Bucket]]] = []
        for reduction_group, outcome in zip(self._reduction_groups, outcomes, strict=True):
            if any(outcome.mask):
                repairs.append((reduction_group, self._second_round(pending, reduction_group, outcome.mask)))
                yield from repairs[-1][1].launch_all()
                yield from repairs[-1][1].finish()
        statuses = [
            dropped.unpack(outcome.statuses) for dropped, outcome in zip(self._dropped_forwards, outcomes, strict=True)
        ]
        self.step_status.collect(statuses, aborted_here=pending.backward.aborted)
        for reduction_group in self._reduction_groups:
            if any(map(any, statuses)):
                reduction_group.reduction.abandon()
            else:
                reduction_group.reduction.commit()
        pending.schedule.hand_over(lambda _indices, _averages: None)  # they are in main_grad
        for reduction_group, second in repairs:
            second.hand_over(partial(self._add_averages, reduction_group))
        self._holds_averages = True
        pending.backward.recorder.done_at = perf_counter_ns()
        for groups in self.groups:
            groups.note(Activity.DONE)

    def scale(self, factor: float | Tensor) -> None:
        """The buffers were multiplied by ``factor``."""
        for bucket in self._buckets:
            bucket.scale(factor)

    def clear(self) -> None:
        """The buffers were zeroed."""
        for bucket in self._buckets:
            bucket.reset()
        self._holds_averages = False
        self.gradients.forget()
        self.step_status = StepStatus(self._reduction_groups)

    def clear_some(self, indices: Sequence[int]) -> None:
        """Set the gradients of the parameters at ``indices`` to zero, after waiting for pending results."""
        self.wait_for_results()
        members: dict[int, list[int]] = {}
        for i in self.gradients.forget_some(indices):
            members.setdefault(self._layout.bucket_of[i], []).append(i)
        for number, of_bucket in members.items():
            self._buckets[number].clear(of_bucket)

    # ------------------------------------------------------------------ inside

    def _prepare(self, bucket: BufferBucket) -> None:
        groups = self._reduction_groups[bucket.extent.reduction_group].groups
        groups.note(Activity.BUCKET, bucket.plan.index)
        bucket.reopen()
        # A gradient that no rank expected waits for the second round, in which all ranks take part.
        self.gradients.add(i for i in bucket.extent.plan.members if self.gradients.averaged[i])
        if self._check_finite:
            self.step_status.note_non_finite(bucket.non_finite())

    def _may_launch(self) -> bool:
        probes = [reduction_group.reduction.may_launch for reduction_group in self._reduction_groups]
        return all(probe is None or probe() for probe in probes)

    def _answers(self, exchanges: Sequence[MaskExchange], local: bytes) -> bytearray:
        present = bytearray(len(self._parameters))
        for reduction_group, exchange in zip(self._reduction_groups, exchanges, strict=True):
            answer = reduction_group.negotiation.finish(exchange, reduction_group.local(local))
            for i, here in zip(reduction_group.indices, answer.mask, strict=True):
                present[i] = here
        return present

    def _note_averaged(self, present: bytes | bytearray) -> None:
        for i, here in enumerate(present):
            if here:
                self.gradients.averaged[i] = 1

    def _second_round(
        self, pending: _PendingResults, reduction_group: ReductionGroup, agreed: bytes
    ) -> LaunchSchedule[Bucket]:
        """The schedule that averages the late gradients: averaging is linear, so both averages can be added."""

        def prepare(bucket: Bucket) -> None:
            taken = [pending.late.get(reduction_group.indices[j]) for j in bucket.expected]
            bucket.hold([None if gradient is None else gradient * reduction_group.gain for gradient in taken])

        groups = reduction_group.groups
        parameters = [self._parameters[i] for i in reduction_group.indices]
        context = BucketContext(reduction_group.repairs.specs, parameters, groups, reduction_group.reduction)
        plan = reduction_group.repairs.plan(agreed)
        buckets = buckets_of_plans(context, MemoryPool(allocator(groups.buckets)))(plan)
        schedule = LaunchSchedule(plan, buckets, bytes(len(parameters)), prepare, repair=True)
        pending.backward.recorder.rounds.append(schedule.record)
        return schedule

    def _add_averages(self, reduction_group: ReductionGroup, members: Sequence[int], averages: list[Tensor]) -> None:
        """Add the averages of late gradients to ``main_grad``."""
        for j, average in zip(members, averages, strict=True):
            i = reduction_group.indices[j]
            self._buckets[self._layout.bucket_of[i]].add(i, average)
            self.gradients.averaged[i] = 1


@dataclass(frozen=True, eq=False)
class _PendingResults:
    """The results that :meth:`BufferSynchronizer.wait_for_results` has to wait for.

    Attributes:
        backward: Whose gradients these are.
        schedule: The buckets that were launched.
        votes: One a reduction group: the late gradients and the status of each rank.
        late: Gradients that arrived after their bucket was launched, or that no rank expected, by parameter index.
    """

    backward: Backward
    schedule: LaunchSchedule[BufferBucket]
    votes: list[MaskExchange]
    late: dict[int, Tensor]
