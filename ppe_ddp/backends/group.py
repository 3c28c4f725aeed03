"""Base classes of process groups in Python: they translate torch's calls to the collectives of one transport.

PythonGroup       the identity of a group
CollectiveGroup   torch's names for collectives, and the forms in which it passes arguments
PendingGroup      asynchronous calls over a wire; memory that the ranks of a node share
"""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import repeat, starmap
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, device, dtype
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed import Work as TorchWork

from ppe_ddp.backends.collective_arguments import HostMemory
from ppe_ddp.backends.collective_comparison import CollectiveComparison, compares_collectives
from ppe_ddp.backends.collectives import Collectives
from ppe_ddp.backends.group_internals import is_registered
from ppe_ddp.backends.mpi import MpiOptions
from ppe_ddp.backends.rank_store import WrittenKeys
from ppe_ddp.backends.shared_memory.shared_group import SharedMemoryGroup
from ppe_ddp.backends.shared_memory.step_queue import SharedLink
from ppe_ddp.backends.shm import ShmOptions
from ppe_ddp.backends.wire import Wire
from ppe_ddp.backends.work import Waits, Work, combined
from ppe_ddp.errors import CommunicationError, UnusableError
from ppe_ddp.torch_internals import exclude_from_compiling
from ppe_ddp.waiting import progress_engine

_DRAIN_SECONDS = 1.0  # that a destroyed group waits for operations in flight, which other ranks may never begin

SUM = ReduceOp(ReduceOp.SUM)


@exclude_from_compiling
class PythonGroup(ProcessGroup):
    """The identity of a group that torch.distributed made by a Python creator, with these ``arguments`` of torch's.

    ``device_types`` are those of tensors that the group takes, such as ``("cpu", "cuda")``.
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        exclude_from_compiling(cls)

    def __init__(self, arguments: Any, backend_name: str, device_types: Iterable[str]) -> None:
        super().__init__(arguments.group_rank, arguments.group_size)  # type: ignore[call-arg]
        self._store = arguments.store
        self._timeout: timedelta = arguments.timeout
        self._group_name: str = arguments.group_id
        self._backend_name = backend_name
        self._types = tuple(device_types)

    # torch reads these from a backend; a group in Python is its own backend.
    supports_splitting = False
    supports_coalescing = True
    supports_time_estimate = False

    def name(self) -> str:
        return self._backend_name

    getBackendName = name

    def get_group_store(self) -> Any:
        return self._store

    def getGroupName(self) -> str:
        """The name under which torch finds the group; functional collectives need it."""
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    @property
    def _device_types(self) -> list[device]:
        # torch 2.15 attaches a recorder to each new group that has devices, and raises for a group in Python. So this
        # group shows its devices only when torch has registered it.
        return [device(kind) for kind in self._types] if is_registered(self) else []

    @property
    def options(self) -> SimpleNamespace:
        """The group's timeout, where torch's own backends have it: ``_get_backend(device).options``."""
        return SimpleNamespace(_timeout=self._timeout)

    def _get_backend(self, _device: device) -> Any:
        return self

    def start_coalescing(self, device: device) -> None:  # torch's name after 2.13
        self._start_coalescing(device)

    def end_coalescing(self, device: device) -> TorchWork:
        return self._end_coalescing(device)

    def release(self, exchange: Callable[[str, Any], list[Any]]) -> None:
        """Free resources that ``abort()`` could not, as other ranks used the group; called when all have aborted it.

        ``exchange(name, word)`` returns the words (JSON values) of all ranks, and raises CommunicationError if not all
        ranks have come.
        """

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the transport orders the collectives itself."""


