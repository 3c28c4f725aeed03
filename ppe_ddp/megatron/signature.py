"""The two forms in which Megatron's wrapper is called, old and new, brought to one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from ppe_ddp.functions import average
from ppe_ddp.megatron.config import DistributedDataParallelConfig
from ppe_ddp.megatron.parallel_groups import ParallelGroups

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ppe_ddp.contracts import ReduceFunction


@dataclass(frozen=True)
class Setup:
    """What a wrapper is made of.

    Attributes:
        module: The model.
        ddp_config: How to synchronize.
        disable_bucketing: Whether everything goes into one bucket a buffer.
        groups: Who averages.
        reduce_function: Averages a bucket; see :class:`ppe_ddp.ReduceFunction`.
    """

    module: nn.Module
    ddp_config: DistributedDataParallelConfig
    disable_bucketing: bool = False
    groups: ParallelGroups = field(default_factory=ParallelGroups)
    reduce_function: ReduceFunction = average


def setup_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Setup:
    """Tell from what follows ``config`` which form a call has.

    Raises:
        TypeError: A keyword or a number of arguments that neither form has.
        ValueError: Contradictory arguments.
    """
    is_new = "ddp_config" in kwargs or (args and isinstance(args[0], DistributedDataParallelConfig))
    setup = _new(*args, **kwargs) if is_new else _old(*args, **kwargs)
    if not isinstance(setup.module, nn.Module):
        raise TypeError(f"DistributedDataParallel wraps an nn.Module, not {type(setup.module).__name__}")
    if setup.ddp_config.use_distributed_optimizer and setup.reduce_function is not average:
        raise ValueError(
            "reduce_function averages by all-reduce; with use_distributed_optimizer gradients are reduce-scattered: "
            "leave one of the two out"
        )
    return setup


def _new(
    ddp_config: DistributedDataParallelConfig,
    module: nn.Module,
    disable_bucketing: bool = False,
    groups: ParallelGroups | None = None,
    *,
    data_parallel_group: ProcessGroup | None = None,
    expert_data_parallel_group: ProcessGroup | None = None,
    reduce_function: ReduceFunction | None = None,
) -> Setup:
    if not isinstance(ddp_config, DistributedDataParallelConfig):
        raise TypeError(f"ddp_config must be a DistributedDataParallelConfig, not {type(ddp_config).__name__}")
    groups = _groups(groups, data_parallel_group, expert_data_parallel_group)
    return Setup(module, ddp_config, disable_bucketing, groups, reduce_function or average)


def _old(
    module: nn.Module,
    data_parallel_group: ProcessGroup | None,
    accumulate_allreduce_grads_in_fp32: bool,
    overlap_grad_reduce: bool,
    use_distributed_optimizer: bool,
    disable_bucketing: bool = False,
    check_for_nan_in_grad: bool = False,
    *,
    groups: ParallelGroups | None = None,
    expert_data_parallel_group: ProcessGroup | None = None,
    reduce_function: ReduceFunction | None = None,
) -> Setup:
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=accumulate_allreduce_grads_in_fp32,
        overlap_grad_reduce=overlap_grad_reduce,
        use_distributed_optimizer=use_distributed_optimizer,
        check_for_nan_in_grad=check_for_nan_in_grad,
    )
    return _new(
        config,
        module,
        disable_bucketing,
        groups,
        data_parallel_group=data_parallel_group,
        expert_data_parallel_group=expert_data_parallel_group,
        reduce_function=reduce_function,
    )


def _groups(groups: ParallelGroups | None, data: ProcessGroup | None, expert: ProcessGroup | None) -> ParallelGroups:
    if groups is None:
        return ParallelGroups(data=data, expert=expert)
    if data is not None or expert is not None:
        raise ValueError("give groups, or data_parallel_group and expert_data_parallel_group, not both")
    return groups
