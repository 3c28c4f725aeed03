"""Broadcasts a module's buffers after backward, without changing values that other autograd graphs still need.

Forward writes buffers, and the ranks' values differ until they are broadcast; but a graph that is gone through again,
or another one that is still to be gone through, needs the values that it was made with. Which buffers a graph needs
may differ from rank to rank: every rank broadcasts the same list, with a copy in the place of such a buffer.
"""

from __future__ import annotations

import weakref
from sys import getrefcount
from typing import TYPE_CHECKING

import torch
from torch import nn

from ppe_ddp.engine.broadcasting import broadcasting
from ppe_ddp.engine.distributed_tensors import local_tensor
from ppe_ddp.engine.torch_internals import (
    buffer_table,
    only_writes_buffers,
    preserve_versions,
    storage_users,
    tensor_users,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ppe_ddp.contracts import BroadcastFunction
    from ppe_ddp.engine.completion import Steps
    from ppe_ddp.engine.groups import Groups
    from ppe_ddp.engine.module_state import ModuleState

    Place = tuple[nn.Module, str]


def broadcasting_buffers(
    function: BroadcastFunction, module_state: ModuleState, groups: Groups, *, source: int
) -> Steps:
    """Give the buffers of ``module_state`` the values of one rank, step by step. All ranks must do this together.

    Args:
        function: How to broadcast.
        module_state: Whose buffers.
        groups: The process groups to communicate in.
        source: Whose values; a rank of the group.

    Raises:
        FunctionError: See :func:`broadcast_all`.
        CommunicationError: Our own function failed to communicate.
    """
    buffers = list(module_state.buffers().values())
    received = [buffer.clone() if tensor_users(buffer) > 1 else buffer for buffer in buffers]
    yield from broadcasting(function, received, groups, source=source)
    needed = [k for k, values in enumerate(received) if values is not buffers[k]]
    for k in needed:
        if not torch.equal(local_tensor(buffers[k]), local_tensor(received[k])):
            _replace(buffers[k], received[k], module_state.places_of(buffers[k]), references=1)


def _replace(buffer: Tensor, values: Tensor, places: list[Place], *, references: int) -> None:
    """Replace ``buffer``, whose values an autograd graph needs, by ``values`` in the modules at ``places``.

    Args:
        buffer: The tensor that they have.
        values: The tensor, or the values, that they get.
        places: Modules, each with its name for the buffer.
        references: How many references to ``buffer`` the caller has.
    """
    if _references(buffer) == len(places) + references + 1 and not _is_special(buffer):
        for owner, key in places:
            buffer_table(owner)[key] = values  # only the graph has the old one from now on
    elif all(only_writes_buffers(owner) for owner, _ in places):
        with preserve_versions([buffer]):
            buffer.copy_(values)
    else:
        buffer.copy_(values)  # autograd refuses the graph by name; wrong numbers would be worse


def _references(buffer: Tensor) -> int:
    """The number of Python references to a tensor that torch holds, the caller's among them."""
    with torch.enable_grad():
        sample = torch.zeros(())
        _graph = torch.zeros((), requires_grad=True) * sample
    # Versions of torch differ in whether its own count as one. Both have one name here.
    return getrefcount(buffer) - getrefcount(sample)


def _is_special(buffer: Tensor) -> bool:
    """Whether a plain copy cannot replace it: it has more than values, or others refer to it or share its memory."""
    has_more = type(buffer) is not torch.Tensor or bool(buffer.__dict__) or buffer.requires_grad
    return storage_users(buffer) > 1 or has_more or weakref.getweakrefcount(buffer) > 0
