"""The gradients of one module in buffers: layout, memory, accumulation, and buckets.

    parameters      0 1 2 3 4 5 6               as registered; those of one kind share a buffer
    buffer          | 6 5 4 . | 3 2 | 1 0 . |   in reverse order, as backward reaches them; "." pads
    shares          |  0 |  1 | 0| 1| 0 | 1 |   the size of each bucket is a multiple of the number of ranks

The kind of a parameter consists of its reduction group (dense parameters or experts), its dtype, the dtype of its
gradient, and its device.

A bucket is reduced in other memory. An all-reduce gives averages of the whole range, a reduce-scatter those of this
rank's share; the rest of the range then has no meaning. The range itself keeps this rank's gradients until the whole
step has succeeded. Reducing in place and restoring a copy would not be safe: an abandoned reduction may still write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ppe_ddp.compression.comm_state import CommState
from ppe_ddp.compression.compressor import Compressor, are_finite
from ppe_ddp.compression.compressor_reduction import CompressorReduction, warn_of_one_machine
from ppe_ddp.contracts import ReduceFunction
from ppe_ddp.engine.bucket import BucketContext, DenseBucket
from ppe_ddp.engine.completion import Steps, ends_soon
from ppe_ddp.engine.grad_hooks import DroppedForwards
from ppe_ddp.engine.gradients import GradientStreams
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.memory import allocator, slots_of
from ppe_ddp.engine.module import ModuleState
from ppe_ddp.engine.negotiation import Negotiation
from ppe_ddp.engine.plan import BucketPlan, Packing, ParameterSpec, Plan, Planner
from ppe_ddp.engine.reduction import FunctionReduction, Reduction
from ppe_ddp.engine.zero.shard_collectives import ReduceScatter
from ppe_ddp.errors import UnusableError
from ppe_ddp.scaling import scale
from ppe_ddp.waiting import probe

_TICK_ELEMENTS = 1 << 14


@dataclass(frozen=True)
class BufferKind:
    """The properties that the gradients of one buffer share."""

    reduction_group: int  # 0 for dense parameters, 1 for experts
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Item:
    """One trainable parameter."""

    index: int  # among all parameters of the module
    numel: int
    kind: BufferKind
    alone: bool = False  # has a bucket of its own, so that all pipeline stages shard it in the same way
    row_major: bool = True


@dataclass(frozen=True)
class BucketRange:
    """A range of a buffer that is reduced as one bucket."""

    plan: BucketPlan  # offsets are from the start of the range; the index counts the module's buckets in sending order
    buffer: int  # the number of its buffer
    reduction_group: int
    start: int  # its first element in the buffer
    padded: int  # number of elements with padding, a multiple of the number of ranks

    def of(self, memory: Tensor) -> Tensor:
        """The range, padding included, in the ``memory`` of its buffer."""
        return memory.narrow(0, self.start, self.padded)


@dataclass(frozen=True)
class BufferLayout:
    """The buffers of one module."""

    kinds: tuple[BufferKind, ...]  # of each buffer
    sizes: tuple[int, ...]  # of each buffer, in elements
    buckets: tuple[BucketRange, ...]  # of all buffers, in the order in which every rank sends them
    bucket_of: dict[int, int]  # parameter index to position in ``buckets``
    launch_triggers: frozenset[int]  # the parameters at whose arrival the reducer launches the buckets that are ready

    def plan(self, present: bytes) -> Plan:
        """The plan of the buckets with a gradient on some rank; ``present`` has one byte a parameter, 0 for none."""
        chosen = tuple(b.plan for b in self.buckets if any(present[i] for i in b.plan.members))
        bucket_of = {i: k for k, bucket in enumerate(chosen) for i in bucket.members}
        return Plan(present, chosen, bucket_of, len(chosen) - 1)


def lay_out(items: Sequence[Item], *, bucket_size: int | None, divisors: Sequence[int]) -> BufferLayout:
    """Lay out buffers and buckets of the trainable parameters, in the order of their registration.

    A bucket is closed after ``bucket_size`` elements; with None each buffer is one bucket. The size of a bucket becomes
    a multiple of the divisor of its reduction group, in ``divisors``.
    """
    reverse = list(reversed(items))
    kinds = tuple(dict.fromkeys(item.kind for item in reverse))
    sizes: list[int] = []
    drafts: list[BucketRange] = []
    for number, kind in enumerate(kinds):
        start = 0
        for members in _packed([item for item in reverse if item.kind == kind], bucket_size):
            drafts.append(_placed(members, number, start, divisors[kind.reduction_group]))
            start += drafts[-1].padded
        sizes.append(start)
    drafts.sort(key=lambda draft: -draft.plan.members[-1])  # in the order in which their last gradients arrive
    buckets = tuple(replace(draft, plan=replace(draft.plan, index=k)) for k, draft in enumerate(drafts))
    bucket_of = {i: k for k, bucket in enumerate(buckets) for i in bucket.plan.members}
    ends = accumulate(item.numel for item in reverse)
    ticks = {end // _TICK_ELEMENTS: item.index for item, end in zip(reverse, ends, strict=True)}
    triggers = frozenset([*ticks.values(), *(bucket.plan.members[-1] for bucket in buckets)])
    return BufferLayout(kinds, tuple(sizes), buckets, bucket_of, triggers)


def _packed(items: Sequence[Item], bucket_size: int | None) -> Iterator[list[Item]]:
    members: list[Item] = []
    size = 0
    for item in items:
        if item.alone and members:
            yield members
            members, size = [], 0
        members.append(item)
        size += item.numel
        if item.alone or (bucket_size is not None and size >= bucket_size):
            yield members
            members, size = [], 0
    if members:
        yield members


def _placed(members: Sequence[Item], buffer: int, start: int, divisor: int) -> BucketRange:
    *offsets, numel = accumulate((item.numel for item in members), initial=0)
    kind = members[0].kind
    plan = BucketPlan(
        index=0,
        members=tuple(item.index for item in members),
        offsets=tuple(offsets),
        numel=numel,
        dtype=kind.grad_dtype,
        device=kind.device,
        sparse=False,
        row_major=all(item.row_major for item in members),
    )
    return BucketRange(plan, buffer, kind.reduction_group, start, -(-numel // divisor) * divisor)


class ParamAndGradBuffer:
    """Contiguous gradients of one kind.

    Attributes:
        kind: The properties that all gradients share.
        buckets: The ranges that are reduced as one bucket each.
        grad_data: 1-D, in the gradients' dtype; padding is zero.
        param_data: 1-D, in the parameters' dtype, of the same number of elements; the parameters are views of it. Or
            None.
        params: The parameters, in the order of their gradients in the buffer.
    """

    def __init__(
        self,
        layout: BufferLayout,
        number: int,
        parameters: Sequence[nn.Parameter],
        specs: Sequence[ParameterSpec],
        *,
        scattered_in: ProcessGroup | None,  # sends the buffer itself, and gathers the parameters; None to all-reduce
    ) -> None:
        self.kind = kind = layout.kinds[number]
        size = layout.sizes[number]
        self.buckets = buckets = tuple(bucket for bucket in layout.buckets if bucket.buffer == number)
        self.param_data: Tensor | None = None
        self.params = [parameters[i] for bucket in buckets for i in bucket.plan.members]
        if scattered_in is None:
            self.grad_data = torch.zeros(size, dtype=kind.grad_dtype, device=kind.device)
            return
        self.grad_data = allocator(scattered_in)(size, kind.grad_dtype, kind.device).zero_()
        self.param_data = memory = torch.zeros(size, dtype=kind.param_dtype, device=kind.device)
        for bucket in buckets:
            for i, offset in zip(bucket.plan.members, bucket.plan.offsets, strict=True):
                slot = memory.as_strided(specs[i].shape, specs[i].stride, bucket.start + offset)
                parameters[i].data = slot.copy_(parameters[i].detach())

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply all gradients by ``scaling_factor``."""
        self.grad_data.mul_(scaling_factor)

    def reset(self) -> None:
        """Set all gradients to zero."""
        self.grad_data.zero_()


