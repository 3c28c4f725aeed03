"""Completes gradients in ``main_grad`` before an optimizer's step: averages them, and sums some over other groups."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from ppe_ddp.backends.group_internals import default_group
from ppe_ddp.engine.groups import Groups
from ppe_ddp.engine.replicas import ranks_of
from ppe_ddp.errors import CommunicationError, DisagreementError, PeerAbortedError
from ppe_ddp.megatron.buffer_synchronizer import BufferSynchronizer
from ppe_ddp.megatron.distributed_data_parallel import DistributedDataParallel
from ppe_ddp.megatron.parallel_groups import SPLITS, ModelParallel, ParallelGroups, position_embedding, word_embedding
from ppe_ddp.torch_internals import uncompiled

logger = logging.getLogger("ppe_ddp")

# Fields of the model's configuration that ask for sums or updates that this library does not have.
_REFUSED: dict[str, Callable[[Any], bool]] = {
    "gtp_weight_remat_size": lambda size: size > 1,
    "expert_gtp_weight_remat_size": lambda size: size > 1,
    "flextron": bool,
    "moe_router_load_balancing_type": lambda kind: "quantile_balancing" in kind,
}


class _Shared(NamedTuple):
    """A gradient of which several ranks have a part."""

    name: str  # the parameter's name, or its role if the name differs between ranks
    copies: list[tuple[BufferSynchronizer, int]]  # this rank's, one a chunk, by index there; they are added first
    factor: float = 1.0  # of the sum

    @property
    def main_grads(self) -> list[Tensor]:
        return [state.gradients.main[i] for state, i in self.copies]

    def described(self) -> str:
        """One line, which is the same on all ranks whose gradients can be summed with this one."""
        copies = zip(self.copies, self.main_grads, strict=True)
        kinds = {f"shape {tuple(main.shape)}, {main.dtype}{state.place_of(i)}" for (state, i), main in copies}
        if len(kinds) > 1:
            raise ValueError(f"the chunks of the model have different forms of {self.name!r}: {'; '.join(kinds)}")
        return f"{self.name}: {kinds.pop()}, times {self.factor:g}"


@uncompiled
def finalize_model_grads(
    model: Sequence[DistributedDataParallel] | DistributedDataParallel,
    num_tokens: Tensor | None = None,
    pg_collection: Any = None,
    *,
    groups: ParallelGroups | None = None,
    force_all_reduce: bool = False,
) -> None:
    """Complete the gradients of one iteration; every rank must call this together, once an iteration.

    It waits for the data-parallel synchronization, including experts, and then sums in ``main_grad``:

    - over ``groups.tensor``, parameters with ``sequence_parallel = True`` (layer norms under sequence parallelism),
      unless ``config.sequence_parallel`` is False, and with ``config.qk_layernorm`` those whose name contains
      ``q_layernorm`` or ``k_layernorm``. Parameters with ``average_gradients_across_tp_domain = True`` are averaged
      instead, whatever other marks they have;
    - over ``groups.pipeline``, parameters with ``pipeline_parallel = True``, of which every stage has a copy. If
      several chunks of one rank have a parameter of one name, these are added first, and all get the sum;
    - over ``groups.embedding``, the result of ``shared_embedding_or_output_weight()`` on the first and the last stage,
      if ``share_embeddings_and_output_weights`` is true or ``config.mtp_num_layers`` is positive;
    - over ``groups.position_embedding``, ``position_embeddings.weight``.

    With ``config.moe_router_enable_expert_bias`` it then updates ``expert_bias`` of each module in training mode that
    has one, by ``config.moe_router_bias_update_rate``: up for experts whose ``local_tokens_per_expert``, summed over
    the data-parallel and tensor-parallel ranks, is below the mean, and down for those above it. Then it sets the counts
    to zero. (Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024.)

    If a model is split, also by experts, an error on one rank is raised on all ranks with the number of that rank, and
    no rank takes the step. So a rank whose backward has raised must call this as well: it raises, and the other ranks
    hear of the error. If that backward was not synchronized (without ``overlap_grad_reduce``, or in ``no_sync()``),
    call ``abort_grad_sync()`` before: nothing else tells this that a part of the gradients is missing.

    Args:
        model: The wrapped chunks of the model that this rank has, in the order of the pipeline; or one chunk.
        num_tokens: A tensor of one element, changed in place: the number of tokens in this rank's micro-batches, as the
            last pipeline stage has counted it. If all ranks give it, gradients are divided by the total over the
            data-parallel ranks. It is for models with ``config.calculate_per_token_loss``, whose gradients are sums.
        pg_collection: Megatron-Core's ``ProcessGroupCollection``, in place of ``groups``.
        groups: The groups of the model; default: those of the first chunk.
        force_all_reduce: See :meth:`DistributedDataParallel.finish_grad_sync`.

    Raises:
        NonFiniteGradientError: See :meth:`DistributedDataParallel.finish_grad_sync`.
        PeerAbortedError: See :meth:`DistributedDataParallel.finish_grad_sync`; or another rank of one of the groups has
            raised in this call.
        DisagreementError: On all ranks of a group that are about to sum different gradients, or different parts; or if
            only some of them give ``num_tokens``, of a split model or one with ``config.calculate_per_token_loss``.
        TypeError: A chunk is not wrapped.
        ValueError: The model's configuration asks for something that is not supported; raised before anything is sent.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    for chunk in chunks:
        if not isinstance(chunk, DistributedDataParallel):
            raise TypeError(f"finalize_model_grads takes ppe_ddp.megatron wrappers, not {type(chunk).__name__}")
    config = chunks[0].config
    for name, asks in _REFUSED.items():
        value = getattr(config, name, None)
        if value is not None and asks(value):
            raise ValueError(f"finalize_model_grads does not support {name}={value!r} of the model's configuration")
    if pg_collection is not None:
        if groups is not None:
            raise ValueError("finalize_model_grads() takes groups or a pg_collection, not both")
        groups = _groups_of(pg_collection, chunks[0].groups)
    is_own = groups is None or _ranks_of(groups) == _ranks_of(chunks[0].groups)
    parallel = chunks[0].gradient_buffers.model_parallel if is_own else ModelParallel(groups, default_group())  # type: ignore[arg-type]
    with _together(chunks, parallel), parallel.step(), torch.no_grad():
        found = _routers(chunks, config)
        routers = [one for one in found if one.training and not getattr(one, "frozen_expert_bias", False)]
        counts = torch.cat([one.local_tokens_per_expert.reshape(-1) for one in routers]) if routers else None
        numbers = (counts, num_tokens) if parallel.group("data") is None else None
        _finish_with(numbers, chunks, force_all_reduce=force_all_reduce)
        plan = {
            "data": [],
            "tensor": _over_tensor(chunks, config, parallel.group("tensor")),
            "pipeline": _over_pipeline(chunks),
            "embedding": _of_ends(chunks, config, word_embedding, parallel),
            "position_embedding": _of_ends(chunks, config, position_embedding, parallel),
        }
        sums = getattr(config, "moe_router_enable_expert_bias", False)
        given = [] if num_tokens is None else ["num_tokens"]
        described = {name: [*(one.described() for one in shared), *given] for name, shared in plan.items()}
        _agree(chunks, parallel, described, sums=sums)
        _share_infinity(chunks, parallel)
        for name, shared in plan.items():
            groups_of_name = parallel.group(name)
            if groups_of_name is not None:
                _sum(shared, parallel, groups_of_name)
        _sum_numbers(counts, num_tokens, parallel)
        parallel.confirm()
        _update_routers(chunks, config, routers, counts)
        if num_tokens is not None:
            _divide(chunks, float(num_tokens.item()))


