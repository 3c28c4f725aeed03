"""The groups that split one model: collectives in duplicates of them, and one end for all where a rank fails.

data        rank 0 ── rank 2        averaged by the wrapper: NaN there is raised on both
tensor      rank 0 ── rank 1        here rank 1 learns of it, and leaves its wait at once
"""

from __future__ import annotations

import logging
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from ppe_ddp.backends.group_internals import kept_with
from ppe_ddp.contracts import probe
from ppe_ddp.engine.completion import run
from ppe_ddp.engine.failures import FINALIZE, reason_of
from ppe_ddp.engine.groups import Groups, renew_all
from ppe_ddp.engine.json_collectives import all_gather_json
from ppe_ddp.errors import AbortedError, DisagreementError, PeerAbortedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from ppe_ddp.contracts import Waitable
    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.megatron.parallel_groups import ParallelGroups

_NAMES = ("tensor", "pipeline", "embedding", "position_embedding")
logger = logging.getLogger("ppe_ddp")


class _Duplicate:
    """The duplicate of one group, which all wrappers of this process share: they use it one after another."""

    groups: Groups | None = None


class ModelParallel:
    """Collectives over the groups that split one model; all their ranks must make theirs together.

    Args:
        groups: The user's groups. Those of one rank are left out.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups = {
            name: _duplicate(parent)
            for name in _NAMES
            if (parent := getattr(groups, name)) is not None and dist.get_world_size(parent) > 1
        }
        self._distinct = [*{id(groups): groups for groups in self._groups.values()}.values()]
        self._waits_in: Groups | None = None

    def group(self, name: str) -> Groups | None:
        """The duplicates of a group by its name in :class:`ParallelGroups`; None where this rank is alone."""
        return self._groups.get(name)

    @contextmanager
    def step(self) -> Generator[None, None, None]:
        """Run one step's collectives: what is raised inside reaches the ranks of all groups.

        Raises:
            PeerAbortedError: A rank of one of the groups has failed.
            CommunicationError: A rank is lost.
        """
        try:
            self._renew()
            yield
        except BaseException as error:
            instead = self._give_up(error)
            if instead is None:
                raise
            raise instead from error
        finally:
            self._waits_in = None
            for groups in self._distinct:
                groups.step += 1

    def communicate(self, groups: Groups, start: Callable[[], Waitable], device: torch.device) -> None:
        """Wait for the collective that ``start`` begins in ``groups``, or until a rank of it reports a failure."""

        def steps() -> Steps:
            work = start()
            yield probe(work)
            groups.failures.wait(work, device)

        self._waits_in = groups
        run(steps())
        self._waits_in = None

    def all_reduce(self, groups: Groups, tensor: Tensor) -> None:
        """Sum ``tensor`` over ``groups``, in place."""
        self.communicate(groups, lambda: dist.all_reduce(tensor, group=groups.buckets, async_op=True), tensor.device)

    def agree(self, described: Mapping[str, Sequence[str]]) -> None:
        """Wait until all ranks of all groups have come here, about to send the same.

        Args:
            described: What is sent in which group, a line each.

        Raises:
            DisagreementError: On all ranks of a group, where they are about to send different things.
        """
        for groups in self._distinct:
            names = [name for name, one in self._groups.items() if one is groups]
            lines = [f"{name}: {line}" for name in names for line in described.get(name, ())]
            code = zlib.crc32("\n".join(lines).encode())
            extremes = torch.tensor([code, -code])
            self._vote(groups, extremes)
            if extremes[0] != -extremes[1]:
                self._waits_in = groups
                raise _disagreement(groups, all_gather_json(lines, groups.control))

    def _vote(self, groups: Groups, extremes: Tensor) -> None:
        """Find the maxima over the ranks; once more, with new connections, if a rank had failed after the last step."""
        mine = extremes.clone()

        def start() -> Waitable:
            work: Waitable = dist.all_reduce(extremes, dist.ReduceOp.MAX, group=groups.control, async_op=True)
            return work

        try:
            self.communicate(groups, start, extremes.device)
        except Exception as error:
            instead = groups.fail(error, FINALIZE) or error
            if not isinstance(instead, PeerAbortedError) or instead.step is None or instead.step >= groups.step:
                raise instead from error
            logger.warning("%s (This rank's gradients of that call were complete.)", instead)
            for other in self._distinct:
                if not other.is_closed and any(report.step < other.step for report in other.failures.of_others()):
                    other.fail(instead, FINALIZE)
            self._renew()
            extremes.copy_(mine)
            self.communicate(groups, start, extremes.device)

    def _renew(self) -> None:
        """Make new connections where a failure has closed them."""
        for groups in self._distinct:
            groups.check()
        renew_all(self._distinct)

    def _give_up(self, error: BaseException) -> BaseException | None:
        """Tell the ranks of all groups that this step has failed here; the error to raise instead, if there is one."""
        instead = self._waits_in.fail(error, FINALIZE) if self._waits_in is not None else None
        cause = instead or error
        told = (isinstance(cause, PeerAbortedError) and cause.reason) or reason_of(cause)
        if "of the job)" not in told:
            told += f" (rank {dist.get_rank()} of the job)"
        for groups in self._distinct:
            if groups is not self._waits_in:
                groups.fail(AbortedError(told.removeprefix("AbortedError: ")), FINALIZE)
        return instead


def _duplicate(parent: ProcessGroup) -> Groups:
    kept = kept_with(parent, _Duplicate)
    if kept.groups is None:
        kept.groups = Groups.duplicate(parent)
    return kept.groups


def _disagreement(groups: Groups, tables: Sequence[Sequence[str]]) -> DisagreementError:
    first = tables[0]
    rank, table = next((rank, table) for rank, table in enumerate(tables) if table != first)
    missing, added = (
        [line for line in one if line not in other][:3] for one, other in ((first, table), (table, first))
    )
    return DisagreementError(
        f"rank {groups.rank} of {groups.world_size}: two ranks are about to sum different gradients, or these in "
        f"another order: rank 0 has {missing}, and rank {rank} has {added}. Parameters that the ranks share need the "
        "same marks, shapes and dtypes on all of them, and with a distributed optimizer the same place in their bucket"
    )
