"""Allocates the memory that this rank loads into, and makes the resulting state_dict."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ppe_ddp.errors import CheckpointError
from ppe_ddp.sharding.checkpoint_entries import local_of, takes_anything
from ppe_ddp.sharding.load_group import device_of
from ppe_ddp.sharding.plain_values import load_plain
from ppe_ddp.sharding.regions import ShardLayout, shape_of
from ppe_ddp.sharding.tensor_transfer import RegionMemory

if TYPE_CHECKING:
    from ppe_ddp.sharding.checkpoint_entries import SourceEntry
    from ppe_ddp.sharding.key_matching import Match
    from ppe_ddp.sharding.load_group import LoadGroup
    from ppe_ddp.sharding.load_options import LoadOptions


class LoadTargets:
    """This rank's part of a checkpoint: memory for each tensor, once for tied ones.

    Args:
        targets: What this rank's module has.
        matched: Which keys are loaded, from where.
        found: What the checkpoint has.
        load_group: The ranks.
        options: See there.
        fresh: Whether to make memory; if not, it is that of the targets.

    Attributes:
        memories: By the key of the checkpoint.
        failure: Why there is not memory for all; the load has to go on, since other ranks count on this one.
    """

    def __init__(
        self,
        targets: Mapping[str, Any],
        matched: Match,
        found: Sequence[SourceEntry],
        load_group: LoadGroup,
        options: LoadOptions,
        *,
        fresh: bool,
    ) -> None:
        self._targets = targets
        self._sources = {key: source for key, source in matched.sources.items() if key in targets}
        self._load_group = load_group
        self._fresh = fresh
        self._keeps_dtype = options.keeps_dtype(fresh)
        self._device = device_for(targets, load_group, options)
        self.memories: dict[str, RegionMemory] = {}
        self.failure: Exception | None = None
        tensors = {entry.key: entry for entry in found if entry.shape is not None}
        with self._kept():
            for key, source in self._sources.items():
                if source in tensors and source not in self.memories:
                    memory = self._memory(key, tensors[source])
                    if memory is not None:
                        self.memories[source] = RegionMemory(memory)

    def borrow(self, state_dict: Mapping[str, Any]) -> None:
        """Take the checkpoint's own tensors where they are all that this rank needs; no memory twice."""
        taken = set()
        with self._kept():
            for key, region_memory in self.memories.items():
                value, room = state_dict[key].detach(), region_memory.target
                same = (value.shape, value.dtype, value.device) == (room.shape, room.dtype, room.device)
                if same and value.is_contiguous() and value.data_ptr() not in taken:
                    taken.add(value.data_ptr())
                    region_memory.target, region_memory.filled = value, True

    def state_dict(self, found: Sequence[SourceEntry], checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """The loaded tensors, by the keys of the module. Tied keys have one object, so that they stay tied.

        Args:
            found: What the checkpoint has.
            checkpoint: It, on the rank that has it; empty elsewhere.
        """
        others = {entry.key: entry.content for entry in found if entry.shape is None}
        made: dict[str, Any] = {}
        result = {}
        uses = Counter(self._sources.values())
        for key, source in self._sources.items():
            if source in others:
                own = source in checkpoint
                result[key] = copy.deepcopy(checkpoint[source]) if own else load_plain(others[source])
            elif source in self.memories:
                if source not in made:
                    made[source] = self._wrapped(self._targets[key], self.memories[source].target, uses[source] > 1)
                result[key] = made[source]
        return result

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error

    def _memory(self, key: str, entry: SourceEntry) -> Tensor | None:
        """Where the values of a key go: the module's memory, or one that is made; None for a rank without a part."""
        target = self._targets[key]
        if takes_anything(key, target) or entry.shape is None:
            return torch.empty(entry.shape or (), dtype=entry.dtype, device=self._device)
        if not self._fresh:
            return local_of(target).detach() if isinstance(target, DTensor) else target.detach()
        shape: Sequence[int] = entry.shape
        if isinstance(target, DTensor):
            region = ShardLayout.of(target).region(entry.shape, self._load_group.ranks[self._load_group.rank])
            if region is None:
                return None
            shape = shape_of(region)
        dtype = target.dtype if self._keeps_dtype else entry.dtype
        return torch.empty(shape, dtype=dtype, device=self._device if target.is_meta else target.device)

    def _wrapped(self, target: Any, local: Tensor, tied: bool) -> Any:
        if isinstance(target, DTensor):
            shape = target.shape
            stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
            mesh, placements = target.device_mesh, target.placements
            value: Tensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
        else:
            value = local
        # nn.Module wraps a tensor anew for each name; a Parameter it takes as it is.
        if tied and self._fresh and isinstance(target, nn.Parameter):
            return nn.Parameter(value, requires_grad=target.requires_grad)
        return value


def refuse_meta(targets: Mapping[str, Any], matched: Match) -> None:
    """Raise ``CheckpointError`` where values would be written to the meta device."""
    meta = [key for key in matched.sources if isinstance(targets[key], Tensor) and targets[key].is_meta]
    if meta:
        raise CheckpointError(
            f"{len(meta)} entries of the module are on the meta device, such as {meta[0]!r}, and have no memory to "
            "load into: pass assign=True, or call to_empty() first"
        )


def device_for(targets: Mapping[str, Any], load_group: LoadGroup, options: LoadOptions) -> torch.device:
    """The device for tensors that the module has on the meta device."""
    if options.device is not None:
        return torch.device(options.device)
    tensors = [target for target in targets.values() if isinstance(target, Tensor)]
    for target in tensors:
        if isinstance(target, DTensor):
            return device_of(target.device_mesh.device_type)
    return next((target.device for target in tensors if not target.is_meta), device_of(load_group.wire_kind("cpu")))
