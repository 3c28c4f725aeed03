"""The CUDA streams that gradients are accumulated on.

autograd accumulates the gradient of a parameter on the stream that was current when the parameter's accumulation
node was made, and the stream of whoever called ``backward()`` waits for all of these only at the end. In between,
gradients are read from hooks, on the stream and the thread of whichever parameter happened to be the last. So there
is one rule: before gradients are read, the reading stream waits for every stream that gradients are accumulated on, and
their memory is not reused before the reading stream is through with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ppe_ddp.backends.cuda_device import CudaDevice

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch
    from torch import Tensor

    from ppe_ddp.backends.cuda_device import Device


class GradientStreams:
    """Knows which stream each gradient is accumulated on, and applies the rule above.

    Args:
        parameters: The parameters. Those on CPUs are ignored.
        device: The functions of CUDA; tests pass a stand-in.
        kind: The type of its devices.
    """

    def __init__(self, parameters: Sequence[Tensor], device: Device | None = None, kind: str = "cuda") -> None:
        self._api: Device = device or CudaDevice()
        self._devices = [parameter.device if parameter.device.type == kind else None for parameter in parameters]
        self._stream_of: dict[int, Any] = {}
        self._seen: dict[torch.device, list[Any]] = {each: [] for each in self._devices if each is not None}

    @staticmethod
    def of(parameters: Sequence[Tensor]) -> GradientStreams | None:
        """The streams of ``parameters``; None where all of them are on CPUs, which have no streams."""
        return GradientStreams(parameters) if any(parameter.is_cuda for parameter in parameters) else None

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self._api.is_capturing()

    def note_stream(self, index: int) -> None:
        """Note the current stream as that of parameter ``index``; called where and when its gradient arrives.

        It stays the same until the parameter gets another node, see :meth:`forget_streams`.
        """
        device = self._devices[index]
        if device is None or index in self._stream_of:
            return
        stream = self._stream_of[index] = self._api.current_stream(device)
        if stream not in self._seen[device]:
            self._seen[device].append(stream)

    def knows_stream(self, index: int) -> bool:
        """Whether the stream of parameter ``index`` is known, or there is none."""
        return self._devices[index] is None or index in self._stream_of

    def forget_streams(self, indices: Iterable[int]) -> None:
        """The gradients of these parameters may arrive on other streams from now on."""
        for i in indices:
            self._stream_of.pop(i, None)

    def wait_for_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Let this thread's current streams wait for the streams of gradients, before they read ``gradients``."""
        for device, seen in self._seen.items():
            current = self._api.current_stream(device)
            others = [stream for stream in seen if stream != current]
            if not others:
                continue
            for stream in others:
                current.wait_stream(stream)
            for gradient in gradients:
                if gradient is not None and gradient.device == device:
                    self._api.record_stream(gradient, current)
