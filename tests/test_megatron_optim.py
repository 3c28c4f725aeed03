"""The distributed optimizer on Megatron's wrapper: the parameters of AdamW in one process."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from one_process import data, mlp, seeded
from parallel_layers import Toy, reference_gradients, whole
from ppe_ddp import DisagreementError, PeerAbortedError, UnusableError
from ppe_ddp.megatron import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ParallelGroups,
    finalize_model_grads,
)
from rank_tests import on_four_ranks, on_two_ranks
from test_megatron_parallel import MICROS, each_kind, iteration, parallel_groups, split_of

optim = pytest.importorskip("ppe_ddp.optim")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("zero_buffer", [False, True])  # Megatron's train step leaves it to the optimizer
@on_two_ranks
def test_steps_are_those_of_one_process(dtype, overlap, zero_buffer):
    module = seeded(mlp, 7, 9, 5, 3).to(dtype)
    twin = copy.deepcopy(module).float()
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, use_distributed_optimizer=True, bucket_size=40
    )
    model = DistributedDataParallel(None, config, module)
    ours = optim.DistributedOptimizer(torch.optim.AdamW, model, lr=0.01, overlap=overlap)
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.01)
    for step in range(4):
        model.zero_grad_buffer(zero_buffer)
        ours.zero_grad()
        theirs.zero_grad()
        for micro in range(3):
            inputs = [data(4, 7, rank=rank, step=10 * step + micro) for rank in range(2)]
            sum(twin(x).pow(2).sum() / 2 for x in inputs).backward()
            x = inputs[dist.get_rank()].to(dtype)
            if micro < 2:
                with model.no_sync():
                    model(x).float().pow(2).sum().backward()
            else:
                model(x).float().pow(2).sum().backward()
        finalize_model_grads([model])
        norms = ours.clip_grad_norm_(1.0), torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        torch.testing.assert_close(*norms, rtol=1e-5 if dtype is torch.float32 else 2e-2, atol=0.0)
        ours.step()
        theirs.step()
    model(x)  # waits for the parameters
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 5e-3}
    for parameter, want in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.float(), want, **tolerance)


class WithExpert(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.expert = torch.nn.Linear(7, 5), torch.nn.Linear(5, 3)
        for parameter in self.expert.parameters():
            parameter.allreduce = False

    def forward(self, x):
        return self.expert(torch.tanh(self.dense(x)))


@on_two_ranks
def test_nan_in_dense_gradients_does_not_reach_experts_by_the_norm_of_both():
    alone = [dist.new_group([other]) for other in range(2)][dist.get_rank()]
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(None, config, seeded(WithExpert), groups=ParallelGroups(expert=alone))
    optimizers = [
        optim.DistributedOptimizer(torch.optim.SGD, shards, lr=0.1) for shards in (model, model.sharded(experts=True))
    ]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model.module.dense.weight.register_hook(lambda gradient: gradient * torch.nan)  # an overflow below the expert
    scaler.scale(model(data(4, 7)).pow(2).sum()).backward()
    finalize_model_grads([model])
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    assert optim.clip_grad_norm_(optimizers, 1.0).isnan()
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert all(map(torch.equal, before, model.parameters()))


@on_two_ranks
def test_experts_have_an_optimizer_of_their_own():
    """Each rank has another expert; what both share is averaged, and an expert's gradient is divided by all ranks."""
    rank = dist.get_rank()
    alone = [dist.new_group([other]) for other in range(2)][rank]
    module = seeded(WithExpert)
    with torch.no_grad():
        module.expert.weight.add_(rank)
    twin = copy.deepcopy(module)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True)
    model = DistributedDataParallel(None, config, module, groups=ParallelGroups(expert=alone))
    ours = [
        optim.DistributedOptimizer(torch.optim.AdamW, model, lr=0.01),
        optim.DistributedOptimizer(torch.optim.AdamW, model.sharded(experts=True), lr=0.01),
    ]
    for shards in (model, model.sharded()):
        with pytest.raises(ValueError, match=r"is an expert's \(allreduce = False\).*sharded\(experts=True\)"):
            optim.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), shards)
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.01)
    for step in range(3):
        x = data(4, 7, rank=rank, step=step)
        model.zero_grad_buffer()
        model(x).pow(2).sum().backward()
        finalize_model_grads([model])
        theirs.zero_grad()
        twin(x).pow(2).sum().backward()
        for parameter in twin.expert.parameters():
            parameter.grad.div_(2)
        for parameter in twin.dense.parameters():
            dist.all_reduce(parameter.grad.div_(2))
        for optimizer in (*ours, theirs):
            optimizer.step()
    for optimizer in ours:
        optimizer.synchronize()
    for parameter, want in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bucket_size", [1000, 20])
