"""What a :class:`~ppe_ddp.engine.reducer.Reducer` needs of whoever talks to the other ranks for it.

The reducer knows when: a backward begins, gradients land, it is over. A carrier knows what is said then, and where
the gradients lie. It is apart because there are two: gradients in ``.grad``, packed anew for each backward
(``communication.py``), and gradients in buffers that stay (``ppe_ddp.megatron``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ppe_ddp.engine.backward import Backward
    from ppe_ddp.engine.census import Census
    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.engine.round import Departures
    from ppe_ddp.engine.streams import LandingStreams


class Carrier(ABC):
    """Carries gradients from rank to rank. Every rank comes through ask, open_round and complete in this order."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether nothing has to be sent at all."""

    @property
    @abstractmethod
    def ticks(self) -> Collection[int]:
        """Parameters at whose landing it is worth looking what may be launched."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of gradient memory held beside the gradients."""

    @abstractmethod
    def arm(self, census: Census, streams: LandingStreams | None) -> None:
        """Carry the gradients of ``census`` from now on, which land on these streams (None: on CPUs)."""

    @abstractmethod
    def landed(self, indices: Sequence[int]) -> None:
        """These have landed in ``.grad``: expected ones, or in a backward that is not synchronized."""

    @abstractmethod
    def ask(self, backward: Backward) -> None:
        """Start to agree on which gradients there are; does not wait."""

    @abstractmethod
    def is_agreed(self, backward: Backward) -> bool:
        """Whether the answer to :meth:`ask` is there."""

    @abstractmethod
    def open_round(self, backward: Backward) -> Departures:
        """Wait for the answer, and make the round that sends what is in it."""

    @abstractmethod
    def complete(self, backward: Backward) -> Steps:
        """Launch what is left, step by step: no gradient of this backward will land any more."""

    @abstractmethod
    def put_back(self, backward: Backward) -> None:
        """The communication has failed: wait for what is in flight, and lose nothing that can be kept."""