class MainGradients:
    """The accumulated gradients of one module, with marks of which exist."""

    def __init__(self, parameters: Sequence[nn.Parameter], main: Mapping[int, Tensor]) -> None:
        self._parameters = parameters
        self.main = main
        self.index = {id(parameters[i]): i for i in main}  # by the id of the parameter
        self.streams: GradientStreams | None = None  # the streams that gradients are accumulated on; None on CPUs
        self.revision = 0  # counts synchronizations, and zeroings of all gradients
        self.fused: set[int] = set()  # the parameters whose gradient a kernel has added to main_grad by itself
        self.forget()
        for i, memory in main.items():
            parameter = parameters[i]
            parameter.main_grad = memory  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def forget(self) -> None:
        """Mark every gradient as absent: the buffers were zeroed."""
        self.accumulated = bytearray(len(self._parameters))  # 1 if this rank has added a gradient since then
        self.averaged = bytearray(len(self._parameters))  # 1 if some rank had the gradient when it was synchronized
        self.is_dirty = False  # a gradient was added that is not synchronized yet
        self.revision += 1

    def forget_some(self, indices: Iterable[int]) -> list[int]:
        """Mark gradients as absent, and return those that existed; the memory of the others is zero already."""
        there = [i for i in indices if self.exist((i,))]
        for i in there:
            self.accumulated[i] = self.averaged[i] = 0
        self.is_dirty = self.is_dirty and any(self.accumulated)
        return there

    def exist(self, indices: Iterable[int]) -> bool:
        """Whether one of these gradients exists."""
        return any(self.accumulated[i] or self.averaged[i] for i in indices)

    def discard(self) -> None:
        """Drop the gradients in ``.grad``, and the marks of kernels that add to ``main_grad`` themselves."""
        for i in self.main:
            parameter = self._parameters[i]
            if parameter.grad is not None:
                parameter.grad = None
            if parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
                parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def existing(self, reached: Sequence[int] | bytes | bytearray) -> bytearray:
        """One byte a parameter: whether its gradient is expected, accumulated, or still in ``.grad``."""
        mask = bytearray(self.accumulated)
        for i in self.main:
            if reached[i] or self._parameters[i].grad is not None:
                mask[i] = 1
        return mask

    def add(self, indices: Iterable[int]) -> None:
        """Add ``.grad`` of these parameters to ``main_grad``, and set it to None; skips those without one."""
        to: list[Tensor] = []
        of: list[Tensor] = []
        for i in indices:
            parameter = self._parameters[i]
            gradient = parameter.grad
            if gradient is None or i not in self.main:
                continue
            parameter.grad = None
            self.accumulated[i] = 1
            self.is_dirty = True
            if parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
                self.fused.add(i)
                if not getattr(parameter, "zero_out_wgrad", False):
                    continue  # .grad is a dummy
            to.append(self.main[i])
            of.append(gradient.detach() if gradient.requires_grad else gradient)  # create_graph
        if self.streams is not None:
            self.streams.wait_for_gradients(of)
        # One is the usual case in no_sync(): a third of the cost of the fused call, which takes no sparse gradients.
        if len(to) == 1 or True in [gradient.is_sparse for gradient in of]:
            for memory, gradient in zip(to, of, strict=True):
                memory.add_(gradient)
        elif to:
            torch._foreach_add_(to, of)

    def take(self, indices: Iterable[int]) -> dict[int, Tensor]:
        """Take the gradients of these parameters out, dense and in the dtype of ``main_grad``.

        They are in ``.grad``, or in ``main_grad`` if a kernel has added them there.
        """
        taken: dict[int, Tensor] = {}
        for i in indices:
            gradient = self._parameters[i].grad
            if gradient is not None and i in self.main:
                self._parameters[i].grad = None
                taken[i] = gradient.detach()
        if self.streams is not None:
            self.streams.wait_for_gradients(list(taken.values()))
        for i, gradient in taken.items():
            main, parameter = self.main[i], self._parameters[i]
            taken[i] = (gradient.to_dense() if gradient.is_sparse else gradient).to(main.dtype)
            if parameter.grad_added_to_main_grad:  # type: ignore[attr-defined]
                self.fused.add(i)
                taken[i] = main + taken[i] if getattr(parameter, "zero_out_wgrad", False) else main.clone()
                main.zero_()
        return taken

    def put_back(self, taken: Mapping[int, Tensor]) -> None:
        """Add gradients that :meth:`take` has taken out to ``main_grad``, as they were not averaged."""
        for i, gradient in taken.items():
            self.main[i].add_(gradient)
            self.accumulated[i] = 1
        self.is_dirty = True


