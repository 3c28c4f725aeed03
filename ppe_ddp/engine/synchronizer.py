"""What a :class:`~ppe_ddp.engine.reducer.Reducer` needs of whoever talks to the other ranks for it.

The reducer knows when: a backward begins, gradients arrive, it is over. A synchronizer knows what is said then, and where
the gradients lie. It is apart because there are two: gradients in ``.grad``, packed anew for each backward
(``bucket_synchronizer.py``), and gradients in buffers that stay (``ppe_ddp.megatron``).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from ppe_ddp.engine.backward import Phase
from ppe_ddp.errors import PeerAbortedError

logger = logging.getLogger("ppe_ddp")

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ppe_ddp.engine.backward import Backward
    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.launch_schedule import LaunchSchedule
    from ppe_ddp.engine.module_state import ModuleState
    from ppe_ddp.engine.streams import GradientStreams


class Synchronizer(ABC):
    """Carries gradients from rank to rank. Every rank comes through ask, schedule and complete in this order."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether nothing has to be sent at all."""

    @property
    @abstractmethod
    def ticks(self) -> Collection[int]:
        """Parameters at whose arrival it is worth looking what may be launched."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of gradient memory held beside the gradients."""

    @property
    @abstractmethod
    def groups(self) -> Sequence[Groups]:
        """Where it communicates."""

    @property
    def is_closed(self) -> bool:
        """Whether the connections were closed after a failure; :meth:`ask` makes others, and waits for all ranks."""
        return any(groups.is_closed for groups in self.groups)

    @abstractmethod
    def arm(self, module_state: ModuleState, streams: GradientStreams | None) -> None:
        """Carry the gradients of ``module_state`` from now on, which arrive on these streams (None: on CPUs)."""

    @abstractmethod
    def on_accumulated(self, indices: Sequence[int]) -> None:
        """These have arrived in ``.grad``: expected ones, or in a backward that is not synchronized."""

    @abstractmethod
    def ask(self, backward: Backward) -> None:
        """Start to agree on which gradients there are; does not wait, unless the connections have to be made anew."""

    @abstractmethod
    def is_agreed(self, backward: Backward) -> bool:
        """Whether the answer to :meth:`ask` is there."""

    @abstractmethod
    def schedule(self, backward: Backward) -> LaunchSchedule[Any]:
        """Wait for the answer, and make the schedule that sends what is in it."""

    @abstractmethod
    def complete(self, backward: Backward) -> Steps:
        """Launch what is left, step by step: no gradient of this backward will arrive any more."""

    @abstractmethod
    def put_back(self, backward: Backward) -> None:
        """The communication has failed: wait for what is in flight, and lose nothing that can be kept."""

    def finish(self, backward: Backward) -> Steps:
        """Complete ``backward``, in new connections where those that it has begun in turn out to be closed."""
        try:
            yield from self.complete(backward)
        except PeerAbortedError as error:
            if not self.put_off(backward, error):
                raise
            self.ask(backward)
            yield from self.complete(backward)

    def fail(self, backward: Backward, error: BaseException) -> PeerAbortedError | None:
        """End the communication of ``backward`` after ``error``, for all ranks.

        Returns:
            What is to be raised instead, where the error is what a failure of another rank looks like here.
        """
        phase = backward.fail()
        heard = [groups.fail(error, phase) for groups in self.groups]
        self.put_back(backward)
        backward.schedule = None
        return next((one for one in heard if one is not None), None)

    def put_off(self, backward: Backward, error: BaseException) -> bool:
        """Where ``error`` says that a rank had failed in the step before, when it was over here: begin again.

        That rank comes to this step, too, and all ranks agree in new connections when backward is over; not before,
        since what is left of backward may have to communicate by itself.

        Returns:
            Whether it is so.
        """
        if backward.phase is not Phase.NEGOTIATING or not isinstance(error, PeerAbortedError) or error.step is None:
            return False
        if any(error.step >= groups.step for groups in self.groups):
            return False
        for groups in self.groups:
            groups.fail(error, "")
        logger.warning("%s (Its averages of that step were complete here.)", error)
        backward.begin_again()
        return True
