"""The distributed optimizer, held to one process that trains on the batches of all ranks."""

import io
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from one_process import assert_same_on_all_ranks, data, mlp, seeded
from optimizing import OPTIMIZERS, DistributedRun, OneProcess, assert_same, everything, hold_to_one_process, loss_of
from ppe_ddp import DistributedDataParallel, DistributedOptimizer, PeerAbortedError
from ppe_ddp.engine.zero.shards import bounds_of
from ppe_ddp.testing import Ranks
from rank_tests import on_three_ranks, on_two_ranks


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_three_ranks
def test_it_trains_like_one_process(name):
    ours, theirs = hold_to_one_process(OPTIMIZERS[name])
    kept = torch.tensor(ours.state_numbers())
    states = [state for parameter, state in theirs.optimizer.state.items() if parameter.requires_grad]
    tensors = [value for state in states for key, value in state.items() if key != "step"]
    everything = sum(tensor.numel() for tensor in tensors)
    # An even third, but for the rounding of each tensor.
    assert everything / 3 - len(tensors) <= kept <= everything / 3 + len(tensors)
    dist.all_reduce(kept)
    assert kept == everything


@on_two_ranks
def test_two_ranks_and_small_buckets():
    hold_to_one_process(OPTIMIZERS["adamw"], bucket_cap_mb=1e-3)
    hold_to_one_process(OPTIMIZERS["sgd"], overlap=False, gradient_as_bucket_view=False)


@on_three_ranks
def test_a_subgroup():
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        hold_to_one_process(OPTIMIZERS["adamw"], group=group, steps=4)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@on_three_ranks
def test_the_norm_is_that_of_all_shards(norm_type):
    ours = DistributedRun(everything(), OPTIMIZERS["sgd"])
    theirs = OneProcess(everything(), OPTIMIZERS["sgd"], 3)
    for step in range(2):
        norms = [trainer.step(step, max_norm=0.01, norm_type=norm_type) for trainer in (ours, theirs)]
        torch.testing.assert_close(*norms)
    assert_same(ours.wrapper, theirs.module)
    everyone = [torch.zeros_like(norms[0]) for _ in range(3)]
    dist.all_gather(everyone, norms[0])
    assert all(torch.equal(norm, norms[0]) for norm in everyone)


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


@on_three_ranks
def test_halves_have_masters_in_float32():
    wrapper = DistributedDataParallel(halves())
    optimizer = DistributedOptimizer(torch.optim.AdamW(wrapper.parameters(), lr=1e-3), wrapper)
    twin = halves()
    masters = [nn.Parameter(p.detach().float()) for p in twin.parameters()]
    plain = torch.optim.AdamW(masters, lr=1e-3)
    for step in range(6):
        train_halves(wrapper, optimizer, [step])
        sums = [torch.zeros_like(master) for master in masters]
        for rank in range(3):
            twin.zero_grad()
            x = data(12, 7, rank=0, step=step, dtype=torch.bfloat16)[rank::3]
            twin(x).float().pow(2).mean().backward()
            for total, parameter in zip(sums, twin.parameters(), strict=True):
                total += parameter.grad.float() / 3
        for master, total in zip(masters, sums, strict=True):
            master.grad = total
        plain.step()
        for master, parameter in zip(masters, twin.parameters(), strict=True):
            parameter.data.copy_(master.data)
    assert_same(wrapper, twin, rtol=1e-2, atol=1e-5)
    held = {weight.dtype for group in optimizer.param_groups for weight in group["params"]}
    held |= {value.dtype for state in optimizer.state.values() for value in state.values()}
    assert held == {torch.float32}
    for weight, name in zip(optimizer.param_groups[0]["params"], optimizer.state_dict()["master"], strict=True):
        whole = dict(zip((n for n, _ in twin.named_parameters()), masters, strict=True))[name].detach().flatten()
        start, stop = bounds_of(whole.numel(), dist.get_rank(), 3)
        torch.testing.assert_close(weight.detach(), whole[start:stop], rtol=1e-5, atol=1e-6)


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


