"""The distributed optimizer, held to one process that trains on the batches of all ranks."""

import contextlib
import copy
import io
import pickle
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from one_process import data, mlp, seeded
from optim_programs import Program, loss_of
from optim_runners import ReferenceRunner, WrapperRunner, assert_same, hold, make_model
from ppe_ddp import (
    DisagreementError,
    DistributedDataParallel,
    DistributedOptimizer,
    PeerAbortedError,
    PpeDdpError,
    UnusableError,
    megatron,
)
from ppe_ddp.megatron import DistributedDataParallel as MegatronDDP
from ppe_ddp.megatron import DistributedDataParallelConfig, ParallelGroups, finalize_model_grads
from ppe_ddp.optim.optimizer_state import described
from rank_tests import on_three_ranks, on_two_ranks


@pytest.mark.parametrize("name", ["momentum", "adamw", "adam", "adamw fused", "adagrad", "rmsprop"])
@on_three_ranks
def test_it_trains_like_one_process(name):
    ours, theirs = hold(Program.plain(name))
    values = [value for state in ours.optimizer.state.values() for value in state.values()]
    kept = torch.tensor(sum(value.numel() for value in values if torch.is_tensor(value) and value.dim()))
    states = [state for parameter, state in theirs.optimizer.state.items() if parameter.requires_grad]
    tensors = [value for state in states for key, value in state.items() if key != "step"]
    everything = sum(tensor.numel() for tensor in tensors)
    # An even third, but for the rounding of each tensor.
    assert everything / 3 - len(tensors) <= kept <= everything / 3 + len(tensors)
    dist.all_reduce(kept)
    assert kept == everything


@on_two_ranks
def test_two_ranks_and_small_buckets():
    hold(Program.plain("adamw", bucket_cap_mb=1e-3))
    hold(Program.plain("momentum", overlap=False, gradient_as_bucket_view=False))


@on_three_ranks
def test_a_subgroup():
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        hold(Program.plain("adamw", 4), group)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@on_three_ranks
def test_the_norm_is_that_of_all_shards(norm_type):
    twin = make_model(torch.float64)
    wrapper = DistributedDataParallel(make_model(torch.float64))
    optimizer = DistributedOptimizer(torch.optim.SGD, wrapper, lr=0.1)
    loss_of(wrapper, 3, dist.get_rank()).backward()
    (sum(loss_of(twin, 3, rank) for rank in range(3)) / 3).backward()
    parameters = [parameter for parameter in twin.parameters() if parameter.numel()]  # else torch finds no largest one
    shards = [weight for group in optimizer.param_groups for weight in group["params"]]
    for foreach in (True, False):
        with pytest.raises(UnusableError, match=r"the norm of one rank's shards .* call clip_grad_norm_\(\) of the"):
            nn.utils.clip_grad_norm_(shards, 0.01, norm_type, foreach=foreach)
    norms = optimizer.clip_grad_norm_(0.01, norm_type), nn.utils.clip_grad_norm_(parameters, 0.01, norm_type)
    torch.testing.assert_close(*norms)
    optimizer.step()
    torch.optim.SGD(parameters, lr=0.1).step()
    assert_same(wrapper, twin)
    everyone = [torch.zeros_like(norms[0]) for _ in range(3)]
    dist.all_gather(everyone, norms[0])
    assert all(torch.equal(norm, norms[0]) for norm in everyone)


@on_two_ranks
def test_complex_gradients_are_clipped_as_by_torch():
    weights = [torch.arange(5) * (0.3 - 0.1j), torch.arange(3) / 7]
    net, twin = (nn.ParameterList(nn.Parameter(w.clone()) for w in weights) for _ in range(2))
    wrapper = DistributedDataParallel(net)
    optimizer = DistributedOptimizer(torch.optim.SGD, wrapper, lr=0.1)
    for norm_type in (2.0, 1.0, float("inf")):
        for one in (wrapper, twin):
            one.zero_grad()
            sum(w.abs().pow(2).sum() for w in one.parameters()).backward()
        wrapper.finish_grad_sync()
        norms = optimizer.clip_grad_norm_(0.1, norm_type), nn.utils.clip_grad_norm_(twin.parameters(), 0.1, norm_type)
        torch.testing.assert_close(*norms)
        optimizer.step()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        assert_same(wrapper, twin)
    for norm_type in (0.0, -float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"norm_type is {norm_type}"):
            optimizer.clip_grad_norm_(0.1, norm_type)


