"""Finds out which parameters are copies of another rank's, so that a norm over all ranks counts each element once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import distributed as dist

from ppe_ddp.megatron.shared_weights import position_embedding, word_embedding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.distributed import ProcessGroup

    from ppe_ddp.megatron.parallel_groups import ParallelGroups


class CopiesOfParameters:
    """The groups that split one module, and which of its parameters are copies of another rank's.

    Args:
        module: The module.
        config: The model's configuration.
        data: The data-parallel group. Its ranks have different shards, and different experts.
        groups: The other groups.

    Attributes:
        groups: Those of more than one rank over which something is true of the whole model.
    """

    def __init__(self, module: nn.Module, config: object, data: ProcessGroup, groups: ParallelGroups) -> None:
        splits = [group for group in (groups.tensor, groups.pipeline) if group is not None]
        self.groups: Sequence[ProcessGroup] = [data, *(group for group in splits if dist.get_world_size(group) > 1)]
        self._tensor_rank = _rank(groups.tensor)
        self._expert_rank = self._tensor_rank if groups.expert_tensor is None else _rank(groups.expert_tensor)
        self._stage = _rank(groups.pipeline)
        self._copied: set[int] = set()
        for group, weight_of in (
            (groups.embedding, word_embedding),
            (groups.position_embedding, position_embedding),
        ):
            if _rank(group) > 0:
                self._copied.add(id(weight_of(module, config)))
        is_split = groups.tensor is not None and dist.get_world_size(groups.tensor) > 1
        self.are_splits_marked = not is_split or any(hasattr(p, "tensor_model_parallel") for p in module.parameters())

    def counts(self, name: str, parameter: nn.Parameter, names: set[str]) -> bool:
        """Whether a parameter adds to the norm on this rank.

        What Megatron marks by ``tensor_model_parallel`` is split over the tensor-parallel ranks; of anything else they
        have copies, of which the first rank's counts. Of what pipeline stages share, the first stage's counts, and of
        ``pipeline_parallel`` parameters of one name its first chunk's; nothing marked ``shared`` does.

        Args:
            name: The parameter's name in its chunk of the model.
            parameter: The parameter.
            names: Of ``pipeline_parallel`` ones that were counted already; changed in place.
        """
        if getattr(parameter, "shared", False) or id(parameter) in self._copied:
            return False
        if getattr(parameter, "pipeline_parallel", False):
            if self._stage > 0 or name in names:
                return False
            names.add(name)
        rank = self._tensor_rank if getattr(parameter, "allreduce", True) else self._expert_rank
        return rank == 0 or bool(getattr(parameter, "tensor_model_parallel", False))


def _rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)
