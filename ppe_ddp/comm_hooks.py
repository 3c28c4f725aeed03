"""The hooks and compressors that users have registered with a wrapper."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.distributed import ProcessGroup
from torch.utils.hooks import RemovableHandle

from ppe_ddp.compression.comm_state import CommState
from ppe_ddp.compression.compressor import Compressor
from ppe_ddp.contracts import CommHook, SyncHook
from ppe_ddp.engine.group_duplicates import GroupHandle
from ppe_ddp.errors import UnusableError
from ppe_ddp.options import check_call

NOT_GIVEN: Any = object()
"""Stands for a state that was left out, as None may be a hook's state."""


class Hooks:
    """The registered hooks of one wrapper."""

    def __init__(self) -> None:
        self.sync: OrderedDict[int, SyncHook] = OrderedDict()  # pytorch-pfn-extras' kind
        self.comm: tuple[Any, CommHook] | None = None  # torch's kind, with its state
        self.compressor: Compressor | None = None
        self.comm_state = CommState()  # what the compressor remembers

    def add(self, state: Any, hook: Any, check: Callable[[Compressor], None]) -> RemovableHandle | None:
        """Add a hook, whose kind the arguments show. Returns a handle for one of pytorch-pfn-extras' kind.

        ``check`` raises for a compressor that the wrapper cannot take.
        """
        one = hook if state is NOT_GIVEN else state
        is_alone = hook is NOT_GIVEN or state is NOT_GIVEN
        if isinstance(one, type) and issubclass(one, Compressor):
            raise TypeError(f"register_comm_hook() takes a compressor, not its class: {one.__name__}(...)")
        if is_alone and not isinstance(one, Compressor):
            if not callable(one):
                raise TypeError(f"register_comm_hook(hook) takes a function of the wrapper, not {type(one).__name__}")
            check_call("hook", one, ("ddp",))
            handle = RemovableHandle(self.sync)
            self.sync[handle.id] = one
            return handle
        if not is_alone:
            check_call("hook", hook, ("state", "bucket"))
        if self.comm is not None or self.compressor is not None:
            before = self.compressor or "a hook"
            raise UnusableError(f"a wrapper takes one compressor or one hook of torch's kind, and has {before} already")
        if is_alone:
            check(one)
            self.compressor = one
        else:
            self.comm = (GroupHandle(state) if isinstance(state, ProcessGroup) else state, hook)  # which can be copied
        return None

    def refuse_sync(self, added: RemovableHandle | None = None) -> None:
        """Raise for hooks of pytorch-pfn-extras' kind, as each rank trains by itself; remove the one just ``added``."""
        if not self.sync:
            return
        if added is not None:
            added.remove()
        raise UnusableError(
            "LocalSGD, DiLoCo and train_apart() do not work with register_comm_hook(hook) of pytorch-pfn-extras' kind: "
            "it is meant for gradients, which are not synchronized, and would change the average of the parameters. "
            "Remove the hook by its handle, and do what it does between backward() and optimizer.step()"
        )
