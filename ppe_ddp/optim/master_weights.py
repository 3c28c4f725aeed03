"""Master weights, which the wrapped optimizer updates: 1-D shards of parameters, in high precision.

Where a parameter has that precision itself, its master weight is the very memory of the shard. Else it is a
copy, and a change of the parameter from outside (``load_state_dict``) is noticed by its version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from ppe_ddp.engine.strides import is_non_overlapping_and_dense
from ppe_ddp.engine.torch_internals import version_of

if TYPE_CHECKING:
    from torch import Tensor

    from ppe_ddp.engine.zero.shards import Shard


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
