"""The base of the wrapper: holds a module, and has its state dict and its names of tensors to ignore."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ppe_ddp.engine.torch_internals import IGNORED_NAMES, mark_ignored, rename_in_checkpoints
from ppe_ddp.state_dict_names import add_prefix, without_prefix, without_wrappers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


class ModuleWrapper(nn.Module):
    """Holds ``module``; its state dict is that module's, without a prefix.

    Args:
        module: The module to wrap.

    Raises:
        ValueError: It is a wrapper itself.
    """

    def __init__(self, module: nn.Module) -> None:
        if isinstance(module, ModuleWrapper | TorchDDP):
            raise ValueError(
                f"the module is wrapped already, by {type(module).__module__}.{type(module).__qualname__}, and both "
                "would average every gradient: wrap its .module, or leave one of the two out"
            )
        super().__init__()
        self.module = module
        # not a method, which would keep the wrapper, and so its hooks, alive until the garbage is collected
        self.register_load_state_dict_pre_hook(add_prefix)  # type: ignore[no-untyped-call]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's ``state_dict``, without a prefix; takes the same arguments."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The wrapped module's ``load_state_dict``; a checkpoint of torch's wrapper (``module.``) loads too."""
        if any(key.startswith("module.") for key in state_dict):
            state_dict = without_prefix(state_dict, self.module.state_dict(keep_vars=True).keys())
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def _fqn_modifiers(self) -> dict[str, str]:
        """What ``torch.distributed.checkpoint.state_dict`` asks for: which names lie in ``module``, unnamed."""
        rename_in_checkpoints(partial(without_wrappers, ModuleWrapper))
        names = [name for name in self.module.state_dict(keep_vars=True)]
        return {name.split(".")[0]: "module" for name in names}

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Collection[str]
    ) -> None:
        """Leave parameters and buffers alone when ``module`` is wrapped, by this class or by torch's.

        Args:
            module: What will be wrapped; marked in place.
            params_and_buffers_to_ignore: Qualified names. They are neither broadcast nor averaged nor cast.
        """
        setattr(module, IGNORED_NAMES, params_and_buffers_to_ignore)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in params_and_buffers_to_ignore:
                mark_ignored(tensor)

    def _ignored(self) -> list[str]:
        return list(getattr(self.module, IGNORED_NAMES, ()))
