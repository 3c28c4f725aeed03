"""The parts of torch that this library uses and torch does not promise: autograd, hooks, tensors, AMP.

Nothing else in the package touches them (process groups have a file of their own, ``backends/group_internals.py``).
Each is a function with the reason for it, and each has a trial in ``tests/torch_internals_check.py``, which tells by
name what a torch does otherwise.
"""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from functools import partial, wraps
from operator import is_not
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd import Variable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from torch.autograd.graph import Node
    from torch.distributed.algorithms.join import Joinable
    from torch.optim import Optimizer

_Function = TypeVar("_Function", bound="Callable[..., Any]")
_Subclass = TypeVar("_Subclass", bound=Tensor)

_TRIED = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")


def tried_versions() -> str:
    """Whether the trials of these functions have been run with this torch, and how to run them; for people."""
    known = f"tried with torch {', '.join(_TRIED)}; this is {torch.__version__}"
    if ".".join(torch.__version__.split(".")[:2]) in _TRIED:
        return known
    return f"{known}: in a checkout of ppe_ddp, `python -m pytest tests/test_torch_internals.py` tries it"


IncompatibleKeys = _IncompatibleKeys
"""What ``nn.Module.load_state_dict`` gives back."""

CALL_ATTRIBUTES = frozenset(
    {
        "_backward_hooks",
        "_backward_pre_hooks",
        "_is_full_backward_hook",
        "_forward_hooks",
        "_forward_hooks_always_called",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
    }
)
"""The attributes of a module that ``nn.Module.__call__`` looks at to find its hooks."""

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

    The dictionary itself: autograd calls what is in it when a gradient arrives. None where there never was a hook.
    """
    hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks
    return hooks


def register_first_hook(tensor: Tensor, hook: Callable[[Tensor], object]) -> None:
    """As ``tensor.register_hook(hook)``, but autograd calls it before those that are there already."""
    tensor.register_hook(hook)
    hooks: Any = tensor._backward_hooks
    for key in list(hooks)[:-1]:
        hooks[key] = hooks.pop(key)  # autograd does not see an OrderedDict.move_to_end()


def preserve_versions(tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """While this is entered, changing ``tensors`` in place goes unnoticed by autograd, also where graphs need them."""
    return _unsafe_preserve_version_counter(tuple(tensors))


def is_in_backward() -> bool:
    """Whether this thread executes a graph now, and not only code that was called at other times."""
    return graph_task() != -1


def graph_task() -> int:
    """The number of the graph task that runs on this thread, which no other one gets; -1 outside of a backward."""
    return int(torch._C._current_graph_task_id())


def current_node() -> Node | None:
    """The node that this thread executes, whose hooks autograd calls now; None outside of a backward."""
    node: Node | None = torch._C._current_autograd_node()
    return node


# ---------------------------------------------------------------------- tensors


def storage_users(tensor: Tensor) -> int:
    """How many tensors, in Python, in autograd or anywhere else, use the memory of ``tensor``; itself is one."""
    handle = tensor.untyped_storage()  # held, as some versions of torch keep it and others do not
    return int(torch._C._storage_Use_Count(handle._cdata)) - 1


def tensor_users(tensor: Tensor) -> int:
    """How many hold this very tensor in C++: one for all of Python, one for a parameter whose ``.grad`` it is, ..."""
    users: int = tensor._use_count()  # type: ignore[attr-defined]
    return users


def is_future(value: object) -> TypeGuard[torch.futures.Future[Any]]:
    """Whether ``value`` is a Future of torch's: ``Work.get_future()`` gives one that is no ``torch.futures.Future``."""
    return isinstance(value, torch._C.Future)


def users_of_tensors(tensors: Iterable[Tensor]) -> list[int]:
    """:func:`tensor_users` of each, in half the time: it is asked for every gradient of every backward."""
    return list(map(Tensor._use_count, tensors))  # type: ignore[attr-defined]


EXISTS: Any = partial(is_not, None)
"""Whether something is not None: for ``filter()``, which then calls no function of Python."""
GRADIENT: Any = Tensor.grad.__get__  # type: ignore[union-attr]
"""The ``.grad`` of a tensor: for ``map()``, which takes half the time of a loop."""


