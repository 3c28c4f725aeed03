"""The arguments of a Megatron wrapper: a configuration with all of Megatron-Core's fields.

Older versions of Megatron-Core took these fields as positional arguments. Both forms are parsed to one :class:`Setup`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from typing_extensions import get_overloads  # in typing from Python 3.11 on; comes with torch

from ppe_ddp.compression.compressor import Compressor
from ppe_ddp.contracts import ReduceFunction
from ppe_ddp.functions import average
from ppe_ddp.megatron.parallel_groups import ParallelGroups
from ppe_ddp.options import check_call, unknown_keyword

DEFAULT_BUCKET_SIZE = 1_000_000
_NO_FSDP = "there is no Megatron-FSDP here; torch's fully_shard works over ppe_ddp's backends"
_OWN_DTYPE = "parameters are gathered in their own dtype"
_REFUSED = {
    "num_distributed_optimizer_instances": "the state is sharded over the whole data-parallel group",
    "check_for_large_grads": "gradients are only checked for NaN and infinity, by check_for_nan_in_grad",
    "num_buckets": "give bucket_size, the number of elements after which a bucket is closed",
    "reduce_scatter_with_fp32_accumulation": "grad_reduce_in_fp32 accumulates and sends in fp32",
    "param_name_patterns_for_fp32_local_accumulation": "grad_reduce_in_fp32 is for all parameters",
    "fp8_param_gather": _OWN_DTYPE,
    "fp4_param_gather": _OWN_DTYPE,
    "reuse_grad_buf_for_mxfp8_param_ag": _OWN_DTYPE,
    "use_megatron_fsdp": _NO_FSDP,
    "use_custom_fsdp": _NO_FSDP,
    "data_parallel_sharding_strategy": _NO_FSDP,
    "outer_dp_sharding_strategy": _NO_FSDP,
    "nccl_ub": "buffers are not registered with NCCL",
    "delay_wgrad_compute": "a gradient is accumulated when autograd has computed it",
}


@dataclass
class DistributedDataParallelConfig:
    """The options of one :class:`~ppe_ddp.megatron.DistributedDataParallel`, under Megatron-Core's names.

    Fields may be set until a wrapper is made with the object. After that, setting one raises ``AttributeError``, since
    it would have no effect; ``dataclasses.replace()`` makes another object.

    Megatron's other fields are of two kinds. Some ask for features that are not supported: any value but the default
    raises a ``ValueError`` with the reason. The rest have no effect: they choose how Megatron computes the same
    numbers, or are read only by Megatron-FSDP and NCCL's registered buffers.

    Attributes:
        grad_reduce_in_fp32: Accumulate and communicate the gradients of half-precision parameters in fp32. It takes
            twice the memory and bytes, but sums over many micro-batches do not lose small gradients. Other dtypes are
            not changed.
        overlap_grad_reduce: Communicate by buckets while backward runs, instead of in ``finish_grad_sync()``.
        overlap_param_gather: Let :meth:`~ppe_ddp.megatron.DistributedDataParallel.start_param_sync` return at once, and
            the next forward wait for what it needs. ``DistributedOptimizer`` gathers by itself, in its step; it does so
            during the next forward if it is made with ``overlap=True``.
        use_distributed_optimizer: Reduce-scatter gradients, so that each rank has the average of its own share only.
            Parameters are kept in contiguous buffers, in which they are gathered in place.
        check_for_nan_in_grad: Look for NaN and infinity in the gradients of this rank before they are sent; one more
            pass over them. All ranks of the group raise an error that names the rank and the parameters.
        bucket_size: Elements after which a bucket is closed, when communication overlaps. Smaller ones are launched
            earlier; larger ones pay the latency of a message less often. None: 1,000,000 (Megatron's 40,000,000 is for
            NCCL).
        pad_buckets_for_high_nccl_busbw: Pad buckets so that each rank's share is a multiple of 65536 elements.
    """

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    use_distributed_optimizer: bool = False
    check_for_nan_in_grad: bool = False
    bucket_size: int | None = None
    pad_buckets_for_high_nccl_busbw: bool = False
    # take their default only
    num_distributed_optimizer_instances: int = 1
    check_for_large_grads: bool = False
    num_buckets: int | None = None
    reduce_scatter_with_fp32_accumulation: bool = False
    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
    fp8_param_gather: bool = False
    fp4_param_gather: bool = False
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    use_megatron_fsdp: bool = False
    use_custom_fsdp: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    outer_dp_sharding_strategy: str = "no_shard"
    nccl_ub: bool = False
    delay_wgrad_compute: bool = False
    # have no effect
    align_param_gather: bool = False
    average_in_collective: bool = False
    gradient_reduce_div_fusion: bool = True
    preserve_fp32_weights: bool = True
    megatron_fsdp_version: int = 1
    suggested_communication_unit_size: int | None = None
    keep_fp8_transpose_cache: bool = False
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool = False
    fsdp_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    fsdp_all_gather_in_start_param_sync: bool = True
    disable_symmetric_registration: bool = False
    fsdp_manual_registration: bool = False
    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    megatron_fsdp_use_decoupled_grad: bool = False
    megatron_fsdp_cuda_graph_mode: bool = False
    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    megatron_fsdp_max_pool_double_buffer: bool = False

    def __post_init__(self) -> None:
        self._check()

    def __setattr__(self, name: str, value: object) -> None:
        if self.__dict__.get("_is_used") and name in self.__dataclass_fields__:
            raise AttributeError(
                f"a wrapper was made with this configuration, so setting {name} would change nothing: set it before, "
                "or wrap again with dataclasses.replace(config, ...)"
            )
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_is_used"}  # no wrapper has a copy

    def use(self) -> None:
        """Check the values, and refuse changes from now on; called when a wrapper is made with them."""
        self._check()
        self._is_used = True

    def _check(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _REFUSED and (tuple(value) if isinstance(value, list) else value) != field.default:
                raise ValueError(
                    f"{field.name}={value!r} is not supported, only {field.default!r}: {_REFUSED[field.name]}"
                )
        if self.bucket_size is not None and self.bucket_size < 1:
            raise ValueError(f"bucket_size must be a positive number of elements or None, not {self.bucket_size!r}")
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            raise ValueError("overlap_param_gather needs use_distributed_optimizer: without it nothing is gathered")

    def described(self) -> str:
        """The fields that differ from their defaults, in one line for fingerprints and messages."""
        values = [(field, getattr(self, field.name)) for field in fields(self)]
        return ", ".join(f"{field.name} {value}" for field, value in values if value != field.default)


_OLD_FIELDS = ("overlap_grad_reduce", "use_distributed_optimizer", "check_for_nan_in_grad", "bucket_size")
_ELSEWHERE = {
    "pg_collection": "pass groups=ParallelGroups(data=pg_collection.dp_cp, tensor=pg_collection.tp, "
    "pipeline=pg_collection.pp, embedding=pg_collection.embd, position_embedding=pg_collection.pos_embd, "
    "expert=pg_collection.expt_dp, expert_tensor=pg_collection.expt_tp)",
    "full_param_layout": "buffers are laid out here; see bucket_size and disable_bucketing",
}


@dataclass(frozen=True)
class Setup:
    """The parsed arguments of a wrapper, the same for both forms."""

    config: object
    module: nn.Module
    ddp_config: DistributedDataParallelConfig
    disable_bucketing: bool
    groups: ParallelGroups
    reduce_function: ReduceFunction | Compressor

    def __post_init__(self) -> None:
        if not isinstance(self.ddp_config, DistributedDataParallelConfig):
            raise TypeError(f"ddp_config must be a DistributedDataParallelConfig, not {type(self.ddp_config).__name__}")
        if not isinstance(self.reduce_function, Compressor):
            check_call("reduce_function", self.reduce_function, ("bucket", "group"))
        if self.ddp_config.use_distributed_optimizer and self.reduce_function is not average:
            raise ValueError(
                "a reduce_function or a compressor averages whole buckets; with use_distributed_optimizer gradients "
                "are reduce-scattered: leave one of the two out"
            )

    @classmethod
    def of(
        cls, constructor: Callable[..., None], config: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Setup:
        """Parse a call of ``constructor``, which has two overloads: the new form and the old one."""
        is_new = "ddp_config" in kwargs or (args and isinstance(args[0], DistributedDataParallelConfig))
        form = _forms(constructor)[0 if is_new else 1]
        for name in kwargs:
            if name in _ELSEWHERE:
                raise TypeError(f"DistributedDataParallel() has no {name}: {_ELSEWHERE[name]}")
            if name not in form.parameters:
                raise TypeError(unknown_keyword(name, {*form.parameters} - {"self"}))
        try:
            call = form.bind(None, config, *args, **kwargs)
        except TypeError as error:
            hint = (
                "; this is the old form, as neither ddp_config nor the second argument is a "
                "DistributedDataParallelConfig: the new one is DistributedDataParallel(config, ddp_config, module)"
            )
            names = ", ".join([*form.parameters][1:])
            raise TypeError(f"DistributedDataParallel({names}): {error}{'' if is_new else hint}") from None
        call.apply_defaults()
        given = call.arguments
        if not is_new:
            in_fp32, values = given["accumulate_allreduce_grads_in_fp32"], {name: given[name] for name in _OLD_FIELDS}
            given["ddp_config"] = DistributedDataParallelConfig(grad_reduce_in_fp32=in_fp32, **values)
        groups, data, expert = (given[n] for n in ("groups", "data_parallel_group", "expert_data_parallel_group"))
        if groups is not None and (data is not None or expert is not None):
            raise ValueError("give groups, or data_parallel_group and expert_data_parallel_group, not both")
        return cls(
            config,
            given["module"],
            given["ddp_config"],
            given["disable_bucketing"],
            groups or ParallelGroups(data=data, expert=expert),
            given["reduce_function"] or average,
        )


def showing_both_forms(constructor: Callable[..., None]) -> Callable[..., None]:
    """Let ``inspect.signature`` show the new form, with the parameters of the old form as further keywords."""
    new, old = _forms(constructor)
    added = [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=None, annotation=f"{one.annotation} | None")
        for name, one in old.parameters.items()
        if name not in new.parameters
    ]
    constructor.__signature__ = new.replace(parameters=[*new.parameters.values(), *added])  # type: ignore[attr-defined]
    return constructor


def _forms(constructor: Callable[..., None]) -> list[inspect.Signature]:
    return [inspect.signature(form) for form in get_overloads(constructor)]
