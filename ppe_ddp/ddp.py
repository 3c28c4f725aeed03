"""The wrapper: an ``nn.Module`` that delegates the synchronization to the engine."""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle
from typing_extensions import Unpack

from ppe_ddp.comm_hooks import NOT_GIVEN, Hooks
from ppe_ddp.compression.compressor import Compressor
from ppe_ddp.compression.compressor_reduction import CompressorReduction, warn_of_one_machine
from ppe_ddp.contracts import BroadcastFunction, MixedPrecision, ReduceFunction
from ppe_ddp.engine.failures import START
from ppe_ddp.engine.grad_hooks import refuse_in_backward
from ppe_ddp.engine.group_duplicates import GroupHandle
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.module import ModuleState, check_gradient_dtypes, check_meshes
from ppe_ddp.engine.plan import Packing
from ppe_ddp.engine.record import EventLog, Trace
from ppe_ddp.engine.reducer import Reducer
from ppe_ddp.engine.reduction import FunctionReduction, HookReduction
from ppe_ddp.engine.replicas import broadcast_all, check_in_sync, owner_of
from ppe_ddp.engine.synchronizer import BucketSynchronizer, Policy
from ppe_ddp.engine.zero.shards import ShardedModel
from ppe_ddp.errors import UnusableError
from ppe_ddp.functions import average, broadcast, own_function
from ppe_ddp.joining import DdpJoinHook, leave_join
from ppe_ddp.launch import check_alone
from ppe_ddp.mixed_precision import Precision
from ppe_ddp.module_wrapper import ModuleWrapper
from ppe_ddp.nested_tensors import Inputs
from ppe_ddp.options import IgnoredByUs, Options, check_arguments, check_ignored
from ppe_ddp.stragglers import RankTime
from ppe_ddp.torch_internals import call_uncompiled, is_in_join, outside_inference, uncompiled


