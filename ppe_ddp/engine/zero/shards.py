"""The interface between a distributed optimizer (ZeRO-1) and a model with reduce-scattered gradients; even shards.

    parameters   |    A    |  B  |     C     |          in the layout of the model's wrapper
    shards       | 0  |  1    |   2   |  3   |          each rank owns a range of each parameter, perhaps an empty one

The optimizer knows neither buffers nor collectives. It asks for the gradients of this rank's shards, writes new values,
and lets the wrapper gather the parameters, unit by unit. A wrapper without buffers cuts each parameter by itself:

    parameter A  (5 elements)     0 1 2 | 3 4          rank 0 owns 0 1 2, rank 1 owns 3 4
    parameter B  (4 elements)     5 6   | 7 8
    rows         chunk 0 of all   0 1 2 5 6            the message: one row a rank, so that rows can be
                 chunk 1 of all   3 4 . 7 8            reduce-scattered and all-gathered in equal parts

Any set of parameters can be laid out as such rows, so each step may have other buckets. A tensor is flattened in the
order of its memory if that is dense (``channels_last`` too), else in the order of indices.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import ProcessGroup

from ppe_ddp.contracts import Waitable
from ppe_ddp.engine.failures import CLIP
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.peer_processes import Activity
from ppe_ddp.engine.plan import ParameterSpec
from ppe_ddp.torch_internals import chunk_cat


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of one parameter that this rank updates."""

    parameter: nn.Parameter  # whole on every rank
    spec: ParameterSpec  # of the parameter
    start: int  # first element, counted in the flattened parameter
    stop: int  # one behind the last; equal to ``start`` for an empty shard

    @property
    def name(self) -> str:
        """The parameter's name in the module."""
        return self.spec.name

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor like the parameter, 1-D: a view if its memory has the spec's layout."""
        return flattened(whole, self.spec)[self.start : self.stop]


@dataclass
class FailedUpdate:
    """A step of optimizers that has failed on this rank, for one model or several of the same ranks; one tells all."""

    is_told: bool = False


class Copies:
    """Tells which shards are copies of another rank's, so that a norm counts each element once. Here, none are.

    Attributes:
        parents: The user's groups whose ranks agree on properties of the whole model: the norm of gradients, and inf.
        are_splits_marked: Whether it is known which parameters are split over ranks, and which are copies.
        are_of_parts: Whether ranks may have different parts of the model, and so different parameters with gradients.
    """

    are_splits_marked = True
    are_of_parts = False

    def __init__(self, groups: Groups, *parents: ProcessGroup) -> None:
        self._groups = groups
        self.parents: Sequence[ProcessGroup] = parents or (groups.parent,)

    @property
    def is_split(self) -> bool:
        """Whether ranks with other parts of a layer or of the pipeline take part in the agreement."""
        return len(self.parents) > 1

    @contextmanager
    def agreeing(self) -> Generator[None, None, None]:
        """A context in which all ranks that have a part of the model agree; it reports an error to the other ranks.

        Raises PeerAbortedError if another rank has raised, CommunicationError if a rank is lost.
        """
        try:
            yield
        except BaseException as error:
            if (instead := self._groups.fail(error, CLIP)) is not None:
                raise instead from error
            raise

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce ``tensor`` over these ranks, in place; called in :meth:`agreeing` on all of them."""
        groups = self._groups
        groups.failures.wait(dist.all_reduce(tensor, op, group=groups.buckets, async_op=True), tensor.device)

    def note_optimizer(self, names: Collection[str], others: Collection[str]) -> None:  # here, ranks have the same
        """Note that a distributed optimizer was made for the parameters ``names``; those of ``others`` go on."""

    def has_inf(self) -> bool:
        """Whether this rank has infinity or NaN in gradients of another optimizer, with which this one is skipped."""
        return False

    def check_scaling(self) -> None:  # here, all ranks have the same optimizers
        """Check that all ranks have as many optimizers, in each of which a GradScaler looks for inf on all of them."""

    def leave(self, error: BaseException) -> None:  # here, the gather of parameters tells all ranks
        """Tell ranks outside the group that an optimizer's step has failed here with ``error``."""

    def note_failed_update(self, failure: FailedUpdate) -> None:  # here, the gather of parameters tells all ranks
        """Tell ranks that have copies of the same parameters that an optimizer's step has failed here."""

    def note_load(self, *, is_of_all: bool) -> None:
        """Note that this rank has loaded, or all ranks have, so that a failed update makes no difference any more."""

    def check_updates(self) -> None:
        """Raise UnusableError if other ranks may have other copies: an update has failed here since the last load."""

    def counts(self, shard: Shard, names: set[str]) -> bool:
        """Whether ``shard`` counts in the norm; ``names``, the parameters counted so far, is changed in place."""
        return True

    def part_of(self, shard: Shard) -> str:
        """Which part of the model the parameter of ``shard`` is; empty if all ranks have the same one under its name.

        It has the place of this rank in each group whose ranks have other ones: "0 of 2 pipeline stages; 1 of 2 ...".
        """
        return ""


