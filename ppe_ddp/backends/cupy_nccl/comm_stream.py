"""The CUDA stream that NCCL works on, and the rule by which it is synchronized with the caller's stream.

The rule: NCCL works on a stream of its own. That stream waits for what the caller's stream has been given so far
(`CommStream.wait_for_caller`), and the caller's stream waits for it in `Work.wait`. The memory of the caller's tensors
is not reused before NCCL is through with it (`Device.record_stream`), whatever the caller does with his references.
Temporary memory is allocated and freed on NCCL's stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from ppe_ddp.backends.cuda_device import Device
    from ppe_ddp.backends.cupy_nccl.nccl_communicator import Members

__all__ = ["CommStream"]


class CommStream:
    """One stream for NCCL, between some ranks, on one device.

    Args:
        device: See :class:`~ppe_ddp.backends.cuda_device.Device`.
        index: The number of the device.
        members: Whose communicator it belongs to.
    """

    def __init__(self, device: Device, index: int, members: Members) -> None:
        self.index = index
        self.members = members
        self.stream = device.make_stream(index)
        self._device = device

    def wait_for_caller(self, tensors: Iterable[Tensor]) -> None:
        """Wait, on the stream, for what the caller's stream has now, and hold the caller's tensors."""
        self.stream.wait_event(self._device.current_stream(self.index).record_event())
        for tensor in tensors:
            self._device.record_stream(tensor, self.stream)
