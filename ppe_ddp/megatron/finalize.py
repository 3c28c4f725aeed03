"""Completes gradients before an optimizer's step: those summed over more than the data-parallel ranks.

    data, expert            average     every parameter, by its wrapper
    tensor                  sum         what has seen a part of the sequence only
    pipeline                sum         what every stage has a copy of
    embedding               sum         the first stage's input is the last stage's output
    position embedding      sum         where stages share it

All of it happens in ``main_grad``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import distributed as dist
from torch import nn

from ppe_ddp.megatron.distributed_data_parallel import DistributedDataParallel
from ppe_ddp.megatron.shared_weights import position_embedding, word_embedding

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup

    from ppe_ddp.megatron.parallel_groups import ParallelGroups


def finalize_model_grads(
    model: Sequence[DistributedDataParallel] | DistributedDataParallel,
    num_tokens: Tensor | None = None,
    *,
    groups: ParallelGroups | None = None,
) -> None:
    """Make the gradients of one iteration whole; every rank must call this together, once an iteration.

    Waits for the data-parallel synchronization, that of experts included, and then sums, in ``main_grad``:

    - over ``groups.tensor``, parameters with ``sequence_parallel = True`` (layer norms under sequence parallelism);
      those with ``average_gradients_across_tp_domain = True`` are averaged;
    - over ``groups.pipeline``, parameters with ``pipeline_parallel = True``, which every stage has a copy of;
    - over ``groups.embedding``, what ``shared_embedding_or_output_weight()`` gives on the first and the last stage;
    - over ``groups.position_embedding``, ``position_embeddings.weight``.

    Args:
        model: The wrapped chunks of the model that this rank has, in the order of the pipeline; or one.
        num_tokens: One element, changed in place: the tokens of this rank's micro-batches, as the last pipeline
            stage has counted them. If given, gradients are divided by the total over the data-parallel ranks; meant
            for models whose ``config.calculate_per_token_loss`` is true, so that gradients are sums.
        groups: Default: those of the first chunk.

    Raises:
        NonFiniteGradientError: See :meth:`DistributedDataParallel.finish_grad_sync`.
        PeerAbortedError: As well.
        TypeError: A chunk is not wrapped.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    for chunk in chunks:
        if not isinstance(chunk, DistributedDataParallel):
            raise TypeError(f"finalize_model_grads takes ppe_ddp.megatron wrappers, not {type(chunk).__name__}")
    groups = groups or chunks[0].groups
    for chunk in chunks:
        chunk.finish_grad_sync()
    with torch.no_grad():
        _sum_marked(chunks, "sequence_parallel", groups.tensor)
        _sum_marked(chunks, "average_gradients_across_tp_domain", groups.tensor, average=True)
        _sum_marked(chunks, "pipeline_parallel", groups.pipeline)
        _sum_shared(chunks, word_embedding, groups.embedding, groups.pipeline)
        _sum_shared(chunks, position_embedding, groups.position_embedding, groups.pipeline)
        if num_tokens is not None:
            _divide(chunks, num_tokens, groups)


def _sum_marked(
    chunks: Sequence[DistributedDataParallel], mark: str, group: ProcessGroup | None, *, average: bool = False
) -> None:
    """Sum the gradients of the parameters that have ``mark`` over ``group``."""
    if group is None or dist.get_world_size(group) == 1:
        return
    marked = [
        (chunk, parameter)
        for chunk in chunks
        for parameter in chunk.module.parameters()
        if getattr(parameter, mark, False) and hasattr(parameter, "main_grad")
    ]
    _sum(marked, group, 1.0 / dist.get_world_size(group) if average else 1.0)


def _sum_shared(
    chunks: Sequence[DistributedDataParallel],
    weight_of: Callable[[nn.Module], Tensor | None],
    group: ProcessGroup | None,
    pipeline: ProcessGroup | None,
) -> None:
    """Sum the gradient of a weight that the first chunk of the first stage and the last of the last one share."""
    if group is None or dist.get_world_size(group) == 1:
        return
    is_last = pipeline is not None and dist.get_rank(pipeline) == dist.get_world_size(pipeline) - 1
    chunk = chunks[-1] if is_last else chunks[0]
    weight = weight_of(chunk.module)
    if weight is not None and hasattr(weight, "main_grad"):
        _sum([(chunk, cast("nn.Parameter", weight))], group)


def _sum(
    pairs: Sequence[tuple[DistributedDataParallel, nn.Parameter]], group: ProcessGroup, factor: float = 1.0
) -> None:
    """Sum gradients over ``group``, those of one kind in one message."""
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[DistributedDataParallel, nn.Parameter]]] = {}
    for chunk, parameter in pairs:
        main = main_grad_of(parameter)
        kinds.setdefault((main.dtype, main.device), []).append((chunk, parameter))
    for members in kinds.values():
        grads = [main_grad_of(parameter) for _, parameter in members]
        # Behind the gradients, which of them exist: None on all data-parallel ranks is None everywhere.
        there = [chunk.main_gradients.was_averaged(parameter) for chunk, parameter in members]
        marks = torch.tensor(there, dtype=grads[0].dtype, device=grads[0].device)
        flat = torch.cat([*(grad.reshape(-1) for grad in grads), marks])
        dist.all_reduce(flat, group=group)
        *sums, marks = flat.split([*(grad.numel() for grad in grads), len(grads)])
        for grad, total in zip(grads, sums, strict=True):
            grad.copy_(total.view_as(grad) * factor if factor != 1.0 else total.view_as(grad))
        for (chunk, parameter), mark in zip(members, marks.tolist(), strict=True):
            if mark:
                chunk.main_gradients.mark_averaged(parameter)


def main_grad_of(parameter: nn.Parameter) -> Tensor:
    """The accumulated gradient of a wrapped parameter: a view of a buffer."""
    main: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return main


def _divide(chunks: Sequence[DistributedDataParallel], num_tokens: Tensor, groups: ParallelGroups) -> None:
    if groups.pipeline is not None:
        dist.broadcast(num_tokens, group=groups.pipeline, group_src=dist.get_world_size(groups.pipeline) - 1)
    dist.all_reduce(num_tokens, group=groups.data)
    total = num_tokens.item()
    if total > 0:
        for chunk in chunks:
            chunk.scale_gradients(1.0 / total)
