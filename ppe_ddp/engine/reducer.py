"""The life of one backward: begin, negotiate, launch, finish, repair.

    a hook on an output, or the first gradient      begin: ask autograd what it will reach; send the mask
    each gradient that lands                        answer there? then plan; launch buckets that are complete
    the end of backward                             launch the rest; vote; wait; hand over; repair if voted

Everything here is local but for the collectives, whose order every rank shares: the mask, the buckets of the
plan that follows from it, the vote, and if that says so the buckets of a second round.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from time import perf_counter_ns
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

from ppe_ddp.engine.agreement import Consensus
from ppe_ddp.engine.arena import Arena
from ppe_ddp.engine.backward import Backward, Phase
from ppe_ddp.engine.broadcasting import broadcast_all
from ppe_ddp.engine.posthooks import LandingHook, keep_back, optimizers_in_backward
from ppe_ddp.engine.presence import Reach
from ppe_ddp.engine.round import Round
from ppe_ddp.errors import PeerAbortedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from ppe_ddp.contracts import BroadcastFunction
    from ppe_ddp.engine.arena import Segment
    from ppe_ddp.engine.census import Census
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.layout import Packing, Plan
    from ppe_ddp.engine.posthooks import PostHook
    from ppe_ddp.engine.presence import Exchange
    from ppe_ddp.engine.sender import Sender
    from ppe_ddp.engine.trace import Recorder, Trace


class Reducer:
    """Synchronizes the gradients of one module over one group.

    Args:
        groups: Where to communicate.
        sender: How to reduce a bucket.
        packing: How to pack buckets.
        negotiate: Whether ranks may have different gradients.
        overlap: Whether to communicate while backward runs.
        views: Whether ``.grad`` may be a view of the arena.
        broadcast_buffers: Broadcasts buffers after each synchronized backward; None to leave them alone.
        ranges: Whether to mark what happens for torch's profiler.
    """

    def __init__(
        self,
        groups: Groups,
        *,
        sender: Sender,
        packing: Packing,
        negotiate: bool = True,
        overlap: bool = True,
        views: bool = False,
        broadcast_buffers: BroadcastFunction | None = None,
        ranges: bool = False,
    ) -> None:
        self.groups = groups
        self.consensus = Consensus(
            groups, packing, negotiate=negotiate, with_buffers=broadcast_buffers is not None
        )
        self.enabled = True
        """Whether a backward is synchronized; ``no_sync()`` clears it."""
        self.scale_by_active = False
        """Whether to divide by the ranks that take part instead of by all."""
        self.sync_hooks: OrderedDict[int, Callable[[], None]] = OrderedDict()
        """Called before synchronization; while there are any, it starts when backward is over."""
        self._sender = sender
        self._overlap = overlap
        self._views = views
        self._broadcast_buffers = broadcast_buffers
        self._ranges = ranges
        self._lock = threading.RLock()  # CUDA backwards land gradients from a thread a device
        self._backward: Backward | None = None
        self._last: Recorder | None = None
        self._handles: list[RemovableHandle] = []
        self._parameters: Sequence[nn.Parameter] = ()

    # ------------------------------------------------------------------ what there is to synchronize

    def arm(self, census: Census) -> None:
        """Take over the parameters of ``census`` and leave all others alone."""
        self.disarm()
        self._census = census
        self._parameters = census.parameters
        self._names = tuple(census.names)
        self._arena = Arena(census.specs)
        self._laid: Plan | None = None
        self._handed: list[tuple[nn.Parameter, Tensor]] = []
        self._reach = Reach(census.parameters)
        self._optimizers_in_backward = optimizers_in_backward(census.parameters)
        self.consensus.arm(census)
        self.is_displaced = False
        owner = weakref.ref(self)
        for i, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                self._handles.append(LandingHook(owner, i).register(parameter))

    def displaced(self) -> None:
        """Another wrapper has taken over some of the parameters; :meth:`arm` takes them back."""
        self.is_displaced = True

    def disarm(self) -> None:
        """Take our hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def use(self, sender: Sender, packing: Packing) -> None:
        """Reduce by ``sender`` from the next backward on. All ranks must do so together."""
        self._sender = sender
        self.consensus.repack(packing)

    def trace(self) -> Trace | None:
        """The last synchronized backward."""
        return None if self._last is None else self._last.trace()

    @property
    def arena_nbytes(self) -> int:
        """Bytes of gradient memory held beside the gradients."""
        return self._arena.nbytes

    # ------------------------------------------------------------------ what the wrapper and autograd call

    def before_forward(self) -> None:
        """Put right what an aborted backward has left, and find hooks that the user has added since."""
        self._running()
        keep_back(self._parameters, self._defer)

    def watch(self, output: Tensor) -> None:
        """Let backward begin when it gets to ``output``, a differentiable output of the module."""
        output.register_hook(self._sign)

    def _sign(self, _gradient: Tensor) -> None:
        if self.enabled:
            with self._lock:
                if self._running() is None:
                    self._begin()

    def landed(self, index: int) -> None:
        """The gradient of parameter ``index`` has landed in its ``.grad``."""
        if not self.enabled:
            return
        with self._lock:
            backward = self._running() or self._begin()
            if backward is None or backward.phase is Phase.FAILED:
                return
            backward.arrivals.append(index)
            if backward.waiting is None:
                return  # negotiated when backward is over
            try:
                with torch.no_grad():
                    self._count_in(backward, backward.waiting, index)
            except BaseException:
                self._fail(backward)
                raise

    def _count_in(self, backward: Backward, waiting: bytearray, index: int) -> None:
        if backward.is_manual:
            raise RuntimeError(
                f"rank {self.groups.rank}: a backward reached {self._names[index]!r} between start_grad_sync() and "
                "finish_grad_sync(); finish first"
            )
        expected = waiting[index]
        if expected:
            waiting[index] = 0
        else:
            backward.surprises.append(index)
        if backward.round is None:
            assert backward.exchange is not None
            if backward.exchange.done():
                self._open_round(backward).launch_ready()
        elif expected:
            backward.round.landed(index)

    def _running(self) -> Backward | None:
        """The backward under way; one whose graph task died is cleared away first."""
        backward = self._backward
        if backward is None or not backward.is_dead():
            return backward
        with self._lock:
            self._recover(backward)
        return None

    # ------------------------------------------------------------------ begin and launch

    def _begin(self) -> Backward | None:
        """Begin with the backward that runs on this thread; None if it accumulates nothing of ours."""
        reached = self._reach.indices()
        if not reached:
            return None
        self.groups.check()
        backward = Backward(self._names)
        callback = _EndOfBackward(self, backward)
        backward.alive = weakref.ref(callback)
        Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]
        self._backward = backward
        if self._overlap and not self.sync_hooks:
            waiting = bytearray(len(self._parameters))
            for i in reached:
                waiting[i] = 1
            self._ask(backward, waiting)
        return backward

    def _ask(self, backward: Backward, reached: bytearray) -> None:
        """Start to agree on the gradients: those that will land, and those that are in ``.grad`` already."""
        backward.waiting = reached
        if backward.silent:
            backward.recorder.local = bytes(len(reached))
        else:
            backward.recorder.local = bytes(
                [
                    here or parameter.grad is not None
                    for here, parameter in zip(reached, self._parameters, strict=True)
                ]
            )
        backward.exchange = self.consensus.ask(backward.recorder.local, not backward.silent)
        backward.phase = Phase.NEGOTIATING

    def _open_round(self, backward: Backward) -> Round:
        """Take the agreed mask, and make the round that sends what is in it."""
        assert backward.exchange is not None and backward.waiting is not None
        recorder = backward.recorder
        answer = self.consensus.answer(backward.exchange, recorder.local)
        recorder.control_nbytes += backward.exchange.nbytes
        recorder.agreed = answer.mask
        recorder.agreed_at = perf_counter_ns()
        backward.active = sum(answer.extra)
        backward.phase = Phase.LAUNCHING
        plan = self.consensus.planner.plan(answer.mask)
        if self._views and plan is not self._laid and any(p.grad is slot for p, slot in self._handed):
            self._arena.renew()
        self._laid = plan
        segments = self._arena.segments(plan)
        backward.round = self._round(backward, plan, segments, self._taker(backward), views=self._views)
        return backward.round

    def _round(
        self,
        backward: Backward,
        plan: Plan,
        segments: list[Segment | None],
        take: Callable[[int], Tensor | None],
        *,
        views: bool,
        repair: bool = False,
    ) -> Round:
        round_ = Round(
            plan,
            segments,
            waiting=bytes(len(self._parameters)) if repair else backward.waiting or b"",
            take=take,
            sender=self._sender,
            specs=self._census.specs,
            parameters=self._parameters,
            views=views,
            repair=repair,
            ranges=self._ranges,
        )
        backward.recorder.rounds.append(round_.record)
        return round_

    def _taker(self, backward: Backward) -> Callable[[int], Tensor | None]:
        """How a flight takes the gradient of a parameter: out of ``.grad``, which is None from then on."""
        parameters, specs = self._parameters, self._census.specs

        def take(index: int) -> Tensor | None:
            parameter = parameters[index]
            gradient = None if backward.silent else parameter.grad
            if gradient is None:
                return None
            parameter.grad = None
            if gradient.is_sparse and not specs[index].sparse:
                return gradient.to_dense()
            return gradient

        return take

    # ------------------------------------------------------------------ finish

    def _end_of_backward(self, backward: Backward) -> None:
        with self._lock:
            if backward is self._backward and backward.phase is not Phase.FAILED:
                self._finish(backward)

    def _finish(self, backward: Backward) -> None:
        """Complete ``backward``; if that fails, put back what there was and let the error out."""
        backward.recorder.backward_at = perf_counter_ns()
        try:
            with torch.no_grad():
                if backward.exchange is None:
                    self._call_sync_hooks()
                    self._ask(backward, bytearray(len(self._parameters)))
                self._complete(backward)
        except BaseException:
            # If nothing was said to the other ranks yet, the next forward lets them go on without us.
            if backward.exchange is not None:
                self._fail(backward)
                self._backward = None
            raise
        for hook, parameter in backward.deferred:
            hook(parameter)
        self._step_in_backward()

    def _complete(self, backward: Backward) -> None:
        round_ = backward.round or self._open_round(backward)
        round_.launch_all()
        backward.phase = Phase.FINISHING
        late = self._late(backward)
        vote = self._vote(late, aborted=backward.aborted)
        handed: list[tuple[nn.Parameter, Tensor]] = []
        for i, gradient in round_.land(self.groups):
            if not backward.silent:
                self._parameters[i].grad = self._scaled(backward, gradient)
                handed.append((self._parameters[i], gradient))
        self._handed = handed if self._views else []
        outcome = self.consensus.answer(vote, b"")
        backward.recorder.control_nbytes += vote.nbytes
        if any(outcome.mask):
            self._repair(backward, outcome.mask, late)
        arrivals = [] if backward.silent else backward.arrivals
        backward.recorder.control_nbytes += self.consensus.learn_order(arrivals, backward.recorder.agreed)
        if self._broadcast_buffers is not None:
            broadcast_all(self._broadcast_buffers, self._census.buffers().values(), self.groups)
        backward.phase = Phase.OVER
        backward.recorder.done_at = perf_counter_ns()
        self._last = backward.recorder
        self._backward = None
        self._raise_for_peers(backward, [rank for rank, gave_up in enumerate(outcome.extra) if gave_up])

    def _late(self, backward: Backward) -> dict[int, Tensor]:
        """Gradients that landed after their bucket had left, or that no rank expected; taken out of ``.grad``."""
        take = self._taker(backward)
        found = {i: take(i) for i in backward.surprises}
        return {i: gradient for i, gradient in found.items() if gradient is not None}

    def _scaled(self, backward: Backward, gradient: Tensor) -> Tensor:
        if self.scale_by_active and 0 < backward.active < self.groups.world_size:
            gradient.mul_(self.groups.world_size / backward.active)
        return gradient

    def _repair(self, backward: Backward, agreed: bytes, late: dict[int, Tensor]) -> None:
        """Average what came late, in a second round, and add it: averaging is linear."""
        plan = self.consensus.planner.plan(agreed)
        segments = Arena(self._census.specs).segments(plan)
        second = self._round(
            backward, plan, segments, lambda i: late.pop(i, None), views=True, repair=True
        )
        second.launch_all()
        for i, gradient in second.land(self.groups):
            if backward.silent:
                continue
            parameter, share = self._parameters[i], self._scaled(backward, gradient)
            parameter.grad = share if parameter.grad is None else parameter.grad.add_(share)

    def _raise_for_peers(self, backward: Backward, aborted: list[int]) -> None:
        if aborted and not backward.aborted:
            raise PeerAbortedError(
                f"rank {self.groups.rank}: the backward of rank {', '.join(map(str, aborted))} raised an error, so the "
                "gradients of this step lack its share; zero them and go on with the next step, or look at that "
                "rank's traceback"
            )

    # ------------------------------------------------------------------ the user's hooks

    def _call_sync_hooks(self) -> None:
        for hook in list(self.sync_hooks.values()):
            hook()

    def _step_in_backward(self) -> None:
        for parameter in self._optimizers_in_backward:
            if parameter.grad is not None:
                for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                    optimizer.step()
                parameter.grad = None

    def _defer(self, hook: PostHook, parameter: nn.Parameter) -> bool:
        backward = self._backward
        if not self.enabled or backward is None or backward.phase is Phase.FAILED:
            return False
        backward.deferred.append((hook, parameter))
        return True

    # ------------------------------------------------------------------ without autograd

    def start(self, *, silent: bool = False) -> None:
        """Begin a synchronization of what is in ``.grad`` now; all ranks must take part, each in its own way.

        Args:
            silent: Contribute nothing and take nothing, but let the other ranks go on.
        """
        with self._lock:
            if self._running() is not None:
                raise RuntimeError(f"rank {self.groups.rank}: a synchronization is under way already")
            self.groups.check()
            backward = Backward(self._names, silent=silent)
            backward.is_manual = True
            if not silent:
                self._call_sync_hooks()
            self._ask(backward, bytearray(len(self._parameters)))
            self._backward = backward

    def finish(self, *, silent: bool = False) -> None:
        """Finish what :meth:`start` began; begin it if it has not."""
        with self._lock:
            if self._running() is None:
                self.start(silent=silent)
            assert self._backward is not None
            self._finish(self._backward)

    # ------------------------------------------------------------------ when something goes wrong

    def _fail(self, backward: Backward) -> None:
        """Put the gradients of this rank back, so that nothing is lost."""
        backward.phase = Phase.FAILED
        if backward.round is not None:
            for i, gradient in backward.round.abandon():
                if self._parameters[i].grad is None:
                    self._parameters[i].grad = gradient

    def _recover(self, backward: Backward) -> None:
        """Let the other ranks finish a backward that raised here; this rank's part of it counts as zero."""
        if backward.phase is Phase.FAILED:
            self._backward = None  # the communication itself failed, here as on every rank
            return
        backward.silent = backward.aborted = True
        backward.recorder.backward_at = perf_counter_ns()
        try:
            with torch.no_grad():
                if backward.exchange is None:
                    self._ask(backward, bytearray(len(self._parameters)))
                self._complete(backward)
        finally:
            self._backward = None

    def _vote(self, late: dict[int, Tensor], *, aborted: bool) -> Exchange:
        """Ask all ranks, beside the last bucket, what came late and who gave up."""
        mask = bytearray(len(self._parameters))
        for i in late:
            mask[i] = 1
        return self.consensus.ask(mask, aborted)


class _EndOfBackward:
    """What autograd calls at the end. It dies with its graph task, which is how an aborted backward shows."""

    __slots__ = ("__weakref__", "_backward", "_reducer")

    def __init__(self, reducer: Reducer, backward: Backward) -> None:
        self._reducer = reducer
        self._backward = backward

    def __call__(self) -> None:
        self._reducer._end_of_backward(self._backward)
