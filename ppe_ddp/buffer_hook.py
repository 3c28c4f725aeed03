"""A buffer communication hook, as torch's wrapper has it: synchronizes buffers in place of the broadcast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ppe_ddp.contracts import probe
from ppe_ddp.engine.reduction import annotate
from ppe_ddp.engine.torch_internals import BufferCommHookLocation, preserve_versions
from ppe_ddp.functions import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from ppe_ddp.contracts import Waitable
    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.engine.groups import Groups


class BufferHook:
    """Calls the hook of ``_register_buffer_comm_hook``, and waits for what it has started.

    As in torch, it is called in a forward if the one before it was to be synchronized, and in the first.

    Args:
        state: Passed to ``hook``.
        hook: Called as ``hook(state, buffers)`` with the buffers by name; changes them in place. It may return
            Futures, which are waited for at the end of the next synchronized backward.
        location: Whether to call it before the module's forward or after it.
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
        """A forward begins."""
        if self._is_before:
            self._call(dict(buffers))

    def after_forward(self, buffers: Mapping[str, Tensor], *, synchronizes: bool) -> None:
        """A forward is over; ``synchronizes`` says whether its backward is to be synchronized."""
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
