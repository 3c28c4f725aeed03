"""Completes gradients before an optimizer's step: those summed over more than the data-parallel ranks.

    data, expert            average     every parameter, by its wrapper
    tensor                  sum         parameters that have seen a part of the sequence only
    pipeline                sum         parameters that every stage has a copy of
    embedding               sum         the first stage's input is the last stage's output
    position embedding      sum         where stages share it

All of it happens in ``main_grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ppe_ddp.backends.group_internals import default_group
from ppe_ddp.errors import CommunicationError
from ppe_ddp.megatron.distributed_data_parallel import DistributedDataParallel
from ppe_ddp.megatron.parallel_groups import ModelParallel, ParallelGroups, position_embedding, word_embedding

if TYPE_CHECKING:
    from ppe_ddp.engine.groups import Groups

# Fields of the model's configuration that ask Megatron for sums or updates that are not built here.
_REFUSED: dict[str, Callable[[Any], bool]] = {
    "gtp_weight_remat_size": lambda size: size > 1,
    "expert_gtp_weight_remat_size": lambda size: size > 1,
    "flextron": bool,
    "moe_router_load_balancing_type": lambda kind: "quantile_balancing" in kind,
}


class _Shared(NamedTuple):
    """A gradient that several ranks have a part of."""

    name: str  # the parameter's, or its role where the ranks have other names for it
    copies: list[tuple[DistributedDataParallel, nn.Parameter]]  # of this rank, one a chunk: added, and given the sum
    factor: float = 1.0  # what the sum is multiplied by

    def described(self) -> str:
        """One line, the same on all ranks that can add this gradient to theirs."""
        kinds = {
            f"shape {tuple(one.shape)}, {main_grad_of(one).dtype}{chunk.gradient_buffers.place_of(one)}"
            for chunk, one in self.copies
        }
        if len(kinds) > 1:
            raise ValueError(f"the chunks of the model have different forms of {self.name!r}: {'; '.join(kinds)}")
        return f"{self.name}: {kinds.pop()}, times {self.factor:g}"

    def marks(self) -> list[tuple[bytearray, int]]:
        """Where it is marked whether some rank had this gradient: the marks of each copy's module, and its index."""
        found = [(chunk.gradient_buffers.gradients, parameter) for chunk, parameter in self.copies]
        return [(gradients.averaged, gradients.index[id(parameter)]) for gradients, parameter in found]


