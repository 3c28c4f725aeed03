"""Hooks and compressors of users: what is registered with a wrapper, and how it is handed to the engine."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from ppe_ddp.compression.comm_state import CommState
from ppe_ddp.compression.compressor import Compressor
from ppe_ddp.compression.compressor_reduction import CompressorReduction, warn_of_one_machine
from ppe_ddp.contracts import probe
from ppe_ddp.engine.plan import Packing
from ppe_ddp.engine.reduction import HookReduction, annotate
from ppe_ddp.errors import UnusableError
from ppe_ddp.functions import name_of
from ppe_ddp.module_wrapper import ModuleWrapper
from ppe_ddp.options import check_call
from ppe_ddp.torch_internals import BufferCommHookLocation, preserve_versions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

    from ppe_ddp.contracts import CommHook, SyncHook, Waitable
    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.module import ModuleState
    from ppe_ddp.engine.reducer import Reducer
    from ppe_ddp.engine.synchronizer import BucketSynchronizer
    from ppe_ddp.options import Options

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


class HookedWrapper(ModuleWrapper):
    """A module wrapper whose communication can be changed by hooks and compressors.

    Args:
        module: The module to wrap.
    """

    _options: Options
    _module_state: ModuleState

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._hooks = Hooks()
        self._reducer: Reducer[BucketSynchronizer] | None = None

    @abstractmethod
    def _ready(self) -> Reducer[BucketSynchronizer] | None:
        """The engine, brought up to date with the module; None where there is nothing to synchronize with."""

    def _packing(self, *, fixed: bool = False, measured: bool = False) -> Packing:
        return Packing.of(self._options.bucket_caps_mb, self._module_state.specs, fixed=fixed, measured=measured)

    def _use_hooks(self) -> None:
        if self._reducer is None:
            return
        self._reducer.recover()
        synchronizer, groups = self._reducer.synchronizer, self._reducer.groups
        if self._hooks.comm is not None:
            reduction = HookReduction(*self._hooks.comm, groups)
            synchronizer.use_reduction(reduction, self._packing(fixed=reduction.keeps_state_by_index))
        if self._hooks.compressor is not None:
            self._hooks.comm_state.begin(groups, self._module_state.specs)
            compressing = CompressorReduction(self._hooks.compressor, self._hooks.comm_state, groups)
            synchronizer.use_reduction(compressing, self._packing())
        if self._hooks.buffers is not None:
            synchronizer.use_buffer_hook(self._hooks.buffers.finishing, self._hooks.buffers.title)

    def register_comm_hook(self, state: Any = NOT_GIVEN, hook: Any = NOT_GIVEN) -> RemovableHandle | None:
        """Register a compressor, or a hook: pytorch-pfn-extras' kind with one argument, torch's kind with two.

        ``register_comm_hook(compressor)``: a :class:`ppe_ddp.compression.Compressor` averages the buckets from now
        on, such as ``ErrorFeedback(PowerSGD(rank=4))``. What it remembers is in :meth:`comm_state_dict`. There may be
        one; every rank must register the same, together.

        ``register_comm_hook(hook)``: ``hook(ddp)`` is called after each backward, before synchronization. It
        sees every local ``.grad`` and may change, set or remove it. Communication then starts when backward
        is over. There may be several.

        ``register_comm_hook(state, hook)``: ``hook(state, bucket)`` reduces a bucket instead of the reduce
        function, and returns a ``torch.futures.Future`` of the flat result; torch's own hooks
        (``torch.distributed.algorithms.ddp_comm_hooks``) are of this kind. There may be one. With a state that is
        neither None nor a process group, buckets are made of the same parameters in every step, since such
        hooks keep state by bucket. All ranks must register the same.

        Returns:
            For pytorch-pfn-extras' kind, a handle that removes the hook.

        Raises:
            DisagreementError: On every rank, if their compressors differ. Hooks of torch's kind, and what one rank
                alone has registered, are compared in the next backward.
            RuntimeError: There is a compressor or a hook of torch's kind already.
        """
        handle = self._hooks.add(state, hook)
        if handle is None:
            self._use_hooks()
            if self._hooks.compressor is not None and self._reducer is not None:
                self._reducer.synchronizer.negotiation.check()
                self._reducer.groups.await_start()
                warn_of_one_machine(self._hooks.compressor, self._reducer.groups)
        return handle

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, Tensor]], Sequence[Waitable] | None],
        comm_hook_location: BufferCommHookLocation = BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Let ``hook(state, buffers)`` synchronize the buffers, not the broadcast; the same on all ranks."""
        self._hooks.buffers = BufferHook(state, hook, comm_hook_location)
        self._use_hooks()

    def comm_state_dict(self) -> dict[str, Any]:
        """A copy of what the compressor remembers on this rank, and of the order in which buckets are made.

        Each rank has its own, to be saved beside the state of model and optimizer: training that goes on from all
        three is what it would have been without the interruption. Without a compressor it is that order alone, which
        more than two ranks need to add up in the same order again. Empty without other ranks.
        """
        reducer, compressor = self._ready(), self._hooks.compressor
        if reducer is None:
            return {}
        state = {} if compressor is None else self._hooks.comm_state.state_dict(compressor, reducer.groups)
        return {**state, "buckets": reducer.synchronizer.negotiation.order_state()}

    def load_comm_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the compressor go on from what :meth:`comm_state_dict` gave; on all ranks together.

        Raises:
            ValueError: It is that of another rank, of another number of ranks, or of another module or compressor.
        """
        reducer, compressor = self._ready(), self._hooks.compressor
        if reducer is None:
            raise UnusableError("torch.distributed is not initialized: do so before wrapping the module")
        if compressor is not None:
            devices = {spec.name: spec.device for spec in self._module_state.specs}
            self._hooks.comm_state.load_state_dict(state, compressor, reducer.groups, devices)
            reducer.synchronizer.negotiation.use_plug("a state of the compressor", *self._hooks.comm_state.agreed)
        elif "compressor" in state:
            raise ValueError(
                f"rank {reducer.groups.rank}: the state of communication is that of {state['compressor']}: register it "
                "before"
            )
        if "buckets" in state:
            reducer.synchronizer.negotiation.load_order_state(state["buckets"])