_PACKING = Packing(bucket_bytes=4 << 20, adopt_bytes=1 << 62)


class ReductionGroup:
    """The parameters that one process group averages, the dense ones or the experts. All its ranks make it together.

    The mean over the group is multiplied by ``gain``. It is not 1 in two cases: experts see the tokens of all
    data-parallel ranks, but are averaged over fewer ranks; and with losses per token gradients are summed.
    """

    def __init__(
        self,
        groups: Groups,
        module_state: ModuleState,
        indices: Sequence[int],  # of its parameters, among all of the module
        specs: Sequence[ParameterSpec],  # of its parameters, with the dtypes of main_grad
        function: ReduceFunction | Compressor,
        *,
        gain: float,
        options: str,
    ) -> None:
        self.groups = groups
        self.module_state = module_state
        self.indices = indices
        self.gain = gain
        # The layout has the buckets, so the planner of the negotiation is not used.
        self.negotiation = Negotiation(groups, _PACKING, negotiate=True, with_buffers=False, options=options)
        self.negotiation.use_module(module_state)
        self.dropped_forwards = DroppedForwards(groups.rank)
        self.repairs = Planner(specs, _PACKING)  # plans second rounds
        self.comm_state = CommState(can_revoke=True)
        self.comm_state.begin(groups, module_state.specs)
        self.reduction: Reduction
        if isinstance(function, Compressor):
            warn_of_one_machine(function, groups)
            self.reduction = CompressorReduction(function, self.comm_state, groups)
        else:
            self.reduction = FunctionReduction(function, groups)
        self.negotiation.use_plug("gradients averaged by", self.reduction.agreed)
        self.negotiation.has_compressor = self.reduction.sends_kept
        pairs = zip(module_state.names, module_state.parameters, strict=True)
        frozen = [repr(name) for name, parameter in pairs if not parameter.requires_grad]
        self.negotiation.use_plug("a parameter that was frozen when it was wrapped:", *frozen)
        self.negotiation.check()

    @property
    def compressor(self) -> Compressor | None:
        return self.reduction.compressor if isinstance(self.reduction, CompressorReduction) else None

    def comm_state_dict(self) -> dict[str, Any]:
        """A copy of the compressor's state on this rank; empty without a compressor."""
        if self.compressor is None:
            return {}
        return self.comm_state.state_dict(self.compressor, self.groups, self.module_state.specs)

    def load_comm_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a :meth:`comm_state_dict`; raises for the state of another rank, module or compressor."""
        if self.compressor is not None:
            self.comm_state.load_state_dict(state, self.compressor, self.groups, self.module_state.specs)
        elif state:
            raise ValueError(f"rank {self.groups.rank}: there is no compressor that could take a state")

    def local(self, mask: bytes | bytearray) -> bytes:
        """The bytes of this group's parameters in a mask over all parameters."""
        return bytes([mask[i] for i in self.indices])


