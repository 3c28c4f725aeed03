"""The CUDA streams that gradients land on.

autograd accumulates the gradient of a parameter on the stream that was current when the parameter's accumulation
node was made, and the stream of whoever called ``backward()`` waits for all of these only at the end. In between,
gradients are read from hooks, on the stream and the thread of whichever parameter happened to land last. So there is
one rule: before gradients are read, the reading stream waits for every stream that gradients land on, and their
memory is not given to anybody else before the reading stream is through with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor


class Device(Protocol):
    """What is needed of CUDA; passed in, so that the rule can be tried without a GPU."""

    def current_stream(self, device: torch.device) -> Any:
        """This thread's current stream of ``device``."""

    def hold(self, tensor: Tensor, stream: Any) -> None:
        """Keep the memory of ``tensor`` from being used again before ``stream`` is through with what it has now."""

    def is_capturing(self) -> bool:
        """Whether this thread's current stream records a graph."""


class Cuda:
    """CUDA, by way of torch."""

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        """This thread's current stream of ``device``."""
        return torch.cuda.current_stream(device)

    def hold(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        """Keep the memory of ``tensor`` from being used again before ``stream`` is through with what it has now."""
        tensor.record_stream(stream)

    def is_capturing(self) -> bool:
        """Whether this thread's current stream records a graph."""
        return torch.cuda.is_current_stream_capturing()


class LandingStreams:
    """Knows which stream each gradient lands on, and keeps the rule above.

    Args:
        parameters: The parameters. Those on CPUs are passed over.
        device: CUDA.
        kind: The type of its devices.
    """

    def __init__(self, parameters: Sequence[Tensor], device: Device | None = None, kind: str = "cuda") -> None:
        self._api: Device = device or Cuda()
        self._devices = [parameter.device if parameter.device.type == kind else None for parameter in parameters]
        self._stream_of: dict[int, Any] = {}
        self._seen: dict[torch.device, list[Any]] = {each: [] for each in self._devices if each is not None}

    @staticmethod
    def of(parameters: Sequence[Tensor]) -> LandingStreams | None:
        """Those of ``parameters``; None where all of them are on CPUs, which have no streams."""
        return LandingStreams(parameters) if any(parameter.is_cuda for parameter in parameters) else None

    def are_captured(self) -> bool:
        """Whether a CUDA graph is being made of what happens now."""
        return self._api.is_capturing()

    def landed(self, index: int) -> None:
        """Note the current stream as that of parameter ``index``; called where and when its gradient lands.

        It stays the same until the parameter gets another node, see :meth:`forget`.
        """
        device = self._devices[index]
        if device is None or index in self._stream_of:
            return
        stream = self._stream_of[index] = self._api.current_stream(device)
        if stream not in self._seen[device]:
            self._seen[device].append(stream)

    def knows(self, index: int) -> bool:
        """Whether the stream of parameter ``index`` is known, or there is none."""
        return self._devices[index] is None or index in self._stream_of

    def forget(self, indices: Iterable[int]) -> None:
        """These parameters may land on other streams from now on."""
        for i in indices:
            self._stream_of.pop(i, None)

    def follow(self, gradients: Sequence[Tensor | None]) -> None:
        """Let this thread's current streams read ``gradients``, and whatever has been accumulated before."""
        for device, seen in self._seen.items():
            current = self._api.current_stream(device)
            others = [stream for stream in seen if stream != current]
            if not others:
                continue
            for stream in others:
                current.wait_stream(stream)
            for gradient in gradients:
                if gradient is not None and gradient.device == device:
                    self._api.hold(gradient, current)
