"""Finds weights that pipeline stages share, by the names that Megatron's models have for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def word_embedding(module: nn.Module, config: object) -> Tensor | None:
    """The result of ``shared_embedding_or_output_weight()``: the embedding of the first stage, the output of the last.

    None for a model that has no such method; or whose ``share_embeddings_and_output_weights`` is False, unless
    ``config.mtp_num_layers`` is positive: layers that predict further tokens have the embedding on the last stage.
    """
    model = _owner(module, "shared_embedding_or_output_weight")
    if model is None:
        return None
    is_shared = getattr(model, "share_embeddings_and_output_weights", True)
    if not (is_shared or getattr(config, "mtp_num_layers", 0)):
        return None
    weight: Callable[[], Tensor | None] = model.shared_embedding_or_output_weight  # type: ignore[assignment]
    return weight()


def position_embedding(module: nn.Module, _config: object) -> Tensor | None:
    """The weight of ``position_embeddings``; None for a model that has none."""
    model = _owner(module, "position_embeddings")
    embeddings: Any = None if model is None else model.position_embeddings
    return getattr(embeddings, "weight", None)


def needs_own_bucket(module: nn.Module, config: object) -> set[int]:
    """The ids of the parameters that other stages must shard in the same way, wherever they lie there."""
    shared = (word_embedding(module, config), position_embedding(module, config))
    found = {id(weight) for weight in shared if weight is not None}
    marks = ("shared_embedding", "pipeline_parallel")
    return found | {id(p) for p in module.parameters() if any(getattr(p, mark, False) for mark in marks)}


def _owner(module: nn.Module, attribute: str) -> nn.Module | None:
    """The module, or one that it wraps under the name ``module``, that has ``attribute``."""
    inner: Any = module
    while isinstance(inner, nn.Module):
        if hasattr(inner, attribute):
            return inner
        inner = getattr(inner, "module", None)
    return None
