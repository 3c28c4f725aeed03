"""Half-precision models: sums over many micro-batches, in fp32 and without, against float64."""

import copy

import pytest
import torch
import torch.distributed as dist

from one_process import data, mlp, seeded
from ppe_ddp.megatron import DistributedDataParallel, DistributedDataParallelConfig, ParallelGroups
from rank_tests import on_two_ranks

MICROS = 32


def run(dtype, **options):
    """Relative errors of the gradients of `MICROS` micro-batches, against float64 from the same half-precision ones."""
    module = seeded(mlp, 8, 16, 4).to(dtype)
    exact = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in module.parameters()]
    model = DistributedDataParallel(None, DistributedDataParallelConfig(**options), module)
    twin = copy.deepcopy(module)
    for micro in range(MICROS):
        for rank in range(2):
            x = data(4, 8, rank=rank, step=micro).to(dtype)
            # What one micro-batch gives is rounded in any case; what counts is what becomes of the sum.
            for total, gradient in zip(
                exact, torch.autograd.grad(loss_of(twin(x)), list(twin.parameters())), strict=True
            ):
                total += gradient.double() / 2
            if rank == dist.get_rank():
                if micro < MICROS - 1:
                    with model.no_sync():
                        loss_of(model(x)).backward()
                else:
                    loss_of(model(x)).backward()
    model.finish_grad_sync()
    if model.ddp_config.use_distributed_optimizer:
        part = model.sharded()
        pairs = [
            (gradient, want.flatten()[shard.start : shard.stop])
            for shard, gradient, want in zip(part.shards, part.gradients(), exact, strict=True)
        ]
    else:
        pairs = [(p.main_grad, want) for p, want in zip(module.parameters(), exact, strict=True)]
    error = sum(float((got.double() - want).pow(2).sum()) for got, want in pairs)
    assert {got.dtype for got, _ in pairs} == {torch.float32 if model.ddp_config.grad_reduce_in_fp32 else dtype}
    return (error / sum(float(want.pow(2).sum()) for _, want in pairs)) ** 0.5


def loss_of(output):
    return (output.float() - 1).pow(2).mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [{}, {"overlap_grad_reduce": True}, {"overlap_grad_reduce": True, "use_distributed_optimizer": True}],
    ids=["after", "overlap", "scatter"],
)
@on_two_ranks
def test_accumulation_in_fp32_keeps_what_half_precision_loses(dtype, options):
    rounded = run(dtype, **options)
    exact = run(dtype, grad_reduce_in_fp32=True, **options)
    assert exact < 1e-6
    assert rounded > 1000 * exact
    assert rounded > torch.finfo(dtype).eps / 4


@on_two_ranks
def test_averages_to_which_more_is_added_stay_what_they_are():
    """Experts on one rank of two are divided by two; undone, half of the largest number there is would be too large."""
    module = seeded(mlp, 2, 2).half()
    for parameter in module.parameters():
        parameter.allreduce = False
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    groups = ParallelGroups(expert=alone)
    config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    model = DistributedDataParallel(None, config, module, groups=groups)

    def step(scale):
        model(torch.ones(1, 2, dtype=torch.float16)).float().mul(scale).sum().backward()
        model.finish_grad_sync()

    step(60000.0)
    torch.testing.assert_close(module[0].bias.main_grad, torch.full((2,), 30000.0, dtype=torch.float16))
    for parameter in module.parameters():
        parameter.main_grad.mul_(2)
    step(1000.0)
    torch.testing.assert_close(module[0].bias.main_grad, torch.full((2,), 60500.0, dtype=torch.float16))


@on_two_ranks
def test_other_dtypes_are_left_as_they_are():
    module = seeded(mlp, 3, 4, 2).double()
    model = DistributedDataParallel(None, DistributedDataParallelConfig(grad_reduce_in_fp32=True), module)
    assert {parameter.main_grad.dtype for parameter in model.parameters()} == {torch.float64}
