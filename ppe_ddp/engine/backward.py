"""The state of one synchronized backward, and the interface of the synchronizers that communicate for it."""

from __future__ import annotations

import enum
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import compress, zip_longest
from operator import attrgetter, methodcaller
from threading import get_ident
from time import perf_counter_ns
from typing import Any

from torch import Tensor

from ppe_ddp.engine.bucket import LaunchSchedule
from ppe_ddp.engine.completion import Completion, ResultSteps, Steps, Turn
from ppe_ddp.engine.failures import COMPARE, HookProgress, relayed
from ppe_ddp.engine.gradients import GradientStreams, has_nonzero
from ppe_ddp.engine.groups import Groups, renewing_all
from ppe_ddp.engine.mask_exchange import MaskExchange
from ppe_ddp.engine.module import ModuleState
from ppe_ddp.engine.negotiation import Agreement, Negotiation
from ppe_ddp.engine.record import EventLog, Recorder
from ppe_ddp.engine.replicas import DriftCheck
from ppe_ddp.errors import AbortedError, CommunicationError, PeerAbortedError, PpeDdpError
from ppe_ddp.torch_internals import uncompiled_hook
from ppe_ddp.weighing import Weights

logger = logging.getLogger("ppe_ddp")

_IS_CLOSED, _IS_DONE = attrgetter("is_closed"), methodcaller("done")


class Phase(enum.Enum):
    """The phase of a backward."""

    BEGUN = enum.auto()
    """Gradients arrive; nothing was sent to the other ranks yet."""
    NEGOTIATING = enum.auto()
    """The mask exchange is under way."""
    LAUNCHING = enum.auto()
    """The plan is known, and buckets are launched."""
    FINISHING = enum.auto()
    """All buckets are launched."""
    OVER = enum.auto()
    """The averages are in ``.grad``."""
    FAILED = enum.auto()
    """The communication failed; nothing more is sent for this backward."""


_BEFORE: dict[Phase, tuple[Phase, ...]] = {
    # A rank that hears of an older failure only after it has sent its mask negotiates again, with new connections.
    Phase.BEGUN: (Phase.NEGOTIATING,),
    Phase.NEGOTIATING: (Phase.BEGUN,),
    Phase.LAUNCHING: (Phase.NEGOTIATING,),
    Phase.FINISHING: (Phase.LAUNCHING,),
    # One rank alone negotiates nothing.
    Phase.OVER: (Phase.BEGUN, Phase.FINISHING),
    # Results may be waited for later (ppe_ddp.megatron), and fail when the backward is over.
    Phase.FAILED: (Phase.BEGUN, Phase.NEGOTIATING, Phase.LAUNCHING, Phase.FINISHING, Phase.OVER),
}
"""The phases from which each phase may be entered."""


