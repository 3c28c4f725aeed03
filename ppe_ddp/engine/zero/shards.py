"""The contract between a distributed optimizer (ZeRO-1) and a model whose gradients are reduce-scattered.

    parameters   |    A    |  B  |     C     |          in the layout of the model's wrapper
    shards       | 0  |  1    |   2   |  3   |          each rank owns a range of each parameter, perhaps an empty one

The optimizer knows neither buffers nor collectives: it asks for the gradients of this rank's shards, writes new
values, and lets the wrapper gather the parameters, unit by unit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

    from ppe_ddp.contracts import Waitable
    from ppe_ddp.engine.groups import Groups


@dataclass(frozen=True, eq=False)
class Shard:
    """The part of one parameter that this rank updates.

    Attributes:
        parameter: Whole on every rank.
        name: The parameter's name in the module.
        start: First element, counted in the flattened parameter.
        stop: One behind the last; equal to ``start`` where this rank owns nothing of it.
    """

    parameter: nn.Parameter
    name: str
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start


class ShardedModel(ABC):
    """The interface of a wrapper to a distributed optimizer. The shards of all ranks cover each parameter once.

    Attributes:
        shards: One for each trainable parameter, the same parameters in the same order on every rank.
        units: Positions in ``shards`` of the parameters that are gathered together, in the order in which a
            forward is expected to need them. Each parameter is in one unit.
    """

    groups: Groups
    """Where the wrapper sends."""
    has_even_shards = True
    """Whether each rank owns the chunk of each flattened parameter that ``torch.chunk`` would give it."""
    shards: Sequence[Shard]
    units: Sequence[Sequence[int]]

    @property
    @abstractmethod
    def group(self) -> ProcessGroup:
        """The ranks that share the parameters."""

    @property
    def groups_of_model(self) -> Sequence[ProcessGroup]:
        """The groups over which, one after another, what is true of the whole model is agreed: norms, and inf."""
        return [self.group]

    def counts(self, index: int, _names: set[str]) -> bool:
        """Whether the shard at ``index`` adds to the norm of the model's gradients, and is no copy of another rank's.

        Args:
            index: Position in ``shards``.
            _names: Of copies that this rank has counted already; changed in place.
        """
        return True

    @property
    def are_splits_marked(self) -> bool:
        """Whether it is known which parameters are split over ranks, and which are copies."""
        return True

    @property
    def is_synchronized(self) -> bool:
        """Whether everything that was accumulated is averaged, so that ``gradients()`` does not raise."""
        return True

    @abstractmethod
    def gradients(self) -> list[Tensor | None]:
        """The averaged gradients after a synchronized backward, one for each shard.

        Returns:
            1-D tensors of ``shard.numel`` elements, or None where there is none.
        """

    @abstractmethod
    def attach(self, index: int, weight: Tensor) -> None:
        """Take ``weight`` (1-D, ``shard.numel``) as what the optimizer updates of the shard at ``index``.

        Its gradient is in ``weight.grad`` from now on, in its dtype; see :meth:`assign_gradients`.
        """

    @abstractmethod
    def assign_gradients(self) -> list[bool]:
        """Bring ``.grad`` of all attached weights up to date, before they are looked at.

        There is one such gradient, and the optimizer's changes to it (to unscale, to clip), in place or by another
        tensor in its place, stay until the next synchronization, which adds to it unless it was cleared. (Where
        gradients add up in memory of the wrapper's own, they add up there: a copy or another tensor is then replaced.)

        Returns:
            For each shard, whether there is a gradient on some rank: the same on every rank.

        Raises:
            RuntimeError: There are gradients that no synchronization has averaged.
        """

    @abstractmethod
    def write(self, index: int, values: Tensor) -> None:
        """Set the shard at ``index`` to ``values`` (1-D, ``shard.numel``, any floating dtype), on this rank only."""

    @abstractmethod
    def write_in_place(self, indices: Sequence[int]) -> None:
        """Note that the shards at ``indices`` have new values, which were written into the parameters themselves."""

    @abstractmethod
    def gather(self, unit: int) -> Waitable | None:
        """Start to gather what was written to all ranks; every rank calls this for the same units in the same order."""

    @abstractmethod
    def install(self, unit: int) -> None:
        """Called when ``gather(unit)`` was waited for: from here on the parameters have their new values."""

    def abandon(self) -> None:  # noqa: B027  # nothing where there is nothing beside the parameters
        """Forget what was written and what is being gathered: a rank has failed, and all will be written again."""

    def zero_grad(self, indices: Sequence[int], *, set_to_none: bool = True) -> None:
        """Clear the gradients of these shards, as ``zero_grad`` of any optimizer does.

        Here, only what has accumulated in ``.grad``; a wrapper that keeps gradients elsewhere clears those too,
        unless a call of its own is meant for that.
        """
        for index in indices:
            parameter = self.shards[index].parameter
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()
