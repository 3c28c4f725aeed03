"""Collectives on tensors within one group: through shared memory if possible, else by the group's wire.

The way follows from the collective, its total size and its dtype, so it is the same on all ranks.

    steps of an all-reduce    begin piece 1    done?    begin piece 2    done?    copy the result back
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ppe_ddp.backends.collective_arguments import (
    CollectiveArguments,
    HostMemory,
    as_bytes,
    check_dtypes,
    overlap,
    unpack,
)
from ppe_ddp.backends.reductions import FOLDED, WireReduction, reduction_of
from ppe_ddp.backends.shared_memory.shared_group import SharedMemoryGroup
from ppe_ddp.backends.wire import MessageInFlight, Wire
from ppe_ddp.backends.work import CallQueue, CallSet, Steps, Waits, WireCall, Work, one_call
from ppe_ddp.waiting import InFlight

_Kind: Any = ReduceOp.RedOpType


class Collectives:
    """All collectives of one group; an ``op`` is a ReduceOp.

    A call begins the collective, which is in flight until its Work was waited for, and raises for errors in this
    rank's own arguments. All ranks must call the methods in the same order.

    Tensors may be non-contiguous or empty. Sizes and dtypes must agree between ranks as each method says. If they do
    not, shared memory raises an error, MPI computes wrong numbers or hangs, and gloo ends the process.

    ``direct_bytes`` is the largest size of an all-reduce or all-gather over the wire in which each rank sends to each
    other one directly.
    """

    def __init__(self, wire: Wire, rank: int, waits: Waits, memory: HostMemory, *, direct_bytes: int = 0) -> None:
        self.rank = rank
        self.size = wire.size
        # Runs collectives through shared memory; set when the ranks have connected there.
        self.shared: SharedMemoryGroup | None = None
        self._wire = wire
        self._waits = waits
        self._memory = memory
        self._direct_bytes = direct_bytes
        self._arguments = CollectiveArguments(rank, wire.size)
        self._is_queued = bool(wire.piece_bytes)  # the wire advances only in calls of this process
        self._calls = CallQueue(waits) if self._is_queued else CallSet(waits)
        self._scratch: dict[torch.dtype, Tensor] = {}

    def all_reduce(self, tensor: Tensor, op: Any, source: int | None = None) -> Work:
        """Reduce ``tensor`` over the ranks, in place; the same size and dtype everywhere.

        ``source`` is for a sum: the number of the only node (in :attr:`SharedMemoryGroup.nodes`) whose tensors are not
        zero, if that is known.
        """
        reduction = reduction_of(tensor.dtype, op.op, self._wire.dtypes)
        host = self._memory.input(tensor)
        home = None if host.data_ptr() == tensor.data_ptr() else partial(self._memory.copy_back, tensor, host)
        work = self._in_shared_memory("all_reduce", home, host, kind=op.op, source=source)
        if work is not None:
            return work
        root = None if self.shared is None else self.shared.only_rank(source)
        if root is not None:
            return self.broadcast(tensor, root)
        return self._begin("all_reduce", self._all_reduce(tensor, host, reduction))

    def reduce(self, tensor: Tensor, op: Any, root: int) -> Work:
        """Reduce over the ranks into rank ``root``'s ``tensor``; the tensors of other ranks stay as they are."""
        reduction = reduction_of(tensor.dtype, op.op, self._wire.dtypes)
        host = self._memory.input(tensor).clone(memory_format=torch.contiguous_format)
        return self._begin("reduce", self._all_reduce(tensor, host, reduction, lands=self.rank == root))

    def broadcast(self, tensor: Tensor, root: int) -> Work:
        """Overwrite ``tensor`` by that of rank ``root``; the same number of bytes everywhere."""
        host = self._memory.input(tensor)

        def steps() -> Steps:
            for piece in self._pieces(as_bytes(host)):
                yield self._wire.broadcast(piece, root)
            if self.rank != root:
                self._memory.copy_back(tensor, host)

        return self._begin("broadcast", steps())

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """Put the tensors of all ranks one after another into ``output``, which has ``size`` times the elements."""
        self._arguments.check_whole("an all-gather", tensor, output)
        result = self._memory.output(output)
        return self._all_gather(result, self._memory.input(tensor), partial(self._memory.copy_back, output, result))

    def all_gather_list(self, outputs: Sequence[Tensor], tensor: Tensor) -> Work:
        """Put rank i's ``tensor``, which has the size of ``outputs[i]``, into ``outputs[i]``."""
        self._arguments.check_parts("an all-gather", tensor, outputs)
        host, result, counts = self._memory.input(tensor), self._memory.flat(outputs), _sizes(outputs)
        home = partial(unpack, result, outputs)
        if len(set(counts)) == 1:
            return self._all_gather(result, host, home)
        copies = as_bytes(host).repeat(self.size)
        return self._all_to_all("all_gather", as_bytes(result), copies, counts, [host.nbytes] * self.size, home)

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: Any) -> Work:
        """Reduce over the ranks; rank i gets the i-th of ``size`` equal parts of the flat ``tensor``."""
        self._arguments.check_whole("a reduce-scatter", output, tensor)
        reduction = reduction_of(tensor.dtype, op.op, FOLDED)
        host, result = self._memory.input(tensor), self._memory.output(output)
        home = partial(self._memory.copy_back, output, result)
        return self._in_shared_memory("reduce_scatter", home, result, host, kind=op.op) or self._begin(
            "reduce_scatter", self._reduce_scatter(output, host.view(-1), reduction, [output.numel()] * self.size)
        )

    def reduce_scatter_list(self, output: Tensor, tensors: Sequence[Tensor], op: Any) -> Work:
        """Reduce ``tensors[i]`` over the ranks into rank i's ``output``; sizes may differ between the ranks."""
        self._arguments.check_parts("a reduce-scatter", output, tensors)
        reduction = reduction_of(output.dtype, op.op, FOLDED)
        flat, counts = self._memory.packed(tensors), [tensor.numel() for tensor in tensors]
        return self._begin("reduce_scatter", self._reduce_scatter(output, flat, reduction, counts))

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Work:
        """Send the j-th part of ``tensor`` to rank j and receive rank i's part as the i-th of ``output``.

        Both have one dtype, and one shape after dimension 0. The splits are rows a rank; empty for equal parts.
        """
        check_dtypes(output, tensor)
        host, result = self._memory.input(tensor), self._memory.output(output)
        send = self._arguments.split_sizes(host, input_splits)
        receive = self._arguments.split_sizes(result, output_splits)
        home = partial(self._memory.copy_back, output, result)
        return self._all_to_all("all_to_all", result.view(-1), host.view(-1), receive, send, home)

    def all_to_all_list(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Work:
        """Send ``tensors[j]`` to rank j and receive rank i's tensor into ``outputs[i]``; any sizes that match."""
        self._arguments.check_list(outputs, "outputs of an all-to-all", *tensors)
        self._arguments.check_list(tensors, "inputs of an all-to-all")
        return self._exchange("all_to_all", outputs, tensors, _sizes(outputs), _sizes(tensors))

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Work:
        """Put rank i's ``tensor`` into ``outputs[i]`` on rank ``root``; other ranks ignore ``outputs``."""
        is_root = self.rank == root
        if is_root:
            self._arguments.check_list(outputs, "outputs of a gather", tensor)
        send = [tensor.nbytes if rank == root else 0 for rank in range(self.size)]
        receive = _sizes(outputs) if is_root else [0] * self.size
        return self._exchange("gather", outputs if is_root else [], [tensor], receive, send)

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], root: int) -> Work:
        """Put ``tensors[i]`` of rank ``root`` into rank i's ``output``; other ranks ignore ``tensors``."""
        is_root = self.rank == root
        if is_root:
            self._arguments.check_list(tensors, "inputs of a scatter", output)
        send = _sizes(tensors) if is_root else [0] * self.size
        receive = [output.nbytes if rank == root else 0 for rank in range(self.size)]
        return self._exchange("scatter", [output], tensors if is_root else [], receive, send)

    def barrier(self) -> Work:
        if self.shared is not None:
            sign = torch.zeros(1, dtype=torch.uint8, device="cpu")
            if (work := self._in_shared_memory("all_reduce", None, sign, kind=_Kind.MAX)) is not None:
                return work
        return self._begin("barrier", one_call(self._wire.barrier))

    def send(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Start sending ``tensor`` to rank ``peer``, which receives as many bytes with the same tag."""
        self._check_tag(tag)
        host = self._memory.input(tensor)
        return self._message(f"send to rank {peer} (tag {tag})", self._wire.send(as_bytes(host), peer, tag), tensor)

    def receive(self, tensor: Tensor, peer: int | None, tag: int) -> Work:
        """Start receiving into ``tensor`` from rank ``peer``; None stands for any rank."""
        self._check_tag(tag)
        host = self._memory.output(tensor)
        what = f"receive from {'any rank' if peer is None else f'rank {peer}'} (tag {tag})"
        work = self._message(what, self._wire.receive(as_bytes(host), peer, tag), tensor)
        work.at_arrival = partial(self._memory.copy_back, tensor, host)
        return work

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """The bytes of every rank, the same number from each; all ranks call this together."""
        table = torch.empty(self.size, len(own), dtype=torch.uint8, device="cpu")
        start = partial(self._gathered, table, torch.frombuffer(bytearray(own), dtype=torch.uint8))
        self._begin("the connection of shared memory", one_call(start)).wait()
        return [bytes(row.tolist()) for row in table]

    def drain(self, seconds: float) -> None:
        """Wait until nothing is in flight; raises CommunicationError after ``seconds``."""
        if self.shared is not None and self.shared.queue is not None:
            self.shared.queue.drain(seconds)
        self._waits.until(self._calls.is_empty, "destroy_process_group", seconds=seconds)

    def _all_reduce(self, tensor: Tensor, host: Tensor, reduction: WireReduction, *, lands: bool = True) -> Steps:
        for elements in self._pieces(host.view(-1).view(reduction.view), reduction.wire.itemsize):
            wire = reduction.to_wire(elements, self._scratch_for(elements, reduction.wire))
            if not reduction.is_known or 0 < wire.nbytes <= self._direct_bytes:
                rows = wire.new_empty((self.size, wire.numel()))
                yield self._gathered(rows, wire)
                wire = reduction.fold(list(rows))
            else:
                yield self._wire.all_reduce(wire, reduction.kind)
            if lands:
                reduction.from_wire(wire, elements, self.size)
        if lands:
            self._memory.copy_back(tensor, host)

    def _reduce_scatter(self, output: Tensor, flat: Tensor, reduction: WireReduction, counts: list[int]) -> Steps:
        elements = flat.view(reduction.view)
        wire, result = reduction.to_wire(elements), self._memory.output(output)
        width = elements.numel() // flat.numel() if flat.numel() else 0  # a complex number is two
        rows = wire.new_empty((self.size, width * output.numel()))
        sending, receiving = [count * width for count in counts], [output.numel() * width] * self.size
        yield self._wire.all_to_all(rows.view(-1), wire, receiving, sending)
        reduction.from_wire(reduction.fold(list(rows)), result.view(-1).view(reduction.view), self.size)
        self._memory.copy_back(output, result)

    def _all_gather(self, result: Tensor, host: Tensor, home: Callable[[], None]) -> Work:
        """An all-gather of equal sizes; ``home`` copies the result to the user's tensors."""
        work = self._in_shared_memory("all_gather", home, result, host)
        return work or self._begin("all_gather", one_call(partial(self._gathered, result, host), home))

    def _gathered(self, result: Tensor, host: Tensor) -> InFlight:
        if 0 < host.nbytes <= self._direct_bytes:
            counts = [host.nbytes] * self.size
            return self._wire.all_to_all(as_bytes(result), torch.cat([as_bytes(host)] * self.size), counts, counts)
        host = host.clone() if overlap(host, result) else host
        return self._wire.all_gather(result, host)

    def _all_to_all(
        self, what: str, result: Tensor, host: Tensor, receive: list[int], send: list[int], home: Callable[[], None]
    ) -> Work:
        own, room = send[self.rank] * host.itemsize, receive[self.rank] * result.itemsize
        if own != room:
            raise ValueError(f"rank {self.rank}: {what} of {own} bytes from this rank to itself, with room for {room}")
        start = partial(self._wire.all_to_all, result, host, receive, send)
        return self._begin(what, one_call(start, home))

    def _exchange(
        self, what: str, outputs: Sequence[Tensor], tensors: Sequence[Tensor], receive: list[int], send: list[int]
    ) -> Work:
        """An all-to-all of lists, with sizes in bytes; a list is empty on a rank that sends or receives nothing."""
        result, flat = self._memory.flat(outputs), self._memory.packed(tensors)
        home = partial(unpack, result, outputs)
        return self._all_to_all(what, as_bytes(result), as_bytes(flat), receive, send, home)

    def _in_shared_memory(
        self, what: str, home: Callable[[], None] | None, *tensors: Tensor, kind: Any = None, source: int | None = None
    ) -> Work | None:
        """Begin :meth:`SharedMemoryGroup.start`, if the tensors go that way; ``home`` copies the result back."""
        work = None if self.shared is None else self.shared.start(what, *tensors, kind=kind, source=source)
        if work is not None:
            work.at_arrival = home
        return work

    def _pieces(self, flat: Tensor, itemsize: int = 1) -> Iterator[Tensor]:
        most = self._wire.piece_bytes // itemsize
        return iter(flat.split(most) if most else (flat,))

    def _scratch_for(self, piece: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Memory for an all-reduce of ``piece``, kept from call to call; None to work in the user's memory.

        A wire with pieces goes on writing after the group was given up, which would change gradients there.
        """
        if not self._wire.piece_bytes:
            return None
        if piece.is_cuda:
            return torch.empty_like(piece, dtype=dtype)
        if dtype not in self._scratch:
            numel = self._wire.piece_bytes // dtype.itemsize
            self._scratch[dtype] = torch.empty(numel, dtype=dtype, device="cpu")
        return self._scratch[dtype][: piece.numel()]

    def _begin(self, what: str, steps: Steps) -> Work:
        absent: Callable[[], Sequence[int]] = tuple
        if self.shared is not None and self.shared.queue is not None:
            absent = self.shared.queue.count_message()
        call = WireCall(what, self._waits, steps, is_queued=self._is_queued)
        self._calls.begin(call)
        work = Work(what, self._waits, call.done, absent=absent, block=None if self._is_queued else call.block)
        work.ask_transport = call.when_done
        return work

    def _check_tag(self, tag: int) -> None:
        if not 0 <= tag <= self._wire.largest_tag:
            raise ValueError(f"{self._waits.place}: tag {tag} is not between 0 and {self._wire.largest_tag}")

    def _message(self, what: str, message: MessageInFlight, tensor: Tensor) -> Work:
        waits = self._waits

        def poll() -> bool:
            try:
                if message.done():
                    return True
            except RuntimeError as error:
                waits.look_now()
                raise waits.error(what, waits.failure or str(error)) from None
            if waits.failure:
                raise waits.error(what, waits.failure)
            return False

        work = Work(what, waits, poll, block=None if self._is_queued else message.block, message=message)
        work.outputs = [tensor]
        return work


def _sizes(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.nbytes for tensor in tensors]
