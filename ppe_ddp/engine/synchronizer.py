"""The interface between a reducer, which follows autograd, and a synchronizer, which communicates.

The :class:`~ppe_ddp.engine.reducer.Reducer` decides when to communicate: as a backward begins, gradients arrive, and it
ends. A synchronizer decides what is sent, and owns the memory of gradients. There are two: for gradients in ``.grad``,
which are packed anew for each backward (``bucket_synchronizer.py``), and for gradients in buffers that are laid out
once (``ppe_ddp.megatron``).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from ppe_ddp.engine.backward import Phase
from ppe_ddp.engine.groups import renew_all
from ppe_ddp.errors import AbortedError, PeerAbortedError

logger = logging.getLogger("ppe_ddp")

RAISED = "its backward has raised an error; look at that rank's traceback"

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ppe_ddp.engine.backward import Backward
    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.engine.failures import HookProgress
    from ppe_ddp.engine.gradients import GradientStreams
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.launch_schedule import LaunchSchedule
    from ppe_ddp.engine.module import ModuleState
    from ppe_ddp.errors import PpeDdpError


class Synchronizer(ABC):
    """Synchronizes gradients with the other ranks.

    For each backward, every rank calls ``start_negotiation()``, ``make_schedule()`` and ``complete()``, in this order.

    Attributes:
        empties_grad: Whether gradients are taken out of ``.grad`` as they arrive, so that no other wrapper finds them.
        knows_of_failure: Whether this step has failed, so that all ranks know of it.
    """

    empties_grad = False

    def __init__(self) -> None:
        self.knows_of_failure = False
        self._has_told = False  # whether the other ranks know of an error in renew()

    @property
    @abstractmethod
    def sends_nothing(self) -> bool:
        """Whether nothing is sent at all."""

    @property
    @abstractmethod
    def launch_triggers(self) -> Collection[int]:
        """The parameters at whose arrival the reducer launches the buckets that are ready."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of gradient memory held beside the gradients."""

    @property
    @abstractmethod
    def groups(self) -> Sequence[Groups]:
        """The process groups that it communicates in."""

    @property
    def is_closed(self) -> bool:
        """Whether its connections were closed by a failure: :meth:`start_negotiation` makes new ones, collectively."""
        return True in [groups.is_closed for groups in self.groups]

    @property
    def hook_progress(self) -> HookProgress | None:
        """How far a hook has come that communicates in groups of its own; None if there is none."""
        return None

    @property
    def unfinished(self) -> Backward | None:
        """A backward that is over, while its averages are not there yet; None if there is none."""
        return None

    @abstractmethod
    def use_module(self, module_state: ModuleState, streams: GradientStreams | None) -> None:
        """Synchronize the parameters of ``module_state`` from now on.

        Args:
            module_state: The parameters.
            streams: The CUDA streams that gradients are accumulated on; None where all parameters are on CPUs.
        """

    @abstractmethod
    def on_accumulated(self, indices: Sequence[int]) -> None:
        """Called when the gradients of these parameters were accumulated in ``.grad``.

        In a synchronized backward only for those that were expected.
        """

    @abstractmethod
    def start_negotiation(self, backward: Backward) -> None:
        """Start to agree on which gradients exist; waits only where the connections have to be made anew."""

    @abstractmethod
    def is_agreed(self, backward: Backward) -> bool:
        """Whether the result of :meth:`start_negotiation` has arrived."""

    @abstractmethod
    def make_schedule(self, backward: Backward) -> LaunchSchedule[Any]:
        """Wait for the agreed mask, and make the schedule that launches its buckets."""

    @abstractmethod
    def complete(self, backward: Backward) -> Steps:
        """Launch the remaining buckets and complete them, as steps: no gradient will arrive any more."""

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
        has_told, self._has_told = self._has_told, False
        if backward.phase is Phase.BEGUN and not isinstance(error, Exception) and not has_told:
            for groups in self.groups:  # an interrupt in a hook: the others are in this step, and not in the last
                groups.skip_step(error)
        phase = backward.fail()
        instead = [groups.fail(error, phase) for groups in self.groups]
        self.put_back(backward)
        backward.forget_rounds()
        return next((one for one in instead if one is not None), None)

    def abort(self, backward: Backward, reason: str = RAISED) -> bool:
        """End the communication of ``backward``, which has raised on this rank, for all ranks at once.

        Args:
            backward: The backward; what it had computed is put back.
            reason: What the other ranks are told.

        Returns:
            Whether it has: False where the ranks could not make new connections afterwards, and must go on with these.
        """
        if self.hook_progress is not None or not all(groups.is_duplicate for groups in self.groups):
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

    def renew(self) -> None:
        """Make new connections where a failure has closed them; every rank must call this together.

        Raises:
            PeerAbortedError: The backward of another rank has raised before it came here; the next step will do.
        """
        self._has_told = False
        try:
            renew_all(self.groups, self.hook_progress)
        except BaseException as error:
            self._has_told = True
            self.knows_of_failure = isinstance(error, PeerAbortedError)
            for groups in self.groups:
                if not groups.is_closed:  # renewed: it loses the step with the others
                    groups.begin_step()
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
        if error.step is None or error.is_in_step:
            return False
        if any(error.step >= groups.step for groups in self.groups):
            return False
        for groups in self.groups:
            groups.fail(error, "")
        logger.warning("%s (Its averages of that step were complete here.)", error)
        backward.restart()
        return True
