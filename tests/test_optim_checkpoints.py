"""Checkpoints of a distributed optimizer: each parameter keeps its own state, and all ranks load or none does."""

import contextlib
import copy
import io
import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from failing import shorten_timeout
from library_warnings import library_warnings
from one_process import data, of_all_ranks, seeded
from optim_runners import quietly
from ppe_ddp import (
    CommunicationError,
    DisagreementError,
    DistributedDataParallel,
    DistributedOptimizer,
    PeerAbortedError,
    megatron,
)
from ppe_ddp.optim import optimizer_state
from ppe_ddp.optim.master_weights import MasterWeights
from rank_tests import on_three_ranks, on_two_ranks


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x, head):
        return self.heads[head](x.to(self.heads[head].weight.dtype))


def two_heads(wrapper, make, module=None, **options):
    module = seeded(TwoHeads) if module is None else module
    if wrapper == "plain":
        model = DistributedDataParallel(module)
    else:
        config = megatron.DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = megatron.DistributedDataParallel(None, config, module)
    parameters = list(module.parameters())
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2]}]  # both heads in each
    return model, DistributedOptimizer(make(groups), model, **options)


def train(model, optimizer, heads):
    for step, head in enumerate(heads):
        if hasattr(model, "zero_grad_buffer"):
            model.zero_grad_buffer()
        optimizer.zero_grad()
        model(data(5, 4, step=step), head).square().sum().backward()
        if hasattr(model, "zero_grad_buffer"):
            model.finish_grad_sync()
        optimizer.step()


def save(path, wrapper, make):
    model, optimizer = two_heads(wrapper, make)
    train(model, optimizer, [0, 0, 0, 1])
    group = optimizer.param_groups[0]
    group["lr"] = group["lr"] * 2  # not in place: torch gives all groups one tensor
    quietly(dcp.save, {"model": model.state_dict(), "optimizer": optimizer}, checkpoint_id=path)
    train(model, optimizer, [1, 0])
    optimizer.synchronize()
    return [parameter.detach() for parameter in model.module.parameters()]


def load(path, wrapper, make):
    model, optimizer = two_heads(wrapper, make)
    state = model.state_dict()
    quietly(dcp.load, {"model": state, "optimizer": optimizer}, checkpoint_id=path)
    model.load_state_dict(state)
    steps = [int(entries["step"]) for entries in optimizer.state_dict()["state"].values()]
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    train(model, optimizer, [1, 0])
    optimizer.synchronize()
    return steps, rates, [parameter.detach() for parameter in model.module.parameters()]


def adamw(groups):
    return torch.optim.AdamW(groups, lr=torch.tensor(0.01), foreach=False)


def nadam(groups):
    return torch.optim.NAdam(groups, lr=0.01)


@pytest.mark.parametrize("wrapper", ["plain", "megatron"])
@pytest.mark.parametrize("make", [adamw, nadam])
def test_every_parameter_gets_its_own_step_and_every_group_its_own_rate(tmp_path, two_ranks, wrapper, make):
    expected = two_ranks.run(save, str(tmp_path), wrapper, make)[0]
    steps, rates, trained = two_ranks.run(load, str(tmp_path), wrapper, make)[0]
    assert steps == [3, 1, 3, 1]
    assert rates == pytest.approx([0.02, 0.01], rel=1e-6)  # one is a float32 tensor
    torch.testing.assert_close(trained, expected, rtol=0.0, atol=0.0)


@on_two_ranks
def test_a_file_that_one_rank_has_written_is_refused_on_the_others():
    model, optimizer = two_heads("plain", adamw)
    train(model, optimizer, [0, 1])
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    files = [file.getvalue()] * 2
    dist.broadcast_object_list(files)
    own = optimizer.state_dict()["state"]["heads.0.weight"]["exp_avg"].to_local().clone()
    for weights_only in (True, False):
        state = torch.load(io.BytesIO(files[0]), weights_only=weights_only)
        with pytest.raises(ValueError, match=r"rank 1 of 2: the state of 'heads\.0\.weight' was saved by rank 0 of 2"):
            optimizer.load_state_dict(state)
        optimizer.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=weights_only))
    assert torch.equal(optimizer.state_dict()["state"]["heads.0.weight"]["exp_avg"].to_local(), own)


