"""Parses the old and the new form of the constructor of Megatron's wrapper."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from typing_extensions import get_overloads  # in typing from Python 3.11 on; comes with torch

from ppe_ddp.compression.compressor import Compressor
from ppe_ddp.functions import average
from ppe_ddp.megatron.config import DistributedDataParallelConfig
from ppe_ddp.megatron.parallel_groups import ParallelGroups
from ppe_ddp.options import check_call, unknown_keyword

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ppe_ddp.contracts import ReduceFunction

F = TypeVar("F", bound=Callable[..., None])
# The old form's arguments, and what they are in a DistributedDataParallelConfig.
_FIELDS = {
    "accumulate_allreduce_grads_in_fp32": "grad_reduce_in_fp32",
    "overlap_grad_reduce": "overlap_grad_reduce",
    "use_distributed_optimizer": "use_distributed_optimizer",
    "check_for_nan_in_grad": "check_for_nan_in_grad",
    "bucket_size": "bucket_size",
}
# Keywords of Megatron's that have another form here.
_ELSEWHERE = {
    "pg_collection": "pass groups=ParallelGroups(data=pg_collection.dp_cp, tensor=pg_collection.tp, "
    "pipeline=pg_collection.pp, embedding=pg_collection.embd, position_embedding=pg_collection.pos_embd, "
    "expert=pg_collection.expt_dp, expert_tensor=pg_collection.expt_tp)",
    "full_param_layout": "buffers are laid out here; see bucket_size and disable_bucketing",
}
# Megatron-Core's constructor had another order before it had a config.
_OLD_FORM = (
    "; this is the old form, as neither ddp_config nor the second argument is a DistributedDataParallelConfig: the new "
    "one is DistributedDataParallel(config, ddp_config, module)"
)


@dataclass(frozen=True)
class Setup:
    """The arguments of a wrapper, whichever form they came in.

    Attributes:
        config: The configuration of the model.
        module: The model.
        ddp_config: How to synchronize.
        disable_bucketing: Whether everything goes into one bucket a buffer.
        groups: The ranks that average.
        reduce_function: Averages a bucket; see :class:`ppe_ddp.ReduceFunction`. Or a compressor that does.
    """

    config: object
    module: nn.Module
    ddp_config: DistributedDataParallelConfig
    disable_bucketing: bool = False
    groups: ParallelGroups = field(default_factory=ParallelGroups)
    reduce_function: ReduceFunction | Compressor = average


def showing_both_forms(constructor: F) -> F:
    """Let ``inspect.signature`` show what the overloads of ``constructor`` take, instead of ``*args, **kwargs``.

    The new form's parameters stand as they are; what only the old form has follows, by name.
    """
    new, old = _forms(constructor)
    added = [
        parameter.replace(
            kind=inspect.Parameter.KEYWORD_ONLY, default=None, annotation=f"{parameter.annotation} | None"
        )
        for name, parameter in old.parameters.items()
        if name not in new.parameters
    ]
    constructor.__signature__ = new.replace(parameters=[*new.parameters.values(), *added])  # type: ignore[attr-defined]
    return constructor


def setup_of(constructor: Callable[..., None], config: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Setup:
    """Parse the arguments of a call in either form.

    Args:
        constructor: Its overloads are the new form and the old one.
        config: The configuration of the model.
        args: What follows ``config`` by position.
        kwargs: What is given by name.

    Raises:
        TypeError: A keyword or a number of arguments that this form does not have.
        ValueError: Contradictory arguments.
    """
    is_new = "ddp_config" in kwargs or (args and isinstance(args[0], DistributedDataParallelConfig))
    new, old = _forms(constructor)
    form = new if is_new else old
    for name in kwargs:
        if name in _ELSEWHERE:
            raise TypeError(f"DistributedDataParallel() has no {name}: {_ELSEWHERE[name]}")
        if name not in form.parameters:
            raise TypeError(unknown_keyword(name, {*form.parameters} - {"self"}))
    call = _bound(form, args, kwargs, "" if is_new else _OLD_FORM)
    call.apply_defaults()
    given = call.arguments
    if not is_new:
        given["ddp_config"] = DistributedDataParallelConfig(**{field: given[name] for name, field in _FIELDS.items()})
    return _checked(
        Setup(
            config,
            given["module"],
            given["ddp_config"],
            given["disable_bucketing"],
            _groups(given["groups"], given["data_parallel_group"], given["expert_data_parallel_group"]),
            given["reduce_function"] or average,
        )
    )


def _bound(form: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], hint: str) -> inspect.BoundArguments:
    try:
        return form.bind(None, None, *args, **kwargs)
    except TypeError as error:
        names = ", ".join(list(form.parameters)[1:])
        raise TypeError(f"DistributedDataParallel({names}): {error}{hint}") from None


def _forms(constructor: Callable[..., None]) -> tuple[inspect.Signature, inspect.Signature]:
    new, old = get_overloads(constructor)
    return inspect.signature(new), inspect.signature(old)


def _checked(setup: Setup) -> Setup:
    if not isinstance(setup.ddp_config, DistributedDataParallelConfig):
        raise TypeError(f"ddp_config must be a DistributedDataParallelConfig, not {type(setup.ddp_config).__name__}")
    if not isinstance(setup.module, nn.Module):
        raise TypeError(f"DistributedDataParallel wraps an nn.Module, not {type(setup.module).__name__}")
    if not isinstance(setup.reduce_function, Compressor):
        check_call("reduce_function", setup.reduce_function, ("bucket", "group"))
    if setup.ddp_config.use_distributed_optimizer and setup.reduce_function is not average:
        raise ValueError(
            "a reduce_function or a compressor averages whole buckets; with use_distributed_optimizer gradients are "
            "reduce-scattered: leave one of the two out"
        )
    return setup


def _groups(groups: ParallelGroups | None, data: ProcessGroup | None, expert: ProcessGroup | None) -> ParallelGroups:
    if groups is None:
        return ParallelGroups(data=data, expert=expert)
    if data is not None or expert is not None:
        raise ValueError("give groups, or data_parallel_group and expert_data_parallel_group, not both")
    return groups