def _groups_of(collection: Any, own: ParallelGroups) -> ParallelGroups:
    """Megatron's groups, as far as finalizing uses them; the wrapper's ``own`` in place of those that are not there."""
    names = {"data": "dp_cp", "tensor": "tp", "pipeline": "pp", "embedding": "embd", "position_embedding": "pos_embd"}
    return replace(own, **{name: getattr(collection, theirs, getattr(own, name)) for name, theirs in names.items()})


def _ranks_of(groups: ParallelGroups) -> dict[str, set[int]]:
    """The ranks of the groups in which finalizing communicates, without those of one rank."""
    given = {"data": groups.data or default_group(), **{name: getattr(groups, name) for name in SPLITS}}
    ranks = {name: ranks_of(one) for name, one in given.items() if one is not None}
    return {name: one for name, one in ranks.items() if len(one) > 1}


@contextmanager
def _together(chunks: Sequence[DistributedDataParallel], parallel: ModelParallel) -> Generator[None, None, None]:
    """A context for finalizing: if all ranks drop the step, the compressors of all chunks revoke it."""
    try:
        yield
    except BaseException:
        if parallel.tells_all:  # else some ranks may have taken the step
            _end_step(chunks, is_taken=False)
        raise
    _end_step(chunks, is_taken=True)