@on_two_ranks
def test_who_fails_as_it_saves_uneven_shards_tells_the_others_and_their_own_collectives_are_right():
    """The others wait for its parts."""
    model, optimizer = two_heads("megatron", adamw)
    train(model, optimizer, [0, 1])

    def fail(*_):
        raise OSError("this rank alone")

    before = optimizer.register_state_dict_pre_hook(fail) if dist.get_rank() else None
    told = pytest.raises(OSError if dist.get_rank() else PeerAbortedError, match="this rank alone")
    with told:
        optimizer.state_dict()
    if before is not None:
        before.remove()
    number = torch.ones(5)
    dist.all_reduce(number)
    assert number.tolist() == [2.0] * 5
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, [0, 1])


@pytest.mark.parametrize("kind", ["tensor", "pipeline", "expert"])
@on_two_ranks
def test_the_state_of_another_part_of_a_split_model_is_refused(kind):
    """Each rank is rank 0 of 1 that have its part; names and shapes are the same."""
    dimension = {"tensor": "tp", "pipeline": "pp", "expert": "ep"}[kind]
    groups = megatron.ParallelGroups.from_mesh(init_device_mesh("cpu", (2,), mesh_dim_names=(dimension,)))
    layer = seeded(nn.Linear, 4, 3)
    layer.weight.tensor_model_parallel, layer.bias.tensor_model_parallel = kind == "tensor", False
    for parameter in layer.parameters():
        parameter.allreduce = kind != "expert"
    config = megatron.DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = megatron.DistributedDataParallel(None, config, layer, groups=groups)
    optimizer = DistributedOptimizer(torch.optim.Adam, model.sharded(experts=kind == "expert"))
    model(data(5, 4)).sum().backward()
    megatron.finalize_model_grads([model])
    optimizer.step()
    own = optimizer.state_dict()
    files = of_all_ranks({**own, "state": {}, "exists": dict.fromkeys(own["exists"], 0)})
    optimizer.load_state_dict(files[dist.get_rank()])
    place = {"tensor": "tensor-parallel ranks", "pipeline": "pipeline stages", "expert": "ranks, of which 1 have"}[kind]
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    text = rf"state of 'weight' is that of number {other} of 2 {place}.*this rank is number {rank}"
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(files[other])
    assert (" in part " in own["layout"]["bias"]) == (kind != "tensor")  # tensor-parallel ranks have copies of it
    layout = {name: text.partition(" in part ")[0] for name, text in own["layout"].items()}
    optimizer.load_state_dict({**files[other], "layout": layout})  # of a model that was not split, or has moved


def set_to(model, value):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


@on_two_ranks
def test_what_is_saved_are_the_weights_that_the_model_was_given():
    model, optimizer = halves(adagrad, torch.float32)
    set_to(model, 0.5)
    saved = optimizer.state_dict()
    set_to(model, 0.25)
    optimizer.load_state_dict(saved)
    assert torch.equal(model.module.weight, torch.full((3, 4), 0.5, dtype=torch.bfloat16))


