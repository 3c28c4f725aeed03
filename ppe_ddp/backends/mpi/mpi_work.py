"""torch's Work for a message over MPI, and for several calls that are waited for as one."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI

from ppe_ddp.backends.mpi.progress_engine import progress_engine
from ppe_ddp.backends.process_group.pending_work import PendingWork
from ppe_ddp.backends.process_group.python_work import PythonWork
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ppe_ddp.backends.mpi.mpi_waits import Waits


class CombinedWork(PythonWork):
    """Several calls, waited for as one."""

    def __init__(self, works: Sequence[PythonWork]) -> None:
        super().__init__([work.result() for work in works])
        self._works = works

    def is_completed(self) -> bool:
        """Whether all of them are; asks each, as a message moves only while somebody asks for it."""
        return all([work.is_completed() for work in self._works])

    def is_success(self) -> bool:
        """Whether all of them are complete without an error."""
        return all([work.is_success() for work in self._works])

    def exception(self) -> BaseException | None:
        """The first error that there is."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for one after another, for each no longer than ``timeout``; raises what they raise."""
        for work in self._works:
            work.wait(*([] if timeout is None else [timeout]))
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of ``result()``."""
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(self._outputs_of)

    def _outputs_of(self, collected: torch.futures.Future[Any]) -> Any:
        for future in collected.value():
            future.value()  # raises
        return self.outputs


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
            self._reason = CommunicationError(f"{self._waits.place}: {self._what} over MPI failed: {reason}")
        return bool(reason)

    def _failure(self) -> BaseException | None:
        return self._reason
