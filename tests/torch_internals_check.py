"""Trials of ``torch_internals.py``: whether what torch does not promise still behaves as this library needs it.

Each ``try_`` function is a trial of the function, or of the use of torch, that its name tells.
"""

import importlib
import sys
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

internals = importlib.import_module("ppe_ddp.torch_internals")  # which renamed_names.py may have replaced


def trials_in(names):
    """The trials in the names of a module, by the name of what each tries."""
    return {name.removeprefix("try_"): trial for name, trial in names.items() if name.startswith("try_")}


def problems_of(trials):
    """Run each trial; yields what does not behave as it is needed, a line each; a trial that raises counts too."""
    for name, trial in trials.items():
        try:
            if not trial():
                yield f"{name}: torch {torch.__version__} behaves in another way than expected"
        except Exception as error:
            yield f"{name}: torch {torch.__version__}: {type(error).__name__}: {error}"


def check():
    """Try each use on small tensors on the CPU; takes milliseconds. Yields as `problems_of`."""
    return problems_of(trials_in(globals()))


def try_is_trial_step():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = nn.Linear(1, 1)
    optimizer, seen = torch.optim.SGD(model.parameters(), 0.1), []
    optimizer.register_step_post_hook(lambda *_: seen.append(internals.is_trial_step()))
    get_optimizer_state_dict(model, optimizer)
    optimizer.step()
    return seen == [True, False]


def try_node_is_executed():
    used, unused = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
    nodes = [get_gradient_edge(parameter).node for parameter in (used, unused)]
    seen = []
    output = used * 2
    output.register_hook(lambda _: seen.extend(map(internals.node_is_executed(), nodes)))
    (output + unused.detach()).backward()
    below, again = internals.accumulates_below, used * 2
    again.register_hook(lambda _: seen.append(below()))
    again.register_hook(lambda _: internals.at_end_of_backward(lambda: seen.append(below(again.grad_fn))))
    again.backward(retain_graph=True)
    torch.autograd.grad(again, used)
    for factor in (unused * used, used * unused):
        factor.register_hook(lambda _: seen.append(below()))
        factor.backward(inputs=[unused])
    return seen == [True, False, True, True, False, False, False, False]


def try_is_captured():
    asked, other, seen = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(())), []
    output = asked * other
    output.register_hook(lambda _: seen.extend(map(internals.is_captured, (asked, other))))
    torch.autograd.grad(output, asked, retain_graph=True)
    output.backward()
    return seen == [True, False, False, False]


def try_register_first_hook():
    events = []
    output = nn.Parameter(torch.ones(())) * 2
    handles = [output.register_hook(lambda _, k=k: events.append(k)) for k in "ab"]
    internals.register_first_hook(output, lambda _: events.append("first"))
    handles[0].remove()
    output.backward()
    return events == ["first", "b"]


def try_at_end_of_backward():
    events = []
    parameter = nn.Parameter(torch.ones(()))
    output = parameter * 2
    output.register_hook(lambda _: internals.at_end_of_backward(lambda: events.append("end")))
    parameter.register_post_accumulate_grad_hook(lambda _: events.append("accumulated"))
    output.backward()
    return events == ["accumulated", "end"]


def try_post_accumulate_hooks():
    events = []
    parameter = nn.Parameter(torch.ones(()))
    if internals.post_accumulate_hooks(parameter) is not None:
        return False
    handles = [parameter.register_post_accumulate_grad_hook(lambda _, k=k: events.append(k)) for k in "ab"]
    hooks = internals.post_accumulate_hooks(parameter)
    if hooks is None or list(hooks) != [handle.id for handle in handles]:
        return False
    other = hooks.pop(handles[0].id)
    hooks[handles[0].id] = other  # behind the second
    hooks[handles[1].id] = lambda _: events.append("replaced")
    (parameter * 2).backward()
    handles[1].remove()
    return events == ["replaced", "a"] and list(hooks) == [handles[0].id]


def try_preserve_versions():
    weight, saved = nn.Parameter(torch.ones(2)), torch.ones(2)
    output = (weight * saved).sum()
    with internals.preserve_versions([saved]):
        saved.add_(1)
    output.backward()
    return weight.grad is not None


def try_base_of():
    tensor = torch.empty(4)
    return internals.base_of(tensor[1:]) is tensor and internals.base_of(tensor) is None


