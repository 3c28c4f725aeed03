"""The shards of one module's gradient buffers, for a distributed optimizer.

Each bucket of a buffer is cut into equal parts, one a rank. A cut may go through a parameter.

    bucket      |  weight 5      | bias 4 |   weight 3      . |
    ranks       |      0       |      1       |       2       |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ppe_ddp.contracts import Waitable
from ppe_ddp.engine.peer_processes import Activity
from ppe_ddp.engine.zero.shard_collectives import all_gather
from ppe_ddp.engine.zero.shards import Shard, ShardedModel
from ppe_ddp.errors import UnusableError
from ppe_ddp.megatron.buffer_synchronizer import BufferSynchronizer
from ppe_ddp.megatron.gradient_buffers import ParamAndGradBuffer
from ppe_ddp.torch_internals import version_of


class _Assigned(NamedTuple):
    """The gradient last assigned to a weight, and the versions by which its changes are noticed."""

    revision: int  # of the averages
    source_version: int  # of the buffer; changes with each write into main_grad
    gradient: Tensor  # a view of the buffer, or a copy if the dtypes differ
    version: int  # of the copy; changes if the optimizer unscales or clips it


class ShardedBuffers(ShardedModel):
    """The shards of the buffers of one reduction group, for a distributed optimizer.

    Gathering is in place, since parameters are views of the buffer. So the parameters of a unit must not be used
    between ``gather()`` and the end of its Work.
    """

    has_even_shards = False  # the bounds of a rank's part of a bucket may lie anywhere in a parameter

    def __init__(self, state: BufferSynchronizer, number: int) -> None:
        self.copies = state.copies
        self._negotiation = state.reduction_groups[number].negotiation
        self.groups = state.reduction_groups[number].groups
        self._gradients = state.gradients
        self._synchronizer = state
        # A forward needs first the parameters that backward reaches last.
        self._buckets = [bucket for bucket in reversed(state.layout.buckets) if bucket.reduction_group == number]
        places = {
            i: (bucket, offset)
            for bucket in self._buckets
            for i, offset in zip(bucket.plan.members, bucket.plan.offsets, strict=True)
        }
        self._indices = sorted(places)
        position = {i: k for k, i in enumerate(self._indices)}
        self.units = [[position[i] for i in reversed(bucket.plan.members)] for bucket in self._buckets]
        self.shards: list[Shard] = []
        self._weights: dict[int, Tensor] = {}
        self._assigned: dict[int, _Assigned] = {}
        self._under_way: set[int] = set()  # units that are being gathered
        self._places: list[tuple[ParamAndGradBuffer, slice]] = []  # of the shards
        for i in self._indices:
            bucket, offset = places[i]
            parameter, spec = state.module_state.parameters[i], state.module_state.specs[i]
            size = bucket.padded // self.groups.world_size
            first = self.groups.rank * size - offset
            start = min(max(first, 0), spec.numel)
            self.shards.append(Shard(parameter, spec, start, max(min(first + size, spec.numel), start)))
            begin = bucket.start + offset
            place = slice(begin + start, begin + self.shards[-1].stop)
            self._places.append((state.buffers[bucket.buffer], place))

    def require_same(self, what: str, *titles: str, watched: Mapping[str, Callable[[], Sequence[str]]]) -> None:
        """See the base; costs no message, as each mask has a digest of all that must be the same."""
        self._negotiation.use_plug(what, *titles, watched=watched)

    @property
    def is_synchronized(self) -> bool:
        """Whether every gradient in the buffers is an average."""
        self._synchronizer.wait_for_results()
        return not self._gradients.is_dirty

    def gradients(self) -> list[Tensor | None]:
        """The averages of this rank's shards: views of the grad buffers, in their dtype, or None."""
        if not self.is_synchronized:
            raise UnusableError(
                f"rank {self.groups.rank}: there are gradients that no synchronization has averaged; call "
                "finish_grad_sync() (or finalize_model_grads()) before the optimizer's step"
            )
        return [
            buffer.grad_data[place] if self._gradients.averaged[i] else None
            for i, (buffer, place) in zip(self._indices, self._places, strict=True)
        ]

    def attach(self, index: int, weight: Tensor) -> None:
        """Attach a weight, whose ``grad`` is set to the average in :meth:`assign_gradients`."""
        self._weights[index] = weight
        self._assigned.pop(index, None)

    def assign_gradients(self) -> list[bool]:
        """Set ``grad`` of the weights to new averages, or to values that were written into ``main_grad``."""
        gradients = self.gradients()
        for index, weight in self._weights.items():
            gradient = gradients[index]
            if gradient is None:
                weight.grad = None
                self._assigned.pop(index, None)
            elif self._has_changed(index, weight, gradient):
                weight.grad = gradient.to(weight.dtype)
                self._assigned[index] = _Assigned(
                    self._gradients.revision, version_of(gradient), weight.grad, version_of(weight.grad)
                )
        return [gradient is not None for gradient in gradients]

    def _has_changed(self, index: int, weight: Tensor, gradient: Tensor) -> bool:
        assigned = self._assigned.get(index)
        if assigned is None or assigned.revision != self._gradients.revision:
            return True
        if gradient.dtype == weight.dtype or version_of(gradient) == assigned.source_version:
            return False
        held = weight.grad
        if held is None or held.data_ptr() != assigned.gradient.data_ptr() or version_of(held) != assigned.version:
            raise UnusableError(
                f"rank {self.groups.rank}: the gradient of {self.shards[index].name!r} was changed by its "
                "optimizer (unscaled or clipped), and then in main_grad, which has another dtype: change main_grad "
                "before the optimizer sees it, or the gradients in the optimizer's param_groups"
            )
        return True

    def zero_grad(self, indices: Sequence[int], *, set_to_none: bool = True) -> None:
        """Clear ``.grad`` and ``main_grad``; afterwards there is no gradient, with or without ``set_to_none``.

        Megatron's train step relies on this if it calls ``zero_grad_buffer(zero_buffer=False)``.
        """
        for index in indices:
            self.shards[index].parameter.grad = None
        self._synchronizer.clear_some([self._indices[index] for index in indices])
        for index in indices:
            if index in self._weights:
                self._weights[index].grad = None

    def write(self, index: int, values: Tensor) -> None:
        """Set the shard at ``index`` in the parameter buffer; local."""
        self._memory_of(index)[self._places[index][1]].copy_(values.detach())

    def write_in_place(self, indices: Sequence[int]) -> None:
        """Check that the parameters at ``indices`` are views of the buffer, which then has their new values."""
        for index in indices:
            self._memory_of(index)

    def _memory_of(self, index: int) -> Tensor:
        memory = self._places[index][0].param_data
        assert memory is not None
        shard = self.shards[index]
        if shard.parameter.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr():
            raise UnusableError(
                f"rank {self.groups.rank}: parameter {shard.name!r} was given other memory since the module was "
                "wrapped, so it is no view of the parameter buffer; wrap the module again, on all ranks"
            )
        return memory

    def gather(self, unit: int) -> Waitable | None:
        """Start the all-gather of one bucket of parameters, in place."""
        bucket = self._buckets[unit]
        if bucket.padded == 0 or self.groups.world_size == 1:
            return None
        groups, memory = self.groups, self._synchronizer.buffers[bucket.buffer].param_data
        assert memory is not None
        values = bucket.of(memory)
        size = bucket.padded // groups.world_size
        self.note_gather(Activity.GATHER)
        self._under_way.add(unit)
        own = values.narrow(0, groups.rank * size, size)
        return all_gather(values, own, groups.buckets, self._synchronizer.pool)

    def abandon(self, unit: int | None = None) -> None:
        self._under_way -= self._under_way if unit is None else {unit}

    def install(self, unit: int) -> None:
        """Note that the gather is complete; the parameters are views of the gathered buffer."""
        if unit in self._under_way:
            self._under_way.remove(unit)
            if not self._under_way:
                self.note_gather(Activity.GATHERED)
