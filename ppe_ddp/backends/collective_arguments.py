"""Arguments of collectives on one rank: their checks, and memory that a wire can read and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CollectiveArguments:
    """Checks of a rank's arguments: TypeError for different dtypes, ValueError for sizes that do not fit together."""

    rank: int  # this one, of the group's ``size``
    size: int

    def check_whole(self, what: str, part: Tensor, whole: Tensor) -> None:
        """Check that ``whole`` has world size times the elements of ``part``."""
        check_dtypes(part, whole)
        if whole.numel() != part.numel() * self.size:
            raise ValueError(
                f"rank {self.rank}: {what} of {part.numel()} elements on each of {self.size} ranks, and "
                f"{whole.numel()} for all of them"
            )

    def check_parts(self, what: str, part: Tensor, parts: Sequence[Tensor]) -> None:
        """Check that ``parts`` has a tensor for each rank, and that this rank's has the size of ``part``."""
        self.check_list(parts, f"tensors of {what}", part)
        if parts[self.rank].numel() != part.numel():
            raise ValueError(
                f"rank {self.rank}: {what} of {part.numel()} elements on this rank, and {parts[self.rank].numel()} in "
                "its place among those of all ranks"
            )

    def check_list(self, tensors: Sequence[Tensor], what: str, *others: Tensor) -> None:
        """Check that ``tensors`` has one for each rank, and that all, with ``others``, have one dtype."""
        if len(tensors) != self.size:
            raise ValueError(f"rank {self.rank}: {len(tensors)} {what}, one for each of {self.size} ranks is needed")
        check_dtypes(*others, *tensors)

    def split_sizes(self, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        """The number of elements of each rank's rows of ``tensor``; without ``splits`` the parts are equal."""
        rows = tensor.shape[0] if tensor.dim() else tensor.numel()
        if not splits:
            if rows % self.size:
                raise ValueError(f"rank {self.rank}: {rows} rows cannot be divided evenly among {self.size} ranks")
            return [tensor.numel() // self.size] * self.size
        if len(splits) != self.size or sum(splits) != rows:
            raise ValueError(f"rank {self.rank}: splits {list(splits)} for {rows} rows and {self.size} ranks")
        row = tensor.numel() // rows if rows else 0
        return [split * row for split in splits]


@dataclass(frozen=True)
class HostMemory:
    """Provides memory that a wire can read and write: a tensor's own memory if possible, else a copy."""

    rank: int  # this one, for errors
    backend: str  # its name, for errors
    takes_cuda: bool = False  # CUDA tensors are supported: they are copied to pinned memory and back
    gpu_aware: bool = False  # the wire reads and writes CUDA memory itself

    def input(self, tensor: Tensor) -> Tensor:
        """The tensor, if the wire can read its memory, else a contiguous copy (for CUDA in pinned memory)."""
        if self._is_own(tensor):
            return _memory_of(tensor)
        host = self._empty(tensor, tensor.shape).copy_(tensor.detach(), non_blocking=True)
        _synchronize(tensor)
        return host

    def output(self, tensor: Tensor) -> Tensor:
        """Memory of the tensor's size that the wire can write: its own if possible."""
        return _memory_of(tensor) if self._is_own(tensor) else self._empty(tensor, tensor.shape)

    def flat(self, tensors: Sequence[Tensor]) -> Tensor:
        """New memory for all ``tensors``, one after another; empty if there are none."""
        for tensor in tensors:
            self._is_own(tensor)  # raises for unsupported tensors
        if not tensors:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return self._empty(tensors[0], (sum(tensor.numel() for tensor in tensors),))

    def packed(self, tensors: Sequence[Tensor]) -> Tensor:
        """Copies of all ``tensors``, one after another in one tensor."""
        flat = pack(self.flat(tensors), tensors)
        if tensors:
            _synchronize(tensors[0])
        return flat

    def copy_back(self, tensor: Tensor, host: Tensor) -> None:
        """Copy the result from ``host`` to the user's ``tensor``, unless it is the same memory; in stream order."""
        if host.data_ptr() != tensor.data_ptr():
            _copy_to(tensor, host.view(tensor.shape))

    def _empty(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        is_staged = tensor.is_cuda and not self.gpu_aware
        device = "cpu" if is_staged else tensor.device
        return torch.empty(shape, dtype=tensor.dtype, device=device, pin_memory=is_staged)

    def _is_own(self, tensor: Tensor) -> bool:
        """Whether the wire can use the memory of ``tensor`` itself; TypeError if the backend does not support it."""
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"rank {self.rank}: the {self.backend} backend has no collectives for {tensor.layout} tensors"
            )
        if not tensor.is_cpu and not (tensor.is_cuda and self.takes_cuda):
            raise TypeError(
                f"rank {self.rank}: the {self.backend} backend is for tensors on cpu, not on {tensor.device}; make a "
                f'group of several backends: "cpu:{self.backend},cuda:nccl"'
            )
        is_reached = tensor.is_cpu or self.gpu_aware
        return is_reached and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def pack(flat: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Copy ``tensors`` one after another into ``flat``; copies from a GPU to pinned memory are not waited for."""
    for part, tensor in zip(_parts_of(flat, tensors), tensors, strict=True):
        part.copy_(tensor.detach(), non_blocking=True)
    return flat


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the parts of ``flat``, one after another, to ``tensors``."""
    for part, tensor in zip(_parts_of(flat, tensors), tensors, strict=True):
        _copy_to(tensor, part)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as a 1-D tensor of bytes."""
    return tensor.view(-1).view(torch.uint8)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors share memory: torch allows it for input and output, and MPI forbids it."""
    start, begin = one.data_ptr(), other.data_ptr()
    return start < begin + other.nbytes and begin < start + one.nbytes


def _memory_of(tensor: Tensor) -> Tensor:
    """A tensor in the same memory, whose writes autograd does not see, as with a backend in C++; inference mode or not.

    One element, or none, gets a stride of 1, without which torch does not view it as another dtype.
    """
    if tensor.is_inference():
        memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        tensor = memory.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return tensor.data if tensor.numel() > 1 else tensor.data.as_strided(tensor.shape, [1] * tensor.dim())


def _copy_to(tensor: Tensor, source: Tensor) -> None:
    if tensor.is_inference():
        with torch.inference_mode():
            tensor.copy_(source, non_blocking=True)
    else:
        tensor.detach().copy_(source, non_blocking=True)


def _parts_of(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in tensors]) if tensors else ()
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _synchronize(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def check_dtypes(*tensors: Tensor) -> None:
    """Raise TypeError if the tensors of one collective have different dtypes."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise TypeError(f"tensors of different dtypes in one collective: {sorted(map(str, dtypes))}")