class Backward:
    """The state of one synchronized backward. The reducer writes it; the synchronizer reports events by its methods."""

    def __init__(
        self,
        names: tuple[str, ...],
        *,
        is_manual: bool = False,
        silent: bool = False,
        turn: Turn | None = None,
        is_empty: bool = False,
        alive: Callable[[], object] = lambda: True,
        expected: Sequence[int] | None = None,
    ) -> None:
        self.phase = Phase.BEGUN
        # This rank contributes and takes nothing: it only issues the collectives that the other ranks wait for.
        self.silent = silent
        self.aborted = False  # this rank is silent because its own backward raised; the vote tells the other ranks
        self.is_manual = is_manual  # begun by a call, not by autograd
        self.is_empty = is_empty  # autograd has named no parameter that this backward reaches
        self.turn = turn  # orders the wrappers that share parameters; None if this wrapper shares none
        self.recorder = Recorder(names)
        # Launches the buckets of the current round; None before the plan is known, and after the end.
        self.schedule: LaunchSchedule[Any] | None = None
        self.rounds: list[LaunchSchedule[Any]] = []  # the schedule of the plan, then that of the second round
        # One byte a parameter: the number of arrivals that its bucket still waits for. It begins as 1 for each
        # ``expected`` gradient. None if the mask is sent only after backward.
        self.waiting: bytearray | None = bytearray(len(names)) if is_manual else None
        if expected is not None:
            self.waiting = waiting = bytearray(b"\1" if len(expected) == len(names) else b"\0") * len(names)
            if len(expected) < len(names):
                for i in expected:
                    waiting[i] = 1
        self.unexpected: list[int] = []  # parameters whose gradient arrived unexpectedly, or a second time
        self.arrivals: list[int] = []  # parameters in the order in which their gradients arrived
        self.dropped = 0  # how many forwards of this rank had no backward so far (``grad_hooks.py``)
        self.alive = alive  # returns None once the graph task is gone
        self.thread = get_ident()  # the thread that has begun it; one of autograd's for a GPU
        self.met: Exception | None = None  # an error to raise at the end of this backward
        self.cause: Exception | None = None  # another rank's failure, of which another wrapper was told in its graph
        self.averaged = b""  # one byte a parameter: whether its average is in ``.grad``
        self.is_handed_over = False  # whether averages are put into ``.grad``, as on all other ranks
        # Set by the synchronizer, through the methods below:
        self.exchanges: Sequence[MaskExchange] = ()  # of the mask: one for each reduction group
        self.agreement: Agreement | None = None  # the result of the mask exchange
        self.weight: float | None = None  # factor of this rank's gradients before averaging; None: no rank weighs
        # Gradients that arrived after their bucket was launched, or that no rank expected, by parameter index.
        self.late: dict[int, Tensor] = {}
        self.aside: dict[int, Tensor] = {}  # gradients of losses that weigh nothing, which are not sent
        self.lacking: set[int] = set()  # parameters whose gradient this rank announced and does not have
        self.is_writer: Sequence[bool] = ()  # by submodule with buffers: whether this rank has written any of them
        self.buffers: dict[str, Tensor] = {}  # by name, those that the ranks agree on; empty if none are broadcast

    @property
    def has_run_out(self) -> bool:
        """Whether this rank has no inputs left (``join()``) and takes part only when other ranks synchronize."""
        return self.silent and not self.aborted

    def abort(self) -> None:
        """Note that this rank's backward has raised: it contributes and takes nothing from here on."""
        self.silent = self.aborted = True

    def enter(self, phase: Phase) -> None:
        """Go on to ``phase``."""
        assert self.phase in _BEFORE[phase], f"a backward cannot go from {self.phase.name} to {phase.name}"
        self.phase = phase

    def expect_more(self, indices: Sequence[int], count: int) -> None:
        """Expect ``count`` more gradients of each of these parameters, if buckets are launched while backward runs."""
        if self.waiting is not None:
            for i in indices:
                self.waiting[i] += count

    def negotiate(
        self, exchanges: Sequence[MaskExchange], buffers: dict[str, Tensor], is_writer: Sequence[bool]
    ) -> None:
        """Note that the mask was sent, which also tells the writers of the module's ``buffers``."""
        self.enter(Phase.NEGOTIATING)
        self.exchanges, self.buffers, self.is_writer = exchanges, buffers, is_writer
        self.recorder.asked_at = perf_counter_ns()

    def note_writers(self, is_writer: Sequence[bool]) -> None:
        """Note what this rank's vote tells of the writers of buffers, some of which only backward writes."""
        self.is_writer = is_writer

    @property
    def is_agreed(self) -> bool:
        """Whether the agreed mask has arrived."""
        return all(map(_IS_DONE, self.exchanges))

    def restart(self) -> None:
        """Discard the mask that was sent; the ranks negotiate again when backward is over."""
        self.enter(Phase.BEGUN)
        self.exchanges, self.waiting = (), None

    def add_round(
        self, schedule: LaunchSchedule[Any], agreement: Agreement | None = None, weight: float | None = None
    ) -> None:
        """Make ``schedule`` the current one: first that of the agreed plan, later that of a second round."""
        if self.schedule is None:
            self.enter(Phase.LAUNCHING)
            self.agreement, self.weight = agreement, weight
        self.schedule = schedule
        self.rounds.append(schedule)
        self.recorder.rounds.append(schedule.record)

    def leave_for_vote(self, indices: Iterable[int]) -> None:
        """Note gradients that are here and no rank expects; they are announced in the vote."""
        self.unexpected.extend(indices)

    def add_late(self, gradients: Mapping[int, Tensor]) -> None:
        """Keep gradients that arrived after their bucket was launched, for the second round."""
        self.late.update(gradients)

    def set_aside(self, gradients: Iterable[tuple[int, Tensor | None]]) -> None:
        """Keep gradients that are not sent (they weigh nothing, or are NaN), until the step has succeeded or failed."""
        self.aside.update((i, gradient) for i, gradient in gradients if gradient is not None)

    def take_aside(self) -> dict[int, Tensor]:
        """Hand the gradients that were set aside over, to be put back."""
        aside, self.aside = self.aside, {}
        return aside

    def lack(self, indices: Iterable[int]) -> None:
        """Note the announced gradients that did not come, because an autograd function returned None for them."""
        self.lacking.update(i for i in indices if self.recorder.local[i])

    def take_late(self, index: int) -> Tensor | None:
        """Hand the late gradient of a parameter over to its bucket of the second round."""
        return self.late.pop(index, None)

    def take_buffers(self) -> dict[str, Tensor]:
        """Hand the buffers over and keep no reference: the broadcast counts references to a buffer."""
        buffers, self.buffers = self.buffers, {}
        return buffers

    def averaged_by_others(self, parameters: Iterable[object]) -> set[int]:
        """The identities of those of this wrapper's ``parameters`` that another one has averaged in this backward."""
        if self.turn is None:
            return set()
        return self.turn.averaged.difference(compress(map(id, parameters), self.averaged))

    def begin_hand_over(self) -> None:
        """Note that nothing is given up any more: all averages come into ``.grad``."""
        self.is_handed_over = True

    def release(self) -> None:
        """Drop the schedules (a reference cycle with this object), and the gradients that were put back."""
        self.schedule, self.rounds, self.late = None, [], {}

    def end(self, averaged: bytes = b"") -> None:
        """Note that the synchronization is complete."""
        self.enter(Phase.OVER)
        self.schedule, self.rounds, self.aside, self.averaged = None, [], {}, averaged
        self.recorder.returned_at = self.recorder.done_at = perf_counter_ns()
        if EventLog.current is not None:
            EventLog.current.backwards.append(self.recorder)

    def fail(self) -> str:
        """Note that the communication has failed; returns the name of the phase in which it failed, for messages."""
        phase = Phase.FINISHING if self.phase is Phase.OVER else self.phase
        self.enter(Phase.FAILED)
        self.exchanges = ()
        return phase.name.lower()


