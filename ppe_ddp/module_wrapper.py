"""The base of the wrapper: holds a module, and saves and loads its state dict under the module's own names.

State dicts of torch's wrapper, whose names begin with ``module.``, load as well.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ppe_ddp.errors import UnusableError
from ppe_ddp.torch_internals import (
    COMPILED,
    IGNORED_NAMES,
    is_wrapped_by_compile,
    loading_metadata,
    mark_ignored,
    metadata_of,
    rename_in_checkpoints,
    saved_buffers,
    set_metadata,
)

_PPE = "pytorch_pfn_extras.training._transform_model"


def _let_ppe_unwrap() -> None:
    """Let ppe's Trainer look into our wrappers as into its own, so that what modules report has the same names."""
    kinds = getattr(sys.modules.get(_PPE), "PpeDistributedDataParallel", ())
    if isinstance(kinds, type):  # else that is done already, or this ppe has no such name
        vars(sys.modules[_PPE])["PpeDistributedDataParallel"] = (kinds, ModuleWrapper)


class ModuleWrapper(nn.Module):
    """Holds ``module``, which must not be a wrapper; the state dict is the module's own, without a prefix."""

    def __init__(self, module: nn.Module) -> None:
        if isinstance(module, ModuleWrapper | TorchDDP):
            raise ValueError(
                f"the module is wrapped already, by {type(module).__module__}.{type(module).__qualname__}, and both "
                "would average every gradient: wrap its .module, or leave one of the two out"
            )
        super().__init__()
        _let_ppe_unwrap()
        self.module = module
        # A function, as a method would keep the wrapper and its hooks alive until garbage collection.
        super().register_load_state_dict_pre_hook(_add_prefix)  # type: ignore[no-untyped-call]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped module's ``state_dict``, without a prefix; takes the same arguments.

        Raises:
            UnusableError: The wrapper itself has got a parameter, a buffer or a submodule with a state, which would be
                left out. Those that the wrapped module has, too, are saved with it.
        """
        saved = {id(one) for one in (*self.module.modules(), *self.module.parameters(), *self.module.buffers())}
        others = [(name, part) for name, part in self.named_children() if id(part) not in saved]
        own = [name for name, part in others if part.state_dict(keep_vars=True)]
        own += [name for name, one in self.named_parameters(recurse=False) if id(one) not in saved]
        own += [name for name in saved_buffers(self) if id(getattr(self, name)) not in saved]
        if own:
            raise UnusableError(
                f"{', '.join(own)}: a tensor or module of the wrapper itself, whose state dict is that of the wrapped "
                "module alone: give it to the wrapped module before wrapping, or save it apart"
            )
        return self.module.state_dict(*args, **kwargs)

    def register_state_dict_pre_hook(self, hook: Any) -> Any:
        """Register the hook on the wrapped module, whose state dict this is, and which the hook gets."""
        return self.module.register_state_dict_pre_hook(hook)

    def register_state_dict_post_hook(self, hook: Any) -> Any:
        """Register the hook on the wrapped module, whose state dict this is, and which the hook gets."""
        return self.module.register_state_dict_post_hook(hook)

    def register_load_state_dict_pre_hook(self, hook: Any) -> Any:
        """Register the hook on the wrapped module, which loads the state dict, and which the hook gets."""
        return self.module.register_load_state_dict_pre_hook(hook)

    def register_load_state_dict_post_hook(self, hook: Any) -> Any:
        """Register the hook on the wrapped module, which loads the state dict, and which the hook gets."""
        return self.module.register_load_state_dict_post_hook(hook)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """The wrapped module's ``load_state_dict``; a checkpoint of torch's wrapper (``module.``) loads too."""
        if any(key.startswith("module.") for key in state_dict):
            state_dict = _without_prefix(state_dict, self.module.state_dict(keep_vars=True).keys())
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells ``torch.distributed.checkpoint.state_dict`` that names in the state dict lack ``module.``."""
        rename_in_checkpoints(_without_wrappers)
        held = [self.module]
        if is_wrapped_by_compile(self.module):
            held.append(self.module.get_submodule(COMPILED))
        return {name.split(".")[0]: "module" for one in held for name in one.state_dict(keep_vars=True)}

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
    names = [key[len(prefix) :] for key in state_dict if key.startswith(prefix)]
    is_own = _is_own(names, own)
    renamed = [name for name in names if name in own and (is_own or not name.startswith("module."))]
    state_dict |= {f"{prefix}module.{name}": state_dict.pop(f"{prefix}{name}") for name in renamed}
    metadata = (loading_metadata() if renamed else None) or {}
    for inner, _ in module.named_modules():
        if (version := metadata.get(f"{prefix}{inner}".rstrip("."))) is not None:
            metadata.setdefault(f"{prefix}module.{inner}".rstrip("."), version)


def _is_own(names: Sequence[str], own: Collection[str]) -> bool:
    """Whether ``names`` of a state dict are the wrapped module's ``own``, and not those of torch's wrapper.

    Not each name tells: the module may have a submodule called ``module``, with parameters called like its own.
    """
    torchs = (name.removeprefix("module.") for name in names if name.startswith("module."))
    return sum(name in own for name in names) >= sum(name in own for name in torchs)


def _without_prefix(state_dict: Mapping[str, Any], own: Collection[str]) -> Mapping[str, Any]:
    """``state_dict`` without the ``module.`` of torch's wrapper, removed from names that the module has without it."""
    prefix = "module."
    is_own = _is_own(list(state_dict), own)
    renamed = {
        key: key[len(prefix) :]
        for key in state_dict
        if key.startswith(prefix) and key[len(prefix) :] in own and not (is_own and key in own)
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


def _without_wrappers(model: nn.Module, name: str, is_own: bool) -> str:
    """The name in ``model.state_dict()`` of the parameter that ``named_parameters()`` calls ``name``.

    Unless ``is_own``, that is without the ``_orig_mod.`` of what is directly in a wrapper; torch removes all others.
    """
    kept: list[str] = []
    parts, here = name.split("."), model
    while parts:
        if isinstance(here, ModuleWrapper):
            if parts[0] == "module" and _has(here, parts):
                parts = parts[1:]
            here = here.get_submodule("module")
            if not is_own and parts[:1] == [COMPILED] and is_wrapped_by_compile(here):
                here, parts = here.get_submodule(COMPILED), parts[1:]
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