def interrupted(*_, **__):
    raise KeyboardInterrupt


@on_two_ranks
def test_who_is_interrupted_as_it_clips_tells_the_others():
    wrapper = DistributedDataParallel(make_model(torch.float64))
    optimizer = DistributedOptimizer(torch.optim.SGD, wrapper, lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(wrapper, step, dist.get_rank()).backward()
        with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
            if step == 1 and dist.get_rank() == 1:
                patch.setattr(dist, "all_reduce", interrupted)
                stack.enter_context(pytest.raises(KeyboardInterrupt))
            elif step == 1:
                told = r"rank 1 of the group failed in clip_grad_norm_.* KeyboardInterrupt\."
                stack.enter_context(pytest.raises(PeerAbortedError, match=told))
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
    wrapper.check_in_sync()


def halves():
    return seeded(mlp, 7, 33, 9, 1).bfloat16()


def train_halves(wrapper, optimizer, steps, count=12):
    """The same numbers whatever the number of ranks is."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in steps:
        x = data(count, 7, rank=0, step=step, dtype=torch.bfloat16)[rank::world_size]
        optimizer.zero_grad()
        wrapper(x).float().pow(2).mean().backward()
        optimizer.step()


@on_two_ranks
def test_what_is_loaded_into_the_model_is_what_is_trained():
    wrapper = DistributedDataParallel(halves())
    optimizer = DistributedOptimizer(torch.optim.SGD(wrapper.parameters(), lr=0.0), wrapper)
    train_halves(wrapper, optimizer, range(2))
    other = {name: torch.full_like(value, 0.5) for name, value in wrapper.state_dict().items()}
    wrapper.load_state_dict(other)
    train_halves(wrapper, optimizer, range(2))
    for name, value in wrapper.state_dict().items():
        assert torch.equal(value, other[name])


def pulled(wrapper, optimizer):
    """Take a step in which each gradient is one."""
    optimizer.zero_grad()
    sum(parameter.sum() for parameter in wrapper.parameters()).backward()
    wrapper.finish_grad_sync()
    optimizer.step()


def written_through_data(parameters, value):
    for k, parameter in enumerate(parameters):
        if k == 1:
            parameter.data = torch.full_like(parameter, value)
        elif k == 2:
            nn.utils.vector_to_parameters(torch.full((parameter.numel(),), value, dtype=parameter.dtype), [parameter])
        else:
            parameter.data.fill_(value)


@on_two_ranks
def test_what_is_written_through_data_is_what_is_trained():
    for dtype, master_dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.float64)):
        wrapper = DistributedDataParallel(halves().to(dtype))
        inner = torch.optim.SGD(wrapper.parameters(), lr=0.0)
        optimizer = DistributedOptimizer(inner, wrapper, master_dtype=master_dtype)
        for value in (0.5, 0.25):
            pulled(wrapper, optimizer)
            written_through_data(list(wrapper.parameters()), value)
            pulled(wrapper, optimizer)
            assert all(torch.equal(p, torch.full_like(p, value)) for p in wrapper.parameters())


@on_two_ranks
def test_a_parameter_whose_memory_gets_holes_is_trained_on():
    wrapper, twin = DistributedDataParallel(seeded(mlp, 4, 6, 2)), seeded(mlp, 4, 6, 2)
    optimizer = DistributedOptimizer(torch.optim.SGD, wrapper, lr=0.1)
    theirs, weight = torch.optim.SGD(twin.parameters(), lr=0.1), wrapper.module[0].weight
    for step in range(4):
        if step == 1:
            weight.data = torch.cat([weight.detach(), weight.detach()], 1)[:, :4]
        if step == 3:  # it is copied no longer
            weight.data = weight.detach().contiguous()
        pulled(wrapper, optimizer)
        for parameter in twin.parameters():
            parameter.grad = torch.ones_like(parameter)
        theirs.step()
    assert_same(wrapper, twin)


@on_two_ranks
def test_an_update_that_was_not_sent_is_not_lost():
    """One rank fails when its weights are updated, so that its parameters do not have their values."""
    wrapper = DistributedDataParallel(halves())
    for parameter in wrapper.parameters():
        nn.init.ones_(parameter)
    inner = torch.optim.SGD(wrapper.parameters(), lr=0.01)
    optimizer = DistributedOptimizer(inner, wrapper)

    def fail(*_):
        raise ArithmeticError("planned")

    handle = inner.register_step_post_hook(fail) if dist.get_rank() else None
    with pytest.raises(ArithmeticError if handle else PeerAbortedError):
        pulled(wrapper, optimizer)
    if handle is not None:
        handle.remove()
    optimizer.zero_grad()
    first, *others = wrapper.parameters()
    first.sum().backward()  # the others are gathered all the same
    optimizer.step()
    for parameter, value in [(first, 0.98), *((one, 0.99) for one in others)]:
        expected = torch.tensor(value, dtype=torch.bfloat16)
        assert torch.equal(parameter, expected.expand_as(parameter))


@on_two_ranks
def test_hooks_that_reduce_are_used_and_the_shard_kept():
    program = Program.plain("momentum", 3)
    ours, theirs = WrapperRunner(program), ReferenceRunner(program, 2)
    ours.wrapper.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for runner in (ours, theirs):
        runner.run(range(3))
    assert_same(ours.wrapper, theirs.module, rtol=2e-2, atol=2e-3)


@on_two_ranks
def test_the_state_that_is_tried_out_for_a_checkpoint_calls_no_hooks():
    wrapper, calls = DistributedDataParallel(seeded(mlp, 6, 8, 3)), []
    inner = torch.optim.Adam(wrapper.parameters())
    inner.register_step_pre_hook(lambda *_: calls.append("before"))
    inner.register_step_post_hook(lambda *_: calls.append("after"))
    state = DistributedOptimizer(inner, wrapper).state_dict()["state"]
    assert all("exp_avg" in own for own in state.values())
    assert calls == []


@pytest.mark.parametrize("overlap", [False, True])
@on_two_ranks
def test_a_post_hook_that_raises_on_one_rank_fails_the_step_of_the_next_optimizer(overlap):
    wrapper = DistributedDataParallel(seeded(mlp, 6, 8, 3))
    weights = [[one for one in wrapper.parameters() if one.dim() == dim] for dim in (1, 2)]
    optimizers = [DistributedOptimizer(torch.optim.SGD(own, lr=0.1), wrapper, overlap=overlap) for own in weights]
    is_failing, raised = False, []

    def hook(*_):
        if is_failing and dist.get_rank() == 1:
            raise ArithmeticError("planned")

    optimizers[0].register_step_post_hook(hook)
    for step in range(4):
        is_failing = step == 1
        wrapper.zero_grad()
        wrapper(data(4, 6, step=step)).square().sum().backward()
        try:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.synchronize()
        except (ArithmeticError, PeerAbortedError) as error:
            raised.append((step, type(error)))
    told = [(1, ArithmeticError if dist.get_rank() == 1 else PeerAbortedError)]
    assert raised == told or (overlap and dist.get_rank() == 0 and raised == [])  # then a warning tells
    for optimizer in optimizers:
        optimizer.synchronize()
    wrapper.check_in_sync()


@pytest.mark.parametrize("is_split", [False, True])
@on_two_ranks
def test_averages_that_a_scaler_takes_for_unscaled_are_refused(is_split):
    """A scaler that has unscaled, and whose step has raised, does not unscale those of the next step."""
    module = seeded(mlp, 6, 8, 3)
    if is_split:
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        for parameter in module.parameters():
            parameter.tensor_model_parallel = True
        groups = ParallelGroups(data=alone, tensor=dist.group.WORLD)
        config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        wrapper = MegatronDDP(None, config, module, groups=groups)
    else:
        wrapper = DistributedDataParallel(module)
    inner = torch.optim.SGD(module.parameters(), lr=0.1)

    def fail(*_):
        raise ArithmeticError("planned")

    optimizer, scaler = DistributedOptimizer(inner, wrapper), torch.amp.GradScaler("cpu", init_scale=1024.0)
    inputs, moved = torch.ones(1, 6), []

    def outcome():
        before = [parameter.detach().clone() for parameter in module.parameters()]
        try:
            wrapper.zero_grad_buffer() if is_split else optimizer.zero_grad()
            scaler.scale(wrapper(inputs).sum()).backward()
            if is_split:
                finalize_model_grads([wrapper])
            scaler.step(optimizer)
            scaler.update()
        except (ArithmeticError, PpeDdpError) as error:
            return type(error).__name__
        moved.append(max((old - new).abs().max().item() for old, new in zip(before, module.parameters(), strict=True)))
        return ""

    assert outcome() == ""
    handle = inner.register_step_pre_hook(fail) if dist.get_rank() == 1 else None
    failed = {outcome()}
    if handle is not None:
        handle.remove()
    if is_split:
        failed.add(outcome())
        assert "DisagreementError" in failed
    told = "PeerAbortedError" if is_split and dist.get_rank() == 0 else "UnusableError"
    assert outcome() == told
    with contextlib.nullcontext() if told == "UnusableError" else pytest.raises(AssertionError):
        scaler.update()  # the other rank's has unscaled nothing
    assert outcome() == ""
    assert 0 < moved[-1] < 10 * moved[0]


@on_two_ranks
def test_closures_hooks_and_zeroing():
    wrapper = DistributedDataParallel(seeded(mlp, 6, 8, 3))
    optimizer = DistributedOptimizer(torch.optim.SGD(wrapper.parameters(), lr=0.1), wrapper)
    calls, losses = [], []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        optimizer.zero_grad()
        loss = wrapper(data(4, 6)).sum()
        loss.backward()
        losses.append(loss.item())
        return loss

    assert [optimizer.step(closure).item() for _ in range(2)] == losses
    assert losses[0] != losses[1]  # the first step has moved the weights
    assert calls == ["before", "after"] * 2
    before = {name: value.clone() for name, value in wrapper.state_dict().items()}
    for zero in (wrapper.zero_grad, optimizer.zero_grad):
        closure()
        zero()
        optimizer.step()
        assert_same(wrapper, _with(before))
    closure()
    optimizer.zero_grad(set_to_none=False)
    assert all(not w.grad.any() for w in optimizer.param_groups[0]["params"])
    optimizer.step()
    assert_same(wrapper, _with(before))


def _with(state):
    module = mlp(6, 8, 3)
    module.load_state_dict(state)
    return module


@pytest.mark.parametrize(
    ("dtype", "what"),
    [
        (torch.float32, "parameters"),
        (torch.bfloat16, "parameters"),
        (torch.float32, "group"),
        (torch.bfloat16, "group"),
    ],
)
@on_two_ranks
def test_a_group_that_was_removed_is_added_again_and_goes_on_with_its_state(dtype, what):
    wrapper, twin = (ddp(seeded(mlp, 6, 8, 8, 3).to(dtype)) for ddp in (DistributedDataParallel, nn.Sequential))
    ours, theirs = list(wrapper.parameters()), list(twin.parameters())
    masters = [one.detach().float().requires_grad_() for one in theirs]
    optimizer = DistributedOptimizer(torch.optim.AdamW([{"params": ours[:2]}, {"params": ours[2:]}], lr=0.1), wrapper)
    plain = torch.optim.AdamW([{"params": masters[:2]}, {"params": masters[2:]}], lr=0.1)
    for step in range(6):
        if step in (2, 4):
            group, same = {"params": ours[:2], "lr": 0.2}, {"params": masters[:2], "lr": 0.2}
            if step == 2:
                removed = [one.param_groups.pop(0) for one in (optimizer, plain)]
            added = [group, same] if what == "parameters" else [{**one, "lr": 0.2} for one in removed]
            for one, again in zip((optimizer, plain), added if step == 4 else [], strict=step == 4):
                one.add_param_group(again)
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
        for module in (wrapper, twin):
            module.zero_grad()
            module(inputs).float().square().sum().backward()
        for master, parameter in zip(masters, theirs, strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        plain.step()
        for master, parameter in zip(masters, theirs, strict=True):
            parameter.data.copy_(master)
        for own, parameter in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own, parameter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_two_ranks
def test_another_optimizer_takes_over_a_group_that_was_removed(dtype):
    wrapper, twin = (ddp(seeded(mlp, 6, 8, 8, 3).to(dtype)) for ddp in (DistributedDataParallel, nn.Sequential))
    ours, theirs = list(wrapper.parameters()), [one.detach().float().requires_grad_() for one in twin.parameters()]
    optimizers = [DistributedOptimizer(torch.optim.SGD([{"params": ours[:2]}, {"params": ours[2:]}], lr=0.1), wrapper)]
    plain = [torch.optim.SGD([{"params": theirs[:2]}, {"params": theirs[2:]}], lr=0.1)]
    for step in range(6):
        if step == 2:
            removed = [one.param_groups.pop() for one in (optimizers[0], plain[0])]
            optimizers.append(DistributedOptimizer(torch.optim.AdamW(ours[2:], lr=0.1), wrapper))
            plain.append(torch.optim.AdamW(theirs[2:], lr=0.1))
        if step == 4:
            for _first, second in (optimizers, plain):
                second.param_groups.pop()
            optimizers[0].param_groups.append(removed[0])
            with pytest.raises(UnusableError, match="a group that was removed, and whose parameters another"):
                optimizers[0].step()
            optimizers[0].param_groups.pop()
            for one, group in zip((optimizers[0], plain[0]), removed, strict=True):
                one.add_param_group(group)
        if step in (2, 4):
            for master, parameter in zip(theirs[2:], list(twin.parameters())[2:], strict=True):
                master.data.copy_(parameter)  # another optimizer's masters begin with what the model has
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
        for module in (wrapper, twin):
            module.zero_grad()
            module(inputs).float().square().sum().backward()
        for master, parameter in zip(theirs, twin.parameters(), strict=True):
            master.grad = parameter.grad.float()
        for one in (*optimizers, *plain):
            one.step()
        for master, own, parameter in zip(theirs, ours, twin.parameters(), strict=True):
            parameter.data.copy_(master)
            torch.testing.assert_close(own, parameter)


@on_two_ranks
def test_groups_added_later_and_parameters_in_two_optimizers():
    wrapper, twin = DistributedDataParallel(seeded(mlp, 6, 8, 8, 3)), seeded(mlp, 6, 8, 8, 3)
    ours, theirs = list(wrapper.parameters()), list(twin.parameters())
    first = DistributedOptimizer(torch.optim.SGD(ours[:2], lr=0.1), wrapper)
    first.add_param_group({"params": ours[2:4], "lr": 0.2})
    with pytest.raises(ValueError, match=r"another group already: 2\.weight"):
        first.add_param_group({"params": [ours[2]]})
    lamb = type("FusedLAMB", (torch.optim.SGD,), {})  # as another library has it
    with pytest.raises(ValueError, match=r"FusedLAMB scales updates by norms .* element by element"):
        DistributedOptimizer(lamb(wrapper.parameters()), wrapper)
    with pytest.raises(ValueError, match=r"shape \(3,\) that is none of the model's"):
        first.add_param_group({"params": [ours[4], nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match="with/without names"):
        first.add_param_group({"params": [("4.weight", ours[4])]})
    assert first.model_parameters == ours[:4]
    second = DistributedOptimizer(torch.optim.AdamW(ours[4:], lr=0.1), wrapper)
    plain = torch.optim.SGD([{"params": theirs[:2]}, {"params": theirs[2:4], "lr": 0.2}], lr=0.1)
    other = torch.optim.AdamW(theirs[4:], lr=0.1)
    for step in range(3):
        wrapper(data(4, 6, step=step)).pow(2).sum().backward()
        (sum(twin(data(4, 6, rank=rank, step=step)).pow(2).sum() for rank in range(2)) / 2).backward()
        for optimizer in (first, second, plain, other):
            optimizer.step()
            optimizer.zero_grad()
    assert_same(wrapper, twin)


@on_two_ranks
def test_of_two_optimizers_of_one_parameter_the_first_is_refused():
    wrapper = DistributedDataParallel(seeded(mlp, 6, 3))
    first = DistributedOptimizer(torch.optim.SGD, wrapper, lr=1.0)
    frozen = DistributedDataParallel(nn.Sequential(wrapper.module.requires_grad_(False), seeded(nn.Linear, 3, 3)))
    DistributedOptimizer(torch.optim.SGD(frozen.parameters(), lr=1.0), frozen)
    wrapper.module.requires_grad_(True)
    pulled(wrapper, first)
    second = DistributedOptimizer(torch.optim.SGD([wrapper.module[0].bias], lr=1.0), wrapper)
    pulled(wrapper, second)
    with pytest.raises(UnusableError, match=r"'0\.bias' is also in a DistributedOptimizer that was made later"):
        first.step()


@pytest.mark.parametrize("difference", ["rate", "class", "order"])
@pytest.mark.parametrize("is_megatron", [False, True])
@on_two_ranks
def test_optimizers_that_differ_between_ranks_are_an_error_on_all(difference, is_megatron):
    is_other, config = dist.get_rank() == 1, megatron.DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrap = partial(megatron.DistributedDataParallel, None, config) if is_megatron else DistributedDataParallel
    wrapper = wrap(seeded(mlp, 6, 3))
    kind = torch.optim.Adam if is_other and difference == "class" else torch.optim.SGD
    parameters = list(wrapper.parameters())[:: -1 if is_other and difference == "order" else 1]
    inner = kind(parameters, lr=0.1 + (is_other and difference == "rate"))
    optimizer = DistributedOptimizer(inner, wrapper)
    words = {"rate": r"lr=1\.1.* lr=0\.1", "class": "Adam .* SGD ", "order": r"'0\.bias'.*'0\.weight'"}[difference]
    for _ in range(2):
        wrapper(data(2, 6)).sum().backward() if is_megatron else None
        step = wrapper.finish_grad_sync if is_megatron else wrapper(data(2, 6)).sum().backward
        with pytest.raises(DisagreementError, match="rank 1 differs from rank 0: .*" + words):
            step()
        if is_megatron:
            wrapper.zero_grad_buffer()
    for group in optimizer.param_groups:
        assert all(weight.grad is None for weight in group["params"])


@pytest.mark.parametrize("is_megatron", [False, True])
@on_two_ranks
def test_hyper_parameters_that_come_apart_later_are_an_error_on_all(is_megatron):
    """As with a scheduler of one rank's own loss: each rank would train its shards with its own rate."""
    config = megatron.DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrap = partial(megatron.DistributedDataParallel, None, config) if is_megatron else DistributedDataParallel
    wrapper = wrap(seeded(mlp, 6, 3))
    optimizer = DistributedOptimizer(torch.optim.SGD(wrapper.parameters(), lr=0.1), wrapper)
    replaced, told = optimizer, []
    for step in range(60):
        group = optimizer.param_groups[0]
        group["lr"] *= 0.9 if 20 <= step < 36 and dist.get_rank() == 1 else 0.99
        if step == 36:
            group["lr"] = 0.05
        if step == 40:
            optimizer = DistributedOptimizer(torch.optim.SGD([*wrapper.parameters()][::-1], lr=0.1), wrapper)
            replaced.param_groups[0]["lr"] += dist.get_rank()
            replaced = replaced if dist.get_rank() else None  # as if it were in a cycle there
        optimizer.zero_grad()
        wrapper.zero_grad_buffer() if is_megatron else None
        try:
            wrapper(data(2, 6)).sum().backward()
            wrapper.finish_grad_sync() if is_megatron else None
            optimizer.step()
        except DisagreementError as error:
            told.append((step, str(error)))
    assert len(told) == 1, told
    assert told[0][0] in range(20, 36)
    assert re.search(r"rank 1 differs from rank 0: .*'0.weight', ... now has lr=0\.0.* lr=0\.0.*schedulers", told[0][1])


def test_hyper_parameters_are_compared_without_their_device():
    optimizer = torch.optim.Adam([torch.zeros(1)], betas=(torch.tensor(0.5), torch.tensor(0.25)), capturable=True)
    optimizer.param_groups[0]["params"] = []
    assert "group 0 with betas=(0.5, 0.25)" in described(optimizer, [], torch.float32)


@pytest.mark.parametrize("first", [0, 1])
@on_two_ranks
def test_a_parameter_of_two_wrappers_gets_the_gradients_of_both(first):
    shared = seeded(nn.Linear, 6, 6)
    modules = [nn.Sequential(shared, seeded(nn.Linear, 6, 3 + k)) for k in range(2)]
    twins = copy.deepcopy(modules)  # together, so that they share the parameter, too
    wrappers = [DistributedDataParallel(module) for module in modules]
    owned = [list(wrappers[0].parameters()), list(wrappers[1].module[1].parameters())]
    optimizers = [
        DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), wrapper)
        for parameters, wrapper in zip(owned, wrappers, strict=True)
    ]
    plain = [torch.optim.SGD(twins[0].parameters(), lr=0.1), torch.optim.SGD(twins[1][1].parameters(), lr=0.1)]
    for step in range(4):
        for k in [(first, 1 - first), (1,), (0,), (1, 0)][step]:  # the second one's optimizer does not have it
            wrappers[k](data(4, 6, step=step)).pow(2).sum().backward()
            (sum(twins[k](data(4, 6, rank=rank, step=step)).pow(2).sum() for rank in range(2)) / 2).backward()
        for optimizer in (*optimizers, *plain):
            optimizer.step()
            optimizer.zero_grad()
        shared.zero_grad()
    assert_same(wrappers[0], twins[0])
    assert_same(wrappers[1], twins[1])


