"""Moves the inputs of a wrapped module to its device."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ppe_ddp.nested_tensors import mapped

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

logger = logging.getLogger("ppe_ddp")


class Inputs:
    """Moves inputs of any structure to the device of a module; warns of the first one that was elsewhere.

    Args:
        module: The module. Where it is not on exactly one device, inputs stay where they are.
    """

    def __init__(self, module: nn.Module) -> None:
        self.device: torch.device | None = None
        self._has_warned = False
        self.find_device(module)

    def find_device(self, module: nn.Module) -> None:
        """Set the device to that of all parameters, or of all buffers if there are none; None where it is not one."""
        devices = {tensor.device for tensor in module.parameters()} or {tensor.device for tensor in module.buffers()}
        self.device = devices.pop() if len(devices) == 1 else None

    def to_device(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The inputs on the module's device; the same objects where they are there already."""
        if self.device is None:
            return args, kwargs
        return mapped(self._to_device, args), mapped(self._to_device, kwargs)

    def _to_device(self, tensor: Tensor) -> Tensor:
        if tensor.device == self.device:
            return tensor
        if not self._has_warned:
            self._has_warned = True
            logger.warning("inputs are moved from %s to %s, where the module is", tensor.device, self.device)
        return tensor.to(self.device)
