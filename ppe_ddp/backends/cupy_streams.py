"""Streams, and the one rule that memory and streams follow.

The rule: NCCL works on streams of its own. Such a stream waits for what the caller's stream has been given by then
(`Channel.follow`), the caller's stream waits for it when the caller asks for the result (`Work.wait`), and the
caller's tensors are not given to anybody else before it is through with them (`Device.hold`), whatever the caller does
with his own references. Memory that is needed in between is taken and given back on NCCL's stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.futures import Future

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from torch import Tensor

    from ppe_ddp.backends.cupy_communicator import Members

__all__ = ["Channel", "CudaDevice", "Device", "Event", "Stream"]


class Event(Protocol):
    """A point in a stream; ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether the stream has passed it."""


class Stream(Protocol):
    """A queue of work on a device; ``torch.cuda.Stream``."""

    @property
    def cuda_stream(self) -> int:
        """The address by which libraries know it."""

    def wait_event(self, event: Any) -> None:
        """Let what is put into this stream from now on wait for ``event``; the host does not wait."""

    def record_event(self) -> Any:
        """The point after what has been put into this stream."""


class Device(Protocol):
    """What the backend needs of one kind of device: passed in, so that its logic can be tried without one."""

    def current(self) -> int:
        """The number of this thread's current device."""

    def at(self, index: int) -> AbstractContextManager[Any]:
        """Make a device current."""

    def current_stream(self, index: int) -> Stream:
        """This thread's current stream of a device."""

    def fresh_stream(self, index: int) -> Stream:
        """A new stream."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream, and its device, current."""

    def hold(self, tensor: Tensor, stream: Any) -> None:
        """Keep a tensor's memory from being used again before ``stream`` is through with what it has now."""

    def room(self, index: int) -> torch.device:
        """Where memory of a device is to be taken."""

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph."""

    def future(self, index: int) -> Future[Any]:
        """A Future whose value comes with the point in the stream that is current when it is set."""


class CudaDevice:
    """CUDA, by way of torch."""

    def current(self) -> int:
        """The number of this thread's current device."""
        return torch.cuda.current_device()

    def at(self, index: int) -> AbstractContextManager[Any]:
        """Make a device current."""
        return torch.cuda.device(index)

    def current_stream(self, index: int) -> Stream:
        """This thread's current stream of a device."""
        return torch.cuda.current_stream(index)

    def fresh_stream(self, index: int) -> Stream:
        """A new stream."""
        return torch.cuda.Stream(index)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream, and its device, current."""
        return torch.cuda.stream(stream)

    def hold(self, tensor: Tensor, stream: Any) -> None:
        """Keep a tensor's memory from being used again before ``stream`` is through with what it has now."""
        tensor.record_stream(stream)

    def room(self, index: int) -> torch.device:
        """Where memory of a device is to be taken."""
        return torch.device("cuda", index)

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph."""
        return torch.cuda.is_current_stream_capturing()

    def future(self, index: int) -> Future[Any]:
        """A Future whose value comes with the point in the stream that is current when it is set."""
        return Future(devices=[torch.device("cuda", index)])


class Channel:
    """One stream for NCCL, between some ranks, on one device.

    Args:
        device: See :class:`Device`.
        index: The number of the device.
        members: Whose communicator it belongs to.
    """

    def __init__(self, device: Device, index: int, members: Members) -> None:
        self.index = index
        self.members = members
        self.stream = device.fresh_stream(index)
        self._device = device

    def follow(self, tensors: Iterable[Tensor]) -> None:
        """Wait, on the stream, for what the caller's stream has now, and hold the caller's tensors."""
        self.stream.wait_event(self._device.current_stream(self.index).record_event())
        for tensor in tensors:
            self._device.hold(tensor, self.stream)
