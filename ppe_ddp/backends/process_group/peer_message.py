"""Base class of the Work of a message: what is waited for from one peer, who may never send it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from ppe_ddp.backends.process_group.pending_work import PendingWork

if TYPE_CHECKING:
    from torch import Tensor

    from ppe_ddp.backends.process_group.polling_waits import PollingWaits


class PeerMessage(PendingWork):
    """A message on its way, to or from one rank; a subclass sets ``_source`` when one has arrived.

    Args:
        what: The call, for errors, such as ``"send to rank 1 (tag 0)"``.
        waits: Of its group.
        tensor: What is sent or received.
    """

    _waits: PollingWaits

    def __init__(self, what: str, waits: PollingWaits, tensor: Tensor) -> None:
        super().__init__(what, waits)
        self.outputs = [tensor]
        self._source = -1

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until it is complete; a message that is not matched within the group's timeout leaves the group good.

        Raises:
            CommunicationError: As :meth:`PendingWork.wait`; the message names the peer.
        """
        is_given = timeout is not None and timeout.total_seconds() > 0.0
        return super().wait(timeout if is_given else timedelta(seconds=self._waits.timeout))

    def source_rank(self) -> int:
        """Who sent it, as a rank of the group; -1 before it has arrived."""
        return self._source

    def _source_rank(self) -> int:  # torch's name for it
        return self._source
