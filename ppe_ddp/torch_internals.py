"""Private parts of torch that this library needs: autograd, hooks, tensors, AMP.

No other file uses private names of torch, except ``backends/group_internals.py`` for process groups. Each function here
has a trial in ``tests/torch_internals_check.py``, which fails under a torch that behaves in another way.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, suppress
from fnmatch import fnmatchcase
from functools import partial, wraps
from inspect import unwrap
from operator import is_not
from types import FrameType, FunctionType, MethodType
from typing import Any, TypeGuard, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.autograd import Variable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import Node
from torch.distributed.algorithms.join import Joinable
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_Function = TypeVar("_Function", bound="Callable[..., Any]")
_Subclass = TypeVar("_Subclass", bound=Tensor)
_Class = TypeVar("_Class", bound=type)

_TRIED = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")


def tried_versions() -> str:
    """The versions of torch that this library was tried with, this one, and how to try it; for people."""
    known = f"tried with torch {', '.join(_TRIED)}; this is {torch.__version__}"
    if ".".join(torch.__version__.split(".")[:2]) in _TRIED:
        return known
    return f"{known}: in a checkout of ppe_ddp, `python -m pytest tests/test_torch_internals.py` tries it"


IncompatibleKeys = _IncompatibleKeys
"""The result of ``nn.Module.load_state_dict``."""

IGNORED_NAMES = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a module in which torch's ``_set_params_and_buffers_to_ignore_for_model`` keeps names."""


# ---------------------------------------------------------------------- autograd


