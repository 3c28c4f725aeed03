"""The base of the wrapper: holds a module, and saves and loads its state dict under the module's own names.

State dicts of torch's wrapper, whose names begin with ``module.``, load as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ppe_ddp.torch_internals import IGNORED_NAMES, mark_ignored, metadata_of, rename_in_checkpoints, set_metadata


class ModuleWrapper(nn.Module):
    """Holds ``module``, which must not be a wrapper; the state dict is the module's own, without a prefix."""

    def __init__(self, module: nn.Module) -> None:
        if isinstance(module, ModuleWrapper | TorchDDP):
            raise ValueError(
                f"the module is wrapped already, by {type(module).__module__}.{type(module).__qualname__}, and both "
                "would average every gradient: wrap its .module, or leave one of the two out"
            )
        super().__init__()
        self.module = module
        # A function, as a method would keep the wrapper and its hooks alive until garbage collection.
        self.register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's ``state_dict``, without a prefix; takes the same arguments."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The wrapped module's ``load_state_dict``; a checkpoint of torch's wrapper (``module.``) loads too."""
        if any(key.startswith("module.") for key in state_dict):
            state_dict = _without_prefix(state_dict, self.module.state_dict(keep_vars=True).keys())
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells ``torch.distributed.checkpoint.state_dict`` that names in the state dict lack ``module.``."""
        rename_in_checkpoints(_without_wrappers)
        return {name.split(".")[0]: "module" for name in self.module.state_dict(keep_vars=True)}

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Collection[str]
    ) -> None:
        """Mark parameters and buffers of ``module`` by name, so that wrappers, torch's too, leave them alone."""
        setattr(module, IGNORED_NAMES, params_and_buffers_to_ignore)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in params_and_buffers_to_ignore:
                mark_ignored(tensor)

    def _ignored(self) -> list[str]:
        return list(getattr(self.module, IGNORED_NAMES, ()))


def _add_prefix(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Add ``module.`` to names before a larger module loads them, as it expects that of a submodule's submodule."""
    module = wrapper.get_submodule("module")
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    own |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    of_class = nn.Module.get_extra_state
    extra = (name for name, part in module.named_modules() if type(part).get_extra_state is not of_class)
    own |= {f"{name}._extra_state".lstrip(".") for name in extra}
    for key in list(state_dict):
        name = key[len(prefix) :]
        inner = f"{prefix}module.{name}"
        if key.startswith(prefix) and name in own and inner not in state_dict:
            state_dict[inner] = state_dict.pop(key)


def _without_prefix(state_dict: Mapping[str, Any], own: Collection[str]) -> Mapping[str, Any]:
    """``state_dict`` without the ``module.`` of torch's wrapper, removed from names that the module has without it."""
    prefix = "module."
    renamed = {
        key: key[len(prefix) :]
        for key in state_dict
        if key.startswith(prefix) and key not in own and key[len(prefix) :] in own
    }
    if not renamed:
        return state_dict
    result = OrderedDict((renamed.get(key, key), value) for key, value in state_dict.items())
    metadata = metadata_of(state_dict)
    if metadata is not None:
        plain = {(key[len(prefix) :] if key.startswith(prefix) else key): value for key, value in metadata.items()}
        if prefix.rstrip(".") in metadata:
            plain[""] = metadata[prefix.rstrip(".")]
        set_metadata(result, plain)
    return result


def _without_wrappers(model: nn.Module, name: str) -> str:
    """The name in ``model.state_dict()`` of the parameter that ``named_parameters()`` calls ``name``."""
    kept: list[str] = []
    parts, here = name.split("."), model
    while parts:
        if isinstance(here, ModuleWrapper):
            if parts[0] == "module" and _has(here, parts):
                parts = parts[1:]
            here = here.get_submodule("module")
        else:
            kept.append(parts[0])
            here, parts = getattr(here, parts[0], here), parts[1:]
    return ".".join(kept)


def _has(module: nn.Module, parts: Sequence[str]) -> bool:
    """Whether ``module`` has this attribute; a submodule of the user's may be called ``module``, too."""
    try:
        attrgetter(".".join(parts))(module)
    except AttributeError:
        return False
    return True