def try_storage_users():
    tensor = torch.empty(4)
    counts = [internals.storage_users(tensor)]
    view = tensor[1:]
    counts.append(internals.storage_users(tensor))
    saved = (nn.Parameter(torch.ones(3)) * view).sum()
    del view
    counts.append(internals.storage_users(tensor))
    del saved
    return [*counts, internals.storage_users(tensor)] == [1, 2, 2, 1]


def try_tensor_users():
    parameter, gradient = nn.Parameter(torch.ones(2)), torch.ones(2)
    counts = [internals.tensor_users(gradient)]
    parameter.grad = gradient
    counts += [internals.tensor_users(gradient), *internals.users_of_tensors([gradient])]
    parameter.grad = None
    # Who holds it in Python shows in Python's own count.
    references = sys.getrefcount(gradient)
    held = [gradient]
    return [*counts, internals.tensor_users(gradient)] == [1, 2, 2, 1] and sys.getrefcount(
        gradient
    ) == references + len(held)


def try_unflatten():
    flat = torch.arange(7.0)
    first, empty, second = internals.unflatten(flat, [torch.empty(2, 2), torch.empty(0, 3), torch.empty(3)])
    placed = second.data_ptr() == flat[4:].data_ptr()
    return first.tolist() == [[0.0, 1.0], [2.0, 3.0]] and empty.shape == (0, 3) and placed


def try_is_future():
    future = torch.futures.Future()
    return (
        internals.is_future(future)
        and internals.is_future(torch.futures.collect_all([future]))
        and not internals.is_future(torch.ones(1))
    )


def try_chunk_cat():
    out = torch.full((2, 3), 9.0)
    internals.chunk_cat([torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])], 2, out)
    return out.tolist() == [[1.0, 2.0, 4.0], [3.0, 0.0, 5.0]]


def try_current_node():
    seen = [internals.current_node()]
    output = torch.ones(1, requires_grad=True) * 2
    output.register_hook(lambda _: seen.append(internals.current_node()))
    (output * 3).backward()
    return seen == [None, output.grad_fn]


def try_is_in_backward():
    seen = [internals.is_in_backward()]
    output = nn.Parameter(torch.ones(())) * 2
    output.register_hook(lambda _: seen.append(internals.is_in_backward()))
    output.backward()
    return [*seen, internals.is_in_backward()] == [False, True, False]


def try_version_of():
    tensor = torch.ones(2)
    before = internals.version_of(tensor)
    view = tensor[:1]
    view.add_(1)
    tensor.detach().add_(1)
    return internals.version_of(tensor) == before + 2


