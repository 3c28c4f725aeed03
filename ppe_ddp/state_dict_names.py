"""Converts names in state dicts: torch's wrapper's have ``module.`` in front, this one's have not; both load."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from torch import nn

from ppe_ddp.engine.torch_internals import metadata_of, set_metadata

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


_EXTRA = "_extra_state"


def add_prefix(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """A pre-hook of loading, for a wrapper inside a larger module: that looks for our names with ``module.``."""
    module = wrapper.get_submodule("module")
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    own |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    own |= {f"{name}.{_EXTRA}".lstrip(".") for name, part in module.named_modules() if _has_extra_state(part)}
    for key in list(state_dict):
        name = key[len(prefix) :]
        inner = f"{prefix}module.{name}"
        if key.startswith(prefix) and name in own and inner not in state_dict:
            state_dict[inner] = state_dict.pop(key)


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def without_prefix(state_dict: Mapping[str, Any], own: Collection[str]) -> Mapping[str, Any]:
    """``state_dict`` with torch's ``module.`` taken off the names that the module knows only without it."""
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


def without_wrappers(wrapper: type[nn.Module], model: nn.Module, name: str) -> str:
    """The name in ``model.state_dict()`` of what ``named_parameters()`` calls ``name``.

    Args:
        wrapper: The class whose ``module`` has no place in names of state dicts; it may be anywhere in ``model``.
        model: The module.
        name: A name of either kind.
    """
    kept: list[str] = []
    parts, here = name.split("."), model
    while parts:
        if isinstance(here, wrapper):
            if parts[0] == "module" and _has(here, parts):
                parts = parts[1:]
            here = here.get_submodule("module")
        else:
            kept.append(parts[0])
            here, parts = getattr(here, parts[0], here), parts[1:]
    return ".".join(kept)


def _has(module: nn.Module, parts: Sequence[str]) -> bool:
    """Whether there is such an attribute: a submodule of the user's may be called ``module`` too."""
    missing = object()
    found: Any = module
    for part in parts:
        found = getattr(found, part, missing)
    return found is not missing
