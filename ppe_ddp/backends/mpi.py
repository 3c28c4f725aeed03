"""A process group of torch.distributed over mpi4py: backend name ``mpi4py``.

Only translates torch's names and calling conventions; the work is in the modules beside it. Everything in
torch that talks over a process group works: DistributedDataParallel and its hooks, DTensor, FSDP2, DCP.
"""

from __future__ import annotations

import zlib
from functools import partial
from os import getpid
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any

from mpi4py import MPI
from torch import Tensor, device, dtype
from torch import distributed as dist
from torch.cuda import is_available
from torch.distributed import ProcessGroup, ReduceOp

from ppe_ddp.backends.mpi_collectives import Collectives, MpiOptions
from ppe_ddp.backends.mpi_job import Call, guard_job
from ppe_ddp.backends.mpi_messages import Messages
from ppe_ddp.backends.mpi_progress import outstanding
from ppe_ddp.backends.mpi_rendezvous import mismatch
from ppe_ddp.backends.mpi_thread import communication_thread
from ppe_ddp.backends.mpi_work import Finished
from ppe_ddp.errors import CommunicationError, UnusableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from torch.distributed import Work

_SUM = ReduceOp(ReduceOp.SUM)
_FEWEST_TAGS = 32767  # that any MPI allows

__all__ = ["MpiOptions", "MpiProcessGroup", "make_group"]


def make_group(arguments: Any, options: MpiOptions | None) -> MpiProcessGroup:
    """Make a group of ranks of MPI's world; its ranks, and no others, must call it together.

    Args:
        arguments: torch's ``_DistributedBackendOptions``.
        options: None for the defaults.

    Raises:
        CommunicationError: torch's ranks are not MPI's, but those of another launcher.
        TypeError: ``options`` are those of another backend.
    """
    if options is not None and not isinstance(options, MpiOptions):
        raise TypeError(f"pg_options for the backend mpi4py are ppe_ddp's MpiOptions, not {type(options).__name__}")
    world = MPI.COMM_WORLD
    ranks = list(arguments.global_ranks_in_group)
    if ranks:
        _check_world(dist.get_rank(), dist.get_world_size())
        # The tag keeps apart the groups that several threads make at a time.
        tag = zlib.crc32(arguments.group_id.encode()) % _FEWEST_TAGS
        comm = world.Create_group(world.Get_group().Incl(ranks), tag)
    else:
        _check_world(arguments.group_rank, arguments.group_size)
        guard_job(together=True)
        comm = world.Dup()
    return MpiProcessGroup(comm, arguments, options or MpiOptions())


def _check_world(rank: int, size: int) -> None:
    world = MPI.COMM_WORLD
    if world.Get_size() != size:
        raise CommunicationError(mismatch(size, "torch.distributed"))
    if world.Get_rank() != rank:
        raise CommunicationError(
            f"rank {rank} of torch.distributed is rank {world.Get_rank()} of MPI; take the ranks from MPI: "
            'init_process_group("mpi4py", init_method="mpi://")'
        )


