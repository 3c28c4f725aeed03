"""A reduction group: the parameters that one process group averages, the dense ones or the experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ppe_ddp.compression.compressor import Compressor
from ppe_ddp.engine.comm_state import CommState
from ppe_ddp.engine.compressor_reduction import CompressorReduction, warn_of_one_machine
from ppe_ddp.engine.negotiation import Negotiation
from ppe_ddp.engine.plan import Packing, Planner
from ppe_ddp.engine.reduction import FunctionReduction

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ppe_ddp.contracts import ReduceFunction
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.module import ModuleState
    from ppe_ddp.engine.plan import ParameterSpec
    from ppe_ddp.engine.reduction import Reduction


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
        comm_state: What the compressor remembers, if there is one.
        gain: What a mean over the group is to be multiplied by. Experts see the tokens of all data-parallel ranks,
            but are averaged over fewer; and where losses are summed a token, so are gradients.
    """

    groups: Groups
    module_state: ModuleState
    indices: Sequence[int]
    negotiation: Negotiation
    reduction: Reduction
    comm_state: CommState
    repairs: Planner
    gain: float

    @classmethod
    def of(
        cls,
        groups: Groups,
        module_state: ModuleState,
        indices: Sequence[int],
        specs: Sequence[ParameterSpec],
        function: ReduceFunction | Compressor,
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
            function: Averages a bucket over the group, or a compressor that does.
            gain: What that mean is to be multiplied by.
            options: What else the ranks must agree on.
        """
        # The buckets of a backward are those of the layout: the planner of the negotiation is not used.
        negotiation = Negotiation(groups, _PACKING, negotiate=True, with_buffers=False, options=options)
        negotiation.use_module(module_state)
        comm_state = CommState()
        comm_state.begin(groups, module_state.specs)
        reduction = _reduction(function, comm_state, groups)
        negotiation.use_plug("gradients averaged by", reduction.agreed)
        return cls(
            groups,
            module_state,
            indices,
            negotiation,
            reduction,
            comm_state,
            Planner(specs, _PACKING),
            gain,
        )

    def comm_state_dict(self) -> dict[str, Any]:
        """A copy of what the compressor remembers on this rank; empty without one."""
        if not isinstance(self.reduction, CompressorReduction):
            return {}
        return self.comm_state.state_dict(self.reduction.compressor, self.groups)

    def load_comm_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`comm_state_dict` gave.

        Raises:
            ValueError: It is another one's.
        """
        if isinstance(self.reduction, CompressorReduction):
            devices = {spec.name: spec.device for spec in self.module_state.specs}
            self.comm_state.load_state_dict(state, self.reduction.compressor, self.groups, devices)
            self.negotiation.use_plug("a state of the compressor", *self.comm_state.agreed)
        elif state:
            raise ValueError(f"rank {self.groups.rank}: there is no compressor that could take a state")

    def local(self, mask: bytes | bytearray) -> bytes:
        """The part of a mask over all parameters that belongs to this reduction group."""
        return bytes([mask[i] for i in self.indices])


def _reduction(function: ReduceFunction | Compressor, comm_state: CommState, groups: Groups) -> Reduction:
    if not isinstance(function, Compressor):
        return FunctionReduction(function, groups)
    warn_of_one_machine(function, groups)
    return CompressorReduction(function, comm_state, groups)
