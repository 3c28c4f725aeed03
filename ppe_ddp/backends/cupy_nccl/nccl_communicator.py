"""NCCL communicators of one group, and the collectives as calls of NCCL.

Each communicator works on a stream of its own. That stream waits for the work that the caller's stream has at the time
of the call, and the caller's stream waits for it in `Work.wait`. If the caller drops a tensor, its memory is not reused
before NCCL has finished with it. Temporary memory is allocated and freed on the communicator's stream.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ppe_ddp.backends.collective_arguments import CollectiveArguments, check_dtypes, pack
from ppe_ddp.backends.cuda_device import CudaDevice
from ppe_ddp.backends.cupy_nccl.nccl_library import BYTE, reduction_of
from ppe_ddp.backends.rank_store import WrittenKeys
from ppe_ddp.errors import CommunicationError

_Kind: Any = ReduceOp.RedOpType


class Members(NamedTuple):
    """The ranks that a communicator connects."""

    purpose: str  # "collectives" or "messages", which have communicators of their own
    ranks: tuple[int, ...]  # ranks of the group, in the communicator's order; for messages sender and receiver


class Communicator:
    """The communicator of some ranks on device number ``index``, and its stream; connected when first used."""

    def __init__(self, device: CudaDevice, index: int, members: Members) -> None:
        self.index = index
        self.members = members
        self.stream = device.make_stream(index)
        self.nccl: Any = None  # ``cupy.cuda.nccl.NcclCommunicator``; None while it is not connected
        self._device = device

    def wait_for_caller(self, tensors: Iterable[Tensor]) -> None:
        """Let the stream wait for the present work of the caller's stream, and hold the memory of the tensors."""
        self.stream.wait_event(self._device.current_stream(self.index).record_event())
        for tensor in tensors:
            self._device.record_stream(tensor, self.stream)


class Communicators:
    """The communicators of one process group on this rank."""

    def __init__(
        self, library: Any, device: CudaDevice, store: WrittenKeys, rank: int, place: str, timeout: float
    ) -> None:
        self._library = library
        self._device = device
        self._store = store
        self._rank = rank
        self._place = place
        self._timeout = timeout
        self._all: dict[tuple[int, Members], Communicator] = {}
        self._turns: dict[Members, int] = {}
        self._ended = False

    def __iter__(self) -> Iterator[Any]:
        """CuPy's communicators, of those that are connected."""
        return iter([communicator.nccl for communicator in list(self._all.values()) if communicator.nccl is not None])

    def of(self, index: int, members: Members) -> Communicator:
        """The communicator of these ranks on device number ``index``; it may not be connected yet."""
        if (index, members) not in self._all:
            self._all[index, members] = Communicator(self._device, index, members)
        return self._all[index, members]

    def connect(self, communicators: Iterable[Communicator]) -> None:
        """Connect those that are not connected yet; their ranks must do so together, outside of a group of calls.

        CommunicationError if a rank did not come in time, NCCL could not connect them, or all communicators were ended,
        such as by the watchdog during this call.
        """
        missing = {(one.index, one.members) for one in communicators if one.nccl is None}
        # Both directions at once, as the two ranks might need the other one in another order.
        missing |= {(index, one._replace(ranks=one.ranks[::-1])) for index, one in missing if one.purpose == "messages"}
        # In the same order on all ranks, or two would wait for each other.
        for index, members in sorted(missing, key=lambda one: (one[1].purpose, sorted(one[1].ranks), one)):
            communicator = self.of(index, members)
            if self._ended:
                raise self._were_ended()
            if communicator.nccl is None:
                with self._device.make_current(index):
                    communicator.nccl = self._connect(members)

    def call(self, parts: Sequence[tuple[Communicator, PreparedCalls]]) -> None:
        """Give all calls of some parts to NCCL, several as one group, in which none waits for another."""
        calls = [(communicator, *call) for communicator, part in parts for call in part.calls]
        with self._grouped() if len(calls) > 1 else contextlib.nullcontext():
            for communicator, name, tensors, numbers in calls:
                nccl = communicator.nccl
                if nccl is None:
                    raise self._were_ended()
                with self._device.make_current(communicator.index):
                    addresses = [tensor.data_ptr() for tensor in tensors]
                    getattr(nccl, name)(*addresses, *numbers, communicator.stream.cuda_stream)

    def _were_ended(self) -> CommunicationError:
        return CommunicationError(f"{self._place}: the group's communicators were ended")

    @contextlib.contextmanager
    def _grouped(self) -> Iterator[None]:
        self._library.groupStart()
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                self._library.groupEnd()
            raise
        self._library.groupEnd()

    @contextlib.contextmanager
    def translated_errors(self, what: str) -> Iterator[None]:
        """Raise CommunicationError for an error of NCCL; ``what`` has failed, by which the message begins."""
        try:
            yield
        # CuPy raises KeyError for errors of NCCL that it does not know.
        except (self._library.NcclError, KeyError) as error:
            reason = f"error {error}" if isinstance(error, KeyError) else str(error)
            raise CommunicationError(f"{what} over NCCL failed: {reason}") from error

    def end(self, *, orderly: bool) -> None:
        """End all communicators: ``orderly`` if all ranks do so with nothing under way; otherwise abort."""
        self._ended = True
        for communicator in list(self._all.values()):
            nccl = communicator.nccl
            if nccl is not None:
                with contextlib.suppress(self._library.NcclError, KeyError):
                    nccl.destroy() if orderly else nccl.abort()
                communicator.nccl = None

    def _connect(self, members: Members) -> Any:
        ranks = members.ranks
        # A second device of this rank connects to the second devices of the others.
        turn = self._turns[members] = self._turns.get(members, 0) + 1
        key = f"cupy_nccl/{members.purpose}/{'-'.join(map(str, ranks))}/{turn}"
        with self.translated_errors(f"{self._place}: connecting ranks {list(ranks)}"):
            if self._rank == ranks[0]:
                # CuPy's ids are tuples of numbers until version 13, bytes from 14 on.
                self._store.set(f"{key}/id", repr(self._library.get_unique_id()))
            # NCCL has no timeout for ranks that never come.
            self._store.set(f"{key}/here/{self._rank}", "1")
            self._wait_for_ranks(key, ranks)
            unique_id = ast.literal_eval(self._store.get(f"{key}/id").decode())
            return self._library.NcclCommunicator(len(ranks), unique_id, ranks.index(self._rank))

    def _wait_for_ranks(self, key: str, ranks: tuple[int, ...]) -> None:
        signs = {rank: f"{key}/here/{rank}" for rank in ranks}
        try:
            self._store.wait(list(signs.values()), timedelta(seconds=self._timeout))
        except RuntimeError as error:
            missing = [rank for rank, sign in signs.items() if not self._store.check([sign])]
            raise CommunicationError(
                f"{self._place}: ranks {missing} did not come within {self._timeout:g} s to connect ranks "
                f"{list(ranks)} over NCCL: they did not make the same call, or died"
            ) from error


