"""The stream that NCCL works on, and the rule by which it is synchronized with the caller's.

The rule: NCCL works on streams of its own. Such a stream waits for what the caller's stream has been given by then
(`CommStream.wait_for_caller`), the caller's stream waits for it when the caller asks for the result (`Work.wait`), and
the caller's tensors are not given to anybody else before it is through with them (`Device.record_stream`), whatever the caller
does with his own references. Memory that is needed in between is taken and given back on NCCL's stream.
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