class _Options:
    """What torch and this library look for in ``_get_backend(device).options``."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout


class MpiProcessGroup(ProcessGroup):
    """A group over one MPI communicator. Made by torch.distributed, not by hand.

    Attributes:
        pg_options: What it was made with, for groups that shall be like it.

    Collectives block in the calling thread and are complete when they return, also with ``async_op=True``; except
    all-reduces of memory from ``allocate_tensor``, which go on while the caller does other things, and all of them
    with ``MpiOptions(thread=True)``. ``isend`` and ``irecv`` return at once. All ranks make the same collectives in
    the same order, with the same sizes and dtypes. Not guaranteed: an error where they differ; MPI then hangs, until
    the watchdog ends the job, or computes wrong numbers.

    Every method that torch calls takes tensors of any dtype, on CPU or CUDA, contiguous or not. What MPI cannot sum
    (float16, bfloat16, float8) is summed in float32 and rounded once.

    Raises from any collective:
        CommunicationError: MPI reports an error.
        TypeError: The operation is not defined for the dtype, or the tensors are sparse.
        ValueError: The sizes of this rank's own arguments do not fit together.
        UnusableError: The group was destroyed.
    """

    def __init__(self, comm: MPI.Intracomm, arguments: Any, options: MpiOptions) -> None:
        super().__init__(comm.Get_rank(), comm.Get_size())  # type: ignore[call-arg]
        self._store = arguments.store
        self._timeout: timedelta = arguments.timeout
        self._group_name: str = arguments.group_id
        self._group_desc = ""
        self.pg_options = options
        place = f"rank {comm.Get_rank()} of {comm.Get_size()}, group {self._group_name!r}"
        self._call = Call(place, self._timeout.total_seconds())
        self._over = Collectives(comm, self._call, options)
        self._outstanding = outstanding(getpid())
        self._thread = communication_thread(getpid()) if options.thread else None
        self._messages = Messages(comm, self._over, place, self._timeout.total_seconds())
        self._closed = False
        guard_job().watch(self._call)

    def getBackendName(self) -> str:
        """``mpi4py``."""
        return "mpi4py"

    def name(self) -> str:
        """``mpi4py``."""
        return "mpi4py"

    def get_group_store(self) -> Any:
        """The store that the ranks of this group share."""
        return self._store

    def getGroupName(self) -> str:
        """The name by which torch finds the group; functional collectives need it."""
        return self._group_name

    def setGroupName(self, name: str) -> None:
        """Called by torch when the group is made."""
        self._group_name = name

    def getGroupDesc(self) -> str:
        """What the user says that the group is for."""
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:
        """Called by torch when the group is made."""
        self._group_desc = desc

    @property
    def _device_types(self) -> list[device]:
        return [device("cpu"), device("cuda")] if is_available() else [device("cpu")]

    @property
    def options(self) -> _Options:
        """The group's timeout, where torch's own backends have it."""
        return _Options(self._timeout)

    def _get_backend(self, _device: device) -> Any:
        return self

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Reduce each tensor over the ranks, in place."""
        tensors = _listed(tensors)
        op = _op_of(opts)
        if len(tensors) == 1 and not self._closed and self._thread is None:
            under_way = self._over.start_all_reduce(tensors[0], op)
            if under_way is not None:
                return under_way
        return self._run("all_reduce", self._all_reduce, tensors, op, result=tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Reduce each tensor over the ranks, in place."""
        return self._run("all_reduce_coalesced", self._all_reduce, tensors, _op_of(opts), result=tensors)

    def reduce(self, tensors: list[Tensor] | Tensor, opts: Any = None, op: Any = None) -> Work:  # type: ignore[override]
        """Reduce each tensor over the ranks, into that of one rank; the others keep theirs."""
        tensors = _listed(tensors)
        root, op = (opts, _op_of(op)) if isinstance(opts, int) else (_root_of(opts), _op_of(opts))
        return self._run("reduce", _each, self._over.reduce, tensors, op, root, result=tensors)

    def broadcast(self, tensors: list[Tensor] | Tensor, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Overwrite each tensor by that of one rank."""
        tensors = _listed(tensors)
        return self._run("broadcast", _each, self._over.broadcast, tensors, _root_of(opts), result=tensors)

    def allgather(self, outputs: list[Any], inputs: list[Tensor] | Tensor, opts: Any = None) -> Work:
        """Put rank j's ``inputs[i]`` into ``outputs[i][j]``."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._run("all_gather", _zipped, self._over.all_gather_list, outputs, inputs, result=outputs)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """Put rank j's ``inputs[i]`` into ``outputs[j][i]``."""
        columns = [[row[index] for row in outputs] for index in range(len(inputs))]
        return self._run("all_gather_coalesced", _zipped, self._over.all_gather_list, columns, inputs, result=outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        """Put the tensors of all ranks one after another into ``output``."""
        return self._run("all_gather_single", self._over.all_gather, output, tensor, result=[output])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Do what ``all_gather_single`` does for several tensors."""
        return self._run("all_gather_single_coalesced", _zipped, self._over.all_gather, outputs, inputs, result=outputs)

    def reduce_scatter(self, outputs: list[Tensor] | Tensor, inputs: list[Any], opts: Any = None) -> Work:  # type: ignore[override]
        """Reduce ``inputs[i][j]`` over the ranks into rank j's ``outputs[i]``."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        over = self._over.reduce_scatter_list
        return self._run("reduce_scatter", _zipped, over, outputs, inputs, _op_of(opts), result=outputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        """Reduce over the ranks; rank i gets the i-th of equal parts."""
        over = self._over.reduce_scatter
        return self._run("reduce_scatter_single", over, output, tensor, _op_of(opts), result=[output])

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Do what ``reduce_scatter_single`` does for several tensors."""
        over, op = self._over.reduce_scatter, _op_of(opts)
        return self._run("reduce_scatter_single_coalesced", _zipped, over, outputs, inputs, op, result=outputs)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Work:
        """Send each rank its rows, and receive its rows from each."""
        over = self._over.all_to_all
        return self._run("all_to_all_single", over, output, tensor, output_splits, input_splits, result=[output])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Send ``inputs[j]`` to rank j, and receive rank i's tensor into ``outputs[i]``."""
        return self._run("all_to_all", self._over.all_to_all_list, outputs, inputs, result=outputs)

    def gather(self, outputs: list[Any], inputs: list[Tensor] | Tensor, opts: Any = None) -> Work:  # type: ignore[override]
        """Put rank j's ``inputs[i]`` into ``outputs[i][j]`` of one rank; ``outputs`` is not looked at elsewhere."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        filled = outputs if outputs else [[]] * len(inputs)
        return self._run("gather", _zipped, self._over.gather, filled, inputs, _root_of(opts), result=outputs or inputs)

    def scatter(self, outputs: list[Tensor] | Tensor, inputs: list[Any], opts: Any = None) -> Work:  # type: ignore[override]
        """Put ``inputs[i][j]`` of one rank into rank j's ``outputs[i]``; ``inputs`` is not looked at elsewhere."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        filled = inputs if inputs else [[]] * len(outputs)
        return self._run("scatter", _zipped, self._over.scatter, outputs, filled, _root_of(opts), result=outputs)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:  # type: ignore[override]
        """Wait until every rank is here; the host waits, not a CUDA stream."""
        return self._run("barrier", self._over.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank is here, or raise CommunicationError on rank 0 with those that are missing."""
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        self._check_open("monitored_barrier")
        with self._call.watched("monitored_barrier"):
            self._outstanding.drain()
        self._messages.monitored_barrier(seconds, wait_all_ranks)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        """Start to send one tensor; complete when the tensor may be changed again."""
        self._check_open("send")
        return self._messages.send(_only(tensors), peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        """Start to receive one tensor."""
        self._check_open("recv")
        return self._messages.receive(_only(tensors), peer, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Start to receive one tensor from whoever sends with this tag; ``source_rank()`` says who it was."""
        self._check_open("recv")
        return self._messages.receive(_only(tensors), None, tag)

    def _start_coalescing(self, _device: device) -> None:
        """Nothing: what is called between is complete when it returns."""

    def _end_coalescing(self, _device: device) -> Work:
        return Finished()

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: MPI orders the collectives itself."""

    def supports_tensor_alloc(self, device: device) -> bool:
        """Whether ``allocate_tensor`` has memory there that makes collectives faster: torch's name for it."""
        return self._over.shares_memory and device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: dtype, device: device) -> Tensor:
        """A 1-D tensor of ``size`` zeros that the ranks of this node share: all-reduces of it copy nothing.

        Not collective. Such an all-reduce is under way until its Work was waited for.

        Raises:
            ValueError: There is no such memory for this device.
        """
        if not self.supports_tensor_alloc(device):
            raise ValueError(f"{self._call.place}: no shared memory for tensors on {device}")
        return self._over.allocate(size, dtype)

    def shutdown(self) -> None:
        """Give the communicator back to MPI; called by ``destroy_process_group`` on every rank of the group."""
        if not self._closed:
            self._closed = True
            if self._thread is not None:
                self._thread.flush()
            with self._call.watched("destroy_process_group"):
                self._outstanding.drain()
            if not MPI.Is_finalized():
                self._over.comm.Free()

    def abort(self) -> None:
        """Close the group without talking to the other ranks."""
        self._closed = True

    # The names of earlier versions of torch.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    monitoredBarrier = monitored_barrier

    def _all_reduce(self, tensors: list[Tensor], op: ReduceOp) -> None:
        for tensor in tensors:
            self._over.all_reduce(tensor, op)

    def _run(self, what: str, call: Callable[..., None], *arguments: Any, result: Any = None) -> Work:
        if self._closed:
            self._check_open(what)
        if self._thread is not None:
            if not any(map(_is_on_cuda, arguments)):
                queued = partial(self._execute, what, call, *arguments)
                return self._thread.submit(queued, f"{self._call.place}: {what}", result)
            self._thread.flush()  # CUDA's current stream is that of this thread
        self._execute(what, call, *arguments)
        return Finished(result)

    def _execute(self, what: str, call: Callable[..., None], *arguments: Any) -> None:
        watched = self._call
        watched.what = what
        watched.thread = get_ident()
        watched.since = monotonic()
        try:
            self._outstanding.drain()
            call(*arguments)
        except MPI.Exception as error:
            raise CommunicationError(f"{watched.place}: {what} over MPI failed: {error}") from error
        finally:
            watched.since = 0.0

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise UnusableError(f"{self._call.place}: {what} on a process group that was destroyed")


def _each(call: Callable[..., None], tensors: Sequence[Tensor], *arguments: Any) -> None:
    for tensor in tensors:
        call(tensor, *arguments)


def _zipped(call: Callable[..., None], first: Sequence[Any], second: Sequence[Any], *arguments: Any) -> None:
    for one, other in zip(first, second, strict=True):
        call(one, other, *arguments)


def _is_on_cuda(argument: Any) -> bool:
    if isinstance(argument, list | tuple):
        return any(map(_is_on_cuda, argument))
    return isinstance(argument, Tensor) and argument.is_cuda


def _listed(tensors: list[Tensor] | Tensor) -> list[Tensor]:
    """The bindings of a ProcessGroup take one tensor, too."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _only(tensors: list[Tensor]) -> Tensor:
    if len(tensors) != 1:
        raise ValueError(f"a message is one tensor, not {len(tensors)}")
    return tensors[0]


def _op_of(opts: Any) -> ReduceOp:
    """The operation, from torch's options, or given as it is."""
    if opts is None:
        return _SUM
    op = getattr(opts, "reduceOp", opts)
    return op if isinstance(op, ReduceOp) else ReduceOp(op)


def _root_of(opts: Any) -> int:
    if opts is None:
        return 0
    return opts if isinstance(opts, int) else int(opts.rootRank)
