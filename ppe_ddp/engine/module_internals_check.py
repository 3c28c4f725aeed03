"""Trials of ``torch_internals.py``: modules, their state, optimizers, compilation and AMP."""

from __future__ import annotations

from inspect import signature
from types import CodeType
from typing import TYPE_CHECKING, Any, cast
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ppe_ddp.engine.torch_internals import (
    CALL_ATTRIBUTES,
    CHECKPOINT_NAMES,
    IGNORED_NAMES,
    BufferCommHookLocation,
    IncompatibleKeys,
    buffer_table,
    call_uncompiled,
    child_table,
    in_backward_optimizers,
    is_compiled,
    is_in_compiled_autograd,
    is_in_join,
    is_marked_ignored,
    is_scaler_check,
    mark_ignored,
    metadata_of,
    only_writes_buffers,
    parameter_table,
    rename_in_checkpoints,
    set_metadata,
    step_hooks,
    uncompiled,
    uncompiled_hook,
    without_torch_function,
)

if TYPE_CHECKING:
    from collections import OrderedDict
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["MODULE_TRIALS"]


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


def _buffer_comm_hook_location() -> bool:
    register = DistributedDataParallel._register_buffer_comm_hook
    locations = {BufferCommHookLocation.PRE_FORWARD, BufferCommHookLocation.POST_FORWARD}
    return signature(register).parameters["comm_hook_location"].default in locations


def _uncompiled() -> bool:
    return bool(uncompiled(lambda: 1)() == call_uncompiled(lambda: 1))


def _uncompiled_hook() -> bool:
    def hook() -> int:
        return 1

    import torch._dynamo.compiled_autograd  # which takes two seconds

    marks = vars(uncompiled_hook(hook)).keys()
    return hook() == 1 and marks <= vars(torch.compiler.disable(lambda: 1)).keys() and not is_in_compiled_autograd()


MODULE_TRIALS: tuple[tuple[Callable[..., Any], Callable[[], bool]], ...] = (
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
    (BufferCommHookLocation, _buffer_comm_hook_location),
    (call_uncompiled, _uncompiled),
    (uncompiled_hook, _uncompiled_hook),
    (is_scaler_check, _is_scaler_check),
)
