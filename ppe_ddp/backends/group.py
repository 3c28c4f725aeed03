"""Base classes of process groups in Python: torch's calls, translated to the collectives of one transport.

Apart from the transports because it is torch's side only: names under which torch finds a group, its many names for
one collective, and the forms in which it hands over arguments.

    PythonGroup       the identity of a group
    CollectiveGroup   torch's names for collectives
    PendingGroup      calls that are under way until they are waited for; memory that a node shares
"""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from itertools import repeat, starmap
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor, device
from torch.distributed import ProcessGroup, ReduceOp

from ppe_ddp.backends.collective_comparison import CollectiveComparison, compares_collectives
from ppe_ddp.backends.collectives import Collectives
from ppe_ddp.backends.group_internals import is_registered
from ppe_ddp.backends.shared_memory.shared_group import SharedMemoryGroup
from ppe_ddp.backends.shared_memory.step_queue import SharedLink
from ppe_ddp.backends.work import Waits, combined
from ppe_ddp.errors import UnusableError
from ppe_ddp.waiting import progress_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import timedelta

    from torch import dtype
    from torch.distributed import Work as TorchWork

    from ppe_ddp.backends.collective_arguments import HostMemory
    from ppe_ddp.backends.mpi import MpiOptions
    from ppe_ddp.backends.rank_store import WrittenKeys
    from ppe_ddp.backends.shared_memory.hierarchy import Hierarchy
    from ppe_ddp.backends.shm import ShmOptions
    from ppe_ddp.backends.wire import Wire
    from ppe_ddp.backends.work import Work

DRAIN_SECONDS = 1.0  # that a group waits, when it is destroyed, for what other ranks may never begin

SUM = ReduceOp(ReduceOp.SUM)