@on_two_ranks
def test_zero_grad_clears_the_gradients_of_one_optimizer(bucket_size):
    """Gradients of parameters that another one has go on adding up, before an average and after it."""
    module = seeded(mlp, 5, 4, 3)
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, use_distributed_optimizer=True, bucket_size=bucket_size
    )
    model = DistributedDataParallel(None, config, module)
    weights = [parameter for parameter in module.parameters() if parameter.ndim == 2]
    biases = [parameter for parameter in module.parameters() if parameter.ndim == 1]
    first, second = (
        optim.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), model) for parameters in (weights, biases)
    )
    model(data(2, 5, rank=dist.get_rank())).sum().backward()
    finalize_model_grads([model])
    once = [None if g is None else g.clone() for g in model.sharded().gradients()]
    first.zero_grad(set_to_none=False)
    cleared = model.sharded().gradients()
    model(data(2, 5, rank=dist.get_rank())).sum().backward()
    finalize_model_grads([model])
    names = [shard.name for shard in model.sharded().shards]
    for name, was, empty, now in zip(names, once, cleared, model.sharded().gradients(), strict=True):
        is_weight = name.endswith("weight")
        assert (empty is None) == is_weight
        torch.testing.assert_close(now, was if is_weight else 2 * was)
    second.zero_grad()
    first.zero_grad()
    assert model.sharded().gradients() == [None] * len(names)
    assert not any(buffer.grad_data.any() for buffer in model.grad_buffers)


@pytest.mark.parametrize("has_experts", [False, True])
@on_two_ranks
def test_zero_grad_of_one_optimizer_leaves_what_another_one_has_clipped(has_experts):
    """That is in copies, as the master weights have another dtype; the gradients lie in one buffer, or in two."""
    alone = [dist.new_group([other]) for other in range(2)][dist.get_rank()] if has_experts else None
    module = seeded(WithExpert).bfloat16()
    for parameter in module.expert.parameters():
        parameter.allreduce = not has_experts
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(None, config, module, groups=ParallelGroups(expert=alone))
    first, second = (
        optim.DistributedOptimizer(torch.optim.SGD(part.parameters(), lr=1.0), shards)
        for part, shards in ((module.dense, model), (module.expert, model.sharded(experts=has_experts)))
    )
    for step in range(2):
        model(data(4, 7, step=step).bfloat16()).float().pow(2).sum().backward()
        finalize_model_grads([model])
        assert optim.clip_grad_norm_([first, second], 0.1) > 0.2
        clipped = [weight.grad.clone() for weight in second.param_groups[0]["params"]]
        first.step()
        first.zero_grad()
        assert all(map(torch.equal, clipped, (weight.grad for weight in second.param_groups[0]["params"])))
        second.step()
        second.zero_grad()


@on_two_ranks
def test_groups_may_be_looked_at_between_micro_batches():
    module = seeded(mlp, 7, 3)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(None, config, module)
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, model, lr=0.5)
    model(data(4, 7)).sum().backward()
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(RuntimeError, match=r"call finish_grad_sync\(\)"):
        optimizer.step()
    finalize_model_grads([model])
    optimizer.step()