def node_is_executed() -> Callable[[Node], bool]:
    """A function that tells whether the graph task on this thread will execute a node, in 0.2 µs.

    There is no public way to learn beforehand which parameters a backward will reach. torch's function itself is
    returned, since it is called for every parameter in every backward.
    """
    return torch._C._will_engine_execute_node


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` after the graph task on this thread, on the thread that ends it: for a GPU one of autograd's.

    torch's own wrappers do so, too. If the backward raises, the callback is dropped.
    """
    Variable._execution_engine.queue_callback(callback)


def post_accumulate_hooks(parameter: Tensor) -> dict[int, Any] | None:
    """The hooks that autograd calls when a gradient was accumulated, in this order, by the id of their handle.

    This is autograd's own dictionary, so changes take effect. None if there never was a hook.
    """
    return parameter._post_accumulate_grad_hooks


def register_first_hook(tensor: Tensor, hook: Callable[[Tensor], object]) -> None:
    """Call ``tensor.register_hook(hook)``, and let autograd call the hook before all earlier ones."""
    tensor.register_hook(hook)
    hooks: Any = tensor._backward_hooks
    for key in list(hooks)[:-1]:
        hooks[key] = hooks.pop(key)  # autograd does not notice OrderedDict.move_to_end()


def preserve_versions(tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """A context in which autograd does not notice in-place changes of ``tensors``, even if graphs need them."""
    return _unsafe_preserve_version_counter(tuple(tensors))


def is_in_backward() -> bool:
    """Whether this thread is executing a graph."""
    return graph_task() != -1


def graph_task() -> int:
    """The unique number of the graph task on this thread; -1 outside of a backward."""
    return int(torch._C._current_graph_task_id())


def current_node() -> Node | None:
    """The node that this thread is executing, or whose hooks it is calling; None outside of a backward."""
    return torch._C._current_autograd_node()


def is_captured(leaf: Tensor) -> bool:
    """Whether the graph task on this thread is that of an ``autograd.grad`` of ``leaf``, which requires gradients."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        node_is_executed()(node)
    except RuntimeError:  # torch does not tell it of such a leaf
        return True
    return False


def accumulates_below(top: Node | None = None) -> bool:
    """Whether the graph task on this thread accumulates gradients of all leaves below ``top``.

    ``autograd.grad`` and ``backward(inputs=...)`` of other leaves do not. Without ``top``, it is the node that the task
    executes.
    """
    below, seen, found = [top or current_node()], set(), False
    while below:
        node = below.pop()
        if node is None or node in seen:
            continue
        if hasattr(node, "variable"):
            found = False
            with suppress(RuntimeError):  # autograd.grad of this leaf
                found = node_is_executed()(node)
            if not found:
                return False
        seen.add(node)
        below += [after for after, _ in node.next_functions]
    return found


# ---------------------------------------------------------------------- tensors


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that ``tensor`` is a view of, which lives as long as the view; None if it is no view."""
    return tensor._base


def storage_users(tensor: Tensor) -> int:
    """The number of tensors, in Python, autograd or elsewhere, that use the memory of ``tensor``, including itself."""
    handle = tensor.untyped_storage()  # held, as only some versions of torch keep it
    return int(torch._C._storage_Use_Count(handle._cdata)) - 1


def tensor_users(tensor: Tensor) -> int:
    """The number of references to this tensor in C++: one for all of Python, one for a ``.grad``, and others."""
    return tensor._use_count()  # type: ignore[attr-defined]


def sole_owner(tensor: Tensor) -> bool:
    """Whether ``tensor`` is held by Python alone, and no other tensor uses its storage."""
    return storage_users(tensor) <= 1 and tensor_users(tensor) <= 1


def is_future(value: object) -> TypeGuard[torch.futures.Future[Any]]:
    """Whether ``value`` is a Future of torch; that of ``Work.get_future()`` is no ``torch.futures.Future``."""
    return isinstance(value, torch._C.Future)


def users_of_tensors(tensors: Iterable[Tensor]) -> list[int]:
    """:func:`tensor_users` of each tensor, in half the time."""
    return list(map(Tensor._use_count, tensors))  # type: ignore[attr-defined]


EXISTS: Any = partial(is_not, None)
"""Whether something is not None; in C, for ``filter()``."""
GRADIENT: Any = Tensor.grad.__get__  # type: ignore[union-attr]
"""The ``.grad`` of a tensor; in C, for ``map()``, which takes half the time of a loop."""


def version_of(tensor: Tensor) -> int:
    """The version counter of ``tensor``, which counts in-place changes of it and of its views; 0 if it has none."""
    return 0 if tensor.is_inference() else tensor._version


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of ``flat``, one after another, row-major, in the shapes of ``like``; in half the time of ``view()``."""
    views = list(torch._C._nn.unflatten_dense_tensors(flat, list(like)))
    if not all(map(Tensor.numel, views)):  # an empty one is a tensor of its own
        return [view if view.numel() else flat[:0].view(tensor.shape) for view, tensor in zip(views, like, strict=True)]
    return views


def chunk_cat(tensors: Sequence[Tensor], chunks: int, out: Tensor) -> None:
    """Chunk each tensor along dimension 0, and put their i-th chunks one after another into row i of ``out``.

    Short chunks are padded with zeros. One kernel does it for all tensors.
    """
    torch._chunk_cat(list(tensors), 0, chunks, out=out)


def without_memory(cls: type[_Subclass], like: Tensor, dtype: torch.dtype) -> _Subclass:
    """A tensor of a subclass with ``__torch_dispatch__``, with shape, strides and device of ``like`` but no memory."""
    made: _Subclass = Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=dtype, device=like.device
    )
    return made


def is_cast(operator: object) -> bool:
    """Whether ``operator`` of ``__torch_dispatch__`` is the one that ``tensor.to()`` and ``module.to()`` call."""
    return operator is torch.ops.aten._to_copy.default


def is_foreach_zero(operator: object) -> bool:
    """Whether ``operator`` of ``__torch_dispatch__`` is the one that ``Optimizer.zero_grad()`` calls for a list."""
    return operator is torch.ops.aten._foreach_zero_.default


def holds_tensors(tensor: Tensor) -> bool:
    """Whether ``tensor`` is of a subclass around other tensors, as DTensor is, without memory of its own."""
    return is_traceable_wrapper_subclass(tensor)


def split_strided(tensor: Tensor, dim: int, split_factor: int, parts: int) -> Sequence[Tensor]:
    """The parts of a tensor, of uneven sizes, by torch's placement of FSDP over tensor parallelism."""
    from torch.distributed.tensor.placement_types import _StridedShard  # imports DTensor, which takes 0.3 s

    placement = _StridedShard(dim, split_factor=split_factor)
    return placement._split_tensor(tensor, parts, with_padding=False, contiguous=False)[0]


# ---------------------------------------------------------------------- modules and optimizers


def parameter_table(module: nn.Module) -> dict[str, Any]:
    """The parameters of ``module`` without its submodules: its own dictionary, into which any tensor may be put."""
    return module._parameters


def buffer_table(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of ``module`` without its submodules: its own dictionary."""
    return module._buffers


def saved_buffers(module: nn.Module) -> list[str]:
    """The names of the buffers of ``module`` without its submodules that its state dict has."""
    there = (name for name, buffer in module._buffers.items() if buffer is not None)
    return [name for name in there if name not in module._non_persistent_buffers_set]


def child_table(module: nn.Module) -> dict[str, Any]:
    """The direct submodules of ``module``: its own dictionary."""
    return module._modules


def only_writes_buffers(module: nn.Module) -> bool:
    """Whether ``module`` is a batch or instance norm with running statistics, which its backward does not read."""
    return isinstance(module, _NormBase) and module.training and module.track_running_stats


def fits(name: str, pattern: str) -> bool:
    """Whether the name of a parameter fits a shell pattern, also as it was before ``torch.compile(module)``."""
    return fnmatchcase(before_compiling(name), pattern) or fnmatchcase(name, pattern)


def before_compiling(name: str) -> str:
    """The name that a parameter or buffer had before ``torch.compile(module)``."""
    return name.replace(f"{COMPILED}.", "")


def is_ignored(name: str, ignored: Collection[str]) -> bool:
    """Whether ``ignored`` has the name of a parameter or buffer, also as it was before ``torch.compile(module)``."""
    return name in ignored or before_compiling(name) in ignored


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` was compiled in place, or is the result of ``torch.compile``."""
    return module._compiled_call_impl is not None or is_wrapped_by_compile(module)


COMPILED = "_orig_mod"
"""The name of the module that ``torch.compile(module)`` has been given in the one that it returns."""


def is_wrapped_by_compile(module: nn.Module) -> bool:
    """Whether ``module`` is the result of ``torch.compile``."""
    return COMPILED in child_table(module)


def metadata_of(state_dict: object) -> dict[str, Any] | None:
    """The versions of the modules in a state dict, by name; None for a plain dictionary."""
    return getattr(state_dict, "_metadata", None)


def set_metadata(state_dict: OrderedDict[str, Any], metadata: dict[str, Any]) -> None:
    """Give a state dict the versions of its modules; without them modules take it for one of their first version."""
    state_dict._metadata = metadata  # type: ignore[attr-defined]


def loading_metadata() -> dict[str, Any] | None:
    """The versions in the state dict that the caller's ``nn.Module.load_state_dict`` loads, as in :func:`metadata_of`.

    Hooks are told only that of their own module; a change reaches the submodules, which are loaded after them.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "load" and frame.f_globals is vars(torch.nn.modules.module):
            return frame.f_locals["metadata"]
        frame = frame.f_back
    return None