@on_two_ranks
def test_named_parameters_are_added_later():
    wrapper = DistributedDataParallel(seeded(mlp, 6, 8, 3))
    named = list(wrapper.module.named_parameters())
    optimizer = DistributedOptimizer(torch.optim.SGD(named[:2], lr=1.0), wrapper)
    optimizer.add_param_group({"params": iter(named[2:])})
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["0.weight", "0.bias"],
        ["2.weight", "2.bias"],
    ]
    before = [parameter.detach() - 1 for _, parameter in named]
    pulled(wrapper, optimizer)
    torch.testing.assert_close([parameter.detach() for _, parameter in named], before)


# --- checkpoints


def wrapped():
    wrapper = DistributedDataParallel(halves())
    wrapper.module.register_parameter("never", nn.Parameter(torch.ones(5, dtype=torch.bfloat16)))
    return wrapper, DistributedOptimizer(torch.optim.AdamW(wrapper.parameters(), lr=1e-3), wrapper)


@on_two_ranks
def test_a_ranks_own_state_comes_back():
    wrapper, optimizer = wrapped()
    train_halves(wrapper, optimizer, range(3))
    file = io.BytesIO()
    torch.save([wrapper.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    model, state = torch.load(file)
    twin, fresh = wrapped()
    twin.load_state_dict(model)
    fresh.load_state_dict(state)
    for trained in ((wrapper, optimizer), (twin, fresh)):
        train_halves(*trained, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(wrapper.parameters(), twin.parameters(), strict=True))
    everyone, other = [None] * 2, 1 - dist.get_rank()
    dist.all_gather_object(everyone, file.getvalue())
    with pytest.raises(ValueError, match=rf"was saved by rank {other} of 2: torch.save keeps one rank's shards"):
        fresh.load_state_dict(torch.load(io.BytesIO(everyone[other]))[1])
    state["layout"]["0.weight"] = "another"
    with pytest.raises(ValueError, match=r"'0\.weight' is of elements in the order another"):
        fresh.load_state_dict(state)
    with pytest.raises(ValueError, match="no state_dict of a DistributedOptimizer: exists, layout, master"):
        fresh.load_state_dict(torch.optim.AdamW(mlp(2, 2).parameters()).state_dict())


# --- what is refused


@on_two_ranks
def test_what_cannot_be_sharded_is_refused():
    wrapper = DistributedDataParallel(seeded(mlp, 6, 8, 3))
    for kind in ("LBFGS", "Adafactor", "Muon", "SparseAdam"):
        if hasattr(torch.optim, kind):
            parameters = [p for p in wrapper.parameters() if p.dim() == 2]
            with pytest.raises(ValueError, match=f"{kind} .* element by element"):
                DistributedOptimizer(getattr(torch.optim, kind)(parameters), wrapper)
    with pytest.raises(ValueError, match=r"shape \(3,\) that is none of the model's"):
        DistributedOptimizer(torch.optim.SGD([nn.Parameter(torch.zeros(3))]), wrapper)
    with pytest.raises(TypeError, match="Linear cannot shard its gradients"):
        DistributedOptimizer(torch.optim.SGD, nn.Linear(2, 2))
    tied = seeded(mlp, 6, 8, 6)
    tied[2].weight.data = tied[0].weight.data.t()
    config = megatron.DistributedDataParallelConfig(use_distributed_optimizer=True)
    for wrap in (DistributedDataParallel, partial(megatron.DistributedDataParallel, None, config)):
        with pytest.raises(ValueError, match=r"parameters '0\.weight' and '2\.weight' share memory, so that shards"):
            DistributedOptimizer(torch.optim.SGD, wrap(tied))
    outer = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), wrapper))
    with pytest.raises(ValueError, match="'1' in the module is wrapped, too"):
        DistributedOptimizer(torch.optim.SGD, outer, lr=1.0)
    wrapper.module.requires_grad_(False)
    DistributedOptimizer(torch.optim.SGD, DistributedDataParallel(outer.module), lr=1.0)  # averages what is outside
    wrapper.module.requires_grad_(True)
    with pytest.raises(TypeError, match="lr: only for an optimizer that is given as a class"):
        DistributedOptimizer(torch.optim.SGD(wrapper.parameters()), wrapper, lr=1.0)
    hooked = torch.optim.SGD(wrapper.parameters())
    hooked.register_state_dict_post_hook(print)
    with pytest.raises(ValueError, match="this SGD has hooks for its state_dict"):
        DistributedOptimizer(hooked, wrapper)
    optimizer = DistributedOptimizer(torch.optim.SGD, wrapper)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copied(optimizer)
    with pytest.raises(UnusableError, match="a DistributedOptimizer needs gradients that are averaged in backward"):
        wrapper.train_apart()
    wrapper = DistributedDataParallel(seeded(mlp, 6, 8, 3))
    wrapper.train_apart()
    with pytest.raises(UnusableError, match=r"after train_apart\(\), which LocalSGD and DiLoCo call"):
        DistributedOptimizer(torch.optim.SGD, wrapper)


