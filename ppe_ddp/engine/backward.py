"""The state of one synchronized backward, from its first hook to the averages, and its transitions."""

from __future__ import annotations

import enum
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from ppe_ddp.engine.record import EventLog, Recorder
from ppe_ddp.torch_internals import uncompiled_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import Tensor

    from ppe_ddp.engine.bucket import LaunchSchedule
    from ppe_ddp.engine.completion import Turn
    from ppe_ddp.engine.mask_exchange import MaskExchange
    from ppe_ddp.engine.negotiation import Agreement


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
    """The state of one synchronized backward. Each attribute has one writer; only methods change the phase.

    Args:
        names: Of all parameters.
        is_manual: Whether a call has begun it, and not autograd.
        silent: Whether this rank contributes nothing and takes nothing.
        turn: When it may launch, among those of wrappers that share parameters with its own; None if there are none.
        is_empty: Whether it reaches no parameter, as far as autograd tells.

    Attributes:
        phase: The current phase.
        silent: Whether this rank contributes nothing and takes nothing: it only makes the calls that others wait for.
        aborted: Whether that is because its own backward raised; the vote tells the other ranks.
        is_manual: The argument.
        is_empty: The argument.
        turn: The argument.
        schedule: Launches the buckets of the current round; None before the plan is known, and when all is over.
        rounds: The schedules so far: that of the plan, and of a second round.

    Attributes that the reducer writes:
        waiting: One byte a parameter: how much its bucket still waits for, which is its gradient where that is
            expected here and has not arrived. None while the mask is not made before backward is over.
        unexpected: Parameters whose gradient arrived without being expected, or once more.
        arrivals: Parameters in the order in which their gradients arrived.
        dropped: How many forwards of this rank had no backward so far (``grad_hooks.py``).
        alive: Returns None once the graph task of this backward is gone.
        met: The error of another rank, to be raised when this backward is over; None where there is none.

    Attributes that the synchronizer writes:
        exchange: The mask exchange; None before.
        launch_triggers: The parameters at whose arrival the reducer launches the buckets that are ready.
        agreement: What came of it; None before.
        weight: What this rank's gradients are multiplied by before they are averaged; None where no rank weighs.
        late: Gradients that arrived after their bucket was launched, or that no rank expected, by parameter index.
        averaged: One byte a parameter: whether its average is in ``.grad``.
        is_writer: Whether this rank has written buffers of each submodule that has any.
        buffers: The module's buffers by name, as all ranks have agreed on them; empty if they are not broadcast.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        *,
        is_manual: bool = False,
        silent: bool = False,
        turn: Turn | None = None,
        is_empty: bool = False,
    ) -> None:
        self.phase = Phase.BEGUN
        self.silent, self.aborted = silent, False
        self.is_manual = is_manual
        self.is_empty = is_empty
        self.turn = turn
        self.recorder = Recorder(names)
        self.waiting: bytearray | None = bytearray(len(names)) if is_manual else None
        self.exchange: MaskExchange | None = None
        self.launch_triggers: Collection[int] = ()
        self.agreement: Agreement | None = None
        self.weight: float | None = None
        self.schedule: LaunchSchedule[Any] | None = None
        self.rounds: list[LaunchSchedule[Any]] = []
        self.unexpected: list[int] = []
        self.arrivals: list[int] = []
        self.late: dict[int, Tensor] = {}
        self.dropped = 0
        self.averaged = b""
        self.is_writer: list[bool] = []
        self.buffers: dict[str, Tensor] = {}
        self.alive: Callable[[], object] = lambda: True
        self.met: Exception | None = None

    def abort(self) -> None:
        """This rank's backward has raised: it contributes and takes nothing from here on."""
        self.silent = self.aborted = True

    def enter(self, phase: Phase) -> None:
        """Go on to ``phase``."""
        assert self.phase in _BEFORE[phase], f"a backward cannot go from {self.phase.name} to {phase.name}"
        self.phase = phase

    def expect(self, indices: Sequence[int]) -> None:
        """The mask is made while backward runs, which will bring the gradients of these parameters."""
        count = len(self.recorder.names)
        self.waiting = waiting = bytearray(b"\1" if len(indices) == count else b"\0") * count
        if len(indices) < count:
            for i in indices:
                waiting[i] = 1

    def expect_more(self, indices: Sequence[int], count: int) -> None:
        """Expect so many more gradients of these parameters, if the mask is made while backward runs."""
        if self.waiting is not None:
            for i in indices:
                self.waiting[i] += count

    def restart(self) -> None:
        """The mask that was sent is void; it is negotiated again when backward is over."""
        self.enter(Phase.BEGUN)
        self.exchange = self.waiting = None

    def add_round(self, schedule: LaunchSchedule[Any]) -> None:
        """Make ``schedule`` the current one: that of the plan, which is known now, or of a second round."""
        if self.schedule is None:
            self.enter(Phase.LAUNCHING)
        self.schedule = schedule
        self.rounds.append(schedule)
        self.recorder.rounds.append(schedule.record)

    def forget_rounds(self) -> None:
        """Let go of the schedules, which hold the backward that holds them."""
        self.schedule = None
        self.rounds = []

    def end(self) -> None:
        """The synchronization is complete."""
        self.enter(Phase.OVER)
        self.forget_rounds()
        self.recorder.returned_at = self.recorder.done_at = perf_counter_ns()
        if EventLog.current is not None:
            EventLog.current.backwards.append(self.recorder)

    def fail(self) -> str:
        """The communication has failed; returns the name of the phase in which it failed, for messages."""
        phase = Phase.FINISHING if self.phase is Phase.OVER else self.phase
        self.enter(Phase.FAILED)
        self.exchange = None
        return phase.name.lower()


class EndOfBackward:
    """The callback that autograd calls at the end of a backward.

    Autograd drops it with its graph task, also where the backward raises: a weak reference that is dead shows that.

    Args:
        then: Called with the backward that has ended.
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