class EndOfBackward(partial[None]):
    """The callback that autograd calls at the end of a backward: of :func:`call_at_end`, with ``then`` and a list.

    The list has the backward, once it has begun. Autograd holds this object as long as the graph task, also if the
    backward raises. So a dead weak reference to it shows that the graph task is gone. The traceback of an interrupt,
    which the user may keep, has the arguments of the functions that were running. So this object is none of these.
    """


@uncompiled_hook
def call_at_end(then: Callable[[Backward], None], begun: Sequence[Backward]) -> None:
    """Called by autograd: the graph task is done."""
    for backward in begun:
        then(backward)


RAISED = "its backward has raised an error"


class Synchronizer(ABC):
    """Synchronizes gradients with the other ranks.

    For each backward, every rank calls ``start_negotiation()``, ``make_schedule()`` and ``complete()``, in this order.
    """

    empties_grad = False
    """Whether gradients are taken out of ``.grad`` as they arrive, so that no other wrapper finds them."""
    is_split = False
    """Whether the model is split over further ranks, and its layers communicate with them in backward. An error of
    another rank is then raised only at the end of backward: leaving it earlier would block those ranks."""
    tells_later = False
    """Whether an error in a backward is raised by ``finish_grad_sync()``."""
    drift: DriftCheck | None = None
    """Compares the parameters of the ranks."""
    commits: Callable[[], Steps] | None = None
    """Steps that end when all ranks have this step's averages, and raise if a rank has failed (``ppe_ddp.elastic``).
    Averages are handed over only after them."""
    sends_nothing = False
    """Whether nothing is sent at all: the group has one rank and uses the default reduce function."""
    ranges = False
    """Whether to mark ranges for torch's profiler."""
    negotiations: Sequence[Negotiation] = ()
    """Those of the groups, one each."""

    def __init__(self, groups: Sequence[Groups]) -> None:
        self.groups = groups
        self.knows_of_failure = False  # this step has failed, and all ranks know of it
        self.weights = Weights(has_nonzero)  # the weight (``weigh()``) of gradients that are not synchronized yet
        self.asking: Sequence[int] = ()
        """While masks are sent, each of which counts the step in its group: the numbers of the last step."""
        self.has_told = False
        """Whether the other ranks know of an error in :meth:`renewing`."""

    def must_renew(self) -> bool:
        """Whether a failure has closed the connections, so that all ranks have to call :meth:`renewing`."""
        return any(map(_IS_CLOSED, self.groups))

    def _finish_gathers(self) -> None:
        """Wait for all parameter gathers of the previous step that are still in flight."""
        for groups in self.groups:
            for gather in list(groups.gathers):
                gather.finish()

    @property
    def is_renewing(self) -> bool:
        """Whether this rank waits for the other ranks to make new connections."""
        return any(groups.is_renewing for groups in self.groups)

    @property
    def hook_progress(self) -> HookProgress | None:
        """The progress of a hook that communicates in groups of the user's; None if there is none."""
        return None

    @property
    def turns(self) -> frozenset[str]:
        """The names of resources that only one wrapper may use at a time (``completion.py``)."""
        return frozenset()

    @property
    def unfinished(self) -> Backward | None:
        """A backward that has ended and whose averages are still in flight; None if there is none."""
        return None

    @abstractmethod
    def use_module(self, module_state: ModuleState, streams: GradientStreams | None) -> None:
        """Synchronize the parameters of ``module_state`` from now on.

        Their gradients are accumulated on ``streams``; None on CPUs.
        """

    def takes(self, index: int) -> bool:
        """Whether this parameter, which was frozen when the module was listed, is synchronized if it is thawed."""
        return True

    def on_accumulated(self, indices: Sequence[int]) -> None:  # noqa: B027  # only those that empty .grad
        """Take gradients that were accumulated in ``.grad``; called only if :attr:`empties_grad`.

        In a synchronized backward it is called for expected gradients only.
        """

    @abstractmethod
    def start_negotiation(self, backward: Backward) -> Collection[int]:
        """Start the mask exchange, which finds out which gradients exist. The connections have to be open.

        Returns the parameters at whose arrival the reducer launches the buckets that are ready.
        """

    @abstractmethod
    def make_schedule(self, backward: Backward) -> LaunchSchedule[Any]:
        """Wait for the agreed mask, and make the schedule that launches the buckets of its plan."""

    @abstractmethod
    def complete(self, backward: Backward) -> ResultSteps[bytes]:
        """Launch the remaining buckets and wait for all, as steps; called after the last gradient has arrived.

        Returns one byte a parameter: whether its average is in ``.grad``.
        """

    def give_back(self, backward: Backward) -> None:  # noqa: B027  # those in buffers stay there
        """Put this rank's gradients back after its backward has raised; the communication goes on."""

    @abstractmethod
    def put_back(self, backward: Backward) -> None:
        """Wait for what is in flight after a failure, and put this rank's gradients back if possible."""

    def fail(self, backward: Backward, error: BaseException) -> PpeDdpError | None:
        """End the communication of ``backward`` after ``error``, for all ranks.

        Returns:
            The error to raise instead, if ``error`` is only the consequence of a failure on another rank.
        """
        self.knows_of_failure = True
        has_told, self.has_told = self.has_told, False
        if backward.phase is Phase.BEGUN and not isinstance(error, Exception) and not has_told:
            self._skip_step(error)  # an interrupt in a hook: the other ranks are in this step, not in the last
        phase, self.asking = backward.fail(), ()
        instead: list[PpeDdpError | None] = []

        def end(groups: Groups) -> None:
            instead.append(groups.fail(error, phase))

        with ExitStack() as stack:  # called in reverse order; all are called, even if an interrupt ends a wait
            stack.callback(backward.release)
            stack.callback(self.put_back, backward)
            for groups in reversed(self.groups):
                stack.callback(end, groups)
            if isinstance(error, Exception):  # closing would end gathers of the previous step that still arrive here
                stack.enter_context(suppress(PeerAbortedError, CommunicationError))
                stack.callback(self._finish_gathers)
        return next((one for one in instead if one is not None), None)

    def abort(self, backward: Backward, reason: str = RAISED) -> bool:
        """End the communication of ``backward``, which has raised on this rank, and report ``reason`` to all ranks.

        Returns False, and ends nothing, if the connections could not be made anew: the step has to go on in them.
        """
        others = [groups for groups in self.groups if groups.world_size > 1] or self.groups
        if self.hook_progress is not None or not all(groups.is_duplicate for groups in others):
            self.give_back(backward)
            return False
        error = AbortedError(reason) if backward.cause is None else relayed(backward.cause)
        if backward.phase is Phase.BEGUN:
            self._skip_step(error)
        self.fail(backward, error)
        return True

    def _skip_step(self, error: BaseException) -> None:
        """Count a step that has failed as it began, in the groups in which its mask, which counts it, was not sent."""
        for groups, step in zip_longest(self.groups, self.asking):
            if step is None or groups.step == step:
                groups.skip_step(error)

    def begin_step(self) -> None:
        """Begin a step; a failure of the previous one is over."""
        self.knows_of_failure = False

    def renewing(self, only: Groups | None = None) -> Steps:
        """Make new connections in place of closed ones, in all groups or ``only`` one; its ranks must do this together.

        Raises:
            PeerAbortedError: The backward of another rank has raised before that rank came here. The next step tries
                again.
        """
        self.has_told = False
        try:
            yield from renewing_all(self._these(only), self.hook_progress)
        except BaseException as error:
            self.has_told = True
            self.knows_of_failure = isinstance(error, PeerAbortedError)
            for groups in self._these(only):
                if not groups.is_closed:  # already renewed: this group loses the step as the other groups do
                    groups.step += 1
            raise

    def connect_again(self, only: Groups | None = None) -> None:
        """Make new connections in place of closed ones, outside of a step; all ranks must call this together."""
        while self.must_renew() and any(map(_IS_CLOSED, self._these(only))):
            with suppress(PeerAbortedError):  # the other ranks make the next attempt in their next step
                Completion(self.renewing(only), self.groups[0]).finish()

    def _these(self, only: Groups | None) -> Sequence[Groups]:
        return self.groups if only is None else [only]

    def check(self, only: Groups | None = None, *, with_buffers: bool = True) -> None:
        """Compare parameters, buffers and options of the ranks outside of a step, see :meth:`Negotiation.check`.

        With ``only`` one of the groups, just its ranks call this, and those of the others may not know of a failure.

        After a failure all ranks connect again, also those that had completed the step before they hear of it, and
        those that others have waited for until the timeout.
        """
        while True:
            self.connect_again(only)
            try:
                for groups, negotiation in zip(self.groups, self.negotiations, strict=True):
                    if only in (None, groups):
                        negotiation.check(with_buffers=with_buffers)
            except (PeerAbortedError, CommunicationError) as error:
                # Those who have given a step up come here as well, those who have given this call up do not.
                if error.phase == COMPARE or (isinstance(error, CommunicationError) and not error.is_late):
                    told = [groups.fail(error, COMPARE) for groups in self._these(only)]
                    if (instead := next(filter(None, told), None)) is not None:
                        raise instead from error
                    raise
                for groups in self.groups:  # or another rank, which has closed all, would wait for this one
                    groups.fail(error, "")
            else:
                for groups in self._these(only):
                    groups.processes.note_open()  # else this rank would seem to wait, and not to be late
                return

    def postpone(self, backward: Backward, error: BaseException) -> bool:
        """Postpone the negotiation to the end of ``backward``, if ``error`` reports a failure in the previous step.

        The averages of the previous step were complete on this rank. The rank that failed takes part in this step, and
        all ranks negotiate with new connections. They wait for the end of backward because the rest of it may contain
        collectives of its own.

        Returns:
            Whether ``error`` is such a report, and the negotiation was postponed.
        """
        if backward.phase is not Phase.NEGOTIATING or not isinstance(error, PeerAbortedError):
            return False
        if error.step is None or error.is_in_step or backward.has_run_out:
            return False
        # A rank that postpones a step reports that in its other groups, with an empty phase.
        step = error.step if error.phase else error.step - 1
        # Groups may count apart: some go on from an earlier wrapper. The step is that of the group that has told.
        told = [groups for groups in self.groups if error.told_in == f"{groups.name}/{groups.generation}"]
        if any(step >= groups.step for groups in told or self.groups):
            return False
        for groups in self.groups:
            groups.fail(error, "")
            groups.step -= 1  # the step begins again
        logger.warning("%s (Its averages of that step were complete here.)", error)
        backward.restart()
        return True
