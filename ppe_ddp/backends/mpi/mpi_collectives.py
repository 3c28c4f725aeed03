"""Collectives on tensors, over one MPI communicator: complete when they return, in the calling thread.

Apart from the process group, which only translates torch's many names, because here is what can be measured
and what can be numerically wrong. On one node nothing was faster than calling MPI inline: MPI does not progress
by itself, and a second thread takes a core from the ranks.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from mpi4py import MPI

from ppe_ddp.backends.group_internals import premul_factor
from ppe_ddp.backends.mpi.mpi_datatypes import MpiReduction, byte_buffer, reduction_of, typed_buffer
from ppe_ddp.backends.mpi.progress_engine import progress_engine
from ppe_ddp.backends.process_group.collective_arguments import CollectiveArguments, pack, unpack
from ppe_ddp.backends.process_group.tensor_memory import is_addressable, overlap
from ppe_ddp.backends.shared_memory.shared_group import SharedMemoryGroup
from ppe_ddp.backends.shared_memory.shared_link import SharedLink, SharedMemoryConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ppe_ddp.backends.mpi.mpi_options import MpiOptions
    from ppe_ddp.backends.mpi.mpi_waits import Waits


class MpiCollectives:
    """All collectives of one communicator; an ``op`` is a ReduceOp.

    Every method must be called by all its ranks, in the same order.

    Tensors may be non-contiguous, empty, on CPU or CUDA. Sizes and dtypes must agree between ranks as each method
    says; MPI does not check it, and wrong numbers or a hang is what follows.

    Args:
        comm: Its ranks are the ranks of the group, in order.
        waits: How to wait for them.
        options: See :class:`MpiOptions`.

    Attributes:
        shared: Runs the collectives that go through shared memory.
    """

    def __init__(self, comm: MPI.Intracomm, waits: Waits, options: MpiOptions) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._options = options
        self._wait = waits.request
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._arguments = CollectiveArguments(self.rank, self.size)
        self.shared = _shared_group(comm, waits, options)

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        """Reduce ``tensor`` over the ranks, in place; the same size and dtype everywhere."""
        reduction = reduction_of(tensor.dtype, op.op)
        is_small = tensor.nbytes < min(self._options.shared_bytes, self._options.piece_bytes)
        if is_small and reduction.is_direct and self._is_addressable(tensor):
            buffer = typed_buffer(tensor, reduction.datatype)
            self._wait(self.comm.Iallreduce(MPI.IN_PLACE, buffer, reduction.op), tensor)
            return
        host = self.host_memory(tensor)
        if self.shared.run("all_reduce", host, op):
            self.copy_back(tensor, host)
            return
        flat = host.view(-1).view(reduction.view)
        for piece in self._pieces(flat, reduction):
            wire = piece if reduction.wire is piece.dtype else self._scratch_like(piece, reduction.wire).copy_(piece)
            self._premultiply(wire, op)
            buffer = typed_buffer(wire, reduction.datatype)
            self._wait(self.comm.Iallreduce(MPI.IN_PLACE, buffer, reduction.op), wire)
            self._divide(wire, reduction)
            if wire is not piece:
                piece.copy_(wire)
        self.copy_back(tensor, host)

    def reduce(self, tensor: Tensor, op: Any, root: int) -> None:
        """Reduce over the ranks into rank ``root``'s ``tensor``; the others keep theirs."""
        reduction = reduction_of(tensor.dtype, op.op)
        host = self.host_memory(tensor)
        flat = host.view(-1).view(reduction.view)
        for piece in self._pieces(flat, reduction):
            wire = piece if reduction.is_direct else self._scratch_like(piece, reduction.wire).copy_(piece)
            self._premultiply(wire, op)
            buffer = typed_buffer(wire, reduction.datatype)
            if self.rank == root:
                self._wait(self.comm.Ireduce(MPI.IN_PLACE, buffer, reduction.op, root), wire)
                self._divide(wire, reduction)
                if wire is not piece:
                    piece.copy_(wire)
            else:
                self._wait(self.comm.Ireduce(buffer, None, reduction.op, root), wire)
        if self.rank == root:
            self.copy_back(tensor, host)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite ``tensor`` by that of rank ``root``; the same number of bytes everywhere."""
        host = self.host_memory(tensor)
        flat = host.view(-1).view(torch.uint8)
        for piece in flat.split(self._options.piece_bytes):
            self._wait(self.comm.Ibcast(byte_buffer(piece), root), piece)
        if self.rank != root:
            self.copy_back(tensor, host)

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        """Put the tensors of all ranks one after another into ``output``, which has ``size`` times the elements."""
        self._arguments.check_all_gather(output, tensor)
        result = self.output_memory(output)
        host = self.host_memory(tensor)
        if not self.shared.run("all_gather", result, host):
            host = host.clone() if overlap(host, result) else host
            # mpi4py wants the count of one rank's block
            block = (byte_buffer(result)[0], host.nbytes, MPI.BYTE)
            self._wait(self.comm.Iallgather(byte_buffer(host), block), host, result)
        self.copy_back(output, result)

    def all_gather_list(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Put rank i's ``tensor`` into ``outputs[i]``; sizes may differ between ranks where the outputs' do."""
        self._arguments.check_all_gather_list(outputs, tensor)
        host, result = self.host_memory(tensor), self._flat_for(outputs)
        counts = [output.nbytes for output in outputs]
        self._wait(self.comm.Iallgatherv(byte_buffer(host), [byte_buffer(result)[0], counts, MPI.BYTE]), host, result)
        unpack(result, outputs)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: Any) -> None:
        """Reduce over the ranks; rank i gets the i-th of ``size`` equal parts of the flat ``tensor``."""
        self._arguments.check_reduce_scatter(output, tensor)
        host, result = self.host_memory(tensor), self.output_memory(output)
        if self.shared.run("reduce_scatter", result, host, op):
            self.copy_back(output, result)
            return
        self._reduce_scatter(output, host.view(-1), op, None)

    def reduce_scatter_list(self, output: Tensor, tensors: Sequence[Tensor], op: Any) -> None:
        """Reduce ``tensors[i]`` over the ranks into rank i's ``output``; sizes may differ between the ranks."""
        self._arguments.check_reduce_scatter_list(output, tensors)
        counts = [tensor.numel() for tensor in tensors]
        self._reduce_scatter(output, self._pack(tensors), op, counts)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> None:
        """Send the j-th part of ``tensor`` to rank j and receive rank i's part as the i-th of ``output``.

        Args:
            output: Changed in place.
            tensor: Of the same dtype, and of the same shape after dimension 0.
            output_splits: How many rows come from each rank; empty for equal parts.
            input_splits: How many rows go to each rank; empty for equal parts.
        """
        self._arguments.check_all_to_all(output, tensor)
        host, result = self.host_memory(tensor), self.output_memory(output)
        send, receive = self._split_bytes(host, input_splits), self._split_bytes(result, output_splits)
        there, here = [byte_buffer(host)[0], send, MPI.BYTE], [byte_buffer(result)[0], receive, MPI.BYTE]
        self._wait(self.comm.Ialltoallv(there, here), host, result)
        self.copy_back(output, result)

    def all_to_all_list(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Send ``tensors[j]`` to rank j and receive rank i's tensor into ``outputs[i]``; any sizes that match."""
        self._arguments.check_all_to_all_list(outputs, tensors)
        flat, result = self._pack(tensors), self._flat_for(outputs)
        send, receive = [tensor.nbytes for tensor in tensors], [output.nbytes for output in outputs]
        there, here = [byte_buffer(flat)[0], send, MPI.BYTE], [byte_buffer(result)[0], receive, MPI.BYTE]
        self._wait(self.comm.Ialltoallv(there, here), flat, result)
        unpack(result, outputs)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> None:
        """Put rank i's ``tensor`` into ``outputs[i]`` on rank ``root``; ``outputs`` is not looked at elsewhere."""
        host = self.host_memory(tensor)
        if self.rank != root:
            self._wait(self.comm.Igatherv(byte_buffer(host), None, root), host)
            return
        self._arguments.check_gather(outputs, tensor)
        result = self._flat_for(outputs)
        counts = [output.nbytes for output in outputs]
        self._wait(
            self.comm.Igatherv(byte_buffer(host), [byte_buffer(result)[0], counts, MPI.BYTE], root), host, result
        )
        unpack(result, outputs)

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], root: int) -> None:
        """Put ``tensors[i]`` of rank ``root`` into rank i's ``output``; ``tensors`` is not looked at elsewhere."""
        result = self.output_memory(output)
        if self.rank != root:
            self._wait(self.comm.Iscatterv(None, byte_buffer(result), root), result)
        else:
            self._arguments.check_scatter(output, tensors)
            flat, counts = self._pack(tensors), [tensor.nbytes for tensor in tensors]
            self._wait(
                self.comm.Iscatterv([byte_buffer(flat)[0], counts, MPI.BYTE], byte_buffer(result), root), flat, result
            )
        self.copy_back(output, result)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._wait(self.comm.Ibarrier())

    def host_memory(self, tensor: Tensor) -> Tensor:
        """The tensor itself where MPI can take its memory, else a contiguous copy (of CUDA: in pinned memory)."""
        if self._is_addressable(tensor):
            return tensor.detach()
        if tensor.layout is not torch.strided:
            raise TypeError(f"rank {self.rank}: the mpi4py backend has no collectives for {tensor.layout} tensors")
        host = self.output_memory(tensor)
        host.copy_(tensor.detach(), non_blocking=True)
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        return host

    def copy_back(self, tensor: Tensor, host: Tensor) -> None:
        """Copy what MPI wrote to where the user wants it, if that is elsewhere; in the order of the current stream."""
        if host.data_ptr() != tensor.data_ptr() or not self._is_addressable(tensor):
            tensor.detach().copy_(host.view(tensor.shape), non_blocking=True)

    def _is_addressable(self, tensor: Tensor) -> bool:
        return is_addressable(tensor, on_cuda=self._options.gpu_aware)

    def output_memory(self, tensor: Tensor) -> Tensor:
        """Memory of a tensor's size that MPI can write: its own where possible."""
        if self._is_addressable(tensor):
            return tensor.detach()
        staged = tensor.is_cuda and not self._options.gpu_aware
        device = "cpu" if staged else tensor.device
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device, pin_memory=staged)

    def _flat_for(self, tensors: Sequence[Tensor]) -> Tensor:
        first = tensors[0]
        staged = first.is_cuda and not self._options.gpu_aware
        count = sum(tensor.numel() for tensor in tensors)
        return torch.empty(count, dtype=first.dtype, device="cpu" if staged else first.device, pin_memory=staged)

    def _pack(self, tensors: Sequence[Tensor]) -> Tensor:
        flat = pack(self._flat_for(tensors), tensors)
        if tensors[0].is_cuda:
            torch.cuda.current_stream(tensors[0].device).synchronize()
        return flat

    def _pieces(self, flat: Tensor, reduction: MpiReduction) -> list[Tensor]:
        return list(flat.split(max(1, self._options.piece_bytes // reduction.wire.itemsize)))

    def _scratch_like(self, piece: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory to compute in: kept from call to call, as fresh memory costs page faults."""
        if piece.is_cuda:
            return torch.empty_like(piece, dtype=dtype)
        scratch = self._scratch.get(dtype)
        if scratch is None:
            scratch = self._scratch[dtype] = torch.empty(self._options.piece_bytes // dtype.itemsize, dtype=dtype)
        return scratch[: piece.numel()]

    def _reduce_scatter(self, output: Tensor, flat: Tensor, op: Any, counts: list[int] | None) -> None:
        reduction = reduction_of(output.dtype, op.op)
        flat = flat.view(reduction.view)
        wire = flat if reduction.is_direct else flat.to(reduction.wire, copy=True)
        self._premultiply(wire, op)
        result = self.output_memory(output)
        wire = wire.clone() if overlap(wire, result) else wire
        flat_result = result.view(-1).view(reduction.view)
        direct = reduction.wire is reduction.view
        part = flat_result if direct else torch.empty_like(flat_result, dtype=reduction.wire)
        send, receive = typed_buffer(wire, reduction.datatype), typed_buffer(part, reduction.datatype)
        if counts is None:
            block = (send[0], part.numel(), reduction.datatype)
            self._wait(self.comm.Ireduce_scatter_block(block, receive, reduction.op), wire, part)
        else:
            width = flat_result.numel() // output.numel() if output.numel() else 0
            numels = [count * width for count in counts]
            self._wait(self.comm.Ireduce_scatter(send, receive, numels, reduction.op), wire, part)
        self._divide(part, reduction)
        if not direct:
            flat_result.copy_(part)
        self.copy_back(output, result)

    def _premultiply(self, wire: Tensor, op: Any) -> None:
        if op.op == op.RedOpType.PREMUL_SUM:
            wire.mul_(premul_factor(op, wire.device))

    def _divide(self, wire: Tensor, reduction: MpiReduction) -> None:
        if reduction.divides:
            wire.div_(self.size, rounding_mode=None if wire.is_floating_point() else "trunc")

    def _split_bytes(self, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        return [numel * tensor.itemsize for numel in self._arguments.split_sizes(tensor, splits)]


def _shared_group(comm: MPI.Intracomm, waits: Waits, options: MpiOptions) -> SharedMemoryGroup:
    size = comm.Get_size()

    def all_gather(own: bytes) -> list[bytes]:
        table = bytearray(len(own) * size)
        waits.request(comm.Iallgather(own, [table, len(own), MPI.BYTE]))
        return [bytes(table[start : start + len(own)]) for start in range(0, len(table), len(own))]

    link = SharedLink(comm.Get_rank(), size, all_gather, waits, progress_engine(os.getpid()))
    is_enabled = options.shared_memory and not options.gpu_aware
    return SharedMemoryGroup(
        link,
        SharedMemoryConfig(is_enabled, options.shared_parts, options.shared_bytes, options.shared_piece_bytes),
    )
