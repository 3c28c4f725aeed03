"""Trials of ``torch_internals.py``: whether what torch does not promise still behaves as this library needs it."""

from __future__ import annotations

import sys
from types import CodeType
from typing import TYPE_CHECKING, Any, cast
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ppe_ddp.torch_internals import (
    CALL_ATTRIBUTES,
    CHECKPOINT_NAMES,
    IGNORED_NAMES,
    IncompatibleKeys,
    at_end_of_backward,
    buffer_table,
    call_uncompiled,
    child_table,
    chunk_cat,
    current_node,
    holds_tensors,
    in_backward_optimizers,
    is_cast,
    is_compiled,
    is_foreach_zero,
    is_future,
    is_in_backward,
    is_in_compiled_autograd,
    is_in_join,
    is_marked_ignored,
    is_scaler_check,
    mark_ignored,
    metadata_of,
    node_is_executed,
    only_writes_buffers,
    parameter_table,
    post_accumulate_hooks,
    preserve_versions,
    register_first_hook,
    rename_in_checkpoints,
    set_metadata,
    split_by,
    step_hooks,
    storage_users,
    strided_shard,
    tell_of_skipped_steps,
    tensor_users,
    uncompiled,
    uncompiled_hook,
    unflatten,
    users_of_tensors,
    version_of,
    without_memory,
    without_torch_function,
)

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["check", "problems_of"]


def problems_of(trials: Iterable[tuple[Callable[..., Any], Callable[[], bool]]]) -> Iterator[str]:
    """Run each trial: a function that relies on torch, and whether torch behaves as it needs it.

    Yields:
        What does not, a line each that begins with the name of the function; a trial that raises counts too.
    """
    for function, trial in trials:
        try:
            if not trial():
                yield f"{function.__name__}: torch {torch.__version__} behaves in another way than expected"
        except Exception as error:
            yield f"{function.__name__}: torch {torch.__version__}: {type(error).__name__}: {error}"


def check() -> Iterator[str]:
    """Try each use on small tensors on the CPU; takes milliseconds.

    Yields:
        What does not behave as this library needs it, a line each, by the name of the function above; none if all is
        well.
    """
    return problems_of((*_TRIALS, *_MODULE_TRIALS))


def _node_is_executed() -> bool:
    used, unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
    nodes = [get_gradient_edge(parameter).node for parameter in (used, unused)]
    seen: list[bool] = []
    output = used * 2
    output.register_hook(lambda _: seen.extend(map(node_is_executed(), nodes)))
    (output + unused.detach()).backward()
    return seen == [True, False]


def _register_first_hook() -> bool:
    events: list[str] = []
    output = nn.Parameter(torch.ones(())) * 2
    handles = [output.register_hook(lambda _, k=k: events.append(k)) for k in "ab"]
    register_first_hook(output, lambda _: events.append("first"))
    handles[0].remove()
    output.backward()
    return events == ["first", "b"]


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


def _current_node() -> bool:
    seen = [current_node()]
    output = torch.ones(1, requires_grad=True) * 2
    output.register_hook(lambda _: seen.append(current_node()))
    (output * 3).backward()
    return seen == [None, output.grad_fn]


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
    (register_first_hook, _register_first_hook),
    (at_end_of_backward, _at_end_of_backward),
    (post_accumulate_hooks, _post_accumulate_hooks),
    (preserve_versions, _preserve_versions),
    (storage_users, _storage_users),
    (tensor_users, _tensor_users),
    (current_node, _current_node),
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


def _is_scaler_check() -> bool:
    seen: list[object] = []

    class CalledTensor(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: object, types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            with without_torch_function():
                return func(*args, **(kwargs or {}))  # type: ignore[operator]

    weight = nn.Parameter(torch.ones(1))
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1.0), torch.optim.SGD([weight])
    scaler.scale(weight.sum())
    weight.grad = torch.tensor([float("inf")]).as_subclass(CalledTensor)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return any(map(is_scaler_check, seen)) and weight.item() == 1.0


def _tables() -> bool:
    module = nn.Sequential(nn.BatchNorm1d(2))
    norm = child_table(module)["0"]
    buffer_table(norm)["running_mean"] = buffer = torch.ones(2)
    parameter_table(norm)["weight"] = weight = torch.full((2,), 3.0)  # as functional_call does
    output = norm.eval()(torch.ones(2, 2))
    return norm.running_mean is buffer and norm.weight is weight and output.tolist() == [[0.0, 0.0]] * 2


def _call_attributes() -> bool:
    code = nn.Module._call_impl.__code__
    codes = [code, *(constant for constant in code.co_consts if isinstance(constant, CodeType))]
    used = {name for one in codes for name in one.co_names}
    module = nn.Module()
    assert module._is_full_backward_hook is None  # is looked at in a function that is called from there
    return {*used.intersection(vars(module)), "_is_full_backward_hook"} == CALL_ATTRIBUTES


def _only_writes_buffers() -> bool:
    kinds = [nn.BatchNorm2d(2), nn.SyncBatchNorm(2), nn.InstanceNorm1d(2, track_running_stats=True)]
    others = [nn.BatchNorm2d(2).eval(), nn.InstanceNorm1d(2), nn.LayerNorm(2)]
    return all(map(only_writes_buffers, kinds)) and not any(map(only_writes_buffers, others))


