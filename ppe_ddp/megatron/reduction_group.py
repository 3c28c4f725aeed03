"""A reduction group: the parameters that one process group averages, the dense ones or the experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ppe_ddp.engine.bucket_plan import Packing, Planner
from ppe_ddp.engine.negotiation import Negotiation
from ppe_ddp.engine.reduction import FunctionReduction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ppe_ddp.contracts import ReduceFunction
    from ppe_ddp.engine.bucket_plan import ParameterSpec
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.module_state import ModuleState


_PACKING = Packing(bucket_bytes=4 << 20, adopt_bytes=1 << 62)


@dataclass(frozen=True, eq=False)
class ReductionGroup:
    """The parameters that are averaged over one process group, and how.

    Attributes:
        groups: The wrapper's own duplicates of the user's group.
        module_state: The parameters.
        indices: Their numbers among all parameters of the module.
        negotiation: Agrees with the ranks of the group.
        reduction: Reduces a bucket.
        repairs: Plans the messages of a second round.
        gain: What a mean over the group is to be multiplied by. Experts see the tokens of all data-parallel ranks,
            but are averaged over fewer; and where losses are summed a token, so are gradients.
    """

    groups: Groups
    module_state: ModuleState
    indices: Sequence[int]
    negotiation: Negotiation
    reduction: FunctionReduction
    repairs: Planner
    gain: float

    @classmethod
    def of(
        cls,
        groups: Groups,
        module_state: ModuleState,
        indices: Sequence[int],
        specs: Sequence[ParameterSpec],
        function: ReduceFunction,
        *,
        gain: float,
        options: str,
    ) -> ReductionGroup:
        """Make the reduction group of ``groups``.

        Args:
            groups: The wrapper's own duplicates of the user's group.
            module_state: The parameters.
            indices: Their numbers among all parameters of the module.
            specs: Theirs, with the dtypes of ``main_grad``.
            function: Averages a bucket over the group.
            gain: What that mean is to be multiplied by.
            options: What else the ranks must agree on.
        """
        # The buckets of a backward are those of the layout: the planner of the negotiation is not used.
        negotiation = Negotiation(groups, _PACKING, negotiate=True, with_buffers=False, options=options)
        negotiation.use_module(module_state)
        return cls(
            groups,
            module_state,
            indices,
            negotiation,
            FunctionReduction(function, groups),
            Planner(specs, _PACKING),
            gain,
        )

    def local(self, mask: bytes | bytearray) -> bytes:
        """The part of a mask over all parameters that belongs to this reduction group."""
        return bytes([mask[i] for i in self.indices])