class ShardedModel(ABC):
    """The interface of a wrapper to a distributed optimizer. The shards of all ranks cover each parameter once.

    Attributes:
        shards: One for each trainable parameter, the same parameters in the same order on every rank.
        units: Positions in ``shards`` of the parameters that are gathered together, in the order in which a
            forward is expected to need them. Each parameter is in one unit.
        copies: Tells which shards are copies of another rank's.
    """

    groups: Groups
    """The groups in which the wrapper communicates."""
    has_even_shards = True
    """Whether each rank owns the chunk of each flattened parameter that ``torch.chunk`` would give it."""
    shards: Sequence[Shard]
    units: Sequence[Sequence[int]]
    copies: Copies
    _round = 0, 0  # a step, and how often parameters were gathered after its backward: by one optimizer after another

    def begin_gather(self) -> None:
        """Note that one more optimizer begins to gather its parameters; every rank calls it, also with none to send."""
        step, count = self._round
        self._round = self.groups.step, count + 1 if step == self.groups.step else 1

    def note_gather(self, activity: Activity) -> None:
        """Write to this rank's page how far the last gather is."""
        self.groups.note(activity, self._round[1])

    @property
    def group(self) -> ProcessGroup:
        """The ranks that share the parameters."""
        return self.groups.parent

    def require_same(  # noqa: B027  # some do not compare them
        self, what: str, *titles: str, watched: Mapping[str, Callable[[], Sequence[str]]]
    ) -> None:
        """Let the next backward raise on all ranks if they differ in the ``titles`` that describe ``what``.

        Let later ones raise if they differ in what ``watched`` return then; see ``Negotiation.use_plug()``.
        """

    @property
    @abstractmethod
    def is_synchronized(self) -> bool:
        """Whether all accumulated gradients are averaged, so that ``gradients()`` does not raise."""

    @abstractmethod
    def gradients(self) -> list[Tensor | None]:
        """The averages after a synchronized backward: for each shard a 1-D tensor of its elements, or None."""

    @abstractmethod
    def attach(self, index: int, weight: Tensor) -> None:
        """Attach ``weight`` (1-D, ``shard.numel``), which the optimizer updates in place of the shard at ``index``.

        From now on the shard's gradient is in ``weight.grad``, in the dtype of ``weight``; see
        :meth:`assign_gradients`.
        """

    @abstractmethod
    def assign_gradients(self) -> list[bool]:
        """Bring ``.grad`` of all attached weights up to date, before the optimizer reads them.

        The optimizer may change such a gradient (to unscale, to clip), in place or by assigning another tensor. The
        change stays until the next synchronization, which adds to the gradient unless it was cleared. (A wrapper that
        accumulates gradients in memory of its own adds there, and replaces an assigned tensor.)

        Returns:
            For each shard, whether some rank has a gradient: the same on every rank.

        Raises:
            RuntimeError: There are gradients that no synchronization has averaged.
        """

    @abstractmethod
    def write(self, index: int, values: Tensor) -> None:
        """Set the shard at ``index`` to ``values`` (1-D, ``shard.numel``, any floating dtype); local."""

    @abstractmethod
    def write_in_place(self, indices: Sequence[int]) -> None:
        """Note that the optimizer has written new values of the shards at ``indices`` into the parameters."""

    @abstractmethod
    def gather(self, unit: int) -> Waitable | None:
        """Start to gather the written shards. Every rank calls this for the same units in the same order."""

    @abstractmethod
    def install(self, unit: int) -> None:
        """Give the parameters of ``unit`` their new values; called when the result of ``gather(unit)`` has arrived."""

    def abandon(self, unit: int | None = None) -> None:  # noqa: B027  # some keep nothing beside the parameters
        """Forget written shards and gathers in flight after a failure; with ``unit``, only the gather of that unit."""

    @abstractmethod
    def zero_grad(self, indices: Sequence[int], *, set_to_none: bool = True) -> None:
        """Clear the gradients of these shards, also in ``.grad``, as ``zero_grad`` of any optimizer does."""