CHECKPOINT_NAMES = "_fqn_modifiers"
"""The method that tells ``torch.distributed.checkpoint.state_dict`` which names a module's state dict leaves out."""


def rename_in_checkpoints(rename: Callable[[nn.Module, str, bool], str]) -> None:
    """Let ``torch.distributed.checkpoint.state_dict`` call a parameter ``rename(module, name, is_own)``.

    ``is_own`` is True where torch asks for the name in the state dict, which has ``_orig_mod.`` for what
    ``torch.compile`` has wrapped; the names that it gives to users have none.

    It names the state of optimizers by ``named_parameters()``, and removes the prefix of a wrapper only for torch's own
    classes; there it does not ask :data:`CHECKPOINT_NAMES`. Only the first call in a process has an effect.
    """
    from torch.distributed.checkpoint import state_dict

    names = state_dict.__dict__
    torchs: Callable[..., set[str]] = names["_get_fqns"]
    if "ppe_ddp_renames" in names:
        return

    def names_of(model: nn.Module, name: str, *arguments: Any, **keywords: Any) -> set[str]:
        is_own = keywords.get("skip_compiler_prefix") is False
        return torchs(model, rename(model, name, is_own), *arguments, **keywords)

    names["_get_fqns"], names["ppe_ddp_renames"] = names_of, rename


