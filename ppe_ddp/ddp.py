"""The wrapper: an ``nn.Module`` that leaves the work to the engine."""

from __future__ import annotations

import logging
import weakref
from collections import OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.utils.hooks import RemovableHandle

from ppe_ddp.engine.broadcasting import broadcast_all
from ppe_ddp.engine.census import Census
from ppe_ddp.engine.communication import Communication, Policy
from ppe_ddp.engine.groups import GroupHandle, Groups
from ppe_ddp.engine.layout import Packing
from ppe_ddp.engine.reducer import Reducer
from ppe_ddp.engine.sender import FunctionSender, HookSender
from ppe_ddp.engine.tensors import mapped, tensors_in
from ppe_ddp.errors import UnusableError
from ppe_ddp.functions import average, broadcast
from ppe_ddp.joining import Shadow, announce
from ppe_ddp.naming import add_prefix, without_prefix
from ppe_ddp.options import Options, check_arguments, check_device_ids, group_of

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.algorithms.join import JoinHook

    from ppe_ddp.contracts import BroadcastFunction, CommHook, ReduceFunction, SyncHook
    from ppe_ddp.engine.sender import Sender
    from ppe_ddp.engine.shards import ShardedModel
    from ppe_ddp.engine.trace import Trace

logger = logging.getLogger("ppe_ddp")

_UNSET: Any = object()


