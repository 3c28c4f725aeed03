"""The parts of torch that this library uses and torch does not promise: autograd, hooks, tensors, AMP.

Nothing else in the package touches them (process groups have a file of their own, ``backends/group_internals.py``).
Each is a function with the reason for it, and each has a trial in :func:`check`, which `python -m ppe_ddp doctor`
runs and a test: a torch that has changed says so by name, instead of training wrongly in silence.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import get_gradient_edge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch.autograd.graph import Node

IN_BACKWARD_OPTIMIZERS = "_in_backward_optimizers"
"""Where ``torch.distributed.optim._apply_optimizer_in_backward`` leaves a parameter's optimizers."""

IGNORED_NAMES = "_ddp_params_and_buffers_to_ignore"
"""Where torch's ``_set_params_and_buffers_to_ignore_for_model`` leaves names on a module."""


# ---------------------------------------------------------------------- autograd


def node_is_executed() -> Callable[[Node], bool]:
    """What tells whether the graph task that runs on this thread will execute a node: 0.2 µs a node.

    There is no public way to learn which parameters a backward will reach before it has reached them. Given out as
    it is, since it is called for every parameter of every backward.
    """
    executed: Callable[[Node], bool] = torch._C._will_engine_execute_node
    return executed


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the graph task that runs on this thread is over, on the thread that has started it.

    torch's own wrappers end a synchronization in this way. The callback is dropped where the backward raises.
    """
    Variable._execution_engine.queue_callback(callback)


def post_accumulate_hooks(parameter: Tensor) -> dict[int, Any] | None:
    """The hooks that autograd calls when a gradient has been accumulated, in this order, by the id of their handle.

    The dictionary itself: autograd calls what is in it when a gradient lands. None where there never was a hook.
    """
    hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks
    return hooks


@contextmanager
def preserve_versions(tensors: Sequence[Tensor]) -> Iterator[None]:
    """While this is entered, changing ``tensors`` in place goes unnoticed by autograd, also where graphs need them."""
    with ExitStack() as stack:
        for tensor in tensors:  # torch 2.6 takes one
            stack.enter_context(_unsafe_preserve_version_counter(tensor))
        yield


# ---------------------------------------------------------------------- tensors


def storage_users(tensor: Tensor) -> int:
    """How many tensors, in Python, in autograd or anywhere else, use the memory of ``tensor``; itself is one."""
    handle = tensor.untyped_storage()  # held, as some versions of torch keep it and others do not
    return int(torch._C._storage_Use_Count(handle._cdata)) - 1


def tensor_users(tensor: Tensor) -> int:
    """How many hold this very tensor in C++: one for all of Python, one for a parameter whose ``.grad`` it is, ..."""
    users: int = tensor._use_count()  # type: ignore[attr-defined]
    return users


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``flat`` in the shapes of ``like``, row-major, one after another: a third of the time of ``view()``."""
    return list(torch._C._nn.unflatten_dense_tensors(flat, list(like)))


def chunk_cat(tensors: Sequence[Tensor], chunks: int, out: Tensor) -> None:
    """Chunk each of ``tensors`` along dimension 0 and put their i-th chunks one after another into row i of ``out``.

    One kernel, where ``torch.chunk`` and ``torch.cat`` would be one for each tensor. Short chunks are padded by zeros.
    """
    torch._chunk_cat(list(tensors), 0, chunks, out=out)


# ---------------------------------------------------------------------- compilation and AMP


@torch._disable_dynamo  # type: ignore[attr-defined,untyped-decorator,unused-ignore]
def call_uncompiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function``, which ``torch.compile`` leaves out of its graphs.

    The public decorator imports torch._dynamo, which takes two seconds; this one does not before it is needed.
    """
    return function(*arguments)


def is_scaler_check(function: object) -> bool:
    """Whether ``function``, as ``__torch_function__`` gets it, is what ``torch.amp.GradScaler`` finds inf with.

    Its first argument is a list of gradients, its second the 0-dimensional tensor that tells of inf.
    """
    return function is torch._amp_foreach_non_finite_check_and_unscale_


def without_torch_function() -> AbstractContextManager[Any]:
    """While this is entered, subclasses of Tensor are handled as plain tensors."""
    disabled: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return disabled


# ---------------------------------------------------------------------- trials


def check() -> list[str]:
    """Try each of these on small tensors on the CPU; takes milliseconds.

    Returns:
        What does not behave as this library needs it, a line each, by the name of the function above; none if all is
        well.
    """
    problems = []
    for function, trial in _TRIALS:
        try:
            if not trial():
                problems.append(f"{function.__name__}: torch {torch.__version__} behaves in another way than expected")
        except Exception as error:
            problems.append(f"{function.__name__}: torch {torch.__version__}: {type(error).__name__}: {error}")
    return problems


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
    counts.append(tensor_users(gradient))
    parameter.grad = None
    # Who holds it in Python shows in Python's own count.
    references = sys.getrefcount(gradient)
    held = [gradient]
    return [*counts, tensor_users(gradient)] == [1, 2, 1] and sys.getrefcount(gradient) == references + len(held)


def _unflatten() -> bool:
    flat = torch.arange(7.0)
    first, second = unflatten(flat, [torch.empty(2, 2), torch.empty(3)])
    return first.tolist() == [[0.0, 1.0], [2.0, 3.0]] and second.data_ptr() == flat[4:].data_ptr()


def _chunk_cat() -> bool:
    out = torch.full((2, 3), 9.0)
    chunk_cat([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])], 2, out)
    return out.tolist() == [[1.0, 2.0, 4.0], [3.0, 0.0, 5.0]]


def _is_scaler_check() -> bool:
    seen: list[object] = []

    class Recorded(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: object, types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            with without_torch_function():
                return func(*args, **(kwargs or {}))  # type: ignore[operator]

    found = torch.zeros(())
    gradient = torch.tensor([float("inf")]).as_subclass(Recorded)
    torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, torch.ones(()))
    return any(map(is_scaler_check, seen)) and bool(found)


_TRIALS: tuple[tuple[Callable[..., Any], Callable[[], bool]], ...] = (
    (node_is_executed, _node_is_executed),
    (at_end_of_backward, _at_end_of_backward),
    (post_accumulate_hooks, _post_accumulate_hooks),
    (preserve_versions, _preserve_versions),
    (storage_users, _storage_users),
    (tensor_users, _tensor_users),
    (unflatten, _unflatten),
    (chunk_cat, _chunk_cat),
    (is_scaler_check, _is_scaler_check),
)
