"""PyTorch's own tools around and inside of the wrapper: functional calls, autocast, compile, copies."""

import contextlib
import copy
import gc
import io
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.func import functional_call

from one_process import (
    assert_gradients,
    assert_same_on_all_ranks,
    check,
    data,
    gradients,
    mean_gradients,
    mlp,
    of_all_ranks,
    seeded,
    square,
)
from ppe_ddp import Checkpointer, DistributedDataParallel, DistributedOptimizer, PeerAbortedError, UnusableError, weigh
from ppe_ddp.compression import DiLoCo, ErrorFeedback, TopK
from ppe_ddp.engine.group_duplicates import GroupHandle
from rank_tests import each_variant, on_three_ranks, on_two_ranks


@each_variant
@on_two_ranks
def test_functional_call(options):
    def step(model, rank):
        prefix = "module." if isinstance(model, DistributedDataParallel) else ""
        own = dict(model.named_parameters())
        # Rank 1 replaces one parameter by a function of it, and another by one that is none of the module's.
        replaced = {prefix + "0.weight": own[prefix + "0.weight"] * 2}
        if rank == 1:
            replaced[prefix + "2.bias"] = torch.ones(2, requires_grad=True)
        functional_call(model, replaced, (data(5, 4, rank=rank),)).pow(2).sum().backward()
        square(model, rank)

    wrapper = check(seeded(mlp, 4, 4, 2), step, **options)
    assert isinstance(wrapper.module[0].weight, nn.Parameter)


@pytest.mark.parametrize("order", ["before", "after"])
@on_two_ranks
def test_functional_call_with_other_parameters_beside_a_forward(order):
    module = seeded(mlp, 4, 2)
    wrapper = DistributedDataParallel(module)
    others = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in wrapper.named_parameters()}
    x = data(5, 4)
    if order == "before":
        teacher = functional_call(wrapper, others, (x,))
        (wrapper(x) - teacher.detach()).sum().backward()
    else:
        output = wrapper(x)
        teacher = functional_call(wrapper, others, (x,))
        with pytest.raises((UnusableError, PeerAbortedError), match=r"functional_call\(\) has replaced"):
            (output - teacher.detach()).sum().backward()
        wrapper.zero_grad()
        wrapper(x).sum().backward()
    assert_gradients(module, mean_gradients(module, lambda model, r: model(data(5, 4, rank=r)).sum().backward()))


@on_two_ranks
def test_functional_gradients_on_one_rank_alone():
    wrapper = DistributedDataParallel(seeded(mlp, 4, 4, 2))
    expected = mean_gradients(wrapper.module, square)
    if dist.get_rank() == 0:
        own = {name: parameter.detach() for name, parameter in wrapper.named_parameters()}

        def loss(parameters, x):
            return functional_call(wrapper, parameters, (x,)).pow(2).sum()

        twin = copy.deepcopy(wrapper.module)
        square(twin, 0)
        slopes = torch.func.grad(loss)(own, data(5, 4))
        assert_gradients(twin, {name.removeprefix("module."): slope for name, slope in slopes.items()})
        per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(own, data(5, 4))
        assert per_sample["module.0.weight"].shape == (5, 4, 4)
        torch.testing.assert_close(per_sample["module.0.weight"].sum(0), slopes["module.0.weight"])
    square(wrapper, dist.get_rank())
    assert_gradients(wrapper.module, expected)


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)

    def forward(self, x, way=0):
        h = self.layers[0](x)
        h = self.norm(self.layers[1 + way](h)) + self.layers[1 + way](h)
        return self.head(torch.relu(h))


@each_variant
@on_two_ranks
def test_autocast_with_a_scaler(options):
    module = seeded(Norms)
    twin = copy.deepcopy(module)
    wrapper = DistributedDataParallel(module, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (wrapper, twin)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in optimizers]

    def step(model, rank, k, scaler):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(data(5, 4, rank=rank, step=k), way=rank)
        assert output.dtype == torch.bfloat16
        loss = output.float().pow(2).mean()
        # In one step rank 1 alone overflows: both have to skip it.
        scaler.scale(loss * (float("inf") if k == 2 and rank == 1 else 1)).backward()

    for k in range(5):
        expected = mean_gradients(twin, lambda m, rank, k=k: step(m, rank, k, scalers[1]))
        for name, parameter in twin.named_parameters():
            parameter.grad = expected[name]
        wrapper.zero_grad()
        step(wrapper, dist.get_rank(), k, scalers[0])
        for optimizer, scaler in zip(optimizers, scalers, strict=True):
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert scalers[0].get_scale() == 2048.0
    for a, b in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


