"""Reads, takes and sets the ``.grad`` of the parameters, also of DTensors; looks for NaN."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Container, Generator, Iterable, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ppe_ddp.backends.cuda_device import CudaDevice
from ppe_ddp.backends.memory_pool import Allocator
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.memory import BucketBuffers, lies_in_bucket
from ppe_ddp.engine.module import ModuleState, is_distributed, local_tensor
from ppe_ddp.engine.negotiation import Negotiation
from ppe_ddp.engine.zero.sharded_gradient import ShardedGradient, local_of, take_local
from ppe_ddp.errors import NonFiniteGradientError
from ppe_ddp.torch_internals import EXISTS, GRADIENT, storage_users, uncompiled_hook
from ppe_ddp.waiting import Probe


class Gradients:
    """Owns the buffers and all access to ``.grad``. Gradients are accumulated on ``streams``; None on CPUs."""

    _all: ClassVar[weakref.WeakSet[Gradients]] = weakref.WeakSet()
    """Those of all wrappers: autograd may give parameters of several wrappers one memory for their gradients."""

    def __init__(self, module_state: ModuleState, allocate: Allocator, streams: GradientStreams | None) -> None:
        self._parameters: Sequence[nn.Parameter] = module_state.parameters
        self._specs = module_state.specs
        self._streams = streams
        distributed = DistributedGradients(module_state.distributed, module_state.names)
        # None if no parameter is a DTensor: it is looked at for every gradient.
        self._distributed = distributed if distributed else None
        self.buffers = BucketBuffers(allocate)
        self.shared: list[int] = []
        """Parameters whose gradients shared their memory with another one's when the last backward began."""
        self.in_place: set[int] = set()
        """Parameters whose gradients then lay in memory that the user holds as well: averages are written there."""
        self._all.add(self)

    def existing(self, reached: bytes | bytearray) -> bytes:
        """One byte a parameter: whether it is in ``reached`` or already has a gradient, other than averaged shards."""
        mask = bytearray(reached)
        grads = list(map(GRADIENT, self._parameters))
        self.shared, self.in_place = [], set()
        if any(map(EXISTS, grads)):
            held = [(i, local) for i, grad in enumerate(grads) if (local := local_of(grad)) is not None]
            if self._distributed is not None:
                held = [(i, local_tensor(gradient)) for i, gradient in held]
            self._find_shared_memory(held)
            for i, _ in held:
                mask[i] = 1
        return bytes(mask)

    def mask(self) -> bytes:
        """One byte a parameter: whether it has a gradient, other than averaged shards."""
        return bytes(local_of(grad) is not None for grad in map(GRADIENT, self._parameters))

    def _find_shared_memory(self, held: list[tuple[int, Tensor]]) -> None:
        """Set :attr:`shared` and :attr:`in_place` for the gradients from before this backward."""
        dense = [(i, gradient) for i, gradient in held if not gradient.is_sparse]
        addresses = [gradient.data_ptr() for _, gradient in dense]
        others = [k for k, address in enumerate(addresses) if address and not lies_in_bucket(dense[k][1])]
        if used := {k: users for k in others if (users := storage_users(dense[k][1])) > 1}:
            own = Counter(map(_storage, self._of_all_wrappers()))  # autograd gives equal gradients one memory
            self.in_place = {dense[k][0] for k, users in used.items() if users > own[_storage(dense[k][1])]}
        if len(set(addresses)) < len(addresses):
            counts = Counter(filter(None, addresses))  # an empty tensor has the address 0
            self.shared = [i for (i, _), address in zip(dense, addresses, strict=True) if counts[address] > 1]

    @classmethod
    def _of_all_wrappers(cls) -> list[Tensor]:
        """The dense gradients of all wrappers' parameters, each once."""
        parameters = {id(parameter): parameter for one in list(cls._all) for parameter in one._parameters}
        found = [local_of(gradient) for gradient in map(GRADIENT, parameters.values())]
        return [local_tensor(gradient) for gradient in found if gradient is not None and not gradient.is_sparse]

    @torch.no_grad()
    def multiply(self, factor: float, *, but: Container[int]) -> None:
        """Multiply all gradients by ``factor``, but those of parameters whose identities are in ``but``.

        It is done in place, also where the user holds the memory, unless autograd has given others the same memory.
        """
        self.existing(bytes(len(self._parameters)))
        for i, parameter in enumerate(self._parameters):
            if id(parameter) in but or (gradient := parameter.grad) is None:
                continue
            has_own = i not in self.shared and (
                i in self.in_place
                or gradient.is_sparse
                or type(gradient) is ShardedGradient
                or storage_users(local_tensor(gradient)) == 1
            )
            if has_own:
                gradient.mul_(factor)
            else:
                parameter.grad = gradient * factor

    def take(self, indices: Sequence[int]) -> list[Tensor | None]:
        """Take gradients out of ``.grad``, which is set to None (averaged shards stay); None for a missing gradient."""
        parameters = self._parameters
        taken: list[Tensor | None] = list(map(GRADIENT, map(parameters.__getitem__, indices)))
        if self._distributed is not None:
            taken = [g if g is None else self._distributed.local(i, g) for i, g in zip(indices, taken, strict=True)]
        if ShardedGradient in set(map(type, taken)):
            taken = [take_local(parameters[i]) for i in indices]
        else:
            for i in indices:
                parameters[i].grad = None
        if self._streams is not None:
            self._streams.wait_for_gradients(taken)
        for k, gradient in enumerate(taken):
            if gradient is None:
                continue
            if gradient.is_sparse and not self._specs[indices[k]].sparse:
                taken[k] = gradient.to_dense()
            elif indices[k] in self.shared:  # the averages may differ, so each needs its own memory
                taken[k] = gradient.clone()
        return taken

    @torch.no_grad()
    def drop(self, indices: Sequence[int], aside: Mapping[int, Tensor]) -> None:
        """Drop gradients, with those that were taken out of ``.grad`` and set ``aside``; :attr:`in_place` become 0."""
        kept = self.in_place.difference(self.shared).intersection(indices)
        self.put_back([(i, gradient) for i, gradient in aside.items() if i in kept])
        self.take([i for i in indices if i not in kept])
        for gradient in filter(EXISTS, map(GRADIENT, map(self._parameters.__getitem__, kept))):
            gradient.zero_()

    def present(self, indices: Sequence[int]) -> list[int]:
        """Those of ``indices`` whose parameters have a gradient."""
        return [i for i in indices if self._parameters[i].grad is not None]

    def take_present(self, indices: Sequence[int]) -> dict[int, Tensor]:
        """As :meth:`take`, but only the gradients that exist, by parameter index."""
        found = zip(indices, self.take(indices), strict=True)
        return {i: gradient for i, gradient in found if gradient is not None}

    def hand_over(self, indices: Sequence[int], gradients: list[Tensor]) -> None:
        """Set ``.grad`` to these averages, or add them to a gradient that is there already."""
        parameters = self._parameters
        for i, gradient in zip(indices, gradients, strict=True):
            if self._distributed is not None:
                gradient = self._distributed.whole(i, gradient)
            parameter = parameters[i]
            there = parameter.grad
            # A ShardedGradient is left from another wrapper with a DistributedOptimizer; this average is whole.
            if there is None or type(there) is ShardedGradient:
                parameter.grad = gradient
            else:
                there.add_(gradient)

    @torch.no_grad()
    def put_back(self, gradients: Iterable[tuple[int, Tensor]]) -> None:
        """Put this rank's own gradients back into ``.grad``, and add gradients that have arrived there since."""
        for i, gradient in gradients:
            if self._distributed is not None:
                gradient = self._distributed.whole(i, gradient)
            parameter = self._parameters[i]
            there = parameter.grad
            if there is None:
                _set(parameter, gradient)
            elif type(there) is ShardedGradient:
                there.add_(gradient)
            elif gradient.is_sparse:  # torch adds sparse to dense, not dense to sparse
                parameter.grad = there + gradient
            else:
                parameter.grad = gradient + there


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@torch.no_grad()
def copied_gradients(parameters: Sequence[nn.Parameter]) -> Callable[[Collection[int]], None]:
    """Copy this rank's gradients; returns what puts them back, each in the tensor that it was in.

    It leaves out the parameters whose identities it is given.
    """
    there = list(map(GRADIENT, parameters))
    copies = [None if (own := local_of(grad)) is None else local_tensor(own).clone() for grad in there]

    @torch.no_grad()
    def restore(but: Collection[int]) -> None:
        for parameter, gradient, copy in zip(parameters, there, copies, strict=True):
            if id(parameter) in but:
                continue
            if copy is not None and type(gradient) is Tensor and _FORM(gradient) != _FORM(copy):
                gradient.data = copy
            _set(parameter, gradient)
            if type(gradient) is ShardedGradient:
                gradient.content.local = copy
            elif copy is not None and (copy.is_sparse or not torch.equal(local_tensor(gradient), copy)):
                local_tensor(gradient).copy_(copy)

    return restore