@on_two_ranks
def test_saving_what_is_there_for_a_while_changes_no_master_weight():
    """As an average of the weights, which a user evaluates and saves before putting his own ones back."""
    model, optimizer = halves(adagrad, torch.float32)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    own, master = model.module.weight.detach().clone(), optimizer.param_groups[0]["params"][0]
    before = master.detach().clone()
    set_to(model, 0.5)
    assert optimizer.state_dict()["master"]["weight"].to_local().tolist() == [0.5] * 6
    with torch.no_grad():
        model.module.weight.copy_(own)
    optimizer.zero_grad()
    model(torch.zeros(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert torch.equal(master, before)
    assert not torch.equal(master, own.view(-1)[6 * dist.get_rank() :][:6].float())


@on_two_ranks
def test_a_checkpoint_without_master_weights_keeps_the_model_that_is_loaded():
    saved = halves(adagrad, torch.bfloat16)[1].state_dict()
    assert not saved["master"]
    model, optimizer = halves(adagrad, torch.float32)
    set_to(model, 0.5)
    optimizer.load_state_dict(saved)
    assert torch.equal(model.module.weight, torch.full((3, 4), 0.5, dtype=torch.bfloat16))


@on_two_ranks
def test_parameters_that_are_their_own_master_weights_get_the_saved_ones():
    """A bfloat16 model that goes on in float32: the model's own file has rounded values only."""
    model, optimizer = halves(adagrad, torch.float32)
    model(torch.full((1, 4), 0.3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    master = saved["master"]["weight"].to_local()
    wide = nn.Linear(4, 3, bias=False)
    wide.load_state_dict(model.module.state_dict())
    wrapper = DistributedDataParallel(wide)
    DistributedOptimizer(adagrad(wide.parameters()), wrapper).load_state_dict(saved)
    wrapper(torch.ones(1, 4))  # waits for the other rank's half
    assert not torch.equal(master, master.bfloat16().float())
    assert torch.equal(wide.weight.detach().view(-1)[6 * dist.get_rank() :][:6], master)
    assert torch.equal(wide.weight.bfloat16(), model.module.weight)
    again = DistributedOptimizer(adagrad(wide.parameters()), DistributedDataParallel(wide))
    with pytest.raises(
        ValueError, match="master weight of 'weight' was saved and not read, as this optimizer has none"
    ):
        again.load_state_dict({**saved, "master": {}})  # as torch.distributed.checkpoint reads it


@on_two_ranks
def test_hooks_of_state_dicts_are_called():
    _, optimizer = halves(adagrad, torch.float32)
    calls = []
    optimizer.register_state_dict_pre_hook(lambda own: calls.append(own))
    optimizer.register_state_dict_post_hook(lambda own, state: {**state, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda own, state: calls.append(state.pop("more")))
    optimizer.register_load_state_dict_post_hook(lambda own: calls.append(own))
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    assert calls == [optimizer, 1, optimizer]
    assert state["more"] == 1


@on_two_ranks
def test_the_first_state_has_the_precision_of_each_weight():
    module = nn.ParameterList(nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.float64))
    optimizer = DistributedOptimizer(torch.optim.Adam, DistributedDataParallel(module))
    state = optimizer.state_dict()["state"]
    assert [state[name]["exp_avg"].dtype for name in ("0", "1")] == [torch.float32, torch.float64]


@on_two_ranks
def test_no_two_entries_are_one_tensor():
    model, optimizer = two_heads("plain", adamw)
    train(model, optimizer, [0])
    for saved in (optimizer.state_dict(), two_heads("plain", adamw)[1].state_dict()):
        tensors = [value for part in ("state", "exists", "master") for value in _tensors(saved[part])]
        tensors += [group["lr"] for group in saved["param_groups"]]
        addresses = [tensor.data_ptr() for tensor in tensors]
        assert len(set(addresses)) == len(tensors) >= 18
    assert not {group["lr"].data_ptr() for group in optimizer.param_groups} & set(addresses)


def _tensors(tree):
    for value in tree.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        else:
            yield value.to_local() if hasattr(value, "to_local") else value


@pytest.mark.parametrize("wrapper", ["plain", "megatron"])
@on_two_ranks
def test_the_error_of_one_rank_is_told_on_all(wrapper):
    """Though with Megatron's wrapper the others have shards to ask for."""
    model, optimizer = two_heads(wrapper, adamw)
    train(model, optimizer, [0, 1])
    good = optimizer.state_dict()
    before = {name: parameter.detach().clone() for name, parameter in model.module.named_parameters()}
    bad = copy.copy(good)
    if dist.get_rank():
        bad["layout"] = {**good["layout"], "heads.1.bias": "another"}
    with pytest.raises(ValueError, match=r"nothing was loaded on any rank: rank 1 of 2: the state of 'heads\.1\.bias'"):
        optimizer.load_state_dict(bad)
    bad = {**good, "exists": {}} if dist.get_rank() else {"state": {}}
    text = r"rank 0 of 2: this is no state_dict of a Dist.*; rank 1 of 2: KeyError: 'heads\.0\.weight'"
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(bad)
    if wrapper == "megatron":
        bad = copy.deepcopy(good) if not dist.get_rank() else good
        if not dist.get_rank():
            del bad["state"]["heads.0.bias"]["exp_avg"]
        with pytest.raises(ValueError, match=re.escape("differ in ['heads.0.bias exp_avg']")):
            optimizer.load_state_dict(bad)
    optimizer.load_state_dict(good)
    for name, parameter in model.module.named_parameters():
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("wrapper", ["plain", "megatron"])
@on_two_ranks
def test_a_state_is_loaded_where_one_rank_alone_has_heard_of_a_failure(wrapper):
    """As after a compressor that has raised behind its last message: one rank's connections are closed."""
    module = seeded(TwoHeads)
    module.heads[1].double()  # whose master weights are the parameters, so that only those of heads[0] are gathered
    model, optimizer = two_heads(wrapper, adamw, module, master_dtype=torch.float64)
    train(model, optimizer, [0, 1])
    saved = copy.deepcopy(optimizer.state_dict())
    before = [parameter.detach().clone() for parameter in module.heads[0].parameters()]
    train(model, optimizer, [0])
    for groups in model._reducer.connections if dist.get_rank() else ():
        groups.fail(RuntimeError("this rank alone"), "finishing")
    optimizer.load_state_dict(saved)
    assert all(map(torch.equal, module.heads[0].parameters(), before))
    train(model, optimizer, [0, 1])


@pytest.mark.parametrize("wrapper", ["plain", "megatron"])
@on_two_ranks
def test_who_is_interrupted_as_it_loads_tells_the_others_and_all_can_load_again(wrapper):
    """In a hook, as it reads, as it fetches what others have, and as parameters are gathered."""
    model, optimizer = two_heads(wrapper, adamw, master_dtype=torch.float64)
    train(model, optimizer, [0, 1])
    saved = copy.deepcopy(optimizer.state_dict())
    before = [parameter.detach().clone() for parameter in model.module.parameters()]
    train(model, optimizer, [0])

    def interrupt(*_):
        raise KeyboardInterrupt

    places = [(MasterWeights, "refresh"), (optimizer_state._CheckpointPart, "_take"), (MasterWeights, "write")]
    if wrapper == "megatron":
        places.append((optimizer_state, "_whole"))
    for owner, name in places:
        told = pytest.raises(PeerAbortedError, match=r"rank 1 failed in DistributedOptimizer\.load_state_dict\(\)")
        with pytest.MonkeyPatch.context() as patches:
            if dist.get_rank() == 1:
                patches.setattr(owner, name, interrupt)
                told = pytest.raises(KeyboardInterrupt)
            with told:
                optimizer.load_state_dict(saved)
        optimizer.load_state_dict(saved)
        assert all(map(torch.equal, model.module.parameters(), before))
    train(model, optimizer, [0, 1])


@pytest.mark.parametrize("wrapper", ["plain", "megatron"])
@on_two_ranks
def test_ranks_that_load_shards_of_different_steps_are_told_and_other_hyper_parameters_are_refused(wrapper):
    model, optimizer = two_heads(wrapper, adamw)
    files = []
    for _ in range(2):
        train(model, optimizer, [0, 1])
        files.append(copy.deepcopy(optimizer.state_dict()))
    with library_warnings() as texts:
        optimizer.load_state_dict(files[0])
        optimizer.load_state_dict(files[dist.get_rank()])
    assert [text[:66] for text in texts] == ["the ranks load shards of different steps, by rank: [1.0, 2.0]. Unl"][
        dist.get_rank() :
    ]
    for group in files[0]["param_groups"]:
        group["lr"] = 0.01 * (1 + dist.get_rank())
    with pytest.raises(ValueError, match=r"nothing was loaded on any: they differ in \['group 0 with lr=0\.01'"):
        optimizer.load_state_dict(files[0])


# --- the precision of state


def adagrad(groups):
    return torch.optim.Adagrad(groups, lr=0.01)


def halves(make, master_dtype):
    """A bf16 model of one weight, and its optimizer."""
    module = nn.Linear(4, 3, bias=False).bfloat16()
    model = DistributedDataParallel(module)
    return model, DistributedOptimizer(make(module.parameters()), model, master_dtype=master_dtype)


def sums(optimizer, key="sum"):
    return optimizer.state[optimizer.param_groups[0]["params"][0]][key]


@on_two_ranks
def test_state_that_is_there_before_the_first_step_is_as_precise_as_the_weights():
    """Adagrad's, which stays where it is as soon as a square is less than half of its last place."""
    model, optimizer = halves(adagrad, torch.float32)
    for size in (1.0, *[2.0**-6] * 4):
        optimizer.zero_grad()
        model(torch.full((1, 4), size, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    found = sums(optimizer)
    assert found.dtype == torch.float32
    assert torch.equal(found, torch.full((6,), 1.0 + 4 * 2.0**-12))


@on_two_ranks
def test_state_that_is_loaded_is_as_precise_as_the_weights():
    """As torch's own ``load_state_dict()`` does it."""
    _, saved = halves(adagrad, torch.float32)
    _, optimizer = halves(adagrad, torch.float64)
    optimizer.load_state_dict(saved.state_dict())
    assert sums(optimizer).dtype == torch.float64


@on_two_ranks
def test_state_of_a_trained_optimizer_becomes_as_precise_as_the_weights():
    module = nn.Linear(4, 3, bias=False).bfloat16()
    plain = adamw(module.parameters())
    module(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    plain.step()
    module.zero_grad()
    optimizer = DistributedOptimizer(plain, DistributedDataParallel(module))
    assert sums(optimizer, "exp_avg").dtype == torch.float32
    assert sums(optimizer, "exp_avg").tolist() == pytest.approx([0.1] * 6, rel=1e-2)


@pytest.mark.parametrize(("wrapper", "calls"), [("plain", "load"), ("megatron", "load"), ("megatron", "save")])
@on_two_ranks
def test_who_came_too_late_for_a_step_connects_again_where_all_save_or_load(wrapper, calls):
    come_too_late(wrapper, calls, late=[0])


@pytest.mark.parametrize(("wrapper", "calls"), [("plain", "load"), ("megatron", "save")])
@on_three_ranks
def test_two_who_came_too_late_connect_again(wrapper, calls):
    come_too_late(wrapper, calls, late=[0, 1])


def come_too_late(wrapper, calls, late):
    model, optimizer = two_heads(wrapper, torch.optim.AdamW)
    train(model, optimizer, [0])
    state = copy.deepcopy(optimizer.state_dict())
    if dist.get_rank() in late:
        optimizer.step = bool  # it fails by itself before that
        train(model, optimizer, [0])
        del optimizer.step
        dist.barrier()  # until the last rank has given the step up
    else:
        shorten_timeout(model, 1)
        with pytest.raises(CommunicationError, match=r"needs rank 0, which (has not come|does not answer)"):
            train(model, optimizer, [0])
        dist.barrier()
        for connections in model._reducer.connections:
            connections.timeout_seconds = 60
    if calls == "save":
        optimizer.state_dict()
    optimizer.load_state_dict(state)
    train(model, optimizer, [1])
    assert len({*of_all_ranks(float(model.module.heads[1].weight.sum()))}) == 1


@pytest.mark.parametrize("then", ["again", "a step"])
@pytest.mark.parametrize(("wrapper", "call"), [("plain", "load"), ("megatron", "save"), ("plain", "compare")])
@on_two_ranks
def test_who_came_too_late_for_a_call_raises_and_the_next_one_works(wrapper, call, then):
    come_too_late_for_a_call(wrapper, call, then, late=[0])


@pytest.mark.parametrize(
    ("wrapper", "call", "then", "fails"), [("plain", "compare", "again", False), ("plain", "load", "a step", True)]
)
@on_three_ranks
def test_two_who_came_too_late_for_a_call_raise_and_the_next_one_works(wrapper, call, then, fails):
    come_too_late_for_a_call(wrapper, call, then, late=[0, 1], fails=fails)


def come_too_late_for_a_call(wrapper, call, then, late, *, fails=False):
    model, optimizer = two_heads(wrapper, torch.optim.AdamW)
    train(model, optimizer, [0])
    state = copy.deepcopy(optimizer.state_dict())
    if fails:  # a step before
        model.abort_grad_sync() if dist.get_rank() == 1 else None
        with pytest.raises(PeerAbortedError) if dist.get_rank() != 1 else contextlib.nullcontext():
            None if dist.get_rank() == 1 else train(model, optimizer, [0])
        optimizer.zero_grad()

    def make_the_call():
        if call == "compare":
            model.check_in_sync()
        elif call == "save":
            optimizer.state_dict()
        else:
            optimizer.load_state_dict(state)

    is_late = dist.get_rank() in late
    if is_late:
        dist.barrier()  # until the last rank has given the call up
    elif fails:  # the connections are closed
        for connections in model._reducer.connections:
            connections.timeout_seconds = 1
    else:
        shorten_timeout(model, 1)
    with pytest.raises(CommunicationError) as caught:
        make_the_call()
    assert caught.value.is_late == is_late
    if not is_late:
        dist.barrier()
    for connections in model._reducer.connections:
        connections.timeout_seconds = 60
    for _ in range(2):
        train(model, optimizer, [1]) if then == "a step" else make_the_call()
    assert len({*of_all_ranks(float(model.module.heads[1].weight.sum()))}) == 1


@on_two_ranks
def test_the_state_of_an_optimizer_without_a_group_that_was_removed():
    model, optimizer = two_heads("plain", torch.optim.AdamW)
    train(model, optimizer, [0])
    del optimizer.param_groups[1]
    state = copy.deepcopy(optimizer.state_dict())
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer, [0])
    assert torch.equal(model.module.heads[0].bias, expected[1])
    optimizer.load_state_dict(state)
    again = optimizer.state_dict()
    assert list(again["state"]) == list(again["exists"]) == ["heads.0.weight", "heads.1.weight"]
    assert float(again["state"]["heads.0.weight"]["step"]) == 1.0


@on_two_ranks
def test_a_compiled_step_that_saves_and_loads():
    model, optimizer = two_heads("plain", torch.optim.AdamW)

    def step(inputs):
        optimizer.zero_grad()
        model(inputs, 0).sum().backward()
        optimizer.step()
        state, kept = optimizer.state_dict(), model.comm_state_dict()
        optimizer.load_state_dict(state)
        model.load_comm_state_dict(kept)
        return state

    state = torch.compile(step, backend="eager")(torch.ones(2, model.module.heads[0].in_features))
    assert float(state["state"]["heads.0.weight"]["step"]) == 1.0


@on_two_ranks
def test_ranks_agree_on_inf_and_norm_though_a_group_was_removed():
    module = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)))
    groups = [{"params": [*layer.parameters()]} for layer in module]
    wrapper = DistributedDataParallel(module)
    optimizer = DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), wrapper)
    del optimizer.param_groups[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = module[1].bias.detach().clone()
    plain = copy.deepcopy(module)
    plain(torch.ones(1, 4)).sum().backward()
    plain = plain[1]
    for is_bad in (True, False):
        optimizer.zero_grad()
        scaler.scale(wrapper(torch.ones(1, 4)).sum()).backward()
        weights = optimizer.param_groups[0]["params"]
        if is_bad and dist.get_rank() == 1:
            weights[0].grad[0] = torch.inf
        if not is_bad:
            scaler.unscale_(optimizer)
            expected = torch.nn.utils.get_total_norm([plain.weight.grad, plain.bias.grad])
            torch.testing.assert_close(optimizer.clip_grad_norm_(1000.0), expected)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert torch.equal(module[1].bias, before) == is_bad


@on_two_ranks
def test_who_saves_alone_what_all_must_save_is_told_at_once():
    model, optimizer = two_heads("megatron", torch.optim.AdamW)
    train(model, optimizer, [0])
    with pytest.raises(DisagreementError, match="make, save or load a DistributedOptimizer, on all ranks together"):
        train(model, optimizer, [1]) if dist.get_rank() else optimizer.state_dict()
    train(model, optimizer, [1])
    optimizer.state_dict()
