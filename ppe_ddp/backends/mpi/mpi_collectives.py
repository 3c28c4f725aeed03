"""Collectives on tensors, over one MPI communicator: begun in the call, and under way until they are waited for.

Apart from the process group, which only translates torch's many names, because here is what can be measured
and what can be numerically wrong. On one node nothing was faster than advancing them in the calling thread: MPI does
not progress by itself, and a second thread takes a core from the ranks.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ppe_ddp.backends.group_internals import premul_factor
from ppe_ddp.backends.mpi.collective_queue import CollectiveQueue
from ppe_ddp.backends.mpi.communicator_release import OpenCommunicator
from ppe_ddp.backends.mpi.mpi_datatypes import MpiReduction, reduction_of
from ppe_ddp.backends.mpi.mpi_link import MpiLink
from ppe_ddp.backends.mpi.nonblocking_calls import NonblockingCalls
from ppe_ddp.backends.mpi.sub_communicator import sub_communicator
from ppe_ddp.backends.process_group.collective_arguments import CollectiveArguments, pack, unpack
from ppe_ddp.backends.process_group.progress_engine import progress_engine
from ppe_ddp.backends.process_group.tensor_memory import is_addressable, overlap
from ppe_ddp.backends.shared_memory.shared_group import SharedMemoryGroup
from ppe_ddp.backends.shared_memory.shared_link import SharedLink, SharedMemoryConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpi4py import MPI
    from torch import Tensor

    from ppe_ddp.backends.mpi.collective_queue import Requests
    from ppe_ddp.backends.mpi.mpi_options import MpiOptions
    from ppe_ddp.backends.mpi.mpi_waits import Waits
    from ppe_ddp.backends.process_group.pending_work import PendingWork
    from ppe_ddp.backends.shared_memory.shared_work import SharedMemoryWork


class MpiCollectives:
    """All collectives of one communicator; an ``op`` is a ReduceOp.

    Every method must be called by all its ranks, in the same order; what it returns is to be waited for. Errors in this
    rank's own arguments are raised by the call.

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
        self._calls = NonblockingCalls(comm)
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._options = options
        self._waits = waits
        self._queue = CollectiveQueue(waits)
        self._begin = self._queue.append
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._arguments = CollectiveArguments(self.rank, self.size)
        self._links: dict[int, tuple[MpiLink, Sequence[int]]] = {}
        self.shared = self._shared_group()

    def all_reduce(self, tensor: Tensor, op: Any, source: int | None = None) -> PendingWork:
        """Reduce ``tensor`` over the ranks, in place; the same size and dtype everywhere.

        Args:
            tensor: Changed in place.
            op: The operation.
            source: Of a sum, the only node on which ``tensor`` is not zero, where that is known; its number in
                :attr:`SharedMemoryGroup.nodes`.
        """
        reduction = reduction_of(tensor.dtype, op.op)
        is_small = tensor.nbytes < min(self._options.shared_bytes, self._options.piece_bytes)
        if is_small and reduction.is_direct and self._is_addressable(tensor):
            return self._begin("all_reduce", self._all_reduce_at_once(tensor, reduction))
        host = self.host_memory(tensor)
        shared = self.shared.start("all_reduce", host, op, source=source)
        root = self.shared.only_rank(source)
        if shared is None and root is not None:
            return self.broadcast(tensor, root)
        return self._arriving(shared, tensor, host) or self._begin(
            "all_reduce", self._all_reduce_in_pieces(tensor, host, op, reduction)
        )

    def reduce(self, tensor: Tensor, op: Any, root: int) -> PendingWork:
        """Reduce over the ranks into rank ``root``'s ``tensor``; the others keep theirs."""
        reduction = reduction_of(tensor.dtype, op.op)
        return self._begin("reduce", self._reduce(tensor, self.host_memory(tensor), op, root, reduction))

    def broadcast(self, tensor: Tensor, root: int) -> PendingWork:
        """Overwrite ``tensor`` by that of rank ``root``; the same number of bytes everywhere."""
        return self._begin("broadcast", self._broadcast(tensor, self.host_memory(tensor), root))

    def all_gather(self, output: Tensor, tensor: Tensor) -> PendingWork:
        """Put the tensors of all ranks one after another into ``output``, which has ``size`` times the elements."""
        self._arguments.check_all_gather(output, tensor)
        result, host = self.output_memory(output), self.host_memory(tensor)
        shared = self.shared.start("all_gather", result, host)
        return self._arriving(shared, output, result) or self._begin(
            "all_gather", self._all_gather(output, result, host)
        )

    def all_gather_list(self, outputs: Sequence[Tensor], tensor: Tensor) -> PendingWork:
        """Put rank i's ``tensor`` into ``outputs[i]``; sizes may differ between ranks where the outputs' do."""
        self._arguments.check_all_gather_list(outputs, tensor)
        return self._begin("all_gather", self._all_gather_list(outputs, self.host_memory(tensor)))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: Any) -> PendingWork:
        """Reduce over the ranks; rank i gets the i-th of ``size`` equal parts of the flat ``tensor``."""
        self._arguments.check_reduce_scatter(output, tensor)
        host, result = self.host_memory(tensor), self.output_memory(output)
        shared = self.shared.start("reduce_scatter", result, host, op)
        return self._arriving(shared, output, result) or self._begin(
            "reduce_scatter", self._reduce_scatter(output, host.view(-1), op, None)
        )

    def reduce_scatter_list(self, output: Tensor, tensors: Sequence[Tensor], op: Any) -> PendingWork:
        """Reduce ``tensors[i]`` over the ranks into rank i's ``output``; sizes may differ between the ranks."""
        self._arguments.check_reduce_scatter_list(output, tensors)
        counts = [tensor.numel() for tensor in tensors]
        return self._begin("reduce_scatter", self._reduce_scatter(output, self._pack(tensors), op, counts))

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> PendingWork:
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

        def steps() -> Requests:
            yield self._calls.all_to_all(result, receive, host, send), (host, result)
            self.copy_back(output, result)

        return self._begin("all_to_all", steps())

    def all_to_all_list(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> PendingWork:
        """Send ``tensors[j]`` to rank j and receive rank i's tensor into ``outputs[i]``; any sizes that match."""
        self._arguments.check_all_to_all_list(outputs, tensors)
        flat, result = self._pack(tensors), self._flat_for(outputs)
        send, receive = [tensor.nbytes for tensor in tensors], [output.nbytes for output in outputs]

        def steps() -> Requests:
            yield self._calls.all_to_all(result, receive, flat, send), (flat, result)
            unpack(result, outputs)

        return self._begin("all_to_all", steps())

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> PendingWork:
        """Put rank i's ``tensor`` into ``outputs[i]`` on rank ``root``; ``outputs`` is not looked at elsewhere."""
        host = self.host_memory(tensor)
        if self.rank == root:
            self._arguments.check_gather(outputs, tensor)

        def steps() -> Requests:
            if self.rank != root:
                yield self._calls.gather(None, (), host, root), (host,)
                return
            result, counts = self._flat_for(outputs), [output.nbytes for output in outputs]
            yield self._calls.gather(result, counts, host, root), (host, result)
            unpack(result, outputs)

        return self._begin("gather", steps())

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], root: int) -> PendingWork:
        """Put ``tensors[i]`` of rank ``root`` into rank i's ``output``; ``tensors`` is not looked at elsewhere."""
        result = self.output_memory(output)
        if self.rank == root:
            self._arguments.check_scatter(output, tensors)

        def steps() -> Requests:
            if self.rank != root:
                yield self._calls.scatter(result, None, (), root), (result,)
            else:
                flat, counts = self._pack(tensors), [tensor.nbytes for tensor in tensors]
                yield self._calls.scatter(result, flat, counts, root), (flat, result)
            self.copy_back(output, result)

        return self._begin("scatter", steps())

    def barrier(self) -> PendingWork:
        """Complete when every rank has called it."""

        def steps() -> Requests:
            yield self._calls.barrier(), ()

        return self._begin("barrier", steps())

    def drain(self, seconds: float) -> None:
        """Wait until nothing is under way; raises CommunicationError if that takes longer."""
        self.shared.drain(seconds)
        self._queue.drain(seconds)

    def free(self) -> None:
        """Give the communicators back to MPI; nothing may be under way."""
        for one in self.communicators().values():
            one.calls.comm.Free()

    def communicators(self) -> dict[str, OpenCommunicator]:
        """All that there are, by names that are the same on all of its ranks; first that of the group."""
        whole = OpenCommunicator(self._calls, range(self.size), self._queue.left)
        return {"group": whole} | {
            f"slice {index}": OpenCommunicator(link.calls, ranks, link.left)
            for index, (link, ranks) in self._links.items()
        }

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
        """Memory to compute in: kept from call to call, as fresh memory costs page faults.

        All-reduces are done there: MPI goes on with one in a group that was given up, and would change gradients.
        """
        if piece.is_cuda:
            return torch.empty_like(piece, dtype=dtype)
        scratch = self._scratch.get(dtype)
        if scratch is None:
            scratch = self._scratch[dtype] = torch.empty(self._options.piece_bytes // dtype.itemsize, dtype=dtype)
        return scratch[: piece.numel()]

    def _arriving(self, shared: SharedMemoryWork | None, tensor: Tensor, host: Tensor) -> PendingWork | None:
        """What is under way in shared memory, with its way home."""
        if shared is not None and not self._is_addressable(tensor):
            shared.at_arrival = partial(self.copy_back, tensor, host)
        return shared

    def _all_reduce_at_once(self, tensor: Tensor, reduction: MpiReduction) -> Requests:
        wire = self._scratch_like(tensor, tensor.dtype).view(tensor.shape).copy_(tensor)
        yield self._calls.all_reduce(wire, reduction.datatype, reduction.op), (wire,)
        tensor.data.copy_(wire)  # as a backend in C++, unseen by autograd

    def _all_reduce_in_pieces(self, tensor: Tensor, host: Tensor, op: Any, reduction: MpiReduction) -> Requests:
        for piece in self._pieces(host.data.view(-1).view(reduction.view), reduction):
            wire = self._scratch_like(piece, reduction.wire).copy_(piece)
            self._premultiply(wire, op)
            yield self._calls.all_reduce(wire, reduction.datatype, reduction.op), (wire,)
            self._divide(wire, reduction)
            piece.copy_(wire)
        self.copy_back(tensor, host)

    def _reduce(self, tensor: Tensor, host: Tensor, op: Any, root: int, reduction: MpiReduction) -> Requests:
        for piece in self._pieces(host.view(-1).view(reduction.view), reduction):
            wire = piece if reduction.is_direct else self._scratch_like(piece, reduction.wire).copy_(piece)
            self._premultiply(wire, op)
            yield self._calls.reduce(wire, reduction.datatype, reduction.op, root), (wire,)
            if self.rank != root:
                continue
            self._divide(wire, reduction)
            if wire is not piece:
                piece.copy_(wire)
        if self.rank == root:
            self.copy_back(tensor, host)

    def _broadcast(self, tensor: Tensor, host: Tensor, root: int) -> Requests:
        for piece in host.view(-1).view(torch.uint8).split(self._options.piece_bytes):
            yield self._calls.broadcast(piece, root), (piece,)
        if self.rank != root:
            self.copy_back(tensor, host)

    def _all_gather(self, output: Tensor, result: Tensor, host: Tensor) -> Requests:
        host = host.clone() if overlap(host, result) else host
        yield self._calls.all_gather(result, host), (host, result)
        self.copy_back(output, result)

    def _all_gather_list(self, outputs: Sequence[Tensor], host: Tensor) -> Requests:
        result, counts = self._flat_for(outputs), [output.nbytes for output in outputs]
        yield self._calls.all_gather_list(result, counts, host), (host, result)
        unpack(result, outputs)

    def _reduce_scatter(self, output: Tensor, flat: Tensor, op: Any, counts: list[int] | None) -> Requests:
        reduction = reduction_of(output.dtype, op.op)
        flat = flat.view(reduction.view)
        wire = flat if reduction.is_direct else flat.to(reduction.wire, copy=True)
        self._premultiply(wire, op)
        result = self.output_memory(output)
        wire = wire.clone() if overlap(wire, result) else wire
        flat_result = result.view(-1).view(reduction.view)
        direct = reduction.wire is reduction.view
        part = flat_result if direct else torch.empty_like(flat_result, dtype=reduction.wire)
        if counts is None:
            yield self._calls.reduce_scatter(part, wire, reduction.datatype, reduction.op), (wire, part)
        else:
            width = flat_result.numel() // output.numel() if output.numel() else 0
            numels = [count * width for count in counts]
            request = self._calls.reduce_scatter_list(part, wire, numels, reduction.datatype, reduction.op)
            yield request, (wire, part)
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

    def _shared_group(self) -> SharedMemoryGroup:
        options = self._options
        return SharedMemoryGroup(
            SharedLink(self.rank, self.size, self._gather_bytes, self._waits, progress_engine(os.getpid()), self._join),
            SharedMemoryConfig(
                is_enabled=options.shared_memory and not options.gpu_aware,
                parts=options.shared_parts,
                smallest_bytes=options.shared_bytes,
                two_level_bytes=options.two_level_bytes,
                piece_bytes=options.shared_piece_bytes,
            ),
        )

    def _join(self, index: int, ranks: Sequence[int]) -> MpiLink:
        """Join this rank with those of other nodes that own the same slice."""
        comm = self._calls.comm
        link = MpiLink(sub_communicator(comm, ranks, index), progress_engine(os.getpid()))
        self._links[index] = link, ranks
        return link

    def _gather_bytes(self, own: bytes) -> list[bytes]:
        table = torch.empty(self.size, len(own), dtype=torch.uint8)
        self._begin(
            "the connection of shared memory",
            self._all_gather(table, table, torch.tensor(list(own), dtype=torch.uint8)),
        ).wait()
        return [bytes(row.tolist()) for row in table]