def _end_step(chunks: Sequence[DistributedDataParallel], *, is_taken: bool) -> None:
    for chunk in chunks:
        chunk.gradient_buffers.end_step(is_taken=is_taken)


def _finish_with(
    numbers: tuple[Tensor | None, Tensor | None] | None,
    chunks: Sequence[DistributedDataParallel],
    *,
    force_all_reduce: bool,
) -> None:
    """Finish the synchronization of all chunks, and sum ``numbers`` with it.

    An error that the others hear of revokes the step; a rank that is interrupted keeps what it has.
    """
    try:
        with chunks[0].gradient_buffers.completed_by(*numbers) if numbers else nullcontext():
            _finish(chunks, force_all_reduce=force_all_reduce)
    except (DisagreementError, PeerAbortedError):
        _end_step(chunks, is_taken=False)
        raise


def _finish(chunks: Sequence[DistributedDataParallel], *, force_all_reduce: bool) -> None:
    """Finish the synchronization of all chunks; a step that fails in one chunk ends in all."""
    calls = [partial(chunk.finish_grad_sync, force_all_reduce) for chunk in chunks]
    if chunks[1:]:  # begin all chunks first: other ranks may come to them in another order, in their backwards
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
            raise [*interrupts, *lost, errors[-1]][0]  # an interrupt or a lost rank causes the other errors
        finally:
            del errors, interrupts, lost  # their frames hold this frame, and the connections


def _agree(
    chunks: Sequence[DistributedDataParallel], parallel: ModelParallel, described: dict[str, list[str]], *, sums: bool
) -> None:
    """See :meth:`ModelParallel.agree`; if an average is not finite on any rank, the compressors of all doubt it."""
    buffers = [chunk.gradient_buffers for chunk in chunks]
    is_undecided = any(one.is_undecided for one in buffers)
    if parallel.agree(described, [one.model_parallel for one in buffers], sums=sums, is_undecided=is_undecided):
        for one in buffers:
            one.doubt_step()


def _divide(chunks: Sequence[DistributedDataParallel], total: float) -> None:
    """Divide sums by the ``total`` of the tokens; warn if far fewer of them divide what a compressor has kept.

    If it is 0, only what a compressor has kept was sent: the step is dropped.
    """
    buffers = [chunk.gradient_buffers for chunk in chunks]
    before, keeps = buffers[0].tokens, any(one.has_residuals for one in buffers)
    if total > 0:
        buffers[0].tokens = total
    elif keeps:
        _end_step(chunks, is_taken=False)
    others = chunks[0].groups.tensor, chunks[0].groups.pipeline
    is_first = buffers[0].groups[0].rank == 0 and not any(one is not None and dist.get_rank(one) for one in others)
    if 0 < total < before / 2 and keeps and is_first:
        logger.warning(
            "a step of %d tokens follows one of %d: what the compressor had not sent of sums over tokens now counts "
            "%.1f times as much. Leave such a batch out (drop_last=True), or average over tokens by weigh() with the "
            "wrapper ppe_ddp.DistributedDataParallel",
            *(total, before, before / total),
        )
    for chunk in chunks if total > 0 or keeps else ():
        chunk.scale_gradients(1.0 / total if total > 0 else 0.0)


