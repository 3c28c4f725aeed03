"""The state of one backward, from its first sign to the hand-over."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from ppe_ddp.engine.trace import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ppe_ddp.engine.mask_exchange import MaskExchange
    from ppe_ddp.engine.round import Departures


class Phase(enum.Enum):
    """How far a backward is. It only moves on, or to FAILED."""

    BEGUN = enum.auto()
    """Gradients land; nothing was said to the other ranks yet."""
    NEGOTIATING = enum.auto()
    """The mask is under way."""
    LAUNCHING = enum.auto()
    """The plan is known and buckets leave."""
    FINISHING = enum.auto()
    """All buckets have left."""
    OVER = enum.auto()
    """The gradients are handed over."""
    FAILED = enum.auto()
    """The communication failed; nothing more is sent for this backward."""


class Backward:
    """What is known about one synchronized backward.

    Attributes:
        waiting: One byte a parameter: how much its bucket still waits for, which is its gradient where that is
            expected here and has not landed. None while the mask is not made before backward is over.
        unexpected: Parameters whose gradient landed without being expected, or once more.
        arrivals: Parameters in the order in which their gradients landed.
        late: Gradients that landed after their bucket had left, or that no rank expected, by parameter index.
        dropped: How many forwards of this rank had no backward so far.
        averaged: One byte a parameter: whether its average is in ``.grad``.
        alive: Returns None when the graph task that this belongs to is gone.
        silent: Whether this rank contributes nothing and takes nothing.
        aborted: Whether that is because its own backward raised.
        active: The number of ranks that contribute.
        source: The first of them; its buffers are broadcast.
        buffers: Those of this rank as all ranks have agreed on them.
    """

    def __init__(self, names: tuple[str, ...], *, silent: bool = False) -> None:
        self.phase = Phase.BEGUN
        self.recorder = Recorder(names)
        self.waiting: bytearray | None = None
        self.exchange: MaskExchange | None = None
        self.round: Departures | None = None
        self.unexpected: list[int] = []
        self.arrivals: list[int] = []
        self.late: dict[int, Tensor] = {}
        self.dropped = 0
        self.averaged = b""
        self.silent = silent
        self.aborted = False
        self.is_manual = False
        self.active = 0
        self.source = 0
        self.buffers: list[Tensor] = []
        self.alive: Callable[[], object] = lambda: True


class EndOfBackward:
    """What autograd calls at the end. It dies with its graph task, which is how an aborted backward shows.

    Args:
        then: Called with the backward that has ended.
    """

    __slots__ = ("__weakref__", "_then", "backward")

    def __init__(self, then: Callable[[Backward], None]) -> None:
        self._then = then
        self.backward: Backward | None = None

    def __call__(self) -> None:
        """The graph task is done."""
        if self.backward is not None:
            self._then(self.backward)
