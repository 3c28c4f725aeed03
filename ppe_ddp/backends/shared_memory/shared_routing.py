"""Which collectives go through the memory that ranks share: an answer that all ranks come to alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from ppe_ddp.backends.mpi.mpi_datatypes import is_plain, overlap, reduction_of
from ppe_ddp.backends.shared_memory.shared_group import SharedMemoryGroup
from ppe_ddp.backends.shared_memory.shared_reservation import shared_memory
from ppe_ddp.backends.shared_memory.shared_steps import cut_gather, cut_scatter, cut_sum, serves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mpi4py import MPI
    from torch import Tensor
    from torch.distributed import Work

    from ppe_ddp.backends.mpi.mpi_options import MpiOptions
    from ppe_ddp.backends.mpi.mpi_waits import Waits
    from ppe_ddp.backends.shared_memory.shared_steps import Step

_Kind: Any = ReduceOp.RedOpType
# Measured: a message is faster for less than 0.5 to 1 MB, and for an all-gather of less than 4 MB.
_GATHERED_PART = 16


class _SharedSteps(NamedTuple):
    """One collective on this way: who takes its steps, and whether nothing has to be copied for them."""

    group: SharedMemoryGroup
    steps: Iterator[Step]
    is_shared: bool


class SharedMemoryRouting:
    """The way through the memory of one node, for the ranks of one communicator.

    It is opened by the first collective that is large enough for it, in which all ranks take part.

    Args:
        comm: The communicator.
        waits: How to wait.
        options: The same on every rank.
    """

    def __init__(self, comm: MPI.Intracomm, waits: Waits, options: MpiOptions) -> None:
        self._comm = comm
        self._rank = comm.Get_rank()
        self._size = comm.Get_size()
        self._waits = waits
        self._options = options
        self._is_wanted = self._size > 1 and options.shared_memory and not options.gpu_aware
        self._is_connected = False
        self._group: SharedMemoryGroup | None = None
        self._routes: dict[str, Callable[..., _SharedSteps | None]] = {"all_reduce": self._all_reduce}
        if options.shared_parts:
            self._routes |= {"reduce_scatter": self._reduce_scatter, "all_gather": self._all_gather}

    @property
    def is_open(self) -> bool:
        """Whether collectives may go this way; whether they do is known at the first of them."""
        is_possible = self._group is not None or not self._is_connected
        return self._is_wanted and is_possible and shared_memory() is not None

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Shared memory for a tensor of zeros."""
        memory = shared_memory()
        assert memory is not None
        return memory.allocate(numel, dtype)

    def drain(self) -> None:
        """Wait until nothing of it is under way."""
        if self._group is not None:
            self._group.drain()

    def start(self, what: str, result: Any, *arguments: Any) -> Work | None:
        """Begin a collective whose input this process holds in shared memory.

        Args:
            what: ``"all_reduce"``, ``"reduce_scatter"`` or ``"all_gather"``; nothing else goes this way.
            result: What the Work's ``result()`` gives.
            *arguments: As :class:`MpiCollectives` takes them.

        Returns:
            None where this is not the way of these tensors; nothing has happened then.
        """
        route = self._route(what, arguments)
        if route is None or not route.is_shared:
            return None
        return route.group.start(route.steps, result)

    def run(self, what: str, *arguments: Any) -> bool:
        """Do a collective of plain tensors, and wait for it; False, with nothing done, where this is not its way."""
        route = self._route(what, arguments)
        if route is None:
            return False
        route.group.run(route.steps)
        return True

    def _route(self, what: str, arguments: tuple[Any, ...]) -> _SharedSteps | None:
        known = self._routes.get(what)
        return known(*arguments) if self._is_wanted and known is not None else None

    def _all_reduce(self, tensor: Tensor, op: Any) -> _SharedSteps | None:
        group = self._group_for(tensor, op.op, tensor)
        if group is None:
            return None
        flat, is_shared = _numbers(tensor, op.op), group.holds(tensor)
        return _SharedSteps(group, cut_sum(flat, op.op, group.piece_bytes, is_shared=is_shared), is_shared)

    def _reduce_scatter(self, output: Tensor, tensor: Tensor, op: Any) -> _SharedSteps | None:
        group = self._group_for(tensor, op.op, tensor, output)
        if group is None or not self._match(output, tensor):
            return None
        tensor = self._apart(tensor, output, tensor)
        rows, part = _numbers(tensor, op.op).view(self._size, -1), _numbers(output, op.op)
        is_shared = group.holds(tensor)
        return _SharedSteps(group, cut_scatter(part, rows, op.op, group.piece_bytes, is_shared=is_shared), is_shared)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> _SharedSteps | None:
        if output.nbytes < _GATHERED_PART * self._options.shared_bytes:
            return None
        group = self._group_for(output, None, tensor, output)
        if group is None or not self._match(tensor, output):
            return None
        tensor = self._apart(tensor, tensor, output)
        rows, share = _numbers(output, _Kind.SUM).view(self._size, -1), _numbers(tensor, _Kind.SUM)
        is_shared = group.holds(tensor)
        return _SharedSteps(group, cut_gather(rows, share, group.piece_bytes, is_shared=is_shared), is_shared)

    def _group_for(self, whole: Tensor, kind: Any, *tensors: Tensor) -> SharedMemoryGroup | None:
        """Where ``whole`` goes this way; its size and dtype are the same on every rank, so all come here together."""
        dtype = whole.dtype
        if whole.nbytes < self._options.shared_bytes or (kind is not None and dtype is torch.bool):
            return None
        kind = _Kind.SUM if kind is None else kind
        if not serves(reduction_of(dtype, kind).view, kind):
            return None
        if not self._is_connected:
            self._group = SharedMemoryGroup.connect(self._comm, self._waits, self._options.shared_piece_bytes)
            self._is_connected = True
        return self._group if all(map(is_plain, tensors)) else None

    def _match(self, part: Tensor, whole: Tensor) -> bool:
        return part.dtype is whole.dtype and part.numel() * self._size == whole.numel()

    def _apart(self, tensor: Tensor, part: Tensor, whole: Tensor) -> Tensor:
        """The input, or a copy where input and output overlap and it is not this rank's part of the whole that does."""
        is_own = part.data_ptr() == whole.data_ptr() + self._rank * part.nbytes
        return tensor if is_own or not overlap(part, whole) else tensor.clone()


def _numbers(tensor: Tensor, kind: Any) -> Tensor:
    """The elements in a row, complex numbers as two real ones."""
    flat = tensor.detach().view(-1)
    dtype = reduction_of(tensor.dtype, kind).view
    return flat if dtype is flat.dtype else flat.view(dtype)
