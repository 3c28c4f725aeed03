"""Gradient memory: flat buffers for buckets, used again as soon as nothing else lies in them.

Fresh memory costs page faults, so buffers are kept from step to step. A ``.grad`` may be a view of one: the
buffer is then left alone for as long as anybody holds that view, whatever the next plan looks like.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from ppe_ddp.engine.layout import BucketPlan, ParameterSpec

_UNIT_BYTES = 1 << 16  # capacities are multiples of it, so that buckets of about the same size share buffers


def sole_owner(tensor: Tensor) -> bool:
    """Whether no other tensor, in Python or in autograd, uses the memory of ``tensor``."""
    # one for the tensor, one for the handle that untyped_storage() makes
    return bool(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) <= 2)


class Arena:
    """Owns the buffers and gives them out for one backward at a time."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        self._used: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes held now, by gradients that are views of a buffer or for the next backward."""
        return sum(buffer.nbytes for buffers in self._buffers.values() for buffer in buffers)

    def buffer(self, bucket: BucketPlan) -> Tensor:
        """A flat tensor of the size of ``bucket``, in which nothing lies; its contents are arbitrary."""
        held = self._buffers.setdefault((bucket.dtype, bucket.device), [])
        fitting = [buffer for buffer in held if buffer.numel() >= bucket.numel and sole_owner(buffer)]
        if fitting:
            chosen = min(fitting, key=torch.Tensor.numel)
        else:
            unit = max(1, _UNIT_BYTES // bucket.dtype.itemsize)
            chosen = torch.empty(-(-bucket.numel // unit) * unit, dtype=bucket.dtype, device=bucket.device)
            held.append(chosen)
        self._used.add(id(chosen))
        return chosen.narrow(0, 0, bucket.numel)

    def trim(self) -> None:
        """Give up the buffers that were not used since the last trim; those in use by others stay theirs."""
        for key, held in self._buffers.items():
            self._buffers[key] = [buffer for buffer in held if id(buffer) in self._used]
        self._used.clear()


def slots_of(
    buffer: Tensor, bucket: BucketPlan, specs: Sequence[ParameterSpec], parameters: Sequence[nn.Parameter]
) -> list[Tensor]:
    """Views of the flat ``buffer``, one a member, in its shape and strides."""
    if bucket.row_major:  # in one call, which is three times as fast
        like: list[Tensor] = [parameters[i] for i in bucket.members]
        return list(torch._C._nn.unflatten_dense_tensors(buffer, like))
    base = buffer.storage_offset()
    return [
        buffer.as_strided(specs[i].shape, specs[i].stride, base + offset)
        for i, offset in zip(bucket.members, bucket.offsets, strict=True)
    ]


def common_buffer(
    gradients: Sequence[Tensor | None], bucket: BucketPlan, specs: Sequence[ParameterSpec]
) -> Tensor | None:
    """The flat tensor that ``gradients`` are consecutive views of, as the last step has left them; or None."""
    first = gradients[0]
    if first is None or first._base is None or first.untyped_storage().nbytes() < bucket.nbytes:
        return None
    base, size = first.data_ptr(), bucket.dtype.itemsize
    for gradient, i, offset in zip(gradients, bucket.members, bucket.offsets, strict=True):
        if gradient is None or gradient.data_ptr() != base + offset * size or gradient.stride() != specs[i].stride:
            return None
        if gradient.dtype != bucket.dtype or gradient.requires_grad:
            return None
    return first.as_strided((bucket.numel,), (1,), first.storage_offset())
