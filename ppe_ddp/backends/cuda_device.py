"""The parts of CUDA that this library uses: streams, events, and memory that belongs to streams.

The object is passed in wherever it is needed, so that tests without a GPU can pass a stand-in.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future


class CudaDevice:
    """CUDA, by way of torch; tests have a stand-in."""

    def current(self) -> int:
        return torch.cuda.current_device()

    def make_current(self, index: int) -> AbstractContextManager[Any]:
        return torch.cuda.device(index)

    def current_stream(self, index: int | torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(index)

    def make_stream(self, index: int) -> torch.cuda.Stream:
        return torch.cuda.Stream(index)

    def use_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def record_stream(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Keep a tensor's memory from being reused before ``stream`` has done its current work."""
        tensor.record_stream(stream)

    def torch_device(self, index: int) -> torch.device:
        return torch.device("cuda", index)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def future(self, index: int) -> Future[Any]:
        """A Future that depends on the stream that is current when its value is set."""
        return Future(devices=[torch.device("cuda", index)])