# ---------------------------------------------------------------------- one model on several ranks


def optimizers_of(model):
    parts = [model.sharded()] + ([model.sharded(experts=True)] if model.expert_parallel_buffers else [])
    return [optim.DistributedOptimizer(torch.optim.SGD, part, lr=0.5) for part in parts]


def hold_parts(model, reference):
    """The parameters of this rank are its part of the reference's."""
    want = dict(reference.named_parameters())
    for name, parameter in model.module.named_parameters():
        expected = model.module.split.part(name, want[name])
        torch.testing.assert_close(parameter, expected, msg=lambda text, name=name: f"{name}: {text}")


@each_kind
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@on_four_ranks
def test_clipping_is_that_of_one_process(kind, norm_type):
    groups, group = parallel_groups(kind)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True, bucket_size=150)
    model = DistributedDataParallel(None, config, Toy(split_of(kind, group)), groups=groups)
    ours, reference = optimizers_of(model), whole()
    for step in range(2):
        iteration(model, groups, step, clear=ours)
        expected = reference_gradients(step, dist.get_world_size(groups.data), MICROS, model=reference)
        for name, parameter in reference.named_parameters():
            parameter.grad = expected[name]
        norm = optim.clip_grad_norm_(ours, 0.01, norm_type)
        want = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
        torch.testing.assert_close(norm, want)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter -= 0.5 * (0 if parameter.grad is None else parameter.grad)
        for optimizer in ours:
            optimizer.step()
        hold_parts(model, reference)


@each_kind
@on_four_ranks
def test_inf_on_one_rank_skips_the_step_on_all(kind):
    groups, group = parallel_groups(kind)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(None, config, Toy(split_of(kind, group)), groups=groups)
    optimizer = optimizers_of(model)[-1]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    before = {name: parameter.clone() for name, parameter in model.module.named_parameters()}
    for is_bad in (True, False):
        iteration(model, groups, 0, clear=[optimizer])
        if is_bad and dist.get_rank() == 2:
            for part in optimizer.param_groups:
                next(weight for weight in part["params"] if weight.grad.numel()).grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        changed = [not torch.equal(before[name], p) for name, p in model.module.named_parameters()]
        assert any(changed) != is_bad


@on_two_ranks
def test_ranks_agree_on_inf_though_their_gradients_have_other_dtypes():
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    if dist.get_rank() == 1:
        module[0].double()
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    groups = ParallelGroups(data=alone, pipeline=dist.group.WORLD)
    model = DistributedDataParallel(None, config, module, groups=groups)
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, model, lr=0.5)
    for bad in ("0.weight", "1.bias", None):  # the dtype that is looked at first on rank 1, and that which is last
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))
        model.zero_grad_buffer()
        for name, parameter in module.named_parameters():
            value = "inf" if dist.get_rank() == 1 and name == bad else "1"
            (parameter.sum() * float(value)).backward()
        finalize_model_grads([model])
        before = module[1].weight.clone()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (2.0 if bad else 4.0)
        assert torch.equal(before, module[1].weight) == bool(bad)


class Chunk(torch.nn.Module):
    """A part of a pipeline of which one chunk a rank has the word embedding."""

    share_embeddings_and_output_weights = True

    def __init__(self, *, has_word):
        super().__init__()
        self.own = torch.nn.Parameter(torch.ones(3))
        self.word = torch.nn.Parameter(torch.ones(3)) if has_word else None

    def shared_embedding_or_output_weight(self):
        return self.word

    def forward(self, factor):
        return (self.own * factor).sum() + (0.0 if self.word is None else self.word.sum())


