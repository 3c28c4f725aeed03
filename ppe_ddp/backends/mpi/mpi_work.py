"""torch's Work for a message over MPI."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mpi4py import MPI

from ppe_ddp.backends.process_group.peer_message import PeerMessage
from ppe_ddp.backends.process_group.progress_engine import progress_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ppe_ddp.backends.mpi.mpi_waits import Waits


class MessageWork(PeerMessage):
    """A message over MPI.

    Args:
        start: Returns MPI's handle of it; None while it cannot be started yet, and is asked again.
        tensor: What is sent or received.
        memory: What MPI reads or writes.
        what: The call, for an error's text, such as ``"send to rank 1 (tag 0)"``.
        waits: Of its group.
    """

    _waits: Waits

    def __init__(
        self,
        start: Callable[[], MPI.Request | None],
        tensor: Tensor,
        memory: Tensor,
        what: str,
        waits: Waits,
    ) -> None:
        super().__init__(what, waits, tensor)
        self._start = start
        self._request = start()
        self._memory = memory
        self._reason: BaseException | None = None

    def keep(self) -> None:
        """Hold its memory as long as MPI may use it, whoever drops this."""
        if self._request is not None:
            progress_engine(os.getpid()).keep(self._request, (self, self._memory))

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
