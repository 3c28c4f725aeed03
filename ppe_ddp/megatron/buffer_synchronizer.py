"""The synchronizer of gradients in buffers, which waits for results after backward, in ``finish_grad_sync()``.

    backward                mask ── buckets ── vote             called by the reducer
    finish_grad_sync()      results ── second round ── errors

Several reduction groups (dense parameters, experts) exchange masks one after another, and launch all their buckets in
one order that is the same on every rank. So no rank waits in one group for a rank that waits for it in another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from time import perf_counter_ns

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup

from ppe_ddp.backends.json_collectives import all_gather_json
from ppe_ddp.backends.memory_pool import MemoryPool
from ppe_ddp.engine.backward import RAISED, Backward, Phase, Synchronizer
from ppe_ddp.engine.bucket import Bucket, BucketContext, LaunchSchedule, buckets_of_plans
from ppe_ddp.engine.completion import Completion, ResultSteps, Steps, run
from ppe_ddp.engine.failures import FINALIZE, aborted_error, reason_of
from ppe_ddp.engine.grad_hooks import pack_status
from ppe_ddp.engine.gradients import NON_FINITE, FiniteCheck, GradientStreams
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.mask_exchange import MaskExchange
from ppe_ddp.engine.memory import BucketBuffers, allocator
from ppe_ddp.engine.module import ModuleState, check_apart, refuse_distributed
from ppe_ddp.engine.negotiation import all_reduced, await_all
from ppe_ddp.engine.peer_processes import Activity
from ppe_ddp.engine.record import EventLog
from ppe_ddp.engine.zero.shard_collectives import HALVES, ReduceScatter
from ppe_ddp.errors import (
    AbortedError,
    CommunicationError,
    DisagreementError,
    PeerAbortedError,
    PpeDdpError,
    UnusableError,
)
from ppe_ddp.functions import own_function
from ppe_ddp.megatron.config import Setup
from ppe_ddp.megatron.gradient_buffers import (
    BufferBucket,
    BufferKind,
    Item,
    MainGradients,
    ParamAndGradBuffer,
    ReductionGroup,
    lay_out,
)
from ppe_ddp.megatron.parallel_groups import CopiesOfParameters, ModelParallel, needs_own_bucket
from ppe_ddp.waiting import probe

logger = logging.getLogger("ppe_ddp")

_ABORTED = 1  # the bit of a rank's status for a backward that has raised, beside NON_FINITE
_ALIGNED = 8  # elements, so that a rank's share starts at a multiple of 16 bytes
_ALIGNED_FOR_NCCL = 1 << 16


class BufferSynchronizer(Synchronizer):
    """Synchronizes the gradient buffers of one module. All ranks must make theirs together.

    ``is_sent`` says that the gradients were sent since the last ``finish_grad_sync()`` or ``zero_grad_buffer()``, and
    that none was accumulated after that. Waiting for results leaves it true: otherwise a rank that reads its gradients
    would send them again, as the only one.
    """

    empties_grad = tells_later = True

    def __init__(self, setup: Setup, default_group: ProcessGroup, *, sums: bool, bucket_size: int | None) -> None:
        config = setup.ddp_config
        setup.groups.check(default_group)
        self.module_state = ModuleState(setup.module)
        tensors = self.module_state.distributed_tensors()
        refuse_distributed(tensors, "ppe_ddp.megatron", "use plain tensors, and ParallelGroups.from_mesh()")
        if config.use_distributed_optimizer:
            check_apart(self.module_state)
        super().__init__(_duplicates(setup, default_group, self.module_state))
        self._names, self._parameters = self.module_state.names, self.module_state.parameters
        self.model_parallel = ModelParallel(setup.groups, default_group)
        self.copies = CopiesOfParameters(setup.module, setup.config, self.groups[0], setup.groups, self.model_parallel)
        fp32 = config.grad_reduce_in_fp32
        self.specs = [  # of main_grad: dense
            replace(spec, dtype=torch.float32 if fp32 and spec.dtype in HALVES else spec.dtype, sparse=False)
            for spec in self.module_state.specs
        ]
        self.reduction_groups = self._make_reduction_groups(setup, sums=sums)
        self.negotiations = [group.negotiation for group in self.reduction_groups]
        aligned = _ALIGNED_FOR_NCCL if config.pad_buckets_for_high_nccl_busbw else _ALIGNED
        divisors = [groups.world_size * aligned for groups in self.groups]
        self.layout = lay_out(self._items(setup), bucket_size=bucket_size, divisors=divisors)
        is_scattered = config.use_distributed_optimizer
        of_kinds = [self.groups[kind.reduction_group].buckets if is_scattered else None for kind in self.layout.kinds]
        self.buffers = [
            ParamAndGradBuffer(self.layout, number, self._parameters, self.specs, scattered_in=group)
            for number, group in enumerate(of_kinds)
        ]
        self.pool = MemoryPool(allocator(self.groups[0].buckets))
        self._buckets = self._make_buckets(scatter=is_scattered)
        main = {i: slot for b in self._buckets for i, slot in zip(b.plan.members, b.slots, strict=True)}
        self.gradients = MainGradients(self._parameters, main)
        self._averaged_before = self.gradients.averaged  # at the last agreed mask, to be restored if that step fails
        self._check_finite = config.check_for_nan_in_grad
        self._finite: FiniteCheck | None = None
        self.is_split = setup.groups.split_model
        self.failure: PpeDdpError | None = None  # in the communication of this step; other ranks do no more for it
        self.error: Exception | None = None  # of any rank, to be raised once
        self._pending_results: tuple[Completion, Backward] | None = None
        self._holds_averages = False
        self._counts_tokens = sums
        self.tokens = 0.0  # by which the gradients of the last step were divided
        self._numbers: list[Callable[[], Steps]] = []  # each sums one
        self.is_sent = False

    def __del__(self) -> None:
        # The reducer releases the first groups, those of the dense parameters.
        if getattr(self, "_pending_results", self) is None:
            for groups in self.groups[1:]:
                groups.release()

    def _make_reduction_groups(self, setup: Setup, *, sums: bool) -> list[ReductionGroup]:
        named = list(setup.module.named_parameters(remove_duplicate=False))
        options = f"{setup.ddp_config.described()}, disable_bucketing {setup.disable_bucketing}, sums {sums}"
        options = ", ".join(filter(None, (options, own_function(setup.reduce_function))))
        reduction_groups = []
        for number, groups in enumerate(self.groups):
            indices = [i for i, parameter in enumerate(self._parameters) if _reduction_group_of(parameter) == number]
            module_state = ModuleState(setup.module, [name for name, p in named if _reduction_group_of(p) != number])
            gain = groups.world_size / (1 if sums else self.groups[0].world_size)
            specs, function = [self.specs[i] for i in indices], setup.reduce_function
            reduction_groups.append(
                ReductionGroup(groups, module_state, indices, specs, function, gain=gain, options=options)
            )
        for groups in self.groups:
            groups.await_start()
        return reduction_groups

    def _items(self, setup: Setup) -> list[Item]:
        is_sharded = setup.ddp_config.use_distributed_optimizer
        alone = needs_own_bucket(setup.module, setup.config) if is_sharded else set()
        items = []
        for i, (parameter, spec) in enumerate(zip(self._parameters, self.specs, strict=True)):
            if parameter.requires_grad:
                kind = BufferKind(_reduction_group_of(parameter), parameter.dtype, spec.dtype, parameter.device)
                items.append(Item(i, parameter.numel(), kind, id(parameter) in alone, spec.is_row_major))
        return items

    def _make_buckets(self, *, scatter: bool) -> list[BufferBucket]:
        buckets = []
        for extent in self.layout.buckets:
            of_group = self.reduction_groups[extent.reduction_group]
            memory = extent.of(self.buffers[extent.buffer].grad_data)
            transport = ReduceScatter(of_group.groups, self.pool, memory.device) if scatter else None
            context = BucketContext(self.specs, self._parameters, of_group.groups, of_group.reduction)
            buckets.append(BufferBucket(extent, memory, context, gain=of_group.gain, scatter=transport))
        return buckets

    def place_of(self, index: int) -> str:
        """The place of a gradient and of this rank's share in a reduce-scattered bucket; empty if all-reduced."""
        extent = self.layout.buckets[self.layout.bucket_of[index]]
        if self.buffers[extent.buffer].param_data is None:
            return ""
        offset = extent.plan.offsets[extent.plan.members.index(index)]
        groups = self.reduction_groups[extent.reduction_group].groups
        return f", at {offset} of {extent.padded} in shares {groups.rank} of {groups.world_size}"

    # ------------------------------------------------------------------ called by the reducer

    @property
    def unfinished(self) -> Backward | None:
        """The backward whose results :meth:`wait_for_results` waits for, unless it has failed."""
        _, backward = self._pending_results or (None, None)
        return None if backward is None or backward.phase is Phase.FAILED else backward

    def use_module(self, module_state: ModuleState, streams: GradientStreams | None) -> None:
        """Set the streams; the parameters of the buffers never change."""
        self.gradients.streams = streams

    def takes(self, index: int) -> bool:
        """Whether this parameter has a place in the buffers."""
        return id(self.module_state.parameters[index]) in self.gradients.index

    def on_accumulated(self, indices: Sequence[int]) -> None:
        """Add these gradients to ``main_grad``; waits for pending results first."""
        self.is_sent = False
        if self._pending_results is not None:
            self._refuse_kernels(indices)
            self.wait_for_results()
        for bucket, i in self._reopen(indices):
            bucket.refuse_kernel(i, is_sent=False)
        self.gradients.add(indices)

    def _refuse_kernels(self, indices: Iterable[int]) -> None:
        """Raise if a kernel has added one of these gradients to ``main_grad``, which pending results overwrite."""
        try:
            for i in indices:
                if i in self.layout.bucket_of:
                    self._buckets[self.layout.bucket_of[i]].refuse_kernel(i, is_sent=True)
        except UnusableError:
            with suppress(PeerAbortedError, CommunicationError):
                self.wait_for_results()  # else the error would end this step on ranks that do not have them yet
            raise

    def _reopen(self, indices: Sequence[int]) -> list[tuple[BufferBucket, int]]:
        """Set averages aside before gradients are added to them; returns the buckets that had any, by parameter."""
        if not self._holds_averages:
            return []
        found = [(self._buckets[self.layout.bucket_of[i]], i) for i in indices if i in self.layout.bucket_of]
        with torch.no_grad():
            for bucket, _ in found:
                bucket.reopen()
        return found

    def must_renew(self) -> bool:
        """Whether connections are closed; waits for pending results first, as their failure would close them."""
        if self._pending_results is not None:
            self._refuse_kernels(self.gradients.fused)
        try:
            self.wait_for_results()
        except (PeerAbortedError, CommunicationError) as error:  # all ranks drop that step and go on with this one
            logger.warning("%s (It was never finished here.)", error)
            self.begin_step()
        return super().must_renew()

    def start_negotiation(self, backward: Backward) -> Collection[int]:
        """Start the mask exchange: for gradients expected in this backward, and those accumulated before."""
        if not backward.aborted:  # an aborted backward belongs to the failed step
            self.failure = None
        if self.weights.is_weighed:
            self.weights.settle()
            raise ValueError(
                f"rank {self.groups[0].rank}: ppe_ddp.weigh() is not for Megatron's wrapper: give its config "
                "calculate_per_token_loss=True, and finalize_model_grads() the number of tokens"
            )
        if self._check_finite:
            self._finite = FiniteCheck(self._names)
        local = self.gradients.existing(backward.waiting or bytes(len(self._parameters)))
        backward.recorder.local = bytes(local)
        self.asking = [groups.step for groups in self.groups]
        exchanges = [group.negotiation.start(group.local(local), 0) for group in self.reduction_groups]
        backward.negotiate(exchanges, {}, ())
        self.asking = ()
        return self.layout.launch_triggers

    def make_schedule(self, backward: Backward) -> LaunchSchedule[BufferBucket]:
        """Wait for the agreed masks, and make the schedule that launches their buckets."""
        recorder = backward.recorder
        present = bytearray(len(self._parameters))
        for group, exchange in zip(self.reduction_groups, backward.exchanges, strict=True):
            answer = group.negotiation.finish(exchange, group.local(recorder.local))
            for i, here in zip(group.indices, answer.mask, strict=True):
                present[i] = here
            recorder.control_nbytes += exchange.nbytes
        recorder.agreed, recorder.agreed_at = bytes(present), perf_counter_ns()
        self._averaged_before = self.gradients.averaged
        self.gradients.averaged = bytearray(map(max, self._averaged_before, present))
        waiting = backward.waiting or bytes(len(self._parameters))
        if self.gradients.fused:  # a kernel in a reentrant checkpoint must not add to main_grad while that is sent
            fused = self.gradients.fused.difference(backward.arrivals)
            backward.expect_more([i for i in fused if present[i] and not waiting[i]], 1)
        plan = self.layout.plan(recorder.agreed)
        buckets = [self._buckets[bucket.index] for bucket in plan.buckets]
        schedule = LaunchSchedule(plan, buckets, waiting, self._prepare, may_launch=self._may_launch)
        backward.add_round(schedule)
        return schedule

    def complete(self, backward: Backward) -> ResultSteps[bytes]:
        """Launch the remaining buckets and start the vote; :meth:`wait_for_results` does the rest."""
        if backward.schedule is None:
            for exchange in backward.exchanges:
                yield exchange.done
        schedule = backward.schedule or self.make_schedule(backward)
        yield from schedule.launch_all()
        backward.enter(Phase.FINISHING)
        for i in backward.unexpected:
            self._buckets[self.layout.bucket_of[i]].refuse_kernel(i, is_sent=bool(self.gradients.averaged[i]))
        late = self.gradients.take(backward.unexpected)
        backward.add_late(late)
        if self._finite is not None:
            self._finite.look(late.keys(), late.values())
        found = 0 if self._finite is None else self._finite.status
        mask = bytearray(i in late for i in range(len(self._parameters)))
        word = pack_status(_ABORTED if backward.aborted else found, backward.dropped)
        backward.recorder.vote_at = perf_counter_ns()
        groups = self.reduction_groups
        votes = [group.negotiation.start(group.local(mask), word, is_vote=True) for group in groups]
        if EventLog.current is not None:
            for vote in votes:
                vote.watch(backward.recorder.note_vote)
        completion = Completion(self._finish_results(backward, schedule, votes), groups[0].groups)
        completion.keep_open()
        self._pending_results = completion, backward
        self.is_sent = True
        self.gradients.is_dirty = False
        return bytes(len(self._parameters))  # no averages yet, so no hook of the user's may step

    def fail(self, backward: Backward, error: BaseException) -> PpeDdpError | None:
        """End the communication for all ranks; ``finish_grad_sync()`` will raise the error, and begin nothing."""
        self.is_sent = False
        instead: PpeDdpError | None = None
        try:
            instead = super().fail(backward, error)
        finally:  # even if an interrupt ends a wait
            self._note_failure(instead or error)
        return instead

    def _note_failure(self, told: BaseException) -> None:
        # Keep a new error: the one that was raised holds its frames, and so the connections.
        if isinstance(told, PeerAbortedError | CommunicationError):
            self.failure = type(told)(*told.args)
            vars(self.failure).update(vars(told))  # the ranks, step, phase and reason
        else:
            self.failure = self._failed_here(f"raised {reason_of(told)}")

    def _failed_here(self, how: str) -> PeerAbortedError:
        return PeerAbortedError(
            f"rank {self.groups[0].rank}: this step has failed here already, as this rank's own backward or its part "
            f"in the communication {how}. Its gradients are not averages: call zero_grad_buffer() and go on with the "
            "next step"
        )

    def abort(self, backward: Backward, reason: str = RAISED) -> bool:
        """End the communication for all ranks at once, even if only results are waited for."""
        # If results have arrived already, finish_grad_sync() raises the error.
        if self.is_sent and backward.is_manual and backward.phase is Phase.BEGUN:
            self._note_failure(AbortedError(reason))
            with ExitStack() as stack:  # others may wait in their optimizer's step; all are told, even if interrupted
                for groups in reversed(self.groups):
                    stack.callback(groups.fail, AbortedError(reason), "finishing")
            return True
        pending = self._pending_results
        try:
            is_over = super().abort(backward, reason)
        finally:  # even if an interrupt ends a wait
            if backward.phase is Phase.FAILED and pending is not None and pending[1] is backward:
                self._pending_results = None
                pending[0].close()
        if all(groups.world_size == 1 for groups in self.groups):  # finalizing tells the ranks that split the model
            self._note_failure(AbortedError(reason))
        return is_over

    def put_back(self, backward: Backward) -> None:
        """Abandon what is in flight, and restore this rank's gradients in ``main_grad``, including late ones."""
        for group in self.reduction_groups:
            group.reduction.abandon()
        for bucket in self._buckets:
            bucket.put_back()
        if backward.recorder.agreed:
            self.gradients.averaged = bytearray(map(min, self._averaged_before, self.gradients.averaged))
        arrived = [i for i, parameter in enumerate(self._parameters) if parameter.grad is not None]
        self._reopen([*arrived, *backward.late])
        self.gradients.add(arrived)  # since the last launch
        self.gradients.put_back(backward.late)
        backward.release()

    # ------------------------------------------------------------------ afterwards

    def wait_for_results(self) -> None:
        """Wait for the results of the last synchronized backward; keeps errors for :meth:`raise_if_bad`."""
        pending = self._pending_results
        if pending is None:
            return
        begin = perf_counter_ns()
        try:
            self._pending_results = None
            pending[0].finish()
        except BaseException:
            if not pending[0].is_over:  # interrupted before it has waited: messages are in flight
                self._pending_results = pending
            raise
        if EventLog.current is not None:
            EventLog.current.add("wait", "for results", begin)

    @property
    def has_residuals(self) -> bool:
        """Whether a compressor keeps what it has not sent; the same on all ranks."""
        compressors = [group.compressor for group in self.reduction_groups]
        return any(one is not None and one.has_residual() for one in compressors)

    @property
    def is_undecided(self) -> bool:
        """See :attr:`CommState.is_undecided`."""
        return any(group.comm_state.is_undecided for group in self.reduction_groups)

    def doubt_step(self) -> None:
        """See :meth:`CommState.doubt`; if any rank of the model is undecided, all are, as all leave a step out."""
        for group in self.reduction_groups:
            group.comm_state.doubt(dict(zip(group.module_state.names, group.module_state.parameters, strict=True)))

    def end_step(self, *, is_taken: bool) -> None:
        """Commit the step in all compressors, or revoke it; all ranks of the model do the same, for all chunks."""
        for group in self.reduction_groups:
            if is_taken:
                group.comm_state.settle()
            else:
                group.comm_state.revoke(group.groups)

    def _finish_results(
        self, backward: Backward, schedule: LaunchSchedule[BufferBucket], votes: Sequence[MaskExchange]
    ) -> Steps:
        try:
            yield from self._take_results(backward, schedule, votes)
        except GeneratorExit:  # closed, as the step has failed
            raise
        except BaseException as error:
            if (peer_error := self.fail(backward, error)) is not None:
                raise peer_error from error
            raise

    def _take_results(
        self, backward: Backward, schedule: LaunchSchedule[BufferBucket], votes: Sequence[MaskExchange]
    ) -> Steps:
        self.gradients.revision += 1
        yield from schedule.finish()
        for vote in votes:
            yield vote.done
        groups = self.reduction_groups
        outcomes = [group.negotiation.finish(vote, b"") for group, vote in zip(groups, votes, strict=True)]
        repairs: list[tuple[ReductionGroup, LaunchSchedule[Bucket]]] = []
        for group, outcome in zip(groups, outcomes, strict=True):
            if any(outcome.mask):
                second = self._second_round(backward, group, outcome.mask)
                repairs.append((group, second))
                yield from second.launch_all()
                yield from second.finish()
        statuses = [g.dropped_forwards.unpack(outcome.statuses) for g, outcome in zip(groups, outcomes, strict=True)]
        yield from self._collect_errors(statuses, aborted_here=backward.aborted)
        last = Activity.DONE
        if any(map(any, statuses)):
            self.put_back(backward)  # all ranks drop the step
        else:
            last = Activity.SUMMED if self._numbers else last
            yield from self._sum_numbers()
            # A scaler skips the step of an optimizer that has parameters of both groups.
            is_finite = all(group.comm_state.is_empty for group in groups)
            is_finite = is_finite or all([group.reduction.has_finite_averages() for group in groups])
            for group in groups:
                group.reduction.commit(group.module_state, is_finite=is_finite)
            schedule.hand_over(lambda _indices, _averages: None)  # averages() has written them into main_grad
            for group, second in repairs:
                second.hand_over(partial(self._add_averages, group))
            self._holds_averages = True
        backward.recorder.done_at = perf_counter_ns()
        for group in groups:
            group.groups.note(last)

    @contextmanager
    def completed_by(self, counts: Tensor | None, num_tokens: Tensor | None) -> Generator[None, None, None]:
        """A context for waiting for results, in which these are summed over the ranks before averages are written.

        So a rank that fails in these sums fails in the step, which all ranks drop. Results that were waited for earlier
        are in ``main_grad`` already, and remain there if these sums fail.
        """
        if self.groups[0].world_size > 1:
            if counts is not None:
                self._numbers.append(partial(self._sum, counts))
            if self._counts_tokens or num_tokens is not None:  # who has forgotten them takes part: all hear of it
                self._numbers.append(partial(self._sum_tokens, num_tokens))
        try:
            yield
            if self._numbers:
                self._sum_late()
        finally:
            self._numbers = []

    def _sum_late(self) -> None:
        try:
            run(self._sum_numbers())
        except BaseException as error:
            self.knows_of_failure = True
            if (instead := self.groups[0].fail(error, FINALIZE)) is not None:
                raise instead from error
            raise
        self.groups[0].note(Activity.SUMMED)

    def _sum_numbers(self) -> Steps:
        while self._numbers:
            self.groups[0].note(Activity.SUM)
            yield from self._numbers.pop()()

    def _sum(self, number: Tensor) -> Steps:
        groups = self.groups[0]
        pending = dist.all_reduce(number, group=groups.buckets, async_op=True)
        yield probe(pending)
        groups.failures.wait(pending, number.device)

    def _sum_tokens(self, num_tokens: Tensor | None) -> Steps:
        groups, cpu = self.groups[0], torch.device("cpu")
        message = allocator(groups.control)(2, torch.float64, cpu)
        own = [0.0, 0.0] if num_tokens is None else [num_tokens.item(), 1.0]
        message.copy_(torch.tensor(own, dtype=torch.float64, device=cpu))
        yield from all_reduced(message, groups)
        total, ranks = message.tolist()
        if 0 < ranks < groups.world_size:
            have_given = all_gather_json(num_tokens is not None, groups.control)
            await_all(groups)
            raise DisagreementError(
                f"rank {groups.rank}: rank {have_given.index(True)} has given finalize_model_grads() num_tokens, and "
                f"rank {have_given.index(False)} has not: either all ranks give num_tokens, or none"
            )
        if num_tokens is not None:
            num_tokens.fill_(total)

    def _collect_errors(self, statuses: Sequence[bytes], *, aborted_here: bool) -> Steps:
        """Keep the error in ``statuses``, which have one byte a rank for each reduction group."""
        for group, of_ranks in zip(self.reduction_groups, statuses, strict=True):
            if NON_FINITE in of_ranks and self._finite is not None:
                found = yield from self._finite.error(group.negotiation, group.groups, of_ranks, group.indices)
                self.error = self.error or found
        for groups, of_ranks in zip(self.groups, statuses, strict=True):
            aborted = bytes(status == _ABORTED for status in of_ranks)
            if any(aborted) and not aborted_here:
                self.error = error = aborted_error(groups.rank, groups.step, aborted)
                error.job_rank = None if error.rank is None else groups.job_rank_of(error.rank)
            elif any(aborted) and self.model_parallel.tells_all:  # finalizing raises, even if no other rank reports
                self.error = self._failed_here("was given up")

    @property
    def is_finite(self) -> bool:
        """Whether the averages that this rank has have neither infinity nor NaN."""
        return all(bucket.is_finite for bucket in self._buckets)

    def raise_if_bad(self) -> None:
        """Raise the error of any rank since the last call, once."""
        failure, error = self.failure, self.error
        self.failure = self.error = None
        if failure is not None:
            try:
                for groups in () if isinstance(failure, CommunicationError) else self.groups:
                    groups.failures.check_lost()  # of which this failure may be a consequence
            except CommunicationError as lost:
                raise lost from failure
            raise failure
        if error is not None:
            raise error

    def scale(self, factor: float | Tensor) -> None:
        for buffer in self.buffers:
            buffer.scale_gradients(factor)
        for bucket in self._buckets:
            bucket.scale(factor)

    def clear(self) -> None:
        for buffer in self.buffers:
            buffer.reset()
        for bucket in self._buckets:
            bucket.reset()
        self._holds_averages = False
        self.gradients.forget()

    def clear_some(self, indices: Sequence[int]) -> None:
        """Set the gradients of the parameters at ``indices`` to zero, after waiting for pending results."""
        self.wait_for_results()
        members: dict[int, list[int]] = {}
        for i in self.gradients.forget_some(indices):
            members.setdefault(self.layout.bucket_of[i], []).append(i)
        for number, of_bucket in members.items():
            everything = self.layout.buckets[number].plan.members
            is_empty = not self.gradients.exist(everything)
            self._buckets[number].clear(everything if is_empty else of_bucket)

    # ------------------------------------------------------------------ inside

    def _prepare(self, bucket: BufferBucket) -> None:
        groups = self.reduction_groups[bucket.extent.reduction_group].groups
        groups.note(Activity.BUCKET, bucket.plan.index)
        bucket.reopen()
        # A gradient that no rank expected waits for the second round.
        members, averaged = bucket.plan.members, self.gradients.averaged
        unexpected = [k for k, i in enumerate(members) if not averaged[i]]
        bucket.late = [k for k in unexpected if bucket.parameters[k].grad_added_to_main_grad]  # type: ignore[attr-defined]
        self.gradients.add(i for i in members if averaged[i])
        if self._finite is not None:
            self._finite.look(members, bucket.slots)

    def _may_launch(self) -> bool:
        probes = [group.reduction.may_launch for group in self.reduction_groups]
        return all(probe is None or probe() for probe in probes)

    def _second_round(self, backward: Backward, group: ReductionGroup, agreed: bytes) -> LaunchSchedule[Bucket]:
        """The schedule that averages the late gradients; averaging is linear, so the results can be added."""

        def prepare(bucket: Bucket) -> None:
            taken = [backward.late.get(group.indices[j]) for j in bucket.expected]
            bucket.hold([None if gradient is None else gradient * group.gain for gradient in taken])

        parameters = [self._parameters[i] for i in group.indices]
        context = BucketContext(group.repairs.specs, parameters, group.groups, group.reduction)
        plan = group.repairs.plan(agreed)
        buckets = buckets_of_plans(context, BucketBuffers(allocator(group.groups.buckets)))(plan)
        schedule = LaunchSchedule(plan, buckets, bytes(len(parameters)), prepare, repair=True)
        backward.recorder.rounds.append(schedule.record)
        return schedule

    def _add_averages(self, group: ReductionGroup, members: Sequence[int], averages: list[Tensor]) -> None:
        for j, average in zip(members, averages, strict=True):
            i = group.indices[j]
            self._buckets[self.layout.bucket_of[i]].add(i, average, is_first=not self.gradients.averaged[i])
            self.gradients.averaged[i] = 1


def _reduction_group_of(parameter: nn.Parameter) -> int:
    return 0 if getattr(parameter, "allreduce", True) else 1


def _duplicates(setup: Setup, default_group: ProcessGroup, module_state: ModuleState) -> list[Groups]:
    experts = [
        name for name, p in zip(module_state.names, module_state.parameters, strict=True) if _reduction_group_of(p)
    ]
    parents = [setup.groups.data or default_group]
    if experts:
        if setup.groups.expert is None:
            raise ValueError(
                f"parameter {experts[0]!r} is an expert's (allreduce = False), and no group averages experts: pass "
                "groups=ParallelGroups(expert=...) or expert_data_parallel_group=..., the ranks that hold the same "
                "experts"
            )
        parents.append(setup.groups.expert)
    return [Groups.duplicate(parent, shared_memory=True) for parent in parents]