def _begin(chunks: Sequence[DistributedDataParallel]) -> None:
    for chunk in chunks:
        chunk.begin_grad_sync()


# ---------------------------------------------------------------------- which gradients are summed


def _over_tensor(chunks: Sequence[DistributedDataParallel], config: object, groups: Groups | None) -> list[_Shared]:
    if groups is None:
        return []
    is_sequence_parallel = getattr(config, "sequence_parallel", True)
    sums_qk = getattr(config, "qk_layernorm", False)
    found = []
    for number, chunk in enumerate(chunks):
        for name, parameter, i in _with_main_grad(chunk):
            is_of_qk = sums_qk and ("q_layernorm" in name or "k_layernorm" in name)
            label, copies = f"{number}.{name}", [(chunk.gradient_buffers, i)]
            if getattr(parameter, "average_gradients_across_tp_domain", False):
                found.append(_Shared(label, copies, 1.0 / groups.world_size))
            elif is_of_qk or (is_sequence_parallel and getattr(parameter, "sequence_parallel", False)):
                found.append(_Shared(label, copies))
    return found


def _over_pipeline(chunks: Sequence[DistributedDataParallel]) -> list[_Shared]:
    copies: dict[str, list[tuple[BufferSynchronizer, int]]] = {}
    for chunk in chunks:
        for name, parameter, i in _with_main_grad(chunk):
            if getattr(parameter, "pipeline_parallel", False):
                copies.setdefault(name, []).append((chunk.gradient_buffers, i))
    return [_Shared(name, copies[name]) for name in sorted(copies)]


def _of_ends(
    chunks: Sequence[DistributedDataParallel],
    config: object,
    weight_of: Callable[[nn.Module, object], Tensor | None],
    parallel: ModelParallel,
) -> list[_Shared]:
    """The weight that the first chunk of the first stage and the last chunk of the last stage share."""
    pipeline = parallel.group("pipeline")
    is_first = pipeline is None or pipeline.rank == 0
    is_last = pipeline is not None and pipeline.rank == pipeline.world_size - 1
    has_predictions = bool(getattr(config, "mtp_num_layers", 0))  # then stages in between have it in their last chunk
    chunk = chunks[-1] if is_last or (has_predictions and not is_first) else chunks[0]
    index = chunk.gradient_buffers.gradients.index.get(id(weight_of(chunk.module, config)))
    return [] if index is None else [_Shared(weight_of.__name__, [(chunk.gradient_buffers, index)])]


def _share_infinity(chunks: Sequence[DistributedDataParallel], parallel: ModelParallel) -> None:
    """Let a GradScaler skip the optimizers of all chunks together, if it looks for inf in those of a pipeline.

    Stages have copies of one parameter in different chunks, which would come to differ.
    """
    if not chunks[1:] or parallel.group("pipeline") is None:
        return
    states = [weakref.ref(chunk.gradient_buffers) for chunk in chunks]

    @cache
    def has_inf() -> bool:
        return any((state := one()) is not None and not state.is_finite for one in states)

    for chunk in chunks:
        chunk.gradient_buffers.model_parallel.has_inf = has_inf


def _with_main_grad(chunk: DistributedDataParallel) -> list[tuple[str, nn.Parameter, int]]:
    """The parameters that have a ``main_grad``: name, parameter, and index in the gradient buffers."""
    index = chunk.gradient_buffers.gradients.index
    return [(name, one, index[id(one)]) for name, one in chunk.module.named_parameters() if id(one) in index]


