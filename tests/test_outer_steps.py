"""LocalSGD and DiLoCo against a training of all ranks in one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from one_process import Routes, assert_same_on_all_ranks, data, mlp, seeded
from ppe_ddp import DistributedDataParallel
from ppe_ddp.compression import DiLoCo, ErrorFeedback, Int8, LocalSGD, TopK
from rank_tests import on_three_ranks, on_two_ranks

EVERY = 3


def inner(model, optimizer, rank, step):
    optimizer.zero_grad()
    # The last layer is never used, the third by rank 1 alone.
    way = [0, 1] if step % 2 else [1]
    model(data(5, 8, rank=rank, step=step), [2, *way] if rank == 1 else way).pow(2).sum().backward()
    optimizer.step()


def reference(size, steps, lr, momentum):
    """What every rank has after each step: Nesterov's outer step written out."""
    models = [seeded(Routes, 8, 4) for _ in range(size)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    last = [parameter.detach().clone() for parameter in models[0].parameters()]
    velocity = [torch.zeros_like(parameter) for parameter in last]
    for step in range(steps):
        for rank in range(size):
            inner(models[rank], optimizers[rank], rank, step)
        if (step + 1) % EVERY:
            continue
        for k, ranks in enumerate(zip(*(model.parameters() for model in models), strict=True)):
            change = sum(last[k] - parameter.detach() for parameter in ranks) / size
            if change.any():
                velocity[k] = momentum * velocity[k] + change
                last[k] = last[k] - lr * (change + momentum * velocity[k])
            for parameter in ranks:
                parameter.data.copy_(last[k])
    return models


def train(make, steps):
    wrapper = DistributedDataParallel(seeded(Routes, 8, 4))
    optimizer = torch.optim.AdamW(wrapper.parameters(), lr=0.01)
    outer = make(wrapper, optimizer)
    for step in range(steps):
        inner(wrapper, optimizer, dist.get_rank(), step)
    return wrapper, optimizer, outer


METHODS = {
    "local sgd": (lambda ddp, optimizer: LocalSGD(ddp, optimizer, every=EVERY), 1.0, 0.0),
    "diloco": (lambda ddp, optimizer: DiLoCo(ddp, optimizer, every=EVERY), 0.7, 0.9),
    "plain": (lambda ddp, optimizer: DiLoCo(ddp, optimizer, every=EVERY, lr=0.5, momentum=0.0), 0.5, 0.0),
}


def check(name):
    make, lr, momentum = METHODS[name]
    for steps in (2, 3, 10):
        expected = reference(dist.get_world_size(), steps, lr, momentum)[dist.get_rank()]
        wrapper, _, _ = train(make, steps)
        for one, other in zip(wrapper.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
@on_two_ranks
def test_as_in_one_process(name):
    check(name)


@on_three_ranks
def test_as_in_one_process_on_three_ranks():
    check("diloco")


@on_two_ranks
def test_nothing_is_sent_between_outer_steps_and_only_what_changed_then():
    wrapper, optimizer, _ = train(METHODS["diloco"][0], 2)
    assert wrapper.trace() is None
    inner(wrapper, optimizer, dist.get_rank(), 2)
    trace = wrapper.trace()
    assert set(trace.agreed) == {f"layers.{k}.{kind}" for k in range(3) for kind in ("weight", "bias")}
    inner(wrapper, optimizer, dist.get_rank(), 3)
    assert wrapper.trace() == trace


@on_two_ranks
def test_outer_steps_are_compressed():
    def run(compressor):
        wrapper = DistributedDataParallel(seeded(lambda: mlp(4, 64, 64, 4)))
        if compressor is not None:
            wrapper.register_comm_hook(compressor)
        optimizer = torch.optim.AdamW(wrapper.parameters(), lr=0.01)
        DiLoCo(wrapper, optimizer, every=EVERY)
        for step in range(30):
            optimizer.zero_grad()
            loss = (wrapper(data(8, 4, step=step)) - 1).pow(2).mean()
            loss.backward()
            optimizer.step()
        same = [None] * 2
        dist.all_gather_object(same, [parameter.detach() for parameter in wrapper.parameters()])
        assert all(torch.equal(one, other) for one, other in zip(*same, strict=True))
        return float(loss), wrapper.trace().gradient_nbytes

    plain, bytes_of_all = run(None)
    assert plain < 0.4
    # Ten outer steps are few for what is sent late.
    for compressor, part, at_most in (
        (Int8(), 0.3, 1.1 * plain),
        (ErrorFeedback(TopK(0.1, min_numel=500)), 0.35, 0.9),
    ):
        loss, nbytes = run(compressor)
        assert nbytes < part * bytes_of_all
        assert loss < at_most


@on_two_ranks
def test_resumed_between_two_outer_steps():
    make = METHODS["diloco"][0]
    wrapper, optimizer, outer = train(make, 7)
    saved = copy.deepcopy((wrapper.state_dict(), optimizer.state_dict(), outer.state_dict()))
    again, its_optimizer, its_outer = train(make, 0)
    again.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    its_outer.load_state_dict(saved[2])
    for step in range(7, 13):
        inner(wrapper, optimizer, dist.get_rank(), step)
        inner(again, its_optimizer, dist.get_rank(), step)
    for one, other in zip(wrapper.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


@on_two_ranks
def test_stopped():
    wrapper, optimizer, outer = train(METHODS["local sgd"][0], EVERY)
    outer.stop()
    assert wrapper.require_backward_grad_sync
    inner(wrapper, optimizer, dist.get_rank(), 0)
    assert_same_on_all_ranks(wrapper.module)


def test_an_outer_step_follows_an_inner_one():
    module = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="every=0: an outer step"):
        LocalSGD(DistributedDataParallel(module), torch.optim.SGD(module.parameters(), lr=0.1), every=0)
