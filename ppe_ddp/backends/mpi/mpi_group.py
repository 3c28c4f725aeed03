"""A process group of torch.distributed over mpi4py: backend name ``mpi4py``.

Only translates torch's names and calling conventions; the work is in the modules beside it. Everything in
torch that talks over a process group works: DistributedDataParallel and its hooks, DTensor, FSDP2, DCP.
"""

from __future__ import annotations

import zlib
from contextlib import suppress
from os import getpid
from typing import TYPE_CHECKING, Any

from mpi4py import MPI
from torch import distributed as dist
from torch.cuda import is_available, synchronize

from ppe_ddp.backends.group_internals import backends_being_made
from ppe_ddp.backends.mpi.communicator_release import release
from ppe_ddp.backends.mpi.mpi_collectives import MpiCollectives
from ppe_ddp.backends.mpi.mpi_job import WatchedCall, install_job_hooks
from ppe_ddp.backends.mpi.mpi_messages import MpiMessages
from ppe_ddp.backends.mpi.mpi_options import MpiOptions
from ppe_ddp.backends.mpi.mpi_rendezvous import mismatch
from ppe_ddp.backends.mpi.mpi_waits import Waits
from ppe_ddp.backends.mpi.progress_thread import is_possible, progress_thread
from ppe_ddp.backends.mpi.sub_communicator import sub_communicator
from ppe_ddp.backends.process_group.collective_comparison import compares_collectives
from ppe_ddp.backends.process_group.device_routed_group import DeviceRoutedGroup, beside_other_backends
from ppe_ddp.backends.process_group.member_rendezvous import await_members
from ppe_ddp.backends.process_group.pending_group import DRAIN_SECONDS, PendingGroup, only
from ppe_ddp.backends.process_group.progress_engine import progress_engine
from ppe_ddp.backends.process_group.written_keys import WrittenKeys
from ppe_ddp.errors import CommunicationError
from ppe_ddp.nested_tensors import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from torch import Tensor
    from torch.distributed import Work

_FEWEST_TAGS = 32767  # that any MPI allows

__all__ = ["MpiOptions", "MpiProcessGroup", "make_group"]


