"""Collectives on tensors in terms of NCCL's calls.

Each collective is a generator with three parts, which run on NCCL's stream: what comes before its `yield` makes copies
where NCCL cannot read a tensor as it is; what it yields are the calls; what comes after brings the results to where
the user wants them. So the calls of several collectives can be made as one group.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ppe_ddp.backends.collective_arguments import CollectiveArguments, pack, unpack
from ppe_ddp.backends.cupy_nccl.nccl_datatypes import BYTE, reduction_of
from ppe_ddp.backends.group_internals import premul_factor

if TYPE_CHECKING:
    from ppe_ddp.backends.cupy_nccl.nccl_communicator import Communicator

__all__ = ["Call", "NcclCollectives", "Steps"]

Call = Callable[["Communicator", int], None]
"""One call of NCCL, given a communicator and the address of a stream."""

Steps = Generator[list[Call], None, None]


class NcclCollectives:
    """All collectives of a group; an ``op`` is a ReduceOp.

    Tensors may be non-contiguous and empty; those of one collective are on one device. What can be checked on this rank
    alone is checked before the first call. Sizes and dtypes must agree between the ranks; NCCL does not check it.

    Args:
        rank: This rank in the communicator.
        size: How many ranks it has.
        version: NCCL's.

    Raises from any collective, when its first part is run:
        TypeError: NCCL has no such reduction, or the tensors are sparse or of different dtypes.
        ValueError: The sizes of this rank's own arguments do not fit together.
    """

    def __init__(self, rank: int, size: int, version: int) -> None:
        self.rank = rank
        self.size = size
        self._version = version
        self._arguments = CollectiveArguments(rank, size)

    def all_reduce(self, tensor: Tensor, op: Any) -> Steps:
        """Reduce ``tensor`` over the ranks, in place; the same size and dtype everywhere."""
        source, (datatype, count, kind) = self._reduced(tensor, op)
        target = _output_memory(tensor)
        yield _unless_empty(
            count, lambda c, s: c.allReduce(source.data_ptr(), target.data_ptr(), count, datatype, kind, s)
        )
        _copy_back(tensor, target)

    def reduce(self, tensor: Tensor, op: Any, root: int) -> Steps:
        """Reduce over the ranks into rank ``root``'s ``tensor``; the others keep theirs."""
        source, (datatype, count, kind) = self._reduced(tensor, op)
        # NCCL writes to the root's output alone.
        target = _output_memory(tensor) if self.rank == root else source
        yield _unless_empty(
            count, lambda c, s: c.reduce(source.data_ptr(), target.data_ptr(), count, datatype, kind, root, s)
        )
        if self.rank == root:
            _copy_back(tensor, target)

    def broadcast(self, tensor: Tensor, root: int) -> Steps:
        """Overwrite ``tensor`` by that of rank ``root``; the same number of bytes everywhere."""
        memory = _input_memory(tensor) if self.rank == root else _output_memory(tensor)
        address, nbytes = memory.data_ptr(), memory.nbytes
        yield _unless_empty(nbytes, lambda c, s: c.broadcast(address, address, nbytes, BYTE, root, s))
        if self.rank != root:
            _copy_back(tensor, memory)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Steps:
        """Put the tensors of all ranks one after another into ``output``, which has ``size`` times the elements."""
        self._arguments.check_all_gather(output, tensor)
        source, target = _input_memory(tensor), _output_memory(output)
        nbytes = source.nbytes
        yield _unless_empty(nbytes, lambda c, s: c.allGather(source.data_ptr(), target.data_ptr(), nbytes, BYTE, s))
        _copy_back(output, target)

    def all_gather_list(self, outputs: Sequence[Tensor], tensor: Tensor) -> Steps:
        """Put rank i's ``tensor`` into ``outputs[i]``; sizes may differ between ranks where the outputs' do."""
        self._arguments.check_all_gather_list(outputs, tensor)
        if _are_even(outputs):
            flat = _flat_for(outputs)
            yield from self.all_gather(flat, tensor)
            unpack(flat, outputs)
            return
        targets = [_output_memory(output) for output in outputs]
        # Only the sender's own is read, and it goes to all, this rank's output among them.
        sources = [_input_memory(tensor) if rank == self.rank else target for rank, target in enumerate(targets)]
        yield [
            call
            for root, (source, target) in enumerate(zip(sources, targets, strict=True))
            for call in _unless_empty(target.nbytes, _broadcast_call(source, target, root))
        ]
        for output, target in zip(outputs, targets, strict=True):
            _copy_back(output, target)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: Any) -> Steps:
        """Reduce over the ranks; rank i gets the i-th of ``size`` equal parts of the flat ``tensor``."""
        self._arguments.check_reduce_scatter(output, tensor)
        source, (datatype, total, kind) = self._reduced(tensor, op)
        target, count = _output_memory(output), total // self.size
        yield _unless_empty(
            count, lambda c, s: c.reduceScatter(source.data_ptr(), target.data_ptr(), count, datatype, kind, s)
        )
        _copy_back(output, target)

    def reduce_scatter_list(self, output: Tensor, tensors: Sequence[Tensor], op: Any) -> Steps:
        """Reduce ``tensors[i]`` over the ranks into rank i's ``output``; sizes may differ between the ranks."""
        self._arguments.check_reduce_scatter_list(output, tensors)
        if _are_even(tensors):
            yield from self.reduce_scatter(output, pack(_flat_for(tensors), tensors), op)
            return
        target = _output_memory(output)
        calls: list[Call] = []
        for root, tensor in enumerate(tensors):
            source, (datatype, count, kind) = self._reduced(tensor, op)
            into = target if root == self.rank else source
            calls += _unless_empty(count, _reduce_call(source, into, count, datatype, kind, root))
        yield calls
        _copy_back(output, target)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Steps:
        """Send each rank its rows, and receive its rows from each."""
        self._arguments.check_all_to_all(output, tensor)
        source, target = _input_memory(tensor), _output_memory(output)
        sent = source.view(-1).split(self._arguments.split_sizes(tensor, input_splits))
        received = target.view(-1).split(self._arguments.split_sizes(output, output_splits))
        yield [*_sends(sent), *_receives(received)]
        _copy_back(output, target)

    def all_to_all_list(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Steps:
        """Send ``tensors[j]`` to rank j and receive rank i's tensor into ``outputs[i]``; any sizes that match."""
        self._arguments.check_all_to_all_list(outputs, tensors)
        sources, targets = [_input_memory(tensor) for tensor in tensors], [_output_memory(output) for output in outputs]
        yield [*_sends(sources), *_receives(targets)]
        for output, target in zip(outputs, targets, strict=True):
            _copy_back(output, target)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Steps:
        """Put rank i's ``tensor`` into ``outputs[i]`` on rank ``root``; ``outputs`` is not looked at elsewhere."""
        source = _input_memory(tensor)
        if self.rank != root:
            yield _unless_empty(source.nbytes, _send_call(source, root))
            return
        self._arguments.check_gather(outputs, tensor)
        targets = [_output_memory(output) for output in outputs]
        yield [*_unless_empty(source.nbytes, _send_call(source, root)), *_receives(targets)]
        for output, target in zip(outputs, targets, strict=True):
            _copy_back(output, target)

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], root: int) -> Steps:
        """Put ``tensors[i]`` of rank ``root`` into rank i's ``output``; ``tensors`` is not looked at elsewhere."""
        target = _output_memory(output)
        calls: list[Call] = []
        if self.rank == root:
            self._arguments.check_scatter(output, tensors)
            calls = _sends([_input_memory(tensor) for tensor in tensors])
        yield [*calls, *_unless_empty(target.nbytes, _receive_call(target, root))]
        _copy_back(output, target)

    def send(self, tensor: Tensor, peer: int) -> Steps:
        """Send ``tensor`` to rank ``peer`` of the communicator, which receives as many bytes."""
        source = _input_memory(tensor)
        yield _unless_empty(source.nbytes, _send_call(source, peer))

    def receive(self, tensor: Tensor, peer: int) -> Steps:
        """Receive into ``tensor`` from rank ``peer`` of the communicator."""
        target = _output_memory(tensor)
        yield _unless_empty(target.nbytes, _receive_call(target, peer))
        _copy_back(tensor, target)

    def _reduced(self, tensor: Tensor, op: Any) -> tuple[Tensor, tuple[int, int, int]]:
        """Memory whose numbers NCCL can reduce, with their datatype, how many they are, and NCCL's operation."""
        reduction = reduction_of(tensor.dtype, op.op, self._version)
        source = _input_memory(tensor)
        if reduction.scales:
            source = source * premul_factor(op, source.device)
        return source, (reduction.datatype, source.nbytes // reduction.itemsize, reduction.op)


def _unless_empty(count: int, call: Call) -> list[Call]:
    return [call] if count else []


def _send_call(source: Tensor, peer: int) -> Call:
    return lambda c, s: c.send(source.data_ptr(), source.nbytes, BYTE, peer, s)


def _receive_call(target: Tensor, peer: int) -> Call:
    return lambda c, s: c.recv(target.data_ptr(), target.nbytes, BYTE, peer, s)


def _broadcast_call(source: Tensor, target: Tensor, root: int) -> Call:
    return lambda c, s: c.broadcast(source.data_ptr(), target.data_ptr(), target.nbytes, BYTE, root, s)


def _reduce_call(source: Tensor, into: Tensor, count: int, datatype: int, op: int, root: int) -> Call:
    return lambda c, s: c.reduce(source.data_ptr(), into.data_ptr(), count, datatype, op, root, s)


def _sends(sources: Sequence[Tensor]) -> list[Call]:
    return [_send_call(source, peer) for peer, source in enumerate(sources) if source.nbytes]


def _receives(targets: Sequence[Tensor]) -> list[Call]:
    return [_receive_call(target, peer) for peer, target in enumerate(targets) if target.nbytes]


def _is_addressable(tensor: Tensor) -> bool:
    """Whether the memory of a tensor is its elements in order."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"NCCL has no collectives for {tensor.layout} tensors; use to_dense()")
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _input_memory(tensor: Tensor) -> Tensor:
    """The tensor itself where NCCL can read its memory, else a copy."""
    if _is_addressable(tensor):
        return tensor.detach()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def _output_memory(tensor: Tensor) -> Tensor:
    """Memory of a tensor's size that NCCL can write: its own where possible."""
    if _is_addressable(tensor):
        return tensor.detach()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _copy_back(tensor: Tensor, target: Tensor) -> None:
    if target.data_ptr() != tensor.data_ptr() or not _is_addressable(tensor):
        tensor.detach().copy_(target.view(tensor.shape))


def _are_even(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.numel() for tensor in tensors}) == 1


def _flat_for(tensors: Sequence[Tensor]) -> Tensor:
    count = sum(tensor.numel() for tensor in tensors)
    return torch.empty(count, dtype=tensors[0].dtype, device=tensors[0].device)
