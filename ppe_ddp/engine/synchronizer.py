"""The synchronizer of the plain wrapper: sends the messages of one backward, and owns the memory of gradients.

The :class:`~ppe_ddp.engine.reducer.Reducer` decides when to communicate: when a backward begins, when gradients arrive,
and when it ends. A synchronizer makes the calls, the same in the same order on every rank, whatever the graph of a rank
is. There are two. This one packs gradients from ``.grad`` anew for each backward. The other one has gradients in
buffers that are laid out once (``ppe_ddp.megatron``).

    start_negotiation     sends the mask
    make_schedule         waits for the agreed mask, and makes the buckets of its plan
    complete              launches the remaining buckets; vote; second round for late gradients; writes the averages
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import compress
from operator import and_, gt, or_
from time import perf_counter_ns
from typing import Literal

import torch
from torch import Tensor

from ppe_ddp.contracts import BroadcastFunction
from ppe_ddp.engine.backward import Backward, Phase, Synchronizer
from ppe_ddp.engine.bucket import Bucket, BucketContext, LaunchSchedule, buckets_of_plans
from ppe_ddp.engine.completion import TOGETHER, ResultSteps, SharedParameters, Steps
from ppe_ddp.engine.failures import HookProgress, aborted_error
from ppe_ddp.engine.grad_hooks import DroppedForwards, pack_status
from ppe_ddp.engine.gradients import NON_FINITE, FiniteCheck, Gradients, GradientStreams
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.mask_exchange import MaskExchange, highest_digits, is_same, lowest_digits, with_complement
from ppe_ddp.engine.memory import allocator
from ppe_ddp.engine.module import ModuleState, check_apart, refuse_distributed
from ppe_ddp.engine.negotiation import Agreement, Negotiation, await_all
from ppe_ddp.engine.peer_processes import Activity
from ppe_ddp.engine.plan import Packing, Plan
from ppe_ddp.engine.record import EventLog, span
from ppe_ddp.engine.reduction import BLOCKING, Reduction
from ppe_ddp.engine.replicas import (
    NOT_DUE,
    BufferWrites,
    DriftCheck,
    broadcasting,
    broadcasting_buffers,
    owner_of,
    sources_of,
)
from ppe_ddp.engine.zero.sharded_parameters import ShardedParameters
from ppe_ddp.errors import DisagreementError, NonFiniteGradientError, PpeDdpError
from ppe_ddp.functions import broadcast
from ppe_ddp.stragglers import RankTimes
from ppe_ddp.weighing import SAID, UNWEIGHTED_BYTES, WhereUsed


@dataclass(frozen=True)
class Policy:
    """The options of a wrapper's synchronization; the same on every rank."""

    negotiate: bool = True  # ranks may have different gradients. Without it, a difference is an error
    overlap: bool = True  # communicate while backward runs. Without it, communicate after backward
    views: bool = False  # ``.grad`` may be a view of its bucket: saves a copy, but a kept ``.grad`` keeps the bucket
    # Broadcasts buffers after each synchronized backward; None leaves them alone.
    broadcast_buffers: BroadcastFunction | None = None
    ranges: bool = False  # mark launches for torch's profiler, at a few microseconds each
    # Look for NaN and infinity in gradients before they are sent. ``"skip"`` drops such a step on all ranks; True
    # raises on all ranks.
    check_finite: bool | Literal["skip"] = False
    # Compare some parameters in each step. ``"raise"`` raises a difference; True logs it.
    check_drift: bool | Literal["raise"] = True
    # Name patterns of parameters whose gradients are averaged only over the ranks that have them; True for all.
    average_where_used: bool | Sequence[str] = False
    agreed: str = ""  # further options that must be the same on every rank, as text for messages


logger = logging.getLogger("ppe_ddp")

_OUTER_BYTES = 4  # of the digest of a parameter before an outer step

# More arrivals than any parameter has in one backward; reentrant checkpoints may reach it several times.
_MORE_ARRIVALS = 200


