"""The configuration of a Megatron wrapper: all of Megatron-Core's fields, of which some only take their default."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

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
    """The choices of one :class:`~ppe_ddp.megatron.DistributedDataParallel`, under Megatron-Core's names.

    Fields may be set until a wrapper is made with the object. From then on setting one raises ``AttributeError``,
    since it would change nothing; ``dataclasses.replace()`` makes another object.

    Of Megatron's other fields, some ask for what is not built here and take their default only; any other value is a
    ``ValueError`` that gives the reason. The rest are accepted and have no effect: ``align_param_gather``,
    ``average_in_collective`` and ``gradient_reduce_div_fusion`` choose when and how Megatron computes the same numbers,
    and what follows them is read by Megatron-FSDP and NCCL's registered buffers only.

    Attributes:
        grad_reduce_in_fp32: Accumulate and communicate the gradients of half-precision parameters in fp32. Twice the
            memory and the bytes; sums over many micro-batches keep what is small. Other dtypes are left as they are.
        overlap_grad_reduce: Communicate by buckets while backward runs, instead of in ``finish_grad_sync()``.
        overlap_param_gather: Let a distributed optimizer bring parameters together while the next forward runs.
        use_distributed_optimizer: Reduce-scatter gradients, so that each rank has the average of its own share only,
            and keep parameters in contiguous buffers, from which they are gathered in place.
        check_for_nan_in_grad: Look for NaN and infinity in the gradients of this rank before they are sent; one more
            pass over them. All ranks of the group raise an error that names the rank and the parameters.
        bucket_size: Elements after which a bucket is closed, when communication overlaps. Smaller ones are launched
            earlier; larger ones pay the latency of a message less often. None: 1,000,000 (Megatron's 40,000,000 is for
            NCCL).
        pad_buckets_for_high_nccl_busbw: Pad buckets so that each rank's share is a multiple of 65536 elements.

    Raises:
        ValueError: A value that is not supported; names the field and the reason.
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
        """Check the values."""
        self.check()

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field, unless a wrapper was made with this object."""
        if self.__dict__.get("_is_used") and name in self.__dataclass_fields__:
            raise AttributeError(
                f"a wrapper was made with this configuration, so setting {name} would change nothing: set it before, "
                "or wrap again with dataclasses.replace(config, ...)"
            )
        super().__setattr__(name, value)

    def use(self) -> None:
        """Check the values once more, and let none of them be changed from now on: a wrapper is made with them."""
        self.check()
        self._is_used = True

    def check(self) -> None:
        """Raise ``ValueError`` for a value that is not supported."""
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
        """One line for fingerprints and messages: the fields that have another value than their default."""
        values = [(field, getattr(self, field.name)) for field in fields(self)]
        return ", ".join(f"{field.name} {value}" for field, value in values if value != field.default)
