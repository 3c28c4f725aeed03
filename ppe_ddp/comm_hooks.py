"""Hooks and compressors of users: what is registered with a wrapper."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from ppe_ddp.compression.comm_state import CommState
from ppe_ddp.compression.compressor import Compressor
from ppe_ddp.contracts import CommHook, SyncHook, Waitable, probe
from ppe_ddp.engine.reduction import annotate
from ppe_ddp.errors import UnusableError
from ppe_ddp.functions import name_of
from ppe_ddp.options import check_call
from ppe_ddp.torch_internals import BufferCommHookLocation, preserve_versions

if TYPE_CHECKING:
    from torch import Tensor

    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.engine.groups import Groups

NOT_GIVEN: Any = object()
"""Tells a hook's state that is None from one that is left out."""


class Hooks:
    """The registered hooks of one wrapper."""

    def __init__(self) -> None:
        self.sync: OrderedDict[int, SyncHook] = OrderedDict()  # pytorch-pfn-extras' kind
        self.comm: tuple[Any, CommHook] | None = None  # torch's kind, with its state
        self.buffers: BufferHook | None = None  # torch's kind for buffers
        self.compressor: Compressor | None = None
        self.comm_state = CommState()  # what the compressor remembers

    def add(self, state: Any, hook: Any) -> RemovableHandle | None:
        """Add a hook of the kind that the arguments show; gives a handle for one of pytorch-pfn-extras' kind."""
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
        self._check_free()
        if is_alone:
            self.compressor = one
        else:
            self.comm = (state, hook)
        return None

    def _check_free(self) -> None:
        if self.comm is not None:
            raise UnusableError("a wrapper takes one hook of torch's kind or one compressor, and has a hook already")
        if self.compressor is not None:
            raise UnusableError(
                f"a wrapper takes one compressor or one hook of torch's kind, and has {self.compressor!r}"
            )


class BufferHook:
    """Calls the hook of ``_register_buffer_comm_hook``, and waits for what it has started.

    As in torch, it is called in a forward if the one before it was to be synchronized, and in the first. It gets the
    buffers by name, changes them in place, and may return Futures, which are waited for at the end of the next
    synchronized backward.
    """

    def __init__(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, Tensor]], Sequence[Waitable] | None],
        location: BufferCommHookLocation,
    ) -> None:
        if not callable(hook):
            raise TypeError(f"a buffer hook must be callable, not {type(hook).__name__}")
        self._state = state
        self._hook = hook
        self._is_before = location.name == "PRE_FORWARD"
        self._is_due = True
        self._pending: list[tuple[Waitable, torch.device]] = []

    @property
    def title(self) -> str:
        """The hook's name."""
        return f"communication hook {name_of(self._hook)}"

    def before_forward(self, buffers: Mapping[str, Tensor]) -> None:
        """Call a hook that is for the beginning of a forward."""
        if self._is_before:
            self._call(dict(buffers))

    def after_forward(self, buffers: Mapping[str, Tensor], *, synchronizes: bool) -> None:
        """Call a hook that is for the end of a forward, whose backward ``synchronizes`` or not."""
        if not self._is_before:
            self._call(dict(buffers))
        self._is_due = synchronizes

    def _call(self, buffers: dict[str, Tensor]) -> None:
        if not self._is_due or not buffers:
            return
        # Autograd has saved some of them (batch norm's), and takes their versions for a sign that it must not use them.
        with torch.no_grad(), preserve_versions(list(buffers.values())):
            started = self._hook(self._state, buffers) or ()
        device = next(iter(buffers.values())).device
        self._pending += [(future, device) for future in started]

    def finishing(self, groups: Groups) -> Steps:
        """Wait for what the hook has started, step by step. It writes into the buffers themselves, until then."""
        pending, self._pending = self._pending, []
        try:
            for future, device in pending:
                yield probe(future)
                groups.failures.wait(future, device)
        except Exception as error:
            annotate(error, f"in {self.title} on rank {groups.rank}")
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is in flight."""
        return {**self.__dict__, "_pending": []}
