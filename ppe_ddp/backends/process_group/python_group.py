"""Base classes of process groups in Python: torch's calls, translated to the collectives of one transport.

Apart from the transports because it is torch's side only: names under which torch finds a group, its many names for
one collective, and the forms in which it hands over arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, device
from torch.distributed import ProcessGroup, ReduceOp

from ppe_ddp.backends.group_internals import is_registered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from torch.distributed import Work

__all__ = ["SUM", "CollectiveGroup", "PythonGroup", "Transport", "op_of"]

SUM = ReduceOp(ReduceOp.SUM)


class Transport(Protocol):
    """The collectives of a transport, one method each; an ``op`` is a ReduceOp.

    What a method returns goes to :meth:`CollectiveGroup._run`, which the same transport defines.
    """

    def all_reduce(self, tensor: Tensor, op: Any) -> Any:
        """Reduce over the ranks, in place."""

    def reduce(self, tensor: Tensor, op: Any, root: int) -> Any:
        """Reduce over the ranks into that of rank ``root``; the others keep theirs."""

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        """Overwrite by that of rank ``root``."""

    def all_gather(self, output: Tensor, tensor: Tensor) -> Any:
        """Put the tensors of all ranks one after another into ``output``."""

    def all_gather_list(self, outputs: Sequence[Tensor], tensor: Tensor) -> Any:
        """Put rank i's ``tensor`` into ``outputs[i]``."""

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: Any) -> Any:
        """Reduce over the ranks; rank i gets the i-th of equal parts."""

    def reduce_scatter_list(self, output: Tensor, tensors: Sequence[Tensor], op: Any) -> Any:
        """Reduce ``tensors[i]`` over the ranks into rank i's ``output``."""

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Any:
        """Send the j-th part of ``tensor`` to rank j and receive rank i's part as the i-th of ``output``.

        Args:
            output: Changed in place.
            tensor: Of the same dtype, and of the same shape after dimension 0.
            output_splits: How many rows come from each rank; empty for equal parts.
            input_splits: How many rows go to each rank; empty for equal parts.
        """

    def all_to_all_list(self, outputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> Any:
        """Send ``tensors[j]`` to rank j, and receive rank i's tensor into ``outputs[i]``."""

    def gather(self, outputs: Sequence[Tensor], tensor: Tensor, root: int) -> Any:
        """Put rank i's ``tensor`` into ``outputs[i]`` of rank ``root``."""

    def scatter(self, output: Tensor, tensors: Sequence[Tensor], root: int) -> Any:
        """Put ``tensors[i]`` of rank ``root`` into rank i's ``output``."""


class _GroupOptions:
    """The options of a group, as torch and this library read them from ``_get_backend(device).options``."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout


class PythonGroup(ProcessGroup):
    """The identity of a group that torch.distributed made by a Python creator.

    Args:
        rank: This rank in the group.
        size: How many ranks the group has.
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

    def getBackendName(self) -> str:
        """The name that the backend is registered under."""
        return self._backend_name

    def name(self) -> str:
        """The name that the backend is registered under."""
        return self._backend_name

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
        # torch 2.15 has a recorder follow each group that it has just made, unless it has no devices: which is how it
        # knows groups in Python, that cannot be followed. On those that have some, it raises.
        return [device(kind) for kind in self._types] if is_registered(self) else []

    @property
    def options(self) -> _GroupOptions:
        """The group's timeout, where torch's own backends have it."""
        return _GroupOptions(self._timeout)

    def _get_backend(self, _device: device) -> Any:
        return self

    # By these names torch's C++ part asks for them, in versions of torch after 2.13.
    def start_coalescing(self, device: device) -> None:
        """Begin calls that belong together."""
        self._start_coalescing(device)

    def end_coalescing(self, device: device) -> Work:
        """End them; what comes back stands for all."""
        return self._end_coalescing(device)

    def release(self, exchange: Callable[[str, Any], list[Any]]) -> None:
        """Give back what ``abort()`` could not, as other ranks used the group; called when all ranks have aborted it.

        Args:
            exchange: Brings a word of each rank, as JSON can write it, under a name, to all ranks.

        Raises:
            CommunicationError: Not all ranks have come to exchange words.
        """

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: the transport orders the collectives itself."""


class CollectiveGroup(PythonGroup):
    """A group over one transport: translates torch's calls to those of :class:`Transport`.

    A subclass sets ``_over`` and defines :meth:`_run`, messages and barrier.
    """

    _over: Transport

    def _run(self, what: str, calls: Sequence[tuple[Any, ...]], result: Any) -> Work:
        """Do what ``calls`` say, together.

        Args:
            what: The collective's name, for errors.
            calls: Methods of ``_over``, each with its arguments.
            result: What the Work's ``result()`` and future give.
        """
        raise NotImplementedError  # an abstract class would need another metaclass than torch's

    def allreduce(self, tensors: list[Tensor] | Tensor, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Reduce each tensor over the ranks, in place."""
        tensors, op = _listed(tensors), op_of(opts)
        return self._run("all_reduce", [(self._over.all_reduce, tensor, op) for tensor in tensors], tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Reduce each tensor over the ranks, in place."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor] | Tensor, opts: Any = None, op: Any = None) -> Work:  # type: ignore[override]
        """Reduce each tensor over the ranks, into that of one rank; the others keep theirs."""
        tensors = _listed(tensors)
        root, op = (opts, op_of(op)) if isinstance(opts, int) else (_root_of(opts), op_of(opts))
        return self._run("reduce", [(self._over.reduce, tensor, op, root) for tensor in tensors], tensors)

    def broadcast(self, tensors: list[Tensor] | Tensor, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """Overwrite each tensor by that of one rank."""
        tensors, root = _listed(tensors), _root_of(opts)
        return self._run("broadcast", [(self._over.broadcast, tensor, root) for tensor in tensors], tensors)

    def allgather(self, outputs: list[Any], inputs: list[Tensor] | Tensor, opts: Any = None) -> Work:
        """Put rank j's ``inputs[i]`` into ``outputs[i][j]``."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        return self._run("all_gather", _zipped(self._over.all_gather_list, outputs, inputs), outputs)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:
        """Put rank j's ``inputs[i]`` into ``outputs[j][i]``."""
        columns = [[row[index] for row in outputs] for index in range(len(inputs))]
        return self._run("all_gather_coalesced", _zipped(self._over.all_gather_list, columns, inputs), outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        """Put the tensors of all ranks one after another into ``output``."""
        return self._run("all_gather_single", [(self._over.all_gather, output, tensor)], [output])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Do what ``all_gather_single`` does for several tensors."""
        return self._run("all_gather_single_coalesced", _zipped(self._over.all_gather, outputs, inputs), outputs)

    def reduce_scatter(self, outputs: list[Tensor] | Tensor, inputs: list[Any], opts: Any = None) -> Work:  # type: ignore[override]
        """Reduce ``inputs[i][j]`` over the ranks into rank j's ``outputs[i]``."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        calls = _zipped(self._over.reduce_scatter_list, outputs, inputs, op_of(opts))
        return self._run("reduce_scatter", calls, outputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        """Reduce over the ranks; rank i gets the i-th of equal parts."""
        calls = [(self._over.reduce_scatter, output, tensor, op_of(opts))]
        return self._run("reduce_scatter_single", calls, [output])

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Do what ``reduce_scatter_single`` does for several tensors."""
        calls = _zipped(self._over.reduce_scatter, outputs, inputs, op_of(opts))
        return self._run("reduce_scatter_single_coalesced", calls, outputs)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Work:
        """Send each rank its rows, and receive its rows from each."""
        calls = [(self._over.all_to_all, output, tensor, output_splits, input_splits)]
        return self._run("all_to_all_single", calls, [output])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """Send ``inputs[j]`` to rank j, and receive rank i's tensor into ``outputs[i]``."""
        return self._run("all_to_all", [(self._over.all_to_all_list, outputs, inputs)], outputs)

    def gather(self, outputs: list[Any], inputs: list[Tensor] | Tensor, opts: Any = None) -> Work:  # type: ignore[override]
        """Put rank j's ``inputs[i]`` into ``outputs[i][j]`` of one rank; ``outputs`` is not looked at elsewhere."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        filled = outputs or [[]] * len(inputs)
        return self._run("gather", _zipped(self._over.gather, filled, inputs, _root_of(opts)), outputs or inputs)

    def scatter(self, outputs: list[Tensor] | Tensor, inputs: list[Any], opts: Any = None) -> Work:  # type: ignore[override]
        """Put ``inputs[i][j]`` of one rank into rank j's ``outputs[i]``; ``inputs`` is not looked at elsewhere."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        filled = inputs or [[]] * len(outputs)
        return self._run("scatter", _zipped(self._over.scatter, outputs, filled, _root_of(opts)), outputs)

    # The names of earlier versions of torch.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


def _zipped(
    call: Callable[..., Any], first: Sequence[Any], second: Sequence[Any], *arguments: Any
) -> list[tuple[Any, ...]]:
    return [(call, one, other, *arguments) for one, other in zip(first, second, strict=True)]


def _listed(tensors: list[Tensor] | Tensor) -> list[Tensor]:
    """The bindings of a ProcessGroup take one tensor, too."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


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