class BucketSynchronizer(Synchronizer):
    """Synchronizes the gradients in ``.grad`` of one module, packed into buckets for each backward."""

    def __init__(self, groups: Groups, reduction: Reduction, packing: Packing, policy: Policy) -> None:
        super().__init__((groups,))
        self._groups, self._policy, self._packing, self.reduction = groups, policy, packing, reduction
        self.sends_nothing, self.ranges = reduction.sends_nothing, policy.ranges
        self.negotiation = Negotiation(
            groups,
            packing,
            negotiate=policy.negotiate,
            with_buffers=policy.broadcast_buffers is not None,
            options=policy.agreed,
        )
        self.negotiations = (self.negotiation,)
        self._dropped_forwards = DroppedForwards(groups.rank)
        self._buffer_writes = BufferWrites(groups.parent)
        self.times = RankTimes(groups.rank)
        self.scale_by_active = False
        """Whether to divide by the number of ranks that take part instead of the world size."""
        self.announce: Callable[[], None] | None = None
        """Called before this rank's first message of a synchronization; tells ranks that have run out (``join()``)."""
        self.handed_over = 0
        """The number of synchronizations whose averages this rank has taken, even if an error came behind that."""
        self.before_outer_step: Mapping[str, int] = {}
        """During an outer step: the digests of the parameters in the last one, by name, which ranks have in common."""
        self.sharded_parameters: ShardedParameters | None = None
        """Keeps this rank's shards of the averages for a DistributedOptimizer; without it ``.grad`` gets averages."""

    @property
    def hook_progress(self) -> HookProgress | None:
        """The progress of a hook that communicates in groups of the user's; None if there is none."""
        return self.reduction.progress

    @property
    def turns(self) -> frozenset[str]:
        """The turns of the reduction; a broadcast function of the user's, and connecting again, may block as well."""
        function = self._policy.broadcast_buffers
        blocks = function not in (None, broadcast) and bool(self.negotiation.buffers())
        return self.reduction.turns | BLOCKING if blocks or self.must_renew() else self.reduction.turns

    def train_apart(self, apart: bool) -> None:
        """Stop comparing parameters, as ranks may have different ones; refuse ``weigh()`` while ``apart``."""
        is_used = self.hook_progress is not None and self.hook_progress.calls > 0
        if apart is not self.weights.is_refused and self.reduction.keeps_state_by_index and is_used:
            logger.warning(
                "rank %d: what %s has kept of gradients is added to changes of parameters from now on, or the reverse: "
                "register it with a new wrapper and a new state",
                *(self._groups.rank, self.reduction.title),
            )
        self._policy, self.drift = replace(self._policy, check_drift=False), None
        self.weights.is_refused = apart
        if not self.weights.has_gradients:
            self.weights.settle()

    def check_module(self, module_state: ModuleState) -> None:
        """Raise ValueError if ``module_state`` has parameters that this synchronizer cannot take."""
        if self.sharded_parameters is not None:
            self.sharded_parameters.indices_of(module_state)
        if self._where_used is not None:
            now = WhereUsed(self._policy.average_where_used, module_state.names)  # type: ignore[arg-type]
            lost = self._where_used.identities(self._module_state.parameters) - now.identities(module_state.parameters)
            for name, parameter in zip(module_state.names, module_state.parameters, strict=True):
                if id(parameter) in lost:
                    raise ValueError(
                        f"rank {self._groups.rank}: parameter {name!r} was averaged where it is used under another "
                        "name, and no pattern of average_where_used fits this one: wrap the module anew, with one that "
                        "does"
                    )

    def use_module(self, module_state: ModuleState, streams: GradientStreams | None) -> None:
        """Synchronize the parameters of ``module_state`` from now on; gradients are accumulated on ``streams``."""
        if self.sharded_parameters is not None:
            self.sharded_parameters.use_module(module_state)
        self._module_state, self.weights.parameters = module_state, module_state.parameters
        self._nothing, self.is_split = bytes(len(module_state.parameters)), bool(module_state.distributed)
        patterns = self._policy.average_where_used
        self._where_used = WhereUsed(patterns, module_state.names) if patterns else None
        groups = self._groups

        def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            # Ask the groups each time: a failure closes their connections, and a rank may list its module anew then.
            return allocator(groups.buckets)(numel, dtype, device)

        self.gradients = Gradients(module_state, allocate, streams)
        self.negotiation.use_module(module_state)
        if self._policy.check_drift and (self.drift is None or not self.drift.goes_on(module_state)):
            raises = self._policy.check_drift == "raise"
            self.drift = DriftCheck(self._groups, module_state, raises=raises)
        self._buffer_writes.use_module(module_state.buffer_slots if self._policy.broadcast_buffers is not None else ())
        self._finite: FiniteCheck | None = None
        self._buckets_of = self._make_buckets()

    def takes(self, index: int) -> bool:
        """Whether this parameter has a shard, where averages are sharded."""
        shards = self.sharded_parameters
        return shards is None or bool(shards.with_shards(b"\1" * len(self._nothing))[index])

    def _make_buckets(self) -> Callable[[Plan], Sequence[Bucket]]:
        context = BucketContext(
            self._module_state.specs, self._module_state.local_parameters(), self._groups, self.reduction
        )
        # A function of the user's computes whole averages, so its buckets are not reduce-scattered.
        shards = self.sharded_parameters if self.reduction.is_plain_average else None
        self.negotiation.sends_by_node = self.reduction.is_plain_average and shards is None
        return buckets_of_plans(context, self.gradients.buffers, None if shards is None else shards.bucket)

    def use_reduction(self, reduction: Reduction, packing: Packing) -> None:
        """Reduce by ``reduction`` from the next backward on. All ranks must call this together."""
        self.reduction, self._packing, self.sends_nothing = reduction, packing, reduction.sends_nothing
        own = packing if self.sharded_parameters is None else self.sharded_parameters.packing(packing)
        self.negotiation.repack(own)
        self.negotiation.use_plug("gradients averaged by", reduction.agreed)
        self.negotiation.has_compressor = reduction.sends_kept
        self._buckets_of = self._make_buckets()

    def shard(self) -> ShardedParameters:
        """Keep only this rank's shards of averages from now on. All ranks must call this together."""
        if self.sharded_parameters is None:
            refuse_distributed(
                self._module_state.distributed_tensors(),
                "DistributedOptimizer",
                "give the optimizer itself the parameters; its state is split over mesh['tp'] as they are",
            )
            check_apart(self._module_state)
            pairs = zip(self._module_state.names, self._module_state.parameters, strict=True)
            frozen = [repr(name) for name, parameter in pairs if not parameter.requires_grad]
            self.negotiation.use_plug("a parameter that was frozen when the DistributedOptimizer was made:", *frozen)
            self.check()
            self._groups.await_start()
            require_same = self.negotiation.use_plug
            self.sharded_parameters = ShardedParameters(self._groups, self._module_state, require_same)
            self.use_reduction(self.reduction, self._packing)
        return self.sharded_parameters

    def clear_shards(self, *, set_to_none: bool) -> None:
        """Clear this rank's shards of the averages, as ``zero_grad()`` does."""
        if self.sharded_parameters is not None:
            self.sharded_parameters.zero_grad(range(len(self.sharded_parameters.shards)), set_to_none=set_to_none)

    def start_negotiation(self, backward: Backward) -> Collection[int]:
        """Start the mask exchange: for gradients that will arrive, and those that are in ``.grad`` already."""
        if self.sharded_parameters is not None:
            self.sharded_parameters.release()
        if self._policy.check_finite:
            self._finite = FiniteCheck(self._module_state.names)
        if self.sends_nothing:
            return ()
        if self.announce is not None and not backward.has_run_out:
            self.announce()
        reached, weights = backward.waiting or self._nothing, self.weights
        local = self.gradients.existing(reached)
        if backward.silent or weights.is_nothing:
            local = self._nothing
        if self.sharded_parameters is not None:
            local = self.sharded_parameters.with_shards(local)
        turn = backward.turn
        # Without negotiation all ranks must have the same gradients, and may end different wrappers together.
        if turn is not None and self._policy.negotiate:
            local = turn.claim(local)
        apart = SharedParameters.apart if turn is None else turn.apart
        backward.recorder.local = local
        if self.gradients.shared:  # an arrival at one changes the other: launch both only at the end of backward
            backward.expect_more(self.gradients.shared, _MORE_ARRIVALS)
        has_gradients = any(local) and not (backward.is_manual and weights.are_zeros())
        said = SAID[has_gradients]
        if weights.is_weighed or backward.is_manual:
            said = weights.field(silent=backward.silent, has_gradients=has_gradients, is_manual=backward.is_manual)
        with span("negotiate") if self.ranges else nullcontext():
            sends_buffers = self._policy.broadcast_buffers is not None and self._module_state.has_buffers
            buffers = self._module_state.buffers() if sends_buffers else {}
            is_writer = self._writers(backward, buffers) if buffers else []
            self.asking = (self._groups.step,)
            exchange = self.negotiation.start(
                local,
                not backward.silent,
                buffers=buffers,
                said={
                    "apart": TOGETHER if backward.is_manual and backward.silent else apart,
                    "writers": highest_digits(is_writer, self._groups.rank) if is_writer else b"",
                },
                own={"weights": said},
            )
        backward.negotiate((exchange,), buffers, is_writer)
        self.asking = ()
        return self.negotiation.planner.launch_triggers

    def _writers(self, backward: Backward, names: Collection[str]) -> list[bool]:
        """For each submodule with some of the buffers ``names``: whether this rank has written what others need.

        If the losses of this step weigh nothing, that is only what it had written in earlier steps.
        """
        found = self._buffer_writes.of(names, marked=self.weights.is_nothing)
        return [False] * len(found) if backward.aborted else found

    def _keep_writers(self) -> None:
        """Mark what this rank has written in a step that has failed: it is still to be sent."""
        if not self.weights.is_nothing:
            self.mark_buffers(self.written_buffers())

    def make_schedule(self, backward: Backward) -> LaunchSchedule[Bucket]:
        """Wait for the agreed mask, and make the schedule that launches the buckets of its plan."""
        recorder, (exchange,) = backward.recorder, backward.exchanges
        answer = self.negotiation.finish(exchange, recorder.local)
        recorder.control_nbytes += exchange.nbytes
        recorder.agreed = answer.mask
        recorder.agreed_at = perf_counter_ns()
        try:
            weight = self.weights.factor(answer.weights) if answer.weights.strip(UNWEIGHTED_BYTES) else None
        except DisagreementError:
            await_all(self._groups)
            raise
        if self.scale_by_active and weight is None and self.reduction.sends_kept:
            # What is kept from this step is added to one with other ranks, so it must have the factor of this step.
            weight = self._factor_by_active(answer)
        if backward.turn is not None:
            backward.turn.agree(answer.apart, is_weighed=bool(answer.weights.strip(UNWEIGHTED_BYTES)))
        in_place = self.gradients.in_place
        views = self._policy.views and not in_place
        masks = self._groups.node_masks

        def prepare(bucket: Bucket) -> None:
            self._groups.note(Activity.BUCKET, bucket.plan.index)
            # This rank's backward may have raised since the schedule was made.
            nothing: list[Tensor | None] = [None] * len(bucket.expected)
            node = bucket.plan.node
            # The ranks of another node that sends this bucket; what is here unannounced waits for the second round.
            senders = () if masks is None or node is None or node == masks.node else self._groups.nodes[node]
            gradients = nothing if backward.silent or senders else self.gradients.take(bucket.expected)
            if senders:
                backward.leave_for_vote(self.gradients.present(bucket.expected))
            if type(None) in set(map(type, gradients)):
                backward.lack(i for i, g in zip(bucket.expected, gradients, strict=True) if g is None)
            if self.weights.is_nothing:
                backward.set_aside(zip(bucket.expected, gradients, strict=True))
                gradients = nothing
            bucket.hold(gradients, views=views, in_place=in_place, weight=weight, is_received=len(senders) == 1)
            if self._finite is not None:  # an error in it must find them in the bucket
                self._finite.look(bucket.expected, gradients)
                if self.reduction.keeps_state_by_index and self._finite.status:
                    backward.set_aside(bucket.give_back())  # zeros are sent, as NaN would stay in the hook's state

        plan = self.negotiation.planner.plan(answer.mask, answer.nodes)
        schedule = self._schedule(plan, prepare, backward.waiting or self._nothing)
        backward.add_round(schedule, answer, weight)
        return schedule

    def complete(self, backward: Backward) -> ResultSteps[bytes]:
        """Launch the remaining buckets, wait for all of them, and put the averages into ``.grad``.

        The vote goes beside the last bucket. But ranks that train apart are not compared, so that one that fails behind
        the last message would differ for good: they vote when all buckets are complete.
        """
        if self.sends_nothing:
            return (yield from self._complete_alone(backward))
        if backward.schedule is None:
            yield backward.exchanges[0].done
        schedule = backward.schedule or self.make_schedule(backward)
        if backward.turn is not None:
            yield from backward.turn.wait()
        yield from schedule.launch_all()
        backward.enter(Phase.FINISHING)
        vote = None if self.weights.is_refused else self._vote(backward)
        yield from schedule.finish()
        vote = vote or self._vote(backward)
        yield vote.done
        outcome = self.negotiation.finish(vote, b"")
        backward.recorder.control_nbytes += vote.nbytes
        self.times.note(outcome.times)
        if outcome.parameters != vote.fields["parameters"]:
            yield from self._comparing(outcome.parameters)
        statuses = self._dropped_forwards.unpack(outcome.statuses, backward.agreement) if any(outcome.statuses) else b""
        if self._finite is not None and any(status & NON_FINITE for status in statuses):
            self._drop(backward, (yield from self._finite.error(self.negotiation, self._groups, statuses)))
            return self._nothing
        averaged, is_apart = backward.recorder.agreed, self.weights.is_refused and not any(statuses)
        if any(outcome.mask):
            averaged = yield from self._repair(backward, outcome.mask)
        if any(outcome.missing) and not any(statuses):
            averaged = bytes(map(and_, averaged, (yield from self.negotiation.agree_held(self._given(backward)))))
        if not is_apart:
            yield from self.negotiation.learn([] if backward.silent else backward.arrivals, backward.recorder)
            if backward.buffers:
                yield from self._broadcast_buffers(backward, outcome.writers, has_failed=any(statuses))
        if any(statuses) and not backward.aborted:
            self.put_back(backward)
            self._groups.note(Activity.DONE)
            raise aborted_error(self._groups.rank, self._groups.step, statuses)
        backward.recorder.averaged_at = perf_counter_ns()
        if self.commits is not None and not any(statuses):
            yield from self.commits()
        self.reduction.abandon() if any(statuses) else self.reduction.commit(self._module_state)  # any: raised here
        self._hand_over(backward, averaged, outcome.users)
        if is_apart:
            yield from self._share(backward, outcome.writers)
        self._groups.note(Activity.DONE)
        self.times.end_step()
        return averaged

    def _share(self, backward: Backward, writers: bytes) -> Steps:
        """Learn together, and broadcast buffers, when averages are handed over.

        Ranks that train apart would differ for good, if one failed here and had not taken them.
        """
        yield from self.negotiation.learn(backward.arrivals, backward.recorder)
        if backward.buffers:
            yield from self._broadcast_buffers(backward, writers, has_failed=False)

    def _complete_alone(self, backward: Backward) -> ResultSteps[bytes]:
        """Complete the backward of one rank alone: its gradients are the averages."""
        there = backward.recorder.agreed = backward.recorder.local = self.gradients.mask()
        backward.recorder.agreed_at = perf_counter_ns()
        if backward.silent:  # its backward has raised, and no other rank waits
            return self._nothing
        done: set[int] = set() if backward.turn is None else backward.turn.averaged
        if self.weights.is_nothing:  # its losses have weight 0, so even NaN does not count
            self._drop_gradients(but=done)
            there = self.gradients.mask()
        if self._finite is not None and not self._finite.is_fine_alone(self._module_state.parameters):
            self._drop(backward, self._finite.error_alone(self._groups))
            return self._nothing
        if self.commits is not None:
            yield from self.commits()
        if self.weights.is_weighed and backward.turn is not None:
            backward.turn.check_weighed()
        self._weigh_alone(done)
        if self.sharded_parameters is not None:
            every = self.sharded_parameters.with_shards(b"\1" * len(self._nothing))
            present = self.gradients.take_present([*compress(range(len(every)), every)])
            self.sharded_parameters.hand_over(list(present), list(present.values()))
        self.handed_over += 1
        return there

    def _drop_gradients(self, but: Container[int] = (), aside: Mapping[int, Tensor] | None = None) -> None:
        """Drop this rank's gradients, also those ``aside``, but for parameters whose identities are in ``but``."""
        parameters = enumerate(self._module_state.parameters)
        if self.sends_nothing:
            self.gradients.existing(self._nothing)
        self.gradients.drop([i for i, parameter in parameters if id(parameter) not in but], aside or {})

    def _weigh_alone(self, done: set[int]) -> None:
        """Divide by the counts what no other wrapper of this backward has divided; ``done`` notes it by identity."""
        if self.weights.is_weighed:
            self.gradients.multiply(self.weights.factor_alone, but=done)
            done.update(id(one) for one in self._module_state.parameters if one.grad is not None)
        self.weights.settle()

    def _drop(self, backward: Backward, error: NonFiniteGradientError) -> None:
        """Drop the step on all ranks, because some rank has NaN or infinity in its gradients."""
        self._groups.note(Activity.DONE)
        self.put_back(backward)
        if self._policy.check_finite != "skip":
            raise error
        self._drop_gradients()
        self.weights.settle()
        self.clear_shards(set_to_none=True)
        logger.warning("rank %d skips this step: %s", self._groups.rank, error)

    def _broadcast_buffers(self, backward: Backward, writers: bytes, *, has_failed: bool) -> Steps:
        """Broadcast each submodule's buffers from the lowest rank that has written them, by ``writers`` of the vote.

        A rank that has written buffers keeps its mark if some rank ``has_failed`` and so does not take them.
        """
        function, buffers = self._policy.broadcast_buffers, backward.take_buffers()
        assert function is not None
        assert backward.agreement is not None
        sources = sources_of(buffers, backward.agreement.senders(writers))
        if backward.aborted:  # this rank's module may have changed since, so receive into copies
            past = [buffer.clone() for buffer in buffers.values()]
            yield from broadcasting(function, past, self._groups, sources=sources)
            return
        names, buffers, is_over = tuple(buffers), {}, False
        self._buffer_writes.release()
        try:
            yield from broadcasting_buffers(function, self._module_state, self._groups, sources=sources)
            is_over = not has_failed
        finally:
            self._buffer_writes.note(has_failed=not is_over)
            if not is_over:
                self.mark_buffers(set(compress(dict.fromkeys(map(owner_of, names)), backward.is_writer)))

    def go_on_from(self, earlier: BucketSynchronizer) -> None:
        """Take over from a synchronizer with other ranks: its weights, and which buffers this rank has written."""
        weights = earlier.weights
        weights.parameters, self.weights = self.weights.parameters, weights
        self.mark_buffers(earlier.written_buffers())

    def note_buffers(self) -> None:
        """Note that all ranks have the same buffers now; a rank that writes them from here on sends its own."""
        self._buffer_writes.note()

    def written_buffers(self) -> list[str]:
        """The names of the submodules whose buffers this rank has written since the last broadcast."""
        return self._buffer_writes.owners(self.negotiation.buffers())

    def mark_buffers(self, owners: Container[str]) -> None:
        """Restore the result of :meth:`written_buffers`."""
        self._buffer_writes.mark(owners)

    def fail(self, backward: Backward, error: BaseException) -> PpeDdpError | None:
        """End the communication as every synchronizer does; a rank that has written buffers still has them to send."""
        if backward.is_writer and not backward.buffers:  # some ranks may have received them, or a part
            written = [*compress(dict.fromkeys(map(owner_of, self.negotiation.buffers())), backward.is_writer)]
            self.note_buffers()  # what was received is no write
            self.mark_buffers(written)
        return super().fail(backward, error)

    def put_back(self, backward: Backward) -> None:
        """Restore in ``.grad`` what this rank has computed, bit by bit, after a failed step.

        This is possible because no average is handed over, and no gradient written, before all has succeeded.
        """
        self.times.end_step()
        self._keep_writers()
        if backward.rounds:
            self.reduction.abandon()
        for schedule in backward.rounds:  # in order: gradients of the second round arrived later
            self.gradients.put_back(schedule.put_back())
        self.gradients.put_back(backward.late.items())
        self.gradients.put_back(backward.take_aside().items())
        backward.release()

    def give_back(self, backward: Backward) -> None:
        """Put this rank's gradients back into ``.grad`` after its backward has raised; other ranks still get them."""
        self._keep_writers()
        for schedule in backward.rounds:
            self.gradients.put_back(schedule.give_back())
        self.gradients.put_back(backward.take_aside().items())

    def _schedule(
        self, plan: Plan, prepare: Callable[[Bucket], None], waiting: bytes | bytearray, *, repair: bool = False
    ) -> LaunchSchedule[Bucket]:
        return LaunchSchedule(
            plan,
            self._buckets_of(plan),
            waiting,
            prepare,
            one_at_a_time=self.reduction.one_at_a_time,
            may_launch=self.reduction.may_launch,
            repair=repair,
            ranges=self.ranges,
        )

    def _vote(self, backward: Backward) -> MaskExchange:
        """Start the vote, beside the last bucket: which gradients came late, and which ranks have raised."""
        late, found, mask = backward.late, 0, bytearray(self._nothing)
        if backward.unexpected and not (backward.silent or self.weights.is_nothing):
            backward.add_late(self.gradients.take_present(backward.unexpected))
        for i in late:
            mask[i] = 1
        backward.recorder.vote_at = perf_counter_ns()
        if self._finite is not None:
            self._finite.look(late.keys(), late.values())
            found = self._finite.status
        status = pack_status(backward.aborted | found, backward.dropped)
        is_writer = backward.is_writer
        if backward.buffers and not all(is_writer):
            is_writer = [*map(or_, is_writer, self._writers(backward, backward.buffers))]
            backward.note_writers(is_writer)
        assert backward.agreement is not None
        writers = lowest_digits(backward.agreement.writers, is_writer, self._groups.rank) if is_writer else b""
        users, drift, said = b"", self.drift, b"" if self.drift is None else NOT_DUE
        if drift is not None and self._groups.step % drift.every == 0:
            said = drift.field(takes_part=not backward.has_run_out)
        if self.weights.is_refused:
            said = self._outer_field()
        if self._where_used is not None and backward.schedule is not None:
            users = self._where_used.field(self._users(backward))
        missing = bytes([not backward.lacking <= late.keys()])
        compared = {} if self._policy.negotiate else self._compared(backward)
        vote = self.negotiation.start(
            mask,
            status,
            is_vote=True,
            said={"writers": writers, "parameters": said, "missing": missing, **compared},
            own={"users": users, "times": self.times.field(backward.recorder.backward_at)},
        )
        if said is not NOT_DUE and drift is not None and not self.reduction.may_write_parameters:
            drift.look()
        if EventLog.current is not None:
            vote.watch(backward.recorder.note_vote)
        return vote

    def _outer_field(self) -> bytes:
        """For each parameter the digest of its value in the last outer step; zeros if there is none on this rank."""
        found = (self.before_outer_step.get(name) for name in self._module_state.names)
        nothing, whole = bytes(2 * _OUTER_BYTES), 1 << 8 * _OUTER_BYTES
        return b"".join(
            nothing if one is None else with_complement((one % whole).to_bytes(_OUTER_BYTES, "big")) for one in found
        )

    def _comparing(self, field: bytes) -> Steps:
        """Compare parameters, by the field of the vote, which differs from what this rank has said."""
        if self.drift is not None:
            yield from self.drift.comparing(field)
        elif self.weights.is_refused:
            self._check_outer_step(field)

    def _check_outer_step(self, field: bytes) -> None:
        """Raise, on all ranks, if these would take an outer step from different values, and so differ for good."""
        for name, start in zip(self._module_state.names, range(0, len(field), 2 * _OUTER_BYTES), strict=False):
            digests = field[start : start + 2 * _OUTER_BYTES]
            if any(digests) and not is_same(digests):
                await_all(self._groups)
                raise DisagreementError(
                    f"rank {self._groups.rank}: the ranks had different values of parameter {name!r} in the last outer "
                    "step, and would differ for good: ranks have loaded different parameters, or replaced them by "
                    "different ones. Load the same parameters on every rank, or load what LocalSGD or DiLoCo had saved"
                )

    def _compared(self, backward: Backward) -> dict[str, bytes]:
        """What tells whether all ranks have the same gradients: nothing of a rank that contributes none.

        It is known only now, as some come late, on some ranks alone.
        """
        if backward.silent or self.weights.is_nothing:
            return {"held": self._nothing, "lacking": self._nothing}
        found = self._held(backward).union(backward.aside)
        held = bytes(i in found for i in range(len(self._nothing)))
        return {"held": held, "lacking": bytes(not here for here in held)}

    def _held(self, backward: Backward) -> set[int]:
        """The parameters of which this rank has contributed a gradient in this step."""
        return set(backward.late).union(*(schedule.held for schedule in backward.rounds))

    def _given(self, backward: Backward) -> set[int]:
        """Those of :meth:`_held`, and those whose averages have what a compressor had kept, if no rank has held one."""
        names = self.reduction.nonzero_averages()
        return self._held(backward).union(i for i, name in enumerate(self._module_state.names) if name in names)

    def _users(self, backward: Backward) -> set[int]:
        """The parameters that this rank has used: with a gradient now, or an average in ``.grad`` from before."""
        shards = self.sharded_parameters
        return self._held(backward).union(() if shards is None or backward.has_run_out else shards.averaged())

    def _factors(self, backward: Backward, users: bytes) -> dict[int, float]:
        """The factors of the averages over all ranks, by parameter index."""
        agreement, factors = backward.agreement, {}
        assert agreement is not None
        if self.scale_by_active and backward.weight is None:
            factors = dict.fromkeys(range(len(self._nothing)), self._factor_by_active(agreement))
        if self._where_used is not None:
            used = self._where_used.factors(users, agreement.weights)
            if backward.weight and self.scale_by_active and not agreement.weights.strip(UNWEIGHTED_BYTES):
                used = {i: factor / backward.weight for i, factor in used.items()}  # applied as they were packed
            factors |= used
        return factors

    def _factor_by_active(self, agreement: Agreement) -> float:
        return float(self._groups.world_size / max(1, sum(agreement.statuses)))

    def _hand_over(self, backward: Backward, averaged: bytes, users: bytes) -> None:
        """Put the averages into ``.grad``, and add those of a second round; called when nothing can fail any more."""
        if not backward.silent:
            backward.begin_hand_over()
        is_mean_of_all = self._where_used is None and not self.scale_by_active
        factors = None if is_mean_of_all else self._factors(backward, users)
        turn = backward.turn
        if self.weights.is_nothing and not backward.silent:
            self._drop_gradients(() if turn is None else turn.averaged, backward.take_aside())
        if turn is not None:
            turn.averaged.update(compress(map(id, self._module_state.parameters), averaged))
        owner, agreed = self.sharded_parameters or self.gradients, backward.recorder.agreed
        withheld = set(compress(range(len(agreed)), map(gt, agreed, averaged))) if averaged != agreed else ()
        with ExitStack() as stack:  # called in reverse order; all are called, even if an interrupt ends one
            for schedule in reversed(backward.rounds):
                if backward.silent:
                    schedule.release()
                else:
                    stack.callback(schedule.hand_over, owner.hand_over, factors, withheld)
            if not backward.silent:
                stack.callback(setattr, self, "handed_over", self.handed_over + 1)
        if self.weights.is_weighed and not backward.silent:
            self.weights.settle()
        self.gradients.buffers.trim()
        if self.sharded_parameters is not None:
            self.sharded_parameters.pool.trim()
        if self.drift is not None and self.reduction.may_write_parameters:
            self.drift.look()

    def _repair(self, backward: Backward, agreed: bytes) -> ResultSteps[bytes]:
        """Average the late gradients in a second round; averaging is linear, so the results can be added.

        Returns one byte a parameter: whether it is averaged in one of both rounds.
        """
        views = self._policy.views and not self.gradients.in_place

        def prepare(bucket: Bucket) -> None:
            self._groups.note(Activity.LATE_BUCKET, bucket.plan.index)
            bucket.hold(list(map(backward.take_late, bucket.expected)), views=views, weight=backward.weight)

        plan = self.negotiation.planner.plan(agreed)
        second = self._schedule(plan, prepare, self._nothing, repair=True)
        backward.add_round(second)
        yield from second.launch_all()
        yield from second.finish()
        return bytes(map(or_, backward.recorder.agreed, agreed))