# ---------------------------------------------------------------------- sums


def _sum(shared: Sequence[_Shared], parallel: ModelParallel, groups: Groups) -> None:
    """Sum gradients over ``groups``, those of one dtype and device in one message."""
    kinds: dict[tuple[torch.dtype, torch.device], list[_Shared]] = {}
    for one in shared:
        main = one.main_grads[0]
        kinds.setdefault((main.dtype, main.device), []).append(one)
    for members in kinds.values():
        parts = [one.main_grads for one in members]
        grads = [part[0] if len(part) == 1 else torch.stack(part).sum(0) for part in parts]
        # The message ends with marks of which gradients exist: one that no rank has stays absent on all ranks.
        exist = [any(state.gradients.averaged[i] for state, i in one.copies) for one in members]
        marks = torch.tensor(exist, dtype=grads[0].dtype, device=grads[0].device)
        flat = torch.cat([*(grad.reshape(-1) for grad in grads), marks])
        parallel.all_reduce(groups, flat)
        *sums, marks = flat.split([*(grad.numel() for grad in grads), len(grads)])
        for one, total, mark in zip(members, sums, marks.tolist(), strict=True):
            for (state, i), main in zip(one.copies, one.main_grads, strict=True):
                main.copy_(total.view_as(main) * one.factor if one.factor != 1.0 else total.view_as(main))
                state.gradients.averaged[i] |= bool(mark)


def _sum_numbers(counts: Tensor | None, num_tokens: Tensor | None, parallel: ModelParallel) -> None:
    """Sum over the ranks of a split model; where it is not split, the wrapper has summed over the data-parallel ranks.

    The last pipeline stage has counted ``num_tokens``.
    """
    data, tensor, pipeline = map(parallel.group, ("data", "tensor", "pipeline"))
    if counts is not None:
        for groups in filter(None, (data, tensor)):
            parallel.all_reduce(groups, counts)
    if num_tokens is not None and pipeline is not None:
        last, group = pipeline.world_size - 1, pipeline.buckets
        parallel.communicate(
            pipeline, lambda: dist.broadcast(num_tokens, group=group, group_src=last, async_op=True), num_tokens.device
        )
    if num_tokens is not None and data is not None:
        parallel.all_reduce(data, num_tokens)


def _update_routers(
    chunks: Sequence[DistributedDataParallel], config: object, updated: Sequence[Any], counts: Tensor | None
) -> None:
    """Update the bias of routers by the ``counts`` of all ranks, and set their own counts to zero."""
    sizes = [router.local_tokens_per_expert.numel() for router in updated]
    for router, tokens in zip(updated, () if counts is None else counts.split(sizes), strict=True):
        below = torch.sign(tokens.mean(dtype=torch.float32) - tokens).view_as(router.expert_bias)
        router.expert_bias.add_(below, alpha=config.moe_router_bias_update_rate)  # type: ignore[attr-defined]
    for router in _routers(chunks, config):
        router.local_tokens_per_expert.zero_()
    if "global_aux_loss" in (getattr(config, "moe_router_load_balancing_type", None) or ()):
        for module in _modules(chunks):
            if hasattr(module, "reset_global_aux_loss_tracker"):
                module.reset_global_aux_loss_tracker()


def _routers(chunks: Sequence[DistributedDataParallel], config: object) -> list[Any]:
    """The modules with an expert bias, if the configuration asks for its updates; one for each bias.

    A module around a router, as of ``torch.compile``, passes its attributes on.
    """
    is_updated = getattr(config, "moe_router_enable_expert_bias", False)
    found = [one for one in _modules(chunks) if getattr(one, "expert_bias", None) is not None] if is_updated else []
    return [*{id(one.expert_bias): one for one in found}.values()]


def _modules(chunks: Sequence[DistributedDataParallel]) -> list[Any]:
    return [module for chunk in chunks for module in chunk.module.modules()]
