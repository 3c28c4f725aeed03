"""The names in a state dict: ours have no ``module.``, torch's wrapper's have, and both are understood."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import nn


def add_prefix(wrapper: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
    """Where the wrapper is a part of a larger module, that looks for our names with ``module.``."""
    for key in wrapper.get_submodule("module").state_dict(keep_vars=True):
        inner = f"{prefix}module.{key}"
        if prefix + key in state_dict and inner not in state_dict:
            state_dict[inner] = state_dict.pop(prefix + key)


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
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        plain = {(key[len(prefix) :] if key.startswith(prefix) else key): value for key, value in metadata.items()}
        if prefix.rstrip(".") in metadata:
            plain[""] = metadata[prefix.rstrip(".")]
        result._metadata = plain  # type: ignore[attr-defined]
    return result
