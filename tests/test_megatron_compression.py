"""Compressors in Megatron's wrapper: what is lost is accounted for, and what does not go is refused."""

import pytest
import torch
import torch.distributed as dist

from one_process import data, mlp, of_all_ranks, seeded
from ppe_ddp.compression import ErrorFeedback, Int8, PowerSGD, TopK
from ppe_ddp.megatron import DistributedDataParallel, DistributedDataParallelConfig
from rank_tests import on_two_ranks


def net():
    return seeded(lambda: mlp(4, 24, 24, 4))


def run(model, step):
    model.zero_grad_buffer()
    model(data(5, 4, step=step)).pow(2).sum().backward()
    model.finish_grad_sync()
    return [parameter.main_grad.clone() for parameter in model.module.parameters()]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("compressor", [TopK(0.1, min_numel=20), PowerSGD(1), Int8(block=64)], ids=repr)
@on_two_ranks
def test_what_is_not_sent_is_kept(overlap, compressor):
    config = DistributedDataParallelConfig(overlap_grad_reduce=overlap, bucket_size=300)
    plain = DistributedDataParallel(None, config, net())
    ours = DistributedDataParallel(None, config, net(), reduce_function=ErrorFeedback(compressor))
    rest = [torch.zeros_like(parameter) for parameter in plain.module.parameters()]
    for step in range(6):
        exact, found = run(plain, step), run(ours, step)
        same = of_all_ranks(found)
        assert all(torch.equal(one, other) for one, other in zip(*same, strict=True))
        for k, (one, other) in enumerate(zip(exact, found, strict=True)):
            rest[k] += one - other
    states = ours.comm_state_dict()
    for (name, _), missing in zip(ours.module.named_parameters(), rest, strict=True):
        kept = states[0]["parameters"][name]["residual"].clone()
        dist.all_reduce(kept)
        torch.testing.assert_close(missing, kept.view_as(missing) / 2, rtol=1e-4, atol=1e-4)
    assert max(float(missing.abs().max()) for missing in rest) > 1e-3

    again = DistributedDataParallel(None, config, net(), reduce_function=ErrorFeedback(compressor))
    again.load_comm_state_dict(states)
    for one, other in zip(run(ours, 9), run(again, 9), strict=True):
        assert torch.equal(one, other)


@on_two_ranks
def test_reduce_scatters_are_not_compressed():
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    with pytest.raises(ValueError, match="a compressor averages whole buckets; with use_distributed_optimizer"):
        DistributedDataParallel(None, config, net(), reduce_function=Int8())


@on_two_ranks
def test_no_compressor_no_state():
    model = DistributedDataParallel(None, DistributedDataParallelConfig(), net())
    assert model.comm_state_dict() == [{}]
    model.load_comm_state_dict([{}])
    with pytest.raises(ValueError, match="no compressor that could take a state"):
        model.load_comm_state_dict([{"rank": 0}])