def make_group(arguments: Any, options: MpiOptions | None) -> MpiProcessGroup | DeviceRoutedGroup:
    """Make a group of ranks of MPI's world; its ranks, and no others, must call it together.

    Where the user wants another backend for some devices (``"cpu:mpi4py,cuda:nccl"``), it holds a group for each.

    Args:
        arguments: torch's ``_DistributedBackendOptions``.
        options: None for the defaults.

    Raises:
        CommunicationError: torch's ranks are not MPI's, but those of another launcher; or not all have come.
        DisagreementError: The ranks have different options.
        TypeError: ``options`` are those of another backend.
        TorchChangedError: torch does not show which backends it makes the group over.
    """
    if options is not None and not isinstance(options, MpiOptions):
        raise TypeError(f"pg_options for the backend mpi4py are ppe_ddp's MpiOptions, not {type(options).__name__}")
    wanted = backends_being_made()
    world, agreed = MPI.COMM_WORLD, (options or MpiOptions()).agreed()
    progress_engine(getpid()).expect(world.Get_size())
    ranks, keys = list(arguments.global_ranks_in_group), WrittenKeys(arguments.store)
    if ranks:
        _check_world(dist.get_rank(), dist.get_world_size())
        # The tag keeps apart the groups that several threads make at a time.
        tag = zlib.crc32(arguments.group_id.encode()) % _FEWEST_TAGS
        turn = await_members(arguments, ranks, agreed, keys)
        comm = sub_communicator(world, ranks, tag)
    else:
        _check_world(arguments.group_rank, arguments.group_size)
        turn = await_members(arguments, range(arguments.group_size), agreed, keys)
        install_job_hooks(together=True)
        comm = world.Dup()
    own = MpiProcessGroup(comm, arguments, options or MpiOptions(), keys)
    if compares_collectives():
        own.compare_collectives(keys.under(f"ppe_ddp/calls/{turn}"))
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
    """A group over one MPI communicator. Made by torch.distributed, not by hand.

    Attributes:
        pg_options: What it was made with, for groups that shall be like it.

    No call waits inside MPI. A collective with ``async_op=True``, and a message, is begun in the call and goes on in
    every call and wait of this backend, on any group; on several nodes, or with ``MpiOptions(thread=True)``, also in
    between, on a thread. All ranks of a group make the same collectives in the same order, with the same sizes and
    dtypes; the order of those on different groups is free. Not guaranteed: an error where sizes differ; MPI then
    computes wrong numbers, or the wait ends at the timeout.

    Every wait ends with an error when the group's timeout is over, or when another rank gives the group up
    (``abort()``, an error of MPI, a timeout). The group is of no use then. A wait that is interrupted (Ctrl-C) leaves
    its collective under way.

    Every method that torch calls takes tensors of any dtype, on CPU or CUDA, contiguous or not. What MPI cannot sum
    (float16, bfloat16, float8) is summed in float32 and rounded once.

    Raises from any collective:
        CommunicationError: MPI reports an error, a rank did not come in time, or has given the group up.
        TypeError: The operation is not defined for the dtype, or the tensors are sparse.
        ValueError: The sizes of this rank's own arguments do not fit together.
        UnusableError: The group was destroyed.
    """

    _waits: Waits

    def __init__(self, comm: MPI.Intracomm, arguments: Any, options: MpiOptions, keys: WrittenKeys) -> None:
        types = ("cpu", "cuda") if is_available() else ("cpu",)
        super().__init__(comm.Get_rank(), comm.Get_size(), arguments, "mpi4py", types)
        self.pg_options = options
        self._keys = keys
        seconds = self._timeout.total_seconds()
        place = f"rank {comm.Get_rank()} of {comm.Get_size()}, group {self._group_name!r}"
        self._call = WatchedCall(place, seconds)
        self._waits = Waits(comm, place, seconds)
        self._mpi = MpiCollectives(comm, self._waits, options)
        self._over = self._mpi
        self._shared = self._mpi.shared
        has_thread = is_possible() and bool(self._shared.nodes) if options.thread is None else options.thread
        self._thread = progress_thread(getpid()) if has_thread else None
        self._messages = MpiMessages(comm, self._mpi, self._waits)
        install_job_hooks().watch(self._call)

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:  # type: ignore[override]
        """Wait until every rank is here; the host waits, not a CUDA stream."""
        return self._run("barrier", [(self._mpi.barrier,)], None)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until every rank is here, or raise CommunicationError on rank 0 with those that are missing."""
        seconds = timeout.total_seconds() if timeout is not None else 0.0
        self._check_open("monitored_barrier")
        self._messages.monitored_barrier(seconds, wait_all_ranks)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        """Start to send one tensor; complete when the tensor may be changed again."""
        self._check_open("send")
        return self._noted(self._messages.send(only(tensors), peer, tag))

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        """Start to receive one tensor."""
        self._check_open("recv")
        return self._noted(self._messages.receive(only(tensors), peer, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Start to receive one tensor from whoever sends with this tag; ``source_rank()`` says who it was."""
        self._check_open("recv")
        return self._noted(self._messages.receive(only(tensors), None, tag))

    def shutdown(self) -> None:
        """Give the communicator back to MPI; called by ``destroy_process_group`` on every rank of the group."""
        if self._closed:
            return
        self._closed = True
        is_idle = False
        with suppress(CommunicationError):  # of a group that was given up
            self._mpi.drain(DRAIN_SECONDS)
            self._waits.check("destroy_process_group")
            is_idle = True
        # What is still under way goes on in the calls of other groups, and at the exit. Another group would get the
        # number of the communicator, and what comes for this one.
        if is_idle and not MPI.Is_finalized():
            with self._call.under_way("destroy_process_group"):
                self._mpi.free()

    def abort(self) -> None:
        """Give the group up without waiting; the other ranks leave their waits in it with an error."""
        self._closed = True
        if not MPI.Is_finalized():
            self._waits.give_up("it has called abort()")

    def release(self, exchange: Callable[[str, Any], list[Any]]) -> None:
        """Give the communicators of a group back to MPI that all ranks have given up; see :class:`PythonGroup`."""
        if not MPI.Is_finalized():
            release({} if self._messages.is_used else self._mpi.communicators(), self._waits, exchange)
        self._keys.delete_all()

    monitoredBarrier = monitored_barrier

    def _run(self, what: str, calls: Sequence[tuple[Any, ...]], result: Any) -> Work:
        self._check_open(what)
        is_on_cuda = any(tensor.is_cuda for tensor in tensors_in(calls))
        if is_on_cuda and self.pg_options.gpu_aware:
            synchronize()  # MPI reads the memory as it is now
        work = self._begin(calls, result)
        if is_on_cuda:
            work.wait()  # a result comes back in the order of the stream that makes this call
        elif self._thread is not None:
            self._thread.wake()
        return self._noted(work)