_FORM = attrgetter("dtype", "device", "shape")


def _set(parameter: nn.Parameter, gradient: Tensor | None) -> None:
    """Set ``.grad``, also to a gradient that the user has given other contents (``.grad.data = ...``)."""
    if type(gradient) is not Tensor or gradient.is_sparse or _FORM(gradient) == _FORM(parameter):
        parameter.grad = gradient
        return
    data, gradient.data = gradient.data, parameter.data  # torch looks at the form only as a gradient is set
    parameter.grad = gradient
    gradient.data = data


def redistribute_gradients(parameter: Any) -> RemovableHandle:
    """Give each gradient that arrives for ``parameter``, a DTensor, its mesh and placements."""
    handle: RemovableHandle = parameter.register_hook(partial(_redistributed, parameter.placements))
    return handle


@uncompiled_hook
def _redistributed(placements: Any, gradient: Any) -> Any:
    if not is_distributed(gradient) or tuple(gradient.placements) == tuple(placements):
        return None
    return gradient.redistribute(placements=placements)


class DistributedGradients:
    """Takes the local tensors of gradients that are DTensors, and makes DTensors of averages.

        parameter    its local tensor stands for it in specs, buckets and broadcasts
        gradient     redistributed like its parameter when it arrives; its local tensor goes into the bucket
        average      becomes the local tensor of a DTensor like the parameter

    A gradient often has other placements than its parameter: partial sums for the norms of sequence parallelism, all
    rows for a sharded embedding. Redistributing communicates within the parameter's own mesh. All ranks of that mesh go
    through the same graph, so autograd accumulates in the same order on them; buckets are launched in no such order.
    Hence a gradient is redistributed when it is accumulated, not when its bucket is launched.

    ``parameters`` are those that are DTensors, by their index.
    """

    def __init__(self, parameters: Mapping[int, Any], names: Sequence[str]) -> None:
        self._parameters = parameters
        self._names = names
        self._with_graph: dict[int, Any] = {}

    def __bool__(self) -> bool:
        """Whether any parameter is a DTensor."""
        return bool(self._parameters)

    def local(self, index: int, gradient: Any) -> Tensor:
        """The local tensor of the gradient of parameter ``index``.

        Raises:
            ValueError: The gradient is no DTensor with the parameter's placements.
        """
        parameter = self._parameters.get(index)
        if parameter is None:
            return gradient  # type: ignore[no-any-return]
        if not is_distributed(gradient) or tuple(gradient.placements) != tuple(parameter.placements):
            found = getattr(gradient, "placements", "no placements")
            raise ValueError(
                f"the gradient of parameter {self._names[index]!r} has {found}, and the parameter "
                f"{parameter.placements}: set .grad to a DTensor like its parameter, by "
                "gradient.redistribute(placements=parameter.placements)"
            )
        if not gradient.requires_grad:
            return local_tensor(gradient)
        self._with_graph[index] = gradient
        with torch.enable_grad():
            return gradient.to_local()  # type: ignore[no-any-return]

    def whole(self, index: int, gradient: Tensor) -> Tensor:
        """A DTensor like parameter ``index`` with the local tensor ``gradient``.

        If :meth:`local` has taken ``gradient`` out of a DTensor with a graph, it returns that DTensor.
        """
        parameter = self._parameters.get(index)
        if parameter is None:
            return gradient
        before = self._with_graph.pop(index, None)
        if before is not None and local_tensor(before).data_ptr() == gradient.data_ptr():
            return before  # type: ignore[no-any-return]
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            gradient,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


