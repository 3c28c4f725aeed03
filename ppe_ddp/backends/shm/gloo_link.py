"""Joins nodes by gloo: collectives among ranks of which each is on another node, on gloo's own threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from ppe_ddp.backends.process_group.given_up_groups import close_given_up
from ppe_ddp.errors import CommunicationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup, Work


class GlooLink:
    """See :class:`~ppe_ddp.backends.shared_memory.node_link.NodeLink`.

    Args:
        groups: Groups of gloo of these ranks. The only references: the connections end with them.
        ranks: Theirs in the group of several nodes, for errors.
    """

    # A group of gloo has two threads, each of which does one collective at a time. What one node sends must not wait
    # for what it receives: they go in turn then, and use the network in one direction at a time.
    GROUPS = 2

    def __init__(self, groups: list[ProcessGroup], ranks: Sequence[int]) -> None:
        self._gloo = groups
        self._ranks = ranks

    def all_reduce(self, flat: Tensor, kind: Any) -> GlooTest:
        """Begin to reduce ``flat`` in place; gloo keeps it alive."""
        made = dist.AllreduceOptions()
        made.reduceOp = dist.ReduceOp(kind)
        with torch.no_grad():
            return GlooTest(self._gloo[0].allreduce([flat], made), self._ranks)

    def broadcast(self, flat: Tensor, source: int) -> GlooTest:
        """Begin to overwrite ``flat`` by that of one rank; gloo keeps it alive."""
        made = dist.BroadcastOptions()
        made.rootRank = source
        with torch.no_grad():
            return GlooTest(self._gloo[source % self.GROUPS].broadcast([flat.view(torch.uint8)], made), self._ranks)

    def all_to_all(self, output: Tensor, flat: Tensor, receiving: Sequence[int], sending: Sequence[int]) -> GlooTest:
        """Begin to send parts of ``flat`` to the ranks, and to receive theirs; as bytes, as gloo knows few dtypes."""
        gloo: Any = self._gloo[0]
        call = getattr(gloo, "alltoall_base", None) or gloo.all_to_all_single
        size = flat.itemsize
        with torch.no_grad():
            work = call(
                output.view(torch.uint8),
                flat.view(torch.uint8),
                [count * size for count in receiving],
                [count * size for count in sending],
            )
        return GlooTest(work, self._ranks)

    def close(self) -> None:
        """End the connections; nothing is under way."""
        self._gloo.clear()

    def give_up(self) -> None:
        """End the connections soon; what is under way there fails then."""
        close_given_up(self._gloo)


class GlooTest:
    """Asks whether a Work of these ranks is over."""

    def __init__(self, work: Work, ranks: Sequence[int]) -> None:
        self._work = work
        self._ranks = ranks

    def Test(self) -> bool:  # as MPI has it
        """Whether it is over; raises CommunicationError where it has failed."""
        if not self._work.is_completed():
            return False
        try:
            self._work.wait()
        except RuntimeError as error:
            ranks = ", ".join(map(str, self._ranks))
            raise CommunicationError(f"between nodes, of ranks {ranks}: {error}") from error
        return True