def version_of(tensor: Tensor) -> int:
    """How often ``tensor``, or another with its version counter, was changed in place: tells whether it was at all."""
    return tensor._version


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``flat`` in the shapes of ``like``, row-major, one after another: half the time of ``view()``."""
    views = list(torch._C._nn.unflatten_dense_tensors(flat, list(like)))
    if not all(map(Tensor.numel, views)):  # an empty one is a tensor of its own
        return [view if view.numel() else flat[:0].view(tensor.shape) for view, tensor in zip(views, like, strict=True)]
    return views


def chunk_cat(tensors: Sequence[Tensor], chunks: int, out: Tensor) -> None:
    """Chunk each of ``tensors`` along dimension 0 and put their i-th chunks one after another into row i of ``out``.

    One kernel, where ``torch.chunk`` and ``torch.cat`` would be one for each tensor. Short chunks are padded by zeros.
    """
    torch._chunk_cat(list(tensors), 0, chunks, out=out)


def without_memory(cls: type[_Subclass], like: Tensor, dtype: torch.dtype) -> _Subclass:
    """A tensor of a subclass that has ``__torch_dispatch__``, with shape, strides and device of ``like``."""
    made: _Subclass = Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=dtype, device=like.device
    )
    return made


def is_cast(operator: object) -> bool:
    """Whether ``operator``, as ``__torch_dispatch__`` gets it, is what ``tensor.to()`` and ``module.to()`` call."""
    return operator is torch.ops.aten._to_copy.default


def is_foreach_zero(operator: object) -> bool:
    """Whether ``operator``, as ``__torch_dispatch__`` gets it, is what ``Optimizer.zero_grad()`` calls for a list."""
    return operator is torch.ops.aten._foreach_zero_.default


def holds_tensors(tensor: Tensor) -> bool:
    """Whether ``tensor`` is of a subclass around other tensors, as DTensor is, without memory of its own."""
    return is_traceable_wrapper_subclass(tensor)


def split_by(placement: Any, positions: Tensor, parts: int) -> Sequence[Tensor]:
    """What a placement of DTensor that is sharded gives to each of ``parts``, of uneven sizes.

    There is no public way to learn how a placement of another class than Shard interleaves its dimension.
    """
    split: Sequence[Tensor] = placement._split_tensor(positions, parts, with_padding=False, contiguous=False)[0]
    return split


def strided_shard(dim: int, split_factor: int) -> Any:
    """Torch's placement of FSDP over tensor parallelism, which has no public name."""
    from torch.distributed.tensor.placement_types import _StridedShard  # with DTensor, a third of a second to import

    return _StridedShard(dim, split_factor=split_factor)


# ---------------------------------------------------------------------- modules and optimizers


def parameter_table(module: nn.Module) -> dict[str, Any]:
    """The parameters of ``module`` alone: the dictionary itself, in which another tensor may be put."""
    table: dict[str, Any] = module._parameters
    return table


def buffer_table(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of ``module`` alone, by name: the dictionary itself."""
    return module._buffers


def child_table(module: nn.Module) -> dict[str, Any]:
    """The submodules of ``module`` itself, by name: the dictionary itself."""
    table: dict[str, Any] = module._modules
    return table


def only_writes_buffers(module: nn.Module) -> bool:
    """Whether ``module`` normalizes, and updates its running statistics without reading them in backward.

    Also for classes of users, which have the base of all of torch's own that do so.
    """
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


def fits(name: str, pattern: str) -> bool:
    """Whether the parameter ``name`` fits a pattern of shells, as it was named before ``torch.compile(module)``."""
    return fnmatchcase(name.replace("_orig_mod.", ""), pattern) or fnmatchcase(name, pattern)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` was compiled in place, or is what ``torch.compile`` has made of another."""
    return module._compiled_call_impl is not None or "_orig_mod" in child_table(module)


def metadata_of(state_dict: object) -> dict[str, Any] | None:
    """The versions of the modules that a state dict is of, by their names; None for a plain dictionary."""
    return getattr(state_dict, "_metadata", None)


def set_metadata(state_dict: OrderedDict[str, Any], metadata: dict[str, Any]) -> None:
    """Give a state dict the versions of its modules, without which they take it for one of their first version."""
    state_dict._metadata = metadata  # type: ignore[attr-defined]


CHECKPOINT_NAMES = "_fqn_modifiers"
"""The method of a module by which ``torch.distributed.checkpoint.state_dict`` learns of names that are left out."""


def rename_in_checkpoints(rename: Callable[[nn.Module, str], str]) -> None:
    """Let ``torch.distributed.checkpoint.state_dict`` call a parameter by what ``rename(module, name)`` gives.

    It names the state of optimizers by ``named_parameters()``, and takes the prefix of a wrapper off only where that is
    torch's own class; what a module says by :data:`CHECKPOINT_NAMES` is not asked there. There is one such function in
    a process: calling this again changes nothing.
    """
    from torch.distributed.checkpoint import state_dict

    names = state_dict.__dict__
    torchs: Callable[..., set[str]] = names["_get_fqns"]
    if "ppe_ddp_renames" in names:
        return

    def names_of(model: nn.Module, name: str, *arguments: Any, **keywords: Any) -> set[str]:
        return torchs(model, rename(model, name), *arguments, **keywords)

    names["_get_fqns"], names["ppe_ddp_renames"] = names_of, rename


def in_backward_optimizers(parameter: Tensor) -> Sequence[Optimizer]:
    """The optimizers that ``torch.distributed.optim._apply_optimizer_in_backward`` has left with a parameter."""
    optimizers: Sequence[Optimizer] = getattr(parameter, "_in_backward_optimizers", ())
    return optimizers


def step_hooks(optimizer: Optimizer) -> int:
    """How many hooks a step of ``optimizer`` calls: its own, and those of all optimizers."""
    own = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    return own + len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks)


