"""What is reduced: the parameters of one process group, and the ranges of buffers that are its buckets.

A bucket is reduced in other memory. By all-reduce, all of it becomes averages. By reduce-scatter only this rank's share
does, and what is in the rest afterwards is of no use. Until the whole step has succeeded the range is what this rank
has computed: a reduction that was given up may still write into its memory, so that a copy to go back to would not do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ppe_ddp.compression.compressor import Compressor
from ppe_ddp.compression.flat_gradients import is_finite
from ppe_ddp.contracts import probe
from ppe_ddp.engine.bucket import DenseBucket
from ppe_ddp.engine.comm_state import CommState
from ppe_ddp.engine.completion import ends_soon
from ppe_ddp.engine.compressor_reduction import CompressorReduction, warn_of_one_machine
from ppe_ddp.engine.grad_hooks import DroppedForwards
from ppe_ddp.engine.memory import allocator, slots_of
from ppe_ddp.engine.negotiation import Negotiation
from ppe_ddp.engine.plan import Packing, Planner
from ppe_ddp.engine.reduction import FunctionReduction
from ppe_ddp.errors import CommunicationError, PeerAbortedError
from ppe_ddp.scaling import scale

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from ppe_ddp.contracts import ReduceFunction
    from ppe_ddp.engine.bucket import BucketContext
    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.module import ModuleState
    from ppe_ddp.engine.plan import ParameterSpec
    from ppe_ddp.engine.reduction import Reduction
    from ppe_ddp.engine.zero.shard_collectives import ReduceScatter
    from ppe_ddp.megatron.buffer_layout import BucketRange

_PACKING = Packing(bucket_bytes=4 << 20, adopt_bytes=1 << 62)


class ReductionGroup:
    """The parameters that one process group averages, the dense ones or the experts. All its ranks make it together.

    Args:
        groups: The wrapper's own duplicates of the user's group.
        module_state: The parameters.
        indices: Their numbers among all parameters of the module.
        specs: The specs of these parameters, with the dtypes of ``main_grad``.
        function: Averages a bucket over the group, or a compressor that does.
        gain: What a mean over the group is multiplied by. Experts see the tokens of all data-parallel ranks, but are
            averaged over fewer; and where losses are summed a token, so are gradients.
        options: What else the ranks must agree on.

    Attributes:
        negotiation: Agrees with the ranks of the group.
        reduction: Reduces a bucket.
        dropped_forwards: Warns where the ranks differ in how many forwards had no backward.
        repairs: Plans the messages of a second round.
    """

    def __init__(
        self,
        groups: Groups,
        module_state: ModuleState,
        indices: Sequence[int],
        specs: Sequence[ParameterSpec],
        function: ReduceFunction | Compressor,
        *,
        gain: float,
        options: str,
    ) -> None:
        self.groups = groups
        self.module_state = module_state
        self.indices = indices
        self.gain = gain
        # The buckets of a backward are those of the layout: the planner of the negotiation is not used.
        self.negotiation = Negotiation(groups, _PACKING, negotiate=True, with_buffers=False, options=options)
        self.negotiation.use_module(module_state)
        self.dropped_forwards = DroppedForwards(groups.rank)
        self.repairs = Planner(specs, _PACKING)
        self._comm_state = CommState()
        self._comm_state.begin(groups, module_state.specs)
        self.reduction: Reduction
        if isinstance(function, Compressor):
            warn_of_one_machine(function, groups)
            self.reduction = CompressorReduction(function, self._comm_state, groups)
        else:
            self.reduction = FunctionReduction(function, groups)
        self.negotiation.use_plug("gradients averaged by", self.reduction.agreed)

    def comm_state_dict(self) -> dict[str, Any]:
        """A copy of what the compressor remembers on this rank; empty without one."""
        if not isinstance(self.reduction, CompressorReduction):
            return {}
        return self._comm_state.state_dict(self.reduction.compressor, self.groups)

    def load_comm_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`comm_state_dict` gave.

        Raises:
            ValueError: The state is of another rank, number of ranks, module or compressor.
        """
        if isinstance(self.reduction, CompressorReduction):
            devices = {spec.name: spec.device for spec in self.module_state.specs}
            self._comm_state.load_state_dict(state, self.reduction.compressor, self.groups, devices)
            self.negotiation.use_plug("a state of the compressor", *self._comm_state.agreed)
        elif state:
            raise ValueError(f"rank {self.groups.rank}: there is no compressor that could take a state")

    def local(self, mask: bytes | bytearray) -> bytes:
        """The part of a mask over all parameters that belongs to this reduction group."""
        return bytes([mask[i] for i in self.indices])