class _Shell(Tensor):
    """Notes the operators that are called with it."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        first = args[0][0] if isinstance(args[0], list) else args[0]
        first.operators.append(func)
        return None if internals.is_foreach_zero(func) else first


def _shell():
    shell = internals.without_memory(_Shell, torch.empty(4, 2).t(), torch.float64)
    shell.operators = []
    return shell


def try_without_memory():
    shell = _shell()
    return (shell.shape, shell.stride(), shell.dtype) == ((2, 4), (1, 2), torch.float64)


def try_is_cast():
    shell = _shell()
    shell.to(torch.float16)
    return [internals.is_cast(operator) for operator in shell.operators] == [True]


def try_is_foreach_zero():
    shell, weight = _shell(), nn.Parameter(torch.ones(2, 4, dtype=torch.float64))
    weight.grad = shell
    torch.optim.SGD([weight], foreach=True).zero_grad(set_to_none=False)
    return [internals.is_foreach_zero(operator) for operator in shell.operators] == [True]


def try_holds_tensors():
    from torch.distributed.tensor import DTensor

    class Holder(_Shell):
        __tensor_flatten__ = DTensor.__tensor_flatten__
        __tensor_unflatten__ = DTensor.__tensor_unflatten__

    holder = internals.without_memory(Holder, torch.ones(1), torch.float32)
    return internals.holds_tensors(holder) and not internals.holds_tensors(nn.Parameter(torch.ones(1)))


def try_split_strided():
    from torch.distributed.tensor.placement_types import _StridedShard

    placement = _StridedShard(0, split_factor=2)
    parts = [part.tolist() for part in internals.split_strided(torch.arange(7), 0, 2, 2)]
    return (placement.dim, placement.split_factor) == (0, 2) and parts == [[0, 1, 4, 5], [2, 3, 6]]


def try_foreach_copy():
    to, of = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 2.0)]
    torch._foreach_copy_(to, of)
    torch._foreach_add_(to, of)
    torch._foreach_mul_(to, 2.0)
    norms = torch._foreach_norm(to, 1.0, dtype=torch.float64)
    torch._foreach_zero_(of)
    return [norm.item() for norm in norms] == [8.0, 24.0] and not any(tensor.any() for tensor in of)


def try_is_scaler_check():
    seen = []

    class CalledTensor(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            with internals.without_torch_function():
                return func(*args, **(kwargs or {}))

    weight = nn.Parameter(torch.ones(1))
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1.0), torch.optim.SGD([weight])
    scaler.scale(weight.sum())
    weight.grad = torch.tensor([float("inf")]).as_subclass(CalledTensor)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return any(map(internals.is_scaler_check, seen)) and weight.item() == 1.0


def try_parameter_table():
    module = nn.Sequential(nn.BatchNorm1d(2))
    norm = internals.child_table(module)["0"]
    internals.buffer_table(norm)["running_mean"] = buffer = torch.ones(2)
    internals.parameter_table(norm)["weight"] = weight = torch.full((2,), 3.0)  # as functional_call does
    output = norm.eval()(torch.ones(2, 2))
    return norm.running_mean is buffer and norm.weight is weight and output.tolist() == [[0.0, 0.0]] * 2


def try_saved_buffers():
    module = nn.BatchNorm1d(1)
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    return internals.saved_buffers(module) == ["running_mean", "running_var", "num_batches_tracked"]


def try_only_writes_buffers():
    kinds = [nn.BatchNorm2d(2), nn.SyncBatchNorm(2), nn.InstanceNorm1d(2, track_running_stats=True)]
    others = [nn.BatchNorm2d(2).eval(), nn.InstanceNorm1d(2), nn.LayerNorm(2)]
    return all(map(internals.only_writes_buffers, kinds)) and not any(map(internals.only_writes_buffers, others))


def try_is_compiled():  # compiling itself, at the first call, takes seconds
    module, in_place = nn.Linear(1, 1), nn.Linear(1, 1)
    in_place.compile(backend="eager")
    compiled = torch.compile(module, backend="eager")
    return [internals.is_compiled(one) for one in (module, compiled, in_place)] == [False, True, True]


def try_COMPILED():
    compiled = torch.compile(module := nn.Linear(1, 1), backend="eager")
    return internals.child_table(compiled) == {internals.COMPILED: module}


def try_is_wrapped_by_compile():
    module, in_place = nn.Linear(1, 1), nn.Linear(1, 1)
    in_place.compile(backend="eager")
    wrapped = torch.compile(module, backend="eager")
    return [internals.is_wrapped_by_compile(one) for one in (module, wrapped, in_place)] == [False, True, False]


def try_IncompatibleKeys():
    found = nn.Linear(1, 1).load_state_dict({"other": torch.ones(1)}, strict=False)
    return found == internals.IncompatibleKeys(["weight", "bias"], ["other"])


def try_metadata_of():
    state = nn.BatchNorm1d(1).state_dict()
    found = internals.metadata_of(state)
    internals.set_metadata(state, {"": {"version": 1}})  # from before there was num_batches_tracked
    del state["num_batches_tracked"]
    return found == {"": {"version": 2}} and nn.BatchNorm1d(1).load_state_dict(state).missing_keys == []


def try_loading_metadata():
    outer, found = nn.Sequential(nn.Sequential(nn.BatchNorm1d(1))), []
    outer[0].register_load_state_dict_pre_hook(lambda *_: found.append(internals.loading_metadata()))
    state = outer.state_dict()
    outer.load_state_dict(state)
    return found == [internals.metadata_of(state)] and internals.loading_metadata() is None


class _Renamed(nn.Module):
    """Has its tensors in a submodule that its state dict says nothing of."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(1, 1))

    def state_dict(self, *args, **kwargs):
        return self.inner.state_dict(*args, **kwargs)


def try_rename_in_checkpoints():
    from torch.distributed.checkpoint import state_dict

    setattr(_Renamed, internals.CHECKPOINT_NAMES, lambda _self: {"0": "inner"})
    names, asked = state_dict.__dict__, []
    kept = dict(names)  # put back, as renaming is for good

    def rename(_module, name, is_own):
        asked.append((name, is_own))
        return name

    names.pop("ppe_ddp_renames", None)
    try:
        internals.rename_in_checkpoints(rename)
        found = state_dict.get_model_state_dict(_Renamed())
        loose = state_dict.StateDictOptions(strict=False)
        state_dict.set_model_state_dict(_Renamed(), dict(found), options=loose)
    finally:
        names.pop("ppe_ddp_renames", None)
        names.update(kept)
    return list(found) == ["0.weight", "0.bias"] and {("0.weight", False), ("0.weight", True)} <= set(asked)


