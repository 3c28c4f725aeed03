"""Exchanges whether a synchronization went well on every rank, and makes the error to raise where it did not."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from ppe_ddp.engine.failures import reason_of
from ppe_ddp.engine.json_collectives import all_gather_json
from ppe_ddp.errors import NonFiniteGradientError, PeerAbortedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.megatron.reduction_group import ReductionGroup

_SOME = 5


class RankStatus(enum.IntEnum):
    """The status of one rank, which it sends beside its last bucket."""

    FINE = 0
    ABORTED = 1
    NON_FINITE = 2


class StepStatus:
    """Collects the statuses of the ranks, and keeps the error until :meth:`raise_if_bad`.

    Args:
        reduction_groups: The groups whose ranks exchange statuses.
    """

    def __init__(self, reduction_groups: Sequence[ReductionGroup]) -> None:
        self._reduction_groups = reduction_groups
        self._non_finite: list[str] = []
        self._error: Exception | None = None
        self._failure = ""

    def note_failure(self, error: BaseException) -> None:
        """Note that the communication of this step has ended with ``error``, which is the user's already."""
        # as text: an error holds the frames that have raised it, and those the connections
        if isinstance(error, PeerAbortedError):
            self._failure = str(error)
        else:
            self._failure = (
                f"rank {self._reduction_groups[0].groups.rank}: this step has failed here already, as this rank's own "
                f"backward or its part in the communication raised {reason_of(error)}. Its gradients are not averages: "
                "call zero_grad_buffer() and go on with the next step"
            )

    def forget_failure(self) -> None:
        """Another step begins, or the failure is being raised."""
        self._failure = ""

    @property
    def has_failed(self) -> bool:
        """Whether the communication of this step has ended: the other ranks will do nothing more for it."""
        return bool(self._failure)

    def note_non_finite(self, names: Iterable[str]) -> None:
        """Note that the gradients of these parameters are NaN or infinite on this rank."""
        self._non_finite.extend(names)

    @property
    def status(self) -> RankStatus:
        """The status of this rank, as far as numbers are concerned."""
        return RankStatus.NON_FINITE if self._non_finite else RankStatus.FINE

    def collect(self, statuses: Sequence[bytes], *, aborted_here: bool) -> None:
        """Evaluate the statuses of all ranks, one byte a rank for each reduction group; every rank must call this.

        Where a rank has found NaN or infinity, all ranks of the reduction group exchange the names.
        """
        for reduction_group, of_ranks in zip(self._reduction_groups, statuses, strict=True):
            if RankStatus.NON_FINITE in of_ranks:
                tables = all_gather_json(self._non_finite, reduction_group.groups.control)
                self._error = self._error or _non_finite(tables, reduction_group.groups)
        for reduction_group, of_ranks in zip(self._reduction_groups, statuses, strict=True):
            aborted = [rank for rank, status in enumerate(of_ranks) if status == RankStatus.ABORTED]
            if aborted and not aborted_here:
                self._error = PeerAbortedError(
                    f"rank {reduction_group.groups.rank}: the backward of rank {', '.join(map(str, aborted))} raised "
                    "an error, so the gradients of this step are not the average of all; call zero_grad_buffer() and "
                    "go on with the next step, or look at that rank's traceback"
                )
        self._non_finite.clear()

    def raise_if_bad(self) -> None:
        """Raise what went wrong since the last call, once."""
        failure, self._failure = self._failure, ""
        error, self._error = self._error, None
        if failure:
            raise PeerAbortedError(failure)
        if error is not None:
            raise error


def _non_finite(tables: Sequence[Sequence[str]], groups: Groups) -> NonFiniteGradientError:
    found = [
        f"rank {rank} in {', '.join(map(repr, names[:_SOME]))}"
        + (f" and {len(names) - _SOME} more" if len(names) > _SOME else "")
        for rank, names in enumerate(tables)
        if names
    ]
    return NonFiniteGradientError(
        f"NaN or infinity in local gradients, before they were averaged: {'; '.join(found)} (ranks of the "
        f"{groups.world_size} that average them). The gradients of this step are of no use: call zero_grad_buffer(), "
        "and look at the data, the learning rate or the loss scale of that rank"
    )