class CollectiveGroup(PythonGroup):
    """A group over one transport: translates torch's calls to the methods of :class:`Collectives`.

    A subclass sets ``_over``, which has these methods. It defines :meth:`_run`, point-to-point calls and barrier.
    """

    _over: Any

    def _run(self, what: str, call: Callable[..., Any], rows: Iterable[tuple[Any, ...]], result: Any) -> TorchWork:
        """Call ``call``, a method of ``_over``, with each of ``rows``; one Work for all, with ``result``."""
        raise NotImplementedError  # ABC would conflict with the metaclass of torch's class

    def allreduce(
        self, tensors: list[Tensor] | Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> TorchWork:
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        return self._run("all_reduce", self._over.all_reduce, zip(tensors, repeat(op_of(opts))), tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> TorchWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor] | Tensor, opts: Any = None, op: Any = None) -> TorchWork:  # type: ignore[override]
        """Reduce each tensor over the ranks, into that of one rank; tensors of other ranks stay as they are."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        root, op = (opts, op_of(op)) if isinstance(opts, int) else (_root_of(opts), op_of(opts))
        return self._run("reduce", self._over.reduce, zip(tensors, repeat(op), repeat(root)), tensors)

    def broadcast(
        self, tensors: list[Tensor] | Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> TorchWork:
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
        return self._run("reduce_scatter_single", self._over.reduce_scatter, [(output, tensor, op_of(opts))], [output])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> TorchWork:
        rows = [(*both, op_of(opts)) for both in zip(outputs, inputs, strict=True)]
        return self._run("reduce_scatter_single_coalesced", self._over.reduce_scatter, rows, outputs)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> TorchWork:
        rows = [(output, tensor, output_splits, input_splits)]
        return self._run("all_to_all_single", self._over.all_to_all, rows, [output])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> TorchWork:
        """Send ``inputs[j]`` to rank j, and receive rank i's tensor into ``outputs[i]``."""
        return self._run("all_to_all", self._over.all_to_all_list, [(outputs, inputs)], outputs)

    def gather(self, outputs: list[Any], inputs: list[Tensor] | Tensor, opts: Any = None) -> TorchWork:  # type: ignore[override]
        """Put rank j's ``inputs[i]`` into ``outputs[i][j]`` of one rank; other ranks ignore ``outputs``."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        rows = [(*both, _root_of(opts)) for both in zip(outputs or [[]] * len(inputs), inputs, strict=True)]
        return self._run("gather", self._over.gather, rows, outputs or inputs)

    def scatter(self, outputs: list[Tensor] | Tensor, inputs: list[Any], opts: Any = None) -> TorchWork:  # type: ignore[override]
        """Put ``inputs[i][j]`` of one rank into rank j's ``outputs[i]``; other ranks ignore ``inputs``."""
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
    """A group over a wire. A subclass calls :meth:`_connect` in :meth:`_connecting`, and defines :meth:`_disconnect`.

    ``pg_options`` has the options of the group, from which similar groups can be made. ``keys`` is the group's store.

    A collective with ``async_op=True``, or a message, begins in the call. It advances in every call and wait of the
    backend, on any group. All ranks call the same collectives in the same order, with the same sizes and dtypes. The
    order of collectives on different groups is free.

    Every wait ends with an error when the group's timeout is over, or when another rank gives the group up
    (``abort()``, an error of the transport, a timeout). The group cannot be used after that.

    Raises from any collective:
        CommunicationError: The transport reports an error, a rank did not come in time, or has given the group up.
        TypeError: The operation is not defined for the dtype, or the tensors are sparse or on another device.
        ValueError: The sizes of this rank's own arguments do not fit together.
        UnusableError: The group was destroyed, or belongs to the process that this one was forked from.
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
        super().__init__(arguments, backend_name, device_types)
        self.pg_options = options
        place = f"rank {rank} of {size}, group {self._group_name!r}"
        self._keys = keys
        self._waits = Waits(keys, rank, place, self._timeout.total_seconds(), transport)
        self._pid = os.getpid()
        self._coalesced: list[Any] | None = None
        self._closed = False
        self._comparison: CollectiveComparison | None = None

    @contextmanager
    def _connecting(self) -> Iterator[None]:
        """A context to connect the ranks in. An error gives the group up, as other ranks wait for this one."""
        try:
            yield
        except BaseException as error:  # even an interrupt
            self._waits.give_up(f"the connection was left: {type(error).__name__}")
            raise

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
        """Make the collectives, on all ranks together; see :class:`Collectives` and :class:`SharedMemoryGroup`."""
        rank, waits = self.rank(), self._waits
        waits.at_failure.append(wire.give_up)
        self._over = Collectives(wire, rank, waits, memory, direct_bytes=direct_bytes)
        link = SharedLink(rank, wire.size, self._over.gather_bytes, waits, progress_engine(self._pid), join)
        self._shared = self._over.shared = SharedMemoryGroup(
            link, self.pg_options, is_enabled=is_enabled, two_level_bytes=two_level_bytes
        )
        if compares_collectives():
            self._comparison = CollectiveComparison(self._keys.under("calls"), rank, wire.size, waits)

    def shutdown(self) -> None:
        """End the connections; called by ``destroy_process_group`` on every rank of the group."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        is_idle = False
        with suppress(CommunicationError):  # the group was given up
            self._over.drain(_DRAIN_SECONDS)
            is_idle = True
        self._disconnect(is_idle=is_idle)

    def _disconnect(self, *, is_idle: bool) -> None:
        """End the connections; ``is_idle`` if nothing is in flight on this rank."""
        raise NotImplementedError

    def abort(self) -> None:
        """Give the group up without waiting; other ranks leave their waits in it with an error."""
        if os.getpid() == self._pid:
            self._closed = True
            self._waits.give_up("it has called abort()")

    def release(self, exchange: Callable[[str, Any], list[Any]]) -> None:
        """Delete this rank's keys in the store; see :class:`PythonGroup`."""
        self._keys.delete_all()

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> TorchWork:  # type: ignore[override]
        """Wait until every rank has called it; the host waits, not a CUDA stream."""
        return self._run("barrier", self._over.barrier, [()], None)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> TorchWork:
        """Start to send one tensor; complete when the tensor may be changed again."""
        return self._message("send", self._over.send, tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> TorchWork:
        return self._message("recv", self._over.receive, tensors, peer, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> TorchWork:
        """Start to receive one tensor from any rank that sends with this tag; ``source_rank()`` names the sender."""
        return self._message("recv", self._over.receive, tensors, None, tag)

    def _message(
        self, what: str, call: Callable[..., Work], tensors: list[Tensor], peer: int | None, tag: int
    ) -> TorchWork:
        if torch.is_inference_mode_enabled():  # see ProgressEngine.progress()
            with torch.inference_mode(False):
                return self._message(what, call, tensors, peer, tag)
        self._check_open(what)
        if len(tensors) != 1:
            raise ValueError(f"a message is one tensor, not {len(tensors)}")
        return self._noted(call(tensors[0], peer, tag))

    def _noted(self, work: Work) -> Work:
        if self._coalesced is not None:  # _end_coalescing() returns a Work for all of them
            self._coalesced.append(work)
        return work

    def supports_tensor_alloc(self, device: device) -> bool:
        """Whether ``allocate_tensor`` has memory on ``device`` that makes collectives faster; the name is torch's."""
        return self._shared.queue is not None and device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: dtype, device: device) -> Tensor:
        """Allocate a 1-D tensor of ``size`` zeros in memory that the ranks of this node share.

        Collectives need not copy such a tensor to shared memory. The call is local, and raises ValueError if there is
        no such memory. An all-reduce, reduce-scatter or all-gather of it is in flight until its Work was waited for.
        """
        if not self.supports_tensor_alloc(device):
            raise ValueError(f"{self._waits.place}: no shared memory for tensors on {device}")
        return self._shared.allocate(size, dtype)

    @property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, if there are several, the same on all ranks; without shared memory each is a node."""
        return tuple((rank,) for rank in range(self.size())) if self._shared.queue is None else self._shared.nodes

    def sum_of_node(self, tensor: Tensor, node: int) -> TorchWork:
        """Sum over the ranks, in place, a tensor that is zero except on the ranks of one node, number ``node``.

        If that node has one rank, the others' values are overwritten, whatever they are. A large tensor is sent from
        that node instead of being summed over the nodes, which halves the traffic. Collective.
        """
        return self._run("all_reduce", self._over.all_reduce, [(tensor, SUM, node)], [tensor])

    @property
    def hierarchy(self) -> SharedMemoryGroup | None:
        """What runs reductions in two levels, if ranks share memory on several nodes. The same on all ranks."""
        return self._shared if self._shared.links else None

    def progress(self) -> None:
        """Advance the operations of all groups of this process, without waiting."""
        self._waits.progress()

    def _start_coalescing(self, _device: device) -> None:
        self._coalesced = []

    def _end_coalescing(self, _device: device) -> TorchWork:
        works, self._coalesced = self._coalesced or [], None
        return combined(works, self._waits)

    def _run(self, what: str, call: Callable[..., Any], rows: Iterable[tuple[Any, ...]], result: Any) -> TorchWork:
        if torch.is_inference_mode_enabled():  # see ProgressEngine.progress()
            with torch.inference_mode(False):
                return self._run(what, call, rows, result)
        self._check_open(what)
        if self._comparison is not None:
            work = self._comparison.append(call, list(rows))
        else:
            works = [*starmap(call, rows)]
            work = works[0] if len(works) == 1 else combined(works, self._waits)
        work.outputs = result
        return self._noted(work)

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
    """The ReduceOp in torch's options, or ``opts`` itself if it is one."""
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
    """The objects whose ``end()`` this process calls when Python exits, held weakly."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def end_all() -> None:
        for each in list(alive):
            each.end()

    atexit.register(end_all)
    return alive
