"""The gradients of a distributed optimizer: cleared, kept, edited and cast as in one process."""

import gc
import io
import warnings
import weakref
from time import monotonic

import pytest
import torch
import torch.distributed as dist
from torch import nn

from one_process import data, mlp, seeded
from ppe_ddp import DistributedDataParallel, DistributedOptimizer, megatron
from ppe_ddp.errors import NonFiniteGradientError, PeerAbortedError, UnusableError
from ppe_ddp.optim import ShardedGradient
from rank_tests import on_three_ranks, on_two_ranks


def alone():
    """This rank by itself."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


class Setup:
    """Weights that begin at zero and fall by their gradient, which is one."""

    def __init__(self, group=None, **options):
        self.net = nn.Linear(5, 1, bias=False)
        nn.init.zeros_(self.net.weight)
        self.ddp = DistributedDataParallel(self.net, process_group=group, **options)
        self.inner = torch.optim.SGD(self.net.parameters(), lr=1.0)
        self.ours = DistributedOptimizer(self.inner, self.ddp)
        self.another = torch.optim.SGD(self.net.parameters(), lr=1.0)

    def backward(self):
        self.ddp(torch.ones(1, 5)).sum().backward()

    def weight(self):
        self.ours.synchronize()
        (value,) = set(self.net.weight.flatten().tolist())
        return value


def in_a_loop(setup):
    for parameter in setup.net.parameters():
        parameter.grad = None


CLEARINGS = [
    in_a_loop,
    *(
        lambda setup, name=name, to_none=to_none: getattr(setup, name).zero_grad(set_to_none=to_none)
        for name in ("net", "ddp", "ours", "another")
        for to_none in (True, False)
    ),
]


def clear_in_every_way(group):
    for clear in CLEARINGS:  # each with what was averaged and what was not
        before, after, skipped, micro = (Setup(group) for _ in range(4))
        seen = []
        for _ in range(3):
            clear(before)
            before.backward()
            before.ours.step()

            after.backward()
            after.ours.step()
            clear(after)

            skipped.backward()  # which is thrown away, as where a loss is bad
            clear(skipped)
            skipped.backward()
            skipped.ours.step()
            clear(skipped)

            with micro.ddp.no_sync():
                micro.backward()
            clear(micro)
            micro.backward()
            micro.ours.step()
            clear(micro)
            seen.append([setup.weight() for setup in (before, after, skipped, micro)])
        assert seen == [[-1.0] * 4, [-2.0] * 4, [-3.0] * 4]


@pytest.mark.parametrize("to_none", [True, False])
@on_two_ranks
def test_the_wrapped_optimizer_clears_what_is_averaged(to_none):
    setup = Setup()
    for step in range(3):
        setup.inner.zero_grad(set_to_none=to_none)
        setup.backward()
        setup.ours.step()
        assert setup.weight() == -step - 1.0
        setup.inner.zero_grad(set_to_none=to_none)
        setup.ours.step()
        assert setup.weight() == -step - 1.0


@on_two_ranks
def test_a_user_who_clears_in_any_way_begins_from_zero():
    clear_in_every_way(None)


@on_two_ranks
def test_one_rank_alone_begins_from_zero():
    clear_in_every_way(alone())


@pytest.mark.parametrize("by_itself", [False, True])
@on_two_ranks
def test_without_clearing_gradients_add_up(by_itself):
    setup = Setup(alone() if by_itself else None)
    seen = []
    for _ in range(3):
        setup.backward()
        setup.ours.step()
        seen.append(setup.weight())
    assert seen == [-1.0, -3.0, -6.0]
    with setup.ddp.no_sync():
        setup.backward()
    with pytest.raises(RuntimeError, match="'weight' has parts that no synchronization has averaged"):
        setup.ours.step()
    setup.backward()  # 3 + 2
    setup.net.weight.grad.mul_(2)
    setup.net.weight.grad /= 4
    setup.ours.step()
    assert setup.weight() == -8.5


@on_two_ranks
def test_one_rank_alone_looks_for_nan_in_what_is_not_averaged():
    setup = Setup(alone(), check_for_nan_in_grad=True)
    for _ in range(2):
        setup.backward()
    setup.ours.step()
    assert setup.weight() == -2.0
    with pytest.raises(NonFiniteGradientError, match="'weight'"):
        (setup.ddp(torch.ones(1, 5)) * float("nan")).sum().backward()


@pytest.mark.parametrize("by_itself", [False, True])
@on_two_ranks
def test_a_frozen_parameter_keeps_the_gradient_that_it_has(by_itself):
    net = seeded(mlp, 6, 5, 3)
    ddp = DistributedDataParallel(net, process_group=alone() if by_itself else None)
    ddp(data(3, 6)).sum().backward()
    before = net[0].bias.grad.clone()
    net[0].bias.requires_grad_(False)
    DistributedOptimizer(torch.optim.SGD, ddp, lr=0.1)
    ddp(data(3, 6)).sum().backward()
    assert torch.equal(net[0].bias.grad, before)


@on_two_ranks
def test_one_rank_whose_step_or_closure_raises_tells_the_others():
    """The first keeps a gradient that is not averaged; in the second the gradients are there; the third has a hook."""
    setup, rank = Setup(), dist.get_rank()

    def closure():
        setup.ours.zero_grad()
        setup.backward()
        if rank == 1 and fails:
            raise ArithmeticError("planned")

    def hook(*_):
        if rank == 1 and error is MemoryError:
            raise error

    setup.ours.register_step_pre_hook(hook)
    cases = ((False, UnusableError), (True, ArithmeticError), (False, MemoryError), (False, None))
    for fails, error in cases:
        setup.ours.zero_grad()
        setup.backward()
        if error is UnusableError and rank == 1:
            with setup.ddp.no_sync():
                setup.backward()
        if error is None:
            setup.ours.step(closure)
            continue
        with pytest.raises(error if rank == 1 else PeerAbortedError) as caught:
            setup.ours.step(closure if fails else None)
        if rank == 0:
            assert caught.value.rank == 1
    everyone = [torch.empty(1, 5) for _ in range(2)]
    dist.all_gather(everyone, setup.net.weight.detach())
    assert torch.equal(*everyone)


@pytest.mark.parametrize("is_megatron", [False, True])
@on_three_ranks
def test_a_second_optimizer_that_fails_is_told_of_at_once(is_megatron):
    """Although all ranks have completed the gather of the first one, and wait in that of the second one."""
    net = seeded(mlp, 4, 4, 4)
    config = megatron.DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = megatron.DistributedDataParallel(None, config, net) if is_megatron else DistributedDataParallel(net)
    first, second = (DistributedOptimizer(torch.optim.Adam(net[k].parameters()), model) for k in (0, 2))

    def fail(*_):
        raise ArithmeticError("planned")

    for is_bad in (False, True, False):
        (model.zero_grad_buffer if is_megatron else model.zero_grad)()
        model(data(3, 4)).sum().backward()
        if is_megatron:
            megatron.finalize_model_grads([model])
        first.step()
        if not is_bad:
            second.step()
            continue
        begin = monotonic()
        handle = second._inner.register_step_post_hook(fail) if dist.get_rank() == 1 else None
        with pytest.raises(ArithmeticError if handle else PeerAbortedError, match="planned"):
            second.step()
        assert monotonic() - begin < 4
        if handle:
            handle.remove()


@on_two_ranks
def test_what_grad_is():
    setup = Setup()
    other = Setup()
    other.net.weight.grad = None
    setup.backward()
    gradient = setup.net.weight.grad
    assert isinstance(gradient, ShardedGradient)
    assert gradient.shape == (1, 5)
    assert "of 5 of the gradient of 'weight'" in repr(gradient)
    for use in (gradient.norm, lambda: nn.utils.clip_grad_norm_(setup.net.parameters(), 1.0), setup.another.step):
        with pytest.raises(UnusableError, match="clip by its clip_grad_norm_"):
            use()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, once a process, about create_graph
        setup.ddp(torch.ones(1, 5)).sum().backward(create_graph=True)
    setup.ours.step()
    assert setup.weight() == -2.0
    # another wrapper begins anew
    plain = DistributedDataParallel(setup.net)
    plain(torch.ones(1, 5)).sum().backward()
    assert torch.equal(setup.net.weight.grad, torch.ones(1, 5))
    torch.save(setup.net, io.BytesIO())
    other.backward()
    assert other.net.double().weight.grad.dtype is torch.float64


@on_two_ranks
def test_a_gradient_keeps_no_model_alive():
    setup = Setup()
    setup.backward()
    gone = weakref.ref(setup.net.weight)
    del setup
    gc.collect()
    assert gone() is None


# --- gradients that the optimizer casts


def halves(group, wrapper):
    """A bf16 ``Linear(8, 8)`` whose weights begin at zero, and its optimizer."""
    net = nn.Linear(8, 8, bias=False).bfloat16()
    nn.init.zeros_(net.weight)
    if wrapper == "plain":
        ddp = DistributedDataParallel(net, process_group=group)
    else:
        config = megatron.DistributedDataParallelConfig(use_distributed_optimizer=True)
        ddp = megatron.DistributedDataParallel(None, config, net, data_parallel_group=group)
    return net, ddp, DistributedOptimizer(torch.optim.SGD, ddp, lr=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("by_itself", [False, True])
@on_two_ranks
def test_no_gradient_of_another_step_is_used(by_itself, dtype):
    """Tensors come and go, and one is where another was before; most often where one rank is alone."""
    ranks = [dist.get_rank()] if by_itself else range(2)
    wrapper = DistributedDataParallel(seeded(mlp, 6, 5, 3).to(dtype), process_group=alone() if by_itself else None)
    optimizer = DistributedOptimizer(torch.optim.SGD, wrapper, lr=0.0, master_dtype=torch.float64)
    twin = seeded(mlp, 6, 5, 3).to(dtype)
    for step in range(60):
        optimizer.zero_grad()
        wrapper(data(3, 6, step=step, dtype=dtype)).sum().backward()
        sums = [torch.zeros_like(p, dtype=torch.float64) for p in twin.parameters()]
        for rank in ranks:
            twin.zero_grad()
            twin(data(3, 6, rank=rank, step=step, dtype=dtype)).sum().backward()
            for total, parameter in zip(sums, twin.parameters(), strict=True):
                total += parameter.grad.double() / len(ranks)
        expected = torch.stack([total.norm() for total in sums]).norm()
        torch.testing.assert_close(optimizer.clip_grad_norm_(1.0), expected, rtol=1e-6, atol=0.0)
        optimizer.step()


@on_two_ranks
def test_what_is_written_into_main_grad_counts_wherever_it_can_be_seen():
    net, ddp, optimizer = halves(None, "megatron")
    ddp(torch.ones(1, 8, dtype=torch.bfloat16)).float().sum().backward()
    ddp.finish_grad_sync()
    assert optimizer.param_groups[0]["lr"] == 1.0
    net.weight.main_grad.mul_(2)
    ddp.scale_gradients(2.0)
    optimizer.step()
    optimizer.synchronize()
    assert torch.equal(net.weight, torch.full_like(net.weight, -4.0))
    optimizer.clip_grad_norm_(1.0)
    net.weight.main_grad.mul_(2)
    with pytest.raises(RuntimeError, match=r"'weight' was changed by its optimizer .* and then in main_grad"):
        optimizer.step()


@on_three_ranks
def test_averages_in_main_grad_are_added_to_as_they_are():
    """Three times 40000 is no float16, nor three times 129 a bfloat16."""
    for dtype, size in ((torch.float16, 40000.0), (torch.bfloat16, 129.0)):
        net = nn.Linear(7, 1, bias=False).to(dtype)
        nn.init.zeros_(net.weight)
        config = megatron.DistributedDataParallelConfig(use_distributed_optimizer=True)
        ddp = megatron.DistributedDataParallel(None, config, net)
        optimizer = DistributedOptimizer(torch.optim.SGD, ddp, lr=1.0)
        for step, part in enumerate((1.0, -0.5, 0.25)):
            with ddp.no_sync():
                ddp(torch.zeros(1, 7, dtype=dtype)).float().sum().backward()
            if step == 2:
                ddp.scale_gradients(0.5)  # of what was averaged, too
            ddp(torch.full((1, 7), part * size, dtype=dtype)).float().sum().backward()
            ddp.finish_grad_sync()
            expected = (1.0, 0.5, 0.5)[step] * size
            (weight,) = optimizer.param_groups[0]["params"]
            assert torch.equal(weight.grad, torch.full_like(weight, expected))


@on_two_ranks
def test_gradients_that_a_user_puts_into_the_groups_are_used():
    setup = Setup()
    setup.backward()
    (weight,) = setup.ours.param_groups[0]["params"]
    weight.grad = weight.grad * 3
    setup.ours.step()
    assert setup.weight() == -3.0
    weight.grad = None if dist.get_rank() else weight.grad
    setup.ours.step()  # the other rank's part stays where it is, and nobody waits
    setup.ours.synchronize()
    assert setup.net.weight[0].tolist() == [-6.0, -6.0, -6.0, -3.0, -3.0]
