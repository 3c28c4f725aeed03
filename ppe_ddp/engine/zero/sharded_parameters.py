"""The shards of the plain wrapper: gradients are reduce-scattered, and updated parameters are gathered.

Buckets may differ from step to step, so no buffer is laid out beforehand. Each parameter is cut by itself (see
``shards.py``), and every rank gets its chunks of a bucket in one message.

    packed     .grad -> rows, one a rank -> reduce-scatter -> this rank's row of the average
    in place   .grad, if its memory has the layout of the rows -> reduce-scatter -> this rank's row of the average
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from operator import is_
from time import perf_counter_ns

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ppe_ddp.backends.memory_pool import MemoryPool
from ppe_ddp.contracts import Waitable
from ppe_ddp.engine.bucket import Bucket, BucketContext, reducible_in_place
from ppe_ddp.engine.completion import Steps
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.memory import allocator
from ppe_ddp.engine.module import ModuleState
from ppe_ddp.engine.peer_processes import Activity
from ppe_ddp.engine.plan import BucketPlan, Packing, ParameterSpec
from ppe_ddp.engine.zero.parameter_gather import UnitGather
from ppe_ddp.engine.zero.shard_collectives import HALVES, ReduceScatter
from ppe_ddp.engine.zero.sharded_gradient import GradientSlot
from ppe_ddp.engine.zero.shards import Copies, Rows, Shard, ShardedModel, bounds_of, flattened, is_dense
from ppe_ddp.errors import UnusableError
from ppe_ddp.torch_internals import GRADIENT, without_torch_function

_UNIT_BYTES = 4 << 20
_ALONE_BYTES = 4 << 20  # from here on a copy costs more than a message of its own (measured: 0.5 to 4 MiB)


class ShardedParameters(ShardedModel):
    """The trainable parameters of a wrapped module, each cut into even chunks."""

    def __init__(self, groups: Groups, module_state: ModuleState, require_same: Callable[..., None]) -> None:
        self.groups = groups
        self._require_same = require_same
        self.copies = Copies(groups)
        self.pool = MemoryPool(allocator(groups.buckets))
        self.shards = [
            Shard(parameter, spec, *bounds_of(spec.numel, groups.rank, groups.world_size))
            for parameter, spec in zip(module_state.parameters, module_state.specs, strict=True)
            if parameter.requires_grad
        ]
        self._specs = [shard.spec for shard in self.shards]
        self.units = _units(self._specs, groups.world_size)
        self._unit_of = {index: unit for unit, members in enumerate(self.units) for index in members}
        self._gathers: dict[int, UnitGather] = {}
        self._under_way: dict[int, tuple[UnitGather, Waitable | None]] = {}
        self._written: list[set[int]] = [set() for _ in self.units]
        self._gradients = [GradientSlot(shard) for shard in self.shards]
        self._parameters = [shard.parameter for shard in self.shards]
        self._marks = [gradient.mark for gradient in self._gradients]
        self._contents = [gradient.content for gradient in self._gradients]
        self._may_release = False
        self.use_module(module_state)

    def require_same(self, what: str, *titles: str, watched: Mapping[str, Callable[[], Sequence[str]]]) -> None:
        """See the base; costs no message, as each mask has a digest of all that must be the same."""
        self._require_same(what, *titles, watched=watched)

    @staticmethod
    def packing(packing: Packing) -> Packing:
        """The packing for scattered gradients, given the packing for averaged ones."""
        if packing.fixed:
            return packing  # for hooks, which compute whole averages
        return replace(packing, adopt_bytes=min(packing.adopt_bytes, _ALONE_BYTES), measured=False)

    # ------------------------------------------------------------------ what the engine calls

    def use_module(self, module_state: ModuleState) -> None:
        """Take gradients in the order of ``module_state`` from now on."""
        self._last_mask = b"", b""
        self._index = self.indices_of(module_state)

    def indices_of(self, module_state: ModuleState) -> dict[int, int]:
        """From parameter index to shard index; ValueError if a trainable parameter has no shard, or has changed."""
        known = {id(shard.parameter): k for k, shard in enumerate(self.shards)}
        found: dict[int, int] = {}
        for i, (parameter, spec) in enumerate(zip(module_state.parameters, module_state.specs, strict=True)):
            k = known.get(id(parameter))
            if k is None and not parameter.requires_grad:
                continue
            if k is None or self._specs[k] != spec:
                change = "is new, or trainable only now" if k is None else f"was {self._specs[k].described()}"
                raise ValueError(
                    f"rank {self.groups.rank}: parameter {spec.described()} {change}, and the DistributedOptimizer "
                    "has shards of what there was: wrap the module anew, and make a new optimizer, on all ranks"
                )
            found[i] = k
        return found

    def with_shards(self, mask: bytes) -> bytes:
        """Clear in ``mask`` the parameters without shards: frozen ones may still have gradients."""
        if mask != self._last_mask[0]:
            self._last_mask = mask, bytes([here and i in self._index for i, here in enumerate(mask)])
        return self._last_mask[1]

    def bucket(self, plan: BucketPlan, context: BucketContext, present: bytes) -> ReduceScatterBucket:
        """Make a reduce-scattered bucket for ``plan``."""
        return ReduceScatterBucket(plan, context, present, pool=self.pool)

    def hand_over(self, indices: Sequence[int], averages: Sequence[Tensor]) -> None:
        """Set the gradients of this rank's shards, or add to those that were not cleared.

        ``averages`` has an average for each parameter: its shard (1-D, owned from here on), or the whole average.
        """
        self._may_release = True
        if isinstance(averages, AveragedShards) and self._take(indices, averages):
            return
        for i, average in zip(indices, averages, strict=True):
            k = self._index[i]
            if average.is_sparse or average.shape == self._specs[k].shape:
                part = self.shards[k].cut(average)
                average = part if self.groups.world_size == 1 else part.clone()  # a view would keep all of it alive
            self._gradients[k].add(average)

    def _take(self, indices: Sequence[int], averages: AveragedShards) -> bool:
        """Set the gradients at once if all were cleared and none needs another dtype; else do nothing, return False.

        What no optimizer of this wrapper has may be in that of another one, see :meth:`GradientSlot.add`.
        """
        places = [self._index[i] for i in indices]
        parameters = [self._parameters[k] for k in places]
        contents = [self._contents[k] for k in places]
        if not all(map(is_, map(GRADIENT, parameters), repeat(None))):
            return False
        dtype = averages[0].dtype
        if not all(content.is_attached and content.weight.dtype is dtype for content in contents):
            return False
        for parameter, content, average, k in zip(parameters, contents, averages, places, strict=True):
            content.local = None
            content.weight.grad = average
            parameter.grad = self._marks[k]
        return True

    def averaged(self) -> list[int]:
        """The indices of parameters that have an average that was not cleared; the same on all ranks."""
        with without_torch_function():
            return [i for i, k in self._index.items() if self._gradients[k].exists]

    def release(self) -> None:
        """Free the memory of gradients that were cleared."""
        if not self._may_release:
            return
        with without_torch_function():  # so that parameters that are being gathered are not waited for
            for gradient in self._gradients:
                gradient.release()

    # ------------------------------------------------------------------ what the optimizer calls

    @property
    def is_synchronized(self) -> bool:
        return self._are_averaged() or all(gradient.is_synchronized for gradient in self._gradients)

    def attach(self, index: int, weight: Tensor) -> None:
        """Put the averaged gradient of the shard at ``index`` into ``weight.grad`` from now on."""
        self._gradients[index].attach(weight)

    def gradients(self) -> list[Tensor | None]:
        """The averages, or None; frees those that were cleared, and raises if some gradients are not averaged."""
        for gradient in self._gradients:
            if not gradient.is_synchronized:
                raise UnusableError(
                    f"rank {self.groups.rank}: the gradient of {gradient.name!r} has parts that no "
                    "synchronization has averaged; run the last backward outside no_sync(), or call "
                    "finish_grad_sync(), before the optimizer's step; after an error, clear the gradients"
                )
        self._may_release = True  # the user may have set ``.grad`` of a weight
        self.release()
        return [content.weight.grad for content in self._contents]

    def _are_averaged(self) -> bool:
        """Whether every parameter has an average and no local gradient, as in most steps."""
        with without_torch_function():
            are_marked = all(map(is_, map(GRADIENT, self._parameters), self._marks))
        return are_marked and all([content.local is None for content in self._contents])

    def assign_gradients(self) -> list[bool]:
        """Free averages that were cleared; ``.grad`` of the weights is set when averages arrive."""
        if self._are_averaged():
            return [True] * len(self.shards)
        self.gradients()
        return [gradient.exists for gradient in self._gradients]

    def zero_grad(self, indices: Sequence[int], *, set_to_none: bool = True) -> None:
        """Clear the averages, and the gradients in ``.grad``."""
        with without_torch_function():
            if not set_to_none:
                for index in indices:
                    if (gradient := self._parameters[index].grad) is not None:
                        gradient.detach_().zero_()
                return
            for index in indices:
                self._parameters[index].grad = None
                self._contents[index].drop()
        if len(set(indices)) == len(self.shards):
            self._may_release = False

    def write(self, index: int, values: Tensor) -> None:
        """Set this rank's shard; ``values`` may be the shard's own memory."""
        shard, parameter = self.shards[index], self.shards[index].parameter.detach()
        self.write_in_place([index])
        flat = flattened(parameter, shard.spec)
        flat[shard.start : shard.stop].copy_(values)
        if not is_dense(parameter, shard.spec):
            parameter.copy_(flat.as_strided(shard.spec.shape, shard.spec.stride))

    def write_in_place(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._written[self._unit_of[index]].add(index)

    def gather(self, unit: int) -> Waitable | None:
        """Start to gather the parameters of ``unit`` that were written since the last gather."""
        self.install(unit)  # a gather of another optimizer with parameters in this unit may be in flight
        members = sorted(self._written[unit])
        self._written[unit].clear()
        if self.groups.world_size == 1 or not members:
            increment_version([self.shards[k].parameter for k in members])
            return None
        gather = self._gathers.get(unit)
        if gather is None or not gather.is_current(members):
            shards = [self.shards[k] for k in members]
            gather = self._gathers[unit] = UnitGather(members, shards, self.groups, self.pool)
        self.note_gather(Activity.GATHER)
        pending = gather.start()
        self._under_way[unit] = (gather, pending)
        return pending

    def abandon(self, unit: int | None = None) -> None:
        for one in [unit] if unit is not None else list(self._under_way):
            if self._under_way.pop(one, None) is not None:
                self._gathers.pop(one)  # its message may still arrive, into memory that the next gather must not use
        if unit is None:
            for written in self._written:
                written.clear()

    def install(self, unit: int) -> None:
        """Copy the gathered values into the parameters."""
        if unit in self._under_way:
            gather, pending = self._under_way[unit]
            if pending is not None:
                pending.wait()
            gather.install()
            del self._under_way[unit]  # after an interrupt it is still to be installed
            if not self._under_way:
                self.note_gather(Activity.GATHERED)


def _units(specs: Sequence[ParameterSpec], world_size: int) -> list[list[int]]:
    """Group parameters that are gathered together: of one dtype and device, in order; a large one alone."""
    units: list[list[int]] = []
    last: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for k, spec in enumerate(specs):
        if spec.nbytes >= _ALONE_BYTES and spec.numel % world_size == 0:
            units.append([k])
            continue
        key = (spec.dtype, spec.device)
        if sizes.get(key, _UNIT_BYTES) >= _UNIT_BYTES:
            last[key], sizes[key] = [], 0
            units.append(last[key])  # where its first member is needed
        last[key].append(k)
        sizes[key] += spec.nbytes
    return units


class AveragedShards(list["Tensor"]):
    """This rank's shards of some averages: 1-D each, in memory that nobody else uses."""