def test_the_parameters_in_the_place_of_the_optimizer_are_refused():
    """As torch's ZeroRedundancyOptimizer takes them."""
    parameters, call = [nn.Parameter(torch.zeros(3))], r": call it as DistributedOptimizer\(torch.optim.AdamW, model,"
    with pytest.raises(TypeError, match="takes an optimizer or its class, not list" + call):
        DistributedOptimizer(parameters, optimizer_class=torch.optim.Adam, lr=0.1)
    with pytest.raises(TypeError, match="needs the wrapper of the model, which shards the gradients" + call):
        DistributedOptimizer(torch.optim.SGD(parameters))


@on_two_ranks
def test_a_module_that_has_changed_is_refused():
    wrapper = DistributedDataParallel(seeded(mlp, 6, 8, 3))
    wrapper.module[0].bias.requires_grad_(False)
    optimizer = DistributedOptimizer(torch.optim.SGD(wrapper.parameters()), wrapper)
    wrapper(data(4, 6)).sum().backward()
    optimizer.step()
    wrapper.module[0].bias.requires_grad_(True)
    text = r"'0\.bias' .* is new, or trainable only now.* wrap the module anew, and make a new optimizer"
    for use in (lambda: wrapper(data(4, 6)), lambda: DistributedOptimizer(torch.optim.SGD, wrapper)):
        with pytest.raises(ValueError, match=text):
            use()
    with pytest.raises(RuntimeError, match="join\\(\\) is not for a model with a DistributedOptimizer"), wrapper.join():
        pass
    again = DistributedDataParallel(wrapper.module)
    before = again.module[0].bias.detach().clone()
    pulled(again, DistributedOptimizer(torch.optim.SGD, again, lr=1.0))
    torch.testing.assert_close(again.module[0].bias.detach(), before - 1)
