"""Master weights, which the wrapped optimizer updates: 1-D shards of parameters, in high precision.

Where a parameter has that precision itself, its master weight is the very memory of the shard. Else it is a
copy, and a change of the parameter from outside (``load_state_dict``) is noticed by its version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ppe_ddp.engine.plan import is_non_overlapping_and_dense
from ppe_ddp.engine.torch_internals import version_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from ppe_ddp.engine.zero.shards import Shard, ShardedModel


class MasterWeight:
    """The master weight of one shard.

    Args:
        index: Which of the model's shards it is.
        shard: The shard.
        dtype: At least this precision.
    """

    def __init__(self, index: int, shard: Shard, dtype: torch.dtype) -> None:
        self.index = index
        self.shard = shard
        self.dtype = torch.promote_types(shard.parameter.dtype, dtype)
        own = self._own()
        self.is_alias = own.dtype == self.dtype and is_non_overlapping_and_dense(shard.parameter)
        self.weight = nn.Parameter(own if self.is_alias else own.to(self.dtype, copy=True))
        self._version = version_of(shard.parameter)
        self._address = shard.parameter.data_ptr()

    def _own(self) -> Tensor:
        """This rank's part of the parameter as it is now: its memory where that is dense, else a copy."""
        parameter, shard = self.shard.parameter.detach(), self.shard
        if is_non_overlapping_and_dense(parameter):
            return parameter.as_strided((shard.numel,), (1,), parameter.storage_offset() + shard.start)
        return parameter.reshape(-1)[shard.start : shard.stop].clone()

    def refresh(self) -> None:
        """Copy the parameter to the master weight, if it was written from outside since the last step."""
        parameter = self.shard.parameter
        if self.is_alias:
            if parameter.data_ptr() != self._address:
                self.weight.data = self._own()
                self._address = parameter.data_ptr()
        elif version_of(parameter) != self._version:
            own = self._own()
            changed = own != self.weight.to(own.dtype)
            self.weight.data = torch.where(changed, own.to(self.dtype), self.weight)
            self.note_written()

    def note_written(self) -> None:
        """Note that the parameter has the values of the master weight."""
        self._version = version_of(self.shard.parameter)


class MasterWeights:
    """All master weights of one optimizer, in the order in which they were added."""

    def __init__(self) -> None:
        self._all: list[MasterWeight] = []
        self._copies: list[MasterWeight] = []
        self._aliased: list[nn.Parameter] = []
        self._weights: list[nn.Parameter] = []
        self._addresses: list[int] = []  # of what is aliased, when it was looked at last
        self._own_addresses: list[int] = []
        self._update: _Update | None = None

    def __iter__(self) -> Iterator[MasterWeight]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def append(self, master: MasterWeight) -> None:
        """Add one more."""
        self._all.append(master)
        self._update = None
        if not master.is_alias:
            self._copies.append(master)
            return
        self._aliased.append(master.shard.parameter)
        self._weights.append(master.weight)

    def refresh(self) -> None:
        """:meth:`MasterWeight.refresh` of each."""
        for master in self._copies:
            master.refresh()
        if list(map(torch.Tensor.data_ptr, self._aliased)) != self._addresses:
            for master in self._all:
                master.refresh()
            self._addresses = list(map(torch.Tensor.data_ptr, self._aliased))
            self._own_addresses = list(map(torch.Tensor.data_ptr, self._weights))

    def write(self, model: ShardedModel, updated: Sequence[bool]) -> Sequence[int]:
        """Give parameters of ``model`` the values of their master weights, on this rank.

        Args:
            model: Whose shards these are the master weights of.
            updated: For each of its shards, whether that has a new value.

        Returns:
            The units that have some of these shards, in order.
        """
        update = self._update
        if update is None or update.updated != updated:
            update = self._update = _Update.of(self._all, model, updated)
        copied = update.copies
        if list(map(torch.Tensor.data_ptr, self._weights)) == self._own_addresses:
            model.write_in_place(update.in_place)
        else:  # the optimizer has set ``.data`` of some of its weights
            copied = update.masters
        for master in copied:
            model.write(master.index, master.weight.detach())
        return update.units


@dataclass(frozen=True, eq=False)
class _Update:
    """Which parameters get new values, kept while it is the same ones.

    Attributes:
        updated: For each shard of the model, whether it has a new value.
        masters: The master weights of these.
        copies: Those of them that are not their parameter's own memory.
        in_place: The numbers of the shards of the others.
        units: Those of the model that have some of these shards.
    """

    updated: Sequence[bool]
    masters: Sequence[MasterWeight]
    copies: Sequence[MasterWeight]
    in_place: Sequence[int]
    units: Sequence[int]

    @classmethod
    def of(cls, masters: Sequence[MasterWeight], model: ShardedModel, updated: Sequence[bool]) -> _Update:
        own = [master for master in masters if updated[master.index]]
        indices = {master.index for master in own}
        return cls(
            updated,
            own,
            [master for master in own if not master.is_alias],
            [master.index for master in own if master.is_alias],
            [unit for unit, members in enumerate(model.units) if not indices.isdisjoint(members)],
        )