class BufferBucket(DenseBucket):
    """A range of a buffer, and memory of the same size for its all-reduce, kept from step to step."""

    def __init__(
        self,
        extent: BucketRange,
        memory: Tensor,
        context: BucketContext,
        *,
        gain: float,
        scatter: ReduceScatter | None,  # None to all-reduce
    ) -> None:
        super().__init__(extent.plan, context)
        self.extent = extent
        self._groups = context.groups
        self._memory = memory
        self._gain = gain
        self._scatter = scatter
        self._range = memory.narrow(0, 0, self.plan.numel)
        size = extent.padded // self._groups.world_size
        # The memory that gets averages: the whole range, or with reduce-scatter this rank's equal part.
        self._averaged_part = self._range if scatter is None else memory.narrow(0, self._groups.rank * size, size)
        self.slots = slots_of(self._range, self.plan, self.specs, self.parameters)  # the main_grad of each member
        self.late: list[int] = []  # places of members that no rank expects and to which kernels add: not to be sent
        self._is_reduced = False
        self._carried: Tensor | None = None
        self._message: tuple[Tensor, list[Tensor]] | None = None  # memory of the all-reduce, and the slots there

    @property
    def is_finite(self) -> bool:
        """Whether the averages that this rank has, if any, have neither infinity nor NaN."""
        return not self._is_reduced or are_finite([self._averaged_part])

    def reset(self) -> None:
        self._is_reduced = False
        self._carried = None

    def clear(self, indices: Sequence[int]) -> None:
        """Set the gradients of the parameters at ``indices``, some of its members, to zero.

        It changes no version of the buffer, by which optimizers of its other parameters notice changes of theirs.
        """
        if len(indices) == len(self.plan.members):
            self._memory.data.zero_()
            self.reset()
            return
        first = self._averaged_part.storage_offset() - self._memory.storage_offset()
        for slot, index, offset in zip(self.slots, self.plan.members, self.plan.offsets, strict=True):
            if index in indices:
                slot.data.zero_()
                if self._carried is not None:
                    self._carried[max(offset - first, 0) : max(offset + slot.numel() - first, 0)].zero_()

    def scale(self, factor: float | Tensor) -> None:
        if self._carried is not None:
            self._carried.mul_(factor)

    def reopen(self) -> None:
        """Prepare to accumulate on top of averages: the next reduction gives their sum with its own averages."""
        if not self._is_reduced:
            return
        self._is_reduced = False
        if self._scatter is None and self._gain == 1.0:
            return  # the averages are the same on all ranks, so averaging them again does not change them
        # Set the averages aside. With a reduce-scatter no other rank has this share of them. With a gain they would be
        # multiplied by it again; dividing by it first would round or overflow in half precision.
        self._carried = self._averaged_part.clone()
        self._memory.zero_()

    def refuse_kernel(self, index: int, *, is_sent: bool) -> None:
        """Raise if a kernel has added a gradient that arrives now to averages, or to what may have been sent before."""
        k = self.plan.members.index(index)
        parameter = self.parameters[k]
        is_fused = parameter.grad is not None and parameter.grad_added_to_main_grad  # type: ignore[attr-defined]
        if is_fused and (is_sent or self._carried is not None):
            raise UnusableError(
                f"rank {self._groups.rank}: a kernel has added the gradient of {self.names[k]!r} to main_grad by "
                "itself (grad_added_to_main_grad), after that was averaged or sent: call zero_grad_buffer() before "
                "each step, and no_sync() for all micro-batches but the last. If it did so in a reentrant checkpoint, "
                "set overlap_grad_reduce=False, or use_reentrant=False there"
            )

    def add(self, index: int, gradient: Tensor, *, is_first: bool) -> None:
        """Add an average of the second round to that of parameter ``index``; ``is_first`` if no rank expected it."""
        slot = self.slots[self.plan.members.index(index)]
        if is_first and self._scatter is not None:
            slot.zero_()  # a reduce-scatter has sent the memory itself, to which kernels may have added meanwhile
        slot.add_(gradient)
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
            self._flat = self._scatter.memory_for_share(self._memory)
            self.pending = self._scatter.start(self._flat, self._memory, factor=factor, spare=False)

    def _pack(self) -> tuple[Tensor, list[Tensor]]:
        if self._reduction.sends_nothing:
            return self._range, self.slots
        if self._message is None:
            flat = allocator(self._groups.buckets)(self.plan.numel, self.plan.dtype, self.plan.device)
            self._message = flat, slots_of(flat, self.plan, self.specs, self.parameters)
        flat, slots = self._message
        scale(flat, self._range, self._gain * self.factor)
        for k in self.late:
            slots[k].zero_()
        return flat, slots

    def finish(self) -> Steps:
        yield from super().finish() if self._scatter is None else self._scatter.finish(self, self._reduction)

    def averages(self) -> list[Tensor]:
        """Write the averages into ``main_grad``, or with reduce-scatter into this rank's share; one view a member."""
        if self._reduction.sends_nothing:
            scale(self._range, self._range, self._gain * self.factor)
        if self._flat is not None and self._flat is not self._range:
            self._averaged_part.copy_(self._flat)
        if self._carried is not None:
            self._averaged_part.add_(self._carried)
            self._carried = None
        self._is_reduced = True
        return self.slots

    def put_back(self) -> list[tuple[int, Tensor]]:
        """Abandon the reduction, after its connections were closed; first waits while it may read ``main_grad``."""
        done = probe(self.pending)
        if self._scatter is not None and done is not None:
            ends_soon(done)
        self.release()
        self._message = None  # the abandoned reduction may still write there
        return []
