"""torch's Work for collectives and messages over MPI: finished, combined, or a message under way."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI
from torch import distributed as dist

from ppe_ddp.backends.mpi.progress_engine import progress_engine
from ppe_ddp.backends.process_group.python_work import PythonWork
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from ppe_ddp.backends.mpi.mpi_waits import Waits

# A waiting receiver gives its core away after this long: messages take less, and a peer may need the core.
_SPIN_SECONDS = 0.005
_NAP_SECONDS = 50e-6


class FinishedWork(dist.Work):
    """A collective that was complete when its call returned.

    Args:
        result: What ``result()`` and the future give: the output tensors, or None.
    """

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True at once; a CUDA result is in the order of the stream that made the call."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def block_current_stream(self) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True: what fails raises from the call itself."""
        return True

    def exception(self) -> BaseException | None:
        """None."""
        return None

    def result(self) -> Any:
        """The output tensors."""
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A completed future of ``result()``."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future


class CombinedWork(PythonWork):
    """Several calls, waited for as one."""

    def __init__(self, works: list[PythonWork]) -> None:
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
        """A completed future of ``result()``: waits first."""
        self.wait()
        return FinishedWork(self._result).get_future()


class MessageWork(PythonWork):
    """A message on its way, to or from one rank.

    It moves only while somebody asks for it: in ``wait()``, ``is_completed()`` or another call of the same MPI.
    Its tensor must not be changed, or read if it is received, until ``wait()`` has returned.

    Args:
        request: MPI's handle of it.
        tensors: What is sent or received; one tensor.
        what: The call, for an error's text, such as ``"send to rank 1 (tag 0)"``.
        waits: Of its group; a ``wait()`` without a timeout of its own has theirs.
        arrive: Called once when it is complete: brings a received copy to its tensor.
    """

    def __init__(
        self,
        request: MPI.Request,
        tensors: list[torch.Tensor],
        what: str,
        waits: Waits,
        arrive: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(tensors)
        self._request = request
        self._what = what
        self._waits = waits
        self._arrive = arrive
        self._lock = threading.Lock()  # MPI allows no two threads to test one request
        self._done = False
        self._error: BaseException | None = None
        self._source = -1

    def is_completed(self) -> bool:
        """Whether it has arrived, or the local buffer may be used again; also True where it failed."""
        self._waits.progress()
        with self._lock:
            if not self._done:
                self._test()
            return self._done

    def is_success(self) -> bool:
        """Whether it is complete without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """The error that it failed with."""
        return self._error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is complete.

        Args:
            timeout: How long at most; None or a time that is not positive stands for the group's timeout.

        Returns:
            True.

        Raises:
            CommunicationError: MPI reports an error, a rank has given the group up, or the time is over; the
                message names the peer. After a timeout the message may still arrive, and the tensor must be left alone.
        """
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if seconds <= 0.0:
            seconds = self._waits.timeout
        start = time.monotonic()
        while not self.is_completed():
            waited = time.monotonic() - start
            if waited > seconds:
                raise CommunicationError(
                    f"{self._waits.place}: {self._what} has not been matched for {seconds:g} s: the other rank did "
                    "not call, or died"
                )
            if waited > _SPIN_SECONDS:
                self._waits.check(self._what)
                time.sleep(_NAP_SECONDS)
        if self._error is not None:
            raise self._error
        return True

    def keep(self) -> None:
        """Hold its memory as long as MPI may use it, whoever drops this."""
        progress_engine(os.getpid()).keep(self._request, (self, self._result))

    def source_rank(self) -> int:
        """Who sent it, as a rank of the group; -1 before it has arrived."""
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """A future of ``result()``; where it is not complete yet, a thread waits for it."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        if self.is_completed():
            self._settle(future)
        else:
            threading.Thread(target=self._settle, args=(future,), name="ppe_ddp-message", daemon=True).start()
        return future

    def _settle(self, future: torch.futures.Future[list[torch.Tensor]]) -> None:
        try:
            self.wait()
        except Exception as error:
            future.set_exception(error)  # type: ignore[arg-type]
        else:
            future.set_result(self._result)

    def _test(self) -> None:
        status = MPI.Status()
        try:
            if not self._request.Test(status):
                return
            self._source = status.Get_source()
            if self._arrive is not None:
                self._arrive()
        except MPI.Exception as error:
            self._error = CommunicationError(f"{self._waits.place}: {self._what} failed: {error}")
        self._arrive = None
        self._done = True
