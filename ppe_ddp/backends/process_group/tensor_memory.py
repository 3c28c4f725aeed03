"""Whether a tensor's memory can be handed to a transport as one address."""

from __future__ import annotations

import torch


def is_addressable(tensor: torch.Tensor, *, on_cuda: bool = False) -> bool:
    """Whether the memory of a tensor is its elements in order, on the host; or, with ``on_cuda``, on a GPU."""
    return (
        (not tensor.is_cuda or on_cuda)
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory, which torch allows for input and output and MPI forbids."""
    start, begin = one.data_ptr(), other.data_ptr()
    return start < begin + other.nbytes and begin < start + one.nbytes