class GradientStreams:
    """The CUDA streams that gradients are accumulated on.

    Autograd accumulates the gradient of a parameter on the stream that was current when the parameter's accumulation
    node was made. The stream that has called ``backward()`` waits for these streams only at the end. Before that, a
    hook reads gradients on the thread and stream of the parameter that has arrived last. So there is one rule. Before
    gradients are read, the reading stream waits for every stream that gradients are accumulated on, and their memory is
    not reused before the reading stream has read it.

    Args:
        parameters: The parameters. Those on CPUs are ignored.
        device: The functions of CUDA; tests pass a stand-in.
        kind: The device type.
    """

    def __init__(self, parameters: Sequence[Tensor], device: CudaDevice | None = None, kind: str = "cuda") -> None:
        self._api: CudaDevice = device or CudaDevice()
        self._devices = [parameter.device if parameter.device.type == kind else None for parameter in parameters]
        self._stream_of: dict[int, Any] = {}
        self._seen: dict[torch.device, list[Any]] = {each: [] for each in self._devices if each is not None}

    @staticmethod
    def of(parameters: Sequence[Tensor]) -> GradientStreams | None:
        """The streams of ``parameters``; None if all are on CPUs, which have no streams."""
        return GradientStreams(parameters) if any(parameter.is_cuda for parameter in parameters) else None

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self._api.is_capturing()

    def note_stream(self, index: int) -> None:
        """Note the current stream as that of parameter ``index``; called in the hook when its gradient arrives.

        The stream stays the same until the parameter gets another node (:meth:`forget_streams`).
        """
        device = self._devices[index]
        if device is None or index in self._stream_of:
            return
        stream = self._stream_of[index] = self._api.current_stream(device)
        if stream not in self._seen[device]:
            self._seen[device].append(stream)

    def knows_stream(self, index: int) -> bool:
        """Whether the stream of parameter ``index`` is known, or the parameter is on a CPU."""
        return self._devices[index] is None or index in self._stream_of

    def forget_streams(self, indices: Iterable[int]) -> None:
        """Forget the streams of these parameters, whose gradients may arrive on other ones from now on."""
        for i in indices:
            self._stream_of.pop(i, None)

    def wait_for_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Let this thread's current streams wait for all accumulation streams, before they read ``gradients``."""
        for device, seen in self._seen.items():
            current = self._api.current_stream(device)
            others = [stream for stream in seen if stream != current]
            if not others:
                continue
            for stream in others:
                current.wait_stream(stream)
            for gradient in gradients:
                if gradient is not None and gradient.device == device:
                    self._api.record_stream(gradient, current)


