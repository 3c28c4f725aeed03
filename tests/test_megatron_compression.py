"""Compressors in Megatron's wrapper: what is lost is accounted for, and what does not go is refused."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from library_warnings import library_warnings
from one_process import data, mlp, of_all_ranks, seeded
from ppe_ddp import DisagreementError, PeerAbortedError
from ppe_ddp.compression import ErrorFeedback, Int8, PowerSGD, TopK
from ppe_ddp.compression.comm_state import fitting_state
from ppe_ddp.megatron import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ParallelGroups,
    finalize_model_grads,
)
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

    ours.zero_grad_buffer()  # a step that fails before it sends changes nothing
    if dist.get_rank():
        ours.abort_grad_sync()
    with pytest.raises(PeerAbortedError):
        finalize_model_grads(ours)
    after = ours.comm_state_dict()[0]["parameters"]
    assert all(torch.equal(after[name]["residual"], one["residual"]) for name, one in states[0]["parameters"].items())

    again = DistributedDataParallel(None, config, net(), reduce_function=ErrorFeedback(compressor))
    again.load_comm_state_dict(states)
    for one, other in zip(run(ours, 9), run(again, 9), strict=True):
        assert torch.equal(one, other)


def test_going_on_without_a_compressor_is_told():
    saved = {"compressor": "TopK(0.1)", "nodes": [], "rank": 0, "steps": 3, "parameters": {}}
    with library_warnings() as texts:
        assert fitting_state(saved, {}) == {}
    assert [text[:30] for text in texts] == ["this was saved with TopK(0.1),"]
    assert fitting_state({}, saved) == {}


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


@pytest.mark.parametrize("compressor", [Int8(), ErrorFeedback(Int8())], ids=repr)
@on_two_ranks
def test_a_step_of_few_tokens_after_one_of_many_is_told(compressor):
    config = SimpleNamespace(calculate_per_token_loss=True)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), net(), reduce_function=compressor)
    for tokens, is_told in ((50.0, False), (26.0, False), (0.0, False), (5.0, True), (50.0, False)):
        model.zero_grad_buffer()
        kept = rest_of(model)
        (model(data(5, 4)).pow(2).sum() * (tokens > 0)).backward()
        with library_warnings() as texts:
            finalize_model_grads([model], torch.tensor([tokens / 2]))
        told = [text for text in texts if "counts 5.2 times as much" in text]
        assert bool(told) == (is_told and isinstance(compressor, ErrorFeedback) and dist.get_rank() == 0)
        if not tokens:
            assert not any(parameter.main_grad.any() for parameter in model.module.parameters())
            assert torch.equal(rest_of(model), kept)


def rest_of(model):
    """The sum over the ranks of what the compressor has kept."""
    states = model.comm_state_dict()[0]["parameters"].values()
    total = sum([one["residual"].sum() for one in states if "residual" in one], torch.zeros(()))
    dist.all_reduce(total)
    return total


@on_two_ranks
def test_a_step_that_is_dropped_in_all_chunks_is_counted_in_none():
    """Else ranks of tensor parallelism, of which one group has failed, would draw other random numbers from then on."""
    config, compressor = DistributedDataParallelConfig(), ErrorFeedback(TopK(0.1, min_numel=20))
    chunks = [DistributedDataParallel(None, config, net(), reduce_function=compressor) for _ in range(2)]

    def take_a_step(fails=False):
        for chunk in chunks:
            chunk.zero_grad_buffer()
            chunk(data(5, 4)).pow(2).sum().backward()
        if fails and dist.get_rank():
            chunks[1].abort_grad_sync()
        finalize_model_grads(chunks)
        return [chunk.comm_state_dict()[0] for chunk in chunks]

    before = take_a_step()
    with pytest.raises(PeerAbortedError):
        take_a_step(fails=True)
    assert [chunk.comm_state_dict()[0]["steps"] for chunk in chunks] == [1, 1]
    assert [state["steps"] for state in take_a_step()] == [2, 2]
    for chunk in chunks:
        chunk.load_comm_state_dict({})
    assert [chunk.comm_state_dict()[0]["steps"] for chunk in chunks] == [0, 0]
    assert before[0]["parameters"]
    assert not chunks[0].comm_state_dict()[0]["parameters"]


@on_two_ranks
def test_a_step_that_is_under_way_does_not_reach_a_state_that_is_loaded():
    """All ranks go back after the backward, for instance as they see a loss spike, and never finish the step."""
    config = DistributedDataParallelConfig(overlap_grad_reduce=True)
    model = DistributedDataParallel(None, config, net(), reduce_function=ErrorFeedback(TopK(0.1, min_numel=20)))
    run(model, 0)
    (before,) = states = model.comm_state_dict()
    model.zero_grad_buffer()
    model(data(5, 4, step=1)).pow(2).sum().backward()
    model.load_comm_state_dict(states)
    model.zero_grad_buffer()
    (after,) = model.comm_state_dict()
    assert after["steps"] == before["steps"] == 1
    for name, own in before["parameters"].items():
        assert torch.equal(after["parameters"][name]["residual"], own["residual"])


@on_two_ranks
def test_a_step_that_fails_in_the_sum_of_tokens_leaves_what_was_kept():
    config = SimpleNamespace(calculate_per_token_loss=True)
    compressor = ErrorFeedback(TopK(0.1, min_numel=20))
    chunks = [
        DistributedDataParallel(config, DistributedDataParallelConfig(), net(), reduce_function=compressor)
        for _ in range(2)
    ]

    def take_a_step(tokens):
        for chunk in chunks:
            chunk.zero_grad_buffer()
            chunk(data(5, 4)).pow(2).sum().backward()
            chunk.start_grad_sync()  # complete when it returns, as nothing overlaps
        finalize_model_grads(chunks, tokens)

    take_a_step(torch.tensor([5.0]))
    states = [chunk.comm_state_dict()[0] for chunk in chunks]
    with pytest.raises(DisagreementError, match="either all ranks give num_tokens, or none"):
        take_a_step(torch.tensor([5.0]) if dist.get_rank() == 0 else None)
    for before, chunk in zip(states, chunks, strict=True):
        after = chunk.comm_state_dict()[0]
        assert after["steps"] == before["steps"] == 1
        for name, own in before["parameters"].items():
            assert torch.equal(after["parameters"][name]["residual"], own["residual"])


@pytest.mark.parametrize("steps", [False, True], ids=["all leave it out", "the other rank steps"])
@on_two_ranks
def test_a_step_that_is_not_finite_on_one_tensor_parallel_rank_is_as_undecided_on_the_other(steps):
    """Else copies of a parameter, whose gradients are finite on both, would have different residuals for ever."""
    alone = [dist.new_group([rank]) for rank in range(2)]
    groups = ParallelGroups(data=alone[dist.get_rank()], tensor=dist.group.WORLD)
    module = seeded(Towers)
    module.expert.weight.allreduce, module.expert.weight.tensor_model_parallel = True, True
    compressor = ErrorFeedback(TopK(0.25, min_numel=1))
    model = DistributedDataParallel(
        None, DistributedDataParallelConfig(), module, reduce_function=compressor, groups=groups
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    takes = steps and dist.get_rank() == 1
    for x, y in (([8.0, 4.0, 0.0, 0.0], torch.inf if dist.get_rank() == 0 else 1.0), ([0.0] * 4, 1.0)):
        model.zero_grad_buffer()
        model(torch.tensor([x]), torch.full((1, 4), y)).backward()
        finalize_model_grads([model])
        for parameter in module.parameters():
            parameter.grad = parameter.main_grad
        if takes:
            optimizer.step()
    # What is left of the first step, of which 8 was sent, if that step is taken.
    sent = [0.0, 4.0, 0.0, 0.0] if takes else [0.0, 0.0, 0.0, 0.0]
    assert module.dense.weight.main_grad.tolist() == [sent]


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.expert = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
        self.expert.weight.allreduce = False

    def forward(self, x, y):
        return self.dense(x).sum() + self.expert(y).sum()


@pytest.mark.parametrize("steps", [False, True], ids=["one optimizer skips", "that of the dense steps"])
@on_two_ranks
def test_a_step_that_is_not_finite_in_experts_leaves_what_was_kept_of_dense_parameters(steps):
    groups = ParallelGroups(data=dist.new_group([0, 1]), expert=dist.new_group([0, 1]))
    compressor, module = ErrorFeedback(TopK(0.25, min_numel=1)), Towers()
    model = DistributedDataParallel(
        None, DistributedDataParallelConfig(), module, reduce_function=compressor, groups=groups
    )
    updated = [[module.dense.weight], [module.expert.weight]] if steps else [list(module.parameters())]
    optimizers = [torch.optim.SGD(own, lr=0.1) for own in updated]
    for x, y in (([8.0, 4.0, 0.0, 0.0], torch.inf), ([0.0] * 4, 1.0)):
        model.zero_grad_buffer()
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        scaler.scale(model(torch.tensor([x]), torch.full((1, 4), y))).backward()
        model.finish_grad_sync()
        for parameter in module.parameters():
            parameter.grad = parameter.main_grad
        for optimizer in optimizers:
            scaler.step(optimizer)
    assert module.dense.weight.main_grad.tolist() == [[0.0, 4.0 if steps else 0.0, 0.0, 0.0]]