class PythonGroup(ProcessGroup):
    """The identity of a group that torch.distributed made by a Python creator.

    Args:
        rank: This rank in the group.
        size: How many ranks it has.
        arguments: torch's ``_DistributedBackendOptions``.
        backend_name: The name that the backend is registered under.
        device_types: Whose tensors the group takes, such as ``("cpu", "cuda")``.
    """

    def __init__(self, rank: int, size: int, arguments: Any, backend_name: str, device_types: Sequence[str]) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = arguments.store
        self._timeout: timedelta = arguments.timeout
        self._group_name: str = arguments.group_id
        self._group_desc = ""
        self._backend_name = backend_name
        self._types = tuple(device_types)

    # torch asks these of a backend; a Python group is its own.
    supports_splitting = False
    supports_coalescing = True
    supports_time_estimate = False

    def name(self) -> str:
        return self._backend_name

    getBackendName = name

    def get_group_store(self) -> Any:
        return self._store

    def getGroupName(self) -> str:
        """The name by which torch finds the group; functional collectives need it."""
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupDesc(self) -> str:
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:
        self._group_desc = desc

    @property
    def _device_types(self) -> list[device]:
        # torch 2.15 has a recorder follow each group that it has just made, unless it has no devices: which is how it
        # knows groups in Python, that cannot be followed. On those that have some, it raises.
        return [device(kind) for kind in self._types] if is_registered(self) else []

    @property
    def options(self) -> SimpleNamespace:
        """The group's timeout, where torch's own backends have it: ``_get_backend(device).options``."""
        return SimpleNamespace(_timeout=self._timeout)

    def _get_backend(self, _device: device) -> Any:
        return self

    # By these names torch's C++ part asks for them, in versions of torch after 2.13.
    def start_coalescing(self, device: device) -> None:
        self._start_coalescing(device)

    def end_coalescing(self, device: device) -> TorchWork:
        return self._end_coalescing(device)

    def release(self, exchange: Callable[[str, Any], list[Any]]) -> None:
        """Give back what ``abort()`` could not, as other ranks used the group; called when all ranks have aborted it.

        ``exchange`` brings a word of each rank, as JSON can write it, under a name, to all; CommunicationError where
        not all have come.
        """

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: the transport orders the collectives itself."""


class CollectiveGroup(PythonGroup):
    """A group over one transport: translates torch's calls to those of :class:`Collectives`.

    A subclass sets ``_over``, which has the same methods, and defines :meth:`_run`, messages and barrier.
    """

    _over: Any

    def _run(self, what: str, call: Callable[..., Any], rows: Iterable[tuple[Any, ...]], result: Any) -> TorchWork:
        """Make calls of ``what``, a method of ``_over`` with each of ``rows``, together; the Work gives ``result``."""
        raise NotImplementedError  # an abstract class would need another metaclass than torch's

    def allreduce(
        self, tensors: list[Tensor] | Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> TorchWork:
        """Reduce each tensor over the ranks, in place."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        return self._run("all_reduce", self._over.all_reduce, zip(tensors, repeat(op_of(opts))), tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> TorchWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor] | Tensor, opts: Any = None, op: Any = None) -> TorchWork:  # type: ignore[override]
        """Reduce each tensor over the ranks, into that of one rank; the others keep theirs."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        root, op = (opts, op_of(op)) if isinstance(opts, int) else (_root_of(opts), op_of(opts))
        return self._run("reduce", self._over.reduce, zip(tensors, repeat(op), repeat(root)), tensors)

    def broadcast(
        self, tensors: list[Tensor] | Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> TorchWork:
        """Overwrite each tensor by that of one rank."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        return self._run("broadcast", self._over.broadcast, zip(tensors, repeat(_root_of(opts))), tensors)

    def allgather(self, outputs: list[Any], inputs: list[Tensor] | Tensor, opts: Any = None) -> TorchWork:
        """Put rank j's ``inputs[i]`` into ``outputs[i][j]``."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._run("all_gather", self._over.all_gather_list, zip(outputs, inputs, strict=True), outputs)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> TorchWork:
        """Put rank j's ``inputs[i]`` into ``outputs[j][i]``."""
        columns = [[row[index] for row in outputs] for index in range(len(inputs))]
        rows = zip(columns, inputs, strict=True)
        return self._run("all_gather_coalesced", self._over.all_gather_list, rows, outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> TorchWork:
        """Put the tensors of all ranks one after another into ``output``."""
        return self._run("all_gather_single", self._over.all_gather, [(output, tensor)], [output])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> TorchWork:
        rows = zip(outputs, inputs, strict=True)
        return self._run("all_gather_single_coalesced", self._over.all_gather, rows, outputs)

    def reduce_scatter(self, outputs: list[Tensor] | Tensor, inputs: list[Any], opts: Any = None) -> TorchWork:  # type: ignore[override]
        """Reduce ``inputs[i][j]`` over the ranks into rank j's ``outputs[i]``."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        rows = [(*both, op_of(opts)) for both in zip(outputs, inputs, strict=True)]
        return self._run("reduce_scatter", self._over.reduce_scatter_list, rows, outputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> TorchWork:
        """Reduce over the ranks; rank i gets the i-th of equal parts."""
        return self._run("reduce_scatter_single", self._over.reduce_scatter, [(output, tensor, op_of(opts))], [output])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> TorchWork:
        rows = [(*both, op_of(opts)) for both in zip(outputs, inputs, strict=True)]
        return self._run("reduce_scatter_single_coalesced", self._over.reduce_scatter, rows, outputs)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> TorchWork:
        """Send each rank its rows, and receive its rows from each."""
        rows = [(output, tensor, output_splits, input_splits)]
        return self._run("all_to_all_single", self._over.all_to_all, rows, [output])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> TorchWork:
        """Send ``inputs[j]`` to rank j, and receive rank i's tensor into ``outputs[i]``."""
        return self._run("all_to_all", self._over.all_to_all_list, [(outputs, inputs)], outputs)

    def gather(self, outputs: list[Any], inputs: list[Tensor] | Tensor, opts: Any = None) -> TorchWork:  # type: ignore[override]
        """Put rank j's ``inputs[i]`` into ``outputs[i][j]`` of one rank; ``outputs`` is not looked at elsewhere."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        rows = [(*both, _root_of(opts)) for both in zip(outputs or [[]] * len(inputs), inputs, strict=True)]
        return self._run("gather", self._over.gather, rows, outputs or inputs)

    def scatter(self, outputs: list[Tensor] | Tensor, inputs: list[Any], opts: Any = None) -> TorchWork:  # type: ignore[override]
        """Put ``inputs[i][j]`` of one rank into rank j's ``outputs[i]``; ``inputs`` is not looked at elsewhere."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        rows = [(*both, _root_of(opts)) for both in zip(outputs, inputs or [[]] * len(outputs), strict=True)]
        return self._run("scatter", self._over.scatter, rows, outputs)

    # The names of earlier versions of torch.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


class PendingGroup(CollectiveGroup):
    """A group over a wire, of which a subclass calls :meth:`_connect` and defines the end.

    ``pg_options`` is what it was made with, for groups that shall be like it; ``keys`` what this rank has written to
    the store of the group.
    """

    _over: Collectives
    _shared: SharedMemoryGroup

    def __init__(
        self,
        arguments: Any,
        options: MpiOptions | ShmOptions,
        keys: WrittenKeys,
        *,
        backend_name: str,
        transport: str,
        device_types: Sequence[str],
    ) -> None:
        rank, size = arguments.group_rank, arguments.group_size
        super().__init__(rank, size, arguments, backend_name, device_types)
        self.pg_options = options
        place = f"rank {rank} of {size}, group {self._group_name!r}"
        self._keys = keys
        self._waits = Waits(keys, rank, place, self._timeout.total_seconds(), transport)
        self._pid = os.getpid()
        self._coalesced: list[Any] | None = None
        self._closed = False
        self._comparison: CollectiveComparison | None = None

    def _connect(
        self,
        wire: Wire,
        memory: HostMemory,
        join: Callable[[int, Sequence[int]], Wire],
        *,
        is_enabled: bool,
        two_level_bytes: int,
        direct_bytes: int = 0,
    ) -> None:
        """Set the collectives, on all ranks together; see :class:`Collectives` and :class:`SharedMemoryGroup`."""
        rank, waits = self.rank(), self._waits
        waits.at_failure.append(wire.give_up)
        self._over = Collectives(wire, rank, waits, memory, direct_bytes=direct_bytes)
        link = SharedLink(rank, wire.size, self._over.gather_bytes, waits, progress_engine(self._pid), join)
        self._shared = self._over.shared = SharedMemoryGroup(
            link, self.pg_options, is_enabled=is_enabled, two_level_bytes=two_level_bytes
        )
        if compares_collectives():
            self._comparison = CollectiveComparison(self._keys.under("calls"), rank, wire.size, waits)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> TorchWork:  # type: ignore[override]
        """Wait until every rank is here; the host waits, not a CUDA stream."""
        return self._run("barrier", self._over.barrier, [()], None)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> TorchWork:
        """Start to send one tensor; complete when the tensor may be changed again."""
        return self._message("send", self._over.send, tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> TorchWork:
        """Start to receive one tensor."""
        return self._message("recv", self._over.receive, tensors, peer, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> TorchWork:
        """Start to receive one tensor from whoever sends with this tag; ``source_rank()`` says who it was."""
        return self._message("recv", self._over.receive, tensors, None, tag)

    def _message(
        self, what: str, call: Callable[..., Work], tensors: list[Tensor], peer: int | None, tag: int
    ) -> TorchWork:
        self._check_open(what)
        if len(tensors) != 1:
            raise ValueError(f"a message is one tensor, not {len(tensors)}")
        work = call(tensors[0], peer, tag)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def supports_tensor_alloc(self, device: device) -> bool:
        """Whether ``allocate_tensor`` has memory there that makes collectives faster: torch's name for it."""
        return self._shared.queue is not None and device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: dtype, device: device) -> Tensor:
        """A 1-D tensor of ``size`` zeros that the ranks of this node share, so that no collective has to copy it there.

        Not collective; ValueError where there is no such memory. An all-reduce, reduce-scatter or all-gather of it is
        under way until its Work was waited for.
        """
        if not self.supports_tensor_alloc(device):
            raise ValueError(f"{self._waits.place}: no shared memory for tensors on {device}")
        return self._shared.allocate(size, dtype)

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, where it makes a difference to :meth:`sum_of_node`; else none. The same on all."""
        return self._shared.nodes

    def sum_of_node(self, tensor: Tensor, node: int) -> TorchWork:
        """Sum over the ranks, in place, a tensor that is zero on all ranks but those of one of :attr:`nodes`.

        The same sum as an all-reduce makes; but what is large is sent from that node instead of being summed over the
        nodes, which takes half the traffic. All ranks call it together, as any collective.
        """
        return self._run("all_reduce", self._over.all_reduce, [(tensor, SUM, node)], [tensor])

    @property
    def hierarchy(self) -> Hierarchy | None:
        """For reductions in two levels, where ranks of several nodes share memory; the same answer on all ranks."""
        return self._shared.hierarchy

    def progress(self) -> None:
        """Move all that is outstanding on all groups of this process, without waiting."""
        self._waits.progress()

    def _start_coalescing(self, _device: device) -> None:
        self._coalesced = []

    def _end_coalescing(self, _device: device) -> TorchWork:
        works, self._coalesced = self._coalesced or [], None
        return combined(works, self._waits)

    def _run(self, what: str, call: Callable[..., Any], rows: Iterable[tuple[Any, ...]], result: Any) -> TorchWork:
        self._check_open(what)
        if self._comparison is not None:
            work = self._comparison.append(call, list(rows))
        else:
            works = [*starmap(call, rows)]
            work = works[0] if len(works) == 1 else combined(works, self._waits)
        work.outputs = result
        if self._coalesced is not None:  # keep it for the end of these: torch does not
            self._coalesced.append(work)
        return work

    def _check_open(self, what: str) -> None:
        if os.getpid() != self._pid:
            raise UnusableError(
                f"{self._waits.place}: {what} in a process that was forked from the one that made the group, to which "
                "its connections belong; start workers by 'spawn', and initialize torch.distributed in each"
            )
        if self._closed:
            raise UnusableError(f"{self._waits.place}: {what} on a process group that was destroyed")
        if self._waits.is_given_up():
            raise self._waits.error(what, self._waits.failure)


def op_of(opts: Any) -> ReduceOp:
    """The operation, from torch's options, or given as it is."""
    if opts is None:
        return SUM
    op = getattr(opts, "reduceOp", opts)
    return op if isinstance(op, ReduceOp) else ReduceOp(op)


def _root_of(opts: Any) -> int:
    if opts is None:
        return 0
    return opts if isinstance(opts, int) else int(opts.rootRank)


@functools.cache
def ended_at_exit(_pid: int) -> weakref.WeakSet[Any]:
    """The objects whose ``end()`` this process calls when Python exits, held weakly; it waits for no other rank."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def end_all() -> None:
        for each in list(alive):
            each.end()

    atexit.register(end_all)
    return alive
