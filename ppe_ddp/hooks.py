"""The hooks that a user has registered with a wrapper: pytorch-pfn-extras' kind, torch's, and torch's for buffers."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

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
    """

    def __init__(self) -> None:
        self.sync: OrderedDict[int, SyncHook] = OrderedDict()
        self.comm: tuple[Any, CommHook] | None = None
        self.buffers: BufferHook | None = None

    def add(self, state: Any, hook: Any) -> RemovableHandle | None:
        """Add a hook of the kind that the arguments show: one with a state is torch's, one without is ppe's.

        Returns:
            For ppe's kind, a handle that removes it.
        """
        if hook is NOT_GIVEN and callable(state):
            return self._add_sync(state)
        if state is NOT_GIVEN:
            if callable(hook):
                return self._add_sync(hook)
            raise TypeError("register_comm_hook(hook) or register_comm_hook(state, hook)")
        if hook is NOT_GIVEN:
            raise TypeError(f"register_comm_hook(hook) takes a function of the wrapper, not {type(state).__name__}")
        check_call("hook", hook, ("state", "bucket"))
        if self.comm is not None:
            raise RuntimeError("a wrapper takes one hook of torch's kind, and has one already")
        self.comm = (state, hook)
        return None

    def _add_sync(self, hook: SyncHook) -> RemovableHandle:
        check_call("hook", hook, ("ddp",))
        handle = RemovableHandle(self.sync)
        self.sync[handle.id] = hook
        return handle
