"""Parameters that are DTensors, as tensor parallelism makes them: what is averaged are their local tensors.

    parameter    its local tensor stands for it in specs, buckets and broadcasts
    gradient     redistributed like its parameter when it arrives; its local tensor goes into the bucket
    average      becomes the local tensor of a DTensor like the parameter

A gradient often has other placements than its parameter: partial sums for the norms of sequence parallelism, all rows
for a sharded embedding. Redistributing communicates within the parameter's own mesh. All ranks of that mesh go through
the same graph, so they do it in the same order where autograd accumulates, and in none where a bucket is launched.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from ppe_ddp.torch_internals import uncompiled_hook

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.distributed import ProcessGroup
    from torch.utils.hooks import RemovableHandle


def is_distributed(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a DTensor; asked by its attributes, since importing the class takes a while."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local_tensor(tensor: Any) -> Tensor:
    """What this rank has of ``tensor`` in memory: the tensor itself, if it is no DTensor."""
    if not is_distributed(tensor):
        return tensor  # type: ignore[no-any-return]
    with torch.no_grad():
        local: Any = tensor.to_local()
    wait = getattr(local, "wait", None)  # of a tensor that a collective is still writing
    return local if wait is None else wait()  # type: ignore[no-any-return]


def placements_of(tensor: Any) -> str:
    """The placements of a DTensor and the shape of its mesh, as text; empty for any other tensor."""
    if not is_distributed(tensor):
        return ""
    return f"{tensor.placements} on {tuple(tensor.device_mesh.shape)} of {tuple(tensor.shape)}"


def redistribute_gradients(parameter: Any) -> RemovableHandle:
    """Give each gradient that arrives for ``parameter``, a DTensor, its mesh and placements."""
    handle: RemovableHandle = parameter.register_hook(partial(_redistributed, parameter.placements))
    return handle


@uncompiled_hook
def _redistributed(placements: Any, gradient: Any) -> Any:
    if not is_distributed(gradient) or tuple(gradient.placements) == tuple(placements):
        return None
    return gradient.redistribute(placements=placements)


class DistributedGradients:
    """Takes the local tensors of gradients that are DTensors, and makes DTensors of averages.

    Args:
        parameters: The parameters that are DTensors, by their index.
        names: Of all parameters.
    """

    def __init__(self, parameters: Mapping[int, Any], names: Sequence[str]) -> None:
        self._parameters = parameters
        self._names = names
        self._with_graph: dict[int, Any] = {}

    def __bool__(self) -> bool:
        """Whether there is any DTensor among the parameters."""
        return bool(self._parameters)

    def local(self, index: int, gradient: Any) -> Tensor:
        """The local tensor of the gradient of parameter ``index``.

        Raises:
            ValueError: Somebody has set a gradient that is no DTensor of the parameter's mesh and placements.
        """
        parameter = self._parameters.get(index)
        if parameter is None:
            return gradient  # type: ignore[no-any-return]
        if not is_distributed(gradient) or tuple(gradient.placements) != tuple(parameter.placements):
            found = getattr(gradient, "placements", "no placements")
            raise ValueError(
                f"the gradient of parameter {self._names[index]!r} has {found}, and the parameter "
                f"{parameter.placements}: set .grad to a DTensor like its parameter, by "
                "gradient.redistribute(placements=parameter.placements)"
            )
        if not gradient.requires_grad:
            return local_tensor(gradient)
        self._with_graph[index] = gradient
        with torch.enable_grad():
            return gradient.to_local()  # type: ignore[no-any-return]

    def whole(self, index: int, gradient: Tensor) -> Tensor:
        """A DTensor like parameter ``index`` whose local tensor is ``gradient``; the very one that had a graph."""
        parameter = self._parameters.get(index)
        if parameter is None:
            return gradient
        before = self._with_graph.pop(index, None)
        if before is not None and local_tensor(before).data_ptr() == gradient.data_ptr():
            return before  # type: ignore[no-any-return]
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            gradient,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )


def check_meshes(module: nn.Module, distributed: Mapping[str, Any], group: ProcessGroup) -> None:
    """Refuse DTensors that are distributed over ranks which average with one another, or that FSDP2 keeps.

    Args:
        module: The wrapped module.
        distributed: Its parameters and buffers that are DTensors, by what they are called in messages.
        group: The ranks that gradients are averaged over.

    Raises:
        ValueError: Names the parameter or buffer.
    """
    if not distributed:
        return
    rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
    from torch.distributed.fsdp import FSDPModule

    if any(isinstance(module, FSDPModule) for module in module.modules()):
        raise ValueError(
            f"rank {rank}: the module was sharded by fully_shard(), which keeps gradients from autograd's hooks and "
            "averages them itself: use it without this wrapper, over replicas too (mesh=mesh['replicate', 'shard'])"
        )
    for name, tensor in distributed.items():
        mesh = sorted(tensor.device_mesh.mesh.flatten().tolist())
        both = [other for other in mesh if other in ranks and other != rank]
        if both:
            raise ValueError(
                f"rank {rank}: {name} is a DTensor over ranks {mesh}, and would be averaged with ranks {both}, which "
                "have other parts of it: pass the data-parallel part of the mesh, as device_mesh=mesh['dp']"
            )


def refuse_distributed(distributed: Iterable[str], who: str, remedy: str) -> None:
    """Raise a ValueError that names the first of these DTensors, if there is any: ``who`` cannot take it."""
    for name in distributed:
        raise ValueError(f"{name} is a DTensor, which {who} does not take: {remedy}")
