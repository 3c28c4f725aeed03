"""Megatron-Core's ``DistributedDataParallel``: gradients in contiguous buffers, on this library's engine."""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup
from typing_extensions import overload  # that of typing has get_overloads() only from Python 3.11 on

from ppe_ddp.backends.group_internals import default_group
from ppe_ddp.compression.compressor import Compressor
from ppe_ddp.contracts import ReduceFunction
from ppe_ddp.engine.module import ModuleState
from ppe_ddp.engine.record import EventLog, Trace
from ppe_ddp.engine.reducer import Reducer
from ppe_ddp.engine.replicas import broadcast_all
from ppe_ddp.engine.zero.parameter_gather import ParameterGather
from ppe_ddp.engine.zero.shards import ShardedModel
from ppe_ddp.errors import PeerAbortedError, UnusableError
from ppe_ddp.functions import broadcast
from ppe_ddp.megatron.buffer_synchronizer import BufferSynchronizer
from ppe_ddp.megatron.config import DEFAULT_BUCKET_SIZE, DistributedDataParallelConfig, Setup, showing_both_forms
from ppe_ddp.megatron.parallel_groups import ParallelGroups
from ppe_ddp.megatron.sharded_buffers import ShardedBuffers
from ppe_ddp.module_wrapper import ModuleWrapper
from ppe_ddp.torch_internals import uncompiled, uncompiled_hook

logger = logging.getLogger("ppe_ddp")