class DistributedDataParallel(ModuleWrapper, Joinable):
    """Data parallelism for modules whose graphs change from step to step and from rank to rank.

    After a synchronized backward each ``.grad`` is the mean over the ranks of ``process_group`` (a rank
    without that gradient counts as zero), the same on all of them, or None if no rank has it. Only gradients
    that exist on some rank are sent, while backward is still running. No flag is needed for a dynamic graph.

    All ranks of the group must construct the wrapper together, over modules with the same parameters. If
    torch.distributed is not initialized yet, the ranks connect in the first forward with gradients after it is.

    All ranks must run the same number of synchronized backwards; a rank that has none in a step calls
    :meth:`finish_grad_sync`. If a rank skips a backward without that call, or goes on after its loss has raised above
    the outputs of the module, it is a step behind. This cannot be told from a forward that was never meant to have a
    backward. So the ranks compare how many of their forwards, in training mode and outside ``no_sync()``, had a graph
    that was freed without a backward. If these numbers differ in two synchronizations in a row, every rank logs a
    warning.

    The interface is that of ``pytorch_pfn_extras.nn.parallel.DistributedDataParallel``. The keywords of
    ``torch.nn.parallel.DistributedDataParallel`` are honoured if they have a meaning here.

    Args:
        module: The module to train. Its parameters and buffers are overwritten by those of the group's rank 0.
        broadcast_buffers: Whether to broadcast buffers after each synchronized backward. The buffers of a submodule
            come from the lowest rank that has written any of them since the last broadcast.
        negotiate_grads: Whether ranks may have different gradients. With False all ranks must have the same gradients
            in every step; a difference is an error.
        process_group: The ranks to average over; None for all. The wrapper communicates in duplicates of it.
        reduce_function: Averages a bucket; see :class:`ppe_ddp.ReduceFunction`. Default: one all-reduce.
        broadcast_function: Broadcasts from rank 0; see :class:`ppe_ddp.BroadcastFunction`.
        bucket_cap_mb: This one and the further keywords are described in :class:`ppe_ddp.Options`.
        **ignored: torch's keywords that have no effect here; see :class:`ppe_ddp.options.IgnoredByUs`.

    Raises:
        DisagreementError: On every rank, if their parameters, buffers or options differ; names the first.
        TypeError: An unknown keyword (named with the nearest), torch's positional ``device_ids``, or a wrong function.
        ValueError: A lazy or expanded parameter, an expanded buffer, a DTensor that is distributed over the ranks
            that are averaged over, a wrapper, or contradictory arguments.
        UnusableError: A launcher has started several ranks, and torch.distributed is not initialized.
    """

    _numbers: ClassVar[Iterator[int]] = itertools.count(1)  # of wrappers that were made before init_process_group()
    _copies: ClassVar[dict[str, Iterator[int]]] = defaultdict(partial(itertools.count, 1))  # of each wrapper

    def __init__(
        self,
        module: nn.Module,
        broadcast_buffers: bool | None = True,
        negotiate_grads: bool = True,
        process_group: ProcessGroup | None = None,
        reduce_function: ReduceFunction | None = None,
        broadcast_function: BroadcastFunction | None = None,
        *,
        bucket_cap_mb: float | Sequence[float] | None = None,
        bucket_cap_mb_list: Sequence[float] | None = None,
        gradient_as_bucket_view: bool = True,
        init_sync: bool = True,
        device_ids: Sequence[int | str | torch.device] | None = None,
        device_mesh: DeviceMesh | None = None,
        mixed_precision: MixedPrecision | None = None,
        forward_sync_buffers: bool | None = None,
        overlap: bool = True,
        record_function: bool = False,
        check_for_nan_in_grad: bool | Literal["skip"] = False,
        check_drift: bool | Literal["raise"] = True,
        average_where_used: bool | str | Sequence[str] = False,
        shared_memory: bool = True,
        **ignored: Unpack[IgnoredByUs],
    ) -> None:
        check_arguments(module, broadcast_buffers, process_group, reduce_function, broadcast_function)
        check_ignored(ignored, DistributedDataParallel.__init__)
        super().__init__(module)
        Joinable.__init__(self)
        self._hooks = Hooks()
        self._reducer: Reducer[BucketSynchronizer] | None = None
        broadcasts = broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers
        self._options = Options(
            bucket_cap_mb=bucket_cap_mb_list or bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            init_sync=init_sync,
            device_ids=device_ids,
            device_mesh=device_mesh,
            mixed_precision=mixed_precision,
            forward_sync_buffers=broadcasts is None or bool(broadcasts),
            overlap=overlap,
            record_function=record_function,
            check_for_nan_in_grad=check_for_nan_in_grad,
            check_drift=check_drift,
            average_where_used=average_where_used,
            shared_memory=shared_memory,
        )
        self._negotiate = bool(negotiate_grads)
        self._group = GroupHandle(self._options.group(process_group))
        self._broadcast_function: BroadcastFunction = broadcast_function or broadcast
        self._precision = Precision(mixed_precision)
        self._reduce_function = self._precision.wrap_reduce_function(reduce_function or average)
        # Loading is no write by a forward, also where a larger module loads its state.
        nn.Module.register_load_state_dict_pre_hook(self, _before_loading)  # the overrides ask the wrapped module
        nn.Module.register_load_state_dict_post_hook(self, _after_loading)
        self._written: list[str] = []  # submodules whose buffers are to be marked: after loading, or in a copy's start
        self._synchronizes = True
        self._is_copy = self._is_apart = False
        self._outer_steps: list[Any] = []  # of LocalSGD or DiLoCo
        self._origin = "a new one" if dist.is_initialized() else f"wrapper {next(self._numbers)}"
        self._module_state = self._list_tensors()
        self._inputs = Inputs(module)
        self._options.check_device(self._inputs.device)
        if dist.is_initialized():
            self._start(synchronize=self._options.init_sync)
        else:
            check_alone()
        self._options.check_names(self._module_state.names)  # raises on all ranks, as their options were compared
        self._precision.cast_buffers(module)

    @property
    def _copies_key(self) -> str:
        return f"{self._origin} of ranks {self._group.ranks}"

    def _list_tensors(self, before: ModuleState | None = None) -> ModuleState:
        module_state = ModuleState(self.module, self._ignored(), before, with_later_buffers=self._reducer is None)
        if dist.is_initialized():
            check_gradient_dtypes(module_state)
            drops_steps = bool(self._options.check_for_nan_in_grad)
            check_meshes(self.module, module_state.distributed_tensors(), self._group.group(), drops_steps=drops_steps)
        if self._hooks.compressor is not None:
            self._check_compressor(module_state, self._hooks.compressor)
        return module_state

    def _check_compressor(self, module_state: ModuleState, compressor: Compressor) -> None:
        numels = {one.name: one.numel << one.dtype.is_complex for one in module_state.specs}
        if self._options.where_used:
            self._options.check_kept(name for name, numel in numels.items() if compressor.has_residual(name, numel))

    @outside_inference
    def _start(self, *, synchronize: bool) -> None:
        """Make the engine. All ranks of the group call this together."""
        parent, shares = self._group.group(), self._options.shared_memory
        same = {"init_sync": synchronize, "the wrapper in its first forward": self._origin}
        groups = Groups.duplicate(parent, shared_memory=shares, taken=self._hooks.comm_state.noted, **same)
        self._origin = f"wrapper {groups.number}"
        self._copies.pop(self._copies_key, None)  # of an earlier wrapper of this number
        if EventLog.current is not None:
            EventLog.current.on_groups(groups)
        policy = Policy(
            negotiate=self._negotiate,
            overlap=self._options.overlap,
            views=self._options.gradient_as_bucket_view,
            broadcast_buffers=self._broadcast_function if self.forward_sync_buffers else None,
            ranges=self._options.record_function,
            check_finite=self._options.check_for_nan_in_grad,
            check_drift=self._options.check_drift,
            average_where_used=self._options.where_used,
            agreed=self._agreed(),
        )
        reduction = FunctionReduction(self._reduce_function, groups)
        packing = self._packing(measured=reduction.is_plain_average)
        self._reducer = Reducer(
            groups,
            BucketSynchronizer(groups, reduction, packing, policy),
            overlap=policy.overlap,
            wrapper=weakref.ref(self),
            sync_hooks=self._hooks.sync,
        )
        self._reducer.use_module(self._module_state)
        self._reducer.enabled = self.require_backward_grad_sync
        self._reducer.synchronizer.weights.is_refused = self._is_apart
        self._mark_written(self._reducer)
        self._use_hooks()
        if synchronize:
            try:
                self._reducer.synchronizer.negotiation.check(writes_buffers=groups.world_size > 1)
                state = [*self._module_state.buffers().values(), *self._module_state.parameters]
                broadcast_all(self._broadcast_function, state, groups)
            except BaseException as error:
                if not isinstance(error, Exception):  # an interrupt, of which the others do not know
                    groups.fail(error, START)
                self._reducer = None  # on all ranks: their next forward begins anew
                raise
            self._reducer.synchronizer.note_buffers()

    def _move(self, steps: int) -> Reducer[BucketSynchronizer]:
        """Make a new engine in the current default group, after ``steps`` steps. All ranks of it call this together.

        It takes over the weights of this rank's gradients, which buffers it has written, and its compressor's state.
        """
        old, self._origin = self._reducer, "a new one"
        if old is not None:
            old.remove_hooks()
            old.enabled = False  # hooks on outputs of earlier forwards may still call it
        self._hooks.comm_state.move(steps)
        self._start(synchronize=False)
        assert self._reducer is not None
        if old is not None:
            self._reducer.synchronizer.go_on_from(old.synchronizer)
        return self._reducer

    def _agreed(self) -> str:
        checks, where_used = self._options.check_for_nan_in_grad, self._options.where_used
        texts = [
            str(self._precision),
            f"check_for_nan_in_grad {checks!r}" if checks else "",
            f"check_drift {self._options.check_drift!r}",
            f"average_where_used {where_used!r}" if where_used else "",
            own_function(self._reduce_function),
            "" if self._broadcast_function is broadcast else "broadcast_function of the user's own",
        ]
        return ", ".join(filter(None, texts))

    def _ready(self) -> Reducer[BucketSynchronizer] | None:
        """The engine, brought up to date with the module; None if torch.distributed is not initialized."""
        if self._reducer is None:
            if not dist.is_initialized():
                return None
            named, self._module_state = self._module_state.by_name(), self._list_tensors(self._module_state)
            self._hooks.comm_state.follow(self._module_state.renamed_from(named))
            self._start(synchronize=self._options.init_sync and not self._is_copy)
        reducer = self._reducer
        assert reducer is not None
        reducer.check()
        # First recover, which finishes a step of the other ranks with the module as it was.
        if reducer.recover() and not self._module_state.is_current(self.module):
            with reducer.looking_at_module():
                module_state = self._list_tensors(self._module_state)
                reducer.synchronizer.check_module(module_state)
            reducer.use_module(module_state)
            if slices := self._hooks.comm_state.follow(module_state.renamed_from(self._module_state.by_name())):
                reducer.synchronizer.negotiation.use_plug("the slices of the compressor's state", str({**slices}))
            self._module_state = module_state
            self._inputs.find_device(self.module)
        return reducer

    def _used(self) -> Reducer[BucketSynchronizer] | None:
        """:meth:`_ready` for a forward or a synchronization, which use this wrapper: saving and comparing do not."""
        if (reducer := self._ready()) is not None:
            reducer.before_forward()
        return reducer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module with its inputs moved to its device; inputs and outputs may be nested."""
        if torch.compiler.is_compiling():
            # The engine must run at every call, not only once while the graph is traced.
            args, kwargs = call_uncompiled(self._enter, args, kwargs)
            return call_uncompiled(self._leave, self._precision.call(self.module, args, kwargs))
        args, kwargs = self._enter(args, kwargs)
        return self._leave(self._precision.call(self.module, args, kwargs))

    def _enter(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if EventLog.current is not None:
            EventLog.current.begin("forward", self)
        # A forward without gradients sends nothing, so that a rank may evaluate alone, also in join().
        if torch.is_grad_enabled() and (reducer := self._used()) is not None:
            reducer.begin_step()
            reducer.synchronizer.times.begin_forward()
            for outer_steps in self._outer_steps:
                outer_steps.note_forward()
            # torch does not reset the join configuration at the end of join(). DdpJoinHook resets ``announce``.
            if reducer.synchronizer.announce is not None and is_in_join(self):
                Join.notify_join_context(self)
        return self._inputs.to_device(args, kwargs)

    def _leave(self, outputs: Any) -> Any:
        if self._reducer is not None and torch.is_grad_enabled():
            reducer = (self._module_state.has_grown() and self._ready()) or self._reducer
            outputs = reducer.watch(outputs, is_training=self.training)
        if EventLog.current is not None:
            EventLog.current.end("forward", self, type(self.module).__name__)
        return outputs

    # ------------------------------------------------------------------ synchronization

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """A context in which ``backward()`` accumulates this rank's gradients without synchronizing them.

        Only the place of the call of ``backward()`` counts, not that of the forward. The next backward outside averages
        all accumulated gradients.
        """
        before, self.require_backward_grad_sync = self._synchronizes, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward that is called now synchronizes gradients. May be set; the name is torch's.

        After :meth:`train_apart` it is False, whatever it is set to.
        """
        return self._synchronizes and not self._is_apart

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, synchronizes: bool) -> None:
        self._synchronizes = bool(synchronizes)
        if self._reducer is not None:
            self._reducer.enabled = self.require_backward_grad_sync

    @uncompiled
    def train_apart(self, apart: bool = True) -> None:
        """Let each rank train by itself, as ``LocalSGD`` does. All ranks call this together.

        Backwards are not synchronized, ``weigh()`` raises, and parameters are not compared any more. A change lets a
        compressor begin anew: its state belongs either to gradients or to differences of parameters.

        Args:
            apart: False synchronizes backwards again. Parameters are still not compared.

        Raises:
            UnusableError: ``ppe_ddp.elastic`` trains the wrapper, a ``DistributedOptimizer`` has its shards, or it has
                a hook of pytorch-pfn-extras' kind or optimizers that step in backward.
        """
        if apart and self._reducer is not None and self._reducer.synchronizer.sharded_parameters is not None:
            raise UnusableError(
                "a DistributedOptimizer needs gradients that are averaged in backward, and LocalSGD, DiLoCo and "
                "train_apart() average none: wrap the module anew, and use a plain optimizer"
            )
        if apart and self._reducer is not None and self._reducer.synchronizer.commits is not None:
            raise UnusableError(
                "ppe_ddp.elastic takes a synchronized backward again after a death: LocalSGD, DiLoCo and train_apart() "
                "do not work with it"
            )
        if apart:
            refuse_in_backward(self.module.parameters())
            self._hooks.refuse_sync()
        if apart != self._is_apart:
            self._hooks.comm_state.begin_anew(None if self._reducer is None else self._reducer.groups)
        self._is_apart, self.require_backward_grad_sync = apart, True
        self._options = replace(self._options, check_drift=False)
        if self._reducer is not None:
            self._reducer.synchronizer.train_apart(apart)

    @uncompiled
    def start_grad_sync(self) -> None:
        """Start to synchronize the gradients in ``.grad`` without a backward.

        If this rank has no backward in a step in which other ranks have one, call this or :meth:`finish_grad_sync`
        instead. It must be followed by :meth:`finish_grad_sync`.
        """
        if not self._outer_steps and (reducer := self._used()) is not None:
            reducer.start()

    @uncompiled
    def finish_grad_sync(self) -> None:
        """Finish the synchronization that :meth:`start_grad_sync` has started, or run a whole one.

        Afterwards ``.grad`` holds the averages. With ``LocalSGD`` or ``DiLoCo`` both calls do nothing.
        """
        if not self._outer_steps and (reducer := self._used()) is not None:
            reducer.finish()

    @uncompiled
    def abort_grad_sync(self, reason: str = "it has called abort_grad_sync()") -> None:
        """Give this step up on all ranks; for a rank that cannot complete it and goes on with the next step.

        The other ranks raise :class:`~ppe_ddp.errors.PeerAbortedError` with ``reason`` in this step's synchronization,
        within a second. The next step works on all ranks. On this rank ``.grad`` keeps what it has computed.

        - Call it if this rank has raised outside of backward and communication, for instance in its loss. If a backward
          or the communication has raised, the others know of that, and it does nothing before the next forward.
        - In a second such step without a forward, call :meth:`finish_grad_sync` instead.
        - Do not call it after the backward has ended, for instance if the optimizer's step raises: it would give up the
          next step.
        - In place of the first forward of a copy it makes the engine, for which it waits for the other ranks.
        - With ``LocalSGD`` or ``DiLoCo`` it counts an inner step that this rank leaves out, by an error before its end.
        """
        reducer = self._reducer or self._ready()  # a copy has no engine yet, and the others make theirs in this step
        for outer_steps in [*self._outer_steps]:
            outer_steps.leave_out()
        if reducer is not None and not self._outer_steps:
            reducer.abort(reason)

    @uncompiled
    def check_in_sync(self) -> None:
        """Compare the bits of parameters, and of broadcast buffers, across the ranks. All ranks call this together.

        Raises:
            DisagreementError: On every rank, with the same text; names the tensors that differ, and the ranks.
        """
        if (reducer := self._ready()) is not None:
            reducer.synchronizer.check()  # else messages might differ in length, and gloo could end the process
            check_in_sync(reducer.synchronizer.negotiation, self._module_state, reducer.groups)

    def rank_times(self) -> list[RankTime]:
        """The duration of a step on each rank, without waiting for other ranks; the mean of the last 20 steps.

        Rank 0 logs a warning if a rank is slow. Times are those of the host; on GPUs they measure launching the work.
        All ranks have the same table after a synchronized backward. It is empty before the first one.
        """
        return [] if self._reducer is None else self._reducer.synchronizer.times.table()

    def trace(self) -> Trace | None:
        """The record of the last synchronized backward on this rank; None before the first."""
        return None if self._reducer is None else self._reducer.trace()

    def sharded(self) -> ShardedModel:
        """Keep only this rank's shards of averages, for a distributed optimizer. All ranks call this together.

        From now on ``.grad`` is a ``ShardedGradient`` after a synchronized backward, or None.
        """
        if (reducer := self._ready()) is None:
            raise UnusableError("torch.distributed is not initialized: do so before wrapping the module")
        if self._is_apart:
            raise UnusableError(
                "a DistributedOptimizer needs gradients that are averaged in backward, and after train_apart(), which "
                "LocalSGD and DiLoCo call, none is: use a plain optimizer"
            )
        averaged = {parameter for parameter in self._module_state.parameters if parameter.requires_grad}
        for name, module in self.module.named_modules():
            if isinstance(module, ModuleWrapper) and not averaged.isdisjoint(module.parameters()):
                raise ValueError(
                    f"{name!r} in the module is wrapped, too, so that its averages would be whole gradients, which a "
                    "DistributedOptimizer cannot shard: wrap the outer module alone, or its parts, each with an "
                    "optimizer of its own"
                )
        return reducer.synchronizer.shard()

    @uncompiled
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, including this rank's shards of averages."""
        if self._reducer is not None:
            self._reducer.await_release()
        self.module.zero_grad(set_to_none)
        if self._reducer is not None:
            self._reducer.synchronizer.clear_shards(set_to_none=set_to_none)
            self._reducer.synchronizer.weights.settle()

    # ------------------------------------------------------------------ hooks and compressors

    def _packing(self, *, fixed: bool = False, measured: bool = False) -> Packing:
        return Packing.of(self._options.bucket_caps_mb, self._module_state.specs, fixed=fixed, measured=measured)

    def _use_hooks(self) -> None:
        if self._reducer is None:
            return
        self._reducer.recover()
        synchronizer, groups = self._reducer.synchronizer, self._reducer.groups
        if self._hooks.comm is not None:
            state, hook = self._hooks.comm
            reduction = HookReduction(state.group() if isinstance(state, GroupHandle) else state, hook, groups)
            synchronizer.use_reduction(reduction, self._packing(fixed=reduction.keeps_state_by_index))
        if self._hooks.compressor is not None:
            self._hooks.comm_state.begin(groups, self._module_state.specs)
            compressing = CompressorReduction(self._hooks.compressor, self._hooks.comm_state, groups)
            synchronizer.use_reduction(compressing, self._packing())
        self._reducer.shared.take_turns()

    def register_comm_hook(self, state: Any = NOT_GIVEN, hook: Any = NOT_GIVEN) -> RemovableHandle | None:
        """Register a compressor, or a hook: pytorch-pfn-extras' kind with one argument, torch's kind with two.

        ``register_comm_hook(compressor)``: a :class:`ppe_ddp.compression.Compressor`, such as
        ``ErrorFeedback(PowerSGD(rank=4))``, averages the buckets from now on. Its state is in
        :meth:`comm_state_dict`. There may be one. All ranks must register the same compressor together.

        ``register_comm_hook(hook)``: ``hook(ddp)`` is called after each backward, before synchronization. It sees every
        local ``.grad`` and may change, set or remove it. Then communication starts. There may be several such hooks.

        ``register_comm_hook(state, hook)``: ``hook(state, bucket)`` reduces a bucket instead of the reduce
        function, and returns a ``torch.futures.Future`` of the flat result; torch's own hooks
        (``torch.distributed.algorithms.ddp_comm_hooks``) are of this kind. There may be one. If the state is
        neither None nor a process group, buckets have the same parameters in every step, since such hooks keep
        state by bucket. All ranks must register the same hook.

        Returns:
            For pytorch-pfn-extras' kind, a handle that removes the hook.

        Raises:
            DisagreementError: On every rank, if their compressors differ. Hooks of torch's kind are compared in the
                next backward, and so is a plug that a single rank has registered.
            RuntimeError: There is a compressor or a hook of torch's kind already.
            UnusableError: A hook of pytorch-pfn-extras' kind, while each rank trains by itself (:meth:`train_apart`).
            ValueError: The compressor keeps (``ErrorFeedback``) what is averaged where it is used.
        """
        handle = self._hooks.add(state, hook, partial(self._check_compressor, self._module_state))
        if handle is not None and self._is_apart:
            self._hooks.refuse_sync(handle)
        if handle is None:
            self._use_hooks()
            if self._hooks.compressor is not None and self._reducer is not None:
                self._reducer.synchronizer.check()
                self._reducer.groups.await_start()
                warn_of_one_machine(self._hooks.compressor, self._reducer.groups)
        return handle

    @uncompiled
    def comm_state_dict(self) -> dict[str, Any]:
        """A copy of the compressor's state on this rank, and of the learned order of buckets.

        Save it on each rank, beside the state of model and optimizer. Without a compressor it has the order of buckets;
        three or more ranks need that order to get the same rounding after a restart. If this rank has written buffers
        since their last broadcast, it also has the names of their submodules. It is empty before the ranks have met.
        """
        reducer, compressor = self._ready(), self._hooks.compressor
        if reducer is None:
            return {}
        state: dict[str, Any] = {"buckets": reducer.synchronizer.negotiation.order_state()}
        if written := reducer.synchronizer.written_buffers():
            state |= {"written": written, "apart": self._is_apart}
        if compressor is not None:
            specs = self._module_state.specs
            state |= {**self._hooks.comm_state.state_dict(compressor, reducer.groups, specs), "apart": self._is_apart}
        return state

    @uncompiled
    def load_comm_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the :meth:`comm_state_dict` of this rank. All ranks call this together.

        Load the module first. With an empty ``state``, or one of the other mode of :meth:`train_apart`, a compressor
        begins anew: what it has not sent is dropped.
        """
        reducer, compressor = self._ready(), self._hooks.compressor
        if reducer is None:
            raise UnusableError("torch.distributed is not initialized: do so before wrapping the module")
        if state and state.get("apart", False) != self._is_apart:
            state = {**state, "parameters": {}, "steps": 0, "written": []}
        if compressor is not None:
            self._hooks.comm_state.load_state_dict(state, compressor, reducer.groups, self._module_state.specs)
        elif "compressor" in state:
            raise ValueError(
                f"rank {reducer.groups.rank}: the state of communication is that of {state['compressor']}: register it "
                "before"
            )
        if "buckets" in state:
            reducer.synchronizer.negotiation.load_order_state(state["buckets"])
        reducer.synchronizer.mark_buffers(state.get("written", []))

    # ------------------------------------------------------------------ uneven inputs

    @contextmanager
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Generator[None, None, None]:
        """A context in which ranks may have different numbers of inputs; see torch's ``Join``.

        Every forward with gradients enabled, outside ``no_sync()``, must be followed by one backward.

        Args:
            divide_by_initial_world_size: Divide gradients by the number of all ranks; else by the number of ranks that
                still have inputs.
            enable: False makes the context do nothing.
            throw_on_early_termination: Raise on every rank when the first rank has run out of inputs.

        Raises:
            UnusableError: Each rank trains by itself (``LocalSGD``, ``DiLoCo`` or :meth:`train_apart`).
        """
        if not enable:
            yield
            return
        same = divide_by_initial_world_size
        try:
            with Join([self], True, throw_on_early_termination, divide_by_initial_world_size=same):
                yield
        finally:
            if self._reducer is not None:
                leave_join(self._reducer.synchronizer)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook that takes part in the steps of other ranks after this rank's inputs have ended (``Joinable``)."""
        if self._reducer is not None and self._reducer.synchronizer.commits is not None:
            raise UnusableError("join() is not for ppe_ddp.elastic, which divides rows by training.batches()")
        if self._is_apart:
            raise UnusableError(
                "join() is not for LocalSGD, DiLoCo and train_apart(): a rank that has run out of inputs would leave "
                "outer steps out, and differ from the others from then on. Give each rank as many batches"
            )
        return DdpJoinHook(
            self._reducer or self._ready(),
            lambda: self._module_state,
            divide_by_initial_world_size=kwargs.get("divide_by_initial_world_size", True),
            before=self._ready,
        )

    @property
    def join_device(self) -> torch.device:
        """The device of the tensors that ``Join`` communicates."""
        return self._inputs.device or torch.device("cpu")

    # ------------------------------------------------------------------ state

    @property
    def process_group(self) -> ProcessGroup:
        """The group that the gradients are averaged over."""
        return self._group.group()

    join_process_group = process_group

    @property
    def device(self) -> torch.device | None:
        """The device of the module; None if it has none, or several."""
        return self._inputs.device

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The device mesh that was given."""
        return self._options.device_mesh

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether buffers are broadcast. The name is torch's; here they are broadcast after backward."""
        return self._options.forward_sync_buffers

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load into the wrapped module; a checkpoint of torch's wrapper (with ``module.``) loads, too."""
        self._begin_loading({*state_dict})
        loaded = super().load_state_dict(state_dict, strict, assign)
        self._end_loading()
        return loaded

    def _begin_loading(self, keys: set[str]) -> None:
        if (reducer := self._reducer) is not None:
            reducer.recover()  # before loading: it may have to broadcast the old buffers
            self._written = reducer.synchronizer.written_buffers()
        others = {name for name in self._module_state.buffers() if not {name, f"module.{name}"} & keys}
        self._written = [*{*self._written} & {*map(owner_of, others)}]

    def _end_loading(self) -> None:
        if (reducer := self._reducer) is not None:
            reducer.synchronizer.note_buffers()
            self._mark_written(reducer)

    def _mark_written(self, reducer: Reducer[BucketSynchronizer]) -> None:
        reducer.synchronizer.mark_buffers(self._written)
        self._written = []

    def __getstate__(self) -> dict[str, Any]:
        """All but the engine; a copy makes its own in its first forward, on all ranks together."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]  # not what is compiled
        if self._reducer is not None:
            self._hooks.comm_state.noted = self._reducer.groups.taken
            state["_written"] = self._reducer.synchronizer.written_buffers()
        state |= {"_reducer": None, "_outer_steps": [], "_is_copy": self._reducer is not None or self._is_copy}
        state["_named"] = state.pop("_module_state").by_name(among=set(self.module.parameters()))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore, and list the module's tensors again.

        The copies of one wrapper are counted, so that none is averaged with another one's on other ranks.
        """
        named = state.pop("_named", {})
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._origin = f"copy {next(self._copies[self._copies_key])} of {self._origin}"
        self._module_state = ModuleState(self.module, self._ignored())
        self._hooks.comm_state.follow(self._module_state.renamed_from(named))


def _before_loading(wrapper: DistributedDataParallel, state_dict: Mapping[str, Any], prefix: str, *_: object) -> None:
    wrapper._begin_loading({key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)})


def _after_loading(wrapper: DistributedDataParallel, _: object) -> None:
    wrapper._end_loading()