class BufferBucket(DenseBucket):
    """A range of a buffer, and the memory that it is all-reduced in: as large as the range, kept from step to step.

    Args:
        extent: The range, and the parameters in it.
        memory: The range of the buffer, padding included.
        context: What all buckets of one group have in common; the specs with the dtypes of ``main_grad``.
        gain: What the mean over the group is multiplied by.
        scatter: How to reduce-scatter; None to all-reduce.

    Attributes:
        slots: The ``main_grad`` of each member.
    """

    def __init__(
        self,
        extent: BucketRange,
        memory: Tensor,
        context: BucketContext,
        *,
        gain: float,
        scatter: ReduceScatter | None,
    ) -> None:
        super().__init__(extent.plan, context)
        self.extent = extent
        self._groups = context.groups
        self._memory = memory
        self._gain = gain
        self._scatter = scatter
        self._range = memory.narrow(0, 0, extent.plan.numel)
        self.slots = slots_of(self._range, extent.plan, self.specs, self.parameters)
        self._is_reduced = False
        self._carried: Tensor | None = None
        self._message: tuple[Tensor, list[Tensor]] | None = None
        self._reduced_share: Tensor | None = None

    @property
    def _averaged_part(self) -> Tensor:
        """Where averages come: the whole range, or where it is reduce-scattered this rank's equal part, 1-D."""
        if self._scatter is None:
            return self._range
        size = self.extent.padded // self._groups.world_size
        return self._memory.narrow(0, self._groups.rank * size, size)

    def reset(self) -> None:
        """The buffer was zeroed."""
        self._is_reduced = False
        self._carried = None

    def clear(self, indices: Sequence[int]) -> None:
        """Set the gradients of the parameters at ``indices``, some of its members, to zero."""
        if len(indices) == len(self.extent.plan.members):
            self._memory.zero_()
            self.reset()
            return
        first = self._averaged_part.storage_offset() - self._memory.storage_offset()
        for slot, index, offset in zip(self.slots, self.extent.plan.members, self.extent.plan.offsets, strict=True):
            if index in indices:
                slot.zero_()
                if self._carried is not None:
                    self._carried[max(offset - first, 0) : max(offset + slot.numel() - first, 0)].zero_()

    def scale(self, factor: float | Tensor) -> None:
        """The buffer was multiplied by ``factor``."""
        if self._carried is not None:
            self._carried.mul_(factor)

    def reopen(self) -> None:
        """Let more be added to averages, so that the next reduction gives their sum with its own averages."""
        if not self._is_reduced:
            return
        self._is_reduced = False
        if self._scatter is None and self._gain == 1.0:
            return  # the mean of what all ranks have is the same
        # No other rank has this share of the averages, or what they were multiplied by would be multiplied once more:
        # undone beforehand, they would be rounded in halves, or too large for them.
        self._carried = self._averaged_part.clone()
        self._memory.zero_()

    def add(self, index: int, gradient: Tensor) -> None:
        """Add an average that came late to that of parameter ``index``."""
        self.slots[self.extent.plan.members.index(index)].add_(gradient)
        self._is_reduced = True

    def launch(self, *, is_last: bool) -> None:
        """Start the reduction: an all-reduce of a copy, or a reduce-scatter into other memory."""
        self.reopen()
        if self.extent.padded == 0:
            return
        if self._scatter is None:
            super().launch(is_last=is_last)
        else:
            factor = self._gain * self._reduction.mean_factor
            self._reduced_share = self._scatter.memory_for_share(self._memory)
            self.pending = self._scatter.start(self._reduced_share, self._memory, factor=factor, spare=False)

    def _pack(self) -> tuple[Tensor, list[Tensor]]:
        factor = self._gain * self.factor
        if self._reduction.sends_nothing:
            scale(self._range, self._range, factor)
            return self._range, self.slots
        if self._message is None:
            flat = allocator(self._groups.buckets)(self.plan.numel, self.plan.dtype, self.plan.device)
            self._message = flat, slots_of(flat, self.plan, self.specs, self.parameters)
        flat, slots = self._message
        scale(flat, self._range, factor)
        return flat, slots

    @property
    def message_nbytes(self) -> int:
        """Bytes of the memory that it is all-reduced in."""
        return 0 if self._message is None else self._message[0].nbytes

    def finish(self) -> Steps:
        """Wait for the result.

        Raises:
            CommunicationError: The transport failed.
            FunctionError: The user's reduce function broke its contract.
        """
        if self._scatter is None:
            yield from super().finish()
            return
        if self.pending is not None:
            yield probe(self.pending)
        self._wait_for_share()

    def _wait_for_share(self) -> None:
        try:
            if self.pending is not None:
                self._groups.failures.wait(self.pending, self.plan.device)
        except PeerAbortedError:
            raise
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self._groups.rank}, bucket {self.plan.index} with {self.title}: the reduce-scatter failed: "
                f"{error}. An error or a crash on another rank ends here: look for the first traceback of all ranks."
            ) from error
        self.pending = None

    def averages(self) -> list[Tensor]:
        """Write the averages into ``main_grad``, of a reduce-scatter into this rank's share; one view a member."""
        reduced = self._reduced_share if self._scatter is not None else self._flat
        if reduced is not None and reduced is not self._range:
            self._averaged_part.copy_(reduced)
        if self._carried is not None:
            self._averaged_part.add_(self._carried)
            self._carried = None
        self._is_reduced = True
        return self.slots

    def release(self) -> None:
        """Drop what belongs to one reduction."""
        super().release()
        self._reduced_share = None

    def put_back(self) -> list[tuple[int, Tensor]]:
        """Abandon the reduction, whose connections were closed; ``main_grad`` is as it was.

        Waits a moment for a reduce-scatter to end, which reads ``main_grad``.
        """
        is_done = probe(self.pending)
        if self._scatter is not None and is_done is not None:
            ends_soon(is_done)
        self.release()
        self._message = None  # the reduction may still write there
        return []

    @property
    def title(self) -> str:
        """The first of its parameters, for messages."""
        names = self.names
        return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if names[3:] else "")

    def non_finite(self) -> list[str]:
        """The names of the members whose gradient is NaN or infinite here."""
        if is_finite(self._memory):
            return []
        return [name for name, slot in zip(self.names, self.slots, strict=True) if not is_finite(slot)]
