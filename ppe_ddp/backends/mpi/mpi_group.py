"""A process group of torch.distributed over mpi4py: the backend ``mpi4py``."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from os import getpid
from typing import Any

from mpi4py import MPI
from torch import distributed as dist
from torch.cuda import is_available, synchronize
from torch.distributed import Work

from ppe_ddp.backends.collective_arguments import HostMemory
from ppe_ddp.backends.device_routed_group import DeviceRoutedGroup, beside_other_backends
from ppe_ddp.backends.group import PendingGroup
from ppe_ddp.backends.group_internals import backends_being_made
from ppe_ddp.backends.mpi import MpiOptions
from ppe_ddp.backends.mpi.mpi_job import install_job_hooks, mismatch
from ppe_ddp.backends.mpi.mpi_wire import MpiWire, release, sub_communicator
from ppe_ddp.backends.rank_store import WrittenKeys, await_members
from ppe_ddp.errors import CommunicationError
from ppe_ddp.nested_tensors import tensors_in
from ppe_ddp.waiting import network_thread, progress_engine

_FEWEST_TAGS = 32767  # every MPI allows tags up to this number


def make_group(arguments: Any, options: MpiOptions | None) -> MpiProcessGroup | DeviceRoutedGroup:
    """Make a group of ranks of MPI's world; only its ranks must call this, together.

    If the user wants other backends for some devices (``"cpu:mpi4py,cuda:nccl"``), the group holds an inner group for
    each.

    Raises:
        CommunicationError: torch's ranks are not those of MPI, or not all ranks have come.
        DisagreementError: The ranks have different options.
        TypeError: ``options`` are those of another backend.
        TorchChangedError: torch does not show the backends of the group.
    """
    options = MpiOptions() if options is None else options
    if not isinstance(options, MpiOptions):
        raise TypeError(f"pg_options for the backend mpi4py are ppe_ddp's MpiOptions, not {type(options).__name__}")
    wanted, world = backends_being_made(), MPI.COMM_WORLD
    progress_engine(getpid()).expect(world.Get_size())
    ranks, keys = list(arguments.global_ranks_in_group), WrittenKeys(arguments.store)
    if ranks:
        _check_world(dist.get_rank(), dist.get_world_size())
    else:
        _check_world(arguments.group_rank, arguments.group_size)
    turn = await_members(arguments, ranks or range(arguments.group_size), options.agreed(), keys)
    if ranks:
        # The tag distinguishes groups that several threads make at the same time.
        comm = sub_communicator(world, ranks, zlib.crc32(arguments.group_id.encode()) % _FEWEST_TAGS)
    else:
        install_job_hooks(together=True)
        comm = world.Dup()
    own = MpiProcessGroup(comm, arguments, options, keys.under(f"ppe_ddp/mpi/{turn}"))
    return beside_other_backends(own, wanted, arguments)


def _check_world(rank: int, size: int) -> None:
    world = MPI.COMM_WORLD
    if world.Get_size() != size:
        raise CommunicationError(mismatch(size, "torch.distributed"))
    if world.Get_rank() != rank:
        raise CommunicationError(
            f"rank {rank} of torch.distributed is rank {world.Get_rank()} of MPI; take the ranks from MPI: "
            'init_process_group("mpi4py", init_method="mpi://")'
        )


class MpiProcessGroup(PendingGroup):
    """A group over one MPI communicator. It is made by torch.distributed.

    No call waits inside MPI. On several nodes, or with ``MpiOptions(thread=True)``, calls also advance on a thread. An
    error for different sizes is not guaranteed: MPI may compute wrong numbers, or the wait ends at the timeout. Ctrl-C
    gives the group up if it comes while this rank does its part; else the collective is still in flight.

    Tensors may have any dtype, on CPU or CUDA, contiguous or not. Dtypes that MPI cannot sum (float16, bfloat16,
    float8) are summed in float32 and rounded once.
    """

    def __init__(self, comm: MPI.Intracomm, arguments: Any, options: MpiOptions, keys: WrittenKeys) -> None:
        self._has_cuda = is_available()
        devices = ("cpu", "cuda") if self._has_cuda else ("cpu",)
        super().__init__(arguments, options, keys, backend_name="mpi4py", transport="MPI", device_types=devices)
        self._is_gpu_aware = options.gpu_aware
        self._wire = MpiWire(comm, options.piece_bytes)
        self._wires: dict[str, tuple[MpiWire, Sequence[int]]] = {"group": (self._wire, range(comm.Get_size()))}
        with self._connecting():
            self._connect(
                self._wire,
                HostMemory(self.rank(), "mpi4py", takes_cuda=True, gpu_aware=options.gpu_aware),
                self._join,
                is_enabled=options.shared_memory and not options.gpu_aware,
                two_level_bytes=options.two_level_bytes,
            )
        is_threaded = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        if options.thread and not is_threaded:
            raise ValueError(
                "MpiOptions(thread=True) needs MPI_THREAD_MULTIPLE, which this MPI does not give: leave it out, or "
                "use another MPI library"
            )
        if options.thread or (options.thread is None and is_threaded and self._shared.nodes):
            network_thread(getpid())
        install_job_hooks()

    def _disconnect(self, *, is_idle: bool) -> None:
        # Calls in flight advance in calls of other groups, and at the exit. If the communicator were freed, another
        # group could get its number, and the messages for this one.
        if is_idle and not self._waits.is_given_up() and not MPI.Is_finalized():
            for wire, _ in self._wires.values():
                wire.comm.Free()

    def abort(self) -> None:
        self._closed = True
        if not MPI.Is_finalized():
            super().abort()

    def release(self, exchange: Callable[[str, Any], list[Any]]) -> None:
        """Free the communicators, after all ranks have given the group up; see :class:`PythonGroup`."""
        if not MPI.Is_finalized():
            release({} if self._wire.has_messages else self._wires, exchange)
        super().release(exchange)

    def _run(self, what: str, call: Callable[..., Any], rows: Iterable[tuple[Any, ...]], result: Any) -> Work:
        if not self._has_cuda:
            return super()._run(what, call, rows, result)
        rows = list(rows)
        is_on_cuda = any(tensor.is_cuda for tensor in tensors_in(rows))
        if is_on_cuda and self._is_gpu_aware:
            synchronize()  # MPI reads the memory at once, without looking at streams
        work = super()._run(what, call, rows, result)
        if is_on_cuda:
            work.wait()  # the result is copied back in the order of the current stream
        return work

    def _join(self, index: int, ranks: Sequence[int]) -> MpiWire:
        """Make a wire to the ranks of other nodes that own the same slice."""
        wire = MpiWire(sub_communicator(self._wire.comm, ranks, index))
        self._wires[f"slice {index}"] = wire, ranks
        return wire
