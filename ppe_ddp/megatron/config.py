"""The configuration of a Megatron wrapper: one frozen object, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

DEFAULT_BUCKET_SIZE = 1_000_000


@dataclass(frozen=True)
class DistributedDataParallelConfig:
    """The choices of one :class:`~ppe_ddp.megatron.DistributedDataParallel`, under Megatron-Core's names.

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
    """

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    use_distributed_optimizer: bool = False
    check_for_nan_in_grad: bool = False
    bucket_size: int | None = None
    pad_buckets_for_high_nccl_busbw: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.bucket_size is not None and self.bucket_size < 1:
            raise ValueError(f"bucket_size must be a positive number of elements or None, not {self.bucket_size!r}")
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            raise ValueError("overlap_param_gather needs use_distributed_optimizer: without it nothing is gathered")

    def replaced(self, **changes: object) -> DistributedDataParallelConfig:
        """A copy with some fields changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def described(self) -> str:
        """One line for fingerprints and messages."""
        return ", ".join(f"{field.name} {getattr(self, field.name)}" for field in fields(self))