def in_backward_optimizers(parameter: Tensor) -> Sequence[Optimizer]:
    """The optimizers that ``torch.distributed.optim._apply_optimizer_in_backward`` has attached to a parameter."""
    return getattr(parameter, "_in_backward_optimizers", ())


_IN_BACKWARD = "torch.distributed.optim.apply_optimizer_in_backward"


def in_backward_table() -> Sized:
    """What gets longer when parameters get :func:`in_backward_optimizers`: torch's table of these parameters.

    As long as that is not imported, it is Python's table of modules.
    """
    module = sys.modules.get(_IN_BACKWARD)
    return sys.modules if module is None else cast("Sized", module.param_to_acc_grad_map.data)


def remove_in_backward_hooks(parameter: Tensor) -> None:
    """Remove the hooks that would step these optimizers with this rank's own gradient, as torch's wrapper does."""
    module = sys.modules.get(_IN_BACKWARD)
    for handle in module.param_to_optim_hook_handle_map.get(parameter, ()) if module is not None else ():
        handle.remove()


def step_hooks(optimizer: Optimizer) -> int:
    """The number of hooks that a step of ``optimizer`` calls: its own, and those for all optimizers.

    Without those for all optimizers that have the attribute ``skips_master_weights``.
    """
    own = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    before = sum(not hasattr(hook, "skips_master_weights") for hook in _global_optimizer_pre_hooks.values())
    return own + before + len(_global_optimizer_post_hooks)


def state_hooks(optimizer: Optimizer, *, loads: bool) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """The hooks to call before and after ``optimizer.state_dict()``, or ``load_state_dict()``."""
    if loads:
        begins, ends = optimizer._optimizer_load_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks
        return [*begins.values()], [*ends.values()]
    before, after = optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks
    return [*before.values()], [*after.values()]


def is_in_join(joinable: Joinable) -> bool:
    """Whether ``joinable`` is in a ``Join`` context, and so has to notify it in every step."""
    return bool(joinable._join_config.enable)


def mark_ignored(tensor: Tensor) -> None:
    """Mark ``tensor`` as one that wrappers ignore, in torch's way."""
    tensor._ddp_ignored = True  # type: ignore[attr-defined]


def is_marked_ignored(tensor: Tensor) -> bool:
    """Whether ``tensor`` is marked as one that wrappers ignore."""
    return bool(getattr(tensor, "_ddp_ignored", False))


# ---------------------------------------------------------------------- compilation and AMP


def outside_inference(function: _Function) -> _Function:
    """Run ``function`` outside of ``torch.inference_mode()``: what is allocated in it cannot be written later on.

    Grad mode stays off, which leaving the inference mode would turn on. The function is not compiled.
    """
    uncompiled_hook(function)

    @wraps(function)
    def run(*arguments: Any, **keywords: Any) -> Any:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                return function(*arguments, **keywords)
        return function(*arguments, **keywords)

    return cast("_Function", run)


def uncompiled(function: _Function) -> _Function:
    """Exclude ``function`` from the graphs of ``torch.compile``, and run it outside of ``torch.inference_mode()``.

    The public decorator imports torch._dynamo, which takes two seconds; this one imports it only when it is needed.
    """
    wrapped: Any = torch._disable_dynamo(outside_inference(function))  # type: ignore[attr-defined,unused-ignore]
    return cast("_Function", wrapped)