def chunk_of(numel: int, world_size: int) -> int:
    """The length of a chunk, as in ``torch.chunk``; the last chunks may be shorter or empty."""
    return -(-numel // world_size)


def bounds_of(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Start and stop of the chunk of ``rank``."""
    chunk = chunk_of(numel, world_size)
    return min(rank * chunk, numel), min((rank + 1) * chunk, numel)


def is_dense(tensor: Tensor, spec: ParameterSpec) -> bool:
    """Whether the memory of ``tensor``, read in order, is the flattened tensor."""
    return tensor.layout is torch.strided and tuple(tensor.stride()) == spec.stride


def flattened(tensor: Tensor, spec: ParameterSpec) -> Tensor:
    """Flatten ``tensor`` to one dimension: a view of its memory if that is dense, else a copy."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if not is_dense(tensor, spec):
        laid_out = torch.empty_strided(spec.shape, spec.stride, dtype=tensor.dtype, device=tensor.device)
        tensor = laid_out.copy_(tensor)
    return tensor.as_strided((spec.numel,), (1,))


class Rows:
    """The layout of some flattened parameters as rows: row r has the r-th chunk of each parameter."""

    def __init__(self, specs: Sequence[ParameterSpec], rank: int, world_size: int) -> None:
        numels = [spec.numel for spec in specs]
        self._world_size = world_size
        self._chunks = [chunk_of(numel, world_size) for numel in numels]
        self.width = sum(self._chunks)  # of a row
        self._offsets = [0, *accumulate(self._chunks)][:-1]
        own = [stop - start for start, stop in (bounds_of(numel, rank, world_size) for numel in numels)]
        self._short = [(k, size) for k, size in enumerate(own) if size != self._chunks[k]]
        self.is_full = not self._short  # no chunk of this rank is padded
        self.numel = self.width * world_size  # of all rows

    def fill(self, rows: Tensor, flats: Sequence[Tensor]) -> None:
        """Copy flattened tensors into ``rows`` (world size x width); padding becomes zero.

        A tensor whose first dimension is a multiple of the world size need not be flattened.
        """
        present = [flat for flat in flats if flat.numel()]
        chunk_cat(present, self._world_size, out=rows)

    def parts(self, row: Tensor) -> list[Tensor]:
        """Views of this rank's row: its chunk of each parameter, without padding."""
        parts = list(row.split(self._chunks))
        for k, size in self._short:
            parts[k] = parts[k][:size]
        return parts

    def pairs(self, rows: Tensor, flats: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Views of ``flats`` and of ``rows`` that hold the same elements, in pairs, for a copy."""
        whole: list[Tensor] = []
        cut: list[Tensor] = []
        for flat, chunk, offset in zip(flats, self._chunks, self._offsets, strict=True):
            if chunk == 0:
                continue
            full = flat.numel() // chunk
            rest = flat.numel() - full * chunk
            whole.append(flat[: full * chunk].view(full, chunk))
            cut.append(rows[:full, offset : offset + chunk])
            if rest:
                whole.append(flat[full * chunk :])
                cut.append(rows[full, offset : offset + rest])
        return whole, cut
