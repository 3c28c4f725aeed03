"""torch's Work for collectives over NCCL, under way on a stream."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ppe_ddp.backends.work import PythonWork
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from torch.futures import Future

    from ppe_ddp.backends.cuda_device import Device
    from ppe_ddp.backends.cupy_nccl.comm_stream import CommStream

__all__ = ["NcclOperation", "NcclWork"]

_NAP_SECONDS = 50e-6


class NcclOperation:
    """NCCL calls that are launched together.

    Args:
        what: The call, for errors: ``"rank 0 of 2, group 'default': all_reduce"``.
        check: Raises where the group has failed.
    """

    def __init__(self, what: str, check: Callable[[], None]) -> None:
        self.what = what
        self.check = check
        self.events: list[tuple[CommStream, Any]] = []
        """The streams that it is on, each with the event behind it."""
        self.launched = False
        """Whether NCCL has it."""
        self.launch: Callable[[], None] | None = None
        """What gives it to NCCL before that would happen by itself."""

    def start(self) -> None:
        """Launch it, if it was not launched yet and this thread may do so."""
        if not self.launched and self.launch is not None:
            self.launch()

    def is_over(self) -> bool:
        """Whether the device is through with it."""
        return self.launched and all(event.query() for _, event in self.events)


class NcclWork(PythonWork):
    """A collective or message on its way on the device.

    Args:
        operation: The calls.
        device: See :class:`~ppe_ddp.backends.cuda_device.Device`.
        index: The number of the device.
        result: The output tensors.
        blocks: Whether ``wait()`` keeps the host until it is over, as a barrier does.
        source: Whom a message comes from, as a rank of the group; -1 for anything else.
    """

    def __init__(
        self,
        operation: NcclOperation,
        device: Device,
        index: int,
        result: Any,
        *,
        blocks: bool = False,
        source: int = -1,
    ) -> None:
        super().__init__(result)
        self._operation = operation
        self._device = device
        self._index = index
        self._blocks = blocks
        self._source = source
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the caller's current stream wait; the host goes on, except after a barrier or with a timeout.

        Args:
            timeout: How long the host waits for the end; None or a time that is not positive: it does not.

        Returns:
            True.

        Raises:
            CommunicationError: The group has failed, or the time is over.
        """
        self._operation.start()
        self._operation.check()
        stream = self._device.current_stream(self._index)
        for _, event in self._operation.events:
            stream.wait_event(event)
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        if seconds > 0 or self._blocks:
            self._wait_on_host(seconds)
        return True

    def is_completed(self) -> bool:
        """Whether the device is through with it, or the group has failed; never waits."""
        self._operation.start()
        return self.exception() is not None or self._operation.is_over()

    def is_success(self) -> bool:
        """Whether the device is through with it, and the group has not failed."""
        return self.exception() is None and self._operation.is_over()

    def exception(self) -> BaseException | None:
        """The error that the group has failed with."""
        try:
            self._operation.check()
        except CommunicationError as error:
            return error
        return None

    def source_rank(self) -> int:
        """Who sent it, as a rank of the group; -1 for what is no received message."""
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> Future[Any]:
        """A Future of ``result()``: whoever waits for it, or goes on from it, does so in stream order."""
        if self._future is None:
            self._operation.start()
            future = self._device.future(self._index)
            # A Future takes the point of the stream that is current while it is set.
            stream = self._operation.events[0][0].stream
            for _, event in self._operation.events[1:]:
                stream.wait_event(event)
            with self._device.use_stream(stream):
                future.set_result(self.outputs)
            self._future = future
        return self._future

    def _wait_on_host(self, seconds: float) -> None:
        start = time.monotonic()
        while not self._operation.is_over():
            self._operation.check()
            if seconds > 0 and time.monotonic() - start > seconds:
                raise CommunicationError(f"{self._operation.what} is not over after {seconds:g} s")
            time.sleep(_NAP_SECONDS)
        self._operation.check()