def uncompiled_hook(function: _Function) -> _Function:
    """Exclude ``function``, which autograd calls, and all that it calls from ``torch.compile``; returns it.

    If a whole step is compiled, its ``backward()`` runs with Dynamo active, which would compile every new Python frame.
    This mark costs a call nothing; :func:`uncompiled` costs three frames and an import.
    """
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def exclude_from_compiling(owner: _Class) -> _Class:
    """Exclude the methods and properties of a class from ``torch.compile``; returns it.

    torch calls those of groups and Works from C++, also in a step that is compiled as a whole.
    """
    for member in vars(owner).values():
        function: Any = member.fget if isinstance(member, property) else member
        function = unwrap(function)
        if isinstance(function, FunctionType):
            uncompiled_hook(function)
    return owner


@uncompiled
def leave_out_of_graphs(kind: type[Tensor]) -> None:
    """Let ``torch.compile`` end a graph before a tensor of the class ``kind``, which has no ``__torch_dispatch__``."""
    torch._dynamo.config.nontraceable_tensor_subclasses.add(kind)


def is_in_compiled_autograd() -> bool:
    """Whether a compiled backward is running, which calls hooks after they were traced."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")  # takes two seconds to import
    return module is not None and bool(module.in_compiled_autograd_region)


@uncompiled
def call_uncompiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``function`` outside of the graphs of ``torch.compile``."""
    return function(*arguments)


def is_scaler_check(function: object) -> bool:
    """Whether ``function`` of ``__torch_function__`` is the one by which ``torch.amp.GradScaler`` finds inf.

    Its first argument is a list of gradients, its second the 0-dimensional tensor that becomes 1 if there is inf.
    """
    return function is torch._amp_foreach_non_finite_check_and_unscale_


def is_trial_step() -> bool:
    """Whether a step that is running is torch's own, with zero gradients and lr 0, so that there is state to describe.

    ``get_state_dict()`` and ``set_state_dict()`` of ``torch.distributed.checkpoint`` take it where there is none.
    """
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    trial: Any = getattr(module, "_init_optim_state", None)  # another thread may be importing it
    if trial is None:
        return False
    code = trial.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


class _TrueForScaler:
    """True in ``GradScaler.step()``; tools take an optimizer of which this is True for one that unscales gradients."""

    def __bool__(self) -> bool:
        caller = sys._getframe(1)
        return caller.f_code.co_name == "step" and isinstance(caller.f_locals.get("self"), torch.amp.GradScaler)


def tell_of_skipped_steps(optimizer: Optimizer, skipped: Callable[[], object]) -> None:
    """Let ``optimizer.step()`` call only ``skipped`` if a ``GradScaler`` skips the step.

    A scaler looks at this rank's gradients, so one rank alone may skip a step, and not call ``step()``. It always calls
    ``step()`` of an optimizer that says that it skips by itself, as torch's fused ones do.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False) not in (None, False):
        return
    plain: Callable[..., Any] = optimizer.step

    @wraps(plain)
    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # Removed meanwhile, as those of torch's optimizers that are not fused refuse them.
        given = take_scale(self)
        found_inf, scale = given.get("found_inf"), given.get("grad_scale")
        result = None
        if found_inf is None or not bool(found_inf):
            if scale is not None:
                _unscale(self, scale)
            result = plain(*args, **kwargs)
        else:
            skipped()
        _give_scale(self, given)
        return result

    vars(optimizer).update(step=MethodType(step, optimizer), _step_supports_amp_scaling=_TrueForScaler())


@uncompiled  # as Dynamo does not carry such a change over a break of its graph
def take_scale(optimizer: Optimizer) -> dict[str, Any]:
    """Remove what a ``GradScaler`` has given ``optimizer`` for a step; the next step would apply it again."""
    return {key: vars(optimizer).pop(key) for key in ("found_inf", "grad_scale") if key in vars(optimizer)}


@uncompiled
def _give_scale(optimizer: Optimizer, given: Mapping[str, Any]) -> None:
    vars(optimizer).update(given)


def _unscale(optimizer: Optimizer, scale: Tensor) -> None:
    factor = scale.double().reciprocal().float()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.device))


without_torch_function: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass
"""A context in which subclasses of Tensor are handled as plain tensors; torch's own class, which costs no frame."""