class PreparedCalls:
    """NCCL's calls for one collective or message, and the copies of the results; made and finished on its stream."""

    def __init__(self) -> None:
        # The name of the communicator's method, its buffers, and its other arguments but the stream.
        self.calls: list[tuple[str, tuple[Tensor, ...], tuple[int, ...]]] = []
        self.copies: list[tuple[Tensor, Tensor]] = []

    def output(self, tensor: Tensor) -> Tensor:
        """Memory of the tensor's size that NCCL can write: its own if possible, else a copy is added."""
        if _is_addressable(tensor):
            return tensor.detach()
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self.copies.append((tensor, memory))
        return memory

    def call(self, name: str, tensors: tuple[Tensor, ...], count: int, *numbers: int) -> PreparedCalls:
        if count:
            self.calls.append((name, tensors, (count, *numbers)))
        return self

    def send(self, tensor: Tensor, peer: int) -> PreparedCalls:
        source = _readable(tensor)
        return self.call("send", (source,), source.nbytes, BYTE, peer)

    def receive(self, tensor: Tensor, peer: int) -> PreparedCalls:
        target = self.output(tensor)
        return self.call("recv", (target,), target.nbytes, BYTE, peer)

    def exchange(self, sources: Iterable[Tensor], targets: Iterable[Tensor]) -> PreparedCalls:
        """Send source i to rank i, and receive target i from it."""
        for peer, tensor in enumerate(sources):
            self.send(tensor, peer)
        for peer, tensor in enumerate(targets):
            self.receive(tensor, peer)
        return self

    def finish(self) -> None:
        for tensor, memory in self.copies:
            tensor.detach().copy_(memory)


