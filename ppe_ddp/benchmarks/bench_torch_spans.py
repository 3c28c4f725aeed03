"""The spans of torch's DistributedDataParallel, which records none: by hooks around its own all-reduce.

Its buckets are all-reduced by a hook that does what it does without one, and notes when. The end of autograd's part is
noted by a callback that comes before the wrapper's own, which waits; the end of that by a callback after it.
"""

from __future__ import annotations

from contextlib import contextmanager
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ppe_ddp.engine.torch_internals import at_end_of_backward
from ppe_ddp.engine.trace import Recorder

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch.nn.parallel import DistributedDataParallel

    from ppe_ddp.engine.event_log import EventLog

__all__ = ["TorchSpans"]


class TorchSpans:
    """Watches one of torch's wrappers.

    Args:
        wrapper: Used for the first time after this; it must have no hook of its own.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._wrapper = wrapper
        self._log: EventLog | None = None
        self._recorder = Recorder(())
        wrapper.register_comm_hook(None, lambda _state, bucket: self._reduce(bucket))
        wrapper.register_forward_pre_hook(self._begin_forward)
        wrapper.register_forward_hook(self._end_forward)

    @contextmanager
    def into(self, log: EventLog) -> Generator[None, None, None]:
        """Write into ``log`` meanwhile."""
        self._log = log
        try:
            yield
        finally:
            self._log = None

    def _begin_forward(self, _module: object, _arguments: object) -> None:
        if self._log is not None:
            self._log.begin("forward", self)

    def _end_forward(self, _module: object, _arguments: object, output: torch.Tensor) -> None:
        if self._log is not None:
            self._log.end("forward", self, type(self._wrapper.module).__name__)
            output.register_hook(self._begin_backward)

    def _begin_backward(self, _gradient: torch.Tensor) -> None:
        self._recorder = Recorder(())
        at_end_of_backward(self._end_of_autograd)

    def _end_of_autograd(self) -> None:
        self._recorder.backward_at = perf_counter_ns()
        at_end_of_backward(self._end)  # after the wrapper's callback, which is queued already

    def _end(self) -> None:
        self._recorder.returned_at = self._recorder.done_at = perf_counter_ns()
        if self._log is not None:
            self._log.backwards.append(self._recorder)

    def _reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        begin = perf_counter_ns()
        tensor = bucket.buffer().div_(dist.get_world_size())
        work = dist.all_reduce(tensor, async_op=True)
        if self._log is not None:
            self._log.add_message("bucket", str(bucket.index()), begin, work, tensor.nbytes)
        return work.get_future().then(_only)  # type: ignore[no-any-return]


def _only(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
    return future.value()[0]