NON_FINITE = 2
"""The bit for NaN and infinity in a rank's status in the vote."""
_FEW = 1 << 12  # elements
_LARGE_BYTES = 16 << 10  # from this mean size on, sums are faster than the fused norm
_NAMED_RANKS = 4  # that the error names; each costs an exchange
_NAMED = 5  # parameters that the error names of each rank


class FiniteCheck:
    """Looks for NaN and infinity in the gradients of one backward before they are sent, and names them on all ranks.

    :meth:`look` computes the sum of each gradient, or one fused norm of many small ones, while they are in the cache.
    A sum is not finite if one of its elements is not. All sums are checked together before the vote. If one is not
    finite, each gradient is checked element by element, since a sum can overflow. The vote carries the result of each
    rank, so all ranks know of it before any average is handed over. The names of the parameters are exchanged only if a
    rank has found something.

    Args:
        names: The names of all parameters.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._found: set[int] = set()
        self._looked: list[tuple[int, Tensor]] = []
        self._totals: list[Tensor] = []

    @property
    def status(self) -> int:
        """This rank's status for the vote: :data:`NON_FINITE` if it has found something, else 0."""
        self._decide()
        return NON_FINITE if self._found else 0

    def look(self, indices: Iterable[int], gradients: Iterable[Tensor | None]) -> None:
        """Look at the gradients of these parameters, which must not change before the vote. On a GPU the host waits."""
        present = {i: _values(gradient) for i, gradient in zip(indices, gradients, strict=True) if gradient is not None}
        present = {i: values for i, values in present.items() if values.is_floating_point() or values.is_complex()}
        if not present:
            return
        self._looked += present.items()
        totals = _totals(list(present.values()))
        self._totals += totals
        if any(total.device.type != "cpu" for total in totals):  # the vote may be on another stream
            self._decide()

    def _decide(self) -> None:
        """Find out which gradients of the calls of :meth:`look` are not finite."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for total in self._totals:
            by_device.setdefault(total.device, []).append(total)
        if not all(bool(torch.stack(totals).sum().isfinite()) for totals in by_device.values()):
            self._found.update(i for i, values in self._looked if not bool(values.isfinite().all()))
        self._looked.clear()
        self._totals.clear()

    def is_fine_alone(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Look at ``.grad`` of all parameters; returns whether all are finite. For a group of one rank."""
        self.look(range(len(parameters)), [local_of(parameter.grad) for parameter in parameters])
        return self.status == 0

    def error(
        self, negotiation: Negotiation, groups: Groups, statuses: Sequence[int], indices: Sequence[int] | None = None
    ) -> Generator[Probe | None, None, NonFiniteGradientError]:
        """Exchange the names, as steps on all ranks, and make the error for them.

        ``statuses`` has each rank's status from the vote; at least one has :data:`NON_FINITE`. The masks of
        ``negotiation`` have the parameters ``indices``; by default all.
        """
        ranks = [rank for rank, status in enumerate(statuses) if status & NON_FINITE]
        indices = range(len(self._names)) if indices is None else indices
        names = [self._names[i] for i in indices]
        places = []
        for rank in ranks[:_NAMED_RANKS]:
            is_found = bytes(rank == groups.rank and i in self._found for i in indices)
            exchange = negotiation.start(is_found, 0, is_vote=True)
            yield exchange.done
            found = [*compress(names, negotiation.finish(exchange, b"").mask)]
            # Of experts only the rank itself knows the names here, as the others have other ones.
            places.append(self._place(rank, found or (self._own_names if rank == groups.rank else ())))
        return self._error(places, ranks, groups)

    def error_alone(self, groups: Groups) -> NonFiniteGradientError:
        """The error in a group of one rank, which exchanges no names."""
        return self._error([self._place(0, self._own_names)], [0], groups)

    @property
    def _own_names(self) -> Sequence[str]:
        return [self._names[i] for i in sorted(self._found)]

    def _place(self, rank: int, names: Sequence[str]) -> str:
        more = f" and {len(names) - _NAMED} more" if names[_NAMED:] else ""
        return f"rank {rank} in {', '.join(map(repr, names[:_NAMED])) or 'an expert'}{more}"

    def _error(self, places: Sequence[str], ranks: Sequence[int], groups: Groups) -> NonFiniteGradientError:
        others = f", and {len(ranks) - len(places)} more ranks" if len(ranks) > len(places) else ""
        error = NonFiniteGradientError(
            f"NaN or infinity in local gradients, before they were averaged: {'; '.join(places)}{others} (ranks of the "
            f"{groups.world_size} that average them). The gradients of this step are of no use: zero them, and "
            "look at the data, the learning rate or the loss scale of that rank"
        )
        error.job_rank = groups.job_rank_of(ranks[0])
        return error


