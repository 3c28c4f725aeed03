"""Collectives on tensors within one group: through shared memory where that can be, by gloo where not.

All ranks come to the same answer which way a collective goes: by its name, the size and dtype of the whole. Begun in
the call, and under way until they are waited for.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from ppe_ddp.backends.process_group.collective_arguments import CollectiveArguments, pack, unpack
from ppe_ddp.backends.process_group.given_up_groups import close_given_up
from ppe_ddp.backends.process_group.tensor_memory import is_addressable
from ppe_ddp.backends.shm.gloo_reductions import gloo_reduction
from ppe_ddp.backends.shm.gloo_work import GlooMessage, GlooWork

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup, Work

    from ppe_ddp.backends.process_group.pending_work import PendingWork
    from ppe_ddp.backends.shared_memory.shared_group import SharedMemoryGroup
    from ppe_ddp.backends.shm.shm_options import ShmOptions
    from ppe_ddp.backends.shm.store_waits import StoreWaits

_LARGEST = dist.ReduceOp(dist.ReduceOp.MAX)


class ShmCollectives:
    """All collectives of one group; an ``op`` is a ReduceOp.

    Every method must be called by all its ranks, in the same order; what it returns is to be waited for. Errors in this
    rank's own arguments are raised by the call.

    Tensors may be non-contiguous or empty. Sizes and dtypes must agree between ranks as each method says: shared memory
    has an error where they do not, and gloo ends the process.

    Args:
        gloo: A group of gloo for the same ranks. The only reference: the connections end with it.
        waits: How to wait for them.
        shared: Runs the collectives that go through shared memory.
        options: Of the group: what gloo sends from each rank to each at once.

    Attributes:
        rank: This process in the group.
        size: How many ranks the group has.
        shared: The same.
    """

    def __init__(self, gloo: ProcessGroup, waits: StoreWaits, shared: SharedMemoryGroup, options: ShmOptions) -> None:
        self.rank = rank = gloo.rank()
        self.size = size = gloo.size()
        self.shared = shared
        self._options = options
        self._gloo: list[ProcessGroup] = [gloo]
        self._waits = waits
        self._arguments = CollectiveArguments(rank, size)
        self._begun: deque[Work] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way by gloo."""
        return all(work.is_completed() for work in self._begun)

    def close(self) -> None:
        """Drop the connections of gloo, after what this rank has under way there, which the others may have to join."""
        self._gloo.clear()

    def give_up(self) -> None:
        """End the connections of gloo soon; what is under way there fails then."""
        close_given_up(self._gloo)

    def all_reduce(self, tensor: Tensor, op: Any, source: int | None = None) -> PendingWork:
        """Reduce ``tensor`` over the ranks, in place; the same size and dtype everywhere.

        Args:
            tensor: Changed in place.
            op: The operation.
            source: Of a sum, the only node on which ``tensor`` is not zero, where that is known; its number in
                :attr:`SharedMemoryGroup.nodes`.
        """
        reduction = gloo_reduction(tensor.dtype, op.op)
        host = self._host(tensor)
        shared = self.shared.start("all_reduce", host, op, source=source)
        if shared is not None:
            return self._home(shared, tensor, host)
        root = self.shared.only_rank(source)
        if root is not None:
            return self.broadcast(tensor, root)
        return self._all_reduce("all_reduce", tensor, host, op, reduction, lands=True)

    def reduce(self, tensor: Tensor, op: Any, root: int) -> PendingWork:
        """Reduce over the ranks into rank ``root``'s ``tensor``; the others keep theirs."""
        reduction = gloo_reduction(tensor.dtype, op.op)
        host = self._host(tensor).clone(memory_format=torch.contiguous_format)
        return self._all_reduce("reduce", tensor, host, op, reduction, lands=self.rank == root)

    def broadcast(self, tensor: Tensor, root: int) -> PendingWork:
        """Overwrite ``tensor`` by that of rank ``root``; the same number of bytes everywhere."""
        host = self._host(tensor)
        made = dist.BroadcastOptions()
        made.rootRank = root
        work = self._begin("broadcast", lambda gloo: gloo.broadcast([_bytes(host)], made), host)
        return self._home(work, tensor, host) if self.rank != root else work

    def all_gather(self, output: Tensor, tensor: Tensor) -> PendingWork:
        """Put the tensors of all ranks one after another into ``output``, which has ``size`` times the elements."""
        self._arguments.check_all_gather(output, tensor)
        result, host = self._output(output), self._host(tensor)
        shared = self.shared.start("all_gather", result, host)
        return self._home(shared or self._all_gather("all_gather", result, host), output, result)

    def all_gather_list(self, outputs: Sequence[Tensor], tensor: Tensor) -> PendingWork:
        """Put rank i's ``tensor`` into ``outputs[i]``; sizes may differ between ranks where the outputs' do."""
        self._arguments.check_all_gather_list(outputs, tensor)
        host, result = self._host(tensor), _flat_for(outputs)
        counts = [output.nbytes for output in outputs]
        if len(set(counts)) == 1:
            work = self.shared.start("all_gather", result, host) or self._all_gather("all_gather", result, host)
        else:
            copies = _bytes(host).repeat(self.size)
            work = self._all_to_all("all_gather", result, counts, copies, [host.nbytes] * self.size)
        work.at_arrival = partial(unpack, result, outputs)
        return work

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: Any) -> PendingWork:
        """Reduce over the ranks; rank i gets the i-th of ``size`` equal parts of the flat ``tensor``."""
        self._arguments.check_reduce_scatter(output, tensor)
        gloo_reduction(tensor.dtype, op.op)
        host, result = self._host(tensor), self._output(output)
        shared = self.shared.start("reduce_scatter", result, host, op)
        if shared is not None:
            return self._home(shared, output, result)
        return self._reduce_scatter(output, host.view(-1), op, [output.numel()] * self.size)

    def reduce_scatter_list(self, output: Tensor, tensors: Sequence[Tensor], op: Any) -> PendingWork:
        """Reduce ``tensors[i]`` over the ranks into rank i's ``output``; sizes may differ between the ranks."""
        self._arguments.check_reduce_scatter_list(output, tensors)
        counts = [tensor.numel() for tensor in tensors]
        return self._reduce_scatter(output, pack(_flat_for(tensors), tensors), op, counts)

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
        host, result = self._host(tensor), self._output(output)
        send, receive = self._split_bytes(host, input_splits), self._split_bytes(result, output_splits)
        return self._home(self._all_to_all("all_to_all", result, receive, host, send), output, result)

    def all_to_all_list(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> PendingWork:
        """Send ``tensors[j]`` to rank j and receive rank i's tensor into ``outputs[i]``; any sizes that match."""
        self._arguments.check_all_to_all_list(outputs, tensors)
        return self._exchange("all_to_all", outputs, tensors, _sizes(outputs), _sizes(tensors))

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> PendingWork:
        """Put rank i's ``tensor`` into ``outputs[i]`` on rank ``root``; ``outputs`` is not looked at elsewhere."""
        is_root = self.rank == root
        if is_root:
            self._arguments.check_gather(outputs, tensor)
        send = [tensor.nbytes if rank == root else 0 for rank in range(self.size)]
        receive = _sizes(outputs) if is_root else [0] * self.size
        return self._exchange("gather", outputs if is_root else [], [tensor], receive, send)

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], root: int) -> PendingWork:
        """Put ``tensors[i]`` of rank ``root`` into rank i's ``output``; ``tensors`` is not looked at elsewhere."""
        is_root = self.rank == root
        if is_root:
            self._arguments.check_scatter(output, tensors)
        send = _sizes(tensors) if is_root else [0] * self.size
        receive = [output.nbytes if rank == root else 0 for rank in range(self.size)]
        return self._exchange("scatter", [output], tensors if is_root else [], receive, send)

    def barrier(self) -> PendingWork:
        """Complete when every rank has called it."""
        shared = self.shared.start("all_reduce", torch.zeros(1), _LARGEST)
        return shared or self._begin("barrier", lambda gloo: gloo.barrier(), None)

    def send(self, tensor: Tensor, peer: int, tag: int) -> PendingWork:
        """Start sending ``tensor`` to rank ``peer``, which receives as many bytes with the same tag."""
        host = self._host(tensor)
        work = self._call(lambda gloo: gloo.send([_bytes(host)], peer, tag))
        return GlooMessage(f"send to rank {peer} (tag {tag})", self._waits, work, tensor, host)

    def receive(self, tensor: Tensor, peer: int | None, tag: int) -> PendingWork:
        """Start receiving into ``tensor`` from rank ``peer``, or from anyone where it is None."""
        host = self._output(tensor)
        buffer = [_bytes(host)]
        work = self._call(
            lambda gloo: gloo.recv_anysource(buffer, tag) if peer is None else gloo.recv(buffer, peer, tag)
        )
        what = f"receive from {'any rank' if peer is None else f'rank {peer}'} (tag {tag})"
        return self._home(GlooMessage(what, self._waits, work, tensor, host), tensor, host)

    def _all_reduce(
        self, what: str, tensor: Tensor, host: Tensor, op: Any, reduction: Any, *, lands: bool
    ) -> PendingWork:
        flat = host.view(-1)
        wire = reduction.to_wire(flat, op)
        rows: Tensor | None = None
        if self._options.goes_directly(self.size, wire.nbytes) or not reduction.is_known_to_gloo:
            rows = wire.new_empty((self.size, wire.numel()))
            work = self._all_gather(what, rows, wire)
        else:
            made = dist.AllreduceOptions()
            made.reduceOp = dist.ReduceOp(reduction.kind)
            work = self._begin(what, lambda gloo: gloo.allreduce([wire], made), (wire, host))

        def finish() -> None:
            if lands:
                reduction.from_wire(wire if rows is None else reduction.fold(list(rows)), flat, self.size)
                self._copy_back(tensor, host)

        work.at_arrival = finish
        return work

    def _reduce_scatter(self, output: Tensor, flat: Tensor, op: Any, counts: list[int]) -> PendingWork:
        reduction = gloo_reduction(output.dtype, op.op)
        wire = reduction.to_wire(flat, op)
        result = self._output(output)
        width = flat.view(reduction.view).numel() // flat.numel() if flat.numel() else 0
        unit = wire.itemsize * width
        rows = wire.new_empty((self.size, width * output.numel()))
        send, receive = [count * unit for count in counts], [output.numel() * unit] * self.size
        work = self._all_to_all("reduce_scatter", rows, receive, wire, send)

        def finish() -> None:
            reduction.from_wire(reduction.fold(list(rows)), result.view(-1), self.size)
            self._copy_back(output, result)

        work.at_arrival = finish
        return work

    def _all_gather(self, what: str, result: Tensor, host: Tensor) -> PendingWork:
        if self._options.goes_directly(self.size, host.nbytes):
            counts = [host.nbytes] * self.size
            return self._all_to_all(what, result, counts, _bytes(host).repeat(self.size), counts)
        parts = list(_bytes(result).view(self.size, -1)) if result.nbytes else [_bytes(result)] * self.size
        return self._begin(what, lambda gloo: gloo.allgather([parts], [_bytes(host)]), (result, host))

    def _exchange(
        self, what: str, outputs: Sequence[Tensor], tensors: Sequence[Tensor], receive: list[int], send: list[int]
    ) -> PendingWork:
        """An all-to-all of lists, which may be empty on a rank that sends or receives nothing."""
        result, flat = _flat_for(outputs), pack(_flat_for(tensors), tensors)
        work = self._all_to_all(what, result, receive, flat, send)
        if outputs:
            work.at_arrival = partial(unpack, result, outputs)
        return work

    def _all_to_all(self, what: str, result: Tensor, receive: list[int], host: Tensor, send: list[int]) -> PendingWork:
        def start(gloo: Any) -> Work:
            call = getattr(gloo, "alltoall_base", None) or gloo.all_to_all_single
            work: Work = call(_bytes(result), _bytes(host), receive, send)
            return work

        return self._begin(what, start, (result, host))

    def _begin(self, what: str, start: Callable[[Any], Any], memory: Any) -> GlooWork:
        work = self._call(start)
        self._forget_ended()
        self._begun.append(work)
        number = self.shared.count_message()
        begun = GlooWork(what, self._waits, work, memory, partial(self.shared.ranks_without_message, number))
        begun.at_end = self._forget_ended
        return begun

    def _forget_ended(self) -> None:
        """Drop what has ended, as gloo keeps its tensors."""
        while self._begun and self._begun[0].is_completed():
            self._begun.popleft()

    def _call(self, start: Callable[[Any], Any]) -> Work:
        if not self._gloo:
            self._waits.check("a call")  # raises
        with torch.no_grad():
            work: Work = start(self._gloo[0])
        return work

    def _host(self, tensor: Tensor) -> Tensor:
        """The tensor itself where its memory is its elements in order, else a contiguous copy."""
        self._check_kind(tensor)
        if is_addressable(tensor):
            return tensor.detach()
        return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())

    def _output(self, tensor: Tensor) -> Tensor:
        """Contiguous memory of a tensor's size: its own where possible."""
        self._check_kind(tensor)
        return tensor.detach() if is_addressable(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype)

    def _check_kind(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            raise TypeError(f"rank {self.rank}: the shm backend has no collectives for {tensor.layout} tensors")
        if tensor.device.type != "cpu":
            raise TypeError(
                f"rank {self.rank}: the shm backend is for tensors on cpu, not on {tensor.device}; make a group of "
                'several backends: "cpu:shm,cuda:nccl"'
            )

    def _home(self, work: Any, tensor: Tensor, host: Tensor) -> PendingWork:
        """A Work that brings the result from ``host`` to ``tensor`` when it arrives, if that is elsewhere."""
        if host.data_ptr() != tensor.data_ptr() or not is_addressable(tensor):
            work.at_arrival = partial(self._copy_back, tensor, host)
        pending: PendingWork = work
        return pending

    def _copy_back(self, tensor: Tensor, host: Tensor) -> None:
        if host.data_ptr() != tensor.data_ptr() or not is_addressable(tensor):
            tensor.detach().copy_(host.view(tensor.shape))

    def _split_bytes(self, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        return [numel * tensor.itemsize for numel in self._arguments.split_sizes(tensor, splits)]


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as gloo moves it."""
    return tensor.view(-1).view(torch.uint8)


def _sizes(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.nbytes for tensor in tensors]


def _flat_for(tensors: Sequence[Tensor]) -> Tensor:
    dtype = tensors[0].dtype if tensors else torch.uint8
    return torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype)