def finalize_model_grads(
    model: Sequence[DistributedDataParallel] | DistributedDataParallel,
    num_tokens: Tensor | None = None,
    *,
    groups: ParallelGroups | None = None,
    force_all_reduce: bool = False,
) -> None:
    """Make the gradients of one iteration whole; every rank must call this together, once an iteration.

    Waits for the data-parallel synchronization, that of experts included, and then sums, in ``main_grad``:

    - over ``groups.tensor``, parameters with ``sequence_parallel = True`` (layer norms under sequence parallelism),
      unless ``config.sequence_parallel`` is False, and with ``config.qk_layernorm`` those whose name contains
      ``q_layernorm`` or ``k_layernorm``. Parameters with ``average_gradients_across_tp_domain = True`` are averaged
      instead, whatever other marks they have;
    - over ``groups.pipeline``, parameters with ``pipeline_parallel = True``, which every stage has a copy of. Chunks
      of one rank that have parameters of one name are added first, and all get the sum;
    - over ``groups.embedding``, what ``shared_embedding_or_output_weight()`` gives on the first and the last stage, if
      ``share_embeddings_and_output_weights`` is true or ``config.mtp_num_layers`` is positive;
    - over ``groups.position_embedding``, ``position_embeddings.weight``.

    With ``config.moe_router_enable_expert_bias`` it then updates ``expert_bias`` of each module in training mode that
    has one: by ``config.moe_router_bias_update_rate``, up where ``local_tokens_per_expert``, summed over the
    data-parallel and tensor-parallel ranks, is below the mean of all experts, down where it is above. Afterwards the
    counts are zero. (Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024.)

    Where a model is split, by experts as well, an error on one rank is raised on all ranks, where it names the rank,
    and no rank takes the step. A rank whose backward has raised calls this all the same there: it raises, and the
    others hear of it.

    Args:
        model: The wrapped chunks of the model that this rank has, in the order of the pipeline; or one.
        num_tokens: One element, changed in place: the tokens of this rank's micro-batches, as the last pipeline
            stage has counted them. If given, gradients are divided by the total over the data-parallel ranks; meant
            for models whose ``config.calculate_per_token_loss`` is true, so that gradients are sums.
        groups: The groups of the model; default: those of the first chunk.
        force_all_reduce: See :meth:`DistributedDataParallel.finish_grad_sync`.

    Raises:
        NonFiniteGradientError: See :meth:`DistributedDataParallel.finish_grad_sync`.
        PeerAbortedError: As well; or another rank of one of the groups has raised in this call.
        DisagreementError: On all ranks of a group that are about to sum different gradients, or different parts.
        TypeError: A chunk is not wrapped.
        ValueError: The model's configuration asks for something that is not built here; before anything is sent.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    for chunk in chunks:
        if not isinstance(chunk, DistributedDataParallel):
            raise TypeError(f"finalize_model_grads takes ppe_ddp.megatron wrappers, not {type(chunk).__name__}")
    config = chunks[0].config
    _check(config)
    is_own = groups is None or groups == chunks[0].groups
    parallel = chunks[0].gradient_buffers.model_parallel if is_own else ModelParallel(groups, default_group())  # type: ignore[arg-type]
    with _together(chunks, parallel), parallel.step(), torch.no_grad():
        _finish(chunks, force_all_reduce=force_all_reduce)
        plan = {
            "tensor": _over_tensor(chunks, config, parallel.group("tensor")),
            "pipeline": _over_pipeline(chunks),
            "embedding": _of_ends(chunks, config, word_embedding, parallel),
            "position_embedding": _of_ends(chunks, config, position_embedding, parallel),
        }
        sums = num_tokens is not None or getattr(config, "moe_router_enable_expert_bias", False)
        described = {name: [one.described() for one in shared] for name, shared in plan.items()}
        parallel.agree(described, [chunk.gradient_buffers.model_parallel for chunk in chunks], sums=sums)
        for name, shared in plan.items():
            groups_of_name = parallel.group(name)
            if groups_of_name is not None:
                _sum(shared, parallel, groups_of_name)
        updates = _router_updates(chunks, config, parallel)
        total = 0.0 if num_tokens is None else _total(chunks, num_tokens, parallel)
        parallel.confirm()
        _update_routers(chunks, config, updates)
        for chunk in chunks if total > 0 else ():
            chunk.scale_gradients(1.0 / total)


@contextmanager
def _together(chunks: Sequence[DistributedDataParallel], parallel: ModelParallel) -> Generator[None, None, None]:
    """Finalize; a step that all ranks drop leaves the memory of compressors as it was, also of complete chunks."""
    try:
        yield
    except BaseException:
        if parallel.tells_all:  # else some may have taken the step
            _end_step(chunks, is_taken=False)
        raise
    _end_step(chunks, is_taken=True)


def _end_step(chunks: Sequence[DistributedDataParallel], *, is_taken: bool) -> None:
    for chunk in chunks:
        chunk.gradient_buffers.end_step(is_taken=is_taken)


def _finish(chunks: Sequence[DistributedDataParallel], *, force_all_reduce: bool) -> None:
    """Finish the synchronization of all chunks; a step that fails in one of them is over in all."""
    calls = [partial(chunk.finish_grad_sync, force_all_reduce) for chunk in chunks]
    if chunks[1:]:  # others may come to them in another order, in their backwards
        calls.insert(0, partial(_begin, chunks))
    errors: list[BaseException] = []
    for call in calls:
        try:
            call()
        except BaseException as error:
            errors.append(error)
    if errors:
        _end_step(chunks, is_taken=False)
        interrupts = [error for error in errors if not isinstance(error, Exception)]
        lost = [error for error in errors if isinstance(error, CommunicationError)]
        try:
            raise [*interrupts, *lost, errors[-1]][0]  # which are not hidden by what follows from them
        finally:
            del errors, interrupts, lost  # whose frames hold this one, and the connections


def _begin(chunks: Sequence[DistributedDataParallel]) -> None:
    for chunk in chunks:
        chunk.begin_grad_sync()


def _check(config: object) -> None:
    for name, asks in _REFUSED.items():
        value = getattr(config, name, None)
        if value is not None and asks(value):
            raise ValueError(f"finalize_model_grads does not support {name}={value!r} of the model's configuration")


# ---------------------------------------------------------------------- what is summed


def _over_tensor(chunks: Sequence[DistributedDataParallel], config: object, groups: Groups | None) -> list[_Shared]:
    if groups is None:
        return []
    is_sequence_parallel = getattr(config, "sequence_parallel", True)
    sums_qk = getattr(config, "qk_layernorm", False)
    found = []
    for number, chunk in enumerate(chunks):
        for name, parameter in _with_main_grad(chunk):
            is_of_qk = sums_qk and ("q_layernorm" in name or "k_layernorm" in name)
            label = f"{number}.{name}"
            if getattr(parameter, "average_gradients_across_tp_domain", False):
                found.append(_Shared(label, [(chunk, parameter)], 1.0 / groups.world_size))
            elif is_of_qk or (is_sequence_parallel and getattr(parameter, "sequence_parallel", False)):
                found.append(_Shared(label, [(chunk, parameter)]))
    return found


def _over_pipeline(chunks: Sequence[DistributedDataParallel]) -> list[_Shared]:
    copies: dict[str, list[tuple[DistributedDataParallel, nn.Parameter]]] = {}
    for chunk in chunks:
        for name, parameter in _with_main_grad(chunk):
            if getattr(parameter, "pipeline_parallel", False):
                copies.setdefault(name, []).append((chunk, parameter))
    return [_Shared(name, copies[name]) for name in sorted(copies)]


def _of_ends(
    chunks: Sequence[DistributedDataParallel],
    config: object,
    weight_of: Callable[[nn.Module, object], Tensor | None],
    parallel: ModelParallel,
) -> list[_Shared]:
    """The weight that the first chunk of the first stage and the last one of the last stage share."""
    pipeline = parallel.group("pipeline")
    is_first = pipeline is None or pipeline.rank == 0
    is_last = pipeline is not None and pipeline.rank == pipeline.world_size - 1
    has_predictions = bool(getattr(config, "mtp_num_layers", 0))  # in between, in the last chunk
    chunk = chunks[-1] if is_last or (has_predictions and not is_first) else chunks[0]
    weight = weight_of(chunk.module, config)
    if not isinstance(weight, nn.Parameter) or not hasattr(weight, "main_grad"):
        return []
    return [_Shared(weight_of.__name__, [(chunk, weight)])]


def _with_main_grad(chunk: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    named = chunk.module.named_parameters()
    return [(name, parameter) for name, parameter in named if hasattr(parameter, "main_grad")]


def main_grad_of(parameter: nn.Parameter) -> Tensor:
    """The accumulated gradient of a wrapped parameter: a view of a buffer."""
    main: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return main


# ---------------------------------------------------------------------- sums


def _sum(shared: Sequence[_Shared], parallel: ModelParallel, groups: Groups) -> None:
    """Sum gradients over ``groups``, those of one dtype and device in one message."""
    kinds: dict[tuple[torch.dtype, torch.device], list[_Shared]] = {}
    for one in shared:
        main = main_grad_of(one.copies[0][1])
        kinds.setdefault((main.dtype, main.device), []).append(one)
    for members in kinds.values():
        parts = [[main_grad_of(parameter) for _, parameter in one.copies] for one in members]
        grads = [part[0] if len(part) == 1 else torch.stack(part).sum(0) for part in parts]
        # Behind the gradients, which of them exist: None on all data-parallel ranks is None everywhere.
        exist = [any(averaged[i] for averaged, i in one.marks()) for one in members]
        marks = torch.tensor(exist, dtype=grads[0].dtype, device=grads[0].device)
        flat = torch.cat([*(grad.reshape(-1) for grad in grads), marks])
        parallel.all_reduce(groups, flat)
        *sums, marks = flat.split([*(grad.numel() for grad in grads), len(grads)])
        for one, total, mark in zip(members, sums, marks.tolist(), strict=True):
            for _, parameter in one.copies:
                main = main_grad_of(parameter)
                main.copy_(total.view_as(main) * one.factor if one.factor != 1.0 else total.view_as(main))
            for averaged, i in one.marks() if mark else ():
                averaged[i] = 1


def _router_updates(
    chunks: Sequence[DistributedDataParallel], config: object, parallel: ModelParallel
) -> list[tuple[Any, Tensor]]:
    """Routers, each with 1 where an expert has got fewer tokens on all ranks than the mean, and -1 where more."""
    if not getattr(config, "moe_router_enable_expert_bias", False):
        return []
    updated = [r for r in _routers(chunks) if r.training and not getattr(r, "frozen_expert_bias", False)]
    if not updated:
        return []
    counts = torch.cat([router.local_tokens_per_expert.reshape(-1) for router in updated])
    for groups in (_data(chunks, parallel), parallel.group("tensor")):
        if groups is not None and groups.world_size > 1:
            parallel.all_reduce(groups, counts)
    sizes = [router.local_tokens_per_expert.numel() for router in updated]
    return [
        (router, torch.sign(tokens.mean(dtype=torch.float32) - tokens).view_as(router.expert_bias))
        for router, tokens in zip(updated, counts.split(sizes), strict=True)
    ]


def _update_routers(
    chunks: Sequence[DistributedDataParallel], config: object, updates: Sequence[tuple[Any, Tensor]]
) -> None:
    """Update the bias of routers, and zero what was counted."""
    for router, below in updates:
        router.expert_bias.add_(below, alpha=config.moe_router_bias_update_rate)  # type: ignore[attr-defined]
    if getattr(config, "moe_router_enable_expert_bias", False):
        for router in _routers(chunks):
            router.local_tokens_per_expert.zero_()
    if "global_aux_loss" in (getattr(config, "moe_router_load_balancing_type", None) or ()):
        modules: list[Any] = [module for chunk in chunks for module in chunk.module.modules()]
        for module in modules:
            if hasattr(module, "reset_global_aux_loss_tracker"):
                module.reset_global_aux_loss_tracker()


def _routers(chunks: Sequence[DistributedDataParallel]) -> list[Any]:
    modules = (module for chunk in chunks for module in chunk.module.modules())
    return [module for module in modules if getattr(module, "expert_bias", None) is not None]


def _data(chunks: Sequence[DistributedDataParallel], parallel: ModelParallel) -> Groups:
    """The data-parallel ranks: the wrapper's groups where no model is split, for which there are no others."""
    return parallel.group("data") or chunks[0].gradient_buffers.groups[0]


def _total(chunks: Sequence[DistributedDataParallel], num_tokens: Tensor, parallel: ModelParallel) -> float:
    """The tokens of all data-parallel ranks, as the last pipeline stage has counted them; also in ``num_tokens``."""
    pipeline, data = parallel.group("pipeline"), _data(chunks, parallel)
    if pipeline is not None:
        last, group = pipeline.world_size - 1, pipeline.buckets
        parallel.communicate(
            pipeline, lambda: dist.broadcast(num_tokens, group=group, group_src=last, async_op=True), num_tokens.device
        )
    if data.world_size > 1:
        parallel.all_reduce(data, num_tokens)
    return float(num_tokens.item())