def _values(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def has_nonzero(gradients: Iterable[Tensor]) -> bool:
    """Whether any element of ``gradients``, which may be sparse or sharded, is not zero; also elsewhere in DTensors.

    All ranks of the meshes of DTensors call it together.
    """
    parts: list[Any] = []
    for gradient in gradients:
        parts += map(_values, gradient.content.parts if isinstance(gradient, ShardedGradient) else [gradient])
    found = _is_nonzero([local_tensor(part) for part in parts])
    meshes = {part.device_mesh: part for part in parts if is_distributed(part)}
    for mesh, part in meshes.items():  # however many of them are nonzero here, once
        from torch.distributed.tensor import DTensor, Partial

        flag = torch.tensor(float(found), device=part.device)
        found = bool(DTensor.from_local(flag, mesh, [Partial()] * mesh.ndim, run_check=False).full_tensor())
    return found


def _is_nonzero(parts: Sequence[Tensor]) -> bool:
    large = []
    for part in parts:
        is_small = part.numel() <= _FEW
        # First the first row of each large one: mostly it has a nonzero, and counting all rows takes far longer.
        if (part if is_small else part[:1]).count_nonzero():
            return True
        if not is_small:
            large.append(part)
    return any(map(torch.count_nonzero, large))


def _totals(gradients: list[Tensor]) -> Sequence[Tensor]:
    """Sums or norms of ``gradients``; not all are finite if an element is not, or if elements are very large."""
    with torch.no_grad():
        if sum(gradient.nbytes for gradient in gradients) >= _LARGE_BYTES * len(gradients):
            return [gradient.sum() for gradient in gradients]
        return torch._foreach_norm(gradients, 2.0)
