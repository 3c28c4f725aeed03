"""The parameters that one process group averages: the dense ones, or the experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppe_ddp.engine.agreement import Consensus
from ppe_ddp.engine.layout import Packing, Planner
from ppe_ddp.engine.sender import FunctionSender

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppe_ddp.contracts import ReduceFunction
    from ppe_ddp.engine.census import Census
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.layout import ParameterSpec


_PACKING = Packing(bucket_bytes=4 << 20, adopt_bytes=1 << 62)


@dataclass(frozen=True, eq=False)
class Lane:
    """One group and what belongs to it.

    Attributes:
        groups: The wrapper's own duplicates of the user's group.
        census: The parameters.
        indices: Their numbers among all parameters of the module.
        consensus: Asks the ranks of the group.
        sender: Reduces a bucket.
        repairs: Plans the messages of a second round.
        gain: What a mean over the group is to be multiplied by. Experts see the tokens of all data-parallel ranks,
            but are averaged over fewer; and where losses are summed a token, so are gradients.
    """

    groups: Groups
    census: Census
    indices: Sequence[int]
    consensus: Consensus
    sender: FunctionSender
    repairs: Planner
    gain: float

    @classmethod
    def of(
        cls,
        groups: Groups,
        census: Census,
        indices: Sequence[int],
        specs: Sequence[ParameterSpec],
        function: ReduceFunction,
        *,
        gain: float,
        options: str,
    ) -> Lane:
        """Make the lane of ``groups``.

        Args:
            groups: The wrapper's own duplicates of the user's group.
            census: The parameters.
            indices: Their numbers among all parameters of the module.
            specs: Theirs, with the dtypes of ``main_grad``.
            function: Averages a bucket over the group.
            gain: What that mean is to be multiplied by.
            options: What else the ranks must agree on.
        """
        # The buckets of a backward are those of the layout: nobody asks the planner of the consensus for any.
        consensus = Consensus(groups, _PACKING, negotiate=True, with_buffers=False, options=options)
        consensus.arm(census)
        return cls(groups, census, indices, consensus, FunctionSender(function, groups), Planner(specs, _PACKING), gain)

    def local(self, mask: bytes | bytearray) -> bytes:
        """The part of a mask over all parameters that is this lane's."""
        return bytes([mask[i] for i in self.indices])