def is_in_join(joinable: Joinable) -> bool:
    """Whether ``joinable`` is being used in a ``Join`` context, so that it has to tell that of every step."""
    return bool(joinable._join_config.enable)


def mark_ignored(tensor: Tensor) -> None:
    """Mark ``tensor`` as torch's wrapper marks what it is to leave alone."""
    tensor._ddp_ignored = True  # type: ignore[attr-defined]


def is_marked_ignored(tensor: Tensor) -> bool:
    """Whether ``tensor`` is marked as what torch's wrapper is to leave alone."""
    return bool(getattr(tensor, "_ddp_ignored", False))


# ---------------------------------------------------------------------- compilation and AMP


def uncompiled(function: _Function) -> _Function:
    """``function``, which ``torch.compile`` leaves out of its graphs.

    The public decorator imports torch._dynamo, which takes two seconds; this one does not before it is needed.
    """
    wrapped: Any = torch._disable_dynamo(function)  # type: ignore[attr-defined,unused-ignore]
    return cast("_Function", wrapped)


def uncompiled_hook(function: _Function) -> _Function:
    """``function`` itself, which autograd calls and ``torch.compile`` leaves out, with all that it calls.

    Where a whole step is compiled, its ``backward()`` runs with Dynamo active, which would compile every Python frame
    that is new to it. This is a mark, and costs a call nothing; :func:`uncompiled` costs two frames and an import.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def is_in_compiled_autograd() -> bool:
    """Whether the backward that runs now is compiled: its hooks are called by compiled code, after it was traced."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")  # takes two seconds to import
    return module is not None and bool(module.in_compiled_autograd_region)


@uncompiled
def call_uncompiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function``, which ``torch.compile`` leaves out of its graphs."""
    return function(*arguments)


def is_scaler_check(function: object) -> bool:
    """Whether ``function``, as ``__torch_function__`` gets it, is what ``torch.amp.GradScaler`` finds inf with.

    Its first argument is a list of gradients, its second the 0-dimensional tensor that tells of inf.
    """
    return function is torch._amp_foreach_non_finite_check_and_unscale_


def tell_of_skipped_steps(optimizer: Optimizer, skipped: Callable[[], object]) -> None:
    """Let ``optimizer.step()`` call ``skipped``, and do nothing else, where a ``GradScaler`` skips the step.

    Gradients are those of one rank, so one rank alone may skip a step, in which ``step()`` would not be called. A
    scaler calls ``step()`` in any case where the optimizer says that it skips by itself, as torch's fused ones do.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        return
    plain: Callable[..., Any] = optimizer.step

    @wraps(plain)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # Taken away meanwhile: torch's optimizers refuse them where they are not fused.
        given = take_scale(self)
        found_inf, scale = given.get("found_inf"), given.get("grad_scale")
        result = None
        if found_inf is None or not bool(found_inf):
            if scale is not None:
                _unscale(self, scale)
            result = plain(*args, **kwargs)
        else:
            skipped()
        vars(self).update(given)
        return result

    vars(optimizer).update(step=MethodType(step, optimizer), _step_supports_amp_scaling=True)


def take_scale(optimizer: Optimizer) -> dict[str, Any]:
    """Take away what a ``GradScaler`` has given ``optimizer`` for a step: the next one would count it once more."""
    return {key: vars(optimizer).pop(key) for key in ("found_inf", "grad_scale") if key in vars(optimizer)}


def _unscale(optimizer: Optimizer, scale: Tensor) -> None:
    factor = scale.double().reciprocal().float()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.device))


def without_torch_function() -> AbstractContextManager[Any]:
    """While this is entered, subclasses of Tensor are handled as plain tensors."""
    disabled: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return disabled
