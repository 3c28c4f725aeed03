"""torch's Work for a message over MPI."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from mpi4py import MPI

from ppe_ddp.backends.process_group.pending_work import PendingWork
from ppe_ddp.backends.process_group.progress_engine import progress_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from ppe_ddp.backends.mpi.mpi_waits import Waits


class MessageWork(PendingWork):
    """A message on its way, to or from one rank.

    Args:
        start: Returns MPI's handle of it; None while it cannot be started yet, and is asked again.
        tensors: What is sent or received; one tensor.
        memory: What MPI reads or writes.
        what: The call, for an error's text, such as ``"send to rank 1 (tag 0)"``.
        waits: Of its group.
    """

    _waits: Waits

    def __init__(
        self,
        start: Callable[[], MPI.Request | None],
        tensors: list[torch.Tensor],
        memory: torch.Tensor,
        what: str,
        waits: Waits,
    ) -> None:
        super().__init__(what, waits)
        self.outputs = tensors
        self._start = start
        self._request = start()
        self._memory = memory
        self._reason: BaseException | None = None
        self._source = -1

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is complete; a message that is not matched within the group's timeout leaves the group good.

        Raises:
            CommunicationError: As :meth:`PendingWork.wait`; the message names the peer.
        """
        is_given = timeout is not None and timeout.total_seconds() > 0.0
        return super().wait(timeout if is_given else timedelta(seconds=self._waits.timeout))

    def keep(self) -> None:
        """Hold its memory as long as MPI may use it, whoever drops this."""
        if self._request is not None:
            progress_engine(os.getpid()).keep(self._request, (self, self._memory))

    def source_rank(self) -> int:
        """Who sent it, as a rank of the group; -1 before it has arrived."""
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def _has_ended(self) -> bool:
        status = MPI.Status()
        try:
            if self._request is None:
                self._request = self._start()
            if self._request is not None and self._request.Test(status):
                self._source = status.Get_source()
                return True
            reason = self._waits.failure
        except MPI.Exception as error:
            reason = str(error)
        if reason:
            self._reason = self._waits.error(self._what, reason)
        return bool(reason)

    def _failure(self) -> BaseException | None:
        return self._reason
