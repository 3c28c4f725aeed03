"""The base class of Megatron wrappers: holds a module, whose state dict is the wrapper's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping


class DistributedDataParallelBase(nn.Module, ABC):
    """Abstract base of wrappers for data parallelism, with the interface of Megatron's class of this name.

    State dicts have the names of the wrapped module, without a prefix of the wrapper's.

    Args:
        module: The module to wrap.

    Raises:
        TypeError: ``module`` is no module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"{type(self).__name__} wraps an nn.Module, not {type(module).__name__}")
        self.module = module

    @abstractmethod
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the wrapped module; a subclass may extend this."""
        return self.module(*inputs, **kwargs)

    def state_dict(self, *args: Any, prefix: str = "", keep_vars: bool = False, **kwargs: Any) -> Any:
        """The wrapped module's ``state_dict``: parameters and persistent buffers by name, as references.

        Args:
            *args: ``(prefix, keep_vars)``, or torch's deprecated ``(destination, prefix, keep_vars)``.
            prefix: Put before every name.
            keep_vars: Whether to leave tensors attached to autograd.
            **kwargs: Further keywords of the module's own method.
        """
        if args and isinstance(args[0], str):
            prefix, args = args[0], args[1:]
            if args:
                keep_vars, args = args[0], args[1:]
        return self.module.state_dict(*args, prefix=prefix, keep_vars=keep_vars, **kwargs)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """The state dict for a checkpoint: by the wrapped module's method of this name, or else its ``state_dict``."""
        own = getattr(self.module, "state_dict_for_save_checkpoint", None)
        return (own or self.module.state_dict)(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy ``state_dict`` into the wrapped module.

        Args:
            state_dict: Parameters and persistent buffers by the module's names.
            strict: Whether the names must be exactly the module's.
            assign: Refused: the wrapper's buffers belong to the parameters that are there.

        Returns:
            torch's named tuple of ``missing_keys`` and ``unexpected_keys``.
        """
        if assign:
            raise ValueError("load_state_dict(assign=True) replaces parameters whose gradients lie in buffers: copy")
        return self.module.load_state_dict(state_dict, strict=strict)
