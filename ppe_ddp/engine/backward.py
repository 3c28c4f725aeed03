"""One synchronized backward, from its first hook to the averages, and what a synchronizer does for it."""

from __future__ import annotations

import enum
import logging
from abc import ABC, abstractmethod
from contextlib import ExitStack, suppress
from operator import attrgetter, methodcaller
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ppe_ddp.engine.gradients import has_nonzero
from ppe_ddp.engine.groups import renewing_all
from ppe_ddp.engine.record import EventLog, Recorder
from ppe_ddp.errors import AbortedError, CommunicationError, PeerAbortedError
from ppe_ddp.torch_internals import uncompiled_hook
from ppe_ddp.weighing import Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from torch import Tensor

    from ppe_ddp.engine.bucket import LaunchSchedule
    from ppe_ddp.engine.completion import ResultSteps, Steps, Turn
    from ppe_ddp.engine.failures import HookProgress
    from ppe_ddp.engine.gradients import GradientStreams
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.mask_exchange import MaskExchange
    from ppe_ddp.engine.module import ModuleState
    from ppe_ddp.engine.negotiation import Agreement
    from ppe_ddp.engine.replicas import DriftCheck
    from ppe_ddp.errors import PpeDdpError

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
"""From where each phase may be entered."""


class Backward:
    """The state of one synchronized backward. The reducer writes it; a synchronizer tells it what has happened."""

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
        self.silent = silent  # this rank contributes and takes nothing: it only makes the calls that others wait for
        self.aborted = False  # whether that is because its own backward raised; the vote tells the other ranks
        self.is_manual = is_manual  # whether a call has begun it, and not autograd
        self.is_empty = is_empty  # whether it reaches no parameter, as far as autograd tells
        self.turn = turn  # when it may launch, among wrappers that share parameters; None if there are none
        self.recorder = Recorder(names)
        # Launches the buckets of the current round; None before the plan is known, and when all is over.
        self.schedule: LaunchSchedule[Any] | None = None
        self.rounds: list[LaunchSchedule[Any]] = []  # that of the plan, and of a second round
        # One byte a parameter: how much its bucket still waits for, which is its gradient where that is ``expected``
        # here and has not arrived. None while the mask is not made before backward is over.
        self.waiting: bytearray | None = bytearray(len(names)) if is_manual else None
        if expected is not None:
            self.waiting = waiting = bytearray(b"\1" if len(expected) == len(names) else b"\0") * len(names)
            if len(expected) < len(names):
                for i in expected:
                    waiting[i] = 1
        self.unexpected: list[int] = []  # parameters whose gradient arrived without being expected, or once more
        self.arrivals: list[int] = []  # parameters in the order in which their gradients arrived
        self.dropped = 0  # how many forwards of this rank had no backward so far (``grad_hooks.py``)
        self.alive = alive  # returns None once the graph task is gone
        self.met: Exception | None = None  # an error, to be raised when this backward is over
        self.averaged = b""  # one byte a parameter: whether its average is in ``.grad``
        # The synchronizer tells these.
        self.exchanges: Sequence[MaskExchange] = ()  # of the mask: one for each reduction group
        self.agreement: Agreement | None = None  # what came of the exchange
        self.weight: float | None = None  # what gradients are multiplied by before averaging; None: no rank weighs
        # Gradients that arrived after their bucket was launched, or that no rank expected, by parameter index.
        self.late: dict[int, Tensor] = {}
        self.lacking: set[int] = set()  # parameters whose gradient was announced here, and is not there
        self.is_writer: Sequence[bool] = ()  # whether this rank has written buffers of each submodule that has any
        self.buffers: dict[str, Tensor] = {}  # by name, as all ranks agree on them; empty if they are not broadcast

    @property
    def has_run_out(self) -> bool:
        """Whether this rank has no inputs left, and takes part only where others announce a synchronization."""
        return self.silent and not self.aborted

    def abort(self) -> None:
        """This rank's backward has raised: it contributes and takes nothing from here on."""
        self.silent = self.aborted = True

    def enter(self, phase: Phase) -> None:
        """Go on to ``phase``."""
        assert self.phase in _BEFORE[phase], f"a backward cannot go from {self.phase.name} to {phase.name}"
        self.phase = phase

    def expect_more(self, indices: Sequence[int], count: int) -> None:
        """Expect so many more gradients of these parameters, if the mask is made while backward runs."""
        if self.waiting is not None:
            for i in indices:
                self.waiting[i] += count

    def negotiate(
        self, exchanges: Sequence[MaskExchange], buffers: dict[str, Tensor], is_writer: Sequence[bool]
    ) -> None:
        """The mask was sent; it speaks of these ``buffers`` of the module, too."""
        self.enter(Phase.NEGOTIATING)
        self.exchanges, self.buffers, self.is_writer = exchanges, buffers, is_writer
        self.recorder.asked_at = perf_counter_ns()

    @property
    def is_agreed(self) -> bool:
        """Whether the agreed mask has arrived."""
        return all(map(_IS_DONE, self.exchanges))

    def restart(self) -> None:
        """The mask that was sent is void; it is negotiated again when backward is over."""
        self.enter(Phase.BEGUN)
        self.exchanges, self.waiting = (), None

    def add_round(
        self, schedule: LaunchSchedule[Any], agreement: Agreement | None = None, weight: float | None = None
    ) -> None:
        """Make ``schedule`` the current one: that of the plan, which was agreed on now, or of a second round."""
        if self.schedule is None:
            self.enter(Phase.LAUNCHING)
            self.agreement, self.weight = agreement, weight
        self.schedule = schedule
        self.rounds.append(schedule)
        self.recorder.rounds.append(schedule.record)

    def add_late(self, gradients: Mapping[int, Tensor]) -> None:
        """These arrived after their bucket was launched: they wait for the second round."""
        self.late.update(gradients)

    def lack(self, indices: Iterable[int]) -> None:
        """There are no gradients of these: the function that would give one that was announced has given None."""
        self.lacking.update(i for i in indices if self.recorder.local[i])

    def take_late(self, index: int) -> Tensor | None:
        """Hand over the late gradient of a parameter to the bucket that sends it."""
        return self.late.pop(index, None)

    def take_buffers(self) -> dict[str, Tensor]:
        """Hand over the buffers, as a broadcast looks at who refers to them."""
        buffers, self.buffers = self.buffers, {}
        return buffers

    def release(self) -> None:
        """Let go of the schedules, which hold the backward that holds them, and of gradients that were put back."""
        self.schedule, self.rounds, self.late = None, [], {}

    def end(self, averaged: bytes = b"") -> None:
        """The synchronization is complete."""
        self.enter(Phase.OVER)
        self.schedule, self.rounds, self.averaged = None, [], averaged
        self.recorder.returned_at = self.recorder.done_at = perf_counter_ns()
        if EventLog.current is not None:
            EventLog.current.backwards.append(self.recorder)

    def fail(self) -> str:
        """The communication has failed; returns the name of the phase in which it failed, for messages."""
        phase = Phase.FINISHING if self.phase is Phase.OVER else self.phase
        self.enter(Phase.FAILED)
        self.exchanges = ()
        return phase.name.lower()


