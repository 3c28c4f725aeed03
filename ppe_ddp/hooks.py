"""What a user has registered with a wrapper: hooks of pytorch-pfn-extras' kind and of torch's, and compressors."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

from ppe_ddp.compression.compressor import Compressor
from ppe_ddp.engine.comm_state import CommState
from ppe_ddp.options import check_call

if TYPE_CHECKING:
    from ppe_ddp.buffer_hook import BufferHook
    from ppe_ddp.contracts import CommHook, SyncHook

NOT_GIVEN: Any = object()
"""Tells a hook's state that is None from one that is left out."""


class Hooks:
    """The registered hooks of one wrapper.

    Attributes:
        sync: pytorch-pfn-extras' kind, called with the wrapper before synchronization.
        comm: torch's kind with its state, called with a bucket.
        buffers: torch's kind for buffers.
        compressor: Ours, which reduces buckets.
        comm_state: What the compressor remembers.
    """

    def __init__(self) -> None:
        self.sync: OrderedDict[int, SyncHook] = OrderedDict()
        self.comm: tuple[Any, CommHook] | None = None
        self.buffers: BufferHook | None = None
        self.compressor: Compressor | None = None
        self.comm_state = CommState()

    def add(self, state: Any, hook: Any) -> RemovableHandle | None:
        """Add a hook of the kind that the arguments show: one with a state is torch's, one without ours or ppe's.

        Returns:
            For ppe's kind, a handle that removes it.
        """
        one = hook if state is NOT_GIVEN else state
        if isinstance(one, type) and issubclass(one, Compressor):
            raise TypeError(f"register_comm_hook() takes a compressor, not its class: {one.__name__}(...)")
        if isinstance(one, Compressor) and (hook is NOT_GIVEN or state is NOT_GIVEN):
            self._check_free()
            self.compressor = one
            return None
        if hook is NOT_GIVEN and callable(state):
            return self._add_sync(state)
        if state is NOT_GIVEN:
            if callable(hook):
                return self._add_sync(hook)
            raise TypeError("register_comm_hook(hook) or register_comm_hook(state, hook)")
        if hook is NOT_GIVEN:
            raise TypeError(f"register_comm_hook(hook) takes a function of the wrapper, not {type(state).__name__}")
        check_call("hook", hook, ("state", "bucket"))
        self._check_free()
        self.comm = (state, hook)
        return None

    def _check_free(self) -> None:
        if self.comm is not None:
            raise RuntimeError("a wrapper takes one hook of torch's kind or one compressor, and has a hook already")
        if self.compressor is not None:
            raise RuntimeError(
                f"a wrapper takes one compressor or one hook of torch's kind, and has {self.compressor!r}"
            )

    def _add_sync(self, hook: SyncHook) -> RemovableHandle:
        check_call("hook", hook, ("ddp",))
        handle = RemovableHandle(self.sync)
        self.sync[handle.id] = hook
        return handle