def _is_compiled() -> bool:  # compiling itself, at the first call, takes seconds
    module, in_place = nn.Linear(1, 1), nn.Linear(1, 1)
    in_place.compile(backend="eager")
    compiled: Any = torch.compile(module, backend="eager")
    return [is_compiled(one) for one in (module, compiled, in_place)] == [False, True, True]


def _incompatible_keys() -> bool:
    found = nn.Linear(1, 1).load_state_dict({"other": torch.ones(1)}, strict=False)
    return bool(found == IncompatibleKeys(["weight", "bias"], ["other"]))


def _metadata() -> bool:
    state = nn.BatchNorm1d(1).state_dict()
    found = metadata_of(state)
    set_metadata(
        cast("OrderedDict[str, Any]", state), {"": {"version": 1}}
    )  # from before there was num_batches_tracked
    del state["num_batches_tracked"]
    return found == {"": {"version": 2}} and nn.BatchNorm1d(1).load_state_dict(state).missing_keys == []


class _Renamed(nn.Module):
    """Has its tensors in a submodule that its state dict says nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(1, 1))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.state_dict(*args, **kwargs)


def _rename_in_checkpoints() -> bool:
    from torch.distributed.checkpoint import state_dict

    setattr(_Renamed, CHECKPOINT_NAMES, lambda _self: {"0": "inner"})
    names, asked = state_dict.__dict__, []
    kept = dict(names)  # put back, as renaming is for good

    def rename(_module: nn.Module, name: str) -> str:
        asked.append(name)
        return name

    names.pop("ppe_ddp_renames", None)
    try:
        rename_in_checkpoints(rename)
        found = state_dict.get_model_state_dict(_Renamed())
    finally:
        names.pop("ppe_ddp_renames", None)
        names.update(kept)
    return list(found) == ["0.weight", "0.bias"] and "0.weight" in asked


def _is_in_join() -> bool:
    from torch.distributed.algorithms.join import Joinable

    class One(Joinable):
        join_device = join_process_group = None  # type: ignore[assignment]

        def __init__(self) -> None:
            super().__init__()

        def join_hook(self, **kwargs: Any) -> Any: ...

    return not is_in_join(One())


def _in_backward_optimizers() -> bool:
    with catch_warnings():
        simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit.script
        from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
    with_one, without = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    _apply_optimizer_in_backward(torch.optim.SGD, [with_one], {"lr": 0.1}, register_hook=False)
    (optimizer,) = in_backward_optimizers(with_one)
    return isinstance(optimizer, torch.optim.SGD) and not in_backward_optimizers(without)


def _step_hooks() -> bool:
    optimizer, calls = torch.optim.SGD([nn.Parameter(torch.ones(1))]), 0
    before = step_hooks(optimizer)

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    handles = [
        register(count)
        for register in (
            optimizer.register_step_pre_hook,
            optimizer.register_step_post_hook,
            register_optimizer_step_pre_hook,
            register_optimizer_step_post_hook,
        )
    ]
    try:
        optimizer.step()
        return step_hooks(optimizer) - before == calls == len(handles)
    finally:
        for handle in handles:
            handle.remove()


def _marks() -> bool:
    module, own = nn.Linear(1, 1), torch.ones(1)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["weight"])
    mark_ignored(own)
    found = [is_marked_ignored(tensor) for tensor in (module.weight, own, module.bias)]
    return found == [True, True, False] and getattr(module, IGNORED_NAMES) == ["weight"]


def _uncompiled() -> bool:
    return bool(uncompiled(lambda: 1)() == call_uncompiled(lambda: 1))


def _tells_of_skipped_steps() -> bool:
    weight, skipped, told = nn.Parameter(torch.ones(1)), list[int](), list[bool]()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0), torch.optim.SGD([weight], lr=0.5)
    tell_of_skipped_steps(optimizer, lambda: skipped.append(1))
    tell_of_skipped_steps(fused := torch.optim.SGD([weight], lr=0.5, fused=True), lambda: None)
    step = optimizer.step

    def called() -> None:
        told.append("found_inf" in vars(optimizer))
        step()

    vars(optimizer)["step"] = called
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)  # which divides by the scale here, and not in the scaler
    vars(optimizer)["found_inf"] = torch.ones(())
    optimizer.step()
    return "step" not in vars(fused) and told == [True, True] and skipped == [1] and weight.item() == 0.5


def _uncompiled_hook() -> bool:
    def hook() -> int:
        return 1

    import torch._dynamo.compiled_autograd  # which takes two seconds

    marks = vars(uncompiled_hook(hook)).keys()
    return hook() == 1 and marks <= vars(torch.compiler.disable(lambda: 1)).keys() and not is_in_compiled_autograd()


_MODULE_TRIALS: tuple[tuple[Callable[..., Any], Callable[[], bool]], ...] = (
    (parameter_table, _tables),
    (nn.Module.__call__, _call_attributes),
    (only_writes_buffers, _only_writes_buffers),
    (is_compiled, _is_compiled),
    (IncompatibleKeys, _incompatible_keys),
    (metadata_of, _metadata),
    (rename_in_checkpoints, _rename_in_checkpoints),
    (is_in_join, _is_in_join),
    (in_backward_optimizers, _in_backward_optimizers),
    (step_hooks, _step_hooks),
    (is_marked_ignored, _marks),
    (call_uncompiled, _uncompiled),
    (uncompiled_hook, _uncompiled_hook),
    (is_scaler_check, _is_scaler_check),
    (tell_of_skipped_steps, _tells_of_skipped_steps),
)