@on_two_ranks
def test_one_ranks_inf_skips_the_step_on_all():
    wrapper = DistributedDataParallel(seeded(mlp, 6, 8, 3))
    optimizer = DistributedOptimizer(torch.optim.AdamW(wrapper.parameters(), lr=0.1), wrapper)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    twin = seeded(mlp, 6, 8, 3)
    plain = torch.optim.AdamW(twin.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(wrapper(data(4, 6, step=step)).pow(2).mean()).backward()
        if step == 1 and dist.get_rank() == 1:
            with torch.no_grad():  # in this rank's shard alone
                next(g for w in optimizer.param_groups[0]["params"] if (g := w.grad) is not None)[0] = float("inf")
        if step != 2:
            scaler.unscale_(optimizer)
            norm = optimizer.clip_grad_norm_(0.5)
            assert bool(norm.isfinite()) == (step != 1)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (64.0 if step == 0 else 32.0)
        if step != 1:
            plain.zero_grad()
            (sum(twin(data(4, 6, rank=rank, step=step)).pow(2).mean() for rank in range(2)) / 2).backward()
            if step != 2:
                nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            plain.step()
        assert_same(wrapper, twin)


@on_two_ranks
def test_hooks_that_reduce_are_used_and_the_shard_kept():
    ours = DistributedRun(everything(torch.float32), OPTIMIZERS["sgd"])
    ours.wrapper.register_comm_hook(None, default_hooks.fp16_compress_hook)
    theirs = OneProcess(everything(torch.float32), OPTIMIZERS["sgd"], 2)
    for step in range(3):
        ours.step(step)
        theirs.step(step)
    assert_same(ours.wrapper, theirs.module, rtol=2e-2, atol=2e-3)


@on_two_ranks
def test_an_aborted_backward_costs_its_step_only():
    ours = DistributedRun(everything(), OPTIMIZERS["sgd"])
    theirs = OneProcess(everything(), OPTIMIZERS["sgd"], 2)
    ours.step(0)
    theirs.step(0)
    loss = loss_of(ours.wrapper, 1, dist.get_rank())
    failing = ours.module.convolve.weight.register_hook(raise_on_purpose) if dist.get_rank() == 1 else None
    with pytest.raises(PeerAbortedError if failing is None else ZeroDivisionError):
        loss.backward()
    if failing is not None:
        failing.remove()
    for step in range(2, 4):
        ours.step(step)
        theirs.step(step)
    assert_same(ours.wrapper, theirs.module)


def raise_on_purpose(_):
    raise ZeroDivisionError("on purpose")


@on_two_ranks
def test_a_rank_without_a_backward():
    module = seeded(mlp, 6, 8, 3)
    wrapper = DistributedDataParallel(module)
    optimizer = DistributedOptimizer(torch.optim.SGD, wrapper, lr=0.1)
    expected = seeded(mlp, 6, 8, 3)
    (expected(data(4, 6, rank=0)).sum() / 2).backward()
    if dist.get_rank() == 0:
        wrapper(data(4, 6)).sum().backward()
    else:
        wrapper.finish_grad_sync()
    optimizer.step()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    assert_same(wrapper, expected)


@on_two_ranks
def test_the_state_that_is_tried_out_for_a_checkpoint_calls_no_hooks():
    wrapper, calls = DistributedDataParallel(seeded(mlp, 6, 8, 3)), []
    inner = torch.optim.Adam(wrapper.parameters())
    inner.register_step_pre_hook(lambda *_: calls.append("before"))
    inner.register_step_post_hook(lambda *_: calls.append("after"))
    state = DistributedOptimizer(inner, wrapper).state_dict()["state"]
    assert all("exp_avg" in own for own in state.values())
    assert calls == []


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


@on_two_ranks
def test_gradients_of_several_backwards_add_up():
    wrapper = DistributedDataParallel(seeded(mlp, 6, 8, 3))
    optimizer = DistributedOptimizer(torch.optim.SGD(wrapper.parameters(), lr=0.1), wrapper)
    twin = seeded(mlp, 6, 8, 3)
    for step in range(3):
        wrapper(data(4, 6, step=step)).sum().backward()
        (sum(twin(data(4, 6, rank=rank, step=step)).sum() for rank in range(2)) / 2).backward()
    optimizer.step()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert_same(wrapper, twin)


@on_two_ranks
def test_groups_added_later_and_parameters_in_two_optimizers():
    wrapper, twin = DistributedDataParallel(seeded(mlp, 6, 8, 8, 3)), seeded(mlp, 6, 8, 8, 3)
    ours, theirs = list(wrapper.parameters()), list(twin.parameters())
    first = DistributedOptimizer(torch.optim.SGD(ours[:2], lr=0.1), wrapper)
    first.add_param_group({"params": ours[2:4], "lr": 0.2})
    with pytest.raises(ValueError, match=r"another group already: 2\.weight"):
        first.add_param_group({"params": [ours[2]]})
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


# --- checkpoints


def wrapped(make):
    wrapper = DistributedDataParallel(halves())
    wrapper.module.register_parameter("never", nn.Parameter(torch.ones(5, dtype=torch.bfloat16)))
    return wrapper, DistributedOptimizer(make(wrapper.parameters()), wrapper)


def make_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def whole(optimizer):
    """Master weights and state of all ranks together."""
    state = optimizer.state_dict()
    tensors = {name: value.full_tensor() for name, value in state["master"].items()}
    for name, entries in state["state"].items():
        tensors[f"{name}/exists"] = state["exists"][name]
        for key, value in entries.items():
            tensors[f"{name}/{key}"] = value.full_tensor() if value.dim() else value.clone()
    return tensors


def save(path, steps):
    wrapper, optimizer = wrapped(make_adamw)
    train_halves(wrapper, optimizer, steps)
    _quietly(dcp.save, {"model": wrapper.state_dict(), "optimizer": optimizer}, checkpoint_id=path)
    own = io.BytesIO()
    torch.save(optimizer.state_dict(), own)
    saved = whole(optimizer)
    train_halves(wrapper, optimizer, range(4, 7))
    return saved, own.getvalue(), wrapper.state_dict()


def load(path, again, own):
    wrapper, optimizer = wrapped(make_adamw)
    if own is not None:  # of one rank, and of more ranks than there are
        before = whole(optimizer)
        with pytest.raises(ValueError, match=r"was saved by rank \d of 4: torch.save keeps one rank's shards"):
            optimizer.load_state_dict(torch.load(io.BytesIO(own)))
        assert all(torch.equal(value, before[name]) for name, value in whole(optimizer).items())
    model = wrapper.state_dict()
    _quietly(dcp.load, {"model": model, "optimizer": optimizer}, checkpoint_id=path)
    wrapper.load_state_dict(model)
    _quietly(dcp.save, {"model": wrapper.state_dict(), "optimizer": optimizer}, checkpoint_id=again)
    loaded = whole(optimizer)
    train_halves(wrapper, optimizer, range(4, 7))
    return loaded, wrapper.state_dict()


def _quietly(function, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about its own
        function(*args, **kwargs)


def test_a_checkpoint_is_loaded_by_another_number_of_ranks(tmp_path, two_ranks, three_ranks):
    paths = [str(tmp_path / name) for name in "abc"]
    with Ranks(4) as four_ranks:
        saved, own, trained = four_ranks.run(save, paths[0], range(4))[0]
    for k, ranks in enumerate((two_ranks, three_ranks)):
        loaded, continued = ranks.run(load, paths[k], paths[k + 1], own)[0]
        assert loaded.keys() == saved.keys()
        assert {name for name in saved if name.endswith("exists") and not saved[name]} == {"never/exists"}
        assert all(torch.equal(value, saved[name]) for name, value in loaded.items())
        for name, value in continued.items():
            torch.testing.assert_close(value, trained[name], rtol=1e-2, atol=1e-4)


@on_two_ranks
def test_a_ranks_own_state_comes_back():
    wrapper, optimizer = wrapped(make_adamw)
    train_halves(wrapper, optimizer, range(3))
    file = io.BytesIO()
    torch.save([wrapper.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    model, state = torch.load(file)
    other, fresh = wrapped(make_adamw)
    other.load_state_dict(model)
    fresh.load_state_dict(state)
    for trained in ((wrapper, optimizer), (other, fresh)):
        train_halves(*trained, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(wrapper.parameters(), other.parameters(), strict=True))
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
    with pytest.raises(TypeError, match="lr: only for an optimizer that is given as a class"):
        DistributedOptimizer(torch.optim.SGD(wrapper.parameters()), wrapper, lr=1.0)


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
    with pytest.raises(ValueError, match=r"'0\.bias' .* is new, or trainable only now"):
        wrapper(data(4, 6))
    with pytest.raises(RuntimeError, match="join\\(\\) is not for a model with a DistributedOptimizer"):
        wrapper.join()


@on_two_ranks
def test_without_it_nothing_has_changed():
    wrapper = DistributedDataParallel(seeded(mlp, 6, 8, 3))
    wrapper(data(4, 6)).sum().backward()
    assert all(parameter.grad is not None for parameter in wrapper.parameters())
    assert_same_on_all_ranks(wrapper.module)