class ReduceScatterBucket(Bucket):
    """A bucket of dense gradients that is reduce-scattered."""

    def __init__(self, plan: BucketPlan, context: BucketContext, present: bytes, *, pool: MemoryPool) -> None:
        super().__init__(plan, context, present)
        groups = context.groups
        self._world_size = world_size = groups.world_size
        self._reduction = context.reduction
        self._pool = pool
        self._transport = ReduceScatter(groups, pool, plan.device)
        self._rows = Rows(self.specs, groups.rank, world_size)
        # Members whose chunks do not end between two rows of the first dimension; they have to be flattened.
        self._ragged = [k for k, spec in enumerate(self.specs) if not spec.shape or spec.shape[0] % world_size]
        self._message: Tensor | None = None
        self._row: Tensor | None = None

    def launch(self, *, is_last: bool) -> None:
        if self.plan.numel == 0:
            return
        rows = self._gradient_as_rows() if self.weight == 1.0 else None
        ours = rows is None
        if rows is None:
            flat = self._pool.take(self._rows.numel, self.plan.dtype, self.plan.device)
            rows = flat.view(self._world_size, self._rows.width)
            self._rows.fill(rows, self._gradients_to_cut())
            if self.weight != 1.0:
                flat.mul_(self.weight)
        self._message = rows
        wide = torch.float32 if rows.dtype in HALVES else rows.dtype
        self._row = self._pool.take(self._rows.width, wide, rows.device)
        self.packed_at = perf_counter_ns()
        factor = self._reduction.mean_factor
        try:
            self.pending = self._transport.start(self._row, rows.view(-1), factor=factor, spare=ours)
        except RuntimeError as error:
            raise self._reduction.failure(error, self.names, self.plan.index, "the reduce-scatter failed") from error

    def _gradient_as_rows(self) -> Tensor | None:
        """The gradient's memory as rows, if the bucket has one gradient whose memory can be used; else None."""
        gradient, world_size = self.gradients[0], self._world_size
        if self._transport.from_pool or len(self.gradients) > 1 or gradient is None or gradient.numel() % world_size:
            return None
        if not reducible_in_place(gradient, self.specs[0]):
            return None
        return gradient.as_strided((world_size, self._rows.width), (self._rows.width, 1))

    def _gradients_to_cut(self) -> list[Tensor]:
        """The gradients for :meth:`Rows.fill`; flattened, except those that are cut between two rows."""
        dtype, specs = self.plan.dtype, self.specs
        flats = [gradient for gradient in self.gradients if gradient is not None]
        if self.plan.row_major and len(flats) == len(specs):  # faster than flattening each
            for k in self._ragged:
                flats[k] = flats[k].reshape(-1)
        else:
            zero = torch.zeros((), dtype=dtype, device=self.plan.device)
            flats = [
                zero.expand(spec.numel).contiguous() if gradient is None else flattened(gradient, spec)
                for gradient, spec in zip(self.gradients, specs, strict=True)
            ]
        return [flat if flat.dtype is dtype else flat.to(dtype) for flat in flats]

    def finish(self) -> Steps:
        yield from self._transport.finish(self, self._reduction)
        self._message = None

    def averages(self) -> list[Tensor]:
        """This rank's chunk of each member's average, 1-D."""
        if self._row is None:
            return AveragedShards([torch.empty(0, dtype=spec.dtype, device=spec.device) for spec in self.specs])
        row, self._row = self._row, None
        return AveragedShards(self._rows.parts(row))

    def release(self) -> None:
        super().release()
        self._message = self._row = None