class Parts(nn.Module):
    """A few fixed parts, chosen at every call by an argument that the graph is compiled for."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, way: int):
        return torch.tanh(self.parts[way](x)) + self.parts[2](x)


@pytest.mark.parametrize("place", ["inside", "outside"])
@on_two_ranks
def test_compile(place):
    torch._dynamo.reset()
    module = seeded(Parts)
    expected = mean_gradients(module, lambda m, rank: m(data(5, 4, rank=rank), rank).pow(2).sum().backward())
    counted = []

    def backend(graph, inputs):
        counted.append(graph)
        return graph

    if place == "inside":
        model = wrapper = DistributedDataParallel(torch.compile(module, backend="aot_eager"))
    else:
        wrapper = DistributedDataParallel(module)
        model = torch.compile(wrapper, backend="aot_eager")
    for _ in range(3):
        wrapper.zero_grad()
        model(data(5, 4), dist.get_rank()).pow(2).sum().backward()
        assert_gradients(module, expected)
        assert_same_on_all_ranks(module)
    assert len(wrapper.trace().agreed) == 6
    assert len(wrapper.trace().local) == 4
    # Something was compiled at all, and forward without gradients works too.
    torch._dynamo.reset()
    compiled = torch.compile(wrapper if place == "outside" else module, backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(compiled(data(5, 4), 0), module(data(5, 4), 0))
    assert counted
    torch._dynamo.reset()


@pytest.mark.parametrize("options", [{}, {"shared_memory": False, "overlap": False}], ids=str)
@on_two_ranks
def test_compile_a_whole_step_with_its_backward(options):
    # Stochastic depth, or experts: the graph of each step and rank is another.
    torch._dynamo.reset()
    rank, module = dist.get_rank(), seeded(Parts)
    wrapper = DistributedDataParallel(module, **options)

    def step(model, x, more, way: int, other: int):
        with model.no_sync() if model is wrapper else contextlib.nullcontext():
            model(more, other).pow(2).sum().backward()
        loss = model(x, way).pow(2).sum()
        loss.backward()
        return loss.detach()

    compiled = torch.compile(lambda *arguments: step(wrapper, *arguments), backend="eager")

    def arguments(r, k):
        return data(5, 4, rank=r, step=2 * k), data(5, 4, rank=r, step=2 * k + 1), (r + k) % 3, k % 2

    for k in range(3):
        expected = mean_gradients(module, lambda m, r, k=k: step(m, *arguments(r, k)))
        wrapper.zero_grad()
        compiled(*arguments(rank, k))
        assert_gradients(module, expected)
        assert_same_on_all_ranks(module)
    if rank == 0:  # alone, as a forward without gradients waits for nobody
        with torch.inference_mode():
            torch.compile(copy.deepcopy(wrapper), backend="eager")(*arguments(0, 0)[::2])
    torch._dynamo.reset()


def plain(optimizer, _wrapper):
    return optimizer


def with_outer_steps(optimizer, wrapper):
    optimizer.outer = DiLoCo(wrapper, optimizer, every=2)
    return optimizer


def step_outside(wrapper, optimizer, _scaler, x):
    square_of(wrapper, x).backward()
    optimizer.step()
    optimizer.outer.synchronize()


def step_clipped(wrapper, optimizer, _scaler, x):
    square_of(wrapper, x).backward()
    optimizer.clip_grad_norm_(0.1)
    optimizer.step()


def step_scaled(wrapper, optimizer, scaler, x):
    scaler.scale(square_of(wrapper, x)).backward()
    scaler.step(optimizer)


def step_without_a_backward_on_one_rank(wrapper, optimizer, _scaler, x):
    if dist.get_rank():
        wrapper.finish_grad_sync()
    else:
        square_of(wrapper, x).backward()
    optimizer.step()
    wrapper.check_in_sync()


def square_of(model, x):
    return model(x).pow(2).sum()


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (with_outer_steps, step_scaled),
        (with_outer_steps, step_outside),
        (DistributedOptimizer, step_scaled),
        (DistributedOptimizer, step_clipped),
        (plain, step_without_a_backward_on_one_rank),
    ],
    ids=["outer steps", "an outer step by hand", "shards, scaled", "shards, clipped", "a rank without a backward"],
)
@on_two_ranks
def test_compile_a_whole_step_with_its_optimizer(make, step):
    found = []
    for is_compiled in (True, False):
        torch._dynamo.reset()
        wrapper = DistributedDataParallel(seeded(mlp, 4, 4, 2))
        optimizer = make(torch.optim.SGD(wrapper.parameters(), lr=0.1, momentum=0.9), wrapper)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        called = torch.compile(step, backend="eager") if is_compiled else step
        for k in range(5):
            optimizer.zero_grad()
            x = data(5, 4, rank=dist.get_rank(), step=k)
            if step is step_scaled and k == 2 and dist.get_rank() == 1:
                x = x * float("inf")  # this rank alone skips the step, or all do
            called(wrapper, optimizer, scaler, x)
            if step is step_scaled:
                scaler.update()
        found.append([parameter.detach().clone() for parameter in wrapper.parameters()])
        del wrapper, optimizer
    torch.testing.assert_close(found[0], found[1])
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_two_ranks
def test_compile_a_step_that_edits_averages(backend):
    def step(wrapper, optimizer, x):
        optimizer.zero_grad()
        wrapper(x).sum().backward()
        for weight in optimizer.param_groups[0]["params"]:
            weight.grad = weight.grad * 0.5
        optimizer.step()

    found = []
    for called in (step, torch.compile(step, backend=backend)):
        torch._dynamo.reset()
        wrapper = DistributedDataParallel(seeded(mlp, 4, 4, 2))
        optimizer = DistributedOptimizer(torch.optim.SGD(wrapper.parameters(), lr=0.1), wrapper)
        for k in range(2):
            called(wrapper, optimizer, data(5, 4, step=k))
        found.append([one.detach().clone() for one in wrapper.parameters()])
    torch.testing.assert_close(*found)
    torch._dynamo.reset()


@pytest.mark.parametrize("make", [plain, DistributedOptimizer])
@on_two_ranks
def test_compile_an_epoch_that_wraps_saves_loads_and_joins(tmp_path, make):
    def epoch(module, x):
        wrapper = DistributedDataParallel(module)
        optimizer = make(torch.optim.SGD(wrapper.parameters(), lr=0.1), wrapper)
        checkpointer = Checkpointer(tmp_path, {"model": wrapper, "optimizer": optimizer})
        checkpointer.save(1)
        with wrapper.join() if make is plain else contextlib.nullcontext():
            for _ in range(2 + (dist.get_rank() if make is plain else 0)):
                optimizer.zero_grad()
                wrapper(x).sum().backward()
                optimizer.step()
        checkpointer.load()
        optimizer.step()
        return list(wrapper.parameters())

    found = []
    for function in (epoch, torch.compile(epoch, backend="eager")):
        torch._dynamo.reset()
        found.append([one.detach().clone() for one in function(seeded(mlp, 4, 4, 2), data(5, 4))])
    torch.testing.assert_close(*found)
    torch._dynamo.reset()


@on_two_ranks
def test_compiled_autograd_is_refused_by_name_on_all_ranks():
    from torch._dynamo import compiled_autograd  # here, as it takes long and ranks have imported it

    rank, module = dist.get_rank(), seeded(mlp, 4, 4, 2)
    wrapper = DistributedDataParallel(module)
    expected = mean_gradients(module, square)
    for culprits in [[0, 1], [1]]:
        is_compiled = rank in culprits
        wrapper.zero_grad()
        with (
            compiled_autograd._enable(torch.compile(backend="eager")) if is_compiled else contextlib.nullcontext(),
            pytest.raises(UnusableError if is_compiled else PeerAbortedError, match="compiled autograd has compiled"),
        ):
            square(wrapper, rank)
        wrapper.zero_grad()
        square(wrapper, rank)
        assert_gradients(module, expected)
    torch._dynamo.reset()


def by_pickle(wrapper):
    return pickle.loads(pickle.dumps(wrapper))


def by_save(wrapper):
    file = io.BytesIO()
    torch.save(wrapper, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [copy.deepcopy, by_pickle, by_save], ids=["deepcopy", "pickle", "save"])
@on_two_ranks
def test_copies_train_in_step(way):
    rank = dist.get_rank()
    original = DistributedDataParallel(seeded(mlp, 4, 4, 2), gradient_as_bucket_view=True, bucket_cap_mb=1e-4)
    square(original, rank)
    twin = way(original)
    kept = gradients(original)
    for wrapper in (twin, way(twin), original, twin):
        expected = mean_gradients(wrapper.module, lambda m, r: square(m, r, step=1))
        wrapper.zero_grad()
        square(wrapper, rank, step=1)
        assert_gradients(wrapper.module, expected)
        assert_same_on_all_ranks(wrapper.module)
        assert wrapper.trace() is not None
        with torch.no_grad():
            for parameter in wrapper.parameters():
                parameter -= 0.1 * parameter.grad
    assert not set(map(id, twin.parameters())) & set(map(id, original.parameters()))
    assert kept.keys() == gradients(original).keys()


def average_nothing(gradients, group):
    for gradient in gradients:
        gradient.fill_(7)


def clear(wrapper):
    for parameter in wrapper.parameters():
        parameter.grad = torch.ones_like(parameter)


@on_two_ranks
def test_copies_keep_options_functions_and_hooks():
    original = DistributedDataParallel(seeded(mlp, 4, 2), reduce_function=average_nothing)
    original.register_comm_hook(clear)
    for twin in (copy.deepcopy(original), by_pickle(original)):
        with twin.no_sync():
            pass
        square(twin, dist.get_rank())
        assert all((parameter.grad == 7).all() for parameter in twin.parameters())
    module = seeded(mlp, 4, 2)
    original = DistributedDataParallel(module)
    original.register_comm_hook(dist.new_group(), fp16_compress_hook)
    for twin in (copy.deepcopy(original), by_pickle(original)):
        square(twin, dist.get_rank())
        assert_gradients(twin.module, mean_gradients(module, square), rtol=5e-3, atol=1e-2)


@on_three_ranks
def test_a_pickled_wrapper_finds_its_subgroup_again():
    group = dist.new_group([2, 1], use_local_synchronization=False)
    if dist.get_rank() == 0:
        return
    wrapper = by_pickle(DistributedDataParallel(seeded(mlp, 4, 2), process_group=group))
    rank = dist.get_rank()
    square(wrapper, rank)
    tables = [mean_gradients(wrapper.module, lambda m, _, r=r: square(m, r), 1) for r in (1, 2)]
    assert_gradients(wrapper.module, {name: (tables[0][name] + tables[1][name]) / 2 for name in tables[0]})


@on_two_ranks
def test_a_pickled_wrapper_does_not_find_a_group_of_others():
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match=r"wants a process group of ranks \[0\], and there is none"):
            GroupHandle(None, [0]).group()
        return
    assert GroupHandle(None, [0]).group() is group


@pytest.mark.parametrize("when", ["before", "after"])
@each_variant
@on_two_ranks
def test_optimizers_that_step_in_backward_hooks(when, options):
    # As in torch's tutorial "How to save memory by fusing the optimizer step into the backward pass".
    module = seeded(Norms)
    twin = copy.deepcopy(module)
    optimizers = {parameter: torch.optim.Adam([parameter], lr=0.1) for parameter in module.parameters()}

    def hook(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    def register():
        return [parameter.register_post_accumulate_grad_hook(hook) for parameter in module.parameters()]

    handles = register() if when == "before" else []
    wrapper = DistributedDataParallel(module, **options)
    handles = handles or register()
    reference = torch.optim.Adam(twin.parameters(), lr=0.1)

    def step(model, rank, k):
        model(data(5, 4, rank=rank, step=k), way=rank if k % 2 else 0).pow(2).sum().backward()

    for k in range(4):
        expected = mean_gradients(twin, lambda m, rank, k=k: step(m, rank, k))
        for name, parameter in twin.named_parameters():
            parameter.grad = expected[name]
        reference.step()
        step(wrapper, dist.get_rank(), k)
        assert all(parameter.grad is None for parameter in module.parameters())
        for a, b in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    for handle in handles:
        handle.remove()
    step(wrapper, dist.get_rank(), 4)
    assert_gradients(module, mean_gradients(module, lambda m, rank: step(m, rank, 4)))


@pytest.mark.parametrize("alone", [False, True])
@on_two_ranks
def test_hooks_are_called_where_gradients_are_averaged_without_a_backward(alone):
    module, seen, rank = seeded(mlp, 4, 2), [], dist.get_rank()
    group = [dist.new_group([one]) for one in range(2)][rank] if alone else None
    wrapper = DistributedDataParallel(module, process_group=group)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad is not None))
    output = wrapper(data(5, 4))
    output.register_hook(lambda gradient: 1 / 0)
    with pytest.raises((ZeroDivisionError, PeerAbortedError)):
        output.sum().backward()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert not seen
    wrapper.finish_grad_sync()  # as ppe_ddp.elastic takes a step again
    assert seen == [True, True]
    wrapper.zero_grad()
    weigh(wrapper(data(5, 4)).sum(), 0).backward()  # has no gradient then
    assert seen == [True, True]


@pytest.mark.parametrize("finishes", [False, True])
@on_two_ranks
def test_hooks_and_optimizers_of_one_rank_alone_get_what_only_a_micro_batch_before_used(finishes):
    """As on several ranks: where the step ends, in a backward or in ``finish_grad_sync()``."""
    from torch.distributed.optim import _apply_optimizer_in_backward  # here, as it warns when it is imported

    def calls_and_parameters(group):
        module, calls = seeded(Norms), {"weight": [], "bias": []}
        _apply_optimizer_in_backward(torch.optim.SGD, module.head.parameters(), {"lr": 0.1})
        _apply_optimizer_in_backward(torch.optim.SGD, module.layers.parameters(), {"lr": 0.1})
        wrapper = DistributedDataParallel(module, process_group=group)
        for name, parameter in module.norm.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls[name].append(p.grad.clone()))
        for k, is_silent in enumerate([True, finishes]):
            with wrapper.no_sync() if is_silent else contextlib.nullcontext():
                wrapper(data(5, 4, rank=0, step=k), way=1 - k).pow(2).sum().backward()
        if finishes:
            wrapper.finish_grad_sync()
        return calls, list(module.parameters())

    alone, _ = dist.new_subgroups(1)
    torch.testing.assert_close(calls_and_parameters(alone), calls_and_parameters(None))


@on_two_ranks
def test_a_hook_that_is_registered_between_forward_and_backward_gets_the_average():
    wrapper, seen = DistributedDataParallel(seeded(mlp, 4, 2)), []
    weight = wrapper.module[0].weight
    output = wrapper(data(5, 4))
    handle = weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    output.sum().backward()
    assert len(seen) == 1
    assert torch.equal(*of_all_ranks(seen[0]))
    output = wrapper(data(5, 4))
    handle.remove()
    output.sum().backward()
    assert len(seen) == 1


@on_two_ranks
def test_hooks_where_a_backward_comes_through_no_output_get_the_average_or_are_refused():
    module, seen = seeded(nn.Linear, 4, 2, bias=False), []

    def register():
        return module.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))

    def step():
        seen.clear()
        module(data(5, 4)).sum().backward()
        assert torch.equal(*of_all_ranks(torch.stack(seen)))
        return len(seen)

    handle = register()
    wrapper = DistributedDataParallel(module)
    assert step() == 1
    handle.remove()
    if dist.get_rank():
        register()
    with pytest.raises(UnusableError if dist.get_rank() else PeerAbortedError, match=r"hook on 'weight'"):
        step()
    assert not seen
    if dist.get_rank() == 0:
        register()
    wrapper(data(5, 4))
    assert step() == 1


@on_two_ranks
def test_a_hook_gets_a_wrapper_that_was_dropped_after_forward():
    module, seen = seeded(mlp, 4, 2), []

    def loss():
        wrapper = DistributedDataParallel(module)
        wrapper.register_comm_hook(lambda one: seen.append(one.module is module))
        return wrapper(torch.ones(3, 4)).sum()

    loss().backward()
    assert seen == [True]


@on_two_ranks
def test_a_dropped_wrapper_lets_go_of_its_module():
    # At once: the garbage collector runs at another moment on every rank, and a rank whose wrapper is still
    # alive would wait for the others.
    module = seeded(mlp, 4, 4, 2)
    expected = mean_gradients(module, lambda m, _: square(m, dist.get_rank()), world_size=1)
    wrapper = DistributedDataParallel(module)
    square(wrapper, dist.get_rank())
    gc.collect()
    gc.disable()
    try:
        del wrapper
        for _ in range(2):
            module.zero_grad()
            square(module, dist.get_rank())
            assert_gradients(module, expected)
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["plain", "compressed", "sharded"])
@on_two_ranks
def test_a_default_device_of_the_user_moves_nothing_that_ranks_send(kind):
    """It is often a GPU; of "meta" tensors nothing can be sent at all."""
    module = seeded(mlp, 4, 8, 2)
    batch, expected = data(5, 4), mean_gradients(module, square)
    torch.set_default_device("meta")
    try:
        model = DistributedDataParallel(module, shared_memory=kind != "compressed", check_for_nan_in_grad=True)
        if kind == "compressed":
            model.register_comm_hook(ErrorFeedback(TopK(1.0, min_numel=0)))
        plain = torch.optim.SGD(module.parameters(), lr=0.0)
        optimizer = DistributedOptimizer(plain, model) if kind == "sharded" else plain
        for _ in range(3):
            optimizer.zero_grad()
            model(batch).pow(2).sum().backward()
            if kind != "sharded":
                assert_gradients(module, expected)
            optimizer.step()
        model.check_in_sync()
        if kind != "sharded":
            with model.join():
                model(batch).pow(2).sum().backward()
        optimizer.load_state_dict(optimizer.state_dict())
    finally:
        torch.set_default_device(None)


@on_two_ranks
def test_what_is_ignored_is_so_when_the_module_is_compiled():
    rank, module = dist.get_rank(), seeded(mlp, 4, 5, 2)
    module.register_buffer("own", torch.full((2,), float(rank)))
    with torch.no_grad():
        module[2].weight.fill_(rank)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["2.weight", "own"])
    wrapper = DistributedDataParallel(torch.compile(module, backend="eager"))
    square(wrapper, rank)
    assert module[2].weight.eq(rank).all()
    assert module.own.eq(rank).all()
    ours = module[2].weight.grad.clone()
    module.zero_grad()
    square(module, rank)
    assert torch.equal(ours, module[2].weight.grad)
    assert not torch.equal(*of_all_ranks(ours))


@on_two_ranks
def test_a_copy_of_a_wrapper_that_was_compiled_in_place():
    torch._dynamo.reset()
    rank, wrapper = dist.get_rank(), DistributedDataParallel(seeded(mlp, 4, 4, 2))
    wrapper.compile(backend="eager")
    square(wrapper, rank)
    for way in (copy.deepcopy, by_pickle):
        twin = way(wrapper)
        wrapper.zero_grad()
        for parameter in twin.module.parameters():
            parameter.data.mul_(2)
        expected = mean_gradients(twin.module, square)
        square(twin, rank)
        assert_gradients(twin.module, expected)
        assert not any(value is not None for value in gradients(wrapper.module).values())
    torch._dynamo.reset()


@pytest.mark.parametrize("alone", [False, True])
@on_two_ranks
def test_functional_calls_alone_since_another_parameter_was_frozen(alone):
    rank, wrapper = dist.get_rank(), DistributedDataParallel(seeded(mlp, 4, 4, 2))
    square(wrapper, rank)

    def step(model, r):
        module = getattr(model, "module", model)
        module[0].bias.requires_grad_(alone and r == 0)
        name = "0.weight" if model is module else "module.0.weight"
        functional_call(model, {name: module[0].weight * 2}, (data(5, 4, rank=r),)).pow(2).sum().backward()

    expected = mean_gradients(wrapper.module, step)
    for model in (wrapper, wrapper, copy.deepcopy(wrapper)):
        model.zero_grad()
        step(model, rank)
        assert_gradients(model.module, expected)