class NcclCollectives:
    """All collectives of a group, with the arguments of :class:`~ppe_ddp.backends.collectives.Collectives`.

    Tensors may be non-contiguous and empty. Sizes and dtypes must be the same on all ranks; NCCL does not check that.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._arguments = CollectiveArguments(rank, size)

    def all_reduce(self, tensor: Tensor, op: Any) -> PreparedCalls:
        part, (source, *numbers) = PreparedCalls(), self._reduced(tensor, op)
        return part.call("allReduce", (source, part.output(tensor)), *numbers)

    def reduce(self, tensor: Tensor, op: Any, root: int) -> PreparedCalls:
        part, (source, *numbers) = PreparedCalls(), self._reduced(tensor, op)
        # NCCL writes to the root's output alone.
        target = part.output(tensor) if self.rank == root else source
        return part.call("reduce", (source, target), *numbers, root)

    def broadcast(self, tensor: Tensor, root: int) -> PreparedCalls:
        part = PreparedCalls()
        memory = _readable(tensor) if self.rank == root else part.output(tensor)
        return part.call("broadcast", (memory, memory), memory.nbytes, BYTE, root)

    def all_gather(self, output: Tensor, tensor: Tensor) -> PreparedCalls:
        self._arguments.check_whole("an all-gather", tensor, output)
        part, source = PreparedCalls(), _readable(tensor)
        return part.call("allGather", (source, part.output(output)), source.nbytes, BYTE)

    def all_gather_list(self, outputs: Sequence[Tensor], tensor: Tensor) -> PreparedCalls:
        self._arguments.check_parts("an all-gather", tensor, outputs)
        if _are_even(outputs):
            flat = _flat_for(outputs)
            part = self.all_gather(flat, tensor)
            pieces = zip(outputs, flat.split(tensor.numel()) if flat.numel() else (), strict=False)
            part.copies += [(output, piece.view(output.shape)) for output, piece in pieces]
            return part
        part = PreparedCalls()
        for root, output in enumerate(outputs):
            target = part.output(output)
            # Only the sender's source is read. It goes to all ranks, also to its own output.
            source = _readable(tensor) if root == self.rank else target
            part.call("broadcast", (source, target), target.nbytes, BYTE, root)
        return part

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: Any) -> PreparedCalls:
        self._arguments.check_whole("a reduce-scatter", output, tensor)
        part, (source, total, *numbers) = PreparedCalls(), self._reduced(tensor, op)
        return part.call("reduceScatter", (source, part.output(output)), total // self.size, *numbers)

    def reduce_scatter_list(self, output: Tensor, tensors: Sequence[Tensor], op: Any) -> PreparedCalls:
        self._arguments.check_parts("a reduce-scatter", output, tensors)
        if _are_even(tensors):
            return self.reduce_scatter(output, pack(_flat_for(tensors), tensors), op)
        part = PreparedCalls()
        target = part.output(output)
        for root, tensor in enumerate(tensors):
            source, *numbers = self._reduced(tensor, op)
            part.call("reduce", (source, target if root == self.rank else source), *numbers, root)
        return part

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> PreparedCalls:
        check_dtypes(output, tensor)
        part = PreparedCalls()
        sent = _readable(tensor).view(-1).split(self._arguments.split_sizes(tensor, input_splits))
        received = part.output(output).view(-1).split(self._arguments.split_sizes(output, output_splits))
        return part.exchange(sent, received)

    def all_to_all_list(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> PreparedCalls:
        self._arguments.check_list(outputs, "outputs of an all-to-all", *tensors)
        self._arguments.check_list(tensors, "inputs of an all-to-all")
        return PreparedCalls().exchange(tensors, outputs)

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> PreparedCalls:
        if self.rank == root:
            self._arguments.check_list(outputs, "outputs of a gather", tensor)
        return PreparedCalls().send(tensor, root).exchange((), outputs if self.rank == root else ())

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], root: int) -> PreparedCalls:
        if self.rank == root:
            self._arguments.check_list(tensors, "inputs of a scatter", output)
        return PreparedCalls().exchange(tensors if self.rank == root else (), ()).receive(output, root)

    def _reduced(self, tensor: Tensor, op: Any) -> tuple[Tensor, int, int, int]:
        """Memory that NCCL can reduce, the number of elements, and NCCL's numbers of datatype and operation."""
        datatype, itemsize, kind = reduction_of(tensor.dtype, op.op)
        if self.size == 1 and op.op == _Kind.AVG:
            kind = reduction_of(tensor.dtype, _Kind.SUM)[2]  # NCCL has no average of float8 for one rank
        source = _readable(tensor)
        return source, source.nbytes // itemsize, datatype, kind


def _is_addressable(tensor: Tensor) -> bool:
    """Whether a tensor's elements are in memory as they are, in row-major order."""
    if tensor.layout is not torch.strided:
        raise TypeError(f"NCCL has no collectives for {tensor.layout} tensors; use to_dense()")
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _readable(tensor: Tensor) -> Tensor:
    """The tensor itself if NCCL can read its memory, else a copy."""
    if _is_addressable(tensor):
        return tensor.detach()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor.detach())


def _are_even(tensors: Sequence[Tensor]) -> bool:
    return len({tensor.numel() for tensor in tensors}) == 1


def _flat_for(tensors: Sequence[Tensor]) -> Tensor:
    count = sum(tensor.numel() for tensor in tensors)
    return torch.empty(count, dtype=tensors[0].dtype, device=tensors[0].device)