class EndOfBackward:
    """The callback that autograd calls at the end of a backward; it calls ``then`` with the backward that has ended.

    Autograd drops it with its graph task, also where the backward raises: a weak reference that is dead shows that.
    """

    __slots__ = ("__weakref__", "_then", "backward")

    def __init__(self, then: Callable[[Backward], None]) -> None:
        self._then = then
        self.backward: Backward | None = None

    @uncompiled_hook
    def __call__(self) -> None:
        """Called by autograd: the graph task is done."""
        if self.backward is not None:
            self._then(self.backward)


RAISED = "its backward has raised an error"


class Synchronizer(ABC):
    """Synchronizes gradients with the other ranks.

    For each backward, every rank calls ``start_negotiation()``, ``make_schedule()`` and ``complete()``, in this order.
    """

    empties_grad = False
    """Whether gradients are taken out of ``.grad`` as they arrive, so that no other wrapper finds them."""
    is_split = False
    """Whether the model is split over other ranks, so that its layers communicate in backward. An error of another rank
    then waits for the end of backward: a rank that left it would keep those waiting."""
    tells_later = False
    """Whether ``finish_grad_sync()`` raises what has failed in a backward."""
    drift: DriftCheck | None = None
    """Compares the ranks' parameters."""
    commits: Callable[[], Steps] | None = None
    """Ends when all ranks have this step's averages, which are handed over then; else raises (``ppe_ddp.elastic``)."""
    sends_nothing = False
    """Whether nothing is sent at all: one rank is alone, with the default reduce function."""
    ranges = False
    """Whether to mark what is done as ranges for torch's profiler."""

    def __init__(self, groups: Sequence[Groups]) -> None:
        self.groups = groups
        self.knows_of_failure = False  # whether this step has failed, so that all ranks know of it
        self.weights = Weights(has_nonzero)  # how much the gradients stand for that were not synchronized yet
        self.has_told = False
        """Whether the other ranks know of an error in :meth:`renewing`."""

    def must_renew(self) -> bool:
        """Whether its connections were closed by a failure: :meth:`renewing` makes new ones, collectively."""
        return any(map(_IS_CLOSED, self.groups))

    def _finish_gathers(self) -> None:
        """Wait for the parameters of the step before that are in flight."""
        for groups in self.groups:
            for gather in list(groups.gathers):
                gather.finish()

    @property
    def is_renewing(self) -> bool:
        """Whether this rank has come to make new connections, and the others may not have."""
        return any(groups.is_renewing for groups in self.groups)

    @property
    def hook_progress(self) -> HookProgress | None:
        """How far a hook has come that communicates in groups of its own; None if there is none."""
        return None

    @property
    def turns(self) -> frozenset[str]:
        """Names what only one wrapper may do at a time (``completion.py``)."""
        return frozenset()

    @property
    def unfinished(self) -> Backward | None:
        """A backward that is over, while its averages are not there yet; None if there is none."""
        return None

    @abstractmethod
    def use_module(self, module_state: ModuleState, streams: GradientStreams | None) -> None:
        """Synchronize these parameters from now on, whose gradients are accumulated on ``streams``; None on CPUs."""

    def on_accumulated(self, indices: Sequence[int]) -> None:  # noqa: B027  # only those that empty .grad
        """Called, where it :attr:`empties_grad`, when the gradients of these parameters were accumulated there.

        In a synchronized backward only for those that were expected.
        """

    @abstractmethod
    def start_negotiation(self, backward: Backward) -> Collection[int]:
        """Start to agree on which gradients exist, with connections that are open.

        Returns the parameters at whose arrival the reducer launches the buckets that are ready.
        """

    @abstractmethod
    def make_schedule(self, backward: Backward) -> LaunchSchedule[Any]:
        """Wait for the agreed mask, and make the schedule that launches its buckets."""

    @abstractmethod
    def complete(self, backward: Backward) -> ResultSteps[bytes]:
        """Launch the remaining buckets and complete them, as steps: no gradient will arrive any more.

        Returns one byte a parameter: whether its average is in ``.grad``.
        """

    def give_back(self, backward: Backward) -> None:  # noqa: B027  # those in buffers stay there
        """This rank's backward has raised: put back what it had computed, without ending the communication."""

    @abstractmethod
    def put_back(self, backward: Backward) -> None:
        """The communication has failed: wait for what is in flight, and put this rank's gradients back if possible."""

    def fail(self, backward: Backward, error: BaseException) -> PpeDdpError | None:
        """End the communication of ``backward`` after ``error``, for all ranks.

        Returns:
            The error to raise instead, where ``error`` is only the consequence of a failure on another rank.
        """
        self.knows_of_failure = True
        has_told, self.has_told = self.has_told, False
        if backward.phase is Phase.BEGUN and not isinstance(error, Exception) and not has_told:
            for groups in self.groups:  # an interrupt in a hook: the others are in this step, and not in the last
                groups.skip_step(error)
        phase = backward.fail()
        instead: list[PpeDdpError | None] = []

        def end(groups: Groups) -> None:
            instead.append(groups.fail(error, phase))

        with ExitStack() as stack:  # the last comes first; all are called, also where an interrupt ends a wait
            stack.callback(backward.release)
            stack.callback(self.put_back, backward)
            for groups in reversed(self.groups):
                stack.callback(end, groups)
            if isinstance(error, Exception):  # closing would cut off what this rank still receives of the step before
                stack.enter_context(suppress(PeerAbortedError, CommunicationError))
                stack.callback(self._finish_gathers)
        return next((one for one in instead if one is not None), None)

    def abort(self, backward: Backward, reason: str = RAISED) -> bool:
        """End the communication of ``backward``, which has raised here, for all ranks at once, and tell them why.

        Returns False where the ranks could not make new connections afterwards, and must go on with these.
        """
        others = [groups for groups in self.groups if groups.world_size > 1] or self.groups
        if self.hook_progress is not None or not all(groups.is_duplicate for groups in others):
            self.give_back(backward)
            return False
        error = AbortedError(reason)
        if backward.phase is Phase.BEGUN:
            for groups in self.groups:
                groups.skip_step(error)
        self.fail(backward, error)
        return True

    def begin_step(self) -> None:
        """A step begins: one that has failed is over."""
        self.knows_of_failure = False

    def renewing(self) -> Steps:
        """Make new connections where a failure has closed them; every rank must do this together.

        Raises:
            PeerAbortedError: The backward of another rank has raised before it came here; the next step will do.
        """
        self.has_told = False
        try:
            yield from renewing_all(self.groups, self.hook_progress)
        except BaseException as error:
            self.has_told = True
            self.knows_of_failure = isinstance(error, PeerAbortedError)
            for groups in self.groups:
                if not groups.is_closed:  # renewed: it loses the step with the others
                    groups.step += 1
            raise

    def postpone(self, backward: Backward, error: BaseException) -> bool:
        """Negotiate again at the end of ``backward``, if ``error`` reports a failure in the step before.

        The averages of that step were complete on this rank. The rank that failed takes part in this step, too, and
        all ranks negotiate with new connections. Not before the end of backward, since what is left of it may have to
        communicate by itself.

        Returns:
            Whether ``error`` is such a report, and the negotiation was postponed.
        """
        if backward.phase is not Phase.NEGOTIATING or not isinstance(error, PeerAbortedError):
            return False
        if error.step is None or error.is_in_step or backward.has_run_out:
            return False
        # Who postpones a step tells so in its other groups, without a phase.
        step = error.step if error.phase else error.step - 1
        if any(step >= groups.step for groups in self.groups):
            return False
        for groups in self.groups:
            groups.fail(error, "")
            groups.step -= 1  # it begins once more
        logger.warning("%s (Its averages of that step were complete here.)", error)
        backward.restart()
        return True
