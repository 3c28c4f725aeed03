"""The parts of CUDA that this library uses: streams, events, and memory that belongs to streams.

Passed in wherever it is needed, so that what follows streams can be tried without a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.futures import Future

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

__all__ = ["CudaDevice", "Device", "Event", "Stream"]


class Event(Protocol):
    """A point in a stream; ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether the stream has passed it."""


class Stream(Protocol):
    """A queue of work on a device; ``torch.cuda.Stream``."""

    @property
    def cuda_stream(self) -> int:
        """Its address, for libraries in C."""

    def wait_event(self, event: Any) -> None:
        """Let what is put into this stream from now on wait for ``event``; the host does not wait."""

    def wait_stream(self, stream: Any) -> None:
        """Let what is put into this stream from now on wait for what ``stream`` has now; the host does not wait."""

    def record_event(self) -> Any:
        """The point after what has been put into this stream."""


class Device(Protocol):
    """The functions that are needed of one kind of device; tests have a stand-in."""

    def current(self) -> int:
        """The number of this thread's current device."""

    def make_current(self, index: int) -> AbstractContextManager[Any]:
        """Make a device current."""

    def current_stream(self, index: int | torch.device) -> Stream:
        """This thread's current stream of a device."""

    def make_stream(self, index: int) -> Stream:
        """A new stream."""

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream, and its device, current."""

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Keep a tensor's memory from being reused before ``stream`` is through with its current work."""

    def torch_device(self, index: int) -> torch.device:
        """The device as torch names it, to allocate memory on."""

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph."""

    def future(self, index: int) -> Future[Any]:
        """A Future whose value comes with the point in the stream that is current when it is set."""


class CudaDevice:
    """CUDA, by way of torch."""

    def current(self) -> int:
        """The number of this thread's current device."""
        return torch.cuda.current_device()

    def make_current(self, index: int) -> AbstractContextManager[Any]:
        """Make a device current."""
        return torch.cuda.device(index)

    def current_stream(self, index: int | torch.device) -> Stream:
        """This thread's current stream of a device."""
        return torch.cuda.current_stream(index)

    def make_stream(self, index: int) -> Stream:
        """A new stream."""
        return torch.cuda.Stream(index)

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream, and its device, current."""
        return torch.cuda.stream(stream)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Keep a tensor's memory from being reused before ``stream`` is through with its current work."""
        tensor.record_stream(stream)

    def torch_device(self, index: int) -> torch.device:
        """The device as torch names it, to allocate memory on."""
        return torch.device("cuda", index)

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph."""
        return torch.cuda.is_current_stream_capturing()

    def future(self, index: int) -> Future[Any]:
        """A Future whose value comes with the point in the stream that is current when it is set."""
        return Future(devices=[torch.device("cuda", index)])