class DistributedDataParallelBase(ModuleWrapper, ABC):
    """Abstract base of wrappers of ``module``, with the interface of Megatron's class of this name.

    State dicts have the names of the wrapped module, without a prefix of the wrapper's.
    """

    @uncompiled_hook
    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"{type(self).__name__} wraps an nn.Module, not {type(module).__name__}")
        super().__init__(module)

    @abstractmethod
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the wrapped module; a subclass may extend this."""
        return self.module(*inputs, **kwargs)

    def state_dict(self, *args: Any, prefix: str = "", keep_vars: bool = False, **kwargs: Any) -> Any:
        """The wrapped module's ``state_dict``; takes its arguments, and ``(prefix, keep_vars)`` by position."""
        if args and isinstance(args[0], str):
            prefix, args = args[0], args[1:]
            if args:
                keep_vars, args = args[0], args[1:]
        return super().state_dict(*args, prefix=prefix, keep_vars=keep_vars, **kwargs)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """The state dict for a checkpoint: by the wrapped module's method of this name, or else its ``state_dict``."""
        own = getattr(self.module, "state_dict_for_save_checkpoint", None)
        return (own or self.module.state_dict)(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy ``state_dict`` into the wrapped module; ``assign`` is refused, as buffers belong to its parameters."""
        if assign:
            raise ValueError("load_state_dict(assign=True) replaces parameters whose gradients lie in buffers: copy")
        return super().load_state_dict(state_dict, strict=strict)


class DistributedDataParallel(DistributedDataParallelBase):
    """Data parallelism with gradients in contiguous buffers, like Megatron-Core's class of this name.

    A backward adds each gradient to ``parameter.main_grad``, a view of a buffer, and leaves ``parameter.grad`` None.
    One iteration has three parts: ``zero_grad_buffer()``; micro-batches, all but the last in ``no_sync()``; and
    :meth:`finish_grad_sync` or ``finalize_model_grads([model])``, after which ``main_grad`` holds the averages. With
    ``overlap_grad_reduce`` buckets are launched during the backward outside ``no_sync()``. Without it, all buckets are
    launched in :meth:`finish_grad_sync`, and ``no_sync()`` makes no difference.

    Graphs may differ between steps and between ranks. A bucket without a gradient on any rank is not sent.

    All ranks of the groups must construct the wrapper together and synchronize equally often. Parameters with
    ``allreduce = False`` are experts: they are summed over ``groups.expert``, and divided by the size of the
    data-parallel group, whose tokens they have seen.

    Args:
        config: The model's configuration. If ``config.calculate_per_token_loss`` exists and is true, gradients are
            summed over ranks instead of averaged, and ``finalize_model_grads`` divides them.
        ddp_config: The options of the synchronization.
        module: The model; its parameters keep their values (see :meth:`broadcast_params`). Parameters that are
            trainable now get a ``main_grad``.
        disable_bucketing: Put all gradients of a kind into one bucket. Later pipeline stages always do so.
        groups: The groups of this rank; default: all ranks average.
        data_parallel_group: ``groups.data``, to be given instead of ``groups``.
        expert_data_parallel_group: ``groups.expert``, to be given instead of ``groups``.
        reduce_function: Averages a bucket; see :class:`ppe_ddp.ReduceFunction`. Default: one all-reduce. Or a
            :class:`ppe_ddp.compression.Compressor`.
        accumulate_allreduce_grads_in_fp32: ``ddp_config.grad_reduce_in_fp32`` in the old form. The further keywords
            are other fields of ``ddp_config`` in the old form.

    Attributes:
        grad_buffers: The buffers of dense parameters (``buffers`` in Megatron, which hides ``nn.Module.buffers()``).
        expert_parallel_buffers: The buffers of experts.
        gradient_buffers: The synchronizer of all buffers; for :func:`finalize_model_grads`.

    Raises:
        DisagreementError: On every rank, if their parameters or options differ; names the first.
        TypeError: An unknown keyword.
        ValueError: An expert without a group for experts, a lazy or DTensor parameter, contradictory arguments.
    """

    @overload
    def __init__(
        self,
        config: object,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        groups: ParallelGroups | None = None,
        *,
        data_parallel_group: ProcessGroup | None = None,
        expert_data_parallel_group: ProcessGroup | None = None,
        reduce_function: ReduceFunction | Compressor | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        config: object,
        module: nn.Module,
        data_parallel_group: ProcessGroup | None,
        accumulate_allreduce_grads_in_fp32: bool,
        overlap_grad_reduce: bool,
        use_distributed_optimizer: bool,
        disable_bucketing: bool = False,
        check_for_nan_in_grad: bool = False,
        *,
        bucket_size: int | None = None,
        groups: ParallelGroups | None = None,
        expert_data_parallel_group: ProcessGroup | None = None,
        reduce_function: ReduceFunction | Compressor | None = None,
    ) -> None: ...

    @showing_both_forms
    def __init__(self, config: object, *args: Any, **kwargs: Any) -> None:
        setup = Setup.of(DistributedDataParallel.__init__, config, args, kwargs)
        super().__init__(setup.module)
        self.config = config
        self.ddp_config = setup.ddp_config
        self.ddp_config.use()
        self.groups = setup.groups
        # One bucket on later pipeline stages, which have time to wait, as in Megatron.
        is_first_stage = setup.groups.pipeline is None or dist.get_rank(setup.groups.pipeline) == 0
        has_buckets = self.ddp_config.overlap_grad_reduce and not setup.disable_bucketing and is_first_stage
        self.bucket_size = (self.ddp_config.bucket_size or DEFAULT_BUCKET_SIZE) if has_buckets else None
        self.gradient_buffers = state = BufferSynchronizer(
            setup,
            default_group(),
            sums=bool(getattr(config, "calculate_per_token_loss", False)),
            bucket_size=self.bucket_size,
        )
        self.grad_buffers, self.expert_parallel_buffers = (
            [buffer for buffer in state.buffers if buffer.kind.reduction_group == number] for number in range(2)
        )
        self._module_state = state.module_state  # as listed last; that of the buffers keeps their order
        self._sharded: dict[bool, ShardedModel] = {}
        self._parameter_gather: ParameterGather | None = None
        self._reducer: Reducer[BufferSynchronizer] = Reducer(
            state.groups[0], state, overlap=True, wrapper=weakref.ref(self), sync_hooks={}
        )
        self._reducer.use_module(state.module_state)
        self._reducer.enabled = self.ddp_config.overlap_grad_reduce
        if self.ddp_config.overlap_param_gather:
            self.enable_forward_pre_hook()

    # ------------------------------------------------------------------ compression

    def comm_state_dict(self) -> list[dict[str, Any]]:
        """A copy of the compressors' states on this rank: of dense parameters, and of experts if there are any."""
        return [group.comm_state_dict() for group in self.gradient_buffers.reduction_groups]

    @uncompiled
    def load_comm_state_dict(self, states: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> None:
        """Load the :meth:`comm_state_dict` of this rank. All ranks call this together.

        With an empty ``states`` compressors begin anew: what they have not sent is dropped. It first waits for a step
        that was not finished.
        """
        groups = self.gradient_buffers.reduction_groups
        if any(group.compressor is not None for group in groups):
            self._ready()
            self._complete_step()
        given: Iterable[Any] = states or [{}] * len(groups)
        for group, state in zip(groups, given, strict=True):
            group.load_comm_state_dict(state)

    # ------------------------------------------------------------------ forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        self._enter()
        outputs = super().forward(*inputs, **kwargs)
        return self._leave(outputs)

    @uncompiled
    def _enter(self) -> None:
        if EventLog.current is not None:
            EventLog.current.begin("forward", self)
        if torch.is_grad_enabled():
            self._ready().begin_step()

    @uncompiled
    def _leave(self, outputs: Any) -> Any:
        if torch.is_grad_enabled():
            outputs = self._reducer.watch(outputs, is_training=self.training)
        if EventLog.current is not None:
            EventLog.current.end("forward", self, type(self.module).__name__)
        return outputs

    def _ready(self) -> Reducer[BufferSynchronizer]:
        """The engine, after it has finished an aborted backward, if there was one."""
        reducer, state = self._reducer, self.gradient_buffers
        reducer.check()
        for groups in state.groups:
            groups.check()
        # First recover, which finishes a step of the other ranks with the module as it was.
        if reducer.recover() and not self._module_state.is_current(self.module):
            with reducer.looking_at_module():
                module_state = ModuleState(self.module)
                self._check_unchanged(state.module_state, module_state)
            reducer.use_module(state.module_state)
            self._module_state = module_state
        reducer.before_forward()
        return reducer

    def _check_unchanged(self, before: ModuleState, now: ModuleState) -> None:
        """Raise if a parameter has no place in the buffers; some may be frozen, removed or in another order."""
        trainable = self.gradient_buffers.gradients.index
        olds = {spec.name: (id(p), spec) for spec, p in zip(before.specs, before.parameters, strict=True)}
        for spec, parameter in zip(now.specs, now.parameters, strict=True):
            is_same = olds.get(spec.name) == (id(parameter), spec)
            if not is_same or (parameter.requires_grad and id(parameter) not in trainable):
                raise UnusableError(
                    f"rank {self._reducer.groups.rank}: parameter {spec.name!r} was added, replaced, moved, cast or "
                    "unfrozen since the module was wrapped, so it has no place in the gradient buffers; wrap the "
                    "module again, on all ranks"
                )

    # ------------------------------------------------------------------ gradients

    @contextmanager
    def no_sync(self) -> Generator[None, None, None]:
        """A context in which ``backward()`` accumulates into ``main_grad`` without synchronizing.

        Use it for all micro-batches but the last. Only the place of the call of ``backward()`` counts.
        """
        reducer = self._reducer
        before, reducer.enabled = reducer.enabled, False
        try:
            yield
        finally:
            reducer.enabled = before

    @uncompiled
    def start_grad_sync(self, *unused: object) -> None:
        """Send all accumulated gradients; does nothing if a backward or this method has sent them, or has failed.

        With ``overlap_grad_reduce`` it waits for the agreed mask, and not for the averages. Without it, ``main_grad``
        holds the averages afterwards, as in Megatron, and :meth:`finish_grad_sync` raises an error of any rank.

        All ranks must take part: by this method, by :meth:`finish_grad_sync`, or by a backward.
        """
        reducer = self._ready()
        synchronizer = reducer.synchronizer
        if reducer.is_started or not (synchronizer.failure or synchronizer.is_sent):
            reducer.finish()
        if not self.ddp_config.overlap_grad_reduce:
            synchronizer.wait_for_results()

    @uncompiled
    def begin_grad_sync(self) -> None:
        """Begin the synchronization of :meth:`finish_grad_sync`, if there is one, without waiting for other ranks."""
        reducer = self._ready()
        if not (reducer.synchronizer.is_sent or reducer.synchronizer.failure):
            reducer.start()

    @uncompiled
    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Wait for the averages, after sending the gradients if they were not sent; then ``main_grad`` holds averages.

        With ``use_distributed_optimizer`` a rank has averages of its own share of each bucket only, and the rest of
        ``main_grad`` has no meaning. ``force_all_reduce`` then raises.

        Raises:
            NonFiniteGradientError: On all ranks, with ``check_for_nan_in_grad``; names ranks and parameters.
            PeerAbortedError: The backward of another rank has raised, or this step has failed here already.
        """
        if force_all_reduce and self.ddp_config.use_distributed_optimizer:
            raise ValueError(
                "force_all_reduce=True: with use_distributed_optimizer gradients are reduce-scattered, and each rank "
                "has the averages of its own shares only; gather them from sharded().gradients()"
            )
        synchronizer = self._reducer.synchronizer
        try:
            self.start_grad_sync()
            synchronizer.wait_for_results()
        except BaseException:
            synchronizer.failure = None  # the error is being raised
            raise
        finally:
            synchronizer.is_sent = False
        synchronizer.raise_if_bad()

    @uncompiled
    def abort_grad_sync(self, reason: str = "it has called abort_grad_sync()") -> None:
        """Give this step up on all ranks; for a rank that cannot complete it and goes on with the next step.

        See :meth:`ppe_ddp.DistributedDataParallel.abort_grad_sync`. The other ranks raise
        :class:`~ppe_ddp.errors.PeerAbortedError` with ``reason`` in this step's backward or :meth:`finish_grad_sync`.
        On this rank ``main_grad`` keeps what it has computed. If the synchronized backward is over, other ranks may
        have their averages already; they go on with a warning. Without ``overlap_grad_reduce``, and in :meth:`no_sync`,
        the call is also needed if a backward has raised. Behind ``finalize_model_grads()`` it would give up the next
        step. If the model is split, also by experts, call ``finalize_model_grads()`` after it: it tells the ranks of
        the whole model and raises, and so it does on ranks whose backward was ended by this. Without it the ranks stay
        a step apart.
        """
        self._reducer.abort(reason)

    @uncompiled
    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply all gradients in the buffers by ``scaling_factor``."""
        synchronizer = self._ready().synchronizer
        synchronizer.wait_for_results()
        synchronizer.scale(scaling_factor)

    @uncompiled
    def zero_grad_buffer(self, zero_buffer: bool = True) -> None:
        """Start an iteration: drop the gradients in ``.grad``, and set ``main_grad`` to zero.

        Without ``zero_buffer`` it leaves ``main_grad`` to ``zero_grad()`` of a distributed optimizer, which has to be
        called before the first backward. Until then the old values count as accumulated.
        """
        synchronizer = self._ready().synchronizer
        synchronizer.begin_step()
        self._complete_step()
        synchronizer.is_sent = False
        synchronizer.failure = synchronizer.error = None
        synchronizer.gradients.discard()
        if zero_buffer:
            synchronizer.clear()

    def _complete_step(self) -> None:
        """Wait for the step that is under way, so that nothing of it comes into the next one."""
        try:
            self.gradient_buffers.wait_for_results()
        except PeerAbortedError as error:  # all ranks drop that step and go on with the next
            logger.warning("%s (It was never finished here.)", error)
        self.gradient_buffers.end_step(is_taken=True)  # as finalize_model_grads(), which may not have been called

    @uncompiled
    def broadcast_params(self) -> None:
        """Overwrite the parameters of all ranks by those of the first rank. All ranks must call this together.

        Dense parameters come from the first rank of ``groups.data``, experts from the first rank of ``groups.expert``.

        Raises:
            DisagreementError: Names, shapes or dtypes of parameters or buffers differ between the ranks, or options.
        """
        self.gradient_buffers.check()  # connects again where a rank has given a step up behind it
        for reduction_group in self.gradient_buffers.reduction_groups:
            broadcast_all(broadcast, reduction_group.module_state.parameters, reduction_group.groups)

    def trace(self) -> Trace | None:
        """The record of the last synchronized backward on this rank; None before the first."""
        return self._reducer.trace()

    # ------------------------------------------------------------------ a distributed optimizer

    def sharded(self, *, experts: bool = False) -> ShardedModel:
        """The shards for a distributed optimizer, of dense parameters or of ``experts``; cached."""
        if not self.ddp_config.use_distributed_optimizer:
            raise ValueError("a distributed optimizer needs a wrapper made with use_distributed_optimizer=True")
        if experts >= len(self.gradient_buffers.reduction_groups):
            raise ValueError("the module has no experts (parameters with allreduce = False)")
        if experts not in self._sharded:
            self._sharded[experts] = ShardedBuffers(self.gradient_buffers, int(experts))
        return self._sharded[experts]

    @uncompiled
    def start_param_sync(self, *unused: object, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Gather the shards that each rank has written; all ranks must call this.

        With ``overlap_param_gather`` the first use of a parameter waits for it; ``force_sync`` waits here. The other
        arguments are Megatron's, and have no effect.
        """
        overlap = self.ddp_config.overlap_param_gather and not force_sync
        if not overlap:  # else nothing may wait here
            self.gradient_buffers.check()  # connects again where a rank has given a step up behind it
        self._gather_of_parameters().start(overlap=overlap)

    def enable_forward_pre_hook(self) -> None:
        """Let forwards wait for parameters that are being gathered; enabled from the start by ``overlap_param_gather``.

        Uses in Python wait without these hooks. The hooks are for extensions, which read parameters in C++.
        """
        self._gather_of_parameters().watch(self.module)

    @uncompiled
    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Remove these hooks, and gather all parameters now, unless ``param_sync`` is False."""
        gather = self._gather_of_parameters()
        gather.finish()
        gather.unwatch()
        if param_sync:
            self.start_param_sync(force_sync=True)

    def _gather_of_parameters(self) -> ParameterGather:
        if self._parameter_gather is None:
            numbers = range(len(self.gradient_buffers.reduction_groups))
            self._parameter_gather = ParameterGather([self.sharded(experts=bool(number)) for number in numbers])
        return self._parameter_gather

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a Megatron wrapper holds buffers that its parameters point into, and cannot be copied or pickled; copy "
            "or save the module inside (ddp.module), and wrap the copy"
        )