@pytest.mark.parametrize("clips", [False, True])
@on_two_ranks
def test_inf_in_one_chunk_of_a_pipeline_skips_the_step_of_all_chunks(clips):
    """Copies of the word embedding are in the first chunk of the first stage and the last chunk of the last stage."""
    rank = dist.get_rank()
    alone = [dist.new_group([one]) for one in range(2)][rank]
    groups = ParallelGroups(data=alone, pipeline=dist.group.WORLD, embedding=dist.group.WORLD)
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    chunks = [
        DistributedDataParallel(None, config, Chunk(has_word=number == rank), groups=groups) for number in range(2)
    ]
    optimizers = [optim.DistributedOptimizer(torch.optim.SGD, one, lr=0.25, weight_decay=1.0) for one in chunks]
    for step in range(5):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number, chunk in enumerate(chunks):
            chunk.zero_grad_buffer()
            scaler.scale(chunk(float("inf") if step == rank + 2 * number else 1.0)).backward()
        finalize_model_grads(chunks)
        for optimizer in optimizers if clips else ():
            scaler.unscale_(optimizer)
        if clips:
            optim.clip_grad_norm_(optimizers, 100.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (4.0 if step == 4 else 2.0)
        for name, parameter in chunks[rank].module.named_parameters():
            moved = 0.75 if name == "word" else 0.5
            assert parameter.unique().tolist() == [1.0 - moved if step == 4 else 1.0]


@pytest.mark.parametrize("has_experts", [True, False])
@on_two_ranks
def test_a_scaler_needs_as_many_optimizers_on_each_stage(has_experts):
    rank = dist.get_rank()
    alone = [dist.new_group([one]) for one in range(2)][rank]
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    if has_experts:
        for parameter in module[1].parameters():
            parameter.allreduce = rank == 0  # experts on the second stage alone
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    groups = ParallelGroups(data=alone, expert=alone if has_experts else None, pipeline=dist.group.WORLD)
    model = DistributedDataParallel(None, config, module, groups=groups)
    optim.DistributedOptimizer(torch.optim.SGD, model, lr=0.5)  # which others replace
    if has_experts:
        shards = [model.sharded(), model.sharded(experts=True)] if rank else [model.sharded()]
        optimizers = [optim.DistributedOptimizer(torch.optim.SGD, one, lr=0.5) for one in shards]
    else:
        parts = module if rank else [module]
        inner = [torch.optim.SGD(part.parameters(), lr=0.5) for part in parts]
        optimizers = [optim.DistributedOptimizer(one, model) for one in inner]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    finalize_model_grads([model])
    with pytest.raises(UnusableError, match=f"rank {rank}: stages have from 1 to 2 distributed optimizers"):
        scaler.step(optimizers[0])
    for optimizer in optimizers:
        optimizer.step()


@on_two_ranks
def test_a_scaler_counts_no_optimizer_that_another_one_has_replaced_in_a_part_of_its_parameters():
    rank = dist.get_rank()
    groups = ParallelGroups(data=[dist.new_group([one]) for one in range(2)][rank], pipeline=dist.group.WORLD)
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model = DistributedDataParallel(
        None, DistributedDataParallelConfig(use_distributed_optimizer=True), module, groups=groups
    )
    optim.DistributedOptimizer(torch.optim.SGD, model, lr=0.5)
    if rank == 0:
        module[0].requires_grad_(False)
    inner = torch.optim.SGD([one for one in module.parameters() if one.requires_grad], lr=0.5)
    optimizer = optim.DistributedOptimizer(inner, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    finalize_model_grads([model])
    before = module[1].bias.detach().clone()
    scaler.step(optimizer)
    assert torch.equal(module[1].bias, before - 0.5)


@on_two_ranks
def test_a_stage_where_nothing_is_trained_takes_part_in_clipping():
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    module = seeded(torch.nn.Linear, 4, 4).requires_grad_(dist.get_rank() == 1).double()
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = DistributedDataParallel(None, config, module, groups=ParallelGroups(alone, pipeline=dist.group.WORLD))
    with pytest.raises(ValueError, match="make one of no parameters"):
        optim.clip_grad_norm_([], 1.0)
    optimizer = optim.DistributedOptimizer(torch.optim.AdamW, model, lr=0.1)
    for _ in range(2):
        model.zero_grad_buffer()
        model(torch.ones(2, 4, dtype=torch.float64, requires_grad=True)).sum().backward()
        finalize_model_grads([model])
        norm = optimizer.clip_grad_norm_(1.0)
        assert norm.dtype is torch.float64
        assert norm.item() == 80**0.5
        optimizer.step()


@on_two_ranks
def test_clipping_needs_to_know_what_is_split():
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    groups = ParallelGroups(data=alone, tensor=dist.group.WORLD)
    for is_marked in (False, True):
        module = torch.nn.Linear(1, 2, bias=False)
        if dist.get_rank() == 0 or is_marked:
            module.weight.tensor_model_parallel = is_marked
        model = DistributedDataParallel(None, config, module, groups=groups)
        optimizer = optim.DistributedOptimizer(torch.optim.SGD, model, lr=0.5)
        module.weight.sum().backward()
        finalize_model_grads([model])
        if is_marked:
            assert optimizer.clip_grad_norm_(1.0).item() == 2.0
        else:
            with pytest.raises(ValueError, match=r"set parameter\.tensor_model_parallel"):
                optimizer.clip_grad_norm_(1.0)


@pytest.mark.parametrize("has_experts", [False, True])
@on_two_ranks
def test_ranks_of_a_split_model_do_not_wait_for_inf_of_an_optimizer_that_is_left_out(has_experts):
    rank = dist.get_rank()
    alone = [dist.new_group([one]) for one in range(2)][rank]
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    for parameter in module.parameters():
        parameter.tensor_model_parallel = True
    for parameter in module[0].parameters() if has_experts else ():
        parameter.allreduce = False
    groups = ParallelGroups(expert=alone) if has_experts else ParallelGroups(data=alone, tensor=dist.group.WORLD)
    model = DistributedDataParallel(None, config, module, groups=groups)
    inner = [torch.optim.SGD(layer.parameters(), lr=0.5) for layer in module]
    shards = [model.sharded(experts=True), model.sharded()] if has_experts else [model, model]
    optimizers = [optim.DistributedOptimizer(*one) for one in zip(inner, shards, strict=True)]

    def fail(*_):
        raise ArithmeticError("planned")

    for step in range(6):  # a step that fails, one that tells of copies that may differ, and one that works
        handle = inner[0].register_step_pre_hook(fail) if step % 3 == 1 and rank == 0 else None
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        model.zero_grad_buffer()
        scaler.scale(model(data(2, 3, rank=rank, step=step)).sum()).backward()
        is_told = step % 3 == 2 and not has_experts
        with pytest.raises(DisagreementError) if is_told else nullcontext():
            finalize_model_grads([model])
        if is_told:
            continue
        with pytest.raises((ArithmeticError, PeerAbortedError)) if step % 3 == 1 else nullcontext():
            for optimizer in optimizers:
                scaler.step(optimizer)
        if handle is not None:
            handle.remove()


@on_two_ranks
def test_who_gives_a_step_up_whose_averages_it_has_read_tells_those_that_wait_in_the_optimizer():
    rank, module = dist.get_rank(), seeded(mlp, 7, 5)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True)
    model = DistributedDataParallel(None, config, module)
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, model, lr=0.5)
    for step in range(4):
        model.zero_grad_buffer()
        model(data(2, 7, rank=rank, step=step)).sum().backward()
        if step == 1 and rank == 1:
            assert optimizer.param_groups[0]["params"][0].grad is not None  # which waits for the averages
            model.abort_grad_sync("cannot go on")
        with pytest.raises(PeerAbortedError, match=r"cannot go on|has failed here") if step == 1 else nullcontext():
            model.finish_grad_sync()
            optimizer.step()
    own = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    everyone = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(everyone, own)
    assert torch.equal(*everyone)