class DistributedDataParallel(nn.Module, Joinable):
    """Data parallelism for modules whose graphs change from step to step and from rank to rank.

    After a synchronized backward each ``.grad`` is the mean over the ranks of ``process_group`` (a rank
    without that gradient counts as zero), the same on all of them, or None if no rank has it. Only gradients
    that exist on some rank are sent, while backward is still running. No flag is needed for a dynamic graph.

    All ranks of the group must construct the wrapper together, over modules with the same parameters, and run
    the same number of synchronized backwards; a rank that has none in a step calls :meth:`finish_grad_sync`.

    The interface is that of ``pytorch_pfn_extras.nn.parallel.DistributedDataParallel``; the keywords of
    ``torch.nn.parallel.DistributedDataParallel`` are honoured where they have a meaning.

    Args:
        module: The module to train. Its parameters and buffers are overwritten by those of the group's rank 0.
        broadcast_buffers: Whether to broadcast the buffers of rank 0 after each synchronized backward.
        negotiate_grads: Whether ranks may have different gradients. With False they must be the same in every
            step, and an error says so if they are not.
        process_group: The ranks to average over; None for all. The wrapper talks in duplicates of it.
        reduce_function: Averages a bucket; see :class:`ppe_ddp.ReduceFunction`. Default: one all-reduce.
        broadcast_function: Broadcasts from rank 0; see :class:`ppe_ddp.BroadcastFunction`.
        **kwargs: See :class:`ppe_ddp.Options`.

    Raises:
        DisagreementError: On every rank, if their parameters, buffers or options differ; names the first.
        TypeError: An unknown keyword, or torch's positional ``device_ids``.
        ValueError: A lazy, DTensor or expanded parameter, an expanded buffer, or contradictory arguments.
    """

    def __init__(
        self,
        module: nn.Module,
        broadcast_buffers: bool = True,
        negotiate_grads: bool = True,
        process_group: ProcessGroup | None = None,
        reduce_function: ReduceFunction | None = None,
        broadcast_function: BroadcastFunction | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        check_arguments(module, broadcast_buffers)
        options = Options.parse(kwargs)
        self.module = module
        self._options = options
        self._broadcasts_buffers = bool(broadcast_buffers)
        self._negotiate = bool(negotiate_grads)
        self._group = GroupHandle(group_of(process_group, options))
        self._reduce_function: ReduceFunction = reduce_function or average
        self._broadcast_function: BroadcastFunction = broadcast_function or broadcast
        self._sync_hooks: OrderedDict[int, SyncHook] = OrderedDict()
        self._comm_hook: tuple[Any, CommHook] | None = None
        self._has_warned_of_move = False
        self._reducer: Reducer[Communication] | None = None
        self._census = Census(module, self._ignored())
        self._device = _only_device(module)
        check_device_ids(options, self._device)
        if dist.is_initialized():
            self._start(synchronize=options.init_sync)
        else:
            logger.warning("torch.distributed is not initialized: the module is not synchronized with any other")
        # not a method, which would keep the wrapper, and so its hooks, alive until the garbage is collected
        self._register_load_state_dict_pre_hook(add_prefix, with_module=True)  # type: ignore[no-untyped-call]

    # ------------------------------------------------------------------ set-up

    def _ignored(self) -> list[str]:
        """Names that torch's ``_set_params_and_buffers_to_ignore_for_model`` has left on the module."""
        return list(getattr(self.module, "_ddp_params_and_buffers_to_ignore", ()))

    def _start(self, *, synchronize: bool) -> None:
        """Make the engine. All ranks of the group come here together."""
        groups = Groups.duplicate(self._group.group())
        policy = Policy(
            negotiate=self._negotiate,
            overlap=self._options.overlap,
            views=self._options.gradient_as_bucket_view,
            broadcast_buffers=self._broadcast_function if self._broadcasts_buffers else None,
            ranges=self._options.record_function,
        )
        sender = FunctionSender(self._reduce_function, groups)
        self._reducer = Reducer(
            groups,
            Communication(groups, sender, self._packing(), policy),
            overlap=policy.overlap,
            wrapper=weakref.ref(self),
            sync_hooks=self._sync_hooks,
        )
        self._reducer.arm(self._census)
        if self._comm_hook is not None:
            self._use(HookSender(*self._comm_hook, groups))
        if synchronize:
            self._reducer.communication.consensus.check()
            state = [*self._census.buffers().values(), *self._census.parameters]
            broadcast_all(self._broadcast_function, state, groups)

    def _use(self, sender: Sender) -> None:
        assert self._reducer is not None
        self._reducer.recover()
        self._reducer.communication.use(sender, self._packing(fixed=sender.keeps_state_by_index))

    def _packing(self, *, fixed: bool = False) -> Packing:
        return Packing.of(self._options.bucket_cap_mb, self._census.specs, fixed=fixed)

    def _ready(self) -> Reducer[Communication] | None:
        """The engine, brought up to date with the module; None where there is nothing to synchronize with."""
        if self._reducer is None:
            if not dist.is_initialized() or not self._was_copied():
                return None
            self._start(synchronize=False)
        reducer = self._reducer
        assert reducer is not None
        reducer.groups.check()
        if reducer.recover():  # in which the other ranks speak of the module as it was
            if not self._census.is_current():
                census = Census(self.module, self._ignored())
                reducer.arm(census)
                self._census = census
                self._device = _only_device(self.module)
            elif reducer.is_displaced:
                reducer.arm(self._census)
        reducer.before_forward()
        return reducer

    def _was_copied(self) -> bool:
        return bool(self.__dict__.get("_is_copy"))

    # ------------------------------------------------------------------ forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module, with tensors on its device; any structure of inputs and outputs."""
        if torch.compiler.is_compiling():
            # The engine is Python that must run at every call, not once when the graph is traced.
            args, kwargs = _enter_uncompiled(self, args, kwargs)
            return _leave_uncompiled(self, self.module(*args, **kwargs))
        args, kwargs = self._enter(args, kwargs)
        return self._leave(self.module(*args, **kwargs))

    def _enter(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        synchronizes = torch.is_grad_enabled()
        reducer = self._ready() if synchronizes else self._reducer
        if reducer is not None and self._join_config.enable:
            Join.notify_join_context(self)
            announce(reducer, synchronizes=synchronizes and reducer.enabled)
        if self._device is not None:
            args, kwargs = mapped(self._to_device, args), mapped(self._to_device, kwargs)
        return args, kwargs

    def _leave(self, outputs: Any) -> Any:
        if self._reducer is not None and torch.is_grad_enabled():
            for output in tensors_in(outputs):
                if output.grad_fn is not None:
                    self._reducer.watch(output)
        return outputs

    def _to_device(self, tensor: Tensor) -> Tensor:
        device = self._device
        if tensor.device == device:
            return tensor
        if not self._has_warned_of_move:
            self._has_warned_of_move = True
            logger.warning("inputs are moved from %s to %s, where the module is", tensor.device, device)
        return tensor.to(device)

    # ------------------------------------------------------------------ synchronization

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """Let backwards inside accumulate this rank's gradients without synchronizing them.

        What counts is where ``backward()`` is called. The next one outside averages all that has accumulated.
        """
        reducer = self._reducer
        if reducer is None:
            yield
            return
        before, reducer.enabled = reducer.enabled, False
        try:
            yield
        finally:
            reducer.enabled = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward that is called now synchronizes; torch's name for it."""
        return self._reducer is not None and self._reducer.enabled

    def start_grad_sync(self) -> None:
        """Start to synchronize what is in ``.grad`` now, without a backward.

        For a step in which this rank has no backward at all, while others have one: call this or
        :meth:`finish_grad_sync` instead. Must be followed by :meth:`finish_grad_sync`.
        """
        reducer = self._ready()
        if reducer is not None:
            reducer.start()

    def finish_grad_sync(self) -> None:
        """Finish what :meth:`start_grad_sync` started, or do both: afterwards ``.grad`` holds the means."""
        reducer = self._ready()
        if reducer is not None:
            reducer.finish()

    def register_comm_hook(self, state: Any = _UNSET, hook: Any = _UNSET) -> RemovableHandle | None:
        """Register a communication hook: pytorch-pfn-extras' kind with one argument, torch's kind with two.

        ``register_comm_hook(hook)``: ``hook(ddp)`` is called after each backward, before synchronization. It
        sees every local ``.grad`` and may change, set or remove it. Communication then starts when backward
        is over. There may be several.

        ``register_comm_hook(state, hook)``: ``hook(state, bucket)`` reduces a bucket instead of the reduce
        function, and returns a ``torch.futures.Future`` of the flat result; torch's own hooks
        (``torch.distributed.algorithms.ddp_comm_hooks``) are of this kind. There may be one. With a state that is
        neither None nor a process group, buckets are made of the same parameters in every step, since such
        hooks keep state by bucket. All ranks must register the same.

        Returns:
            For the first kind, a handle that removes the hook.
        """
        if hook is _UNSET and callable(state):
            return self._register_sync_hook(state)
        if state is _UNSET:
            if callable(hook):
                return self._register_sync_hook(hook)
            raise TypeError("register_comm_hook(hook) or register_comm_hook(state, hook)")
        if not callable(hook):
            raise TypeError(f"a communication hook must be callable, not {type(hook).__name__}")
        if self._comm_hook is not None:
            raise RuntimeError("a wrapper takes one hook of torch's kind, and has one already")
        self._comm_hook = (state, hook)
        if self._reducer is not None:
            self._use(HookSender(state, hook, self._reducer.groups))
        return None

    def _register_sync_hook(self, hook: SyncHook) -> RemovableHandle:
        handle = RemovableHandle(self._sync_hooks)
        self._sync_hooks[handle.id] = hook
        return handle

    def trace(self) -> Trace | None:
        """What happened in the last synchronized backward on this rank; None before the first."""
        return None if self._reducer is None else self._reducer.trace()

    def sharded(self) -> ShardedModel:
        """Let every rank keep only its shards of the averages, for a distributed optimizer; on all ranks together.

        From here on ``.grad`` is a ``ShardedGradient`` after a synchronized backward, or None.
        """
        reducer = self._ready()
        if reducer is None:
            raise UnusableError("torch.distributed is not initialized: do so before wrapping the module")
        return reducer.communication.scatter()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, also those of which every rank keeps its shards."""
        self.module.zero_grad(set_to_none)
        if self._reducer is not None:
            self._reducer.communication.forget(set_to_none=set_to_none)

    # ------------------------------------------------------------------ uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """A context in which ranks may have different numbers of inputs; see torch's class of this name.

        Every forward with gradients enabled, outside ``no_sync()``, must be followed by one backward.

        Args:
            divide_by_initial_world_size: Divide gradients by the number of all ranks, or else by the number of
                those that still have inputs.
            enable: Whether to do anything.
            throw_on_early_termination: Raise on every rank when the first one has run out, instead.
        """
        same = divide_by_initial_world_size
        return Join([self], enable, throw_on_early_termination, divide_by_initial_world_size=same)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What this rank does for the others after its inputs have ended (``Joinable``)."""
        return Shadow(
            self._reducer,
            self.module,
            divide_by_initial_world_size=kwargs.get("divide_by_initial_world_size", True),
            before=self._ready,
        )

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` keeps its own small tensors."""
        return self._device or torch.device("cpu")

    @property
    def join_process_group(self) -> ProcessGroup:
        """The group that ``Join`` communicates in."""
        return self.process_group

    # ------------------------------------------------------------------ state

    @property
    def process_group(self) -> ProcessGroup:
        """The group that the gradients are averaged over."""
        return self._group.group()

    @property
    def device(self) -> torch.device | None:
        """The device of the module; None if it has none, or several."""
        return self._device

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's ``state_dict``, without a prefix; takes the same arguments."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The wrapped module's ``load_state_dict``; a checkpoint of torch's wrapper (``module.``) loads too."""
        if self._reducer is not None:
            self._reducer.recover()  # while buffers are what the other ranks take them for
        if any(key.startswith("module.") for key in state_dict):
            state_dict = without_prefix(state_dict, self.module.state_dict(keep_vars=True).keys())
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but connections; the copy makes its own at its first forward, on all ranks together."""
        state = self.__dict__.copy()
        state["_reducer"] = None
        state["_is_copy"] = self._reducer is not None or self._was_copied()
        del state["_census"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore, and look at the module anew."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._census = Census(self.module, self._ignored())


@torch._disable_dynamo  # type: ignore[attr-defined,untyped-decorator,unused-ignore]
def _enter_uncompiled(ddp: DistributedDataParallel, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return ddp._enter(args, kwargs)


@torch._disable_dynamo  # type: ignore[attr-defined,untyped-decorator,unused-ignore]
def _leave_uncompiled(ddp: DistributedDataParallel, outputs: Any) -> Any:
    return ddp._leave(outputs)


def _only_device(module: nn.Module) -> torch.device | None:
    """The device of all parameters (of all buffers if there are none); None if there is not exactly one."""
    devices = {parameter.device for parameter in module.parameters()} or {buffer.device for buffer in module.buffers()}
    return devices.pop() if len(devices) == 1 else None