def try_is_in_join():
    from torch.distributed.algorithms.join import Joinable

    class One(Joinable):
        join_device = join_process_group = None

        def __init__(self):
            super().__init__()

        def join_hook(self, **kwargs): ...

    return not internals.is_in_join(One())


def try_in_backward_optimizers():
    with catch_warnings():
        simplefilter("ignore", DeprecationWarning)  # torch's own, of torch.jit.script
        from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
    with_one, without = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    before = len(internals.in_backward_table())
    _apply_optimizer_in_backward(torch.optim.SGD, [with_one], {"lr": 0.1})
    (optimizer,) = internals.in_backward_optimizers(with_one)
    internals.remove_in_backward_hooks(with_one)
    with_one.sum().backward()
    is_stepped = with_one.item() != 1.0 or with_one.grad is None
    is_counted = len(internals.in_backward_table()) == before + 1
    is_found = isinstance(optimizer, torch.optim.SGD) and not internals.in_backward_optimizers(without)
    return is_counted and is_found and not is_stepped


def try_step_hooks():
    optimizer, calls = torch.optim.SGD([nn.Parameter(torch.ones(1))]), 0
    before = internals.step_hooks(optimizer)

    def count(*_):
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
        return internals.step_hooks(optimizer) - before == calls == len(handles)
    finally:
        for handle in handles:
            handle.remove()


def try_state_hooks():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    registered = [
        [optimizer.register_state_dict_pre_hook, optimizer.register_state_dict_post_hook],
        [optimizer.register_load_state_dict_pre_hook, optimizer.register_load_state_dict_post_hook],
    ]
    hooks = [[lambda *_: None for _ in pair] for pair in registered]
    for pair, own in zip(registered, hooks, strict=True):
        for register, hook in zip(pair, own, strict=True):
            register(hook)
    return [[hook for (hook,) in internals.state_hooks(optimizer, loads=loads)] for loads in (False, True)] == hooks


def try_is_marked_ignored():
    module, own = nn.Linear(1, 1), torch.ones(1)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["weight"])
    internals.mark_ignored(own)
    found = [internals.is_marked_ignored(tensor) for tensor in (module.weight, own, module.bias)]
    return found == [True, True, False] and getattr(module, internals.IGNORED_NAMES) == ["weight"]


def try_outside_inference():
    with torch.inference_mode():
        return not internals.outside_inference(lambda: torch.ones(1))().is_inference()


def try_call_uncompiled():
    return internals.uncompiled(lambda: 1)() == internals.call_uncompiled(lambda: 1)


def try_tell_of_skipped_steps():
    weight, skipped, told = nn.Parameter(torch.ones(1)), [], []
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0), torch.optim.SGD([weight], lr=0.5)
    internals.tell_of_skipped_steps(optimizer, lambda: skipped.append(1))
    internals.tell_of_skipped_steps(fused := torch.optim.SGD([weight], lr=0.5, fused=True), lambda: None)
    step = optimizer.step

    def called():
        told.append("found_inf" in vars(optimizer))
        step()

    vars(optimizer)["step"] = called
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)  # which divides by the scale here, and not in the scaler
    vars(optimizer)["found_inf"] = torch.ones(())
    optimizer.step()
    return "step" not in vars(fused) and told == [True, True] and skipped == [1] and weight.item() == 0.5


def try_leave_out_of_graphs():  # that Dynamo asks for it is seen by compiling, in test_graphs_tools.py
    kind = type("Kind", (torch.Tensor,), {})
    internals.leave_out_of_graphs(kind)
    kinds = torch._dynamo.config.nontraceable_tensor_subclasses
    is_there = kind in kinds
    kinds.discard(kind)
    return is_there


def try_uncompiled_hook():
    def hook():
        return 1

    import torch._dynamo.compiled_autograd  # which takes two seconds

    marks = vars(internals.uncompiled_hook(hook)).keys()
    return (
        hook() == 1
        and marks <= vars(torch.compiler.disable(lambda: 1)).keys()
        and not internals.is_in_compiled_autograd()
    )
