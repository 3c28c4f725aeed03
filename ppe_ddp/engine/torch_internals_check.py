"""Trials of ``torch_internals.py``: autograd and tensors; those of modules are in ``module_internals_check.py``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ppe_ddp.backends.trials import problems_of
from ppe_ddp.engine.module_internals_check import MODULE_TRIALS
from ppe_ddp.engine.torch_internals import (
    at_end_of_backward,
    chunk_cat,
    holds_tensors,
    is_cast,
    is_foreach_zero,
    is_future,
    is_in_backward,
    node_is_executed,
    post_accumulate_hooks,
    preserve_versions,
    split_by,
    storage_users,
    strided_shard,
    tensor_users,
    unflatten,
    users_of_tensors,
    version_of,
    without_memory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["check"]


def check() -> list[str]:
    """Try each use on small tensors on the CPU; takes milliseconds.

    Returns:
        What does not behave as this library needs it, a line each, by the name of the function above; none if all is
        well.
    """
    return problems_of((*_TRIALS, *MODULE_TRIALS))


def _node_is_executed() -> bool:
    used, unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
    nodes = [get_gradient_edge(parameter).node for parameter in (used, unused)]
    seen: list[bool] = []
    output = used * 2
    output.register_hook(lambda _: seen.extend(map(node_is_executed(), nodes)))
    (output + unused.detach()).backward()
    return seen == [True, False]


def _at_end_of_backward() -> bool:
    events: list[str] = []
    parameter = nn.Parameter(torch.ones(()))
    output = parameter * 2
    output.register_hook(lambda _: at_end_of_backward(lambda: events.append("end")))
    parameter.register_post_accumulate_grad_hook(lambda _: events.append("accumulated"))
    output.backward()
    return events == ["accumulated", "end"]


def _post_accumulate_hooks() -> bool:
    events: list[str] = []
    parameter = nn.Parameter(torch.ones(()))
    if post_accumulate_hooks(parameter) is not None:
        return False
    handles = [parameter.register_post_accumulate_grad_hook(lambda _, k=k: events.append(k)) for k in "ab"]
    hooks = post_accumulate_hooks(parameter)
    if hooks is None or list(hooks) != [handle.id for handle in handles]:
        return False
    other = hooks.pop(handles[0].id)
    hooks[handles[0].id] = other  # behind the second
    hooks[handles[1].id] = lambda _: events.append("replaced")
    (parameter * 2).backward()
    handles[1].remove()
    return events == ["replaced", "a"] and list(hooks) == [handles[0].id]


def _preserve_versions() -> bool:
    weight, saved = nn.Parameter(torch.ones(2)), torch.ones(2)
    output = (weight * saved).sum()
    with preserve_versions([saved]):
        saved.add_(1)
    output.backward()
    return weight.grad is not None


def _storage_users() -> bool:
    tensor = torch.empty(4)
    counts = [storage_users(tensor)]
    view = tensor[1:]
    counts.append(storage_users(tensor))
    saved = (nn.Parameter(torch.ones(3)) * view).sum()
    del view
    counts.append(storage_users(tensor))
    del saved
    return [*counts, storage_users(tensor)] == [1, 2, 2, 1]


def _tensor_users() -> bool:
    parameter, gradient = nn.Parameter(torch.ones(2)), torch.ones(2)
    counts = [tensor_users(gradient)]
    parameter.grad = gradient
    counts += [tensor_users(gradient), *users_of_tensors([gradient])]
    parameter.grad = None
    # Who holds it in Python shows in Python's own count.
    references = sys.getrefcount(gradient)
    held = [gradient]
    return [*counts, tensor_users(gradient)] == [1, 2, 2, 1] and sys.getrefcount(gradient) == references + len(held)


def _unflatten() -> bool:
    flat = torch.arange(7.0)
    first, empty, second = unflatten(flat, [torch.empty(2, 2), torch.empty(0, 3), torch.empty(3)])
    placed = second.data_ptr() == flat[4:].data_ptr()
    return first.tolist() == [[0.0, 1.0], [2.0, 3.0]] and empty.shape == (0, 3) and placed


def _is_future() -> bool:
    future = torch.futures.Future[Any]()
    return is_future(future) and is_future(torch.futures.collect_all([future])) and not is_future(torch.ones(1))


def _chunk_cat() -> bool:
    out = torch.full((2, 3), 9.0)
    chunk_cat([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])], 2, out)
    return out.tolist() == [[1.0, 2.0, 4.0], [3.0, 0.0, 5.0]]


def _is_in_backward() -> bool:
    seen = [is_in_backward()]
    output = nn.Parameter(torch.ones(())) * 2
    output.register_hook(lambda _: seen.append(is_in_backward()))
    output.backward()
    return [*seen, is_in_backward()] == [False, True, False]


def _version_of() -> bool:
    tensor = torch.ones(2)
    before = version_of(tensor)
    view = tensor[:1]
    view.add_(1)
    tensor.detach().add_(1)
    return version_of(tensor) == before + 2


class _Shell(Tensor):
    """Notes the operators that are called with it."""

    operators: list[object]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        first = args[0][0] if isinstance(args[0], list) else args[0]
        first.operators.append(func)
        return None if is_foreach_zero(func) else first


def _shell() -> _Shell:
    shell = without_memory(_Shell, torch.empty(4, 2).t(), torch.float64)
    shell.operators = []
    return shell


def _without_memory() -> bool:
    shell = _shell()
    return (shell.shape, shell.stride(), shell.dtype) == ((2, 4), (1, 2), torch.float64)


def _is_cast() -> bool:
    shell = _shell()
    shell.to(torch.float16)
    return [is_cast(operator) for operator in shell.operators] == [True]


def _is_foreach_zero() -> bool:
    shell, weight = _shell(), nn.Parameter(torch.ones(2, 4, dtype=torch.float64))
    weight.grad = shell
    torch.optim.SGD([weight], foreach=True).zero_grad(set_to_none=False)
    return [is_foreach_zero(operator) for operator in shell.operators] == [True]


def _holds_tensors() -> bool:
    from torch.distributed.tensor import DTensor

    class Holder(_Shell):
        __tensor_flatten__ = DTensor.__tensor_flatten__
        __tensor_unflatten__ = DTensor.__tensor_unflatten__

    holder = without_memory(Holder, torch.ones(1), torch.float32)
    return holds_tensors(holder) and not holds_tensors(nn.Parameter(torch.ones(1)))


def _split_by() -> bool:
    from torch.distributed.tensor import Shard

    return [part.tolist() for part in split_by(Shard(0), torch.arange(5), 2)] == [[0, 1, 2], [3, 4]]


def _strided_shard() -> bool:
    placement = strided_shard(0, 2)
    parts = [part.tolist() for part in split_by(placement, torch.arange(8), 2)]
    return (placement.dim, placement.split_factor) == (0, 2) and parts == [[0, 1, 4, 5], [2, 3, 6, 7]]


def _foreach() -> bool:
    to, of = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 2.0)]
    torch._foreach_copy_(to, of)
    torch._foreach_add_(to, of)
    torch._foreach_mul_(to, 2.0)
    norms = torch._foreach_norm(to, 1.0, dtype=torch.float64)
    torch._foreach_zero_(of)
    return [norm.item() for norm in norms] == [8.0, 24.0] and not any(tensor.any() for tensor in of)


_TRIALS: tuple[tuple[Callable[..., Any], Callable[[], bool]], ...] = (
    (node_is_executed, _node_is_executed),
    (at_end_of_backward, _at_end_of_backward),
    (post_accumulate_hooks, _post_accumulate_hooks),
    (preserve_versions, _preserve_versions),
    (storage_users, _storage_users),
    (tensor_users, _tensor_users),
    (is_in_backward, _is_in_backward),
    (version_of, _version_of),
    (unflatten, _unflatten),
    (is_future, _is_future),
    (chunk_cat, _chunk_cat),
    (without_memory, _without_memory),
    (is_cast, _is_cast),
    (is_foreach_zero, _is_foreach_zero),
    (holds_tensors, _holds_tensors),
    (split_by, _split_by),
    (strided_shard, _strided_shard),
    (torch._foreach_copy_, _foreach),
)
