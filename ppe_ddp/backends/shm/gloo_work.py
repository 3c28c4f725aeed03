"""The Works of what goes by gloo: waiting for them moves what this process has under way elsewhere."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ppe_ddp.backends.group_internals import source_of
from ppe_ddp.backends.process_group.peer_message import PeerMessage
from ppe_ddp.backends.process_group.pending_work import PendingWork
from ppe_ddp.backends.process_group.progress_engine import progress_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.distributed import Work

    from ppe_ddp.backends.shm.store_waits import StoreWaits

_LOOK = timedelta(milliseconds=1)


class GlooWork(PendingWork):
    """A collective by gloo.

    Args:
        what: The call, for errors.
        waits: Of its group.
        work: gloo's.
        memory: What gloo reads or writes.
        absent: The ranks that have not begun it, as far as is known.
    """

    _waits: StoreWaits

    def __init__(
        self, what: str, waits: StoreWaits, work: Work, memory: Any, absent: Callable[[], Sequence[int]]
    ) -> None:
        super().__init__(what, waits)
        self._work = work
        self._memory = memory
        self._absent_ranks = absent
        self._progress = progress_engine(os.getpid())
        self.at_end: Callable[[], None] = _nothing
        """Called once when it has ended, well or not."""

    def when_ended(self, call: Callable[[], None]) -> None:
        """As :meth:`PendingWork.when_ended`, by gloo's own thread."""
        super().when_ended(call)
        self._work.get_future().add_done_callback(lambda _: self._tell_end())

    def _arrived(self) -> bool:
        if self._progress.is_idle:  # gloo's own threads need the core more than a loop of ours
            with suppress(RuntimeError):
                self._work.wait(_LOOK)
        return self._settle()

    def _has_ended(self) -> bool:
        return self._work.is_completed() or bool(self._waits.failure)

    def _failure(self) -> BaseException | None:
        reason = ""
        if self._work.is_completed():
            try:
                self._work.wait()
            except RuntimeError as error:
                reason = str(error)
        else:
            reason = self._waits.failure
        self._memory = None
        self.at_end()
        if not reason:
            return None
        # a rank that gives up says so before it closes its connections
        if not self._waits.look_now():
            self._waits.give_up(f"{self._what} was left: {reason}")
            return self._waits.error(self._what, reason)
        return self._waits.error(self._what, self._waits.failure)

    def _absent(self) -> Sequence[int]:
        return self._absent_ranks()


def _nothing() -> None:
    pass


class GlooMessage(PeerMessage):
    """A message by gloo.

    gloo says of a message whether it has arrived only to who waits for it, inside gloo: so a thread does.

    Args:
        what: The call, for errors, such as ``"send to rank 1 (tag 0)"``.
        waits: Of its group.
        work: gloo's.
        tensor: What is sent or received.
        memory: What gloo reads or writes.
    """

    _waits: StoreWaits

    def __init__(self, what: str, waits: StoreWaits, work: Work, tensor: Tensor, memory: Tensor) -> None:
        super().__init__(what, waits, tensor)
        self._reason = ""
        self._is_over = False
        threading.Thread(target=self._await, args=(work, memory), name="ppe_ddp-message", daemon=True).start()

    def _await(self, work: Work, _memory: Tensor) -> None:
        try:
            work.wait()
            with suppress(RuntimeError):  # of a message that was sent
                self._source = source_of(work)
        except RuntimeError as error:
            self._reason = str(error) or "gloo gives no reason"
        self._is_over = True

    def _has_ended(self) -> bool:
        return self._is_over or bool(self._waits.failure)

    def _failure(self) -> BaseException | None:
        if self._is_over and not self._reason:
            return None
        self._waits.look_now()
        return self._waits.error(self._what, self._waits.failure or self._reason)
