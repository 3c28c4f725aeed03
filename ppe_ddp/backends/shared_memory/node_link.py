"""The contract of what joins nodes: collectives among ranks of which each is on another node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ppe_ddp.backends.process_group.progress_engine import Testable


class NodeLink(Protocol):
    """Joins one rank of every node; all of them call each method in the same order."""

    def all_reduce(self, flat: Tensor, kind: Any) -> Testable:
        """Begin to sum ``flat`` over the ranks, or take its maximum, in place.

        Args:
            flat: 1-D and contiguous, of float32, float64, uint8, int8, int32 or int64. Must be left alone until it is
                over; the link keeps it alive until then.
            kind: SUM or MAX.

        Returns:
            Its ``Test()`` says whether it is over, and raises RuntimeError where it has failed.
        """
        ...

    def broadcast(self, flat: Tensor, source: int) -> Testable:
        """Begin to overwrite ``flat`` by that of one rank; its size in bytes is the same on all.

        Args:
            flat: 1-D and contiguous; changed in place. Must be left alone until it is over, and is kept alive.
            source: Whose; its place among the ranks.

        Returns:
            As :meth:`all_reduce`.
        """
        ...

    def all_to_all(self, output: Tensor, flat: Tensor, receiving: Sequence[int], sending: Sequence[int]) -> Testable:
        """Begin to send parts of ``flat`` to the ranks, one after another, and to receive theirs into ``output``.

        Args:
            output: 1-D and contiguous; changed in place.
            flat: 1-D and contiguous, of the same dtype. Both must be left alone until it is over, and are kept alive.
            receiving: How many elements come from each rank.
            sending: How many go to each rank.

        Returns:
            As :meth:`all_reduce`.
        """
        ...

    def close(self) -> None:
        """End the connections; nothing is under way."""
        ...

    def give_up(self) -> None:
        """Drop the connections without waiting for what is under way."""
        ...
