"""Checks and conversions of collectives' arguments that every transport needs.

They see one rank's arguments; whether the ranks fit together no transport checks here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class CollectiveArguments:
    """The checks of one group.

    Args:
        rank: This rank, for errors.
        size: How many ranks the group has.

    Raises from any check:
        TypeError: Tensors of one collective have different dtypes.
        ValueError: The sizes or counts of this rank's arguments do not fit together.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def check_all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """``output`` has room for the tensors of all ranks."""
        _check_dtypes(output, tensor)
        if output.numel() != tensor.numel() * self.size:
            raise ValueError(
                f"rank {self.rank}: all-gather of {tensor.numel()} elements from {self.size} ranks into an output of "
                f"{output.numel()} elements"
            )

    def check_all_gather_list(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """There is an output for each rank, and this rank's has the size of ``tensor``."""
        self._check_count(outputs, "outputs of an all-gather")
        _check_dtypes(*outputs, tensor)
        if outputs[self.rank].numel() != tensor.numel():
            raise ValueError(
                f"rank {self.rank}: all-gather of {tensor.numel()} elements into an output of "
                f"{outputs[self.rank].numel()} elements"
            )

    def check_reduce_scatter(self, output: Tensor, tensor: Tensor) -> None:
        """``tensor`` has as many elements as the outputs of all ranks."""
        _check_dtypes(output, tensor)
        if tensor.numel() != output.numel() * self.size:
            raise ValueError(
                f"rank {self.rank}: reduce-scatter of {tensor.numel()} elements over {self.size} ranks into an output "
                f"of {output.numel()} elements"
            )

    def check_reduce_scatter_list(self, output: Tensor, tensors: Sequence[Tensor]) -> None:
        """There is an input for each rank, and this rank's has the size of ``output``."""
        self._check_count(tensors, "inputs of a reduce-scatter")
        _check_dtypes(output, *tensors)
        if tensors[self.rank].numel() != output.numel():
            raise ValueError(
                f"rank {self.rank}: reduce-scatter of {tensors[self.rank].numel()} elements into an output of "
                f"{output.numel()} elements"
            )

    def check_all_to_all(self, output: Tensor, tensor: Tensor) -> None:
        """Both have one dtype; :meth:`split_sizes` checks the rows."""
        _check_dtypes(output, tensor)

    def check_all_to_all_list(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """There are an input and an output for each rank."""
        self._check_count(outputs, "outputs of an all-to-all")
        self._check_count(tensors, "inputs of an all-to-all")
        _check_dtypes(*outputs, *tensors)

    def check_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """On the root: there is an output for each rank."""
        self._check_count(outputs, "outputs of a gather")
        _check_dtypes(*outputs, tensor)

    def check_scatter(self, output: Tensor, tensors: Sequence[Tensor]) -> None:
        """On the root: there is an input for each rank."""
        self._check_count(tensors, "inputs of a scatter")
        _check_dtypes(output, *tensors)

    def split_sizes(self, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        """How many elements of ``tensor`` each rank's rows have; without ``splits`` the parts are equal."""
        rows = tensor.shape[0] if tensor.dim() else tensor.numel()
        if not splits:
            if rows % self.size:
                raise ValueError(f"rank {self.rank}: {rows} rows cannot be divided evenly among {self.size} ranks")
            return [tensor.numel() // self.size] * self.size
        if len(splits) != self.size or sum(splits) != rows:
            raise ValueError(f"rank {self.rank}: splits {list(splits)} for {rows} rows and {self.size} ranks")
        row = tensor.numel() // rows if rows else 0
        return [split * row for split in splits]

    def _check_count(self, tensors: Sequence[Tensor], what: str) -> None:
        if len(tensors) != self.size:
            raise ValueError(f"rank {self.rank}: {len(tensors)} {what}, one for each of {self.size} ranks is needed")


def pack(flat: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Copy ``tensors`` one after another into ``flat``, which may be pinned memory: the copies are not waited for."""
    for part, tensor in zip(_parts_of(flat, tensors), tensors, strict=True):
        part.copy_(tensor.detach(), non_blocking=True)
    return flat


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy from ``flat`` what :func:`pack` has put there."""
    for part, tensor in zip(_parts_of(flat, tensors), tensors, strict=True):
        tensor.detach().copy_(part, non_blocking=True)


def _parts_of(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _check_dtypes(*tensors: Tensor) -> None:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise TypeError(f"tensors of different dtypes in one collective: {sorted(map(str, dtypes))}")
